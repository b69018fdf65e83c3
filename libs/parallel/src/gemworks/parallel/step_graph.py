"""The operations of one rank's training step, with what each waits for: forward, backward, tables, optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gemworks.parallel._check import number, one_of
from gemworks.parallel.cluster import COLLECTIVES, ClusterSpec, Collective, Tier
from gemworks.parallel.costs import CollectiveCost, GroupShape, Posting, collective_cost
from gemworks.parallel.measured_error import MEASURED, text_of
from gemworks.parallel.plan import ParallelPlan, View
from gemworks.parallel.profile import LayerProfile, ModelProfile
from gemworks.parallel.timeline import Op, Queue

Balance = Literal["none", "bbs", "global"]


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """How a step is run.

    Attributes:
        balance: of ranks' batches.
        balance_gain: method -> share of the excess over the mean that it removes; the defaults are of the balance table
            (window of 16 batches of 8 sub-batches, uniform and Zipf lengths, 64 to 4,096 ranks).
        sm_slowdown: of compute while a collective runs; 0.092: two 8192 matmuls under an NCCL all-gather of 256 MiB on
            two H200.
        prefetch: gather weights one layer ahead.
        overlap_exchange: expert exchange overlaps the neighbouring layers.
        overlap_tables: table gathers are launched ahead.
        keep_gathered: gathered dense weights stay for backward (no second all-gather).
        flat_copies: FSDP moves weights out of an all-gather's flat buffer and gradients into a reduce-scatter's, on the
            compute stream; both are charged at the rate of a device copy.
        posting: what an all-to-all's network messages cost besides their bytes; None for nothing.
        blocking: every collective keeps the host waiting, as torch's FSDP does on gloo: nothing overlaps.
        wire_factor: collective -> bytes on the wire / those of a ring, for a backend that does more; `GLOO` for gloo.
        validation: the error of such predictions on hardware, printed with every result; the default is what this
            version was measured at.
    """

    balance: Balance = "bbs"
    balance_gain: Mapping[str, float] = field(default_factory=lambda: {"none": 0.0, "bbs": 0.7, "global": 0.95})
    sm_slowdown: float = 0.092
    prefetch: bool = True
    overlap_exchange: bool = True
    overlap_tables: bool = True
    keep_gathered: bool = False
    flat_copies: bool = True
    posting: Posting | None = field(default_factory=Posting)
    blocking: bool = False
    wire_factor: Mapping[str, float] = field(default_factory=dict)
    validation: str = text_of(MEASURED)

    def __post_init__(self) -> None:
        one_of("balance", self.balance, get_args(Balance))
        number("sm_slowdown", self.sm_slowdown, least=0)
        one_of("balance: a method of balance_gain", self.balance, self.balance_gain)
        for method, gain in self.balance_gain.items():
            number(f"balance_gain of {method}", gain)
        for collective, factor in self.wire_factor.items():
            one_of("wire_factor", collective, COLLECTIVES)
            number(f"wire_factor of {collective}", factor, least=0)


# gloo has no reduce-scatter: torch runs an all-reduce and keeps this rank's part, twice a ring reduce-scatter's bytes.
GLOO: Mapping[str, float] = {"reduce_scatter": 2.0}


@dataclass(frozen=True)
class _Backward:
    """What backward leaves to wait for, as indices of operations: the first layer's compute, gradient reductions, what
    experts send back, and the tables' gather where it overlaps."""

    final: int
    reduced: list[int | None]
    returned: list[int | None]
    table_gather: int | None


