"""A small cache for several threads: what one thread is making, the others wait for instead of making it again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedCache(Generic[T]):
    """The values used last.

    Args:
        size: values kept.

    >>> cache = SharedCache(1)
    >>> cache.get("a", lambda: 1), cache.get("a", lambda: 2), cache.get("b", lambda: 3), len(cache)
    (1, 1, 3, 1)
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._futures: OrderedDict[Hashable, Future[T]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._futures)

    def make_room(self, size: int) -> None:
        """Keep at least so many values from now on: what one reader needs at the same time must fit."""
        with self._lock:
            self._size = max(self._size, size)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made by the first thread that asks. An error of `make` reaches all that wait for it."""
        with self._lock:
            future = self._futures.get(key)
            mine = future is None
            if future is None:
                future = self._futures[key] = Future()
                if len(self._futures) > self._size:
                    self._futures.popitem(last=False)
            else:
                self._futures.move_to_end(key)
        if mine:
            try:
                future.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._futures.pop(key, None)
                future.set_exception(error)
        return future.result()
