"""The head's mean over a sequence: values and gradients are `mean_pool`'s, bit for bit."""

import pytest
import torch
from gemworks.gem.model.head import _MeanPool
from gemworks.jagged import mean_pool
from torch import Tensor

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lengths", [[0, 3, 1, 0, 700, 64, 0], [5], [0, 0]])
def test_mean_and_gradient_are_mean_pools(lengths: list[int], dtype: torch.dtype):
    torch.manual_seed(0)
    offsets_S = torch.tensor([0, *lengths]).cumsum(0)
    s_TD = torch.randn(int(offsets_S[-1]), 24).to(dtype).requires_grad_()
    grad_BD = torch.randn(len(lengths), 24).to(dtype)

    def both(out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, s_TD, grad_BD)]

    found, wanted = both(_MeanPool.apply(s_TD, offsets_S)), both(mean_pool(s_TD, offsets_S))  # pyright: ignore[reportArgumentType]
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype == dtype
        assert torch.equal(x, y)
