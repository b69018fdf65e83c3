"""Writes what the benchmark's CSV says into the pages: targets, met or missed, and every case beside its peers.

    python libs/jagged/tools/targets.py           # rewrites the blocks between the markers
    python libs/jagged/tools/targets.py --check   # says whether they are up to date

No figure in these blocks is typed. A ratio is the time of the best peer of the same run over ours; a target is met when
each of its measures is.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gemworks.jagged.bench import norms
from gemworks.jagged.bench.blocks import VARIANTS as BLOCK_VARIANTS
from gemworks.jagged.bench.cases import CASES, SWEEP_LAWS, draw_lengths
from gemworks.jagged.bench.plots import SWEPT, executed

ROOT = Path(__file__).resolve().parents[3]
ROWS = ROOT / "docs/measured/jagged_h200.csv"
SOURCES = (ROWS,)
COUNTERS = ROOT / "docs/measured/jagged_counters_h200.csv"
TRITON = ROOT / "docs/measured/jagged_plain_triton_h200.csv"
PAGE = ROOT / "docs/jagged.md"
README = ROOT / "libs/jagged/README.md"
OURS = "gemworks"
LINK = "@"  # stands for the way from a page to the folder of the rows
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
Row = dict[str, str]


@dataclass(frozen=True)
class Target:
    """Of one op and shape, for (forward, backward); None where nothing is asked.

    Attributes:
        ratio: to the best peer of the run, or to `peer`.
        tflops: for orientation; it decides nothing.
        copy_share: of the bandwidth of a copy in the same run.
        less_than: what share of the time of this other shape of the op it may take.
    """

    op: str
    shape: str
    ratio: tuple[float, float] | None = None
    tflops: tuple[float, float] | None = None
    copy_share: tuple[float, float] | None = None
    less_than: tuple[str, float] | None = None
    peer: str = ""
    law: str = "uniform"


BLOCKS = "B1152 max2000 block64"
TARGETS = (
    Target("gdpa", "B256 max1024", (1.4, 1.2), (530, 430)),
    Target("gdpa", "B128 max2048", (1.25, 1.15), (600, 480)),
    Target("gdpa", "B256 max2048 kv256", (1.6, 1.35), (480, 400), law="full"),
    Target("gdpa", "B128 max2048 seeds256", (1.3, 1.3), (400, 300)),
    Target("gdpa", "B128 max2048 seeds64", copy_share=(0.80, 0.65)),
    Target("flash_attention", "B128 max2048 window100", less_than=("B128 max2048", 0.4)),
    Target("flash_attention", "B256 max1024", (1.25, 1.1), (450, 390)),
    Target("flash_attention", "B128 max2048", (1.15, 1.08), (550, 450)),
    Target(
        "block_attention rope",
        BLOCKS,
        (1.25, 2.5),
        None,
        (0.80, 0.70),
        peer="torch varlen_attn without rope",
        law="mean70",
    ),
    *(
        Target(f"{op}", f"{rows}x{width}", copy_share=(0.85, 0.85), law="")
        for width, rows in (
            (128, 1 << 20),
            (512, 1 << 18),
            (1000, 1 << 18),
            (1024, 1 << 18),
            (2048, 1 << 18),
            (3000, 1 << 18),
            (8192, 1 << 17),
        )
        for op in ("rms_norm residual", "layer_norm affine residual")
    ),
)
FLOPS_PER_CYCLE = 132 * 4096  # dense bf16 of an H100 or H200: 989 TFLOP/s at 1.83 GHz
TILE = 128  # rows of q and of k
SWEEP_PEERS = ("torch varlen_attn", "flash-attn-4")
SCHEDULE_SHARE = 0.05  # of one layer's forward
COLUMNS = ("op, shape", "direction", "asked", "measured", "best peer", "", "commit")


class Rows:
    """The rows of one run, by what they measure."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def find(
        self, op: str, shape: str, direction: str, impl: str = OURS, law: str = "", commit: str = ""
    ) -> Row | None:
        """The first that has a time, and comes from the run of that commit where one is named."""
        for r in self.rows:
            if commit and r["commit"] != commit:
                continue
            same = (r["op"], r["shape"], r["direction"], r["impl"]) == (op, shape, direction, impl)
            if same and r["ms"] and (not law or r["law"] == law) and r["head_dim"] in ("128", ""):
                return r
        return None


