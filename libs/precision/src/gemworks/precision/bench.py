"""`python -m gemworks.precision.bench --out DIR`: correctness first, then ceilings, casts, norms and linear layers, as
CSV.

On a GPU everything below runs; on a CPU the same code runs at toy sizes (`--smoke` is implied), so that the script
itself is tested. A check that fails is printed, its op is not timed, and the exit status is 1. `--tune` tries tile
sizes of the casts instead and writes `tune.json`. Random normal data, seed printed; medians and 20/80 % quantiles.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gemworks.precision.activation import activation_cast
from gemworks.precision.attention import head_plane
from gemworks.precision.backends import PrecisionCostWarning, device_spec
from gemworks.precision.bench_checks import run_checks
from gemworks.precision.bench_fused import bench_fused, bench_mlp
from gemworks.precision.bench_host import bench_host
from gemworks.precision.bench_linear import bench_linear, bench_norm_linear, bench_parts
from gemworks.precision.bench_plot import plot
from gemworks.precision.bench_run import (
    KINDS,
    SEED,
    Bench,
    attempt,
    compiled,
    time_bytes,
    triton_version,
)
from gemworks.precision.casts import CastSpec, cast, cast_both
from gemworks.precision.norm import norm_cast
from gemworks.precision.projection import project_heads
from gemworks.precision.recipe import GemmKind
from torch import Tensor, nn

PARTS = (
    "checks", "casts", "norms", "activations", "projection", "host", "linear", "fused", "mlp", "parts", "norm_linear",
)  # fmt: skip


def ceilings(bench: Bench) -> None:
    """Measured copy bandwidth and bf16 matmul rate of this run."""
    num = 2**18 if bench.smoke else 2**30
    source = torch.empty(num, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    ms, *_ = bench.time(lambda: target.copy_(source))
    bench.copy_gbps = 2 * num / ms / 1e6
    n = 128 if bench.smoke else 8192
    a, b = bench.randn(n, n), bench.randn(n, n).t()
    ms, *_ = bench.time_graph(lambda: a @ b)
    bench.bf16_tflops = 2 * n**3 / ms / 1e9
    print(f"ceilings: copy {bench.copy_gbps:.0f} GB/s, bf16 {bench.bf16_tflops:.1f} TFLOP/s, seed {SEED}", flush=True)


def copy_time(bench: Bench, shape: tuple[int, int], per_element: int) -> float:
    """Milliseconds of a copy that reads and writes `per_element` bytes an element; a row of its own."""
    num_bytes = math.prod(shape) * per_element
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    name = f"{per_element} bytes an element"
    return time_bytes(bench, "copy", shape, name, "torch", lambda: target.copy_(source), num_bytes)


def bench_casts(bench: Bench) -> None:
    """Each cast against the copy bandwidth of this run, which is that of 2 GiB, and against a copy of as many bytes as
    it moves: short kernels reach less. The row-wise one against torch.compile of the reference."""
    shapes = [(262144, 512), (262144, 1024), (262133, 1024), (131072, 4096), (8192, 8192)]
    if bench.smoke:
        shapes = [(64, 256)]
    for m, k in shapes:
        x = bench.randn(m, k)
        copies = {per_element: copy_time(bench, (m, k), per_element) for per_element in (3, 4)}
        for kind in KINDS:
            spec = CastSpec(kind)
            planes = m * k * (1 + 1 / (32 if kind is GemmKind.MXFP8 else 128))
            runs: list[tuple[str, Callable[[], object], float]] = [
                ("cast_rows", lambda x=x, s=spec: cast(x, 1, s), planes),
                ("cast_columns", lambda x=x, s=spec: cast(x, 0, s), planes),
                ("cast_both", lambda x=x, s=spec: cast_both(x, s), 2 * planes),
                ("cast_square", lambda x=x, s=spec: cast(x, None, s), m * k),
            ]
            for op, run, written in runs:
                num_bytes, per_element = 2 * m * k + written, 4 if op == "cast_both" else 3
                copy_ms = copies[per_element] * num_bytes / (per_element * m * k)
                time_bytes(bench, op, (m, k), kind.value, "gemworks", run, num_bytes, copy_ms)
        if bench.peers and (m, k) == (262144, 1024):
            from gemworks.precision.quantization import quantize

            made = compiled(lambda t: (lambda q: (q.codes, q.scales))(quantize(t, 1)))
            attempt("torch.compile of the reference", lambda x=x, c=made, m=m, k=k: time_bytes(
                bench, "cast_rows", (m, k), "mxfp8", "torch_compile", lambda: c(x), m * k * (3 + 1 / 32)
            ))  # fmt: skip


def bench_norms(bench: Bench) -> None:
    """RMSNorm with residual and both casts in one kernel, against the same in three steps."""
    shapes = [(64, 256)] if bench.smoke else [(262144, 512), (262144, 1024), (65536, 4096)]
    for m, k in shapes:
        x, residual, w = bench.randn(m, k), bench.randn(m + 16, k)[:m], bench.randn(k)
        for kind in KINDS:
            spec = CastSpec(kind)
            # Reads x and residual, writes the sum and both planes.
            num_bytes = m * k * (6 + 2 * (1 + 1 / (32 if kind is GemmKind.MXFP8 else 128)))
            fused = lambda x=x, r=residual, w=w, s=spec: norm_cast(x, w, s, residual=r)  # noqa: E731

            def parts(x: Tensor = x, r: Tensor = residual, w: Tensor = w, s: CastSpec = spec) -> object:
                return cast_both(nn.functional.rms_norm(x + r, w.shape, w, 1e-6), s)

            time_bytes(bench, "norm_cast", (m, k), kind.value, "gemworks", fused, num_bytes)
            time_bytes(bench, "norm_cast", (m, k), kind.value, "unfused", parts, num_bytes)


def bench_activations(bench: Bench) -> None:
    """GELU and both casts in one kernel, against the same in two steps."""
    m, k = (64, 256) if bench.smoke else (262144, 1024)
    x = bench.randn(m, k)
    for kind in KINDS:
        spec = CastSpec(kind)
        num_bytes = m * k * (2 + 2 * (1 + 1 / (32 if kind is GemmKind.MXFP8 else 128)))
        fused = lambda x=x, s=spec: activation_cast(x, s, "gelu_tanh")  # noqa: E731
        parts = lambda x=x, s=spec: cast_both(nn.functional.gelu(x, approximate="tanh"), s)  # noqa: E731
        time_bytes(bench, "gelu_cast", (m, k), kind.value, "gemworks", fused, num_bytes)
        time_bytes(bench, "gelu_cast", (m, k), kind.value, "unfused", parts, num_bytes)


def bench_projection(bench: Bench) -> None:
    """q, k, v of four heads of 128 with the cast of q and k in the epilogue, against cuBLAS and a cast behind it."""
    m, k, heads, width = (64, 64, 6, 32) if bench.smoke else (262144, 512, 12, 128)
    coded = heads * 2 // 3
    x, w = bench.randn(m, k), bench.randn(heads * width, k) / k**0.5

    def parts() -> object:
        y = nn.functional.linear(x, w).view(m, heads, width)
        return head_plane(y[:, :coded].contiguous(), square=False)

    rows: list[tuple[str, Callable[[], object]]] = [
        ("gemworks", lambda: project_heads(x, w, width, coded)), ("unfused", parts)
    ]  # fmt: skip
    times = {impl: bench.time_graph(run) for impl, run in rows}
    for impl, (ms, p20, p80) in times.items():
        tflops = 2.0 * m * k * heads * width / ms / 1e9
        bench.add(
            op="project_heads",
            shape=f"{m}x{k}x{heads * width}",
            format="head-wide",
            direction="fwd",
            impl=impl,
            ms=round(ms, 4),
            ms_p20=round(p20, 4),
            ms_p80=round(p80, 4),
            tflops=round(tflops, 2),
            roofline_fraction=round(tflops / bench.bf16_tflops, 4),
            best_peer="unfused",
            ratio_to_best_peer=round(times["unfused"][0] / ms, 4),
        )


def tune(bench: Bench, out: Path, which: str, warm: bool) -> None:
    """Try the tiles named in `tiles` and write the times, best first; the shipped table is then edited by hand.

    `which`: only ops whose name, with a bar behind it, contains one of these words, separated by commas. `warm`
    compiles the kernels on a small matrix and times nothing: run that for several words at once, and the timing run
    finds its kernels compiled.
    """
    from gemworks.precision import activation, tiles, triton_casts, triton_norm
    from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS, TileConfig

    results: dict[str, list[tuple[float, str]]] = {}
    both = ALONG_ROWS | ALONG_COLUMNS
    saved = triton_casts.tile_config, triton_norm.fused_tile_config, activation.fused_tile_config
    saved_squares = triton_casts.square_config
    for kind in KINDS:
        spec = CastSpec(kind)
        share = 1 + 1 / (32 if kind is GemmKind.MXFP8 else 128)
        for k in (512, 1024, 4096):
            m = 256 if bench.smoke or warm else min(262144, 2**28 // k)
            x, w, residual = bench.randn(m, k), bench.randn(k), bench.randn(m + 16, k)[:m]

            def candidates(directions: int, kind: GemmKind = kind, spec: CastSpec = spec) -> list[TileConfig]:
                return tiles.tile_candidates(spec.block, spec.regroups, directions)

            jobs: list[tuple[str, list[TileConfig], float, Callable[[], object]]] = []
            if k == 1024:
                rows, columns = candidates(ALONG_ROWS), candidates(ALONG_COLUMNS)
                jobs += [
                    ("cast_rows", rows, 2 + share, lambda x=x, s=spec: cast(x, 1, s)),
                    ("cast_columns", columns, 2 + share, lambda x=x, s=spec: cast(x, 0, s)),
                    ("cast_both", candidates(both), 2 + 2 * share, lambda x=x, s=spec: cast_both(x, s)),
                    (
                        "cast_square", tiles.square_candidates(spec.block, spec.regroups), 3,
                        lambda x=x, s=spec: cast(x, None, s),
                    ),
                    (
                        "gelu_cast", candidates(both), 2 + 2 * share,
                        lambda x=x, s=spec: activation_cast(x, s, "gelu_tanh"),
                    ),
                ]  # fmt: skip
            jobs.append(
                (
                    f"norm_cast{k}",
                    candidates(both),
                    6 + 2 * share,
                    lambda x=x, w=w, s=spec, r=residual: norm_cast(x, w, s, residual=r),
                )
            )
            for name, tried, per_element, run in jobs:
                op = f"{name} {kind.value}"
                if which and not any(word in f"{op}|" for word in which.split(",")):
                    continue
                times: list[tuple[float, str]] = []
                for candidate in tried:
                    triton_casts.tile_config = lambda *_, c=candidate: c
                    triton_norm.fused_tile_config = lambda *_, c=candidate: c
                    activation.fused_tile_config = lambda *_, c=candidate: c
                    triton_casts.square_config = lambda *_, c=candidate: c
                    what = " ".join(map(str, (*vars(candidate).values(),)))
                    job = run if warm else lambda r=run, t=times, c=what: t.append((bench.time(r)[0], c))
                    attempt(f"{op} {what}", job)
                triton_casts.tile_config, triton_norm.fused_tile_config, activation.fused_tile_config = saved
                triton_casts.square_config = saved_squares
                results[op] = sorted(times)
                for ms, what in sorted(times):
                    fraction = m * k * per_element / ms / 1e6 / bench.copy_gbps
                    print(f"tune {op}: {ms:.4f} ms {fraction:.3f} of copy: {what}", flush=True)
    (out / "tune.json").write_text(json.dumps(results, indent=1))


def write(bench: Bench, path: Path) -> None:
    """The CSV, and a plot where matplotlib is installed."""
    bench.save()
    print(f"wrote {path}: {len(bench.rows)} rows", flush=True)
    try:
        drawn = plot([{k: str(v) for k, v in row.items()} for row in bench.rows], path.with_suffix(".png"))
    except ImportError:
        print("no plot: matplotlib is not installed", flush=True)
    else:
        print(f"wrote {path.with_suffix('.png')}" if drawn else "no plot: nothing to draw was timed", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 0 if every check passed."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.precision.bench", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/precision_bench"), help="folder for CSV, plot, tune.json"
    )
    parser.add_argument("--smoke", action="store_true", help="toy sizes")
    parser.add_argument(
        "--tune", nargs="?", const="", help="also time candidate tiles (of ops whose name contains this)"
    )
    parser.add_argument("--peers", action="store_true", help="also peers that compile for long (torch.compile)")
    parser.add_argument("--warm", action="store_true", help="with --tune: compile the candidates, time nothing")
    parser.add_argument("--only", default="", help=f"comma-separated parts of {','.join(PARTS)}")
    parser.add_argument("--shape", default="", help="of the linear parts, only shapes MxKxN that contain one of these")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, chosen.smoke or device.type == "cpu")
    path = bench.path = chosen.out / ("precision_cpu_smoke.csv" if bench.smoke else "precision_h200.csv")
    parts = set(filter(None, chosen.only.split(","))) or set(PARTS)
    if not parts <= set(PARTS):
        parser.error(f"--only: unknown parts {sorted(parts - set(PARTS))}, expected some of {PARTS}")
    bench.only, bench.peers = chosen.shape, chosen.peers and device.type == "cuda"
    print(f"device {device_spec(device)}, torch {torch.__version__}, triton {triton_version() or '-'}", flush=True)
    import warnings

    warnings.filterwarnings("ignore", category=PrecisionCostWarning)
    failures = run_checks(device, bench.smoke) if "checks" in parts else {}
    for op, problem in failures.items():
        print(f"CHECK FAILED {op}: {problem}", flush=True)
    if not chosen.warm:
        ceilings(bench)
    jobs: dict[str, tuple[Callable[[Bench], None], tuple[str, ...]]] = {
        "casts": (bench_casts, ("cast",)),
        "norms": (bench_norms, ("cast", "norm")),
        "activations": (bench_activations, ("cast", "activation")),
        "projection": (bench_projection, ("cast", "projection")),
        "host": (bench_host, ("cast", "gemm", "linear")),
        "linear": (bench_linear, ("cast", "gemm", "linear")),
        "fused": (bench_fused, ("cast", "norm", "activation", "gemm", "linear")),
        "mlp": (bench_mlp, ("cast", "activation", "gemm", "linear")),
        "parts": (bench_parts, ("cast", "gemm")),
        "norm_linear": (bench_norm_linear, ("cast", "norm", "gemm", "linear")),
    }
    if chosen.tune is not None and not failures:
        tune(bench, chosen.out, chosen.tune, chosen.warm)
        return 0
    wanted = {part: jobs[part] for part in jobs if part in parts}
    for number, (part, (job, needs)) in enumerate(wanted.items(), 1):
        print(f"[{number}/{len(wanted)}] {part}", flush=True)
        broken = [op for op in failures if op.split(":")[0] in needs]
        if broken:
            print(f"not timed: {part}, as {broken} failed", flush=True)
            continue
        job(bench)
        write(bench, path)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
