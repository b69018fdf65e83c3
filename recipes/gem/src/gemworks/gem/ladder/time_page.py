"""Where a step's time goes, from the kernels that a traced row wrote: kinds of kernels, their rates, and their floors.

Letters: T packed events, D model width, L layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemworks.gem.config import GemConfig
from gemworks.gem.data import open_source
from gemworks.gem.efficiency import count_expected_flops
from gemworks.gem.ladder.tables import MAIN_LAW, law_of
from gemworks.gem.presets import get_preset

HEAD = re.compile(
    r"one step of (\w+), (\w+) attention: tensor cores ([\d.]+) ms, other kernels ([\d.]+) ms, gaps ([\d.]+) ms"
)
LINE = re.compile(r" *([\d.]+) ms +x([\d.]+) +(.*)")
# The first that fits counts.
KINDS: Mapping[str, str] = {
    "attention: pooling, PFFN and self-attention": (
        r"(backward|forward)\w*_hopper|block_(fwd|bwd)|flash_|attention_|gdpa|delta_kernel"
    ),
    "norm and rotation of queries and keys": r"norm_rope",
    "other norms and elementwise work, fused by the compiler": r"triton_(per|red|poi)_",
    "linear products": r"nvjet|cutlass|cublas|gemm|splitK",
    "optimizer and clipping": r"multi_tensor_apply",
    "copies": r"[Mm]emcpy|copy_kernel|Memset",
}  # fmt: skip
REST = "everything else"
ATTENTION, NORMS, FUSED, PRODUCTS, *_ = KINDS
WIDTH = 2  # bytes of a bf16 value


@dataclass(frozen=True)
class Step:
    """A traced step.

    Attributes:
        kinds: ms per kind of kernel.
        total_ms: of all kernels, and of the gaps between them.
    """

    row: str
    attention: str
    kinds: Mapping[str, float]
    gaps_ms: float
    total_ms: float


def kind_of(kernel: str) -> str:
    """
    >>> kind_of("nvjet_sm90_tst_128x304_64x3_2x1_v_bz_coopA_NNT")
    'linear products'
    >>> kind_of("triton_per_fused__fused_rms_norm_backward_attention_backward_view_20")
    'other norms and elementwise work, fused by the compiler'
    """
    if kernel.startswith("triton_"):
        return FUSED
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), REST)


def read_step(path: Path) -> Step | None:
    """A row's kernels; None for another kind of file. Kernels below the file's last line count as everything else."""
    head, *lines = path.read_text().splitlines() or [""]
    found = HEAD.match(head)
    if found is None:
        return None
    row, attention, *times = found.groups()
    busy, gaps = float(times[0]) + float(times[1]), float(times[2])
    kinds = dict.fromkeys([*KINDS, REST], 0.0)
    for line in lines:
        entry = LINE.match(line)
        if entry is not None:
            kinds[kind_of(entry.group(3))] += float(entry.group(1))
    kinds[REST] += max(busy - sum(kinds.values()), 0.0)  # streams overlap by less than a per cent
    return Step(row, attention, kinds, gaps, sum(kinds.values()) + gaps)


def flops_of(config: GemConfig, total: float) -> dict[str, float]:
    """Model FLOPs of a step by kind of kernel: the expected shares, scaled to the `total` that a row counted."""
    count = count_expected_flops(config, open_source(config.data).schema)
    cores = sum(flops for name, flops in count.parts.items() if name.endswith(".core"))
    everything = sum(count.parts.values())
    return {ATTENTION: total * cores / everything, PRODUCTS: total * (1 - cores / everything)}


def step_table(step: Step, row: Mapping[str, str], rates: Mapping[str, str]) -> str:
    """A Markdown table of one traced step.

    Args:
        row: of the ladder's CSV, for FLOPs and sizes.
        rates: a row of the layers' CSV, for the run's copy and product rates.
    """
    config = get_preset("large").with_model(attention=step.attention).with_data(
        batch_size=int(row["batch"]), length_law=row["law"]
    )  # fmt: skip
    flops = flops_of(config, float(row["flops_per_step"]))
    tflops, gbps = float(rates["bf16_tflops"]), float(rates["copy_gbps"])
    stream_bytes = float(row["batch"]) * float(row["mean_len"]) * config.model.dim * WIDTH
    pass_ms = stream_bytes / gbps / 1e6
    lines = [
        f"### {step.attention} attention, {step.row}, batch {row['batch']}\n",
        "| kernels | ms | share | TFLOP | TFLOP/s | least ms | passes of a layer |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, ms in step.kinds.items():
        cells = [kind, f"{ms:.1f}", f"{100 * ms / step.total_ms:.1f} %", "", "", "", ""]
        if kind in flops and ms:
            rate, least = flops[kind] / ms / 1e9, flops[kind] / tflops / 1e9
            cells[3:6] = [f"{flops[kind] / 1e12:.1f}", f"{rate:.0f}", f"{least:.1f}"]
        if kind in (NORMS, FUSED):
            cells[6] = f"{ms / config.model.num_layers / pass_ms:.1f}"
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(f"| gaps | {step.gaps_ms:.1f} | {100 * step.gaps_ms / step.total_ms:.1f} % |  |  |  |  |")
    lines.append(f"| all | {step.total_ms:.1f} | 100 % | {sum(flops.values()) / 1e12:.1f} |  |  |  |")
    return "\n".join(lines) + "\n"


def where_time_goes(folder: Path, rows: Sequence[Mapping[str, str]], layers: Sequence[Mapping[str, str]]) -> str:
    """Tables of all traced steps that the ladder's CSV has a row of; empty without one."""
    tables = []
    for path in sorted(folder.glob("ladder_*_kernels.txt")):
        step = read_step(path)
        if step is None:
            continue
        wanted = (step.row, step.attention, MAIN_LAW)
        own = [r for r in rows if (r["row"], r["attention"], law_of(r)) == wanted and r["flops_per_step"]]
        rates = [r for r in layers if r["attention"] == step.attention and r["bf16_tflops"] and r["gpu"]]
        if own and rates:
            tables.append(step_table(step, own[-1], rates[-1]))
    if not tables:
        return ""
    return INTRO + "\n" + "\n".join(tables)


INTRO = """\
Kernels of one traced step, by kind. *TFLOP* are the model's own, backward twice forward; *TFLOP/s* is what the kernels
make of them, and *least ms* what they would take at the rate of a large bf16 product in the layers' run. A *pass* is
one read or write of one bf16 tensor of the stream (all packed rows at the model's width) at the speed of a copy: what
memory-bound kernels of one layer, forward and backward, cost in that unit. A trace slows the host down, so gaps of rows
without CUDA graphs are larger here than in their steps. What follows from these tables: [where Local MFU
goes](local_mfu.md).
"""
