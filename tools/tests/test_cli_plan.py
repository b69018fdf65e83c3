"""gemworks plan: the library's own answers as text, JSON, picture and trace; wrong plans say what to change."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from gemworks.cli.app import run
from gemworks.parallel import ModelProfile, ParallelPlan, presets, search, simulate
from gemworks.parallel.profile import gem_like

pytestmark = pytest.mark.reference

WORDS = "--gpus 4096 --shard 256 --expert 2 --expert-shard 16 --table-group 256 --replica-shard 8"
PUBLISHED = WORDS.split()
HOST = ["--cluster", "h200", "--gpus", "8", "--shard", "8", "--table-group", "4", "--replica-shard", "2"]


def test_simulate_prints_what_the_library_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "simulate", *PUBLISHED]) == 0
    plan = ParallelPlan.for_world(4096, shard=256, expert=2, expert_shard=16, table_group=256, replica_shard=8)
    expected = simulate(plan, gem_like(), presets.roce_cluster(4096))
    assert capsys.readouterr().out == expected.text() + "\n"
    assert run(["plan", "simulate", *PUBLISHED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(expected.to_json())


def test_simulate_draws_and_traces(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "simulate", *PUBLISHED, "--picture", "plan.svg", "--trace", "step.json"]) == 0
    assert ET.parse("plan.svg").getroot().tag.endswith("svg")
    events = json.loads(Path("step.json").read_text())["traceEvents"]
    assert {e["tid"] for e in events if e["ph"] == "X"} == {0, 1, 2}


def test_search_ranks_plans_of_a_profile_and_a_cluster_file(capsys: pytest.CaptureFixture[str]) -> None:
    cluster, model = presets.roce_cluster(64), gem_like(num_layers=2)
    cluster.to_toml("cluster.toml")
    Path("model.json").write_text(model.to_json())
    arguments = ["plan", "search", "--cluster", "cluster.toml", "--profile", "model.json", "--keep", "2"]
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert ModelProfile.from_json("model.json") == model
    expected = search(model, cluster, keep=2)
    assert found["best"] == json.loads(expected.to_json(10))["best"]
    assert run([*arguments, "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert [line[6:] for line in text.splitlines()[1:4]] == expected.best.plan.text().split("; ")
    assert "slower:" in text or "as fast as the best" in text


def test_m7_ranks_says_which_rank_holds_what(
    capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    """Case M7: nobody could see which rank holds what. Stable text, and the same as JSON."""
    assert run(["plan", "ranks", *HOST, "--rank", "3"]) == 0
    golden("plan_ranks.txt", capsys.readouterr().out)
    assert run(["plan", "ranks", *HOST, "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [r["rank"] for r in ranks] == list(range(8))
    rows = [(t["first_row"], t["last_row"]) for t in ranks[3]["tables"]]
    assert len(rows) == 8
    assert set(rows) == {(125_000_000, 249_999_999)}


def test_m6_a_plan_that_does_not_fit_says_need_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """Case M6: the report of an infeasible plan crashed. One line here, exit code 2."""
    assert run(["plan", "simulate", "--gpus", "64", "--shard", "64", "--table-group", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "GiB" in err
    assert "table_group" in err


def test_the_measured_error_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    header = "config,split,predicted_ms,measured_ms,error_pct,gpu\n"
    Path("error.csv").write_text(
        header + "a,calibrate,1,1,50,H200\nb,validate,9,10,-10,H200\nc,validate,10,10,2,H200\n"
    )
    assert run(["plan", "simulate", *PUBLISHED, "--measured", "error.csv"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "prediction error: median 6.0 %, worst 10.0 % over 2 measured steps" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "mainframe"], "error: --cluster: got 'mainframe', expected roce, h200, gb200, or the path"),
        (["--balance", "luck"], "error: --balance: got 'luck', expected none, bbs or global"),
        (["--gpus", "64", "--shard", "48"], "error: dense: got shard 48 = 48, expected a divisor of the world size 64"),
        (["--picture", "plan.png"], "error: --picture: got 'plan.png', expected a file that ends in .svg"),
        (["--trace", "nowhere/step.json"], "error: --trace: got 'nowhere/step.json', but there is no folder 'nowhere'"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "simulate", *([] if "--shard" in arguments else ["--shard", "8"]), *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)
