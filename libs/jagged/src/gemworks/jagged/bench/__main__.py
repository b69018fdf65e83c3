"""Attention, block attention and norms beside their peers: correctness first, then times in turn, a table, CSV and PNG.

python -m gemworks.jagged.bench --out jagged.csv --budget-s 540     # on a GPU: everything that fits into nine minutes
python -m gemworks.jagged.bench --prepare 16 --limit-s 110          # before it: only compiles, in 16 processes
python -m gemworks.jagged.bench --smoke                             # on a CPU: seconds, tiny shapes

A peer that fails, hangs or breaks the device keeps its row, with the reason in place of the ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged import TileSchedule
from gemworks.jagged.bench import bandwidth, report
from gemworks.jagged.bench.cases import Case, Inputs, make_inputs
from gemworks.jagged.bench.contend import left_out, set_up
from gemworks.jagged.bench.guard import Guard, State
from gemworks.jagged.bench.peers import PEERS, Maker, from_file, ours
from gemworks.jagged.bench.plots import plots
from gemworks.jagged.bench.prepare import prepare
from gemworks.jagged.bench.selection import SUITES, attention_groups, is_late, label_of, memory_bound_subjects
from gemworks.jagged.bench.timing import Clock, Time, measure_ceilings, time_in_turn


def build_schedule(x: Inputs) -> Callable[[], object] | None:
    """Replay of what builds the tiles of a self-attention batch: device time alone, without the host's launches."""
    if x.case.kind != "self" or x.case.window or x.case.causal:
        return None
    offsets, total = x.offsets_q, x.q.shape[0]

    def build() -> TileSchedule:
        return TileSchedule.build(offsets, total_q=total)

    if x.q.device.type != "cuda":
        return build
    build()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build()
    return graph.replay


