"""What a model costs on one GPU: layers, tables and the law of its lengths; the simulator's input.

Times are of one rank's batch on one GPU, measured or from FLOPs and an efficiency; each layer says which.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from gemworks.parallel._check import kind, number, one_of, whole
from gemworks.parallel.cluster import ClusterSpec
from gemworks.parallel.lengths import CostModel, LengthLaw
from gemworks.parallel.tables import TableSpec

LayerKind = Literal["dense", "expert"]


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer, run by all ranks (kind "dense") or spread over the expert axis (kind "expert").

    For an expert layer `params`, `flops` and times are of the whole ensemble on one rank's own batch: with E experts
    over n ranks each rank runs E / n of them on n batches, which is the same work.

    Attributes:
        name: unique.
        params: weights, elements.
        flops: forward FLOPs of one rank's mean batch; backward counts twice that.
        forward_us, backward_us: measured on one GPU for that batch; None: FLOPs / (peak * efficiency), or bytes / HBM
            rate.
        hbm_bytes: forward bytes read and written, for layers without FLOPs (norms, gates); backward counts twice that.
        efficiency: of the peak, used without measured times.
        activation_bytes: kept for backward.
        exchange_bytes: for an expert layer: activations of one rank that are all-gathered (and of outputs that are
            scattered).
        length_share: share of its time that follows the batch's lengths (0: fixed, 1: all of it).
        recompute: share of forward that backward runs again.
        forward_host_us, backward_host_us: what the host takes to launch it, half of it before its first kernel starts;
            0: launching is never what a step waits for.
    """

    name: str
    params: int
    flops: float
    forward_us: float | None = None
    backward_us: float | None = None
    hbm_bytes: float = 0.0
    efficiency: float = 0.5
    activation_bytes: float = 0.0
    exchange_bytes: float = 0.0
    length_share: float = 1.0
    recompute: float = 0.0
    forward_host_us: float = 0.0
    backward_host_us: float = 0.0
    kind: LayerKind = "dense"

    def __post_init__(self) -> None:
        where = f"layer {self.name!r}: "
        one_of(where + "kind", self.kind, get_args(LayerKind))
        number(where + "efficiency", self.efficiency, above=0)
        for name in (
            "params",
            "flops",
            "hbm_bytes",
            "activation_bytes",
            "exchange_bytes",
            "length_share",
            "recompute",
            "forward_host_us",
            "backward_host_us",
        ):
            number(where + name, getattr(self, name), least=0)
        for name in ("forward_us", "backward_us"):
            if getattr(self, name) is not None:
                number(where + name, getattr(self, name), least=0)
        for name in ("efficiency", "length_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{where}{name}: got {getattr(self, name)!r}, expected a share, 0..1")

    def times_us(self, cluster: ClusterSpec, dtype: str = "bf16") -> tuple[float, float]:
        """Forward and backward time on one GPU, without recompute."""
        if self.forward_us is not None and self.backward_us is not None:
            return self.forward_us, self.backward_us
        compute = self.flops / (cluster.gpu.peak_flops_per_s[dtype] * self.efficiency)
        memory = self.hbm_bytes / cluster.gpu.hbm_bytes_per_s
        forward = max(compute, memory) * 1e6
        return (
            forward if self.forward_us is None else self.forward_us,
            2 * forward if self.backward_us is None else self.backward_us,
        )


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model as the simulator sees it.

    Attributes:
        name: of the model.
        layers: in the order of forward.
        tables: embedding tables.
        ids_per_batch: ids that one rank looks up per step (after removing duplicates, if the reader does).
        bytes_per_row: of a looked-up row on the wire, for the mean table width.
        samples_per_rank: local batch.
        num_experts: in an expert layer; 0 without.
        dtype: of compute; weights travel in it too.
        weight_bytes, gradient_bytes: per element on the wire of the all-gather and of the reduction.
        optimizer_bytes: per dense parameter of master weight and state (fp32 master + two moments: 12).
        table_state_bytes: per row, of the row optimizer.
        optimizer_us_per_million: optimizer time per million parameters stored on a rank.
        lookup_us, update_us: measured times of a batch's lookup and of its table update; None: rows twice (three times)
            over HBM.
        law: lengths of samples.
        cost: of a batch as a function of its lengths; only its shape counts, the profile sets the mean.
        sources: where the times come from.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    tables: tuple[TableSpec, ...] = ()
    ids_per_batch: float = 0.0
    bytes_per_row: float = 0.0
    samples_per_rank: int = 1024
    num_experts: int = 0
    dtype: str = "bf16"
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    table_state_bytes: float = 4.0
    optimizer_us_per_million: float = 5.0
    lookup_us: float | None = None
    update_us: float | None = None
    law: LengthLaw = field(default_factory=lambda: LengthLaw(name="uniform", max_len=2048))
    cost: CostModel = field(default_factory=lambda: CostModel(linear=1.0))
    sources: str = ""

    def __post_init__(self) -> None:
        for x in self.layers:
            kind("layers", x, LayerProfile)
        for t in self.tables:
            kind("tables", t, TableSpec)
        kind("law", self.law, LengthLaw)
        kind("cost", self.cost, CostModel)
        whole("samples_per_rank", self.samples_per_rank)
        whole("num_experts", self.num_experts, 0)
        for name in (
            "ids_per_batch",
            "bytes_per_row",
            "weight_bytes",
            "gradient_bytes",
            "optimizer_bytes",
            "table_state_bytes",
            "optimizer_us_per_million",
        ):
            number(name, getattr(self, name), least=0)
        for name in ("lookup_us", "update_us"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), least=0)
        names = [x.name for x in self.layers]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"layers: got the names {names}, expected at least one, all different")
        if any(x.kind == "expert" for x in self.layers) != (self.num_experts > 0):
            raise ValueError(f"num_experts: got {self.num_experts}, expected > 0 exactly if there are expert layers")

    @property
    def flops(self) -> float:
        """Useful FLOPs of one rank's step: backward counts twice forward."""
        return 3 * sum(x.flops for x in self.layers)

    @property
    def dense_params(self) -> int:
        return sum(x.params for x in self.layers if x.kind == "dense")

    @property
    def expert_params(self) -> int:
        return sum(x.params for x in self.layers if x.kind == "expert")

    @property
    def table_bytes(self) -> float:
        """All tables with their optimizer state, fp32."""
        return sum(t.num_rows * (4 * t.dim + self.table_state_bytes) for t in self.tables)

    @property
    def table_weight_bytes(self) -> float:
        """All tables without their optimizer state, fp32."""
        return sum(4.0 * t.num_rows * t.dim for t in self.tables)

    def to_json(self) -> str:
        """Everything, for files."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ModelProfile:
        """The inverse of `json.loads(to_json())`.

        Raises:
            ValueError: an unknown key.
        """
        kwargs = dict(content)
        try:
            kwargs["layers"] = tuple(LayerProfile(**x) for x in kwargs["layers"])
            kwargs["tables"] = tuple(TableSpec(**x) for x in kwargs.get("tables", ()))
            if "law" in kwargs:
                kwargs["law"] = LengthLaw(**kwargs["law"])
            if "cost" in kwargs:
                kwargs["cost"] = CostModel(**kwargs["cost"])
            return cls(**kwargs)
        except KeyError as error:
            raise ValueError(f"model profile: no {error} in it; ModelProfile.to_json writes one") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"model profile: {error}; expected the fields of ModelProfile") from error

    @classmethod
    def from_json(cls, path: str | Path) -> ModelProfile:
        """Read a file that `to_json` wrote.

        Raises:
            ValueError: not such a file; it is named.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # of JSON, or not text
            raise ValueError(
                f"model profile {str(path)!r}: not JSON ({error}); ModelProfile.to_json writes one"
            ) from error
        if not isinstance(content, dict):
            raise ValueError(f"model profile {str(path)!r}: got {type(content).__name__}, expected an object")
        try:
            return cls.from_dict(content)
        except ValueError as error:
            text = str(error).removeprefix("model profile: ")
            raise ValueError(f"model profile {str(path)!r}: {text}") from error


