"""The GEM reference model, built from a `Schema` and a `GemConfig`. It knows nothing of parallelism."""

from gemworks.gem.model.gem import Gem

__all__ = ["Gem"]
