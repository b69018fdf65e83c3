"""Linear layers whose casts ride on their neighbours: the input's on the norm in front, the output gradient's on the
gradient of the activation behind. What the neighbours take anyway is timed too, and taken off.

    linear_with_neighbours   residual + RMSNorm + cast, forward, activation gradient + cast, dgrad, wgrad
    linear_fused             the same less the fastest bf16 norm and activation gradient of the run

Shape letters: M rows, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from gemworks.precision.activation import activation_gradient_cast
from gemworks.precision.bench_linear import Forward, LayerBench, linear_run, shapes_of
from gemworks.precision.bench_run import Bench, compiled
from gemworks.precision.casts import CastSpec, cast_both
from gemworks.precision.gemms import gemm
from gemworks.precision.linear import mx_linear
from gemworks.precision.mlp import mx_mlp
from gemworks.precision.norm import norm_cast
from gemworks.precision.products import weight_plane
from gemworks.precision.recipe import GemmKind, Recipe, recipe
from torch import Tensor, nn

NORM, GRADIENT = "norm", "activation_gradient"


@dataclass(frozen=True)
class Neighbours:
    """What stands around a layer: x = rms_norm(a + residual) * gain, and dy = d * gelu'(h)."""

    residual: Tensor
    gain: Tensor
    h: Tensor

    @staticmethod
    def make(layer: LayerBench) -> Neighbours:
        """Normal data, unlike the layer's own: the seed is that of the shape."""
        m, k, n = layer.shape
        gain = torch.ones(k, dtype=layer.x.dtype, device=layer.x.device)
        return Neighbours(layer.bench.randn(m + 16, k)[:m], gain, layer.bench.randn(m + 16, n)[:m])


