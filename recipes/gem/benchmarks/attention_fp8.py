"""FP8 attention on planes of this library against bf16 attention: rows `op=attention_fp8` of precision_h200.csv.

    python recipes/gem/benchmarks/attention_fp8.py --out DIR

Needs gemworks.jagged beside gemworks.precision. Checks first: attention of the dequantised values. Lengths uniform on
[1, max], normal q, k and v, four heads of 128. `tiles`: one scale for 128 rows of a sequence and head, both products on
the FP8 units; `squares`: multiplied out exactly in front of bf16 attention, or (`gemworks_prologue`) as the kernel
loads them; `squares_p`, `squares_ds`, `squares_p_ds`: with P, dS, or both rounded to MXFP8 on the way. `sqnr_db` is
that of the output to bf16 attention's, with direction fwd_bwd the lowest of those of dq, dk and dv.

In bursts of its own bf16 has been slower than beside others (0.81 and 0.71 ms on an H200), and the FP8 kernel has not.
So there are rows of both: of each implementation in bursts of its own (op `attention_fp8`), and of the fast ones in
turns too short for a clock of their own (op `attention_fp8_one_clock`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged import TileSchedule, flash_attention, flash_attention_fp8
from gemworks.precision.attention import head_plane
from gemworks.precision.bench import ceilings
from gemworks.precision.bench_run import SEED, Bench
from gemworks.precision.head_tiles import HeadTiles, head_tiles
from gemworks.precision.probe import sqnr_db
from torch import Tensor

Row = dict[str, object]
ROUNDED = {
    "squares_p": {"quantize_p": True},
    "squares_ds": {"quantize_ds": True},
    "squares_p_ds": {"quantize_p": True, "quantize_ds": True},
}
FAST = (("bf16", "gemworks_bf16"), ("tiles", "gemworks"), ("tiles", "gemworks_with_casts"), ("squares", "gemworks"))


def time_runs(
    bench: Bench,
    runs: Mapping[tuple[str, str], Callable[[], object]],
    flops: float,
    noise: Mapping[str, float],
    facts: Row,
) -> None:
    """A row per run, by format and implementation, timed both ways; ratios are to the first one, which is bf16."""
    replays = {name: bench.capture(run) for name, run in runs.items()}
    fast = {name: replay for name, replay in replays.items() if name in FAST}
    for op, timed, burst_s, num_turns in (
        ("attention_fp8", replays, 0.2, 2),
        ("attention_fp8_one_clock", fast, 0.0, 20),
    ):
        times = bench.time_in_turns(list(timed.values()), [burst_s] * len(timed), num_turns)
        base = times[0][0]
        for i, ((format, impl), (ms, p20, p80)) in enumerate(zip(timed, times, strict=True)):
            bench.add(
                op=op,
                format=format,
                impl=impl,
                ratio_to_bf16=round(base / ms, 4),
                sqnr_db=round(noise[format], 2) if format in noise else "",
                ms=round(ms, 4),
                ms_p20=round(p20, 4),
                ms_p80=round(p80, 4),
                tflops=round(flops / ms / 1e9, 2),
                best_peer="gemworks_bf16:bf16",
                ratio_to_best_peer=round(base / ms, 4),
                clock_mhz=bench.clocks.get(i, ""),
                **facts,
            )
            bench.rows[-1]["command"] = " ".join(["python recipes/gem/benchmarks/attention_fp8.py", *sys.argv[1:]])


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 if the check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/precision_bench"))
    parser.add_argument("--smoke", action="store_true", help="a small batch")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, chosen.smoke or device.type == "cpu")
    ceilings(bench)
    batch, longest, heads, width = (3, 400, 4, 128) if bench.smoke else (128, 2048, 4, 128)
    lengths = torch.randint(1, longest + 1, (batch,), generator=torch.Generator().manual_seed(SEED + 1))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
    total = int(lengths.sum())
    q, k, v = (bench.randn(total + i, heads, width)[:total].clone() for i in range(3))
    schedule = TileSchedule.build(offsets, total_q=total)
    options: dict[str, Any] = {"max_length_q": longest, "schedule": schedule}
    squares = head_plane(q, square=True), head_plane(k, square=True), head_plane(v, square=True)

    def quantise(q: Tensor, k: Tensor, v: Tensor) -> tuple[HeadTiles, HeadTiles, HeadTiles]:
        return head_tiles(q, offsets), head_tiles(k, offsets), head_tiles(v, offsets, transposed=True)

    def fp8(
        tiles: tuple[HeadTiles, HeadTiles, HeadTiles], origins: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> Tensor:
        a, b, c = tiles
        return flash_attention_fp8(
            a.codes, b.codes, c.codes, a.scales, b.scales, c.scales, offsets, origins=origins, **options
        )

    def by_squares(origins: tuple[Tensor, Tensor, Tensor] | None = None, **rounded: Any) -> Tensor:
        a, b, c = squares
        return flash_attention_fp8(
            a.codes, b.codes, c.codes, a.scales, b.scales, c.scales, offsets, origins=origins, **options, **rounded
        )

    tiles = quantise(q, k, v)
    plain = flash_attention(q, k, v, offsets, **options)
    values = [t.dequantize(torch.bfloat16) for t in tiles]
    agreement = sqnr_db(flash_attention(values[0], values[1], values[2], offsets, **options), fp8(tiles))
    print(f"check: {agreement:.1f} dB to attention of the dequantised values", flush=True)
    if not agreement > 28:
        print("CHECK FAILED attention_fp8: not timed", flush=True)
        return 1
    noise = {"tiles": sqnr_db(plain, fp8(tiles)), "squares": sqnr_db(plain, by_squares())}
    noise["squares_p"] = sqnr_db(plain, by_squares(quantize_p=True))
    flops = 4.0 * float((lengths.double() ** 2).sum()) * heads * width
    d_out = bench.randn(total + 3, heads, width)[:total].clone()
    leaves = (q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_())

    def trained(run: Callable[[], Tensor]) -> Callable[[], None]:
        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            run().backward(d_out)

        return step

    def gradients(run: Callable[[], object]) -> list[Tensor]:
        run()
        return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]

    forward: dict[tuple[str, str], Callable[[], object]] = {
        ("bf16", "gemworks_bf16"): lambda: flash_attention(q, k, v, offsets, **options),
        ("tiles", "gemworks"): lambda: fp8(tiles),
        ("tiles", "gemworks_with_casts"): lambda: fp8(quantise(q, k, v)),
        ("squares", "gemworks"): by_squares,
        ("squares", "gemworks_prologue"): lambda: by_squares(prologue=True),
        ("squares_p", "gemworks"): lambda: by_squares(quantize_p=True),
    }
    both: dict[tuple[str, str], Callable[[], object]] = {
        ("bf16", "gemworks_bf16"): trained(lambda: flash_attention(*leaves, offsets, **options)),
        ("tiles", "gemworks_with_casts"): trained(
            lambda: fp8(quantise(leaves[0].detach(), leaves[1].detach(), leaves[2].detach()), leaves)
        ),
        ("squares", "gemworks"): trained(lambda: by_squares(leaves)),
        ("squares", "gemworks_prologue"): trained(lambda: by_squares(leaves, prologue=True)),
        **{
            (format, "gemworks"): trained(lambda flags=flags: by_squares(leaves, **flags))
            for format, flags in ROUNDED.items()
        },
    }
    exact, errors = gradients(both["bf16", "gemworks_bf16"]), dict[str, float]()
    for (format, _), run in both.items():
        if format != "bf16":
            found = [sqnr_db(a, b) for a, b in zip(exact, gradients(run), strict=True)]
            errors[format] = min(found)
            print(f"{format}: dq, dk, dv {', '.join(f'{x:.2f}' for x in found)} dB to those of bf16", flush=True)
    facts: Row = {
        "shape": f"B{batch} max{longest}", "law": "uniform", "mean_len": round(total / batch, 1),
        "max_len": int(lengths.max()), "bwd_factor": 2.5,
    }  # fmt: skip
    time_runs(bench, forward, flops, noise, facts | {"direction": "fwd"})
    time_runs(bench, both, 3.5 * flops, errors, facts | {"direction": "fwd_bwd"})
    bench.path = chosen.out / "attention_fp8.csv"
    bench.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
