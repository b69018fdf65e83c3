"""GDPA with a norm at its end on a GPU: Gluon and its twin against float64, repeats, compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import NormEpilogue, TileSchedule, gdpa, offsets_from_lengths
from gemworks.jagged.ops.gdpa import launch_epilogue
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [0, 1, 63, 64, 65, 128, 300, 0, 1000, 127]
PARTS = ("residual", "add", "weight", "bias")


def make(heads: int, width: int, rows: int, dtype: torch.dtype, tail: int = 70) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    total, batch = sum(LENGTHS) + tail, len(LENGTHS)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("q", "residual", "add", "dy"), (total, heads, width))
    shapes |= dict.fromkeys(("k", "v"), (batch, rows, heads, width)) | dict.fromkeys(PARTS[2:], (heads * width,))
    x = {n: torch.randn(*s, device="cuda", generator=generator).to(dtype) for n, s in shapes.items()}
    return {n: t.requires_grad_(n != "dy") for n, t in x.items()}, offsets_from_lengths(torch.tensor(LENGTHS)).cuda()


def run(x: dict[str, Tensor], offsets: Tensor, kind: Any, parts: tuple[str, ...], **options: Any) -> list[Tensor]:
    residual, add, weight, bias = (x[n] if n in parts else None for n in PARTS)
    e = NormEpilogue(kind, residual, add, weight, bias)
    scale = x["q"].shape[2] ** -0.5
    y = gdpa(
        x["q"], x["k"], x["v"], offsets, max_length_q=1000, scale=scale, activation="fast_gelu", epilogue=e, **options
    )
    return [y, *torch.autograd.grad(y, [x[n] for n in ("q", "k", "v", *parts)], x["dy"])]


CASES = [
    (4, 128, 256, torch.bfloat16, True),
    (4, 128, 64, torch.float16, True),
    (2, 128, 128, torch.bfloat16, True),
    (8, 128, 128, torch.bfloat16, True),
    (4, 128, 100, torch.bfloat16, True),
    (3, 64, 128, torch.bfloat16, False),
    (2, 32, 40, torch.float32, False),
]


@pytest.mark.parametrize(("kind", "parts"), [("rms", PARTS[:2]), ("layer", PARTS), ("rms", ()), ("layer", PARTS[1:3])])
@pytest.mark.parametrize(("heads", "width", "rows", "dtype", "gluon"), CASES)
def test_values_and_gradients(
    heads: int, width: int, rows: int, dtype: torch.dtype, gluon: bool, kind: Any, parts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Against float64; garbage past the last offset; bit-equal repeats; the expected kernel."""
    taken: list[str] = []
    for name in ("gluon_forward", "triton_forward"):
        real = getattr(launch_epilogue, name)
        monkeypatch.setattr(launch_epilogue, name, lambda *a, n=name, r=real: (taken.append(n), r(*a)))
    x, offsets = make(heads, width, rows, dtype)
    used = int(offsets[-1])
    exact = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in x.items()}
    truth = run(exact, offsets, kind, parts)
    with torch.no_grad():
        for n in ("q", "residual"):
            x[n][used:] = float("nan")
    got = run(x, offsets, kind, parts)
    if torch.cuda.get_device_capability() == (9, 0):
        assert taken == ["gluon_forward" if gluon else "triton_forward"]
    bound = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3, torch.float32: 2e-3}[dtype]
    for name, g, t in zip(("y", "q", "k", "v", *parts), got, truth, strict=True):
        assert g.isfinite().all(), name
        error = float((g.detach().double() - t.detach()).norm() / t.detach().norm())
        assert error < bound, f"{name}: {error:.1e}"
    assert all(torch.equal(a, b) for a, b in zip(got, run(x, offsets, kind, parts), strict=True))


def test_schedule_and_compile_j7() -> None:
    """A schedule built before, under torch.compile with another total: equal to eager, one graph."""
    compiled = torch.compile(run, fullgraph=False, dynamic=True)
    for tail in (0, 33):
        x, offsets = make(4, 128, 256, torch.bfloat16, tail)
        schedule = TileSchedule.build(offsets, total_q=x["q"].shape[0], rows_k=256)
        eager = run(x, offsets, "rms", PARTS[:2], schedule=schedule)
        assert torch.equal(eager[0], run(x, offsets, "rms", PARTS[:2])[0])
        for a, b in zip(eager, compiled(x, offsets, "rms", PARTS[:2], schedule=schedule), strict=True):
            assert torch.equal(a, b)
