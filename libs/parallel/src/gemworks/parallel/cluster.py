"""What a cluster can do: shape, links, bandwidth and latency per tier and collective.

The file format is specified in this library's README ("The cluster file").
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from gemworks.parallel._check import number, whole
from gemworks.parallel._toml import dump_toml

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
Tier = Literal["nvlink", "zone", "cross_zone"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
TIERS: tuple[Tier, ...] = get_args(Tier)
SCHEMA = "gemworks.cluster/1"
_DTYPES = ("bf16", "fp8", "fp16", "tf32", "fp32", "fp64")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What one collective reaches on one tier, per GPU.

    Attributes:
        bytes_per_s: bus bandwidth: bytes one GPU must send over the tier / time.
        latency_us: of one step between neighbours.
    """

    bytes_per_s: float
    latency_us: float

    def __post_init__(self) -> None:
        number("bytes_per_s", self.bytes_per_s, above=0)
        number("latency_us", self.latency_us, least=0)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A raw link of one GPU; directions are seen from the GPU (up: leaves it).

    Attributes:
        up_bytes_per_s: outwards alone.
        down_bytes_per_s: inwards alone.
        duplex_bytes_per_s: sum of both when both are busy.
        latency_us: of one small transfer.
        copy_engines_up: copy engines that can drive it outwards at once; 0: none can.
        copy_engines_down: the same, inwards.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    duplex_bytes_per_s: float
    latency_us: float
    copy_engines_up: int
    copy_engines_down: int

    def __post_init__(self) -> None:
        for name in ("up_bytes_per_s", "down_bytes_per_s", "duplex_bytes_per_s"):
            number(name, getattr(self, name), above=0)
        for name in ("latency_us", "copy_engines_up", "copy_engines_down"):
            number(name, getattr(self, name), least=0)
        most = self.up_bytes_per_s + self.down_bytes_per_s
        if self.duplex_bytes_per_s > most * (1 + 1e-9):
            raise ValueError(
                f"duplex_bytes_per_s: got {self.duplex_bytes_per_s:g}, expected at most up + down = {most:g}; "
                "it is the sum over both directions, not the rate of one"
            )


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: memory, its copy rate (read + write), SMs and nominal dense peak by dtype ("bf16" is required)."""

    name: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    num_sms: int
    peak_flops_per_s: Mapping[str, float]

    def __post_init__(self) -> None:
        for name in ("hbm_bytes", "hbm_bytes_per_s", "num_sms"):
            number(name, getattr(self, name), above=0)
        _mapping("gpu.peak_flops_per_s", self.peak_flops_per_s)
        unknown = sorted(set(self.peak_flops_per_s) - set(_DTYPES))
        if unknown or "bf16" not in self.peak_flops_per_s:
            raise ValueError(
                f"gpu.peak_flops_per_s: got keys {sorted(self.peak_flops_per_s)}, expected bf16 and any of {_DTYPES}"
            )
        for dtype, value in self.peak_flops_per_s.items():
            number(f"gpu.peak_flops_per_s.{dtype}", value, above=0)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster of `num_zones` zones of `domains_per_zone` NVLink domains of `gpus_per_domain` GPUs.

    Ranks are numbered along that hierarchy: rank r sits in NVLink domain `r // gpus_per_domain`.

    Attributes:
        name: of the cluster.
        gpus_per_domain, domains_per_zone, num_zones: the shape.
        oversubscription: a zone's NIC bandwidth over its uplink's; informative, `tiers["cross_zone"]` already has it.
        gpu: the device.
        links: "host", and where they exist "nvlink" and "nic".
        tiers: tier -> collective -> `Rate`.
        sources: dotted path -> where the figure comes from; the longest matching prefix counts, "" is the rest.
        extra: anything; kept when the file is rewritten.

    Example:
        >>> from gemworks.parallel import presets
        >>> presets.h200_host().num_gpus
        8
        >>> presets.h200_host().tiers["nvlink"]["all_gather"].bytes_per_s
        256000000000.0
    """

    name: str
    gpus_per_domain: int
    domains_per_zone: int = 1
    num_zones: int = 1
    oversubscription: float = 1.0
    gpu: Gpu
    links: Mapping[str, Link]
    tiers: Mapping[Tier, Mapping[Collective, Rate]]
    sources: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("gpus_per_domain", "domains_per_zone", "num_zones"):
            whole(f"shape.{name}", getattr(self, name))
        number("shape.oversubscription", self.oversubscription)
        if self.oversubscription < 1:
            raise ValueError(
                f"shape.oversubscription: got {self.oversubscription}, expected >= 1 (1: the uplink carries every NIC)"
            )
        unknown = sorted(set(self.links) - {"host", "nvlink", "nic"})
        if unknown or "host" not in self.links:
            raise ValueError(f"links: got {sorted(self.links)}, expected host, and optionally nvlink and nic")
        unknown = sorted(set(self.tiers) - set(TIERS))
        if unknown:
            raise ValueError(f"tiers: got {unknown}, expected some of {TIERS}")
        for tier in self.needed_tiers():
            if tier not in self.tiers:
                raise ValueError(
                    f"tiers: {tier} is missing but the shape {self.shape_text()} uses it; add [tiers.{tier}] or "
                    "shrink the shape"
                )
        for tier, rates in self.tiers.items():
            if set(rates) != set(COLLECTIVES):
                raise ValueError(f"tiers.{tier}: got {sorted(rates)}, expected exactly {sorted(COLLECTIVES)}")

    @property
    def gpus_per_zone(self) -> int:
        return self.gpus_per_domain * self.domains_per_zone

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_zone * self.num_zones

    def needed_tiers(self) -> tuple[Tier, ...]:
        """The tiers that the shape has links on."""
        sizes = {"nvlink": self.gpus_per_domain, "zone": self.domains_per_zone, "cross_zone": self.num_zones}
        return tuple(t for t in TIERS if sizes[t] > 1)

    def shape_text(self) -> str:
        return f"{self.num_zones} zones x {self.domains_per_zone} domains x {self.gpus_per_domain} GPUs"

    def source(self, path: str) -> str:
        """Where the figure at a dotted path comes from.

        Args:
            path: for example "tiers.nvlink.all_gather.bytes_per_s".

        Returns:
            The sentence of the longest entry of `sources` that is `path` or a prefix of it; "" if there is none.
        """
        parts = path.split(".")
        for n in range(len(parts), -1, -1):
            text = self.sources.get(".".join(parts[:n]))
            if text is not None:
                return text
        return ""

    def resized(self, num_gpus: int) -> ClusterSpec:
        """The same hardware with another number of GPUs: whole zones, or one part-filled zone, or one part-filled
        domain.

        Raises:
            ValueError: `num_gpus` fills neither whole domains nor whole zones.
        """
        whole("num_gpus", num_gpus)
        if num_gpus <= self.gpus_per_domain:
            shape = (num_gpus, 1, 1)
        elif num_gpus <= self.gpus_per_zone and num_gpus % self.gpus_per_domain == 0:
            shape = (self.gpus_per_domain, num_gpus // self.gpus_per_domain, 1)
        elif num_gpus % self.gpus_per_zone == 0:
            shape = (self.gpus_per_domain, self.domains_per_zone, num_gpus // self.gpus_per_zone)
        else:
            raise ValueError(
                f"num_gpus: got {num_gpus}, expected a multiple of {self.gpus_per_domain} up to {self.gpus_per_zone} "
                f"(one zone), or of {self.gpus_per_zone} (whole zones); change num_gpus or the shape of {self.name}"
            )
        return dataclasses.replace(self, gpus_per_domain=shape[0], domains_per_zone=shape[1], num_zones=shape[2])

    def scaled(self, tier: Tier, factor: float) -> ClusterSpec:
        """The same cluster with every collective's bandwidth on one tier multiplied by `factor` (for sensitivity)."""
        number("factor", factor, above=0)
        if tier not in self.tiers:
            raise ValueError(f"tier: got {tier!r}, expected one of {tuple(self.tiers)}, which {self.name} has")
        rates = {c: dataclasses.replace(r, bytes_per_s=r.bytes_per_s * factor) for c, r in self.tiers[tier].items()}
        return dataclasses.replace(self, tiers={**self.tiers, tier: rates})

    def to_dict(self) -> dict[str, Any]:
        """The content of the cluster file as nested dicts."""
        content: dict[str, Any] = {
            "schema": SCHEMA,
            "name": self.name,
            "shape": {
                "gpus_per_domain": self.gpus_per_domain,
                "domains_per_zone": self.domains_per_zone,
                "num_zones": self.num_zones,
                "oversubscription": float(self.oversubscription),
            },
            "gpu": {**dataclasses.asdict(self.gpu), "peak_flops_per_s": dict(self.gpu.peak_flops_per_s)},
            "links": {k: dataclasses.asdict(v) for k, v in self.links.items()},
            "tiers": {t: {c: dataclasses.asdict(r) for c, r in rates.items()} for t, rates in self.tiers.items()},
            "sources": dict(self.sources),
        }
        if self.extra:
            content["extra"] = dict(self.extra)
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ClusterSpec:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a key is missing or unknown, a value has the wrong type, or the figures contradict each other.
        """
        top = _table(
            content, "", {"schema", "name", "shape", "gpu", "links", "tiers", "sources"}, optional=frozenset({"extra"})
        )
        if top["schema"] != SCHEMA:
            raise ValueError(
                f"schema: got {top['schema']!r}, expected {SCHEMA!r}; convert the file or update the library"
            )
        for name in ("links", "tiers", "sources"):
            _mapping(name, top[name])
        _mapping("extra", top.get("extra", {}))
        shape = _table(top["shape"], "shape", {"gpus_per_domain", "domains_per_zone", "num_zones", "oversubscription"})
        unknown = sorted(set(top["tiers"]) - set(TIERS))
        if unknown:
            raise ValueError(f"tiers: got {unknown}, expected some of {TIERS}")
        tiers: dict[Tier, dict[Collective, Rate]] = {}
        for tier in TIERS:
            if tier in top["tiers"]:
                rates = _table(top["tiers"][tier], f"tiers.{tier}", set(COLLECTIVES))
                tiers[tier] = {c: _build(Rate, rates[c], f"tiers.{tier}.{c}") for c in COLLECTIVES}
        return cls(
            name=_typed(top["name"], str, "name"),
            gpus_per_domain=_typed(shape["gpus_per_domain"], int, "shape.gpus_per_domain"),
            domains_per_zone=_typed(shape["domains_per_zone"], int, "shape.domains_per_zone"),
            num_zones=_typed(shape["num_zones"], int, "shape.num_zones"),
            oversubscription=_typed(shape["oversubscription"], float, "shape.oversubscription"),
            gpu=_build(Gpu, top["gpu"], "gpu"),
            links={k: _build(Link, v, f"links.{k}") for k, v in top["links"].items()},
            tiers=tiers,
            sources={k: _typed(v, str, f"sources.{k!r}") for k, v in top["sources"].items()},
            extra=dict(top.get("extra", {})),
        )

    def to_toml(self, path: str | Path) -> None:
        """Write the cluster file."""
        Path(path).write_text(dump_toml(self.to_dict()), encoding="utf-8")

    @staticmethod
    def measure(base: ClusterSpec, *, device: str = "cpu", **kwargs: Any) -> ClusterSpec:
        """`base` with its tiers measured on the initialised world; see `gemworks.parallel.measure.measure_cluster`."""
        from gemworks.parallel.measure import measure_cluster

        return measure_cluster(base, device=device, **kwargs)

    @classmethod
    def from_toml(cls, path: str | Path) -> ClusterSpec:
        """Read a cluster file.

        Raises:
            ValueError: not TOML, or see `from_dict`; the file is named.
            OSError: it cannot be read.
        """
        try:
            raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"cluster file {str(path)!r}: not TOML: {error}; ClusterSpec.to_toml writes one") from None
        try:
            return cls.from_dict(raw)
        except ValueError as error:
            raise ValueError(f"cluster file {str(path)!r}: {error}") from None


def _table(value: Any, path: str, keys: set[str], optional: frozenset[str] = frozenset()) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: got {value!r}, expected a table with the keys {sorted(keys)}")
    missing, unknown = sorted(keys - set(value)), sorted(set(value) - keys - optional)
    if missing or unknown:
        where = path or "the top level"
        raise ValueError(f"{where}: missing keys {missing}, unknown keys {unknown}; the README lists every key")
    return value


def _typed(value: Any, kind: type, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{path}: got {value!r}, expected {kind.__name__}")
    return value


def _build(cls: type[T], value: Any, path: str) -> T:
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    table = _table(value, path, set(fields))
    kinds = {"int": int, "float": float, "str": str}
    kwargs: dict[str, Any] = {}
    for name, spec in fields.items():
        kind = kinds.get(str(spec.type))
        if kind is None:
            _mapping(f"{path}.{name}", table[name])
            kwargs[name] = {k: _typed(v, float, f"{path}.{name}.{k}") for k, v in table[name].items()}
        else:
            kwargs[name] = _typed(table[name], kind, f"{path}.{name}")
    try:
        return cls(**kwargs)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _mapping(path: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: got {value!r}, expected a table; the README lists every key")
