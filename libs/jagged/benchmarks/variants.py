"""Times every selectable variant of the attention kernels on a GPU, each checked first.

Gluon is checked against the table's plain Triton, plain Triton against what the table ships.

    python libs/jagged/benchmarks/variants.py --out variants.csv --budget-s 540

What wins belongs into gemworks/jagged/ops/attention_core/table.py. Each group runs in a process of its own with a time
limit: a variant whose barriers wait for each other hangs the device until its process ends. A group that hangs is
reported and the next one starts.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged._dense import Mask
from gemworks.jagged.bench import report
from gemworks.jagged.bench.cases import BWD_FACTOR, Case, Inputs, make_inputs
from gemworks.jagged.bench.peers import torch_varlen
from gemworks.jagged.bench.timing import Ceilings, Clock, Time, measure_ceilings
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.attention_core.reference import Rule
from gemworks.jagged.ops.attention_core.table import FusedConfig, GluonConfig, TritonConfig
from torch import Tensor
from warp_specialised import SpecialisedConfig

NARROW = {
    f"B{b} max256 {law} width64": Case("flash_attention", "self", b, 256, law, 64)
    for b in (256, 1152)
    for law in ("uniform", "mean70", "zipf12")
}
CASES = {
    "B256 max1024": Case("flash_attention", "self", 256, 1024),
    "B128 max2048": Case("flash_attention", "self", 128, 2048),
    "B256 max2048 kv256": Case("flash_attention", "pffn", 256, 2048, "full", rows=256),
    "B128 max2048 seeds256": Case("flash_attention", "pool", 128, 2048, rows=256),
    "B128 max2048 seeds64": Case("flash_attention", "pool", 128, 2048, rows=64),
    "B128 max2048 window100": Case("flash_attention", "self", 128, 2048, window=100),
    "B128 max2048 causal": Case("flash_attention", "self", 128, 2048, causal=True),
    "B1024 max1024": Case("flash_attention", "self", 1024, 1024, "ones"),
    **NARROW,
}
# The same kinds of work on a few short sequences, for --check
SMALL = {
    "B256 max1024": Case("flash_attention", "self", 9, 300),
    "B128 max2048": Case("flash_attention", "self", 9, 700),
    "B256 max2048 kv256": Case("flash_attention", "pffn", 9, 700, rows=256),
    "B128 max2048 seeds256": Case("flash_attention", "pool", 9, 700, rows=256),
    "B128 max2048 seeds64": Case("flash_attention", "pool", 9, 700, rows=64),
    "B128 max2048 window100": Case("flash_attention", "self", 9, 700, window=100),
    "B128 max2048 causal": Case("flash_attention", "self", 9, 700, causal=True),
    "B1024 max1024": Case("flash_attention", "self", 32, 300, "ones"),
    **{name: Case("flash_attention", "self", 9, 256, case.law, 64) for name, case in NARROW.items()},
}
ACTIVATIONS = ("fast_gelu", "softmax")
COLUMNS: tuple[str, ...] = (
    *("op", "shape", "head_dim", "direction", "impl", "setting", "error", "note"),
    *report.COLUMNS[report.COLUMNS.index("dtype") :],
)
# In forwards. "backward" is all of it: for softmax with the row sums of dO * O in front.
PRODUCTS = {"forward": 1.0, "backward_kv": 2.0, "backward_q": 1.5, "backward": 2.5}

SHOWN = ("op", "shape", "direction", "impl", "setting", "ms", "tflops", "ratio_to_best_peer", "error", "note")
DIRECTIONS = {"forward": "fwd", "backward": "bwd", "backward_kv": "bwd dk dv", "backward_q": "bwd dq"}
PEER = "torch varlen_attn"
Variant = tuple[str, Any, bool | None]  # step, configuration, fold (forward of fast_gelu)


@dataclass(frozen=True)
class Group:
    """Variants that are timed one after the other in one process, on these shapes with these activations."""

    variants: tuple[Variant, ...]
    shapes: tuple[str, ...] = ("B256 max1024", "B128 max2048")
    activations: tuple[str, ...] = ACTIVATIONS


def two_groups(block: int, stages: int, resident: int, **options: bool) -> GluonConfig:
    return GluonConfig(block, stages, 2, 232, resident, **options)


def three_groups(block: int, stages: int, resident: int, **options: bool) -> GluonConfig:
    return GluonConfig(block, stages, 3, 160, resident, **options)


def forward(*configs: GluonConfig | TritonConfig | SpecialisedConfig) -> tuple[Variant, ...]:
    """With the scale folded into the activation wherever that is possible."""
    return tuple(("forward", c, isinstance(c, GluonConfig)) for c in configs)


def pair(step: str, *configs: GluonConfig | TritonConfig) -> tuple[Variant, ...]:
    return tuple((step, c, None) for c in configs)


BOTH_PEERS: tuple[Variant, ...] = (("forward", PEER, None), ("backward", PEER, None))
FUSED = ("backward", FusedConfig(2, 2, early=True, ahead=True), None)
IN_TWO = ("backward", None, None)  # the pair of kernels that the table names
SHIPPED = "shipped"  # whatever the table names for the shape
TRITON_PAIR = "plain Triton pair"  # delta and the pair in plain Triton, as the table configures it
TRITON: tuple[Variant, ...] = (
    ("forward", SHIPPED, None),
    ("backward", SHIPPED, None),
    *forward(*(TritonConfig(m, 64, w, s) for m, w in ((64, 4), (128, 8)) for s in (2, 3))),
    ("backward", TRITON_PAIR, None),
)
# The same kernel with descriptors as it is, and specialised by warps
SPECIALISED: tuple[Variant, ...] = (
    ("forward", SHIPPED, None),
    *forward(SpecialisedConfig(64, 3, specialised=False)),
    *forward(*(SpecialisedConfig(n, s) for n, s in ((64, 2), (64, 3), (128, 2)))),
)
GROUPS: dict[str, Group] = {
    "forward softmax": Group(
        (
            BOTH_PEERS[0],
            *forward(
                two_groups(128, 2, 2, one_release=True, chained=True),
                two_groups(128, 2, 2, one_release=True),
                two_groups(128, 2, 2, one_release=True, in_turn=True),
                two_groups(128, 2, 1, one_release=True, in_turn=True),
            ),
        ),
        activations=("softmax",),
    ),
    "forward activation": Group(
        forward(
            three_groups(64, 3, 2, one_release=True),
            three_groups(64, 3, 2, one_release=True, in_turn=True),
        ),
        activations=("fast_gelu",),
    ),
    "narrow softmax short": Group(
        forward(
            three_groups(64, 3, 2),
            two_groups(128, 2, 2, one_release=True, chained=True),
            three_groups(64, 3, 2, one_release=True),
            two_groups(64, 4, 2),
            GluonConfig(64, 2, 1),
        ),
        tuple(NARROW),
        ("softmax",),
    ),
    "forward one-row sequences": Group(
        forward(
            two_groups(128, 2, 2, one_release=True, chained=True),
            two_groups(128, 2, 2, one_release=True, in_turn=True),
        ),
        ("B1024 max1024",),
        ("softmax",),
    ),
    "forward short keys": Group(
        forward(
            two_groups(128, 2, 2),
            three_groups(64, 3, 2, one_release=True),
            three_groups(64, 3, 2, one_release=True, in_turn=True),
            three_groups(64, 3, 2, in_turn=True),
        ),
        ("B256 max2048 kv256",),
        ("fast_gelu",),
    ),
    "softmax short keys": Group(
        forward(
            two_groups(128, 2, 2, one_release=True, chained=True),
            two_groups(128, 2, 2, one_release=True, in_turn=True),
        ),
        ("B256 max2048 kv256",),
        ("softmax",),
    ),
    "forward shared query": Group(
        forward(
            three_groups(64, 3, 2, one_release=True),
            three_groups(64, 3, 2, one_release=True, in_turn=True),
        ),
        ("B128 max2048 seeds256",),
        ("fast_gelu",),
    ),
    "forward few queries": Group(
        forward(
            two_groups(64, 4, 2),
            GluonConfig(64, 2, 1),  # two programs a multiprocessor
            GluonConfig(64, 2, 1, one_release=True),
        ),
        ("B128 max2048 seeds64",),
        ("fast_gelu",),
    ),
    "forward masked": Group(
        (
            BOTH_PEERS[0],
            *forward(
                two_groups(64, 4, 1),
                two_groups(64, 4, 2, one_release=True),
                three_groups(64, 3, 2, one_release=True),
            ),
        ),
        ("B128 max2048 window100", "B128 max2048 causal"),
    ),
    "backward": Group((BOTH_PEERS[1], FUSED)),
    "backward all": Group(
        (
            IN_TWO,
            FUSED,
            *(
                ("backward", FusedConfig(2, 2, early=e, ahead=a), None)
                for e, a in ((False, False), (True, False), (False, True))
            ),
            ("backward", FusedConfig(3, 1, early=True, ahead=True), None),
        )
    ),
    "backward short keys": Group((FUSED,), ("B256 max2048 kv256",), ("fast_gelu",)),
    "backward shared query": Group((FUSED, IN_TWO), ("B128 max2048 seeds256", "B128 max2048 seeds64"), ("fast_gelu",)),
    "masked backward": Group((BOTH_PEERS[1], FUSED), ("B128 max2048 window100", "B128 max2048 causal"), ("softmax",)),
    "masks": Group(
        (
            *BOTH_PEERS,
            *forward(TritonConfig(64, 64, 4, 3), two_groups(64, 4, 1), two_groups(64, 4, 2), two_groups(128, 2, 1)),
            IN_TWO,  # in plain Triton
            FUSED,
        ),
        ("B128 max2048 window100", "B128 max2048 causal"),
        ("softmax",),
    ),
    "pair": Group(
        (
            *pair("backward_kv", *(GluonConfig(64, n, 2, 240) for n in (2, 3))),
            *pair("backward_q", *(GluonConfig(64, n, 2, 240) for n in (2, 3, 4))),
        )
    ),
    # Plain Triton, and plain Triton specialised by warps, at every attention target that is missed
    "triton": Group(TRITON),
    "triton short keys": Group(TRITON, ("B256 max2048 kv256", "B128 max2048 seeds256"), ("fast_gelu",)),
    "triton few queries": Group(TRITON, ("B128 max2048 seeds64",), ("fast_gelu",)),
    "triton one-row sequences": Group(TRITON, ("B1024 max1024",), ("softmax",)),
    "specialised": Group(SPECIALISED),
    "specialised short keys": Group(SPECIALISED, ("B256 max2048 kv256", "B128 max2048 seeds256"), ("fast_gelu",)),
    "specialised one-row sequences": Group(SPECIALISED, ("B1024 max1024",), ("softmax",)),
    "triton steps": Group(
        (
            *pair("backward_kv", *(TritonConfig(m, 128, 8, 2) for m in (32, 64))),
            *pair("backward_q", *(TritonConfig(128, n, 8, 2) for n in (32, 64))),
        )
    ),
}


def run_step(
    p: Any, variant: Variant, out: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Callable[[], None], list[Tensor]]:
    """A closure that runs the variant, and the tensors that it fills."""
    import warp_specialised
    from gemworks.jagged.ops.attention_core import launch, launch_hopper

    step, config, fold = variant
    gluon = isinstance(config, GluonConfig)
    if step == "forward":
        mine, fresh = torch.empty_like(d_out), torch.empty_like(lse)
        if gluon:
            return lambda: launch_hopper.forward(p, mine, fresh, config, fold=bool(fold)), [mine]
        if isinstance(config, SpecialisedConfig):
            return lambda: warp_specialised.forward(p, mine, fresh, config), [mine]
        return lambda: launch.triton_forward(p, mine, fresh, config), [mine]
    if step == "backward":
        dtype = torch.float32 if p.rule.shared_query else p.q.dtype
        dq = torch.empty(p.rows_q, *p.q.shape[1:], dtype=dtype, device=p.q.device)
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (p.k, p.v))

        def sums() -> Tensor:
            return launch.compute_delta(out, d_out) if p.rule.is_softmax else delta

        if config is None:
            return lambda: launch._backward_in_two(p, d_out, lse, sums(), dq, dk, dv), [dq, dk, dv]
        if isinstance(config, FusedConfig):
            return lambda: launch_hopper.backward_fused(p, d_out, lse, sums(), dq, dk, dv, config), [dq, dk, dv]

        def pair() -> None:
            rows = sums()
            launch.triton_backward_kv(p, d_out, lse, rows, dk, dv, table.triton_config("backward_kv", p.shape))
            launch.triton_backward_q(p, d_out, lse, rows, dq, table.triton_config("backward_q", p.shape))

        return pair, [dq, dk, dv]
    if step == "backward_kv":
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (p.k, p.v))
        if gluon:
            return lambda: launch_hopper.backward_kv(p, d_out, lse, delta, dk, dv, config), [dk, dv]
        return lambda: launch.triton_backward_kv(p, d_out, lse, delta, dk, dv, config), [dk, dv]
    dtype = torch.float32 if p.rule.shared_query else p.q.dtype
    dq = torch.empty(p.rows_q, *p.q.shape[1:], dtype=dtype, device=p.q.device)
    if gluon:
        return lambda: launch_hopper.backward_q(p, d_out, lse, delta, dq, config), [dq]
    return lambda: launch.triton_backward_q(p, d_out, lse, delta, dq, config), [dq]


def resolved(p: Any, variant: Variant) -> Variant:
    step, config, _ = variant
    if config != SHIPPED:
        return variant
    if step == "backward":
        return step, table.choose_fused(p.shape, p.architecture), None
    chosen = table.choose(step, p.shape, p.architecture)  # pyright: ignore[reportArgumentType]
    return step, chosen, isinstance(chosen, GluonConfig)


def twin_of(p: Any, step: Any, config: Any) -> Variant:
    """What a variant is compared with: the table's plain Triton; for that and its like what the table ships."""
    if step == "backward":
        return step, table.choose_fused(p.shape, p.architecture) if config == TRITON_PAIR else TRITON_PAIR, None
    if isinstance(config, GluonConfig):
        return step, table.triton_config(step, p.shape), None
    return step, table.choose(step, p.shape, p.architecture), None


