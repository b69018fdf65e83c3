"""Regrouping: MX blocks of 32 turned into 128-wide ones by shifting exponents, with a count of what that loses.

Hopper has no block-scaled product for 32-wide blocks but fast ones for 1x128 and 128x128. A wider block takes the
largest exponent of its members; the codes of the others move down by the difference, which is exact until they reach
the subnormals of the element format. What rounds is counted, so that a caller can fall back to exact arithmetic.
"""

from __future__ import annotations

import torch
from gemworks.precision.formats import E8M0_BIAS, E8M0_NAN, decode, element_spec, encode
from gemworks.precision.mxtensor import MXTensor, expand_blocks
from torch import Tensor


def regroup(mx: MXTensor, *, square: bool = False) -> tuple[MXTensor, Tensor]:
    """Merge 32-wide blocks into 1x128 along the same dim, or (`square`) into 128x128.

    Args:
        mx: an 8-bit plane with block 32 (along a dim, or square).
        square: merge into 128x128 over the last two dims.

    Returns:
        The plane with block 128 and a scalar int64 tensor: how many codes lost their exact value. No host sync.

    Raises:
        ValueError: block other than 32, a 4-bit format, or a square plane without `square=True`.

    >>> from gemworks.precision import quantize
    >>> plane, inexact = regroup(quantize(torch.ones(2, 256)))
    >>> plane.block, tuple(plane.scales.shape), inexact.item()
    (128, (2, 2), 0)
    """
    if not isinstance(mx, MXTensor):
        raise ValueError(f"mx: got {type(mx).__name__}, expected an MXTensor; quantize(x) makes one")
    spec = element_spec(mx.format)
    if mx.block != 32 or spec.torch_dtype is None:
        raise ValueError(f"mx: got block {mx.block} and format {mx.format.value!r}, expected block 32 of e4m3 or e5m2")
    if square and len(mx.shape) < 2:
        raise ValueError(f"mx: got shape {mx.shape}, squares need at least 2 dims; leave square unset")
    if mx.dim is None and not square:
        raise ValueError("mx: square 32x32 blocks merge into 128x128 only; pass square=True")
    scales = mx.scales.to(torch.int32)
    merged = scales
    dims = (len(mx.shape) - 2, len(mx.shape) - 1) if square else (mx.dim,)
    for dim in dims:
        assert dim is not None
        # Along a dim that the old blocks do not run along, one old scale covers one element: 128 of them merge.
        group = 4 if mx.dim is None or dim == mx.dim else 128
        merged = _block_max(merged, dim, group)
    merged = torch.where(merged == E8M0_NAN, E8M0_NAN, merged.clamp(min=1))
    new_dim = None if square else mx.dim
    shift = expand_blocks(scales, mx.padded_shape, mx.dim, 32) - expand_blocks(merged, mx.padded_shape, new_dim, 128)
    values = decode(mx.codes, mx.format)
    # 2^shift from exponent bits; under 2^-126 nothing of any code is left.
    factor = ((shift.clamp(-126, 127) + E8M0_BIAS) << 23).to(torch.int32).view(torch.float32)
    codes = encode(values * factor, mx.format)
    not_finite = expand_blocks(merged == E8M0_NAN, mx.padded_shape, new_dim, 128)
    inexact = ((decode(codes, mx.format) != values * factor) & ~not_finite).sum()
    codes = torch.where(not_finite, spec.nan_code, codes).to(torch.uint8)
    if new_dim is not None:
        codes = codes.movedim(new_dim, -1).contiguous().movedim(-1, new_dim)
    plane = MXTensor(codes, merged.to(torch.uint8), mx.shape, new_dim, 128, mx.format, mx.scale_mode, mx.hadamard)
    return plane, inexact


def _block_max(scales: Tensor, dim: int, group: int) -> Tensor:
    rows = scales.movedim(dim, -1)
    num_groups = -(-rows.shape[-1] // group)
    rows = torch.nn.functional.pad(rows, (0, num_groups * group - rows.shape[-1]))
    return rows.unflatten(-1, (num_groups, group)).amax(dim=-1).movedim(-1, dim)
