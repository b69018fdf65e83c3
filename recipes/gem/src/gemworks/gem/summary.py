"""The result of a run: `summary.json` and the table that is printed at the end."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch
from gemworks.gem.baselines import BaselineResult, as_dict
from gemworks.gem.config import GemConfig
from gemworks.gem.metrics import Predictions, paired_bootstrap
from gemworks.gem.reporting import si
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor

PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "numpy", "gemworks-gem", "gemworks-jagged")


def versions() -> dict[str, str]:
    """Versions of what decides the numbers; a package that runs from its source tree has no version."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "source tree" if name.startswith("gemworks") else "not installed"
    found["torch"] = torch.__version__
    return found


def comparison(test: Predictions, baselines: list[BaselineResult], seed: int) -> dict[str, Any]:
    """The model against every baseline, on the same samples of the test part.

    Returns:
        `baseline_ne`, `baseline_auc`, `history_baseline_ne`, `history_baseline_auc` (None without baselines), details
        per baseline, and the gain over each with its paired 95 % bootstrap interval.
    """
    logits_NK, labels_NK, _ = test.tensors()
    result: dict[str, Any] = {
        f"{key}_{what}": None for key in ("baseline", "history_baseline") for what in ("ne", "auc")
    }
    details: dict[str, Any] = {}
    for item in baselines:
        name, best = item.strongest.name, item.strongest
        key = "baseline" if name == "identity" else f"{name}_baseline"
        result |= {f"{key}_ne": best.test.ne, f"{key}_auc": best.test.auc}
        details[name] = as_dict(item) | {
            "gain": _gain(logits_NK[:, 0], best.test_logits_N, labels_NK[:, 0], best.test.ne, seed)
        }
    return result | {"baselines": details}


def _gain(model_N: Tensor, baseline_N: Tensor, labels_N: Tensor, baseline_ne: float, seed: int) -> dict[str, Any]:
    interval = paired_bootstrap(model_N, baseline_N, labels_N, seed=seed)
    return {
        "ne_difference": interval.difference,
        "ne_difference_low": interval.low,
        "ne_difference_high": interval.high,
        "confidence": interval.confidence,
        "num_resamples": interval.num_resamples,
        "excludes_zero": interval.excludes_zero,
        "ne_gain_percent": -100.0 * interval.difference / baseline_ne,
    }


def run_facts(config: GemConfig, device: str, num_dense: int, num_table: int) -> dict[str, Any]:
    """What was run, on what."""
    return {
        "preset": config.preset,
        "source": config.data.source,
        "device": device,
        "num_threads": torch.get_num_threads(),
        "num_dense_parameters": num_dense,
        "num_table_parameters": num_table,
        "seeds": {"train": config.train.seed, "data": config.data.seed},
        "versions": versions(),
    }


def table(summary: dict[str, Any]) -> RenderableType:
    """The summary for people."""
    grid = Table(title=f"GEM {summary['preset']} on {summary['source']}, test part", title_justify="left")
    gain_column = ["GEM's NE gain, 95 % interval"] if summary["baselines"] else []
    for name in ("", "NE", "AUC", "calibration", *gain_column):
        grid.add_column(name, justify="right" if name else "left")
    names = {"identity": "logistic regression: identity", "history": "logistic regression: identity + history"}
    for name, item in summary["baselines"].items():
        gain = item["gain"]
        low, high = (-100.0 * gain[f"ne_difference_{end}"] / item["ne"] for end in ("high", "low"))
        grid.add_row(
            names.get(name, name),
            f"{item['ne']:.4f}",
            f"{item['auc']:.4f}",
            "",
            f"{gain['ne_gain_percent']:+.2f} % [{low:+.2f}, {high:+.2f}]",
        )
    if summary.get("bayes_ne") is not None:
        grid.add_row("Bayes (all there is to know)", f"{summary['bayes_ne']:.4f}", "", "")
    for name, task in summary["tasks"].items():
        cells = ["-" if task[key] is None else f"{task[key]:.4f}" for key in ("ne", "auc", "calibration")]
        style = "bold" if name == summary["task"] else ""
        grid.add_row(f"GEM: {name}", *cells, style=style)
    work = si(summary["flops_per_s"], "FLOP/s") + (
        "" if summary["mfu"] is None else f", MFU {100 * summary['mfu']:.1f} %"
    )
    speed = (
        f"best step {summary['best_step']} of {summary['num_steps']}, {summary['train_seconds']:.0f} s, "
        f"{si(summary['samples_per_s'])} samples/s, {si(summary['tokens_per_s'])} tokens/s, {work}, "
        f"{summary['step_ms']:.0f} ms/step on {summary['device']}"
    )
    return Group(grid, speed)
