"""The benchmark's forward that is specialised by warps, under Triton's interpreter against the plain kernel.

Run by test_jagged_interpret. It is the compiler that specialises: rows of a GPU are checked as they are timed.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from gemworks.jagged.bench.cases import Case, make_inputs
from gemworks.jagged.ops.attention_core import launch, table

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
variants = importlib.import_module("variants")
warp_specialised = importlib.import_module("warp_specialised")

CASES = (
    Case("flash_attention", "self", 5, 130, heads=2, head_dim=16),
    Case("gdpa", "pool", 3, 130, heads=2, head_dim=16, rows=70),
    Case("gdpa", "pffn", 3, 130, heads=2, head_dim=16, rows=70),
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.kind)
@pytest.mark.parametrize("activation", ["softmax", "fast_gelu"])
def test_the_specialised_forward_is_the_plain_one(case: Case, activation: str) -> None:
    x = make_inputs(case, torch.device("cpu"), torch.float32)
    p = variants.problem(x, activation)
    outs = [torch.full_like(x.d_out, float("nan")) for _ in range(2)]
    sums = [torch.full((case.heads, p.rows_q), float("nan")) for _ in range(2)]
    warp_specialised.forward(p, outs[0], sums[0], warp_specialised.SpecialisedConfig(64, 2))
    launch.triton_forward(p, outs[1], sums[1], table.triton_config("forward", p.shape))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)
    if activation == "softmax":
        torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-4)
