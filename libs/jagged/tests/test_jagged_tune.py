"""Tables of tuned configurations: written whole, put in force by name, refused where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gemworks.jagged import tune
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.norms import configs

pytestmark = pytest.mark.reference


@pytest.fixture(autouse=True)
def _shipped_again() -> Iterator[None]:
    yield
    tune.use_table(None)


def entry(key: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"key": key, "config": config, "ms": 1.0, "shipped_ms": 2.0}


def test_a_table_is_in_force_until_it_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    tuned: dict[str, Any] = {"block": 32, "stages": 4, "groups": 2, "registers": 232}
    norm: dict[str, Any] = {"rows": 8, "num_warps": 2, "stages": 2}
    entries = [entry("attention forward softmax long", tuned), entry("norm sums 512", norm)]
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "entries": entries}))
    key = ("forward", "softmax", "long")
    shipped, shipped_norm = table.GLUON[key], configs.norm_config(512, sums_columns=True)
    tune.use_table(path)
    assert table.GLUON[key] == table.GluonConfig(**tuned)
    assert configs.norm_config(512, sums_columns=True) == configs.NormConfig(8, 2, 2)
    assert configs.norm_config(512) != configs.NormConfig(8, 2, 2)
    assert len(table.GLUON) == len(tune.SHIPPED_ATTENTION)
    tune.use_table(None)
    assert table.GLUON[key] == shipped
    assert configs.norm_config(512, sums_columns=True) == shipped_norm


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected a file that python -m gemworks.jagged.tune wrote"),
        ('{"gpu": "x"}', "expected a file that python -m gemworks.jagged.tune wrote"),
        (json.dumps({"entries": [entry("attention forward softmax enormous", {})]}), "unknown key"),
        (json.dumps({"entries": [entry("attention forward softmax long", {"blocks": 3})]}), "tune again"),
    ],
)
def test_what_is_no_table_is_refused_and_changes_nothing(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        tune.use_table(path)
    with pytest.raises(ValueError, match=r"absent\.json"):
        tune.use_table(tmp_path / "absent.json")
    assert table.GLUON == tune.SHIPPED_ATTENTION


def test_candidates_begin_with_what_is_shipped() -> None:
    for shipped in tune.SHIPPED_ATTENTION.values():
        candidates = list(tune.attention_candidates(shipped))
        assert candidates[0] == shipped
        assert all(c.stages >= 2 for c in candidates)  # one stage waits for itself
    for fused in tune.SHIPPED_FUSED.values():
        assert next(tune.fused_candidates(fused)) == fused
    for width in tune.NORM_WIDTHS:
        for sums in (False, True):
            candidates = list(tune.norm_candidates(width, sums=sums))
            assert candidates[0] == configs.norm_config(width, sums_columns=sums)
            assert all(c.rows * width <= 16384 for c in candidates)


def test_the_command_writes_what_each_process_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(key: str, limit_s: float, jobs: int) -> tune.Entry | None:
        assert jobs == 3
        if key.endswith("8192"):
            return None  # its process was stopped
        return tune.Entry(key, {"rows": 2, "num_warps": 4}, 1.0, 2.0)

    monkeypatch.setattr(tune, "in_a_process", found)
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tune.main(["--only", "norm forward", "--jobs", "3"]) == 0
    path = tune.default_path("NVIDIA H200")
    assert path == tmp_path / "gemworks" / "jagged" / "nvidia_h200.json"
    lines = json.loads(path.read_text())["entries"]
    assert [line["key"] for line in lines] == [f"norm forward {w}" for w in tune.NORM_WIDTHS if w != 8192]
    tune.use_table(path)
    assert configs.norm_config(1024) == configs.NormConfig(2, 4)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if tune.torch.cuda.is_available():
        pytest.skip("there is one")
    assert tune.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_shares_compile_every_candidate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    def runner(key: str) -> Any:
        def run(config: int) -> Any:
            compiled.append(config)
            if config == 2:
                raise RuntimeError("out of resource: shared memory")
            return list

        return iter([0, 1, 2, 3, 1, 4]), run

    monkeypatch.setattr(tune, "norm_runner", runner)
    monkeypatch.setattr(tune.torch.cuda, "synchronize", lambda: None)
    for i in range(2):
        tune.compile_share("norm forward 128", i, 2)
    assert sorted(compiled) == [0, 1, 2, 3, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not tune.torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_key_is_tuned_on_the_device() -> None:
    """Of candidates that are all right, one that is at least as fast as the shipped one."""
    entry = tune.tune("norm forward 512")
    assert entry.key == "norm forward 512"
    assert 0 < entry.ms <= entry.shipped_ms
    configs.NormConfig(**entry.config)
