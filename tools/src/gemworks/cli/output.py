"""How commands print: JSON for programs, tables for people, one red line for errors."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PICTURES = (".png", ".svg", ".pdf")


def print_json(value: Any) -> None:
    """One JSON object on standard output; NaN and infinity become null."""
    from gemworks.gem.run_dir import json_ready

    print(json.dumps(json_ready(value), indent=2, allow_nan=False))


def print_lines(text: str) -> None:
    """Text on standard output. A terminal gets its lines folded between words, what continues a line further in; a
    word that is longer than the terminal, such as a path, stays whole. Programs that read a pipe get lines as they are.
    """
    columns = terminal_columns()
    if columns is not None:
        text = "\n".join(part for line in text.splitlines() for part in _fold(line, columns))
    print(text)


def terminal_columns() -> int | None:
    """Width of the terminal that standard output is; None where it is none."""
    from rich.console import Console

    return Console().width if sys.stdout.isatty() else None


def _fold(line: str, columns: int) -> list[str]:
    """
    >>> _fold("  a layer: forward 28.3 dB", 20)
    ['  a layer: forward', '      28.3 dB']
    >>> _fold("", 20)
    ['']
    """
    inner = " " * (len(line) - len(line.lstrip()) + 4)
    folded = textwrap.wrap(line, columns, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)
    return folded or [""]


def console(*, stderr: bool = False) -> Console:
    """Where tables go. Brackets and colons are text: a folder may be named [red], a column [/x] or :on:."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False)


def print_error(text: str) -> None:
    """One line on standard error, red on a terminal."""
    from gemworks.gem.errors import print_line

    print_line(f"error: {text}", sys.stderr)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides what importing other people's packages says about their own future."""
    from gemworks.gem.process import prepare_process

    prepare_process()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def writable(option: str, path: Path | None, *suffixes: str) -> None:
    """Says that a file cannot be written, before anything slow happens.

    Args:
        option: as the user typed it.
        path: the file; None asks nothing.
        suffixes: those that it may end in; none given, any.

    Raises:
        ValueError: another suffix, no such folder, a folder in the file's place, or no right to write there.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{option}: got {str(path)!r}, expected a file that ends in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ValueError(f"{option}: got {str(path)!r}, but there is no folder {str(path.parent)!r}; make it first")
    if path.is_dir():
        raise ValueError(f"{option}: got {str(path)!r}, which is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}: got {str(path)!r}, which may not be written here; name a file in another folder")


def new_folder(option: str, path: Path) -> None:
    """Says that a folder cannot be made, before anything slow happens.

    Raises:
        ValueError: a file is in its way, or the folder that it belongs in may not be written.
    """
    above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not above.is_dir():
        raise ValueError(f"{option}: got {str(path)!r}, but {str(above)!r} is a file; name another folder")
    if not os.access(above, os.W_OK):
        raise ValueError(f"{option}: got {str(path)!r}, but {str(above)!r} may not be written; name another folder")


def at_least(least: int, **numbers: int | None) -> None:
    """Says that an option's number is too small, by the name that it has on the command line.

    Raises:
        ValueError: one is; None asks nothing.

    >>> at_least(1, sync_every=0)
    Traceback (most recent call last):
    ValueError: --sync-every: got 0, expected 1 or more
    """
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ValueError(f"--{name.replace('_', '-')}: got {number}, expected {least} or more")


def readable(path: Path, expected: str) -> None:
    """Says that a file cannot be read, before torch is imported.

    Args:
        path: the file.
        expected: what it should be, such as "a trace that torch.profiler exported".

    Raises:
        ValueError: there is no such file, or this user may not read it.
    """
    if not path.is_file():
        raise ValueError(f"{str(path)!r}: got no file, expected {expected}")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{str(path)!r}: got a file that may not be read, expected {expected}")


def need(module: str, package: str) -> None:
    """Says which package a command lacks, before anything slow happens.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"this command needs {package}, which is not installed: pip install {package}")