def run_peer(x: Inputs, step: str) -> Callable[[], object]:
    attend = torch_varlen(x).attend
    if step == "forward":
        q, k, v = (t.detach() for t in x.leaves)
        return lambda: attend(q, k, v)
    out = attend(*x.leaves)
    return lambda: torch.autograd.grad(out, x.leaves, x.d_out, retain_graph=True)


def numbers(x: Inputs, step: str, t: Time, ceilings: Ceilings, peer_ms: float | None) -> dict[str, str]:
    flops = PRODUCTS[step] * x.flops
    moved = x.bytes_moved("fwd" if step == "forward" else "bwd")
    roof_ms = max(flops / ceilings.bf16_tflops / 1e9, moved / ceilings.copy_gbps / 1e6)
    row = {"ms": f"{t.ms:.4f}", "ms_p20": f"{t.ms_p20:.4f}", "ms_p80": f"{t.ms_p80:.4f}"}
    row |= {"tflops": f"{flops / t.ms / 1e9:.4g}", "gbps": f"{moved / t.ms / 1e6:.4g}"}
    if peer_ms is not None:
        row |= {"best_peer": PEER, "ratio_to_best_peer": f"{peer_ms / t.ms:.3f}"}
    return row | {"roofline_fraction": f"{roof_ms / t.ms:.3f}"}


