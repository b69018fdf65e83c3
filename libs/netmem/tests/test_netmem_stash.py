"""The state stash: equal training, memory really freed and had again, whatever goes wrong on the way."""

from __future__ import annotations

import copy
import gc
import itertools
import linecache
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gemworks.netmem import sealed
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.errors import ParkedStateError
from gemworks.netmem.movers import DelayedMover, InlineMover
from gemworks.netmem.stash import Place, StateStash
from netmem_stashes import make_stash, make_training, train
from torch import nn

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("seed", range(4))
def test_training_with_parked_optimizer_state_is_bit_equal(seed):
    model, optimizer = make_training()
    reference, reference_optimizer = make_training()
    stash = make_stash(seed)
    stash.add_optimizer("adam", optimizer)
    stash.around_step("adam", optimizer)
    assert train(model, optimizer, 12) == train(reference, reference_optimizer, 12)
    stash.restore("adam")
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["exp_avg"], reference_optimizer.state[q]["exp_avg"])


def test_parking_frees_the_device_and_restoring_gives_every_alias_back():
    stash = make_stash()
    base = torch.arange(1000.0)
    views = [base, base.view(10, 100).t(), base[500:]]
    expected = [v.clone() for v in views]
    stash.add("table", views)
    stash.park("table", wait=True)
    assert stash.place("table") is Place.PARKED
    assert base.untyped_storage().nbytes() == 0
    stash.prefetch("table")
    assert stash.place("table") is Place.RETURNING
    stash.restore("table")
    for a, b in zip(views, expected, strict=True):
        assert torch.equal(a, b)
    assert stash._arena.stats().num_live == 0
    assert base._version == 0


def test_a_storage_of_the_minimum_size_leaves_and_a_smaller_one_stays():
    stash = make_stash()  # min_bytes=64
    at_least, smaller = torch.ones(16), torch.ones(15)
    stash.add("state", [at_least, smaller])
    stash.park("state", wait=True)
    assert [x.untyped_storage().nbytes() for x in (at_least, smaller)] == [0, 60]


def test_restored_while_leaving_and_written_at_once():
    """The outgoing copy of the first round must not read what the owner writes after the restore."""
    for seed in range(6):
        stash = make_stash(seed)
        table = torch.zeros(1000)
        stash.add("table", [table])
        for round_ in range(5):
            stash.park("table")
            stash.restore("table")
            table.fill_(round_)
            stash.park("table", wait=round_ % 2 == 0)
            stash.restore("table")
            assert table.unique().tolist() == [round_]


@pytest.mark.parametrize("seed", range(3))
def test_an_embedding_table_parked_from_lookup_to_its_update(seed):
    model, optimizer = make_training()
    reference, reference_optimizer = make_training()
    stash = make_stash(seed)
    embedding = model[0]
    stash.add_module("table", embedding)
    stash.restore_before_forward("table", embedding)
    optimizer.register_step_pre_hook(lambda *_: stash.restore("table"))
    embedding.register_forward_hook(lambda *_: stash.park("table"))
    assert train(model, optimizer, 8) == train(reference, reference_optimizer, 8)


def test_restore_in_the_midst_of_backward():
    stash = make_stash()
    table = torch.arange(100.0)
    stash.add("table", [table])
    x = torch.ones(3, requires_grad=True)
    h = x * 2
    stash.restore_before_gradient("table", h)
    stash.park("table", wait=True)
    places = []
    x.register_hook(lambda _: places.append(stash.place("table")))
    h.sum().backward()
    assert places == [Place.DEVICE]
    assert table[99] == 99


def test_exhausted_host_memory_leaves_state_on_the_device():
    stash = make_stash(capacity_bytes=1024)
    tensors = [torch.full((200,), 1.0), torch.full((200,), 2.0)]
    stash.add("both", tensors)
    with pytest.warns(RuntimeWarning, match="exhausted"):
        stash.park("both", wait=True)
    assert [t.untyped_storage().nbytes() for t in tensors] == [0, 800]
    stash.restore("both")
    assert [float(t.sum()) for t in tensors] == [200.0, 400.0]


def test_memory_goes_when_all_of_the_group_has_left():
    class OneByOne(InlineMover):
        num_done = 0

        def __init__(self) -> None:
            self.num_copies = 0

        def copy(self, way, target, source, after):
            super().copy(way, target, source, after)
            self.num_copies += 1
            return Numbered(self.num_copies)

        def compute_waits(self, fence):
            raise AssertionError("poll() makes compute wait for what is not done")

    class Numbered:
        def __init__(self, number: int) -> None:
            self.number = number

        def done(self) -> bool:
            return OneByOne.num_done >= self.number

    stash = StateStash(PinnedArena(1 << 20, pin=False), device="cpu", min_bytes=64, mover=OneByOne())
    tensors = [torch.ones(100) for _ in range(2)]
    stash.add("both", tensors)
    stash.park("both")
    for OneByOne.num_done, place in ((0, Place.LEAVING), (1, Place.LEAVING), (2, Place.PARKED)):
        assert stash.place("both") is place
    assert [x.untyped_storage().nbytes() for x in tensors] == [0, 0]


