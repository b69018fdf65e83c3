"""Properties over drawn lengths: {0, 1, tile - 1, tile, tile + 1, one giant, all empty}."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import (
    AttentionBias,
    Jagged,
    block_attention,
    concat,
    flash_attention,
    from_list,
    from_padded,
    gdpa,
    num_pairs,
    offsets_from_lengths,
    split,
    to_padded,
)
from gemworks.jagged.testing import attention_loop, is_admitted, softmax_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.reference

TILES = [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65]
lengths_lists = st.one_of(
    st.lists(st.sampled_from(TILES), min_size=1, max_size=6),
    st.lists(st.sampled_from([0, 1]), min_size=1, max_size=8),
    st.lists(st.just(0), min_size=1, max_size=4),
    st.lists(st.sampled_from([0, 1, 33]), max_size=4).map(lambda rest: [*rest, 300]),
)
windows = st.one_of(st.none(), st.integers(1, 70), st.tuples(st.integers(-1, 40), st.integers(-1, 40)))
few = settings(max_examples=25, deadline=None)


def packed(lengths: list[int], *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random float64 values [T, ...] with a gradient, and their offsets."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), *shape, dtype=torch.float64, generator=generator)
    return values.requires_grad_(), offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One sequence, [L, N, H]; rows without a key give 0."""
    logits = torch.einsum("lnh,knh->nlk", q, k) / q.shape[-1] ** 0.5
    weights = logits.masked_fill(~mask, -1e300).softmax(-1) * mask.any(-1, keepdim=True)
    return torch.einsum("nlk,knh->lnh", weights, v)


def admitted(length_q: int, length_k: int, **rule: Any) -> Tensor:
    rows = [[is_admitted(i, j, length_q, length_k, **rule) for j in range(length_k)] for i in range(length_q)]
    return torch.tensor(rows, dtype=torch.bool).view(length_q, length_k)


