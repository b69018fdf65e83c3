"""Trains one model per seed and recipe, evaluates all on the same held-out samples, and says how far their NE differ.

    python recipes/gem/benchmarks/loss_parity.py --preset tiny --out docs/measured/loss_parity_movielens_cpu.csv \
        --set data.source=movielens --recipes bf16 mxfp8 --seeds 0
    python recipes/gem/benchmarks/loss_parity.py --preset base --out docs/measured/loss_parity_h200.csv \
        --recipes bf16 mxfp8 mxfp8_regroup128 fp8_block128 mxfp8_floor --seeds 0 1 2 3 4

The first recipe is the one that the others are compared with: same seed, same initial weights, same batches. A row per
seed and recipe: NE of the primary task, its difference in per cent of the first recipe's NE with a paired 95 %
interval over samples (bootstrap or normal); behind them a row per recipe with the mean over seeds and its 95 % interval
(Student's t). `mxfp8_floor` is `mxfp8` with scale mode floor, which saturates. `--curve` also writes the training
losses (`NAME.curves.csv`) and plots the differences to the first recipe (`loss_parity_plot.py`).

A finished model leaves its predictions in `--work`, and is not trained again: a run that was cut off goes on where it
was, and rows are those of the models that exist. `--jobs` processes train models at a time; on a
GPU small models leave most of it idle, so several at once cost little more than one.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gemworks.gem.config import GemConfig
from gemworks.gem.data import open_source
from gemworks.gem.device import resolve_device
from gemworks.gem.evaluate import evaluate
from gemworks.gem.metrics import normalized_entropy, paired_bootstrap
from gemworks.gem.presets import load_config
from gemworks.gem.trainer import Trainer
from gemworks.precision import recipe
from loss_parity_plot import plot, read, seeds_interval
from torch import Tensor

COLUMNS = (
    "recipe", "seed", "ne", "ne_difference_percent", "low_percent", "high_percent", "num_layers", "preset", "source",
    "num_samples", "num_steps", "batch_size", "dtype", "device", "seconds", "command", "commit", "torch",
)  # fmt: skip


def commit() -> str:
    """The checkout's commit: of git, or what GEMWORKS_COMMIT says."""
    if "GEMWORKS_COMMIT" in os.environ:
        return os.environ["GEMWORKS_COMMIT"]
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def named_recipe(name: str, folder: Path) -> str:
    """What `kernels.linears` takes for a name of ours: a preset's name, or the path of a recipe file."""
    if not name.endswith("_floor"):
        return name
    path = folder / f"{name}.toml"
    recipe(name.removesuffix("_floor"), name=name, scale_mode="floor").save_file(path)
    return str(path)


def train(config: GemConfig, source: Any, device: torch.device) -> tuple[Tensor, Tensor, list[float], int]:
    """Logits and labels of the primary task on the test part, the losses of the steps, and how many linears differ."""
    from gemworks.precision.convert import MXLinear

    trainer = Trainer(config, source, device)
    losses: list[float] = []
    before = 0.0
    for _ in trainer.steps():
        losses.append(trainer._window_loss - before)
        before = trainer._window_loss
    predictions = evaluate(trainer.model, source, config, "test", device)
    logits_NK, labels_NK, _ = predictions.tensors()
    converted = sum(isinstance(module, MXLinear) for module in trainer.model.modules())
    return logits_NK[:, 0].cpu(), labels_NK[:, 0].cpu(), losses, converted


class Remembering:
    """A source that keeps the batches it has made: the models of one process read the same ones."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._batches: dict[tuple[str, bytes], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, split: str, rows_B: Any) -> Any:
        """The batch of these rows, made once."""
        key = split, rows_B.tobytes()
        if key not in self._batches:
            self._batches[key] = self._source.read(split, rows_B)
        return self._batches[key]


def run_one(name: str, seed: int, chosen: argparse.Namespace, sources: dict[str, Any]) -> None:
    """Train and evaluate one model, and leave what it predicted in the work folder."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = []
        if name != "bf16":
            kernels = [
                f"kernels.linears={json.dumps(named_recipe(name, Path(folder)))}",
                f"kernels.linears_min_features={chosen.min_features}",
            ]
        config = load_config(chosen.preset, sets=[*chosen.sets, f"train.seed={seed}", *kernels])
        device = resolve_device(config.train.device)
        start = time.perf_counter()
        source = sources.setdefault("source", Remembering(open_source(config.data)))
        logits, labels, losses, converted = train(config, source, device)
    facts = {
        "num_layers": converted,
        "preset": chosen.preset,
        "source": config.data.source,
        "num_samples": labels.numel(),
        "num_steps": len(losses),
        "batch_size": config.data.batch_size,
        "dtype": config.train.dtype,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "seconds": round(time.perf_counter() - start, 1),
    }
    path = result_path(chosen.work, name, seed)
    torch.save({"logits": logits, "labels": labels.to(torch.uint8), "losses": losses, "facts": facts}, f"{path}.part")
    os.replace(f"{path}.part", path)  # never half a file
    print(f"trained {name}, seed {seed}: {facts['seconds']} s", flush=True)


def result_path(work: Path, name: str, seed: int) -> Path:
    """Where a model's predictions are kept."""
    return work / f"{name}-{seed}.pt"


