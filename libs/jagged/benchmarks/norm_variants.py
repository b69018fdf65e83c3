"""Times every configuration of the norm kernels that is worth trying, on a GPU.

    python libs/jagged/benchmarks/norm_variants.py --shard 3/14    # beforehand: compiles a share of them
    python libs/jagged/benchmarks/norm_variants.py --out norm_variants.csv

What wins belongs into `norm_config` of gemworks/jagged/ops/norms/launch.py. The results are compared with those of the
shipped configuration before they are timed.

Letters: D width.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged.bench.bandwidth import assert_near
from gemworks.jagged.bench.timing import Clock, Time, measure_ceilings
from torch import Tensor

WIDTHS = (128, 512, 1024, 2048, 8192)
COLUMNS = ("kernel", "width", "rows", "config", "ms", "ms_p20", "ms_p80", "share_of_copy", "shipped", "note")
KERNELS = ("rms fwd residual", "rms bwd residual", "layer fwd affine residual", "layer bwd affine residual")


def configs(kernel: str, width: int) -> Iterator[Any]:
    from gemworks.jagged.ops.norms.configs import NormConfig

    sums_columns = "bwd affine" in kernel
    per_thread = (8, 16) if sums_columns else (16, 32, 64)
    for values, warps in itertools.product((1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8, 16)):
        if values < width or values // (32 * warps) not in per_thread:
            continue
        for stages in (1, 3) if sums_columns else (1,):
            yield NormConfig(values // width, warps, stages)


def calls(kernel: str, width: int, num_rows: int) -> tuple[Callable[[Any], list[Tensor]], float]:
    """A call of the kernel with a configuration, and the bytes that it must move."""
    from gemworks.jagged.ops.norms.launch import norm_backward, norm_forward

    generator = torch.Generator("cuda").manual_seed(0)
    x, r, dy = (
        torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)
    )
    center = kernel.startswith("layer")
    weight, bias = (torch.randn(width, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2))
    weight_or_not, bias_or_not = (weight, bias) if center else (None, None)
    size = 2.0 * num_rows * width

    def forward(config: Any) -> list[Tensor]:
        return list(norm_forward(x, weight_or_not, bias_or_not, r, None, eps=1e-5, center=center, config=config))

    def backward(config: Any) -> list[Tensor]:
        dtype = torch.bfloat16 if center else None
        return list(norm_backward(dy, r, x, weight_or_not, dtype, eps=1e-5, center=center, config=config))

    return (forward, 4 * size) if "fwd" in kernel else (backward, 4 * size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("norm_variants.csv"))
    parser.add_argument("--shard", default="", metavar="I/N")
    parser.add_argument("--values", type=int, default=1 << 28, help="elements of a tensor")
    args = parser.parse_args()
    everything = [(k, w, c) for k, w in itertools.product(KERNELS, WIDTHS) for c in configs(k, w)]
    if args.shard:
        index, count = map(int, args.shard.split("/"))
        for kernel, width, config in everything[index::count]:
            try:
                calls(kernel, width, 4096)[0](config)
            except Exception as error:  # the run that times them reports it
                print(f"{kernel} {width} {config}: {type(error).__name__}", flush=True)
        torch.cuda.synchronize()
        return
    from gemworks.jagged.ops.norms.configs import norm_config

    device = torch.device("cuda")
    clock = Clock(device)
    copy_gbps = measure_ceilings(clock, device).copy_gbps
    print(f"copy {copy_gbps:.0f} GB/s, {len(everything)} configurations", flush=True)
    with args.out.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for (kernel, width), group in itertools.groupby(everything, key=lambda item: item[:2]):
            num_rows = args.values // width
            call, num_bytes = calls(kernel, width, num_rows)
            shipped = norm_config(width, sums_columns="bwd affine" in kernel)
            expected = call(shipped)
            best: tuple[float, str] = (float("inf"), "")
            own = float("inf")
            for config in dict.fromkeys([shipped, *(c for _, _, c in group)]):
                row = {"kernel": kernel, "width": str(width), "rows": str(num_rows), "config": str(config)}
                row["shipped"] = str(int(config == shipped))
                try:
                    for got, exact in zip(call(config), expected, strict=True):
                        if exact.numel():
                            assert_near(got.flatten()[: 1 << 20], exact.flatten()[: 1 << 20], kernel)
                    t = Time.of(clock.sample(partial(call, config), 10)[2:])
                    row |= {"ms": f"{t.ms:.4f}", "ms_p20": f"{t.ms_p20:.4f}", "ms_p80": f"{t.ms_p80:.4f}"}
                    row["share_of_copy"] = f"{num_bytes / t.ms / 1e6 / copy_gbps:.3f}"
                    best = min(best, (t.ms, str(config)))
                    own = t.ms if config == shipped else own
                except Exception as error:  # a configuration that does not fit the chip is a result too
                    row["note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                writer.writerow(row)
                file.flush()
            share = num_bytes / 1e6 / copy_gbps
            print(f"{kernel} {width}: shipped {share / own:.3f}, best {share / best[0]:.3f} {best[1]}", flush=True)


if __name__ == "__main__":
    main()
