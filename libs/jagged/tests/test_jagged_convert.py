"""`Jagged` and its conversions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import (
    Jagged,
    concat,
    concat_batch,
    expand_rows,
    from_cu_seqlens,
    from_keyed,
    from_lengths,
    from_list,
    from_nested,
    from_padded,
    from_torchrec,
    jagged_dense_matmul,
    jagged_dot,
    jagged_jagged_matmul,
    next_power_of_two,
    offsets_from_lengths,
    padding_mask,
    split,
    to_cu_seqlens,
    to_nested,
    to_padded,
    to_torchrec,
)
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.reference

SEQUENCES = [torch.arange(6.0).view(2, 3), torch.empty(0, 3), 10 + torch.arange(9.0).view(3, 3)]


def rows(j: Jagged) -> list[Any]:
    return [s.tolist() for s in j.unbind()]


TRUTH = [s.tolist() for s in SEQUENCES]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_list_and_cu_seqlens_agree(dtype: torch.dtype) -> None:
    values, lengths = torch.cat(SEQUENCES), torch.tensor([2, 0, 3], dtype=dtype)
    made = [
        from_lengths(values, lengths),
        Jagged.from_lengths(values, lengths, 3),
        from_list(SEQUENCES),
        Jagged.from_list(SEQUENCES, max_length=4),
        from_cu_seqlens(values, offsets_from_lengths(lengths).to(torch.int32), 3),
    ]
    for j in made:
        assert rows(j) == TRUTH
        assert j.max_length == 4
        assert (j.num_sequences, j.total) == (3, 5)
        assert j.lengths.tolist() == [2, 0, 3]
    assert made[0].offsets.dtype == dtype
    again = from_cu_seqlens(*to_cu_seqlens(made[0]))
    assert again.offsets.dtype == torch.int32
    assert rows(again) == TRUTH
    assert again.values.data_ptr() == values.data_ptr()


def test_padded_and_mask() -> None:
    j = from_list(SEQUENCES)
    padded = to_padded(j, 4, value=-1.0)
    assert padded.shape == (3, 4, 3)
    assert padded[1].eq(-1).all()
    assert padded[0, 2:].eq(-1).all()
    assert padding_mask(j, 4).sum(1).tolist() == [2, 0, 3]
    assert rows(Jagged.from_padded(padded, j.lengths)) == TRUTH
    assert rows(from_padded(padded, mask=padding_mask(j, 4))) == TRUTH
    assert j.to_padded().shape[1] == j.max_length


def test_mask_with_holes_keeps_the_order() -> None:
    padded = torch.arange(8.0).view(2, 4)
    mask = torch.tensor([[True, False, True, True], [False, False, False, True]])
    assert rows(from_padded(padded, mask=mask)) == [[0.0, 2.0, 3.0], [7.0]]


def test_surplus_total_gives_zero_rows_past_the_end() -> None:
    padded = torch.ones(2, 3, 1, requires_grad=True)
    j = from_padded(padded, torch.tensor([1, 2]), total=6)
    assert j.values[:, 0].tolist() == [1, 1, 1, 0, 0, 0]
    assert j.offsets.tolist() == [0, 1, 3]
    (g,) = torch.autograd.grad(j.values.sum(), padded)
    assert g[..., 0].tolist() == [[1, 0, 0], [1, 1, 0]]


def test_padded_gradients_reach_the_values() -> None:
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 5])
    assert torch.autograd.gradcheck(lambda x: to_padded(Jagged(x, offsets, 4)), values)


def test_nested_is_zero_copy_both_ways() -> None:
    nested = torch.nested.nested_tensor(SEQUENCES, layout=torch.jagged)
    j = from_nested(nested)
    assert rows(j) == TRUTH
    assert j.values.data_ptr() == nested.values().data_ptr()
    back = to_nested(j)
    assert back.values().data_ptr() == j.values.data_ptr()
    assert [s.tolist() for s in back.unbind()] == TRUTH
    assert from_nested(back).max_length == 4
    with pytest.raises(ValueError, match=r"layout torch.strided, expected torch.jagged"):
        from_nested(torch.zeros(2, 3))


class FakeJaggedTensor:
    """The methods of torchrec's class that the conversion relies on; the real one is tested in the recipe."""

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor | None = None) -> None:
        self._values, self._lengths = values, lengths
        self._offsets = offsets_from_lengths(lengths) if offsets is None else offsets

    def values(self) -> torch.Tensor:
        return self._values

    def lengths(self) -> torch.Tensor:
        return self._lengths

    def offsets(self) -> torch.Tensor:
        return self._offsets


def test_torchrec_objects_are_known_by_their_methods() -> None:
    source = FakeJaggedTensor(torch.cat(SEQUENCES), torch.tensor([2, 0, 3]))
    j = from_torchrec(source)
    assert rows(j) == TRUTH
    assert j.values.data_ptr() == source.values().data_ptr()
    back = to_torchrec(j, FakeJaggedTensor)
    assert back.lengths().tolist() == [2, 0, 3]
    assert back.values().data_ptr() == j.values.data_ptr()


