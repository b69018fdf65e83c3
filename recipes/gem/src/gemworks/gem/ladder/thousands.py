"""What the planner predicts for thousands of GPUs from the layers that were measured on one: `plan_predictions.csv`.

python -m gemworks.gem.ladder.thousands --out docs/measured   # reads layers_h200.csv and ladder_h200.csv there

Everything that it writes is predicted. Times of a layer are the device's own (tensor cores and other kernels of the
trace) and the host's launches beside them, scaled linearly from the batch that was measured. Sizes of tables are ours:
the published model's are not known.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from gemworks.gem.config import GemConfig
from gemworks.gem.data import open_source
from gemworks.gem.ladder.tables import MAIN_LAW, law_of
from gemworks.gem.model.layer import GemLayer
from gemworks.gem.plan import interaction_tokens
from gemworks.gem.presets import load_config
from gemworks.parallel import presets
from gemworks.parallel.lengths import CostModel, LengthLaw
from gemworks.parallel.measured_rows import PREDICTION_COLUMNS, merge_rows, stamp
from gemworks.parallel.planner import ladders
from gemworks.parallel.profile import LayerProfile, ModelProfile, scaled_batch
from gemworks.parallel.simulation import Simulation, simulate
from gemworks.parallel.step_graph import SimulationConfig
from gemworks.parallel.tables import TableSpec

Row = dict[str, str]
SEQUENCE = ("hsp", "pffn", "attention")
TABLE_ROWS, NUM_TABLES = 4_000_000_000, 8  # ours, as in gemworks.parallel's own profile
# Of matrix products under an all-gather of 256 MiB on two H200: by NCCL, and by copy engines.
SLOWDOWN_SMS, SLOWDOWN_COPY_ENGINES = 0.092, 0.079
KEPT_WIDTHS = 24  # tensors [T, D] in bf16 that a layer keeps for backward, where no training step was measured


class NotMeasuredError(ValueError):
    """The CSVs lack what a prediction starts from."""


def read_layers(path: Path, attention: str, setting: str) -> dict[str, Row]:
    """The rows of the largest batch per layer that a trace was taken of.

    Layers without a sequence are the same whatever the attention, so another kind's rows serve where these are missing.

    Raises:
        NotMeasuredError: a sequence layer, or the experts, are not there.
    """
    found: dict[str, Row] = {}
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                own = row["attention"] == attention
                if (row["setting"], law_of(row)) != (setting, MAIN_LAW) or not row["tensor_core_ms"]:
                    continue
                if row["layer"] in SEQUENCE and not own:
                    continue
                old = found.get(row["layer"])
                if old is None or (own, int(row["batch"])) >= (old["attention"] == attention, int(old["batch"])):
                    found[row["layer"]] = row
    missing = [name for name in (*SEQUENCE, "experts") if name not in found]
    if missing:
        raise NotMeasuredError(
            f"{path}: no traced row of {', '.join(missing)} with {attention} attention and setting {setting!r}; "
            f"measure them: python -m gemworks.gem.layers --attention {attention} --setting {setting}"
        )
    return found


def layer_times(row: Row, batch: int) -> tuple[float, float, float, float]:
    """Forward and backward time on the device, and the host's, in us, for `batch` samples.

    A row has both directions together: forward is taken as a third, as of FLOPs.
    """
    factor = batch / int(row["batch"])
    device = 1e3 * factor * (float(row["tensor_core_ms"]) + float(row["memory_ms"]))
    host = 1e3 * float(row.get("host_ms") or 0.0)
    return device / 3, 2 * device / 3, host / 3, 2 * host / 3


def measured_profile(config: GemConfig, layers: Mapping[str, Row], *, batch: int, kept_bytes: float) -> ModelProfile:
    """The model of a configuration with measured times.

    Args:
        config: sizes.
        layers: rows by layer name.
        batch: samples of a rank.
        kept_bytes: activations that one sample keeps for backward, all layers together.
    """
    model, data = config.model, config.data
    sizes = [model.event(event.name) for event in open_source(data).schema.events]
    tokens = interaction_tokens(config, sizes)
    layer = GemLayer(config, sizes, model.num_layers - 1, tokens, device=torch.device("meta"))
    experts = sum(p.numel() for p in layer.interaction.parameters())
    rest = sum(p.numel() for p in layer.parameters()) - experts
    law = LengthLaw.named("uniform", data.max_length)
    mean_len = float(layers["hsp"]["mean_len"])
    exchange = 2.0 * batch * tokens * model.dim

    def one(name: str, rows: Sequence[Row], params: int, **more: object) -> LayerProfile:
        times = [sum(t) for t in zip(*(layer_times(row, batch) for row in rows), strict=True)]
        flops = sum(float(r["tflops"]) * float(r["ms"]) * 1e9 / 3 * batch / int(r["batch"]) for r in rows)
        return LayerProfile(
            name=name, params=params, flops=flops, forward_us=times[0], backward_us=times[1],
            forward_host_us=times[2], backward_host_us=times[3], **more,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip

    out: list[LayerProfile] = []
    if "events" in layers:
        out.append(one("events", [layers["events"]], 1_000_000))
    for i in range(model.num_layers):
        rows = [layers[name] for name in (*SEQUENCE, "summary") if name in layers]
        out.append(one(f"sequence{i}", rows, rest, activation_bytes=kept_bytes * batch / model.num_layers))
        out.append(
            one(
                f"experts{i}", [layers["experts"]], experts, kind="expert", length_share=0.0, exchange_bytes=exchange,
                activation_bytes=6 * exchange,
            )
        )  # fmt: skip
    if "head" in layers:
        out.append(one("head", [layers["head"]], 1_000_000, length_share=0.0))
    quadratic = 0.0
    if layers["attention"]["attention"] == "full":  # the part of the time that the pairs take, by FLOPs
        projections = 8.0 * model.dim**2
        quadratic = 4.0 * model.dim / (projections + 4.0 * 2 * model.pffn_rows * model.dim + 4.0 * model.dim**2)
    sources = (
        f"layers of {config.preset} on {layers['hsp']['gpu']}, commit {layers['hsp']['commit']}, batch "
        f"{layers['hsp']['batch']}, mean length {mean_len:.0f}; tables ours"
    )
    return ModelProfile(
        name=f"{config.preset}, {layers['attention']['attention']} attention",
        layers=tuple(out),
        tables=tuple(
            TableSpec(name=f"table{i}", num_rows=TABLE_ROWS // NUM_TABLES, dim=model.embedding_dim, sharding="row_wise")
            for i in range(NUM_TABLES)
        ),
        ids_per_batch=batch * (2 * mean_len + data.num_id_fields),
        bytes_per_row=2.0 * model.embedding_dim,
        samples_per_rank=batch,
        num_experts=model.num_experts,
        law=law,
        cost=CostModel(linear=1.0, quadratic=quadratic),
        sources=sources,
    )  # fmt: skip


def kept_bytes_per_sample(path: Path, config: GemConfig, attention: str, row_name: str) -> float:
    """From the peak of a measured training step less weights, gradients and optimizer state; else by a count."""
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if (row["row"], row["attention"], law_of(row)) == (row_name, attention, MAIN_LAW) and row["peak_gib"]:
                    return max(float(row["peak_gib"]) - 10.0, 1.0) * 2**30 / int(row["batch"])
    return KEPT_WIDTHS * 2.0 * config.model.dim * config.model.num_layers * config.data.max_length / 2


def predictions(profile: ModelProfile, num_gpus: int) -> Iterator[tuple[str, Simulation]]:
    """What each dimension of the plan buys on a cluster of that size, then the plan with one thing taken away."""
    cluster = presets.roce_cluster(num_gpus, gpus_per_zone=min(2048, num_gpus))
    found = ladders(profile, cluster)
    for kind, rungs in found.items():
        for rung in rungs:
            yield f"{kind} {rung.name}", rung.simulation
    best = found["sparse"][-1].plan
    base = SimulationConfig(sm_slowdown=SLOWDOWN_COPY_ENGINES)
    variants = {
        "all": (base, profile),
        "without BBS": (replace(base, balance="none"), profile),
        "gathers on SMs": (replace(base, sm_slowdown=SLOWDOWN_SMS), profile),
        "one activation budget: a third of forward again": (base, recomputed(profile, 1 / 3)),
        "half the batch": (base, scaled_batch(profile, 0.5)),
        "twice the batch, activations in half the bytes": (base, kept_in(scaled_batch(profile, 2.0), 0.5)),
    }
    for name, (config, model) in variants.items():
        yield name, simulate(best, model, cluster, config, check_memory=False)


def recomputed(profile: ModelProfile, share: float) -> ModelProfile:
    """With a share of every layer's forward run again in backward, as one budget for all regions makes it."""
    return replace(profile, layers=tuple(replace(x, recompute=share) for x in profile.layers))


