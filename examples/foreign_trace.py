"""The overlap report of a trace that no code of ours took part in: two gloo ranks of plain PyTorch.

`gemworks trace rank0.json rank1.json` prints the same; this program calls the library. On a GPU the very same works on
traces of kernels and NCCL.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from gemworks.netmem.overlap import kernel_table, overlap_report, rank_waits, read_trace
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile


def their_program(rank: int, folder: str) -> None:
    """Somebody's data-parallel step: rank 1 has twice the work, so rank 0 waits for it in the all-reduce."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    weight, gradient = torch.randn(512, 512), torch.randn(512, 512)
    dist.all_reduce(gradient)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(3):
            for _ in range(4 * (rank + 1)):
                weight = torch.nn.functional.normalize(weight @ weight)
            dist.all_reduce(gradient)
    profiled.export_chrome_trace(f"{folder}/rank{rank}.json")
    dist.destroy_process_group()


def main(folder: str) -> None:
    spawn(their_program, (folder,), nprocs=2)
    traces = [read_trace(Path(folder) / f"rank{rank}.json") for rank in range(2)]
    for trace in traces:
        print(overlap_report(trace).to_text())
        print(kernel_table(trace).to_text(top=3))
    waits = rank_waits(traces)
    print(waits.to_text())
    assert waits.num_collectives == 3
    assert "aten::mm" in {kernel.name for kernel in kernel_table(traces[0]).kernels}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
