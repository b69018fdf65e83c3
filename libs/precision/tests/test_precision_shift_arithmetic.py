"""The arithmetic of `kernel_tile.pack4_shifted` in hardware, written out in torch, over every code and shift.

The kernel's assembly can't run without a GPU; its algorithm can: subtract where a code stays normal, else two factors
in fp16. Compared with the definition: decode, multiply by 2^shift, round again.
"""

import pytest
import torch
from gemworks.precision.formats import Format, decode, encode

pytestmark = pytest.mark.reference


def half(exponent):
    """2^exponent as the kernel builds it from fp16 bits."""
    return torch.tensor((exponent + 15) << 10, dtype=torch.int16).view(torch.float16)


def in_hardware(codes, shift):
    """(codes, lost) of the kernel's steps, one shift for all."""
    step = min(-shift, 15) * 8
    slack = 0x78 - step
    assert slack >= 0
    stays = ((codes & 0x7F) + slack) & 0x80 != 0
    moved = codes - step
    first = max(shift, -14)
    rest = max(shift - first, -10)
    exact = codes.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float16) * half(first)
    slow = encode((exact * half(rest)).float(), Format.E4M3).to(torch.int32)
    back = slow.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float16) * half(-rest)
    return torch.where(stays, moved, slow), ~stays & (back != exact) & ~(back.isnan() | exact.isnan())


@pytest.mark.parametrize("shift", [*range(-32, 1), -60, -254])
def test_every_code_moves_as_the_definition_says(shift):
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.int32)
    values = decode(codes.to(torch.uint8), Format.E4M3)
    wanted = values * 2.0 ** max(shift, -126)
    expected = encode(wanted, Format.E4M3).to(torch.int32)
    inexact = decode(expected.to(torch.uint8), Format.E4M3) != wanted
    ours, lost = in_hardware(codes, shift)
    assert torch.equal(ours, expected)
    assert torch.equal(lost, inexact)
    assert inexact.any() == (shift < 0)
