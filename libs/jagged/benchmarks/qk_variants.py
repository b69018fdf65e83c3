"""Times QK-norm and rotation in front of flash attention on a GPU: by kernel, in PyTorch, by torch.compile.

    python libs/jagged/benchmarks/qk_variants.py --out qk_variants.csv

Each way is checked against the first one by kernel, so the formulas in PyTorch check them all. "packed" is
`flash_attention_qkv` of one projection, "apart" `flash_attention` of its parts; "core" is attention alone, of q and k
that are ready.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gemworks.jagged import Rope, flash_attention, flash_attention_qkv
from gemworks.jagged.bench import report
from gemworks.jagged.bench.cases import BWD_FACTOR, Case, make_inputs
from gemworks.jagged.bench.timing import Clock, Time, measure_ceilings
from gemworks.jagged.ops.flash_attention import op
from torch import Tensor

SHAPES = ((128, 2048), (256, 1024))
COLUMNS: tuple[str, ...] = (
    *("op", "shape", "head_dim", "direction", "impl", "setting", "error", "note"),
    *report.COLUMNS[report.COLUMNS.index("dtype") :],
)
Way = Callable[[Tensor], Tensor]


def by_kernel(on: bool) -> None:
    """Whether `flash_attention` norms and rotates by one kernel."""
    op.runs_in_one_pass = lambda *_, **__: on


def measure() -> Iterator[dict[str, str]]:
    device = torch.device("cuda")
    clock = Clock(device)
    ceilings = measure_ceilings(clock, device)
    common = report.Context(ceilings, device, torch.bfloat16, ()).columns()
    common["command"] = "python libs/jagged/benchmarks/qk_variants.py"
    for batch, longest in SHAPES:
        case = Case("flash_attention", "self", batch, longest)
        x = make_inputs(case, device, torch.bfloat16)
        total, heads, width = x.q.shape
        offsets, schedule = x.offsets_q, x.schedule
        assert offsets is not None
        qkv = torch.randn(total, 3 * heads, width, device=device, dtype=torch.bfloat16).requires_grad_()
        rope = Rope().tables(offsets, width, total=total)
        small = Rope().tables(offsets, width, total=total, dtype=torch.float16)

        def packed(t: Tensor, tables=rope, offsets=offsets, schedule=schedule, case=case) -> Tensor:
            return flash_attention_qkv(
                t, offsets, num_heads=case.heads, max_length=case.maximum, qk_norm=True, rope=tables, schedule=schedule
            )

        def apart(t: Tensor, rope=rope, offsets=offsets, schedule=schedule, case=case) -> Tensor:
            q, k, v = t.chunk(3, dim=1)
            return flash_attention(
                q, k, v, offsets, max_length_q=case.maximum, qk_norm=True, rope=rope, schedule=schedule
            )

        def core(t: Tensor, offsets=offsets, schedule=schedule, case=case) -> Tensor:
            return flash_attention_qkv(t, offsets, num_heads=case.heads, max_length=case.maximum, schedule=schedule)

        ways: list[tuple[str, bool, Way]] = [
            ("core, packed", True, core),
            ("packed, by kernel", True, packed),
            ("packed, by kernel, fp16 tables", True, lambda t, packed=packed, small=small: packed(t, tables=small)),
            ("apart, by kernel", True, apart),
            ("apart, in PyTorch", False, apart),
            ("apart, by torch.compile", False, torch.compile(apart, dynamic=False)),
        ]
        lengths = x.lengths_q.double()
        row = common | {"op": "flash_attention qk_norm rope", "shape": case.shape, "head_dim": str(width)}
        row |= {"law": case.law, "mean_len": f"{lengths.mean():.1f}", "max_len": str(int(lengths.max()))}
        row |= {"seed": str(case.seed), "bwd_factor": str(BWD_FACTOR), "impl": report.OURS}
        truth: list[Tensor] = []
        for name, kernel, way in ways:
            by_kernel(kernel)
            try:
                out = way(qkv)
                (grad,) = torch.autograd.grad(out, qkv, x.d_out, retain_graph=True)
                error = 0.0
                if name.startswith("packed, by kernel") and not truth:
                    truth = [out.detach(), grad]
                elif truth and "fp16" not in name:
                    pairs = zip((out, grad), truth, strict=True)
                    error = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
                assert error < 2e-2, f"relative error {error:.1e}"
                times = {
                    "fwd": Time.of(clock.sample(lambda way=way, qkv=qkv: way(qkv), 12)[2:]),
                    "bwd": Time.of(
                        clock.sample(
                            lambda out=out, x=x, qkv=qkv: torch.autograd.grad(out, qkv, x.d_out, retain_graph=True), 12
                        )[2:]
                    ),
                }
            except Exception as failure:  # what does not run is a result too
                yield row | {
                    "setting": name,
                    "note": f"{type(failure).__name__}: {' '.join(str(failure).split())[:160]}",
                }
                continue
            for direction, t in times.items():
                flops = x.flops * (1.0 if direction == "fwd" else BWD_FACTOR)
                yield row | {
                    "setting": name, "direction": direction, "error": f"{error:.1e}", "ms": f"{t.ms:.4f}",
                    "ms_p20": f"{t.ms_p20:.4f}", "ms_p80": f"{t.ms_p80:.4f}", "tflops": f"{flops / t.ms / 1e9:.4g}",
                }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("qk_variants.csv"))
    out = parser.parse_args().out
    with out.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for row in measure():
            writer.writerow(row)
            file.flush()
            print("  ".join(row.get(c, "") for c in ("shape", "setting", "direction", "ms", "tflops", "error", "note")))


if __name__ == "__main__":
    main()
