"""Device memory that a plan needs on one rank, and what to say when it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gemworks.parallel.cluster import ClusterSpec
from gemworks.parallel.plan import ParallelPlan
from gemworks.parallel.profile import ModelProfile

GIB = 2**30

# About 500 MB a communicator: NVIDIA/nccl#964 (544-688 MB on A100) and pytorch/pytorch#158793 report such sizes.
COMMUNICATOR_BYTES = 500e6
CONTEXT_BYTES = 1.0 * GIB
ALLOCATOR_SLACK = 0.08


class InfeasiblePlan(ValueError):
    """A plan needs more memory than a GPU has; the message says need, capacity, the largest parts and what to
    change."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank.

    Attributes:
        parts: name -> bytes, for everything that is there at the peak.
        capacity: of the GPU.
    """

    parts: Mapping[str, float]
    capacity: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    def text(self) -> str:
        rows = [f"  {name:34} {b / GIB:9.2f} GiB" for name, b in self.parts.items()]
        return "\n".join([*rows, f"  {'total':34} {self.total / GIB:9.2f} of {self.capacity / GIB:.0f} GiB"])


def estimate_memory(
    plan: ParallelPlan, model: ModelProfile, cluster: ClusterSpec, num_communicators: int
) -> MemoryEstimate:
    """Peak bytes of a rank.

    Weights, gradients and optimizer state lie on their shards; two layers are gathered at once (the running one and the
    prefetched one); gradients of one layer wait for their reduction. The peak is the larger of (all activations, at
    the end of forward) and (gathered tables, in the lookup and in the update, when activations are not there): tables
    are released before the peak. Allocator slack is 8 % of what comes and goes (an estimate).

    Args:
        plan, model, cluster: what runs where.
        num_communicators: distinct groups of a rank.
    """
    d, e, s = plan.dense, plan.experts, plan.sparse
    per_param = model.optimizer_bytes + model.gradient_bytes
    expert_ranks = 1 if e is None else e.expert
    expert_shards = 1 if e is None else e.expert_shard
    dense_state = model.dense_params / d.shard * per_param
    expert_state = model.expert_params / expert_ranks / expert_shards * per_param
    gathered: list[float] = []
    gradients: list[float] = []
    for x in model.layers:
        shards, ranks = (d.shard, 1) if x.kind == "dense" else (expert_shards, expert_ranks)
        if shards > 1:
            gathered.append(x.params / ranks * model.weight_bytes)
            gradients.append(x.params / ranks * model.gradient_bytes)
        else:
            dense_state += x.params / ranks * model.weight_bytes
    layers = sum(sorted(gathered)[-2:]) + max(gradients, default=0.0)
    # A joint batch of the expert group is kept for the expert's backward.
    activations = sum(
        x.activation_bytes + (x.exchange_bytes * expert_ranks if x.kind == "expert" else 0.0) for x in model.layers
    )
    rows = 2 * model.ids_per_batch * model.bytes_per_row
    full = model.table_bytes / (1 if s is None else s.table_group)  # without a sparse view every rank has them whole
    stored = full / (1 if s is None else s.replica_shard)
    transient_tables = full if s is not None and s.replica_shard > 1 else 0.0
    moving = max(activations + layers, transient_tables) + rows
    parts = {
        "dense weights, gradients, optimizer": dense_state,
        "expert weights, gradients, optimizer": expert_state,
        "tables and row optimizer": stored,
        "activations and gathered layers": activations + layers if activations + layers >= transient_tables else 0.0,
        "gathered tables": transient_tables if transient_tables > activations + layers else 0.0,
        "looked-up rows and gradients": rows,
        f"communicators ({num_communicators})": num_communicators * COMMUNICATOR_BYTES,
        "context": CONTEXT_BYTES,
        "allocator slack": ALLOCATOR_SLACK * moving,
    }
    return MemoryEstimate(parts={k: v for k, v in parts.items() if v}, capacity=float(cluster.gpu.hbm_bytes))


def infeasible_report(plan: ParallelPlan, model: ModelProfile, cluster: ClusterSpec, memory: MemoryEstimate) -> str:
    """Why a plan does not fit: need, capacity, the largest parts and tables, and what to change.

    Args:
        memory: an estimate that does not fit (or does: the report then says so).
    """
    over = memory.total - memory.capacity
    lines = [
        f"need {memory.total / GIB:.1f} GiB a GPU, {cluster.gpu.name} has {memory.capacity / GIB:.1f} GiB: "
        + (f"{over / GIB:.1f} GiB too much" if over > 0 else "it fits"),
        memory.text(),
    ]
    tables = sorted(model.tables, key=lambda t: (-t.num_rows * t.dim, t.name))[:3]
    if tables:
        lines.append("largest tables:")
        lines += [f"  {t.name}: {t.num_rows} x {t.dim}, {t.num_rows * t.dim * 4 / GIB:.1f} GiB" for t in tables]
    advice: list[str] = []
    worst = max(memory.parts, key=lambda k: memory.parts[k])
    s, d, e = plan.sparse, plan.dense, plan.experts
    if model.tables and s is None:
        advice.append("give the plan a sparse view: tables are whole on every rank without one")
    if s is not None and "tables" in worst:
        if s.replica_shard < cluster.gpus_per_domain and s.replica > 1:
            advice.append(f"raise sparse.replica_shard above {s.replica_shard} (up to {cluster.gpus_per_domain} here)")
        if s.table_group < plan.world_size:
            advice.append(f"raise sparse.table_group above {s.table_group}")
        if s.table_group * s.replica_shard == plan.world_size:
            advice.append("use more GPUs or smaller tables: every rank already stores a different part")
    if worst.startswith("dense"):
        advice.append(
            f"raise dense.shard above {d.shard}" if d.replica > 1 else "use more GPUs: dense weights are fully sharded"
        )
    if worst.startswith("expert") and e is not None:
        advice.append(f"raise experts.expert_shard above {e.expert_shard}")
    if worst.startswith("activations"):
        advice.append(
            f"lower the local batch of {model.samples_per_rank}, recompute or offload activations "
            f"({memory.parts[worst] / GIB:.1f} GiB)"
        )
    if worst.startswith("communicators"):
        advice.append("use fewer axes with more than one rank, or orders whose groups coincide")
    lines.append("change: " + ("; ".join(advice) or f"reduce {worst}"))
    return "\n".join(lines)
