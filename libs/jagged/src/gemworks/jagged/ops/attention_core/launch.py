"""Starts the kernels: plain Triton here, Gluon in launch_hopper.py. Everything is decided from host values.

Imported on the first call on a device (or by a test of the interpreter), never with the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gemworks.jagged._triton.quick import quick
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.attention_core.call import UNBOUNDED
from gemworks.jagged.ops.attention_core.kernel_backward import backward_bias_kernel as _backward_bias
from gemworks.jagged.ops.attention_core.kernel_backward import backward_kv_kernel as _backward_kv
from gemworks.jagged.ops.attention_core.kernel_backward import backward_q_kernel as _backward_q
from gemworks.jagged.ops.attention_core.kernel_backward import delta_kernel as _delta
from gemworks.jagged.ops.attention_core.kernel_forward import forward_kernel as _forward
from gemworks.jagged.ops.attention_core.reference import Rule
from gemworks.jagged.schedule import TileSchedule
from torch import Tensor

# Triton's kernels are not callables to a type checker.
forward_kernel: Any = quick(_forward)
backward_bias_kernel: Any = quick(_backward_bias)
backward_kv_kernel: Any = quick(_backward_kv)
backward_q_kernel: Any = quick(_backward_q)
delta_kernel: Any = quick(_delta)
DELTA_ROWS = 32
BIAS_WORKERS = 256  # programs a head, each with sums of its own: a constant, or repeats on another device would differ


@dataclass(frozen=True)
class Bias:
    """Tables of an additive bias as the kernels read them, one row a query head; see kernel_bias.py.

    Attributes:
        position: float32 [N, 2 R + 1], contiguous, or None.
        time: float32 [N, M], contiguous, or None; M at most 64.
        times_q, times_k: int64, one per row of q and of k; needed by `time`.
        unit: width of the first bucket of time.
    """

    position: Tensor | None
    time: Tensor | None
    times_q: Tensor | None
    times_k: Tensor | None
    unit: int

    @property
    def buckets(self) -> int:
        return 0 if self.time is None else self.time.shape[1]

    @property
    def radius(self) -> int:
        return 0 if self.position is None else self.position.shape[1] // 2


@dataclass(frozen=True)
class NormRope:
    """What made the keys of a call, if their gradient is to leave as that of the rows before: a norm, then a turn.

    Attributes:
        cos, sin: [T, H / 2] of the rows of k, or None if they were not turned.
        scales: float32 [T, M], the norm's factors, a row's side by side; None if they were not normed.
    """

    cos: Tensor | None
    sin: Tensor | None
    scales: Tensor | None

    def arguments(self) -> list[Any]:
        """Of the kernels: both tables, the factors, their stride of rows. What is not read is any of these."""
        there = self.cos if self.scales is None else self.scales
        assert there is not None, "a norm, or a turn, or both"
        cos, sin = (there, there) if self.cos is None or self.sin is None else (self.cos, self.sin)
        return [cos.contiguous(), sin.contiguous(), there, there.stride(0)]

    def constants(self) -> dict[str, bool]:
        return {"NORM": self.scales is not None, "ROPE": self.cos is not None}


NO_ARGUMENTS = [None] * 4  # of `NormRope`, where there is none
NO_CONSTANTS = {"NORM": False, "ROPE": False}


@dataclass(frozen=True)
class Problem:
    """One call: tensors whose last dim is contiguous, the rule, the schedule, and where it runs."""

    q: Tensor
    k: Tensor
    v: Tensor
    rule: Rule
    schedule: TileSchedule
    max_length_k: int
    architecture: str
    rows_q: int  # of the output: those of q, or B * R with a shared query
    rows_k: int | None  # per sequence, for a 4-D k
    bias: Bias | None = None

    @property
    def shape(self) -> table.Shape:
        return table.Shape(
            self.rule.activation,
            self.q.dtype,
            self.q.shape[2],
            self.v.shape[2],
            not self.rule.mask.is_full,
            self.rule.shared_query,
            self.q.shape[1] != self.k.shape[1],
            self.max_length_k,
            self.q.shape[0] if self.rule.shared_query else 0,
            self.bias is not None,
        )

    def config(self, step: table.Step) -> table.Config:
        config = table.choose(step, self.shape, self.architecture)
        assert config is not None, "the caller asks table.choose first"
        return config

    def tiles(self, height: str) -> tuple[Tensor, Tensor, Tensor]:
        """(sequence, first row, number of tiles); built here when the schedule lacks the height."""
        tiles = self.schedule.tiles(height)
        if tiles is None:
            total = self.rows_q if height.startswith("q") else self.k.shape[0]
            tiles = self.schedule.with_height(height, total).tensors[-1]
        sample, row, count = tiles.unbind()
        return sample, row, count


def rowwise(x: Tensor) -> Tensor:
    """`x`, copied only if its last dim is not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _width(head_dim: int) -> int:
    return max(16, next_power_of_two(head_dim))


