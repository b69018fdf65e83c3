"""Trains one model per seed and recipe, evaluates all on the same held-out samples, and says how far their NE differ.

    python recipes/gem/benchmarks/loss_parity.py --preset tiny --out docs/measured/loss_parity_movielens_cpu.csv \
        --set data.source=movielens --recipes bf16 mxfp8 --seeds 0
    python recipes/gem/benchmarks/loss_parity.py --preset base --out docs/measured/loss_parity_h200.csv \
        --recipes bf16 mxfp8 mxfp8_regroup128 fp8_block128 mxfp8_floor --seeds 0 1 2 3 4

The first recipe is the one that the others are compared with: same seed, same initial weights, same batches; another
seed has other weights and other batches, and the held-out samples are the same for all. A row per
seed and recipe: NE of the primary task, its difference in per cent of the first recipe's NE with a paired 95 %
interval over samples (bootstrap or normal); behind them a row per recipe with the mean over seeds and its 95 % interval
(Student's t). `mxfp8_floor` is `mxfp8` with scale mode floor, which saturates. `NAME.curves.csv` beside the rows has
loss and NE of every step's samples, before they are trained on; `loss_parity_plot.py` draws both.

A finished model leaves its predictions in `--work` and is not trained again: a run that was cut off goes on where it
was. Rows and curves are those of the models that exist, written again whenever one more does. `--jobs` processes train
at a time, seed by seed; on a GPU small models leave most of it idle, so several at once cost little more than one.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
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
from loss_parity_batches import StoredBatches, rows_read, training_start
from loss_parity_plot import plot, read, seeds_interval
from torch import Tensor

COLUMNS = (
    "recipe", "seed", "ne", "ne_difference_percent", "low_percent", "high_percent", "num_layers", "preset", "source",
    "num_samples", "num_steps", "batch_size", "dtype", "device", "seconds", "command", "commit", "torch",
)  # fmt: skip
CURVE_COLUMNS = ("recipe", "seed", "step", "examples", "loss", "ne")
Point = tuple[int, float, float]  # examples so far; loss and NE of the last step's


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
    if not path.exists():
        recipe(name.removesuffix("_floor"), name=name, scale_mode="floor").save_file(path)
    return str(path)


def train(config: GemConfig, source: Any, device: torch.device) -> tuple[Tensor, Tensor, list[Point], int]:
    """Logits and labels of the primary task on the test part, the curve, and how many linears differ."""
    from gemworks.precision.convert import MXLinear

    trainer = Trainer(config, source, device)
    first, _ = training_start(config, trainer.loader)
    trainer.loader.position = first
    curve: list[Point] = []
    for _ in trainer.steps():
        row = trainer.take_row()  # waits for the step: its loss belongs to no other
        curve.append((trainer.loader.num_given - first, row.loss, row.ne))
    predictions = evaluate(trainer.model, source, config, "test", device)
    logits_NK, labels_NK, _ = predictions.tensors()
    converted = sum(isinstance(module, MXLinear) for module in trainer.model.modules())
    return logits_NK[:, 0].cpu(), labels_NK[:, 0].cpu(), curve, converted


def result_path(work: Path, name: str, seed: int) -> Path:
    """Where a model's predictions are kept."""
    return work / f"{name}-{seed}.pt"


def config_of(name: str, seed: int, chosen: argparse.Namespace) -> GemConfig:
    """The configuration of a model."""
    kernels = []
    if name != "bf16":
        linears = json.dumps(named_recipe(name, chosen.work))
        kernels = [f"kernels.linears={linears}", f"kernels.linears_min_features={chosen.min_features}"]
    return load_config(chosen.preset, sets=[*chosen.sets, f"train.seed={seed}", *kernels])


def source_of(config: GemConfig, chosen: argparse.Namespace) -> StoredBatches:
    """The data, of which every batch is made once."""
    return StoredBatches(open_source(config.data), chosen.work / "batches")


