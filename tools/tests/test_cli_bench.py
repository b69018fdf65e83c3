"""gemworks bench: the programs' own rows, none whose check failed; comparison with an older CSV."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gemworks.cli import bench
from gemworks.cli.app import run
from gemworks.cli.compare import compare, read_rows

pytestmark = pytest.mark.reference

COLUMNS = ["op", "shape", "impl", "ms", "ms_p20", "ms_p80", "tflops"]
# A benchmark program as the libraries have them: a failed check has no row, and exit code 1.
PROGRAM = f"""
import argparse, csv, sys
parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--smoke", action="store_true")
parser.add_argument("--break", dest="broken", default="")
parser.add_argument("--ms", type=float, default=1.0)
args = parser.parse_args()
with open(args.out, "w", newline="") as file:
    writer = csv.DictWriter(file, {COLUMNS})
    writer.writeheader()
    for op in ("forward", "backward"):
        if op == args.broken:
            print(op, "FAILED: relative error 1e+00", flush=True)
            continue
        print(op, "done", flush=True)
        ms = args.ms if op == "forward" else 2.0
        writer.writerow(dict(op=op, shape="8x8", impl="gemworks", ms=ms, ms_p20=ms * 0.9, ms_p80=ms * 1.1, tflops=3.0))
sys.exit(1 if args.broken else 0)
"""


@pytest.fixture(autouse=True)
def _fake_suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fake_bench.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    fake = bench.Suite("fake_bench", lambda folder: str(folder / "jagged.csv"), ("--smoke",), "")
    monkeypatch.setitem(bench.SUITES, "jagged", fake)  # type: ignore[arg-type]


def test_rows_and_progress(capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]) -> None:
    assert run(["bench", "jagged", "--out", "new"]) == 0
    out, err = capsys.readouterr()
    golden("bench.txt", out)
    assert err.splitlines() == ["forward done", "backward done", "written to new"]
    assert Path("new/bench.log").read_text().splitlines() == ["forward done", "backward done"]


def test_a_failed_check_has_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "jagged", "--out", "new", "--json", "--", "--break", "forward"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["failed"]
    assert [row["op"] for row in found["rows"]] == ["backward"]
    assert "forward FAILED: relative error" in err
    assert (
        "error: bench jagged: the program ended with exit code 1; what failed has no row; its output: new/bench.log"
        in err
    )


def test_compare_with_an_older_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "jagged", "--out", "old", "--json"]) == 0
    capsys.readouterr()
    arguments = ["bench", "jagged", "--compare", "old/jagged.csv"]
    assert run([*arguments, "--out", "new", "--json", "--", "--ms", "1.5"]) == 0
    found = json.loads(capsys.readouterr().out)["comparison"]
    assert [(row["op"], row["verdict"], row["ratio"]) for row in found] == [
        ("forward", "slower", 1.5),
        ("backward", "same", 1.0),
    ]
    assert run([*arguments, "--out", "newer", "--", "--ms", "0.5"]) == 0
    assert "against old/jagged.csv: 1 faster, 1 same" in capsys.readouterr().out
    assert run([*arguments, "--out", "broken", "--json", "--", "--break", "forward"]) == 1
    found = json.loads(capsys.readouterr().out)["comparison"]
    assert [(row["op"], row["verdict"]) for row in found] == [("backward", "same"), ("forward", "gone")]


def test_differences_of_times_may_be_below_zero_and_have_no_ratio() -> None:
    Path("old.csv").write_text("op,ms\nregion_price,-0.25\nforward,2.0\n")
    rows = read_rows(Path("old.csv"))
    found = compare(rows, [row | {"ms": "0.5"} for row in rows])
    assert [(row["op"], row["ratio"], row["verdict"]) for row in found] == [
        ("region_price", None, "slower"),
        ("forward", 0.25, "faster"),
    ]


def test_brackets_are_text_and_bytes_that_are_none_do_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of rows and folders may look like markup; a program may print what is no UTF-8."""
    text = PROGRAM.replace('impl="gemworks"', 'impl="a[red]"')
    text = text.replace('print(op, "done", flush=True)', 'sys.stdout.buffer.write(b"caf\\xe9 [/]\\n")')
    Path("fake_bench.py").write_text(text)
    assert run(["bench", "jagged", "--out", "[/x]"]) == 0
    out, err = capsys.readouterr()
    assert "forward 8x8 a[red]" in out
    assert "caf\ufffd [/]" in err
    assert run(["bench", "jagged", "--out", "new", "--compare", "[/x]/jagged.csv"]) == 0
    out = capsys.readouterr().out
    assert "against [/x]/jagged.csv: 2 same" in out
    assert out.count("forward 8x8 a[red]") == 2


