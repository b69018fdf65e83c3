"""The long run in pieces, on a CPU: a kill inside a piece, files that travel, and a piece that goes on from them."""

import csv
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "long_run.py"


def load() -> object:
    spec = importlib.util.spec_from_file_location("gem_long_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_piece_is_killed_and_the_next_goes_on_from_its_files(tmp_path: Path):
    main = load().main  # pyright: ignore[reportAttributeAccessIssue]
    run, parts = tmp_path / "run", tmp_path / "parts"
    common = ["--preset", "tiny", "--bare", "--run-dir", str(run), "--parts", str(parts), "--out", str(tmp_path)]
    common += ["--file-mib", "2", "--poll", "0.5", "--set", "data.batch_size=16", "data.num_samples=200000"]
    common += ["train.save_every=10", "train.log_every=5", "train.keep_last=1", "train.eval_every=1000000"]
    assert main([*common, "--seconds", "100", "--kill-after", "50"]) == 0
    first = max(path.name for path in (run / "checkpoints").glob("step_*"))
    assert len(list(parts.glob("part.*"))) > 1
    shutil.rmtree(run)
    (tmp_path / "long_run_h200.csv").unlink()  # another machine: what it has is in the files
    assert main([*common, "--seconds", "45"]) == 0
    assert max(path.name for path in (run / "checkpoints").glob("step_*")) > first
    with (tmp_path / "long_run_h200.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["event"] for row in rows if row["event"] in ("killed", "started again", "resumed from files")] == [
        "killed", "started again", "resumed from files",
    ]  # fmt: skip
    steps = [int(row["step"]) for row in rows if row["event"] == "train" and row["piece"] == "2"]
    assert steps
    assert min(steps) > int(first.split("_")[1])


@pytest.mark.reference
def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = load()
    step = tmp_path / "run" / "checkpoints" / "step_00000001"
    step.mkdir(parents=True)
    (step / "data").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(module, "newest_whole", lambda folder, say: step)
    cut = module.cut  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="expected at most 2 files of 1 MiB"):
        cut(tmp_path / "run", tmp_path / "parts", num_files=2, file_mib=1)
    assert cut(tmp_path / "run", tmp_path / "parts", num_files=8, file_mib=1) == 4


@pytest.mark.reference
@pytest.mark.parametrize(("visible", "asked"), [("1,0", "--id=1"), ("GPU-8a", "--id=GPU-8a"), (None, "--id=0")])
def test_memory_is_read_of_the_gpu_that_is_trained_on(
    visible: str | None, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, seen = load(), []
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def run(command: list[str], **_: object) -> object:
        seen.extend(command)
        return module.subprocess.CompletedProcess(command, 0, "NVIDIA H200, 1234\n")  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(module.subprocess, "run", run)  # pyright: ignore[reportAttributeAccessIssue]
    assert module.state_of_gpu() == ("NVIDIA H200", 1234.0)  # pyright: ignore[reportAttributeAccessIssue]
    assert asked in seen


@pytest.mark.reference
def test_without_a_gpu_memory_is_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert module.state_of_gpu() is None  # pyright: ignore[reportAttributeAccessIssue]
    assert module.memory_mib(module.os.getpid()) > 1  # pyright: ignore[reportAttributeAccessIssue]
