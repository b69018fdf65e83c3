"""`python -m gemworks.precision.bench --out DIR`: correctness first, then ceilings, casts, norms and linear layers, as
CSV.

On a GPU everything below runs; on a CPU the same code runs at toy sizes (`--smoke` is implied), so that the script
itself
is tested. A check that fails is printed, its op is not timed, and the exit status is 1. `--tune` also tries tile sizes
of
the cast kernels and writes `tune.json`. Random normal data, seed printed; medians and 20/80 % quantiles.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gemworks.precision.activation import activation_cast
from gemworks.precision.backends import PrecisionCostWarning, device_spec
from gemworks.precision.bench_checks import run_checks
from gemworks.precision.casts import CastSpec, cast, cast_both
from gemworks.precision.gemms import gemm
from gemworks.precision.linear import mx_linear
from gemworks.precision.norm import mx_norm_linear, norm_cast
from gemworks.precision.probe import sqnr_db
from gemworks.precision.recipe import GemmKind, recipe
from torch import Tensor, nn

LEADING = ("op", "shape", "format", "direction", "impl", "ratio_to_bf16", "sqnr_db")
COMMON = (
    "dtype", "law", "mean_len", "max_len", "seed", "ms", "ms_p20", "ms_p80", "tflops", "gbps", "bwd_factor",
    "roofline_fraction", "best_peer", "ratio_to_best_peer", "copy_gbps", "bf16_tflops", "gpu", "num_gpus", "clock_mhz",
    "command", "commit", "torch", "triton",
)  # fmt: skip
KINDS = tuple(kind for kind in GemmKind if kind is not GemmKind.BF16)
KINDS_TUNED = (GemmKind.MXFP8, GemmKind.FP8_BLOCK128, GemmKind.MXFP8_REGROUP128)
SEED = 0


@dataclass
class Bench:
    """One run: its device, ceilings and rows."""

    device: torch.device
    smoke: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    copy_gbps: float = 0.0
    bf16_tflops: float = 0.0

    def time(self, run: Callable[[], object]) -> tuple[float, float, float]:
        """Median, 20 % and 80 % quantile in milliseconds."""
        if self.device.type == "cuda":
            from triton.testing import do_bench

            values = do_bench(run, quantiles=[0.5, 0.2, 0.8])
            assert isinstance(values, list | tuple)
            return float(values[0]), float(values[1]), float(values[2])
        times = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times), min(times), max(times)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal data of the run's seed."""
        generator = torch.Generator(self.device).manual_seed(SEED + sum(shape))
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)

    def add(self, **row: Any) -> None:
        """Append a row with the columns that all rows share, and show it."""
        base: dict[str, Any] = dict.fromkeys((*LEADING, *COMMON), "")
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        base.update(dtype="bf16", law="normal", seed=SEED, bwd_factor=2, gpu=gpu, num_gpus=1, torch=torch.__version__)
        base.update(
            copy_gbps=round(self.copy_gbps, 1), bf16_tflops=round(self.bf16_tflops, 2), clock_mhz=clock_mhz(self.device)
        )
        base.update(
            command=" ".join(["python -m gemworks.precision.bench", *sys.argv[1:]]),
            commit=commit(),
            triton=triton_version(),
        )
        unknown = set(row) - set(base)
        if unknown:
            raise AssertionError(f"columns that no file has: {unknown}")
        base.update(row)
        self.rows.append(base)
        shown = {
            k: row[k]
            for k in (*LEADING, "ms", "tflops", "gbps", "roofline_fraction", "best_peer", "ratio_to_best_peer")
            if k in row
        }
        print("  ".join(f"{k}={v}" for k, v in shown.items()), flush=True)


def triton_version() -> str:
    """Triton's version, empty if it is not installed."""
    try:
        import triton
    except ImportError:
        return ""
    return triton.__version__


def commit() -> str:
    """The commit of the working tree, or of the environment variable GEMWORKS_COMMIT where there is no git."""
    named = os.environ.get("GEMWORKS_COMMIT")
    if named:
        return named
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def clock_mhz(device: torch.device) -> Any:
    """Current SM clock, empty where it can't be read."""
    if device.type != "cuda":
        return ""
    try:
        return torch.cuda.clock_rate(device)
    except (RuntimeError, ModuleNotFoundError):
        return ""


