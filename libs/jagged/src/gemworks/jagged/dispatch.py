"""Which backend runs an op, and why: the rules, the table made from them, and `explain`.

A rule states what a backend can do. An op takes the first rule that fits; the reference backend, last, fits everything
that the op's own checks let through.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import torch
from gemworks.jagged._checks import DTYPES, MAX_HEAD_DIM
from gemworks.jagged.ops.attention_core import table

Direction = Literal["forward", "backward"]
OPS = (
    "flash_attention",
    "gdpa",
    "block_attention",
    "layer_norm",
    "rms_norm",
    "seed_pool",
    "kronecker_compress",
    "sum_pool",
    "mean_pool",
    "last_pool",
    "apply_rope",
    "token_map",
)
ATTENTION_OPS = ("flash_attention", "gdpa", "block_attention", "seed_pool")


@dataclass(frozen=True)
class Rule:
    """What one backend can do.

    Attributes:
        architectures: "any", or names such as "sm_90".
        max_head_dim: widest head for attention ops; None where it has no meaning.
        head_dims: the only head widths; None for every one up to `max_head_dim`.
        config: name of the shipped configuration table, or "-".
    """

    backend: str
    ops: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    architectures: tuple[str, ...]
    directions: tuple[Direction, ...]
    max_head_dim: int | None
    config: str = "-"
    head_dims: tuple[int, ...] | None = None

    def refusal(self, op: str, dtype: torch.dtype, architecture: str, head_dim: int | None) -> str | None:
        """Why this rule does not fit, or None if it does."""
        if op not in self.ops:
            return f"does not implement {op}"
        if dtype not in self.dtypes:
            return f"does not take {dtype}"
        if "any" not in self.architectures and architecture not in self.architectures:
            return f"runs on {', '.join(self.architectures)}, not on {architecture}"
        if head_dim is not None and op in ATTENTION_OPS and self.max_head_dim and head_dim > self.max_head_dim:
            return f"takes head widths up to {self.max_head_dim}, not {head_dim}"
        if head_dim is not None and op in ATTENTION_OPS and self.head_dims and head_dim not in self.head_dims:
            return f"takes head widths {', '.join(map(str, self.head_dims))}, not {head_dim}"
        return None


BOTH: tuple[Direction, ...] = ("forward", "backward")
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HALF_DTYPES = (torch.float16, torch.bfloat16)
NORM_OPS = ("layer_norm", "rms_norm")
TILE_ARCHITECTURES = ("sm_90", "sm_100")  # of norms and block_attention: where their kernels are compiled in tests
BLOCK_HEAD_DIMS = tuple(range(16, 129, 16))  # half a head is whole 16-byte vectors
KERNEL_OPS = ("flash_attention", "gdpa", "seed_pool")
RULES: tuple[Rule, ...] = (
    Rule(
        "gluon",
        KERNEL_OPS,
        table.GLUON_DTYPES,
        table.GLUON_ARCHITECTURES,
        BOTH,
        max(table.GLUON_HEAD_DIMS),
        "attention_core/table.py",
        table.GLUON_HEAD_DIMS,
    ),
    Rule(
        "triton",
        KERNEL_OPS,
        table.TRITON_DTYPES,
        table.TRITON_ARCHITECTURES,
        BOTH,
        table.TRITON_MAX_HEAD_DIM,
        "attention_core/table.py",
    ),
    Rule("triton", ("apply_rope",), KERNEL_DTYPES, TILE_ARCHITECTURES, BOTH, None, "rope/launch.py"),
    Rule("triton", ("token_map",), HALF_DTYPES, TILE_ARCHITECTURES, BOTH, None, "token_map/launch.py"),
    Rule("triton", NORM_OPS, KERNEL_DTYPES, TILE_ARCHITECTURES, BOTH, None, "norms/launch.py"),
    Rule(  # one query head per key head, blocks of 64 (of 128 at head width 128); else the next rule's kernel
        "gluon",
        ("block_attention",),
        table.GLUON_DTYPES,
        table.GLUON_ARCHITECTURES,
        BOTH,
        max(table.GLUON_HEAD_DIMS),
        "block_attention/launch.py",
        table.GLUON_HEAD_DIMS,
    ),
    Rule(
        "triton",
        ("block_attention",),
        KERNEL_DTYPES,
        TILE_ARCHITECTURES,
        BOTH,
        max(BLOCK_HEAD_DIMS),
        "block_attention/launch.py",
        BLOCK_HEAD_DIMS,
    ),
    Rule("reference", OPS, DTYPES, ("any",), BOTH, MAX_HEAD_DIM),
)

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """A `UserWarning`, the first time only; silent while a compiler traces."""
    if torch.compiler.is_compiling() or message in _warned:
        return
    _warned.add(message)
    warnings.warn(f"gemworks.jagged: {message}", stacklevel=3)


@dataclass(frozen=True)
class SupportRow:
    """One line of the support table."""

    op: str
    dtype: str
    architecture: str
    direction: Direction
    backend: str
    max_head_dim: int | None


def support() -> tuple[SupportRow, ...]:
    """The op x dtype x architecture x direction table, generated from the dispatch rules.

    >>> sorted({row.backend for row in support() if row.op == "rms_norm"})
    ['reference', 'triton']
    """
    return tuple(
        SupportRow(
            op,
            str(dtype).removeprefix("torch."),
            architecture,
            direction,
            rule.backend,
            rule.max_head_dim if op in ATTENTION_OPS else None,
        )
        for rule in RULES
        for op in rule.ops
        for dtype in rule.dtypes
        for architecture in rule.architectures
        for direction in rule.directions
    )


@dataclass(frozen=True)
class Explanation:
    """Which kernel an op would use.

    Attributes:
        backend: "gluon", "triton" or "reference". "gluon" may hand the backward to "triton": see `config`.
        config: the kernel's configuration, step by step; "-" where there is nothing to choose.
        reason: in words, with the refusal of every backend that comes first.
    """

    op: str
    backend: str
    config: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.backend} ({self.reason})"


def architecture_of(device: torch.device | str) -> str:
    """ "cpu", or "sm_90" and the like for a CUDA device (asks the driver once, reads no device memory)."""
    if not isinstance(device, torch.device):
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError):
            found = None
        # torch built for CUDA makes a CUDA device where there is none
        if found is None or (found.type == "cuda" and not torch.cuda.is_available()):
            raise ValueError(f"device: got {device!r}, expected one that torch has here, e.g. 'cpu'")
        device = found
    return device.type if device.type != "cuda" else _gpu_of(device).architecture


def num_multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    return _gpu_of(device).num_multiprocessors


class _Gpu(NamedTuple):
    architecture: str
    num_multiprocessors: int


def _gpu_of(device: torch.device) -> _Gpu:
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache  # every op asks, some of them twice, and torch takes microseconds to answer
def _gpu(index: int) -> _Gpu:
    found = torch.cuda.get_device_properties(index)
    return _Gpu(f"sm_{found.major}{found.minor}", found.multi_processor_count)


CODE_FEATURES = ("quantize_p", "quantize_ds", "prologue")
FEATURES = ("masked", "grouped", "shared_query", "bias", "qk_norm", "rope", *CODE_FEATURES)


def explain(
    op: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    architecture: str | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    max_length_k: int = 1024,
    features: tuple[str, ...] = (),
) -> Explanation:
    """Which backend and configuration `op` would use, and why.

    Args:
        op: a name in the support table.
        dtype: of the values.
        device: where they live; asks the driver for a CUDA device's architecture.
        architecture: instead of `device`, for a machine that is not here, e.g. "sm_90".
        head_dim: H, for attention ops.
        value_dim: width of v's heads; None for H.
        max_length_k: the bound of the key lengths.
        features: of an attention call: "masked" (causal or a window), "grouped" (fewer key heads), "shared_query",
            "bias", "qk_norm", "rope"; of `flash_attention_fp8` and `gdpa_fp8` "quantize_p", "quantize_ds", "prologue".

    Raises:
        ValueError: unknown op or feature; nothing supports the request (the message says what is supported).

    >>> explain("rms_norm", architecture="sm_90").backend
    'triton'
    >>> print(explain("gdpa", dtype=torch.float64))
    gdpa: reference (gluon does not take torch.float64; triton does not take torch.float64; takes float64 on cpu)
    >>> explain("gdpa", architecture="sm_90", head_dim=128).backend
    'gluon'
    >>> explain("flash_attention", architecture="sm_90", head_dim=128, features=("bias",)).backend
    'triton'
    """
    if op not in OPS:
        raise ValueError(f"op: got {op!r}, expected one of {', '.join(OPS)}")
    unknown = [f for f in features if f not in FEATURES]
    if unknown:
        raise ValueError(f"features: got {', '.join(unknown)}, expected some of {', '.join(FEATURES)}")
    of_codes = [f for f in CODE_FEATURES if f in features]
    if of_codes and (op not in ("flash_attention", "gdpa") or "shared_query" in features or "bias" in features):
        raise ValueError(
            f"features: got {', '.join(of_codes)} with {op} {features}; only flash_attention_fp8 and gdpa_fp8 have "
            "them, which take no shared query and no bias"
        )
    place = architecture_of(device) if architecture is None else architecture
    width = head_dim or 128
    shape = None
    if op in KERNEL_OPS:
        shape = table.Shape(
            table.SOFTMAX if op == "flash_attention" else "gelu",
            dtype,
            width,
            value_dim or width,
            "masked" in features,
            "shared_query" in features or op == "seed_pool",
            "grouped" in features,
            max_length_k,
            biased="bias" in features,
        )
    refusals: list[str] = []
    for rule in [r for r in RULES if op in r.ops]:
        refusal = rule.refusal(op, dtype, place, head_dim) or _call_refusal(rule, op, features, shape, place)
        if refusal is not None:
            refusals.append(refusal if refusal.startswith(rule.backend) else f"{rule.backend} {refusal}")
            continue
        reasons = [*refusals, f"takes {str(dtype).removeprefix('torch.')} on {place}"]
        if shape is None or rule.backend == "reference":
            return Explanation(op, rule.backend, rule.config, "; ".join(reasons))
        if any(f in CODE_FEATURES for f in features):
            return Explanation(op, rule.backend, _code_configurations(shape), "; ".join(reasons))
        why = table.fused_refusal(shape, place)
        reasons += [] if why is None else [f"backward in two kernels: {why}"]
        front = [f for f in ("qk_norm", "rope") if f in features]
        reasons += [f"{' and '.join(front)} run before it, in one pass of their own"] if front else []
        return Explanation(op, rule.backend, _configurations(shape, place), "; ".join(reasons))
    raise ValueError(f"{op}: {'; '.join(refusals)}; support() lists every op, dtype and architecture")


def _call_refusal(
    rule: Rule, op: str, features: tuple[str, ...], shape: table.Shape | None, architecture: str
) -> str | None:
    """Why a rule that takes the op does not take this call of it, or None."""
    asked = [f for f in CODE_FEATURES if f in features]
    if asked and rule.backend == "gluon":
        return f"gluon has no {' or '.join(asked)} (tiles of FP8 have their own rounding of P)"
    if asked and shape is not None and rule.backend == "triton":
        return table.codes_refusal(shape.dtype, max(shape.head_dim, shape.value_dim), architecture)
    if rule.backend != "gluon":
        return None
    if op == "block_attention" and "grouped" in features:
        return "gluon has no grouped heads in block_attention"
    return None if shape is None else table.gluon_refusal("forward", shape, architecture)


def _configurations(shape: table.Shape, architecture: str) -> str:
    """What the table gives each step of attention."""
    fused = table.choose_fused(shape, architecture)
    steps: dict[str, table.Config | table.FusedConfig | None]
    if fused is None:
        steps = {step: table.choose(step, shape, architecture) for step in table.STEPS}
    else:
        steps = {"forward": table.choose("forward", shape, architecture), "backward": fused}
    return "; ".join(f"{step}: {choice}" for step, choice in steps.items())


def _code_configurations(shape: table.Shape) -> str:
    """What attention_fp8's kernels that read codes take."""
    width = max(shape.head_dim, shape.value_dim)
    steps = {step: table.codes_config(step, shape.activation, shape.dtype, width) for step in table.STEPS}
    return "; ".join(f"{step}: {choice}" for step, choice in steps.items())


@lru_cache(maxsize=1024)
def backend_of(op: str, dtype: torch.dtype, architecture: str, head_dim: int | None = None) -> str:
    """The backend that `explain` names.

    >>> backend_of("rms_norm", torch.bfloat16, "sm_90"), backend_of("rms_norm", torch.float64, "sm_90")
    ('triton', 'reference')
    """
    return explain(op, dtype=dtype, architecture=architecture, head_dim=head_dim).backend
