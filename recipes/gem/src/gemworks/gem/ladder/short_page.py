"""The start of `docs/ladder.md`: what came out, and which technique is which row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemworks.gem.ladder.sequence import TARGETS, SequenceRun
from gemworks.gem.ladder.settings import OTHER_BATCHES
from gemworks.gem.ladder.tables import MAIN_LAW, Row, law_of

TECHNIQUES = """\
## Which technique is which row

| technique | row |
|---|---|
| jagged flash attention | `attention` (full), `fused_qk` |
| block attention | `attention` (block), `fused_qk` |
| sliding window | none: with a window it is a third model; the kernel's figures: [jagged](jagged.md) |
| GDPA for the PFFN and pooling | `gdpa`, `fast_gelu`, `pffn_epilogue`; pooling is softmax in this preset |
| schedules of tiles | `shared_schedule` |
| norms in one pass, bf16 stream | `norms`, `stream`, `half_tables`, `less_kept`, `graphs_late_residual` |
| compiler | `compiled`, `compiled_norms`, `compiled_qk`, `graphs_compiled_ends` |
| CUDA graphs | `cuda_graphs`, `graphs_less_kept`, `graphs_epilogue`, `graphs_batch_x2` |
| kernels that do others' work | `graphs_qk_backward`, `graphs_pffn_weights`, `graphs_fewer_passes`, `graphs_all` |
| FP8 linears; by probe; Hadamard, stochastic rounding | `fp8_linears`, `fp8_probed`, `fp8_hadamard`, `fp8_stochastic` |
| late layers in bf16 | none: what a probe decides per layer |
| FP8 attention | `fp8_attention` (full attention; block attention is bound by memory, not by products) |
| activations quantised, offloaded, recomputed | `activations_quantised`, `activations_offloaded`, `recompute` |
| a budget per region | `region_budgets` |
| optimizer state stashed | `state_stash` (tables of synthetic data are too small to park) |
| base-batch shuffling | `bbs`; across ranks in "Two GPUs" |
| 2D FSDP, experts, tables over ranks, placement, copies without SMs, FP8 gathers | rows of "Two GPUs" |
"""


def in_short(ladders: Mapping[str, Sequence[Row]], runs: Sequence[SequenceRun], law: str = MAIN_LAW) -> str:
    """Per kind of attention: from the first row to the fastest at the same batch, quality, and the target of Local MFU
    with the time that it is missed by.

    Args:
        ladders: rows of the ladder by kind of attention, in order.
        runs: of the layers.
        law: of the rows' lengths.
    """
    lines = []
    for attention in TARGETS:
        own = [row for row in ladders.get(attention, ()) if row["samples_per_s"]]
        if own:
            first, same = own[0], [row for row in own if row["batch"] == own[0]["batch"]]
            best = max(same, key=lambda row: float(row["samples_per_s"]))
            slow, fast = float(first["samples_per_s"]), float(best["samples_per_s"])
            scores = [float(row["ne"]) for row in same if row["ne"] and row["row"] not in OTHER_BATCHES]
            span = f" NE of these {len(scores)} rows: {min(scores):.4f} to {max(scores):.4f}." if scores else ""
            lines.append(
                f"- **{attention} attention**: {slow:.0f} samples/s in `{first['row']}`, {fast:.0f} in "
                f"`{best['row']}` at the same {first['batch']} samples: x{fast / slow:.2f}.{span}"
            )
        timed = [run for run in runs if run.first["attention"] == attention and law_of(run.first) == law]
        if whole := [run for run in timed if not run.missing]:
            lines.append(_local(max(whole, key=lambda run: run.best), TARGETS[attention]))
    return "\n".join(lines or ["Nothing measured yet."]) + "\n"


def _local(run: SequenceRun, target: float) -> str:
    found, ms = run.best, run.ms * run.apart / run.best
    parts = "as one graph" if found > run.apart else "part by part"
    verdict = "reached" if found >= target else f"missed: {ms:.0f} ms where {ms * found / target:.0f} would do"
    return (
        f"  Local MFU of its sequence layers {100 * found:.1f} % (`{run.first['setting']}`, batch "
        f"{run.first['batch']}, {parts}), {100 * found / run.bound:.0f} % of what the run's copy and product rates "
        f"allow; target {100 * target:.0f} %, {verdict}."
    )
