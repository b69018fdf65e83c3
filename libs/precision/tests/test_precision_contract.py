"""The hand-worked cases, and the reference against them."""

import struct

import pytest
import torch
from gemworks.precision import MXTensor, ScaleMode, quantize, quantize_square
from gemworks.precision.contract import CASES, DECODE_CASES, Case, DecodeCase, check_backend
from gemworks.precision.scales import scale_values

pytestmark = pytest.mark.reference


def test_the_contract_has_at_least_twenty_distinct_cases():
    names = [case.name for case in CASES] + [case.name for case in DECODE_CASES]
    assert len(CASES) >= 20
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reference_keeps_the_contract(case: Case):
    """P1 tiny_1e-37; P2 all_zero; P3 smallest_scale_exact; P8 the NaN and inf cases."""
    mx = quantize(case.input(), 0, case.format, case.mode, block=case.block)
    assert mx.scales.tolist() == [case.scale_byte]
    assert mx.element_codes().tolist() == case.expected_codes().tolist()


def test_check_backend_passes_the_reference_and_names_what_a_wrong_backend_gets_wrong():
    assert check_backend(quantize) == []

    def floors(x, dim, format, scale_mode, *, block):
        return quantize(x, dim, format, "floor", block=block)

    failures = check_backend(floors)
    assert any(line.startswith("rceil_above_max") for line in failures)


@pytest.mark.parametrize("case", [c for c in CASES if c.block == 32], ids=lambda c: c.name)
def test_square_blocks_keep_the_contract(case: Case):
    x = torch.full((32, 32), case.fill)
    x[4] = case.input()
    mx = quantize_square(x, case.format, case.mode)
    assert mx.scales.tolist() == [[case.scale_byte]]
    assert mx.element_codes()[4].tolist() == case.expected_codes().tolist()


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda c: c.name)
def test_decoding(case: DecodeCase):
    code = torch.tensor([case.code], dtype=torch.uint8)
    mx = MXTensor(code, torch.tensor([case.scale_byte], dtype=torch.uint8), (1,), 0, 32, case.format, ScaleMode.RCEIL)
    got = struct.pack("f", mx.dequantize().item())
    expected = struct.pack("f", case.value)
    assert got == expected or (case.value != case.value and mx.dequantize().isnan().all())


def test_scale_bytes_are_exact_powers_of_two():
    """P3: 2^-127, a subnormal of fp32, included."""
    values = scale_values(torch.arange(256, dtype=torch.uint8)).double()
    exact = torch.tensor([2.0 ** (byte - 127) for byte in range(255)], dtype=torch.float64)
    assert torch.equal(values[:255], exact)
    assert values[255].isnan()
