"""Checks of products and linear layers before they are timed. Every check raises AssertionError with what differs:
products against the float64 product of the same planes, layers against that of what was quantised."""

from __future__ import annotations

from typing import Any

import torch
from gemworks.precision import linear as linear_module
from gemworks.precision.bench_run import KINDS
from gemworks.precision.bounds import fp32_bound, hopper_fp8_bound, tensor_fp8_bound
from gemworks.precision.casts import CastSpec, cast, cast_both, cast_squares
from gemworks.precision.formats import Format, decode
from gemworks.precision.gemms import gemm
from gemworks.precision.linear import mx_linear
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.probe import sqnr_db
from gemworks.precision.recipe import GemmKind, GemmRecipe, Recipe, recipe
from gemworks.precision.scaled_mm import num_pieces, num_processors, operands
from torch import Tensor

PRODUCT_SHAPES = ((128, 256, 128), (130, 256, 384), (1000, 1024, 512), (7, 384, 128))


def product_planes(x: Tensor, w: Tensor, dy: Tensor, kind: GemmKind) -> dict[str, tuple[MXTensor, MXTensor]]:
    """Operands of the three products of a linear layer, as the layer quantises them."""
    spec, square = CastSpec(kind), kind is not GemmKind.MXFP8
    plane_w = cast(w, None if square else 1, spec)[0]
    plane_wt = plane_w.t() if square else cast(w, 0, spec)[0].t()
    rows_x, columns_x, _ = cast_both(x, spec)
    rows_dy, columns_dy, _ = cast_both(dy, spec)
    return {"forward": (rows_x, plane_w), "dgrad": (rows_dy, plane_wt), "wgrad": (columns_dy.t(), columns_x.t())}


def check_products(device: torch.device) -> None:
    """Every product within its bound of the float64 product of the same planes (see the `bounds` module), and its mean
    square error under the expected one."""
    for m, k, n in PRODUCT_SHAPES:
        generator = torch.Generator(device).manual_seed(m + k + n)
        x, w, dy = (torch.randn(*s, device=device, generator=generator).bfloat16() for s in ((m, k), (n, k), (m, n)))
        for kind in KINDS:
            for name, (a, b) in product_planes(x, w, dy, kind).items():
                left, right = a.dequantize().double(), b.dequantize().double()
                exact = left @ right.t()
                for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24)):
                    error = (gemm(a, b, kind, dtype).double() - exact).abs()
                    where = f"{kind.value} {name} {(m, k, n)} {dtype}"
                    if kind is GemmKind.MXFP8:
                        worst = fp32_bound(left, right, unit)
                    else:
                        worst, variance = hopper_fp8_bound(left, right, unit)
                        ratio = (error.square().mean() / variance.mean()).item()
                        if not ratio <= 1:
                            raise AssertionError(f"{where}: mean square error {ratio:.3g} times the expected one")
                    beyond = (error - worst).max().item()
                    if not beyond <= 0:
                        raise AssertionError(f"{where}: beyond the bound by {beyond:.3g}")


