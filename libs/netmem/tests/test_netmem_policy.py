"""Policies per region: lossless ones give equal gradients, the profile's bytes are true, plans keep their budget when
run.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from gemworks.netmem import policy as policy_module
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.budget import CHOICES, KEEP, QUANTISE, QUANTISE_OFFLOAD, StepProfile, evaluate
from gemworks.netmem.ledger import BandwidthLedger, Link
from gemworks.netmem.meters import LiveStorages, storages
from gemworks.netmem.movers import DelayedMover
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.policy import apply_policy, compile_with_budget, explain_compile_budget, has_region_budget
from gemworks.netmem.profiler import profile, table
from gemworks.netmem.solver import least_feasible, solve
from torch import nn

pytestmark = pytest.mark.reference
# importing the partitioner's decompositions runs torch's own deprecated torch.jit.script_method
SCRIPT_METHOD = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
# dynamo itself looks at .grad of its non-leaf inputs
NON_LEAF_GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
LOSSLESS = [c for c in CHOICES if c not in (QUANTISE, QUANTISE_OFFLOAD)]


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(32, h) for h in (32, 128, 64, 256)])
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x).square().mean()


REGIONS = [f"layers.{i}" for i in range(4)]
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def everywhere(choice: str) -> dict[str, str]:
    return {name: choice for name in REGIONS}  # noqa: C420 - fromkeys loses the value's type


def make_engine(window_bytes: int = 0) -> OffloadEngine:
    return OffloadEngine(PinnedArena(8 << 20, pin=False), device="cpu", window_bytes=window_bytes, min_bytes=64)


def make_ledger(rate: float = 1e9) -> BandwidthLedger:
    return BandwidthLedger([Link("host.up", rate), Link("host.down", rate)], hbm_bytes_per_s=1e12)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    x = X.clone().requires_grad_()
    model(x).backward()
    assert x.grad is not None
    return [x.grad, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_in_eager_and_back(choice):
    model, engine = Model(), make_engine()
    expected = gradients(model)
    with apply_policy(model, everywhere(choice), engine=engine) as applied:
        assert applied.choices["layers.0"] == choice
        got = gradients(model)
        with torch.no_grad():
            model(X)
    for a, b in zip(got, expected, strict=True):
        if choice in LOSSLESS:
            assert torch.equal(a, b)
        else:
            assert 10 * torch.log10(b.square().sum() / (a - b).square().sum()) > 20
    assert engine.stats().num_live == 0
    assert "forward" not in model.layers[0].__dict__
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


def test_mixed_choices_are_bit_equal():
    model, engine = Model(), make_engine()
    expected = gradients(model)
    choices = dict(zip(REGIONS, ["offload", "recompute", "keep", "recompute_cheap"], strict=True))
    with apply_policy(model, choices, engine=engine):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))
    assert engine.stats().num_moved > 0


@SCRIPT_METHOD
@NON_LEAF_GRAD
@pytest.mark.parametrize("choice", ["recompute", "offload", "recompute_cheap"])
def test_lossless_choices_in_compiled_regions_equal_compiled_keep(choice):
    torch._dynamo.reset()
    model, engine = Model(), make_engine()
    compile_kwargs = {"backend": "aot_eager_decomp_partition"}
    with apply_policy(model, everywhere(KEEP), compile_kwargs=compile_kwargs):
        expected = gradients(model)
    torch._dynamo.reset()
    with apply_policy(model, everywhere(choice), engine=engine, compile_kwargs=compile_kwargs):
        for a, b in zip(gradients(model), expected, strict=True):
            assert torch.equal(a, b)


@SCRIPT_METHOD
@pytest.mark.parametrize("native", [True, False])
def test_a_smaller_partitioner_budget_saves_fewer_bytes(monkeypatch, native):
    if native and not has_region_budget():
        pytest.skip("this torch has no region_activation_memory_budget")
    if not native:
        monkeypatch.setattr(policy_module, "has_region_budget", lambda: False)
    layer = Layer(32, 128)
    weights = {p.untyped_storage()._cdata for p in layer.parameters()}
    found = []
    for budget in (1.0, 0.5, 0.0):
        torch._dynamo.reset()
        call = compile_with_budget(layer.forward, budget, backend="aot_eager_decomp_partition")
        sizes: dict[int, int] = {}

        def pack(x: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            if x.untyped_storage()._cdata not in weights:
                sizes[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            call(X.clone().requires_grad_())
        found.append(sum(sizes.values()))
    assert found[0] > found[2]
    assert found[0] >= found[1] >= found[2]
    assert "budget" in explain_compile_budget()


def test_profile_bytes_are_what_the_region_really_holds():
    model, engine = Model(), make_engine()
    step = profile(model, X.clone().requires_grad_(), REGIONS, ledger=make_ledger(), engine=engine, repeats=1)
    assert [r.name for r in step.regions] == REGIONS
    unit = 64 * 4  # bytes of one feature of the batch
    region = step.regions[3]
    # norm keeps x, mean, rstd; `up` its input; gelu its input; `down` its input; all but the statistics by hand
    assert region.option("keep").held_bytes == (32 + 32 + 256 + 256) * unit + 2 * unit
    assert region.option("recompute").held_bytes == 32 * unit
    assert region.option("recompute_cheap").held_bytes < region.option("keep").held_bytes
    offload = region.option("offload")
    assert offload.held_bytes == 0
    assert offload.moved_bytes == region.option("keep").held_bytes
    quantise = region.option("quantise")
    assert quantise.held_bytes < 0.3 * region.option("keep").held_bytes  # float32 to one byte and scales
    assert region.option("quantise_offload").moved_bytes == quantise.held_bytes
    for r in step.regions:
        for o in r.options:
            assert o.forward_bytes >= o.held_bytes
            assert o.backward_bytes >= o.held_bytes
    base = sum(p.numel() * 4 for p in model.parameters())
    assert step.base_bytes == 2 * base + X.numel() * 4
    assert "ms/GB" in table(step)


def peak_of_a_step(model: nn.Module, engine: OffloadEngine) -> int:
    """Peak bytes of a real forward and backward, parameters, gradients and batch included."""
    x = X.clone().requires_grad_()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    engine.arena.prepare()
    fixed = [*model.parameters(), *[p.grad for p in model.parameters()], x, engine.arena.region]
    base = sum(t.numel() * t.element_size() for t in fixed[:-1] if t is not None)
    meter = LiveStorages(storages(fixed))
    with meter:
        model(x).backward()
        return base + meter.peak()


# the gradient of the loss, and the loss
SCALARS = 16


@pytest.mark.parametrize("choice", ["keep", "recompute"])
def test_o6_what_lies_outside_the_regions_is_in_the_base(choice):
    model, engine = Model(), make_engine()
    model.head = nn.Linear(32, 4096)
    step = profile(
        model,
        X.clone().requires_grad_(),
        REGIONS,
        ledger=make_ledger(),
        engine=engine,
        repeats=1,
        choices=["keep", "recompute"],
    )
    alone = profile(Model(), X, REGIONS, ledger=make_ledger(), engine=engine, repeats=1, choices=["keep"])
    # products of the head, their squares and gradients
    assert step.base_bytes - alone.base_bytes > 2 * 64 * 4096 * 4
    plan = evaluate(step, [choice] * 4)
    with apply_policy(model, plan, engine=engine):
        assert peak_of_a_step(model, engine) <= plan.peak_bytes + SCALARS


@pytest.fixture(scope="module")
def slow_link_profile() -> StepProfile:
    batch = X.clone().requires_grad_()
    return profile(Model(), batch, REGIONS, ledger=make_ledger(1e7), engine=make_engine(40_000), repeats=1)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_o6_the_real_peak_stays_within_the_budget(share, slow_link_profile):
    step = slow_link_profile
    model, engine = Model(), make_engine(window_bytes=40_000)
    least, keep = least_feasible(step).peak_bytes, evaluate(step, ["keep"] * 4).peak_bytes
    assert least < keep
    budget = least + share * (keep - least)
    plan = solve(step, budget)
    with apply_policy(model, plan, engine=engine):
        real = peak_of_a_step(model, engine)
    assert real <= budget + SCALARS
    if share == 1.0:
        assert plan.step_s <= evaluate(step, ["keep"] * 4).step_s


class _Heavy(torch.autograd.Function):
    """Saves nothing, and works in a lot of memory in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] + torch.zeros(40_000)[0]


