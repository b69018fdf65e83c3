"""gemworks checkpoint convert and reshard: the same values in another form; the copy of a run can be trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gemworks.cli.app import run
from gemworks.gem import checkpoint_files as files
from gemworks.gem.checkpoint import read_into, read_metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.reference

TINY = (
    "data.num_samples=128 data.batch_size=32 data.max_length=8 data.prefetch=0 model.dim=32 train.max_steps=2 "
    "train.log_every=1 train.eval_every=1"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("trained") / "first"
    assert run(["train", "--preset", "tiny", "--set", *TINY.split(), "--run-dir", str(folder)]) == 0
    return folder


def stored_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in read_metadata(checkpoint).state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    read_into(state, checkpoint)
    return state


def test_convert_writes_the_dense_part(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "convert", str(trained), "model.safetensors", "--checkpoint", "last", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    written = safetensors_torch.load_file("model.safetensors")
    stored = stored_tensors(files.find(trained / "checkpoints", "last"))
    model = {name.removeprefix("model."): t for name, t in stored.items() if name.startswith("model.")}
    dense = {name for name in model if not name.startswith("embeddings.")}
    assert written.keys() == dense == found["tensors"].keys()
    assert all(torch.equal(written[name], model[name]) for name in dense)
    assert set(found["left_out"]) == model.keys() - dense
    assert (found["step"], found["num_parameters"]) == (2, sum(t.numel() for t in written.values()))
    assert run(["checkpoint", "convert", str(trained), "model.safetensors"]) == 2
    assert "error: out: got 'model.safetensors', which exists" in capsys.readouterr().err


def test_reshard_keeps_every_value_and_goes_on(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trained / "linears.toml").write_text("what a probe chose")
    assert run(["checkpoint", "reshard", str(trained), "second", "--parts", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    before, after = (files.find(folder / "checkpoints", "last") for folder in (trained, Path("second")))
    assert len(list(after.glob("*.distcp"))) == 3 == found["num_parts"]
    one, other = stored_tensors(before), stored_tensors(after)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert found["num_tensors"] == len(one)
    assert Path("second/linears.toml").read_text() == "what a probe chose"
    assert run(["checkpoint", "inspect", "second", "--against", str(trained)]) == 0
    assert "no tensor differs in name or shape" in capsys.readouterr().out
    assert run(["train", "--run-dir", "second", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["ne"] == json.loads((trained / "summary.json").read_text())["ne"]


def test_errors_leave_nothing_behind(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "reshard", str(trained), "third", "--parts", "0"]) == 2
    assert "error: --parts: got 0, expected 1 or more" in capsys.readouterr().err
    assert run(["checkpoint", "reshard", str(tmp_path), "third", "--parts", "2"]) == 2
    assert "got no config.toml in it" in capsys.readouterr().err
    assert run(["checkpoint", "convert", "nowhere", "x.safetensors"]) == 2
    assert "error: 'nowhere': got no folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
