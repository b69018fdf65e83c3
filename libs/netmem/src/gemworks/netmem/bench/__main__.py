"""Command line of the benchmarks.

One GPU:   python -m gemworks.netmem.bench --out docs/measured/netmem_h200.csv
Two GPUs:  torchrun --nproc-per-node 2 -m gemworks.netmem.bench --suite pair --out docs/measured/netmem_h200x2.csv
Anywhere:  python -m gemworks.netmem.bench --smoke --out /tmp/netmem.csv
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

import torch
from gemworks.netmem.bench import pair, single
from gemworks.netmem.bench.budgets import PARTS, budgets, warm_compiler
from gemworks.netmem.bench.hooks import hooks
from gemworks.netmem.bench.plots import plot_file
from gemworks.netmem.bench.rows import Rows
from gemworks.netmem.bench.stack import SMOKE, StackSize
from gemworks.netmem.ledger import HBM, BandwidthLedger
from gemworks.netmem.measure import measure

SUITES = ("links", "offload_copies", "small_copy_under_bulk", "turns", "quantise", "stash", "hooks", "budgets")


def _ledger(device: torch.device, smoke: bool) -> BandwidthLedger:
    return measure(device, num_bytes=1 << 20 if smoke else 256 << 20, repeats=3 if smoke else 11)


def _matmul_tflops(device: torch.device, smoke: bool) -> float:
    from gemworks.netmem.bench.rows import timed_ms

    size = 128 if smoke else 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / timed_ms(lambda: a @ a, device, 5)[0] / 1e9


def _plot(out: Path) -> None:
    try:
        plot_file(out)
    except ImportError:
        print("no plots: matplotlib is not installed")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks and write a CSV."""
    parser = argparse.ArgumentParser(
        prog="python -m gemworks.netmem.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", nargs="+", default=["all"], choices=[*SUITES, "pair", *pair.SUITES, "all"])
    parser.add_argument("--out", required=True, help="the CSV; the cluster file, plots and traces go beside it")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU: does it run?")
    parser.add_argument("--compile", action="store_true", help="compile every region")
    parser.add_argument(
        "--warm",
        choices=["no", "yes", "only"],
        default="yes",
        help="with --compile: compile all choices of `budgets` at once before it; only: and do nothing else",
    )
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="of `budgets`")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds that a suite of `pair` may take")
    parser.add_argument("--batch", type=int, default=StackSize.batch)
    parser.add_argument("--depth", type=int, default=StackSize.depth)
    args = parser.parse_args(argv)
    # multicast stays off: this library never uses it, and some machines must not
    for name, value in (
        ("NCCL_NVLS_ENABLE", "0"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
        ("NVSHMEM_DISABLE_NVLS", "1"),
    ):
        os.environ.setdefault(name, value)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not args.smoke else torch.device("cpu")
    if device.type == "cpu" and not args.smoke:
        print("error: no CUDA device; use --smoke to run tiny sizes on the CPU", file=sys.stderr)
        return 2
    size = SMOKE if args.smoke else StackSize(batch=args.batch, depth=args.depth)

    if any(name.startswith("pair") for name in args.suite):
        suites = list(pair.SUITES) if args.suite == ["pair"] else args.suite
        if not set(suites) <= set(pair.SUITES):
            parser.error("the pair suites run alone, under torchrun")

        def make_rows(device: torch.device, num_gpus: int) -> Rows:
            if int(os.environ.get("RANK", "0")):
                return Rows(device, 0, 0, num_gpus, quiet=True)
            # rank 0 measures while the others wait: the links are idle
            ledger = _ledger(device, args.smoke)
            rows = Rows(device, ledger.capacity[HBM] / 1e9, _matmul_tflops(device, args.smoke), num_gpus, out)
            for name, link in ledger.links.items():
                if name.startswith("nvlink"):
                    rows.add("link", setting=name, gbps=link.bytes_per_s / 1e9, ms=link.latency_s * 1e3)
            return rows

        rows = pair.run(make_rows, suites, args.smoke, args.limit_s)
        if not int(os.environ.get("RANK", "0")):
            rows.write(out)
            _plot(out)
        return 0
    if args.warm != "no" and args.compile and device.type == "cuda" and {"all", "budgets"} & set(args.suite):
        warm_compiler(size, args.parts)
    if args.warm == "only":
        return 0
    ledger = _ledger(device, args.smoke)
    ledger.to_toml(out.with_suffix(".cluster.toml"))
    rows = Rows(device, ledger.capacity[HBM] / 1e9, _matmul_tflops(device, args.smoke), path=out)
    setup = single.Setup(device, ledger, rows, args.smoke, args.compile)
    failed = []
    suites = SUITES if "all" in args.suite else args.suite
    for number, name in enumerate(suites, 1):
        print(f"[{number}/{len(suites)}] {name}", flush=True)
        try:
            if name == "budgets":
                budgets(setup, size, args.parts)
            elif name == "hooks":
                hooks(setup)
            else:
                getattr(single, name)(setup)
        except (RuntimeError, AssertionError, ValueError, MemoryError) as error:
            # the other suites' rows are worth keeping; the exit status still says that one failed
            failed.append(name)
            traceback.print_exc()
            print(f"error: suite {name}: {type(error).__name__}: {error}", file=sys.stderr)
        rows.write(out)
    _plot(out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
