"""Starts GDPA with a norm at its end: Gluon where it fits, plain Triton for the rest. Everything from host values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from gemworks.jagged._triton.quick import quick
from gemworks.jagged.dispatch import num_multiprocessors
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.attention_core import launch, table
from gemworks.jagged.ops.attention_core.launch import Problem
from gemworks.jagged.ops.gdpa.kernel_epilogue import gdpa_norm_kernel as _plain
from torch import Tensor

gdpa_norm_kernel: Any = quick(_plain)
NORM_VALUES = 4096  # of the rows that are normalised at a time in plain Triton


@dataclass(frozen=True)
class NormArgs:
    """What follows the products: h = o + residual; y = norm(h) weight + bias + add."""

    residual: Tensor | None
    add: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    center: bool

    def tensors(self, unused: Tensor) -> tuple[list[Tensor], list[int]]:
        """(residual, add, weight, bias), heads side by side, and the strides of the rows of the first two."""
        rows = [unused if x is None else _flat_rows(x) for x in (self.residual, self.add)]
        columns = [unused if x is None else x.contiguous() for x in (self.weight, self.bias)]
        return rows + columns, [x.stride(0) for x in rows]

    @property
    def constants(self) -> dict[str, bool]:
        return {
            "CENTER": self.center,
            "HAS_RESIDUAL": self.residual is not None,
            "HAS_ADD": self.add is not None,
            "HAS_WEIGHT": self.weight is not None,
            "HAS_BIAS": self.bias is not None,
        }


@dataclass(frozen=True)
class GluonNormConfig:
    """Key tiles of `block` rows, `stages` of them in flight; registers per thread of a consumer and of the norm's."""

    block: int = 64
    stages: int = 4
    resident_stages: int = 2
    registers: int = 192
    norm_registers: int = 96


def gluon_refusal(p: Problem) -> str | None:
    """Why plain Triton has to do it, or None."""
    shape, width = p.shape, p.q.shape[1] * p.v.shape[2]
    refusal = table.gluon_refusal("forward", shape, p.architecture)
    if refusal is not None:
        return refusal
    if shape.head_dim != 128 or shape.grouped:
        return "gluon's norm takes heads of 128, as many of k as of q"
    if width != next_power_of_two(width) or not 256 <= width <= 1024:
        return f"gluon's norm takes rows of 256, 512 or 1024 columns, not {width}"
    return None


def forward(p: Problem, args: NormArgs, *, config: GluonNormConfig | None = None) -> tuple[Tensor, Tensor]:
    """(y, h), both [T, N, V] and contiguous."""
    config = config or GluonNormConfig()
    y, h = (torch.empty(p.rows_q, p.q.shape[1], p.v.shape[2], dtype=p.q.dtype, device=p.q.device) for _ in range(2))
    if p.rows_q == 0:
        return y, h
    if gluon_refusal(p) is None:
        gluon_forward(p, args, y, h, config)
    else:
        triton_forward(p, args, y, h, table.triton_config("forward", p.shape))
    return y, h


@cache
def _hopper() -> Any:
    from gemworks.jagged.ops.gdpa.kernel_epilogue_hopper import gdpa_norm_hopper_kernel

    return quick(gdpa_norm_hopper_kernel)


def gluon_forward(p: Problem, args: NormArgs, y: Tensor, h: Tensor, config: GluonNormConfig) -> None:
    from gemworks.jagged.ops.attention_core import launch_hopper

    sample, row, count = p.tiles("q128")
    others, strides = args.tensors(p.q)
    q, k, v = (launch_hopper.streamable(x) for x in (p.q, p.k, p.v))
    _hopper()[(num_multiprocessors(q.device),)](
        launch_hopper.ragged(q, 64), *(launch_hopper.ragged(x, config.block) for x in (k, v)), h, y, *others,
        p.schedule.bounds[1, -1:], p.schedule.bounds[0], p.schedule.bounds[3], sample, row, count, p.rule.scale,
        args.eps, *strides,
        ACT=p.rule.activation, HEADS=q.shape[1], H=q.shape[2], BN=config.block, STAGES=config.stages,
        QSTAGES=config.resident_stages, FOLD=launch_hopper.folds(p.rule.activation, p.rule.scale, q.dtype),
        CONSUMER_REGS=config.registers, FINISHER_REGS=config.norm_registers, num_warps=4, **args.constants,
    )  # fmt: skip


def triton_forward(p: Problem, args: NormArgs, y: Tensor, h: Tensor, config: table.TritonConfig) -> None:
    sample, row, count = p.tiles(config.height("forward"))
    others, strides = args.tensors(p.q)
    wanted = ("ACT", "GROUP", "H", "V", "BH", "BV", "BM", "BN", "PRECISION", "num_warps", "num_stages")
    constants = {name: value for name, value in launch.constants_of(p, config).items() if name in wanted}
    width = next_power_of_two(p.q.shape[1] * p.v.shape[2])
    gdpa_norm_kernel[(sample.shape[0],)](
        p.q, p.k, p.v, h, y, *others, p.schedule.bounds[1, -1:], p.schedule.bounds[0], p.schedule.bounds[3],
        sample, row, count, p.rule.scale, args.eps, *launch.strides_of(p.q, p.k, p.v), *strides,
        HEADS=p.q.shape[1], BW=width, C=max(1, min(config.block_m, NORM_VALUES // width)),
        **constants, **args.constants,
    )  # fmt: skip


def _flat_rows(x: Tensor) -> Tensor:
    """[T, N, V] as rows of N * V neighbouring values on 16-byte boundaries; copied only if they are not."""
    ok = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if ok or x.shape[0] == 0 else x.clone(memory_format=torch.contiguous_format)
