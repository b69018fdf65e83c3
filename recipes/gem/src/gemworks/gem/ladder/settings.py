"""The rows of the ladder: each is a configuration, made from the row above by changing one thing.

A row changes configuration fields only; no code asks which row it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemworks.gem.config import ConfigError, GemConfig

Change = Callable[[GemConfig], GemConfig]


@dataclass(frozen=True)
class Rung:
    """One row.

    Attributes:
        name: in the CSV's `row`.
        added: in words, what it adds to the row above.
        change: from the configuration above to this one.
        side: measured beside the ladder; the next row builds on the row above this one.
        refusal: of the configuration above: why the row cannot run, or ""; it is written with this reason.
        over: the row beside the ladder that it adds its one thing to; "": the row above that is not beside it.
    """

    name: str
    added: str
    change: Change
    side: bool = False
    refusal: Callable[[GemConfig], str] = lambda config: ""
    over: str = ""


def kernels(**changes: Any) -> Change:
    return lambda config: config.with_kernels(**changes)


def train(**changes: Any) -> Change:
    return lambda config: replace(config, train=replace(config.train, **changes))


def optimizer(**changes: Any) -> Change:
    return lambda config: replace(config, optimizer=replace(config.optimizer, **changes))


def model(**changes: Any) -> Change:
    return lambda config: config.with_model(**changes)


def chain(*changes: Change) -> Change:
    def all_of(config: GemConfig) -> GemConfig:
        for change in changes:
            config = change(config)
        return config

    return all_of


def batch_times(factor: int) -> Change:
    return lambda config: config.with_data(batch_size=factor * config.data.batch_size)


BASELINE = chain(
    kernels(
        layout="padded", attention="sdpa", pooling="sdpa", pffn="matmul", norm="torch", fused_qk=False,
        stream="float32", share_schedule=False, compile_scope="layers", pffn_weights="torch",
    ),
    train(compile=False),
)  # fmt: skip
FP8 = kernels(linears="fp8_block128")
# fewer passes over the stream, in every way that there is
FEWEST_PASSES = kernels(
    compile_saves="least", fused_pffn_norm=True, fused_qk_backward=True, pffn_weights="gemworks"
)  # fmt: skip
NOT_YET = "not measured: "


def no_fp8_attention(config: GemConfig) -> str:
    """Why a configuration has no FP8 attention, or ""."""
    full = config.model.only_full_attention
    return "" if full else NOT_YET + "FP8 codes have kernels for full attention only"


RUNGS: tuple[Rung, ...] = (
    Rung("padded_eager", "baseline: padded, SDPA, eager autocast, separate norms", BASELINE),
    Rung("padded_compiled", "torch.compile of the baseline", train(compile=True), side=True),
    Rung(
        "jagged_varlen_eager",
        "packed sequences, torch varlen_attn",
        kernels(layout="jagged", attention="varlen", pooling="varlen"),
    ),
    Rung("jagged_varlen_compiled", "torch.compile of the row above", train(compile=True), side=True),
    Rung("attention", "JFA, or BlockAttention", kernels(attention="gemworks")),
    Rung("gdpa", "GDPA for the PFFN, shared seeds for pooled attention", kernels(pffn="gemworks", pooling="gemworks")),
    Rung("shared_schedule", "tile schedules built once per batch", kernels(share_schedule=True)),
    Rung("fused_qk", "QK-norm and RoPE inside the attention op", kernels(fused_qk=True)),
    Rung("norms", "norms fused with their residuals", kernels(norm="gemworks")),
    Rung("stream", "bf16 tokens between the layers", kernels(stream="autocast")),
    Rung("half_tables", "cosines and sines of the rotations in fp16", kernels(rope_tables="float16")),
    Rung("compiled", "torch.compile of the rest, around the kernels", train(compile=True)),
    Rung("compiled_norms", "norms and what is beside them by the compiler", kernels(norm="torch")),
    Rung("compiled_qk", "QK-norm and RoPE by the compiler", kernels(fused_qk=False), side=True),
    Rung("fast_gelu", "GELU as a polynomial", model(pffn_activation="fast_gelu")),
    Rung(
        "batched_experts", "each product of the experts for all of them at once", kernels(experts="batched"), side=True
    ),
    Rung(
        "cuda_graphs", "CUDA graphs of forward and backward, a graph per bucket of rows", train(cuda_graphs=True),
        side=True,
    ),
    Rung(
        "less_kept", "compiled layers keep no float32 copies for backward", kernels(compile_saves="least"), side=True
    ),
    Rung(
        "graphs_less_kept", "CUDA graphs, and no float32 copies for backward",
        chain(train(cuda_graphs=True), kernels(compile_saves="least")), side=True, over="cuda_graphs",
    ),
    Rung("pffn_epilogue", "norm and residuals inside GDPA's kernel", kernels(fused_pffn_norm=True), side=True),
    Rung(
        "graphs_late_residual", "CUDA graphs, no float32 copies, self-attention's residual added with the next norms",
        chain(train(cuda_graphs=True), kernels(compile_saves="least", late_residual=True)),
        side=True, over="graphs_less_kept",
    ),
    Rung(
        "graphs_pffn_weights", "CUDA graphs, and a kernel that makes the PFFN's keys or values from their summary",
        chain(train(cuda_graphs=True), kernels(pffn_weights="gemworks")), side=True, over="cuda_graphs",
    ),
    Rung(
        "graphs_qk_backward", "CUDA graphs, no float32 copies, keys' norm and RoPE undone in attention's kernel",
        chain(train(cuda_graphs=True), kernels(compile_saves="least", fused_qk_backward=True)),
        side=True, over="graphs_less_kept",
    ),
    Rung(
        "graphs_fewer_passes", "`graphs_qk_backward`, and the kernel that makes the PFFN's keys or values",
        chain(
            train(cuda_graphs=True),
            kernels(compile_saves="least", fused_qk_backward=True, pffn_weights="gemworks"),
        ),
        side=True, over="graphs_qk_backward",
    ),
    Rung(
        "graphs_compiled_ends", "`graphs_fewer_passes`, and rotations' tables and the head's norm and mean compiled",
        chain(
            train(cuda_graphs=True),
            kernels(
                compile_saves="least", fused_qk_backward=True, pffn_weights="gemworks", compile_scope="all",
            ),
        ),
        side=True, over="graphs_fewer_passes",
    ),
    Rung(
        "graphs_epilogue", "CUDA graphs, no float32 copies, and GDPA's norm in its kernel",
        chain(train(cuda_graphs=True), kernels(compile_saves="least", fused_pffn_norm=True)),
        side=True, over="graphs_less_kept",
    ),
    Rung(
        "graphs_all", "`graphs_fewer_passes`, and GDPA's norm in its kernel",
        chain(train(cuda_graphs=True), FEWEST_PASSES), side=True, over="graphs_fewer_passes",
    ),
    Rung("fp8_linears", "FP8 linears, 1x128 and 128x128 scales", FP8, side=True),
    Rung("fp8_probed", "FP8 linears where a probe finds them exact and faster", kernels(linears="probe"), side=True),
    Rung(
        "fp8_hadamard", "FP8 linears, Hadamard transform before weight gradients",
        chain(FP8, kernels(linears_hadamard=True)), side=True, over="fp8_linears",
    ),
    Rung(
        "fp8_stochastic", "FP8 linears, stochastic rounding of gradients",
        chain(FP8, kernels(linears_stochastic=True)), side=True, over="fp8_linears",
    ),
    Rung(
        "fp8_attention", "FP8 attention: q, k and v in tiles of 128 rows",
        lambda config: config if no_fp8_attention(config) else config.with_kernels(attention_format="fp8"),
        side=True, refusal=lambda config: no_fp8_attention(config),
    ),
    Rung(
        "graphs_fp8_attention", "CUDA graphs, no float32 copies, and FP8 attention",
        lambda config: config if no_fp8_attention(config) else chain(
            train(cuda_graphs=True), kernels(compile_saves="least", attention_format="fp8")
        )(config),
        side=True, over="graphs_less_kept", refusal=lambda config: no_fp8_attention(config),
    ),
    Rung(
        "activations_quantised", "activations kept in MXFP8",
        kernels(activations="quantise"), side=True,
    ),
    Rung(
        "activations_offloaded", "activations moved to the host",
        kernels(activations="offload"), side=True,
    ),
    Rung("recompute", "activations recomputed", kernels(activations="recompute"), side=True),
    Rung(
        "region_budgets", "every compiled layer has a budget of half of its activations",
        kernels(activations="recompute@0.5"), side=True,
    ),
    Rung("state_stash", "AdamW's moments in host memory between steps", optimizer(state_place="host"), side=True),
    Rung("batch_x2", "FP8 linears and twice the batch", chain(FP8, batch_times(2)), side=True),
    Rung("bf16_batch_x2", "twice the batch", batch_times(2)),
    Rung(
        "graphs_batch_x2", "twice the batch by CUDA graphs that share their memory",
        train(cuda_graphs=True, graph_memory="shared"), side=True,
    ),
    Rung(
        "all_batch_x2", "`graphs_all` at twice the batch, its graphs sharing their memory",
        chain(train(cuda_graphs=True, graph_memory="shared"), FEWEST_PASSES), side=True, over="graphs_batch_x2",
    ),
    Rung(
        "bbs", "base-batch shuffling: even batches, dealt from 8 steps",
        lambda config: config.with_data(balance_window=8),
    ),
)  # fmt: skip


def build(base: GemConfig, rungs: tuple[Rung, ...] = RUNGS) -> dict[str, GemConfig]:
    """The configuration of every row, on top of `base`."""
    out, config = {}, base
    for rung in rungs:
        out[rung.name] = rung.change(config)
        if not rung.side:
            config = out[rung.name]
    return out


# Rows whose batches are dealt otherwise than the others': their NE is of other samples.
OTHER_BATCHES = frozenset({"bbs"})

# What a stack loses when one technique is taken away. "without" -> change of the stack; one that changes nothing is
# left out: norms are the compiler's in the full stack, and the eager one ends before compilation and GELU.
FULL_STACK = "fast_gelu"
WITHOUT: Mapping[str, Change] = {
    "jagged attention kernel": kernels(attention="varlen", fused_qk=False),
    "pooled attention kernel": kernels(pooling="varlen"),
    "GDPA": kernels(pffn="matmul"),
    "shared schedules": kernels(share_schedule=False),
    "fused QK-norm and RoPE": kernels(fused_qk=False),
    "fused norms": kernels(norm="torch"),
    "bf16 stream": kernels(stream="float32"),
    "fp16 rotations": kernels(rope_tables="float32"),
    "torch.compile": chain(kernels(compile_saves="usual"), train(compile=False)),
    "fast GELU": model(pffn_activation="gelu"),
}


def _setting(config: GemConfig, rung: Rung) -> GemConfig:
    """A row's configuration; a row that cannot run has none."""
    refusal = rung.refusal(config)
    if refusal:
        raise ConfigError(f"setting: got {rung.name!r}, expected a row that can run: {refusal.removeprefix(NOT_YET)}")
    return build(config)[rung.name]


SETTINGS: Mapping[str, Change] = {
    **{rung.name: (lambda config, rung=rung: _setting(config, rung)) for rung in RUNGS},
    "gemworks": lambda config: build(config)[FULL_STACK],
    "default": lambda config: config,
}
