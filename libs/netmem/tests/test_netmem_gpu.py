"""What only a GPU can show: streams, pinned memory, no host synchronisation. Cases O1-O3 on real streams."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from gemworks.netmem import kernel_codec
from gemworks.netmem.arbiter import CopyArbiter
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.bench.stack import StackSize, make_stack
from gemworks.netmem.budget import Option, Region, StepProfile, evaluate
from gemworks.netmem.codec import explain_codec, get_codec, kernel_layout
from gemworks.netmem.collectives import QuantizedCollective
from gemworks.netmem.ledger import BandwidthLedger, Link
from gemworks.netmem.meters import allocator_slack
from gemworks.netmem.movers import CudaMover
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.policy import apply_policy
from gemworks.netmem.profiler import profile
from gemworks.netmem.stash import StateStash

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler (2.11) looks at the gradient of whatever it traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZE = StackSize(batch=8, length=256, width=128, heads=2, keys=32, depth=2)


def gradients(model, batch) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    batch.grad = None
    model(batch).backward()
    return [p.grad.clone() for p in (batch, *model.parameters()) if p.grad is not None]


@pytest.mark.parametrize("compile_kwargs", [None, {}], ids=["eager", "compiled"])
@pytest.mark.parametrize("window_bytes", [0, 1 << 20, 1 << 30])
def test_o1_o2_o3_bit_equal_gradients_with_delayed_streams(window_bytes, compile_kwargs):
    device = torch.device("cuda", 0)
    model, batch = make_stack(SIZE, device)
    with apply_policy(model, {name: "keep" for name in model.regions}, compile_kwargs=compile_kwargs):  # noqa: C420
        expected = gradients(model, batch)
    rng = random.Random(0)
    mover = CudaMover(device, chunk_bytes=1 << 18, delay=lambda way: rng.randint(0, 2_000_000))
    engine = OffloadEngine(
        PinnedArena(256 << 20), device=device, window_bytes=window_bytes, min_bytes=1 << 12, mover=mover
    )
    choices = {name: "offload" for name in model.regions}  # noqa: C420 - fromkeys loses the value's type
    with apply_policy(model, choices, engine=engine, compile_kwargs=compile_kwargs):
        for _ in range(10):
            for a, b in zip(gradients(model, batch), expected, strict=True):
                assert torch.equal(a, b)
    engine.synchronize()
    assert engine.stats().num_live == 0


def test_no_host_synchronisation():
    device = torch.device("cuda", 0)
    model, batch = make_stack(SIZE, device)
    engine = OffloadEngine(PinnedArena(256 << 20), device=device, window_bytes=1 << 20, min_bytes=1 << 12)
    with apply_policy(model, {model.regions[0]: "offload"}, engine=engine):
        gradients(model, batch)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(batch).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_wait_for_a_copy_is_measured():
    from gemworks.netmem.bench.waits import MeteredMover

    mover = MeteredMover(torch.device("cuda", torch.cuda.current_device()))
    host = torch.ones(256 << 20, dtype=torch.uint8).pin_memory()
    device = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")

    def copy_and_wait() -> None:
        mover.compute_waits(mover.copy("down", device, host, [mover.mark()]))

    copy_and_wait()
    assert mover.measure_ms(copy_and_wait) > 1.0  # 268 MB: 5 ms at 54 GB/s, and no link is five times as fast
    done = mover.copy("down", device, host, [mover.mark()])
    mover.synchronize()
    assert mover.measure_ms(lambda: mover.compute_waits(done)) < 0.5
    assert device.all()


def test_device_memory_is_flat_over_100_steps():
    device = torch.device("cuda", 0)
    model, batch = make_stack(SIZE, device)
    engine = OffloadEngine(PinnedArena(256 << 20), device=device, window_bytes=1 << 20, min_bytes=1 << 12)
    sizes = []
    with apply_policy(model, {name: "offload" for name in model.regions}, engine=engine):  # noqa: C420
        for step in range(100):
            model(batch).backward()
            if step % 20 == 19:
                engine.synchronize()
                sizes.append(torch.cuda.memory_allocated(device))
    assert len(set(sizes[1:])) == 1, sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["fp8_row", "fp8_block128", "mxfp8"])
@pytest.mark.parametrize("shape", [(1,), (63, 129), (5, 8192), (4096, 512), (3, 0)])
def test_codec_kernels_have_the_bits_of_the_definition(name, dtype, shape):
    device, codec = torch.device("cuda", 0), get_codec(name)
    generator = torch.Generator(device).manual_seed(sum(shape))
    x = torch.randn(shape, device=device, generator=generator)
    x = (x * torch.randint(-9, 9, shape, device=device, generator=generator).float().exp2()).to(dtype)
    assert explain_codec(codec, x).startswith("triton")
    codes = codec.encode(x)
    expected = codec.encode(x.cpu())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(codes, expected, strict=True))
    back = codec.decode(codes, x.shape, dtype)
    assert torch.equal(back.cpu(), codec.decode(expected, x.shape, dtype))


@pytest.mark.parametrize("name", ["fp8_row", "fp8_block128", "mxfp8"])
def test_codec_messages_of_ranks_add_up(name):
    device, codec, shape = torch.device("cuda", 0), get_codec(name), (4096, 512)
    layout = kernel_layout(codec, shape, torch.bfloat16, device)
    assert layout is not None
    coded = [codec.encode(torch.randn(shape, device=device).bfloat16()) for _ in range(3)]
    messages = torch.cat([c.contiguous().view(-1).view(torch.uint8) for pair in coded for c in pair])
    total = torch.zeros(shape, device=device)
    for pair in coded:
        total += codec.decode(pair, shape, torch.float32)
    # by a tensor: a GPU divides by a number as it multiplies by the reciprocal, which is not rounded once
    expected = {False: total.bfloat16(), True: (total / torch.full_like(total, 3)).bfloat16()}
    for mean in (False, True):
        got = kernel_codec.decode_sum(messages, 3, total.numel(), *layout, torch.bfloat16, mean).view(shape)
        num_differ = int((got != expected[mean]).sum())
        assert num_differ == 0, (mean, num_differ, got.numel())


@pytest.mark.parametrize("shape", [(64, 512), (7, 33), (5, 4), (0, 8)])
@pytest.mark.parametrize("name", ["bf16", "fp8_row", "fp8_block128", "mxfp8"])
def test_o7_collectives_of_one_rank_are_the_codec_alone(name, shape, tmp_path):
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, device_id=device)
    try:
        codec, x = get_codec(name), torch.randn(shape, device=device).bfloat16()
        expected = codec.decode(codec.encode(x), x.shape, x.dtype) if x.numel() else x
        q = QuantizedCollective(codec=name)
        assert torch.equal(q.all_gather(x), expected)
        assert torch.equal(q.reduce_scatter(x), expected)
        assert torch.equal(q.all_to_all(x, [shape[0]], [shape[0]]), expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("n", [1, 5000, 1 << 22])
def test_codec_free_sum_of_parts(n):
    device = torch.device("cuda", 0)
    parts, own = (torch.randn(s, device=device).bfloat16() for s in ((3, n), (n,)))
    out = torch.full((n,), float("nan"), device=device, dtype=torch.bfloat16)
    kernel_codec.sum_parts(own, parts, 1, out, True)
    assert torch.equal(out, ((parts[0].float() + own.float() + parts[2].float()) / 3).bfloat16())


def test_a_paced_plan_moves_ahead_of_need_and_frees_memory():
    """The first region offloaded, all others kept: nothing but the pace tells the engine where the step is."""
    device = torch.device("cuda", 0)
    model, batch = make_stack(SIZE, device)
    expected = gradients(model, batch)
    engine = OffloadEngine(PinnedArena(256 << 20), device=device, window_bytes=64 << 20, min_bytes=1 << 12)
    regions = []
    for name in model.regions:
        # the last one's backward sets the peak, and leaves no room for what is late or early
        own = (0, 64 << 20, (128 if name == model.regions[-1] else 64) << 20)
        away = Option("offload", 0.1, 0.2, *own, moved_bytes=8 << 20)
        regions.append(Region(name, (Option("keep", 0.1, 0.2, *own), away)))
    step = StepProfile(
        tuple(regions),
        up_bytes_per_s=1e8,
        down_bytes_per_s=1e8,
        window_bytes=64 << 20,
    )
    plan = evaluate(step, ["offload"] + ["keep"] * (len(model.regions) - 1))
    assert plan.stall_s == 0
    assert plan.pace[model.regions[-1]].leaving_bytes == 0
    with apply_policy(model, plan, engine=engine):
        for _ in range(3):
            for a, b in zip(gradients(model, batch), expected, strict=True):
                assert torch.equal(a, b)
        model.zero_grad(set_to_none=True)
        loss = model(batch)
        assert engine.stats().num_live > 0
        # the queue is empty by the end of forward, so everything has departed, whatever the host knows of the copies
        assert engine.stats().in_flight_bytes == 0
        before = engine.stats().num_rescued
        loss.backward()
        assert engine.stats().num_rescued == before


def test_a_paced_copy_out_that_backward_outruns_ends_before_its_memory_is_used_again():
    """The last region offloaded over slow streams: its backward finds everything still leaving, and compute waits
    for each copy when its tensor is needed no more."""
    device = torch.device("cuda", 0)
    model, batch = make_stack(SIZE, device)
    expected = gradients(model, batch)
    mover = CudaMover(device, delay=lambda way: 5_000_000)
    engine = OffloadEngine(PinnedArena(256 << 20), device=device, window_bytes=64 << 20, min_bytes=1 << 12, mover=mover)
    regions = []
    for name in model.regions:
        own = (0, 64 << 20, (256 if name == model.regions[0] else 64) << 20)
        away = Option("offload", 0.1, 0.2, *own, moved_bytes=8 << 20)
        regions.append(Region(name, (Option("keep", 0.1, 0.2, *own), away)))
    step = StepProfile(tuple(regions), up_bytes_per_s=1e9, down_bytes_per_s=1e9, window_bytes=64 << 20)
    plan = evaluate(step, ["keep"] * (len(model.regions) - 1) + ["offload"])
    with apply_policy(model, plan, engine=engine):
        for _ in range(10):
            before = engine.stats().num_rescued
            for a, b in zip(gradients(model, batch), expected, strict=True):
                assert torch.equal(a, b)
            assert engine.stats().num_rescued > before
    engine.synchronize()
    assert (engine.stats().num_live, engine.stats().host_bytes) == (0, 0)


def test_o1_bit_equal_gradients_through_an_arbiter_shared_with_a_stash():
    device = torch.device("cuda", 0)
    model, batch = make_stack(SIZE, device)
    expected = gradients(model, batch)
    arbiter = CopyArbiter(CudaMover(device, chunk_bytes=1 << 18), piece_bytes=1 << 18)
    engine = OffloadEngine(
        PinnedArena(256 << 20), device=device, window_bytes=1 << 20, min_bytes=1 << 12, mover=arbiter.port(1)
    )
    stash = StateStash(PinnedArena(128 << 20), device=device, mover=arbiter.port(0))
    table = torch.arange(16 << 20, device=device, dtype=torch.float32)
    stash.add("table", [table])
    with apply_policy(model, {name: "offload" for name in model.regions}, engine=engine):  # noqa: C420
        for _ in range(5):
            stash.park("table")
            got = gradients(model, batch)
            stash.restore("table")
            for a, b in zip(got, expected, strict=True):
                assert torch.equal(a, b)
            assert torch.equal(table, torch.arange(16 << 20, device=device, dtype=torch.float32))
    arbiter.synchronize()
    assert engine.stats().num_live == 0


def test_stash_frees_device_memory():
    device = torch.device("cuda", 0)
    stash = StateStash(PinnedArena(128 << 20), device=device)
    table = torch.arange(16 << 20, device=device, dtype=torch.float32)
    stash.add("table", [table])
    before = torch.cuda.memory_allocated(device)
    stash.park("table", wait=True)
    assert before - torch.cuda.memory_allocated(device) >= 64 << 20
    stash.restore("table")
    assert torch.equal(table, torch.arange(16 << 20, device=device, dtype=torch.float32))


@pytest.mark.parametrize("batch_size", [8, 24])
def test_o6_the_allocator_stays_within_the_plan(batch_size):
    """Uniform choices, whose plans have no bytes to spare, in another order and on blocks that other work left."""
    device = torch.device("cuda", 0)
    model, batch = make_stack(StackSize(batch=batch_size, length=384, width=128, heads=2, keys=32, depth=3), device)
    gradients(model, batch)
    engine = OffloadEngine(PinnedArena(16 << 20), device=device)
    ledger = BandwidthLedger([Link("host.up", 5e10), Link("host.down", 5e10)], hbm_bytes_per_s=4e12)
    choices = ["keep", "recompute", "quantise"]
    step = profile(model, batch, model.regions, ledger=ledger, engine=engine, choices=choices, repeats=1, base_bytes=0)
    assert step.base_bytes >= allocator_slack(device) == 2 << 20
    for seed, choice in enumerate([*reversed(choices), *choices]):
        generator = random.Random(seed)
        sizes = [generator.randrange(1 << 20, 40 << 20) for _ in range(20)]
        others = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        del others[::2]
        plan = evaluate(step, [choice] * len(step.regions))
        with apply_policy(model, plan, engine=engine):
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            model(batch).backward()
            peak = torch.cuda.max_memory_allocated(device) - before
        assert peak <= plan.peak_bytes, (choice, peak, plan.peak_bytes)
        del others


def test_codes_made_by_the_compiler_take_less_memory_and_keep_the_gradients():
    device = torch.device("cuda", 0)
    size = StackSize(batch=8, length=1024, width=512, heads=4, keys=256, depth=1)
    model, batch = make_stack(size, device)
    found = {}
    for choice in ("recompute@0.85", "quantise_fused@0.85"):
        with apply_policy(model, dict.fromkeys(model.regions, choice), compile_kwargs={}):
            model(batch).backward()  # compiles
            model.zero_grad()
            before = torch.cuda.memory_allocated(device)
            loss = model(batch)
            held = torch.cuda.memory_allocated(device) - before
            loss.backward()
            found[choice] = (
                held,
                torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None]),
            )
    (held, expected), (held_coded, got) = found.values()
    unit = batch.numel() * batch.element_size()
    # of the input, scores (twice as large) and products of the first region and the input of the second a half each;
    # the first region's input is the batch, which is there all the same
    assert held - held_coded > 1.4 * unit
    assert 10 * torch.log10(expected.square().sum() / (got - expected).square().sum()) > 25
