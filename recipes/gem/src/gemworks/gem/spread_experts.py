"""A layer's experts on several ranks: `MixtureOfExperts` by gemworks.parallel's exchange, with the same names.

Letters: B samples of this rank, J samples of the expert group, n tokens, D width, M experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from gemworks.gem.model.gem import Gem
from gemworks.gem.model.wukong import MixtureOfExperts
from gemworks.gem.ranks import Ranks
from gemworks.gem.schema import Batch
from gemworks.parallel.experts import ExpertExchange, Gathering, Scattering
from torch import Tensor, nn

F = TypeVar("F", bound=Callable[..., Any])


class ExpertsHere(nn.ModuleDict):
    """The experts of a mixture that live on this rank, by their index in the mixture."""

    def forward(self, x_JnD: Tensor, gates: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Their sum by `gates`, which has one entry for each."""
        outputs = [gate * expert(x_JnD) for gate, expert in zip(gates, self.values(), strict=True)]
        return torch.stack(outputs).sum(0) if len(outputs) > 1 else outputs[0]


def _eager(method: F) -> F:
    """Kept out of compiled graphs: collectives are under way from one call to the next."""
    return torch.compiler.disable(method)  # type: ignore[return-value]


class RowCounts:
    """Samples of every rank of an expert group in the batch under way, found out once for all layers.

    Attributes:
        rows: in the order of the group.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup) -> None:
        self._ranks, self._members = ranks, dist.get_process_group_ranks(group)
        self.rows: list[int] = []

    def see(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """A forward pre-hook of the model."""
        batch: Batch = args[0]
        counts = self._ranks.gather(batch.num_samples)
        self.rows = [counts[rank] for rank in self._members]


class SpreadMixture(ExpertExchange):
    """What takes a `MixtureOfExperts`' place; names and values of the parameters that stay here are its own.

    The gates stay with the layer's other weights, whose gradients are means over all ranks. An expert's gate gets its
    gradient on the ranks that hold the expert only, so there it counts as often as there are ranks in the group.

    Args:
        mixture: whole; it is not used afterwards.
        group: of the experts.
        counts: of the model's batches.

    Attributes:
        experts, gates_M: as the mixture's; `experts` has those of this rank.
    """

    def __init__(self, mixture: MixtureOfExperts, group: dist.ProcessGroup, counts: RowCounts) -> None:
        super().__init__(len(mixture.experts), group)
        self.experts = ExpertsHere({str(i): mixture.experts[i] for i in self.indices})
        self.gates_M = mixture.gates_M
        self._counts = counts

    def experts_here(self) -> nn.Module:
        return self.experts

    @_eager
    def start(self, x: Tensor, rows: Any = None) -> Gathering:
        return super().start(x, self._counts.rows if rows is None else rows)

    @_eager
    def run(self, gathering: Gathering, *more: Any) -> Scattering:
        gates = self.gates_M[self.indices.start : self.indices.stop]
        if gates.requires_grad:
            gates.register_hook(lambda gradient: gradient * self.size)
        return super().run(gathering, gates, *more)

    @_eager
    def finish(self, scattering: Scattering) -> Tensor:
        return super().finish(scattering)


def spread_experts(model: Gem, group: dist.ProcessGroup, ranks: Ranks) -> list[SpreadMixture]:
    """Puts a `SpreadMixture` in the place of every layer's mixture; every rank calls it with equal parameters."""
    counts = RowCounts(ranks, group)
    found: list[SpreadMixture] = []
    for layer in model.layers:
        mixture = layer.get_submodule("interaction")
        assert isinstance(mixture, MixtureOfExperts)
        layer.interaction = SpreadMixture(mixture, group, counts)
        found.append(layer.interaction)
    model.register_forward_pre_hook(counts.see)
    return found