class StepGraph:
    """Builds the operations of one step."""

    def __init__(
        self,
        plan: ParallelPlan,
        model: ModelProfile,
        cluster: ClusterSpec,
        config: SimulationConfig,
        shapes: Mapping[tuple[View, str], GroupShape],
        slow: float,
    ) -> None:
        self.plan, self.model, self.cluster, self.config, self.shapes, self.slow = (
            plan,
            model,
            cluster,
            config,
            shapes,
            slow,
        )
        self.ops: list[Op] = []
        self.calls: dict[str, tuple[int, float, Tier | None]] = {}
        self.sent: dict[str, float] = {}
        self.alone_us = 0.0
        self._cache: dict[tuple[Any, ...], CollectiveCost] = {}

    def compute(self, name: str, parts: dict[str, float], deps: Sequence[int | None]) -> int:
        us = sum(parts.values())
        self.ops.append(Op(name, "compute", us, self._after(deps), next(iter(parts), "compute"), parts))
        return len(self.ops) - 1

    def launch(self, host_us: float) -> int | None:
        """Half of what the host does for a layer: before its compute is launched, or after."""
        if host_us <= 0:
            return None
        self.ops.append(Op("launch", "host", host_us / 2, self._after([]), "waiting for the host"))
        return len(self.ops) - 1

    def collective(
        self,
        view: View,
        axis: str,
        collective: Collective,
        nbytes: float,
        deps: Sequence[int | None],
        name: str,
        every: int = 1,
    ) -> int | None:
        """Launch one; None if there is nothing to move. What runs every so many steps counts with its mean."""
        shape = self.shapes.get((view, axis))
        if shape is None or shape.size == 1 or nbytes <= 0:
            return None
        key = (view, axis, collective, nbytes)
        if key not in self._cache:
            self._cache[key] = collective_cost(collective, shape, nbytes, self.cluster, posting=self.config.posting)
        cost = self._cache[key]
        duration = cost.us / every
        label = f"{view}.{axis} {collective}"
        count, us, _ = self.calls.get(label, (0, 0.0, None))
        self.calls[label] = (count + 1, us + duration, shape.widest_tier)
        for tier, b in cost.bytes_by_tier.items():
            self.sent[tier] = self.sent.get(tier, 0.0) + b / every * self.config.wire_factor.get(collective, 1.0)
        queue: Queue = "nvlink" if shape.widest_tier == "nvlink" else "network"
        self.ops.append(Op(f"{name} {label}", queue, duration, self._after(deps), f"exposed: {label}"))
        return len(self.ops) - 1

    def _after(self, deps: Sequence[int | None]) -> list[int]:
        """What an operation waits for; the one before it too if everything blocks."""
        before = [len(self.ops) - 1] if self.config.blocking and self.ops else []
        return [*(d for d in deps if d is not None), *before]

    def layer_parts(self, x: LayerProfile, backward: bool) -> dict[str, float]:
        forward_us, backward_us = x.times_us(self.cluster, self.model.dtype)
        base = backward_us if backward else forward_us
        self.alone_us += base
        again = x.recompute * forward_us if backward else 0.0
        late = (base + again) * x.length_share * (self.slow - 1)
        return {k: v for k, v in {"compute": base, "recompute": again, "imbalance": late}.items() if v}

    def build(self) -> None:
        """Tables, layers forward, layers backward, tables, optimizer."""
        embedded = self._look_up() if self._has_tables else None
        last, pending = self._forward(embedded)
        back = self._backward(last, pending)
        final = back.final
        averaged = self._average_replicated(final)
        if self._has_tables:
            final = self._update_tables(back)
        self.compute(
            "optimizer",
            {"optimizer": self._stored_params() / 1e6 * self.model.optimizer_us_per_million},
            [final, *back.reduced, *averaged, *back.returned],
        )

    @property
    def _has_tables(self) -> bool:
        return self.plan.sparse is not None and bool(self.model.tables)

    @property
    def _rows_bytes(self) -> float:
        """Of the looked-up rows of a rank's batch."""
        return self.model.ids_per_batch * self.model.bytes_per_row

    @property
    def _rows_us(self) -> float:
        """To read and write those rows once."""
        return 2 * self._rows_bytes / self.cluster.gpu.hbm_bytes_per_s * 1e6

    def _look_up(self) -> int | None:
        """Ids out, rows back; returns the exchange of the rows."""
        model, sparse = self.model, self.plan.sparse
        assert sparse is not None
        lookup_us = self._rows_us if model.lookup_us is None else model.lookup_us
        # A lookup needs no optimizer state.
        weights_only = model.table_weight_bytes / sparse.table_group
        gather = self.collective("sparse", "replica_shard", "all_gather", weights_only, [], "forward")
        ids = self.collective("sparse", "table_group", "all_to_all", model.ids_per_batch * 8, [], "ids")
        self.alone_us += lookup_us
        lookup = self.compute("lookup", {"lookup and table update": lookup_us}, [gather, ids])
        return self.collective("sparse", "table_group", "all_to_all", self._rows_bytes, [lookup], "rows")

    def _gather_weights(self, x: LayerProfile, deps: Sequence[int | None], phase: str) -> int | None:
        ranks, view, axis = 1, "dense", "shard"
        if x.kind == "expert":
            ranks, view, axis = self._expert_ranks(), "experts", "expert_shard"
        nbytes = x.params / ranks * self.model.weight_bytes
        return self.collective(view, axis, "all_gather", nbytes, deps, f"{phase} {x.name}")

    def _exchange(self, x: LayerProfile, collective: Collective, dep: int | None, phase: str) -> int | None:
        """Samples of the expert group joined before an expert (all_gather), or parted after it (reduce_scatter)."""
        nbytes = x.exchange_bytes * self._expert_ranks()
        return self.collective("experts", "expert", collective, nbytes, [dep], f"{phase} {x.name}")

    def _forward(self, embedded: int | None) -> tuple[int, list[int | None]]:
        """Returns the last layer's compute and the exchange that may still be under way."""
        layers, c = self.model.layers, self.config
        done: list[int] = []
        weights: dict[int, int | None] = {}
        returned: dict[int, int | None] = {}
        for i, x in enumerate(layers):
            ahead = range(i, min(i + 2, len(layers))) if c.prefetch else (i,)
            before = done[i - 1] if i else None
            for j in ahead:
                if j not in weights:
                    weights[j] = self._gather_weights(layers[j], [before], "forward")
            inputs: list[int | None] = [before, weights[i], embedded if i == 0 else None]
            if x.kind == "expert":
                source = (done[i - 2] if i >= 2 else embedded) if c.overlap_exchange else (before if i else embedded)
                inputs.append(self._exchange(x, "all_gather", source, "forward"))
            late = i - 2 if c.overlap_exchange else i - 1
            inputs += [v for k, v in returned.items() if k == late]
            parts = self.layer_parts(x, False) | self._copies(x, weights[i] is not None, False)
            done.append(self.compute(f"forward {x.name}", parts, [*inputs, self.launch(x.forward_host_us)]))
            self.launch(x.forward_host_us)
            if x.kind == "expert":
                returned[i] = self._exchange(x, "reduce_scatter", done[i], "forward")
        return done[-1], list(returned.values())[-1:]

    def _backward(self, last: int, pending: list[int | None]) -> _Backward:
        """Mirrors forward, and reduces gradients.

        Args:
            last: compute of the last layer's forward.
            pending: what its backward waits for besides.
        """
        layers, c = self.model.layers, self.config
        reduced: list[int | None] = []
        table_gather: int | None = None
        back: dict[int, int] = {}
        weights: dict[int, int | None] = {}
        returned: dict[int, int | None] = {}
        order = list(reversed(range(len(layers))))
        for step, i in enumerate(order):
            x = layers[i]
            ahead = order[step : step + 2] if c.prefetch else [i]
            before = back[order[step - 1]] if step else last
            for j in ahead:
                keep = j == len(layers) - 1 or (c.keep_gathered and layers[j].kind == "dense")
                if j not in weights:
                    weights[j] = None if keep else self._gather_weights(layers[j], [before], "backward")
            inputs: list[int | None] = [before, weights[i], *(pending if step == 0 else [])]
            if x.kind == "expert":
                source = (back[order[step - 2]] if step >= 2 else last) if c.overlap_exchange else before
                inputs.append(self._exchange(x, "all_gather", source, "backward"))
            late = order[step - 2] if c.overlap_exchange and step >= 2 else order[step - 1] if step else -1
            inputs += [v for k, v in returned.items() if k == late]
            if self._has_tables and c.overlap_tables and i == min(1, len(layers) - 1):
                table_gather = self._gather_tables([before])
            parts = self.layer_parts(x, True) | self._copies(x, weights[i] is not None, True)
            back[i] = self.compute(f"backward {x.name}", parts, [*inputs, self.launch(x.backward_host_us)])
            self.launch(x.backward_host_us)
            if x.kind == "expert":
                returned[i] = self._exchange(x, "reduce_scatter", back[i], "backward")
            reduced += self._reduce(x, back[i])
        return _Backward(back[order[-1]], reduced, list(returned.values()), table_gather)

    def _gather_tables(self, deps: Sequence[int | None]) -> int | None:
        assert self.plan.sparse is not None
        nbytes = self.model.table_bytes / self.plan.sparse.table_group
        return self.collective("sparse", "replica_shard", "all_gather", nbytes, deps, "backward")

    def _update_tables(self, back: _Backward) -> int:
        """Gradients of rows out, the update, its result published; returns the update."""
        model, sparse = self.model, self.plan.sparse
        assert sparse is not None
        table_bytes = model.table_bytes / sparse.table_group
        tail = [back.final, *back.returned]
        grads = self.collective("sparse", "table_group", "all_to_all", self._rows_bytes, tail, "gradients")
        gather = back.table_gather if self.config.overlap_tables else self._gather_tables(tail)
        update_us = 1.5 * self._rows_us if model.update_us is None else model.update_us
        self.alone_us += update_us
        final = self.compute("table update", {"lookup and table update": update_us}, [back.final, grads, gather])
        publish = self.collective("sparse", "replica_shard", "reduce_scatter", table_bytes, [final], "publish")
        self.collective(
            "sparse",
            "replica",
            "all_reduce",
            table_bytes / sparse.replica_shard,
            [publish if publish is not None else final],
            "publish",
            every=sparse.sync_every,
        )
        return final

    def _stored_params(self) -> float:
        """Dense parameters whose optimizer state a rank has."""
        plan, model = self.plan, self.model
        experts = model.expert_params
        if plan.experts is not None:
            experts = experts / plan.experts.expert / plan.experts.expert_shard
        return model.dense_params / plan.dense.shard + experts

    def _expert_ranks(self) -> int:
        return 1 if self.plan.experts is None else self.plan.experts.expert

    def _average_replicated(self, final: int) -> list[int | None]:
        """Unsharded weights are averaged when backward ends: dense ones in one piece, experts one by one."""
        plan, g = self.plan, self.model.gradient_bytes
        e = plan.experts
        pieces: list[tuple[View, float]] = []
        if e is not None and e.expert_shard == 1:
            pieces.extend(("experts", x.params / e.expert * g) for x in self.model.layers if x.kind == "expert")
        if plan.dense.shard == 1:
            pieces.append(("dense", self.model.dense_params * g))
        done: list[int | None] = []
        before = final
        for view, nbytes in pieces:
            shape = self.shapes.get((view, "replica"))
            if shape is None or shape.size == 1 or nbytes <= 0:
                continue
            passes = nbytes / self.cluster.gpu.hbm_bytes_per_s * 1e6 if self.config.flat_copies else 0.0
            # Into a flat buffer (read, write), then divided there and copied back (2 x read, write).
            joined = self.compute("flatten gradients", {"flat-buffer copies": 2 * passes}, [before])
            reduced = self.collective(view, "replica", "all_reduce", nbytes, [joined], "backward")
            before = self.compute("spread gradients", {"flat-buffer copies": 4 * passes}, [reduced])
            done.append(before)
        return done

    def _copies(self, x: LayerProfile, gathered: bool, backward: bool) -> dict[str, float]:
        """Between parameters and the flat buffers of FSDP's collectives: read + write, in us."""
        if not self.config.flat_copies:
            return {}
        m, axis = self.model, ("dense", "shard") if x.kind == "dense" else ("experts", "expert_shard")
        shape = self.shapes.get(axis)  # type: ignore[call-overload]
        if shape is None or shape.size == 1:
            return {}
        params = x.params if x.kind == "dense" else x.params / self._expert_ranks()
        moved = params * 2 * m.weight_bytes if gathered else 0.0
        if backward:
            moved += params * (m.weight_bytes + m.gradient_bytes)
        return {"flat-buffer copies": moved / self.cluster.gpu.hbm_bytes_per_s * 1e6} if moved else {}

    def _reduce(self, x: LayerProfile, dep: int) -> list[int | None]:
        plan, g = self.plan, self.model.gradient_bytes
        if x.kind == "dense":
            view, axis, params, shards = "dense", "shard", x.params, plan.dense.shard
        else:
            e = plan.experts
            view, axis, params, shards = (
                "experts",
                "expert_shard",
                x.params / self._expert_ranks(),
                1 if e is None else e.expert_shard,
            )
        if shards == 1:
            return []
        name = f"backward {x.name}"
        scatter = self.collective(view, axis, "reduce_scatter", params * g, [dep], name)  # type: ignore[arg-type]
        reduce = self.collective(
            view,
            "replica",
            "all_reduce",
            params / shards * g,
            [dep if scatter is None else scatter],
            name,  # type: ignore[arg-type]
        )
        return [scatter, reduce]