def norm(a: Tensor, residual: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and its norm, as PyTorch has them."""
    total = a + residual
    return total, nn.functional.rms_norm(total, gain.shape, gain, 1e-6)


def gradient(d: Tensor, h: Tensor) -> Tensor:
    """PyTorch's gradient of the tanh GELU: one kernel."""
    return torch.ops.aten.gelu_backward(d, h, approximate="tanh")


def fused_run(layer: LayerBench, around: Neighbours, both: bool, dense: bool) -> Callable[[], object]:
    """Forward and backward of an `fp8_block128` layer with squares of its input, on planes that its neighbours made.

    Args:
        layer, around: operands.
        both: the output gradient comes from an activation; otherwise it is cast by itself.
        dense: the weight gradient is bf16, of values that the neighbours store beside codes. Otherwise the input is
            quantised in squares.
    """
    chosen = recipe("fp8_block128")
    spec, kind = CastSpec(GemmKind.FP8_BLOCK128), GemmKind.FP8_BLOCK128
    a, w, dy, dtype = layer.x.detach(), layer.w.detach(), layer.dy, layer.x.dtype

    def run() -> object:
        made = norm_cast(
            a, around.gain, spec, residual=around.residual, columns=not dense, square=not dense, return_y=dense
        )
        assert made.rows is not None
        y = gemm(made.rows, weight_plane(w, chosen.forward, chosen, False)[0], kind, dtype)
        if both:
            back = activation_gradient_cast(dy, around.h, spec, "gelu_tanh", columns=not dense, return_y=dense)
            rows, columns, value = back.rows, back.columns, back.y
        else:
            (rows, columns, _), value = cast_both(dy, spec), dy
        dx = gemm(rows, weight_plane(w, chosen.dgrad, chosen, True)[0], kind, dtype)
        if dense:
            assert value is not None
            assert made.y is not None
            return y, dx, value.t() @ made.y
        assert columns is not None
        assert made.columns is not None
        return y, dx, gemm(columns.t(), made.columns, kind, dtype, in_parts=True)

    return run


def bench_fused(bench: Bench) -> None:
    """Rows of the neighbours, of a layer with them and of the layer less what they take, beside the layer alone."""
    for shape in shapes_of(bench):
        layer = LayerBench.make(bench, shape)
        around = Neighbours.make(layer)
        m, k, n = shape
        a, dy = layer.x.detach(), layer.dy
        plain: list[tuple[str, str, Forward]] = [("bf16", "torch", nn.functional.linear)]
        chosen = recipe("fp8_block128", save="both", square_inputs=True)
        plain.append(("fp8_block128", "gemworks_unfused", lambda x, w, c=chosen: mx_linear(x, w, None, c)))
        for format, impl, forward in plain:
            row = {"op": "linear_fused", "format": format, "impl": impl, "direction": "fwd_bwd"}
            layer.add(row, bench.capture(linear_run(layer.x, layer.w, dy, forward), layer.pool), 3)
        neighbours = [(NORM, "torch", partial(norm, a, around.residual, around.gain)),
                      (GRADIENT, "torch", partial(gradient, dy, around.h))]  # fmt: skip
        if bench.device.type == "cuda":
            fast_norm = compiled(norm, dynamic=False)
            neighbours.append((NORM, "torch_compile", partial(fast_norm, a, around.residual, around.gain)))
        for op, impl, run in neighbours:
            row = {"op": op, "format": "bf16", "impl": impl, "direction": "fwd" if op == NORM else "bwd"}
            layer.add(row, bench.capture(run, layer.pool))
        for impl, both, dense in (
            ("norm", False, False), ("norm_and_gradient", True, False), ("norm_and_gradient_wgrad_bf16", True, True)
        ):  # fmt: skip
            row = {"op": "linear_with_neighbours", "format": "fp8_block128", "impl": f"gemworks_{impl}"}
            run = fused_run(layer, around, both, dense)
            layer.add({**row, "direction": "fwd_bwd"}, bench.capture(run, layer.pool), 3)
        layer.time()
        fastest = {op: min(row["ms"] for row in layer.rows if row["op"] == op) for op in (NORM, GRADIENT)}
        base = layer.rows[0]["ms"]
        for row in list(layer.rows):
            if row["op"] == "linear_with_neighbours":
                taken = fastest[NORM] + (fastest[GRADIENT] if "gradient" in row["impl"] else 0.0)
                left = round(row["ms"] - taken, 4)
                if left <= 0:  # at toy sizes on a CPU
                    print(f"{row['impl']}: nothing is left of {row['ms']} ms beside its neighbours', so no row")
                    continue
                tflops = 6.0 * m * k * n / left / 1e9
                net = {"op": "linear_fused", "ms": left, "ms_p20": "", "ms_p80": ""}
                layer.rows.append({**row, **net, "tflops": round(tflops, 2)})
        for row in layer.rows:
            if row["op"] in (NORM, GRADIENT):
                elements, per_element = (m * k, 8) if row["op"] == NORM else (m * n, 6)
                gbps = elements * per_element / row["ms"] / 1e6
                row |= {"gbps": round(gbps, 1), "roofline_fraction": round(gbps / bench.copy_gbps, 4)}
            else:
                row["roofline_fraction"] = round((row["tflops"] or 0.0) / bench.bf16_tflops, 4)
            if row["op"] == "linear_fused":
                row["ratio_to_bf16"] = round(base / row["ms"], 4)
            bench.add(**row, shape="x".join(map(str, shape)))
        bench.save()


def bench_mlp(bench: Bench) -> None:
    """Two layers around a tanh GELU, from K to N features and back to K: fused, in parts, and in bf16; inputs in
    squares."""
    for shape in shapes_of(bench):
        m, k, n = shape
        layer = LayerBench.make(bench, shape)
        layer.dy, w2 = bench.randn(m, k), nn.Parameter(bench.randn(k, n) / n**0.5)
        chosen = recipe("fp8_block128", save="both", square_inputs=True)

        def parts(x: Tensor, w: Tensor, product: Callable[[Tensor, Tensor], Tensor], w2: Tensor = w2) -> Tensor:
            return product(nn.functional.gelu(product(x, w), approximate="tanh"), w2)

        def quantised(x: Tensor, w: Tensor, chosen: Recipe = chosen) -> Tensor:
            return mx_linear(x, w, None, chosen)

        runs: list[tuple[str, str, Forward]] = [
            ("bf16", "torch", lambda x, w, p=parts: p(x, w, nn.functional.linear)),
            ("fp8_block128", "gemworks_unfused", lambda x, w, p=parts, q=quantised: p(x, w, q)),
            ("fp8_block128", "gemworks", lambda x, w, w2=w2, c=chosen: mx_mlp(x, w, w2, c)),
        ]
        for format, impl, forward in runs:
            row = {"op": "mlp", "format": format, "impl": impl, "direction": "fwd_bwd"}
            layer.add(row, bench.capture(mlp_run(layer, w2, forward), layer.pool), 6)
        layer.publish()


def mlp_run(layer: LayerBench, w2: Tensor, forward: Forward) -> Callable[[], None]:
    """Forward and backward once."""
    run = linear_run(layer.x, layer.w, layer.dy, forward)

    def both() -> None:
        w2.grad = None
        run()

    return both
