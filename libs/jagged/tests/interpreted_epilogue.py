"""GDPA with a norm at its end in plain Triton, under the interpreter, against the definition in float64.

Run by test_jagged_interpret. Buffers a kernel fills are poisoned with NaN first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import NormEpilogue, gdpa, offsets_from_lengths
from gemworks.jagged._dense import Mask
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.attention_core.launch import Problem
from gemworks.jagged.ops.attention_core.reference import Rule
from gemworks.jagged.ops.gdpa import launch_epilogue
from gemworks.jagged.ops.norms.launch import norm_backward
from gemworks.jagged.schedule import TileSchedule
from torch import Tensor

pytestmark = pytest.mark.interpret
LENGTHS, ROWS, NAN = [0, 1, 31, 33, 5], 19, float("nan")
VARIANTS = [
    ("rms", ("residual", "add"), 2, 2, 16, 16, torch.float32),
    ("layer", ("residual", "add", "weight", "bias"), 3, 1, 24, 16, torch.float32),
    ("layer", (), 1, 1, 32, 48, torch.float16),
    ("rms", ("add", "weight"), 2, 2, 16, 16, torch.float16),
]


@pytest.mark.parametrize(("kind", "parts", "heads", "key_heads", "width", "value_width", "dtype"), VARIANTS)
def test_twin_equals_definition(
    kind: Any, parts: tuple[str, ...], heads: int, key_heads: int, width: int, value_width: int, dtype: torch.dtype
) -> None:
    """Values, and the norm's backward with garbage past the last offset."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    used, tail, batch = sum(LENGTHS), 3, len(LENGTHS)
    offsets, total = offsets_from_lengths(torch.tensor(LENGTHS)), sum(LENGTHS) + tail
    q, k, v = (
        random(total, heads, width),
        random(batch, ROWS, key_heads, width),
        random(batch, ROWS, key_heads, value_width),
    )
    rest = {n: random(total, heads, value_width) for n in ("residual", "add") if n in parts}
    rest |= {n: random(heads * value_width) for n in ("weight", "bias") if n in parts}
    r, a, w, b = (rest.get(n) for n in ("residual", "add", "weight", "bias"))
    e = NormEpilogue(kind, *(None if x is None else x.double() for x in (r, a, w, b)), eps=1e-6)  # pyright: ignore[reportArgumentType]
    settings: Any = {"max_length_q": 33, "scale": 0.3, "activation": "gelu"}
    truth = gdpa(q.double(), k.double(), v.double(), offsets, epilogue=e, **settings)
    for x in (q, *(rest[n] for n in ("residual",) if n in parts)):
        x[used:] = NAN
    schedule = TileSchedule.build(offsets, total_q=total, rows_k=ROWS, heights="")
    problem = Problem(
        q, k.flatten(0, 1), v.flatten(0, 1), Rule(0.3, "gelu", Mask(), False), schedule, ROWS, "sm_90", total, ROWS
    )
    args = launch_epilogue.NormArgs(r, a, w, b, e.eps, kind == "layer")
    y, h = (torch.full((total, heads, value_width), NAN, dtype=dtype) for _ in range(2))
    launch_epilogue.triton_forward(problem, args, y, h, table.TritonConfig(16, 16, 4, 1))
    tolerance: Any = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(y.double(), truth, **tolerance)
    assert not h[used:].any()

    dy = random(total, heads * value_width)
    exact = [h[:used].flatten(1).double().requires_grad_()]
    exact += [rest[n].double().requires_grad_() for n in ("weight", "bias") if n in parts]
    n64 = exact[0] - exact[0].mean(-1, keepdim=True) if kind == "layer" else exact[0]
    n64 = n64 * torch.rsqrt(n64.square().mean(-1, keepdim=True) + e.eps)
    y64 = n64 if "weight" not in parts else n64 * exact[1]
    y64 = y64 if "bias" not in parts else y64 + exact[2]
    expected = torch.autograd.grad(y64, exact, dy[:used].double())
    dy[used:] = NAN
    bias_dtype = dtype if "bias" in parts else None
    got = norm_backward(
        dy, None, h.flatten(1), rest.get("weight"), bias_dtype, eps=e.eps, center=kind == "layer", offsets=offsets
    )
    assert not got[0][used:].any()
    got = [got[0][:used], *(x for x in got[1:] if x.numel())]
    for g, t in zip(got, expected, strict=True):
        torch.testing.assert_close(g.double(), t, rtol=10 * tolerance["rtol"], atol=20 * tolerance["atol"])
