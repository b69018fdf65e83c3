"""The shipped table: which kernel and which configuration an attention step takes. A pure function of host values.

Measured on one H200 (sm_90) with bf16, 4 heads of 128; other entries are what compiles without spilling there. No
length enters except the bucketed bound, so a neighbouring batch takes the same binary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

Step = Literal["forward", "backward_kv", "backward_q"]
STEPS: tuple[Step, ...] = ("forward", "backward_kv", "backward_q")
SOFTMAX = "softmax"

GLUON_ARCHITECTURES = ("sm_90",)
GLUON_DTYPES = (torch.bfloat16, torch.float16)
GLUON_HEAD_DIMS = (64, 128)
FUSED_HEAD_DIM = 128
NARROW_HEAD_DIM = 64
TRITON_ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON_MAX_HEAD_DIM = 256
CODES_ARCHITECTURES = ("sm_90", "sm_100")  # of plain Triton that reads E4M3 codes: below sm_89 it has no such type
MAX_TIME_BUCKETS = 64  # a shift by more is undefined
FEW_QUERIES = 64  # rows of a shared query up to which a second consumer group would have nothing to do
SHORT_KEYS = 256  # bound of the keys up to which a tile's K and V are a few kilobytes that the L2 cache must deliver


@dataclass(frozen=True)
class TritonConfig:
    """Plain Triton: tiles of `block_m` query rows and `block_n` key rows."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def height(self, step: Step) -> str:
        return f"k{self.block_n}" if step == "backward_kv" else f"q{self.block_m}"


@dataclass(frozen=True)
class GluonConfig:
    """Gluon on sm_90: `groups` consumer warpgroups of 64 rows each beside one warp that loads.

    Attributes:
        block: rows of a streamed tile.
        stages: streamed tiles in flight, at least 2.
        resident_stages: resident tiles in flight.
        registers: per thread of a consumer.
        one_release: one signal for K of a tile and V of the one before (forward).
        chained: the last step of a tile computes the first scores of the next one (forward; resident_stages 2).
        in_turn: consumers issue their products one after the other (forward without a mask, not chained, groups >= 2).

    Raises:
        ValueError: if in_turn comes with chained or with one group.
    """

    block: int
    stages: int
    groups: int = 2
    registers: int = 232
    resident_stages: int = 1
    one_release: bool = False
    chained: bool = False
    in_turn: bool = False

    def __post_init__(self) -> None:
        if self.in_turn and self.chained:
            raise ValueError(
                "in_turn: got True with chained=True; a chained consumer takes no turns: leave one of them out"
            )
        if self.in_turn and self.groups < 2:
            raise ValueError(f"in_turn: got True with groups={self.groups}, expected 2 or more; leave in_turn out")

    @property
    def programs(self) -> int:
        """Per multiprocessor: two of one consumer group each, for tiles of 64 rows (a short shared query)."""
        return 2 if self.groups == 1 else 1

    @property
    def max_registers(self) -> int | None:
        """Per thread as launched: two programs of eight warps share the register file."""
        return 128 if self.groups == 1 else None

    def height(self, step: Step) -> str:
        return f"{'k' if step == 'backward_kv' else 'q'}{64 * self.groups}"


@dataclass(frozen=True)
class FusedConfig:
    """The backward in one Gluon kernel of five products, on sm_90: key tiles of 128 rows, query tiles of 64.

    Attributes:
        stages: query tiles in flight, at least 2.
        key_stages: key tiles in flight.
        early: start P^T dO before dP is there.
        ahead: compute the scores of the next query tile while dQ of this one is added.
        registers: per thread of a consumer.
    """

    stages: int
    key_stages: int
    early: bool
    ahead: bool
    registers: int = 240

    height: ClassVar[str] = "k128"


Config = TritonConfig | GluonConfig