def make_batches(share: int, seeds: Sequence[int], chosen: argparse.Namespace) -> None:
    """One of `chosen.jobs` shares of the batches that models of these seeds will read."""
    for seed in seeds:
        config = config_of(chosen.recipes[0], seed, chosen)
        source = source_of(config, chosen)
        for split, rows_B in itertools.islice(rows_read(config, source), share, None, chosen.jobs):
            source.read(split, rows_B)


def run_one(name: str, seed: int, chosen: argparse.Namespace) -> str:
    """Train and evaluate one model, and leave what it predicted in the work folder; returns a line about it."""
    config = config_of(name, seed, chosen)
    device = resolve_device(config.train.device)
    start = time.perf_counter()
    logits, labels, curve, converted = train(config, source_of(config, chosen), device)
    facts = {
        "num_layers": converted,
        "preset": chosen.preset,
        "source": config.data.source,
        "num_samples": labels.numel(),
        "num_steps": len(curve),
        "batch_size": config.data.batch_size,
        "dtype": config.train.dtype,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "seconds": round(time.perf_counter() - start, 1),
        "commit": commit(),  # of the model: a run that goes on may be of a later one
        "torch": str(torch.__version__),
    }
    path = result_path(chosen.work, name, seed)
    torch.save({"logits": logits, "labels": labels.to(torch.uint8), "curve": curve, "facts": facts}, f"{path}.part")
    os.replace(f"{path}.part", path)  # never half a file
    used = f", {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB" if device.type == "cuda" else ""
    return f"trained {name}, seed {seed}: {facts['seconds']} s{used}"


def run_missing(chosen: argparse.Namespace) -> list[str]:
    """Train what has no predictions yet, seed by seed, so that a run that is cut off has whole pairs; rows are written
    as models come. Returns what failed."""
    missing = [
        (name, seed)
        for seed in chosen.seeds
        for name in chosen.recipes
        if not result_path(chosen.work, name, seed).exists()
    ]
    if not missing:
        return []
    for name, _ in missing:
        named_recipe(name, chosen.work)  # here, so that no two processes write one file
    failed: list[str] = []
    # New interpreters: a process that was forked cannot use CUDA after its parent did.
    with ProcessPoolExecutor(chosen.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        seeds = list(dict.fromkeys(seed for _, seed in missing))
        shares = [pool.submit(make_batches, share, seeds, chosen) for share in range(chosen.jobs)]
        models = {pool.submit(run_one, name, seed, chosen): f"{name}, seed {seed}" for name, seed in missing}
        for done in as_completed(models):
            error = done.exception()
            if error is None:
                print(done.result(), flush=True)
                write_all(chosen)
            else:
                failed.append(f"{models[done]}: {type(error).__name__}: {error}")
                print(f"failed: {failed[-1]}", flush=True)
        failed += [f"batches: {error}" for share in shares if (error := share.exception()) is not None]
    if not failed:
        shutil.rmtree(chosen.work / "batches", ignore_errors=True)
    return failed


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


@functools.cache
def result_of(path: Path) -> dict[str, Any]:
    """What a model left."""
    return torch.load(path, weights_only=True)


@functools.cache
def row_of(path: Path, first: Path | None, num_resamples: int) -> dict[str, Any]:
    """NE of a model, and its difference to the first recipe's."""
    result = result_of(path)
    logits, labels = result["logits"], result["labels"].float()
    row: dict[str, Any] = {"ne": normalized_entropy(logits, labels), **result["facts"]}
    if first is not None:
        of_first = result_of(first)["logits"]
        base = normalized_entropy(of_first, labels)
        low, high = samples_interval(logits, of_first, labels, num_resamples)
        row["ne_difference_percent"] = 100 * (row["ne"] - base) / base
        row["low_percent"], row["high_percent"] = 100 * low / base, 100 * high / base
    return row


def collect(chosen: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, list[float]], list[dict[str, Any]]]:
    """Rows, differences by recipe, and the curves, of the models that exist."""
    rows: list[dict[str, Any]] = []
    differences: dict[str, list[float]] = {}
    curves: list[dict[str, Any]] = []
    for seed in chosen.seeds:
        first = result_path(chosen.work, chosen.recipes[0], seed)
        for name in chosen.recipes:
            path = result_path(chosen.work, name, seed)
            if not path.exists():
                continue
            paired = first if path != first and first.exists() else None
            row = {"recipe": name, "seed": seed, **row_of(path, paired, chosen.resamples)}
            if paired is not None:
                differences.setdefault(name, []).append(row["ne_difference_percent"])
            rows.append(row)
            curves += [
                {
                    "recipe": name,
                    "seed": seed,
                    "step": step,
                    "examples": examples,
                    "loss": f"{loss:.6g}",
                    "ne": f"{ne:.6g}",
                }
                for step, (examples, loss, ne) in enumerate(result_of(path)["curve"], 1)
            ]
    return rows, differences, curves