class Run:
    """Groups of cases, one after another: set up, check, time in turn, write rows."""

    def __init__(self, clock: Clock, context: report.Context, guard: Guard, makers: dict[str, Maker], args: Any):
        self.clock, self.context, self.guard, self.makers, self.args = clock, context, guard, makers, args

    def group(self, cases: list[Case]) -> int:
        """Measure and write one group; returns how many of its cases have no number of ours."""
        shared = make_inputs(cases[0], self.context.device, self.context.dtype)
        mine = {f"{report.OURS} {c.op}": replace(shared, case=c) for c in cases}
        refusals: dict[str, str] = dict.fromkeys(self.args.skip, "left out: --skip") | self.guard.state.broken
        runs: dict[str, dict[str, Callable[[], object]]] = {"fwd": {}, "bwd": {}}
        for name, make in {**dict.fromkeys(mine, ours), **self.makers}.items():
            x = mine.get(name, shared)
            if name not in refusals:
                for direction, run in self._set_up(name, make, x, refusals).items():
                    runs[direction][name] = run
        times: dict[str, dict[str, Time]] = {}
        for direction, by_name in runs.items():
            still = {n: run for n, run in by_name.items() if n not in refusals}
            times[direction], errors = time_in_turn(
                self.clock,
                still,
                rounds=self.args.rounds,
                repeats=self.args.repeats,
                round_ms=self.args.round_ms,
                enter=self.guard.enter,
            )
            for name, error in errors.items():
                self._refuse(name, error, refusals)
        self.guard.leave()
        failed = 0
        for name, x in mine.items():
            if name in refusals:
                failed += 1
                print(f"  FAILED {x.case.op}: {refusals[name]}", flush=True)
                continue
            by_direction = {
                direction: {report.OURS: t[name]} | {n: t[n] for n in self.makers if n in t}
                for direction, t in times.items()
            }
            reasons = {n: refusals[n] for n in self.makers if n in refusals}
            rows = report.rows_of(x, by_direction, reasons, self.context)
            if x.case.computes == "softmax" and (build := build_schedule(x)):
                cost = time_in_turn(self.clock, {"schedule": build}, rounds=2, repeats=self.args.repeats)[0]["schedule"]
                rows.append(report.schedule_row(x, cost, times["fwd"][name], self.context))
            report.print_rows(rows)
            report.append_csv(self.args.out, rows)
        return failed

    def memory_bound(self, make: Callable[[], bandwidth.Subject]) -> int:
        """Measure and write one norm or one block attention; returns 1 where it has no number of ours."""
        label = "memory-bound op"
        try:
            if label in self.guard.state.broken:
                raise RuntimeError(self.guard.state.broken[label])
            self.guard.enter(label)
            rows = bandwidth.measure(
                make(),
                self.clock,
                self.context,
                rounds=self.args.rounds,
                repeats=self.args.repeats,
                round_ms=self.args.round_ms,
            )
        except (AssertionError, RuntimeError, ValueError) as error:  # no number for what is wrong
            print(f"  FAILED {type(error).__name__}: {error}", flush=True)
            if self.context.device.type == "cuda":
                self.guard.check_device(torch.cuda.synchronize, label, str(error)[:160])
            return 1
        finally:
            self.guard.leave()
        report.print_rows(rows)
        report.append_csv(self.args.out, rows)
        return 0

    def _set_up(self, name: str, make: Maker, x: Inputs, refusals: dict[str, str]) -> dict[str, Callable[[], object]]:
        if reason := left_out(name, x.case, everything=self.args.smoke or self.args.all_peers):
            refusals[name] = reason
            return {}
        began = self.guard.state.seconds
        self.guard.enter(name)
        try:
            out = set_up(name, make, x)
        except Exception as error:  # a peer's failure of any kind is a result, and is printed as one
            self._refuse(name, error, refusals)
            return {}
        if self.guard.state.seconds - began > 1.5:
            print(f"  {name}: set up in {self.guard.state.seconds - began:.1f} s", flush=True)
        return out

    def _refuse(self, name: str, error: Exception, refusals: dict[str, str]) -> None:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        refusals[name] = f"cannot run: {reason}"
        if self.context.device.type == "cuda":
            self.guard.check_device(torch.cuda.synchronize, name, reason)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gemworks.jagged.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("jagged.csv"), help="CSV to append to; the plot lies beside it"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, also without a GPU")
    parser.add_argument("--budget-s", type=float, default=540.0, help="start no case after this many seconds")
    parser.add_argument("--suite", nargs="+", default=list(SUITES), choices=SUITES, help="all by default")
    parser.add_argument("--only", default="", help="cases whose 'op shape law' contains this")
    parser.add_argument("--priority", type=int, default=3, help="cases up to this priority")
    parser.add_argument("--from-priority", type=int, default=0, help="cases from this priority")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--all-peers", action="store_true", help="also those that compile for a minute, on every case")
    parser.add_argument("--skip", action="append", default=[], choices=list(PEERS), help="leave a peer out")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=FILE.py:FUNCTION",
        help="one more peer: FUNCTION(q, k, v, cu_q, cu_k, max_q, max_k, scale), or make(inputs)",
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=8, help="in a round")
    parser.add_argument("--round-ms", type=float, default=80.0, help="of one contender's repeats in a round")
    parser.add_argument(
        "--shard", default="0/1", metavar="I/N", help="every n-th case: n processes compile side by side what one times"
    )
    parser.add_argument(
        "--limit-s", type=float, default=120.0, help="of one contender's set-up or round, until it is left out"
    )
    parser.add_argument(
        "--prepare",
        type=int,
        default=0,
        metavar="N",
        help="measure nothing: compile in N processes side by side what this run needs, for --limit-s at most",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default=None)
    parser.add_argument("--resume", default="", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None, *, restarts: bool = False) -> int:
    """Run the benchmark; with `restarts`, this process may replace itself when a peer breaks it."""
    arguments = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(arguments)
    if args.resume:
        at = arguments.index("--resume")
        arguments = [*arguments[:at], *arguments[at + 2 :]]
    cuda = torch.cuda.is_available()
    if not cuda and not args.smoke:
        print("no CUDA device here; --smoke runs tiny shapes on the CPU", file=sys.stderr)
        return 2
    state = State(**json.loads(args.resume)) if args.resume else State()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dtype = getattr(torch, args.dtype) if args.dtype else (torch.bfloat16 if cuda else torch.float32)
    if args.prepare:
        return prepare(args)
    makers = {} if args.no_peers else dict(PEERS)
    makers |= dict(from_file(spec) for spec in args.peer)
    clock = Clock(device)
    context = report.Context(measure_ceilings(clock, device), device, dtype, arguments)
    print(
        f"copy {context.ceilings.copy_gbps:.0f} GB/s, bf16 product {context.ceilings.bf16_tflops:.4g} TFLOP/s, "
        f"{args.out}",
        flush=True,
    )
    run = Run(clock, context, Guard(state, arguments, args.limit_s, active=restarts), makers, args)
    attention = [
        (label_of(cases), lambda cases=cases: run.group(cases), cases[0].priority) for cases in attention_groups(args)
    ]
    memory_bound = [
        (label, lambda make=make: run.memory_bound(make)) for label, make in memory_bound_subjects(args, device, dtype)
    ]
    steps: list[tuple[str, Callable[[], int]]] = [
        *((label, step) for label, step, priority in attention if priority == 0),
        *(step for step in memory_bound if not is_late(step[0])),
        *((label, step) for label, step, priority in attention if priority > 0),
        *(step for step in memory_bound if is_late(step[0])),
    ]
    shard, num_shards = map(int, args.shard.split("/"))
    steps = steps[shard::num_shards]
    for index, (label, step) in enumerate(steps):
        if index < state.group:
            continue
        if index > state.group:
            state.group, state.broken = index, {}
        if state.seconds > args.budget_s:
            print(f"{label}: not run, the budget of {args.budget_s:.0f} s is spent", flush=True)
            continue
        print(f"[{index + 1}/{len(steps)}] {label} ({state.seconds:.0f} s)", flush=True)
        state.failed += step()
        if cuda:
            torch.cuda.empty_cache()
    if num_shards == 1 and (rows := report.read_csv(args.out)):
        print(plots(args.out.with_suffix(".png"), rows), flush=True)
    return 1 if state.failed else 0


if __name__ == "__main__":
    sys.exit(main(restarts=True))
