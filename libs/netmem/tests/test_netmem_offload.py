"""The offload engine: bit-equal gradients, races, identity, leaks, bad input. Cases O1-O5."""

from __future__ import annotations

import gc
import itertools
import warnings
from typing import Any

import pytest
import torch
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.codec import BUILTIN, Fp8Codec
from gemworks.netmem.errors import CodecError, ModifiedAfterSaveError
from gemworks.netmem.movers import DelayedMover, InlineMover
from gemworks.netmem.offload import OffloadEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.reference


def make_engine(mover=None, capacity_bytes=4 << 20, window_bytes=3000, min_bytes=1) -> OffloadEngine:
    return OffloadEngine(
        PinnedArena(capacity_bytes, pin=False),
        device="cpu",
        window_bytes=window_bytes,
        min_bytes=min_bytes,
        mover=mover,
    )


class Block(nn.Module):
    """Saves views, transposes, non-contiguous tensors and aliases of one storage."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        a = torch.softmax(q @ k.mT, dim=-1)
        y = self.out((a @ v).transpose(0, 1).transpose(0, 1))
        return x + torch.nn.functional.gelu(y) * y.sigmoid()


def make_model(seed: int = 0, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Block() for _ in range(depth)])


def gradients(model: nn.Module, x: torch.Tensor, engine: OffloadEngine | None = None, **kwargs) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    if engine is None:
        loss = model(x).square().mean()
    else:
        with engine.saving(model, **kwargs):
            loss = model(x).square().mean()
    loss.backward()
    assert x.grad is not None
    return [x.grad.clone(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


def assert_bit_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("window_bytes", [0, 1, 3000, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_o1_gradients_are_bit_equal_under_random_delays(seed, window_bytes):
    model = make_model()
    mover = DelayedMover(seed, max_delay=30, chunk_bytes=256)
    engine = make_engine(mover, window_bytes=window_bytes)
    assert_bit_equal(gradients(model, X, engine), gradients(model, X))
    assert (mover.num_expired_sources, mover.num_expired_targets) == (0, 0)
    stats = engine.stats()
    assert stats.num_moved > 20
    assert stats.num_live == 0
    assert stats.host_bytes == 0


def test_o1_the_delayed_mover_does_catch_memory_freed_too_early(monkeypatch):
    """The test above can fail: without the wait before letting bytes go, gradients are wrong."""
    monkeypatch.setattr("gemworks.netmem.parcels.Parcel.depart", _depart_without_waiting)
    model = make_model()
    mover = DelayedMover(0, max_delay=30, chunk_bytes=256)
    got = gradients(model, X, make_engine(mover, window_bytes=0))
    expected = gradients(model, X)
    assert mover.num_expired_sources > 0
    assert not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def _depart_without_waiting(parcel):
    from gemworks.netmem.parcels import State

    parcel._bytes = None
    parcel.state = State.AWAY


@pytest.mark.parametrize("seed", range(4))
def test_o2_first_iteration_reload_does_not_race_the_outgoing_copy(seed):
    model = make_model(depth=2)
    engine = make_engine(DelayedMover(seed, max_delay=1000, chunk_bytes=64), window_bytes=0)
    assert_bit_equal(gradients(model, X, engine), gradients(model, X))


@pytest.mark.parametrize("seed", range(3))
def test_o3_reused_host_memory_over_many_steps(seed):
    """The arena holds one step's tensors and little more, so that pieces are reused while copies may still be
    pending.
    """
    model = make_model(depth=2)
    probe = make_engine()
    gradients(model, X, probe)
    engine = make_engine(
        DelayedMover(seed, max_delay=40, chunk_bytes=512), probe.arena.stats().peak_reserved_bytes, window_bytes=20_000
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = make_model(depth=2)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(25):
        x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(step))
        assert_bit_equal(gradients(model, x, engine), gradients(reference, x))
        optimizer.step()
        reference_optimizer.step()
    assert engine.stats().num_exhausted == 0


def test_o3_a_fence_of_the_former_owner_guards_the_new_owner():
    arena = PinnedArena(1024, pin=False)
    mover = DelayedMover(0, max_delay=10_000, chunk_bytes=64)
    device = torch.zeros(1024, dtype=torch.uint8)
    first = arena.allocate(1024)
    first.data.fill_(7)
    reading = mover.copy("down", device, first.data, [])
    arena.free(first, [reading])
    second = arena.allocate(1024)
    assert second.fences == [reading]
    writing = mover.copy("up", second.data, torch.full((1024,), 9, dtype=torch.uint8), second.fences)
    mover.compute_waits(writing)
    assert device.unique().tolist() == [7]


def saved_round_trip(make, engine) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, Any, Any]]]:
    """Tensors as autograd saved them, and as the engine gives them back."""

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *tensors):
            ctx.save_for_backward(*tensors)
            return x.clone()

        @staticmethod
        def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
            got.extend(ctx.saved_tensors)
            return g, *[None] * len(tensors)

    got: list[torch.Tensor] = []
    tensors = make()
    expected = [(t.clone(), t.stride(), t.storage_offset()) for t in tensors]
    x = torch.zeros(1, requires_grad=True)
    with engine.saving():
        y = Save.apply(x, *tensors)
    tensors = [t.shape for t in tensors]
    y.backward()
    return got, expected


@pytest.mark.parametrize("seed", range(3))
def test_o4_views_transposes_and_aliases_come_back_right(seed):
    base = torch.arange(240.0).view(12, 20)

    def make():
        return [
            base,
            base.t(),
            base[2:],
            base[:, ::2],
            base.view(-1),
            base[::3, 1:],
            base.unsqueeze(1).expand(12, 3, 20),
        ]

    engine = make_engine(DelayedMover(seed, chunk_bytes=128))
    got, expected = saved_round_trip(make, engine)
    for a, (b, stride, offset) in zip(got, expected, strict=True):
        assert torch.equal(a, b)
        assert (a.stride(), a.storage_offset()) == (stride, offset)
    assert len({t.untyped_storage()._cdata for t in got}) == 1  # still one storage
    assert engine.stats().num_moved == 1


def test_o4_a_small_view_of_a_large_storage_travels_alone():
    base = torch.randn(100, 100)
    engine = make_engine()
    got, expected = saved_round_trip(lambda: [base[3], base[:5].t()], engine)
    for a, (b, _, _) in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert engine.stats().moved_up_bytes == 4 * (100 + 500)


def test_o4_a_new_storage_at_an_old_address_is_not_mistaken():
    engine = make_engine()
    for value in range(50):
        got, expected = saved_round_trip(lambda value=value: [torch.full((64,), float(value))], engine)
        assert torch.equal(got[0], expected[0][0])


def test_o4_a_storage_changed_in_place_between_two_graphs_is_saved_twice():
    engine = make_engine(DelayedMover(0))
    w = torch.ones(64, requires_grad=True)
    buffer = torch.full((64,), 2.0)
    with engine.saving():
        first = (w * buffer).sum()
        with torch.no_grad():
            buffer.mul_(10)
        second = (w * buffer).sum()
    second.backward()
    assert w.grad is not None
    assert w.grad.unique().tolist() == [20.0]
    with pytest.raises(ModifiedAfterSaveError):
        first.backward()


def test_o4_an_alias_with_a_version_counter_of_its_own_is_not_mistaken():
    engine = make_engine()
    w = torch.ones(64, requires_grad=True)
    buffer = torch.full((64,), 2.0)
    with engine.saving():
        first = (w * buffer).sum()
        with torch.no_grad():
            buffer.mul_(10)
        second = (w * buffer.data).sum()  # version 0 again, other content
    second.backward()
    assert w.grad is not None
    assert w.grad.unique().tolist() == [20.0]
    del first


@pytest.mark.parametrize("seed", range(5))
def test_o3_what_was_brought_for_nothing_is_let_go_only_after_its_copy(seed):
    """Backward of an older graph evicts what was brought ahead for a younger one, or drops it unread."""
    mover = DelayedMover(seed, max_delay=200, chunk_bytes=64)
    engine = make_engine(mover, window_bytes=512)  # two of the tensors
    xs = [torch.randn(64, requires_grad=True) for _ in range(3)]
    with engine.saving():
        losses = [x.sin().exp().sin().exp().sum() for x in xs]
    engine.synchronize()
    (first,) = torch.autograd.grad(losses[2], xs[2], retain_graph=True)
    (again,) = torch.autograd.grad(losses[0], xs[0])
    losses[1] = losses[2] = torch.zeros(())
    engine.stats()
    mover.synchronize()
    assert mover.num_expired_targets == 0
    for x, got in ((xs[2], first), (xs[0], again)):
        (expected,) = torch.autograd.grad(x.sin().exp().sin().exp().sum(), x)
        assert torch.equal(got, expected)


shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3)


@given(
    shape=shapes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]),
    order=st.randoms(),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_and_dtype_round_trips(shape, dtype, order, seed):
    dims = list(range(len(shape)))
    order.shuffle(dims)
    engine = make_engine(DelayedMover(seed, chunk_bytes=16))
    got, expected = saved_round_trip(lambda: [torch.randn(shape).to(dtype).permute(dims)], engine)
    assert torch.equal(got[0], expected[0][0])
    assert got[0].dtype is dtype


def live_tensor_bytes() -> int:
    gc.collect()
    seen = {}
    with warnings.catch_warnings():
        # walking all objects touches lazy modules whose attributes warn about their own deprecation
        warnings.simplefilter("ignore")
        for o in gc.get_objects():
            if type(o) in (torch.Tensor, nn.Parameter):
                seen[o.untyped_storage()._cdata] = o.untyped_storage().nbytes()
    return sum(seen.values())


def test_o5_memory_is_flat_over_100_steps_and_after_exceptions():
    model = make_model(depth=2)
    engine = make_engine(DelayedMover(0, max_delay=5))

    class Boom(nn.Module):
        def forward(self, x):
            raise ArithmeticError("boom")

    broken = nn.Sequential(model, Boom())
    sizes = []
    for step in range(100):
        if step % 3 == 1:
            with pytest.raises(ArithmeticError), engine.saving(broken):
                broken(X.clone().requires_grad_())
        elif step % 3 == 2:
            with engine.saving(model):
                model(X.clone().requires_grad_()).sum()  # a graph that nobody ever runs backward
        else:
            gradients(model, X, engine)
        if step % 20 == 19:
            model.zero_grad()
            engine.synchronize()
            assert engine.stats().num_live == 0
            assert engine.stats().host_bytes == 0
            assert len(engine._identity) <= 64 + 200
            sizes.append(live_tensor_bytes())
    assert max(sizes) - min(sizes) <= 1024, sizes
    assert_bit_equal(gradients(model, X, engine), gradients(model, X))


def test_device_memory_does_leave():
    """While a graph waits for its backward, its saved tensors are on the host only."""
    model = make_model(depth=6)
    x = torch.randn(64, 32, 16).requires_grad_()
    keep = model(x).sum()
    kept_bytes = live_storage_bytes(keep)
    del keep
    engine = make_engine(capacity_bytes=32 << 20, window_bytes=0)
    with engine.saving(model):
        loss = model(x).sum()
    assert live_storage_bytes(loss) < 0.1 * kept_bytes
    loss.backward()


def live_storage_bytes(loss: torch.Tensor) -> int:
    """Bytes of activations that the graph below a loss holds on the device."""
    total, seen, todo = 0, set(), [loss.grad_fn]
    storages = {}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [n for n, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved"):
                raw = getattr(node, name)
                for saved in raw if isinstance(raw, (tuple, list)) else [raw]:
                    data = saved.data if hasattr(saved, "data") else None
                    if isinstance(data, torch.Tensor) and not isinstance(data, nn.Parameter):
                        storages[data.untyped_storage()._cdata] = data.untyped_storage().nbytes()
    for size in storages.values():
        total += size
    return total


def test_several_backwards_and_higher_order():
    x = torch.randn(4, 8, dtype=torch.float64).requires_grad_()
    w = torch.randn(8, 8, dtype=torch.float64).requires_grad_()
    engine = make_engine(DelayedMover(3))

    def run():
        y = torch.tanh(x @ w)
        return (y * y.exp()).sum()

    expected = [torch.autograd.grad(run(), (x, w)) for _ in range(2)]
    with engine.saving():
        loss = run()
    got: tuple[torch.Tensor, ...] = ()
    for e in expected:
        got = torch.autograd.grad(loss, (x, w), retain_graph=True)
        assert_bit_equal(list(got), list(e))
    partial = torch.autograd.grad(loss, w, retain_graph=True)
    assert torch.equal(partial[0], expected[0][1])
    (first,) = torch.autograd.grad(run(), x, create_graph=True)
    (reference,) = torch.autograd.grad(first.square().sum(), w)
    with engine.saving():
        (first,) = torch.autograd.grad(run(), x, create_graph=True)
        second = first.square().sum()
    assert torch.equal(torch.autograd.grad(second, w)[0], reference)
    del loss, first, second, partial, got
    assert engine.stats().num_live == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_nested_checkpointing(reentrant):
    model = make_model(depth=3)
    expected = gradients(model, X)
    engine = make_engine(DelayedMover(1))

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            for block in self.inner:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    assert_bit_equal(gradients(Checkpointed(), X, engine), expected)

    def inside(x):
        with engine.saving(model):
            return model(x)

    x = X.clone().requires_grad_()
    model.zero_grad()
    checkpoint(inside, x, use_reentrant=reentrant).square().mean().backward()
    assert_bit_equal([p.grad for p in (x, *model.parameters()) if p.grad is not None], expected)
    assert engine.stats().num_live == 0


def test_two_graphs_at_once_in_either_order():
    model = make_model(depth=2)
    inputs = [torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    for order in itertools.permutations(range(3)):
        engine = make_engine(DelayedMover(sum(order)), window_bytes=2000)
        xs = [x.clone().requires_grad_() for x in inputs]
        with engine.saving(model):
            losses = [model(x).square().mean() for x in xs]
        for i in order:
            losses[i].backward()
        for x, reference in zip(xs, inputs, strict=True):
            assert x.grad is not None
            assert torch.equal(x.grad, gradients(model, reference)[0])


@pytest.mark.parametrize("batch", [0, 1])
def test_empty_batches(batch):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(batch, 16)
    assert_bit_equal(gradients(model, x.view(batch, 16), make_engine()), gradients(model, x))


@pytest.mark.parametrize("move", [True, False])
def test_a_tensor_modified_in_place_after_saving_is_detected(move):
    engine = make_engine(min_bytes=1 if move else 1 << 20)
    x = torch.randn(8, requires_grad=True)
    with engine.saving():
        h = x * 2
        y = h.sin()
        z = y.exp()
        h.add_(1)
        y.mul_(1)
    with pytest.raises(ModifiedAfterSaveError, match="in-place"):
        z.sum().backward()


def test_modified_in_place_also_after_the_copy_left_and_for_coded_tensors():
    x = torch.randn(512, requires_grad=True)
    for codec, move in ((None, True), ("fp8_row", True), ("fp8_row", False)):
        engine = make_engine(window_bytes=0)
        with engine.saving(codec=codec, move=move):
            h = x * 2
            y = h.sin().sum()
        engine.synchronize()
        with torch.no_grad():
            h.zero_()
        with pytest.raises(ModifiedAfterSaveError):
            y.backward()


def test_exhausted_host_memory_keeps_tensors_says_so_once_and_stays_right():
    model = make_model()
    engine = make_engine(capacity_bytes=8192)
    with pytest.warns(RuntimeWarning, match="exhausted"):
        got = gradients(model, X, engine)
    gradients(model, X, engine)  # a second warning would be an error here
    assert_bit_equal(got, gradients(model, X))
    assert engine.stats().num_exhausted > 0
    assert engine.stats().host_bytes == 0


@pytest.mark.parametrize("codec", sorted(BUILTIN))
@pytest.mark.parametrize("move", [True, False])
def test_coded_gradients_are_close_and_memory_is_less(codec, move):
    model = make_model(depth=2)
    x = torch.randn(16, 32, 16)
    engine = make_engine(DelayedMover(0), min_bytes=64)
    got, expected = gradients(model, x, engine, codec=codec, move=move), gradients(model, x)
    for a, b in zip(got, expected, strict=True):
        sqnr_db = 10 * torch.log10(b.square().sum() / (a - b).square().sum())
        assert sqnr_db > 20, float(sqnr_db)
    assert engine.stats().coded_bytes < 0.55 * engine.stats().saved_bytes
    assert (engine.stats().num_moved > 0) == move
    assert engine.stats().num_live == 0


def test_a_codec_that_changes_shape_or_dtype_is_named():
    class Wrong(Fp8Codec):
        @property
        def name(self):
            return "wrong"

        def decode(self, codes, shape, dtype):
            return super().decode(codes, shape, dtype).flatten().double()

    x = torch.randn(64, requires_grad=True)
    engine = make_engine()
    with engine.saving(codec=Wrong()):
        y = (x * x).sum()
    with pytest.raises(CodecError, match="wrong"):
        y.backward()
    del y
    assert engine.stats().num_live == 0


def test_parameters_stay_and_small_tensors_stay():
    linear = nn.Linear(64, 64, bias=False)
    engine = make_engine(min_bytes=64 * 64 * 4)
    x = torch.randn(2, 64, requires_grad=True)
    with engine.saving(linear):
        linear(x).sum().backward()
    assert engine.stats().num_moved == 0
    with engine.saving():
        linear(x).sum().backward()
    assert engine.stats().num_moved == 1


# importing inductor runs torch's own deprecated torch.jit.script_method
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_regions_offload_too(backend):
    torch._dynamo.reset()
    model = make_model(depth=2)
    for block in model:
        block.compile(backend=backend)
    compiled = model
    expected = gradients(compiled, X)
    engine = make_engine(DelayedMover(2))
    assert_bit_equal(gradients(compiled, X, engine), expected)
    assert engine.stats().num_moved > 0
    assert engine.stats().num_live == 0


def test_lookahead_brings_tensors_before_they_are_asked_for():
    class Recording(InlineMover):
        def __init__(self):
            self.ways = []

        def copy(self, way, target, source, after):
            self.ways.append(way)
            return super().copy(way, target, source, after)

    def demand_count(window_bytes: int) -> int:
        mover = Recording()
        engine = make_engine(mover, window_bytes=window_bytes, min_bytes=64)
        x = torch.randn(100, requires_grad=True)
        with engine.saving():
            y = x
            for _ in range(10):
                y = y.sin()
        engine.synchronize()
        fetched = []
        original = engine._fetch

        def fetch(parcel):
            fetched.append(parcel.state.value)
            return original(parcel)

        engine._fetch = fetch
        y.sum().backward()
        return fetched.count("away")

    assert demand_count(window_bytes=0) == 10
    assert demand_count(window_bytes=1000) == 1


def test_in_flight_never_exceeds_the_window_by_more_than_one_tensor():
    model = make_model(depth=4)
    engine = make_engine(DelayedMover(0, max_delay=1000), window_bytes=5000)
    gradients(model, X, engine)
    largest = 3 * 5 * 48 * 4
    assert 0 < engine.stats().peak_in_flight_bytes <= 5000 * 2 + largest


@pytest.mark.parametrize(
    "call",
    [
        lambda: OffloadEngine(PinnedArena(1024, pin=False), device="cpu", window_bytes=-1),
        lambda: PinnedArena(0),
        lambda: PinnedArena(1 << 60),
        lambda: PinnedArena(1024, pin=False).allocate(-1),
        lambda: make_engine().saving(codec="fp7").__enter__(),
        lambda: make_engine().saving(codec=object()).__enter__(),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_a_value_error(call):
    with pytest.raises(ValueError, match="expected"):
        call()
