"""What a process that trains or evaluates settles before it imports torch."""

from __future__ import annotations

import logging
import os


def prepare_process() -> None:
    """Threads that wait go to sleep, and torchrec's imports keep quiet. Without effect on threads once torch is
    imported.

    By default OpenMP's threads spin while they wait for each other, which on a shared machine starves the very thread
    that they wait for. With other jobs on its 2 cores a step of `small` took 23 s of wall time with 2 spinning
    threads, and 2.6 s with 2 sleeping ones. Set OMP_WAIT_POLICY=ACTIVE on a machine of your own to compare.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torchrec 1.8 calls a function of torch.fx that torch 2.13 warns about, once per process
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    # its planner warns about a hardware description and an estimate of its own, which we do not use
    for name in ("types", "storage_reservations"):
        logging.getLogger(f"torchrec.distributed.planner.{name}").setLevel(logging.ERROR)
