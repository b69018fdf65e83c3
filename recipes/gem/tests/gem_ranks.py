"""Runs of several gloo processes for tests: what each rank did, and how it ended.

Each rank is a fork of a server that has imported everything. The store lives in the test's process, as torchrun's lives
in its agent: it survives every rank.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # its stub does not export it

PRELOAD = [
    "gemworks.gem.run",
    "gemworks.gem.train",
    "gemworks.gem.parallelize",
    "gemworks.gem.world",
    "torch.utils.tensorboard",
    "torchrec.optim.rowwise_adagrad",
    "torch.distributed.optim.apply_optimizer_in_backward",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "gem_ranks",
]


@dataclass
class Outcome:
    """How a rank ended.

    Attributes:
        code: of the process; negative: killed by that signal.
        value: what the function returned.
        error: type and message of what it raised.
        seconds: from its start to its end.
    """

    code: int
    value: Any = None
    error: tuple[str, str] | None = None
    seconds: float = 0.0


@dataclass
class Faults:
    """What goes wrong, in one rank.

    Attributes:
        rank: the rank.
        step: after this step.
        kind: "kill", "stop" (hangs), "terminate" (SIGTERM), "raise" (a ValueError).
        seal_fails_at: sealing the checkpoint of this step finds a full disk.
        poison: steps in which the rank's loss is NaN.
    """

    rank: int = 0
    step: int | None = None
    kind: str = ""
    seal_fails_at: int | None = None
    poison: tuple[int, ...] = field(default=())


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0, stopped: tuple[int, ...] = ()
) -> list[Outcome]:
    """Calls `function(rank, world, *args)` in `world` processes whose environment is torchrun's.

    Args:
        stopped: ranks that will hang: they are killed once the others have ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        processes = [
            context.Process(target=_child, args=(function, rank, world, store.port, folder, args), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            for rank, process in enumerate(processes):
                if rank not in stopped:
                    process.join(max(timeout_s - (time.monotonic() - began), 0.1))
            hanging = [rank for rank, p in enumerate(processes) if p.is_alive() and rank not in stopped]
            assert not hanging, f"ranks {hanging} are still there after {timeout_s} s"
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [_outcome(process, Path(folder) / str(rank)) for rank, process in enumerate(processes)]


def _outcome(process: Any, path: Path) -> Outcome:
    facts = pickle.loads(path.read_bytes()) if path.exists() else {}
    return Outcome(code=process.exitcode, **facts)


def _child(function: Callable[..., Any], rank: int, world: int, port: int, folder: str, args: tuple[Any, ...]) -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME="lo",
    )
    began, value, error = time.monotonic(), None, None
    try:
        value = function(rank, world, *args)
    except Exception as caught:
        error = (type(caught).__name__, str(caught))
    facts = {"value": value, "error": error, "seconds": time.monotonic() - began}
    path = Path(folder) / str(rank)
    path.with_suffix(".partial").write_bytes(pickle.dumps(facts))
    path.with_suffix(".partial").rename(path)
    os._exit(0 if error is None else 1)


def trained(
    rank: int, world: int, path: str, settings: tuple[str, ...], faults: Faults | None = None
) -> list[tuple[int, list[int], float]]:
    """Trains in a folder; returns step, this rank's sample ids and the step's loss of every step it did."""
    import io

    from gemworks.gem import checkpoint_files as files
    from gemworks.gem.presets import load_config
    from gemworks.gem.train import train
    from gemworks.gem.trainer import Trainer
    from rich.console import Console

    faults = faults or Faults(rank=-1)
    trace: list[tuple[int, list[int], float]] = []
    original, seal = Trainer._train_step, files.seal

    def step(self: Any, batches: Any) -> None:
        before = self._window_loss
        original(self, batches)
        ids = [i for batch in batches for i in batch.sample_ids_B.tolist()]
        trace.append((self.step, ids, self._window_loss - before))
        if rank == faults.rank and self.step == faults.step:
            if faults.kind == "raise":
                raise ValueError("data.path: row 7 is bad")
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}[faults.kind]
            os.kill(os.getpid(), number)

    def failing_seal(folder: Path) -> None:
        if rank == faults.rank and folder.name.endswith(f"step_{faults.seal_fails_at:08d}"):
            raise OSError(28, "No space left on device")
        seal(folder)

    Trainer._train_step = step
    if faults.seal_fails_at is not None:
        files.seal = failing_seal
    train(load_config("tiny", sets=settings), path, console=Console(file=io.StringIO(), width=120))
    return trace


def figures(path: Path) -> list[dict[str, Any]]:
    from gemworks.gem.run_dir import RunDir

    return RunDir.open(path).rows()


def parameters(path: Path) -> dict[str, Any]:
    """The last checkpoint's tensors, read by one process."""
    import torch
    from gemworks.gem import checkpoint
    from gemworks.gem.data import open_source
    from gemworks.gem.run_dir import RunDir
    from gemworks.gem.trainer import Trainer

    folder = RunDir.open(path)
    trainer = Trainer(folder.config(), open_source(folder.config().data), torch.device("cpu"))
    trainer.load(checkpoint.find(folder.checkpoints, "last"))
    state = trainer.optimizers.state_dict()["state"]
    moments = {f"{name}/{key}": t for name, entry in state.items() for key, t in entry.items()}
    return trainer.model.state_dict() | moments


def assert_close_runs(one: Path, other: Path) -> None:
    """Every line, the last checkpoint and the result, to float tolerance; what is counted, exactly."""
    import pytest
    import torch
    from gemworks.gem.run_dir import RunDir

    exact = ("kind", "step", "total_steps", "lr", "sparse_lr", "num_skipped", "best", "num_samples")
    close = ("loss", "ne", "grad_norm", "auc", "log_loss", "calibration")
    first, second = figures(one), figures(other)
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert [a.get(key) for key in exact] == [b.get(key) for key in exact]
        for key in close:
            if a.get(key) is not None:
                assert b[key] == pytest.approx(a[key], rel=2e-4, abs=2e-5), (a["kind"], a["step"], key)
    mine, others = parameters(one), parameters(other)
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        # A weight before a norm has a gradient of rounding errors, of which AdamW makes whole steps: less than one of
        # them (3e-3) for weights, little for what they come from.
        atol = 2e-3 if "/" not in name and not name.startswith("embeddings.") else 1e-4
        torch.testing.assert_close(tensor, others[name], rtol=1e-3, atol=atol, msg=name)
    a, b = RunDir.open(one).summary(), RunDir.open(other).summary()
    assert a is not None
    assert b is not None
    assert (a["best_step"], a["num_steps"]) == (b["best_step"], b["num_steps"])
    assert b["ne"] == pytest.approx(a["ne"], rel=1e-4)
    for key in ("num_dense_parameters", "num_table_parameters"):
        assert a[key] == b[key]
