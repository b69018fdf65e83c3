"""Linear layers in the benchmark: every recipe and its peers, forward and backward, and where their time goes.

Shape letters: M rows, K input features, N output features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from gemworks.precision.bench_gemm_checks import (
    check_current_scaling_codes,
    check_transformer_engine,
    tensor_recipe,
)
from gemworks.precision.bench_run import KINDS, Bench, attempt, compiled, time_bytes
from gemworks.precision.casts import CastSpec, cast, cast_both
from gemworks.precision.gemms import gemm
from gemworks.precision.linear import mx_linear
from gemworks.precision.norm_linear import mx_norm_linear
from gemworks.precision.probe import sqnr_db
from gemworks.precision.recipe import GemmKind, GemmRecipe, Recipe, recipe
from torch import Tensor, nn

# The last has a number of rows as packed sequences have them.
SHAPES = ((262144, 1024, 1024), (262144, 4096, 1024), (262144, 512, 1536), (8192, 8192, 8192), (262133, 512, 1536))
Forward = Callable[[Tensor, Tensor], Tensor]


def shapes_of(bench: Bench) -> tuple[tuple[int, int, int], ...]:
    """(M, K, N) of this run: those whose name contains one of the run's `--shape`."""
    if bench.smoke:
        return ((96, 256, 128),)
    words = bench.only.split(",")
    return tuple(shape for shape in SHAPES if any(word in "x".join(map(str, shape)) for word in words))


def linear_run(x: Tensor, w: Tensor, dy: Tensor, forward: Forward) -> Callable[[], None]:
    """A closure that runs forward and backward once."""

    def run() -> None:
        x.grad = w.grad = None
        forward(x, w).backward(dy)

    return run


@dataclass
class LayerBench:
    """Rows of one shape; they are published together, as each has a ratio to bf16 and to the best peer."""

    bench: Bench
    shape: tuple[int, int, int]
    x: Tensor
    w: Tensor
    dy: Tensor
    rows: list[dict[str, Any]] = field(default_factory=list)
    replays: list[Callable[[], object]] = field(default_factory=list)
    pool: Any = None

    @staticmethod
    def make(bench: Bench, shape: tuple[int, int, int]) -> LayerBench:
        """Normal operands, weights scaled by 1 / sqrt(K)."""
        m, k, n = shape
        w = nn.Parameter(bench.randn(n, k) / k**0.5)
        pool = torch.cuda.graph_pool_handle() if bench.device.type == "cuda" else None
        return LayerBench(bench, shape, bench.randn(m, k).requires_grad_(), w, bench.randn(m, n), pool=pool)

    def record(self, format: str, impl: str, forward: Forward, op: str = "linear", sqnr: bool = True) -> None:
        """Make one implementation ready to be timed; `sqnr` compares its first 256 rows with an fp32 product."""
        noise: Any = ""
        with torch.no_grad():
            if sqnr:
                exact = self.x[:256].float() @ self.w.float().t()
                noise = round(sqnr_db(exact, forward(self.x[:256], self.w)), 2)
            alone = self.bench.capture(lambda: forward(self.x, self.w), self.pool)
        both = self.bench.capture(linear_run(self.x, self.w, self.dy, forward), self.pool)
        row = {"op": op, "format": format, "impl": impl, "sqnr_db": noise}
        self.add({**row, "direction": "fwd"}, alone, 1)
        self.add({**row, "direction": "fwd_bwd"}, both, 3)

    def add(self, row: dict[str, Any], replay: Callable[[], object], products: int = 0) -> None:
        """A row, what is timed for it, and how many products that is."""
        self.rows.append(row | {"tflops": 2.0e-9 * products * math.prod(self.shape)})
        self.replays.append(replay)

    def time(self) -> None:
        """Time all that was made ready, in turns."""
        bursts = [0.03 if row["direction"] == "fwd" else 0.1 for row in self.rows]
        times = self.bench.time_in_turns(self.replays, bursts)
        for i, (row, (ms, p20, p80)) in enumerate(zip(self.rows, times, strict=True)):
            row |= {"ms": round(ms, 4), "ms_p20": round(p20, 4), "ms_p80": round(p80, 4)}
            row["clock_mhz"] = self.bench.clocks.get(i, "")
            row["tflops"] = round(row["tflops"] / ms, 2) or ""
        self.replays.clear()

    def profile(self, format: str, forward: Forward) -> None:
        """Print the kernels of one forward and backward, by time."""
        from torch.profiler import ProfilerActivity, profile

        run = linear_run(self.x, self.w, self.dy, forward)
        run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run()
            torch.cuda.synchronize()
        events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
        for event in [e for e in events if e.self_device_time_total > 0][:8]:
            ms = event.self_device_time_total / 1e3
            print(f"  kernel {format} {self.shape}: {ms:8.4f} ms x{event.count} {event.key[:70]}", flush=True)

    def publish(self) -> None:
        """Time, add and save the rows with their ratios to bf16 and to the best peer of the same op and direction."""
        self.time()
        for row in self.rows:
            same = [r for r in self.rows if (r["op"], r["direction"]) == (row["op"], row["direction"])]
            plain = next(r for r in same if r["format"] == "bf16")
            best = min((r for r in same if not r["impl"].startswith("gemworks")), key=lambda r: r["ms"])
            self.bench.add(
                **row,
                shape="x".join(map(str, self.shape)),
                ratio_to_bf16=round(plain["ms"] / row["ms"], 4),
                best_peer=f"{best['impl']}:{best['format']}",
                ratio_to_best_peer=round(best["ms"] / row["ms"], 4),
                roofline_fraction=round((row["tflops"] or 0.0) / self.bench.bf16_tflops, 4),
            )
        self.bench.save()


