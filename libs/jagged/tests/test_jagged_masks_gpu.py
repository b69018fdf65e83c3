"""Causal and window masks in the Hopper kernels, on a CUDA device, against float64 and against plain Triton."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gemworks.jagged.ops.attention_core import table
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 700, 2]
LENGTHS_K = [129, 5, 0, 64, 1, 65, 300, 128, 127, 63, 2, 257, 0]
FULL = 1 << 30
MASKS = {
    "causal": (FULL, 0, "bottom_right"),
    "causal top left": (FULL, 0, "top_left"),
    "window": (40, 40, "bottom_right"),
    "window to the left": (150, 0, "top_left"),
    "wide window": (300, 100, "bottom_right"),
}


def arguments(
    kind: str, activation: str, mask: str, lengths: tuple[list[int], list[int]], width: int = 128, heads_k: int = 2
) -> tuple[Any, ...]:
    from gemworks.jagged import offsets_from_lengths

    torch.manual_seed(0)
    offsets_q, offsets_k = (offsets_from_lengths(torch.tensor(n)).cuda() for n in lengths)
    rows_q, rows_k = sum(lengths[0]) + 5, sum(lengths[1]) + 5
    rows_k = rows_q if kind == "self" else rows_k
    fused = torch.randn(max(rows_q, rows_k), 2 + 2 * heads_k, width, device="cuda", dtype=torch.bfloat16)
    q, k, v = fused[:rows_q, :2], fused[:rows_k, 2 : 2 + heads_k], fused[:rows_k, 2 + heads_k :]
    left, right, align = MASKS[mask]
    return (
        q, k, v, offsets_q, None if kind == "self" else offsets_k, [], "", len(lengths[0]), -1, 1024, 512, width**-0.5,
        activation, left, right, align, False,
    )  # fmt: skip


def run(args: tuple[Any, ...]) -> list[Tensor]:
    out, lse = torch.ops.gemworks_jagged.attention_forward(*args)
    d_out = torch.linspace(-3, 3, out.numel(), dtype=torch.float64).view(out.shape).sin().to(out)
    saved = (out, lse) if args[12] == "softmax" else (None, None)
    return [out, *torch.ops.gemworks_jagged.attention_backward(d_out, *args[:3], *saved, *args[3:])]


def to_host(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.double().cpu() if x.is_floating_point() else x.cpu()


def compare_with_float64(args: tuple[Any, ...]) -> None:
    ours, again = run(args), run(args)
    truth = run(tuple(to_host(x) for x in args))
    for name, x, y, exact in zip(("out", "dq", "dk", "dv"), ours, again, truth, strict=True):
        assert x.isfinite().all(), name
        assert torch.equal(x, y), name
        error = float((x.double().cpu() - exact).norm() / exact.norm())
        assert error <= 1.2e-2, f"{name}: {error:.2e}"


CALLS = [*itertools.product(("softmax", "fast_gelu"), ("self", "cross"), MASKS), ("silu", "self", "causal")]


@pytest.mark.parametrize(("activation", "kind", "mask"), CALLS)
def test_masks(activation: str, kind: str, mask: str) -> None:
    compare_with_float64(arguments(kind, activation, mask, (LENGTHS, LENGTHS_K)))


@pytest.mark.parametrize(("width", "heads_k"), [(64, 2), (128, 1)], ids=["narrow", "grouped"])
@pytest.mark.parametrize("activation", ["softmax", "fast_gelu"])
def test_masked_forwards_whose_backward_is_plain(activation: str, width: int, heads_k: int) -> None:
    compare_with_float64(arguments("cross", activation, "window", (LENGTHS, LENGTHS_K), width, heads_k))


@pytest.mark.parametrize("mask", MASKS)
def test_long_sequences(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More key tiles than multiprocessors, which have to take turns; beside plain Triton."""
    many = torch.randint(0, 1500, (48,), generator=torch.Generator().manual_seed(3)).tolist()
    args = arguments("self", "softmax", mask, (many, many))
    ours = run(args)
    monkeypatch.setattr(table, "GLUON_ARCHITECTURES", ())
    for name, x, y in zip(("out", "dq", "dk", "dv"), ours, run(args), strict=True):
        error = float((x.double() - y.double()).norm() / y.double().norm())
        assert error <= 1.2e-2, f"{name}: {error:.2e}"