class Noting(InlineMover):
    """Copies at once, but no fence is ever done; notes what each copy comes after."""

    def __init__(self) -> None:
        self.copies = []

    def copy(self, way, target, source, after):
        super().copy(way, target, source, after)
        fence = Never()
        self.copies.append((way, fence, list(after)))
        return fence


class Never:
    def done(self) -> bool:
        return False


def test_host_memory_is_used_again_only_after_the_copies_that_touch_it():
    mover = Noting()
    stash = StateStash(PinnedArena(512, pin=False), device="cpu", min_bytes=64, mover=mover)
    for name in ("first", "second"):  # the arena has room for one
        stash.add(name, [torch.ones(128)])
        stash.park(name, wait=True)
        stash.restore(name)
    ways, fences, after = zip(*mover.copies, strict=True)
    assert ways == ("up", "down", "up", "down")
    assert fences[0] in after[1]
    assert fences[1] in after[2]
    assert fences[2] in after[3]


def test_host_memory_of_a_dropped_stash_keeps_its_fence():
    mover, arena = Noting(), PinnedArena(512, pin=False)
    stash = StateStash(arena, device="cpu", min_bytes=64, mover=mover)
    stash.add("table", [torch.ones(128)])
    stash.park("table", wait=True)
    del stash
    gc.collect()
    assert arena.allocate(512).fences == [mover.copies[0][1]]


def test_what_is_on_its_way_back_can_be_parked_again():
    stash, table = make_stash(), torch.arange(100.0)
    stash.add("table", [table])
    stash.park("table", wait=True)
    stash.prefetch("table")
    stash.park("table", wait=True)
    assert stash.place("table") is Place.PARKED
    stash.restore("table")
    assert torch.equal(table, torch.arange(100.0))


def test_what_cannot_be_freed_and_had_again_stays():
    numpy_owns, shared = torch.from_numpy(np.ones(1000, np.float32)), torch.ones(1000).share_memory_()
    others = [torch.ones(30, 30).to_sparse(), torch.ones(1000, device="meta"), torch.ones(8)]
    stash, table = make_stash(), torch.ones(1000)
    stash.add("mixed", [numpy_owns, shared, *others, table])
    stash.park("mixed", wait=True)
    assert (numpy_owns.sum(), shared.sum(), table.untyped_storage().nbytes()) == (1000, 1000, 0)
    stash.restore("mixed")
    assert table.sum() == 1000


def test_a_group_of_which_nothing_leaves_stays_on_the_device():
    stash, module = make_stash(), nn.Linear(2, 2)
    stash.add_module("small", module)
    stash.park("small", wait=True)
    assert stash.place("small") is Place.DEVICE
    module(torch.ones(1, 2))


def test_host_memory_of_a_dropped_stash_comes_back():
    arena = PinnedArena(1 << 20, pin=False)
    for _ in range(3):
        stash = StateStash(arena, device="cpu", min_bytes=64)
        table = torch.ones(1000)
        stash.add("table", [table])
        stash.park("table", wait=True)
        del stash, table
        gc.collect()
    assert arena.stats().num_live == 0


def test_restore_points_and_steps_inside_compiled_code():
    stash = make_stash()
    module, x = nn.Linear(64, 64), torch.ones(1, 64)
    stash.add_module("linear", module)
    stash.restore_before_forward("linear", module)
    compiled = torch.compile(module, backend="eager")
    expected = compiled(x).detach()
    for wait in (True, False):
        stash.park("linear", wait=wait)
        assert torch.equal(compiled(x), expected)
        assert stash.place("linear") is Place.DEVICE
    weights = [nn.Parameter(torch.ones(100)) for _ in range(2)]
    optimizers = [torch.optim.Adam([w], lr=0.1) for w in weights]
    stash.add_optimizer("adam", optimizers[0])
    stash.around_step("adam", optimizers[0])
    step = torch.compile(optimizers[0].step, backend="eager")
    for w in weights:
        w.grad = torch.ones(100)
    for _ in range(3):
        step()
        optimizers[1].step()
    assert stash.place("adam") in (Place.LEAVING, Place.PARKED)
    torch.testing.assert_close(weights[0], weights[1])
    stash.restore("adam")


