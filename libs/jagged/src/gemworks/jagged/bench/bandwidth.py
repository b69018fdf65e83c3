"""Rows of ops that memory bounds: what they must move over the time they take, as a share of the measured copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gemworks.jagged.bench import report
from gemworks.jagged.bench.timing import Clock, time_in_turn
from torch import Tensor

Run = Callable[[], object]
Forward = Callable[..., Any]  # of the leaves, to one tensor or several


@dataclass(frozen=True)
class Subject:
    """One op of one shape: how it is run by us and by its peers.

    Attributes:
        common: columns that all of its rows share.
        ours, leaves: the op, and what it takes and differentiates.
        peers: name -> how to make (function, leaves); may raise, which becomes the reason of an empty row.
        cotangents: of ours and the peers' outputs alike.
        bytes_fwd, bytes_bwd: each tensor once.
        flops: of the forward, or None where nothing but bytes counts.
        check: of ours, before anything is timed; and of each peer's output against ours.
    """

    common: Mapping[str, str]
    ours: Forward
    leaves: list[Tensor]
    peers: Mapping[str, Callable[[], tuple[Forward, list[Tensor]]]]
    cotangents: list[Tensor]
    bytes_fwd: float
    bytes_bwd: float
    check: Callable[[list[Tensor]], None]
    flops: float | None = None
    bwd_factor: float = 2.5
    same_function: frozenset[str] = frozenset()


def assert_near(got: Tensor, truth: Tensor, what: str, bound: float = 2e-2) -> None:
    """Relative error in the norm; a benchmark whose check fails prints no number."""
    got, truth = got.detach().double(), truth.detach().double()
    error = float((got - truth).norm() / truth.norm().clamp(min=1e-30))
    if not error <= bound:
        raise AssertionError(f"{what}: relative error {error:.2e}, expected <= {bound:.0e}")


def _as_list(outs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [outs] if isinstance(outs, Tensor) else list(outs)


def _closures(run: Forward, leaves: list[Tensor], cotangents: list[Tensor]) -> tuple[dict[str, Run], list[Tensor]]:
    outs = _as_list(run(*leaves))

    def forward() -> None:
        with torch.no_grad():
            run(*leaves)

    def backward() -> object:
        return torch.autograd.grad(outs, leaves, cotangents, retain_graph=True)

    return {"fwd": forward, "bwd": backward}, outs


def set_up(subject: Subject) -> tuple[dict[str, dict[str, Run]], dict[str, str]]:
    """direction -> contender -> closure, and why the other contenders have none. Raises if ours is wrong."""
    ours, outs = _closures(subject.ours, subject.leaves, subject.cotangents)
    subject.check(outs)
    runs = {direction: {report.OURS: run} for direction, run in ours.items()}
    refusals: dict[str, str] = {}
    for name, make in subject.peers.items():
        try:
            peer, theirs = _closures(*make(), subject.cotangents)
            if name in subject.same_function:
                for got, expected in zip(theirs, outs, strict=True):
                    assert_near(got, expected, name)
            for direction, run in peer.items():
                run()
                runs[direction][name] = run
        except Exception as error:  # a peer's failure of any kind is a result, and is printed as one
            refusals[name] = _reason(error)
    return runs, refusals


def _reason(error: Exception) -> str:
    return f"cannot run: {type(error).__name__}: {' '.join(str(error).split())[:160]}"


def measure(
    subject: Subject,
    clock: Clock,
    context: report.Context,
    *,
    rounds: int,
    repeats: int,
    round_ms: float = float("inf"),
) -> list[report.Row]:
    """Rows of both directions. Raises if ours is wrong; peers that fail have their reason in place of the ratio."""
    runs, refusals = set_up(subject)
    rows = []
    for direction, by_name in runs.items():
        times, errors = time_in_turn(clock, by_name, rounds=rounds, repeats=repeats, round_ms=round_ms)
        if report.OURS in errors:
            raise errors[report.OURS]
        for name, error in errors.items():
            refusals[name] = _reason(error)
        peers = {name: t.ms for name, t in times.items() if name != report.OURS}
        best = min(peers, key=peers.__getitem__) if peers else ""
        num_bytes = subject.bytes_fwd if direction == "fwd" else subject.bytes_bwd
        flops = None if subject.flops is None else subject.flops * (subject.bwd_factor if direction == "bwd" else 1)
        for name in [*times, *(n for n in refusals if n not in times)]:
            row = dict.fromkeys(report.COLUMNS, "") | context.columns() | dict(subject.common)
            row |= {"direction": direction, "impl": name, "best_peer": best}
            if flops is not None:
                row["bwd_factor"] = str(subject.bwd_factor)
            if name not in times:
                row["ratio_to_best_peer"] = refusals[name]
            else:
                t = times[name]
                gbps = num_bytes / t.ms / 1e6
                row |= {
                    "ms": f"{t.ms:.4f}", "ms_p20": f"{t.ms_p20:.4f}", "ms_p80": f"{t.ms_p80:.4f}",
                    "tflops": "" if flops is None else f"{flops / t.ms / 1e9:.4g}", "gbps": f"{gbps:.4g}",
                    "roofline_fraction": f"{gbps / context.ceilings.copy_gbps:.3f}",
                    "ratio_to_best_peer": f"{peers[best] / t.ms:.3f}" if best else "",
                }  # fmt: skip
            rows.append(row)
    return rows
