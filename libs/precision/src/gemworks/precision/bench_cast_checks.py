"""Checks of casts before they are timed: alone, behind norms, activations and projections. Every check raises
AssertionError with what differs: bit-equality with the reference for codes, scales and counts, else a stated bound."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from gemworks.precision.activation import ACTIVATIONS, activation_cast, activation_gradient_cast
from gemworks.precision.attention import head_plane
from gemworks.precision.bench_run import KINDS
from gemworks.precision.casts import CastSpec, cast, cast_both, cast_squares
from gemworks.precision.codec import MXCodec
from gemworks.precision.contract import check_backend
from gemworks.precision.formats import Format
from gemworks.precision.hadamard import Hadamard
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.norm import norm_backward, norm_cast
from gemworks.precision.projection import project_heads
from gemworks.precision.recipe import GemmKind
from gemworks.precision.rng import Stochastic
from gemworks.precision.scaled_mm import square_scales, wide_scales
from gemworks.precision.scales import ScaleMode
from torch import Tensor


def _different(name: str, ours: MXTensor, reference: MXTensor) -> None:
    if not torch.equal(ours.scales, reference.scales):
        count = (ours.scales != reference.scales).sum().item()
        raise AssertionError(f"{name}: {count} scales differ")
    if not torch.equal(ours.codes, reference.codes):
        count = (ours.codes != reference.codes).sum().item()
        raise AssertionError(f"{name}: {count} codes differ")


def _different_squares(name: str, ours: tuple[MXTensor | None, MXTensor | None], y: Tensor, spec: CastSpec) -> None:
    """The plane along K and the square one of the transpose, with the scales that products take."""
    expected = cast_squares(y, spec, "reference")
    rows, transposed = ours
    assert rows is not None
    assert transposed is not None
    _different(f"{name} squares, rows", rows, expected.rows)
    _different(f"{name} squares, transposed", transposed, expected.transposed)
    made = square_scales(expected.transposed, transposed.scales.shape[1])
    if transposed.wide is not None and not torch.equal(transposed.wide.nan_to_num(-1), made.nan_to_num(-1)):
        raise AssertionError(f"{name}: fp32 scales of squares differ")


def _in_and_out_of_epilogues(device: torch.device) -> Iterator[str]:
    """Squares behind a norm or an activation both ways, whichever is the default."""
    if device.type != "cuda":
        yield ""
        return
    from gemworks.precision import triton_squares

    default = triton_squares.IN_EPILOGUES
    try:
        for inside in (False, True):
            triton_squares.IN_EPILOGUES = inside
            yield ", in its epilogue" if inside else ""
    finally:
        triton_squares.IN_EPILOGUES = default


def _data(m: int, n: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(m + n)
    scale = torch.randint(-12, 12, (-(-m // 16), -(-n // 16)), generator=generator).float().exp2()
    x = torch.randn(m, n, generator=generator) * scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[:m, :n]
    x[:, n // 2] = 0
    return x.to(device, dtype)


def check_contract(device: torch.device) -> None:
    """The hand-worked cases through whatever backend this device uses."""

    def run(x: Tensor, dim: int, format: str, mode: str, *, block: int) -> MXTensor:
        if device.type == "cuda":
            from gemworks.precision.triton_casts import triton_cast

            return triton_cast(x, dim, CastSpec(GemmKind.MXFP8, Format(format), ScaleMode(mode)), block=block)[0]
        from gemworks.precision.quantization import quantize

        return quantize(x, dim, format, mode, block=block)

    failures = check_backend(run, device)
    if failures:
        raise AssertionError("; ".join(failures[:5]))


Run = tuple[tuple[int, int], torch.dtype, GemmKind, Stochastic | None]
NOISE = Stochastic(2**40 + 7, 3)


def _check_runs(device: torch.device, runs: list[Run]) -> None:
    """Codes, scales and counts of every direction, alone and in one read, bit-equal to the reference."""
    for shape, dtype, kind, rounding in runs:
        x = _data(*shape, device, torch.float32).clamp(-6e4, 6e4).to(dtype)
        spec = CastSpec(kind, stochastic=rounding)
        name = f"{kind.value} {shape} {dtype} stochastic={rounding is not None}"
        for dim in (0, 1, None):
            ours, lost = cast(x, dim, spec)
            reference, expected = cast(x, dim, spec, "reference")
            _different(f"{name} dim {dim}", ours, reference)
            if lost != expected:
                raise AssertionError(f"{name} dim {dim}: {lost.item()} inexact codes, expected {expected.item()}")
        rows, columns, lost = cast_both(x, spec)
        rows_expected, columns_expected, expected = cast_both(x, spec, "reference")
        _different(f"{name} both, rows", rows, rows_expected)
        _different(f"{name} both, columns", columns, columns_expected)
        if lost != expected:
            raise AssertionError(f"{name} both: {lost.item()} inexact codes, expected {expected.item()}")


def check_tile_casts(device: torch.device) -> None:
    """Features in multiples of 16, which go through the tile kernel; regrouping under every scale mode and on data that
    loses few codes, many, and none."""
    shapes = ((144, 272), (256, 1024), (261, 1024))
    _check_runs(device, [(shape, torch.bfloat16, kind, None) for shape in shapes for kind in KINDS])
    _check_runs(device, [((48, 80), d, GemmKind.MXFP8, None) for d in (torch.float32, torch.float16)])
    generator = torch.Generator().manual_seed(9)
    plain = torch.randn(256, 384, generator=generator)
    for mode in ScaleMode:
        spec = CastSpec(GemmKind.MXFP8_REGROUP128, scale_mode=mode)
        for name, x in (
            ("normal", plain),
            ("gated", plain.relu()),
            ("spread", plain * torch.randint(-20, 20, plain.shape, generator=generator).float().exp2()),
            ("equal", torch.full_like(plain, 3.0)),
        ):
            on_device = x.to(device, torch.bfloat16)
            *ours, lost = cast_both(on_device, spec)
            *expected, lost_expected = cast_both(on_device, spec, "reference")
            for a, b in zip(ours, expected, strict=True):
                _different(f"regrouping, {mode}, {name}", a, b)
            if lost != lost_expected:
                raise AssertionError(f"regrouping, {mode}, {name}: {lost.item()}, expected {lost_expected.item()}")


def check_squares(device: torch.device) -> None:
    """Squares stored both ways, with the fp32 scales that products take."""
    spec = CastSpec(GemmKind.FP8_BLOCK128)
    for shape in ((144, 272), (1024, 640), (1001, 640)):
        x = _data(*shape, device)
        ours, expected = cast_squares(x, spec), cast_squares(x, spec, "reference")
        for name in ("rows", "columns", "transposed"):
            plane, other = getattr(ours, name), getattr(expected, name)
            _different(f"squares {name}", plane, other)
            if plane.dim is None:
                wide, made = plane.wide, square_scales(other, plane.scales.shape[1])
            else:
                plane, other = (plane, other) if plane.dim == 1 else (plane.t(), other.t())
                wide, made = plane.wide, wide_scales(other, plane.tensors[0].shape[0], plane.scales.shape[1])
            if wide is not None:
                real = plane.shape[0]  # behind them one writes ones, the other the scale of zeros
                wide, made = (w if plane.dim is None else w[:real] for w in (wide, made))
            if wide is None and device.type == "cpu":
                continue  # the reference keeps the bytes alone
            if (
                wide is None
                or wide.stride() != made.stride()
                or not torch.equal(wide.nan_to_num(-1), made.nan_to_num(-1))
            ):
                raise AssertionError(f"squares {name}: fp32 scales differ")


def check_general_casts(device: torch.device) -> None:
    """Odd sizes, which go through the general kernel."""
    _check_runs(device, [((33, 70), torch.bfloat16, kind, None) for kind in KINDS])
    _check_runs(device, [((33, 70), d, GemmKind.MXFP8, None) for d in (torch.float32, torch.float16)])
    _check_runs(device, [(shape, torch.bfloat16, GemmKind.MXFP8, None) for shape in ((1, 1), (513, 300))])


def check_noise(device: torch.device, kind: GemmKind) -> None:
    """Stochastic rounding: the general kernel; aligned sizes are another specialisation."""
    shapes = ((33, 70), (256, 1024)) if kind is GemmKind.MXFP8 else ((33, 70),)
    _check_runs(device, [(shape, torch.bfloat16, kind, NOISE) for shape in shapes])


def check_formats(device: torch.device) -> None:
    """Hadamard transforms, modes of E5M2 and 4-bit storage."""
    x = _data(300, 520, device)
    specs = [(CastSpec(GemmKind.MXFP8, hadamard=Hadamard(size, 5)), dim) for size in (32, 256) for dim in (0, 1)]
    specs += [(CastSpec(GemmKind.MXFP8, Format.E5M2, mode), 1) for mode in ScaleMode]
    specs += [(CastSpec(GemmKind.MXFP8, Format.E2M1), dim) for dim in (0, 1)]
    for spec, dim in specs:
        _different(f"{spec} dim {dim}", cast(x, dim, spec)[0], cast(x, dim, spec, "reference")[0])


def check_codec(device: torch.device) -> None:
    """Payloads of flat arrays, whatever lines they are laid out in, are those of the CPU; decoded values too."""
    generator = torch.Generator().manual_seed(12)
    for format in (Format.E4M3, Format.E2M1):
        codec = MXCodec(format)
        for size in (1, 31, 480, 1000, 2**16, 3 * 2**12 + 32):
            x = torch.randn(size, generator=generator).bfloat16()
            expected, context = codec.encode(x)
            payload, _ = codec.encode(x.to(device))
            if not torch.equal(payload.cpu(), expected):
                raise AssertionError(f"codec {format.value} of {size}: payload differs")
            if not torch.equal(codec.decode(payload, context).cpu(), codec.decode(expected, context)):
                raise AssertionError(f"codec {format.value} of {size}: decoded values differ")


def check_large(device: torch.device) -> None:
    """Past 2^31 elements: the last rows and columns are right, in the tile kernel and in the general one."""
    wide = torch.zeros(2**20 + 64, 2064, dtype=torch.bfloat16, device=device)
    wide[-64:] = torch.randn(64, 2064, device=device)
    spec = CastSpec(GemmKind.MXFP8)
    for name, x in (("tile", wide), ("general", wide[:, :2049])):
        rows, columns, _ = cast_both(x, spec)
        tail = x[-64:]
        for plane, dim in ((rows, 1), (columns, 0), (cast(x, 1, spec)[0], 1)):
            reference = cast(tail, dim, spec, "reference")[0]
            if not torch.equal(plane.codes[-64:], reference.codes):
                raise AssertionError(f"{name}, dim {dim}: codes past 2^31 elements differ")


def check_norm(device: torch.device) -> None:
    """Planes of the fused norm are those of its own y, and y is that of the reference to bf16 rounding."""
    # The general kernel, a row in one tile, rows of several tiles.
    runs = [((300, 520), "rms", kind) for kind in KINDS] + [((304, 528), "rms", kind) for kind in KINDS]
    runs += [((304, 528), "layer", kind) for kind in (GemmKind.MXFP8, GemmKind.FP8_BLOCK128)]
    runs += [((96, 2064), norm, GemmKind.MXFP8) for norm in ("rms", "layer")]
    for shape, norm, kind in runs:
        x, residual = _data(*shape, device).clamp(-100, 100), _data(*shape, device).flip(0).clamp(-100, 100)
        w = torch.randn(shape[1], device=device)
        spec = CastSpec(kind)
        bias = w.flip(0) if norm == "layer" else None
        out = norm_cast(x, w, spec, norm=norm, bias=bias, residual=residual, return_y=True)
        reference = norm_cast(x, w, spec, norm=norm, bias=bias, residual=residual, return_y=True, backend="reference")
        assert out.y is not None
        assert reference.y is not None
        assert out.rows is not None
        assert out.columns is not None
        torch.testing.assert_close(out.hidden, reference.hidden, rtol=0, atol=0)
        torch.testing.assert_close(out.y, reference.y, rtol=2**-7, atol=1e-4)
        name = f"norm {norm} {kind.value} {shape}"
        _different(f"{name} rows", out.rows, cast(out.y, 1, spec, "reference")[0])
        _different(f"{name} columns", out.columns, cast(out.y, 0, spec, "reference")[0])
    for shape, norm in (((304, 528), "rms"), ((1001, 640), "layer"), ((300, 520), "rms")):
        x, w, spec = _data(*shape, device).clamp(-100, 100), torch.randn(shape[1], device=device), CastSpec(KINDS[-1])
        bias = w.flip(0) if norm == "layer" else None
        for where in _in_and_out_of_epilogues(device):
            out = norm_cast(x, w, spec, norm=norm, bias=bias, residual=x.flip(0), square=True, return_y=True)
            assert out.y is not None
            _different_squares(f"norm {norm} {shape}{where}", (out.rows, out.columns), out.y, spec)


def check_norm_backward(device: torch.device) -> None:
    """Gradients of the norm against autograd in float64, with and without a gradient of the sum; equal bits twice."""
    for (m, k), norm in (((300, 520), "rms"), ((5000, 1024), "layer"), ((40, 4096), "rms")):
        generator = torch.Generator(device).manual_seed(m)
        h, dy, more = (torch.randn(m, k, device=device, generator=generator).bfloat16() for _ in range(3))
        w = torch.randn(k, device=device, generator=generator)
        leaf, weight = h.double().requires_grad_(), w.double().requires_grad_()
        bias = torch.zeros_like(weight).requires_grad_()
        centred = leaf - (leaf.mean(1, keepdim=True) if norm == "layer" else 0)
        rstd = (centred.square().mean(1) + 1e-6).rsqrt()
        (centred * rstd[:, None] * weight + bias).backward(dy.double())
        mean = h.double().mean(1).float() if norm == "layer" else torch.zeros(m, device=device)
        for extra in (None, more):
            first, second = (
                norm_backward(dy, h, w, mean, rstd.detach().float(), norm, norm == "layer", extra) for _ in range(2)
            )
            assert leaf.grad is not None
            expected = leaf.grad if extra is None else leaf.grad + extra.double()
            for name, ours, exact, again in zip(
                ("dx", "dw", "db"), first, (expected, weight.grad, bias.grad), second, strict=True
            ):
                if ours is None or again is None:
                    continue
                assert exact is not None
                torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=2e-2 if name == "dx" else 5e-2)
                if not torch.equal(ours, again):
                    raise AssertionError(f"norm backward {norm} {(m, k)} {name}: two runs differ")


def check_activation(device: torch.device) -> None:
    """Planes of the fused activation and of its gradient are those of the y they computed, and y is that of the
    reference to bf16 rounding."""
    x, dy = _data(304, 528, device).clamp(-100, 100), _data(304, 528, device).flip(0).clamp(-100, 100)
    for kind, activation in zip((*KINDS, KINDS[0]), ACTIVATIONS, strict=True):
        spec = CastSpec(kind)
        for name, run in (
            (activation, partial(activation_cast, x)),
            (f"gradient of {activation}", partial(activation_gradient_cast, dy, x)),
        ):
            out, reference = (run(spec, activation, return_y=True, backend=b) for b in ("auto", "reference"))
            assert out.y is not None
            assert reference.y is not None
            assert out.columns is not None
            torch.testing.assert_close(out.y, reference.y, rtol=2**-7, atol=1e-4)
            _different(f"{name} {kind.value} rows", out.rows, cast(out.y, 1, spec, "reference")[0])
            _different(f"{name} {kind.value} columns", out.columns, cast(out.y, 0, spec, "reference")[0])
    spec = CastSpec(KINDS[-1])
    for where in _in_and_out_of_epilogues(device):
        out = activation_cast(x, spec, "gelu_tanh", square=True, return_y=True)
        assert out.y is not None
        _different_squares(f"activation{where}", (out.rows, out.columns), out.y, spec)


def check_projection(device: torch.device) -> None:
    """Planes of the projection's epilogue are those of the y it computed, and y is that of cuBLAS to bf16 rounding."""
    generator = torch.Generator(device).manual_seed(4)
    for rows, features, width in ((300, 520, 64), (1000, 512, 128)):
        x = torch.randn(rows, features, device=device, generator=generator).bfloat16()
        w = (torch.randn(6 * width, features, device=device, generator=generator) / features**0.5).bfloat16()
        y = project_heads(x, w, width, 0).values
        torch.testing.assert_close(y.flatten(1), x @ w.t(), rtol=2**-7, atol=2e-2)
        out = project_heads(x, w, width, 4)
        assert out.coded is not None
        plane = head_plane(y[:, :4].contiguous(), square=False, backend="reference")
        _different(f"projection {rows}x{features}, heads of {width}", out.coded.plane, plane.plane)
        if not torch.equal(out.values, y[:, 4:]):
            raise AssertionError("projection: values beside codes differ")