def kept_in(profile: ModelProfile, factor: float) -> ModelProfile:
    """With activations that take a share of their bytes, as budgets per region make them by FP8 and offload."""
    layers = tuple(replace(x, activation_bytes=factor * x.activation_bytes) for x in profile.layers)
    return replace(profile, layers=layers)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gemworks.gem.ladder.thousands", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--preset", default="large")
    parser.add_argument("--attention", choices=("block", "full"), action="append")
    parser.add_argument("--setting", default="fast_gelu", help="of layers_h200.csv")
    parser.add_argument("--batch-size", type=int, default=512, help="samples of a rank")
    parser.add_argument("--gpus", type=int, action="append", help="256, 1024, 4096, 8192 if not given")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the CSVs, read and written")
    args = parser.parse_args(argv)
    rows: list[dict[str, object]] = []
    same = stamp("gemworks.gem.ladder.thousands", 0) | {"gpu": "predicted"}
    for attention in args.attention or ("block", "full"):
        config = load_config(args.preset, sets=[f"model.attention={attention}"])
        try:
            layers = read_layers(args.out / "layers_h200.csv", attention, args.setting)
        except NotMeasuredError as error:
            print(error, file=sys.stderr)
            return 2
        kept = kept_bytes_per_sample(args.out / "ladder_h200.csv", config, attention, args.setting)
        profile = measured_profile(config, layers, batch=args.batch_size, kept_bytes=kept)
        for num_gpus in args.gpus or (256, 1024, 4096, 8192):
            for name, s in predictions(profile, num_gpus):
                print(
                    f"{profile.name}, {num_gpus} GPUs, {name}: {s.step_us / 1e3:.1f} ms, MFU {s.mfu:.1%} = "
                    f"{s.local_mfu:.1%} x {s.scaling_ratio:.1%}, {s.memory.total / 2**30:.0f} GiB"
                )
                plan = f"{profile.name}, {name}: {s.plan.text()}"
                for item, us in {"step": s.step_us, **dict(sorted(s.items.items()))}.items():
                    rows.append(
                        same
                        | {
                            "gpus": num_gpus, "plan": plan, "e2e_mfu": s.mfu, "scaling_ratio": s.scaling_ratio,
                            "item": item, "ms": us / 1e3, "law": "uniform", "max_len": config.data.max_length,
                        }
                    )  # fmt: skip
    merge_rows(args.out / "plan_predictions.csv", PREDICTION_COLUMNS, rows, key=("gpus", "plan", "item"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
