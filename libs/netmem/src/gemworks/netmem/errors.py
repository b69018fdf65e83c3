"""The errors of this library that a caller may want to catch by name."""

from __future__ import annotations


class NetmemError(Exception):
    """Base of every error that this library defines."""


class OversubscribedError(NetmemError, ValueError):
    """A reservation would ask a link for more than it can carry."""


class InfeasibleBudgetError(NetmemError, ValueError):
    """No combination of choices fits the memory budget.

    Attributes:
        least_feasible_bytes: the smallest budget for which a solution exists.
        held_up_by: name of the region whose point in the step sets that least budget.
    """

    def __init__(self, message: str, least_feasible_bytes: int, held_up_by: str) -> None:
        super().__init__(message)
        self.least_feasible_bytes = least_feasible_bytes
        self.held_up_by = held_up_by


class PinnedMemoryExhaustedError(NetmemError, MemoryError):
    """The arena has no free piece of the asked size."""


class CodecError(NetmemError, ValueError):
    """A codec gave back something else than the tensor it was given (shape, dtype or device)."""


class ModifiedAfterSaveError(NetmemError, RuntimeError):
    """A tensor saved for backward was modified in place before backward read it."""


class ParkedStateError(NetmemError, RuntimeError):
    """Something touched state that is parked in host memory."""


class CollectiveMismatchError(NetmemError, ValueError):
    """The ranks of a group called a collective with shapes, dtypes or splits that do not match."""


class CollectiveTimeoutError(NetmemError, RuntimeError):
    """A collective over symmetric memory waited too long for a peer; work that waits on the device is lost."""
