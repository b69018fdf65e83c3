"""A plan's pace: copies keep to the queues that the solver computed, whatever the regions between do."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.budget import Option, Region, StepProfile, evaluate
from gemworks.netmem.codec import get_codec
from gemworks.netmem.errors import ModifiedAfterSaveError
from gemworks.netmem.handles import memory_order
from gemworks.netmem.movers import DelayedMover
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.policy import apply_policy
from torch import nn

pytestmark = pytest.mark.reference
NUM = 6
X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(NUM)])


def make_step(rate: float, moved_bytes: int, granule_bytes: int = 0, own_bytes: int = 1 << 20) -> StepProfile:
    """Regions that hold nothing and work in `own_bytes`; the last one's backward, in twice that, sets the peak."""
    regions = []
    for i in range(NUM):
        own = (0, own_bytes, own_bytes * (2 if i == NUM - 1 else 1))
        options = (Option("keep", 1, 2, *own), Option("offload", 1, 2, *own, moved_bytes=moved_bytes))
        regions.append(Region(str(i), options))
    return StepProfile(
        tuple(regions), up_bytes_per_s=rate, down_bytes_per_s=rate, window_bytes=1 << 20, granule_bytes=granule_bytes
    )


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_pace_is_the_two_queues_where_memory_is_at_its_peak_and_the_window_elsewhere():
    profile = make_step(rate=4, moved_bytes=10)
    plan = evaluate(profile, ["offload"] + ["keep"] * (NUM - 1))
    assert plan.stall_s == 0
    assert (plan.peak.region, plan.peak.phase) == (str(NUM - 1), "backward")
    assert [plan.pace[str(i)].leaving_bytes for i in range(NUM)] == [1 << 20] * (NUM - 1) + [0]
    # nothing lies before the first region and ten bytes before the others
    assert [plan.pace[str(i)].returning_bytes for i in range(NUM)] == [0, *[10] * (NUM - 2), 0]
    slow = evaluate(make_step(rate=1, moved_bytes=10), ["offload"] + ["keep"] * (NUM - 1))
    # six seconds of forward, the first of which is over when the bytes are there: five leave until the turn
    assert slow.pace[str(NUM - 1)].leaving_bytes == 5
    # the other way round: the bytes come within the two seconds of each of the four backwards between
    assert slow.pace[str(NUM - 1)].returning_bytes == 2


def test_pace_has_no_room_where_the_peak_is():
    profile = make_step(rate=4, moved_bytes=10)
    held = Option("keep", 1, 2, 0, 20, 30)
    regions = (*profile.regions[:3], Region("3", (held,)), *profile.regions[4:])
    flat = [dataclasses.replace(o, forward_bytes=0, backward_bytes=0) for r in profile.regions for o in r.options]
    regions = tuple(
        Region(r.name, tuple(flat[2 * i : 2 * i + 2]) if i != 3 else (held,)) for i, r in enumerate(regions)
    )
    plan = evaluate(dataclasses.replace(profile, regions=regions), ["offload"] + ["keep"] * (NUM - 1))
    assert (plan.peak_bytes, plan.peak.region, plan.peak.phase) == (30, "3", "backward")
    assert [plan.pace[str(i)].leaving_bytes for i in range(NUM)] == [30, 30, 10, 30, 30, 30]
    # what comes back is there until it is needed: not before the backward without room is over
    assert [plan.pace[str(i)].returning_bytes for i in range(NUM)] == [0, 10, 10, 0, 0, 0]
    # what has not left by then has to; before and after it may be there
    assert [plan.pace[str(i)].staying_bytes for i in range(NUM)] == [30, 30, 30, 0, 30, 30]


def test_a_granule_is_counted_once_per_queue_that_is_not_empty():
    step = make_step(rate=4, moved_bytes=10, granule_bytes=3)
    assert [step.in_flight_bytes(q) for q in (0, 1, 1 << 21)] == [0, 4, 1 << 20]
    with pytest.raises(ValueError, match="granule_bytes"):
        make_step(rate=4, moved_bytes=1, granule_bytes=-1)


def test_room_up_to_the_peak_leaves_out_the_tensor_that_a_queue_is_rounded_up_by():
    step = make_step(rate=4, moved_bytes=10, granule_bytes=3, own_bytes=100)
    plan = evaluate(step, ["offload"] + ["keep"] * (NUM - 1))
    assert plan.peak_bytes == 200
    # queues of 10, 6, 2 and 0 bytes beside the 100 of the next forward: each may grow until 3 more make the peak
    assert [plan.pace[str(i)].leaving_bytes for i in range(4)] == [97] * 4


