"""The GEM reference model, built from a `Schema` and a `GemConfig`. It knows nothing of parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemworks.gem.model.gem import Gem

__all__ = ["Gem"]


def __getattr__(name: str) -> Any:
    # The whole model needs torchrec; its layers alone do not.
    if name == "Gem":
        from gemworks.gem.model.gem import Gem

        return Gem
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