# (step, softmax or activation, class of lengths); 128-wide heads. Narrower heads use the same but for GLUON_NARROW. The
# backward's entries serve what FUSED does not.
GLUON: dict[tuple[Step, str, str], GluonConfig] = {
    ("forward", "softmax", "long"): GluonConfig(128, 2, resident_stages=2, one_release=True, chained=True),
    ("forward", "softmax", "short"): GluonConfig(128, 2, resident_stages=2, one_release=True, chained=True),
    ("forward", "activation", "long"): GluonConfig(64, 3, 3, 160, resident_stages=2, one_release=True),
    ("forward", "activation", "short"): GluonConfig(128, 2, resident_stages=2),
    ("backward_kv", "softmax", "long"): GluonConfig(64, 3, registers=240),
    ("backward_kv", "softmax", "short"): GluonConfig(64, 3, registers=240),
    ("backward_kv", "activation", "long"): GluonConfig(64, 3, registers=240),
    ("backward_kv", "activation", "short"): GluonConfig(64, 3, registers=240),
    ("backward_q", "softmax", "long"): GluonConfig(64, 4, registers=240),
    ("backward_q", "softmax", "short"): GluonConfig(64, 3, registers=240),
    ("backward_q", "activation", "long"): GluonConfig(64, 4, registers=240),
    ("backward_q", "activation", "short"): GluonConfig(64, 4, registers=240),
    ("forward", "softmax", "few"): GluonConfig(128, 2),
    ("forward", "activation", "few"): GluonConfig(64, 4, resident_stages=2),
    ("backward_kv", "softmax", "few"): GluonConfig(64, 3, registers=240),
    ("backward_kv", "activation", "few"): GluonConfig(64, 3, registers=240),
    ("backward_q", "softmax", "few"): GluonConfig(64, 4, registers=240),
    ("backward_q", "activation", "few"): GluonConfig(64, 4, registers=240),
}

# In place of GLUON for 64-wide heads. At 128 the one of softmax spills; at 64 nothing does, and it is the faster one.
GLUON_NARROW: dict[tuple[Step, str, str], GluonConfig] = {
    ("forward", "softmax", "short"): GluonConfig(64, 4, resident_stages=2),
}

# The forward with a causal or window mask: small tiles, most of which lie wholly inside it.
GLUON_MASKED: dict[str, GluonConfig] = {
    "softmax": GluonConfig(64, 4),
    "activation": GluonConfig(64, 4, resident_stages=2),
}

# (softmax or activation, class of lengths): a backward that takes neither backward_kv nor backward_q
FUSED: dict[tuple[str, str], FusedConfig] = {
    ("softmax", "long"): FusedConfig(2, 2, early=True, ahead=True),
    ("softmax", "short"): FusedConfig(2, 2, early=True, ahead=True),
    ("softmax", "few"): FusedConfig(2, 2, early=True, ahead=True),
    ("activation", "long"): FusedConfig(2, 2, early=True, ahead=True),
    ("activation", "short"): FusedConfig(2, 2, early=True, ahead=True),
    ("activation", "few"): FusedConfig(2, 2, early=True, ahead=True),
}

# (step, softmax or activation, bytes of an element, padded head width class)
TRITON: dict[tuple[Step, str, int, int], TritonConfig] = {
    ("forward", "softmax", 2, 128): TritonConfig(64, 64, 4, 3),
    ("forward", "activation", 2, 128): TritonConfig(128, 64, 8, 3),
    ("backward_kv", "softmax", 2, 128): TritonConfig(64, 128, 8, 2),
    ("backward_kv", "activation", 2, 128): TritonConfig(64, 128, 8, 2),
    ("backward_q", "softmax", 2, 128): TritonConfig(128, 64, 8, 2),
    ("backward_q", "activation", 2, 128): TritonConfig(128, 64, 8, 2),
    ("forward", "softmax", 2, 256): TritonConfig(64, 32, 4, 2),
    ("forward", "activation", 2, 256): TritonConfig(64, 32, 4, 2),
    ("backward_kv", "softmax", 2, 256): TritonConfig(32, 64, 8, 1),
    ("backward_kv", "activation", 2, 256): TritonConfig(32, 64, 8, 1),
    ("backward_q", "softmax", 2, 256): TritonConfig(64, 32, 8, 1),
    ("backward_q", "activation", 2, 256): TritonConfig(64, 32, 8, 1),
    ("forward", "softmax", 4, 128): TritonConfig(64, 32, 4, 2),
    ("forward", "activation", 4, 128): TritonConfig(64, 32, 4, 2),
    ("backward_kv", "softmax", 4, 128): TritonConfig(32, 32, 4, 1),
    ("backward_kv", "activation", 4, 128): TritonConfig(32, 32, 4, 1),
    ("backward_q", "softmax", 4, 128): TritonConfig(32, 32, 4, 1),
    ("backward_q", "activation", 4, 128): TritonConfig(32, 32, 4, 1),
    ("forward", "softmax", 4, 256): TritonConfig(32, 32, 4, 1),
    ("forward", "activation", 4, 256): TritonConfig(32, 32, 4, 1),
    ("backward_kv", "softmax", 4, 256): TritonConfig(16, 16, 4, 1),
    ("backward_kv", "activation", 4, 256): TritonConfig(16, 16, 4, 1),
    ("backward_q", "softmax", 4, 256): TritonConfig(16, 16, 4, 1),
    ("backward_q", "activation", 4, 256): TritonConfig(16, 16, 4, 1),
}

