"""Hardware counters of every kernel of a step: what a kernel that misses its target waits for.

    python libs/jagged/tools/counters.py --out counters.csv                        # needs Nsight Compute (ncu)
    python libs/jagged/tools/counters.py --out counters.csv --only "gdpa B256" "block_attention rope"
    python libs/jagged/tools/counters.py --child --only "gdpa B256"                # without ncu: compiles

A row is one kernel of one step: its time under the profiler, the share of cycles in which the tensor pipe worked, in
which a scheduler issued, the share of the memory bandwidth, and the reasons why warps waited (cycles per issued
instruction, the largest first). ncu repeats a kernel until all counters are read, with cold caches and free clocks, so
its times are not the benchmark's.
"""

from __future__ import annotations

import argparse
import csv
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged.bench import blocks, norms, report
from gemworks.jagged.bench.cases import CASES, make_inputs
from gemworks.jagged.bench.peers import ours
from torch import Tensor

SECTIONS = ("SpeedOfLight", "SchedulerStats", "WarpStateStats", "LaunchStats")
OUR_KERNELS = "regex:^(forward|backward|block|norm|column|delta|gdpa|zero|fp8|biased)"
COLUMNS = (
    *("op", "direction", "kernel", "us", "tensor_pipe_percent", "issue_percent", "dram_percent", "l2_percent"),
    *("warps_active", "registers", "waits"),
    *report.COLUMNS[report.COLUMNS.index("gpu") :],
)
TIME = "gpu__time_duration.sum"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
DRAM = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
L2 = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
WARPS = "sm__warps_active.avg.per_cycle_active"
REGISTERS = "launch__registers_per_thread"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
WAIT = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio$")
MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
SEPARATOR = " @ "
Step = tuple[Callable[[], object], Callable[[], object]]


def steps(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Step]]:
    """Label -> how to make (forward, backward) of a target's row."""

    def attention(label: str) -> Step:
        case = next(c for c in CASES if f"{c.op} {c.shape}" == label)
        x = make_inputs(case, device, dtype)
        attend = ours(x).attend
        out = attend(*x.leaves)

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(*x.leaves)

        return forward, lambda: torch.autograd.grad(out, x.leaves, x.d_out, retain_graph=True)

    def memory_bound(label: str) -> Step:
        made = [*blocks.subjects(device, dtype), *norms.subjects(device, dtype)]
        subject = dict(made)[label]()
        out = subject.ours(*subject.leaves)
        outs = list(out) if isinstance(out, tuple) else [out]

        def forward() -> object:
            with torch.no_grad():
                return subject.ours(*subject.leaves)

        return forward, lambda: torch.autograd.grad(outs, subject.leaves, subject.cotangents, retain_graph=True)

    labels = dict.fromkeys(f"{c.op} {c.shape}" for c in CASES if c.priority == 0 and c.law in ("uniform", "full"))
    plan: dict[str, Callable[[], Step]] = {label: lambda x=label: attention(x) for label in labels}
    for label, _ in (*blocks.subjects(device, dtype), *norms.subjects(device, dtype)):
        plan[label] = lambda x=label: memory_bound(x)
    return plan


def chosen(device: torch.device, only: Sequence[str]) -> dict[str, Callable[[], Step]]:
    return {k: v for k, v in steps(device, torch.bfloat16).items() if not only or any(o in k for o in only)}


def child(only: Sequence[str], limit_s: float) -> None:
    """Of each step once to warm up, and once inside the profiler's range; ncu writes once this process has ended."""
    began = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    runtime: Any = torch.cuda.cudart()
    for label, make in chosen(device, only).items():
        if time.monotonic() - began > limit_s:
            print(f"{label}: not run, {limit_s:.0f} s are spent", flush=True)
            continue
        try:
            forward, backward = make()
            for run in (forward, backward):
                run()
            torch.cuda.synchronize()
            for direction, run in (("fwd", forward), ("bwd", backward)):
                # A range of the process, not of a thread: the backward runs in another one.
                named = torch.cuda.nvtx.range_start(f"{label}{SEPARATOR}{direction}")
                runtime.cudaProfilerStart()
                run()
                torch.cuda.synchronize()
                runtime.cudaProfilerStop()
                torch.cuda.nvtx.range_end(named)
        except (RuntimeError, ValueError) as error:  # the other steps go on
            print(f"{label}: {type(error).__name__}: {error}"[:300], flush=True)
        torch.cuda.empty_cache()


