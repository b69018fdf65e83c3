"""Where the rows of embedding tables live inside a table group.

Large tables are split by rows over the whole group, small ones sit whole on one rank. Tables of equal width on one
rank share one flat buffer, so that a replica shard is one contiguous piece and one collective moves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gemworks.parallel._check import one_of, whole

TableSharding = Literal["row_wise", "table_wise"]


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """An embedding table.

    Attributes:
        name: unique.
        num_rows: N.
        dim: D, the width.
        sharding: "row_wise", "table_wise", or None to choose: row-wise if every rank of the group gets at least 64
            rows.
    """

    name: str
    num_rows: int
    dim: int
    sharding: TableSharding | None = None

    def __post_init__(self) -> None:
        whole(f"table {self.name!r}: num_rows", self.num_rows)
        whole(f"table {self.name!r}: dim", self.dim)
        one_of(f"table {self.name!r}: sharding", self.sharding, (None, *get_args(TableSharding)))


MIN_ROWS_PER_RANK = 64


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Rows of one table: row `i` lives on group rank `first_owner + i // block_rows`.

    Attributes:
        spec: the table.
        first_owner: group rank of row 0.
        block_rows: rows per rank (the last rank may hold fewer).
        offsets: for each rank of the group, where its rows begin in its flat buffer (0 where it has none).
    """

    spec: TableSpec
    first_owner: int
    block_rows: int
    offsets: tuple[int, ...]

    def rows_on(self, group_rank: int) -> range:
        """The rows that a rank of the group holds."""
        start = (group_rank - self.first_owner) * self.block_rows
        if start < 0:
            return range(0)
        return range(min(start, self.spec.num_rows), min(start + self.block_rows, self.spec.num_rows))


@dataclass(frozen=True, kw_only=True)
class TableShards:
    """All tables of one width in one table group.

    Attributes:
        dim: D.
        tables: placements, in the order given.
        num_rows: for each rank of the group, rows in its flat buffer.
    """

    dim: int
    tables: tuple[TablePlacement, ...]
    num_rows: tuple[int, ...]

    def padded_rows(self, group_rank: int, replica_shard: int) -> int:
        """Rows of the flat buffer, rounded up so that `replica_shard` equal parts make it."""
        return -(-self.num_rows[group_rank] // replica_shard) * replica_shard


def shard_tables(tables: Sequence[TableSpec], table_group: int) -> tuple[TableShards, ...]:
    """Assign the rows of tables to the ranks of a table group.

    Row-wise tables are cut in equal blocks; whole tables go to the rank with the fewest bytes so far, largest first.

    Args:
        tables: names must differ.
        table_group: ranks in the group.

    Returns:
        One `TableShards` per width, narrowest first.

    Example:
        >>> shards, = shard_tables([TableSpec(name="item", num_rows=10, dim=4, sharding="row_wise")], 4)
        >>> [len(shards.tables[0].rows_on(r)) for r in range(4)]
        [3, 3, 3, 1]
    """
    whole("table_group", table_group)
    names = [t.name for t in tables]
    if len(set(names)) != len(names):
        raise ValueError(f"tables: got the names {sorted(names)}, expected them to differ")
    load = [0] * table_group
    owner: dict[str, int] = {}
    row_wise = {t.name: _is_row_wise(t, table_group) for t in tables}
    for t in tables:
        if row_wise[t.name]:
            block = -(-t.num_rows // table_group)
            for r in range(table_group):
                load[r] += max(0, min(block, t.num_rows - r * block)) * t.dim
    for t in sorted((t for t in tables if not row_wise[t.name]), key=lambda t: (-t.num_rows * t.dim, t.name)):
        owner[t.name] = min(range(table_group), key=lambda r: (load[r], r))
        load[owner[t.name]] += t.num_rows * t.dim
    found: list[TableShards] = []
    for dim in sorted({t.dim for t in tables}):
        used = [0] * table_group
        placed: list[TablePlacement] = []
        for t in tables:
            if t.dim != dim:
                continue
            first = 0 if row_wise[t.name] else owner[t.name]
            block = -(-t.num_rows // table_group) if row_wise[t.name] else t.num_rows
            placement = TablePlacement(spec=t, first_owner=first, block_rows=block, offsets=tuple(used))
            placed.append(placement)
            for r in range(table_group):
                used[r] += len(placement.rows_on(r))
        found.append(TableShards(dim=dim, tables=tuple(placed), num_rows=tuple(used)))
    return tuple(found)


def _is_row_wise(table: TableSpec, table_group: int) -> bool:
    if table.sharding is not None:
        return table.sharding == "row_wise"
    return table.num_rows >= MIN_ROWS_PER_RANK * table_group