# Lookups of a bias want registers: what every supported Triton compiles without spilling, for two-byte elements and
# widths up to 128.
BIASED: dict[Step, TritonConfig] = {
    "forward": TritonConfig(64, 32, 4, 2),
    "backward_kv": TritonConfig(64, 64, 8, 2),
    "backward_q": TritonConfig(128, 32, 8, 2),
}


# Kernels that read codes, multiples of 32 rows: what compiles without spilling for two-byte elements and widths up to
# 128, rounding included; CODES_SMALL for the rest, and for dK and dV of activations, which take more registers.
CODES: dict[Step, TritonConfig] = {
    "forward": TritonConfig(64, 64, 8, 2),
    "backward_kv": TritonConfig(32, 64, 8, 2),
    "backward_q": TritonConfig(32, 64, 8, 2),
}
CODES_SMALL = TritonConfig(32, 32, 8, 1)


@dataclass(frozen=True)
class Shape:
    """What the choice depends on.

    Attributes:
        masked: causal or a window.
        grouped: several query heads per key head.
        max_length_k: the bound of the key lengths.
        shared_rows: R of a shared query, else 0.
        biased: with an additive bias.
    """

    activation: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    masked: bool
    shared_query: bool
    grouped: bool
    max_length_k: int
    shared_rows: int = 0
    biased: bool = False

    @property
    def lengths(self) -> str:
        """ "few" queries (a shared query of at most 64 rows), else "short" or "long" keys."""
        if self.shared_query and self.shared_rows <= FEW_QUERIES:
            return "few"
        return "short" if self.max_length_k <= SHORT_KEYS else "long"


def gluon_refusal(step: Step, shape: Shape, architecture: str) -> str | None:
    """Why the Gluon kernel does not take this step, or None."""
    refusal = _gluon_refusal_at_all(shape, architecture)
    if refusal is not None:
        return refusal
    if shape.masked and shape.shared_query:
        return "gluon has no mask with a shared query"
    if shape.masked and step != "forward":
        return "gluon's pair of backward kernels has no causal or window mask"
    if shape.biased:
        return "gluon has no bias"
    if shape.grouped and step != "forward":
        return "gluon's backward has no grouped heads"
    return None


def _gluon_refusal_at_all(shape: Shape, architecture: str) -> str | None:
    """Why no Gluon kernel takes any step, masked or not."""
    if architecture not in GLUON_ARCHITECTURES:
        return f"gluon runs on {', '.join(GLUON_ARCHITECTURES)}, not on {architecture}"
    if shape.dtype not in GLUON_DTYPES:
        return f"gluon does not take {shape.dtype}"
    if shape.head_dim not in GLUON_HEAD_DIMS or shape.value_dim != shape.head_dim:
        widths = f"{shape.head_dim} and {shape.value_dim}"
        return f"gluon takes equal head widths of q, k and v in {GLUON_HEAD_DIMS}, not {widths}"
    return None


def fused_refusal(shape: Shape, architecture: str) -> str | None:
    """Why the backward is not one kernel, or None."""
    if shape.masked and shape.shared_query:
        return "the fused backward has no mask with a shared query"
    refusal = _gluon_refusal_at_all(shape, architecture)
    if refusal is not None:
        return refusal
    if shape.biased:
        return "gluon has no bias"
    if shape.grouped:
        return "gluon's backward has no grouped heads"
    if shape.head_dim != FUSED_HEAD_DIM:
        return f"the fused backward takes head width {FUSED_HEAD_DIM}, not {shape.head_dim}"
    return None


def choose_fused(shape: Shape, architecture: str) -> FusedConfig | None:
    """The configuration of a backward in one kernel; None where it takes backward_kv and backward_q instead."""
    if fused_refusal(shape, architecture) is not None:
        return None
    return FUSED.get(("softmax" if shape.activation == SOFTMAX else "activation", shape.lengths))


