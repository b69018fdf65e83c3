"""Ensemble experts and 2D FSDP on gloo processes, against one process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from gemworks.parallel import ParallelPlan, build_meshes, presets
from gemworks.parallel.collective_log import CollectiveLog, find_order_conflict
from gemworks.parallel.experts import EnsembleExperts, _Transfer
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.replicas import check_equal_replicas
from parallel_spawn import spawn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

D, NUM_EXPERTS = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, 3 * D)
        self.b = nn.Linear(3 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def make_expert(i: int) -> nn.Module:
    torch.manual_seed(1000 + i)
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


class Model(nn.Module):
    """Dense block, experts, dense block, a scalar per row."""

    def __init__(self, group=None, overlap: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Block()
        self.second = Block()
        self.scale = nn.Parameter(torch.ones(1))
        self.experts = EnsembleExperts(make_expert, NUM_EXPERTS, group)
        self.overlap = overlap

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.overlap:
            sent = self.experts.start(h)
            side = torch.tanh(h) @ h.new_ones(D, D)
            back = self.experts.run(sent)
            side = side + h.sin()
            y = self.experts.finish(back) + 0.01 * side
        else:
            side = torch.tanh(h) @ h.new_ones(D, D) + h.sin()
            y = self.experts(h) + 0.01 * side
        return (self.second(y) * self.scale).sum(-1)


def batches(world: int, step: int, case: str) -> list[Tensor]:
    g = torch.Generator().manual_seed(77 + step)
    rows = [(r * 3 + step) % 5 for r in range(world)]
    if case == "rank 0 empty":
        rows[0] = 0
    if case == "all empty":
        rows = [0] * world
    if case == "equal":
        rows = [3] * world
    return [torch.randn(r, D, generator=g) for r in rows]


def loss_of(y: Tensor) -> Tensor:
    return (y**2).sum() / 7


def full(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def reference(world: int, case: str, steps: int, optimizer: str):
    model = Model()
    opt = make_optimizer(optimizer, model)
    losses = []
    grads: dict[str, Tensor] = {}
    for step in range(steps):
        opt.zero_grad()
        loss = torch.stack([loss_of(model(x)) for x in batches(world, step, case)]).mean()
        loss.backward()
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        opt.step()
        losses.append(float(loss.detach()))
    return losses, grads, {n: p.detach().clone() for n, p in model.named_parameters()}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(rank: int, world: int, plan_args: dict, case: str, steps: int, optimizer: str, policy: dict) -> dict:
    plan = ParallelPlan.for_world(world, **plan_args)
    meshes = build_meshes(plan, presets.h200_host(world))
    group = meshes.group("experts", "expert") if plan.experts else None
    model = Model(group, overlap=policy.pop("overlap", False))
    report = apply_fsdp(model, meshes, ["first", "second"], FsdpPolicy(**policy))
    opt = make_optimizer(optimizer, model)
    losses = []
    grads: dict[str, Tensor] = {}
    log = CollectiveLog()
    for step in range(steps):
        opt.zero_grad()
        x = batches(world, step, case)[rank]
        with log:
            y = model(x)
            loss = loss_of(y)
            loss.backward()
        if step == 0:
            grads = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    return {
        "losses": losses,
        "grads": {n: g.numpy() for n, g in grads.items()},
        "params": {n: full(p).numpy() for n, p in model.named_parameters()},
        "events": log.events,
        "report": report.text(),
    }


CASES = [
    # each dimension alone
    ("shard", {"shard": 4, "expert": 1, "expert_shard": 1}, {}),
    ("replica", {"shard": 1, "expert": 1}, {}),
    ("expert", {"shard": 1, "expert": 4}, {}),
    ("expert_shard", {"shard": 1, "expert": 1, "expert_shard": 4}, {}),
    # pairs and more: the real 2 x 2
    ("shard x replica", {"shard": 2, "expert": 1, "expert_shard": 2}, {"min_shard_numel": 9}),
    ("shard x expert", {"shard": 4, "expert": 2, "expert_shard": 2}, {"keep_bytes": 10**6}),
    ("2x2 and expert x replica", {"shard": 2, "expert": 2, "expert_shard": 1}, {"overlap": True, "prefetch": False}),
]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "plan", "policy"), CASES, ids=[c[0] for c in CASES])
def test_m3_loss_gradients_and_ten_steps_equal_one_process(name: str, plan: dict, policy: dict) -> None:
    """M3: expert parallelism must not double gradients. M5: the order of collectives is the same everywhere."""
    case = "rank 0 empty" if "expert" in name else "mixed"
    optimizer = "adamw" if "x" in name else "sgd"
    losses, grads, params = reference(4, case, 10, optimizer)
    results = spawn(_train, 4, plan, case, 10, optimizer, policy)
    for r in results:
        assert r["losses"] == pytest.approx(losses, rel=2e-5, abs=1e-6)
        assert set(r["grads"]) == set(r["params"])
        for n, g in r["grads"].items():
            torch.testing.assert_close(torch.from_numpy(g), grads[n], rtol=2e-4, atol=1e-6, msg=n)
        for n, p in r["params"].items():
            torch.testing.assert_close(torch.from_numpy(p), params[n], rtol=2e-4, atol=2e-5, msg=n)
    logs = [r["events"] for r in results]
    assert all(len(log) for log in logs)
    assert find_order_conflict(logs) is None


@pytest.mark.dist
@pytest.mark.parametrize("case", ["equal", "all empty"])
def test_m2_every_rank_may_be_empty(case: str) -> None:
    """M2: a rank, or all ranks, with no rows."""
    losses, _, params = reference(2, case, 2, "sgd")
    for r in spawn(_train, 2, {"shard": 2, "expert": 2}, case, 2, "sgd", {"overlap": True}):
        assert r["losses"] == pytest.approx(losses, rel=1e-5, abs=1e-7)
        for n, p in r["params"].items():
            torch.testing.assert_close(torch.from_numpy(p), params[n], rtol=1e-4, atol=1e-6)


@pytest.mark.dist
@pytest.mark.slow
def test_m3_eight_processes_two_by_two_by_two() -> None:
    """M3 with expert 2 x expert_shard 2 x replica 2 and FSDP 4 x 2."""
    losses, _, params = reference(8, "mixed", 10, "adamw")
    for r in spawn(_train, 8, {"shard": 4, "expert": 2, "expert_shard": 2}, "mixed", 10, "adamw", {"overlap": True}):
        assert r["losses"] == pytest.approx(losses, rel=2e-5, abs=1e-6)
        for n, p in r["params"].items():
            torch.testing.assert_close(torch.from_numpy(p), params[n], rtol=2e-4, atol=2e-5)


def _sum_or_mean(rank: int, world: int, gradient: str) -> dict:
    group = dist.group.WORLD
    experts = EnsembleExperts(make_expert, NUM_EXPERTS, group, gradient=gradient)  # type: ignore[arg-type]
    x = batches(world, 0, "mixed")[rank].requires_grad_()
    loss_of(experts(x)).backward()
    assert x.grad is not None
    grads = {n: p.grad.numpy() for n, p in experts.local.named_parameters() if p.grad is not None}
    return {"x": x.grad.numpy(), "weights": grads}


@pytest.mark.dist
@pytest.mark.parametrize(("gradient", "share"), [("sum", 1.0), ("mean", 0.5)])
def test_weight_gradients_are_sums_or_means_and_input_gradients_are_the_same(gradient: str, share: float) -> None:
    alone = EnsembleExperts(make_expert, NUM_EXPERTS)
    xs = [x.requires_grad_() for x in batches(2, 0, "mixed")]
    torch.stack([loss_of(alone(x)) for x in xs]).sum().backward()
    want = dict(alone.local.named_parameters())
    for rank, r in enumerate(spawn(_sum_or_mean, 2, gradient)):
        torch.testing.assert_close(torch.from_numpy(r["x"]), xs[rank].grad)
        assert len(r["weights"]) == len(want) // 2
        for n, g in r["weights"].items():
            torch.testing.assert_close(torch.from_numpy(g), share * want[n].grad, msg=n)  # type: ignore[operator]


def _buffers_after_steps(rank: int, world: int, case: str) -> list[bool]:
    made: list[StorageWeakRef] = []
    real = {name: getattr(_Transfer, name) for name in ("all_gather", "reduce_scatter")}

    def noting(name: str) -> Callable[[_Transfer, Tensor], tuple[Tensor, object]]:
        def launch(transfer: _Transfer, x: Tensor) -> tuple[Tensor, object]:
            out, work = real[name](transfer, x)
            made.append(StorageWeakRef(out.untyped_storage()))
            return out, work

        return launch

    for name in real:
        setattr(_Transfer, name, noting(name))
    experts = EnsembleExperts(make_expert, NUM_EXPERTS, dist.group.WORLD)

    def run(step: int) -> None:
        loss_of(experts(batches(world, step, case)[rank].requires_grad_() * 1)).backward()

    run(0)
    run(1)
    experts.zero_grad()
    gc.collect()
    return [storage.expired() for storage in made]


@pytest.mark.dist
@pytest.mark.parametrize("case", ["equal", "mixed"])
def test_no_buffer_of_a_step_outlives_it(case: str) -> None:
    for freed in spawn(_buffers_after_steps, 2, case):
        assert freed == [True] * 8  # two steps of two gathers and two scatters


def _different_experts(rank: int, world: int) -> str:
    meshes = build_meshes(ParallelPlan.for_world(world, shard=1, expert=1), presets.h200_host(world))
    model = Model()
    with torch.no_grad():
        model.experts.local.gates["2"].fill_(float(rank))
    try:
        apply_fsdp(model, meshes, ["first", "second"])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_m4_experts_that_start_different_on_their_replicas_are_named() -> None:
    for message in spawn(_different_experts, 2):
        assert "['experts: gates.2'] of" in message


def _different(rank: int, world: int) -> str:
    torch.manual_seed(rank)
    same = nn.Linear(2, 2)
    with torch.no_grad():
        same.weight.fill_(1.0)
    try:
        check_equal_replicas(same.named_parameters(), None)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_m4_replicas_that_start_different_are_named_on_every_rank() -> None:
    """M4: replicas are checked equal at start."""
    for message in spawn(_different, 2):
        assert "['bias'] of 2" in message


class _CountingGather:
    """The process group's all-gather, counted."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Doubled(torch.Tensor):
    """A weight that travels halved and arrives whole: a stand-in for a quantised weight."""

    seen = 0

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(
            cls, x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad
        )

    def __init__(self, x):
        self._x = x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        from torch.utils._pytree import tree_map

        plain = tree_map(lambda t: t._x if isinstance(t, Doubled) else t, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if func.overloadpacket.__name__ in ("copy_",):
            return args[0]
        keep = (
            "empty_like",
            "new_zeros",
            "slice",
            "view",
            "as_strided",
            "_to_copy",
            "clone",
            "split",
            "detach",
            "_pin_memory",
        )
        if func.overloadpacket.__name__ in keep:
            return tree_map(lambda t: Doubled(t) if isinstance(t, Tensor) else t, out)
        return out

    def fsdp_pre_all_gather(self, mesh):
        Doubled.seen += 1
        return (self._x / 2,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (half,) = outputs
        if out is not None:
            out.copy_(half * 2)
            return None
        return half * 2, (half,)


def _hooks(rank: int, world: int) -> dict:
    meshes = build_meshes(ParallelPlan.for_world(world, shard=world, expert=1), presets.h200_host(world))
    gather = _CountingGather()
    model = Model()
    x = torch.randn(3, D, generator=torch.Generator().manual_seed(1))
    want = model(x).detach()

    def wrap(name: str, p: nn.Parameter):
        return Doubled(p.detach()) if name == "first.a.weight" else None

    apply_fsdp(model, meshes, ["first", "second"], FsdpPolicy(all_gather=gather, wrap_weight=wrap))
    y = model(x)
    loss_of(y).backward()
    return {"error": float((y.detach() - want).abs().max()), "gathers": gather.calls, "wrapped": Doubled.seen}


@pytest.mark.dist
def test_hooks_for_another_all_gather_and_for_quantised_weights() -> None:
    for r in spawn(_hooks, 2):
        assert r["error"] < 1e-5
        assert r["gathers"] >= 2
        assert r["wrapped"] >= 1


@pytest.fixture
def two_ranks() -> Iterator[dist.ProcessGroup | None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_expert_counts_that_do_not_divide_say_what_would(two_ranks: dist.ProcessGroup | None) -> None:
    with pytest.raises(ValueError, match=r"num_experts: got 3, .* a multiple of the 2 ranks .* use 2 or 4 experts"):
        EnsembleExperts(make_expert, 3, two_ranks)
    with pytest.raises(ValueError, match=r"use 2 experts, or another group"):
        EnsembleExperts(make_expert, 1, two_ranks)


@pytest.mark.parametrize("rows", [[5], [5, 3, 1], [4, 5], [5, -1]])
def test_rows_that_cannot_be_are_named(rows: list[int], two_ranks: dist.ProcessGroup | None) -> None:
    experts = EnsembleExperts(make_expert, 2, two_ranks)
    with pytest.raises(ValueError, match=r"rows: got .* expected 2 counts with 5, x's rows, at place 0"):
        experts.start(torch.zeros(5, D), rows)


def test_one_process_is_a_gated_sum_and_differentiates() -> None:
    experts = EnsembleExperts(make_expert, 3)
    with torch.no_grad():
        for i, gate in enumerate([1.0, -2.0, 0.5]):
            experts.local.gates[str(i)].fill_(gate)
    x = torch.randn(5, D)
    want = sum(g * e(x) for g, e in zip([1.0, -2.0, 0.5], experts.local.experts.values(), strict=True))
    torch.testing.assert_close(experts(x), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_fingerprints_tell_one_bit_and_two_swapped_values(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemworks.parallel import replicas

    monkeypatch.setattr(replicas, "_PIECE", 16)
    x = torch.arange(1, 41).to(dtype)
    same = replicas.fingerprint(x)
    assert torch.equal(same, replicas.fingerprint(x.clone()))
    bit = x.clone()
    bit.view(torch.uint8)[33] ^= 1
    assert not torch.equal(same, replicas.fingerprint(bit))
    swapped = x.clone()
    swapped[[3, 30]] = x[[30, 3]]
    assert not torch.equal(same, replicas.fingerprint(swapped))
    assert torch.equal(replicas.fingerprint(x[:0]), torch.zeros(2, dtype=torch.int64))


def test_order_conflicts_are_found() -> None:
    """M5: a hang is told from the records."""
    from gemworks.parallel.collective_log import Event

    ring = [Event("allreduce", (i, (i + 1) % 3), 4) for i in range(3)]
    assert find_order_conflict([[ring[0], ring[2]], [ring[1], ring[0]], [ring[2], ring[1]]]) is not None
    assert find_order_conflict([[Event("a", (0, 1), 4)], []]) == "rank 0 waits in a over (0, 1)"
    sizes = [[Event("a", (0, 1), 4)], [Event("a", (0, 1), 8)]]
    assert find_order_conflict(sizes) is None
    assert find_order_conflict(sizes, compare_bytes=True) is not None
