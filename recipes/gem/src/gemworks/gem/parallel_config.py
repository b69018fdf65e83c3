"""How a model is spread over ranks: one frozen record, read by `parallelize.py` alone. Imports no torch.

Nothing here changes what is learned, with two exceptions: replicas of tables (`table_replica_shard` or a `table_group`
below the world) take row-wise Adagrad's steps apart and average them, and FP8 gathers need FP8 linears.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gemworks.gem.config_checks import check, check_counts
from gemworks.gem.typed_config import ConfigError


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The dimensions of gemworks.parallel's plan, and by what means weights travel. One process has no use for it.

    Attributes:
        shard: ranks that share one copy of the dense weights (FSDP2); that group is repeated over the rest. None: all
            ranks share one copy.
        experts: ranks over which the experts of a layer are spread: each gets the tokens of all of them and computes
            its own experts (EP). 1: every rank computes every expert.
        expert_shard: ranks that share one copy of an expert's weights, where experts are spread.
        tables: by torchrec's `DistributedModelParallel`, or gemworks.parallel's `FullyShardedEmbeddings`.
        table_group: ranks over which the rows of a fully sharded table are spread. None: all that
            `table_replica_shard` leaves.
        table_replica_shard: replicas of such a group's rows that hold a part each, and gather the whole for a lookup.
        gather: dtype in which dense weights are gathered: as they are stored, bfloat16, or FP8 codes and scales for
            the linears that `kernels.linears` quantises. Gradients are reduced in float32.
        all_gather: what gathers dense weights: the process group's collective, or copy engines (gemworks.netmem).
        min_shard_numel: dense weights of fewer elements are whole on every rank, their gradients averaged when backward
            ends: what FSDP's host does grows with the number of weights, not with their size.
        keep_gib: gathered dense weights that may stay until their backward, smallest layers first.
        placement: of ranks on the cluster: searched by predicted time, or in order.
    """

    shard: int | None = None
    experts: int = 1
    expert_shard: int = 1
    tables: Literal["torchrec", "fully_sharded"] = "torchrec"
    table_group: int | None = None
    table_replica_shard: int = 1
    gather: Literal["stored", "bfloat16", "fp8"] = "stored"
    all_gather: Literal["collective", "copy_engine"] = "collective"
    min_shard_numel: int = 0
    keep_gib: float = 0.0
    placement: Literal["searched", "row_major"] = "searched"

    def __post_init__(self) -> None:
        check_counts("parallel", self, "shard table_group", optional=True)
        check_counts("parallel", self, "min_shard_numel", least=0)
        check_counts("parallel", self, "experts expert_shard table_replica_shard")
        if self.expert_shard > 1 and self.experts == 1:
            raise ConfigError(
                f"parallel.expert_shard: got {self.expert_shard} with parallel.experts 1, expected 1: experts that are "
                "not spread are sharded with the other dense weights; set parallel.experts too"
            )
        if self.tables == "torchrec" and (self.table_group is not None or self.table_replica_shard > 1):
            raise ConfigError(
                "parallel.table_group, parallel.table_replica_shard: only fully sharded tables have them; set "
                "parallel.tables=fully_sharded too"
            )
        check(
            math.isfinite(self.keep_gib) and self.keep_gib >= 0,
            "parallel.keep_gib",
            self.keep_gib,
            "a number of GiB, 0 or more",
        )
