"""A long training run in pieces, on machines that are lent for minutes: each goes on where another stopped.

python recipes/gem/benchmarks/long_run.py --run-dir /tmp/long --parts parts --seconds 450 --kill-after 150 --out out

One piece: put the run folder together from the files in `--parts` (none at the first piece), train until the time is
over (the scheduler's SIGTERM: the run saves and ends), and cut the folder into files again, at most `--files` of
`--file-mib` MiB. With `--kill-after` the trainer is killed with SIGKILL that many seconds in, and started again: it
goes on from its newest whole checkpoint. Progress goes to `long_run_h200.csv` (steps, NE, throughput, memory), which
travels in the run folder, so that the last machine's has the rows of all pieces; `--out` gets a copy of it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from gemworks.gem.checkpoint import newest_whole
from gemworks.gem.layers.report import commit

# `base` with one narrow expert and fewer terms of the Kronecker sum: what a checkpoint holds, three float32 per
# parameter, is 111 MiB and fits 8 files of 16 MiB with room for the log.
SETS = (
    *("model.num_experts=1", "model.expert_dim=16", "model.kronecker_rank=2"),
    *("data.num_samples=67108864", "train.eval_every=1000000000"),
    *("train.save_every=200", "train.keep_last=1", "train.log_every=50", "train.compile=true"),
)
CSV = "long_run_h200.csv"
COLUMNS: tuple[str, ...] = (
    "piece",
    "second",
    "step",
    "samples",
    "ne",
    "loss",
    "samples_per_s",
    "step_ms",
    "memory_mib",
    "event",
    "gpu",
    "commit",
    "note",
)
TO_BE_CONTINUED = 75  # the trainer's exit code after a SIGTERM
MIB = 1 << 20


def put_together(parts: Path, run_dir: Path) -> bool:
    """The run folder from the files of the piece before; False at the first piece."""
    files = sorted(parts.glob("part.*")) if parts.is_dir() else []
    if not files:
        return False
    archive = run_dir.parent / "whole.tar"
    with archive.open("wb") as whole:
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, whole)
    run_dir.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(run_dir, filter="data")
    archive.unlink()
    return True


def cut(run_dir: Path, parts: Path, *, num_files: int, file_mib: int) -> int:
    """Cuts the folder, its newest checkpoint alone, into files; returns their number.

    Raises:
        ValueError: it takes more files than may travel.
    """
    newest = newest_whole(run_dir / "checkpoints", print)
    if newest is None:
        raise ValueError(f"run-dir: got no checkpoint in {str(run_dir)!r}, expected one; give the piece more seconds")
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    archive = parts / "whole.tar"
    with tarfile.open(archive, "w") as tar:
        for path in sorted(run_dir.rglob("*")):
            inside = path.relative_to(run_dir)
            other = inside.parts[0] == "checkpoints" and newest not in (path, *path.parents)
            if path.is_file() and not other and inside.parts[0] not in ("lock", "tensorboard"):
                tar.add(path, str(inside))
    size, limit = archive.stat().st_size, num_files * file_mib * MIB
    if size > limit:
        raise ValueError(
            f"files: got a run folder of {size / MIB:.1f} MiB, expected at most {num_files} files of {file_mib} MiB; "
            f"make the model smaller with --set, or let more files travel"
        )
    number = 0
    with archive.open("rb") as whole:
        while block := whole.read(file_mib * MIB):
            (parts / f"part.{number:03}").write_bytes(block)
            number += 1
    archive.unlink()
    return number


def visible_gpu() -> str | None:
    """The GPU that a trainer takes, as `nvidia-smi --id` wants it; None without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return visible or None


def state_of_gpu() -> tuple[str, float] | None:
    """Name and MiB in use of the GPU that is trained on; None without one."""
    gpu = visible_gpu()
    if gpu is None:
        return None
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--id={gpu}", "--query-gpu=name,memory.used", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        name, mib = said.stdout.strip().split("\n")[0].rsplit(",", 1)
        return name.strip(), float(mib)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def memory_mib(pid: int) -> float | None:
    """Of the GPU if there is one, else resident memory of the process."""
    if (state := state_of_gpu()) is not None:
        return state[1]
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
    except (OSError, IndexError):
        return None


