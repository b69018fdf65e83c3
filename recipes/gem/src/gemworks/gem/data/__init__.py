"""Readers: stateful, in time order, producing `gemworks.gem.schema.Batch`."""
