"""Every op on a CUDA device under compile, export, checkpointing, autocast, TF32 and strided inputs, without a wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemworks.jagged import (
    Rope,
    TileSchedule,
    apply_rope,
    block_attention,
    block_attention_qkv,
    flash_attention,
    gdpa,
    layer_norm,
    offsets_from_lengths,
    rms_norm,
    seed_pool,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.gpu,
    # float64, the truth of these tests, has no kernel, and an op says so once.
    pytest.mark.filterwarnings("ignore:gemworks.jagged. .* runs on the reference backend:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
LENGTHS = [200, 0, 64, 3, 129, 1]
MAX = 256
Layer = Callable[[Tensor, Tensor], Tensor]


def given(*shape: int, x: Tensor) -> Tensor:
    """The same numbers every time, in x's dtype."""
    return torch.linspace(-1, 1, shape[-1], device=x.device).sin().expand(shape).to(x.dtype)


def weights(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    w = given(offsets.shape[0] - 1, 256, 2, 128, x=x)
    return w, w


def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of one fused projection [T, 3 N, H]."""
    q, k, v = x.split(2, dim=1)
    return q, k, v


LAYERS: dict[str, Layer] = {
    "flash": lambda x, o: flash_attention(*parts(x), o, max_length_q=MAX),
    "flash causal": lambda x, o: flash_attention(*parts(x), o, max_length_q=MAX, causal=True, qk_norm=True),
    "gdpa": lambda x, o: gdpa(*parts(x), o, max_length_q=MAX, scale=0.1, activation="fast_gelu"),
    "pffn": lambda x, o: gdpa(x[:, :2], *weights(x, o), o, max_length_q=MAX, scale=0.1, activation="fast_gelu"),
    "seed pool": lambda x, o: seed_pool(given(64, 2, 128, x=x), *parts(x)[1:], o, max_length_k=MAX),
    "block": lambda x, o: block_attention(*parts(x), o, max_length_q=MAX, qk_norm=True),
    "block rope": lambda x, o: block_attention_qkv(
        x, o, num_heads=2, max_length=MAX, rope=Rope().tables(o, 128, total=x.shape[0])
    ),
    "rope": lambda x, o: apply_rope(x, Rope().tables(o, 128, total=x.shape[0])),
    "layer_norm": lambda x, o: layer_norm(x, residual=x)[0],
    "rms_norm": lambda x, o: rms_norm(x, add=x),
}
ATTENTION = ("flash", "flash causal", "gdpa", "pffn", "seed pool", "block", "block rope")


def leaf(lengths: list[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(sum(lengths))
    x = torch.randn(sum(lengths), 6, 128, device=DEVICE, generator=generator).to(dtype)
    return x.requires_grad_(), offsets_from_lengths(torch.tensor(lengths)).to(DEVICE)


def gradient(out: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(out.float().square().sum(), x)[0]


def assert_near(ours: Tensor, truth: Tensor, bound: float) -> None:
    ours, truth = ours.detach().double(), truth.detach().double()
    error = float((ours - truth).norm() / truth.norm().clamp(min=1e-30))
    assert ours.isfinite().all()
    assert error <= bound, f"{error:.1e} > {bound:.1e}"


@pytest.mark.parametrize("name", LAYERS)
def test_no_op_waits_for_the_device_j9(name: str) -> None:
    """J9: forward and backward of every public function, offsets that were never on the host."""
    x, offsets = leaf(LENGTHS)
    gradient(LAYERS[name](x, offsets), x)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradient(LAYERS[name](x, offsets), x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", LAYERS)
def test_one_inductor_graph_for_every_total_j7(name: str) -> None:
    """J7: whole graphs of torch.compile's own backend; batches of other totals compile nothing."""
    torch._dynamo.reset()
    compiled = torch.compile(LAYERS[name], fullgraph=True, dynamic=True)
    counters, graphs = torch._dynamo.utils.counters, []
    counters.clear()
    for lengths in (LENGTHS, [7, 100, 0, 0, 256, 31], [256] * 6):
        x, offsets = leaf(lengths)
        out, expected = compiled(x, offsets), LAYERS[name](x, offsets)
        assert_near(out, expected, 1e-2)
        assert_near(gradient(out, x), gradient(expected, x), 2e-2)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == graphs[:1] * 3


def test_compiled_tables_of_rope_equal_eager_ones() -> None:
    def tables(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
        made = Rope().tables(offsets, 128, total=total)
        return made.cos_TJ, made.sin_TJ

    torch._dynamo.reset()
    compiled = torch.compile(tables, fullgraph=True, dynamic=True)
    for lengths in (LENGTHS, [7, 100, 0, 0, 256, 31]):
        offsets = offsets_from_lengths(torch.tensor(lengths)).to(DEVICE)
        for ours, eager in zip(compiled(offsets, sum(lengths)), tables(offsets, sum(lengths)), strict=True):
            torch.testing.assert_close(ours, eager, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_export_with_a_dynamic_total(name: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
            return LAYERS[name](x, offsets)

    total = torch.export.Dim("total", min=4, max=1 << 20)
    with torch.no_grad():
        x, offsets = leaf(LENGTHS)
        program = torch.export.export(Module(), (x.detach(), offsets), dynamic_shapes=({0: total}, None))
        for lengths in (LENGTHS, [7, 100, 0, 0, 256, 31]):
            x, offsets = leaf(lengths)
            assert_near(program.module()(x.detach(), offsets), LAYERS[name](x, offsets), 1e-2)


@pytest.mark.parametrize("name", LAYERS)
def test_checkpointing_changes_no_bit(name: str) -> None:
    x, offsets = leaf(LENGTHS)
    kept: Any = checkpoint(LAYERS[name], x, offsets, use_reentrant=False)
    plain = LAYERS[name](x, offsets)
    assert torch.equal(kept, plain)
    assert torch.equal(gradient(kept, x), gradient(plain, x))


@pytest.mark.parametrize("name", ATTENTION)
def test_autocast_computes_low_and_gives_gradients_in_the_leaf_dtype(name: str) -> None:
    x, offsets = leaf(LENGTHS, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = LAYERS[name](x, offsets)
    assert out.dtype == torch.bfloat16
    grad = gradient(out, x)
    assert grad.dtype == torch.float32
    low = x.detach().bfloat16().requires_grad_()
    expected = LAYERS[name](low, offsets)
    assert_near(out, expected, 1e-2)
    assert_near(grad, gradient(expected, low), 2e-2)


@pytest.mark.parametrize("name", ["flash", "flash causal", "gdpa", "pffn", "seed pool", "block"])
def test_float32_is_ieee_or_tf32_by_torchs_setting(name: str) -> None:
    x, offsets = leaf(LENGTHS, torch.float32)
    wide = x.detach().double().requires_grad_()
    truth = LAYERS[name](wide, offsets)
    exact = gradient(truth, wide)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, bound in (("highest", 5e-5), ("high", 6e-3)):
            torch.set_float32_matmul_precision(precision)
            out = LAYERS[name](x, offsets)
            assert_near(out, truth, bound)
            assert_near(gradient(out, x), exact, bound)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", ["flash", "gdpa"])
def test_views_of_one_projection_are_read_in_place(name: str) -> None:
    """A copy of q, k or v would show in the peak of the memory that the forward takes."""
    lengths = [256] * 256
    x, offsets = leaf(lengths)
    bounds: Any = {"max_length_q": MAX, "schedule": TileSchedule.build(offsets, total_q=x.shape[0])}
    with torch.no_grad():
        extra = 0
        for _ in range(2):  # the first compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            if name == "flash":
                out = flash_attention(*parts(x), offsets, **bounds)
            else:
                out = gdpa(*parts(x), offsets, scale=0.1, activation="fast_gelu", **bounds)
            extra = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
            del out
    assert extra < x.numel() * x.element_size() // 12, extra  # a quarter of one of the three


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times a kernel: run it without -n")
@pytest.mark.parametrize("name", ["flash", "gdpa"])
def test_empty_sequences_cost_no_tile(name: str) -> None:
    """Three empty sequences beside each one cost the kernels a tenth of the time at most, not three tiles."""
    from triton.testing import do_bench as triton_do_bench

    do_bench: Any = triton_do_bench
    few = torch.randint(1, 257, (512,), generator=torch.Generator().manual_seed(1))
    many = torch.stack([few, *[torch.zeros_like(few)] * 3], dim=1).flatten()
    times = []
    for lengths in (few, many):
        x, offsets = leaf(lengths.tolist())
        schedule = TileSchedule.build(offsets, total_q=x.shape[0])
        q, k, v = (p.detach().contiguous() for p in parts(x))
        if name == "flash":
            run = lambda: flash_attention(q, k, v, offsets, max_length_q=MAX, schedule=schedule)  # noqa: B023, E731
        else:
            run = lambda: gdpa(q, k, v, offsets, max_length_q=MAX, scale=0.1, schedule=schedule)  # noqa: B023, E731
        times.append(do_bench(run, return_mode="median"))
    assert times[1] <= 1.1 * times[0], times