def variants() -> list[tuple[str, str, Recipe]]:
    """(format, impl, recipe) of every row of ours. What differs from the preset is in the name of the row: planes kept
    for backward, square blocks of the input, a weight gradient in bf16."""
    both, squares = {"save": "both"}, {"save": "both", "square_inputs": True}
    plain = GemmRecipe(GemmKind.BF16)
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("mxfp8", "gemworks_save_both", both),
        ("mxfp8_regroup128", "gemworks", {}),
        ("fp8_block128", "gemworks", {}),
        ("fp8_block128", "gemworks_save_both", both),
        ("fp8_block128", "gemworks_square_inputs", squares),
        ("fp8_block128", "gemworks_squares", {**squares, "square_gradients": True}),
        ("fp8_block128", "gemworks_wgrad_bf16", {"wgrad": plain}),
    ]
    made = [(name, impl, recipe(name, **changes)) for name, impl, changes in rows]
    # The preset is Transformer Engine's current scaling; and what it would be without E5M2 and fast accumulation.
    tensor = ("fp8_tensor", "gemworks_save_both", recipe("fp8_tensor", **both))
    return [*made, tensor, ("fp8_tensor", "gemworks_e4m3", tensor_recipe(**both))]


def bench_linear(bench: Bench) -> None:
    """Forward, and forward + backward, of linear layers: every recipe and its peers."""
    for shape in shapes_of(bench):
        layer = LayerBench.make(bench, shape)
        layer.record("bf16", "torch", nn.functional.linear)
        for format, impl, chosen in variants():
            layer.record(format, impl, lambda a, b, c=chosen: mx_linear(a, b, None, c))
        if bench.device.type == "cuda":
            transformer_engine_rows(layer)
        layer.publish()
        if bench.device.type == "cuda" and shape in (SHAPES[0], SHAPES[2]):
            for format, impl, chosen in variants()[3::2]:
                layer.profile(f"{format} {impl}", lambda a, b, c=chosen: mx_linear(a, b, None, c))


