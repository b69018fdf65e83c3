"""Attention on a CUDA device: values and gradients against float64, repeats, no synchronisation, size, memory.

python -m pytest libs/jagged/tests -m gpu -n 12 --dist loadgroup --durations 15

Compiling takes most of the time, so processes side by side (pytest-xdist) share it; what needs much memory has a group.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from gemworks.jagged import TileSchedule, flash_attention, gdpa, offsets_from_lengths
from gemworks.jagged.dispatch import architecture_of
from gemworks.jagged.ops.attention_core import op, table
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 700, 2]
LENGTHS_K = [129, 5, 0, 64, 1, 65, 300, 128, 127, 63, 2, 257, 0]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
FULL = op.UNBOUNDED
MASKS: dict[str, tuple[int, int, str]] = {
    "full": (FULL, FULL, "bottom_right"),
    "causal": (FULL, 0, "bottom_right"),
    "causal top left": (FULL, 0, "top_left"),
    "window": (40, 40, "bottom_right"),
}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` hands out holds NaN, so that a row nobody writes shows."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        out = empty(*size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


def arguments(
    kind: str = "self",
    activation: str = "softmax",
    mask: str = "full",
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 2,
    key_heads: int = 2,
    width: int = 128,
    value_width: int | None = None,
    scale: float | None = None,
    lengths: tuple[list[int], list[int]] = (LENGTHS, LENGTHS_K),
    past_end: int = 5,
) -> tuple[Any, ...]:
    """Arguments of `attention_forward` on the device; q, k and v are views of one fused projection."""
    torch.manual_seed(0)
    offsets_q, offsets_k = (offsets_from_lengths(torch.tensor(n)).to(DEVICE) for n in lengths)
    b = len(lengths[0])
    rows_q, rows_k = sum(lengths[0]) + past_end, sum(lengths[1]) + past_end
    rows_q, rows_k = {
        "self": (rows_q, rows_q), "fixed": (rows_q, 256 * b), "shared": (200, rows_k), "cross": (rows_q, rows_k)
    }[kind]  # fmt: skip
    v_width = width if value_width is None else value_width
    fused = torch.randn(max(rows_q, rows_k), heads + 2 * key_heads, max(width, v_width), device=DEVICE, dtype=dtype)
    q = fused[:rows_q, :heads, :width]
    k, v = fused[:rows_k, heads : heads + key_heads, :width], fused[:rows_k, heads + key_heads :, :v_width]
    left, right, align = MASKS[mask]
    return (
        q, k, v, None if kind == "shared" else offsets_q, None if kind in ("self", "fixed") else offsets_k, [], "", b,
        256 if kind == "fixed" else -1, 1024, 512, width**-0.5 if scale is None else scale, activation, left, right,
        align, kind == "shared",
    )  # fmt: skip


def run(args: tuple[Any, ...]) -> tuple[list[Tensor], Tensor]:
    """[output, dq, dk, dv] of the device's kernels, and the cotangent."""
    out, lse = torch.ops.gemworks_jagged.attention_forward(*args)
    generator = torch.Generator(DEVICE).manual_seed(1)
    d_out = torch.randn(out.shape, device=DEVICE, dtype=out.dtype, generator=generator)
    softmax = args[12] == "softmax"
    saved = (out, lse) if softmax else (None, None)
    grads = torch.ops.gemworks_jagged.attention_backward(d_out, *args[:3], *saved, *args[3:])
    return [out, *grads], d_out


