"""The norms of the sequence stream, by the kernels that the configuration names.

Letters: T packed events, D width.
"""

from __future__ import annotations

import torch
from gemworks import jagged
from gemworks.gem.kernels import NormKernel
from torch import Tensor
from torch.nn import functional

RMS_EPS = 1e-6
LAYER_EPS = 1e-5


def rms_norm(x_TD: Tensor, kernel: NormKernel, *, add: Tensor | None = None) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) + add` over the last dim, in x's dtype."""
    if kernel == "gemworks":
        return jagged.rms_norm(x_TD, add=add, eps=RMS_EPS)
    with torch.autocast(x_TD.device.type, enabled=False):  # autocast would make it float32
        y_TD = functional.rms_norm(x_TD, x_TD.shape[-1:], eps=RMS_EPS)
    return y_TD if add is None else y_TD + add


def layer_norm(x_TD: Tensor, kernel: NormKernel) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` over the last dim, in x's dtype."""
    if kernel == "gemworks":
        return jagged.layer_norm(x_TD, eps=LAYER_EPS)
    with torch.autocast(x_TD.device.type, enabled=False):
        return functional.layer_norm(x_TD, x_TD.shape[-1:], eps=LAYER_EPS)


def sum_rms_norm(x_TD: Tensor, residual_TD: Tensor, kernel: NormKernel, *, add: Tensor) -> Tensor:
    """`rms_norm(x + residual) + add`, in the dtype of `add`; gemworks' kernel does all of it in one pass."""
    if kernel == "gemworks":
        return jagged.rms_norm(x_TD.to(add.dtype), residual=residual_TD.to(add.dtype), add=add, eps=RMS_EPS)[0]
    return rms_norm(x_TD.to(add.dtype) + residual_TD.to(add.dtype), kernel, add=add)
