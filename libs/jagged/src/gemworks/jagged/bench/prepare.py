"""Compiles what a run needs, in processes side by side, so that the run itself only measures.

Compilers write to caches on disk (Triton's, Inductor's, flash-attn-4's), where the run finds their work. What no cache
keeps (cuDNN's plans, tuning by time) is left to the run.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gemworks.jagged.bench import bandwidth
from gemworks.jagged.bench.cases import Case, make_inputs
from gemworks.jagged.bench.contend import SLOW_TO_COMPILE, left_out, set_up
from gemworks.jagged.bench.peers import PEERS, Maker, from_file, ours, shares_of
from gemworks.jagged.bench.selection import attention_groups, is_late, label_of, memory_bound_subjects

NOTHING_TO_COMPILE = ("torch varlen_attn", "padded SDPA")
FEW_SEQUENCES = 16  # enough for kernels that know no length
SHORT = 256  # bound of lengths up to which kernels may be other ones
OUT_OF_MEMORY_TRIES = 8
MEMORY_WEIGHTS = (
    5  # of the units that run at the same time, so that they fit on the device: block attention takes 30 GiB
)


@dataclass(frozen=True)
class Unit:
    """What one process compiles at a time.

    Attributes:
        rank: lower is begun earlier.
        weight: of its memory.
    """

    label: str
    run: Callable[[], None]
    rank: int
    weight: int = 0


def _attention(name: str, make: Maker, case: Case, device: torch.device, dtype: torch.dtype) -> None:
    for run in set_up(name, make, make_inputs(case, device, dtype)).values():
        run()


def _memory_bound(label: str, args: Any, device: torch.device, dtype: torch.dtype) -> None:
    subjects = dict(memory_bound_subjects(args, device, dtype))  # anew, so that its tensors end with this call
    runs, _ = bandwidth.set_up(subjects[label]())
    for run in (run for by_name in runs.values() for run in by_name.values()):
        run()


def _binaries(name: str, case: Case) -> Case:
    """Equal for cases that run the same binaries."""
    if name in SLOW_TO_COMPILE:
        return case.inputs
    bound = min(case.maximum, SHORT + 1) if case.kind == "self" else 0
    same = replace(case, batch=0, maximum=bound, law="", seed=0, priority=0, window=min(case.window, 1))
    return same if name.startswith("gemworks") else same.inputs


def units(args: Any, device: torch.device, dtype: torch.dtype) -> list[Unit]:
    """What there is to compile, the most urgent and the longest first; the same list in every process."""
    plan: list[Unit] = []
    seen: set[tuple[str, Case]] = set()
    peers = {} if args.no_peers else {n: m for n, m in PEERS.items() if n not in (*NOTHING_TO_COMPILE, *args.skip)}
    shared = {name: shares for name, shares in map(shares_of, args.peer) if shares}
    peers |= {n: m for n, m in map(from_file, args.peer) if n not in shared}
    for cases in attention_groups(args):
        contenders: list[tuple[str, Maker, Case]] = [(f"gemworks {c.op}", ours, c) for c in cases]
        contenders += [(name, make, cases[0]) for name, make in peers.items()]
        for name, make, case in contenders:
            binaries = (name, _binaries(name, case))
            if binaries in seen or left_out(name, case, everything=args.smoke or args.all_peers):
                continue
            seen.add(binaries)
            slow = name in SLOW_TO_COMPILE
            few = case if slow else replace(case, batch=min(case.batch, FEW_SEQUENCES))
            rank = 10 * case.priority + (0 if slow else 2)
            plan.append(Unit(f"{label_of([case])}: {name}", partial(_attention, name, make, few, device, dtype), rank))
    for label, _ in memory_bound_subjects(args, device, dtype):
        block = label.startswith("block")
        rank = 30 if is_late(label) else 1 if block else 4
        plan.append(Unit(label, partial(_memory_bound, label, args, device, dtype), rank, 2 if block else 1))
    for name, shares in shared.items():
        rank, n = 3 + 10 * shares.priority, shares.count
        plan += [Unit(f"{name} {i}/{n}", partial(shares.prepare, i, n), rank) for i in range(n)]
    return sorted(plan, key=lambda unit: unit.rank)


def _next(plan: list[Unit], taken: Any) -> int | None:
    """The first that nobody has taken and whose memory is free; -1 to wait, None for nothing left.

    Args:
        taken: shared by the processes, for each unit 0, 1 while it runs, 2 afterwards.
    """
    with taken.get_lock():
        used = sum(unit.weight for unit, state in zip(plan, taken, strict=True) if state == 1)
        free = [i for i, state in enumerate(taken) if state == 0]
        for i in free:
            if plan[i].weight == 0 or used + plan[i].weight <= MEMORY_WEIGHTS:
                taken[i] = 1
                return i
        return -1 if free else None


def _work(args: Any, taken: Any, failed: Any, deadline: float) -> None:
    """Takes units until there are none, or no time is left."""
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dtype = getattr(torch, args.dtype) if args.dtype else (torch.bfloat16 if cuda else torch.float32)
    plan = units(args, device, dtype)
    while time.time() < deadline:
        index = _next(plan, taken)
        if index is None:
            return
        if index < 0:
            time.sleep(0.2)
            continue
        unit = plan[index]
        began, told = time.time(), "ready"
        for _ in range(OUT_OF_MEMORY_TRIES):
            try:
                unit.run()
                if cuda:
                    torch.cuda.synchronize()
            except torch.OutOfMemoryError:  # of the neighbours' making: wait for them
                told = "out of memory"
                torch.cuda.empty_cache()
                time.sleep(2.0)
                continue
            except Exception as error:  # the run will meet it again, and print it as a result
                told = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            else:
                told = "ready"
            break
        if told != "ready":
            with failed.get_lock():
                failed.value += 1
        taken[index] = 2
        print(f"  {unit.label}: {told}, {time.time() - began:.0f} s", flush=True)
        if cuda:
            torch.cuda.empty_cache()


def prepare(args: Any) -> int:
    """Compile everything that `args` would run, in `args.prepare` processes, for `args.limit_s` at most."""
    for threads in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):  # the processes are the parallelism
        os.environ.setdefault(threads, "1")
    context = multiprocessing.get_context("spawn")
    total = len(units(args, torch.device("cpu"), torch.float32))
    taken, failed = context.Array("i", total), context.Value("i", 0)
    began = time.time()
    deadline = began + args.limit_s
    workers = [
        context.Process(target=_work, args=(args, taken, failed, deadline), daemon=True) for _ in range(args.prepare)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.1, deadline - time.time()))
    cut = [worker for worker in workers if worker.is_alive()]
    for worker in cut:
        worker.kill()
    begun = sum(state > 0 for state in taken)
    print(
        f"{begun} of {total} begun, {failed.value} failed, {len(cut)} cut off, {time.time() - began:.0f} s", flush=True
    )
    return 0 if begun == total and not cut else 1
