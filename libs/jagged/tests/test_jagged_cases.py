"""The public bug reports J1 to J6 and J9 as tests of the reference backend, and a sample's independence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemworks.jagged import (
    AttentionBias,
    Jagged,
    Rope,
    _packing,
    block_attention,
    concat,
    expand_rows,
    flash_attention,
    from_padded,
    gdpa,
    jagged_dense_matmul,
    jagged_jagged_matmul,
    last_pool,
    layer_norm,
    mean_pool,
    num_pairs,
    offsets_from_lengths,
    rms_norm,
    seed_pool,
    split,
)
from gemworks.jagged.convert import to_padded
from torch import Tensor

pytestmark = pytest.mark.reference

OPS: dict[str, Callable[..., Tensor]] = {
    "flash": lambda *x, **kw: flash_attention(*x, **kw),
    "flash causal": lambda *x, **kw: flash_attention(*x, causal=True, **kw),
    "flash window": lambda *x, **kw: flash_attention(*x, window=2, align="top_left", **kw),
    "flash qk_norm": lambda *x, **kw: flash_attention(*x, qk_norm=True, **kw),
    "gdpa": lambda *x, **kw: gdpa(*x, scale=0.5, **kw),
    "gdpa causal": lambda *x, **kw: gdpa(*x, scale=0.5, causal=True, **kw),
}


def leaves(total_q: int, total_k: int, width: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, 2, width, requires_grad=True) for n in (total_q, total_k, total_k)]


def run(op: str, lengths_q: list[int], lengths_k: list[int], width: int = 4) -> tuple[Tensor, list[Tensor]]:
    x = leaves(sum(lengths_q), sum(lengths_k), width)
    offsets = [offsets_from_lengths(torch.tensor(n, dtype=torch.int64)) for n in (lengths_q, lengths_k)]
    bounds = {"max_length_q": max([*lengths_q, 0]), "max_length_k": max([*lengths_k, 0])}
    out = OPS[op](*x, *offsets, **bounds)
    return out, list(torch.autograd.grad(out.sum(), x))


@pytest.mark.parametrize("op", OPS)
def test_empty_query_with_keys_j1(op: str) -> None:
    """J1: query length 0 with key length > 0: no rows out, dk and dv exactly 0."""
    out, (dq, dk, dv) = run(op, [0, 2], [3, 2])
    assert out.shape[0] == dq.shape[0] == 2
    assert dk[:3].eq(0).all()
    assert dv[:3].eq(0).all()
    assert dv[3:].ne(0).any()


@pytest.mark.parametrize("op", OPS)
def test_empty_keys_with_queries_j1(op: str) -> None:
    out, (dq, dk, dv) = run(op, [3, 2], [0, 2])
    assert out[:3].eq(0).all()
    assert dq[:3].eq(0).all()
    assert out[3:].ne(0).any()
    assert all(g.isfinite().all() for g in (out, dq, dk, dv))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [([], []), ([0, 0], [0, 0]), ([0], [4]), ([4], [0])], ids=str)
def test_nothing_but_empty_sequences_j1(op: str, lengths: tuple[list[int], list[int]]) -> None:
    out, grads = run(op, *lengths)
    assert out.shape[0] == sum(lengths[0])
    assert all(x.eq(0).all() for x in (out, *grads))


@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
def test_empty_query_with_wide_heads_backward_j2(width: int) -> None:
    """J2: zero-length q at every supported head width."""
    for op in OPS:
        out, grads = run(op, [0, 1, 0], [2, 1, 0], width)
        assert all(x.isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [[0, 1, 0, 1, 1], [1], [0, 0, 1], [1, 0]], ids=str)
def test_lengths_zero_and_one_j3(op: str, lengths: list[int]) -> None:
    """J3: maximum length 1 with zero-length sequences. A row alone attends to itself."""
    out, grads = run(op, lengths, lengths)
    x = leaves(sum(lengths), sum(lengths))
    if op.startswith("flash"):
        torch.testing.assert_close(out, x[2])
    assert all(g.isfinite().all() for g in grads)


def past_end_functions() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    def heads(x: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, 4)

    rope = Rope()
    return {
        "flash": lambda x, o: flash_attention(heads(x), heads(x), heads(x), o, max_length_q=8),
        "flash rope": lambda x, o: flash_attention(
            heads(x), heads(x), heads(x), o, max_length_q=8, qk_norm=True, rope=rope.tables(o, 4, total=x.shape[0])
        ),
        "gdpa": lambda x, o: gdpa(heads(x), heads(x), heads(x), o, max_length_q=8, scale=1.0),
        "block": lambda x, o: block_attention(heads(x), heads(x), heads(x), o, max_length_q=8),
        "seed pool": lambda x, o: seed_pool(torch.ones(3, 2, 4), heads(x), heads(x), o, max_length_k=8),
        "mean": mean_pool,
        "last": last_pool,
        "padded": lambda x, o: to_padded(Jagged(x, o, 8)),
        "matmul": lambda x, o: jagged_dense_matmul(x, torch.ones(3, 8, 2), o, max_length=8),
        "product": lambda x, o: jagged_jagged_matmul(x, x, o, max_length=8),
        "concat": lambda x, o: concat([Jagged(x, o, 8), Jagged(x, o, 8)]).values,
    }


@pytest.mark.parametrize("name", past_end_functions())
@pytest.mark.parametrize("poison", [1e4, float("nan"), float("inf")])
def test_rows_past_the_last_offset_j4(name: str, poison: float) -> None:
    """J4: rows past offsets[-1] get zero output and zero gradient, and no poison in them reaches a result."""
    function = past_end_functions()[name]
    offsets = torch.tensor([0, 3, 3, 5])
    torch.manual_seed(0)
    used = torch.randn(5, 8)
    x = torch.cat([used, torch.full((2, 8), poison)]).requires_grad_()
    clean = used.clone().requires_grad_()
    out, truth = function(x, offsets), function(clean, offsets)
    torch.testing.assert_close(out[: truth.shape[0]], truth, equal_nan=False)
    assert out[truth.shape[0] :].eq(0).all()
    (gradient,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(truth.sum(), clean)
    torch.testing.assert_close(gradient[:5], expected)
    assert gradient[5:].eq(0).all()


@pytest.mark.parametrize("length_k", [1, 2, 3])
def test_short_keys_with_head_width_16_j5(length_k: int) -> None:
    """J5: dq is finite and right for key lengths 1..3 at head width 16."""
    q, k, v = (torch.randn(n, 1, 16, dtype=torch.float64, requires_grad=True) for n in (5, length_k, length_k))
    out = flash_attention(q, k, v, torch.tensor([0, 5]), torch.tensor([0, length_k]), max_length_q=8, max_length_k=4)
    weights = (torch.einsum("qnh,knh->nqk", q, k) / 4).softmax(-1)
    dense = torch.einsum("nqk,knh->qnh", weights, v)
    for ours, truth in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(dense.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, truth)


def test_one_plan_per_batch_whatever_the_number_of_layers_j6() -> None:
    """J6: layers share the plan of a batch; offsets with other values get their own, even in the same memory."""
    _packing._cached_host_plan.cache_clear()
    offsets = torch.tensor([0, 3, 5])
    x = torch.randn(5, 1, 4)
    for _ in range(4):
        flash_attention(x, x, x, offsets, max_length_q=4)
    assert _packing._cached_host_plan.cache_info().misses == 1
    before = flash_attention(x, x, x, offsets, max_length_q=4)
    offsets[1] = 2
    assert _packing._cached_host_plan.cache_info().misses == 1
    assert not torch.equal(flash_attention(x, x, x, offsets, max_length_q=4), before)
    assert _packing._cached_host_plan.cache_info().misses == 2


def no_sync_calls(device: str) -> dict[str, Callable[[], Tensor]]:
    """Every op on 3 sequences in 20 rows on `device`, from fresh leaves."""

    def x(*shape: int) -> Tensor:
        return torch.ones(*shape, device=device, requires_grad=True)

    o = torch.zeros(4, dtype=torch.int64, device=device)
    times = torch.zeros(20, dtype=torch.int64, device=device)
    length: Any = {"max_length_q": 8}

    def bias() -> AttentionBias:
        return AttentionBias(x(5, 2), x(4, 2), times)

    def rope() -> Any:
        return Rope(time_fraction=0.5).tables(o, 8, total=20, dt=times)

    def qkv() -> tuple[Tensor, Tensor, Tensor]:
        return x(20, 2, 8), x(20, 2, 8), x(20, 2, 8)

    return {
        "flash": lambda: flash_attention(*qkv(), o, causal=True, qk_norm=True, rope=rope(), bias=bias(), **length),
        "gdpa": lambda: gdpa(*qkv(), o, scale=1.0, window=4, activation="fast_gelu", **length),
        "pffn": lambda: gdpa(x(20, 2, 8), x(3, 5, 1, 8), x(3, 5, 1, 8), o, scale=1.0, **length),
        "block": lambda: block_attention(*qkv(), o, rope=rope(), **length),
        "seed pool": lambda: seed_pool(x(6, 2, 8), x(20, 2, 8), x(20, 2, 8), o, max_length_k=8),
        "layer_norm": lambda: layer_norm(x(20, 8)),
        "rms_norm": lambda: rms_norm(x(20, 8), add=x(20, 8)),
        "mean": lambda: mean_pool(x(20, 8), o),
        "last": lambda: last_pool(x(20, 8), o),
        "expand": lambda: expand_rows(x(3, 8), o, 20),
        "matmul": lambda: jagged_dense_matmul(x(20, 8), x(3, 8, 4), o, max_length=8),
        "product": lambda: jagged_jagged_matmul(x(20, 8), x(20, 8), o, max_length=8),
        "padded": lambda: to_padded(Jagged(x(20, 8), o, 8)),
        "pack": lambda: from_padded(x(3, 8, 2), o.diff(), total=20).values,
        "concat": lambda: concat([Jagged(x(20, 8), o, 8)] * 2).values,
        "split": lambda: split(Jagged(x(40, 8), o, 8), [Jagged(x(20, 8), o, 8)] * 2)[1].values,
        "pairs": lambda: num_pairs(o.diff(), causal=True, total_q=20) * x(1),
    }


@pytest.mark.parametrize("name", no_sync_calls("cpu"))
def test_device_data_is_never_read_j9(name: str) -> None:
    """J9: on meta tensors there is nothing to read, so an op that looks at values of its offsets raises."""
    no_sync_calls("meta")[name]().sum().backward()


def test_the_j9_test_can_fail() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device="meta").nonzero()
    with pytest.raises(RuntimeError):
        torch.zeros((), device="meta").item()


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat host offsets as if they could not be read: the plan that CUDA tensors get."""
    from gemworks.jagged import _checks, convert
    from gemworks.jagged.ops.block_attention import reference

    for module in (_packing, _checks, convert, reference):
        monkeypatch.setattr(module, "is_host", lambda x: False)


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize("op", [*OPS, "pffn", "shared", "block", "bias"])
def test_device_plan_equals_host_plan(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group padded to max_length and groups by real length are the same function."""
    lengths_q, lengths_k = [3, 0, 70, 1, 8], [5, 4, 17, 0, 8]
    offsets_q, offsets_k = (offsets_from_lengths(torch.tensor(n)) for n in (lengths_q, lengths_k))
    torch.manual_seed(0)
    q = torch.randn(84, 2, 4, dtype=torch.float64, requires_grad=True)  # two rows past the end
    k, v = (torch.randn(36, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    fixed = torch.randn(5, 7, 1, 4, dtype=torch.float64, requires_grad=True)
    table = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    bias = AttentionBias(table, table, torch.arange(84) * 9, torch.arange(36) * 5, 2)
    cross: Any = {"max_length_q": 128, "max_length_k": 32}

    def call() -> tuple[Tensor, ...]:
        if op == "pffn":
            out = gdpa(q, fixed, fixed, offsets_q, max_length_q=128, scale=0.5)
            return out, *torch.autograd.grad(out.square().sum(), (q, fixed))
        if op == "shared":
            out = seed_pool(q[:6], k, v, offsets_k, max_length_k=32)
        elif op == "block":
            out = block_attention(q, q, q, offsets_q, max_length_q=128, block=32)
            return out, *torch.autograd.grad(out.square().sum(), q)
        elif op == "bias":
            out = flash_attention(q, k, v, offsets_q, offsets_k, bias=bias, **cross)
            return out, *torch.autograd.grad(out.square().sum(), (q, k, v, table))
        else:
            out = OPS[op](q, k, v, offsets_q, offsets_k, **cross)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    device = call()
    monkeypatch.undo()
    for a, b in zip(device, call(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("as_device")
def test_too_small_a_bound_off_the_host_never_corrupts_neighbours() -> None:
    """Off the host the bound can't be checked: the reference takes rows beyond it for absent; others are untouched.

    The kernels compute them: interpreted_attention.py, test_a_bound_that_is_too_small_changes_nothing.
    """
    offsets = torch.tensor([0, 6, 9])
    x = torch.randn(9, 1, 4, requires_grad=True)
    out = flash_attention(x, x, x, offsets, max_length_q=4)
    first = flash_attention(x[:4], x[:4], x[:4], torch.tensor([0, 4]), max_length_q=4)
    second = flash_attention(x[6:], x[6:], x[6:], torch.tensor([0, 3]), max_length_q=4)
    torch.testing.assert_close(out, torch.cat([first, torch.zeros(2, 1, 4), second]))


@pytest.mark.parametrize("op", OPS)
def test_a_sample_does_not_depend_on_its_neighbours(op: str) -> None:
    lengths = [3, 40, 7]
    offsets = offsets_from_lengths(torch.tensor(lengths))
    q, k, v = leaves(50, 50)
    whole = OPS[op](q, k, v, offsets, max_length_q=64)
    for b, n in enumerate(lengths):
        rows = slice(int(offsets[b]), int(offsets[b + 1]))
        alone = OPS[op](q[rows], k[rows], v[rows], torch.tensor([0, n]), max_length_q=64)
        torch.testing.assert_close(whole[rows], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [10.0, 30.0, 100.0, 1e4])
def test_large_logits_stay_finite(size: float) -> None:
    q, k, v = leaves(20, 20)
    offsets = torch.tensor([0, 1, 4, 20])
    out = flash_attention(q * size, k * size, v, offsets, max_length_q=16, causal=True)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_repeats_are_bit_equal() -> None:
    q, k, v = leaves(300, 300)
    offsets = torch.tensor([0, 100, 120, 300])
    runs = []
    for _ in range(3):
        out = flash_attention(q, k, v, offsets, max_length_q=256)
        runs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
