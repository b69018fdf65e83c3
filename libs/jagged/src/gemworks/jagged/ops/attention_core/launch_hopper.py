"""Starts the Gluon kernels (sm_90): descriptors of the host, one persistent program per multiprocessor."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from gemworks.jagged._triton.quick import quick
from gemworks.jagged.dispatch import num_multiprocessors
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.attention_core.kernel_backward import zero_queries_without_keys_kernel as _zero
from gemworks.jagged.ops.attention_core.kernel_backward_fused_hopper import backward_fused_hopper_kernel as _fused
from gemworks.jagged.ops.attention_core.kernel_backward_pair_hopper import backward_hopper_kernel as _pair
from gemworks.jagged.ops.attention_core.kernel_forward_hopper import forward_hopper_kernel as _forward
from gemworks.jagged.ops.attention_core.launch import NO_ARGUMENTS, NO_CONSTANTS, NormRope, Problem, limits
from gemworks.jagged.ops.attention_core.table import FusedConfig, GluonConfig, Step
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Scales between which every folded coefficient is a normal float32; others are multiplied score by score.
FOLD_RANGE = (1e-3, 1e3)
_MANY = 0x7FFF0000
# Triton's kernels are not callables to a type checker.
forward_hopper_kernel: Any = quick(_forward)
backward_hopper_kernel: Any = quick(_pair)
backward_fused_hopper_kernel: Any = quick(_fused)
zero_queries_without_keys_kernel: Any = quick(_zero)
Pair = tuple[Tensor, Tensor]
_GL_DTYPES: dict[torch.dtype, Any] = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def _grid(x: Tensor, config: GluonConfig) -> tuple[int]:
    return (num_multiprocessors(x.device) * config.programs,)


def streamable(x: Tensor) -> Tensor:
    """`x` [T, N, H] with rows and heads on 16-byte boundaries; copied only if it is not."""
    rows, heads, columns = x.stride()
    ok = columns == 1 and heads % 8 == 0 and rows % 8 == 0 and min(heads, rows) > 0 and x.data_ptr() % 16 == 0
    return x if ok or x.shape[0] == 0 else x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=64)
def _layout(rows: int, width: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, 1, width], _GL_DTYPES[dtype])


def ragged(x: Tensor, rows: int) -> TensorDescriptor:
    """Of streamable `x` [T, N, H], for boxes of `rows` rows of one head that end where their sequence ends.

    One descriptor for all sequences. A box is cut off at the end of a dimension, and rows end at 2^30: for L rows at b,
    row r is at 2^30 - L + r of that dimension, b + L in one of the same stride, and 2^30 in one of stride 2^34 - s. The
    sum is (b + r) s + 2^64 elements, and addresses wrap (as in `triton.tools.ragged_tma`).
    """
    if x.shape[0] == 0:  # nothing will be loaded, but a descriptor wants an address
        x = x.new_empty(1, *x.shape[1:])
    _total, heads, width = x.shape
    shape, strides = [_MANY, _MANY, 1 << 30, heads, width], [(1 << 34) - x.stride(0), x.stride(0), *x.stride()]
    return TensorDescriptor(x, shape, strides, [1, 1, rows, 1, width], _layout(rows, width, x.dtype))


def folds(activation: str, scale: float, dtype: torch.dtype) -> bool:
    """Whether the scale goes into the gate's coefficients and the output. float16 weights could overflow without it."""
    low, high = FOLD_RANGE
    return activation == "fast_gelu" and dtype == torch.bfloat16 and low <= scale <= high


def forward(p: Problem, out: Tensor, lse: Tensor, config: GluonConfig, *, fold: bool | None = None) -> None:
    sample, row, count = p.tiles(config.height("forward"))
    q, k, v, bounds = streamable(p.q), streamable(p.k), streamable(p.v), p.schedule.bounds
    if fold is None:
        fold = folds(p.rule.activation, p.rule.scale, q.dtype)
    masked = not p.rule.mask.is_full
    forward_hopper_kernel[_grid(q, config)](
        ragged(q, 64), ragged(k, config.block), ragged(v, config.block), out, lse, bounds[0], bounds[3],
        sample, row, count, *limits(p.rule), out.stride(0), out.stride(1), lse.stride(0),
        ACT=p.rule.activation, HEADS=q.shape[1], GROUP_HEADS=q.shape[1] // k.shape[1], H=q.shape[2], HV=v.shape[2],
        BN=config.block, STAGES=config.stages, QSTAGES=config.resident_stages, GROUPS=config.groups,
        SHARED=p.rule.shared_query, FOLD=fold, ONE_RELEASE=config.one_release,
        MASKED=masked, BOTTOM_RIGHT=p.rule.mask.align == "bottom_right", CHAINED=config.chained and not masked,
        IN_TURN=config.in_turn and not masked, CONSUMER_REGS=config.registers,
        num_warps=4, maxnreg=config.max_registers,
    )  # fmt: skip


