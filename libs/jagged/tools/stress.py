"""The same attention again and again, bit for bit, while the device is kept busy with other things.

    python libs/jagged/tools/stress.py --seconds 20 --contend products
    python libs/jagged/tools/stress.py --seconds 20 --contend same --launch plain --forward separate

Everything that `flash_attention` and `gdpa` return is a function of their arguments, to the bit, however the device is
shared and however far the host runs ahead. So each repeat is compared with the first one, on the device and without
waiting, over several batches in turn whose memory is reused. Prints a line per op, and exits with 1 if any repeat
differed. These provoke:

    --contend products   another process: matrix products, memory that is taken and given back
    --contend same       another process: this program, without anything beside it
    --beside N           products on N other streams of this process, so that programs of a kernel start at
                         different times
    --programs           grids of 20 to 300 programs in turn, in place of one per multiprocessor
    --lag MS             the device sleeps before every step: the host is that far ahead of it
    --poison             ones (NaN, -1) in the free memory before every call: shows reads of what nobody wrote

and these take one suspect away each:

    --launch plain       Triton's own launcher in place of `quick`
    --dispatch torch     every call through torch's dispatcher
    --forward separate   a signal each for K and V, tiles that are not chained
    --backward split     two kernels of dQ and dK, dV in place of the fused one
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from gemworks.jagged import flash_attention, gdpa, offsets_from_lengths
from gemworks.jagged.ops.attention_core import table
from torch import Tensor

NAMES = ("out", "dq", "dk", "dv")
HEADS, WIDTH = 4, 128
CYCLES_PER_MS = 2_000_000  # a little more than devices make
# Another process: products of changing sizes, and memory that is taken and given back.
OTHER = """
import torch
x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
n = 0
while True:
    n += 1
    y = x[: 256 + 64 * (n % 120)] @ x
    z = torch.empty((n % 64) << 20, device="cuda").fill_(float(n))
    if n % 50 == 0:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