def test_within_the_spread_is_the_same() -> None:
    old = [{"op": "a", "ms": "1.0", "ms_p20": "0.9", "ms_p80": "1.1"}]
    assert compare(old, [{"op": "a", "ms": "1.3", "ms_p20": "1.05", "ms_p80": "1.4"}])[0]["verdict"] == "same"
    assert compare(old, [{"op": "a", "ms": "1.3", "ms_p20": "1.2", "ms_p80": "1.4"}])[0]["verdict"] == "slower"
    assert compare(old, [{"op": "a", "ms": "0.8", "ms_p20": "0.7", "ms_p80": "0.95"}])[0]["verdict"] == "same"
    assert compare(old, [{"op": "a", "ms": "0.8", "ms_p20": "0.7", "ms_p80": "0.85"}])[0]["verdict"] == "faster"
    for touches in ({"ms": "1.3", "ms_p20": "1.1", "ms_p80": "1.4"}, {"ms": "0.8", "ms_p20": "0.7", "ms_p80": "0.9"}):
        assert compare(old, [{"op": "a", **touches}])[0]["verdict"] == "same"
    assert [r["verdict"] for r in compare(old, [{"op": "b", "ms": "1"}])] == ["new", "gone"]
    assert compare(old, [{"op": "a", "ms": ""}])[0]["verdict"] == "gone"
    without = [{"op": "a", "ms": "1.0"}]
    assert [compare(without, [{"op": "a", "ms": ms}])[0]["verdict"] for ms in ("1.1", "1.0", "0.9")] == [
        "slower",
        "same",
        "faster",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "none.csv"], "error: 'none.csv': got no file, expected a CSV that `gemworks bench` wrote"),
        (["--compare", "other.csv"], "error: 'other.csv': got the columns a, b, expected ms and op, layer or row"),
        (["--out", "used"], "error: --out: got 'used', which holds results already; expected a new folder"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.csv").write_text("a,b\n1,2\n")
    Path("used").mkdir()
    Path("used/jagged.csv").write_text("op,ms\n")
    assert run(["bench", "jagged", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert not Path("runs").exists()


def test_wrong_arguments_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "jagged", "--out", "new", "--", "--rounds", "3"]) == 2
    out, err = capsys.readouterr()
    assert "unrecognized arguments: --rounds 3" in err
    assert out == "", "no table of nothing"


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "docs/measured").glob("*_h200*.csv")), ids=str)
def test_committed_measurements_can_be_compared_with(path: Path) -> None:
    with path.open() as file:
        columns = set(csv.DictReader(file).fieldnames or ())
        if "ms" not in columns or not columns & {"op", "layer", "row"}:
            pytest.skip("a table of another kind")
    rows = read_rows(path)
    found = compare(rows, rows)
    assert {row["verdict"] for row in found} == {"same"}
    assert len(found) == len({tuple(r.get(k) or "" for k in bench_keys()) for r in rows if r["ms"]})


def bench_keys() -> tuple[str, ...]:
    from gemworks.cli.compare import KEY_COLUMNS

    return KEY_COLUMNS


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["jagged", "precision", "parallel", "netmem", "layers", "ladder"])
def test_real_suites_smoke(
    suite: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The libraries' programs at tiny sizes: rows come, with a command that names the program itself."""
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    # the compiled rows of the ladder take minutes on a CPU; .ci/run has a stage for the eager ones
    some = ["--", "--no-local", "--attention=block", "--rows=padded_eager", "--rows=norms"] if suite == "ladder" else []
    assert run(["bench", suite, "--smoke", "--out", str(tmp_path / "out"), "--json", *some]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"]
    assert all(row["command"].startswith(f"python -m {bench.SUITES[suite].module}") for row in found["rows"])