class Piece:
    """One piece of the run.

    Args:
        args: of the command line.
        number: of this piece, from 1.
    """

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        self.args, self.number, self.began = args, number, time.monotonic()
        self.path: Path = args.run_dir / CSV
        self._last_step = 0
        if self.path.is_file():
            with self.path.open(newline="") as file:
                self._last_step = max((int(row["step"]) for row in csv.DictReader(file) if row["step"]), default=0)

    def say(self, event: str, pid: int = 0, **more: object) -> None:
        row: dict[str, object] = dict.fromkeys(COLUMNS, "")
        memory = memory_mib(pid) if pid else None
        row |= {
            "piece": self.number, "second": f"{time.monotonic() - self.began:.1f}", "event": event,
            "memory_mib": "" if memory is None else f"{memory:.0f}",
        }  # fmt: skip
        row |= {key: value for key, value in more.items() if key in COLUMNS and value is not None}
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(row)
        shutil.copyfile(self.path, self.args.out / CSV)
        print(" ".join(f"{k}={v}" for k, v in row.items() if v != ""), flush=True)

    def take_progress(self, pid: int) -> None:
        """What the run's own metrics have of steps that were not told yet; those done again after a kill are old."""
        metrics = self.args.run_dir / "metrics.jsonl"
        for line in metrics.read_text().splitlines() if metrics.is_file() else ():
            row = json.loads(line)
            if "samples_per_s" in row and int(row["step"]) > self._last_step:
                self._last_step = int(row["step"])
                self.say("train", pid, **row)

    def start(self) -> subprocess.Popen[bytes]:
        args = self.args
        new = not (args.run_dir / "config.toml").exists()
        command = [sys.executable, "-W", "ignore", "-m", "gemworks.gem.train", "--run-dir", str(args.run_dir)]
        command += ["--preset", args.preset, "--set", *(SETS if not args.bare else ()), *args.sets] if new else []
        with (args.run_dir / "long_run.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def run(self) -> int:
        """Trains for the piece's time; returns 0 if the run can be gone on with or is complete."""
        args = self.args
        deadline, kill_at = self.began + args.seconds, self.began + (args.kill_after or float("inf"))
        process = self.start()
        self.say("started")
        code: int | None = None
        while True:
            code = process.poll()
            now = time.monotonic()
            self.take_progress(process.pid)
            if code is not None and code < 0 and kill_at == float("inf"):
                process = self.start()  # it was we who killed it
                self.say("started again")
            elif code is not None:
                break
            if now >= kill_at:
                kill_at = float("inf")
                process.send_signal(signal.SIGKILL)
                process.wait()
                self.say("killed")
            elif now >= deadline:
                process.send_signal(signal.SIGTERM)
                code = process.wait(timeout=args.grace)
                self.take_progress(process.pid)
                break
            time.sleep(args.poll)
        self.say(f"ended with code {code}")
        return 0 if code in (0, TO_BE_CONTINUED) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, help="where the run's folder lies on this machine")
    parser.add_argument("--parts", type=Path, required=True, help="the files that travel: read first, written last")
    parser.add_argument("--seconds", type=float, default=450.0, help="of training in this piece")
    parser.add_argument("--kill-after", type=float, help="kill the trainer once, this many seconds in")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--file-mib", type=int, default=16)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--bare", action="store_true", help="leave out this script's own settings")
    parser.add_argument("--grace", type=float, default=90.0, help="seconds that saving may take")
    parser.add_argument("--poll", type=float, default=1.0)
    parser.add_argument("--note", default="", help="what else the machine did, for the CSV")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of a copy of the CSV")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    args.run_dir.mkdir(parents=True, exist_ok=True)
    resumed = put_together(args.parts, args.run_dir)
    earlier = args.run_dir / CSV
    numbers = []
    if earlier.is_file():
        with earlier.open(newline="") as file:
            numbers = [int(row["piece"]) for row in csv.DictReader(file)]
    piece = Piece(args, max(numbers, default=0) + 1)
    state = state_of_gpu()
    what = {"gpu": state[0] if state else "", "commit": commit(), "note": args.note}
    piece.say("resumed from files" if resumed else "first piece", **what)
    code = piece.run()
    number = cut(args.run_dir, args.parts, num_files=args.files, file_mib=args.file_mib)
    print(f"cut into {number} files")
    return code


if __name__ == "__main__":
    sys.exit(main())
