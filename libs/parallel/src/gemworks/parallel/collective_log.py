"""Record the collectives that a rank launches, and compare the records of all ranks.

Ranks that launch collectives of one group in different orders hang or corrupt data (torchrec#850); a record taken in a
test shows it without the hang, on the fake process group too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Event:
    """One collective: its name, the global ranks of its group, and the bytes of its first tensor."""

    op: str
    members: tuple[int, ...]
    nbytes: int


class CollectiveLog(TorchDispatchMode):
    """Records collectives while it is active.

    Attributes:
        events: in the order of launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.events.append(_event(func, args))
        return func(*args, **(kwargs or {}))


def _event(func: Any, args: Any) -> Event:
    members: tuple[int, ...] = ()
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            members = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
    tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    nbytes = tensors[0].numel() * tensors[0].element_size() if tensors else 0
    return Event(func._schema.name.removeprefix("c10d::").strip("_"), members, nbytes)


def find_order_conflict(logs: Sequence[Sequence[Event]], *, compare_bytes: bool = False) -> str | None:
    """Replay the records of all ranks; says where they would hang, or None.

    A collective proceeds when it is next on every member of its group. If nothing can proceed and records are left,
    the ranks wait for each other for ever.

    Args:
        logs: the events of rank 0, 1, ...
        compare_bytes: also demand equal sizes on all members (not true of all-to-all on jagged data).

    Example:
        >>> a, b = Event("allreduce", (0, 1), 4), Event("broadcast", (0, 1), 4)
        >>> find_order_conflict([[a, b], [a, b]]) is None
        True
        >>> find_order_conflict([[a, b], [b, a]])
        'rank 0 waits in allreduce over (0, 1), rank 1 waits in broadcast over (0, 1)'
    """
    at = [0] * len(logs)

    def key(e: Event) -> tuple[Any, ...]:
        return (e.op, e.members, e.nbytes) if compare_bytes else (e.op, e.members)

    moved = True
    while moved:
        moved = False
        for rank, log in enumerate(logs):
            if at[rank] >= len(log):
                continue
            event = log[at[rank]]
            members = event.members or (rank,)
            ready = all(at[m] < len(logs[m]) and key(logs[m][at[m]]) == key(event) for m in members)
            if ready:
                for m in members:
                    at[m] += 1
                moved = True
    stuck = [
        f"rank {r} waits in {logs[r][at[r]].op} over {logs[r][at[r]].members}"
        for r in range(len(logs))
        if at[r] < len(logs[r])
    ]
    return ", ".join(stuck) or None
