"""The numerics contract as data: one block in, one scale byte and its codes out, worked out by hand.

Every backend is held to these cases bit by bit (`check_backend`), next to the reference, which is the definition.
A case lists the entries that differ from `fill`; the rest of the block holds `fill`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from gemworks.precision.formats import Format
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.scales import ScaleMode
from torch import Tensor

_NAN, _INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    """One block: values by position, the scale byte and codes they must give, and the rule the case pins down."""

    name: str
    rule: str
    values: dict[int, float]
    scale_byte: int
    codes: dict[int, int]
    format: Format = Format.E4M3
    mode: ScaleMode = ScaleMode.RCEIL
    fill: float = 0.0
    fill_code: int = 0
    block: int = 32

    def input(self) -> Tensor:
        """fp32 `[block]`."""
        x = torch.full((self.block,), self.fill)
        for position, value in self.values.items():
            x[position] = value
        return x

    def expected_codes(self) -> Tensor:
        """uint8 `[block]`, unpacked."""
        codes = torch.full((self.block,), self.fill_code, dtype=torch.uint8)
        for position, code in self.codes.items():
            codes[position] = code
        return codes


@dataclass(frozen=True)
class DecodeCase:
    """One code under one scale byte and the fp32 value it stands for."""

    name: str
    code: int
    scale_byte: int
    value: float
    format: Format = field(default=Format.E4M3)


_E5M2, _E2M1 = Format.E5M2, Format.E2M1
_FLOOR, _CEIL, _EVEN = ScaleMode.FLOOR, ScaleMode.CEIL, ScaleMode.EVEN

CASES: tuple[Case, ...] = (
    Case("ones", "1 = 2^0 lands on 2^8, code 0x78", {}, 119, {}, fill=1.0, fill_code=0x78),
    Case("max_value_is_kept", "448 is the largest value at scale 1", {3: 448.0}, 127, {3: 0x7E}),
    Case("rceil_above_max", "449 > 448: next scale, 224.5 -> 224", {0: 449.0}, 128, {0: 0x76}),
    Case("floor_above_max_saturates", "449 -> 448", {0: 449.0}, 127, {0: 0x7E}, mode=_FLOOR),
    Case("floor_negative_saturates", "-449 -> -448", {0: -449.0}, 127, {0: 0xFE}, mode=_FLOOR),
    Case("floor_worst_case", "511 -> 448, 12 % lost", {0: 511.0}, 127, {0: 0x7E}, mode=_FLOOR),
    Case("ceil_wastes_a_binade", "257 needs no larger scale but gets it", {0: 257.0}, 128, {0: 0x70}, mode=_CEIL),
    Case("ceil_power_of_two", "256 is a power of two", {0: 256.0}, 127, {0: 0x78}, mode=_CEIL),
    Case("rceil_one_bit_above", "448 + 2^-15: next scale", {0: 448.000030517578125}, 128, {0: 0x76}),
    Case("ceil_one_bit_above", "256 + 2^-15 is no power of two", {0: 256.000030517578125}, 128, {0: 0x70}, mode=_CEIL),
    Case("even_rounds_amax_down", "1.9 * 2^8 stays and saturates", {0: 486.4}, 127, {0: 0x7E}, mode=_EVEN),
    Case("even_rounds_amax_up", "1.9375 * 2^8 goes up; 248 ties to 256", {0: 496.0}, 128, {0: 0x78}, mode=_EVEN),
    Case("ties_to_even", "17 -> 16, 19 -> 20", {0: 448.0, 1: 17.0, 2: 19.0}, 127, {0: 0x7E, 1: 0x58, 2: 0x5A}),
    Case(
        "subnormals",
        "multiples of 2^-9, ties to even, 7.5 of them carry into the first normal",
        {0: 448.0, 1: 2**-9, 2: 2**-10, 3: 1.5 * 2**-9, 4: -(2**-9), 5: 1.0009765625 * 2**-10, 6: 7.5 * 2**-9},
        127,
        {0: 0x7E, 1: 0x01, 2: 0x00, 3: 0x02, 4: 0x81, 5: 0x01, 6: 0x08},
    ),
    Case("all_zero", "smallest scale, zero codes, never NaN", {}, 0, {}),
    Case("negative_zero", "the sign of zero survives", {5: -0.0}, 0, {5: 0x80}),
    Case("negative_underflow", "a vanishing negative becomes -0", {0: 448.0, 1: -1e-30}, 127, {0: 0x7E, 1: 0x80}),
    Case("nan_poisons_block", "scale 0xFF, every code NaN", {7: _NAN}, 255, {}, fill=1.0, fill_code=0x7F),
    Case("inf_poisons_block", "an infinity is not a number to train on", {7: _INF}, 255, {}, fill=1.0, fill_code=0x7F),
    Case("minus_inf_poisons_block", "either sign", {0: -_INF}, 255, {}, fill=2.0, fill_code=0x7F),
    Case("tiny_1e-37", "scale clamps to 2^-127; 17.01 -> 18", {0: 1e-37, 1: -1e-37}, 0, {0: 0x59, 1: 0xD9}),
    Case("smallest_scale_exact", "2^-119 is 2^8 at scale byte 0", {0: 2.0**-119}, 0, {0: 0x78}),
    Case("fp32_subnormal_survives", "2^-130 is 2^-3 at scale byte 0", {0: 2.0**-130}, 0, {0: 0x20}),
    Case("fp32_smallest_subnormal", "2^-149 is under half of 2^-136", {0: 2.0**-149}, 0, {0: 0x00}),
    Case("fp32_max_rceil", "255.99998 -> 256 at byte 247", {0: 3.4028234663852886e38}, 247, {0: 0x78}),
    Case("fp32_max_floor", "saturates at byte 246", {0: -3.4028234663852886e38}, 246, {0: 0xFE}, mode=_FLOOR),
    Case("e5m2_ones", "1 lands on 2^15", {}, 112, {}, format=_E5M2, fill=1.0, fill_code=0x78),
    Case("e5m2_max_value", "57344 at scale 1", {0: 57344.0}, 127, {0: 0x7B}, format=_E5M2),
    Case("e5m2_rceil_above_max", "61440: next scale, 30720 ties to 32768", {0: 61440.0}, 128, {0: 0x78}, format=_E5M2),
    Case(
        "e5m2_subnormals",
        "multiples of 2^-16",
        {0: 57344.0, 1: 2**-16, 2: 2**-17, 3: 1.5 * 2**-16},
        127,
        {0: 0x7B, 1: 0x01, 2: 0x00, 3: 0x02},
        format=_E5M2,
    ),
    Case("e5m2_inf", "E5M2 has an infinity, the contract does not use it", {0: _INF}, 255, {}, _E5M2, fill_code=0x7F),
    Case(
        "e2m1_ties",
        "0.25 -> 0, 0.75 -> 1, 2.5 -> 2, 5 -> 4",
        {0: 6.0, 1: 0.25, 2: 0.75, 3: 2.5, 4: 5.0, 5: -1.5},
        127,
        {0: 0x7, 1: 0x0, 2: 0x2, 3: 0x4, 4: 0x6, 5: 0xB},
        format=_E2M1,
    ),
    Case("e2m1_rceil_above_max", "7: next scale, 3.5 ties to 4", {0: 7.0}, 128, {0: 0x6}, format=_E2M1),
    Case("e2m1_nan", "no NaN code: the scale byte says it", {0: _NAN}, 255, {}, format=_E2M1, fill=1.0),
    Case("wide_block_zero", "128-wide blocks start at byte 1, a normal fp32", {}, 1, {}, block=128),
    Case("wide_block_max", "one value rules 128", {127: 896.0, 0: 1.0}, 128, {127: 0x7E, 0: 0x30}, block=128),
)

DECODE_CASES: tuple[DecodeCase, ...] = (
    DecodeCase("smallest_times_smallest", 0x01, 0, 2.0**-136),
    DecodeCase("one_at_smallest_scale", 0x38, 0, 2.0**-127),
    DecodeCase("one_at_largest_scale", 0x38, 254, 2.0**127),
    DecodeCase("largest_finite", 0x7E, 246, 448.0 * 2.0**119),
    DecodeCase("overflow_is_inf", 0x7E, 247, _INF),
    DecodeCase("two_at_largest_scale_overflows", 0xC0, 254, -_INF),
    DecodeCase("nan_code", 0x7F, 127, _NAN),
    DecodeCase("nan_scale", 0x38, 255, _NAN),
    DecodeCase("nan_scale_over_zero", 0x00, 255, _NAN),
    DecodeCase("zero_at_largest_scale", 0x80, 254, -0.0),
    DecodeCase("e5m2_infinity", 0x7C, 127, _INF, Format.E5M2),
    DecodeCase("e5m2_smallest", 0x01, 127, 2.0**-16, Format.E5M2),
    DecodeCase("e2m1_largest", 0x7, 127, 6.0, Format.E2M1),
    DecodeCase("e2m1_negative", 0x9, 128, -1.0, Format.E2M1),
)


def check_backend(quantize: Callable[..., MXTensor], device: torch.device | str = "cpu") -> list[str]:
    """Run every encoding case through a quantiser along both dims of a matrix whose other blocks are unrelated.

    Cases of one format, mode and block share a matrix: the quantiser is called twice for each such group.

    Args:
        quantize: called as `quantize(x, dim, format, scale_mode, block=...)`.
        device: where to put the inputs.

    Returns:
        One line per failing case; empty when the backend keeps the contract.
    """
    groups: dict[tuple[Format, ScaleMode, int], list[Case]] = {}
    for case in CASES:
        groups.setdefault((case.format, case.mode, case.block), []).append(case)
    failures = []
    for (format, mode, block), cases in groups.items():
        blocks = [torch.linspace(-3.0, 5.0, block)]
        for case in cases:
            blocks += [case.input(), torch.ones(block)]
        rows = torch.stack(blocks)
        for dim in (0, 1):
            mx = quantize((rows if dim == 1 else rows.t()).to(device), dim, format, mode, block=block)
            codes = mx.element_codes().cpu().movedim(dim, -1)[1::2]
            scales = mx.scales.cpu().movedim(dim, -1)[1::2, 0].tolist()
            for case, found, scale in zip(cases, codes, scales, strict=True):
                wrong = (found != case.expected_codes()).nonzero().flatten().tolist()
                if scale != case.scale_byte or wrong:
                    failures.append(
                        f"{case.name} (dim {dim}): scale byte {scale}, expected {case.scale_byte}; "
                        f"wrong codes at {wrong}: {case.rule}"
                    )
    return failures