def products_precision(dtype: torch.dtype) -> str:
    """float32 products follow torch's setting; narrower dtypes ignore it."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" or dtype != torch.float32 else "tf32"


def constants_of(p: Problem, config: table.TritonConfig) -> dict[str, Any]:
    h, v = p.q.shape[2], p.v.shape[2]
    return {
        "ACT": p.rule.activation,
        "MASKED": not p.rule.mask.is_full,
        "BOTTOM_RIGHT": p.rule.mask.align == "bottom_right",
        "SHARED": p.rule.shared_query,
        "GROUP": p.q.shape[1] // p.k.shape[1],
        "H": h,
        "V": v,
        "BH": _width(h),
        "BV": _width(v),
        "BM": config.block_m,
        "BN": config.block_n,
        "PRECISION": products_precision(p.q.dtype),
        "BY_POSITION": p.bias is not None and p.bias.position is not None,
        "BUCKETS": 0 if p.bias is None else p.bias.buckets,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def strides_of(*tensors: Tensor) -> list[int]:
    return [s for x in tensors for s in (x.stride(0), x.stride(1))]


def limits(rule: Rule) -> tuple[float, int, int]:
    return rule.scale, min(rule.mask.left, UNBOUNDED), min(rule.mask.right, UNBOUNDED)


def _bias_arguments(p: Problem) -> list[Any]:
    """Tables, timestamps, radius and unit; any tensor where a kernel does not read one."""
    b = p.bias or Bias(None, None, None, None, 1)
    return [*(p.q if x is None else x for x in (b.position, b.time, b.times_q, b.times_k)), b.radius, b.unit]


def triton_forward(p: Problem, out: Tensor, lse: Tensor, config: table.TritonConfig) -> None:
    sample, row, count = p.tiles(config.height("forward"))
    heads, bounds = p.q.shape[1], p.schedule.bounds
    forward_kernel[(sample.shape[0] * heads,)](
        p.q, p.k, p.v, out, lse, bounds[0], bounds[3], sample, row, count, *limits(p.rule),
        *_bias_arguments(p),
        *strides_of(p.q, p.k, p.v, out), lse.stride(0), HEADS=heads, **constants_of(p, config),
    )  # fmt: skip


def triton_backward_kv(
    p: Problem, d_out: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, config: table.TritonConfig,
    keys: NormRope | None = None,
) -> None:  # fmt: skip
    sample, row, count = p.tiles(config.height("backward_kv"))
    heads, bounds = p.k.shape[1], p.schedule.bounds
    backward_kv_kernel[(sample.shape[0] * heads,)](
        p.q, p.k, p.v, d_out, lse, delta, dk, dv, bounds[1], bounds[2], sample, row, count, *limits(p.rule),
        *_bias_arguments(p),
        *strides_of(p.q, p.k, p.v, d_out, dk, dv), lse.stride(0),
        *(NO_ARGUMENTS if keys is None else keys.arguments()),
        HEADS_K=heads, **constants_of(p, config), **(NO_CONSTANTS if keys is None else keys.constants()),
    )  # fmt: skip


def triton_backward_q(
    p: Problem, d_out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, config: table.TritonConfig
) -> None:
    sample, row, count = p.tiles(config.height("backward_q"))
    heads, bounds = p.q.shape[1], p.schedule.bounds
    backward_q_kernel[(sample.shape[0] * heads,)](
        p.q, p.k, p.v, d_out, lse, delta, dq, bounds[0], bounds[3], sample, row, count, *limits(p.rule),
        *_bias_arguments(p),
        *strides_of(p.q, p.k, p.v, d_out, dq), lse.stride(0), HEADS=heads, **constants_of(p, config),
    )  # fmt: skip


def triton_backward_bias(p: Problem, d_out: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the two tables, float32 [N, 2 R + 1] and [N, M]; [N, 0] for a table that is not there."""
    assert p.bias is not None
    b, heads = p.bias, p.q.shape[1]
    config = table.bias_config(p.shape)
    sample, row, count = p.tiles(config.height("backward_q"))
    by_position, by_time = (
        torch.zeros(BIAS_WORKERS, heads, 0 if x is None else x.shape[1], dtype=torch.float32, device=p.q.device)
        for x in (b.position, b.time)
    )
    constants = constants_of(p, config)
    del constants["ACT"]
    backward_bias_kernel[(BIAS_WORKERS * heads,)](
        p.q, p.k, p.v, d_out, lse, delta, by_position, by_time, p.schedule.bounds[0], p.schedule.bounds[3],
        sample, row, count, *limits(p.rule), *_bias_arguments(p), *strides_of(p.q, p.k, p.v, d_out), lse.stride(0),
        HEADS=heads, BB=next_power_of_two(max(b.buckets, 1)),
        W=next_power_of_two(config.block_m + config.block_n), WORKERS=BIAS_WORKERS, **constants,
    )  # fmt: skip
    return by_position.sum(0), by_time.sum(0)