def ceilings(bench: Bench) -> None:
    """Measured copy bandwidth and bf16 matmul rate of this run."""
    num = 2**18 if bench.smoke else 2**30
    source = torch.empty(num, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    ms, *_ = bench.time(lambda: target.copy_(source))
    bench.copy_gbps = 2 * num / ms / 1e6
    n = 128 if bench.smoke else 8192
    a, b = bench.randn(n, n), bench.randn(n, n).t()
    ms, *_ = bench.time(lambda: a @ b)
    bench.bf16_tflops = 2 * n**3 / ms / 1e9
    print(f"ceilings: copy {bench.copy_gbps:.0f} GB/s, bf16 {bench.bf16_tflops:.1f} TFLOP/s, seed {SEED}", flush=True)


def bench_casts(bench: Bench) -> None:
    """Each cast against copy bandwidth, and the row-wise one against torch.compile of the reference."""
    shapes = [(64, 256)] if bench.smoke else [(262144, 512), (262144, 1024), (131072, 4096), (8192, 8192)]
    for m, k in shapes:
        x = bench.randn(m, k)
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
                time_bytes(bench, op, (m, k), kind.value, "gemworks", run, 2 * m * k + written)
        if bench.device.type == "cuda" and (m, k) == (262144, 1024):
            from gemworks.precision.quantization import quantize

            compiled = torch.compile(lambda t: (lambda q: (q.codes, q.scales))(quantize(t, 1)))
            attempt("torch.compile of the reference", lambda x=x, c=compiled, m=m, k=k: time_bytes(
                bench, "cast_rows", (m, k), "mxfp8", "torch_compile", lambda: c(x), m * k * (3 + 1 / 32)
            ))  # fmt: skip


def time_bytes(
    bench: Bench, op: str, shape: tuple[int, int], format: str, impl: str, run: Callable[[], object], num_bytes: float
) -> float:
    """One bandwidth row; returns milliseconds."""
    ms, p20, p80 = bench.time(run)
    gbps = num_bytes / ms / 1e6
    bench.add(
        op=op,
        shape="x".join(map(str, shape)),
        format=format,
        direction="fwd",
        impl=impl,
        ms=round(ms, 4),
        ms_p20=round(p20, 4),
        ms_p80=round(p80, 4),
        gbps=round(gbps, 1),
        roofline_fraction=round(gbps / bench.copy_gbps, 4),
    )
    return ms


def attempt(what: str, run: Callable[[], object]) -> None:
    """Run a peer; if it can't, say why instead of leaving it out in silence."""
    try:
        run()
    except Exception as error:  # a peer's failure of any kind must not end the run
        print(f"not run: {what}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def bench_norms(bench: Bench) -> None:
    """RMSNorm with residual and both casts in one kernel, against the same in three steps."""
    shapes = [(64, 256)] if bench.smoke else [(262144, 512), (262144, 1024), (65536, 4096)]
    for m, k in shapes:
        x, residual, w = bench.randn(m, k), bench.randn(m, k), bench.randn(k)
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


def linear_run(x: Tensor, w: Tensor, dy: Tensor, forward: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
    """A closure that runs forward and backward once."""

    def run() -> None:
        x.grad = w.grad = None
        forward(x, w).backward(dy)

    return run


def bench_linear(bench: Bench) -> None:
    """Forward, and forward + backward, of linear layers: every recipe, its peers, the products alone, norm included."""
    shapes = [(96, 256, 128)] if bench.smoke else [
        (262144, 1024, 1024), (262144, 4096, 1024), (262144, 512, 1536), (8192, 8192, 8192)
    ]  # fmt: skip
    for m, k, n in shapes:
        x = bench.randn(m, k).requires_grad_()
        w = nn.Parameter(bench.randn(n, k) / k**0.5)
        dy = bench.randn(m, n)
        flops = 2.0 * m * k * n
        exact = x[:256].detach().float() @ w.detach().float().t()
        found: list[dict[str, Any]] = []

        def record(
            format: str, impl: str, forward: Callable[[Tensor, Tensor], Tensor], op: str = "linear", sqnr: bool = True,
            x: Tensor = x, w: Tensor = w, dy: Tensor = dy, exact: Tensor = exact, flops: float = flops, found: list =
            found,
        ) -> None:  # fmt: skip
            with torch.no_grad():
                noise = round(sqnr_db(exact, forward(x[:256], w)), 2) if sqnr else ""
                timed = bench.time(lambda: forward(x, w))
            for direction, (ms, p20, p80), factor in (
                ("fwd", timed, 1),
                ("fwd_bwd", bench.time(linear_run(x, w, dy, forward)), 3),
            ):
                found.append(
                    {
                        "op": op,
                        "format": format,
                        "impl": impl,
                        "direction": direction,
                        "ms": round(ms, 4),
                        "ms_p20": round(p20, 4),
                        "ms_p80": round(p80, 4),
                        "tflops": round(factor * flops / ms / 1e9, 2),
                        "sqnr_db": noise,
                    }
                )

        record("bf16", "torch", lambda a, b: nn.functional.linear(a, b))
        for kind in KINDS:
            for save in ("high_precision", "both"):
                chosen = recipe(kind.value, save=save)
                name = "gemworks" if save == "high_precision" else "gemworks_save_both"
                record(kind.value, name, lambda a, b, c=chosen: mx_linear(a, b, None, c))
        if bench.device.type == "cuda":
            transformer_engine_rows(record, k, n)
        g = torch.ones(k, dtype=x.dtype, device=x.device)
        record(
            "bf16",
            "torch",
            lambda a, b, g=g: nn.functional.linear(nn.functional.rms_norm(a, g.shape, g, 1e-6), b),
            "norm_linear",
            False,
        )
        for kind in KINDS:
            chosen = recipe(kind.value, save="both")
            record(
                kind.value, "gemworks", lambda a, b, g=g, c=chosen: mx_norm_linear(a, g, b, c)[0], "norm_linear", False
            )
        publish(bench, (m, k, n), found)
        bench_products(bench, (m, k, n), x.detach(), w.detach(), dy)


def publish(bench: Bench, shape: tuple[int, int, int], found: list[dict[str, Any]]) -> None:
    """Add the rows of one shape with their ratios to bf16 and to the best peer of the same op and direction."""
    for row in found:
        same = [r for r in found if (r["op"], r["direction"]) == (row["op"], row["direction"])]
        plain = next(r for r in same if r["format"] == "bf16")
        peers = [r for r in same if not r["impl"].startswith("gemworks")]
        best = min(peers, key=lambda r: r["ms"])
        bench.add(
            **row,
            shape="x".join(map(str, shape)),
            ratio_to_bf16=round(plain["ms"] / row["ms"], 4),
            best_peer=f"{best['impl']}:{best['format']}",
            ratio_to_best_peer=round(best["ms"] / row["ms"], 4),
            roofline_fraction=round(row["tflops"] / bench.bf16_tflops, 4),
        )


def bench_products(bench: Bench, shape: tuple[int, int, int], x: Tensor, w: Tensor, dy: Tensor) -> None:
    """The three products alone, operands quantised beforehand."""
    m, k, n = shape
    for kind in KINDS:
        spec = CastSpec(kind)
        square = kind is not GemmKind.MXFP8
        plane_w = cast(w, None if square else 1, spec)[0]
        plane_w_t = plane_w.t() if square else cast(w, 0, spec)[0].t()
        rows_x, columns_x, _ = cast_both(x, spec)
        rows_dy, columns_dy, _ = cast_both(dy, spec)
        for name, a, b, dtype in (
            ("forward", rows_x, plane_w, torch.bfloat16),
            ("dgrad", rows_dy, plane_w_t, torch.bfloat16),
            ("wgrad", columns_dy.t(), columns_x.t(), torch.bfloat16),
        ):
            ms, p20, p80 = bench.time(lambda a=a, b=b, kind=kind, dtype=dtype: gemm(a, b, kind, dtype))
            tflops = 2.0 * m * k * n / ms / 1e9
            bench.add(
                op=f"gemm_{name}",
                shape=f"{m}x{k}x{n}",
                format=kind.value,
                direction="fwd",
                impl="gemworks",
                ms=round(ms, 4),
                ms_p20=round(p20, 4),
                ms_p80=round(p80, 4),
                tflops=round(tflops, 2),
                roofline_fraction=round(tflops / bench.bf16_tflops, 4),
            )


def transformer_engine_rows(record: Callable[..., None], in_features: int, out_features: int) -> None:
    """Transformer Engine's own linear layer as a peer, where it is installed."""

    def run() -> None:
        import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
        from transformer_engine.common import recipe as te_recipe  # pyright: ignore[reportMissingImports]

        for name, make in (
            ("block_scaling", te_recipe.Float8BlockScaling),
            ("current_scaling", te_recipe.Float8CurrentScaling),
        ):
            layer = te.Linear(in_features, out_features, bias=False, params_dtype=torch.bfloat16).cuda()

            def forward(a: Tensor, b: Tensor, layer: Any = layer, make: Any = make) -> Tensor:
                if layer.weight is not b:
                    assert isinstance(b, nn.Parameter)
                    layer.weight = b
                with te.fp8_autocast(enabled=True, fp8_recipe=make()):
                    return layer(a)

            attempt(f"transformer_engine {name}", lambda n=name, f=forward: record(n, "transformer_engine", f))

    attempt("transformer_engine", run)


def tune(bench: Bench, out: Path, which: str) -> None:
    """Try the tiles named in `tiles` and write the times, best first; the shipped table is then edited by hand.

    About 25 kernels, two seconds each to compile and a fifth of one to time.
    """
    from gemworks.precision import norm, tiles, triton_casts
    from gemworks.precision.tiles import ALONG_COLUMNS, ALONG_ROWS, TileConfig

    results: dict[str, list[tuple[float, str]]] = {}
    m, k = (64, 256) if bench.smoke else (262144, 1024)
    x, w, residual = bench.randn(m, k), bench.randn(k), bench.randn(m, k).neg_()
    mx, wide, merged = (CastSpec(kind) for kind in KINDS_TUNED)
    both = ALONG_ROWS | ALONG_COLUMNS
    jobs: list[tuple[str, list[TileConfig], Callable[[], object]]] = [
        ("cast_rows mxfp8", tiles.tile_candidates(32, False, ALONG_ROWS), lambda: cast(x, 1, mx)),
        ("cast_columns mxfp8", tiles.tile_candidates(32, False, ALONG_COLUMNS), lambda: cast(x, 0, mx)),
        ("cast_both mxfp8", tiles.tile_candidates(32, False, both), lambda: cast_both(x, mx)),
        ("cast_both fp8_block128", tiles.tile_candidates(128, False, both), lambda: cast_both(x, wide)),
        ("cast_both mxfp8_regroup128", tiles.tile_candidates(32, True, both), lambda: cast_both(x, merged)),
        ("norm_cast mxfp8", tiles.norm_tile_candidates(False), lambda: norm_cast(x, w, mx, residual=residual)),
        ("norm_cast fp8_block128", tiles.norm_tile_candidates(True), lambda: norm_cast(x, w, wide, residual=residual)),
    ]
    saved = triton_casts.tile_config, norm.norm_tile_config
    for op, candidates, run in jobs:
        if which not in op:
            continue
        times: list[tuple[float, str]] = []
        for candidate in candidates:
            triton_casts.tile_config = lambda *_, c=candidate: c
            norm.norm_tile_config = lambda *_, c=candidate: c
            attempt(f"{op} {candidate}", lambda r=run, t=times, c=candidate: t.append((bench.time(r)[0], str(c))))
        triton_casts.tile_config, norm.norm_tile_config = saved
        results[op] = sorted(times)
        for ms, name in sorted(times):
            print(f"tune {op}: {ms:.4f} ms {name}", flush=True)
        (out / "tune.json").write_text(json.dumps(results, indent=1))


def write(bench: Bench, out: Path) -> None:
    """The CSV, and a plot where matplotlib is installed."""
    name = "precision_cpu_smoke" if bench.smoke else "precision_h200"
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*LEADING, *COMMON], lineterminator="\n")
        writer.writeheader()
        writer.writerows(bench.rows)
    print(f"wrote {out / name}.csv: {len(bench.rows)} rows", flush=True)
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", flush=True)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    casts = [r for r in bench.rows if r["gbps"] != "" and r["impl"] == "gemworks"]
    layers = [r for r in bench.rows if r["ratio_to_bf16"] != "" and r["direction"] == "fwd_bwd" and r["op"] == "linear"]
    figure, axes = pyplot.subplots(2, 1, figsize=(12, 4 + 0.12 * (len(casts) + len(layers))))
    for axis, rows, column, title in (
        (axes[0], casts, "roofline_fraction", "casts: share of measured copy bandwidth"),
        (axes[1], layers, "ratio_to_bf16", "linear, forward + backward: speed relative to bf16"),
    ):
        labels = [f"{r['op']} {r['shape']} {r['format']} {r['impl']}" for r in rows]
        axis.barh(labels, [float(r[column]) for r in rows])
        axis.set_title(title)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.tick_params(axis="y", labelsize=6)
    figure.tight_layout()
    figure.savefig(out / f"{name}.png", dpi=120)
    pyplot.close(figure)


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
    parser.add_argument("--only", default="", help="comma-separated parts: checks,casts,norms,activations,linear")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, chosen.smoke or device.type == "cpu")
    parts = set(filter(None, chosen.only.split(","))) or {"checks", "casts", "norms", "activations", "linear"}
    print(f"device {device_spec(device)}, torch {torch.__version__}, triton {triton_version() or '-'}", flush=True)
    import warnings

    warnings.filterwarnings("ignore", category=PrecisionCostWarning)
    failures = run_checks(device, bench.smoke) if "checks" in parts else {}
    for op, problem in failures.items():
        print(f"CHECK FAILED {op}: {problem}", flush=True)
    ceilings(bench)
    jobs: dict[str, tuple[Callable[[Bench], None], tuple[str, ...]]] = {
        "casts": (bench_casts, ("cast",)),
        "norms": (bench_norms, ("cast", "norm")),
        "activations": (bench_activations, ("cast", "activation")),
        "linear": (bench_linear, ("cast", "norm", "gemm", "linear")),
    }
    if chosen.tune is not None and device.type == "cuda" and not failures:
        tune(bench, chosen.out, chosen.tune)
    for part, (job, needs) in jobs.items():
        if part not in parts:
            continue
        broken = [op for op in failures if op.split(":")[0] in needs]
        if broken:
            print(f"not timed: {part}, as {broken} failed", flush=True)
            continue
        job(bench)
        write(bench, chosen.out)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
