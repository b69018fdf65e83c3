"""Starts the kernels that multiply codes out as they load them. Imported on the first call on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gemworks.jagged._triton.quick import quick
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.attention_core.launch import (
    Problem,
    compute_delta,
    limits,
    products_precision,
    rowwise,
    strides_of,
)
from gemworks.jagged.ops.attention_fp8.kernel_codes import backward_kv_codes_kernel as _backward_kv
from gemworks.jagged.ops.attention_fp8.kernel_codes import backward_q_codes_kernel as _backward_q
from gemworks.jagged.ops.attention_fp8.kernel_codes import forward_codes_kernel as _forward
from gemworks.jagged.ops.attention_fp8.reference import scale_block
from torch import Tensor

# Triton's kernels are not callables to a type checker.
forward_codes_kernel: Any = quick(_forward)
backward_kv_codes_kernel: Any = quick(_backward_kv)
backward_q_codes_kernel: Any = quick(_backward_q)


@dataclass(frozen=True)
class Codes:
    """One call: q, k and v of the problem are codes, or values where their scales are None.

    Attributes:
        problem: on codes or values as they are stored; its rule says what is rounded.
        scales: of q, k and v.
        dtype: of the products and of the results.
    """

    problem: Problem
    scales: tuple[Tensor | None, Tensor | None, Tensor | None]
    dtype: torch.dtype

    def config(self, step: table.Step) -> table.TritonConfig:
        p = self.problem
        return table.codes_config(step, p.rule.activation, self.dtype, max(p.q.shape[2], p.v.shape[2]))

    def operands(self) -> tuple[list[Tensor], list[int]]:
        """q, k, v and scales (any tensor where there are none), and the strides of all six."""
        p = self.problem
        tensors = [p.q, p.k, p.v, *(p.q if s is None else s.contiguous() for s in self.scales)]
        return tensors, strides_of(*tensors)

    def constants(self, config: table.TritonConfig) -> dict[str, Any]:
        p = self.problem
        h, v = p.q.shape[2], p.v.shape[2]
        of_q, _, of_v = self.scales
        return {
            "ACT": p.rule.activation,
            "MASKED": not p.rule.mask.is_full,
            "BOTTOM_RIGHT": p.rule.mask.align == "bottom_right",
            "GROUP": p.q.shape[1] // p.k.shape[1],
            "H": h,
            "V": v,
            "BH": max(16, next_power_of_two(h)),
            "BV": max(16, next_power_of_two(v)),
            "BM": config.block_m,
            "BN": config.block_n,
            "PRECISION": products_precision(self.dtype),
            "QR": 0 if of_q is None else scale_block("q", p.q, of_q)[0],
            "VR": 0 if of_v is None else scale_block("v", p.v, of_v)[0],
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }


def forward(c: Codes) -> tuple[Tensor, Tensor]:
    """(output [T, N, V] in `dtype`, log-sum-exp [N, T], or [N, 0] for an activation)."""
    p = c.problem
    heads, device = p.q.shape[1], p.q.device
    out = torch.empty(p.rows_q, heads, p.v.shape[2], dtype=c.dtype, device=device)
    lse = torch.empty(heads, p.rows_q if p.rule.is_softmax else 0, dtype=torch.float32, device=device)
    if p.rows_q == 0 or p.k.shape[0] == 0:
        return out.zero_(), lse.fill_(float("inf"))
    config = c.config("forward")
    sample, row, count = p.tiles(config.height("forward"))
    tensors, strides = c.operands()
    bounds = p.schedule.bounds
    forward_codes_kernel[(sample.shape[0] * heads,)](
        *tensors, out, lse, bounds[0], bounds[3], sample, row, count, *limits(p.rule),
        *strides, *strides_of(out), lse.stride(0),
        HEADS=heads, ROUND_P=p.rule.round_p, **c.constants(config),
    )  # fmt: skip
    return out, lse


def backward(c: Codes, d_out: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in `dtype`."""
    p = c.problem
    dq, dk, dv = (torch.empty(x.shape, dtype=c.dtype, device=x.device) for x in (p.q, p.k, p.v))
    if p.rows_q == 0 or p.k.shape[0] == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    d_out = rowwise(d_out)
    if p.rule.is_softmax:
        assert out is not None
        assert lse is not None
        delta = compute_delta(rowwise(out), d_out)
    else:  # not read, but a pointer has to be given
        lse = delta = torch.empty(p.q.shape[1], 1, dtype=torch.float32, device=p.q.device)
    tensors, strides = c.operands()
    bounds, rule = p.schedule.bounds, p.rule
    config = c.config("backward_kv")
    sample, row, count = p.tiles(config.height("backward_kv"))
    heads = p.k.shape[1]
    backward_kv_codes_kernel[(sample.shape[0] * heads,)](
        *tensors, d_out, lse, delta, dk, dv, bounds[1], bounds[2], sample, row, count, *limits(rule),
        *strides, *strides_of(d_out, dk, dv), lse.stride(0),
        HEADS_K=heads, ROUND_P=rule.round_p, ROUND_DS=rule.round_ds, **c.constants(config),
    )  # fmt: skip
    config = c.config("backward_q")
    sample, row, count = p.tiles(config.height("backward_q"))
    heads = p.q.shape[1]
    backward_q_codes_kernel[(sample.shape[0] * heads,)](
        *tensors, d_out, lse, delta, dq, bounds[0], bounds[3], sample, row, count, *limits(rule),
        *strides, *strides_of(d_out, dq), lse.stride(0),
        HEADS=heads, ROUND_DS=rule.round_ds, **c.constants(config),
    )  # fmt: skip
    return dq, dk, dv