def compute_delta(out: Tensor, d_out: Tensor) -> Tensor:
    """rowsum(dO * O), float32 [N, T]."""
    total, heads, width = out.shape
    delta = torch.empty(heads, total, dtype=torch.float32, device=out.device)
    delta_kernel[(-(-total // DELTA_ROWS), heads)](
        out, d_out, delta, total, *strides_of(out, d_out), delta.stride(0),
        V=width, BV=_width(width), BT=DELTA_ROWS, num_warps=4,
    )  # fmt: skip
    return delta


def forward(p: Problem) -> tuple[Tensor, Tensor]:
    """(output [rows, N, V], log-sum-exp [N, rows] or [N, 0])."""
    heads = p.q.shape[1]
    out = torch.empty(p.rows_q, heads, p.v.shape[2], dtype=p.q.dtype, device=p.q.device)
    rows = p.rows_q if p.rule.is_softmax else 0
    lse = torch.empty(heads, rows, dtype=torch.float32, device=p.q.device)
    if p.rows_q == 0 or p.k.shape[0] == 0:
        return out.zero_(), lse.fill_(float("inf"))
    config = p.config("forward")
    if isinstance(config, table.GluonConfig):
        from gemworks.jagged.ops.attention_core import launch_hopper

        launch_hopper.forward(p, out, lse, config)
    else:
        triton_forward(p, out, lse, config)
    return out, lse


def backward(
    p: Problem, d_out: Tensor, out: Tensor | None, lse: Tensor | None, into: list[Tensor],
    keys: NormRope | None = None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Fills `into`: dq, dk, dv, shaped and typed as q, k, v; a row's heads and columns lie side by side.

    Args:
        keys: what made k; dk is then the gradient of what it was made of. Only where the table's
            `goes_back_through_norm_rope`.

    Returns:
        With a bias the gradients of its tables, as `triton_backward_bias`.
    """
    dq, dk, dv = into
    if p.rows_q == 0 or p.k.shape[0] == 0:
        for grad in into:
            grad.zero_()
        if p.bias is None:
            return None
        like = (x if x is not None else p.q.new_empty(p.q.shape[1], 0) for x in (p.bias.position, p.bias.time))
        d_position, d_time = (torch.zeros_like(x, dtype=torch.float32) for x in like)
        return d_position, d_time
    d_out = rowwise(d_out)
    if p.rule.is_softmax:
        assert out is not None
        assert lse is not None
        delta = compute_delta(rowwise(out), d_out)
    else:  # not read, but a pointer has to be given
        lse = delta = torch.empty(p.q.shape[1], 1, dtype=torch.float32, device=p.q.device)
    # A shared query collects one share per sequence; the sum over them has a fixed order.
    shares = dq
    if p.rule.shared_query:
        shares = torch.empty(p.rows_q, *p.q.shape[1:], dtype=torch.float32, device=p.q.device)
    fused = table.choose_fused(p.shape, p.architecture)
    if fused is not None:
        from gemworks.jagged.ops.attention_core import launch_hopper

        launch_hopper.backward_fused(p, d_out, lse, delta, shares, dk, dv, fused, keys)
    else:
        _backward_in_two(p, d_out, lse, delta, shares, dk, dv, keys)
    if p.rule.shared_query:
        dq.copy_(shares.view(-1, *p.q.shape).sum(0))
    if p.bias is None:
        return None
    return triton_backward_bias(p, d_out, lse, delta)


def _backward_in_two(
    p: Problem, d_out: Tensor, lse: Tensor, delta: Tensor, shares: Tensor, dk: Tensor, dv: Tensor,
    keys: NormRope | None = None,
) -> None:  # fmt: skip
    config = p.config("backward_kv")
    if isinstance(config, table.GluonConfig):
        assert keys is None, "the pair of Gluon kernels does not go back through k's norm and rotation"
        from gemworks.jagged.ops.attention_core import launch_hopper

        launch_hopper.backward_kv(p, d_out, lse, delta, dk, dv, config)
    else:
        triton_backward_kv(p, d_out, lse, delta, dk, dv, config, keys)
    config = p.config("backward_q")
    if isinstance(config, table.GluonConfig):
        from gemworks.jagged.ops.attention_core import launch_hopper

        launch_hopper.backward_q(p, d_out, lse, delta, shares, config)
    else:
        triton_backward_q(p, d_out, lse, delta, shares, config)