def run_missing(chosen: argparse.Namespace, arguments: list[str]) -> None:
    """Train what has no predictions yet, seed by seed, so that a run that is cut off has whole pairs."""
    missing = {
        seed: [name for name in chosen.recipes if not result_path(chosen.work, name, seed).exists()]
        for seed in chosen.seeds
    }
    if chosen.jobs == 1:
        sources: dict[str, Any] = {}
        for seed, names in missing.items():
            for name in names:
                run_one(name, seed, chosen, sources)
        return

    def start(job: tuple[int, list[str]]) -> None:
        seed, names = job
        # Later arguments replace earlier ones.
        one = [*arguments, "--recipes", *names, "--seeds", str(seed), "--jobs", "1", "--train-only"]
        done = subprocess.run([sys.executable, __file__, *one], capture_output=True, text=True, check=False)
        said = done.stdout if done.returncode == 0 else f"{done.stdout}failed: {job}: {done.stderr[-2000:]}"
        print(said.strip(), flush=True)

    size = chosen.models_per_job
    jobs = [(seed, names[i : i + size]) for seed, names in missing.items() for i in range(0, len(names), size)]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        list(pool.map(start, jobs))


def samples_interval(logits: Tensor, first: Tensor, labels: Tensor, num_resamples: int) -> tuple[float, float]:
    """95 % interval of NE(logits) - NE(first) over samples: a paired bootstrap or, with no resamples, the normal
    interval of the mean difference of losses (the same to three digits from some thousands of samples on)."""
    if num_resamples:
        interval = paired_bootstrap(logits, first, labels, num_resamples=num_resamples)
        return interval.low, interval.high
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    target = labels.double()
    differences = loss(logits.double(), target, reduction="none") - loss(first.double(), target, reduction="none")
    rate = target.mean()
    entropy = -(rate * rate.log() + (1 - rate) * (1 - rate).log()).item()
    half = 1.96 * differences.std().item() / math.sqrt(len(differences))
    mean = differences.mean().item()
    return (mean - half) / entropy, (mean + half) / entropy


def collect(chosen: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, list[float]], list[dict[str, Any]]]:
    """Rows, differences by recipe, and the losses of all steps, of the models that exist."""
    rows: list[dict[str, Any]] = []
    differences: dict[str, list[float]] = {}
    curves: list[dict[str, Any]] = []
    for seed in chosen.seeds:
        first: Tensor | None = None
        base = math.nan
        for name in chosen.recipes:
            path = result_path(chosen.work, name, seed)
            if not path.exists():
                continue
            result = torch.load(path, weights_only=True)
            logits, labels = result["logits"], result["labels"].float()
            ne = normalized_entropy(logits, labels)
            row: dict[str, Any] = {"recipe": name, "seed": seed, "ne": ne, **result["facts"]}
            losses = enumerate(result["losses"], 1)
            curves += [{"recipe": name, "seed": seed, "step": step, "loss": f"{loss:.6g}"} for step, loss in losses]
            if name == chosen.recipes[0]:
                first, base = logits, ne
            elif first is not None:
                low, high = samples_interval(logits, first, labels, chosen.resamples)
                row["ne_difference_percent"] = 100 * (ne - base) / base
                row["low_percent"], row["high_percent"] = 100 * low / base, 100 * high / base
                differences.setdefault(name, []).append(row["ne_difference_percent"])
            rows.append(row)
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return rows, differences, curves


def main(arguments: list[str] | None = None) -> int:
    """Train what is missing, then write rows and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "mxfp8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], dest="sets", metavar="A.B=C")
    parser.add_argument("--min-features", type=int, default=128, help="narrower linears stay in bf16")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--models-per-job", type=int, default=1, help="one after another in a process; data made once")
    parser.add_argument("--resamples", type=int, default=2000, help="of the bootstrap over samples; 0: normal interval")
    parser.add_argument("--work", type=Path, help="folder of predictions; beside the CSV if not named")
    parser.add_argument("--train-only", action="store_true", help="write no rows")
    parser.add_argument("--collect-only", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--curve", action="store_true", help="also write the training losses, and plot differences")
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = parser.parse_args(arguments)
    if min(chosen.jobs, chosen.models_per_job) < 1:
        parser.error(f"--jobs, --models-per-job: got {chosen.jobs}, {chosen.models_per_job}, expected at least 1")
    chosen.work = chosen.work or chosen.out.with_suffix("")
    for folder in (chosen.out.parent, chosen.work):
        folder.mkdir(parents=True, exist_ok=True)
    if not chosen.collect_only:
        run_missing(chosen, arguments)
    if chosen.train_only:
        return 0
    rows, differences, curves = collect(chosen)
    write(chosen.out, rows, differences)
    if chosen.curve:
        beside = chosen.out.with_suffix(".curves.csv")
        with beside.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=["recipe", "seed", "step", "loss"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(curves)
        plot(read(chosen.out), read(beside), chosen.out.with_suffix(".png"))
    for name, values in differences.items():
        mean, low, high = seeds_interval(values)
        print(f"{name}: mean NE difference {mean:+.4f} % [{low:.4f}, {high:.4f}] over {len(values)} seeds", flush=True)
    return 0


def write(path: Path, rows: list[dict[str, Any]], differences: dict[str, list[float]]) -> None:
    """Rows of single models, and of what is known of each recipe over seeds."""
    shared = {"command": "python " + " ".join(sys.argv), "commit": commit(), "torch": torch.__version__}
    means = []
    for name, values in differences.items():
        if len(values) > 1:
            mean, low, high = seeds_interval(values)
            percent = {"ne_difference_percent": mean, "low_percent": low, "high_percent": high}
            means.append({"recipe": name, "seed": f"mean of {len(values)}", **percent})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([row | shared for row in [*rows, *means]])


if __name__ == "__main__":
    sys.exit(main())
