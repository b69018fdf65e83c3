"""Benchmarks of one device. Every function asserts that its result is right before it reports a time."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import torch
from gemworks.netmem.arbiter import CopyArbiter
from gemworks.netmem.arena import Fence, PinnedArena
from gemworks.netmem.bench.rows import Rows, synchronize, timed_ms, timed_on_device_ms
from gemworks.netmem.codec import BUILTIN, Codec, explain_codec
from gemworks.netmem.ledger import HBM, BandwidthLedger
from gemworks.netmem.movers import CHUNK_BYTES, as_bytes, mover_for
from gemworks.netmem.parcels import Parcel
from gemworks.netmem.stash import StateStash

GIB = 2**30
STASH_ROUNDS = 5


@dataclass(frozen=True)
class Setup:
    """What every benchmark gets."""

    device: torch.device
    ledger: BandwidthLedger
    rows: Rows
    smoke: bool
    compile: bool

    @property
    def repeats(self) -> int:
        return 3 if self.smoke else 20

    def gib(self, full: float) -> int:
        """Bytes of a GiB figure; a small one in a smoke run."""
        return (1 << 20) if self.smoke else int(full * GIB)


def links(s: Setup) -> None:
    """The ledger's measured rates."""
    for name, link in s.ledger.links.items():
        s.rows.add("link", setting=name, gbps=link.bytes_per_s / 1e9, ms=link.latency_s * 1e3)
    for name in (HBM, "host.duplex"):
        s.rows.add("link", setting=name, gbps=s.ledger.capacity[name] / 1e9)


def offload_copies(s: Setup) -> None:
    """Parcels out and back, alone: share of the measured link."""
    num, each = 8, s.gib(0.25)
    arena = PinnedArena(num * each + (1 << 20), pin=s.device.type == "cuda")
    mover = mover_for(s.device)
    sources = [torch.randint(0, 255, (each,), dtype=torch.uint8, device=s.device) for _ in range(num)]
    parcels: list[Parcel] = []

    def out() -> None:
        for p in parcels:
            p.close()
        parcels[:] = [Parcel(i, x.untyped_storage(), arena, mover) for i, x in enumerate(sources)]
        for p in parcels:
            p.depart()

    def back() -> None:
        for p in parcels:
            p.bring()
        for p in parcels:
            p.fetch()
        synchronize(s.device)
        for p in parcels:
            p.settle()

    out()
    for parcel, source in zip(parcels, sources, strict=True):
        assert torch.equal(as_bytes(parcel.fetch()), source), "an offloaded tensor came back changed"
        parcel.settle()
    for name, run, link in (("out", out, "host.up"), ("back", back, "host.down")):
        ms, p20, p80 = timed_ms(run, s.device, s.repeats)
        gbps = num * each / ms / 1e6
        s.rows.add(
            "offload_copy",
            shape=f"{num}x{each}B",
            setting=name,
            ms=ms,
            ms_p20=p20,
            ms_p80=p80,
            gbps=gbps,
            roofline_fraction=gbps * 1e9 / s.ledger.link(link).bytes_per_s,
            dtype="uint8",
        )