@few
@given(lengths_lists, st.booleans(), windows)
def test_a_batch_equals_a_loop_of_dense_calls(lengths: list[int], causal: bool, window: Any) -> None:
    q, offsets = packed(lengths, 2, 4, seed=1)
    k, v = packed(lengths, 2, 4, seed=2)[0], packed(lengths, 2, 4, seed=3)[0]
    ours = flash_attention(q, k, v, offsets, max_length_q=512, causal=causal, window=window)
    parts = zip(*(Jagged(x, offsets, 512).unbind() for x in (q, k, v)), strict=True)
    truth = torch.cat(
        [dense_attention(a, b, c, admitted(len(a), len(a), causal=causal, window=window)) for a, b, c in parts]
    )
    torch.testing.assert_close(ours, truth)
    for g, e in zip(
        torch.autograd.grad(ours.square().sum(), (q, k, v)),
        torch.autograd.grad(truth.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-8)


@few
@given(st.lists(st.tuples(st.sampled_from(TILES), st.sampled_from(TILES)), min_size=1, max_size=4), st.data())
def test_q_and_k_lengths_in_pairs_equal_loops(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    causal, window = data.draw(st.booleans()), data.draw(windows)
    align = data.draw(st.sampled_from(["top_left", "bottom_right"]))
    q, offsets_q = packed([a for a, _ in pairs], 2, 3, seed=1)
    k, offsets_k = packed([b for _, b in pairs], 1, 3, seed=2)
    rule: Any = {"causal": causal, "window": window, "align": align}
    ours = flash_attention(q, k, k, offsets_q, offsets_k, max_length_q=65, max_length_k=65, scale=1.0, **rule)
    truth = attention_loop(q, k, k, offsets_q, offsets_k, weigh=softmax_weights, scale=1.0, **rule)
    torch.testing.assert_close(ours, truth)


@few
@given(lengths_lists, st.randoms())
def test_permuting_sequences_permutes_results(lengths: list[int], random: Any) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    x, offsets = packed(lengths, 2, 4)
    sequences = Jagged(x.detach(), offsets, 512).unbind()
    moved = from_list([sequences[i] for i in order], 512)
    for op in (
        lambda y, o: flash_attention(y, y, y, o, max_length_q=512),
        lambda y, o: gdpa(y, y, y, o, max_length_q=512, scale=0.3),
        lambda y, o: block_attention(y, y, y, o, max_length_q=512),
    ):
        before = Jagged(op(x.detach(), offsets), offsets, 512).unbind()
        after = Jagged(op(moved.values, moved.offsets), moved.offsets, 512).unbind()
        for i, j in enumerate(order):
            torch.testing.assert_close(after[i], before[j], rtol=1e-12, atol=1e-13)


@few
@given(lengths_lists, st.booleans())
def test_a_window_as_long_as_the_sequence_is_full_attention(lengths: list[int], causal: bool) -> None:
    x, offsets = packed(lengths, 2, 4)
    full = flash_attention(x, x, x, offsets, max_length_q=512, causal=causal)
    window = flash_attention(x, x, x, offsets, max_length_q=512, causal=causal, window=max(1, *lengths, 1))
    torch.testing.assert_close(window, full)


@few
@given(lengths_lists, st.sampled_from([32, 64, 128]))
def test_block_attention_is_flash_attention_with_a_block_mask(lengths: list[int], block: int) -> None:
    x, offsets = packed(lengths, 2, 4)
    ours = block_attention(x, x, x, offsets, max_length_q=512, block=block)
    truth = torch.cat(
        [dense_attention(s, s, s, admitted(len(s), len(s), block=block)) for s in Jagged(x, offsets, 512).unbind()]
    )
    torch.testing.assert_close(ours, truth)


@few
@given(lengths_lists)
def test_gdpa_with_identity_is_q_times_k_transposed_v(lengths: list[int]) -> None:
    q, offsets = packed(lengths, 1, 4, seed=1)
    k, v = packed(lengths, 1, 4, seed=2)[0], packed(lengths, 1, 3, seed=3)[0]
    ours = gdpa(q, k, v, offsets, max_length_q=512, scale=0.5, activation="identity")
    parts = zip(*(Jagged(x[:, 0], offsets, 512).unbind() for x in (q, k, v)), strict=True)
    torch.testing.assert_close(ours[:, 0], torch.cat([0.5 * a @ (b.T @ c) for a, b, c in parts]))


@few
@given(lengths_lists, windows, st.booleans(), st.sampled_from(["top_left", "bottom_right"]), st.integers(0, 9))
def test_num_pairs_equals_counting(lengths: list[int], window: Any, causal: bool, align: Any, length_k: int) -> None:
    lengths = [min(n, 66) for n in lengths]
    rule: Any = {"window": window, "causal": causal, "align": align}
    cases: list[tuple[Any, list[int]]] = [(None, lengths), (length_k, [length_k] * len(lengths))]
    for argument, lengths_k in cases:
        count = sum(int(admitted(a, b, **rule).sum()) for a, b in zip(lengths, lengths_k, strict=True))
        assert int(num_pairs(torch.tensor(lengths), argument, **rule)) == count


@few
@given(lengths_lists, st.sampled_from([32, 64]), st.booleans())
def test_num_pairs_of_blocks_equals_counting(lengths: list[int], block: int, causal: bool) -> None:
    lengths = [min(n, 66) for n in lengths]
    count = sum(int(admitted(n, n, block=block, causal=causal).sum()) for n in lengths)
    assert int(num_pairs(torch.tensor(lengths), block=block, causal=causal)) == count


@few
@given(lengths_lists, st.integers(1, 3))
def test_padding_and_packing_are_inverse(lengths: list[int], width: int) -> None:
    x, offsets = packed(lengths, width)
    jagged = Jagged(x, offsets, 512)
    padded = to_padded(jagged, max([*lengths, 1]))
    back = from_padded(padded, jagged.lengths)
    assert torch.equal(back.values, x)
    assert torch.equal(back.offsets, offsets)
    mask = torch.arange(padded.shape[1]) < jagged.lengths[:, None]
    assert torch.equal(from_padded(padded, mask=mask).values, x)


@few
@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_split_undoes_concat(num_sequences: int, num_parts: int, data: st.DataObject) -> None:
    draw = st.lists(st.integers(0, 5), min_size=num_sequences, max_size=num_sequences)
    parts = []
    for i in range(num_parts):
        x, offsets = packed(data.draw(draw), 2, seed=i)
        extra = data.draw(st.integers(0, 2))  # rows past the end
        parts.append(Jagged(torch.cat([x, torch.zeros(extra, 2)]).detach(), offsets, 8))
    joined = concat(parts)
    for b, sequence in enumerate(joined.unbind()):
        assert torch.equal(sequence, torch.cat([p.unbind()[b] for p in parts]))
    for part, back in zip(parts, split(joined, parts), strict=True):
        assert torch.equal(part.values, back.values)


@few
@given(lengths_lists)
def test_a_constant_bias_changes_nothing_and_a_steep_one_selects(lengths: list[int]) -> None:
    x, offsets = packed(lengths, 2, 4)
    plain = flash_attention(x, x, x, offsets, max_length_q=512)
    constant = AttentionBias(position_table=torch.full((5, 2), 3.0, dtype=torch.float64))
    torch.testing.assert_close(flash_attention(x, x, x, offsets, max_length_q=512, bias=constant), plain)
    own = torch.full((3, 2), -1e4, dtype=torch.float64)
    own[1] = 0.0
    itself = flash_attention(x, x, x, offsets, max_length_q=512, bias=AttentionBias(position_table=own))
    torch.testing.assert_close(itself, x)