def test_exactly_what_may_stay_stays():
    engine = OffloadEngine(
        PinnedArena(1 << 20, pin=False),
        device="cpu",
        window_bytes=1 << 20,
        min_bytes=64,
        mover=DelayedMover(0, max_delay=10**6),
    )
    with engine.paced(), engine.saving():
        outs = [torch.randn(100, requires_grad=True).sin() for _ in range(3)]
    engine.end_forward(math.inf)
    engine.begin_backward(3, 3, 0, 801)
    assert engine.stats().in_flight_bytes == 1200  # 801, rounded up to a tensor
    engine.begin_backward(3, 3, 0, 800)
    assert engine.stats().in_flight_bytes == 800
    del outs


# with a million calls of delay nothing is done before somebody waits for it, as when the host is far ahead of a GPU
@pytest.mark.parametrize(("seed", "max_delay"), [(0, 3), (1, 3), (2, 10**6)])
def test_only_the_first_region_moves_and_is_back_before_its_backward(seed, max_delay):
    model = make_model()
    expected = gradients(model, X)
    mover = DelayedMover(seed, max_delay=max_delay)
    engine = OffloadEngine(
        PinnedArena(1 << 20, pin=False), device="cpu", window_bytes=1 << 20, min_bytes=64, mover=mover
    )
    moved = (32 * 64 + 32 * 64 + 32 * 16) * 4
    plan = evaluate(make_step(rate=moved / 2, moved_bytes=moved), ["offload"] + ["keep"] * (NUM - 1))
    fetched, original = [], engine._queues.fetch

    def fetch(parcel):
        fetched.append(parcel.state.value)
        return original(parcel)

    engine._queues.fetch = fetch
    with apply_policy(model, plan, engine=engine):
        for _ in range(3):
            model.zero_grad()
            loss = model(X).square().sum()
            assert engine.stats().num_live > 0
            assert engine.stats().in_flight_bytes == 0, "device bytes are still held at the end of forward"
            fetched.clear()
            loss.backward()
            assert fetched, "nothing was moved"
            assert set(fetched) <= {"returning", "resident"}, "a tensor was asked for before it was on its way"
            for p, grad in zip(model.parameters(), expected, strict=True):
                assert p.grad is not None
                assert torch.equal(p.grad, grad)
    assert engine.stats().num_live == 0
    assert mover.num_expired_targets == 0


def test_without_the_plan_nobody_tells_the_engine():
    """The same choices as a mapping: the counterpart that shows that the test above can fail."""
    model = make_model()
    engine = OffloadEngine(
        PinnedArena(1 << 20, pin=False), device="cpu", window_bytes=1 << 20, min_bytes=64, mover=DelayedMover(0, 1000)
    )
    with apply_policy(model, {"0": "offload"} | {str(i): "keep" for i in range(1, NUM)}, engine=engine):
        loss = model(X).square().sum()
        assert engine.stats().in_flight_bytes > 0
        loss.backward()


def test_bytes_ahead_stay_within_the_pace_rounded_up_to_a_tensor():
    engine = OffloadEngine(PinnedArena(1 << 20, pin=False), device="cpu", window_bytes=1 << 20, min_bytes=64)
    leaves = [torch.randn(100, requires_grad=True) for _ in range(8)]
    with engine.saving():
        outs = [x.sin() for x in leaves]
    engine.end_forward(0)
    assert engine.stats().in_flight_bytes == 0
    engine.begin_backward(8, 8, 0)
    assert engine.stats().in_flight_bytes == 0
    engine.begin_backward(8, 8, 500)
    assert engine.stats().in_flight_bytes == 800  # two tensors of 400 bytes: the first ends below 500
    engine.begin_backward(6, 8, 0)  # a region's own tensors come whatever the pace says of earlier ones
    assert engine.stats().in_flight_bytes == 800
    torch.stack(outs).sum().backward()
    assert all(x.grad is not None and torch.equal(x.grad, x.detach().cos()) for x in leaves)


def test_a_tensor_that_is_saved_again_after_a_backward_outran_its_copy_is_sent_again():
    """Its first parcel is closed by then: the file of what was sent must not name it any more."""
    mover = DelayedMover(0, max_delay=10**6)  # a copy ends when it is waited for
    engine = OffloadEngine(
        PinnedArena(1 << 20, pin=False), device="cpu", window_bytes=1 << 20, min_bytes=64, mover=mover
    )
    x, w = torch.randn(100, requires_grad=True), torch.randn(100, requires_grad=True)
    start = engine.position
    with engine.saving():
        y = (x * w).sum()
        engine.begin_backward(start, engine.position, 0.0)
        y.backward()
        del y
        assert (engine.stats().num_live, engine.stats().in_flight_bytes, engine.stats().host_bytes) == (0, 0, 0)
        z = (x * w).sum()
    z.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * w.detach())
    assert (mover.num_expired_sources, engine.stats().host_bytes) == (0, 0)


