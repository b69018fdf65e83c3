"""Norms and block attention on a GPU: values and every gradient against float64, poison, repeats, streams, memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gemworks.jagged import (
    BlockSchedule,
    Rope,
    RopeTables,
    block_attention,
    block_attention_qkv,
    layer_norm,
    offsets_from_lengths,
    rms_norm,
)
from gemworks.jagged.ops.norms.configs import NormConfig
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    # float64, the truth of these tests, has no kernel, and an op says so once.
    pytest.mark.filterwarnings("ignore:gemworks.jagged. .* runs on the reference backend:UserWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Relative error in the norm, against float64 on the same rounded inputs.
ERROR = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 2e-5}


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` on the device returns NaN, so that a row nobody writes is seen."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_cuda and x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def assert_near(got: Tensor, truth: Tensor, bound: float, what: str = "") -> None:
    got, truth = got.detach(), truth.detach()
    error = (got.double() - truth).norm() / truth.norm().clamp(min=1e-30)
    assert got.isfinite().all(), what
    assert float(error) <= bound, f"{what}: relative error {float(error):.2e}, expected <= {bound:.0e}"


# bf16 at every width; the other types, which share its code, at a width of each class of tiles.
NORMS = [
    *itertools.product((torch.bfloat16,), (7, 64, 96, 128, 512, 1000, 1001, 1002, 1024, 1536, 2048, 3000, 8192)),
    *itertools.product((torch.float16, torch.float32), (96, 1000, 8192)),
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("dtype", "width"), NORMS, ids=str)
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("full", [True, False], ids=["affine_residual_add", "plain"])
def test_norms(full: bool, center: bool, width: int, dtype: torch.dtype) -> None:
    rows = 1027
    leaves = {"x": random(rows, width, seed=0, dtype=dtype)}
    if full:
        leaves |= {n: random(rows, width, seed=i, dtype=dtype) for i, n in enumerate(("residual", "add"), 1)}
        leaves["weight"] = random(width, seed=3, dtype=torch.float32)
        if center:
            leaves["bias"] = random(width, seed=4, dtype=torch.float32)
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    exact = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    public: Any = layer_norm if center else rms_norm
    outs, truths = public(**leaves), public(**exact)
    outs, truths = (outs, truths) if full else ((outs,), (truths,))
    cotangents = [random(rows, width, seed=5 + i, dtype=dtype) for i in range(len(outs))]
    got = torch.autograd.grad(outs, list(leaves.values()), cotangents, retain_graph=True)
    expected = torch.autograd.grad(truths, list(exact.values()), [c.double() for c in cotangents])
    names = [*("y", "h")[: len(outs)], *(f"d{name}" for name in leaves)]
    for name, g, e in zip(names, [*outs, *got], [*truths, *expected], strict=True):
        assert_near(g, e, ERROR[dtype], name)
    for _ in range(9):  # D1
        again = torch.autograd.grad(outs, list(leaves.values()), cotangents, retain_graph=True)
        assert all(torch.equal(a, g) for a, g in zip(again, got, strict=True))


IN_PIECES = [
    (1000, NormConfig(1, 2, 3, programs=8, columns=1024)),
    (1536, NormConfig(1, 4, 3, programs=4, columns=512)),
    (3000, NormConfig(1, 8, 3, programs=2, columns=1024)),
    (3000, NormConfig(1, 4, 1, programs=3, columns=1024)),
    (6000, NormConfig(1, 16, 3, programs=1, columns=2048)),
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("width", "config"), IN_PIECES, ids=str)
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
def test_norms_in_pieces(center: bool, width: int, config: NormConfig) -> None:
    """Every gradient against float64; rows past the last offset hold NaN, get 0 and add nothing; D1."""
    from gemworks.jagged.ops.norms.launch import norm_backward
    from gemworks.jagged.ops.norms.reference import norm_reference

    rows, used = 1027, 1003
    x, dy, dh = (random(rows, width, seed=i, dtype=torch.bfloat16) for i in range(3))
    weight, bias = (random(width, seed=i, dtype=torch.float32) for i in (3, 4))
    exact = [t.double().requires_grad_() for t in ((x[:used], weight, bias) if center else (x[:used], weight))]
    y, _ = norm_reference(exact[0], exact[1], exact[2] if center else None, None, None, eps=1e-5, center=center)
    expected = list(torch.autograd.grad(y, exact, dy[:used].double()))
    expected[0] = expected[0] + dh[:used].double()
    for t in (x, dy, dh):
        t[used:] = float("nan")
    offsets = torch.tensor([0, 3, used], device="cuda")

    def backward() -> list[Tensor]:
        bias_dtype = torch.float32 if center else None
        grads = norm_backward(dy, dh, x, weight, bias_dtype, eps=1e-5, center=center, offsets=offsets, config=config)
        return [g for g in grads if g.numel()]

    got = backward()
    assert not got[0][used:].any()
    for name, g, e in zip("xwb"[: len(got)], [got[0][:used], *got[1:]], expected, strict=True):
        assert_near(g, e, ERROR[torch.bfloat16], f"d{name}")
    for _ in range(9):
        assert all(torch.equal(a, g) for a, g in zip(backward(), got, strict=True))


@pytest.mark.parametrize("width", [20, 24, 1000, 1002])
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
def test_norms_at_strides_that_16_does_not_divide(center: bool, width: int) -> None:
    """Rows, and heads, inside a wider projection give what copies of them give, but for the order of sums."""
    projection = random(301, 3, 2, width, seed=0, dtype=torch.bfloat16)
    weight = random(width, seed=1, dtype=torch.float32)
    public: Any = layer_norm if center else rms_norm
    for parts in (projection.unbind(1), projection[:, :, 1].unbind(1)):
        results = []
        for x, r, dy in (parts, [p.contiguous() for p in parts]):
            leaves = [t.detach().requires_grad_() for t in (x, weight, r)]
            outs = public(leaves[0], weight=leaves[1], residual=leaves[2])
            results.append([*outs, *torch.autograd.grad(outs, leaves, (dy, dy))])
        for got, expected in zip(*results, strict=True):
            assert_near(got, expected, 2e-3)


def block_batch(
    lengths: list[int], *, heads: int, key_heads: int, width: int, dtype: torch.dtype, rope: bool, tail: int = 5
) -> tuple[Tensor, Tensor, RopeTables | None]:
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64)).cuda()
    total = sum(lengths) + tail
    qkv = random(total, heads + 2 * key_heads, width, seed=1, dtype=dtype)
    tables = None
    if rope:
        tables = Rope(time_fraction=0.5).tables(offsets, width, total=total, dt=torch.rand(total, device="cuda") * 1e6)
    return qkv, offsets, tables


def lengths_of(block: int) -> list[int]:
    return [0, 1, block - 1, block, block + 1, 0, 5 * block + 7, 1, 0]


HEADS = [(4, 4, 128), (4, 4, 64), (2, 2, 32), (4, 2, 96), (4, 1, 128)]
FRONTS = [(0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 0), (1, 1, 1)]
# (block, qk_norm, rope, causal, heads, key heads, width, dtype): two at a time in full, so that every entry of the
# table of configurations is met; float32 fits blocks of 64 at most.
BLOCKS = list(
    dict.fromkeys(
        [
            *((block, *front, *HEADS[0], torch.bfloat16) for block in (32, 64, 128) for front in FRONTS),
            *((64, 1, 1, 0, *heads, dtype) for heads in HEADS for dtype in ERROR),
            *((block, 1, 1, 1, *heads, torch.bfloat16) for block in (32, 128) for heads in HEADS),
            *((block, 0, 1, 0, *HEADS[1], dtype) for block in (32, 64, 128) for dtype in ERROR),
        ]
    )
)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("block", "qk_norm", "rope", "causal", "heads", "key_heads", "width", "dtype"), BLOCKS, ids=str
)
def test_block_attention_j1_j2_j3_j4_j5(
    block: int, qk_norm: int, rope: int, causal: int, heads: int, key_heads: int, width: int, dtype: torch.dtype
) -> None:
    """J1-J5: empty, one-row, tile-sized and longer sequences, rows past the end (NaN), every width, both layouts."""
    lengths = lengths_of(block)
    qkv, offsets, tables = block_batch(
        lengths, heads=heads, key_heads=key_heads, width=width, dtype=dtype, rope=bool(rope)
    )
    used = sum(lengths)
    settings: dict[str, Any] = {"block": block, "causal": bool(causal), "qk_norm": bool(qk_norm)}
    exact = qkv.double().requires_grad_()
    wide = None if tables is None else RopeTables(tables.cos_TJ.double(), tables.sin_TJ.double())
    truth = block_attention_qkv(exact, offsets, num_heads=heads, max_length=1000, rope=wide, **settings)
    dout = random(*truth.shape, seed=2, dtype=dtype)
    (dtruth,) = torch.autograd.grad(truth, exact, dout.double())
    qkv[used:] = float("nan")
    dout[used:] = float("nan")
    qkv.requires_grad_()
    out = block_attention_qkv(qkv, offsets, num_heads=heads, max_length=1000, rope=tables, **settings)
    (grad,) = torch.autograd.grad(out, qkv, dout, retain_graph=True)
    bound = max(ERROR[dtype], 2e-3 if torch.get_float32_matmul_precision() != "highest" else 0.0)
    assert_near(out, truth, bound, "out")
    for name, g, e in zip("qkv", *(x.split([heads, key_heads, key_heads], dim=1) for x in (grad, dtruth)), strict=True):
        assert_near(g, e, bound, f"d{name}")
    assert not out[used:].any()
    assert not grad[used:].any()
    q, k, v = parts = [p.detach().requires_grad_() for p in qkv.split([heads, key_heads, key_heads], dim=1)]
    apart = block_attention(q, k, v, offsets, max_length_q=1000, rope=tables, **settings)
    assert torch.equal(apart, out)
    assert torch.equal(torch.cat(torch.autograd.grad(apart, parts, dout), dim=1), grad)
    for _ in range(9):  # D1
        assert torch.equal(torch.autograd.grad(out, qkv, dout, retain_graph=True)[0], grad)


@pytest.mark.parametrize("factor", [10.0, 30.0, 100.0])
def test_large_logits(factor: float) -> None:
    qkv, offsets, _ = block_batch([200, 64, 3], heads=4, key_heads=4, width=128, dtype=torch.bfloat16, rope=False)
    exact = qkv.double()
    out = block_attention_qkv(qkv, offsets, num_heads=4, max_length=200, scale=factor / 128**0.5)
    truth = block_attention_qkv(exact, offsets, num_heads=4, max_length=200, scale=factor / 128**0.5)
    assert_near(out, truth, ERROR[torch.bfloat16])


def test_float32_follows_the_matmul_precision() -> None:
    qkv, offsets, _ = block_batch([200, 64, 3], heads=4, key_heads=4, width=128, dtype=torch.float32, rope=False)
    truth = block_attention_qkv(qkv.double(), offsets, num_heads=4, max_length=200)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, bound in (("highest", 2e-5), ("high", 2e-3)):
            torch.set_float32_matmul_precision(precision)
            assert_near(block_attention_qkv(qkv, offsets, num_heads=4, max_length=200), truth, bound, precision)
    finally:
        torch.set_float32_matmul_precision(before)


def layer(qkv: Tensor, offsets: Tensor, schedule: BlockSchedule | None = None) -> Tensor:
    normed, stream = rms_norm(qkv, residual=qkv)
    out = block_attention_qkv(normed, offsets, num_heads=4, max_length=512, qk_norm=True, schedule=schedule)
    return layer_norm(out, add=stream[:, :4])


def test_no_host_sync_j9() -> None:
    """J9: schedule, forward and backward read nothing back."""
    qkv, offsets, _ = block_batch([200, 64, 3], heads=4, key_heads=4, width=128, dtype=torch.bfloat16, rope=False)
    qkv.requires_grad_()
    layer(qkv, offsets).sum().backward()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(qkv, offsets, BlockSchedule.make(offsets, total=qkv.shape[0])).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        lengths = torch.randint(0, 513, (64,), generator=generator)
        qkv, offsets, _ = block_batch(
            lengths.tolist(), heads=4, key_heads=4, width=64, dtype=torch.bfloat16, rope=False, tail=0
        )
        yield qkv.requires_grad_(), offsets


def test_one_graph_for_every_batch_j7_t2() -> None:
    """J7, T2: whole graphs, and none is made anew for other totals."""
    torch._dynamo.reset()
    compiled: Callable[..., Tensor] = torch.compile(layer, fullgraph=True, dynamic=True)
    counters = torch._dynamo.utils.counters
    counters.clear()
    for qkv, offsets in batches(20):
        out = compiled(qkv, offsets)
        torch.testing.assert_close(out, layer(qkv, offsets))
        out.sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_one_binary_for_every_batch_j7_t1() -> None:
    """J7, T1: twenty totals, one compiled kernel each of norm and block attention."""
    from gemworks.jagged.ops.block_attention.kernel_block import block_bwd_kernel, block_fwd_kernel
    from gemworks.jagged.ops.norms.kernel_norm import norm_bwd_kernel, norm_fwd_kernel

    kernels: list[Any] = [block_fwd_kernel, block_bwd_kernel, norm_fwd_kernel, norm_bwd_kernel]
    if torch.cuda.get_device_capability() == (9, 0):
        from gemworks.jagged.ops.block_attention import kernel_block_hopper

        kernels += [kernel_block_hopper.block_fwd_hopper_kernel, kernel_block_hopper.block_bwd_hopper_kernel]
    device = torch.cuda.current_device()
    counts = []
    for i, (qkv, offsets) in enumerate(batches(20)):
        layer(qkv, offsets).sum().backward()
        if i in (0, 19):
            counts.append([len(kernel.device_caches[device][0]) for kernel in kernels])
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_flat_memory_over_500_batches_t3() -> None:
    """T3: neither memory nor the number of compiled kernels grows."""
    peaks = []
    for i, (qkv, offsets) in enumerate(batches(500)):
        layer(qkv, offsets).sum().backward()
        if i in (50, 499):
            del qkv, offsets
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            peaks.append(torch.cuda.memory_reserved())
    assert peaks[1] <= peaks[0] + (64 << 20)


@pytest.mark.slow
@pytest.mark.xdist_group("much memory")
def test_beyond_two_to_the_31_elements_j8() -> None:
    """J8: the last rows of tensors with more than 2^31 elements equal the same rows alone."""
    total = (1 << 31) // 512 + 1000
    lengths = torch.full((total // 1000,), 1000)
    offsets = offsets_from_lengths(lengths).cuda()
    used = int(lengths.sum())
    q, k, v = (random(used, 4, 128, seed=i, dtype=torch.bfloat16).requires_grad_() for i in range(3))
    out = block_attention(q, k, v, offsets, max_length_q=1000)
    small = [x.detach()[-1000:].clone().requires_grad_() for x in (q, k, v)]
    end = torch.tensor([0, 1000], device="cuda")
    expected = block_attention(small[0], small[1], small[2], end, max_length_q=1000)
    assert torch.equal(out[-1000:], expected)
    dout = random(*out.shape, seed=4, dtype=torch.bfloat16)
    for g, e in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, small, dout[-1000:]), strict=True
    ):
        assert torch.equal(g[-1000:], e)
    x = q.detach().flatten(1)
    assert torch.equal(rms_norm(x)[-5:], rms_norm(x[-5:].clone()))


def test_fake_tensors_have_the_right_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        qkv = torch.empty_strided((640, 12, 128), (1536, 128, 1), device="cuda", dtype=torch.bfloat16)
        offsets = torch.zeros(9, device="cuda", dtype=torch.int64)
        assert layer(qkv, offsets).shape == (640, 4, 128)


def test_autocast_and_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    qkv, offsets, _ = block_batch([200, 64, 3], heads=4, key_heads=4, width=64, dtype=torch.float32, rope=False)
    qkv.requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = block_attention_qkv(qkv, offsets, num_heads=4, max_length=200)
    assert out.dtype == torch.bfloat16
    half = qkv.detach().bfloat16().requires_grad_()
    plain = layer(half, offsets)
    kept: Any = checkpoint(layer, half, offsets, use_reentrant=False)
    assert torch.equal(plain, kept)
    assert torch.equal(*(torch.autograd.grad(o.float().sum(), half)[0] for o in (plain, kept)))