def command_of(ncu: str, only: Sequence[str], log: Path, limit_s: float) -> list[str]:
    metrics = ",".join((TIME, TENSOR, ISSUE, DRAM, L2, WARPS))
    return [
        *(ncu, "--profile-from-start", "off", "--nvtx", "--clock-control", "none", "--kernel-name", OUR_KERNELS),
        *("--csv", "--page", "raw", "--log-file", str(log), "--metrics", metrics),
        *(x for section in SECTIONS for x in ("--section", section)),
        *(sys.executable, __file__, "--child", "--limit-s", str(0.8 * limit_s), *(("--only", *only) if only else ())),
    ]


def parse(text: str) -> list[dict[str, str]]:
    """Kernels of ncu's raw page: name -> value, times in microseconds."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    if len(rows) < 3:
        return []
    names, units = rows[0], rows[1]
    out = []
    for row in rows[2:]:
        kernel = dict(zip(names, row, strict=True))
        unit = dict(zip(names, units, strict=True)).get(TIME, "")
        if TIME in kernel:
            kernel[TIME] = str(_number(kernel[TIME]) * MICROSECONDS.get(unit, 1.0))
        out.append(kernel)
    return out


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def summary(kernel: dict[str, str]) -> dict[str, str]:
    """The columns of one kernel; empty where a counter was not there."""

    def value(name: str, form: str = ".1f") -> str:
        return format(_number(kernel[name]), form) if kernel.get(name) else ""

    waits = {m[1]: _number(v) for name, v in kernel.items() if v and (m := WAIT.match(name))}
    waits.pop("selected", None)  # the warp that issues waits for nothing
    largest = sorted(waits.items(), key=lambda item: -item[1])[:4]
    return {
        "kernel": kernel["Kernel Name"],
        "us": value(TIME),
        "tensor_pipe_percent": value(TENSOR),
        "issue_percent": value(ISSUE),
        "dram_percent": value(DRAM),
        "l2_percent": value(L2),
        "warps_active": value(WARPS),
        "registers": value(REGISTERS, ".0f"),
        "waits": "; ".join(f"{name} {cycles:.2f}" for name, cycles in largest),
    }


def step_of(kernel: dict[str, str]) -> tuple[str, str]:
    """(label, direction) by the range that was open at its launch."""
    for name, value in kernel.items():
        if "Range" in name and SEPARATOR in value:
            before, _, after = value.partition(SEPARATOR)
            return before.rpartition(":")[2].strip(), after[:3]
    return "", ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("counters.csv"))
    parser.add_argument("--only", nargs="+", default=[], help="steps whose label contains one of these")
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--child", action="store_true", help="only run the steps, without ncu")
    args = parser.parse_args(argv)
    if args.child:
        child(args.only, args.limit_s)
        return 0
    device = torch.device("cuda")
    common = {
        **dict.fromkeys(COLUMNS, ""),
        **{"num_gpus": "1", "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__},
        **{"triton": report.triton_version(), "commit": report.commit()},
        "command": f"python libs/jagged/tools/counters.py {shlex.join(sys.argv[1:] if argv is None else argv)}",
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    log = args.out.with_suffix(".ncu.csv")
    try:
        subprocess.run(command_of(args.ncu, args.only, log, args.limit_s), timeout=args.limit_s, check=True)
    except (OSError, subprocess.SubprocessError) as error:  # what was written until then counts
        print(f"{type(error).__name__}: {error}"[:300], flush=True)
    kernels = parse(log.read_text()) if log.exists() else []
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for kernel in kernels:
            row = common | dict(zip(("op", "direction"), step_of(kernel), strict=True)) | summary(kernel)
            writer.writerow(row)
            print(row["op"], *(f"{c}={row[c]}" for c in COLUMNS[1:11]), flush=True)
    return 0 if kernels else 1


if __name__ == "__main__":
    sys.exit(main())
