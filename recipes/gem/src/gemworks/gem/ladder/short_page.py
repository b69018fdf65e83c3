"""The start of `docs/ladder.md`: what came out, and which technique is which row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemworks.gem.ladder.settings import OTHER_BATCHES

Row = dict[str, str]
TARGETS = {"block": "0.40", "full": "0.42"}  # Local MFU of the sequence layers of `large`
TECHNIQUES = """\
## Which technique is which row

| technique | row |
|---|---|
| jagged flash attention | `attention` (full), `fused_qk` |
| block attention | `attention` (block), `fused_qk` |
| sliding window | none: with a window it is a third model; the kernel's figures: [jagged](jagged.md) |
| GDPA for the PFFN and pooling | `gdpa`, `fast_gelu`, `pffn_epilogue`; pooling is softmax in this preset |
| schedules of tiles | `shared_schedule` |
| norms in one pass, bf16 stream | `norms`, `stream`, `half_tables`, `less_kept` |
| compiler | `compiled`, `compiled_norms`, `compiled_qk` |
| CUDA graphs | `cuda_graphs`, `graphs_less_kept`, `graphs_epilogue`, `graphs_batch_x2` |
| FP8 linears; by probe; Hadamard, stochastic rounding | `fp8_linears`, `fp8_probed`, `fp8_hadamard`, `fp8_stochastic` |
| late layers in bf16 | none: what a probe decides per layer |
| FP8 attention | `fp8_attention` (full attention; block attention is bound by memory, not by products) |
| activations quantised, offloaded, recomputed | `activations_quantised`, `activations_offloaded`, `recompute` |
| a budget per region | `region_budgets` |
| optimizer state stashed | `state_stash` (tables of synthetic data are too small to park) |
| base-batch shuffling | `bbs`; across ranks in "Two GPUs" |
| 2D FSDP, experts, tables over ranks, placement, copies without SMs, FP8 gathers | rows of "Two GPUs" |
"""


def in_short(ladders: Mapping[str, Sequence[Row]], layers: Sequence[Row]) -> str:
    """Per kind of attention: from the first row to the fastest at the same batch, quality, and the target of Local MFU
    with the time that it is missed by.

    Args:
        ladders: rows of the ladder by kind of attention, in order.
        layers: of the layers' CSV.
    """
    lines = []
    for attention, target in TARGETS.items():
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
        measured = [r for r in layers if (r["layer"], r["attention"]) == ("sequence layers", attention)]
        if measured:
            row = max(measured, key=lambda r: float(r["local_mfu"]))
            found, wanted, ms = float(row["local_mfu"]), float(target), float(row["ms"])
            verdict = "reached" if found >= wanted else f"missed: {ms:.0f} ms where {ms * found / wanted:.0f} would do"
            lines.append(
                f"  Local MFU of its sequence layers {100 * found:.1f} % (`{row['setting']}`, batch {row['batch']}); "
                f"target {100 * wanted:.0f} %, {verdict}."
            )
    return "\n".join(lines or ["Nothing measured yet."]) + "\n"
