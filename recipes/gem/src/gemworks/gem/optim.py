"""Optimizers of the two kinds of parameters and their common schedule.

Dense: AdamW, after the gradients have been seen whole. Embedding tables: fused row-wise Adagrad, one accumulator per
row. Fused means that a table is updated inside backward, as soon as its gradient is there, and that the gradient is
then dropped. `DistributedModelParallel` reads the same declaration off the parameters and gives sharded tables fbgemm's
kernels of the same formula. What must not reach a table is stopped before it, by `model/gate.py`.

The state of both has one form, whatever the number of processes: a table's accumulators are `[num_rows]` by its name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from gemworks.gem.config import OptimizerConfig
from gemworks.gem.model.gem import Gem
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

ADAGRAD_EPS = 1e-8
MIN_PARKED_BYTES = 1 << 16  # smaller moments stay: a copy has its price


def learning_rate_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """What both learning rates are multiplied with in step `step` (from 0): linear warm-up, then constant or half a
    cosine to 0.

    >>> config = OptimizerConfig(warmup_steps=2, decay="cosine")
    >>> [round(learning_rate_factor(s, config, 6), 3) for s in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def declare_table_optimizer(model: Gem, config: OptimizerConfig) -> None:
    """Says that the tables are updated inside backward, and how; whoever shards them afterwards reads it there.

    Raises:
        ValueError: it has been said before; the tables would move twice.
    """
    # torchrec takes seconds to import, and a command line that only prints help must not pay for it
    with warnings.catch_warnings():
        # importing the package uses torch.jit, which torch 2.13 itself has deprecated
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is deprecated", category=DeprecationWarning)
        from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    tables = list(model.sparse_parameters())
    if any(_in_backward(p) for p in tables):
        raise ValueError("model: its tables have optimizers already, expected none; make a new model for new ones")
    _apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": config.sparse_lr, "eps": ADAGRAD_EPS})


class TableOptimizers(Protocol):
    """The optimizers of all tables, which run inside backward."""

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """Each has an "lr"; `begin` makes changes take effect."""
        ...

    def begin(self) -> None: ...

    def accumulators(self) -> dict[str, Tensor]:
        """Sums of squares by the table's parameter name, [num_rows]; of sharded tables `TablePieces`. They share memory
        with the optimizer's own."""
        ...


class SpreadModel(Protocol):
    """How a model has been spread over ranks; see `parallelize.Spread`."""

    @property
    def tables(self) -> TableOptimizers: ...

    @property
    def experts(self) -> frozenset[str]: ...

    @property
    def expert_group(self) -> dist.ProcessGroup | None: ...


class _OwnTables:
    """Of whole tables in this process."""

    def __init__(self, model: Gem) -> None:
        self._by_name: dict[str, tuple[nn.Parameter, Optimizer]] = {
            name: (p, optimizer) for name, p in model.named_parameters() for optimizer in _in_backward(p)
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for _, optimizer in self._by_name.values() for group in optimizer.param_groups]

    def begin(self) -> None:
        pass

    def accumulators(self) -> dict[str, Tensor]:
        return {name: optimizer.state[p]["sum"].view(-1) for name, (p, optimizer) in self._by_name.items()}


class Optimizers:
    """AdamW for `model.dense_parameters()` and fused row-wise Adagrad for `model.sparse_parameters()`.

    A step is `begin(step)`, any number of backwards, `clip()`, and `step_dense()` unless the step is to be skipped.

    Args:
        model: the model; its parameters keep their identity, the tables get hooks.
        config: learning rates, decay, clipping.
        total_steps: where the schedule ends.
        spread: how the model has been spread over ranks; None: it is whole and in this process.

    Raises:
        ValueError: the model has been given optimizers before; its tables would move twice.
    """

    def __init__(
        self, model: Gem, config: OptimizerConfig, total_steps: int, spread: SpreadModel | None = None
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        sparse = {id(p) for p in model.sparse_parameters()}
        self._dense = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in sparse}
        self._expert_names = frozenset() if spread is None else spread.experts
        self._expert_group = None if spread is None else spread.expert_group
        # Parameters of one mesh, or of none, at a time: no operation takes those of several.
        self._parts = _parts(self._dense, self._expert_names)
        groups = []
        for part in self._parts:
            groups += [
                {"params": [p for p in part if p.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [p for p in part if p.ndim < 2], "weight_decay": 0.0},
            ]
        fused = self._fused = _takes_fused(list(self._dense.values()))
        self.dense = AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, fused=fused)
        # A checkpoint is read into existing tensors, so they exist from the start, also for a parameter without a
        # gradient. RowWiseAdagrad makes its own at once.
        for p in self._dense.values():
            self.dense.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device if fused else None),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
            }
        if spread is None:
            declare_table_optimizer(model, config)
        self.tables: TableOptimizers = _OwnTables(model) if spread is None else spread.tables
        self._parking = None
        if config.state_place == "host":
            if spread is not None:
                raise ValueError(
                    "optimizer.state_place: got 'host' in several processes, expected one; set it to 'device'"
                )
            self._parking = _Parking(self.dense)

    def begin(self, step: int) -> None:
        """Sets the learning rates of step `step` and drops the dense gradients; the tables move from here on. State
        that `state_dict` has brought back is parked again."""
        if self._parking is not None:
            self._parking.park()
        factor = learning_rate_factor(step, self.config, self.total_steps)
        self.dense.zero_grad(set_to_none=True)
        for groups, peak in [
            (self.dense.param_groups, self.config.lr),
            (self.tables.param_groups, self.config.sparse_lr),
        ]:
            for group in groups:
                group["lr"] = peak * factor
        self.tables.begin()

    def clip(self) -> Tensor:
        """Clips the dense gradient.

        Returns:
            Its norm before, float32 scalar on the device. Tables are not clipped: Adagrad already divides by the
            gradient's own size, and a fused update is done by now.
        """
        if len(self._parts) == 1 and self._expert_group is None:
            norm = nn.utils.clip_grad_norm_(self._parts[0], self.config.clip_norm)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm
        found = [[p.grad for p in part if p.grad is not None] for part in self._parts]
        squares: list[Tensor] = []
        for part, gradients in zip(self._parts, found, strict=True):
            norm = nn.utils.get_total_norm(gradients)
            square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
            if self._expert_group is not None and part is self._parts[-1]:
                dist.all_reduce(square, group=self._expert_group)  # every rank of the group has other experts
            squares.append(square)
        total = torch.stack(squares).sum().sqrt()
        factor = (self.config.clip_norm / (total + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for gradients in found:
            local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
            torch._foreach_mul_(local, factor)  # pyright: ignore[reportPrivateImportUsage]  # torch's own clipping uses it
        return total

    def step_dense(self, skip: Tensor | None = None) -> None:
        """Updates the dense part.

        Args:
            skip: bool scalar on the device: True leaves everything as it is. Only where `skips_on_device`; the host
                then need not know before the next step is on its way.
        """
        if self._parking is None:
            self._step_dense(skip)
            return
        self._parking.fetch()
        self._step_dense(skip)
        self._parking.park()

    def _step_dense(self, skip: Tensor | None) -> None:
        if skip is None:
            self.dense.step()
            return
        fused: Any = self.dense  # torch's fused optimizers read this attribute, as GradScaler sets it
        fused.found_inf = skip.float()
        self.dense.step()
        del fused.found_inf

    @property
    def skips_on_device(self) -> bool:
        """Whether `step_dense` takes `skip`: the fused optimizer of whole parameters."""
        return self._fused and not any(isinstance(p, DTensor) for p in self._dense.values())

    def learning_rates(self) -> tuple[float, float]:
        """Dense and sparse learning rate of the step begun last."""
        sparse = self.tables.param_groups[0]["lr"] if self.tables.param_groups else 0.0
        return float(self.dense.param_groups[0]["lr"]), float(sparse)

    def state_dict(self) -> dict[str, Any]:
        """Tensors by parameter name, so that it does not depend on the order of parameters; they share memory with the
        optimizers' own. Learning rates are not in it: a step's are a function of the step. Parked state comes back and
        stays until the next step."""
        if self._parking is not None:
            self._parking.fetch()
        state: dict[str, Any] = {name: dict(self.dense.state[p]) for name, p in self._dense.items()}
        state |= {name: {"sum": sums} for name, sums in self.tables.accumulators().items()}
        return {"state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a `state_dict` of as many ranks; entries that share memory with this one's are there already."""
        for name, entry in self.state_dict()["state"].items():
            for key, own in entry.items():
                given = state_dict["state"][name][key]
                pieces = getattr(own, "pieces", None)
                if pieces is not None:
                    for (first, rows), (given_first, given_rows) in zip(pieces, given.pieces, strict=True):
                        assert first == given_first
                        rows.copy_(given_rows)
                elif given is not own:
                    own.copy_(given)


class _Parking:
    """AdamW's moments in the host's memory between steps. What comes after on the device waits for each way: only then
    is their memory free for a forward that the host starts at once."""

    def __init__(self, dense: AdamW) -> None:
        from gemworks.netmem import PinnedArena, StateStash

        state = [x for entry in dense.state.values() for x in entry.values() if isinstance(x, Tensor)]
        device = state[0].device if state else torch.device("cpu")
        num_bytes = sum(-(-x.untyped_storage().nbytes() // 4096) * 4096 for x in state) + (1 << 20)
        try:
            arena = PinnedArena(num_bytes, pin=device.type == "cuda")
        except ValueError as error:
            raise ValueError(f"optimizer.state_place: 'host': {error}; or set it to 'device'") from error
        self._stash = StateStash(arena, device=device, min_bytes=MIN_PARKED_BYTES)
        self._stash.add_optimizer("dense", dense)
        self.park()

    def park(self) -> None:
        self._stash.park("dense", wait=True)

    def fetch(self) -> None:
        self._stash.restore("dense")


def _parts(named: dict[str, nn.Parameter], experts: frozenset[str]) -> list[list[nn.Parameter]]:
    """Parameters by where they are sharded, those of `experts` last."""
    parts: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for name, p in named.items():
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        parts.setdefault((name in experts, mesh), []).append(p)
    return [parts[key] for key in sorted(parts, key=lambda key: key[0])]


def _takes_fused(parameters: Sequence[nn.Parameter]) -> bool:
    """One kernel reads and writes everything once; torch's other way runs a dozen over all parameters."""
    return all(p.device.type == "cuda" for p in parameters)


def _in_backward(parameter: nn.Parameter) -> list[Optimizer]:
    """The optimizers that update a parameter inside backward."""
    return getattr(parameter, "_in_backward_optimizers", [])
