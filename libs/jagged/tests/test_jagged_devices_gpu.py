"""Tensors on a second GPU while the first is current: kernels start where the tensors are, on that device's stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gemworks.jagged import (
    AttentionBias,
    NormEpilogue,
    Rope,
    block_attention,
    flash_attention,
    flash_attention_fp8,
    gdpa,
    layer_norm,
    offsets_from_lengths,
    rms_norm,
)
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
LENGTHS = torch.tensor([5, 0, 200, 64, 1])
TOTAL, HEADS, WIDTH = 280, 2, 128


def norms(x: Tensor, offsets: Tensor) -> Tensor:
    weight = torch.ones(WIDTH, device=x.device)
    return layer_norm(rms_norm(x, weight), weight, torch.zeros_like(weight))


def block(x: Tensor, offsets: Tensor) -> Tensor:
    rope = Rope().tables(offsets, WIDTH, total=TOTAL)
    return block_attention(x, x, x, offsets, max_length_q=256, rope=rope, qk_norm=True)


def softmax(x: Tensor, offsets: Tensor) -> Tensor:
    rope = Rope().tables(offsets, WIDTH, total=TOTAL)
    return flash_attention(x, x, x, offsets, max_length_q=256, rope=rope, qk_norm=True)


def causal(x: Tensor, offsets: Tensor) -> Tensor:
    return flash_attention(x, x, x, offsets, max_length_q=256, causal=True)


def biased(x: Tensor, offsets: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, 33 * HEADS, device=x.device).view(33, HEADS)
    return flash_attention(x, x, x, offsets, max_length_q=256, bias=AttentionBias(position_table=table))


def fp8(x: Tensor, offsets: Tensor) -> Tensor:
    codes, ones = x.detach().to(torch.float8_e4m3fn), torch.full(x.shape[:2], 127, dtype=torch.uint8, device=x.device)
    return flash_attention_fp8(codes, codes, codes, ones, ones, ones, offsets, max_length_q=256, origins=(x, x, x))


def gelu(x: Tensor, offsets: Tensor) -> Tensor:
    return gdpa(x, x, x, offsets, max_length_q=256, scale=0.1, activation="fast_gelu")


def gelu_norm(x: Tensor, offsets: Tensor) -> Tensor:
    epilogue = NormEpilogue(residual=x)
    return gdpa(x, x, x, offsets, max_length_q=256, scale=0.1, activation="fast_gelu", epilogue=epilogue)


def run(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the gradient, as the current stream of x's device leaves them."""
    x = x.detach().requires_grad_()
    y = call(x, offsets)
    (dx,) = torch.autograd.grad(y, x, y.detach())
    return y.detach(), dx


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("call", [norms, block, softmax, causal, biased, fp8, gelu, gelu_norm])
def test_kernels_start_on_the_device_and_stream_of_their_tensors(
    call: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    """The input is still being written by a side stream of the second GPU when the kernels are started; cuda:0 is
    current."""
    values = torch.randn(TOTAL, HEADS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    offsets = offsets_from_lengths(LENGTHS)
    torch.cuda.set_device(0)
    expected = run(call, values.cuda(0), offsets.cuda(0))
    late, x, there = values.cuda(1), torch.full_like(values, float("nan"), device="cuda:1"), offsets.cuda(1)
    run(call, late, there)  # compiles
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        torch.cuda.set_device(0)
        assert torch.cuda.current_device() == 0
        assert torch.cuda.current_stream(1) == stream
        with torch.cuda.device(1):
            torch.cuda._sleep(50_000_000)
        x.copy_(late, non_blocking=True)
        found = run(call, x, there)
        assert torch.cuda.current_device() == 0
        stream.synchronize()
    for got, truth in zip(found, expected, strict=True):
        assert got.device == torch.device("cuda", 1)
        assert got.isfinite().all()
        assert torch.equal(got.cpu(), truth.cpu())
