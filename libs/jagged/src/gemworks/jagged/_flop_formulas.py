"""FLOP formulas of our custom ops, registered with torch's counter without importing it.

`torch.utils.flop_counter` imports Triton, which importing this package must not do. So a formula is registered at once
if the counter has been imported already, else right after somebody imports it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

COUNTER = "torch.utils.flop_counter"
_waiting: list[Callable[[ModuleType], None]] = []


def flop_formula(*ops: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate the formula of some ops (`torch.ops.namespace.name`); it gets their arguments as they are."""

    def decorate(formula: Callable[..., int]) -> Callable[..., int]:
        def register(counter: ModuleType) -> None:
            counter.register_flop_formula(list(ops), get_raw=True)(formula)

        if COUNTER in sys.modules:
            register(sys.modules[COUNTER])
        else:
            if not _waiting:
                sys.meta_path.insert(0, _AfterImport())
            _waiting.append(register)
        return formula

    return decorate


class _AfterImport:
    """Finder that lets the others find the counter, and registers what waits once it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType] (a finder without the deprecated methods)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                for register in _waiting:
                    register(module)
                _waiting.clear()

            spec.loader.exec_module = run_and_register
        return spec