def small_copy_under_bulk(s: Setup) -> None:
    """Latency of a small copy while a bulk copy goes the same way, in one piece and in chunks.

    From the host's call to the copy's end as the host sees it. The bulk copy is queued on another stream 2 ms before.
    The row says in how many runs it was still under way when the small copy was done: in all of them the small copy
    overtook it, in none of them the small copy waited for all of it.
    """
    if s.device.type != "cuda":
        s.rows.add("small_copy", setting="needs a GPU: a CPU has no copy engine")
        return
    bulk = s.gib(1)
    host, device = (
        torch.ones(bulk, dtype=torch.uint8).pin_memory(),
        torch.zeros(bulk, dtype=torch.uint8, device=s.device),
    )
    streams = [torch.cuda.Stream(s.device) for _ in range(2)]
    for way, small in itertools.product(("to device", "to host"), (4096, 1 << 20, 16 << 20)):
        near, far = (host, device) if way == "to device" else (device, host)
        source, target = near[:small].clone(), far[:small].clone()
        if way == "to device":
            source = source.pin_memory()
        else:
            target = target.pin_memory()
        idle_ms = 0.0
        for chunk in (0, bulk, CHUNK_BYTES, CHUNK_BYTES // 4):
            latencies, num_under_way = [], 0
            for _ in range(7):
                end, bulk_end = torch.cuda.Event(), torch.cuda.Event()
                synchronize(s.device)
                with torch.cuda.stream(streams[0]):
                    for start in range(0, bulk, chunk) if chunk else ():
                        far[start : start + chunk].copy_(near[start : start + chunk], non_blocking=True)
                    bulk_end.record()
                time.sleep(0.002)  # the bulk copy is on its way
                started = time.perf_counter()
                with torch.cuda.stream(streams[1]):
                    target.copy_(source, non_blocking=True)
                    end.record()
                end.synchronize()
                latencies.append((time.perf_counter() - started) * 1e3)
                num_under_way += not bulk_end.query()
            synchronize(s.device)
            assert torch.equal(target.cpu(), source.cpu()), "the small copy is wrong"
            latencies.sort()
            ms = latencies[len(latencies) // 2]
            idle_ms = idle_ms if chunk else ms
            under = f"chunk={chunk}, bulk under way in {num_under_way} of 7" if chunk else "idle link"
            s.rows.add(
                "small_copy",
                shape=f"{small}B {way} under {bulk}B",
                setting=under,
                ms=ms,
                ms_p20=latencies[1],
                ms_p80=latencies[5],
                best_peer="idle link",
                ratio_to_best_peer=idle_ms / ms,
            )


def turns(s: Setup) -> None:
    """The same small copies and bulk with an arbiter, which queues the bulk late; and what that costs the bulk."""
    if s.device.type != "cuda":
        s.rows.add("small_copy_turns", setting="needs a GPU: a CPU has no copy engine")
        return
    bulk = s.gib(1)
    host = torch.ones(bulk, dtype=torch.uint8).pin_memory()
    device = torch.zeros(bulk, dtype=torch.uint8, device=s.device)
    for piece_bytes in (8 << 20, CHUNK_BYTES):
        arbiter = CopyArbiter(mover_for(s.device, piece_bytes), piece_bytes=piece_bytes)
        slow, urgent = arbiter.port(0), arbiter.port(1)
        for small in (1 << 20, 16 << 20):
            source = torch.full((small,), 3, dtype=torch.uint8).pin_memory()
            latencies = []
            for _ in range(7):
                synchronize(s.device)
                fence = slow.copy("down", device, host, [])
                time.sleep(0.002)
                started = time.perf_counter()
                target, arrival = urgent.to_device(source, s.device)
                while not arrival.done():
                    pass
                latencies.append((time.perf_counter() - started) * 1e3)
                under_way = not fence.done()
                arbiter.synchronize()
                assert torch.equal(target.cpu(), source), "the small copy is wrong"
                assert under_way, "the bulk copy was over before the small one: nothing was measured"
            latencies.sort()
            s.rows.add(
                "small_copy_turns",
                shape=f"{small}B to device under {bulk}B",
                setting=f"arbiter, pieces of {piece_bytes}, 2 queued",
                ms=latencies[3],
                ms_p20=latencies[1],
                ms_p80=latencies[5],
            )
        for setting, port in ((f"arbiter, pieces of {piece_bytes}, 2 queued", slow), ("queued at once", None)):
            mover = port or mover_for(s.device, piece_bytes)
            ms, p20, p80 = timed_ms(lambda mover=mover: _finish(mover.copy("down", device, host, [])), s.device, 7)
            gbps = bulk / ms / 1e6
            share = gbps * 1e9 / s.ledger.link("host.down").bytes_per_s
            shape = f"{bulk}B to device in pieces of {piece_bytes}"
            s.rows.add(
                "bulk_copy_turns",
                shape=shape,
                setting=setting,
                ms=ms,
                ms_p20=p20,
                ms_p80=p80,
                gbps=gbps,
                roofline_fraction=share,
            )


def _finish(fence: Fence) -> None:
    while not fence.done():
        time.sleep(1e-4)


def quantise(s: Setup) -> None:
    """Codecs alone: bytes, time against 6 B per element at copy bandwidth, signal to noise."""
    numel = s.gib(0.25) // 2
    dtype = torch.bfloat16 if s.device.type == "cuda" else torch.float32
    x = torch.randn(numel // 512, 512, device=s.device, dtype=dtype)
    for name, codec in BUILTIN.items():
        ratio = x.numel() * x.element_size() / codec.nbytes(x.shape, x.dtype)
        if ratio == 1.0:
            continue  # bf16 of bf16 is the tensor itself: there is nothing to time

        def round_trip(codec: Codec = codec) -> torch.Tensor:
            return codec.decode(codec.encode(x), x.shape, x.dtype)

        back = round_trip()
        error = (back.float() - x.float()).square().sum()
        sqnr_db = 10 * torch.log10(x.float().square().sum() / error.clamp_min(1e-30)).item()
        assert sqnr_db > 25, f"{name}: {sqnr_db:.1f} dB"
        bound_ms = 6 * x.numel() / s.ledger.capacity[HBM] * 1e3
        ms, p20, p80 = timed_on_device_ms(round_trip, s.device, s.repeats)
        s.rows.add(
            "quantise",
            shape=str(tuple(x.shape)),
            setting=f"{name} {ratio:.3f}x fewer bytes, {sqnr_db:.1f} dB",
            impl=f"gemworks {explain_codec(codec, x).split(':')[0]}",
            ms=ms,
            ms_p20=p20,
            ms_p80=p80,
            gbps=6 * x.numel() / ms / 1e6,
            roofline_fraction=bound_ms / ms,
            dtype=str(dtype).removeprefix("torch."),
        )


def stash(s: Setup) -> None:
    """A table parked and brought back under compute, in turns with the same compute without it, two steps in a row.

    Each way takes less than half of the compute, so the device memory is given up in the middle by a wait on the device
    that is over by then. Asking the host instead (`poll`) finds the copy under way, since the host is far ahead, and
    nothing comes back. The device sleeps before each measurement until the copies of the first step are issued:
    training has the host ahead too (decision 0456).
    """
    num_bytes = s.gib(16)
    arena = PinnedArena(num_bytes + (1 << 20), pin=s.device.type == "cuda")
    state = StateStash(arena, device=s.device)
    table_ = torch.ones(num_bytes // 4, device=s.device)
    state.add("table", [table_])
    size = 64 if s.smoke else 8192
    a = torch.randn(size, size, device=s.device, dtype=torch.bfloat16 if s.device.type == "cuda" else torch.float32)
    link_s = num_bytes / s.ledger.link("host.up").bytes_per_s
    once_s = timed_ms(lambda: a @ a, s.device, 5)[0] / 1e3
    num = max(4, int(2.5 * link_s / once_s))
    product = torch.empty_like(a)
    parked_bytes: list[int] = []

    def compute(stashed: bool) -> None:
        if stashed:
            state.park("table")
        for i in range(num):
            if stashed and i == num // 2:
                state.park("table", wait=True)
                parked_bytes.append(table_.untyped_storage().nbytes())
                state.prefetch("table")
            torch.mm(a, a, out=product)
        if stashed:
            state.restore("table")

    in_a_row = 2
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3 if s.smoke else STASH_ROUNDS):
        for stashed in times:  # a table of 16 GiB costs the host some 500 copies each way, about 5 ms
            ms, *_ = timed_on_device_ms(lambda on=stashed: compute(on), s.device, 1, in_a_row, ahead_cycles=20_000_000)
            times[stashed].append(ms)
    assert parked_bytes, "no step parked the table"
    assert not any(parked_bytes), "the table was never parked"
    assert bool((table_ == 1).all()), "the table came back changed"
    overheads = ", ".join(f"{100 * (b / a - 1):+.2f}" for a, b in zip(times[False], times[True], strict=True))
    plain, parked = sorted(times[False]), sorted(times[True])
    last = len(parked) - 1
    ms, plain_ms = statistics.median(parked), statistics.median(plain)
    s.rows.add(
        "stash",
        shape=f"{num_bytes}B",
        setting=f"parked=True, {in_a_row} steps in a row, in turns: {overheads} % time of the step",
        ms=ms,
        ms_p20=parked[round(0.2 * last)],
        ms_p80=parked[round(0.8 * last)],
        exposed_ms=ms - plain_ms,
        ratio_to_best_peer=plain_ms / ms,
        best_peer="no stash",
        memory_gib=num_bytes / GIB,
    )