class _Part(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "heavy":
            return _Heavy.apply(x)  # type: ignore[return-value]
        for _ in range(8 if self.kind == "saves" else 0):
            x = x.sin()
        return x * 2


@pytest.mark.parametrize("up", [1e3, 1e12])
@pytest.mark.parametrize("max_delay", [0, 10**6])
@pytest.mark.parametrize("kinds", [("saves", "light", "heavy", "light"), ("heavy", "saves", "light", "light")])
def test_o6_what_is_late_or_early_stays_out_of_a_backward_without_room(up, max_delay, kinds):
    """A region's tensors, late on a slow way out or early on a fast way back, while another one works at the peak: in
    backward before they are needed, or after they were used without ever having left. With a million calls of delay no
    copy is done before somebody waits for it."""
    names = ["0", "1", "2", "3"]
    model = nn.Sequential(*[_Part(kind) for kind in kinds])
    ledger = BandwidthLedger([Link("host.up", up), Link("host.down", 1e12)], hbm_bytes_per_s=1e13)
    x = torch.randn(5000, requires_grad=True)

    def engine(mover: DelayedMover | None = None) -> OffloadEngine:
        arena = PinnedArena(8 << 20, pin=False)
        return OffloadEngine(arena, device="cpu", window_bytes=1 << 20, min_bytes=64, mover=mover)

    step = profile(model, x, names, ledger=ledger, engine=engine(), repeats=1, choices=["keep", "offload"])
    plan = evaluate(step, ["offload" if kind == "saves" else "keep" for kind in kinds])
    assert kinds[0] != "saves" or plan.peak_bytes < evaluate(step, ["keep"] * 4).peak_bytes - 100_000
    run = engine(DelayedMover(0, max_delay=max_delay, chunk_bytes=1 << 20))
    run.arena.prepare()
    x.grad = torch.zeros_like(x)
    meter = LiveStorages(storages([x, x.grad, run.arena.region]))
    with apply_policy(model, plan, engine=run), meter:
        model(x).sum().backward()
    assert step.base_bytes + meter.peak() <= plan.peak_bytes + SCALARS


@pytest.mark.parametrize("choice", ["recompute", "recompute_cheap"])
def test_recomputed_regions_get_keyword_arguments_of_checkpoints_names(choice):
    class Debugged(nn.Linear):
        def forward(self, x: torch.Tensor, *, debug: bool = False) -> torch.Tensor:  # pyright: ignore
            return super().forward(x) * (2 if debug else 1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Debugged(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, debug=True)

    model, x = Outer(), torch.ones(1, 4)
    expected = model(x)
    with apply_policy(model, {"inner": choice}):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("kwargs", [{}, {"compile_kwargs": {"backend": "eager"}}])
def test_copies_of_a_model_run_their_own_regions(kwargs):
    model, buffer = Model(), io.BytesIO()
    expected = model(X)
    with apply_policy(model, {"layers.0": "recompute", "layers.1": "keep"}, **kwargs):
        copied = copy.deepcopy(model)
        torch.save(model, buffer)
        loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert torch.equal(copied(X), expected)
        assert torch.equal(loaded(X), expected)
    assert torch.equal(copied(X), expected)
    assert model(X) == 0


def test_regions_whose_names_begin_alike_are_not_inside_one_another():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(11)])
    own = [layer.forward for layer in model]
    with apply_policy(model, {"1": "recompute", "10": "recompute"}), apply_policy(model, {"1": "keep"}):
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ValueError, match="lies inside"):
            apply_policy(model, {"": "keep", "1": "keep"})
    assert [layer.forward for layer in model] == own


