"""Times GDPA with a residual and a norm at its end against GDPA and then `rms_norm`, on a GPU, each checked first.

    python libs/jagged/benchmarks/epilogue.py --check                # compiles and compares
    python libs/jagged/benchmarks/epilogue.py --out epilogue.csv

Both give `rms_norm(gdpa(q, k, v) + residual) + add` across heads, as the PFFN of the model. `gdpa alone` is what
remains without a norm. Letters: T packed rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged import NormEpilogue, gdpa, rms_norm
from gemworks.jagged._dense import Mask
from gemworks.jagged.bench import report
from gemworks.jagged.bench.bandwidth import assert_near
from gemworks.jagged.bench.cases import BWD_FACTOR, Case, Inputs, make_inputs
from gemworks.jagged.bench.timing import Clock, measure_ceilings, time_in_turn
from gemworks.jagged.ops.attention_core.reference import Rule
from gemworks.jagged.ops.gdpa import launch_epilogue
from torch import Tensor

CASES = (
    Case("gdpa", "pffn", 256, 2048, "full", rows=256),
    Case("gdpa", "pffn", 256, 1024, rows=256),
    Case("gdpa", "pffn", 256, 1024, rows=128),
)
SMALL = Case("gdpa", "pffn", 9, 300, rows=256)
PEER = "gdpa then rms_norm"


def functions(x: Inputs, residual: Tensor, add: Tensor) -> dict[str, Callable[[], Tensor]]:
    settings: dict[str, Any] = {
        "max_length_q": x.case.maximum, "scale": x.scale, "activation": "fast_gelu", "schedule": x.schedule
    }  # fmt: skip
    epilogue = NormEpilogue("rms", residual, add)

    def alone() -> Tensor:
        return gdpa(x.q, x.k, x.v, x.offsets_q, **settings)

    def unfused() -> Tensor:
        o = alone().flatten(1)
        y, _ = rms_norm(o, residual=residual.flatten(1), add=add.flatten(1))
        return y.view(add.shape)

    return {
        "gemworks": lambda: gdpa(x.q, x.k, x.v, x.offsets_q, epilogue=epilogue, **settings),
        PEER: unfused,
        "gdpa alone": alone,
    }


def measure(case: Case, clock: Clock, context: report.Context, check: bool) -> list[report.Row]:
    x = make_inputs(case, context.device, context.dtype)
    residual, add = (torch.randn_like(x.d_out).requires_grad_() for _ in range(2))
    made = functions(x, residual, add)
    leaves = {name: [*x.leaves] + ([] if "alone" in name else [residual, add]) for name in made}
    outs = {name: f() for name, f in made.items()}
    runs: dict[str, dict[str, Callable[[], object]]] = {"fwd": {}, "bwd": {}}
    for name, f in made.items():
        out = outs[name]

        def backward(out: Tensor = out, wanted: list[Tensor] = leaves[name]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, wanted, x.d_out, retain_graph=True)

        def forward(f: Callable[[], Tensor] = f) -> Tensor:
            with torch.no_grad():
                return f()

        runs["fwd"][name], runs["bwd"][name] = forward, backward
    for got, exact in zip(
        (outs["gemworks"], *runs["bwd"]["gemworks"]()),  # pyright: ignore[reportGeneralTypeIssues]
        (outs[PEER], *runs["bwd"][PEER]()),  # pyright: ignore[reportGeneralTypeIssues]
        strict=True,
    ):
        assert_near(got, exact, case.shape)
    rows = []
    if check:
        return rows
    for direction, by_name in runs.items():
        times, errors = time_in_turn(clock, by_name, rounds=3, repeats=8)
        if errors:
            raise next(iter(errors.values()))
        tensor = x.d_out.numel() * 2
        # gdpa's own bytes, and per norm: residual and add in, y and h out; dy and h in, the gradient of h out
        moved = {"fwd": x.bytes_moved("fwd") + 3 * tensor, "bwd": x.bytes_moved("bwd") + 2 * tensor}[direction]
        for name, t in times.items():
            flops = x.flops * (BWD_FACTOR if direction == "bwd" else 1)
            rows.append(
                dict.fromkeys(report.COLUMNS, "")
                | context.columns()
                | {
                    "command": "python libs/jagged/benchmarks/epilogue.py", "op": "gdpa norm epilogue",
                    "shape": case.shape, "head_dim": "128", "direction": direction, "impl": name, "law": case.law,
                    "mean_len": f"{x.lengths_q.double().mean():.1f}", "max_len": str(int(x.lengths_q.max())),
                    "seed": str(case.seed), "ms": f"{t.ms:.4f}", "ms_p20": f"{t.ms_p20:.4f}",
                    "ms_p80": f"{t.ms_p80:.4f}", "tflops": f"{flops / t.ms / 1e9:.4g}",
                    "gbps": "" if name == "gdpa alone" else f"{moved / t.ms / 1e6:.4g}",
                    "bwd_factor": str(BWD_FACTOR), "best_peer": PEER,
                    "ratio_to_best_peer": f"{times[PEER].ms / t.ms:.3f}",
                }
            )  # fmt: skip
    return rows


def variants(case: Case, clock: Clock, context: report.Context) -> None:
    """Configurations of the Gluon kernel, printed; each compared with `gdpa` and then the norm first."""
    from gemworks.jagged.ops.attention_core.launch import Problem

    x = make_inputs(case, context.device, context.dtype)
    residual, add = (torch.randn_like(x.d_out) for _ in range(2))
    q, k, v = x.q.detach(), x.k.detach().flatten(0, 1), x.v.detach().flatten(0, 1)
    rule = Rule(x.scale, "fast_gelu", Mask(), False)
    p = Problem(q, k, v, rule, x.schedule, case.rows, "sm_90", q.shape[0], case.rows)
    made = {name: f().detach() for name, f in functions(x, residual, add).items()}
    make = launch_epilogue.GluonNormConfig
    norm = launch_epilogue.NormArgs(residual, add, None, None, 1e-6, False)
    for config in (make(), make(128, 2), make(64, 4, 2, 184, 112), make(64, 5, 1)):
        y, h = torch.full_like(x.d_out, float("nan")), torch.full_like(x.d_out, float("nan"))

        def run(config: Any = config, y: Tensor = y, h: Tensor = h) -> None:
            launch_epilogue.gluon_forward(p, norm, y, h, config)

        times, errors = time_in_turn(clock, {"y": run}, rounds=1, repeats=10)
        if not errors:
            assert_near(y, made[PEER], "norm")
        note = errors.get("y") or f"{times['y'].ms:.4f} ms, {x.flops / times['y'].ms / 1e9:.1f} TFLOP/s"
        print(case.shape, config, str(note)[:100], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("epilogue.csv"))
    parser.add_argument("--check", action="store_true", help="a small shape, no times")
    parser.add_argument("--variants", action="store_true", help="also configurations of the kernel, printed alone")
    args = parser.parse_args()
    device = torch.device("cuda")
    clock = Clock(device)
    context = report.Context(measure_ceilings(clock, device), device, torch.bfloat16, ())
    for case in (SMALL,) if args.check else CASES:
        rows = measure(case, clock, context, args.check)
        report.print_rows(rows)
        if rows:
            report.append_csv(args.out, rows)
    if args.variants:
        variants(SMALL if args.check else CASES[0], clock, context)


if __name__ == "__main__":
    main()
