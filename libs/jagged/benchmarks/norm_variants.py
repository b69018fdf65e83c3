"""Times configurations of the norm kernels that are worth trying, on a GPU, each compared with float64 first.

    python libs/jagged/benchmarks/norm_variants.py --shard 3/14    # beforehand: compiles a share of them
    python libs/jagged/benchmarks/norm_variants.py --out norm_variants.csv
    python libs/jagged/benchmarks/norm_variants.py --kernel "layer bwd affine residual" --width 3000 --out norm_3000.csv

What wins belongs into `norm_config` of gemworks/jagged/ops/norms/configs.py. "value by value" are rows that are read as
they were before the kernels counted strides in units, at widths that 16 does not divide.

Letters: D width.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from gemworks.jagged.bench import report
from gemworks.jagged.bench.bandwidth import assert_near
from gemworks.jagged.bench.timing import Clock, Time, measure_ceilings
from gemworks.jagged.jagged import next_power_of_two
from gemworks.jagged.ops.norms.configs import NormConfig, norm_config
from gemworks.jagged.ops.norms.reference import norm_reference
from torch import Tensor

WIDTHS = (128, 512, 1024, 2048, 8192, 1000, 1536, 3000, 3072, 6000)
KERNELS = ("rms fwd residual", "rms bwd residual", "layer fwd affine residual", "layer bwd affine residual")
COLUMNS: tuple[str, ...] = (
    *("op", "shape", "config", "shipped", "direction", "impl", "error", "note"),
    *report.COLUMNS[report.COLUMNS.index("dtype") :],
)
CHECKED_ROWS = 4099  # more than the programs of one device have tiles, the last tile not full
EPS = 1e-5


@dataclass(frozen=True)
class Variant:
    config: NormConfig
    by_value: bool = False

    def __str__(self) -> str:
        return f"{self.config}{' value by value' if self.by_value else ''}"


def is_backward(kernel: str) -> bool:
    return " bwd " in kernel


def sums_columns(kernel: str) -> bool:
    return "bwd affine" in kernel


def variants(kernel: str, width: int) -> list[Variant]:
    """The shipped one first."""
    sums, block = sums_columns(kernel), next_power_of_two(width)
    shipped = norm_config(width, sums_columns=sums)
    found = [Variant(shipped)]
    if width % 16:
        found.append(Variant(NormConfig(shipped.rows, shipped.num_warps, shipped.stages), by_value=True))
    elif width != block and sums:
        found.append(Variant(NormConfig(shipped.rows, shipped.num_warps, shipped.stages)))
    for values, warps in itertools.product((1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8, 16)):
        if values < block or values // (32 * warps) not in ((8, 16) if sums else (16, 32, 64)):
            continue
        if width != block and values != block:
            continue
        programs = None if width == block or not sums else max(16 // warps, 1)
        stages = (1, 3) if sums else (1,)
        found += [Variant(NormConfig(values // block, warps, s, programs)) for s in stages]
    if sums:
        found += map(Variant, pieces(width))
    return list(dict.fromkeys(found))


def pieces(width: int) -> Iterator[NormConfig]:
    """Rows in up to six pieces of a power of two, at most a sixteenth wider than they are, that should fit the
    registers: seven or so for every value that a thread owns.
    """
    columns = next_power_of_two(width)
    while -(-width // columns) * columns > width * 17 / 16:
        columns //= 2
    count = -(-width // columns)
    for warps, total in itertools.product((1, 2, 4, 8, 16), (8, 12, 16, 24)):
        values = columns * count // (32 * warps)
        if total % warps or count > 6 or not 8 <= values <= 24 or columns // (32 * warps) < 4:
            continue
        for stages in (1, 3):
            config = NormConfig(1, warps, stages, total // warps, columns)
            if (config.max_registers() or 255) >= 7 * values:
                yield config


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # also h, the row that a backward reads
    r: Tensor  # the residual, also dh
    dy: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def make(cls, kernel: str, width: int, num_rows: int, device: torch.device, dtype: torch.dtype) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator).to(dtype)

        rows = [random(num_rows, width) for _ in range(3)]
        affine = [random(width) for _ in range(2)] if kernel.startswith("layer") else [None, None]
        return cls(rows[0], rows[1], rows[2], affine[0], affine[1])


def run(kernel: str, inputs: Inputs, variant: Variant) -> list[Tensor]:
    """What the kernel returns, by the way that the shipped op goes."""
    from gemworks.jagged.ops.norms import launch

    i, center = inputs, kernel.startswith("layer")
    with mock.patch.object(launch, "stride_unit", return_value=1) if variant.by_value else nullcontext():
        if not is_backward(kernel):
            y = launch.norm_forward(i.x, i.weight, i.bias, i.r, None, eps=EPS, center=center, config=variant.config)
            return list(y)
        bias_dtype = None if i.bias is None else i.bias.dtype
        grads = launch.norm_backward(
            i.dy, i.r, i.x, i.weight, bias_dtype, eps=EPS, center=center, config=variant.config
        )
        return [g for g in grads if g.numel()]


def truth(kernel: str, inputs: Inputs) -> list[Tensor]:
    """The same in float64, gradients by autograd."""
    i, center = inputs, kernel.startswith("layer")
    x, r, dy = (t.double() for t in (i.x, i.r, i.dy))
    affine = [None if t is None else t.double() for t in (i.weight, i.bias)]
    if not is_backward(kernel):
        return list(norm_reference(x, affine[0], affine[1], r, None, eps=EPS, center=center))
    leaves = [t.requires_grad_() for t in (x, *affine) if t is not None]
    y, _ = norm_reference(x, affine[0], affine[1], None, None, eps=EPS, center=center)
    dx, *rest = torch.autograd.grad(y, leaves, dy)
    return [dx + r, *rest]


def check(kernel: str, inputs: Inputs, variant: Variant, expected: list[Tensor]) -> float:
    """The worst relative error; raises if it is no rounding, or if a second call gives other bits."""
    got, again = run(kernel, inputs, variant), run(kernel, inputs, variant)
    worst = 0.0
    for a, b, exact in zip(got, again, expected, strict=True):
        assert bool(a.isfinite().all()), "not finite"
        assert torch.equal(a, b), "a second call gives other bits"
        assert_near(a, exact, kernel, 1.2e-2)
        worst = max(worst, float((a.double() - exact).norm() / exact.norm()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("norm_variants.csv"))
    parser.add_argument("--shard", default="", metavar="I/N")
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only this; all by default")
    parser.add_argument("--width", action="append", type=int, choices=WIDTHS, help="only this; all by default")
    parser.add_argument("--values", type=int, default=1 << 28, help="elements of a tensor")
    parser.add_argument("--checked-rows", type=int, default=CHECKED_ROWS)
    args = parser.parse_args()
    cases = list(itertools.product(args.kernel or KERNELS, args.width or WIDTHS))
    # Without a GPU, for tests of this file: under Triton's interpreter, which is wrong in bf16.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if args.shard:
        index, count = map(int, args.shard.split("/"))
        everything = [(kernel, width, v) for kernel, width in cases for v in variants(kernel, width)]
        for kernel, width, variant in everything[index::count]:
            try:
                run(kernel, Inputs.make(kernel, width, args.checked_rows, device, dtype), variant)
            except Exception as error:  # the run that times them reports it
                print(f"{kernel} {width} {variant}: {type(error).__name__}", flush=True)
        return
    clock = Clock(device)
    ceilings = measure_ceilings(clock, device)
    print(f"copy {ceilings.copy_gbps:.0f} GB/s", flush=True)
    common = report.Context(ceilings, device, dtype, ()).columns()
    common["command"] = " ".join(["python libs/jagged/benchmarks/norm_variants.py", *map(quoted, sys.argv[1:])])
    common |= {"impl": report.OURS, "seed": "0"}
    wrong = 0
    with args.out.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for kernel, width in cases:
            num_rows = args.values // width
            small = Inputs.make(kernel, width, args.checked_rows, device, dtype)
            expected = truth(kernel, small)
            large = Inputs.make(kernel, width, num_rows, device, dtype)
            num_bytes = (
                4.0 * num_rows * width * dtype.itemsize
            )  # rows alone: two read and two written, or three and one
            shipped = variants(kernel, width)[0]
            best: tuple[float, str] = (float("inf"), "")
            own = float("inf")
            for variant in variants(kernel, width):
                direction = "bwd" if is_backward(kernel) else "fwd"
                row = common | {"op": kernel, "shape": f"{num_rows}x{width}", "direction": direction}
                row |= {"config": str(variant), "shipped": str(int(variant == shipped))}
                try:
                    row["error"] = f"{check(kernel, small, variant, expected):.1e}"
                    t = Time.of(clock.sample(partial(run, kernel, large, variant), 12)[2:])
                    row |= {"ms": f"{t.ms:.4f}", "ms_p20": f"{t.ms_p20:.4f}", "ms_p80": f"{t.ms_p80:.4f}"}
                    rate = num_bytes / t.ms / 1e6
                    row |= {"gbps": f"{rate:.4g}", "roofline_fraction": f"{rate / ceilings.copy_gbps:.3f}"}
                    best = min(best, (t.ms, str(variant)))
                    own = t.ms if variant == shipped else own
                except AssertionError as error:
                    row["note"] = f"WRONG: {error}"
                    wrong += 1
                    print(f"{kernel} {width} {variant}: WRONG: {error}", flush=True)
                except Exception as error:  # a configuration that does not fit the chip is a result too
                    row["note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                    print(f"{kernel} {width} {variant}: {row['note']}", flush=True)
                writer.writerow(row)
                file.flush()
            share = num_bytes / 1e6 / ceilings.copy_gbps
            print(f"{kernel} {width}: shipped {share / own:.3f}, best {share / best[0]:.3f} {best[1]}", flush=True)
    if wrong:
        raise SystemExit(f"{wrong} wrong")


def quoted(argument: str) -> str:
    return f'"{argument}"' if " " in argument else argument


if __name__ == "__main__":
    main()
