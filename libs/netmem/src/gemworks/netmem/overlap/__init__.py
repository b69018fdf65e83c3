"""Overlap report of any PyTorch profiler trace; uses no other part of the library.

`python -m gemworks.netmem.overlap trace.json [more.json ...] [--json OUT] [--png OUT]`
"""

from gemworks.netmem.overlap.kernels import KernelTable, KernelUse, kernel_table
from gemworks.netmem.overlap.plot import plot_timeline
from gemworks.netmem.overlap.report import DeviceReport, OverlapReport, RankWaits, overlap_report, rank_waits
from gemworks.netmem.overlap.trace import Activity, Trace, read_trace

__all__ = [
    "Activity",
    "DeviceReport",
    "KernelTable",
    "KernelUse",
    "OverlapReport",
    "RankWaits",
    "Trace",
    "kernel_table",
    "overlap_report",
    "plot_timeline",
    "rank_waits",
    "read_trace",
]