def verdicts(rows: Rows) -> list[tuple[str, ...]]:
    """One line of the table of targets per target and direction."""
    lines = []
    for t in TARGETS:
        for i, (direction, word) in enumerate(DIRECTIONS.items()):
            row = rows.find(t.op, t.shape, direction, law=t.law)
            head = (f"`{t.op}` {t.shape}", word)
            if row is None:
                lines.append((*head, asked(t, i), "not measured", "", "-", ""))
                continue
            measured, met = [], []
            best = row["best_peer"]
            if t.ratio is not None:
                ratio = float(row["ratio_to_best_peer"]) if row["ratio_to_best_peer"] else None
                if t.peer:
                    peer = rows.find(t.op, t.shape, direction, t.peer, t.law, row["commit"])
                    best, ratio = t.peer, None if peer is None else float(peer["ms"]) / float(row["ms"])
                measured.append("no peer ran" if ratio is None else f"{ratio:.2f}x")
                met.append(ratio is not None and ratio >= t.ratio[i])
            if t.copy_share is not None:
                share = float(row["gbps"]) / float(row["copy_gbps"])
                measured.append(f"{share:.0%} of copy")
                met.append(share >= t.copy_share[i])
            if t.less_than is not None:
                whole = rows.find(t.op, t.less_than[0], direction, law=t.law, commit=row["commit"])
                elsewhere = None if whole else rows.find(t.op, t.less_than[0], direction, law=t.law)
                other = whole or elsewhere
                share = float(row["ms"]) / float(other["ms"]) if other else float("inf")
                measured.append(f"{1 - share:.0%} less time" if other else "nothing to compare with")
                if elsewhere:
                    measured[-1] += f" than in the run of {elsewhere['commit']}"
                met.append(share <= t.less_than[1])
            if row["tflops"]:
                measured.append(f"{float(row['tflops']):.0f} TFLOP/s")
            verdict = "met" if all(met) else "**missed**"
            lines.append((*head, asked(t, i), ", ".join(measured), best, verdict, row["commit"]))
    lines += small_sequences(rows)
    lines += tiles(rows)
    return lines


def tiles(rows: Rows) -> list[tuple[str, ...]]:
    """Per shape the costliest of its laws and head widths, and how many of them are above the share that is asked."""
    by_shape: dict[str, list[tuple[float, Row]]] = {}
    for r in rows.rows:
        if r["op"] == "tile_schedule" and r["impl"] == OURS and r["ms"]:
            by_shape.setdefault(r["shape"], []).append((1 / float(r["ratio_to_best_peer"]), r))
    lines = []
    for shape, here in by_shape.items():
        share, row = max(here, key=lambda pair: pair[0])
        above = sum(other >= SCHEDULE_SHARE for other, _ in here)
        measured = f"{share:.1%}, {1e3 * float(row['ms']):.0f} us: {row['law']}, width {row['head_dim']}"
        if len(here) > 1:
            measured += f"; {above} of {len(here)} batches above"
        verdict = "**missed**" if above else "met"
        asked_for = f"< {SCHEDULE_SHARE:.0%} of a forward"
        lines.append((f"tiles of {shape}", "build", asked_for, measured, "", verdict, row["commit"]))
    return lines


