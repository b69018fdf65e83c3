"""Attention on jagged lengths, ours beside the peers: correctness first, then times in turn, a table, CSV and PNG.

python -m gemworks.jagged.bench --out jagged.csv --budget-s 540     # on a GPU: everything that fits into nine minutes
python -m gemworks.jagged.bench --smoke                             # on a CPU: seconds, tiny shapes
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged.bench import report
from gemworks.jagged.bench.cases import CASES, SMOKE, Case, Inputs, make_inputs
from gemworks.jagged.bench.peers import ACTIVATION, PEERS, Contender, from_file, ours
from gemworks.jagged.bench.timing import Clock, Time, measure_ceilings, time_in_turn
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS
from torch import Tensor

SLOW_TO_COMPILE = ("FlexAttention",)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


def definition(x: Inputs, b: int, softmax: bool) -> list[Tensor]:
    """[out, dq, dk, dv] of one sequence, densely, in float32 (dq of a shared query is left out)."""
    begin_q, begin_k = int(x.lengths_q[:b].sum()), int(x.lengths_k[:b].sum())
    rows_q = slice(begin_q, begin_q + int(x.lengths_q[b]))
    rows_k = slice(begin_k, begin_k + int(x.lengths_k[b]))
    keys, values = (t[b] if t.dim() == 4 else t[rows_k] for t in (x.k, x.v))
    queries = x.q if x.case.kind == "pool" else x.q[rows_q]
    q, k, v = (t.detach().float().requires_grad_() for t in (queries, keys, values))
    logits = x.scale * torch.einsum("qnh,knh->nqk", q, k)
    if x.case.window:
        away = torch.arange(k.shape[0], device=k.device) - torch.arange(q.shape[0], device=q.device)[:, None]
        far = away.abs() >= x.case.window
        weights = (
            logits.masked_fill(far, float("-inf")).softmax(-1) if softmax else ACTIVATIONS[ACTIVATION](logits) * ~far
        )
    else:
        weights = logits.softmax(-1) if softmax else ACTIVATIONS[ACTIVATION](logits)
    out = torch.einsum("nqk,knh->qnh", weights, v)
    grads = torch.autograd.grad(out, (q, k, v), x.d_out[rows_q].float())
    return [out.detach(), *grads]


def check(x: Inputs, contender: Contender, *, activation_known: bool) -> None:
    """Raise AssertionError unless output and gradients of the shortest, a middle and the longest sequence are right."""
    if contender.leaves is not None:
        with torch.no_grad():
            out = contender.attend(*contender.leaves)
            results = [out if contender.unpack is None else contender.unpack(out)]
    else:
        out = contender.attend(*x.leaves)
        results = [out, *torch.autograd.grad(out, x.leaves, x.d_out)]
    if not activation_known:  # a peer from a file may compute another activation: only finiteness can be asked of it
        assert all(bool(t.isfinite().all()) for t in results), "not finite"
        return
    order = x.lengths_q.argsort() if x.case.kind == "self" else x.lengths_k.argsort()
    tolerance = TOLERANCE[x.q.dtype]
    for b in {int(order[0]), int(order[len(order) // 2]), int(order[-1])}:
        truth = definition(x, b, contender.softmax)
        for i, (name, exact) in enumerate(zip(("out", "dq", "dk", "dv"), truth, strict=True)):
            if i >= len(results) or (name == "dq" and x.case.kind == "pool"):
                continue
            side_k = i >= 2
            lengths = x.lengths_k if side_k else x.lengths_q
            begin = int(lengths[:b].sum())
            got = results[i].flatten(0, 1) if results[i].dim() == 4 else results[i]
            got = got[begin : begin + int(lengths[b])].detach().float()
            error = float((got - exact).norm() / exact.norm().clamp(min=1e-20))
            # Of a row that sees one key, softmax has no gradient: compare with the size of the cotangent instead.
            if float(exact.norm()) > 1e-3 * float(x.d_out[:1].float().norm()):
                assert error <= tolerance, (
                    f"{name} of sequence {b} ({int(lengths[b])} rows): relative error {error:.1e}"
                )


def closures(x: Inputs, contender: Contender) -> dict[str, Callable[[], object]]:
    leaves = x.leaves if contender.leaves is None else contender.leaves
    out = contender.attend(*leaves)
    d_out = x.d_out if contender.leaves is None else torch.randn_like(out)

    def forward() -> object:
        with torch.no_grad():
            return contender.attend(*leaves)

    return {"fwd": forward, "bwd": lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)}


def measure(
    case: Case, makers: dict[str, Callable[[Inputs], Contender]], clock: Clock, context: report.Context, args: Any
) -> list[report.Row]:
    x = make_inputs(case, context.device, context.dtype)
    runs: dict[str, dict[str, Callable[[], object]]] = {"fwd": {}, "bwd": {}}
    refusals: dict[str, str] = {}
    for name, make in {report.OURS: ours, **makers}.items():
        if name in SLOW_TO_COMPILE and case.priority > 0 and not args.smoke and not args.all_peers:
            refusals[name] = "left out: it compiles for long; --all-peers measures it here too"
            continue
        try:
            contender = make(x)
            check(x, contender, activation_known=name == report.OURS or name in PEERS)
            for direction, run in closures(x, contender).items():
                runs[direction][name] = run
        except Exception as error:  # a peer's failure of any kind is a result, and is printed as one
            if name == report.OURS:
                raise
            refusals[name] = f"cannot run: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    times: dict[str, dict[str, Time]] = {}
    for direction, by_name in runs.items():
        times[direction] = time_in_turn(clock, by_name, rounds=args.rounds, repeats=args.repeats)
    return report.rows_of(x, times, refusals, context)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gemworks.jagged.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("jagged.csv"), help="CSV to append to; the plot lies beside it"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, also without a GPU")
    parser.add_argument("--budget-s", type=float, default=540.0, help="start no case after this many seconds")
    parser.add_argument("--only", default="", help="cases whose 'op shape law' contains this")
    parser.add_argument("--priority", type=int, default=3, help="cases up to this priority")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--all-peers", action="store_true", help="also those that compile for a minute, on every case")
    parser.add_argument("--skip", action="append", default=[], choices=list(PEERS), help="leave a peer out")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FILE.py:FUNCTION",
                        help="one more peer: FUNCTION(q, k, v, cu_q, cu_k, max_q, max_k, scale)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default=None)
    args = parser.parse_args(argv)
    begin = time.monotonic()
    cuda = torch.cuda.is_available()
    if not cuda and not args.smoke:
        print("no CUDA device here; --smoke runs tiny shapes on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dtype = getattr(torch, args.dtype) if args.dtype else (torch.bfloat16 if cuda else torch.float32)
    makers = {} if args.no_peers else {n: make for n, make in PEERS.items() if n not in args.skip}
    makers |= dict(from_file(spec) for spec in args.peer)
    clock = Clock(device)
    context = report.Context(measure_ceilings(clock, device), device, dtype)
    ceilings = context.ceilings
    print(
        f"copy {ceilings.copy_gbps:.0f} GB/s, bf16 product {ceilings.bf16_tflops:.4g} TFLOP/s, {args.out}", flush=True
    )
    cases = sorted(SMOKE if args.smoke else CASES, key=lambda c: c.priority)
    rows: list[report.Row] = []
    failed = 0
    for case in cases:
        label = f"{case.op} {case.shape} {case.law} H{case.head_dim}"
        if case.priority > args.priority or args.only not in label:
            continue
        if time.monotonic() - begin > args.budget_s:
            print(f"{label}: not run, the budget of {args.budget_s:.0f} s is spent", flush=True)
            continue
        print(f"{label} ({time.monotonic() - begin:.0f} s)", flush=True)
        try:
            fresh = measure(case, makers, clock, context, args)
        except (AssertionError, RuntimeError, ValueError) as error:  # no number for a case whose check fails
            failed += 1
            print(f"  FAILED {type(error).__name__}: {error}", flush=True)
            continue
        report.print_rows(fresh)
        report.append_csv(args.out, fresh)
        rows += fresh
        if cuda:
            torch.cuda.empty_cache()
    if rows:
        print(report.plot(args.out.with_suffix(".png"), rows), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
