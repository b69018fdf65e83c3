"""Starts GDPA with a norm at its end: Gluon where it fits, plain Triton for the rest. Everything from host values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from gemworks.jagged._triton.quick import quick
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.attention_core import launch, table
from gemworks.jagged.ops.attention_core.launch import Problem
from gemworks.jagged.ops.gdpa.kernel_norm import gdpa_norm_kernel as _plain
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
    groups: int = 2  # of consumers; three without a norm alone


def gluon_refusal(p: Problem, config: GluonNormConfig) -> str | None:
    """Why plain Triton has to do it, or None."""
    shape, width = p.shape, p.q.shape[1] * p.v.shape[2]
    refusal = table.gluon_refusal("forward", shape, p.architecture)
    if refusal is not None:
        return refusal
    if shape.head_dim != 128 or shape.grouped:
        return "gluon's norm takes heads of 128, as many of k as of q"
    if width != next_power_of_two(width) or not 256 <= width <= 1024:
        return f"gluon's norm takes rows of 256, 512 or 1024 columns, not {width}"
    if not p.rows_k or p.rows_k % config.block:
        return f"gluon's norm takes keys of one length that is a multiple of {config.block}, not {p.rows_k}"
    return None


def forward(p: Problem, args: NormArgs, *, config: GluonNormConfig | None = None) -> tuple[Tensor, Tensor]:
    """(y, h), both [T, N, V] and contiguous."""
    config = config or GluonNormConfig()
    y, h = (torch.empty(p.rows_q, p.q.shape[1], p.v.shape[2], dtype=p.q.dtype, device=p.q.device) for _ in range(2))
    if p.rows_q == 0:
        return y, h
    if gluon_refusal(p, config) is None:
        gluon_forward(p, args, y, h, config)
    else:
        triton_forward(p, args, y, h, table.triton_config("forward", p.shape))
    return y, h


@cache
def _hopper() -> Any:
    from gemworks.jagged.ops.gdpa.kernel_norm_hopper import gdpa_norm_hopper_kernel

    return quick(gdpa_norm_hopper_kernel)


def gluon_forward(p: Problem, args: NormArgs | None, y: Tensor, h: Tensor, config: GluonNormConfig) -> None:
    """Fills y and h; without `args` there is no norm, and h is the output of gdpa."""
    from gemworks.jagged.ops.attention_core import launch_hopper
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    def descriptor(x: Tensor, rows: int) -> Any:
        x = launch_hopper.aligned(x)
        total, heads, width = x.shape
        layout: Any = gl.NVMMASharedLayout.get_default_for([rows, width], launch_hopper._GL_DTYPES[x.dtype])
        flat = x.as_strided((total, heads * width), (x.stride(0), 1))
        return TensorDescriptor(flat, [total, heads * width], [x.stride(0), 1], [rows, width], layout)

    sample, row, count = p.tiles(f"q{64 * config.groups}")
    norm = NormArgs(None, None, None, None, 0.0, False) if args is None else args
    others, strides = norm.tensors(p.q)
    grid = launch_hopper._num_programs(p.q.device.index or 0)
    _hopper()[(grid,)](
        descriptor(p.q, 64), descriptor(p.k, config.block), descriptor(p.v, config.block), h, y, *others,
        p.schedule.bounds[1, -1:], p.schedule.bounds[0], p.schedule.bounds[3], sample, row, count, p.rule.scale,
        norm.eps, *strides,
        ACT=p.rule.activation, HEADS=p.q.shape[1], H=p.q.shape[2], BN=config.block, STAGES=config.stages,
        QSTAGES=config.resident_stages, GROUPS=config.groups,
        FOLD=launch_hopper.folds(p.rule.activation, p.rule.scale, p.q.dtype),
        CONSUMER_REGS=config.registers, FINISHER_REGS=config.norm_registers, NORM=args is not None, num_warps=4,
        **norm.constants,
    )  # fmt: skip


def triton_forward(p: Problem, args: NormArgs, y: Tensor, h: Tensor, config: table.TritonConfig) -> None:
    sample, row, count = p.tiles(config.height("forward"))
    others, strides = args.tensors(p.q)
    wanted = ("ACT", "GROUP", "H", "V", "BH", "BV", "BM", "BN", "PRECISION", "num_warps", "num_stages")
    constants = {name: value for name, value in launch._constants(p, config).items() if name in wanted}
    width = next_power_of_two(p.q.shape[1] * p.v.shape[2])
    gdpa_norm_kernel[(sample.shape[0],)](
        p.q, p.k, p.v, h, y, *others, p.schedule.bounds[1, -1:], p.schedule.bounds[0], p.schedule.bounds[3],
        sample, row, count, p.rule.scale, args.eps, *launch._strides(p.q, p.k, p.v), *strides,
        HEADS=p.q.shape[1], BW=width, C=max(1, min(config.block_m, NORM_VALUES // width)),
        **constants, **args.constants,
    )  # fmt: skip


def _flat_rows(x: Tensor) -> Tensor:
    """[T, N, V] as rows of N * V neighbouring values on 16-byte boundaries; copied only if they are not."""
    ok = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if ok or x.shape[0] == 0 else x.clone(memory_format=torch.contiguous_format)
