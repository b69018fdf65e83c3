"""Every op inside a CUDA graph: captured once with the lengths of one batch, replayed with those of others.

Nothing that a launch decides may depend on lengths: shapes are those of the bucket, offsets a buffer on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gemworks.jagged import (
    AttentionBias,
    BlockSchedule,
    Rope,
    TileSchedule,
    apply_rope,
    block_attention,
    block_attention_qkv,
    flash_attention,
    flash_attention_qkv,
    gdpa,
    layer_norm,
    offsets_from_lengths,
    rms_norm,
    seed_pool,
)
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    # The input that takes gradients is made once, outside of the stream that captures.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BUCKET, MAX, HEADS, WIDTH = 1024, 256, 2, 128
BATCHES = ([200, 0, 64, 3, 129, 1], [7, 256, 0, 0, 256, 31], [0, 0, 0, 0, 0, 1], [170, 171, 171, 170, 171, 171])
Layer = Callable[[Tensor, Tensor], Tensor]


def given(*shape: int, x: Tensor) -> Tensor:
    """The same numbers every time, in x's dtype."""
    return torch.linspace(-1, 1, shape[-1], device=x.device).sin().expand(shape).to(x.dtype)


def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.split(HEADS, dim=1)
    return q, k, v


def with_tiles(x: Tensor, offsets: Tensor) -> Tensor:
    """Two layers that share a schedule, which the graph builds once."""
    schedule = TileSchedule.build(offsets, total_q=x.shape[0])
    q, k, v = parts(x)
    out = flash_attention(q, k, v, offsets, max_length_q=MAX, schedule=schedule)
    return gdpa(out, k, v, offsets, max_length_q=MAX, scale=0.1, activation="fast_gelu", schedule=schedule)


def with_blocks(x: Tensor, offsets: Tensor) -> Tensor:
    schedule = BlockSchedule.make(offsets, total=x.shape[0], max_length=MAX)
    rope = Rope().tables(offsets, WIDTH, total=x.shape[0])
    return block_attention_qkv(x, offsets, num_heads=HEADS, max_length=MAX, rope=rope, qk_norm=True, schedule=schedule)


def pffn(x: Tensor, offsets: Tensor) -> Tensor:
    w = given(offsets.shape[0] - 1, 256, HEADS, WIDTH, x=x)
    return gdpa(x[:, :HEADS], w, w, offsets, max_length_q=MAX, scale=0.1, activation="fast_gelu")


def biased(x: Tensor, offsets: Tensor) -> Tensor:
    bias = AttentionBias(x[:33, :HEADS, 0].float())  # gets its gradient too
    return flash_attention(*parts(x), offsets, max_length_q=MAX, bias=bias)


LAYERS: dict[str, Layer] = {
    "flash": lambda x, o: flash_attention(*parts(x), o, max_length_q=MAX),
    "flash causal norm": lambda x, o: flash_attention(*parts(x), o, max_length_q=MAX, causal=True, qk_norm=True),
    "flash window": lambda x, o: flash_attention(*parts(x), o, max_length_q=MAX, window=64),
    "flash biased": biased,
    "flash qkv": lambda x, o: flash_attention_qkv(
        x, o, num_heads=HEADS, max_length=MAX, qk_norm=True, rope=Rope().tables(o, WIDTH, total=x.shape[0])
    ),
    "flash qkv to the end": lambda x, o: flash_attention_qkv(
        x,
        o,
        num_heads=HEADS,
        max_length=MAX,
        qk_norm=True,
        rope=Rope().tables(o, WIDTH, total=x.shape[0]),
        backward_epilogue=True,
    ),
    "gdpa": lambda x, o: gdpa(*parts(x), o, max_length_q=MAX, scale=0.1, activation="fast_gelu"),
    "two layers": with_tiles,
    "pffn": pffn,
    "seed pool": lambda x, o: seed_pool(given(64, HEADS, WIDTH, x=x), *parts(x)[1:], o, max_length_k=MAX),
    "block": lambda x, o: block_attention(*parts(x), o, max_length_q=MAX),
    "block norm rope": with_blocks,
    "rope": lambda x, o: apply_rope(x, Rope().tables(o, WIDTH, total=x.shape[0])),
    "layer_norm": lambda x, o: layer_norm(x, given(WIDTH, x=x), given(WIDTH, x=x), residual=x)[0],
    "rms_norm": lambda x, o: rms_norm(x, given(WIDTH, x=x), add=x),
}


def offsets_of(lengths: list[int]) -> Tensor:
    return offsets_from_lengths(torch.tensor(lengths)).cuda()


def step(layer: Layer, x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    out = layer(x, offsets)
    (grad,) = torch.autograd.grad(out, x, given(*out.shape, x=out))
    return out, grad


@pytest.mark.parametrize("name", LAYERS)
def test_replays_with_other_lengths_equal_eager(name: str) -> None:
    layer, generator = LAYERS[name], torch.Generator("cuda").manual_seed(1)
    x = torch.empty(BUCKET, 3 * HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    x.normal_(generator=generator).requires_grad_()
    offsets = offsets_of(BATCHES[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and lets autograd make what it makes once
        for _ in range(2):
            step(layer, x, offsets)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grad = step(layer, x, offsets)
    for lengths in (*BATCHES, BATCHES[0]):
        with torch.no_grad():
            x.normal_(generator=generator)
            offsets.copy_(offsets_of(lengths))
        junk = torch.full((1 << 22,), float("nan"), device="cuda")  # whoever reads beyond the graph's pool sees it
        del junk
        graph.replay()
        expected, expected_grad = step(layer, x, offsets)
        assert expected.isfinite().all()
        assert expected_grad.isfinite().all()
        assert torch.equal(out, expected), f"{name}: values of {lengths}"
        assert torch.equal(grad, expected_grad), f"{name}: gradient of {lengths}"