def backward_kv(
    p: Problem, d_out: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, config: GluonConfig
) -> None:
    bounds = p.schedule.bounds
    _backward(p, "backward_kv", (p.k, p.v), (p.q, d_out), lse, delta, (bounds[2], bounds[1]), (dv, dk), config)


def backward_q(p: Problem, d_out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, config: GluonConfig) -> None:
    bounds = p.schedule.bounds
    _backward(p, "backward_q", (p.q, d_out), (p.k, p.v), lse, delta, (bounds[0], bounds[3]), (dq, dq), config)


def _backward(
    p: Problem, step: Step, resident: Pair, streamed: Pair, lse: Tensor, delta: Tensor, bounds: Pair, results: Pair,
    config: GluonConfig,
) -> None:  # fmt: skip
    sample, row, count = p.tiles(config.height(step))
    a, b, c, d = (streamable(x) for x in (*resident, *streamed))
    is_kv = step == "backward_kv"
    backward_hopper_kernel[_grid(a, config)](
        ragged(a, 64), ragged(b, 64), ragged(c, config.block), ragged(d, config.block), *results, lse, delta, *bounds,
        sample, row, count, p.rule.scale, *(s for x in results for s in (x.stride(0), x.stride(1))), lse.stride(0),
        KV=is_kv, ACT=p.rule.activation, HEADS=a.shape[1], H=a.shape[2],
        BC=config.block, STAGES=config.stages, SHARED=p.rule.shared_query, RSTAGES=config.resident_stages,
        GROUPS=config.groups, CONSUMER_REGS=config.registers,
        num_warps=4, maxnreg=config.max_registers,
    )  # fmt: skip


def backward_fused(
    p: Problem, d_out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, config: FusedConfig,
    keys: NormRope | None = None,
) -> None:  # fmt: skip
    """Fills dq (contiguous), dk and dv. Scratch: 512 bytes per query row and head, 4 bytes per 64 of them.

    keys: what made k; dk is then the gradient of what it was made of.
    """
    shared = p.rule.shared_query
    sample, row, count = p.tiles("q128" if shared else config.height)
    num_sequences, tiles_per_unit = (p.rows_q // p.q.shape[0], -(-p.q.shape[0] // 128)) if shared else (0, 0)
    q, k, v, d_out, bounds = streamable(p.q), streamable(p.k), streamable(p.v), streamable(d_out), p.schedule.bounds
    heads, width, num_bounds = q.shape[1], q.shape[2], bounds.shape[1]
    num_tiles = (p.rows_q // 64 + num_bounds) * heads
    # The counter that hands out key tiles, then one per query tile, on a 16-byte boundary.
    turn = torch.zeros(4 + num_tiles, dtype=torch.int32, device=q.device)
    mask = {"MASKED": not p.rule.mask.is_full, "BOTTOM_RIGHT": p.rule.mask.align == "bottom_right"}
    in_one_tile = p.rows_k is not None and p.rows_k <= 128
    scratch = torch.empty(1 if in_one_tile else num_tiles * 64 * width, dtype=torch.float32, device=q.device)
    backward_fused_hopper_kernel[(num_multiprocessors(q.device),)](
        *(ragged(x, 64) for x in (q, k, v, d_out)), dq, dk, dv, scratch, turn[4:], turn, lse, delta,
        bounds[2], bounds[1], sample, row, count, tiles_per_unit, num_sequences, *limits(p.rule),
        *(s for x in (dq, dk, dv) for s in (x.stride(0), x.stride(1))), lse.stride(0),
        *(NO_ARGUMENTS if keys is None else keys.arguments()),
        ACT=p.rule.activation, HEADS=heads, H=width, STAGES=config.stages, KSTAGES=config.key_stages,
        SHARED=shared, EARLY=config.early, AHEAD=config.ahead, **mask,
        **(NO_CONSTANTS if keys is None else keys.constants()),
        CONSUMER_REGS=config.registers, num_warps=4,
    )  # fmt: skip
    q_sample, q_row, q_count = p.tiles("q128")
    zero_queries_without_keys_kernel[(q_sample.shape[0],)](
        dq, bounds[0], bounds[3], q_sample, q_row, q_count, *limits(p.rule)[1:], dq.stride(0),
        WIDTH=heads * width, BW=next_power_of_two(heads * width), ROWS=128, BR=8, **mask, num_warps=4,
    )  # fmt: skip
