"""Spreads a model over ranks, from outside: FSDP2 for the dense part, torchrec's `DistributedModelParallel` for tables.

The model knows nothing of it. Afterwards dense parameters are `DTensor`s and the two embedding collections are
torchrec's sharded ones; names of parameters stay.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from gemworks.gem.checkpoint import table_pieces
from gemworks.gem.config import OptimizerConfig
from gemworks.gem.model.events import Sequence as TokenSequence
from gemworks.gem.model.gem import Gem
from gemworks.gem.optim import declare_table_optimizer
from gemworks.gem.ranks import Ranks
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.meshes import build_meshes
from gemworks.parallel.plan import DensePlan, ParallelPlan
from gemworks.parallel.presets import h200_host, roce_cluster
from gemworks.parallel.replicas import check_equal_replicas
from torch import Tensor
from torch.utils import _pytree as pytree

with warnings.catch_warnings():
    # importing torchrec.distributed uses torch.jit, which torch 2.13 itself has deprecated
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is deprecated", category=DeprecationWarning)
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


def parallelize(model: Gem, config: OptimizerConfig, ranks: Ranks, device: torch.device) -> ShardedTables:
    """Shards a model in place; every rank calls it with equal parameters.

    Every gradient becomes the mean over the ranks.

    Args:
        model: whole, on its device, on each rank.
        config: of the tables' optimizer.
        ranks: more than one.
        device: where the model lives.

    Returns:
        The tables' optimizers.

    Raises:
        RuntimeError: parameters that differ between ranks (case M4); says which.
    """
    try:
        check_equal_replicas(model.named_parameters(), None)
    except ValueError as error:
        raise RuntimeError(f"the model: {error}") from error
    declare_table_optimizer(model, config)
    tables = _shard_tables(model, ranks, device)
    model.embeddings.gate.total = ranks.sum
    _shard_dense(model, ranks, device)
    return tables


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


def _shard_dense(model: Gem, ranks: Ranks, device: torch.device) -> None:
    _let_fsdp_see_sequences()
    size = ranks.world_size
    # Only the numbering of ranks is taken from it, and with one view that is the identity.
    cluster = h200_host(size) if size <= GPUS_PER_MACHINE else roce_cluster(size)
    meshes = build_meshes(ParallelPlan(dense=DensePlan(shard=size)), cluster, device_type=device.type)
    blocks = [f"layers.{index}" for index in range(len(model.layers))]
    tables = list(model.sparse_parameters())
    apply_fsdp(model, meshes, blocks, FsdpPolicy(), ignore=tables, check=False)


def _let_fsdp_see_sequences() -> None:
    """FSDP2 before torch 2.13 finds the tensors that go in and out of a block only in containers that pytree knows."""
    if TokenSequence in pytree.SUPPORTED_NODES:
        return
    pytree.register_pytree_node(
        TokenSequence, lambda s: ([s.s_TD], s), lambda children, s: s.replace_tokens(next(iter(children)))
    )