def write_all(chosen: argparse.Namespace) -> dict[str, list[float]]:
    """Rows and curves of the models that exist; returns the differences by recipe."""
    rows, differences, curves = collect(chosen)
    write(chosen.out, rows, differences)
    write_rows(chosen.out.with_suffix(".curves.csv"), CURVE_COLUMNS, curves)
    return differences


def main(arguments: list[str] | None = None) -> int:
    """Train what is missing, then write rows and plot; 1 if a model failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "mxfp8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], dest="sets", metavar="A.B=C")
    parser.add_argument("--min-features", type=int, default=128, help="narrower linears stay in bf16")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--resamples", type=int, default=2000, help="of the bootstrap over samples; 0: normal interval")
    parser.add_argument("--work", type=Path, help="folder of predictions; beside the CSV if not named")
    parser.add_argument("--collect-only", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    if chosen.jobs < 1:
        parser.error(f"--jobs: got {chosen.jobs}, expected at least 1")
    chosen.work = chosen.work or chosen.out.with_suffix("")
    for folder in (chosen.out.parent, chosen.work):
        folder.mkdir(parents=True, exist_ok=True)
    settings = json.dumps({"preset": chosen.preset, "sets": chosen.sets, "min_features": chosen.min_features})
    remembered = chosen.work / "settings.json"
    if not remembered.exists():
        remembered.write_text(settings)
    elif remembered.read_text() != settings:
        parser.error(f"--work: {chosen.work} has models of {remembered.read_text()}, expected {settings}; name another")
    failed = [] if chosen.collect_only else run_missing(chosen)
    differences = write_all(chosen)
    plot(read(chosen.out), read(chosen.out.with_suffix(".curves.csv")), chosen.out.with_suffix(".png"))
    for name, values in differences.items():
        mean, low, high = seeds_interval(values)
        print(f"{name}: mean NE difference {mean:+.4f} % [{low:.4f}, {high:.4f}] over {len(values)} seeds", flush=True)
    return 1 if failed else 0


def write(path: Path, rows: list[dict[str, Any]], differences: dict[str, list[float]]) -> None:
    """Rows of single models, and of what is known of each recipe over seeds, with the commits of all its models."""
    command = {"command": "python " + " ".join(sys.argv)}
    means = []
    for name, values in differences.items():
        if len(values) > 1:
            mean, low, high = seeds_interval(values)
            percent = {"ne_difference_percent": mean, "low_percent": low, "high_percent": high}
            models = [row for row in rows if row["recipe"] == name and "ne_difference_percent" in row]
            of = {
                key: ", ".join(dict.fromkeys(row[key] for row in models if key in row)) for key in ("commit", "torch")
            }
            means.append({"recipe": name, "seed": f"mean of {len(values)}", **percent, **of})
    write_rows(path, COLUMNS, [row | command for row in [*rows, *means]])


def write_rows(path: Path, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
    """A CSV, replaced whole: who reads while models come sees no half of it."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, path)


if __name__ == "__main__":
    sys.exit(main())
