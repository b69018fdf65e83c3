"""Command lines that a user gets wrong, and files that are damaged: exit code 2 and one line, before anything slow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gemworks.cli.app import run
from gemworks.cli.compare import read_rows
from gemworks.cli.output import new_folder, readable, writable

pytestmark = pytest.mark.reference

WHOLE = "op,ms,ms_p20,ms_p80\nforward,1.25,1.20,1.30\nbackward,2.5,2.4,2.6\n"


@pytest.fixture
def _may_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may write anywhere; so the question is answered here."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "closed" not in str(path) and real(path, mode))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--preset", "tiny", "--run-dir", ""], "--run-dir: got '', expected a value; is a shell variable"),
        (["train", "--preset", "tiny", "--run-dir="], "--run-dir: got ''"),
        (["eval", ""], "eval: got ''"),
        (["bench", "netmem", "--nproc", "0"], "--nproc: got 0, expected 1 or more"),
        (["plan", "search", "--top", "-1"], "--top: got -1, expected 1 or more"),
        (["plan", "simulate", "--shard", "8", "--sync-every", "0"], "--sync-every: got 0, expected 1 or more"),
        (
            ["plan", "search", "--measured", "cut.csv"],
            "--measured: got 'cut.csv' without the columns config, error_pct",
        ),
        (["plan", "search", "--measured", "bytes.csv"], "--measured: got 'bytes.csv', which is no CSV"),
        (["plan", "search", "--measured", "none.csv"], "'none.csv': got no file, expected a simulator_error.csv"),
        (["trace", "t.json", "--kernels", "-3"], "--kernels: got -3, expected 0 or more"),
        (["trace", "t.json", "./t.json"], "TRACE...: got the same file twice, expected one per rank"),
        (["mfu", "--flops", "nan", "--step-ms", "5"], "--flops: got nan, expected a positive number"),
        (["mfu", "--flops", "1e15", "--step-ms", "inf"], "--step-ms: got inf, expected a positive number"),
        (["mfu", "--preset", "tiny", "--step-ms", "5", "--samples", "0"], "--samples: got 0, expected 1 or more"),
        (["mfu", "--flops", "1e15", "--step-ms", "1"], "MFU: got 101112%, and no GPU does more than its peak"),
        (["checkpoint", "convert", ".", "model.pt"], "OUT: got 'model.pt', expected a file that ends in .safetensors"),
        (["checkpoint", "reshard", ".", "new", "--parts", "1000000"], "--parts: got 1000000, which as many processes"),
        (["checkpoint", "reshard", ".", "cut.csv/new", "--parts", "2"], "OUT_DIR: got 'cut.csv/new', but '"),
        (["checkpoint", "reshard", ".", "new", "--parts", "0"], "--parts: got 0, expected 1 or more"),
        (["plan", "search", "--gpus", "0"], "--gpus: got 0, expected 1 or more"),
        (["plan", "ranks", "--shard", "8", "--table-group", "-2"], "--table-group: got -2, expected 1 or more"),
        (["probe", "their_model:make", "--min-sqnr-db", "nan"], "--min-sqnr-db: got nan, expected a finite number"),
        (["bench", "jagged", "--out", "cut.csv"], "--out: got 'cut.csv', but 'cut.csv' is a file; name another folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_line_and_exit_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("cut.csv").write_text(WHOLE)
    Path("bytes.csv").write_bytes(b"split\n\xff\xfe\n")
    Path("t.json").write_text(json.dumps({"traceEvents": []}))
    before = set(Path().iterdir())
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert set(Path().iterdir()) == before, "nothing is left behind"


def test_empty_words_after_two_dashes_are_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "jagged", "--compare", "none.csv", "--", "--only", ""]) == 2
    assert "'none.csv': got no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WHOLE[:35], "row 2: got more or fewer values than columns"),
        (WHOLE[:-1], "the last row has no end, so the file was cut"),  # 2.6 may have been 2.65
        (WHOLE.replace("1.25", "1.25,7"), "row 2: got more or fewer values than columns"),
        (WHOLE.replace("2.5", "fast"), "row 3: ms: got 'fast', expected milliseconds"),
        (WHOLE.replace("2.4", "nan"), "row 3: ms_p20: got 'nan', expected milliseconds"),
        (WHOLE.replace("1.30", "-inf"), "row 2: ms_p80: got '-inf', expected milliseconds"),
        ("", "got the columns none, expected ms and op, layer or row"),
        ("op,ms\n\xff,1\n", "got no CSV ("),
        ('op,ms\n"' + "x" * 200_000 + '",1\n', "got no CSV (field larger than field limit"),
    ],
    ids=["row cut", "last value cut", "too many", "word", "nan", "infinite", "empty", "bytes", "huge"],
)
def test_a_damaged_csv_is_found_before_anything_is_measured(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("old.csv").write_text(text, encoding="latin-1")
    assert run(["bench", "jagged", "--compare", "old.csv"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: 'old.csv'")
    assert message in err
    assert not Path("runs").exists()


def test_a_whole_csv_is_read_and_may_lack_times() -> None:
    Path("old.csv").write_text(WHOLE + "other,,,\n")
    assert [row["ms"] for row in read_rows(Path("old.csv"))] == ["1.25", "2.5", ""]


@pytest.mark.usefixtures("_may_not_write")
@pytest.mark.parametrize(
    ("look", "message"),
    [
        (
            lambda: writable("--png", Path("closed/t.png"), ".png"),
            "--png: got 'closed/t.png', which may not be written",
        ),
        (lambda: writable("--png", Path("closed.png"), ".png"), "--png: got 'closed.png', which may not be written"),
        (lambda: new_folder("--out", Path("closed/a/b")), "closed' may not be written; name another folder"),
        (lambda: readable(Path("closed.png"), "a picture"), "'closed.png': got a file that may not be read"),
    ],
    ids=["file in a closed folder", "closed file", "folder in a closed folder", "file to read"],
)
def test_what_may_not_be_written_is_said_at_once(look: Callable[[], None], message: str) -> None:
    Path("closed").mkdir()
    Path("closed.png").touch()
    with pytest.raises(ValueError, match="closed") as caught:
        look()
    assert message in str(caught.value)


def test_what_may_be_written_passes() -> None:
    writable("--png", Path("new.png"), ".png")
    new_folder("--out", Path("a/b/c"))
    assert list(Path().iterdir()) == []
