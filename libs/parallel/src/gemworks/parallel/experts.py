"""Ensemble expert parallelism: every expert sees every sample of its group, and their outputs are summed.

The experts are the members of a hierarchical ensemble (DHEN, arXiv 2203.11014), so there is no router and no all-to-all
(Engineering at Meta, 2026-08-03):

    forward   all-gather activations -> local experts on the joint batch -> reduce-scatter outputs (a sum)
    backward  all-gather output gradients -> local backward -> reduce-scatter input gradients

Letters: R rows of this rank (samples, or jagged tokens), J rows of the joint batch, n ranks of the expert group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from gemworks.parallel._check import one_of, whole
from torch import Tensor, nn


class LocalExperts(nn.Module):
    """The experts that live on this rank, summed with learned scalar gates; shard this module with FSDP.

    Modules and gates are keyed by the expert's index in the whole ensemble, so that names in a checkpoint are unique
    over ranks and any other spread of the experts can load it.

    Args:
        experts: index -> module [J, ...] -> [J, ...], all of one output shape.
    """

    def __init__(self, experts: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(i): m for i, m in experts.items()})
        self.gates = nn.ParameterDict({str(i): nn.Parameter(torch.ones(1)) for i in experts})

    def forward(self, x: Tensor) -> Tensor:
        found = {i: self.gates[i].to(x.dtype) * expert(x) for i, expert in self.experts.items()}
        if len({y.shape for y in found.values()}) > 1:
            raise ValueError(
                f"experts: got outputs { ({i: tuple(y.shape) for i, y in found.items()}) }, expected one shape"
            )
        return torch.stack(list(found.values())).sum(0)


@dataclass
class _Transfer:
    """One gather or scatter in flight, in both directions of autograd."""

    group: dist.ProcessGroup | None
    rows: list[int]  # of every rank of the group
    rank: int
    forward_scale: float = 1.0
    backward_scale: float = 1.0
    buffer: Tensor | None = None
    work: Any = None
    backward_work: Any = None
    keep: list[Tensor] = field(default_factory=list)

    # A work holds the tensor that it wrote. That tensor's graph holds this transfer: kept, the work would close a cycle
    # through C++, which no garbage collector sees, and each step's buffers would stay for good.

    def finish(self) -> None:
        """Waits for what forward launched, and lets go of it."""
        work, self.work = self.work, None
        work.wait()

    def finish_backward(self) -> None:
        """Waits for what backward launched, and lets go of it."""
        work, self.backward_work = self.backward_work, None
        work.wait()

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        return max(self.rows)

    def all_gather(self, x: Tensor) -> tuple[Tensor, Any]:
        """Launch; the result [n * longest, ...] is ready after `wait`."""
        mine = _pad_rows(x, self.longest)
        out = x.new_empty(self.size * self.longest, *x.shape[1:])
        work = dist.all_gather_into_tensor(out, mine, group=self.group, async_op=True)
        self.keep = [mine, out]
        return out, work

    def reduce_scatter(self, y: Tensor) -> tuple[Tensor, Any]:
        """Launch; the result [longest, ...] is ready after `wait`."""
        padded = self.spread(y)
        out = y.new_empty(self.longest, *y.shape[1:])
        work = dist.reduce_scatter_tensor(out, padded, group=self.group, async_op=True)
        self.keep = [padded, out]
        return out, work

    def join(self, gathered: Tensor) -> Tensor:
        """[n * longest, ...] -> [J, ...]: without the padding."""
        if min(self.rows) == self.longest:
            return gathered
        return torch.cat([gathered[i * self.longest : i * self.longest + r] for i, r in enumerate(self.rows)])

    def spread(self, joint: Tensor) -> Tensor:
        """[J, ...] -> [n * longest, ...]: zeros where a rank has fewer rows."""
        if min(self.rows) == self.longest:
            return joint.contiguous()
        out = joint.new_zeros(self.size * self.longest, *joint.shape[1:])
        start = 0
        for i, r in enumerate(self.rows):
            out[i * self.longest : i * self.longest + r] = joint[start : start + r]
            start += r
        return out


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x.contiguous()
    out = x.new_zeros(rows, *x.shape[1:])
    out[: x.shape[0]] = x
    return out


# Each transfer is two autograd nodes, launch and wait. What runs between them in forward runs between their mirrors in
# backward, so neighbouring compute hides the communication both ways.


class _LaunchGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, t: _Transfer) -> Tensor:  # type: ignore[override]
        ctx.t = t
        t.buffer, t.work = t.all_gather(x.detach())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        t = ctx.t
        t.finish_backward()
        t.keep = []
        return (dx if t.backward_scale == 1.0 else dx * t.backward_scale), None


class _WaitGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, t: _Transfer) -> Tensor:  # type: ignore[override]
        ctx.t = t
        t.finish()
        assert t.buffer is not None
        joint = t.join(t.buffer)
        t.buffer, t.keep = None, []
        return joint

    @staticmethod
    def backward(ctx: Any, d_joint: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        t = ctx.t
        out, t.backward_work = t.reduce_scatter(d_joint)
        return out[: t.rows[t.rank]], None


class _LaunchScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, t: _Transfer) -> Tensor:  # type: ignore[override]
        ctx.t = t
        t.buffer, t.work = t.reduce_scatter(y.detach())
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        t = ctx.t
        t.finish_backward()
        assert t.buffer is not None
        joint = t.join(t.buffer)
        t.buffer, t.keep = None, []
        return joint, None


class _WaitScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, t: _Transfer) -> Tensor:  # type: ignore[override]
        ctx.t, ctx.joint_shape = t, token.shape
        t.finish()
        assert t.buffer is not None
        mine = t.buffer[: t.rows[t.rank]]
        t.buffer, t.keep = None, []
        return mine

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        t = ctx.t
        t.buffer, t.backward_work = t.all_gather(dy if t.backward_scale == 1.0 else dy * t.backward_scale)
        # A stand-in of the joint shape: the launch node waits and puts the gathered gradient in its place.
        return dy.new_empty(()).expand(ctx.joint_shape), None


@dataclass
class Gathering:
    """Activations on their way to the experts; made by `EnsembleExperts.start`."""

    token: Tensor
    transfer: _Transfer | None


@dataclass
class Scattering:
    """Outputs on their way back; made by `EnsembleExperts.run`."""

    token: Tensor
    transfer: _Transfer | None


class ExpertExchange(nn.Module):
    """What surrounds experts that are spread over a group of ranks; a subclass holds the experts.

    `forward(x)` is `finish(run(start(x)))`. Call the three apart to hide communication: what you compute between
    `start` and `run` overlaps the gather, between `run` and `finish` the scatter, and the same in backward.

    Ranks may bring different numbers of rows, or none. The gather is padded to the longest rank, so what travels is n
    times the longest; row counts are exchanged by a small all-gather and one host read unless the caller knows them.

    Args:
        num_experts: in all; a multiple of the group's size. Experts `rank * k ... rank * k + k - 1` live here.
        group: the expert axis' process group; None for one rank.
        gradient: "mean": weight gradients are scaled so that averaging them over the other ranks' copies gives the
            mean over all ranks of the world, as for dense weights; "sum": the plain sum over the joint batch.

    Raises:
        ValueError: `num_experts` is not a multiple of the group's size.

    Attributes:
        size, rank: of the group, and in it.
        indices: of the experts that live here.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup | None = None,
        *,
        gradient: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__()
        whole("num_experts", num_experts)
        one_of("gradient", gradient, ("mean", "sum"))
        size = 1 if group is None else dist.get_world_size(group)
        if num_experts % size:
            near = sorted({max(size, num_experts // size * size), (num_experts // size + 1) * size})
            raise ValueError(
                f"num_experts: got {num_experts}, expected a multiple of the {size} ranks of the expert group; "
                f"use {' or '.join(map(str, near))} experts, or another group"
            )
        self.group = group
        self.size = size
        self.rank = 0 if group is None else dist.get_rank(group)
        self.gradient = gradient
        k = num_experts // size
        self.indices = range(self.rank * k, (self.rank + 1) * k)

    def experts_here(self) -> nn.Module:
        """The module of this rank's experts, [J, ...] -> [J, ...], the sum over them; FSDP shards it as a unit."""
        raise NotImplementedError

    def start(self, x: Tensor, rows: Sequence[int] | None = None) -> Gathering:
        """Launch the gather.

        Args:
            x: [R, ...]; R may differ between ranks and be 0.
            rows: R of every rank of the group, if known on the host.

        Raises:
            ValueError: `rows` does not agree with x.
        """
        if self.group is None:
            return Gathering(x, None)
        if rows is None:
            mine = torch.tensor([x.shape[0]], device=x.device)
            counts = torch.empty(self.size, dtype=torch.int64, device=x.device)
            dist.all_gather_into_tensor(counts, mine, group=self.group)
            rows = counts.tolist()
        if len(rows) != self.size or rows[self.rank] != x.shape[0] or min(rows) < 0:
            raise ValueError(
                f"rows: got {list(rows)}, expected {self.size} counts with {x.shape[0]}, x's rows, at place {self.rank}"
            )
        scale = float(self.size) if self.gradient == "mean" else 1.0
        t = _Transfer(self.group, list(rows), self.rank, backward_scale=scale)
        return Gathering(_LaunchGather.apply(x, t), t)  # type: ignore[arg-type]

    def run(self, gathering: Gathering, *more: Any) -> Scattering:
        """Run this rank's experts on the joint batch, and `more`, and launch the scatter."""
        if gathering.transfer is None:
            return Scattering(self.experts_here()(gathering.token, *more), None)
        joint = _WaitGather.apply(gathering.token, gathering.transfer)
        y = self.experts_here()(joint, *more)
        scale = 1.0 / self.size if self.gradient == "mean" else 1.0
        t = _Transfer(self.group, gathering.transfer.rows, self.rank, backward_scale=scale)
        return Scattering(_LaunchScatter.apply(y, t), t)  # type: ignore[arg-type]

    def finish(self, scattering: Scattering) -> Tensor:
        """Wait for the outputs: [R, ...]."""
        if scattering.transfer is None:
            return scattering.token
        return _WaitScatter.apply(scattering.token, scattering.transfer)  # type: ignore[return-value]

    def forward(self, x: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        return self.finish(self.run(self.start(x, rows)))


class EnsembleExperts(ExpertExchange):
    """Experts spread over a group of ranks, their outputs summed with learned scalar gates; see `ExpertExchange`.

    Args:
        make_expert: expert index -> module [J, ...] -> [J, ...]; called for this rank's experts only. Seed by the
            index.
        num_experts, group, gradient: as for `ExpertExchange`.

    Raises:
        ValueError: `num_experts` is not a multiple of the group's size.

    Example:
        >>> experts = EnsembleExperts(lambda i: nn.Identity(), 3)
        >>> experts(torch.ones(2, 1)).tolist()
        [[3.0], [3.0]]
    """

    def __init__(
        self,
        make_expert: Callable[[int], nn.Module],
        num_experts: int,
        group: dist.ProcessGroup | None = None,
        *,
        gradient: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__(num_experts, group, gradient=gradient)
        made = {i: make_expert(i) for i in self.indices}
        if strange := {i: type(m).__name__ for i, m in made.items() if not isinstance(m, nn.Module)}:
            raise ValueError(f"make_expert: got {strange}, expected a module for each index")
        self.local = LocalExperts(made)

    def experts_here(self) -> nn.Module:
        return self.local
