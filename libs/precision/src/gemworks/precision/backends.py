"""Who computes what on which device: one registry, one rule per backend, and an explanation of every choice.

Ops are `cast` (quantise) and `gemm` (the product of two planes). A backend states for every (op, kind, shape, device)
either that it can or the reason why not; the first able backend in the order of `ORDER` is chosen. Nothing here looks
at the machine unless a caller asks about "cuda".
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from gemworks.precision import te_backend
from gemworks.precision.checks import as_integer, set_integer
from gemworks.precision.recipe import GemmKind, Recipe, recipe

Shape = tuple[int, int, int]
"""(M, K, N): rows, input features, output features of a linear layer; for one product, (rows, contraction, columns)."""


class PrecisionCostWarning(UserWarning):
    """A choice that is right but slower than the reader may think; raised once per choice."""


@dataclass(frozen=True)
class DeviceSpec:
    """A device as the rules see it: `cpu`, or `cuda` with a compute capability such as 90."""

    type: str
    capability: int = 0

    def __post_init__(self) -> None:
        number = as_integer(self.capability)
        known = number is not None and (number == 0 if self.type == "cpu" else number > 0)
        if self.type not in ("cpu", "cuda") or number is None or not known:
            raise ValueError(
                f"DeviceSpec: got type {self.type!r} and capability {self.capability!r}, expected 'cpu' alone, or "
                "'cuda' with a compute capability such as 90; device_spec('sm_90') makes one"
            )
        set_integer(self, "capability", number)

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"sm_{self.capability}"


def device_spec(device: str | torch.device | DeviceSpec) -> DeviceSpec:
    """Understand `"cpu"`, `"sm_90"` (no GPU needed), or a torch device (asks the driver for its capability).

    >>> device_spec("sm_90")
    DeviceSpec(type='cuda', capability=90)
    """
    if isinstance(device, DeviceSpec):
        return device
    if isinstance(device, torch.device) and device.type == "cuda":
        return _cuda_spec(device.index)
    name = str(device)
    if name.startswith("sm_") and name[3:].isdigit():
        return DeviceSpec("cuda", int(name[3:]))
    try:
        parsed = torch.device(name)
    except RuntimeError:
        parsed = torch.device("meta")
    if parsed.type == "cpu":
        return DeviceSpec("cpu")
    if parsed.type != "cuda":
        raise ValueError(f"device: got {name!r}, expected 'cpu', 'cuda', 'cuda:N' or an architecture such as 'sm_90'")
    return _cuda_spec(parsed.index)


@lru_cache
def _cuda_spec(index: int | None) -> DeviceSpec:
    if not torch.cuda.is_available():
        raise ValueError("device: 'cuda' asked for, but there is no CUDA device; name an architecture such as 'sm_90'")
    major, minor = torch.cuda.get_device_capability(index)
    return DeviceSpec("cuda", 10 * major + minor)


Rule = Callable[[str, GemmKind, Shape, DeviceSpec], str | None]


@dataclass(frozen=True)
class Backend:
    """Name, rule (None: able; otherwise the reason), and what its kernels are for each op."""

    name: str
    rule: Rule
    kernels: Callable[[str, GemmKind, DeviceSpec], str]


def interpreting() -> bool:
    """Are Triton kernels run by the interpreter on CPU tensors?"""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


_CODES_IN_FP32 = "torch.matmul of codes in fp32, then both scales"
_CODES_IN_BF16 = "matmul of codes in bf16 (exact operands), then both scales in fp32"


def _reference_rule(op: str, kind: GemmKind, shape: Shape, device: DeviceSpec) -> str | None:
    return None


def _reference_kernel(op: str, kind: GemmKind, device: DeviceSpec) -> str:
    if op == "cast":
        return "torch, several passes"
    if kind is GemmKind.BF16:
        return "torch.matmul"
    if kind is GemmKind.FP8_TENSOR:
        return _CODES_IN_FP32 if device.type == "cpu" else _CODES_IN_BF16
    return "dequantise + torch.matmul in " + ("fp32" if device.type == "cpu" else "bf16 (exact operands)")


def _triton_rule(op: str, kind: GemmKind, shape: Shape, device: DeviceSpec) -> str | None:
    if kind is GemmKind.BF16:
        return "nothing to quantise"
    if device.type == "cpu" and not interpreting():
        return "needs a CUDA device (or TRITON_INTERPRET=1)"
    if device.type == "cuda" and device.capability < 89:
        return f"E4M3 conversion needs sm_89 or later, this is sm_{device.capability}"
    if op == "gemm" and device.type == "cpu":
        return "under the interpreter only casts are worth running"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def _triton_kernel(op: str, kind: GemmKind, device: DeviceSpec) -> str:
    if kind is GemmKind.FP8_TENSOR:
        return "two Triton kernels, the second when the largest value is known" if op == "cast" else _CODES_IN_BF16
    return "one Triton kernel" if op == "cast" else "Triton dequantise to bf16 (exact) + cuBLAS bf16"


def _scaled_mm_rule(op: str, kind: GemmKind, shape: Shape, device: DeviceSpec) -> str | None:
    if op == "cast":
        return "cuBLAS has no cast"
    if kind is GemmKind.BF16:
        return "nothing is scaled"
    if device.type != "cuda":
        return "needs a CUDA device"
    if kind is GemmKind.MXFP8:
        if not 100 <= device.capability < 120:
            return f"1x32 scales need sm_100, this is sm_{device.capability} (cuBLAS refuses)"
        multiple = 32
    elif kind is GemmKind.FP8_TENSOR:
        if device.capability < 89:
            return f"FP8 products need sm_89 or later, this is sm_{device.capability}"
        multiple = 16
    else:
        if device.capability != 90:
            return f"1x128 and 128x128 scales are Hopper's (sm_90), this is sm_{device.capability}"
        multiple = 128
    if shape[1] % multiple or shape[2] % 16:
        return f"contraction {shape[1]} and columns {shape[2]} must be multiples of {multiple} and 16"
    return None


def _scaled_mm_kernel(op: str, kind: GemmKind, device: DeviceSpec) -> str:
    if kind is GemmKind.MXFP8:
        return "cuBLAS 1x32 E8M0 (written and shape-checked, not run on our machines)"
    if kind is GemmKind.FP8_TENSOR:
        return "cuBLAS FP8, one scale a tensor" + ("" if device.capability == 90 else " (not run on our machines)")
    return "cuBLAS FP8 1x128 x 128x128 (forward, dgrad), 1x128 x 1x128 (wgrad)"


def _te_rule(op: str, kind: GemmKind, shape: Shape, device: DeviceSpec) -> str | None:
    return te_backend.refusal(kind, device.type, device.capability)


def _te_kernel(op: str, kind: GemmKind, device: DeviceSpec) -> str:
    run = kind is not GemmKind.MXFP8 and device.capability == 90
    seen = "the same bits as ours on an H200" if run else "not run on our machines"
    return f"Transformer Engine's Linear, {te_backend.RECIPES[kind]} (its own casts; {seen})"


REGISTRY: dict[str, Backend] = {
    "reference": Backend("reference", _reference_rule, _reference_kernel),
    "triton": Backend("triton", _triton_rule, _triton_kernel),
    "scaled_mm": Backend("scaled_mm", _scaled_mm_rule, _scaled_mm_kernel),
    # Of whole layers, and only by name: its codes are its own.
    te_backend.NAME: Backend(te_backend.NAME, _te_rule, _te_kernel),
}
ORDER = ("scaled_mm", "triton", "reference")


@dataclass(frozen=True)
class Choice:
    """Which backend runs an op, with which kernel, and why the ones before it do not."""

    op: str
    kind: GemmKind
    backend: str
    kernel: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        why = "; ".join(f"not {name}: {reason}" for name, reason in self.rejected)
        return f"{self.op:4} {self.kind.value:16} {self.backend}: {self.kernel}" + (f" ({why})" if why else "")


@lru_cache(maxsize=4096)
def choose(op: str, kind: GemmKind, shape: Shape, device: DeviceSpec, backend: str = "auto") -> Choice:
    """Pick the backend of one op.

    Args:
        op: `cast` or `gemm`.
        kind: arithmetic of the product.
        shape: (rows, contraction, columns) of the product; casts ignore it.
        device: from `device_spec`.
        backend: `auto`, or a name: for a `gemm` that backend or an error; for a `cast`, a name whose backend has no
            cast leaves the choice automatic (cuBLAS has none).

    Raises:
        ValueError: an unknown backend, or the named one can't do it (with its reason).
    """
    if backend != "auto":
        if backend not in REGISTRY:
            raise ValueError(f"backend: got {backend!r}, expected 'auto' or one of {sorted(REGISTRY)}")
        if not (backend == "scaled_mm" and (op == "cast" or kind is GemmKind.BF16)) and not (
            backend == "triton"
            and (kind is GemmKind.BF16 or (op == "gemm" and device.type == "cpu" and interpreting()))
        ):
            reason = REGISTRY[backend].rule(op, kind, shape, device)
            if reason is not None:
                raise ValueError(f"backend: {backend!r} cannot run {op} {kind.value} on {device}: {reason}; use 'auto'")
            return Choice(op, kind, backend, REGISTRY[backend].kernels(op, kind, device), ())
    rejected: list[tuple[str, str]] = []
    for name in ORDER:
        reason = REGISTRY[name].rule(op, kind, shape, device)
        if reason is None:
            return Choice(op, kind, name, REGISTRY[name].kernels(op, kind, device), tuple(rejected))
        rejected.append((name, reason))
    raise AssertionError("the reference backend refuses nothing")


def cost_note(choice: Choice, device: DeviceSpec) -> str | None:
    """What a choice costs on a GPU, where that may surprise; None where it does not."""
    if device.type == "cpu" or choice.kind is GemmKind.BF16 or choice.op == "cast" or choice.backend == "scaled_mm":
        return None
    if choice.kind is GemmKind.MXFP8:
        return (
            f"mxfp8 on {device} multiplies dequantised bf16 operands: exact, but slower than plain bf16 by its casts. "
            "'mxfp8_regroup128' and 'fp8_block128' use Hopper's FP8 units"
        )
    why = "; ".join(reason for _, reason in choice.rejected)
    return f"{choice.kind.value} on {device} is emulated in bf16, with no gain in speed ({why})"


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn with `PrecisionCostWarning`, the first time only."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, PrecisionCostWarning, stacklevel=3)


@dataclass(frozen=True)
class Explanation:
    """What a linear layer of one shape would do: a line per product and per cast, and the notes that go with it."""

    shape: Shape
    recipe: str
    device: DeviceSpec
    choices: tuple[tuple[str, Choice], ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        head = f"linear M={self.shape[0]} K={self.shape[1]} N={self.shape[2]}, recipe {self.recipe}, {self.device}"
        return "\n".join(
            [head, *(f"  {name:8} {choice}" for name, choice in self.choices), *(f"  note: {n}" for n in self.notes)]
        )


def product_shapes(shape: Shape) -> dict[str, Shape]:
    """(rows, contraction, columns) of the three products of a linear layer."""
    m, k, n = shape
    return {"forward": (m, k, n), "dgrad": (m, n, k), "wgrad": (n, m, k)}


def explain(
    shape: Shape,
    recipe_or_name: str | Recipe = "mxfp8",
    device: str | torch.device | DeviceSpec = "cpu",
    num_ranks: int | None = None,
) -> Explanation:
    """Say which kernel each product and cast of a linear layer would use, and why. Needs no device for `sm_NN`.

    Args:
        shape: (M, K, N).
        recipe_or_name: a recipe or preset name.
        device: `cpu`, `cuda`, or an architecture such as `sm_90`.
        num_ranks: also say how FSDP2 would gather the weight over as many ranks (`fsdp.gather_in_fp8`).

    Raises:
        ValueError: another shape, recipe, device or number of ranks.

    >>> print(explain((4096, 1024, 1024), "fp8_block128", "sm_90"))  # doctest: +ELLIPSIS
    linear M=4096 K=1024 N=1024, recipe fp8_block128, sm_90
      forward  gemm fp8_block128     scaled_mm: cuBLAS FP8 1x128 x 128x128 (forward, dgrad), 1x128 x 1x128 (wgrad)
    ...
    """
    found = [as_integer(size) for size in shape] if isinstance(shape, list | tuple) else []
    sizes = [size for size in found if size is not None and size >= 1]
    if len(found) != 3 or len(sizes) != 3:
        raise ValueError(f"shape: got {shape!r}, expected (M, K, N): rows, in_features and out_features, each >= 1")
    shape = (sizes[0], sizes[1], sizes[2])
    chosen, spec = recipe(recipe_or_name), device_spec(device)
    reason = shape_rule(shape[1], shape[2], chosen)
    notes = []
    if reason is not None:
        notes.append(f"stays bf16: {reason}")
        chosen = recipe("bf16")
    choices: list[tuple[str, Choice]] = []
    for name, product in product_shapes(shape).items():
        gemm = getattr(chosen, name)
        # The contraction of wgrad is padded to the block, so any number of rows will do.
        rows, contraction, columns = product
        padded = (rows, -(-contraction // gemm.kind.block) * gemm.kind.block, columns)
        choice = choose("gemm", gemm.kind, padded, spec, chosen.backend)
        choices.append((name, choice))
        if gemm.kind is not GemmKind.BF16:
            choices.append((name, choose("cast", gemm.kind, padded, spec, chosen.backend)))
        note = cost_note(choice, spec)
        if note is not None and note not in notes:
            notes.append(note)
    if spec.type == "cuda" and not chosen.is_bf16:
        from gemworks.precision.linear import short_way

        half = torch.bfloat16
        short = chosen.backend == "auto" and short_way(chosen, spec, half, half, shape[1], shape[2]) is not None
        notes.append(
            "the host's work: eager layers of bf16 activations take the short way"
            if short
            else "the host's work: the general way, ten times a bf16 layer's on an H200 (1.4 ms forward + backward)"
        )
    if num_ranks is not None:
        from gemworks.precision.fsdp import gather_rule

        ranks = as_integer(num_ranks)
        if ranks is None or ranks < 1:
            raise ValueError(f"num_ranks: got {num_ranks!r}, expected the number of ranks that share the weight, >= 1")
        how, why = gather_rule(shape[2], shape[1], ranks, chosen)
        notes.append(f"FSDP2 over {ranks} ranks gathers the weight as {how}: {why}")
    return Explanation(shape, chosen.name, spec, tuple(choices), tuple(notes))


def shape_rule(in_features: int, out_features: int, chosen: Recipe) -> str | None:
    """Why a layer of this shape stays bf16 under a recipe; None if it does not."""
    if chosen.is_bf16:
        return None
    multiple = chosen.feature_multiple
    for name, features in (("in_features", in_features), ("out_features", out_features)):
        if features % multiple:
            return f"{name} {features} is not a multiple of {multiple}"
    smallest = min(in_features, out_features)
    if smallest < chosen.min_features:
        return f"{smallest} features are fewer than min_features {chosen.min_features}: casts cost more than they save"
    return None


def support_table(devices: tuple[str, ...] = ("cpu", "sm_80", "sm_90", "sm_100")) -> list[tuple[str, str, str, str]]:
    """(device, op, kind, kernel) of every combination, produced by the rules that `choose` follows.

    Raises:
        ValueError: no sequence of devices, or a device that is none.
    """
    if not isinstance(devices, list | tuple):
        raise ValueError(f"devices: got {devices!r}, expected a tuple of them, e.g. ('cpu', 'sm_90')")
    rows = []
    for device in devices:
        spec = device_spec(device)
        for kind in GemmKind:
            for op in ("cast", "gemm"):
                choice = choose(op, kind, (4096, 4096, 4096), spec)
                if not (op == "cast" and kind is GemmKind.BF16):
                    rows.append((str(spec), op, kind.value, f"{choice.backend}: {choice.kernel}"))
    return rows
