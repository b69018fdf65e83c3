"""`MXTensor`: codes, E8M0 scales and what is needed to read them back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from gemworks.precision.checks import check_tensor
from gemworks.precision.formats import Format, decode, element_spec, unpack_e2m1
from gemworks.precision.hadamard import Hadamard, hadamard_inverse
from gemworks.precision.scales import ScaleMode, scale_values
from torch import Tensor

ROW_BLOCK_SIZES = (32, 64, 128, 256)
SQUARE_BLOCK_SIZES = (32, 128)


@dataclass(frozen=True)
class MXTensor:
    """A quantised array: element = decode(code) * 2^(scale byte - 127).

    Attributes:
        codes: uint8, the (padded) shape of the array; E2M1 holds two codes a byte along `dim`. The quantised dim is
            contiguous in memory whatever `dim` is, as tensor cores want their contraction.
        scales: uint8 E8M0 bytes; the array's shape with `dim` divided by `block`, rounded up (square: both dims).
        shape: the shape of the array that was quantised.
        dim: the dim that blocks run along, counted from the front; None for square blocks (over the last two dims).
        block: elements per scale: 32 is OCP MX, 128 the Hopper form, others serve attention heads.
        hadamard: the transform that was applied before quantisation (None: none); it pads `dim`.
        wide: the scales as fp32, in the shape and memory order of Hopper's products (`scaled_mm`), where a cast kernel
            wrote them so: then `scales` is made from them when somebody asks. Otherwise None; made when needed.
        whole: where the cast kernel left zero codes behind the matrix, all of them: `codes` is its first corner, and
            products, whose sizes are multiples of 16 and 128, read it without a copy.
    """

    codes: Tensor
    scales: Tensor
    shape: tuple[int, ...]
    dim: int | None
    block: int
    format: Format
    scale_mode: ScaleMode
    hadamard: Hadamard | None = None
    wide: Tensor | None = field(default=None, compare=False, repr=False)
    whole: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, value, kind in (("format", self.format, Format), ("scale_mode", self.scale_mode, ScaleMode)):
            if not isinstance(value, kind):
                raise ValueError(f"{name}: got {value!r}, expected a {kind.__name__}; {kind.__name__}(name) is one")
        sizes = SQUARE_BLOCK_SIZES if self.dim is None else ROW_BLOCK_SIZES
        if self.block not in sizes:
            raise ValueError(f"block: got {self.block!r}, expected one of {sizes} along dim {self.dim}")
        dims = len(self.shape)
        if dims < 2 if self.dim is None else self.dim not in range(dims):
            raise ValueError(
                f"dim: got {self.dim!r}, expected one in [0, {dims}) of shape {self.shape}, or None for squares "
                "over the last two dims"
            )
        for name, tensor in (("codes", self.codes), ("scales", self.scales)):
            check_tensor(name, tensor)
        expected = scale_shape(self.padded_shape, self.dim, self.block)
        if tuple(self.scales.shape) != expected:
            raise ValueError(
                f"scales: got shape {tuple(self.scales.shape)}, expected {expected} for an array of shape "
                f"{self.padded_shape} in blocks of {self.block} along dim {self.dim}; "
                "pass the scales that came with these codes"
            )
        for name, tensor in (("codes", self.codes), ("scales", self.scales)):
            if tensor.dtype != torch.uint8:
                raise ValueError(
                    f"{name}: got dtype {tensor.dtype}, expected torch.uint8; use tensor.view(torch.uint8)"
                )
        if tuple(self.codes.shape) != self.code_shape:
            raise ValueError(f"codes: got shape {tuple(self.codes.shape)}, expected {self.code_shape}")
        if self.codes.device != self.scales.device:
            raise ValueError(f"scales: on {self.scales.device}, codes are on {self.codes.device}; move one of them")

    @classmethod
    def unchecked(
        cls,
        codes: Tensor,
        scales: Tensor | None,
        wide: Tensor | None,
        shape: tuple[int, ...],
        dim: int | None,
        block: int,
        format: Format,
        scale_mode: ScaleMode,
        hadamard: Hadamard | None = None,
    ) -> MXTensor:
        """For callers that made the tensors themselves: checks are most of what making a plane costs the host.

        Codes of a matrix may be larger than it: then they are `whole`. scales may be None where wide is given.
        """
        plane = object.__new__(cls)
        whole = None
        if codes.shape != shape and len(shape) == 2 and hadamard is None and format is not Format.E2M1:
            whole, codes = codes, codes[: shape[0], : shape[1]]
        values = (codes, scales, shape, dim, block, format, scale_mode, hadamard, wide, whole)
        plane.__dict__.update(zip(_FIELDS, values, strict=True))
        if scales is None:
            del plane.__dict__["scales"]
        return plane

    def __getattr__(self, name: str) -> Tensor:
        if name != "scales" or self.__dict__.get("wide") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        assert self.wide is not None
        rows, columns = scale_shape(self.shape, self.dim, self.block)
        # A NaN has the exponent field 255, the byte of a NaN scale.
        bits = (self.wide if self.dim is not None else self.wide.t()).view(torch.int32)
        scales = (bits[:rows, :columns] >> 23).to(torch.uint8)
        object.__setattr__(self, "scales", scales)
        return scales

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Codes (all of them), scales and `wide`, or None for one of the two: the first arguments of `unchecked`."""
        codes = self.codes if self.whole is None else self.whole
        return (codes, self.scales, None) if self.wide is None else (codes, None, self.wide)

    @property
    def meta(self) -> tuple[Any, ...]:
        """Everything but the tensors, in the order of `unchecked`."""
        return self.shape, self.dim, self.block, self.format, self.scale_mode, self.hadamard

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """`shape`, with `dim` rounded up to the Hadamard size where a transform was applied."""
        if self.hadamard is None or self.dim is None:
            return self.shape
        size = self.hadamard.size
        return tuple(-(-n // size) * size if i == self.dim else n for i, n in enumerate(self.shape))

    @property
    def code_shape(self) -> tuple[int, ...]:
        """Shape of `codes`: the padded shape, halved along `dim` for E2M1."""
        if self.format is not Format.E2M1:
            return self.padded_shape
        packed = len(self.shape) - 1 if self.dim is None else self.dim
        return tuple(-(-n // 2) if i == packed else n for i, n in enumerate(self.padded_shape))

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.numel() + self.scales.numel()

    @property
    def float8_codes(self) -> Tensor:
        """`codes` viewed as torch's float8 dtype of the format (no copy)."""
        dtype = _FLOAT8.get(self.format)
        if dtype is None:
            raise ValueError(f"float8_codes: format {self.format.value!r} has no 8-bit torch dtype; read .codes")
        return self.codes.view(dtype)

    def element_codes(self) -> Tensor:
        """One code per byte, of `padded_shape`; unpacks E2M1."""
        if self.format is not Format.E2M1:
            return self.codes
        dim = len(self.shape) - 1 if self.dim is None else self.dim
        return unpack_e2m1(self.codes.movedim(dim, -1), self.padded_shape[dim]).movedim(-1, dim)

    def expanded_scales(self) -> Tensor:
        """fp32 scale of every element, of `padded_shape`."""
        return expand_blocks(scale_values(self.scales), self.padded_shape, self.dim, self.block)

    def dequantize(self, dtype: torch.dtype = torch.float32, *, keep_transform: bool = False) -> Tensor:
        """The values, rounded once from exact to `dtype`.

        E4M3 times a scale byte in 3..246 is exact in bf16, every byte up to 246 is exact in fp32; a product beyond
        fp32 (bytes 247 and up) overflows to inf. A block with scale byte 0xFF is NaN throughout.

        Args:
            dtype: of the result.
            keep_transform: leave a Hadamard transform (and its padding) in place, as a GEMM wants it.

        Returns:
            `shape`; `padded_shape` with `keep_transform`.

        Raises:
            ValueError: a dtype that is no floating point.

        >>> from gemworks.precision import quantize
        >>> quantize(torch.tensor([[1.0, 448.0]])).dequantize().tolist()
        [[1.0, 448.0]]
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype: got {dtype!r}, expected floating point, e.g. torch.bfloat16")
        values = decode(self.element_codes(), self.format) * self.expanded_scales()
        if self.hadamard is not None and not keep_transform:
            assert self.dim is not None
            values = hadamard_inverse(values, self.hadamard, self.dim).narrow(self.dim, 0, self.shape[self.dim])
        return values.to(dtype)

    def t(self) -> MXTensor:
        """The transpose of a 2-D plane, without copying: a square plane serves both products of a weight."""
        if len(self.shape) != 2:
            raise ValueError(f"t: got {len(self.shape)} dims, expected 2")
        if self.format is Format.E2M1 and self.dim is None:
            raise ValueError(
                "t: a packed E2M1 square plane cannot be transposed without repacking; quantise the transpose"
            )
        # Squares are padded along their contraction, which is now the other dim.
        wide = None if self.dim is None or self.wide is None else self.wide.t()
        return MXTensor.unchecked(
            (self.codes if self.whole is None else self.whole).t(),
            self.scales.t() if wide is None else None,
            wide,
            (self.shape[1], self.shape[0]),
            None if self.dim is None else 1 - self.dim,
            self.block,
            self.format,
            self.scale_mode,
            self.hadamard,
        )


_FLOAT8 = {format: dtype for format in Format if (dtype := element_spec(format).torch_dtype) is not None}
_FIELDS = ("codes", "scales", "shape", "dim", "block", "format", "scale_mode", "hadamard", "wide", "whole")


def _flatten_mx(mx: MXTensor) -> tuple[list[Tensor], tuple[object, ...]]:
    return [mx.codes, mx.scales], mx.meta


def _unflatten_mx(tensors: Iterable[Any], context: Any) -> MXTensor:
    codes, scales = tensors
    return MXTensor.unchecked(codes, scales, None, *context)


pytree.register_pytree_node(MXTensor, _flatten_mx, _unflatten_mx, serialized_type_name="gemworks.precision.MXTensor")


def padded_rows(num_rows: int) -> int:
    """Rows of the planes that a tile kernel writes, zero behind the real ones: what the products of any number of rows
    read, so that nothing is copied in front of them.

    >>> padded_rows(256), padded_rows(257)
    (256, 384)
    """
    return -(-num_rows // 128) * 128


def scale_shape(shape: tuple[int, ...], dim: int | None, block: int) -> tuple[int, ...]:
    """Shape of the scales of an array in blocks of `block` along `dim` (None: squares over the last two dims)."""
    blocked = (len(shape) - 2, len(shape) - 1) if dim is None else (dim,)
    return tuple(-(-n // block) if i in blocked else n for i, n in enumerate(shape))


def expand_blocks(per_block: Tensor, shape: tuple[int, ...], dim: int | None, block: int) -> Tensor:
    """Repeat one entry per block over the elements of the block; cut a ragged last block to `shape`."""
    for d in (len(shape) - 2, len(shape) - 1) if dim is None else (dim,):
        per_block = per_block.repeat_interleave(block, dim=d).narrow(d, 0, shape[d])
    return per_block
