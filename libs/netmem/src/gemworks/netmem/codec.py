"""Codecs: a tensor becomes fewer bytes and, approximately, the tensor again.

A codec is any object with `name`, `encode`, `decode` and `nbytes` (see `Codec`). Those here take every shape: empty,
odd, zero-dimensional. Elements are taken in logical (row-major) order whatever the strides.

The torch code is the definition and runs everywhere. On a GPU with Triton the FP8 codecs run as one kernel each way
(`kernel_codec`), with the same bits; `explain_codec` says which runs and why.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from gemworks.netmem.checks import check_kind, check_number
from gemworks.netmem.errors import CodecError

E4M3_MAX = 448.0
MX_BLOCK = 32
E8M0_BIAS = 127
E8M0_NAN = 255
MAX_KERNEL_BLOCK = 8192  # kernel_codec.MAX_BLOCK; importing that module imports Triton
# The smallest scale that keeps 1 / scale finite in float32.
MIN_SCALE = 2.0**-126


@runtime_checkable
class Codec(Protocol):
    """What the offload engine, the activation policy and the collectives ask of a codec."""

    @property
    def name(self) -> str:
        """Short name, used in reports and errors."""
        ...

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The codes of a floating-point tensor: contiguous tensors on the same device. Takes meta tensors too."""
        ...

    def decode(self, codes: tuple[torch.Tensor, ...], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape and dtype, from what `encode` gave."""
        ...

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of all codes of a tensor of that shape and dtype."""
        ...


def decode_checked(
    codec: Codec, codes: tuple[torch.Tensor, ...], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Decode, and raise `CodecError` unless the result has the shape, dtype and device that were encoded."""
    x = codec.decode(codes, shape, dtype)
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype or x.device != device:
        raise CodecError(
            f"codec {codec.name!r}: expected {tuple(shape)} {dtype} on {device} back, "
            f"got {tuple(x.shape)} {x.dtype} on {x.device}; fix its decode"
        )
    return x


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """float32 `[num_blocks, block]` of the elements of x in row-major order, zero-padded at the end."""
    flat = x.reshape(-1).float()
    missing = -flat.numel() % block
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, block)


def _numel(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _check_floating(x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise ValueError(f"x: expected a floating-point tensor, got {getattr(x, 'dtype', x)}")


def _check_codes(raw: torch.Tensor, shape: Sequence[int]) -> None:
    if raw.numel() != _numel(shape):
        raise ValueError(f"codes: expected {_numel(shape)} of them for shape {tuple(shape)}, got {raw.numel()}")


@functools.cache
def has_triton() -> bool:
    """Is Triton installed? Does not import it."""
    return importlib.util.find_spec("triton") is not None


def _no_kernel(device: torch.device, dtype: torch.dtype, block: int) -> str | None:
    """Why the kernels don't serve this, or None if they do."""
    if device.type != "cuda":
        return f"tensors on {device.type}: the kernels are for CUDA"
    if not has_triton():
        return "Triton is not installed"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{dtype}: the kernels take float32, bfloat16 and float16"
    if block > MAX_KERNEL_BLOCK:
        return f"blocks of {block} elements: the kernels take at most {MAX_KERNEL_BLOCK}"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no FP8 conversions (they came with compute capability 8.9)"
    return None


def _use_kernel(x: torch.Tensor, dtype: torch.dtype, block: int) -> bool:
    # a compiler fuses the torch code with its neighbours, which beats a kernel of our own
    return x.numel() > 0 and not torch.compiler.is_compiling() and _no_kernel(x.device, dtype, block) is None


@dataclass(frozen=True)
class Bf16Codec:
    """Rounds to bfloat16: half of float32's bytes; lossless for bfloat16."""

    @property
    def name(self) -> str:
        return "bf16"

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _check_floating(x)
        return (x.to(torch.bfloat16).contiguous(),)

    def decode(self, codes: tuple[torch.Tensor, ...], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        (raw,) = codes
        _check_codes(raw, shape)
        return raw.view(tuple(shape)).to(dtype)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return 2 * _numel(shape)


@dataclass(frozen=True)
class Fp8Codec:
    """E4M3 codes with one float32 scale per block: `x ~ code * scale`, `scale = max|block| / 448`, and
    `code = round(x * (1 / scale))`.

    A block with an infinity or a NaN decodes to NaN, so that a broken step stays visible.

    Args:
        block: elements per scale, counted in row-major order; None: one scale per row of the last dim ("row-wise").

    >>> codec = Fp8Codec()
    >>> x = torch.tensor([[448.0, 1.1, 0.0], [224.0, 0.25, -0.5]])
    >>> codec.decode(codec.encode(x), x.shape, x.dtype).tolist()
    [[448.0, 1.125, 0.0], [224.0, 0.25, -0.5]]
    >>> codec.nbytes((2, 3), torch.float32)
    14
    """

    block: int | None = None

    def __post_init__(self) -> None:
        if self.block is not None:
            check_number("block", self.block, 1, whole=True, fix="None is for whole rows")

    @property
    def name(self) -> str:
        return "fp8_row" if self.block is None else f"fp8_block{self.block}"

    def _block(self, shape: Sequence[int]) -> int:
        return self.block or max(1, shape[-1] if len(shape) else 1)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _check_floating(x)
        if _use_kernel(x, x.dtype, self._block(x.shape)):
            from gemworks.netmem import kernel_codec

            return kernel_codec.encode(x, self._block(x.shape), mx=False)
        blocks = _blocks(x, self._block(x.shape))
        scale = (blocks.abs().amax(dim=1) / E4M3_MAX).clamp_min(MIN_SCALE) if blocks.numel() else blocks.new_ones(0)
        # one division per block; the largest element may come out a rounding above 448, hence the clamp
        codes = (blocks * (1.0 / scale)[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8).view(-1)[: x.numel()], scale

    def decode(self, codes: tuple[torch.Tensor, ...], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raw, scale = codes
        _check_codes(raw, shape)
        if _use_kernel(raw, dtype, self._block(shape)):
            from gemworks.netmem import kernel_codec

            return kernel_codec.decode(raw, scale, self._block(shape), mx=False, dtype=dtype).view(tuple(shape))
        blocks = _blocks(raw.view(torch.float8_e4m3fn), self._block(shape)) * scale[:, None]
        return blocks.view(-1)[: _numel(shape)].view(tuple(shape)).to(dtype)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        numel = _numel(shape)
        return numel + 4 * math.ceil(numel / self._block(shape))


@dataclass(frozen=True)
class MXFP8Codec:
    """OCP MXFP8: E4M3 codes, one E8M0 scale byte per 32 elements: `x ~ code * 2^(byte - 127)`.

    The exponent is the smallest with `max|block| <= 448 * 2^e`, so that nothing saturates (rounding "up" of the
    scale). A block with an infinity or a NaN gets the NaN scale byte 255 and decodes to NaN.
    Source: OCP Microscaling Formats specification v1.0.
    """

    @property
    def name(self) -> str:
        return "mxfp8"

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _check_floating(x)
        if _use_kernel(x, x.dtype, MX_BLOCK):
            from gemworks.netmem import kernel_codec

            return kernel_codec.encode(x, MX_BLOCK, mx=True)
        blocks = _blocks(x, MX_BLOCK)
        amax = blocks.abs().amax(dim=1) if blocks.numel() else blocks.new_zeros(0)
        # amax = m * 2^e with m in [0.5, 1) and 448 = 0.875 * 2^9: the least exponent is e - 9, one more where m > 0.875
        mantissa, exponent = torch.frexp(amax)
        exponent = exponent - 9 + (mantissa > 0.875).to(torch.int32)
        exponent = torch.where(amax == 0, -E8M0_BIAS, exponent).clamp(-E8M0_BIAS, E8M0_BIAS)
        scaled = _times_power_of_two(blocks, -exponent[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
        byte = torch.where(amax.isfinite(), exponent + E8M0_BIAS, E8M0_NAN).to(torch.uint8)
        codes = scaled.to(torch.float8_e4m3fn)
        return codes.view(torch.uint8).view(-1)[: x.numel()], byte

    def decode(self, codes: tuple[torch.Tensor, ...], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raw, byte = codes
        _check_codes(raw, shape)
        if _use_kernel(raw, dtype, MX_BLOCK):
            from gemworks.netmem import kernel_codec

            return kernel_codec.decode(raw, byte, MX_BLOCK, mx=True, dtype=dtype).view(tuple(shape))
        blocks = _blocks(raw.view(torch.float8_e4m3fn), MX_BLOCK)
        blocks = _times_power_of_two(blocks, byte.to(torch.int32)[:, None] - E8M0_BIAS)
        blocks = torch.where(byte[:, None] == E8M0_NAN, math.nan, blocks)
        return blocks.view(-1)[: _numel(shape)].view(tuple(shape)).to(dtype)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        numel = _numel(shape)
        return numel + math.ceil(numel / MX_BLOCK)


def _times_power_of_two(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """`x * 2^exponent` in two factors, because 2^-127 and 2^128 are not normal float32 numbers."""
    half = torch.div(exponent, 2, rounding_mode="floor").to(torch.int32)
    # built from the exponent's bits: pow() need not be exact on a GPU
    factors = [((e + E8M0_BIAS) << 23).view(torch.float32) for e in (half, exponent.to(torch.int32) - half)]
    return x * factors[0] * factors[1]


BUILTIN: dict[str, Codec] = {
    "bf16": Bf16Codec(),
    "fp8_row": Fp8Codec(),
    "fp8_block128": Fp8Codec(128),
    "mxfp8": MXFP8Codec(),
}


def kernel_layout(
    codec: Codec, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[int, bool] | None:
    """(elements per scale, E8M0 scales) where the kernels serve a tensor of that kind, else None."""
    if not isinstance(codec, Fp8Codec | MXFP8Codec):
        return None
    mx = isinstance(codec, MXFP8Codec)
    block = MX_BLOCK if isinstance(codec, MXFP8Codec) else codec._block(shape)
    return None if _no_kernel(device, dtype, block) or not _numel(shape) else (block, mx)


def explain_codec(codec: str | Codec, x: torch.Tensor) -> str:
    """Which implementation codes a tensor, and why.

    >>> explain_codec("mxfp8", torch.zeros(2))
    'torch: tensors on cpu: the kernels are for CUDA'
    """
    coder = get_codec(codec)
    check_kind("x", x, torch.Tensor)
    if isinstance(coder, Fp8Codec):
        why = _no_kernel(x.device, x.dtype, coder._block(x.shape))
    elif isinstance(coder, MXFP8Codec):
        why = _no_kernel(x.device, x.dtype, MX_BLOCK)
    else:
        return f"{type(coder).__name__}: its own code"
    return "triton: one kernel each way" if why is None else f"torch: {why}"


def get_codec(codec: str | Codec) -> Codec:
    """A built-in codec by name, or the codec itself.

    Raises:
        ValueError: unknown name, or an object without `encode`, `decode` and `nbytes`.
    """
    if isinstance(codec, str):
        if codec not in BUILTIN:
            raise ValueError(f"codec: got {codec!r}, expected one of {sorted(BUILTIN)} or a codec object")
        return BUILTIN[codec]
    if not isinstance(codec, Codec):
        raise ValueError(f"codec: got {codec!r}, expected an object with name, encode, decode and nbytes")
    return codec
