"""Spreads a model over ranks, from outside, as `config.parallel` says: FSDP2 for dense weights, experts and tables each
over their own groups.

The model knows nothing of it. Afterwards dense parameters are `DTensor`s, a layer has this rank's experts only, and the
two embedding collections are sharded ones; names of parameters stay.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gemworks.gem.checkpoint import table_pieces
from gemworks.gem.config import GemConfig
from gemworks.gem.implement import compile_part
from gemworks.gem.model.events import Sequence as TokenSequence
from gemworks.gem.model.gem import Gem
from gemworks.gem.optim import TableOptimizers, declare_table_optimizer
from gemworks.gem.parallel_config import ParallelConfig
from gemworks.gem.ranks import Ranks
from gemworks.gem.spread_experts import SpreadMixture, spread_experts
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.layout import Layout
from gemworks.parallel.meshes import Meshes, build_meshes
from gemworks.parallel.placement import Placement
from gemworks.parallel.plan import ParallelPlan
from gemworks.parallel.presets import h200_host, roce_cluster
from gemworks.parallel.replicas import check_equal_replicas
from torch import Tensor
from torch.utils import _pytree as pytree

with warnings.catch_warnings():
    # importing torchrec.distributed uses torch.jit, which torch 2.13 itself has deprecated
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is deprecated", category=DeprecationWarning)
    from gemworks.gem.sharded_tables import shard_tables
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.types import ShardingEnv

# What has one accumulator per row whatever the sharding, and what every device has a kernel for. Data parallel is not
# among them: its tables would have no fused optimizer. Column-wise neither: each piece would have accumulators of its
# own.
SHARDING_TYPES = ["table_wise", "row_wise"]
GPUS_PER_MACHINE = 8


class _BagSharder(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return SHARDING_TYPES


class _RowSharder(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return SHARDING_TYPES


class ShardedTables:
    """The optimizers of sharded tables: fbgemm's, inside backward."""

    def __init__(self, fused: Any) -> None:
        self._fused = fused

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        return self._fused.param_groups

    def begin(self) -> None:
        self._fused.zero_grad()  # hands the learning rates of the groups to the kernels

    def accumulators(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, entry in self._fused.state_dict()["state"].items():
            (sums,) = entry.values()
            found[f"embeddings.{name}"] = table_pieces(sums)
        return found


@dataclass(frozen=True)
class Spread:
    """A model on several ranks: what its optimizers have to know.

    Attributes:
        tables: the tables' optimizers.
        experts: names of the parameters of spread experts, of which every rank of `expert_group` has others.
        expert_group: None: experts are on every rank, and dense weights like all others.
    """

    tables: TableOptimizers
    experts: frozenset[str] = frozenset()
    expert_group: dist.ProcessGroup | None = None


def plan_of(config: ParallelConfig, num_ranks: int) -> ParallelPlan:
    """The plan that a configuration means on so many ranks.

    Raises:
        ValueError: a product of its sizes does not divide the ranks; says which divisors are near.

    >>> plan_of(ParallelConfig(shard=2, experts=2), 4).text()
    'dense shard 2 x replica 2; experts expert 2 x expert_shard 1 x replica 2'
    """
    group, sharded = config.table_group, config.tables == "fully_sharded"
    if group is None:
        group = max(num_ranks // config.table_replica_shard, 1)
    return ParallelPlan.for_world(
        num_ranks,
        shard=num_ranks if config.shard is None else config.shard,
        expert=config.experts if config.experts > 1 else None,
        expert_shard=config.expert_shard if config.experts > 1 else 1,
        table_group=group if sharded else None,
        replica_shard=config.table_replica_shard if sharded else 1,
    )


def parallelize(model: Gem, config: GemConfig, ranks: Ranks, device: torch.device) -> Spread:
    """Spreads a model in place; every rank calls it with equal parameters.

    Every gradient becomes the mean over the ranks.

    Args:
        model: whole, on its device, on each rank.
        config: of the run.
        ranks: more than one.
        device: where the model lives.

    Raises:
        RuntimeError: parameters that differ between ranks (case M4); says which.
        ValueError: sizes of `config.parallel` that do not divide the ranks, or do not fit their machines.
    """
    try:
        check_equal_replicas(model.named_parameters(), None)
    except ValueError as error:
        raise RuntimeError(f"the model: {error}") from error
    size = ranks.world_size
    plan = plan_of(config.parallel, size)
    cluster = h200_host(size) if size <= GPUS_PER_MACHINE else roce_cluster(size)
    in_order = Placement(layout=Layout.row_major(plan), views={}) if config.parallel.placement == "row_major" else None
    meshes = build_meshes(plan, cluster, device_type=device.type, placement=in_order)
    lr = config.optimizer.sparse_lr
    if config.parallel.tables == "fully_sharded":
        tables: TableOptimizers = shard_tables(model, meshes, lr, device)
    else:
        declare_table_optimizer(model, config.optimizer)
        tables = _shard_tables(model, ranks, device)
    model.embeddings.gate.total = ranks.sum
    group = meshes.group("experts", "expert") if plan.experts is not None else None
    mixtures = spread_experts(model, group, ranks) if group is not None else []
    if config.train.compile:
        for mixture in mixtures:
            compile_part(mixture.experts, config.kernels)
    experts = frozenset(n for n, _ in model.named_parameters() if ".interaction.experts." in n) if mixtures else None
    _shard_dense(model, config, meshes, mixtures)
    return Spread(tables, experts or frozenset(), group)


def _shard_tables(model: Gem, ranks: Ranks, device: torch.device) -> ShardedTables:
    whole = {name: tensor.detach() for name, tensor in model.embeddings.state_dict().items()}
    sharders: list[Any] = [_BagSharder(), _RowSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks.world_size, local_world_size=ranks.local_world_size, compute_device=device.type
        )
    )
    # not `collective_plan`: if that fails on its first rank, the others wait for ever
    plan = ranks.on_first(lambda: planner.plan(model.embeddings, sharders))
    group = dist.group.WORLD
    assert group is not None
    sharded = DistributedModelParallel(
        model.embeddings,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=plan,
        sharders=sharders,
        init_data_parallel=False,  # the dense part is FSDP's
        init_parameters=False,  # that would draw new ones
    )
    model.embeddings.load_state_dict(whole)
    return ShardedTables(sharded.fused_optimizer)


def _shard_dense(model: Gem, config: GemConfig, meshes: Meshes, mixtures: Sequence[SpreadMixture]) -> None:
    _let_fsdp_see_sequences()
    chosen, plan = config.parallel, meshes.layout.plan
    if chosen.gather == "fp8":
        _gather_in_fp8(model, plan, spread=bool(mixtures))
    policy = FsdpPolicy(
        min_shard_numel=chosen.min_shard_numel,
        keep_bytes=int(chosen.keep_gib * 2**30),
        param_dtype=None if chosen.gather == "stored" else torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    blocks = [f"layers.{index}" for index in range(len(model.layers))]
    apply_fsdp(model, meshes, blocks, policy, ignore=list(model.sparse_parameters()), check=False)
    if chosen.all_gather == "copy_engine":
        from gemworks.netmem import copy_engine_all_gather  # of no use to others

        copy_engine_all_gather(model, meshes.group("dense", "shard"))
        for mixture in mixtures:
            if plan.experts is not None and plan.experts.expert_shard > 1:
                copy_engine_all_gather(mixture.experts, meshes.group("experts", "expert_shard"))


def _gather_in_fp8(model: Gem, plan: ParallelPlan, *, spread: bool) -> None:
    """Quantised linears send codes and scales, where their rows allow it."""
    from gemworks.precision import MXLinear
    from gemworks.precision.fsdp import FP8GatherWeight, gather_in_fp8

    def of_experts(name: str, layer: MXLinear) -> bool:
        return spread and ".interaction.experts." in name

    made = gather_in_fp8(model, plan.dense.shard, lambda name, layer: not of_experts(name, layer))
    if plan.experts is not None and plan.experts.expert_shard > 1:
        made += gather_in_fp8(model, plan.experts.expert_shard, of_experts)
    if all(decision.form == "bf16" for decision in made):
        reasons = sorted({decision.reason for decision in made}) or ["kernels.linears quantises none that is sharded"]
        raise ValueError(
            f"parallel.gather: got 'fp8', but no weight can be gathered so ({'; '.join(reasons)}); set "
            "parallel.gather=bfloat16, or wider layers"
        )
    for layer in model.modules():
        if isinstance(layer, MXLinear) and isinstance(layer.weight.data, FP8GatherWeight):
            # a weight that exists as codes and scales only is nothing for the compiler's tracing
            setattr(layer, "forward", torch.compiler.disable(layer.forward))  # noqa: B010 - its type is any callable


def _let_fsdp_see_sequences() -> None:
    """FSDP2 before torch 2.13 finds the tensors that go in and out of a block only in containers that pytree knows."""
    if TokenSequence in pytree.SUPPORTED_NODES:
        return
    pytree.register_pytree_node(
        TokenSequence,
        lambda s: ([s.s_TD] if s.late_TD is None else [s.s_TD, s.late_TD], s),
        lambda children, s: s.replace_tokens(*children),
    )