def test_real_torchrec_round_trip() -> None:
    torchrec = pytest.importorskip("torchrec", reason="an optional neighbour, never imported by the library")
    j = from_torchrec(torchrec.JaggedTensor(torch.cat(SEQUENCES), lengths=torch.tensor([2, 0, 3])))
    assert rows(j) == TRUTH
    assert rows(from_torchrec(to_torchrec(j, torchrec.JaggedTensor))) == TRUTH
    keyed = torchrec.KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(7), lengths=torch.tensor([2, 0, 3, 1, 1, 0])
    )
    parts = from_keyed(keyed, {"a": 8, "b": 2})
    assert rows(parts["a"]) == [[0, 1], [], [2, 3, 4]]
    assert rows(parts["b"]) == [[5], [6], []]
    assert (parts["a"].max_length, parts["b"].max_length) == (8, 2)


def test_pytree_carries_the_bound() -> None:
    j = from_list(SEQUENCES)
    leaves, spec = pytree.tree_flatten({"x": j})
    assert len(leaves) == 2
    doubled = pytree.tree_unflatten([leaf * 2 if leaf.is_floating_point() else leaf for leaf in leaves], spec)["x"]
    assert doubled.max_length == j.max_length
    assert rows(doubled) == [(2 * s).tolist() for s in SEQUENCES]
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_to_moves_values_and_keeps_offsets() -> None:
    j = from_list(SEQUENCES).to(torch.bfloat16)
    assert j.values.dtype == torch.bfloat16
    assert j.offsets.dtype == torch.int64
    meta = j.to("meta")
    assert meta.device.type == meta.offsets.device.type == "meta"
    with pytest.raises(ValueError, match="unbind"):
        meta.unbind()
    with pytest.raises(ValueError, match="max_length: missing"):
        from_lengths(meta.values, meta.lengths)


@pytest.mark.parametrize(("n", "bound"), [(0, 1), (1, 1), (5, 8), (64, 64), (65, 128)])
def test_bound_is_rounded_to_a_power_of_two(n: int, bound: int) -> None:
    assert next_power_of_two(n) == bound
    assert Jagged(torch.zeros(n), torch.tensor([0, n]), n).max_length == bound


def test_empty_batch() -> None:
    j = Jagged(torch.zeros(0, 3), torch.tensor([0]), 0)
    assert j.num_sequences == 0
    assert to_padded(j, 4).shape == (0, 4, 3)
    assert concat([j, j]).total == 0
    assert jagged_jagged_matmul(j.values, j.values, j.offsets, max_length=1).shape == (0, 3, 3)
    with pytest.raises(ValueError, match="sequences: got none"):
        from_list([])


def test_concat_keeps_each_samples_order() -> None:
    a = from_list([torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
    b = from_list([torch.tensor([4.0, 5.0]), torch.empty(0)])
    joined = concat([a, b, a])
    assert rows(joined) == [[1, 4, 5, 1], [2, 3, 2, 3]]
    assert [rows(p) for p in split(joined, [a, b, a])] == [rows(a), rows(b), rows(a)]
    assert rows(concat_batch([a, b])) == [[1], [2, 3], [4, 5], []]
    with pytest.raises(ValueError, match=r"parts\[1\]"):
        concat([a, from_list([torch.ones(1)])])
    with pytest.raises(ValueError, match="rows past the last offset"):
        concat_batch([Jagged(torch.zeros(3), torch.tensor([0, 2]), 2)])
    with pytest.raises(ValueError, match="like"):
        split(joined, [a, b])


def test_concat_gradients() -> None:
    offsets = torch.tensor([0, 1, 3])
    x, y = (torch.randn(4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: concat([Jagged(a, offsets, 2), Jagged(b, offsets, 2)]).values, (x, y))


def test_jagged_products_equal_loops() -> None:
    offsets = torch.tensor([0, 2, 2, 7])
    x, y = (torch.randn(8, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    bounds = [(0, 2), (2, 2), (2, 7)]

    def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return jagged_dense_matmul(x, w, offsets, max_length=8)

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return jagged_jagged_matmul(x, y, offsets, max_length=8)

    truth = torch.cat([*(x[a:b] @ w[i] for i, (a, b) in enumerate(bounds)), torch.zeros(1, 2)])
    torch.testing.assert_close(matmul(x, w), truth)
    torch.testing.assert_close(product(x, y), torch.stack([x[a:b].T @ y[a:b] for a, b in bounds]))
    dots = torch.stack([(x[a:b] * y[a:b]).sum() for a, b in bounds])
    torch.testing.assert_close(jagged_dot(x, y, offsets), dots)
    assert expand_rows(torch.tensor([1.0, 2.0, 3.0]), offsets, 8).tolist() == [1, 1, 3, 3, 3, 3, 3, 0]
    assert torch.autograd.gradcheck(matmul, (x, w))
    assert torch.autograd.gradcheck(product, (x, y))
    assert torch.autograd.gradcheck(lambda a, b: jagged_dot(a, b, offsets), (x, y))