@pytest.mark.parametrize("stopped", [False, True])
def test_profile_gives_gradients_and_buffers_back(stopped):
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 8))
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    before = [x.clone() for x in model.buffers()]

    def progress(line: str) -> None:
        if stopped and line.startswith("1 keep"):
            raise KeyboardInterrupt

    engine = make_engine()
    try:
        profile(
            model, torch.randn(16, 8), ["0", "1"], ledger=make_ledger(), engine=engine, repeats=1, progress=progress
        )
        assert not stopped
    except KeyboardInterrupt:
        assert stopped
    assert all(torch.equal(p.grad, torch.full_like(p, 7.0)) for p in model.parameters() if p.grad is not None)
    assert all(torch.equal(x, y) for x, y in zip(model.buffers(), before, strict=True))
    assert engine.stats().num_live == 0


def test_profile_leaves_gradients_alone():
    model = Model()
    gradients(model)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    profile(model, X, REGIONS[:1], ledger=make_ledger(), engine=make_engine(), repeats=1, choices=["keep", "offload"])
    assert all(torch.equal(a, b.grad) for a, b in zip(before, model.parameters(), strict=True) if b.grad is not None)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda m, e: apply_policy(m, {"layers.9": "keep"}), "layers.9"),
        (lambda m, e: apply_policy(m, {"layers.0": "levitate"}), "levitate"),
        (lambda m, e: apply_policy(m, {"layers.0": "offload"}), "engine"),
        (lambda m, e: apply_policy(m, {"layers": "keep", "layers.0": "keep"}), "inside"),
        (lambda m, e: compile_with_budget(m, 1.5), "budget"),
        (lambda m, e: profile(m, X, ["layers"], ledger=make_ledger(), engine=e), "did not run"),
        (
            lambda m, e: profile(
                nn.Sequential(m.head, nn.Linear(1, 32), m.head), X, ["0"], ledger=make_ledger(), engine=e
            ),
            "once",
        ),
        (lambda m, e: profile(m, X, REGIONS, ledger=BandwidthLedger([], 1.0), engine=e), r"host\.up"),
    ],
)
def test_bad_input_is_a_value_error(call, named):
    model = Model()
    with pytest.raises(ValueError, match=named):
        call(model, make_engine())
    assert not any("forward" in m.__dict__ for m in model.modules())
