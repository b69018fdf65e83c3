"""`python -m gemworks.parallel.bench`: what the planner costs, what balancing buys, what overlaps on the GPUs at hand.

Sections: `plan` (planner and mesh seconds), `balance` (max/mean cost over ranks), `ladder` (predicted), `gpu` (two
GPUs under
torchrun: collective rates, exposed communication of FSDP and of the expert exchange). Rows go to CSV.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gemworks.parallel import presets
from gemworks.parallel.balance_report import balance_rows
from gemworks.parallel.balance_report import to_csv as balance_csv
from gemworks.parallel.experts import EnsembleExperts
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.lengths import CostModel, LengthLaw
from gemworks.parallel.measure import measure_cluster
from gemworks.parallel.meshes import build_meshes
from gemworks.parallel.placement import place
from gemworks.parallel.plan import ParallelPlan
from gemworks.parallel.planner import ladder_text, ladders, search
from gemworks.parallel.profile import gem_like
from torch import nn

COLUMNS = [
    "op",
    "shape",
    "setting",
    "impl",
    "memory_gib",
    "exposed_ms",
    "dtype",
    "law",
    "mean_len",
    "max_len",
    "seed",
    "ms",
    "ms_p20",
    "ms_p80",
    "tflops",
    "gbps",
    "bwd_factor",
    "roofline_fraction",
    "best_peer",
    "ratio_to_best_peer",
    "copy_gbps",
    "bf16_tflops",
    "gpu",
    "num_gpus",
    "clock_mhz",
    "command",
    "commit",
    "torch",
    "triton",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.parallel.bench", description=__doc__)
    parser.add_argument(
        "sections", nargs="*", help="plan, balance, ladder, gpu; all that can run here if none is named"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for the CSV files; nothing is written without it"
    )
    parser.add_argument("--max-ranks", type=int, default=4096, help="of the balance table")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.sections) - {"plan", "balance", "ladder", "gpu"})
    if unknown:
        parser.error(f"unknown sections {unknown}; choose from plan, balance, ladder, gpu")
    chosen = args.sections or ["plan", "balance", "ladder", *(["gpu"] if torch.cuda.device_count() > 1 else [])]
    lead = int(os.environ.get("RANK", "0")) == 0
    rows: list[dict[str, Any]] = []
    if "plan" in chosen and lead:
        rows += _plan_rows()
    if "balance" in chosen and lead:
        table = [
            row
            for name in ("uniform", "zipf1.2")
            for n in (8, 64, 512, 4096)
            if n <= args.max_ranks
            for row in balance_rows(LengthLaw.named(name, 2048), n, cost=CostModel(linear=1.0, quadratic=1 / 2048))
        ]
        text = balance_csv(table)
        print(text)
        if args.out:
            (args.out / "parallel_balance.csv").write_text(text)
    if "ladder" in chosen and lead:
        print("predicted, not measured:\n" + ladder_text(ladders(gem_like(), presets.roce_cluster(4096))))
    if "gpu" in chosen:
        rows += _gpu_rows(lead)
    if rows and lead:
        _report(rows, args.out)
    return 0


def _stamp(argv: Sequence[str]) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu {platform.machine()}"
    return {
        "gpu": gpu,
        "num_gpus": dist.get_world_size() if dist.is_initialized() else 0,
        "command": "python -m gemworks.parallel.bench " + " ".join(argv),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
    }


def _report(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    stamp = _stamp(sys.argv[1:])
    for row in rows:
        row.update({k: v for k, v in stamp.items() if k not in row})
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if k not in stamp}
        print("  ".join(f"{k}={v}" for k, v in shown.items()))
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    name = "parallel_h200x2.csv" if any(r["op"].startswith("gpu") for r in rows) else "parallel_planner.csv"
    with (out / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _timed(run: Callable[[], object], repeats: int = 3) -> dict[str, float]:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    return {"ms": statistics.median(times), "ms_p20": times[len(times) // 5], "ms_p80": times[-1 - len(times) // 5]}


def _plan_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for n in (64, 4096, 16384):
        group = min(256, n)
        plan = ParallelPlan.for_world(
            n, shard=group, expert=2, expert_shard=16, table_group=group, replica_shard=min(8, n // group)
        )
        cluster = presets.roce_cluster(n)

        def groups(plan: ParallelPlan = plan, cluster: Any = cluster) -> None:
            layout = place(plan, cluster).layout
            for view, axis in layout.used_axes():
                layout.groups(view, axis)

        rows.append(
            {
                "op": "place and groups",
                "shape": f"{n} ranks",
                "setting": "five dimensions",
                "impl": "gemworks",
                **_timed(groups),
            }
        )
        model = gem_like()
        rows.append(
            {
                "op": "search",
                "shape": f"{n} GPUs",
                "setting": model.name,
                "impl": "gemworks",
                **_timed(lambda c=cluster, m=model: search(m, c), repeats=1),
            }
        )
    return rows


def _gpu_rows(lead: bool) -> list[dict[str, Any]]:
    """Two or more GPUs under torchrun."""
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "gpu: needs CUDA and torchrun; run `torchrun --nproc-per-node 2 -m gemworks.parallel.bench "
            "gpu --out docs/measured`"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world = dist.get_world_size()
    rows: list[dict[str, Any]] = []
    spec = measure_cluster(presets.h200_host(world), device=device, sizes=(2**20, 2**28), repeats=9)
    for collective, rate in spec.tiers.get("nvlink", {}).items():
        rows.append(
            {
                "op": f"gpu {collective}",
                "shape": "1-256 MiB",
                "setting": f"{world} GPUs, fitted; latency {rate.latency_us:.1f} us",
                "impl": "nccl",
                "gbps": rate.bytes_per_s / 1e9,
            }
        )
    rows += _fsdp_rows(world, device) + _expert_rows(world, device)
    dist.destroy_process_group()
    return rows if lead else []


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class _Stack(nn.Module):
    def __init__(self, n: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _cuda_ms(run: Callable[[], object], repeats: int = 15) -> dict[str, float]:
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    times.sort()
    return {"ms": statistics.median(times), "ms_p20": times[repeats // 5], "ms_p80": times[-1 - repeats // 5]}


def _fsdp_rows(world: int, device: torch.device) -> list[dict[str, Any]]:
    """Exposed communication of FSDP: step time minus the same step on one GPU."""
    rows: list[dict[str, Any]] = []
    n, width = 8, 4096
    for tokens in (4096, 16384):
        torch.manual_seed(0)
        x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
        alone = _Stack(n, width).to(device=device, dtype=torch.bfloat16)

        def step(model: nn.Module, x: torch.Tensor = x) -> None:
            model(x).float().pow(2).mean().backward()
            model.zero_grad(set_to_none=True)

        base = _cuda_ms(lambda m=alone: step(m))
        flops = 3 * 2 * tokens * 8 * width * width * n
        rows.append(_row("gpu step alone", tokens, width, "1 GPU", base, flops, 0.0))
        del alone
        for prefetch in (True, False):
            torch.manual_seed(0)
            model = _Stack(n, width).to(device)
            meshes = build_meshes(
                ParallelPlan.for_world(world, shard=world), presets.h200_host(world), device_type="cuda"
            )
            policy = FsdpPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, prefetch=prefetch)
            apply_fsdp(model, meshes, [f"blocks.{i}" for i in range(n)], policy)
            got = _cuda_ms(lambda m=model: step(m))
            setting = f"{world} GPUs, prefetch {'on' if prefetch else 'off'}"
            rows.append(_row("gpu step fsdp", tokens, width, setting, got, flops, got["ms"] - base["ms"]))
            del model
            torch.cuda.empty_cache()
    return rows


def _expert_rows(world: int, device: torch.device) -> list[dict[str, Any]]:
    """Exposed communication of the expert exchange, with and without a neighbour to hide behind."""
    tokens, width = 8192, 2048
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def make(i: int) -> nn.Module:
        torch.manual_seed(i)
        return _Block(width).to(device=device, dtype=torch.bfloat16)

    side = _Block(width).to(device=device, dtype=torch.bfloat16)
    local = EnsembleExperts(make, world).to(device)
    spread = EnsembleExperts(make, world, dist.group.WORLD).to(device)
    counts = [tokens] * world

    def apart(experts: EnsembleExperts) -> None:
        (experts(x, counts) + side(x)).float().pow(2).mean().backward()

    def overlapped(experts: EnsembleExperts) -> None:
        sent = experts.start(x, counts)
        beside = side(x)
        (experts.finish(experts.run(sent)) + beside).float().pow(2).mean().backward()

    flops = 3 * 2 * tokens * 8 * width * width * (world + 1)
    base = _cuda_ms(lambda: apart(local))
    rows = [_row("gpu experts alone", tokens, width, f"1 GPU, {world} experts", base, flops, 0.0)]
    for name, run in (("one after the other", apart), ("overlapped", overlapped)):
        got = _cuda_ms(lambda r=run: r(spread))
        rows.append(
            _row("gpu experts spread", tokens, width, f"{world} GPUs, {name}", got, flops, got["ms"] - base["ms"])
        )
    return rows


def _row(
    op: str, tokens: int, width: int, setting: str, t: dict[str, float], flops: float, exposed: float
) -> dict[str, Any]:
    return {
        "op": op,
        "shape": f"{tokens}x{width}",
        "setting": setting,
        "impl": "gemworks",
        "exposed_ms": exposed,
        "dtype": "bf16",
        "tflops": flops / t["ms"] / 1e9,
        "bwd_factor": 2,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        **t,
    }


if __name__ == "__main__":
    raise SystemExit(main())
