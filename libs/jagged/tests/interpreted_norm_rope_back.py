"""dK back through k's norm and rotation at the end of its kernel, under Triton's interpreter, against float64.

Run by test_jagged_interpret.py. bf16 stays out: the interpreter computes it wrongly. Buffers are poisoned with NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import Rope, RopeTables, apply_rope, offsets_from_lengths
from gemworks.jagged.ops.attention_core import op, table
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS
from gemworks.jagged.ops.norms.reference import rms_normalize
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
EPS = 1e-6
# As of dQ, dK and dV without the ends in interpreted_attention.py, where keys are not rounded once more in between.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 6e-3}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        out = empty(*size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


def gradients(
    monkeypatch: pytest.MonkeyPatch,
    *,
    norm: bool = True,
    turn: bool = True,
    kind: str = "cross",
    activation: str = "softmax",
    heads: int = 2,
    key_heads: int = 2,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype = torch.float32,
    **mask: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX of the rows that became k, by the kernel; the same in float64; rows of no sequence)."""
    monkeypatch.setattr(table, "choose", lambda *_: table.TritonConfig(TILE, TILE, 4, 1))
    from gemworks.jagged._attention_args import make_mask
    from gemworks.jagged.ops.attention_core import launch
    from gemworks.jagged.ops.rope.launch import norm_rope

    torch.manual_seed(0)
    offsets_q, offsets_k = (offsets_from_lengths(torch.tensor(n)) for n in (LENGTHS, LENGTHS_K))
    shared, scale = kind == "shared", 0.3
    given_q, given_k = None if shared else offsets_q, None if kind == "self" else offsets_k
    end = int((offsets_q if given_k is None else offsets_k)[-1])
    rows_k = end + 3
    rows_q = 37 if shared else int(offsets_q[-1]) + (3 if kind == "self" else 2)
    # Views of one fused projection: rows are strided, and the kernels read them in place.
    fused = torch.randn(max(rows_q, rows_k), heads + 2 * key_heads, width, dtype=dtype)
    q, x, v = fused[:rows_q, :heads], fused[:rows_k, heads : heads + key_heads], fused[:rows_k, heads + key_heads :]
    offsets = offsets_q if given_k is None else offsets_k
    tables = Rope(base=50.0).tables(offsets, width, total=rows_k, dtype=table_dtype) if turn else None
    parts = (None, None) if tables is None else (tables.cos_TJ.clone(), tables.sin_TJ.clone())
    for part in parts:
        if part is not None:
            part[end:] = float("nan")  # belong to nobody
    eps = EPS if norm else None
    scales = torch.empty(rows_k, key_heads) if norm else None
    k = norm_rope(x, *parts, torch.tensor([end]), eps, scales=scales)
    bounds = make_mask(mask.get("causal", False), mask.get("window"), "bottom_right")
    rest = (
        given_q, given_k, [], "", len(LENGTHS), -1, 64, 64, scale, activation,
        min(bounds.left, op.UNBOUNDED), min(bounds.right, op.UNBOUNDED), bounds.align, shared,
    )  # fmt: skip
    problem = op.make_problem(q, k, v, op.Call(q, k, op.Settings(*rest)), "sm_90")
    out, lse = launch.forward(problem)
    d_out = torch.randn(out.shape, dtype=dtype)
    grads = [torch.empty(t.shape[0], 2 * t.shape[1], width, dtype=dtype)[:, : t.shape[1]] for t in (q, k, v)]
    launch.backward(problem, d_out, out, lse, grads, launch.NormRope(*parts, scales))

    leaf = x.double().requires_grad_()
    made = rms_normalize(leaf, EPS) if norm else leaf
    if tables is not None:
        made = apply_rope(made, RopeTables(tables.cos_TJ.double(), tables.sin_TJ.double()))
    weigh = softmax_weights if activation == "softmax" else activation_weights(ACTIVATIONS[activation])
    truth = attention_loop(
        q.double(), made, v.double(), given_q, given_k, weigh=weigh, scale=scale, shared_query=shared, **mask
    ).reshape(out.shape)
    (exact,) = torch.autograd.grad(truth, leaf, d_out.double())
    return grads[1], exact, grads[1][end:]


def check(monkeypatch: pytest.MonkeyPatch, **call: Any) -> None:
    ours, exact, of_nobody = gradients(monkeypatch, **call)
    bound = TOLERANCE[call.get("dtype", torch.float32)] * max(1.0, exact.abs().max().item())
    error = (ours.double() - exact).abs().max().item()
    assert error <= bound, f"{error:.2e} > {bound:.2e}"
    assert of_nobody.eq(0).all()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kind", ["self", "cross", "shared"])
@pytest.mark.parametrize(("norm", "turn"), [(True, True), (True, False), (False, True)])
def test_dk_leaves_as_of_the_rows_before(
    monkeypatch: pytest.MonkeyPatch, kind: str, norm: bool, turn: bool, dtype: torch.dtype
) -> None:
    """Empty sequences and tiles on either side; rows past the end, whose tables are garbage, get zeros."""
    check(monkeypatch, kind=kind, norm=norm, turn=turn, dtype=dtype)


@pytest.mark.parametrize(
    "call",
    [{"heads": 4}, {"window": 7}, {"causal": True}, {"width": 64}, {"activation": "silu"}],
    ids=lambda call: next(iter(call)),
)
def test_other_calls(monkeypatch: pytest.MonkeyPatch, call: dict[str, Any]) -> None:
    """Grouped heads, masks, another width, an activation."""
    check(monkeypatch, **call)


def test_narrow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, dtype=torch.float16, table_dtype=torch.float16)


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm's projection left out is seen, and so is a turn the wrong way."""
    ours, exact, _ = gradients(monkeypatch)
    bound = TOLERANCE[torch.float32] * max(1.0, exact.abs().max().item())
    for other in (gradients(monkeypatch, norm=False)[0], gradients(monkeypatch, turn=False)[0]):
        assert (other.double() - exact).abs().max().item() > 100 * bound
    assert (ours.double() - exact).abs().max().item() <= bound
