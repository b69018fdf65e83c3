"""The token map's kernels under Triton's interpreter against float64: values and every gradient.

Run by test_jagged_interpret; fp16 and fp32 only, as the interpreter computes bf16 wrong.
"""

from __future__ import annotations

import pytest
import torch
from gemworks.jagged.ops.token_map.launch import token_map_backward, token_map_forward
from gemworks.jagged.ops.token_map.reference import token_map_reference
from torch import Tensor

SHAPES = [(7, 32, 256, 128), (1, 1, 1, 1), (5, 17, 100, 70), (4, 64, 129, 64), (0, 4, 4, 4), (2, 3, 16, 200)]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_token_map_kernels(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    num_samples, num_in, num_out, width = shape
    x = random(num_samples, num_in, width, dtype=dtype, seed=1)
    weight = random(num_out, num_in, dtype=dtype, seed=2).float() / num_in**0.5
    base = random(num_out, width, dtype=torch.float32, seed=3)
    dy = random(num_samples, num_out, width, dtype=dtype, seed=4)
    leaves = [t.double().requires_grad_() for t in (x, weight.to(dtype), base)]
    wanted = token_map_reference(*leaves)
    grads = torch.autograd.grad(wanted, leaves, dy.double())
    tolerance = 3e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(token_map_forward(x, weight, base).double(), wanted, rtol=tolerance, atol=tolerance)
    found = token_map_backward(dy, x, weight)
    assert [t.dtype for t in found] == [dtype, torch.float32, torch.float32]
    for got, grad in zip(found, grads, strict=True):
        scale = float(grad.abs().max()) if grad.numel() else 1.0
        torch.testing.assert_close(got.double(), grad, rtol=tolerance, atol=tolerance * max(scale, 1.0))
    again = token_map_backward(dy, x, weight)
    assert all(torch.equal(p, q) for p, q in zip(found, again, strict=True))
