"""What a row will take of its GPU's memory, from rows that were measured; rows without room may be tried again."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gemworks.gem.ladder import pair, room
from gemworks.gem.ladder.__main__ import Ladder, arguments
from gemworks.gem.ladder.pair import Pair
from gemworks.gem.ladder.rows import COLUMNS, Case, done, key_of
from gemworks.gem.ladder.settings import build
from gemworks.gem.layers.report import append_csv
from gemworks.gem.presets import get_preset, load_config
from gemworks.gem.ranks import Ranks

pytestmark = pytest.mark.reference


def measured(name: str, **cells: str) -> dict[str, str]:
    given = {"row": name, "attention": "block", "batch": "256", "max_len": "2048", "mean_len": "1024.5"}
    return dict.fromkeys(COLUMNS, "") | {"peak_gib": "50", "num_gpus": "1"} | given | cells


def test_memory_grows_with_events_and_not_with_weights() -> None:
    """Twice the samples, and as many of another law: what is not fixed grows alike."""
    config = get_preset("large").with_data(batch_size=512)
    rows = [measured("stream", peak_gib="99"), measured("stream"), measured("stream", attention="full", batch="512")]
    found = room.expected(config, ["stream"], rows, fixed_gib=10.0)
    assert found is not None
    assert found.gib == pytest.approx(90.0)  # the last of the two, of this kind of attention
    assert found.source == "50.0 GiB of stream at 256 samples"
    longer = config.with_data(batch_size=256, length_law="uniform_0.7")
    found = room.expected(longer, ["stream"], rows, fixed_gib=10.0)
    assert found is not None
    assert found.gib == pytest.approx(10.0 + 40.0 * 1.4, rel=2e-3)


def test_a_row_without_a_measurement_takes_what_it_builds_on() -> None:
    config = build(get_preset("large").with_data(batch_size=256))["all_batch_x2"]
    rows = [measured("fast_gelu"), measured("bf16_batch_x2", batch="512", peak_gib="88.7")]
    found = room.expected(config, room.builds_on("all_batch_x2"), rows, fixed_gib=9.1)
    assert found is not None
    assert found.source == "88.7 GiB of bf16_batch_x2 at 512 samples"
    assert room.expected(config, room.builds_on("all_batch_x2"), [], fixed_gib=9.1) is None
    assert room.expected(config, ["fast_gelu"], [measured("fast_gelu", max_len="512")], fixed_gib=9.1) is None


def test_padded_rows_keep_whole_rows_of_every_law() -> None:
    config = build(get_preset("large").with_data(batch_size=256, length_law="uniform_0.7"))
    rows = [measured("padded_eager", peak_gib="119.95", padding="0.4998")]
    found = room.expected(config["padded_eager"], room.builds_on("padded_eager"), rows, fixed_gib=9.1)
    assert found is not None
    assert found.gib == pytest.approx(119.95)
    packed = room.expected(config["jagged_varlen_eager"], ["padded_eager"], rows, fixed_gib=9.1)
    assert packed is not None
    assert packed.gib == pytest.approx(9.1 + 110.85 * 0.7, rel=2e-3)


def test_a_row_is_refused_for_its_own_peak_or_that_of_the_row_that_it_names() -> None:
    configs = build(get_preset("large").with_data(batch_size=256))

    def decides(name: str, of: str) -> bool:
        found = room.expected(configs[name], room.builds_on(name), [measured(of)], fixed_gib=9.1)
        assert found is not None
        return found.decides

    assert decides("compiled", "compiled")
    assert decides("graphs_less_kept", "cuda_graphs")
    assert not decides("compiled", "half_tables")
    assert not decides("less_kept", "fast_gelu")


def test_memory_is_foreseen_from_rows_of_the_same_model() -> None:
    rows = [
        measured("norms", command="python -m gemworks.gem.ladder --preset=base"),
        measured("norms", command="python -m gemworks.gem.ladder --set model.dim=64"),
        measured("norms"),
        measured("fsdp", preset="base", sets="model.dim=64"),
    ]
    assert room.of_model(rows, "base", []) == rows[:1]
    assert room.of_model(rows, "large", ["model.dim=64"]) == rows[1:2]
    assert room.of_model(rows, "large", []) == rows[2:3]
    assert room.of_model(rows, "base", ["model.dim=64"]) == rows[3:]


def test_a_row_that_only_takes_after_another_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(room, "free_gib", lambda device: (1.0, 138.0))
    peaks = tmp_path / "before.csv"
    append_csv(peaks, [measured("norms", batch="8", max_len="64", mean_len="32.5")], COLUMNS)
    args = arguments(["--rows", "stream", "--out", str(tmp_path), "--peaks", str(peaks)])
    ladder = Ladder(args, torch.device("cuda"))
    ((plan, _),) = ladder.pending([get_preset("tiny").with_data(batch_size=8)])
    assert ladder._no_room(plan) == ""
    assert "stream: 50.0 GiB expected, from 50.0 GiB of norms at 8 samples" in capsys.readouterr().out


def test_room_that_others_leave_is_waited_for() -> None:
    needed, left = room.Expected(60.0, "a row"), iter([(40.0, 90.0), (40.0, 90.0), (120.0, 1.0)])
    assert room.refusal(needed, lambda: next(left), patience_s=30.0, poll_s=0.0) == ""
    said = room.refusal(needed, lambda: (40.0, 90.0), patience_s=0.0)
    assert said == "NoRoom: expected 60.0 GiB (a row), 40.0 are free; others and contexts hold 90.0"


def test_a_row_without_room_is_refused_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the CSV with what was foreseen, trains nothing, and does not count as done."""
    monkeypatch.setattr(room, "free_gib", lambda device: (1.0, 138.0))
    refusal = room.refusal
    monkeypatch.setattr(room, "refusal", lambda needed, free: refusal(needed, free, patience_s=0.0))
    peaks = tmp_path / "before.csv"
    append_csv(peaks, [measured("norms", batch="8", max_len="64", mean_len="32.5")], COLUMNS)
    args = arguments(["--no-local", "--rows", "norms", "--out", str(tmp_path), "--peaks", str(peaks)])
    ladder = Ladder(args, torch.device("cuda"))
    ladder.common = {}  # of a GPU that is not there
    base = get_preset("tiny").with_data(batch_size=8)
    ((plan, case),) = ladder.pending([base])
    ladder._measure(plan, case)
    text = (tmp_path / "ladder_h200.csv").read_text()
    assert "NoRoom: expected 50.0 GiB (50.0 GiB of norms at 8 samples), 1.0 are free" in text
    assert key_of("norms", Case("block", 8, "uniform", 64)) not in done(tmp_path / "ladder_h200.csv")
    assert len(ladder.pending([base])) == 1


def test_two_gpus_are_measured_without_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_gib", lambda device: (90.0, 41.5))
    monkeypatch.setattr(pair, "PATIENCE_S", 0.0)
    args = pair.arguments(["--rows", "fsdp", "--out", str(tmp_path)])
    ladder = Pair(args, Ranks(), torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"--turns: got none where others hold 41.5 GiB"):
        ladder.climb(load_config("tiny", sets=["train.dtype=bfloat16"]))


def test_a_row_that_hangs_ends_the_command() -> None:
    """And says where; a row that ends in time does not."""
    code = "import time\nfrom gemworks.gem.ladder.pair import _at_most\n"
    code += "with _at_most(0.3):\n    pass\ntime.sleep(0.6)\nprint('in time', flush=True)\n"
    code += "with _at_most(0.3):\n    time.sleep(60)\n"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=50)
    assert time.monotonic() - began < 45
    assert done.returncode != 0
    assert "in time" in done.stdout
    assert "Timeout" in done.stderr
    assert "line 8 in <module>" in done.stderr
