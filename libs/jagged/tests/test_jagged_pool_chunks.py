"""Pooling by a shared query in chunks of keys equals pooling whole sequences: values, every gradient, bad arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import gdpa, offsets_from_lengths
from torch import Tensor

LENGTHS = [0, 1, 7, 8, 9, 0, 24, 3]
TAIL = 4  # rows of nobody


def inputs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """(q, k, v), offsets and dO; rows past the last sequence are NaN."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    total = sum(LENGTHS) + TAIL
    q, k, v = random(3, 4, 8), random(total, 2, 8), random(total, 2, 6)
    k[-TAIL:] = v[-TAIL:] = float("nan")
    offsets = offsets_from_lengths(torch.tensor(LENGTHS))
    return [t.requires_grad_() for t in (q, k, v)], offsets, random(len(LENGTHS), 3, 4, 6)


def pooled(leaves: list[Tensor], offsets: Tensor, d_out: Tensor, **settings: Any) -> list[Tensor]:
    q, k, v = leaves
    out = gdpa(q, k, v, None, offsets, scale=0.4, shared_query=True, **settings)
    return [out, *torch.autograd.grad(out, leaves, d_out)]


@pytest.mark.parametrize("activation", ["gelu", "identity", "fast_silu", "tanh"])
@pytest.mark.parametrize("chunk", [1, 5, 8, 23, 24, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_chunks_give_what_whole_sequences_give(dtype: torch.dtype, bound: float, chunk: int, activation: Any) -> None:
    """Shorter, as long and longer than sequences; empty ones give 0, rows of nobody get 0; repeats are bit-equal."""
    leaves, offsets, d_out = inputs(dtype)
    settings = {"max_length_k": 24, "activation": activation}
    whole = pooled(leaves, offsets, d_out, **settings)
    cut = pooled(leaves, offsets, d_out, key_chunk=chunk, **settings)
    for got, expected in zip(cut, whole, strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=bound, atol=bound)
    assert not cut[0][0].any()
    assert not cut[2][-TAIL:].any()
    again = pooled(leaves, offsets, d_out, key_chunk=chunk, **settings)
    assert all(torch.equal(a, b) for a, b in zip(cut, again, strict=True))


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    """Where a sequence is cut is its own matter."""
    (q, k, v), offsets, _ = inputs(torch.float32)
    together = gdpa(q, k, v, None, offsets, max_length_k=24, scale=0.4, shared_query=True, key_chunk=5)
    for i, length in enumerate(LENGTHS):
        rows = slice(int(offsets[i]), int(offsets[i + 1]))
        alone = gdpa(
            q, k[rows], v[rows], None, torch.tensor([0, length]), max_length_k=24, scale=0.4, shared_query=True,
            key_chunk=5,
        )  # fmt: skip
        torch.testing.assert_close(alone[0], together[i], rtol=1e-6, atol=1e-6)


def test_chunks_that_cannot_be_are_refused() -> None:
    (q, k, v), offsets, _ = inputs(torch.float32)
    settings: dict[str, Any] = {"max_length_k": 24, "scale": 0.4, "shared_query": True}
    wrong: list[dict[str, Any]] = [{"key_chunk": 0}, {"key_chunk": 5, "causal": True}, {"key_chunk": 5, "window": 3}]
    for more in wrong:
        with pytest.raises(ValueError, match="key_chunk"):
            gdpa(q, k, v, None, offsets, **settings, **more)
    with pytest.raises(ValueError, match="key_chunk"):
        gdpa(k, k, k, offsets, max_length_q=24, scale=0.4, key_chunk=5)
    kv = torch.randn(2, 5, 2, 8)
    with pytest.raises(ValueError, match="key_chunk"):
        gdpa(q, kv, kv, None, scale=0.4, shared_query=True, key_chunk=2)
    with pytest.raises(ValueError, match="max_length"):  # as without chunks: too small for the data
        gdpa(q, k, v, None, offsets, max_length_k=23, scale=0.4, shared_query=True, key_chunk=5)


@pytest.mark.gpu
# float64, the truth of this test, has no kernel, and an op says so once.
@pytest.mark.filterwarnings("ignore:gemworks.jagged. .* runs on the reference backend:UserWarning")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", [512, 1000])
def test_chunks_on_a_gpu(chunk: int) -> None:
    """Heads of 128 in bf16, 256 queries, against float64; bit-equal repeats."""
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = torch.tensor([0, 1, 511, 512, 513, 3000, 0, 70])
    offsets, total = offsets_from_lengths(lengths).cuda(), int(lengths.sum())
    shapes = ((256, 4, 128), (total, 4, 128), (total, 4, 128), (len(lengths), 256, 4, 128))
    q, k, v, d_out = (torch.randn(*s, device="cuda", generator=generator).bfloat16() for s in shapes)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    settings: dict[str, Any] = {"max_length_k": 3000, "activation": "fast_gelu", "key_chunk": chunk}
    exact = [t.detach().double().requires_grad_() for t in leaves]
    del settings["key_chunk"]
    truth = pooled(exact, offsets, d_out.double(), **settings)
    settings["key_chunk"] = chunk
    got = pooled(leaves, offsets, d_out, **settings)
    for g, e in zip(got, truth, strict=True):
        assert g.isfinite().all()
        assert float((g.double() - e).norm() / e.norm()) < 1.2e-2
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(pooled(leaves, offsets, d_out, **settings), got, strict=True))
