"""Fully sharded embeddings: tables model-parallel in a group, replicas of a shard themselves sharded.

    forward   all-gather shard -> all-to-all ids -> lookup -> all-to-all rows, gathered copy released
    backward  all-gather shard -> all-to-all gradients -> local update -> reduce-scatter (mean) of weights and state

(Engineering at Meta, 2026-08-03; two-dimensional sparse parallelism: arXiv 2508.03854.) Meaning:

- gradients: each table group applies the mean over its ranks of the losses' gradients; with SGD the result is exactly
  an unsharded table updated by the mean over all ranks;
- row-wise Adagrad: R independent local updates, then the mean of weights and of states; see `sparse_optim`;
- with `sync_every` above 1 the outer replicas make that many local updates between means, with either optimizer, and
  differ in between: `checkpoint` and `full_table` average first.

Letters: T ids of a feature, B samples, U distinct ids asked from this rank's view, D width, N rows of a buffer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from gemworks.parallel._check import kind as check_kind
from gemworks.parallel._check import one_of
from gemworks.parallel.meshes import Meshes
from gemworks.parallel.replicas import check_equal_replicas
from gemworks.parallel.sparse_optim import RowOptimizer
from gemworks.parallel.table_checkpoint import TablePieces
from gemworks.parallel.table_shards import ShardedBuffer
from gemworks.parallel.tables import TableShards, TableSpec, shard_tables
from torch import Tensor, nn

Pooling = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """An id feature.

    Attributes:
        name: key in the batch.
        table: whose rows it looks up.
        pooling: "sum" or "mean" over a sample's ids, or None for one row per id.
    """

    name: str
    table: str
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        one_of(f"feature {self.name!r}: pooling", self.pooling, (None, *get_args(Pooling)))


class _Route:
    """Where the ids of one batch go and come from, for tables of one width."""

    def __init__(self, keys_T: Tensor, stride: int, group: dist.ProcessGroup | None, size: int) -> None:
        self.group = group
        unique_U, self.inverse_T = torch.unique(keys_T, return_inverse=True)
        owner_U = unique_U // stride
        sent = torch.bincount(owner_U, minlength=size)
        if group is None:
            self.sent = self.received = [unique_U.numel()]
            self.rows_V = unique_U % stride
            return
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self.sent, self.received = torch.stack([sent, received]).tolist()
        self.rows_V = torch.empty(sum(self.received), dtype=torch.int64, device=keys_T.device)
        dist.all_to_all_single(self.rows_V, (unique_U % stride).contiguous(), self.received, self.sent, group=group)

    def to_askers(self, rows_VD: Tensor) -> Tensor:
        """Rows from owners to the ranks that asked: [V, D] -> [U, D]."""
        if self.group is None:
            return rows_VD
        out = rows_VD.new_empty(sum(self.sent), rows_VD.shape[1])
        dist.all_to_all_single(out, rows_VD.contiguous(), self.sent, self.received, group=self.group)
        return out

    def to_owners(self, grad_UD: Tensor) -> Tensor:
        """Gradients back to the owners: [U, D] -> [V, D]."""
        if self.group is None:
            return grad_UD
        out = grad_UD.new_empty(sum(self.received), grad_UD.shape[1])
        dist.all_to_all_single(out, grad_UD.contiguous(), self.received, self.sent, group=self.group)
        return out


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, bank: _Bank, route: _Route) -> Tensor:  # type: ignore[override]
        ctx.bank, ctx.route = bank, route
        rows_VD = bank.weight.full()[route.rows_V]
        bank.weight.release()
        return route.to_askers(rows_VD)

    @staticmethod
    def backward(ctx: Any, grad_UD: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.bank.apply_gradient(ctx.route, grad_UD)
        return None, None, None


class _Bank:
    """All tables of one width: their buffer, their optimizer state, their routing tables."""

    def __init__(
        self,
        shards: TableShards,
        meshes: Meshes,
        optimizer: RowOptimizer,
        init: Callable[[TableSpec, range], Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        plan = meshes.layout.plan.sparse
        assert plan is not None
        here = meshes.layout.coordinates(meshes.rank, "sparse")
        self.shards, self.optimizer = shards, optimizer
        self.group_rank, self.part, self.parts = here["table_group"], here["replica_shard"], plan.replica_shard
        self.group = meshes.group("sparse", "table_group")
        self.group_size = plan.table_group
        self.replicas = plan.replica_shard * plan.replica
        self.piece_rows = shards.padded_rows(self.group_rank, self.parts) // self.parts
        groups = (meshes.group("sparse", "replica_shard"), meshes.group("sparse", "replica"))
        weight = torch.zeros(self.piece_rows, shards.dim, dtype=dtype, device=device)
        for table, rows, place in self.stored():
            values = init(table, rows)
            if values.shape != (len(rows), shards.dim):
                raise ValueError(
                    f"init: got {tuple(values.shape)} for {len(rows)} rows of {table.name!r}, expected "
                    f"{(len(rows), shards.dim)}"
                )
            weight[place.start : place.stop] = values.to(device=device, dtype=dtype)
        self.weight = ShardedBuffer(weight, *groups, plan.sync_every)
        self.state: ShardedBuffer | None = None
        if optimizer.num_states:
            self.state = ShardedBuffer(torch.zeros(self.piece_rows, device=device), *groups, plan.sync_every)
        longest = max(max(shards.num_rows), 1)
        self.stride = longest
        self.first_owner = {t.spec.name: t.first_owner for t in shards.tables}
        self.block_rows = {t.spec.name: t.block_rows for t in shards.tables}
        self.offsets = {t.spec.name: torch.tensor(t.offsets, device=device) for t in shards.tables}

    def stored(self) -> list[tuple[TableSpec, range, range]]:
        """(table, its rows, their place in this rank's stored piece)."""
        found: list[tuple[TableSpec, range, range]] = []
        low, high = self.part * self.piece_rows, (self.part + 1) * self.piece_rows
        for t in self.shards.tables:
            rows, start = t.rows_on(self.group_rank), t.offsets[self.group_rank]
            a, b = max(start, low), min(start + len(rows), high)
            if a < b:
                found.append((t.spec, rows[a - start : b - start], range(a - low, b - low)))
        return found

    def keys(self, table: str, ids_T: Tensor) -> Tensor:
        """owner * stride + row in the owner's buffer."""
        block = self.block_rows[table]
        owner = self.first_owner[table] + ids_T // block
        return owner * self.stride + self.offsets[table][owner] + ids_T % block

    def launch_gather(self, state: bool) -> None:
        self.weight.launch_gather()
        if state and self.state is not None:
            self.state.launch_gather()

    def apply_gradient(self, route: _Route, grad_UD: Tensor) -> None:
        self.launch_gather(state=True)
        grad_VD = route.to_owners(grad_UD)
        rows_W, inverse_V = torch.unique(route.rows_V, return_inverse=True)
        grad_WD = grad_VD.new_zeros(rows_W.numel(), grad_VD.shape[1], dtype=torch.float32)
        grad_WD.index_add_(0, inverse_V, grad_VD.float())
        grad_WD /= self.group_size
        state = None if self.state is None else self.state.full()
        self.optimizer.update(self.weight.full(), state, rows_W, grad_WD, self.replicas)
        self.weight.launch_publish()
        if self.state is not None:
            self.state.launch_publish()


class FullyShardedEmbeddings(nn.Module):
    """Embedding tables in the sparse view of a plan.

    The optimizer runs inside backward, so tables are no parameters of the module. Call `backward` once per forward.

    Overlap: `prefetch()` starts the forward gather (call it right after the previous step, or before the dense bottom);
    `gather_in_backward_of(x)` starts the backward gather when backward reaches x, a tensor of the dense model that
    comes after the embeddings. The reduce-scatter of a step is waited for by the next gather.

    Args:
        tables: names must differ.
        features: which feature looks up which table.
        meshes: with a sparse view.
        optimizer: `RowSGD` or `RowWiseAdagrad`; its `lr` may be changed between steps.
        init: (table, rows) -> float [len(rows), D]: initial values of some rows, equal on every rank. None: uniform in
            +-1/sqrt(num_rows), drawn per row block from `seed`.
        device, dtype: of the buffers.
        seed: of the default initialisation.

    Raises:
        ValueError: the plan lacks a sparse view, a feature names an unknown table, or replicas start different.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        features: Sequence[FeatureSpec],
        meshes: Meshes,
        optimizer: RowOptimizer,
        *,
        init: Callable[[TableSpec, range], Tensor] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_kind("meshes", meshes, Meshes, "make them with build_meshes")
        for needed in ("update", "num_states"):
            if not hasattr(optimizer, needed):
                got = type(optimizer).__name__
                raise ValueError(f"optimizer: got {got}, expected RowSGD, RowWiseAdagrad or another RowOptimizer")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype: got {dtype}, expected a floating point type")
        if not tables:
            raise ValueError("tables: got none, expected at least one")
        plan = meshes.layout.plan.sparse
        if plan is None:
            raise ValueError("meshes: the plan has no sparse view; give ParallelPlan table_group")
        for t in tables:
            check_kind("tables", t, TableSpec)
        known = {t.name: t for t in tables}
        names = [f.name for f in features]
        if len(set(names)) != len(names):
            raise ValueError(f"features: got the names {sorted(names)}, expected them to differ")
        for f in features:
            if f.table not in known:
                raise ValueError(f"features: {f.name!r} looks up {f.table!r}, expected one of {sorted(known)}")
        self.tables, self.features, self.optimizer = known, tuple(features), optimizer
        make = init or (lambda table, rows: default_rows(table, rows, seed))
        self._banks = [
            _Bank(s, meshes, optimizer, make, torch.device(device), dtype)
            for s in shard_tables(tables, plan.table_group)
        ]
        # Autograd needs an input that requires a gradient to call backward at all.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        replicas = meshes.group("sparse", "replica")
        if replicas is not None:
            check_equal_replicas(((f"tables of width {b.shards.dim}", b.weight.shard) for b in self._banks), replicas)

    def prefetch(self) -> None:
        """Start gathering weights for the next forward; does nothing for unsharded replicas."""
        for bank in self._banks:
            bank.launch_gather(state=False)

    def gather_in_backward_of(self, x: Tensor) -> Tensor:
        """Start gathering weights and state when backward has computed x's gradient; returns x."""
        check_kind("x", x, Tensor)

        def launch(gradient: Tensor) -> None:
            for bank in self._banks:
                bank.launch_gather(state=True)

        if x.requires_grad:
            x.register_hook(launch)
        return x

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Look up a batch; every rank of the table group takes part, with as many ids as it has, or none.

        Args:
            batch: a torchrec `KeyedJaggedTensor`, or feature -> (ids int64 [T], offsets int64 [B + 1]).

        Returns:
            feature -> float [B, D] for a pooled feature (zeros for a sample without ids), [T, D] for the others.

        Raises:
            ValueError: an id outside its table, a feature that is missing, or ids and offsets that do not fit together
                (their values are looked at on the CPU only).
        """
        inputs = _inputs(batch)
        missing = [f.name for f in self.features if f.name not in inputs]
        if missing:
            raise ValueError(f"batch: lacks the features {missing}; it has {sorted(inputs)}")
        for f in self.features:  # all of them before the first exchange: others would wait in the next one
            _check_input(f.name, inputs[f.name])
            self._check_ids(f, inputs[f.name][0])
        found: dict[str, Tensor] = {}
        for bank in self._banks:
            mine = [f for f in self.features if f.table in bank.first_owner]
            keys = []
            for f in mine:
                ids_T = inputs[f.name][0].to(torch.int64)
                keys.append(bank.keys(f.table, ids_T))
            keys_T = torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64, device=self._anchor.device)
            route = _Route(keys_T, bank.stride, bank.group, bank.group_size)
            rows_UD: Tensor = _Lookup.apply(self._anchor, bank, route)  # type: ignore[assignment]
            parts = rows_UD[route.inverse_T].split([k.numel() for k in keys])
            for f, rows_TD in zip(mine, parts, strict=True):
                found[f.name] = rows_TD if f.pooling is None else _pool(rows_TD, inputs[f.name][1], f.pooling)
        return {f.name: found[f.name] for f in self.features}

    def settle(self) -> None:
        """Wait until the stored weights and states are those after the last backward."""
        for bank in self._banks:
            bank.weight.release()
            bank.weight.settle()
            if bank.state is not None:
                bank.state.release()
                bank.state.settle()

    def sync(self) -> None:
        """Average the outer replicas now, if the plan lets them differ between steps; every rank calls it."""
        self.settle()
        for bank in self._banks:
            for buffer in (bank.weight, bank.state):
                if buffer is not None:
                    buffer.sync()

    @property
    def is_gathered(self) -> bool:
        """Whether any gathered copy is alive; False between forward and backward unless a gather was launched."""
        return any(b.weight.is_gathered or (b.state is not None and b.state.is_gathered) for b in self._banks)

    def stored_bytes(self) -> int:
        """Bytes that stay on this rank between uses: weights and optimizer state."""
        buffers = [b for bank in self._banks for b in (bank.weight, bank.state) if b is not None]
        return sum(b.shard.numel() * b.shard.element_size() for b in buffers)

    def checkpoint(self) -> dict[str, Tensor]:
        """A state dict for `torch.distributed.checkpoint.save` and `load`; a checkpoint loads into any other sparse
        plan.

        Returns:
            `<table>.weight` [num_rows, D] and, for Adagrad, `<table>.state` [num_rows], as pieces. Loading writes in
            place.
        """
        self.sync()
        found: dict[str, Tensor] = {}
        for bank in self._banks:
            buffers = [("weight", bank.weight.shard)] + ([] if bank.state is None else [("state", bank.state.shard)])
            for kind, data in buffers:
                for t in bank.shards.tables:
                    pieces = [
                        (rows.start, data[place.start : place.stop])
                        for spec, rows, place in bank.stored()
                        if spec.name == t.spec.name
                    ]
                    shape = (t.spec.num_rows, t.spec.dim) if kind == "weight" else (t.spec.num_rows,)
                    found[f"{t.spec.name}.{kind}"] = TablePieces(shape, pieces, data)
        return found

    def full_table(self, name: str, kind: Literal["weight", "state"] = "weight") -> Tensor:
        """A whole table on every rank, for tests and small tables; all ranks of the world call it.

        Returns:
            [num_rows, D], or [num_rows] for "state".

        Raises:
            ValueError: no such table, or no such state.
        """
        one_of("name", name, self.tables)
        one_of("kind", kind, ("weight", "state"))
        self.sync()
        spec = self.tables[name]
        bank = next(b for b in self._banks if b.shards.dim == spec.dim)
        buffer = bank.weight if kind == "weight" else bank.state
        if buffer is None:
            raise ValueError(f"kind: got {kind!r}, but {type(self.optimizer).__name__} keeps no state")
        pieces = [(rows.start, buffer.shard[p.start : p.stop].cpu()) for s, rows, p in bank.stored() if s.name == name]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, pieces)
        out = torch.zeros((spec.num_rows, spec.dim) if kind == "weight" else (spec.num_rows,), dtype=buffer.shard.dtype)
        for start, rows in (piece for rank in everyone for piece in rank):
            out[start : start + rows.shape[0]] = rows
        return out

    def _check_ids(self, f: FeatureSpec, ids_T: Tensor) -> None:
        # On a GPU the check would stall the stream before the exchange; there, out-of-range ids are the reader's to
        # prevent.
        if ids_T.is_cuda or not ids_T.numel():
            return
        low, high = int(ids_T.min()), int(ids_T.max())
        if low < 0 or high >= self.tables[f.table].num_rows:
            raise ValueError(
                f"{f.name}: got ids {low}..{high}, expected 0..{self.tables[f.table].num_rows - 1} of {f.table!r}"
            )


def default_rows(table: TableSpec, rows: range, seed: int) -> Tensor:
    """Uniform in +-1/sqrt(num_rows), a function of (seed, table, row) alone, so any sharding starts equal.

    Returns:
        float32 [len(rows), D].
    """
    block = 4096
    parts: list[Tensor] = []
    for b in range(rows.start // block, -(-rows.stop // block)):
        g = torch.Generator().manual_seed(hash_of(table.name, seed, b))
        n = min(block, table.num_rows - b * block)
        values = torch.rand(n, table.dim, generator=g)
        parts.append(values[max(rows.start - b * block, 0) : rows.stop - b * block])
    if not parts:
        return torch.empty(0, table.dim)
    return (torch.cat(parts) * 2 - 1) / table.num_rows**0.5


def hash_of(name: str, *numbers: int) -> int:
    """A stable 63-bit number (Python's own hash of a string differs between processes)."""
    digest = hashlib.sha256("/".join([name, *map(str, numbers)]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _check_input(name: str, pair: Any) -> None:
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(x, Tensor) for x in pair):
        raise ValueError(f"{name}: got {type(pair).__name__}, expected a pair of tensors (ids, offsets)")
    ids_T, offsets_S = pair
    for what, x in (("ids", ids_T), ("offsets", offsets_S)):
        if x.ndim != 1 or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise ValueError(f"{name}: got {what} {x.dtype} {tuple(x.shape)}, expected integers in one dim")
    if not offsets_S.numel():
        raise ValueError(f"{name}: got no offsets, expected one more than samples")
    if offsets_S.is_cuda:
        return  # as for ids: the host does not wait for the device
    first, last = int(offsets_S[0]), int(offsets_S[-1])
    if first or last != ids_T.numel() or bool((offsets_S.diff() < 0).any()):
        raise ValueError(
            f"{name}: got offsets {first}..{last} for {ids_T.numel()} ids, expected 0..{ids_T.numel()}, never falling"
        )


def _inputs(batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
    if isinstance(batch, Mapping):
        return batch
    if not hasattr(batch, "keys"):
        got = type(batch).__name__
        raise ValueError(f"batch: got {got}, expected a KeyedJaggedTensor, or feature -> (ids, offsets)")
    return {k: (batch[k].values(), batch[k].offsets()) for k in batch.keys()}  # noqa: SIM118 - a KJT is no mapping


def _pool(rows_TD: Tensor, offsets_S: Tensor, pooling: Pooling) -> Tensor:
    lengths_B = offsets_S.diff()
    # output_size keeps the host from reading it back from the device.
    sample_T = torch.repeat_interleave(
        torch.arange(lengths_B.numel(), device=rows_TD.device), lengths_B, output_size=rows_TD.shape[0]
    )
    out = rows_TD.new_zeros(lengths_B.numel(), rows_TD.shape[1]).index_add(0, sample_T, rows_TD)
    return out if pooling == "sum" else out / lengths_B.clamp_min(1)[:, None].to(out.dtype)


def from_torchrec(configs: Sequence[Any]) -> tuple[list[TableSpec], list[FeatureSpec]]:
    """Tables and features of torchrec configs.

    Args:
        configs: `EmbeddingBagConfig` (pooled by its `pooling`) or `EmbeddingConfig` (one row per id).

    Returns:
        Arguments for `FullyShardedEmbeddings`.

    Raises:
        ValueError: another kind of config, or another pooling than a sum or a mean.
    """
    tables: list[TableSpec] = []
    features: list[FeatureSpec] = []
    for c in configs:
        if not hasattr(c, "num_embeddings") or not hasattr(c, "feature_names"):
            raise ValueError(
                f"configs: got {type(c).__name__}, expected torchrec's EmbeddingBagConfig or EmbeddingConfig"
            )
        tables.append(TableSpec(name=c.name, num_rows=c.num_embeddings, dim=c.embedding_dim))
        kind = getattr(c, "pooling", None)
        pooling: Any = None if kind is None else str(kind.value).lower()  # FeatureSpec refuses what it does not know
        features += [FeatureSpec(name=n, table=c.name, pooling=pooling) for n in c.feature_names]
    return tables, features