def backward_products(shape: Shape, architecture: str) -> int | None:
    """Matrix products of a backward: the five that it needs, or seven where each of two kernels computes the scores and
    the gradient of the weights. None where no kernel takes the call.

    >>> shapes = [Shape(SOFTMAX, torch.bfloat16, h, h, False, False, False, 1024) for h in (64, 128)]
    >>> [backward_products(shape, "sm_90") for shape in shapes]
    [7, 5]
    """
    if choose_fused(shape, architecture) is not None:
        return 5
    return None if choose("backward_kv", shape, architecture) is None else 7


def goes_back_through_norm_rope(shape: Shape, architecture: str) -> bool:
    """Whether the kernel of dK can end in the backward of the norm and the rotation that made k.

    >>> shapes = [Shape(SOFTMAX, torch.bfloat16, h, h, False, False, False, 1024) for h in (64, 96, 128)]
    >>> [goes_back_through_norm_rope(shape, "sm_90") for shape in shapes]
    [False, False, True]
    >>> goes_back_through_norm_rope(shapes[0], "sm_80")
    True
    """
    if choose_fused(shape, architecture) is not None:
        return True
    power_of_two = shape.head_dim >= 16 and shape.head_dim & (shape.head_dim - 1) == 0
    return power_of_two and isinstance(choose("backward_kv", shape, architecture), TritonConfig)


def triton_refusal(shape: Shape, architecture: str) -> str | None:
    """Why plain Triton does not take this call, or None."""
    if architecture not in TRITON_ARCHITECTURES:
        return f"triton kernels are compiled for {', '.join(TRITON_ARCHITECTURES)}, not for {architecture}"
    if shape.dtype not in TRITON_DTYPES:
        return f"triton does not take {shape.dtype}"
    if max(shape.head_dim, shape.value_dim) > TRITON_MAX_HEAD_DIM:
        return f"triton takes head widths up to {TRITON_MAX_HEAD_DIM}"
    return None


def triton_config(step: Step, shape: Shape) -> TritonConfig:
    kind = "softmax" if shape.activation == SOFTMAX else "activation"
    width = 128 if max(shape.head_dim, shape.value_dim) <= 128 else 256
    if shape.biased and width == 128 and shape.dtype.itemsize == 2:
        return BIASED[step]
    return TRITON[step, kind, shape.dtype.itemsize, width]


def codes_refusal(dtype: torch.dtype, width: int, architecture: str) -> str | None:
    """Why the kernels that multiply codes out as they load them do not take a call, or None."""
    if architecture not in CODES_ARCHITECTURES:
        return f"kernels that read codes are compiled for {', '.join(CODES_ARCHITECTURES)}, not for {architecture}"
    if dtype not in TRITON_DTYPES or width > TRITON_MAX_HEAD_DIM:
        return f"they take bf16, fp16 and fp32, and head widths up to {TRITON_MAX_HEAD_DIM}"
    return None


def codes_config(step: Step, activation: str, dtype: torch.dtype, width: int) -> TritonConfig:
    """Of attention_fp8's kernels that multiply codes out as they load them."""
    if dtype.itemsize > 2 or width > 128 or (step == "backward_kv" and activation != SOFTMAX):
        return CODES_SMALL
    return CODES[step]


def bias_config(shape: Shape) -> TritonConfig:
    """Of the kernel that sums the gradients of a bias; its tiles of query rows are walked over."""
    small = shape.dtype.itemsize == 2 and max(shape.head_dim, shape.value_dim) <= 128
    return TritonConfig(64, 32, 8, 1) if small else TritonConfig(16, 16, 4, 1)


def choose(step: Step, shape: Shape, architecture: str) -> Config | None:
    """The configuration of one step; None where no kernel takes the call, so that the reference must."""
    if gluon_refusal(step, shape, architecture) is None:
        kind = "softmax" if shape.activation == SOFTMAX else "activation"
        if shape.masked:
            return GLUON_MASKED[kind]
        key = (step, kind, shape.lengths)
        narrow = GLUON_NARROW.get(key) if shape.head_dim == NARROW_HEAD_DIM else None
        return narrow or GLUON[key]
    if triton_refusal(shape, architecture) is None:
        return triton_config(step, shape)
    return None
