"""LayerNorm and RMSNorm with residual beside torch.compile, eager PyTorch and Liger.

Letters: D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gemworks.jagged import layer_norm, rms_norm
from gemworks.jagged.bench.bandwidth import Forward, Subject, assert_near
from torch import Tensor
from torch.nn import functional

EPS = 1e-5
SEED = 0
# What the model runs at every width that matters, then the rest at one width.
MAIN, MAIN_WIDTHS = ("rms_norm residual", "layer_norm affine residual"), (128, 512, 1024, 2048, 8192)
OTHERS, OTHER_WIDTHS = (
    ("rms_norm", "rms_norm affine", "rms_norm affine residual", "rms_norm add", "layer_norm affine"),
    (512,),
)
ODD_WIDTHS = (1000, 3000)  # tiles of the next power of two, and rows that begin off the boundaries of long loads
LATE = ("rms_norm", "rms_norm add")  # measured last, where time may run out
CASES: tuple[tuple[str, int], ...] = (
    *((variant, width) for width in MAIN_WIDTHS for variant in MAIN),
    *((variant, width) for variant in OTHERS for width in OTHER_WIDTHS),
    *((variant, width) for width in ODD_WIDTHS for variant in MAIN),
)


def num_rows(width: int) -> int:
    """262,144 rows, fewer where a tensor would pass 2 GiB in bf16, more where it would not fill the device."""
    return min(max(1 << 18, (1 << 27) // width), (1 << 30) // width)


def _parts(variant: str, rest: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Keyword arguments of the op, and what is left over (`add` of a peer)."""
    others, named = list(rest), {}
    if "residual" in variant:
        named["residual"] = others.pop(0)
    if "affine" in variant:
        named["weight"] = others.pop(0)
        if variant.startswith("layer"):
            named["bias"] = others.pop(0)
    if "add" in variant:
        named["add"] = others.pop(0)
    return named, others


def ours(variant: str) -> Forward:
    public: Any = layer_norm if variant.startswith("layer") else rms_norm
    return lambda x, *rest: public(x, eps=EPS, **_parts(variant, rest)[0])


def plain(variant: str) -> Forward:
    """The same function in plain PyTorch, for eager mode and for torch.compile."""

    def norm(x: Tensor, *rest: Tensor) -> Any:
        named, _ = _parts(variant, rest)
        h = x + named["residual"] if "residual" in named else x
        width = h.shape[-1:]
        if variant.startswith("layer"):
            y = functional.layer_norm(h, width, named.get("weight"), named.get("bias"), EPS)
        else:
            y = functional.rms_norm(h, width, named.get("weight"), EPS)
        if "add" in named:
            y = y + named["add"]
        return (y, h) if "residual" in named else y

    return norm


def liger(variant: str) -> Forward:
    """Liger's kernels where it has one for this variant; the weight is not optional there."""
    if variant == "rms_norm affine":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]

        return lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)
    if variant == "rms_norm affine residual":
        from liger_kernel.ops.fused_add_rms_norm import (  # pyright: ignore[reportMissingImports]
            LigerFusedAddRMSNormFunction,
        )

        return lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", False)
    if variant == "layer_norm affine":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # pyright: ignore[reportMissingImports]

        return lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, EPS)
    raise NotImplementedError("Liger has no kernel for this variant")


def subjects(
    device: torch.device, dtype: torch.dtype, cases: tuple[tuple[str, int], ...] = CASES, rows: int | None = None
) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """(label, how to make it) of every case; tensors exist only once it is made."""
    for variant, width in cases:
        count = num_rows(width) if rows is None else rows
        yield f"{variant} {count}x{width}", lambda v=variant, w=width, n=count: _subject(v, w, n, device, dtype)


def _subject(variant: str, width: int, rows: int, device: torch.device, dtype: torch.dtype) -> Subject:
    generator = torch.Generator(device).manual_seed(SEED)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    leaves = [random(rows, width).requires_grad_()]
    if "residual" in variant:
        leaves.append(random(rows, width).requires_grad_())
    if "affine" in variant:
        leaves += [random(width).requires_grad_() for _ in range(2 if variant.startswith("layer") else 1)]
    if "add" in variant:
        leaves.append(random(rows, width).requires_grad_())
    streams = 2 if "residual" in variant else 1
    cotangents = [random(rows, width) for _ in range(streams)]
    tensor_bytes = rows * width * dtype.itemsize

    def compiled() -> tuple[Forward, list[Tensor]]:
        torch._dynamo.reset()  # each width its own graph, or it would become a symbol and slow the peer down
        return torch.compile(plain(variant), dynamic=False), leaves

    return Subject(
        common={
            "op": variant, "shape": f"{rows}x{width}", "dtype": str(dtype).removeprefix("torch."), "seed": str(SEED)
        },
        ours=ours(variant),
        leaves=leaves,
        peers={
            "torch.compile": compiled,
            "torch eager": lambda: (plain(variant), leaves),
            "Liger": lambda: (liger(variant), leaves),
        },
        cotangents=cotangents,
        # x (and residual or add) in, y (and h) out; then dy (and dh) and h in, dx out.
        bytes_fwd=tensor_bytes * (len([a for a in leaves if a.dim() == 2]) + streams),
        bytes_bwd=tensor_bytes * (2 + streams),
        check=lambda outs: _check(variant, leaves, outs, cotangents),
        same_function=frozenset({"torch.compile", "torch eager", "Liger"}),
    )  # fmt: skip


def _check(variant: str, leaves: list[Tensor], outs: list[Tensor], cotangents: list[Tensor]) -> None:
    """The first and last rows against float64, and finite everywhere."""
    grads = torch.autograd.grad(outs, leaves, cotangents, retain_graph=True)
    assert all(bool(x.isfinite().all()) for x in (*outs, *grads)), variant
    for part in (slice(0, 64), slice(-64, None)):
        cut = [(a[part] if a.dim() == 2 else a).detach().double().requires_grad_() for a in leaves]
        truth = plain(variant)(*cut)
        truths = list(truth) if isinstance(truth, tuple) else [truth]
        exact = torch.autograd.grad(truths, cut, [c[part].double() for c in cotangents])
        for got, expected in zip(outs, truths, strict=True):
            assert_near(got[part], expected, f"{variant} forward")
        for leaf, got, expected in zip(leaves, grads, exact, strict=True):
            if leaf.dim() == 2:  # the sums over all rows are checked in the tests
                assert_near(got[part], expected, f"{variant} backward")