def small_sequences(rows: Rows) -> list[tuple[str, ...]]:
    """What three empty or one-row sequences beside each other one add, against what a whole tile for each would."""
    lengths = draw_lengths("uniform", 256, 1024, 1)
    tiles = int(((lengths + TILE - 1) // TILE).square().sum())
    tile_share = 3 * len(lengths) / tiles
    lines = []
    for law, op in itertools.product(("empties", "ones"), ("flash_attention", "gdpa")):
        for direction, word in DIRECTIONS.items():
            with_them = rows.find(op, "B1024 max1024", direction, law=law)
            if with_them is None:
                continue
            without = rows.find(op, "B256 max1024", direction, law="uniform", commit=with_them["commit"])
            if without is None:
                continue
            extra = float(with_them["ms"]) / float(without["ms"]) - 1
            asked_for = f"< {tile_share:.0%} more time: {3 * len(lengths)} tiles"
            head = (f"`{op}` B1024 max1024 {law}", word, asked_for, f"{extra:+.1%}", "")
            lines.append((*head, "met" if extra < tile_share else "**missed**", with_them["commit"]))
    return lines


def asked(t: Target, i: int) -> str:
    parts = []
    if t.ratio is not None:
        parts.append(f">= {t.ratio[i]:g}x" + (f" {t.peer}" if t.peer else ""))
    if t.copy_share is not None:
        parts.append(f">= {t.copy_share[i]:.0%} of copy")
    if t.less_than is not None:
        parts.append(f">= {1 - t.less_than[1]:.0%} less time than {t.less_than[0]}")
    if t.tflops is not None:
        parts.append(f"({t.tflops[i]:g} TFLOP/s)")
    return ", ".join(parts)


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)])


def provenance(rows: Rows) -> str:
    first = rows.rows[0]
    runs = dict.fromkeys((r["commit"], r["copy_gbps"], r["bf16_tflops"]) for r in rows.rows)
    told = "; ".join(f"{commit}: copy {copy} GB/s, bf16 product {product} TFLOP/s" for commit, copy, product in runs)
    return (
        f"One {first['gpu']}, torch {first['torch']}, triton {first['triton']}. A ratio compares within one run; the "
        f"runs, by commit: {told}."
    )


def targets_block(rows: Rows) -> str:
    lines = verdicts(rows)
    met, measured = sum(line[-2] == "met" for line in lines), sum(line[-2] != "-" for line in lines)
    return (
        f"{provenance(rows)} {met} of {measured} met, {len(lines) - measured} not measured.\n\n{table(COLUMNS, lines)}"
    )


def cases_block(rows: Rows, *, main: bool) -> str:
    """Every case of attention: ours, and every peer's time over ours; reasons where one did not run."""
    cases: dict[tuple[str, ...], list[Row]] = {}
    for r in rows.rows:
        if r["bwd_factor"]:
            key = (r["op"], r["shape"], r["law"], r["head_dim"], r["direction"])
            here = cases.setdefault(key, [])
            if not here or here[0]["commit"] == r["commit"]:  # of several runs, the first
                here.append(r)
    peers = list(dict.fromkeys(r["impl"] for r in rows.rows if r["bwd_factor"] and r["ms"] and r["impl"] != OURS))
    lines = []
    wanted = {(t.op, t.shape, t.law) for t in TARGETS}
    for (op, shape, law, width, direction), here in cases.items():
        if main and ((op, shape, law) not in wanted or width != "128"):
            continue
        by_impl: dict[str, Row] = {}
        for r in here:  # what one run measured twice counts once
            by_impl.setdefault(r["impl"], r)
        ours = by_impl.get(OURS)
        if ours is None or not ours["ms"]:
            continue
        ratios = []
        for name in peers:
            peer = by_impl.get(name)
            ratios.append(f"{float(peer['ms']) / float(ours['ms']):.2f}" if peer and peer["ms"] else "")
        twice = executed(ours)
        rates = (f"{float(ours['tflops']):.0f}", "" if twice is None else f"{twice:.0f}")
        lines.append((f"`{op}` {shape}", law, width, direction, *rates, f"{float(ours['gbps']):.0f}", *ratios))
    columns = ("op, shape", "law", "width", "", "TFLOP/s", "executed", "GB/s", *peers)
    used = [i for i in range(len(columns)) if i < 5 or any(line[i] for line in lines)]
    return table([columns[i] for i in used], [[line[i] for i in used] for line in lines])


def memory_block(rows: Rows) -> str:
    """Norms and block attention: share of the copy, and the best peer."""
    lines = []
    for r in rows.rows:
        norm = not r["bwd_factor"] and r["op"] != "tile_schedule"
        if r["impl"] == OURS and r["ms"] and (norm or r["op"].startswith("block_attention")):
            share = float(r["gbps"]) / float(r["copy_gbps"])
            against = (r["ratio_to_best_peer"], r["best_peer"])
            lines.append((f"`{r['op']}` {r['shape']}", r["direction"], f"{share:.0%}", *against))
    return table(("op, shape", "", "of copy", "ratio", "best peer"), lines)


