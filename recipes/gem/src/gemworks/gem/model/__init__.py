"""The GEM model. Nothing here knows of parallelism."""
