"""The plain Triton kernels under Triton's interpreter against loops in float64: values and every gradient.

Run by test_jagged_interpret.py, or: TRITON_INTERPRET=1 python -m pytest libs/jagged/tests/interpreted_attention.py

bf16 stays out: the interpreter computes it wrongly. Every buffer a kernel gets is poisoned with NaN first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import offsets_from_lengths
from gemworks.jagged.ops.attention_core import op, table
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS
from gemworks.jagged.testing import activation_weights, attention_loop, softmax_weights
from torch import Tensor

pytestmark = [
    pytest.mark.interpret,
    # NumPy computes rows that are never stored too, and says so where they overflow.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]
TILE = 32
LENGTHS = [0, 1, TILE - 1, TILE, TILE + 1, 5]
LENGTHS_K = [TILE + 1, 5, TILE, 1, TILE - 1, 0]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal top left": {"causal": True, "align": "top_left"},
    "window": {"window": 7},
    "window causal": {"window": 3, "causal": True, "align": "top_left"},
    "left only": {"window": (4, -1)},
}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        out = empty(*size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


def check(
    monkeypatch: pytest.MonkeyPatch,
    *,
    activation: str = "softmax",
    kind: str = "cross",
    heads: int = 2,
    key_heads: int = 1,
    width: int = 16,
    value_width: int = 16,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
    size: float = 1.0,
    heights: str = "",
    max_length: int = 64,
    lengths: tuple[list[int], list[int]] = (LENGTHS, LENGTHS_K),
    **mask: Any,
) -> None:
    monkeypatch.setattr(table, "choose", lambda *_: table.TritonConfig(TILE, TILE, 4, 1))
    from gemworks.jagged._attention_args import make_mask
    from gemworks.jagged.ops.attention_core import launch
    from gemworks.jagged.schedule import TileSchedule

    torch.manual_seed(0)
    offsets_q, offsets_k = (offsets_from_lengths(torch.tensor(x)) for x in lengths)
    total_q, total_k, b = int(offsets_q[-1]) + 2, int(offsets_k[-1]) + 3, len(lengths[0])
    rows_k, shared = (9, False) if kind == "fixed" else (-1, kind == "shared")
    total_q = 37 if shared else total_q
    k_rows = {"self": total_q, "fixed": b * 9}.get(kind, total_k)
    # Views of one fused projection: rows are strided, and the kernels read them in place.
    fused = torch.randn(max(total_q, k_rows), heads + 2 * key_heads, max(width, value_width), dtype=dtype) * size
    q = fused[:total_q, :heads, :width]
    k = fused[:k_rows, heads : heads + key_heads, :width]
    v = fused[:k_rows, heads + key_heads :, :value_width]
    given_q = None if shared else offsets_q
    given_k = None if kind in ("self", "fixed") else offsets_k
    bounds = make_mask(mask.get("causal", False), mask.get("window"), mask.get("align", "bottom_right"))
    tiles: list[Tensor] = []
    if heights:
        sides: dict[str, Any] = {"total_q": total_q, "total_k": None if kind != "cross" else k_rows}
        tiles = list(TileSchedule.build(given_q, given_k, heights=heights, **sides).tensors)
    rest = (
        given_q, given_k, tiles, heights, b, rows_k, max_length, max_length, scale, activation,
        min(bounds.left, op.UNBOUNDED), min(bounds.right, op.UNBOUNDED), bounds.align, shared,
    )  # fmt: skip
    problem = op.make_problem(q, k, v, op.Call(q, k, op.Settings(*rest)), "sm_90")
    out, lse = launch.forward(problem)
    d_out = torch.randn(out.shape, dtype=dtype)
    # Rows of the gradients are strided too: parts of one buffer, as for a packed projection.
    grads = [torch.empty(x.shape[0], 2 * x.shape[1], x.shape[2], dtype=dtype)[:, : x.shape[1]] for x in (q, k, v)]
    launch.backward(problem, d_out, out, lse, grads)

    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    args: dict[str, Any] = {"offsets_q": given_q, "offsets_k": given_k, "shared_query": shared, **mask}
    if kind == "fixed":
        args["k"], args["v"] = (x.view(b, 9, *x.shape[1:]) for x in leaves[1:])
    else:
        args["k"], args["v"] = leaves[1:]
    weigh = softmax_weights if activation == "softmax" else activation_weights(ACTIVATIONS[activation])
    truth = attention_loop(leaves[0], weigh=weigh, scale=scale, **args).reshape(out.shape)
    expected = torch.autograd.grad(truth, leaves, d_out.double(), materialize_grads=True)
    tolerance = 3e-5 if dtype == torch.float32 else 6e-3
    for name, ours, exact in zip(["o", "q", "k", "v"], (out, *grads), (truth, *expected), strict=True):
        assert ours.dtype == dtype
        bound = tolerance * max(1.0, exact.abs().max().item()) * max(size, 1.0)
        error = (ours.double() - exact).abs().max().item()
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_masks(monkeypatch: pytest.MonkeyPatch, mask: str, activation: str) -> None:
    check(monkeypatch, activation=activation, **MASKS[mask])


@pytest.mark.parametrize("kind", ["self", "fixed", "shared"])
@pytest.mark.parametrize("activation", ["softmax", "gelu"])
def test_layouts(monkeypatch: pytest.MonkeyPatch, kind: str, activation: str) -> None:
    check(monkeypatch, kind=kind, activation=activation)


@pytest.mark.parametrize("kind", ["fixed", "shared"])
def test_layouts_with_a_mask(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    check(monkeypatch, kind=kind, causal=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    check(monkeypatch, activation=activation, kind="self", lengths=([33, 0, 3], [1, 1, 1]))


@pytest.mark.parametrize(("width", "value_width"), [(16, 32), (24, 8), (96, 64)])
@pytest.mark.parametrize("activation", ["softmax", "fast_gelu"])
def test_widths(monkeypatch: pytest.MonkeyPatch, width: int, value_width: int, activation: str) -> None:
    check(monkeypatch, activation=activation, width=width, value_width=value_width, lengths=([33, 2], [5, 34]))


@pytest.mark.parametrize("activation", ["softmax", "relu"])
def test_grouped_heads(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    check(monkeypatch, activation=activation, heads=4, key_heads=2, window=5, lengths=([33, 2], [5, 34]))


@pytest.mark.parametrize("activation", ["softmax", "fast_silu"])
def test_half_precision(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    check(monkeypatch, activation=activation, dtype=torch.float16, scale=0.25)


@pytest.mark.parametrize("logit", [10.0, 30.0, 100.0, 1000.0])
def test_large_logits(monkeypatch: pytest.MonkeyPatch, logit: float) -> None:
    """Rows of very negative logits beside a surplus key, whose logit is 0: its weight must not overflow."""
    check(monkeypatch, scale=logit / 16, kind="self", lengths=([33, 5, 1], [1, 1, 1]))


@pytest.mark.parametrize("lengths", [([0, 0], [0, 0]), ([0], [4]), ([4], [0])], ids=str)
@pytest.mark.parametrize("activation", ["softmax", "gelu"])
def test_empty(monkeypatch: pytest.MonkeyPatch, lengths: tuple[list[int], list[int]], activation: str) -> None:
    """J1: rows without a pair are written, as zeros."""
    check(monkeypatch, activation=activation, lengths=lengths)


def test_a_given_schedule_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, heights="q32 k32")
    check(monkeypatch, heights="q128")  # lacks what the kernels want


@pytest.mark.parametrize("kind", ["self", "cross", "shared"])
@pytest.mark.parametrize("activation", ["softmax", "gelu"])
def test_a_bound_that_is_too_small_changes_nothing(monkeypatch: pytest.MonkeyPatch, kind: str, activation: str) -> None:
    """Kernels take rows from the offsets, and nothing but the choice of tiles from the bound of the lengths."""
    check(monkeypatch, kind=kind, activation=activation, max_length=4)


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemworks.jagged.ops.attention_core import launch

    monkeypatch.setattr(launch, "compute_delta", lambda out, d_out: out.float().sum(-1).t().contiguous())
    with pytest.raises(AssertionError, match="q: "):
        check(monkeypatch)


@pytest.mark.parametrize("mask", MASKS)
def test_queries_without_keys_get_zeros(mask: str) -> None:
    """The fused backward's helper writes dq where no key tile walks, of rows past the end too, and nothing else."""
    from gemworks.jagged._attention_args import make_mask
    from gemworks.jagged.ops.attention_core.kernel_backward import zero_queries_without_keys_kernel
    from gemworks.jagged.schedule import TileSchedule

    kernel: Any = zero_queries_without_keys_kernel
    lengths_q, lengths_k = torch.tensor([5, 130, 0, 257, 64, 300]), torch.tensor([3, 0, 4, 0, 1, 150])
    offsets_q, offsets_k = offsets_from_lengths(lengths_q), offsets_from_lengths(lengths_k)
    total, width = int(offsets_q[-1]) + 3, 2 * 24
    schedule = TileSchedule.build(offsets_q, offsets_k, total_q=total, total_k=int(offsets_k[-1]), heights="q128")
    sample, row, count = schedule.tensors[-1]
    bounds = make_mask(
        MASKS[mask].get("causal", False), MASKS[mask].get("window"), MASKS[mask].get("align", "bottom_right")
    )
    left, right = (min(x, op.UNBOUNDED) for x in (bounds.left, bounds.right))
    dq = torch.empty(total, 2, 24)
    kernel[(sample.shape[0],)](
        dq, schedule.bounds[0], schedule.bounds[3], sample, row, count, left, right, dq.stride(0),
        WIDTH=width, BW=64, ROWS=128, BR=8, MASKED=not bounds.is_full, BOTTOM_RIGHT=bounds.align == "bottom_right",
    )  # fmt: skip
    expected = torch.ones(total, dtype=torch.bool)
    for b, (lq, lk) in enumerate(zip(lengths_q.tolist(), lengths_k.tolist(), strict=True)):
        shift = lk - lq if bounds.align == "bottom_right" else 0
        for m in range(0, lq, 64):
            walked = any(
                max(n - shift - right, 0) // 64 * 64 <= m < min(lq, min(n + 128, lk) - shift + left)
                for n in range(0, lk, 128)
            )
            begin = int(offsets_q[b])
            expected[begin + m : begin + min(m + 64, lq)] = not walked
    assert dq.flatten(1).eq(0).all(1).equal(expected)
    assert dq.flatten(1).isnan().all(1).equal(~expected)
