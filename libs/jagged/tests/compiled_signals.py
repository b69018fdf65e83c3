"""What of the signals between the warps of a compiled program rests on luck."""

from __future__ import annotations

import re


def signals(ptx: str) -> dict[str, int]:
    """What of the signals between the warps of a program rests on luck; all 0 in a right kernel.

    One thread signals a barrier for the warps of its partition, so they have to meet between their last access and the
    signal (`loose_signals`). `cp.async` counts itself into a barrier, in all lanes before the one that expects bytes
    arrives (`early_expects`). A kernel that writes descriptors writes them into the memory of the ones before, which
    loads that were issued earlier may still be reading (`device_descriptors`).
    """
    met = counted_in = False
    counts = {"loose_signals": 0, "early_expects": 0, "device_descriptors": ptx.count("tensormap.cp_fenceproxy")}
    for line in ptx.splitlines():
        if re.search(r"\b(bar|barrier)(\.warp)?\.sync", line):
            met, counted_in = True, False
        elif "cp.async.mbarrier.arrive" in line:
            counted_in = True
        elif "mbarrier.arrive.expect_tx" in line:
            counts["early_expects"] += counted_in
        elif "mbarrier.arrive" in line:
            counts["loose_signals"] += not met
        elif line.startswith("$L") or re.search(r"\b(ld|st|red|atom|cp|stmatrix|ldmatrix|wgmma|mbarrier)\b", line):
            met = False
    return counts


def barriers(ttgir: str) -> list[str]:
    """Names of the barriers that a program makes."""
    return re.findall(r"(%\S+) = ttg\.local_alloc [^\n]*memdesc<(?:\d+x)+i64", ttgir)


def idle_barriers(ttgir: str) -> int:
    """Barriers that are made, that no warp knows after `warp_specialize`, and that nobody ends; 0 in a right kernel.

    Their memory is free for other data at once. `mbarrier.inval` ends a barrier, as Triton's own pipelines do; else a
    device that is shared by processes has been seen to write its state over those data.
    """
    names = re.findall(r"inval_barrier (%[^\s:,]+)", ttgir)
    for captured in re.findall(r"ttg\.warp_specialize\(([^)]*)\)", ttgir):
        names += re.split(r"[,\s]+", captured)
    stages = dict(re.findall(r"(%\S+) = ttg\.memdesc_index (%[^\s\[]+)\[", ttgir))
    known: set[str] = set()
    for name in names:
        while name in stages and name not in known:  # a stage of a ring
            known.add(name)
            name = stages[name]
        known.add(name)
    return sum(name not in known for name in barriers(ttgir))
