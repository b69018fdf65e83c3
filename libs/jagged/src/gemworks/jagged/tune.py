"""Finds the fastest configurations of the kernels on this GPU and writes them to a table; training never tunes.

    python -m gemworks.jagged.tune --out h200.json       # a named file; without --out, the user's cache
    python -m gemworks.jagged.tune --only norm --budget-s 60 --jobs 8   # eight processes compile what one then times

The shipped table stays in force until a process asks for another one by its name: `use_table("h200.json")` at its
start, before anything is compiled. Every candidate is compared with the shipped configuration before it is timed, in a
process of its own that ends at a time limit, since a wrong one can hang the device.

Letters: D width.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged.ops.attention_core import table
from torch import Tensor

SHIPPED_ATTENTION = dict(table.GLUON)
SHIPPED_FUSED = dict(table.FUSED)
NORM_WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
CASES = {"long": ("self", 256, 1024, 0), "short": ("pffn", 256, 2048, 256), "few": ("pool", 128, 2048, 64)}
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Entry:
    """One line of the table: what it is for, the configuration, its time and that of the shipped one."""

    key: str
    config: dict[str, Any]
    ms: float
    shipped_ms: float


def default_path(gpu: str) -> Path:
    """In the user's cache, one file per kind of GPU."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "gemworks" / "jagged" / f"{re.sub(r'[^a-z0-9]+', '_', gpu.lower()).strip('_')}.json"


def keys() -> list[str]:
    """What can be tuned: "attention STEP KIND LENGTHS", "fused KIND LENGTHS" and "norm forward|sums D"."""
    attention = [f"attention {' '.join(key)}" for key in SHIPPED_ATTENTION]
    attention += [f"fused {' '.join(key)}" for key in SHIPPED_FUSED]
    return attention + [f"norm {what} {width}" for what in ("forward", "sums") for width in NORM_WIDTHS]


def use_table(path: str | Path | None) -> None:
    """Put a table that was written here in force for this process; None goes back to the shipped one.

    Call it before the first kernel: what is compiled already stays.

    Raises:
        ValueError: no such file, not a table, or one with a line that this version does not know.
    """
    attention: dict[Any, table.GluonConfig] = dict(SHIPPED_ATTENTION)
    fused: dict[Any, table.FusedConfig] = dict(SHIPPED_FUSED)
    norms: dict[tuple[int, bool], dict[str, Any]] = {}
    if path is not None:
        try:
            lines = json.loads(Path(path).read_text())["entries"]
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"table: got {path}, expected a file that python -m gemworks.jagged.tune wrote; {error}"
            ) from None
        for line in lines:
            suite, *rest = line["key"].split()
            try:
                if suite == "attention" and tuple(rest) in SHIPPED_ATTENTION:
                    attention[tuple(rest)] = table.GluonConfig(**line["config"])
                elif suite == "fused" and tuple(rest) in SHIPPED_FUSED:
                    fused[tuple(rest)] = table.FusedConfig(**line["config"])
                elif suite == "norm":
                    norms[int(rest[1]), rest[0] == "sums"] = line["config"]
                else:
                    raise TypeError("unknown key")
            except TypeError as error:
                raise ValueError(f"table: {path} has {line['key']!r}: {error}; tune again with this version") from None
    table.GLUON.clear()
    table.GLUON.update(attention)
    table.FUSED.clear()
    table.FUSED.update(fused)
    from gemworks.jagged.ops.norms import configs

    configs.TUNED.clear()
    configs.TUNED.update({key: configs.NormConfig(**config) for key, config in norms.items()})


def attention_candidates(shipped: table.GluonConfig) -> Iterator[table.GluonConfig]:
    """Neighbours of the shipped configuration: tiles, stages, groups with the registers that fit them."""
    yield shipped
    groups = ((shipped.groups, shipped.registers), (2, 232), (2, 240), (3, 160))
    for block, stages, (group, registers), resident in itertools.product(
        (32, 64, 128), (2, 3, 4), dict.fromkeys(groups), (1, 2)
    ):
        yield replace(shipped, block=block, stages=stages, groups=group, registers=registers, resident_stages=resident)


def fused_candidates(shipped: table.FusedConfig) -> Iterator[table.FusedConfig]:
    yield shipped
    for stages, key_stages, early, ahead in itertools.product((2, 3), (1, 2), (False, True), (False, True)):
        yield replace(shipped, stages=stages, key_stages=key_stages, early=early, ahead=ahead)