def gem_like(
    *,
    num_layers: int = 8,
    width: int = 512,
    samples_per_rank: int = 1152,
    max_len: int = 2048,
    num_experts: int = 2,
    dense_params_per_layer: int = 4_000_000,
    expert_params_per_layer: int = 20_000_000,
    table_rows: int = 4_000_000_000,
    table_dim: int = 128,
    num_tables: int = 8,
    ids_per_sample: float = 1500.0,
    law: LengthLaw | None = None,
) -> ModelProfile:
    """A profile shaped like the published system: sequence layers, ensemble experts, very large tables.

    FLOPs per layer follow the formulas of the model's description: projections 8 T D^2, PFFN 4 T K D with K = 256,
    attention in blocks of 64 4 T 64 D, pooling with 256 seeds 4 256 T D + 4 T D^2; experts 2 FLOPs per weight and
    sample. Efficiencies are estimates (0.45 of the peak for a sequence layer, 0.5 for experts); replace them by
    measured times. The sizes of the published model are not public; these are ours.
    """
    counts = {"num_layers": num_layers, "width": width, "samples_per_rank": samples_per_rank, "max_len": max_len}
    for name, count in (counts | {"num_experts": num_experts, "num_tables": num_tables}).items():
        whole(name, count)
    whole("table_rows", table_rows, num_tables)
    the_law = law or LengthLaw.named("uniform", max_len)
    tokens = samples_per_rank * the_law.mean
    sequence = tokens * (8 * width**2 + 4 * 256 * width + 4 * 64 * width + 4 * 256 * width + 4 * width**2)
    exchange = samples_per_rank * 64 * width * 2.0
    layers: list[LayerProfile] = []
    for i in range(num_layers):
        layers.append(
            LayerProfile(
                name=f"sequence{i}",
                params=dense_params_per_layer,
                flops=sequence,
                efficiency=0.45,
                activation_bytes=tokens * width * 2 * 2,
                length_share=0.95,
                recompute=0.3,
            )
        )
        layers.append(
            LayerProfile(
                name=f"expert{i}",
                params=expert_params_per_layer * num_experts,
                flops=2.0 * expert_params_per_layer * num_experts * samples_per_rank * 8,
                efficiency=0.5,
                activation_bytes=exchange * 6,
                exchange_bytes=exchange,
                length_share=0.0,
                kind="expert",
            )
        )
    layers.append(
        LayerProfile(name="head", params=2_000_000, flops=2.0 * 2_000_000 * samples_per_rank, length_share=0.0)
    )
    tables = tuple(
        TableSpec(name=f"table{i}", num_rows=table_rows // num_tables, dim=table_dim, sharding="row_wise")
        for i in range(num_tables)
    )
    return ModelProfile(
        name=f"gem-like-{num_layers}x{width}",
        layers=tuple(layers),
        tables=tables,
        ids_per_batch=samples_per_rank * ids_per_sample,
        bytes_per_row=2.0 * table_dim,
        samples_per_rank=samples_per_rank,
        num_experts=num_experts,
        law=the_law,
        sources="FLOPs by formula, efficiencies estimated, sizes ours",
    )


def scaled_batch(profile: ModelProfile, factor: float) -> ModelProfile:
    """The same model with another local batch: times, activations and ids scale with it (not for very small
    batches)."""
    if factor <= 0:
        raise ValueError(f"factor: got {factor}, expected > 0")
    layers: Sequence[LayerProfile] = [
        dataclasses.replace(
            x,
            flops=x.flops * factor,
            hbm_bytes=x.hbm_bytes * factor,
            forward_us=None if x.forward_us is None else x.forward_us * factor,
            backward_us=None if x.backward_us is None else x.backward_us * factor,
            activation_bytes=x.activation_bytes * factor,
            exchange_bytes=x.exchange_bytes * factor,
        )
        for x in profile.layers
    ]
    return dataclasses.replace(
        profile,
        layers=tuple(layers),
        ids_per_batch=profile.ids_per_batch * factor,
        samples_per_rank=max(1, round(profile.samples_per_rank * factor)),
    )
