"""What runs beside what, and what a policy makes of a model: on the fake process group, so in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gemworks.parallel import (
    EnsembleExperts,
    FsdpPolicy,
    ParallelPlan,
    apply_fsdp,
    build_meshes,
    embeddings,
    place,
    presets,
)
from gemworks.parallel.collective_log import CollectiveLog
from gemworks.parallel.embeddings import FeatureSpec, FullyShardedEmbeddings
from gemworks.parallel.global_balance import exchange_samples
from gemworks.parallel.sparse_optim import RowSGD, RowWiseAdagrad
from gemworks.parallel.tables import TableSpec
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytestmark = [
    pytest.mark.dist,
    # torch 2.13 renames collectives that 2.11 has under the old name alone; here a test calls them for the library
    pytest.mark.filterwarnings("ignore:.*_tensor` is deprecated:FutureWarning"),
]


@pytest.fixture
def world() -> Iterator[Callable[[int], None]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)

    yield start
    dist.destroy_process_group()


class Watched:
    """A collective's handle that says when it is waited for."""

    def __init__(self, events: list[str], name: str, work: Any) -> None:
        self.events, self.name, self.work = events, name, work

    def wait(self) -> None:
        self.events.append(f"wait {self.name}")
        self.work.wait()


def watch(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    for function, name in (("all_gather_into_tensor", "all_gather"), ("reduce_scatter_tensor", "reduce_scatter")):
        real = getattr(dist, function)

        def watched(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            events.append(f"launch {name}")
            work = real(*args, **kwargs)
            return None if work is None else Watched(events, name, work)

        monkeypatch.setattr(dist, function, watched)


class Mark(torch.autograd.Function):
    """Neighbouring compute: notes when it runs, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], name: str) -> Tensor:  # type: ignore[override]
        ctx.events, ctx.name = events, name
        events.append(name)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.events.append(f"{ctx.name} backward")
        return gradient, None, None


class Noting(nn.Module):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def forward(self, x: Tensor) -> Tensor:
        return Mark.apply(x, self.events, "expert")  # type: ignore[return-value]


def test_compute_between_the_calls_runs_between_launch_and_wait_both_ways(world, monkeypatch) -> None:
    world(2)
    events: list[str] = []
    experts = EnsembleExperts(lambda i: Noting(events), 2, dist.group.WORLD)
    watch(monkeypatch, events)
    x = torch.ones(3, 4, requires_grad=True)
    sent = experts.start(x, [3, 3])
    side = Mark.apply(x, events, "first")
    back = experts.run(sent)
    side = Mark.apply(side, events, "second")
    y = experts.finish(back)
    forward = ["launch all_gather", "first", "wait all_gather", "expert"]
    assert events == [*forward, "launch reduce_scatter", "second", "wait reduce_scatter"]
    events.clear()
    (y.sum() + side.sum()).backward()  # type: ignore[union-attr]
    gather = events.index("launch all_gather"), events.index("wait all_gather")
    scatter = events.index("launch reduce_scatter"), events.index("wait reduce_scatter")
    assert gather[0] < events.index("second backward") < gather[1]
    assert scatter[0] < events.index("first backward") < scatter[1]
    assert gather[1] < events.index("expert backward") < scatter[0]


def test_row_counts_that_do_not_agree_with_the_input_are_named(world) -> None:
    world(2)
    experts = EnsembleExperts(lambda i: nn.Identity(), 2, dist.group.WORLD)
    for rows in ([2, 3], [3]):
        with pytest.raises(ValueError, match=r"expected 2 counts with 3, x's rows, at place 0"):
            experts.start(torch.ones(3, 4), rows)


def tables(table_group: int, replica_shard: int, rule: RowSGD | RowWiseAdagrad, rows: int = 64):
    size = table_group * replica_shard
    plan = ParallelPlan.for_world(size, shard=size, table_group=table_group, replica_shard=replica_shard)
    specs = [TableSpec(name="t", num_rows=rows, dim=8, sharding="row_wise")]
    meshes = build_meshes(plan, presets.h200_host(size))
    return FullyShardedEmbeddings(specs, [FeatureSpec(name="f", table="t", pooling="sum")], meshes, rule)


BATCH = {"f": (torch.tensor([0, 5, 5]), torch.tensor([0, 2, 3]))}


def test_table_gathers_are_launched_ahead_of_the_lookup_and_of_the_update(world, monkeypatch) -> None:
    world(4)
    emb = tables(1, 4, RowWiseAdagrad(lr=0.1))
    events: list[str] = []
    watch(monkeypatch, events)
    emb.prefetch()
    assert events == ["launch all_gather"], "weights alone; the lookup waits"
    events.append("dense bottom")
    rows = emb(BATCH)["f"]
    assert events == ["launch all_gather", "dense bottom", "wait all_gather"]
    assert not emb.is_gathered
    events.clear()
    top = emb.gather_in_backward_of(Mark.apply(rows, events, "dense"))  # type: ignore[arg-type]
    top.sum().backward()
    assert events == [
        *("dense", "launch all_gather", "launch all_gather", "dense backward", "wait all_gather", "wait all_gather"),
        *("launch reduce_scatter", "launch reduce_scatter"),
    ], "weights and state on their way while the dense part computes; the update's result is not waited for"
    events.clear()
    emb.prefetch()
    assert events[:2] == ["wait reduce_scatter", "launch all_gather"]


class Live(TorchDispatchMode):
    """How many storages of at least `least` bytes are alive at once."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.most = least, 0
        self.seen: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() >= self.least:
                self.seen.add(StorageWeakRef(x.untyped_storage()))
        self.seen = {ref for ref in self.seen if not ref.expired()}
        self.most = max(self.most, len(self.seen))
        return out


@pytest.mark.parametrize("rows", [64 * 41, 64 * 41 - 1])
def test_one_copy_of_the_rows_is_alive_in_the_lookup_and_in_the_update(world, rows: int) -> None:
    """No second one for a collective, also where the rows do not divide by the replica shards."""
    world(8)
    emb = tables(1, 8, RowSGD(lr=0.1), rows)
    with Live(least=rows * 8 * 4) as live:
        loss = emb(BATCH)["f"].sum()
        assert live.most == 1
        assert not emb.is_gathered
        loss.backward()
        emb.settle()
    assert live.most == 1
    assert emb.stored_bytes() == 64 * 41 // 8 * 8 * 4


class Named(nn.ModuleDict):
    """Blocks by name, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.values():
            x = block(x)
        return x


def test_blocks_stay_gathered_smallest_first_as_far_as_the_bytes_reach(world) -> None:
    world(4)
    meshes = build_meshes(ParallelPlan.for_world(4, shard=4), presets.h200_host(4))

    def kept(keep_bytes: int, **more: Any) -> list[str]:
        model = Named({n: nn.Linear(16, k, bias=False) for n, k in (("a", 48), ("b", 16), ("c", 32), ("d", 64))})
        report = apply_fsdp(model, meshes, list(model), FsdpPolicy(keep_bytes=keep_bytes, **more), check=False)
        size = 2 if more else 4
        assert dict(report.block_bytes) == {n: 16 * k * size for n, k in (("a", 48), ("b", 16), ("c", 32), ("d", 64))}
        return [n for n, how in report.blocks.items() if how == "kept"]

    assert kept(0) == ["d"], "the last block's backward follows at once"
    assert kept(16 * 4 * 16) == ["b", "d"]
    assert kept(16 * 4 * (16 + 32) + 1) == ["b", "c", "d"]
    assert kept(16 * 4 * (16 + 32) + 1, param_dtype=torch.bfloat16) == ["a", "b", "c", "d"]


def test_prefetch_is_one_module_ahead_both_ways(world, monkeypatch) -> None:
    world(4)
    meshes = build_meshes(ParallelPlan.for_world(4, shard=4), presets.h200_host(4))
    calls: list[tuple[str, str, list[str]]] = []
    model = Named({n: nn.Linear(16, 16) for n in "abc"})
    names = {id(m): n for n, m in model.items()}
    for way in ("forward", "backward"):

        def note(self: nn.Module, modules: list[nn.Module], way: str = way) -> None:
            calls.append((way, names[id(self)], [names[id(m)] for m in modules]))

        monkeypatch.setattr(FSDPModule, f"set_modules_to_{way}_prefetch", note)
    apply_fsdp(model, meshes, list("abc"), FsdpPolicy(), check=False)
    assert sorted(calls) == [
        *(("backward", "b", ["a"]), ("backward", "c", ["b"])),
        *(("forward", "a", ["b"]), ("forward", "b", ["c"])),
    ]
    calls.clear()
    other = Named({n: nn.Linear(16, 16) for n in "abc"})
    apply_fsdp(other, meshes, list("abc"), FsdpPolicy(prefetch=False), check=False)
    assert calls == []


def test_weights_travel_and_compute_in_one_dtype_and_gradients_are_reduced_in_another(world) -> None:
    world(4)
    meshes = build_meshes(ParallelPlan.for_world(4, shard=2), presets.h200_host(4))
    model = nn.Sequential(nn.Linear(16, 32, bias=False))
    apply_fsdp(model, meshes, ["0"], FsdpPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), check=False)
    with CollectiveLog() as log:
        y = model(torch.ones(2, 16))
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
    sent = {e.op: e.nbytes for e in log.events}
    assert sent["allgather_base"] == 16 * 32 * 2
    assert max(n for op, n in sent.items() if "reduce" in op) in (16 * 32 * 4, 16 * 32 * 4 // 2)
    (p,) = model.parameters()
    assert p.dtype == torch.float32
    assert p.grad is not None
    assert p.grad.dtype == torch.float32


def test_rows_move_by_the_stated_rule() -> None:
    """s += scale * mean(g^2); w -= lr * g / (sqrt(s) + eps), with 1 / R as the scale unless one is given."""
    g = torch.tensor([[3.0, -1.0]])
    for given, scale in ((None, 1 / 4), (0.5, 0.5), (0.0, 0.0)):
        w, s = torch.zeros(3, 2), torch.tensor([1.0, 4.0, 9.0])
        RowWiseAdagrad(lr=0.1, eps=0.25, moment_scale=given).update(w, s, torch.tensor([1]), g, 4)
        assert s.tolist() == [1.0, 4.0 + scale * 5.0, 9.0]
        torch.testing.assert_close(w[1], -0.1 * g[0] / (s[1].sqrt() + 0.25))
        assert not w[[0, 2]].any()


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_features_of_all_banks_are_looked_at_before_the_first_exchange(world, monkeypatch, wrong: str) -> None:
    """A rank that stopped between two banks would leave the others in the second one's exchange."""
    world(1)
    meshes = build_meshes(ParallelPlan.for_world(1, shard=1, table_group=1), presets.h200_host(1))
    specs = [TableSpec(name="a", num_rows=8, dim=4), TableSpec(name="b", num_rows=8, dim=6)]
    features = [FeatureSpec(name=t.name, table=t.name) for t in specs]
    emb = FullyShardedEmbeddings(specs, features, meshes, RowSGD(lr=0.1))
    assert len(emb._banks) == 2
    routes: list[object] = []
    route = embeddings._Route
    monkeypatch.setattr(embeddings, "_Route", lambda *args: routes.append(args) or route(*args))
    batch = {t.name: (torch.tensor([1]), torch.tensor([0, 1])) for t in specs}
    emb(batch)
    assert len(routes) == 2
    with pytest.raises(ValueError, match=rf"{wrong}: got ids 8..8"):
        emb(batch | {wrong: (torch.tensor([8]), torch.tensor([0, 1]))})
    assert len(routes) == 2


def test_what_does_not_fit_together_is_named_before_anything_is_sent(world) -> None:
    world(1)
    host = presets.h200_host(1)
    plan = ParallelPlan.for_world(1, shard=1, table_group=1)
    meshes = build_meshes(plan, host)
    specs, features = [TableSpec(name="t", num_rows=8, dim=4)], [FeatureSpec(name="f", table="t", pooling="sum")]
    emb = FullyShardedEmbeddings(specs, features, meshes, RowSGD(lr=0.1))
    ids, offsets = BATCH["f"]
    values, lengths, costs = torch.ones(3, 2), torch.tensor([1, 2]), torch.tensor([1.0, 2.0])

    def made(**changes: Any) -> object:
        arguments = {"tables": specs, "features": features, "meshes": meshes, "optimizer": RowSGD(lr=0.1)}
        return FullyShardedEmbeddings(**arguments | changes)

    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: emb(None), "batch: got NoneType, expected a KeyedJaggedTensor"),
        (lambda: emb({"f": ids}), "f: got Tensor, expected a pair"),
        (lambda: emb({"f": (ids + 0.5, offsets)}), "f: got ids torch.float32"),
        (lambda: emb({"f": (ids[None], offsets)}), r"f: got ids torch.int64 \(1, 3\)"),
        (lambda: emb({"f": (ids, offsets.float())}), "f: got offsets torch.float32"),
        (lambda: emb({"f": (ids, torch.tensor([0, 2]))}), r"offsets 0..2 for 3 ids, expected 0..3"),
        (lambda: emb({"f": (ids, torch.tensor([1, 3]))}), r"offsets 1..3 for 3 ids"),
        (lambda: emb({"f": (ids, torch.tensor([0, 2, 1, 3]))}), "never falling"),
        (lambda: emb.gather_in_backward_of(None), "x: got NoneType"),  # type: ignore[arg-type]
        (lambda: emb.full_table("no"), "name: got 'no'"),
        (lambda: emb.full_table("t", "moment"), "kind: got 'moment'"),  # type: ignore[arg-type]
        (lambda: made(tables=[]), "tables: got none"),
        (lambda: made(features=features * 2), "features: got the names"),
        (lambda: made(optimizer=torch.optim.SGD([torch.ones(1)], lr=0.1)), "optimizer: got SGD, expected RowSGD"),
        (lambda: made(init=lambda t, rows: torch.ones(3, 3)), r"init: got \(3, 3\) for 8 rows of 't'"),
        (lambda: made(dtype=torch.int64), "dtype: got torch.int64"),
        (lambda: exchange_samples([values[:2]], lengths, costs), r"values: got shape \(2, 2\), expected 3 rows"),
        (lambda: exchange_samples([values], lengths, costs[:1]), r"costs_B: got shape \(1,\)"),
        (lambda: exchange_samples([values], lengths, costs / 0), "costs_B: got a value that is not finite"),
        (lambda: exchange_samples([values], torch.tensor([4, -1]), costs), "lengths_B: got -1"),
        (lambda: exchange_samples([values], lengths.float(), costs), "lengths_B: got torch.float32"),
        (lambda: build_meshes(None, host), "plan: got NoneType"),  # type: ignore[arg-type]
        (lambda: build_meshes(plan, host, timeout=5), "timeout: got int, expected timedelta"),  # type: ignore[arg-type]
        (
            lambda: build_meshes(plan, host, placement=place(ParallelPlan.for_world(1, shard=1), host)),
            "placement: got one of dense shard 1 x replica 1, expected",
        ),
        (lambda: meshes.mesh("nope"), "view: got 'nope'"),  # type: ignore[arg-type]
        (lambda: apply_fsdp(nn.Sequential(nn.Linear(1, 1)), meshes, ["0", "0"]), "expected each name once"),
        (lambda: apply_fsdp(nn.Linear(1, 1), meshes, "0"), "blocks: got '0', expected a list of names"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
