"""Benchmarks of this library: `python -m gemworks.netmem.bench --help`."""