def print_evaluation(result: dict[str, Any]) -> None:
    """The table of `gemworks eval`."""
    from rich.table import Table

    table = Table(title=f"{result['run_dir']}, {result['checkpoint']}, {result['split']} part", title_justify="left")
    for name in ("task", "NE", "AUC", "calibration", "rate", "samples"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for name, task in result["tasks"].items():
        figures = ["-" if task[key] is None else f"{task[key]:.4f}" for key in ("ne", "auc", "calibration", "rate")]
        table.add_row(name, *figures, f"{task['num_samples']:,}")
    if result["equals_training"] is not None:
        same = result["equals_training"]
        table.caption = (
            "the same figures as in training, bit for bit" if same else "not the figures reported in training"
        )
    console().print(table)


def print_checkpoints(result: dict[str, Any], *, tensors: bool) -> None:
    """The tables of `gemworks checkpoint inspect`."""
    from rich.table import Table
    from rich.text import Text

    out = console()
    table = Table(title=result["path"], title_justify="left")
    for name in ("step", "MiB", "parameters", "epoch", "position", "skipped", "is", "state"):
        table.add_column(name, justify="left" if name in ("is", "state") else "right")
    for item in result["checkpoints"]:
        names = ("num_model_parameters", "epoch", "position", "num_skipped")
        figures = [f"{item[name]:,}" if item["whole"] else "-" for name in names]
        marks = ", ".join(mark for mark in ("best", "last") if item[mark])
        state = "whole" if item["whole"] else Text("damaged", style="red")
        step = "-" if item["step"] is None else str(item["step"])
        table.add_row(step, f"{item['num_bytes'] / 2**20:.1f}", *figures, marks, state)
    out.print(table)
    for item in result["checkpoints"]:
        if not item["whole"]:
            out.print(item["problem"], style="red", highlight=False, soft_wrap=True)
    newest = result["checkpoints"][-1]
    if tensors and newest["whole"]:
        for name, shape in newest["tensors"].items():
            out.print(f"{name}  {shape}", highlight=False, soft_wrap=True)
    if result["differences"] is not None:
        for line in result["differences"] or ["no tensor differs in name or shape"]:
            out.print(line, highlight=False, soft_wrap=True)


def print_findings(findings: dict[str, Any]) -> None:
    """The tables of `gemworks doctor`."""
    from rich.table import Table
    from rich.text import Text

    out = console()
    versions = Table(title="packages", title_justify="left")
    for name in ("package", "version", "state", "what to do"):
        versions.add_column(name, overflow="fold")
    for item in findings["packages"]:
        color = {"ok": "green", "missing": "yellow", "broken": "red"}[item["state"]]
        versions.add_row(item["name"], item["version"] or "", Text(item["state"], style=color), item["advice"])
    out.print(versions)
    out.print(f"python {findings['python']} on {findings['platform']}", highlight=False)
    for device in findings["devices"]:
        links = f"; {device['links']}" if device.get("links") else ""
        out.print(f"device {device['name']}: {device['description']}{links}", highlight=False)
    ops = Table(title="which backend every op would use", title_justify="left")
    for name in ("op", "device", "backend", "dtypes or recipes"):
        ops.add_column(name, overflow="fold")
    dtypes: dict[tuple[str, str, str], list[str]] = {}
    reasons: dict[str, list[str]] = {}
    for item in findings["ops"]:
        backend = item["backend"] or "none"
        dtypes.setdefault((item["op"], item["device"], backend), []).append(item["dtype"])
        named = reasons.setdefault(f"{backend}: {item['reason']}", [])
        if item["op"] not in named:
            named.append(item["op"])
    devices: dict[tuple[str, str, str], list[str]] = {}  # equal GPUs take one line
    for (op, device, backend), names in dtypes.items():
        devices.setdefault((op, backend, ", ".join(names)), []).append(device)
    for (op, backend, names), places in devices.items():
        ops.add_row(op, ", ".join(places), backend, names)
    out.print(ops)
    _print_paragraphs("why", [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()])
    _print_paragraphs(
        "for faster backends",
        [
            f"{', '.join(item['ops'])}: {item['do'] or 'nothing to install'} ({item['why']})"
            for item in findings["advice"]
        ]
        or ["nothing: every op has the best backend that it can have here"],
    )
    _print_paragraphs("problems", findings["problems"], style="red")


def _print_paragraphs(title: str, paragraphs: Sequence[str], style: str = "") -> None:
    """A list under a title, folded to the terminal's width between words."""
    from rich.table import Table
    from rich.text import Text

    if not paragraphs:
        return
    table = Table.grid(padding=(0, 1))
    for paragraph in paragraphs:
        table.add_row("-", Text(paragraph, style=style))
    out = console()
    out.print(title, style="italic", highlight=False)
    out.print(table)
