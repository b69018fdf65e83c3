"""`python -m gemworks.parallel`: the same content for people and as JSON; mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gemworks.parallel import presets
from gemworks.parallel.__main__ import main
from gemworks.parallel.profile import gem_like

PLAN = ["--gpus", "64", "--shard", "64", "--expert", "2", "--table-group", "8", "--replica-shard", "8"]


def _files(folder: Path) -> list[str]:
    presets.roce_cluster(64).to_toml(folder / "cluster.toml")
    (folder / "model.json").write_text(gem_like(num_layers=1, table_rows=10**8).to_json())
    return ["--cluster", str(folder / "cluster.toml"), "--model", str(folder / "model.json")]


def test_simulate_prints_for_people_and_as_json_and_writes_a_trace(
    tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = _files(tmp_path)
    (tmp_path / "errors.csv").write_text("config,split,predicted_ms,measured_ms,error_pct\na,validate,1,1,2.5\n")
    assert main(["simulate", *where, *PLAN, "--errors", str(tmp_path / "errors.csv")]) == 0
    text = capsys.readouterr().out
    assert "MFU" in text
    assert "median 2.5 %" in text
    assert main(["simulate", *where, *PLAN, "--json", "--trace", str(tmp_path / "t.json")]) == 0
    content = json.loads(capsys.readouterr().out)
    assert f"step     {content['step_us'] / 1e3:.2f} ms" in text
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_search_and_place_print_for_people_and_as_json(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    where = _files(tmp_path)
    assert main(["search", *where, "--top", "3"]) == 0
    assert "plans fit" in capsys.readouterr().out
    assert main(["search", *where, "--top", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["step_us"] == found["plans"][0]["step_us"]
    assert main(["place", *where, *PLAN]) == 0
    text = capsys.readouterr().out
    assert "predicted" in text
    assert "prediction error: median" in text
    assert main(["place", *where, *PLAN, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["views"]["sparse"]["tiers"]["replica_shard"] == "nvlink"
    assert content["validation"] in " ".join(text.split())


def test_the_ladder_ends_in_the_published_plan(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    where = _files(tmp_path)
    assert main(["ladder", *where, "--gpus", "64"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()] == ["ladder", *["dense"] * 3, *["sparse"] * 4, "prediction"]
    assert main(["ladder", *where, "--gpus", "64", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["dense"][-1]["plan"] == content["sparse"][-1]["plan"]
    assert content["dense"][-1]["plan"]["experts"] == {"expert": 2, "expert_shard": 16, "replica": 2}
    assert main(["ladder", *where, "--picture", str(tmp_path / "x.svg")]) == 2
    assert "--picture: got a file" in capsys.readouterr().err


def test_a_step_without_a_table_group_still_has_its_tables(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """One copy over all GPUs, whatever shares a replica."""
    where = _files(tmp_path)
    for more, group in ([], 64), (["--replica-shard", "4"], 16):
        assert main(["simulate", *where, "--gpus", "64", "--shard", "64", *more, "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["plan"]["sparse"]["table_group"] == group
        assert content["memory_bytes"]["tables and row optimizer"] > 0


def test_ranks_says_who_holds_what_and_draws_it(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--cluster", "h200", "--shard", "8", "--picture", str(tmp_path / "plan.svg")]
    assert main(["ranks", *plan, "--rank", "3", "--rank", "5"]) == 0
    text = capsys.readouterr().out
    assert "rank 3  zone 0" in text
    assert "rank 4  zone 0" not in text
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    assert main(["ranks", *plan, "--json"]) == 0
    assert [r["rank"] for r in json.loads(capsys.readouterr().out)["ranks"]] == list(range(8))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["search", "--cluster", "nowhere.toml"], "expected roce, h200, gb200, or the path of a cluster file"),
        (["search", "--model", "nothing.json"], "expected gem-like"),
        (["place", "--cluster", "h200", "--shard", "3"], "expected a divisor of the world size 8"),
        (["simulate", "--cluster", "h200", "--shard", "8", "--replica-shard", "0"], "sparse.replica_shard: got 0"),
        (["place", "--cluster", "h200", "--shard", "8", "--replica-shard", "4"], "got 4 without table_group"),
        (["search", "--balance", "luck"], "--balance: got 'luck', expected none, bbs or global"),
        (["simulate", "--cluster", "h200", "--shard", "8", "--table-group", "8"], "need "),
        (["simulate", "--cluster", "h200", "--shard", "8", "--replica-shard", "3"], "the nearest divisors are [2, 4]"),
        (["search", "--cluster", "h200", "--top", "-3"], "top: got -3, expected an int >= 1"),
        (["search", "--cluster", "h200", "--errors", "."], "measured errors '.': "),
        (["search", "--cluster", "h200", "--errors", __file__], "lacks the columns ['error_pct', 'split']"),
        (["place", "--cluster", "h200", "--shard", "8", "--picture", "."], "Is a directory: '.'"),
    ],
)
def test_mistakes_end_in_one_line_and_code_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err