def truth(args: tuple[Any, ...], d_out: Tensor) -> list[Tensor]:
    """The same by the reference in float64 on the host."""
    host = [x.double().cpu() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    host = [x.cpu() if isinstance(x, Tensor) else x for x in host]
    host[5], host[6] = [], ""
    out, lse = torch.ops.gemworks_jagged.attention_forward(*host)
    grads = torch.ops.gemworks_jagged.attention_backward(d_out.double().cpu(), *host[:3], out, lse, *host[3:])
    return [out, *grads]


def check(args: tuple[Any, ...], tolerance: float | None = None) -> list[Tensor]:
    """Relative error (Frobenius) of the output and of every gradient; rows that meet no row are exactly zero.

    A query without keys has no output and no dq, a key without queries no dv and no dk. (A query with a single key has
    dq = 0 in exact arithmetic only: there dP and delta differ by their rounding.)
    """
    ours, d_out = run(args)
    bound = TOLERANCE[args[0].dtype] if tolerance is None else tolerance
    exact_out, exact_dq, exact_dk, exact_dv = truth(args, d_out)
    alone = {"out": exact_out, "dq": exact_out, "dk": exact_dv, "dv": exact_dv}
    for name, x, exact in zip(alone, ours, (exact_out, exact_dq, exact_dk, exact_dv), strict=True):
        assert x.isfinite().all(), name
        error = (x.double().cpu() - exact).norm() / exact.norm().clamp(min=1e-30)
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"
        if x.shape[0] == alone[name].shape[0]:  # not a shared query's own gradient
            assert x.cpu()[alone[name].flatten(1).abs().sum(1) == 0].eq(0).all(), f"{name}: rows that must be zero"
    return ours


KINDS = ("self", "cross", "fixed", "shared")
# Every kind of call without a mask, where the kernels of sm_90 are chosen; masks run in plain Triton, whose code is the
# same for every activation.
VALUES = [
    *itertools.product(("softmax", "fast_gelu", "silu"), KINDS, ("full",)),
    *itertools.product(("softmax",), KINDS, ("causal", "causal top left", "window")),
    *itertools.product(("fast_gelu",), ("self", "cross"), ("causal", "window")),
    ("silu", "self", "causal"),
]


@pytest.mark.parametrize(("activation", "kind", "mask"), VALUES)
def test_values_and_gradients_j1_j5(activation: str, kind: str, mask: str) -> None:
    """J1, J5: empty and one-row sequences, tiles and their neighbours, q and k of different lengths."""
    check(arguments(kind, activation, mask))


WIDTHS = [
    *itertools.product(("softmax",), (32, 64, 96, 128, 256), TOLERANCE),
    *itertools.product(("fast_gelu",), (32, 64, 96, 128, 256), (torch.bfloat16,)),
    *itertools.product(("fast_gelu",), (64, 128), (torch.float32,)),
]


@pytest.mark.parametrize(("activation", "width", "dtype"), WIDTHS, ids=str)
def test_widths_and_dtypes_j2(activation: str, width: int, dtype: torch.dtype) -> None:
    """J2: every supported head width, zero-length sequences among them."""
    check(arguments("cross", activation, dtype=dtype, width=width))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    check(arguments("self", activation, scale=0.2))


@pytest.mark.parametrize("activation", ["softmax", "relu"])
def test_grouped_heads_and_other_value_widths(activation: str) -> None:
    check(arguments("cross", activation, heads=4, key_heads=2))
    check(arguments("cross", activation, width=128, value_width=64))
    check(arguments("shared", activation, heads=4, key_heads=1, width=64))


@pytest.mark.parametrize("logit", [10.0, -10.0, 30.0, -30.0, 100.0, -100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_logits(logit: float, dtype: torch.dtype) -> None:
    """Rows far below and far above 0, the logit of surplus keys."""
    args = list(arguments("self", dtype=dtype, scale=abs(logit) / 128))
    args[0], args[1] = args[0].abs() + 0.5, (args[1].abs() + 0.5) * (1 if logit > 0 else -1)
    check(tuple(args), tolerance=2 * TOLERANCE[dtype] + (1e-4 if dtype == torch.float32 else 0.0))


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": 40}], ids=str)
@pytest.mark.parametrize("kind", ["self", "cross", "shared"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bias(kind: str, mask: dict[str, Any], dtype: torch.dtype) -> None:
    """Values, gradients of q, k, v and of both tables against float64; repeats are bit-equal."""
    from gemworks.jagged import AttentionBias

    generator = torch.Generator().manual_seed(0)
    offsets_q, offsets_k = (offsets_from_lengths(torch.tensor(n)) for n in (LENGTHS, LENGTHS_K))
    rows_q, rows_k = (200 if kind == "shared" else sum(LENGTHS) + 5), (sum(LENGTHS_K) + 5)
    rows_k = rows_q if kind == "self" else rows_k

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()

    exact = [random(rows_q, 4, 128), random(rows_k, 2, 128), random(rows_k, 2, 128), random(301, 4), random(20, 4)]
    times_q, times_k = (torch.randint(0, 10**6, (n,), generator=generator) for n in (rows_q, rows_k))

    def call(leaves: list[Tensor], device: str) -> list[Tensor]:
        bias = AttentionBias(
            leaves[3], None if kind == "shared" else leaves[4], times_q.to(device),
            None if kind == "self" else times_k.to(device), 60,
        )  # fmt: skip
        q, k, v = leaves[:3]
        out = flash_attention(
            q, k, v, None if kind == "shared" else offsets_q.to(device),
            None if kind == "self" else offsets_k.to(device), max_length_q=None if kind == "shared" else 1024,
            max_length_k=None if kind == "self" else 512, bias=bias, shared_query=kind == "shared", **mask,
        )  # fmt: skip
        d_out = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).sin().to(out)
        return [out, *torch.autograd.grad(out, leaves, d_out, materialize_grads=True)]

    truth = call([x.requires_grad_() for x in exact], "cpu")
    leaves = [x.detach().to(DEVICE, dtype).requires_grad_() for x in exact]
    ours, again = call(leaves, DEVICE), call(leaves, DEVICE)
    for name, x, y, t in zip(("out", "dq", "dk", "dv", "position", "time"), ours, again, truth, strict=True):
        assert torch.equal(x, y), name
        error = float((x.detach().double().cpu() - t.detach()).norm() / t.detach().norm().clamp(min=1e-30))
        assert error <= 2 * TOLERANCE[dtype], f"{name}: {error:.2e}"


GLUON_CONFIGS = sorted(
    {(step, kind, c) for t in (table.GLUON, table.GLUON_NARROW) for (step, kind, _), c in t.items()}, key=str
)
GLUON_SHAPES = [
    (torch.bfloat16, 128, "cross"),
    (torch.bfloat16, 128, "shared"),
    (torch.bfloat16, 64, "shared"),
    (torch.float16, 64, "cross"),
]


@pytest.mark.parametrize(("dtype", "width", "layout"), GLUON_SHAPES, ids=str)
@pytest.mark.parametrize(("step", "kind", "config"), GLUON_CONFIGS, ids=str)
def test_every_gluon_config_equals_its_twin(
    step: Any, kind: str, config: Any, dtype: torch.dtype, width: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shipped configuration against plain Triton and against float64."""
    if architecture_of(DEVICE) not in table.GLUON_ARCHITECTURES:
        pytest.skip(f"Gluon kernels run on {table.GLUON_ARCHITECTURES}")

    def chosen(s: Any, shape: Any, place: str) -> Any:
        return config if s == step else table.triton_config(s, shape)

    args = arguments(layout, "softmax" if kind == "softmax" else "fast_gelu", dtype=dtype, width=width)
    monkeypatch.setattr(table, "choose", chosen)
    monkeypatch.setattr(table, "choose_fused", lambda *_: None)  # it would take the place of both backward steps
    ours = check(args)
    monkeypatch.setattr(table, "choose", lambda s, shape, place: table.triton_config(s, shape))
    for x, y in zip(ours, run(args)[0], strict=True):
        error = (x.double() - y.double()).norm() / y.double().norm()
        assert error <= TOLERANCE[dtype], error


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["softmax", "fast_gelu"])
def test_every_triton_config(activation: str, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that another backend takes the place of on this architecture: they are what other ones run."""
    monkeypatch.setattr(table, "choose", lambda s, shape, place: table.triton_config(s, shape))
    monkeypatch.setattr(table, "choose_fused", lambda *_: None)
    check(arguments("cross", activation, dtype=dtype, width=width))


@pytest.mark.parametrize("config", sorted(set(table.FUSED.values()), key=str), ids=str)
@pytest.mark.parametrize("dtype", table.GLUON_DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["softmax", "fast_gelu"])
def test_every_fused_config_equals_its_twin(
    activation: str, dtype: torch.dtype, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward in one kernel against float64 and against the pair in plain Triton; long sequences too."""
    if architecture_of(DEVICE) not in table.GLUON_ARCHITECTURES:
        pytest.skip(f"Gluon kernels run on {table.GLUON_ARCHITECTURES}")
    many = torch.randint(0, 1500, (48,), generator=torch.Generator().manual_seed(3)).tolist()
    for layout in ("self", "cross", "fixed", "shared", "many"):
        if layout == "many":
            args = arguments("self", activation, dtype=dtype, heads=4, key_heads=4, lengths=(many, many))
        else:
            args = arguments(layout, activation, dtype=dtype)
        with monkeypatch.context() as patch:
            patch.setattr(table, "choose_fused", lambda *_: config)
            ours = run(args)[0] if layout == "many" else check(args)
        with monkeypatch.context() as patch:
            patch.setattr(table, "choose_fused", lambda *_: None)
            patch.setattr(table, "choose", lambda s, shape, place: table.triton_config(s, shape))
            twin = run(args)[0]
        for x, y in zip(ours[1:], twin[1:], strict=True):
            error = (x.double() - y.double()).norm() / y.double().norm()
            assert error <= TOLERANCE[dtype], error


@pytest.mark.parametrize("kind", ["self", "fixed", "shared"])
@pytest.mark.parametrize("activation", ["softmax", "fast_gelu"])
def test_ten_backwards_are_bit_equal_d1_d2_t4(kind: str, activation: str) -> None:
    """D1, D2, T4: repeats agree to the bit, the first call included."""
    args = arguments(kind, activation)
    first, _ = run(args)
    for _ in range(9):
        again, _ = run(args)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("activation", ["softmax", "fast_gelu"])
def test_nothing_waits_for_the_device_j9(activation: str) -> None:
    args = arguments("self", activation)
    run(args)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(args)
        schedule = TileSchedule.build(args[3], total_q=args[0].shape[0])
        run((*args[:5], list(schedule.tensors), schedule.heights, *args[7:]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_public_functions_train_under_compile_j7_t3() -> None:
    """J7, T3: one graph for all totals, and flat memory, over 500 random batches."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def step(x: Tensor, offsets: Tensor) -> Tensor:
        y = flash_attention(x, x, x, offsets, max_length_q=256, qk_norm=True)
        return gdpa(y, x, x, offsets, max_length_q=256, scale=0.1, activation="fast_gelu").square().sum()

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    peaks = []
    for i in range(500):
        lengths = torch.randint(0, 257, (16,), generator=generator)
        lengths[0] = 256 * 16 - int(lengths[1:].sum())  # the same total every time, else peaks differ by the data
        lengths[0] = lengths[0].clamp(0, 256)
        x = torch.randn(4096, 2, 64, device=DEVICE, dtype=torch.bfloat16)[: int(lengths.sum())].requires_grad_()
        compiled(x, offsets_from_lengths(lengths).to(DEVICE)).backward()
        if i % 100 == 99:
            torch.cuda.synchronize()
            peaks.append(torch.cuda.memory_allocated())
    assert counter.frame_count <= 2
    assert max(peaks[1:]) - min(peaks[1:]) < 2**22


@pytest.mark.parametrize("activation", ["softmax", "fast_gelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_kernel_is_compiled_twice_t1_j7(dtype: torch.dtype, activation: str) -> None:
    """T1, J7: after two batches, fifty more of any total and any number of sequences compile nothing."""
    from triton import knobs as triton_knobs

    compiled: list[Any] = []
    knobs: Any = triton_knobs.runtime
    before = knobs.jit_post_compile_hook
    generator = torch.Generator().manual_seed(2)

    def batch(b: int) -> None:
        lengths = torch.randint(0, 400, (b,), generator=generator).tolist()
        run(arguments("self", activation, dtype=dtype, lengths=(lengths, lengths), past_end=b % 3))

    for b in (7, 16):
        batch(b)
    knobs.jit_post_compile_hook = lambda **kwargs: compiled.append(kwargs["fn"])
    try:
        for b in range(1, 51):
            batch(b)
    finally:
        knobs.jit_post_compile_hook = before
    assert not compiled, [f.name for f in compiled]


@pytest.mark.slow
@pytest.mark.xdist_group("much memory")
@pytest.mark.parametrize("activation", ["softmax", "fast_gelu"])
def test_more_than_2_to_31_elements_j8(activation: str) -> None:
    """J8: the last sequence of a batch whose q has more than 2^31 elements equals the same sequence alone."""
    heads, width, rows = 4, 128, 2**31 // 512 + 70_000
    lengths = torch.full((rows // 512,), 512)
    offsets = offsets_from_lengths(lengths).to(DEVICE)
    q = torch.empty(rows, heads, width, device=DEVICE, dtype=torch.bfloat16)
    for chunk in q.split(1 << 18):
        chunk.normal_()
    begin, end = int(offsets[-2]), int(offsets[-1])

    def call(x: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        out = (
            flash_attention(leaf, leaf, leaf, o, max_length_q=512)
            if activation == "softmax"
            else gdpa(leaf, leaf, leaf, o, max_length_q=512, scale=0.1, activation="fast_gelu")
        )
        out.backward(out.detach())
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    out, grad = call(q, offsets)
    alone, grad_alone = call(q[begin:end].clone(), torch.tensor([0, end - begin], device=DEVICE))
    torch.testing.assert_close(out[begin:end], alone, rtol=0, atol=0)
    torch.testing.assert_close(grad[begin:end], grad_alone, rtol=0, atol=0)
    assert out[end:].eq(0).all()
    assert grad[end:].eq(0).all()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times a kernel: run it without -n")
def test_schedule_is_cheap_j6() -> None:
    """J6: building the schedule costs the device a few per cent of one layer's forward."""
    from triton.testing import do_bench as triton_do_bench

    do_bench: Any = triton_do_bench

    lengths = torch.randint(1, 1025, (256,), generator=torch.Generator().manual_seed(1))
    offsets = offsets_from_lengths(lengths).to(DEVICE)
    q = torch.randn(int(lengths.sum()), 4, 128, device=DEVICE, dtype=torch.bfloat16)
    schedule = TileSchedule.build(offsets, total_q=q.shape[0])
    forward = do_bench(lambda: flash_attention(q, q, q, offsets, max_length_q=1024, schedule=schedule))

    graph = torch.cuda.CUDAGraph()  # device time alone, without the host's launches
    with torch.cuda.graph(graph):
        TileSchedule.build(offsets, total_q=q.shape[0])
    build = do_bench(graph.replay)
    assert build < 0.05 * forward, f"{build:.3f} ms against {forward:.3f} ms"


def test_fallbacks_say_so_once() -> None:
    from gemworks.jagged import AttentionBias, dispatch

    dispatch._warned.clear()
    x = torch.randn(10, 2, 16, device=DEVICE)
    offsets = torch.tensor([0, 4, 10], device=DEVICE)
    times = torch.arange(10, device=DEVICE)
    bias = AttentionBias(time_table=torch.zeros(65, 2, device=DEVICE), timestamps_q=times)
    with pytest.warns(UserWarning, match="65|64 buckets"):
        flash_attention(x, x, x, offsets, max_length_q=8, bias=bias)
    flash_attention(x, x, x, offsets, max_length_q=8, bias=bias)  # a second warning would be an error
