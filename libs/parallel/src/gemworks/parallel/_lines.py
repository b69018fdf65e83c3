"""Lines that a terminal of 80 columns does not fold by itself."""

from __future__ import annotations

import textwrap

COLUMNS = 80


def folded(text: str, indent: str = "  ", first: str = "") -> list[str]:
    """`text` at most `COLUMNS` wide, cut between words.

    >>> folded("one two three four " * 5, first="plan ")
    ['plan one two three four one two three four one two three four one two three four', '  one two three four']
    """
    return textwrap.wrap(
        text, COLUMNS, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def plan_lines(plan_text: str, first: str = "") -> list[str]:
    """A plan with each of its views on a line of its own, all under where the first one begins.

    >>> plan_lines("dense shard 2 x replica 4; sparse replica_shard 1 x table_group 8 x replica 1", "plan  ")
    ['plan  dense shard 2 x replica 4', '      sparse replica_shard 1 x table_group 8 x replica 1']
    """
    indent = " " * len(first)
    lines: list[str] = []
    for view in plan_text.split("; "):
        lines += folded(view, indent + "  ", indent if lines else first)
    return lines