def bench_norm_linear(bench: Bench) -> None:
    """RMSNorm and the linear layer behind it, with the cast in the norm's epilogue."""
    for shape in shapes_of(bench):
        layer = LayerBench.make(bench, shape)
        g = torch.ones(shape[1], dtype=layer.x.dtype, device=layer.x.device)
        plain = lambda a, b, g=g: nn.functional.linear(nn.functional.rms_norm(a, g.shape, g, 1e-6), b)  # noqa: E731
        layer.record("bf16", "torch", plain, "norm_linear", False)
        if bench.peers:
            made = compiled(plain)
            attempt("torch.compile", lambda c=made, r=layer: r.record(
                "bf16_compiled", "torch_compile", lambda a, b: c(a, b), "norm_linear", False
            ))  # fmt: skip
        for kind in KINDS:
            chosen = recipe(kind.value, save="both")
            fused = lambda a, b, g=g, c=chosen: mx_norm_linear(a, g, b, c)[0]  # noqa: E731
            layer.record(kind.value, "gemworks", fused, "norm_linear", False)
        layer.publish()


def bench_parts(bench: Bench) -> None:
    """What a layer is made of, one by one: the casts of x, dy and the weight, and the three products of planes."""
    for shape in shapes_of(bench):
        m, k, n = shape
        x, w, dy = bench.randn(m, k), bench.randn(n, k), bench.randn(m, n)
        for kind in KINDS:
            spec, square = CastSpec(kind), kind is not GemmKind.MXFP8
            share = 1 + 1 / (32 if kind is GemmKind.MXFP8 else 128)
            time_bytes(
                bench, "linear_cast_x", (m, k), kind.value, "gemworks", lambda x=x, s=spec: cast_both(x, s),
                m * k * (2 + 2 * share),
            )  # fmt: skip
            time_bytes(
                bench, "linear_cast_dy", (m, n), kind.value, "gemworks", lambda x=dy, s=spec: cast_both(x, s),
                m * n * (2 + 2 * share),
            )  # fmt: skip
            time_bytes(
                bench, "linear_cast_w", (n, k), kind.value, "gemworks",
                lambda w=w, s=spec, q=square: cast(w, None if q else 1, s), n * k * (3 if square else 2 + share),
            )  # fmt: skip
            plane_w = cast(w, None if square else 1, spec)[0]
            plane_w_t = plane_w.t() if square else cast(w, 0, spec)[0].t()
            rows_x, columns_x, _ = cast_both(x, spec)
            rows_dy, columns_dy, _ = cast_both(dy, spec)
            for name, a, b in (
                ("forward", rows_x, plane_w),
                ("dgrad", rows_dy, plane_w_t),
                ("wgrad", columns_dy.t(), columns_x.t()),
            ):
                ms, p20, p80 = bench.time(lambda a=a, b=b, kind=kind: gemm(a, b, kind, torch.bfloat16))
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


def transformer_engine_rows(layer: LayerBench) -> None:
    """Transformer Engine's own linear layer as a peer, where it is installed."""

    def run() -> None:
        import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
        from transformer_engine.common import recipe as te_recipe  # pyright: ignore[reportMissingImports]

        _, in_features, out_features = layer.shape
        for name, make, ours in (
            ("block_scaling", te_recipe.Float8BlockScaling, recipe("fp8_block128")),
            ("current_scaling", te_recipe.Float8CurrentScaling, recipe("fp8_tensor")),
        ):
            module = te.Linear(in_features, out_features, bias=False, params_dtype=torch.bfloat16).cuda()

            def forward(a: Tensor, b: Tensor, module: Any = module, make: Any = make) -> Tensor:
                if module.weight is not b:
                    assert isinstance(b, nn.Parameter)
                    module.weight = b
                with te.fp8_autocast(enabled=True, fp8_recipe=make()):
                    return module(a)

            def checked(name: str = name, forward: Forward = forward, ours: Recipe = ours) -> None:
                check_transformer_engine(layer.bench.device, ours)
                if ours.name == "fp8_tensor":
                    check_current_scaling_codes(layer.bench.device)
                    check_transformer_engine(layer.bench.device, tensor_recipe(power_of_two_scales=True))
                layer.record(name, "transformer_engine", forward)

            attempt(f"transformer_engine {name}", checked)

    attempt("transformer_engine", run)
