"""The offload engine: bit-equal gradients, races, identity of what comes back. Cases O1-O4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.netmem.arena import Fence, PinnedArena
from gemworks.netmem.errors import ModifiedAfterSaveError
from gemworks.netmem.movers import DelayedMover, InlineMover, nothing
from gemworks.netmem.parcels import Parcel
from hypothesis import given, settings
from hypothesis import strategies as st
from netmem_offload_model import X, assert_bit_equal, gradients, make_engine, make_model
from torch._subclasses import FakeTensorMode

pytestmark = pytest.mark.reference


def test_nothing_made_under_a_fake_mode_does_not_stay_fake():
    with FakeTensorMode():
        assert type(nothing(torch.complex128, torch.device("cpu"))) is not torch.Tensor
    with torch.inference_mode():
        nothing(torch.complex128, torch.device("cpu"))
    made = nothing(torch.complex128, torch.device("cpu"))
    assert type(made) is torch.Tensor
    assert not made.is_inference()


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


def test_a_copy_that_cannot_start_leaves_no_host_memory_behind():
    class Refusing(InlineMover):
        def copy(self, way, target, source, after):
            raise OSError("no copy")

    engine = make_engine(Refusing())
    with pytest.raises(OSError, match="no copy"), engine.saving():
        torch.ones(100, requires_grad=True).exp().exp()
    assert engine.arena.stats().num_live == 0


def test_codes_of_which_one_cannot_be_sent_leave_no_host_memory_behind():
    class RefusesTheSecond(InlineMover):
        num_copies = 0

        def copy(self, way, target, source, after):
            self.num_copies += 1
            if self.num_copies == 2:
                raise OSError("no copy")
            return super().copy(way, target, source, after)

    engine = make_engine(RefusesTheSecond())
    with pytest.raises(OSError, match="no copy"), engine.saving(codec="fp8_row"):
        torch.ones(30, 30, requires_grad=True).exp()
    assert engine.stats().num_live == 0
    assert engine.arena.stats().num_live == 0
    assert_bit_equal(gradients(make_model(depth=1), X, engine), gradients(make_model(depth=1), X))


def test_a_tensor_with_two_handles_comes_back_once_in_every_backward():
    engine = make_engine(window_bytes=0)
    x = torch.ones(100, requires_grad=True)
    with engine.saving():
        h = x * 2
        y = (h * h.view(10, 10).view(100)).sum()  # saves h and a view of it
    del h
    for times in (1, 2, 3):
        y.backward(retain_graph=True)
        assert engine.stats().moved_down_bytes == 400 * times


def test_views_of_parameters_are_not_moved_whatever_modules_are_named():
    model = make_model(depth=1)
    engine, named = make_engine(), make_engine()
    x = torch.ones(3, 5, 16, requires_grad=True)
    for e, modules in ((engine, ()), (named, (model,))):
        with e.saving(*modules):
            model(x).sum().backward()
    assert engine.stats().moved_up_bytes == named.stats().moved_up_bytes > 0


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


def test_o3_a_piece_that_changes_hands_unused_keeps_the_fence_of_its_first_owner():
    arena = PinnedArena(1024, pin=False)
    mover = DelayedMover(0, max_delay=10_000)
    first = arena.allocate(1024)
    reading = mover.copy("down", torch.zeros(1024, dtype=torch.uint8), first.data, [])
    arena.free(first, [reading])
    arena.free(arena.allocate(1024))
    assert arena.allocate(1024).fences == [reading]


def test_o3_a_parcel_waits_for_the_host_memorys_former_owner_and_for_its_own_way_out():
    """On one compute stream the mark orders both already; a backward on another stream has only these fences."""
    arena = PinnedArena(1024, pin=False)

    class Recording(InlineMover):
        def __init__(self) -> None:
            self.found: list[tuple[str, Fence, list[Fence]]] = []

        def copy(self, way, target, source, after):
            self.found.append((way, DelayedMover().copy("up", target, source, []), list(after)))
            return self.found[-1][1]

    mover = Recording()
    first = arena.allocate(1024)
    unread = DelayedMover(0, max_delay=10_000).copy("down", torch.zeros(1024, dtype=torch.uint8), first.data, [])
    arena.free(first, [unread])
    parcel = Parcel(0, torch.ones(1024, dtype=torch.uint8).untyped_storage(), arena, mover)
    parcel.depart()
    parcel.bring()
    (_, left, after_up), (_, _, after_down) = mover.found
    assert unread in after_up
    assert left in after_down


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
