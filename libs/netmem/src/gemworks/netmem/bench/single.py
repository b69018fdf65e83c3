"""Benchmarks of one device. Every function asserts that its result is right before it reports a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.bench.rows import Rows, synchronize, timed_ms
from gemworks.netmem.bench.stack import Stack, StackSize, make_stack
from gemworks.netmem.budget import KEEP, OFFLOAD, Plan, StepProfile, evaluate
from gemworks.netmem.codec import BUILTIN
from gemworks.netmem.errors import InfeasibleBudgetError
from gemworks.netmem.ledger import HBM, BandwidthLedger
from gemworks.netmem.movers import CHUNK_BYTES, as_bytes, mover_for
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.parcels import Parcel
from gemworks.netmem.policy import apply_policy
from gemworks.netmem.profiler import profile, table
from gemworks.netmem.solver import solve
from gemworks.netmem.stash import StateStash

GIB = 2**30


@dataclass(frozen=True)
class Setup:
    """What every benchmark gets."""

    device: torch.device
    ledger: BandwidthLedger
    rows: Rows
    smoke: bool
    out: Path
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
    """Latency of a 4 KiB copy to the device while a bulk copy goes the same way, in one piece and in chunks."""
    if s.device.type != "cuda":
        s.rows.add("small_copy", setting="needs a GPU: a CPU has no copy engine")
        return
    bulk, small = s.gib(2), 4096
    host, device = (
        torch.ones(bulk, dtype=torch.uint8).pin_memory(),
        torch.empty(bulk, dtype=torch.uint8, device=s.device),
    )
    small_host, small_device = (
        torch.ones(small, dtype=torch.uint8).pin_memory(),
        torch.empty(small, dtype=torch.uint8, device=s.device),
    )
    streams = [torch.cuda.Stream(s.device) for _ in range(2)]
    for chunk in (bulk, CHUNK_BYTES, CHUNK_BYTES // 4):
        latencies = []
        for _ in range(s.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            synchronize(s.device)
            with torch.cuda.stream(streams[0]):
                for start in range(0, bulk, chunk):
                    device[start : start + chunk].copy_(host[start : start + chunk], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                begin.record()
                small_device.copy_(small_host, non_blocking=True)
                end.record()
            synchronize(s.device)
            latencies.append(begin.elapsed_time(end))
        latencies.sort()
        assert bool((small_device == 1).all()), "the small copy is wrong"
        s.rows.add(
            "small_copy", shape=f"{small}B under {bulk}B", setting=f"chunk={chunk}", ms=latencies[len(latencies) // 2]
        )


def quantise(s: Setup) -> None:
    """Codecs alone: bytes, time against 6 B per element at copy bandwidth, signal to noise."""
    numel = s.gib(0.25) // 2
    dtype = torch.bfloat16 if s.device.type == "cuda" else torch.float32
    x = torch.randn(numel // 512, 512, device=s.device, dtype=dtype)
    for name, codec in BUILTIN.items():

        def round_trip(codec=codec) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return codec.decode(codec.encode(x), x.shape, x.dtype)

        run = torch.compile(round_trip) if s.compile and s.device.type == "cuda" else round_trip
        error = (run().float() - x.float()).square().sum()
        sqnr_db = 10 * torch.log10(x.float().square().sum() / error.clamp_min(1e-30)).item()
        assert sqnr_db > 25, f"{name}: {sqnr_db:.1f} dB"
        ms, p20, p80 = timed_ms(run, s.device, s.repeats)
        bound_ms = 6 * x.numel() / s.ledger.capacity[HBM] * 1e3
        ratio = x.numel() * x.element_size() / codec.nbytes(x.shape, x.dtype)
        s.rows.add(
            "quantise",
            shape=str(tuple(x.shape)),
            setting=f"{name} {ratio:.3f}x fewer bytes, {sqnr_db:.1f} dB",
            ms=ms,
            ms_p20=p20,
            ms_p80=p80,
            roofline_fraction=bound_ms / ms,
            dtype=str(dtype),
        )


def stash(s: Setup) -> None:
    """A parked table under compute against the same compute without it."""
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

    def compute(before: Callable[[], None], middle: Callable[[], None], after: Callable[[], None]) -> None:
        before()
        for i in range(num):
            if i == num // 2:
                middle()
            torch.mm(a, a)
        after()

    def nothing() -> None:
        return None

    plain, *_ = timed_ms(lambda: compute(nothing, nothing, nothing), s.device, s.repeats)
    parked = [0]

    def middle() -> None:
        state.poll()
        parked[0] = table_.untyped_storage().nbytes()
        state.prefetch("table")

    run = lambda: compute(lambda: state.park("table"), middle, lambda: state.restore("table"))  # noqa: E731
    ms, p20, p80 = timed_ms(run, s.device, s.repeats)
    assert bool((table_ == 1).all()), "the table came back changed"
    s.rows.add(
        "stash",
        shape=f"{num_bytes}B",
        setting=f"parked={parked[0] == 0}",
        ms=ms,
        ms_p20=p20,
        ms_p80=p80,
        exposed_ms=ms - plain,
        ratio_to_best_peer=plain / ms,
        best_peer="no stash",
        memory_gib=num_bytes / GIB,
    )


def _peak_gib(device: torch.device, run: Callable[[], None]) -> float | str:
    if device.type != "cuda":
        return ""
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) / GIB


def _step(model: Stack, batch: torch.Tensor) -> None:
    model.zero_grad(set_to_none=False)
    batch.grad = None
    model(batch).backward()


def budgets(s: Setup, size: StackSize) -> list[tuple[float, Plan, float]]:
    """Per-region plans at five budgets, against keep-everything and against one global choice; predicted and
    measured.
    """
    model, batch = make_stack(size, s.device)
    engine = OffloadEngine(
        PinnedArena(s.gib(48) if not s.smoke else 64 << 20, pin=s.device.type == "cuda"),
        device=s.device,
        window_bytes=2 * batch.numel() * batch.element_size(),
        min_bytes=1024 if s.smoke else 1 << 20,
    )
    compile_kwargs = {} if s.compile else None
    measured: StepProfile = profile(
        model, batch, model.regions, ledger=s.ledger, engine=engine, repeats=s.repeats, compile_kwargs=compile_kwargs
    )
    print(table(measured))
    keep = evaluate(measured, [KEEP] * len(measured.regions))
    found: list[tuple[float, Plan, float]] = []

    def row(setting: str, impl: str, choices: dict[str, str], predicted: Plan) -> float:
        with apply_policy(model, choices, engine=engine, compile_kwargs=compile_kwargs):
            run = lambda: _step(model, batch)  # noqa: E731
            ms, p20, p80 = timed_ms(run, s.device, s.repeats)
            peak = _peak_gib(s.device, run)
        text = f"{setting}, predicted {predicted.step_s * 1e3:.3f} ms {predicted.peak_bytes / GIB:.4f} GiB"
        s.rows.add(
            "budget",
            shape=size.label,
            setting=text,
            impl=impl,
            memory_gib=peak,
            ms=ms,
            ms_p20=p20,
            ms_p80=p80,
            exposed_ms=predicted.stall_s * 1e3,
            dtype=str(batch.dtype),
            law="fixed",
            mean_len=size.length,
            max_len=size.length,
            seed=0,
        )
        return ms

    row("keep", "keep everything", dict(keep.choices), keep)
    activations = keep.peak_bytes - measured.base_bytes
    for share in (0.25, 0.38, 0.5, 0.75, 0.9):
        budget = measured.base_bytes + share * activations
        try:
            plan = solve(measured, budget)
        except InfeasibleBudgetError as error:
            s.rows.add(
                "budget",
                shape=size.label,
                setting=f"share={share}: least is {error.least_feasible_bytes / GIB:.3f} GiB, {error.held_up_by}",
            )
            continue
        uniform = [evaluate(measured, [o.choice] * len(measured.regions)) for o in measured.regions[0].options]
        ms = row(f"share={share}", "gemworks", dict(plan.choices), plan)
        found.append((share, plan, ms))
        fitting = [u for u in uniform if u.peak_bytes <= budget]
        if fitting:
            best = min(fitting, key=lambda u: u.step_s)
            row(f"share={share}", f"uniform {next(iter(best.choices.values()))}", dict(best.choices), best)
    # the most regions that can be offloaded without a predicted wait
    names = [r.name for r in measured.regions]
    free = keep
    for num in range(1, len(names) + 1):
        plan = evaluate(measured, [OFFLOAD] * num + [KEEP] * (len(names) - num))
        if plan.stall_s > 0:
            break
        free = plan
    num_free = sum(c == OFFLOAD for c in free.choices.values())
    row(
        f"free: {num_free} of {len(names)} regions, {free.moved_bytes / GIB:.4f} GiB",
        "gemworks offload",
        dict(free.choices),
        free,
    )
    return found


def plot_budgets(found: list[tuple[float, Plan, float]], path: Path) -> None:
    """Memory against measured step time."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    axes.plot([p.peak_bytes / GIB for _, p, _ in found], [ms for *_, ms in found], "o-", label="measured")
    axes.plot(
        [p.peak_bytes / GIB for _, p, _ in found], [p.step_s * 1e3 for _, p, _ in found], "x--", label="predicted"
    )
    axes.set_xlabel("peak memory (GiB, predicted)")
    axes.set_ylabel("step (ms)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
