"""A rank that fails inside a collective, for torchrun: `parallel_nccl_death.py kill|raise BACKEND`."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gemworks.parallel.heartbeat import Heartbeat, RankFailure
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    fault, backend = sys.argv[1:]
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=12))
    default: Any = dist.distributed_c10d._get_default_store()
    store = dist.distributed_c10d.PrefixStore("heart", default.clone())
    world = dist.get_world_size()
    with Heartbeat(store, rank, world, interval_s=0.2, patience=5) as beat:
        x = torch.ones(2**20, device=device)
        dist.all_reduce(x)
        float(x[0])
        if rank == 1:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("rank 1 is out of luck")
        try:
            with beat.guard("step 3"):
                dist.all_reduce(x)
                float(x[0])  # with NCCL the host waits here, and the watchdog ends the process
        except RankFailure as error:
            print(f"RankFailure: {error}", file=sys.stderr, flush=True)
            time.sleep(2)  # torchrun tells the first failure from the others by the whole second
            os._exit(1)


if __name__ == "__main__":
    main()
