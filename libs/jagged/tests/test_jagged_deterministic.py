"""What `torch.use_deterministic_algorithms` does to every op: honoured or an error, never accepted and ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from gemworks.jagged import (
    AttentionBias,
    Rope,
    RopeTables,
    block_attention,
    flash_attention,
    gdpa,
    jagged_dense_matmul,
    layer_norm,
    mean_pool,
    rms_norm,
    seed_pool,
)
from torch import Tensor

LENGTHS = (3, 0, 70, 1, 130)
OFFSETS = [0, 3, 3, 73, 74, 204]
HEADS, WIDTH = 2, 16
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.reference),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


def bias(device: str, buckets: int) -> AttentionBias:
    """Few buckets, so that many pairs add to each entry of the tables."""
    g = torch.Generator().manual_seed(1)
    time, position = (torch.randn(n, HEADS, generator=g).to(device).requires_grad_() for n in (buckets, 9))
    stamps = torch.randint(0, 1 << 20, (OFFSETS[-1],), generator=g).to(device)
    return AttentionBias(position_table=position, time_table=time, timestamps_q=stamps)


def rotation(x: Tensor, offsets: Tensor) -> RopeTables:
    return Rope().tables(offsets, WIDTH, total=x.shape[0])


def one(x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """What a norm without residual returns."""
    assert isinstance(x, Tensor)
    return x


Op = Callable[[Tensor, Tensor, AttentionBias], Tensor]
B = 130
OPS: dict[str, tuple[Op, int]] = {
    "flash": (lambda x, o, b: flash_attention(x, x, x, o, max_length_q=B, causal=True, qk_norm=True), 0),
    "flash, bias in the kernels": (lambda x, o, b: flash_attention(x, x, x, o, max_length_q=B, bias=b), 64),
    "flash, bias of the reference": (lambda x, o, b: flash_attention(x, x, x, o, max_length_q=B, bias=b), 65),
    "gdpa": (lambda x, o, b: gdpa(x, x, x, o, max_length_q=B, scale=0.2, activation="silu"), 0),
    "gdpa, shared query": (
        lambda x, o, b: gdpa(x[:5], x, x, None, o, max_length_k=B, scale=0.2, shared_query=True),
        0,
    ),
    "block": (lambda x, o, b: block_attention(x, x, x, o, max_length_q=B, qk_norm=True, rope=rotation(x, o)), 0),
    "layer norm": (lambda x, o, b: one(layer_norm(x.flatten(1), x[0].flatten(), x[1].flatten())), 0),
    "rms norm": (lambda x, o, b: one(rms_norm(x.flatten(1), x[0].flatten())), 0),
    "mean pool": (lambda x, o, b: mean_pool(x.flatten(1), o), 0),
    "seed pool": (lambda x, o, b: seed_pool(x[:5], x, x, o, max_length_k=B), 0),
    "product": (lambda x, o, b: jagged_dense_matmul(x.flatten(1), x[:160].reshape(5, 32, 32), o, max_length=B), 0),
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch raises wherever an operator of its own has no deterministic form; unwritten memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:gemworks.jagged. a time_table of more than 64 buckets:UserWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.usefixtures("deterministic")
def test_ten_backwards_are_bit_equal_where_torch_is_asked_for_it_d1_d2(name: str, device: str) -> None:
    """D1, D2: with the flag every op runs, in its fixed order, the tables of a bias too."""
    op, buckets = OPS[name]
    offsets = torch.tensor(OFFSETS, device=device)
    x = torch.randn(OFFSETS[-1], HEADS, WIDTH, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    table = bias(device, max(1, buckets))
    leaves = [x, table.time_table, table.position_table] if buckets else [x]
    first: list[Tensor] = []
    for _ in range(10):
        out = op(x, offsets, table)
        grads = torch.autograd.grad(out.square().sum(), leaves)  # type: ignore[arg-type]
        found = [out.detach(), *grads]
        assert all(bool(torch.isfinite(t).all()) for t in found)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
