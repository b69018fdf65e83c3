"""Times the configurations of the BlockAttention kernels on a GPU, each compared with one of another language first.

    python libs/jagged/benchmarks/block_variants.py --shard 3/8    # beforehand: compiles a share of them
    python libs/jagged/benchmarks/block_variants.py --out block_variants.csv
    python libs/jagged/benchmarks/block_variants.py --block 128 --direction fwd --out block_variants_128.csv

What wins belongs into `block_config` or `gluon_config` of gemworks/jagged/ops/block_attention/launch.py.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged import BlockSchedule, Rope, offsets_from_lengths
from gemworks.jagged.bench import report
from gemworks.jagged.bench.bandwidth import assert_near
from gemworks.jagged.bench.blocks import SEED, Shape, block_lengths
from gemworks.jagged.bench.timing import Clock, Time, measure_ceilings
from gemworks.jagged.ops.block_attention.formulas import BlockArgs
from torch import Tensor

COLUMNS: tuple[str, ...] = (
    *("op", "shape", "head_dim", "direction", "impl", "tables", "setting", "error", "note"),
    *report.COLUMNS[report.COLUMNS.index("dtype") :],
)
SHOWN = ("op", "direction", "tables", "setting", "ms", "gbps", "roofline_fraction", "error", "note")
Runner = Callable[[], list[Tensor]]


class Batch:
    """q, k, v, dO of 4 heads of 128, views of one projection, and what the kernels write into."""

    def __init__(self, lengths: Tensor, heads: int, width: int, block: int, tail: int = 0) -> None:
        self.block = block
        generator = torch.Generator("cuda").manual_seed(0)
        self.offsets, self.total = offsets_from_lengths(lengths).cuda(), int(lengths.sum()) + tail
        self.table = BlockSchedule.make(self.offsets, total=self.total, block=block).table_S3
        shape = (self.total, 3 * heads, width)
        qkv = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.qkv, self.grad = qkv, torch.empty_like(qkv)
        self.q, self.k, self.v = qkv.split(heads, dim=1)
        self.dq, self.dk, self.dv = self.grad.split(heads, dim=1)
        self.dout = torch.randn(self.total, heads, width, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.out = torch.empty_like(self.dout)
        self.tables = Rope(time_fraction=0.0).tables(self.offsets, width, total=self.total)

    def args(self, rope: torch.dtype | None, norm: bool, causal: bool = False) -> BlockArgs:
        cos, sin = (None, None) if rope is None else (self.tables.cos_TJ.to(rope), self.tables.sin_TJ.to(rope))
        return BlockArgs(self.table, cos, sin, self.q.shape[2] ** -0.5, self.block, causal, norm, 1e-6)

    def runner(self, direction: str, args: BlockArgs, config: Any) -> Runner:
        from gemworks.jagged.ops.block_attention import launch

        if direction == "fwd":

            def forward() -> list[Tensor]:
                launch.block_attention_forward(self.q, self.k, self.v, args, out=self.out, config=config)
                return [self.out]

            return forward
        grads = (self.dq, self.dk, self.dv)

        def backward() -> list[Tensor]:
            launch.block_attention_backward(self.dout, self.q, self.k, self.v, *grads, args, config=config)
            return list(grads)

        return backward


def configs(block: int, direction: str, rope: bool, norm: bool) -> list[Any]:
    """The shipped one first."""
    from gemworks.jagged.ops.block_attention.launch import BlockConfig, block_config, gluon_config

    name: Any = "forward" if direction == "fwd" else "backward"
    plain = block_config(block, name, dtype=torch.bfloat16, group=1, rope=rope, qk_norm=norm)
    shipped = gluon_config(block, name)
    if block == 128:  # 128 registers a thread let two programs of eight warps onto a multiprocessor
        caps, others = (None, 128) if direction == "fwd" else (None,), [plain, BlockConfig(16)]
        others += [BlockConfig(8, 128)] if direction == "fwd" else []
        return list(dict.fromkeys([shipped, *(BlockConfig(8, cap, gluon=True) for cap in caps), *others]))
    caps = (128, 168) if direction == "fwd" else (168, None)
    return list(dict.fromkeys([shipped, plain, *(BlockConfig(4, cap, gluon=True) for cap in caps)]))


def compare(batch: Batch, direction: str, args: BlockArgs, config: Any, other: Any) -> float:
    """Relative error of `config` against another one, everything written."""

    def results(config: Any) -> list[Tensor]:
        for x in (batch.out, batch.grad):
            x.fill_(float("nan"))
        return [x.clone() for x in batch.runner(direction, args, config)()]

    worst = 0.0
    for got, exact in zip(results(config), results(other), strict=True):
        assert bool(got.isfinite().all()), "not everything was written, or not finite"
        assert_near(got, exact, direction)
        worst = max(worst, float((got.float() - exact.float()).norm() / exact.float().norm()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("block_variants.csv"))
    parser.add_argument("--shard", default="", metavar="I/N")
    parser.add_argument("--block", type=int, choices=(64, 128), default=64)
    parser.add_argument("--direction", action="append", choices=("fwd", "bwd"), help="only this; both by default")
    args = parser.parse_args()
    block = args.block
    small = Batch(torch.tensor([0, 1, 63, 64, 65, 0, 200, 640, 3]), 4, 128, block, tail=70)
    fronts = ((None, False), (torch.float16, False), (torch.float32, False), (torch.float16, True))
    everything = [
        (direction, rope, norm, config)
        for direction, (rope, norm) in itertools.product(args.direction or ("fwd", "bwd"), fronts)
        for config in configs(block, direction, rope is not None, norm)
    ]
    if args.shard:
        index, count = map(int, args.shard.split("/"))
        for direction, rope, norm, config in everything[index::count]:
            small.runner(direction, small.args(rope, norm), config)()
        torch.cuda.synchronize()
        return
    device = torch.device("cuda")
    clock = Clock(device)
    ceilings = measure_ceilings(clock, device)
    print(f"copy {ceilings.copy_gbps:.0f} GB/s", flush=True)
    common = report.Context(ceilings, device, torch.bfloat16, ()).columns()
    common["command"] = " ".join(["python libs/jagged/benchmarks/block_variants.py", *sys.argv[1:]])
    shape = Shape()
    lengths = block_lengths(shape.num_sequences, shape.max_length)
    batch = Batch(lengths, shape.num_heads, shape.head_dim, block)
    common |= {"shape": f"B{shape.num_sequences} max{shape.max_length} block{block}", "head_dim": str(shape.head_dim)}
    common |= {"impl": report.OURS, "law": "mean70", "mean_len": f"{lengths.double().mean():.1f}", "seed": str(SEED)}
    common["max_len"] = str(int(lengths.max()))
    with args.out.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for direction, rope, norm, config in everything:
            # Gluon is compared with plain Triton, and that with what is shipped.
            known = configs(block, direction, rope is not None, norm)
            other = next(c for c in known if c.gluon != config.gluon)
            moved = (4 if direction == "fwd" else 7) * batch.dout.numel() * 2
            moved += 0 if rope is None else 2 * batch.tables.cos_TJ.numel() * rope.itemsize
            front = "norm rope" if norm else "rope" if rope else "plain"
            row = common | {"op": f"block_attention {front}", "direction": direction, "setting": str(config)}
            row["tables"] = "" if rope is None else str(rope).removeprefix("torch.")
            settings = batch.args(rope, norm)
            try:
                compare(small, direction, small.args(rope, norm), config, other)
                row["error"] = f"{compare(batch, direction, settings, config, other):.1e}"
                t = Time.of(clock.sample(batch.runner(direction, settings, config), 10)[2:])
                row |= {"ms": f"{t.ms:.4f}", "ms_p20": f"{t.ms_p20:.4f}", "ms_p80": f"{t.ms_p80:.4f}"}
                rate = moved / t.ms / 1e6
                row |= {"gbps": f"{rate:.4g}", "roofline_fraction": f"{rate / ceilings.copy_gbps:.3f}"}
            except Exception as error:  # a configuration that does not fit the chip is a result too
                row["note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            writer.writerow(row)
            file.flush()
            print("  ".join(row.get(c, "") for c in SHOWN), flush=True)


if __name__ == "__main__":
    main()