"""
Step = Callable[[], list[Tensor]]


def poison(num_bytes: int = 6 << 30) -> None:
    """Leaves 0xFF in memory that the next calls get, in blocks of the sizes that they ask for."""
    blocks = [
        torch.empty(n, dtype=torch.uint8, device="cuda") for n in [1 << 20] * 64 + [256 << 20] * (num_bytes >> 28)
    ]
    small = [torch.empty(512 * (1 + n % 64), dtype=torch.uint8, device="cuda") for n in range(2048)]
    for block in blocks + small:
        block.fill_(255)


class Beside:
    """Products on other streams, of sizes that change; they take multiprocessors away while a kernel starts."""

    def __init__(self, number: int) -> None:
        self.streams = [torch.cuda.Stream(priority=-1) for _ in range(number)]
        self.x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) if number else None
        torch.cuda.synchronize()  # the other streams read it
        self.sizes = itertools.cycle(range(256, 8192, 328))

    def start(self) -> None:
        for stream in self.streams:
            assert self.x is not None
            with torch.cuda.stream(stream):
                self.x[: next(self.sizes)] @ self.x  # pyright: ignore[reportUnusedExpression]


def change_grids() -> None:
    """Gives every launch another number of programs: results must not depend on it."""
    from gemworks.jagged.ops.attention_core import launch_hopper
    from gemworks.jagged.ops.attention_fp8 import launch as launch_fp8
    from gemworks.jagged.ops.gdpa import launch_epilogue

    numbers = itertools.cycle([132, 20, 300, 131, 97, 264, 60])
    for module in (launch_hopper, launch_epilogue, launch_fp8):
        module.num_multiprocessors = lambda device: next(numbers)  # pyright: ignore[reportAttributeAccessIssue]


def start_other(kind: str) -> subprocess.Popen[bytes] | None:
    if kind == "products":
        return subprocess.Popen([sys.executable, "-c", OTHER])
    if kind == "same":
        return subprocess.Popen([sys.executable, __file__, "--seconds", "600"], stdout=subprocess.DEVNULL)
    return None


def without_suspects(args: argparse.Namespace) -> None:
    """Puts the slower, older way in the place of each suspect that the options name."""
    if args.launch == "plain":
        from gemworks.jagged._triton.quick import Quick

        Quick.__getitem__ = lambda self, grid: self.kernel[grid]
    if args.dispatch == "torch":
        from gemworks.jagged import _custom_op

        _custom_op._is_watched = lambda: True
    if args.forward == "separate":
        choose = table.choose

        def separate(step: Any, shape: Any, architecture: str) -> Any:
            config = choose(step, shape, architecture)
            if isinstance(config, table.GluonConfig):
                return replace(config, one_release=False, chained=False)
            return config

        table.choose = separate
    if args.backward == "split":
        table.choose_fused = lambda shape, architecture: None


def steps(batch: int, max_length: int, seed: int) -> dict[str, Step]:
    """op -> forward and backward on one batch of uniform lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_length + 1, (batch,), generator=generator)
    offsets, total = offsets_from_lengths(lengths).cuda(), int(lengths.sum())
    on_device = torch.Generator("cuda").manual_seed(seed)
    q, k, v, d_out = (torch.randn(total, HEADS, WIDTH, generator=on_device, device="cuda").bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both(attend: Callable[..., Tensor], **options: Any) -> list[Tensor]:
        out = attend(*leaves, offsets, max_length_q=max_length, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    return {
        "flash_attention": lambda: both(flash_attention),
        "gdpa fast_gelu": lambda: both(gdpa, scale=WIDTH**-0.5, activation="fast_gelu"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=3, help="different ones, in turn")
    parser.add_argument("--seconds", type=float, default=20.0, help="of repeats, after the first results")
    parser.add_argument("--contend", choices=("nobody", "products", "same"), default="nobody")
    parser.add_argument("--beside", type=int, default=0, metavar="N")
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--lag", type=float, default=0.0, metavar="MS")
    parser.add_argument("--launch", choices=("quick", "plain"), default="quick")
    parser.add_argument("--dispatch", choices=("direct", "torch"), default="direct")
    parser.add_argument("--forward", choices=("shipped", "separate"), default="shipped")
    parser.add_argument("--backward", choices=("shipped", "split"), default="shipped")
    parser.add_argument("--poison", action="store_true")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: it is about what devices do")
    without_suspects(args)
    cases = [steps(args.batch_size, args.max_length, seed) for seed in range(args.batches)]
    first = [{op: step() for op, step in case.items()} for case in cases]
    torch.cuda.synchronize()
    if args.programs:
        change_grids()
    beside = Beside(args.beside)
    different = {op: torch.zeros(len(NAMES), dtype=torch.int64, device="cuda") for op in cases[0]}
    not_finite = dict.fromkeys(different, torch.zeros((), dtype=torch.int64, device="cuda"))
    other = start_other(args.contend)
    repeats, end = 0, time.monotonic() + args.seconds
    try:
        while time.monotonic() < end:
            for case, expected in zip(cases, first, strict=True):
                for op, step in case.items():
                    if args.poison:
                        poison()
                    if args.lag:
                        torch.cuda._sleep(int(args.lag * CYCLES_PER_MS))
                    beside.start()
                    found = step()
                    different[op] += torch.stack([(a != b).any() for a, b in zip(found, expected[op], strict=True)])
                    not_finite[op] = not_finite[op] + torch.stack([~x.isfinite().all() for x in found]).any()
            repeats += args.batches
            if repeats % (8 * args.batches) == 0:  # the host may run ahead, but not for ever
                torch.cuda.synchronize()
        torch.cuda.synchronize()
    finally:
        if other is not None:
            other.kill()
            other.wait()
    total = 0
    for op, counts in different.items():
        total += sum(counts.tolist())
        facts = "  ".join(f"{name} {n}" for name, n in zip(NAMES, counts.tolist(), strict=True))
        print(f"{op}: of {repeats} repeats differed: {facts}; not finite: {int(not_finite[op])}", flush=True)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
