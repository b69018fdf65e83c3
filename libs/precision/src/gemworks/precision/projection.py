"""The q/k/v projection with the cast in its epilogue: codes and scales straight for attention.

Shape letters: M rows, K features, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.precision.attention import HEAD_WIDTHS, HeadPlane, head_plane
from gemworks.precision.backends import choose, interpreting
from gemworks.precision.casts import CastSpec, device_of
from gemworks.precision.formats import Format
from gemworks.precision.launch import launch
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.recipe import GemmKind
from gemworks.precision.scales import ScaleMode
from torch import Tensor

BLOCK_ROWS, BLOCK_FEATURES, GROUP = 128, 64, 8


@dataclass(frozen=True)
class Projected:
    """Result of `project_heads`: the plane of the quantised heads (None if there are none), values of the others."""

    coded: HeadPlane | None
    values: Tensor


def project_heads(
    x: Tensor,
    weight: Tensor,
    width: int,
    num_coded: int,
    *,
    bias: Tensor | None = None,
    format: str | Format = "e4m3",
    scale_mode: str | ScaleMode = "rceil",
    backend: str = "auto",
) -> Projected:
    """`x W^T + bias` as heads, the first `num_coded` of them quantised under one scale a row and head.

    The planes are exactly those of `head_plane(y, square=False)` of the projection y that was computed, rounded to x's
    dtype; y itself may differ in its last bit between backends, as sums are ordered differently.

    Args:
        x: `[M, K]`, bf16, fp16 or fp32.
        weight: `[H D, K]` in x's dtype: for attention that takes codes of q and k, q's heads, k's, then v's.
        width: D.
        num_coded: heads that become codes; the others stay values.
        bias: `[H D]`.
        format, scale_mode, backend: as in `head_plane`.

    Raises:
        ValueError: shapes, width, number of heads or format that do not fit.

    >>> out = project_heads(torch.ones(3, 64), torch.eye(64).repeat(3, 1), width=32, num_coded=4)
    >>> tuple(out.coded.codes.shape), tuple(out.coded.scales.shape), tuple(out.values.shape)
    ((3, 4, 32), (3, 4), (3, 2, 32))
    """
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(
            f"x and weight: got {tuple(x.shape)} {x.dtype} and {tuple(weight.shape)} {weight.dtype}, expected [M, K] "
            f"and [H D, K] of one dtype"
        )
    if width not in HEAD_WIDTHS or weight.shape[0] % width:
        raise ValueError(f"width: got {width} for {weight.shape[0]} outputs, expected a divisor among {HEAD_WIDTHS}")
    heads = weight.shape[0] // width
    if not 0 <= num_coded <= heads:
        raise ValueError(f"num_coded: got {num_coded}, expected 0 to {heads}, the number of heads")
    spec = CastSpec(GemmKind.MXFP8, Format(format), ScaleMode(scale_mode))
    if spec.format is Format.E2M1:
        raise ValueError("format: got 'e2m1', expected 'e4m3' or 'e5m2': attention reads 8-bit codes")
    chosen = choose("cast", spec.kind, (0, 0, 0), device_of(x), backend).backend
    if chosen == "triton" and (x.is_cuda or backend == "triton") and x.numel():
        return _project_triton(x, weight, width, heads, num_coded, bias, spec)
    y = torch.nn.functional.linear(x, weight, bias).unflatten(1, (heads, width))
    plane = None
    if num_coded:
        kind = "reference" if chosen == "reference" else backend
        plane = head_plane(
            y[:, :num_coded].contiguous(), square=False, format=spec.format, scale_mode=spec.scale_mode, backend=kind
        )
    return Projected(plane, y[:, num_coded:])


def _project_triton(
    x: Tensor, weight: Tensor, width: int, heads: int, num_coded: int, bias: Tensor | None, spec: CastSpec
) -> Projected:
    from gemworks.precision.kernel_common import FORMATS, MODES
    from gemworks.precision.kernel_project import project_kernel

    x, weight = x if x.stride(1) == 1 else x.contiguous(), weight.contiguous()
    rows = x.shape[0]
    codes = torch.empty(rows, num_coded, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, num_coded, dtype=torch.uint8, device=x.device)
    values = torch.empty(rows, heads - num_coded, width, dtype=x.dtype, device=x.device)
    wide = x.dtype is torch.float32
    block_rows = 64 if wide or width > 128 else BLOCK_ROWS
    constants = {
        "HAS_BIAS": bias is not None,
        "D": width,
        "BM": block_rows,
        "BK": 32 if wide else BLOCK_FEATURES,
        "GROUP": GROUP,
        "FORMAT": FORMATS[spec.format.value],
        "MODE": MODES[spec.scale_mode.value],
        "HARDWARE": not interpreting(),
        "PRECISION": "ieee",
    }
    tensors = (x, weight, bias if bias is not None else weight, codes, scales, values)
    launch(
        project_kernel,
        (-(-rows // block_rows) * heads, 1, 1),
        (*tensors, rows, x.shape[1], x.stride(0), heads, num_coded),
        constants,
        {"num_warps": 8, "num_stages": 3},
    )
    if not num_coded:
        return Projected(None, values)
    shape = (rows * num_coded, width)
    plane = MXTensor(codes.view(shape), scales.view(-1, 1), shape, 1, width, spec.format, spec.scale_mode)
    return Projected(HeadPlane(codes, scales, plane), values)