class Save(torch.autograd.Function):
    """One node that saves several tensors: it asks for them in the order of saving, as compiled regions do."""

    @staticmethod
    def forward(ctx, x, *kept):
        ctx.save_for_backward(*kept)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        assert [int(t[0]) for t in ctx.saved_tensors] == [0, 1, 2]
        return grads[0], None, None, None


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("max_delay", [0, 10**6])
def test_a_backward_brings_each_tensor_once(told, max_delay):
    mover = DelayedMover(0, max_delay=max_delay)
    engine = OffloadEngine(
        PinnedArena(1 << 20, pin=False), device="cpu", window_bytes=1 << 20, min_bytes=64, mover=mover
    )
    y = torch.ones(1, requires_grad=True)
    for _ in range(2):
        with engine.saving():
            y = Save.apply(y, *[torch.full((100,), float(i)) for i in range(3)])
    engine.end_forward(0)
    for num_passes in (1, 2):
        if told:
            engine.begin_backward(3, 6, 0)
        y.backward(retain_graph=True)
        assert engine.stats().moved_down_bytes == num_passes * engine.stats().moved_up_bytes == num_passes * 2400
    del y
    assert engine.stats().num_live == 0


def test_pace_of_a_plan_that_moves_nothing_costs_nothing():
    model = make_model()
    plan = evaluate(make_step(1, 1), ["keep"] * NUM)
    assert plan.moved_bytes == 0
    with apply_policy(model, plan):
        assert model[0].forward.__qualname__.endswith("forward")
        assert not hasattr(model[0].forward, "__wrapped__")


@pytest.mark.parametrize("codec", [None, "fp8_row"])
def test_exact_strides_come_back(codec):
    engine = OffloadEngine(PinnedArena(1 << 20, pin=False), device="cpu", window_bytes=0, min_bytes=64)
    base = torch.randn(4, 8, 6)
    found = {}

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *kept):
            ctx.save_for_backward(*kept)
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            found["saved"] = ctx.saved_tensors
            return grads[0], None, None, None

    kept = (base.permute(2, 0, 1), base[:, :, :1], base.transpose(0, 1)[:3])
    with engine.saving(codec=codec, exact_strides=True):
        out = Save.apply(torch.ones(1, requires_grad=True), *kept)
    out.sum().backward()
    for a, b in zip(found["saved"], kept, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0.07, atol=0.01)
        assert codec is not None or torch.equal(a, b)


@pytest.mark.parametrize("move", [True, False])
def test_interleaved_views_are_coded_as_their_storage_once(move):
    """Queries, keys and values of one projection: views with gaps, whose strides compiled code relies on."""
    engine = OffloadEngine(PinnedArena(1 << 20, pin=False), device="cpu", window_bytes=0, min_bytes=64)
    qkv = torch.randn(40, 3, 2, 16)
    kept = qkv.permute(1, 2, 0, 3).unbind(0)
    assert memory_order(kept[0]) is None
    weight = torch.ones(2, 40, 16, requires_grad=True)
    for _ in range(3):
        before = engine.stats().coded_bytes
        with engine.saving(codec="fp8_row", move=move, exact_strides=True):
            out = [weight * view for view in kept]
        assert engine.stats().coded_bytes - before == get_codec("fp8_row").nbytes((240, 16), torch.float32)
        grads = [torch.autograd.grad(y.sum(), weight)[0] for y in out]
        for view, grad in zip(kept, grads, strict=True):
            assert 10 * torch.log10(view.square().sum() / (grad - view).square().sum()) > 25
        del out
        assert engine.stats().num_live == 0


def test_a_storage_coded_whole_is_coded_again_after_a_change_and_the_change_is_seen():
    engine = OffloadEngine(PinnedArena(1 << 20, pin=False), device="cpu", window_bytes=0, min_bytes=64)
    base = torch.randn(40, 96)
    weight = torch.ones(40, 32, requires_grad=True)
    found = []
    for change in (0.0, 5.0):
        base += change
        with engine.saving(codec="fp8_row", exact_strides=True):
            out = (weight * base[:, :32]).sum()
        (grad,) = torch.autograd.grad(out, weight)
        found.append(grad)
    torch.testing.assert_close(found[1] - found[0], torch.full((40, 32), 5.0), rtol=0, atol=1.0)
    with engine.saving(codec="fp8_row", exact_strides=True):
        out = (weight * base[:, :32]).sum()
    base += 1
    with pytest.raises(ModifiedAfterSaveError):
        out.backward()
