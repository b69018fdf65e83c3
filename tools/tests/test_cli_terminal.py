"""The command in a real terminal of 80 columns, and piped: width, colour, progress, exit codes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

pytestmark = pytest.mark.reference

PROGRAM = "from gemworks.cli.app import main; main()"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PLAIN = {"\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[3m", "\x1b[1;2m", "\x1b[2;3m"}  # bold, faint and italic are no colours
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def environment(**more: str) -> dict[str, str]:
    """Without what would tell the program about width and colour."""
    hidden = ("COLUMNS", "LINES", "NO_COLOR", "TERMINAL_WIDTH", "FORCE_COLOR", "TERM")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | more


def in_terminal(*arguments: str, columns: int = 80, program: str = PROGRAM, **more: str) -> tuple[int, str]:
    """Run the command with all three streams on a new pseudo-terminal; its exit code and what it showed."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, "-c", program, *arguments]
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment(**more))
    os.close(slave)
    shown = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:  # Linux says EIO when the other end is closed
            break
        if not block:
            break
        shown += block
    os.close(master)
    return child.wait(), shown.decode("utf-8").replace("\r\n", "\n")


def piped(*arguments: str, program: str = PROGRAM, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, check=False)


# Every command of the tree, one after the other; the exit codes at the end.
ALL = """
import typer.main
from gemworks.cli.app import app, run

def walk(command, path):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, [*path, name])

codes = [run([*path, "--help"]) for path in walk(typer.main.get_command(app), [])]
print(len(codes), set(codes))
"""


def test_help_of_every_command_fits_80_columns_in_colour() -> None:
    code, text = in_terminal(program=ALL)
    assert code == 0
    assert len(COLOUR.findall(text)) > 1000
    lines = CONTROL.sub("", text).splitlines()
    assert max(map(len, lines)) == 80
    number, codes = lines[-1].split(maxsplit=1)
    assert (int(number) > 20, codes) == (True, "{0}")


def test_help_of_every_command_without_colour_and_piped() -> None:
    code, text = in_terminal(program=ALL, NO_COLOR="1")
    assert code == 0
    assert set(COLOUR.findall(text)) <= PLAIN
    done = piped(program=ALL)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stdout.endswith("{0}\n")


def test_tables_shrink_to_the_terminal_and_no_color_is_honoured() -> None:
    code, text = in_terminal("mfu", "--preset", "tiny", "--step-ms", "10", columns=40, NO_COLOR="1")
    assert code == 0
    assert "MFU" in text
    assert set(COLOUR.findall(text)) <= PLAIN
    assert max(map(len, CONTROL.sub("", text).splitlines())) <= 46  # the last line is a sentence


