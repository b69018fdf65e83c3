"""Topology-aware five-dimensional parallelism for large recommenders."""
