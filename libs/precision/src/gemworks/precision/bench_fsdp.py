"""`torchrun --nproc-per-node 2 -m gemworks.precision.bench_fsdp --out DIR`: FSDP2 with weights gathered in FP8.

A stack of square linear layers, each its own FSDP2 unit, trained for a few steps under `fp8_block128`: weights gathered
in their own dtype and quantised behind the gather, against shards quantised first and gathered as codes and scales;
beside plain bf16 layers. Checked before anything is timed: both ways give the same losses to the bit. Rank 0 writes
`precision_h200x2.csv` with the bytes that a rank receives in the all-gathers of one step. Without GPUs it runs at toy
sizes on gloo.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gemworks.precision.bench_run import COMMON, LEADING, Bench
from gemworks.precision.convert import convert
from gemworks.precision.fsdp import gather_in_fp8
from gemworks.precision.recipe import recipe
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

COLUMN = "gathered_mib"
COMMAND = "torchrun --nproc-per-node 2 -m gemworks.precision.bench_fsdp"


@contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """Bytes that this rank receives from others, one entry for each all-gather of FSDP2."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    received: list[int] = []
    original = DefaultAllGather.__call__

    def counted(self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        bytes_of = lambda tensor: tensor.numel() * tensor.element_size()  # noqa: E731
        received.append(bytes_of(output_tensor) - bytes_of(input_tensor))
        return original(self, output_tensor, input_tensor, *args, **kwargs)

    DefaultAllGather.__call__ = counted
    try:
        yield received
    finally:
        DefaultAllGather.__call__ = original


def build(impl: str, features: int, depth: int, device: torch.device) -> nn.Module:
    """The sharded stack: `torch` in bf16, `gather_bf16` or `gemworks` (gathered in FP8) under `fp8_block128`."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(features, features, bias=False) for _ in range(depth)))
    net = net.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if impl != "torch":
        convert(net, recipe("fp8_block128"))
    if impl == "gemworks":
        forms = {decision.form for decision in gather_in_fp8(net, dist.get_world_size())}
        assert forms == {"square"}, forms
    # No dtype of parameters: quantising what was rounded to another dtype first would not be the same.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in net:
        fully_shard(layer, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    return net


def step_of(net: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Forward, backward and an update; returns the loss."""
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)

    def step() -> Tensor:
        loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def timed(step: Callable[[], object], device: torch.device, repetitions: int) -> tuple[float, float, float]:
    """Median, 20 % and 80 % quantile of a step in milliseconds; ranks start together."""
    times = []
    for _ in range(repetitions):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    times.sort()
    return statistics.median(times), times[len(times) // 5], times[4 * len(times) // 5]


def main(arguments: list[str] | None = None) -> int:
    """Run on the ranks that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/precision_fsdp"))
    parser.add_argument("--shapes", type=int, nargs="*", default=[0, 1, 2], help="which of the three shapes")
    parser.add_argument("--repetitions", type=int, default=20, help="timed steps of each; 1 only compiles")
    chosen = parser.parse_args(arguments)
    begun = time.perf_counter()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    bench = Bench(device, smoke=not gpu)
    known = [(8192, 4096, 8), (8192, 8192, 4), (32768, 8192, 4)]
    shapes = [known[i] for i in chosen.shapes] if gpu else [(32, 256, 2)]
    for rows, features, depth in shapes:
        x = bench.randn(rows, features, dtype=torch.bfloat16 if gpu else torch.float32)
        results: dict[str, Any] = {}
        for impl in ("torch", "gather_bf16", "gemworks"):
            step = step_of(build(impl, features, depth, device), x)
            with counted_gathers() as received:
                losses = [step().item()]
                nbytes = sum(received)
            losses += [step().item() for _ in range(2)]
            results[impl] = losses, nbytes, timed(step, device, chosen.repetitions if gpu else 3)
            if dist.get_rank() == 0:
                print(f"{impl} {rows}x{features}: done after {time.perf_counter() - begun:.1f} s", flush=True)
            del step
        if results["gather_bf16"][0] != results["gemworks"][0]:
            losses = results["gather_bf16"][0], results["gemworks"][0]
            print(f"CHECK FAILED {rows}x{features}x{depth}: losses {losses}; not published", flush=True)
            continue
        for impl, (_, nbytes, (ms, p20, p80)) in results.items():
            if dist.get_rank() == 0:
                mib = round(nbytes / 2**20, 2)
                print(f"{impl} {rows}x{features}, {depth} layers: {mib} MiB gathered a step", flush=True)
                bench.add(
                    op="fsdp_step",
                    shape=f"{rows}x{features}x{features} x{depth}",
                    format="bf16" if impl == "torch" else "fp8_block128",
                    direction="fwd_bwd",
                    impl=impl,
                    ratio_to_bf16=round(results["torch"][2][0] / ms, 4),
                    ms=round(ms, 4),
                    ms_p20=round(p20, 4),
                    ms_p80=round(p80, 4),
                    tflops=round(6.0 * rows * features**2 * depth / ms / 1e9, 2),
                    best_peer="gather_bf16",
                    ratio_to_best_peer=round(results["gather_bf16"][2][0] / ms, 4),
                    num_gpus=dist.get_world_size() if gpu else 0,
                )
                bench.rows[-1][COLUMN] = mib
                # Ceilings are not measured here.
                bench.rows[-1] |= {"copy_gbps": "", "bf16_tflops": "", "command": " ".join([COMMAND, *sys.argv[1:]])}
    if dist.get_rank() == 0:
        chosen.out.mkdir(parents=True, exist_ok=True)
        path = chosen.out / ("precision_h200x2.csv" if gpu else "precision_fsdp_cpu_smoke.csv")
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=[*LEADING, COLUMN, *COMMON], lineterminator="\n")
            writer.writeheader()
            writer.writerows(bench.rows)
        print(f"wrote {path}: {len(bench.rows)} rows", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