class Interrupt:
    """A trace function that raises at the n-th line of the stash, as Ctrl-C may."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame, event, arg):
        if Path(frame.f_code.co_filename).name not in ("stash.py", "sealed.py"):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # the way out of `with` counts as a line of its own, on which no signal is looked at
        if event == "line" and not line.startswith("with "):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("what", ["park", "restore"])
def test_whatever_is_interrupted_can_be_restored(what):
    own = dict(vars(dist.ProcessGroup))
    at, stash = 0, make_stash()
    for at in itertools.count(1):
        stash = make_stash(at)
        tensors = [torch.full((100,), float(i)) for i in range(2)]
        stash.add("all", tensors)
        if what == "restore":
            stash.park("all", wait=at % 2 == 0)
        before = sys.gettrace()
        sys.settrace(Interrupt(at))
        try:
            stash.park("all", wait=True) if what == "park" else stash.restore("all")
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        for _ in range(2):
            assert [type(x) for x in tensors if not x.untyped_storage().nbytes()].count(torch.Tensor) == 0
            stash.restore("all")
            assert [x.unique().tolist() for x in tensors] == [[0.0], [1.0]]
            assert {type(x) for x in tensors} == {torch.Tensor}
            stash.park("all", wait=True)
        stash.restore("all")
        assert not sealed._held
        assert dict(vars(dist.ProcessGroup)) == own
        assert stash._arena.stats().num_live <= 1  # of what was about to be noted, at most
    assert at > 50
    stash.restore("all")


def test_bad_names():
    stash = make_stash()
    stash.add("a", [])
    with pytest.raises(ValueError, match="taken"):
        stash.add("a", [])
    with pytest.raises(ValueError, match="expected one of"):
        stash.park("b")


def test_two_stashes_do_not_park_one_storage():
    first, second = make_stash(1), make_stash(2)
    table = torch.ones(100)
    first.add("a", [table])
    second.add("b", [table])
    for wait in (False, True):
        first.park("a", wait=wait)
        second.park("b", wait=True)
        first.restore("a")
        table.fill_(7.0)
        second.restore("b")
        assert table.unique().tolist() == [7.0]
        assert type(table) is torch.Tensor


def test_a_stash_that_is_dropped_while_parked_holds_nobody_up():
    stash = make_stash()
    table = torch.ones(100)
    stash.add("table", [table])
    stash.park("table", wait=True)
    del stash, table
    gc.collect()
    other, kept = make_stash(), torch.ones(100)
    other.add("kept", [kept])
    other.park("kept", wait=True)
    other.restore("kept")
    assert not sealed._held
    assert not sealed._originals


class FailingMover(DelayedMover):
    """Refuses a copy."""

    def __init__(self, way: str, number: int) -> None:
        super().__init__(0, max_delay=20, chunk_bytes=256)
        self.left = {way: number}

    def copy(self, way, target, source, after):
        self.left[way] = self.left.get(way, 0) - 1
        if self.left[way] == 0:
            raise OSError("no copy")
        return super().copy(way, target, source, after)


@pytest.mark.parametrize("way", ["up", "down"])
def test_an_error_in_the_midst_leaves_what_can_be_restored(way):
    mover = FailingMover(way, 2)
    stash = StateStash(PinnedArena(1 << 20, pin=False), device="cpu", min_bytes=64, mover=mover)
    tensors = [torch.full((100,), float(i)) for i in range(3)]
    stash.add("all", tensors)

    def round_trip() -> None:
        stash.park("all", wait=True)
        stash.restore("all")

    with pytest.raises(OSError, match="no copy"):
        round_trip()
    stash.restore("all")
    assert [x.unique().tolist() for x in tensors] == [[0.0], [1.0], [2.0]]
    assert {type(x) for x in tensors} == {torch.Tensor}
    assert stash._arena.stats().num_live == 0
    assert not sealed._held


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_state_of_fsdp2_is_parked_inside_its_dtensors(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        losses = []
        for parked in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 1))
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            stash = make_stash()
            if parked:
                stash.add_optimizer("adam", optimizer)
                stash.around_step("adam", optimizer)
            for _ in range(4):
                loss = model(torch.ones(8, 64)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            if parked:
                stash.park("adam", wait=True)
                weight = next(model.parameters())
                moment = optimizer.state[weight]["exp_avg"]
                assert isinstance(moment, DTensor)
                assert isinstance(weight, DTensor)
                assert moment._local_tensor.untyped_storage().nbytes() == 0
                assert moment.placements == weight.placements
                for use in (lambda x: x + 1, lambda x: x.to_local(), lambda x: x.full_tensor(), copy.deepcopy):
                    with pytest.raises(ParkedStateError, match="'adam'"):
                        use(moment)
                stash.restore("adam")
                view = DTensor.from_local(moment._local_tensor, moment.device_mesh, moment.placements)
                stash.park("adam", wait=True)
                with stash.guard(), pytest.raises(ParkedStateError, match="'adam'"):
                    view.add(1)  # not in the group, but with its memory
                stash.restore("adam")
                assert type(moment) is DTensor
                assert moment.full_tensor().isfinite().all()
        assert losses[:4] == losses[4:]
    finally:
        dist.destroy_process_group()
