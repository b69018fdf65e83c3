"""The offload engine over whole graphs: leaks, several backwards, checkpointing, compiling, bad input. Case O5."""

from __future__ import annotations

import gc
import itertools
import warnings

import pytest
import torch
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.codec import BUILTIN, Fp8Codec
from gemworks.netmem.errors import CodecError, ModifiedAfterSaveError
from gemworks.netmem.movers import DelayedMover, InlineMover
from gemworks.netmem.offload import OffloadEngine
from netmem_offload_model import X, assert_bit_equal, gradients, make_engine, make_model
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.reference


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
    assert engine.stats().num_moved == 0  # it stays in any case


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
        original = engine._queues.fetch

        def fetch(parcel):
            fetched.append(parcel.state.value)
            return original(parcel)

        engine._queues.fetch = fetch
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