def norm_candidates(width: int, *, sums: bool) -> Iterator[Any]:
    from gemworks.jagged.ops.norms.configs import NormConfig, norm_config

    yield norm_config(width, sums_columns=sums)
    for values, warps in itertools.product((1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8, 16)):
        if values >= width and values // (32 * warps) in ((8, 16) if sums else (16, 32, 64)):
            for stages in (1, 3) if sums else (1,):
                yield NormConfig(max(values // width, 1), warps, stages)


def attention_runner(key: str) -> tuple[Iterator[Any], Callable[[Any], Callable[[], list[Tensor]]]]:
    """Candidates of one key, and what installs one and returns a call of the step it is for."""
    from gemworks.jagged.bench.cases import Case, make_inputs
    from gemworks.jagged.bench.peers import ours

    step, kind, lengths = key.replace("fused", "attention fused").split()[1:]
    shape, batch, maximum, rows = CASES[lengths]
    op = "flash_attention" if kind == "softmax" else "gdpa"
    case = Case(op, shape, batch, maximum, "full" if shape == "pffn" else "uniform", rows=rows)
    x = make_inputs(case, torch.device("cuda"), torch.bfloat16)
    attend = ours(x).attend
    entries: Any = table.FUSED if step == "fused" else table.GLUON
    entry: Any = (kind, lengths) if step == "fused" else (step, kind, lengths)
    if step != "fused":
        table.FUSED.clear()  # it would take the place of both backward steps

    def runner(config: Any) -> Callable[[], list[Tensor]]:
        entries[entry] = config
        out = attend(*x.leaves)
        if step == "forward":
            return lambda: [attend(*(t.detach() for t in x.leaves))]
        return lambda: list(torch.autograd.grad(out, x.leaves, x.d_out, retain_graph=True))

    candidates = fused_candidates(SHIPPED_FUSED[entry]) if step == "fused" else None
    return candidates or attention_candidates(SHIPPED_ATTENTION[entry]), runner


def norm_runner(key: str) -> tuple[Iterator[Any], Callable[[Any], Callable[[], list[Tensor]]]]:
    from gemworks.jagged.ops.norms.launch import norm_backward, norm_forward

    what, width = key.split()[1], int(key.split()[2])
    x, r, dy = (torch.randn((1 << 28) // width, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)

    def runner(config: Any) -> Callable[[], list[Tensor]]:
        if what == "forward":
            return lambda: list(norm_forward(x, None, None, r, None, eps=1e-5, center=False, config=config))
        return lambda: list(norm_backward(dy, r, x, weight, x.dtype, eps=1e-5, center=True, config=config))

    return norm_candidates(width, sums=what == "sums"), runner


def tune(key: str) -> Entry:
    """The fastest candidate of one key, on this process's GPU."""
    from gemworks.jagged.bench.timing import Clock, Time

    candidates, runner = (norm_runner if key.startswith("norm") else attention_runner)(key)
    clock = Clock(torch.device("cuda"))
    expected: list[Tensor] = []
    shipped_ms, best, best_ms = float("inf"), None, float("inf")
    for config in dict.fromkeys(candidates):
        try:
            run = runner(config)
            got = run()
            if not expected:
                expected = got
            errors = [
                float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, expected, strict=True)
            ]
            if not max(errors) <= TOLERANCE:
                continue
            ms = Time.of(clock.sample(run, 8)[2:]).ms
        except (RuntimeError, ValueError) as error:  # needs more registers or shared memory than there are
            print(f"{key} {config}: {type(error).__name__}", file=sys.stderr)
            continue
        if best is None:
            shipped_ms = ms
        if ms < best_ms:
            best, best_ms = config, ms
    if best is None:
        raise RuntimeError(f"{key}: no configuration runs here")
    return Entry(key, asdict(best), best_ms, shipped_ms)


def compile_share(key: str, index: int, count: int) -> None:
    """Run every `count`-th candidate once, so that its binaries lie in Triton's cache when it is timed."""
    candidates, runner = (norm_runner if key.startswith("norm") else attention_runner)(key)
    for config in list(dict.fromkeys(candidates))[index::count]:
        try:
            runner(config)()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError):  # needs more than there is; the process that times says so
            continue


def in_a_process(key: str, limit_s: float, jobs: int = 1) -> Entry | None:
    """`tune(key)` in a child; None, with the reason on stderr, if it fails or takes longer.

    Args:
        jobs: processes that compile the candidates side by side before that.
    """
    command = [sys.executable, "-m", "gemworks.jagged.tune", "--child", key]
    deadline = time.monotonic() + limit_s
    if jobs > 1:
        compilers = [
            subprocess.Popen([*command, "--share", f"{i}/{jobs}"], stderr=subprocess.DEVNULL) for i in range(jobs)
        ]
        for compiler in compilers:
            try:
                compiler.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                compiler.kill()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1.0, deadline - time.monotonic()), check=True
        )
    except subprocess.SubprocessError as error:
        print(f"{key}: {type(error).__name__}; the shipped configuration stays", file=sys.stderr)
        return None
    return Entry(**json.loads(done.stdout.splitlines()[-1]))


def write(path: Path, entries: list[Entry], gpu: str) -> None:
    """Whole or not at all: a reader never meets half a table."""
    import triton

    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "entries": list(map(asdict, entries)),
    }
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gemworks.jagged.tune", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, help="the table; a file in the user's cache where it is not given")
    parser.add_argument("--only", default="", help="keys that contain this, e.g. 'attention forward' or 'norm'")
    parser.add_argument("--budget-s", type=float, default=900.0, help="begin no key after this many seconds")
    parser.add_argument("--limit-s", type=float, default=120.0, help="of one key")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that compile the candidates of a key side by side"
    )
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child and args.share:
        index, count = map(int, args.share.split("/"))
        compile_share(args.child, index, count)
        return 0
    if args.child:
        print(json.dumps(asdict(tune(args.child))), flush=True)
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device here: there is nothing to time", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name()
    out = args.out or default_path(gpu)
    began, entries = time.monotonic(), []
    for key in keys():
        if args.only not in key:
            continue
        if time.monotonic() - began > args.budget_s:
            print(f"{key}: not run, the budget of {args.budget_s:.0f} s is spent", flush=True)
            continue
        entry = in_a_process(key, args.limit_s, args.jobs)
        if entry is not None:
            entries.append(entry)
            print(f"{key}: {entry.shipped_ms:.4f} -> {entry.ms:.4f} ms {entry.config}", flush=True)
            write(out, entries, gpu)
    print(f"{len(entries)} lines in {out}; in force after use_table({str(out)!r})", flush=True)
    return 0 if entries else 1


if __name__ == "__main__":
    sys.exit(main())
