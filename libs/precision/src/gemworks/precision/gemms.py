"""The product of two planes, `A [M, K] @ B [N, K]^T`, both quantised along K (or square).

Reference: dequantise and multiply. On a CPU in fp32; on a GPU the dequantised operands are exact in bf16 (E4M3 with
scale bytes 3..246, see `MXTensor.dequantize`) and the product accumulates in fp32, so it *is* the product of the planes
up to the order of summation. How far a backend's product may be from the exact one: the `bounds` module.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from gemworks.precision.backends import choose, cost_note, device_spec, warn_once
from gemworks.precision.casts import Plane
from gemworks.precision.formats import decode, element_spec
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.recipe import GemmKind
from gemworks.precision.tensor_scaling import TensorPlane
from torch import Tensor


def gemm(
    a: Plane,
    b: Plane,
    kind: GemmKind,
    out_dtype: torch.dtype,
    backend: str = "auto",
    *,
    in_parts: bool = False,
    fast: bool = False,
) -> Tensor:
    """Multiply two planes along their dim 1.

    Args:
        a: `[M, K]`, quantised along dim 1 or square.
        b: `[N, K]`, likewise; the same Hadamard transform as `a`.
        kind: arithmetic, which decides the backends that may run it.
        out_dtype: of the result.
        backend: as in `choose`.
        in_parts: the contraction may be cut, as weight gradients ask: as long as a batch, with few outputs. Parts are
            summed in fp32, so a product that is compared with another bit by bit leaves it unset.
        fast: of planes with one scale: `GemmRecipe.fast_accumulation`.

    Returns:
        `[M, N]`.

    Raises:
        ValueError: operands whose contractions, directions or transforms do not fit.
    """
    if not (isinstance(a, MXTensor) and isinstance(b, MXTensor)):
        return _multiply_tensors(a, b, kind, out_dtype, backend, fast)
    for name, plane in (("a", a), ("b", b)):
        if len(plane.shape) != 2 or plane.dim == 0:
            raise ValueError(
                f"{name}: shape {plane.shape} quantised along dim {plane.dim}; a product needs 2 dims with the "
                f"contraction last and quantised along it; use {name}.t() or quantise along the other dim"
            )
    if a.padded_shape[1] != b.padded_shape[1] or a.hadamard != b.hadamard:
        raise ValueError(
            f"a and b: contractions {a.shape[1]} ({a.hadamard}) and {b.shape[1]} ({b.hadamard}) differ; "
            "both operands need the same length and the same Hadamard transform"
        )
    # Contractions are padded to the block, which leaves one entry for all numbers of rows of a weight gradient.
    backend = _backend_of(kind, kind.block, b.padded_shape[0], a.codes.device, backend)
    if backend == "scaled_mm":
        from gemworks.precision.scaled_mm import scaled_mm

        return scaled_mm(a, b, out_dtype, in_parts)
    if backend == "triton":
        from gemworks.precision.triton_reading import readable_length, triton_dequantize

        length = readable_length(a.padded_shape[1])
        left, right = (triton_dequantize(plane, length=length) for plane in (a, b))
        return multiply_bf16(left, right, out_dtype)
    if not a.codes.is_cuda:
        product = a.dequantize(keep_transform=True) @ b.dequantize(keep_transform=True).t()
        return product.to(out_dtype)
    half = torch.bfloat16
    return multiply_bf16(a.dequantize(half, keep_transform=True), b.dequantize(half, keep_transform=True), out_dtype)


def _multiply_tensors(a: Plane, b: Plane, kind: GemmKind, out_dtype: torch.dtype, backend: str, fast: bool) -> Tensor:
    """`gemm` of planes with one scale each: the sum of products of codes, times both scales in fp32."""
    if not (isinstance(a, TensorPlane) and isinstance(b, TensorPlane)) or kind is not GemmKind.FP8_TENSOR:
        raise ValueError(
            f"a and b: a {type(a).__name__} and a {type(b).__name__} in a product of kind {kind.value!r}; planes with "
            "one scale go with each other and with kind 'fp8_tensor'"
        )
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a and b: contractions {a.shape[1]} and {b.shape[1]} differ; both need the same length")
    if _backend_of(kind, kind.block, b.shape[0], a.codes.device, backend) == "scaled_mm":
        from gemworks.precision.scaled_mm import tensor_mm

        return tensor_mm(a, b, out_dtype, fast)
    if not a.codes.is_cuda:
        product = decode(a.codes, a.format) @ decode(b.codes, b.format).t()
    else:
        product = product_bf16(_codes_bf16(a), _codes_bf16(b).t(), torch.float32)
    return (product * (a.scale * b.scale)).to(out_dtype)


def _codes_bf16(plane: TensorPlane) -> Tensor:
    """What codes stand for before the scale, which bf16 holds exactly."""
    dtype = element_spec(plane.format).torch_dtype
    assert dtype is not None, "planes with one scale have codes of 8 bits"
    return plane.codes.view(dtype).to(torch.bfloat16)


@lru_cache(maxsize=1024)
def _backend_of(kind: GemmKind, contraction: int, columns: int, device: torch.device, backend: str) -> str:
    """The backend of a product; warns of its cost the first time."""
    spec = device_spec(device)
    choice = choose("gemm", kind, (0, contraction, columns), spec, backend)
    note = cost_note(choice, spec)
    if note is not None:
        warn_once(note)
    return choice.backend


def multiply_bf16(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`a @ b^T` of bf16 matrices with fp32 accumulation, rounded once to `out_dtype`."""
    return product_bf16(a, b.t(), out_dtype)


def product_bf16(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`left @ right` of bf16 matrices with fp32 accumulation, rounded once to `out_dtype`."""
    if out_dtype is torch.float32 and left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).to(out_dtype)