def test_a_terminal_that_cannot_show_a_character_shows_another() -> None:
    """Bars and frames are no ASCII; where an old locale has nothing else, a question mark stands there."""
    done = piped("data", "inspect", "--preset", "tiny", "--max-samples", "64", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?????" in done.stdout


def test_a_narrow_terminal_folds_names_and_cuts_none() -> None:
    code, text = in_terminal("doctor", columns=40, NO_COLOR="1")
    assert code == 0
    table = CONTROL.sub("", text).partition("python 3")[0]
    assert "\u2026" not in table
    assert max(map(len, table.splitlines())) <= 40


def test_wrong_input_is_red_on_a_terminal() -> None:
    code, text = in_terminal("config", "--preset", "smal")
    assert code == 2
    assert text.startswith("\x1b[31merror: preset: got 'smal'")


def test_piped_is_plain_text() -> None:
    for arguments in (["plan", "simulate", "--help"], ["config", "--preset", "tiny"]):
        done = piped(*arguments)
        assert done.returncode == 0
        assert done.stdout
        assert "\x1b" not in done.stdout + done.stderr
    wrong = piped("config", "--preset", "smal")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: preset: got 'smal'")


def test_a_closed_pipe_is_no_traceback() -> None:
    """`gemworks ... | head -1`"""
    command = f'"{sys.executable}" -c "{PROGRAM}" plan ranks --cluster h200 --gpus 8 --shard 8 --json | head -1'
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


# The commands that run something, one after the other; a line with the exit code of each.
REAL = """
import json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from gemworks.cli.app import run

model = "torch.nn.Linear(128, 128), [torch.randn(64, 128)]"
Path("probed.py").write_text(f"import torch\\n\\ndef make():\\n    return {model}\\n")
sys.path.insert(0, ".")
kernel = {"ph": "X", "cat": "kernel", "name": "n" * 200, "dur": 5.0, "args": {"stream": 7}}
kernels = [kernel | {"ts": 9.0 * i} for i in range(9)]
Path("trace.json").write_text(json.dumps({"traceEvents": kernels, "deviceProperties": [{"id": 0, "numSms": 132}]}))
SETS = "data.num_samples=128 data.batch_size=32 data.max_length=8 data.prefetch=0 model.dim=32 train.max_steps=2"
HOST = "--cluster h200 --gpus 8 --shard 8 --table-group 4 --replica-shard 2"
for line in (
    f"train --preset tiny --set {SETS} --run-dir first",
    "eval first",
    "checkpoint inspect first",
    "checkpoint convert first dense.safetensors",
    "checkpoint reshard first second --parts 2",
    "probe probed:make --candidate mxfp8 --min-sqnr-db 10",
    "trace trace.json",
    "mfu --preset tiny --step-ms 10",
    "plan simulate --gpus 64 --shard 64",
    f"plan ranks {HOST} --rank 3",
    "plan search --gpus 64 --keep 2 --top 3",
):
    print("CODE", run(line.split()), *line.split()[:2], flush=True)
"""


@pytest.mark.parametrize(
    "where", ["terminal", *(pytest.param(w, marks=pytest.mark.slow) for w in ("no colour", "piped"))]
)
def test_commands_that_run_something(where: str, tmp_path: Path) -> None:
    """Nothing that they print is wider than the terminal; NO_COLOR means none; piped text is plain and not folded."""
    if where == "piped":
        done = piped(program=REAL)
        assert "\x1b" not in done.stdout + done.stderr
        code, text = done.returncode, done.stdout
    else:
        code, text = in_terminal(program=REAL, NO_COLOR="1") if where == "no colour" else in_terminal(program=REAL)
        colours = set(COLOUR.findall(text)) - PLAIN
        assert (colours == set()) == (where == "no colour"), colours
    assert code == 0, text[-3000:]
    shown = CONTROL.sub("", text)
    codes = re.findall(r"^CODE (\d+) (\w+)", shown, re.MULTILINE)
    expected = ["train", "eval", *["checkpoint"] * 3, "probe", "trace", "mfu", *["plan"] * 3]
    assert [name for _, name in codes] == expected
    assert {exit_code for exit_code, _ in codes} == {"0"}, shown[-3000:]
    wide = [line for line in re.split(r"[\r\n]", shown) if len(line) > 80]
    if where == "piped":  # a program that reads lines finds a kernel or a layer's format in one
        assert any("wgrad" in line for line in wide)
        assert any("nnn..." in line for line in wide)
    else:
        assert wide == []


# A benchmark program of two steps, in the place of gemworks.jagged.bench.
SUITE = """
from gemworks.cli import app, bench
bench.SUITES = {"jagged": bench.Suite("two_steps", lambda folder: str(folder / "jagged.csv"), (), "")}
app.main()
"""
TWO_STEPS = """
import sys, time
print("[1/2] first", flush=True)
time.sleep(0.4)
print("[2/2] second", flush=True)
time.sleep(0.4)
open(sys.argv[-1], "w").write("op,ms\\nfirst,1\\nsecond,2\\n")
"""


def test_bench_shows_progress_in_one_line(tmp_path: Path) -> None:
    """On a terminal a bar moves with the program's steps and is gone at the end; the table stays."""
    (tmp_path / "two_steps.py").write_text(TWO_STEPS)
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    code, text = in_terminal("bench", "jagged", "--out", str(tmp_path / "out"), program=SUITE, PYTHONPATH=path)
    assert code == 0
    shown = CONTROL.sub("", text)
    assert re.search(r"\d:\d\d:\d\d ━+╺?━+ bench jagged: \[2/2\] second", shown)
    drawn = shown.removesuffix(f"written to {tmp_path / 'out'}\n")  # a path is as long as it is
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]", drawn))
    stays = shown.split("\r")[-1].splitlines()
    assert stays[0].strip() == "bench jagged: 2 rows"
    assert stays[-1] == f"written to {tmp_path / 'out'}"