def check_exact_products(device: torch.device) -> None:
    """Products of small integers, which even the FP8 units' accumulator holds, are exact to the bit in every kind."""
    m, k, n = 192, 512, 256
    generator = torch.Generator(device).manual_seed(3)

    def integers(rows: int, columns: int) -> Tensor:
        values = torch.randint(-1, 2, (rows, columns), device=device, generator=generator)
        # One power of two for each 128 x 128, so that scales differ between blocks.
        powers = torch.randint(0, 3, (-(-rows // 128), -(-columns // 128)), device=device, generator=generator)
        wide = powers.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        return (values * 2**wide).bfloat16()

    x, w, dy = integers(m, k), integers(n, k), integers(m, n)
    for kind in KINDS:
        for name, (a, b) in product_planes(x, w, dy, kind).items():
            exact = a.dequantize().double() @ b.dequantize().double().t()
            source = {"forward": (x, w), "dgrad": (dy, w.t()), "wgrad": (dy.t(), x.t())}[name]
            if not torch.equal(exact, source[0].double() @ source[1].double().t()):
                raise AssertionError(f"{kind.value} {name}: small integers are not exact in the planes")
            got = gemm(a, b, kind, torch.float32).double()
            if not torch.equal(got, exact):
                worst = (got - exact).abs().max().item()
                raise AssertionError(f"{kind.value} {name}: off by {worst:.3g} where the product is exact")


def check_pieces(device: torch.device) -> None:
    """A weight gradient that is split over its contraction, unevenly, against one in one piece; equal bits twice."""
    m, k, n = (66048, 256, 384) if device.type == "cuda" else (512, 256, 384)
    generator = torch.Generator(device).manual_seed(5)
    x, dy = (torch.randn(m, c, device=device, generator=generator).bfloat16() for c in (k, n))
    spec = CastSpec(GemmKind.FP8_BLOCK128)
    columns, squares = cast_squares(dy, spec).columns.t(), cast_squares(x, spec).transposed
    if device.type != "cuda" or num_pieces(n, k, m, num_processors(device)) == 1:
        return
    split, again = (gemm(columns, squares, spec.kind, torch.float32, in_parts=True) for _ in range(2))
    single = torch.empty_like(split)
    operands(columns, squares).multiply(single)
    if not torch.equal(split, again):
        raise AssertionError("pieces: two runs differ")
    noise = sqnr_db(single.double(), split)
    if not noise >= 60:
        raise AssertionError(f"pieces: {noise:.1f} dB from one piece, expected 60")


def check_tensor_casts(device: torch.device) -> None:
    """Codes both ways and scale of one scale a tensor have the reference's bits: any number of rows, strides, dtypes,
    values that are not finite, too large and too small for their quotient."""
    generator = torch.Generator(device).manual_seed(9)
    base = torch.randn(777, 528, device=device, generator=generator)
    spread = base * torch.exp2(torch.randint(-30, 30, base.shape, device=device, generator=generator).float())
    special = {
        name: torch.where(base == base[5, 7], value, base)
        for name, value in (("nan", float("nan")), ("inf", float("inf")), ("-inf", float("-inf")), ("max", 3.4e38))
    }
    cases = {"normal": base, "spread": spread, "tiny": base * 1e-38, "subnormal": base * 1e-42, "zero": base * 0}
    formats = ((Format.E4M3, False), (Format.E5M2, False), (Format.E4M3, True))
    for name, values in (cases | special).items():
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            x = values.to(dtype)
            views = (x, x[:130, :256], x[:64, :16].t(), x[:3])
            # Kernels of other dtypes than bf16 differ in how they read: one format shows that.
            for format, power in formats if dtype is torch.bfloat16 else formats[:1]:
                spec = CastSpec(GemmKind.FP8_TENSOR, format, power_of_two=power)
                for view in views:
                    both, reference = cast_both(view, spec)[:2], cast_both(view, spec, "reference")[:2]
                    for ours, expected in zip(both, reference, strict=True):
                        same = torch.equal(ours.scale.nan_to_num(-1), expected.scale.nan_to_num(-1))
                        if not same or not torch.equal(ours.codes, expected.codes) or ours.dim != expected.dim:
                            count = (ours.codes != expected.codes).sum().item()
                            raise AssertionError(
                                f"{name} {tuple(view.shape)} {dtype} {format.value} power of two {power}: scale "
                                f"{ours.scale.item()!r}, expected {expected.scale.item()!r}; {count} codes differ"
                            )


def check_tensor_products(device: torch.device) -> None:
    """Products under one scale a tensor: within their bound and variance, with fast accumulation and without; exact to
    the bit where every partial sum fits 14 bits."""
    for m, k, n in (*PRODUCT_SHAPES, (130, 272, 48)):
        generator = torch.Generator(device).manual_seed(m + k + n)
        x, w = (torch.randn(*s, device=device, generator=generator).bfloat16() for s in ((m, k), (n, k)))
        for format in (Format.E4M3, Format.E5M2):
            a, b = cast(x, 1, CastSpec(GemmKind.FP8_TENSOR, format))[0], cast(w, 1, CastSpec(GemmKind.FP8_TENSOR))[0]
            left, right = (decode(plane.codes, plane.format).double() for plane in (a, b))
            scale = (a.scale.double() * b.scale.double()).item()
            for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24)):
                worst, variance = tensor_fp8_bound(left, right, scale, unit)
                for fast in (False, True):
                    got = gemm(a, b, GemmKind.FP8_TENSOR, dtype, fast=fast).double()
                    error = (got - left @ right.t() * scale).abs()
                    ratio, beyond = (error.square().mean() / variance.mean()).item(), (error - worst).max().item()
                    if not (ratio <= 1 and beyond <= 0):
                        raise AssertionError(
                            f"{(m, k, n)} {format.value} {dtype} fast {fast}: beyond the bound by {beyond:.3g}, mean "
                            f"square error {ratio:.3g} times the expected one"
                        )
        # 7, the largest, has the factor 64 (E4M3): codes are integers times it, and their products' sums small.
        x, w = (torch.randint(-1, 2, s, device=device, generator=generator).bfloat16() for s in ((m, k), (n, k)))
        x[0, 0] = w[0, 0] = 7.0
        a, b = (cast(t, 1, CastSpec(GemmKind.FP8_TENSOR))[0] for t in (x, w))
        for fast in (False, True):
            got = gemm(a, b, GemmKind.FP8_TENSOR, torch.float32, fast=fast)
            if not torch.equal(got.double(), x.double() @ w.double().t()):
                raise AssertionError(f"{(m, k, n)} fast {fast}: a product of small integers is not exact")


def check_linear(device: torch.device) -> None:
    """SQNR of y, dx, dw against float64 products of the unquantised operands. E5M2 has a bit less than E4M3, 6 dB."""
    m, k, n = 515, 1024, 512
    squares = {"save": "both", "square_inputs": True, "square_gradients": True}
    for kind in (*KINDS, GemmKind.FP8_TENSOR):
        tensor = kind is GemmKind.FP8_TENSOR
        for settings in (
            *({"save": save} for save in ("high_precision", "row", "both")),
            {"power_of_two_scales": True} if tensor else squares,
        ):
            x = torch.randn(m, k, device=device).bfloat16().requires_grad_()
            w = (torch.randn(n, k, device=device) / 32).bfloat16().requires_grad_()
            dy = torch.randn(m, n, device=device).bfloat16()
            y = mx_linear(x, w, None, recipe(kind.value, **settings))
            y.backward(dy)
            assert x.grad is not None
            assert w.grad is not None
            xd, wd, dyd = x.detach().double(), w.detach().double(), dy.double()
            for name, exact, got, gate in (
                # Of E4M3 with fast accumulation no more is asked than of its gradients in E5M2.
                ("y", xd @ wd.t(), y.detach(), 23.5 if tensor else 27.5),
                ("dx", dyd @ wd, x.grad, 23.5 if tensor else 25.0),
                ("dw", dyd.t() @ xd, w.grad, 23.5 if tensor else 24.0),
            ):
                noise = sqnr_db(exact, got)
                if not noise >= gate:
                    raise AssertionError(f"{kind} {settings} {name}: {noise:.1f} dB, expected at least {gate}")


def check_ways(device: torch.device) -> None:
    """The short way of an eager layer on Hopper gives the bits of the general one: y, dx, dw and the counts of inexact
    codes, with bf16 and fp32 weights, and with rows enough for the weight gradient to be split."""
    settings: list[tuple[str, dict[str, str | bool]]] = [
        ("fp8_block128", {}),
        ("fp8_block128", {"save": "both"}),
        ("fp8_block128", {"square_inputs": True}),
        ("fp8_square128", {}),
        ("fp8_wgrad_bf16", {}),
        ("mxfp8_regroup128", {}),
        ("mxfp8_regroup128", {"save": "both"}),
        ("mxfp8", {}),
        ("mxfp8", {"save": "both"}),
        ("fp8_tensor", {}),
        ("fp8_tensor", {"save": "both"}),
        ("fp8_tensor", {"power_of_two_scales": True, "save": "row"}),
    ]
    short = linear_module._plan_of
    for m, k, n, dtype in ((515, 1024, 384, torch.float32), (65536, 256, 384, torch.bfloat16)):
        if device.type != "cuda" and m > 1000:
            continue
        for name, changes in settings:
            results = []
            for way in (short, lambda *_: None):
                generator = torch.Generator(device).manual_seed(8)
                x = torch.randn(m, k, device=device, generator=generator).bfloat16().requires_grad_()
                w = (torch.randn(n, k, device=device, generator=generator) / 32).to(dtype).requires_grad_()
                dy = torch.randn(m, n, device=device, generator=generator).bfloat16()
                linear_module._plan_of = way
                try:
                    y, counts = linear_module.linear_with_counts(x, w, None, recipe(name, **changes), 0)
                finally:
                    linear_module._plan_of = short
                y.backward(dy)
                results.append((y.detach(), x.grad, w.grad, counts))
            for what, ours, expected in zip(("y", "dx", "dw", "counts"), *results, strict=True):
                assert ours is not None
                assert expected is not None
                if ours.dtype is not expected.dtype or not torch.equal(ours, expected):
                    count = (ours != expected).sum().item()
                    raise AssertionError(
                        f"{name} {changes} {(m, k, n)} {what}: {count} elements differ between two ways"
                    )


def tensor_recipe(**changes: Any) -> Recipe:
    """One scale a tensor, E4M3 throughout, no fast accumulation: what `fp8_tensor` is without its losses."""
    plain = GemmRecipe(GemmKind.FP8_TENSOR)
    return recipe("fp8_tensor", forward=plain, dgrad=plain, wgrad=plain, **changes)


def check_transformer_engine(device: torch.device, chosen: Recipe) -> None:
    """Transformer Engine's layer against ours, of one recipe: the same scales, codes and products, so y, dx and dw
    agree far better than either does with exact products. Needs transformer_engine and a Hopper GPU."""
    for m, k, n in ((512, 1024, 768), (4096, 512, 1536)):
        generator = torch.Generator(device).manual_seed(m + k + n)
        x, w, dy = (torch.randn(*s, device=device, generator=generator).bfloat16() for s in ((m, k), (n, k), (m, n)))
        results = []
        for backend in ("auto", "transformer_engine"):
            leaf, weight = x.clone().requires_grad_(), torch.nn.Parameter(w / k**0.5)
            y = mx_linear(leaf, weight, None, recipe(chosen, backend=backend))
            y.backward(dy)
            assert leaf.grad is not None
            assert weight.grad is not None
            results.append((y.detach(), leaf.grad, weight.grad))
        formats = f"{chosen.name} {chosen.forward.left.value} {chosen.dgrad.left.value}"
        for name, ours, theirs in zip(("y", "dx", "dw"), *results, strict=True):
            noise = sqnr_db(ours.double(), theirs)
            print(f"transformer_engine {formats} {m}x{k}x{n} {name}: {noise:.1f} dB from ours", flush=True)
            # With fast accumulation the order of a kernel's sums is seen.
            gate = 30.0 if name == "y" and chosen.forward.fast_accumulation else 35.0
            if not noise >= gate:
                raise AssertionError(
                    f"transformer_engine {formats} {m}x{k}x{n} {name}: {noise:.1f} dB from ours, expected {gate}"
                )


def check_current_scaling_codes(device: torch.device) -> None:
    """Codes both ways and scales of Transformer Engine's current scaling are ours, bit by bit."""
    from transformer_engine.pytorch.tensor.float8_tensor import (  # pyright: ignore[reportMissingImports]
        Float8CurrentScalingQuantizer,
        TE_DType,
    )

    formats = {Format.E4M3: TE_DType.kFloat8E4M3, Format.E5M2: TE_DType.kFloat8E5M2}
    generator = torch.Generator(device).manual_seed(10)
    count = 0
    for size in (1.0, 1e-30, 3e4):
        for dtype in (torch.bfloat16, torch.float32):
            x = (torch.randn(384, 528, device=device, generator=generator) * size).to(dtype)
            for format, theirs in formats.items():
                for power in (False, True):
                    spec = CastSpec(GemmKind.FP8_TENSOR, format, power_of_two=power)
                    rows, columns, _ = cast_both(x, spec)
                    made = Float8CurrentScalingQuantizer(theirs, device, force_pow_2_scales=power)(x)
                    pairs = [(made._scale_inv, rows.scale)]
                    pairs += [(made._data, rows.codes)] if made._data is not None else []
                    pairs += [(made._transpose, columns.codes.t())] if made._transpose is not None else []
                    where = f"{format.value} {dtype} x {size:g} power of two {power}"
                    if len(pairs) < 2:
                        raise AssertionError(f"current scaling {where}: no codes to compare with")
                    for other, ours in pairs:
                        if not torch.equal(other.view(ours.dtype), ours):
                            raise AssertionError(
                                f"current scaling {where}: {(other != ours).sum().item()} entries differ"
                            )
                    count += 1
    print(f"transformer_engine current scaling: scales and codes of {count} tensors are ours, bit by bit", flush=True)
