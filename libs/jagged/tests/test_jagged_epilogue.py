"""GDPA with a residual and a norm at its end: the public function and its custom op, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import NormEpilogue, gdpa, layer_norm, offsets_from_lengths, rms_norm
from gemworks.jagged.ops.gdpa import epilogue as module
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.reference
LENGTHS = [3, 0, 17, 1, 8]
NAN = float("nan")


def inputs(dtype: torch.dtype = torch.float64, tail: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    """q, k, v, residual, add, weight, bias as leaves, and offsets with `tail` rows past the last."""
    generator = torch.Generator().manual_seed(0)
    offsets, rows = offsets_from_lengths(torch.tensor(LENGTHS)), sum(LENGTHS) + tail
    shapes = {"q": (rows, 2, 8), "k": (5, 6, 2, 8), "v": (5, 6, 2, 8)} | dict.fromkeys(
        ("residual", "add"), (rows, 2, 8)
    )
    shapes |= dict.fromkeys(("weight", "bias"), (16,))
    leaves = {n: torch.randn(*s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    return {n: x.to(dtype).requires_grad_() for n, x in leaves.items()}, offsets


def attend(x: dict[str, Tensor], offsets: Tensor, e: NormEpilogue | None, **options: Any) -> Tensor:
    return gdpa(x["q"], x["k"], x["v"], offsets, max_length_q=17, scale=0.4, epilogue=e, **options)


def chosen(kind: Any, x: dict[str, Tensor], parts: tuple[str, ...]) -> NormEpilogue:
    residual, add, weight, bias = (x[n] if n in parts else None for n in ("residual", "add", "weight", "bias"))
    return NormEpilogue(kind, residual, add, weight, bias)


VARIANTS = [
    ("rms", ("residual", "add")),
    ("rms", ("add", "weight")),
    ("layer", ("residual", "add", "weight", "bias")),
    ("layer", ()),
]


@pytest.mark.parametrize(("kind", "parts"), VARIANTS)
def test_epilogue_is_the_norm_after_gdpa(kind: Any, parts: tuple[str, ...]) -> None:
    """Values and every gradient, in float64 by the definition and in float32 through the op; rows past the end."""
    x, offsets = inputs()
    used = sum(LENGTHS)
    e = chosen(kind, x, parts)
    y = attend(x, offsets, e)
    h = attend(x, offsets, None).flatten(1)
    if "residual" in parts:
        h = h + x["residual"].flatten(1)
    plain = rms_norm(h, e.weight, eps=e.eps) if kind == "rms" else layer_norm(h, e.weight, e.bias, eps=e.eps)
    live = torch.arange(len(h))[:, None] < used
    expected = (torch.where(live, plain, 0) + (0 if e.add is None else e.add.flatten(1))).view(y.shape)
    torch.testing.assert_close(y, expected)
    names = ["q", "k", "v", *parts]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    truth = torch.autograd.grad(expected, [x[n] for n in names], dy)
    torch.testing.assert_close(torch.autograd.grad(y, [x[n] for n in names], dy), truth)

    narrow, _ = inputs(torch.float32)
    with torch.no_grad():
        for n in ("q", "residual"):
            narrow[n][used:] = NAN  # garbage in rows of no sequence reaches nobody
    dy = dy.float()
    if "add" not in parts:
        dy[used:] = NAN
    called = call_op(narrow, offsets, chosen(kind, narrow, parts))
    torch.testing.assert_close(called.double(), y, rtol=1e-4, atol=1e-4)
    grads = torch.autograd.grad(called, [narrow[n] for n in names], dy)
    for name, got, t in zip(names, grads, truth, strict=True):
        torch.testing.assert_close(got.double(), t, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def op_arguments(x: dict[str, Tensor], offsets: Tensor, e: NormEpilogue) -> tuple[Any, ...]:
    full = module.op.UNBOUNDED
    k, v = x["k"].flatten(0, 1), x["v"].flatten(0, 1)
    return (
        x["q"], k, v, offsets, None, [], "", 5, 6, 17, 6, 0.4, "gelu", full, full, "bottom_right", False,
        e.residual, e.add, e.weight, e.bias, e.eps, e.kind == "layer",
    )  # fmt: skip


def call_op(x: dict[str, Tensor], offsets: Tensor, e: NormEpilogue) -> Tensor:
    return torch.ops.gemworks_jagged.gdpa_norm(*op_arguments(x, offsets, e))[0]


def test_op_is_registered_soundly_and_counts_flops() -> None:
    x, offsets = inputs(torch.float32)
    e = NormEpilogue("layer", x["residual"], x["add"], x["weight"], x["bias"])
    arguments = op_arguments(x, offsets, e)
    leaves = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]
    torch.library.opcheck(module.gdpa_norm_op.overload, tuple(leaves))
    counter = FlopCounterMode(display=False)
    with counter:
        call_op(x, offsets, e)
    assert counter.get_total_flops() == 4 * sum(LENGTHS) * 6 * 2 * 8


def test_mistakes() -> None:
    x, offsets = inputs()
    with pytest.raises(ValueError, match="epilogue: got a bias with kind 'rms'"):
        attend(x, offsets, NormEpilogue(bias=x["bias"]))
    with pytest.raises(ValueError, match=r"epilogue.residual: got shape \(5, 6, 2, 8\)"):
        attend(x, offsets, NormEpilogue(residual=x["k"]))
    with pytest.raises(ValueError, match=r"epilogue.weight: got shape \(32, 2, 8\), expected \(16,\)"):
        attend(x, offsets, NormEpilogue(weight=x["q"]))
    with pytest.raises(ValueError, match="epilogue: got kind 'batch'"):
        attend(x, offsets, NormEpilogue("batch"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="epilogue: got one with shared_query=True"):
        gdpa(x["q"], x["k"], x["v"], None, shared_query=True, scale=1.0, epilogue=NormEpilogue())
