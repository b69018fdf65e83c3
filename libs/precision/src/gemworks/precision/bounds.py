"""How far a product of two planes may be from the exact one, entry by entry, and why.

Shape letters: M, N rows of A and B; K contraction.

**fp32 accumulation** (reference, dequantise + bf16 units): `2 K 2^-24 S + u |result|`, with `S = |A| |B|^T` and `u` the
rounding unit of the output.

**Hopper's FP8 units.** One instruction adds 32 products to the accumulator in fixed point: all are shifted to the
largest exponent among them and cut off after 13 fraction bits (DeepSeek-V3 technical report, arXiv 2412.19437, section
3.5.2: 14 bits of each product, and of the accumulator; SageAttention2, arXiv 2411.10958: an accumulator of 1 + 8 + 13
bits). So an instruction adds an error under 2^-13 times the largest magnitude, rounded down to a power of two, for each
of its 32 products, its accumulator and its result. Products with 128-wide scales start a new accumulator every 128 of
K, that is every four instructions, and add it to an fp32 sum, scaled by a power of two:

    |error| <= sum over blocks, sum over their 4 instructions of 35 * 2^-13 * max(P, |A|, |A'|)
               + (K / 128 + 1) 2^-24 S + u |result|

P is the largest product of the instruction, A and A' the exact partial sums of its block before and after it; 35 = 32 +
2, rounded up for the error that A carries itself. Cut-off parts of both signs average out: independent ones of full
size would have the mean square `34 / 3 (2^-13 max(...))^2` for each instruction. Products of two codes have eight
significant bits, so most are not cut at all: over many entries a quarter of that is expected not to be exceeded (the
model in the tests reaches a sixteenth).

No multiple of `S = |A| |B|^T` smaller than about `2^-6` bounds this for K = 128: `2^-13 S`, which looks like an ulp of
the accumulator, does not. Where every product and partial sum of a block is a multiple of 2^-13 of the power of two at
or under its largest magnitude, nothing is cut off and the product is exact.

**One scale a tensor.** How often cuBLAS hands the accumulator to an fp32 sum is not documented, and with fast
accumulation it never does. Whenever it does, an accumulator is the difference of two partial sums over prefixes of the
contraction, so the range of these so far, largest less smallest, stands for `max(|A|, |A'|)`, and there are at most
K / 32 additions in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

INSTRUCTION_K = 32
PROMOTION_K = 128


def fp32_bound(left: Tensor, right: Tensor, unit: float) -> Tensor:
    """Bound `[M, N]` of a product accumulated in fp32.

    Args:
        left, right: dequantised operands `[M, K]` and `[N, K]`, float64.
        unit: rounding unit of the output dtype, 2^-8 for bf16, 2^-24 for fp32.
    """
    total = left.abs() @ right.abs().t()
    return 2 * left.shape[1] * 2.0**-24 * total + unit * (left @ right.t()).abs()


def hopper_fp8_bound(left: Tensor, right: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """Bound `[M, N]` of a product on Hopper's FP8 units with 128-wide scales, and the variance expected of its error.

    Args:
        left, right: dequantised operands `[M, K]` and `[N, K]`, float64 (scales, powers of two, change nothing).
        unit: rounding unit of the output dtype.

    >>> a, b = torch.full((1, 128), 1.0).double(), torch.full((1, 128), 1.0).double()
    >>> worst, variance = hopper_fp8_bound(a, b, 0.0)
    >>> round(worst.item() * 2**13 / 35), variance.item() > 0  # 32 + 64 + 64 + 128
    (288, True)
    """
    m, k = left.shape
    worst = torch.zeros(m, right.shape[0], dtype=torch.float64, device=left.device)
    squares, exact, total = torch.zeros_like(worst), torch.zeros_like(worst), torch.zeros_like(worst)
    for block in range(0, k, PROMOTION_K):
        partial = torch.zeros_like(worst)
        for start in range(block, min(block + PROMOTION_K, k), INSTRUCTION_K):
            a, b = left[:, start : start + INSTRUCTION_K], right[:, start : start + INSTRUCTION_K]
            largest = partial.abs()
            partial = partial + a @ b.t()
            largest = torch.maximum(largest, partial.abs())
            for column in range(a.shape[1]):
                largest = torch.maximum(largest, a[:, column, None].abs() * b[None, :, column].abs())
            # The power of two at or under the largest magnitude; log2 of a double power of two is exact.
            step = torch.exp2(torch.floor(torch.log2(largest)) - 13)
            worst += (INSTRUCTION_K + 3) * step
            squares += (INSTRUCTION_K + 2) / 12 * step.square()
            total += a.abs() @ b.abs().t()
        exact += partial
    ordinary = (-(-k // PROMOTION_K) + 1) * 2.0**-24 * total + unit * exact.abs()
    return worst + ordinary, squares + ordinary.square()


def tensor_fp8_bound(left: Tensor, right: Tensor, scale: float, unit: float) -> tuple[Tensor, Tensor]:
    """Bound `[M, N]` of a product on Hopper's FP8 units with one scale a tensor, fast accumulation or not, and the
    variance expected of its error.

    Args:
        left, right: values of codes `[M, K]` and `[N, K]` without their scales, float64.
        scale: product of both scales, applied to the sum in fp32.
        unit: rounding unit of the output dtype.

    >>> a = torch.full((1, 64), 1.0).double()
    >>> worst, _ = tensor_fp8_bound(a, a, 2.0, 0.0)
    >>> round(worst.item() * 2**13 / 35 / 2)  # 32 + 64
    96
    """
    k = left.shape[1]
    partial = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float64, device=left.device)
    worst, squares, low, high = (torch.zeros_like(partial) for _ in range(4))
    for start in range(0, k, INSTRUCTION_K):
        a, b = left[:, start : start + INSTRUCTION_K], right[:, start : start + INSTRUCTION_K]
        partial = partial + a @ b.t()
        low, high = torch.minimum(low, partial), torch.maximum(high, partial)
        largest = high - low
        for column in range(a.shape[1]):
            largest = torch.maximum(largest, a[:, column, None].abs() * b[None, :, column].abs())
        step = torch.exp2(torch.floor(torch.log2(largest)) - 13)
        worst += (INSTRUCTION_K + 3) * step
        squares += (INSTRUCTION_K + 2) / 12 * step.square()
    # The sum over instructions in fp32, both scales multiplied and applied, the output rounded.
    total = left.abs() @ right.abs().t()
    ordinary = (-(-k // INSTRUCTION_K) + 1) * 2.0**-24 * total + (unit + 3 * 2.0**-24) * partial.abs()
    return (worst + ordinary) * scale, (squares + ordinary.square()) * scale**2
