# Triton's language is typed by its own compiler, not by Python's: pyright is quiet in this file.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportIndexIssue=false
"""The built-in FP8 codecs as one kernel each way, and sums of what ranks sent: every element is read once and written
once.

The same bits as the definitions in `codec`: divisions, one per block, round to nearest; scale exponents come from
integer arithmetic; an element costs one multiplication. A code is rounded by the hardware's conversion where
`HARDWARE` is set, and in float32 first otherwise: Triton's interpreter loses carries when it converts to FP8, and
exact values it converts right.

Triton is imported here; nothing in the package imports this module before a tensor on a GPU asks for it.

Letters: R blocks per program, P elements of a block, padded to a power of two, W ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# elements of a tile, and the longest block that one program can hold
TILE = 4096
MAX_BLOCK = 8192
NUM_WARPS = 4


@triton.jit
def _e4m3_exact(x):
    """The E4M3 value nearest to |x| <= 448, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # below 2^-6 codes are multiples of 2^-9, the spacing of float32 at 1.5 * 2^14
    small = tl.abs((x + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return tl.where(tl.abs(x) < 0.015625, small.to(tl.float32, bitcast=True), normal)


@triton.jit
def _tile(numel, num_blocks, BLOCK: tl.constexpr, P: tl.constexpr, R: tl.constexpr, MASK: tl.constexpr):
    """First element of this program (int64), offsets from it, and which of them exist."""
    row_R = tl.arange(0, R)
    col_P = tl.arange(0, P)
    first_row = tl.program_id(0).to(tl.int64) * R
    at_RP = row_R[:, None] * BLOCK + col_P[None, :]
    there_R = row_R < num_blocks - first_row
    there_RP = tl.broadcast_to(there_R[:, None], R, P)
    if MASK == 2:
        there_RP &= (col_P < BLOCK)[None, :] & (at_RP < numel - first_row * BLOCK)
    return first_row, row_R, at_RP, there_R, there_RP


@triton.jit
def encode_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    numel,
    num_blocks,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    MASK: tl.constexpr,
    MX: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    first_row, row_R, at_RP, there_R, there_RP = _tile(numel, num_blocks, BLOCK, P, R, MASK)
    x_ptr += first_row * BLOCK
    codes_ptr += first_row * BLOCK
    if MASK == 0:
        x_RP = tl.load(x_ptr + at_RP).to(tl.float32)
    else:
        x_RP = tl.load(x_ptr + at_RP, mask=there_RP, other=0.0).to(tl.float32)
    # the largest magnitude by its bits: a NaN is above an infinity is above every number
    top_R = tl.max(x_RP.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if MX:
        # at most 247: a finite float32 is below 2^128
        byte_R = tl.maximum((top_R >> 23) - 8 + ((top_R & 0x7FFFFF) > 0x600000).to(tl.int32), 0)
        inverse_R = ((254 - byte_R) << 23).to(tl.float32, bitcast=True)
        scale_R = tl.where(top_R >= 0x7F800000, 255, byte_R).to(tl.uint8)
    else:
        scale_R = tl.div_rn(top_R.to(tl.float32, bitcast=True), 448.0)
        scale_R = tl.where(scale_R < 1.1754943508222875e-38, 1.1754943508222875e-38, scale_R)  # a NaN stays
        inverse_R = tl.div_rn(1.0, scale_R)
    scaled_RP = x_RP * inverse_R[:, None]
    if not HARDWARE:  # the hardware's conversion saturates by itself
        scaled_RP = _e4m3_exact(tl.clamp(scaled_RP, -448.0, 448.0))
    codes_RP = scaled_RP.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if MASK == 0:
        tl.store(codes_ptr + at_RP, codes_RP)
    else:
        tl.store(codes_ptr + at_RP, codes_RP, mask=there_RP)
    tl.store(scales_ptr + first_row + row_R, scale_R, mask=there_R)


@triton.jit
def _scale(stored, MX: tl.constexpr):
    """A stored scale as float32; NaN for a block that held an infinity or a NaN."""
    if MX:
        byte = stored.to(tl.int32)
        # 2^-127 is subnormal; byte 255 is the format's NaN
        bits = tl.where(byte == 0, 0x400000, byte << 23)
        scale = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        scale = tl.where(stored < float("inf"), stored, float("nan"))
    return scale


@triton.jit
def decode_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    numel,
    num_blocks,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    MASK: tl.constexpr,
    MX: tl.constexpr,
):
    first_row, row_R, at_RP, there_R, there_RP = _tile(numel, num_blocks, BLOCK, P, R, MASK)
    codes_ptr += first_row * BLOCK
    out_ptr += first_row * BLOCK
    codes_RP = tl.load(codes_ptr + at_RP) if MASK == 0 else tl.load(codes_ptr + at_RP, mask=there_RP, other=0)
    scale_R = tl.load(scales_ptr + first_row + row_R, mask=there_R, other=0)
    x_RP = codes_RP.to(tl.float8e4nv, bitcast=True).to(tl.float32) * _scale(scale_R, MX)[:, None]
    if MASK == 0:
        tl.store(out_ptr + at_RP, x_RP.to(out_ptr.dtype.element_ty))
    else:
        tl.store(out_ptr + at_RP, x_RP.to(out_ptr.dtype.element_ty), mask=there_RP)


@triton.jit
def decode_sum_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    codes_stride,
    scales_stride,
    numel,
    num_blocks,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    MASK: tl.constexpr,
    MX: tl.constexpr,
    MEAN: tl.constexpr,
):
    """The float32 sum of W decoded tensors, in their order; strides from one to the next in elements."""
    first_row, row_R, at_RP, there_R, there_RP = _tile(numel, num_blocks, BLOCK, P, R, MASK)
    codes_ptr += first_row * BLOCK
    scales_ptr += first_row
    total_RP = tl.zeros((R, P), dtype=tl.float32)
    for w in tl.static_range(W):
        codes_RP = tl.load(codes_ptr + w * codes_stride + at_RP, mask=there_RP, other=0)
        scale_R = tl.load(scales_ptr + w * scales_stride + row_R, mask=there_R, other=0)
        total_RP += codes_RP.to(tl.float8e4nv, bitcast=True).to(tl.float32) * _scale(scale_R, MX)[:, None]
    if MEAN:
        total_RP = tl.div_rn(total_RP, tl.full((R, P), W, tl.float32))
    tl.store(out_ptr + first_row * BLOCK + at_RP, total_RP.to(out_ptr.dtype.element_ty), mask=there_RP)


@triton.jit
def sum_kernel(
    own_ptr,
    parts_ptr,
    out_ptr,
    n,
    stride,
    W: tl.constexpr,
    RANK: tl.constexpr,
    MEAN: tl.constexpr,
    TILE_: tl.constexpr,
):
    """The float32 sum of W tensors in the order of ranks; that of RANK lies apart from the others."""
    first = tl.program_id(0).to(tl.int64) * TILE_
    at = tl.arange(0, TILE_)
    there = at < n - first
    total = tl.zeros((TILE_,), dtype=tl.float32)
    for w in tl.static_range(W):
        if w == RANK:
            total += tl.load(own_ptr + first + at, mask=there, other=0.0).to(tl.float32)
        else:
            total += tl.load(parts_ptr + w * stride + first + at, mask=there, other=0.0).to(tl.float32)
    if MEAN:
        total = tl.div_rn(total, tl.full((TILE_,), W, tl.float32))
    tl.store(out_ptr + first + at, total.to(out_ptr.dtype.element_ty), mask=there)


def _shape(numel: int, block: int) -> tuple[int, dict[str, int]]:
    """(blocks, constants of the kernels). MASK 0: tiles are full; 1: rows may be missing; 2: elements may be."""
    padded, num_blocks = triton.next_power_of_2(block), triton.cdiv(numel, block)
    rows = max(1, TILE // padded)
    mask = 2 if padded != block or numel % block else int(num_blocks % rows != 0)
    return num_blocks, {"BLOCK": block, "P": padded, "R": rows, "MASK": mask}


def encode(
    x: torch.Tensor,
    block: int,
    mx: bool,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    hardware: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 `[numel]` and one scale per block of the elements of x in row-major order.

    Args:
        x: float32, bf16 or fp16, on a GPU; contiguous, or it is copied.
        block: elements per scale, at most `MAX_BLOCK`.
        mx: E8M0 scale bytes instead of float32 scales.
        out: codes and scales to write, contiguous.
        hardware: False under the interpreter.
    """
    x = x.contiguous()
    num_blocks, constants = _shape(x.numel(), block)
    codes, scales = out or (
        torch.empty(x.numel(), dtype=torch.uint8, device=x.device),
        torch.empty(num_blocks, dtype=torch.uint8 if mx else torch.float32, device=x.device),
    )
    assert (codes.numel(), scales.numel()) == (x.numel(), num_blocks), (codes.shape, scales.shape)
    grid = (triton.cdiv(num_blocks, constants["R"]),)
    with torch.cuda.device_of(x):
        encode_kernel[grid](
            x, codes, scales, x.numel(), num_blocks, MX=mx, HARDWARE=hardware, num_warps=NUM_WARPS, **constants
        )
    return codes, scales


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: int,
    mx: bool,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[numel]` of that dtype, from what `encode` gave; into `out` if there is one."""
    num_blocks, constants = _shape(codes.numel(), block)
    out = torch.empty(codes.numel(), dtype=dtype, device=codes.device) if out is None else out
    grid = (triton.cdiv(num_blocks, constants["R"]),)
    with torch.cuda.device_of(codes):
        decode_kernel[grid](codes, scales, out, codes.numel(), num_blocks, MX=mx, num_warps=NUM_WARPS, **constants)
    return out


def decode_sum(
    messages: torch.Tensor, num: int, numel: int, block: int, mx: bool, dtype: torch.dtype, mean: bool
) -> torch.Tensor:
    """Sum (or mean) `[numel]` of `num` tensors whose codes and scales lie one after the other.

    Args:
        messages: uint8 `[num * message]`; a message is `numel` codes, then the scales. Without `mx` both sizes are
            multiples of 4.
    """
    num_blocks, constants = _shape(numel, block)
    message = messages.numel() // num
    width = 1 if mx else 4
    assert message % width == 0, message
    assert numel % width == 0, numel
    scales = messages[numel:] if mx else messages[numel:].view(torch.float32)
    out = torch.empty(numel, dtype=dtype, device=messages.device)
    grid = (triton.cdiv(num_blocks, constants["R"]),)
    with torch.cuda.device_of(messages):
        decode_sum_kernel[grid](
            messages,
            scales,
            out,
            message,
            message // width,
            numel,
            num_blocks,
            W=num,
            MX=mx,
            MEAN=mean,
            num_warps=NUM_WARPS,
            # the definition rounds each product before it adds
            enable_fp_fusion=False,
            **constants,
        )
    return out


def sum_parts(own: torch.Tensor, parts: torch.Tensor, rank: int, out: torch.Tensor, mean: bool) -> None:
    """`out[n]` = sum (or mean) over ranks in their order, in float32: row r of `parts[W, n]`, but `own[n]` for `rank`.

    Rows of `parts` may be apart by more than n.
    """
    n = out.numel()
    with torch.cuda.device_of(out):
        sum_kernel[(triton.cdiv(n, TILE),)](
            own, parts, out, n, parts.stride(0), W=parts.shape[0], RANK=rank, MEAN=mean, TILE_=TILE, num_warps=NUM_WARPS
        )
