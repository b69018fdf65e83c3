"""Turns on the copy engines: who goes first, that nothing is lost, and that gradients stay bit-equal."""

from __future__ import annotations

import threading

import pytest
import torch
from gemworks.netmem.arbiter import CopyArbiter
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.movers import DelayedMover, InlineMover
from gemworks.netmem.stash import StateStash
from netmem_offload_model import X, assert_bit_equal, gradients, make_engine, make_model

pytestmark = pytest.mark.reference


class ByHand(InlineMover):
    """Notes the copies that are queued; they are done when the test says so."""

    def __init__(self):
        self.queued, self.num_done = [], 0

    def copy(self, way, target, source, after):
        assert all(f.done() for f in after), "a copy was queued before what it depends on"
        target.copy_(source)
        self.queued.append((way, source[0].item()))
        number, mover = len(self.queued), self

        class Numbered:
            def done(self):
                return mover.num_done >= number

        return Numbered()


def pieces(value, num, each=8):
    return torch.zeros(num * each, dtype=torch.uint8), torch.full((num * each,), value, dtype=torch.uint8)


def test_an_urgent_copy_waits_for_depth_pieces_only():
    mover = ByHand()
    arbiter = CopyArbiter(mover, piece_bytes=8, depth=2, thread=False)
    bulk, batch = arbiter.port(0), arbiter.port(1)
    bulk.copy("down", *pieces(1, 5), [])
    assert mover.queued == [("down", 1)] * 2
    fence = batch.copy("down", *pieces(2, 1), [])
    other_way = batch.copy("up", *pieces(3, 1), [])
    assert mover.queued[2:] == [("up", 3)], "the other direction has a queue of its own"
    mover.num_done = 1
    assert not fence.done()
    assert mover.queued[3:] == [("down", 2)]
    mover.num_done = 100
    assert fence.done()
    assert other_way.done()
    assert [v for _, v in mover.queued].count(1) == 5


def test_what_compute_waits_for_is_queued_at_once_with_what_it_depends_on():
    mover = ByHand()
    arbiter = CopyArbiter(mover, piece_bytes=8, depth=1, thread=False)
    port = arbiter.port()
    first = port.copy("up", *pieces(1, 3), [])
    mover.num_done = 100
    target, source = pieces(2, 2)
    second = port.copy("down", target, source, [first])
    third = port.copy("down", *pieces(3, 2), [])
    port.compute_waits(second)
    assert torch.equal(target, source)
    assert [q for q in mover.queued if q[0] == "up"] == [("up", 1)] * 3
    assert ("down", 3) not in mover.queued[: mover.queued.index(("down", 2)) + 1]
    arbiter.synchronize()
    assert third.done()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("thread", [False, True])
def test_o1_gradients_are_bit_equal_through_a_shared_arbiter(seed, thread):
    mover = DelayedMover(seed, max_delay=10, chunk_bytes=100)
    arbiter = CopyArbiter(mover, piece_bytes=300, thread=thread)
    model, table = make_model(), torch.arange(1000.0)
    stash = StateStash(PinnedArena(1 << 16, pin=False), device="cpu", min_bytes=1, mover=arbiter.port(0))
    stash.add("table", [table])
    engine = make_engine(arbiter.port(1), window_bytes=3000)
    expected = gradients(model, X)
    for _ in range(3):
        stash.park("table")
        assert_bit_equal(gradients(model, X, engine), expected)
        stash.restore("table")
        assert torch.equal(table, torch.arange(1000.0))
    arbiter.synchronize()
    assert (mover.num_expired_sources, mover.num_expired_targets) == (0, 0)
    assert engine.stats().num_live == 0


def test_what_waited_for_its_turn_is_queued_under_a_guard():
    mover = ByHand()
    arbiter = CopyArbiter(mover, piece_bytes=8, depth=1, thread=False)
    stash = StateStash(PinnedArena(1 << 16, pin=False), device="cpu", min_bytes=1, mover=arbiter.port(0))
    table = torch.arange(8.0)
    stash.add("table", [table])
    stash.park("table")
    mover.num_done = 100
    with stash.guard():
        fence = arbiter.port(1).copy("up", *pieces(5, 2), [])
        for _ in range(4):
            fence.done()  # hands out the turns of the stash too
    stash.restore("table")
    assert torch.equal(table, torch.arange(8.0))


def test_the_thread_finishes_what_nobody_asks_for_again_and_ends():
    free = threading.Event()

    class Blocked(InlineMover):
        def copy(self, way, target, source, after):
            target.copy_(source)

            class WhenFree:
                def done(self):
                    return free.is_set()

            return WhenFree()

    before = set(threading.enumerate())
    target, source = pieces(7, 20)
    arbiter = CopyArbiter(Blocked(), piece_bytes=8)
    arbiter.port().copy("up", target, source, [])
    (thread,) = set(threading.enumerate()) - before
    assert torch.equal(target, source) is False
    free.set()
    thread.join(60)
    assert not thread.is_alive()
    assert torch.equal(target, source)


def test_batches_and_bad_input():
    arbiter = CopyArbiter(InlineMover())
    x = torch.randn(6, 2)[2:]
    got, fence = arbiter.port().to_device(x, torch.device("cpu"))
    arbiter.port().compute_waits(fence)
    assert torch.equal(got, x)
    with pytest.raises(ValueError, match="contiguous"):
        arbiter.port().to_device(x.t(), torch.device("cpu"))
    with pytest.raises(ValueError, match="depth"):
        CopyArbiter(InlineMover(), depth=0)
    empty, fence = arbiter.port().to_device(torch.empty(0, 3), torch.device("cpu"))
    assert fence.done()
    assert empty.shape == (0, 3)