def refusals_block(rows: Rows) -> str:
    """Why a peer has no number, and in how many rows."""
    counts: dict[tuple[str, str], int] = {}
    for r in rows.rows:
        if not r["ms"]:
            key = (r["impl"], r["ratio_to_best_peer"])
            counts[key] = counts.get(key, 0) + 1
    return table(("peer", "rows", "reason"), [(name, str(n), reason) for (name, reason), n in counts.items()])


def counters_block(counters: Sequence[Row], rows: Rows) -> str:
    """One line per kernel; beside the tensor pipe's activity, what the useful FLOPs of that step would need."""
    columns = ("step", "", "kernel", "us", "tensor pipe", "useful", "issue", "DRAM", "L2", "warps", "waits for")
    lines = []
    for r in counters:
        if not r["us"] or float(r["us"]) < 5:
            continue
        op, _, shape = r["op"].partition(" ") if not r["op"].startswith("block_attention") else (r["op"], "", BLOCKS)
        step = rows.find(op, shape, r["direction"])
        useful = ""
        if step and step["tflops"] and step["clock_mhz"] and float(r["tensor_pipe_percent"] or 0) >= 1:
            useful = f"{float(step['tflops']) / (FLOPS_PER_CYCLE * float(step['clock_mhz']) * 1e-6):.0%}"
        shares = [f"{r[c]} %" for c in ("issue_percent", "dram_percent", "l2_percent")]
        head = (r["op"], r["direction"], f"`{r['kernel'].split('(')[0]}`", r["us"], f"{r['tensor_pipe_percent']} %")
        lines.append((*head, useful, *shares, r["warps_active"], r["waits"]))
    return table(columns, lines)


def triton_block(rows: Sequence[Row]) -> str:
    """Per shape and direction the shipped kernel beside the best of each kind in Triton, all of one process each."""

    def kind(setting: str) -> str:
        if setting.startswith("SpecialisedConfig"):
            return "by warps" if "specialised=True" in setting else "descriptors"
        return "plain" if setting.startswith(("TritonConfig", "plain Triton")) else "shipped"

    kinds = ("shipped", "plain", "descriptors", "by warps")
    found: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for r in rows:
        key = (f"`{r['op']}` {r['shape']}", r["law"], r["direction"])
        found.setdefault(key, {}).setdefault(kind(r["setting"]), []).append(r)
    lines = []
    for key, here in found.items():
        cells = []
        for name in kinds:
            timed = [r for r in here.get(name, []) if r["ms"]]
            if timed:
                best = min(timed, key=lambda r: float(r["ms"]))
                cells.append(f"{float(best['ms']):.3f} ms, {float(best['tflops']):.0f}")
            else:
                cells.append(here[name][0]["note"].partition(":")[0] if name in here else "")
        lines.append((*key, *cells))
    commits = ", ".join(dict.fromkeys(r["commit"] for r in rows))
    head = ("op, shape", "law", "", "shipped", "plain Triton", "with descriptors", "specialised by warps")
    return f"Milliseconds and TFLOP/s of the best configuration of each kind, at {commits}.\n\n{table(head, lines)}"


def coverage_block(rows: Rows) -> str:
    """How many of the benchmark's cases have rows, and which have none."""
    measured = {(r["op"], r["shape"], r["law"], r["head_dim"]) for r in rows.rows if r["impl"] == OURS and r["ms"]}
    memory = {(r["op"], r["shape"]) for r in rows.rows if r["impl"] == OURS and r["ms"]}
    attention = dict.fromkeys((c.op, c.shape, c.law, str(c.head_dim)) for c in CASES)
    bound = [
        *(f"{v} {norms.num_rows(w)}x{w}" for v, w in norms.CASES),
        *(f"block_attention {v} {BLOCKS}" for v in BLOCK_VARIANTS),
    ]
    absent = [
        f"`{op}` {shape} {law} H{width}"
        for op, shape, law, width in attention
        if (op, shape, law, width) not in measured
    ]
    absent += [f"`{label}`" for label in bound if not any(label == f"{op} {shape}" for op, shape in memory)]
    total = len(attention) + len(bound)
    ran = dict.fromkeys(r["impl"] for r in rows.rows if r["ms"] and r["impl"] != OURS)
    text = f"{total - len(absent)} of the benchmark's {total} cases have rows, beside {', '.join(ran)}."
    return text + (f" Without: {'; '.join(absent)}." if absent else "")


