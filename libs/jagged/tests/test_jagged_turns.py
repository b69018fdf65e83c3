"""Order of key tiles in the fused backward: its index arithmetic, run on the host, against a look at every pair."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.reference
UNBOUNDED = 1 << 30
MASKS = [(UNBOUNDED, 0), (40, 40), (0, 0), (UNBOUNDED, -1), (3, UNBOUNDED), (200, -70), (-1, 90)]


@pytest.mark.parametrize(("left", "right"), MASKS)
@pytest.mark.parametrize("bottom_right", [True, False])
def test_every_pair_is_walked_over_and_tiles_take_turns(
    left: int, right: int, bottom_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each admitted pair lies in a walk; the tiles that meet a query tile are neighbours, the ends know it."""
    pytest.importorskip("triton")
    from gemworks.jagged.ops.attention_core import kernel_turns_hopper as kernels

    walk: Any = kernels.walk
    ends: Any = kernels.ends
    in_turn: Any = kernels.in_turn
    monkeypatch.setattr(kernels, "gl", SimpleNamespace(maximum=max, minimum=min))
    draw = random.Random(0)
    lengths = [(draw.choice([1, 63, 64, 65, 300, 777]), draw.choice([0, 1, 127, 128, 129, 500])) for _ in range(20)]
    for q_len, k_len in lengths:
        shift = k_len - q_len if bottom_right else 0
        walks: dict[int, list[int]] = {m: [] for m in range(0, q_len, 64)}
        for row in range(0, k_len, 128):
            found, begin, end = walk.fn(row, k_len, q_len, left, right, True, bottom_right)
            assert found == shift
            assert begin % 64 == 0
            for m in range(begin, end, 64):
                walks[m].append(row)
        for m, rows in walks.items():
            assert rows == list(range(rows[0], rows[-1] + 1, 128)) if rows else True
            for row in rows:
                first, last = ends.fn(row, k_len, m, shift, left, right, True)
                assert (first, last) == (row == rows[-1], row == rows[0]), (q_len, k_len, m, row)
            turns = [in_turn.fn(row, k_len, True) for row in rows]
            assert turns == sorted(turns, reverse=True)
            assert [in_turn.fn(turn, k_len, True) for turn in turns] == rows
            # Started together, a tile with an earlier turn is never behind.
            steps = [m - walk.fn(row, k_len, q_len, left, right, True, bottom_right)[1] for row in rows]
            assert steps == sorted(steps, reverse=True), (q_len, k_len, m, rows)
            for query in range(m, min(m + 64, q_len)):
                low, high = max(query + shift - left, 0), min(query + shift + right, k_len - 1)
                assert all(key // 128 * 128 in rows for key in range(low, high + 1))
