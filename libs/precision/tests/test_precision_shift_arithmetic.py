"""The arithmetic of `kernel_tile.pack4_merged` in hardware, written out in torch, over values and shifts.

The kernel's assembly can't run without a GPU; its algorithm can: one rounding under the wide scale where every code is
above the smallest normal one, else the definition with two factors in fp16.
"""

import pytest
import torch
from gemworks.precision.formats import Format, decode, encode

pytestmark = pytest.mark.reference


def half(exponent):
    """2^exponent as the kernel builds it from fp16 bits."""
    return torch.tensor((exponent + 15) << 10, dtype=torch.int16).view(torch.float16)


def in_hardware(x, shift):
    """(codes, lost) of the kernel's steps for values under the narrow scale 1 and a wide scale 2^-shift."""
    direct = encode(x * 2.0 ** max(shift, -126), Format.E4M3).to(torch.int32)
    quick = ((direct & 0x7F) + 0x77) & 0x80 != 0
    if shift == 0:
        return direct, torch.zeros_like(quick)
    codes = encode(x, Format.E4M3)
    first = max(shift, -14)
    rest = max(shift - first, -10)
    exact = codes.view(torch.float8_e4m3fn).to(torch.float16) * half(first)
    slow = encode((exact * half(rest)).float(), Format.E4M3).to(torch.int32)
    back = slow.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float16) * half(-rest)
    return torch.where(quick, direct, slow), ~quick & (back != exact)


@pytest.mark.parametrize("shift", [*range(-32, 1), -60, -254])
def test_every_code_moves_as_the_definition_says(shift):
    """Every code, the ties between codes, what lies beside both, and random values, none of them saturating."""
    codes = decode(torch.arange(127, dtype=torch.uint8), Format.E4M3)
    ties = (codes[1:] + codes[:-1]) / 2
    values = torch.cat((codes, ties, torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 448))
    near = torch.cat((values, torch.nextafter(values, values * 2 + 1), torch.nextafter(values, values * 0)))
    x = torch.cat((near, near * 2.0**-9, -near)).clamp(-448, 448)
    narrow = decode(encode(x, Format.E4M3), Format.E4M3)
    wanted = narrow * 2.0 ** max(shift, -126)
    expected = encode(wanted, Format.E4M3).to(torch.int32)
    inexact = decode(expected.to(torch.uint8), Format.E4M3) != wanted
    ours, lost = in_hardware(x, shift)
    assert torch.equal(ours, expected)
    assert torch.equal(lost, inexact)
    assert inexact.any() == (shift < 0)