def problem(x: Inputs, activation: str) -> Any:
    from gemworks.jagged.ops.attention_core import launch

    q, k, v = (t.detach() for t in x.leaves)
    rows_k = k.shape[1] if k.dim() == 4 else None
    if rows_k is not None:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    schedule = x.schedule
    for height, total in (("q64", x.d_out.shape[0]), ("k64", k.shape[0])):
        schedule = schedule.with_height(height, total)
    window = x.case.window - 1 if x.case.window else Mask().left
    mask = Mask(window, 0 if x.case.causal else window)
    rule = Rule(x.scale, activation, mask, x.case.kind == "pool")
    bound = x.case.maximum if rows_k is None else rows_k
    return launch.Problem(q, k, v, rule, schedule, bound, "sm_90", x.d_out.shape[0], rows_k)


def measure(
    group: str, shapes: list[str], only: int | None, check: bool, clock: Clock, ceilings: Ceilings
) -> Iterator[dict[str, str]]:
    from gemworks.jagged.ops.attention_core import launch

    peers: dict[tuple[str, str], float] = {}
    device, listed = torch.device("cuda"), GROUPS[group]
    common = report.Context(ceilings, device, torch.bfloat16, ()).columns()
    common["command"] = f"python libs/jagged/benchmarks/variants.py --group {shlex.quote(group)}"
    for shape, activation in itertools.product([s for s in listed.shapes if s in shapes], listed.activations):
        x = make_inputs((SMALL if check else CASES)[shape], device, torch.bfloat16)
        p = problem(x, activation)
        softmax = activation == "softmax"
        lse = torch.empty(p.q.shape[1], p.rows_q if softmax else 1, device=device)
        out = torch.empty_like(x.d_out)
        launch.triton_forward(p, out, lse, table.triton_config("forward", p.shape))
        delta = launch.compute_delta(out, x.d_out) if softmax else lse
        twins: dict[Variant, list[Tensor]] = {}
        lengths = (x.lengths_k if x.case.kind == "pool" else x.lengths_q).double()
        common |= {"law": x.case.law, "mean_len": f"{lengths.mean():.1f}", "max_len": str(int(lengths.max()))}
        common |= {"seed": str(x.case.seed), "bwd_factor": str(BWD_FACTOR)}
        for variant in listed.variants if only is None else [listed.variants[only]]:
            variant = resolved(p, variant)
            step, config, _fold = variant
            row = common | {"op": "flash_attention" if softmax else "gdpa", "shape": x.case.shape}
            row["head_dim"] = str(x.case.head_dim)
            row |= {"direction": DIRECTIONS[step], "impl": report.OURS, "setting": str(config or "pair")}
            if config == PEER:  # softmax, whatever we compute: once for both
                if (shape, step) not in peers and not check:
                    row |= {"op": "flash_attention", "impl": PEER, "setting": ""}
                    try:
                        t = Time.of(clock.sample(run_peer(x, step), 12)[2:])
                    except Exception as error:
                        yield row | {"note": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
                    else:
                        peers[shape, step] = t.ms
                        yield row | numbers(x, step, t, ceilings, t.ms)
                continue
            if softmax:
                variant = (step, config, None)
            if variant[2]:
                row["setting"] += " fold"
            try:
                twin = twin_of(p, step, config)
                if twin not in twins:
                    run, twins[twin] = run_step(p, twin, out, x.d_out, lse, delta)
                    run()
                run, filled = run_step(p, variant, out, x.d_out, lse, delta)
                for t in filled:
                    t.fill_(float("nan"))
                run()
                errors = [
                    float((t.float() - exact.float()).norm() / exact.float().norm())
                    for t, exact in zip(filled, twins[twin], strict=True)
                ]
                row["error"] = f"{max(errors):.1e}"
                if not max(errors) < 2e-2:
                    row["note"] = "WRONG: not timed"
                elif not check:
                    t = Time.of(clock.sample(run, 12)[2:])
                    row |= numbers(x, step, t, ceilings, peers.get((shape, step)))
            except Exception as error:  # a variant that does not compile or launch is a result too
                row["note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            yield row


def run_all(groups: list[str], shapes: list[str], out: Path, only: int | None, check: bool) -> None:
    device = torch.device("cuda")
    clock = Clock(device)
    ceilings = Ceilings(1.0, 1.0, None) if check else measure_ceilings(clock, device)
    rows = (row for g in groups for row in measure(g, shapes, only, check, clock, ceilings))
    if check:
        for row in rows:
            print(" ".join(row.get(c, "") for c in SHOWN if row.get(c)), flush=True)
        return
    new = not out.exists()
    with out.open("a", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, restval="")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow(row)
            file.flush()
            print("  ".join(row.get(c, "") for c in SHOWN), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("variants.csv"))
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--limit-s", type=float, default=150.0, help="of one group")
    parser.add_argument("--group", action="append", choices=list(GROUPS), help="only these; all by default")
    parser.add_argument("--shape", action="append", choices=list(CASES), help="only these; all by default")
    parser.add_argument("--check", action="store_true", help="small shapes, no times: compiles and compares")
    parser.add_argument("--only", type=int, help="one variant of a group, by its number; with --check")
    parser.add_argument("--here", action="store_true", help="all groups in this process: quicker, and a hang ends it")
    args = parser.parse_args()
    groups, shapes, begin = args.group or list(GROUPS), args.shape or list(CASES), time.monotonic()
    if args.here or args.check:
        run_all(groups, shapes, args.out, args.only, args.check)
        return
    for group in groups:
        left = args.budget_s - (time.monotonic() - begin)
        print(f"== {group} ({left:.0f} s left)", flush=True)
        if left < 20:
            print("not run", flush=True)
            continue
        command = [sys.executable, __file__, "--here", "--group", group, "--out", str(args.out)]
        command += [w for s in shapes for w in ("--shape", s)]
        try:
            done = subprocess.run(command, timeout=min(left, args.limit_s))
            if done.returncode:
                print(f"{group}: ended with {done.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{group}: stopped at its limit (slow, or a variant that hangs)", flush=True)


if __name__ == "__main__":
    main()
