"""A checkpoint for other programs and other worlds: its dense part as safetensors, or all of it in another number of
parts.

Dense is what is no embedding table: tables are too large for one file, and other systems serve them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gemworks.gem import checkpoint_files as files
from gemworks.gem.checkpoint import read_into, read_metadata
from gemworks.gem.run_dir import RunDir
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.multiprocessing.spawn import spawn

MODEL, TABLES = "model.", "model.embeddings."
TIMEOUT = timedelta(minutes=10)


def checkpoint_of(path: str | Path, which: str = "best") -> Path:
    """The checkpoint that a path means: itself, or the best or last one of a run.

    Raises:
        ValueError: there is none.
    """
    path = Path(path)
    if (path / files.SEAL).is_file():
        return path
    return files.find(RunDir.open(path).checkpoints, which)


def export_dense(path: str | Path, out: str | Path, *, which: str = "best") -> dict[str, Any]:
    """Write the dense part of a model as one safetensors file.

    Args:
        path: a run's folder or one checkpoint.
        out: the file; it must not exist.
        which: "best" or "last", of a run.

    Returns:
        `checkpoint`, `step`, `out`, `tensors` (shapes by name, as in the model), `num_parameters`, `num_bytes` (of the
        file), `left_out` (names of the tables).

    Raises:
        ValueError: no checkpoint there, a damaged one, or `out` is in the way.
        ModuleNotFoundError: safetensors is not installed.
    """
    from safetensors.torch import save_file

    source, out = checkpoint_of(path, which), Path(out)
    if out.exists():
        raise ValueError(f"out: got {str(out)!r}, which exists; choose another name")
    files.verify(source)
    stored = read_metadata(source).state_dict_metadata
    state: dict[str, Any] = {"host": ""}
    for name, item in stored.items():
        if name.startswith(MODEL) and not name.startswith(TABLES) and isinstance(item, TensorStorageMetadata):
            state[name] = torch.empty(item.size, dtype=item.properties.dtype)
    read_into(state, source)
    step = int(json.loads(state.pop("host"))["step"])
    tensors = {name.removeprefix(MODEL): tensor for name, tensor in state.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".partial_{out.name}")
    try:
        save_file(tensors, partial, metadata={"format": "pt", "step": str(step), "source": "gemworks-gem"})
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return {
        "checkpoint": str(source),
        "step": step,
        "out": str(out),
        "tensors": {name: list(tensor.shape) for name, tensor in sorted(tensors.items())},
        "num_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "num_bytes": out.stat().st_size,
        "left_out": sorted(name.removeprefix(MODEL) for name in stored if name.startswith(TABLES)),
    }


def reshard(path: str | Path, out: str | Path, num_parts: int) -> dict[str, Any]:
    """Copy a run's best and last checkpoints into a new run folder in another number of parts, one file per part.

    A checkpoint loads into any world as it is: this is for many small files that should be few, or for one file that
    many hosts shall read a part of. Tensors are cut along their first dimension. The parts are written by as many
    processes on this machine, each of which holds its own part only. The new folder can be trained on.

    Args:
        path: a run's folder.
        out: the new run's folder; it must not exist.
        num_parts: of the copy.

    Returns:
        `out`, `steps` (of the checkpoints), `num_parts`, `num_tensors` (of the last one), `num_bytes` (of all).

    Raises:
        ValueError: no checkpoint there, a damaged one, or a wrong argument.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts: got {num_parts}, expected 1 or more")
    run, out = RunDir.open(path), Path(out)
    if out.exists():
        raise ValueError(f"out: got {str(out)!r}, which exists; choose a new folder")
    last, best = files.find(run.checkpoints, "last"), files.best_step(run.checkpoints)
    sources = {last, *([] if best is None else [files.step_dir(run.checkpoints, best)])}
    for source in sources:
        files.verify(source)
    target = RunDir(out)
    try:
        for source in sources:
            partial = target.checkpoints / f".partial_{source.name}"
            partial.mkdir(parents=True)
            with tempfile.TemporaryDirectory() as meeting:
                arguments = (num_parts, str(source), str(partial), f"{meeting}/store")
                spawn(_write_part, arguments, nprocs=num_parts)
            files.seal(partial)
            files.publish(partial, target.checkpoints / source.name)
        if best is not None:
            shutil.copyfile(run.checkpoints / files.BEST, target.checkpoints / files.BEST)
        for file in (run.config_path, run.linears_path):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    stored = read_metadata(target.checkpoints / last.name).state_dict_metadata
    return {
        "out": str(out),
        "steps": files.steps(target.checkpoints),
        "num_parts": num_parts,
        "num_tensors": sum(isinstance(item, TensorStorageMetadata) for item in stored.values()),
        "num_bytes": sum(file.stat().st_size for file in target.checkpoints.rglob("*") if file.is_file()),
    }


def _write_part(rank: int, num_parts: int, source: str, target: str, store: str) -> None:
    """One of the processes of `reshard`: reads its part of every tensor, and writes it."""
    from torch.distributed import tensor as sharded
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_parts, timeout=TIMEOUT)
    try:
        mesh = init_device_mesh("cpu", (num_parts,))
        state: dict[str, Any] = {}
        for name, item in read_metadata(Path(source)).state_dict_metadata.items():
            if isinstance(item, BytesStorageMetadata):
                state[name] = None
            elif len(item.size) and item.size[0] >= num_parts > 1:
                state[name] = sharded.empty(
                    item.size, dtype=item.properties.dtype, device_mesh=mesh, placements=[sharded.Shard(0)]
                )
            else:
                state[name] = torch.empty(item.size, dtype=item.properties.dtype)
        load_state(state, checkpoint_id=source)
        save_state(state, checkpoint_id=target)
    finally:
        dist.destroy_process_group()