def sweep_table(rows: Rows) -> str:
    """Median and range of a peer's time over ours in the sweep of self-attention, by width and longest sequence."""
    times: dict[tuple[str, ...], dict[str, float]] = {}
    for r in rows.rows:
        if (
            r["ms"]
            and SWEPT.fullmatch(r["shape"])
            and r["law"] in SWEEP_LAWS
            and r["op"] in ("flash_attention", "gdpa")
        ):
            case = times.setdefault((r["op"], r["shape"], r["law"], r["head_dim"], r["direction"]), {})
            case.setdefault(r["impl"], float(r["ms"]))
    lines = []
    for width, direction, longest in itertools.product(("128", "64"), DIRECTIONS, ("256", "1024", "4096")):
        here = [t for k, t in times.items() if k[3:] == (width, direction) and k[1].endswith(f" max{longest}")]
        told = []
        for peer in SWEEP_PEERS:
            ratios = [t[peer] / t[OURS] for t in here if peer in t and OURS in t]
            told.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "")
        lines.append((width, longest, DIRECTIONS[direction], str(len(here)), *told))
    return table(("width", "longest", "", "cases", *SWEEP_PEERS), lines)


def sweep_block() -> str:
    """The sweep's plot, where a run has drawn it."""
    image = ROWS.with_suffix(".sweep.png")
    return f"![TFLOP/s over the longest sequence, by law, batch and head width]({LINK}{image.name})"


def blocks() -> dict[str, Callable[[], str]]:
    def rows() -> Rows:
        found: list[Row] = []
        for path in SOURCES:  # of what was measured more than once, the newer run
            known = {case_of(r) for r in found}
            # a file may hold several runs, the newest first
            found += [r for r in read(path) if case_of(r) not in known]
        return Rows(found)

    return {
        "targets": lambda: targets_block(rows()),
        "main cases": lambda: cases_block(rows(), main=True),
        "all cases": lambda: cases_block(rows(), main=False),
        "memory-bound": lambda: memory_block(rows()),
        "sweep table": lambda: sweep_table(rows()),
        "coverage": lambda: coverage_block(rows()),
        "sweep plot": sweep_block,
        "refusals": lambda: refusals_block(rows()),
        "counters": lambda: counters_block(read(COUNTERS), rows()),
        "triton": lambda: triton_block(read(TRITON)),
    }


def case_of(r: Row) -> tuple[str, ...]:
    return tuple(r[c] for c in ("op", "shape", "law", "head_dim"))


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def filled(text: str, link: str = "measured/") -> str:
    """`text` with every block `<!-- measured: NAME -->` ... `<!-- /measured -->` made anew.

    Args:
        link: from the page to the folder of the rows.
    """
    for name, make in blocks().items():
        begin, end = f"<!-- measured: {name} -->\n", "<!-- /measured -->"
        at = text.find(begin)
        if at >= 0:
            stop = text.index(end, at)
            others = {"counters": COUNTERS, "triton": TRITON, "sweep plot": ROWS.with_suffix(".sweep.png")}
            needs = others.get(name, ROWS)
            made = make().replace(LINK, link) if needs.exists() else "Not measured yet."
            text = f"{text[: at + len(begin)]}\n{made}\n\n{text[stop:]}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    stale = []
    for path, link in ((PAGE, "measured/"), (README, "../../docs/measured/")):
        old = path.read_text()
        new = filled(old, link)
        if new != old:
            stale.append(path.relative_to(ROOT))
            if not args.check:
                path.write_text(new)
    print(f"{'stale' if args.check else 'rewritten'}: {', '.join(map(str, stale))}" if stale else "up to date")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
