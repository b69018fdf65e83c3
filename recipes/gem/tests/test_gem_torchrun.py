"""Two ranks under torchrun, on two GPUs with NCCL and on a CPU with gloo: the steps of one process; ranks that fail.

A rank dies in the middle of a step: with NCCL the other then waits for the device, where no exception comes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gemworks.gem import checkpoint_files as files
from gemworks.gem.run_dir import RunDir

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
CPU = pytest.param("cpu", marks=[pytest.mark.dist, pytest.mark.slow])
devices = pytest.mark.parametrize("device", [CUDA, CPU])
SETTINGS = (
    "data.num_samples=2048",
    "data.batch_size=64",
    "data.max_length=32",
    "data.prefetch=2",
    "model.dim=64",
    "optimizer.warmup_steps=3",
    "train.log_every=1",
    "train.max_steps=8",
    "train.save_every=3",
    "train.eval_every=4",
    "train.rank_timeout_seconds=60",
)
KERNELS = {
    "recomputed": ("kernels.activations=recompute",),
    "FP8 linears": ("kernels.linears=fp8_block128", "kernels.linears_min_features=64"),
    "padded": (
        "kernels.layout=padded",
        "kernels.attention=sdpa",
        "kernels.pooling=sdpa",
        "kernels.pffn=matmul",
        "kernels.norm=torch",
        "kernels.fused_qk=false",
    ),
}
COMPILED = ("train.compile=true", "kernels.compile_scope=layers", "kernels.activations=recompute")


def run(path: Path, device: str, num_ranks: int, fault: str, *settings: str) -> tuple[int, str, float]:
    """Exit code, standard error and seconds of a run in `path`."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    script = [str(Path(__file__).parent / "gem_faulty_rank.py"), fault, "--preset", "tiny", "--run-dir", str(path)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    settings = (f"train.device={device}", *settings)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *(launcher if num_ranks > 1 else []), *script, "--set", *SETTINGS, *settings],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"},
    )
    return done.returncode, done.stderr, time.monotonic() - began


def losses(path: Path) -> list[float]:
    return [row["loss"] for row in RunDir.open(path).rows("train")]


def root_cause(text: str) -> str:
    """What torchrun's report says of the first failure."""
    return text[text.rindex("Root Cause (first observed failure):") :]


def same_steps(path: Path, device: str, tolerance: float, *settings: str) -> None:
    """One rank and two, at the same time, take the same steps."""
    with ThreadPoolExecutor() as pool:
        started = [pool.submit(run, path / str(n), device, n, "none:0:0", *settings) for n in (1, 2)]
    for code, err, _ in (each.result() for each in started):
        assert code == 0, err[-3000:]
    one, two = losses(path / "1"), losses(path / "2")
    assert len(one) == 8
    print(f"{device}: largest difference of a loss {max(abs(b / a - 1) for a, b in zip(one, two, strict=True)):.2g}")
    assert two == pytest.approx(one, rel=tolerance)


@devices
def test_two_ranks_take_the_steps_of_one(device: str, tmp_path: Path) -> None:
    same_steps(tmp_path, device, 1e-3)
    first, second = (RunDir.open(tmp_path / name).summary() for name in ("1", "2"))
    assert first is not None
    assert second is not None
    assert second["num_ranks"] == 2
    assert second["ne"] == pytest.approx(first["ne"], rel=1e-3)


@devices
@pytest.mark.parametrize("name", KERNELS)
def test_two_ranks_take_the_steps_of_one_on_other_kernels(device: str, name: str, tmp_path: Path) -> None:
    """Each rank rounds its own half of the batch, so FP8 and bf16 differ by their own errors."""
    dtype = () if name == "padded" else ("train.dtype=bfloat16",)
    same_steps(tmp_path, device, 1e-3 if name == "padded" else 2e-2, *dtype, *KERNELS[name])


@pytest.mark.gpu
def test_two_gpus_take_the_steps_of_one_compiled(tmp_path: Path) -> None:
    same_steps(tmp_path, "cuda", 2e-2, "train.dtype=bfloat16", *COMPILED)


@devices
def test_torchrun_names_a_rank_that_is_killed_in_a_step(device: str, tmp_path: Path) -> None:
    code, err, seconds = run(tmp_path / "run", device, 2, "kill:1:5")
    assert code == 1
    cause = root_cause(err)
    assert "rank      : 1 (local_rank: 1)" in cause
    assert "exitcode  : -9" in cause
    assert "RankFailure: rank 1 stopped without a word" in err
    assert files.steps(tmp_path / "run" / "checkpoints") == [3, 4]
    print(f"{device}: killed; {seconds:.1f} s from start to end")


@devices
def test_torchrun_names_a_rank_that_raises_in_a_step_and_says_what(device: str, tmp_path: Path) -> None:
    code, err, _ = run(tmp_path / "run", device, 2, "raise:1:5")
    assert code == 1
    cause = root_cause(err)
    assert "rank      : 1 (local_rank: 1)" in cause
    assert "ValueError: data.path: row 7 is bad" in cause


@devices
def test_a_failure_of_the_first_rank_alone_ends_the_other(device: str, tmp_path: Path) -> None:
    code, err, _ = run(tmp_path / "run", device, 2, "seal:0:3")
    assert code == 1
    cause = root_cause(err)
    assert "rank      : 0 (local_rank: 0)" in cause
    assert "CheckpointError: the checkpoint of step 3 could not be written" in cause
    assert "No space left on device" in err
    assert files.steps(tmp_path / "run" / "checkpoints") == []
