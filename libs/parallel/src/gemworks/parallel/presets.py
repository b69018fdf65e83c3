"""Clusters that we know something about; every figure states where it comes from.

An estimate says so. Replace it by `measure_cluster` where you can.
"""

from __future__ import annotations

from gemworks.parallel._check import whole
from gemworks.parallel.cluster import COLLECTIVES, ClusterSpec, Collective, Gpu, Link, Rate

_GIB = 2**30
_MEASURED = "measured on H200 (700 W, torch 2.11.0+cu130, NCCL 2.28.9, NVLS off)"
_NCCL_LATENCY = (
    "estimate: NCCL's own tuning table (src/graph/tuning.cc, hwLat), ring with the Simple protocol: "
    "NVLink 3.4, network 14"
)


def _h200() -> Gpu:
    return Gpu(
        name="H200",
        hbm_bytes=139 * _GIB,
        hbm_bytes_per_s=4.2e12,
        num_sms=132,
        peak_flops_per_s={
            "bf16": 989e12,
            "fp16": 989e12,
            "fp8": 1979e12,
            "tf32": 494.5e12,
            "fp32": 67e12,
            "fp64": 34e12,
        },
    )


_H200_LINKS = {
    "host": Link(
        up_bytes_per_s=55e9,
        down_bytes_per_s=55e9,
        duplex_bytes_per_s=100e9,
        latency_us=10.0,
        copy_engines_up=1,
        copy_engines_down=1,
    ),
    "nvlink": Link(
        up_bytes_per_s=325e9,
        down_bytes_per_s=325e9,
        duplex_bytes_per_s=650e9,
        latency_us=3.4,
        copy_engines_up=1,
        copy_engines_down=1,
    ),
}
_H200_NVLINK: dict[Collective, Rate] = {
    "all_gather": Rate(bytes_per_s=256e9, latency_us=3.4),
    "reduce_scatter": Rate(bytes_per_s=229e9, latency_us=3.4),
    "all_reduce": Rate(bytes_per_s=285e9, latency_us=3.4),
    "all_to_all": Rate(bytes_per_s=279e9, latency_us=3.4),
    "broadcast": Rate(bytes_per_s=305e9, latency_us=3.4),
}
_H200_SOURCES = {
    "gpu": "NVIDIA H200 SXM datasheet, dense peaks",
    "gpu.hbm_bytes": _MEASURED + ": usable memory",
    "gpu.hbm_bytes_per_s": _MEASURED + ": device copy, read + write",
    "links.host": _MEASURED + ": pinned copies, one way and both ways at once",
    "links.host.latency_us": "estimate",
    "links.host.copy_engines_up": "one engine serves one direction; measured behaviour, not a datasheet figure",
    "links.host.copy_engines_down": "one engine serves one direction; measured behaviour, not a datasheet figure",
    "links.nvlink": _MEASURED
    + ": push through symmetric memory by a copy engine; both directions taken as independent",
    "links.nvlink.latency_us": _NCCL_LATENCY,
    "links.nvlink.copy_engines_up": "estimate: one push at a time was measured",
    "links.nvlink.copy_engines_down": "estimate: one push at a time was measured",
    "tiers.nvlink": _MEASURED + ": two GPUs, 256 MiB messages, rate per rank taken as bus bandwidth",
    "tiers.nvlink.all_reduce": _MEASURED + ": two GPUs, fitted to 1 and 128 MiB",
    "tiers.nvlink.broadcast": _MEASURED + ": two GPUs, fitted to 1 and 128 MiB",
    **{f"tiers.nvlink.{c}.latency_us": _NCCL_LATENCY for c in COLLECTIVES},
}
_NIC_EFFICIENCY = 0.9


def h200_host(num_gpus: int = 8) -> ClusterSpec:
    """One HGX host of up to eight H200 GPUs on NVLink."""
    whole("num_gpus", num_gpus)
    if num_gpus > 8:
        raise ValueError(f"num_gpus: got {num_gpus}, expected 1..8, the GPUs of one host; roce_cluster has more hosts")
    return ClusterSpec(
        name=f"h200-host-{num_gpus}",
        gpus_per_domain=num_gpus,
        gpu=_h200(),
        links=_H200_LINKS,
        tiers={"nvlink": _H200_NVLINK},
        sources={"": "HGX H200: eight GPUs on NVLink", **_H200_SOURCES},
    )


def roce_cluster(num_gpus: int = 4096, *, gpus_per_zone: int = 2048, oversubscription: float = 7.0) -> ClusterSpec:
    """A three-tier RoCE cluster like those that Meta describes: hosts of 8 GPUs, zones, an oversubscribed layer above.

    Hosts of 8 GPUs on NVLink with one 400 Gbit/s NIC per GPU, zones of full bisection bandwidth, 1:7 oversubscription
    above (The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.1, where a zone has 3,072 GPUs). The size of GEM's
    zones is not published: 2,048 is our choice, the nearest to 3,072 that divides 4,096 ... 16,384.
    """
    whole("num_gpus", num_gpus)
    whole("gpus_per_zone", gpus_per_zone)
    if gpus_per_zone % 8:
        raise ValueError(f"gpus_per_zone: got {gpus_per_zone}, expected a multiple of the 8 GPUs of a host")
    if not oversubscription >= 1:
        raise ValueError(f"oversubscription: got {oversubscription}, expected >= 1, zone bandwidth over its uplink's")
    line = 50e9
    nic = line * _NIC_EFFICIENCY
    zone: dict[Collective, Rate] = {c: Rate(bytes_per_s=nic, latency_us=14.0) for c in COLLECTIVES}
    cross: dict[Collective, Rate] = {c: Rate(bytes_per_s=nic / oversubscription, latency_us=20.0) for c in COLLECTIVES}
    full = ClusterSpec(
        name="roce-3-tier",
        gpus_per_domain=8,
        domains_per_zone=gpus_per_zone // 8,
        num_zones=max(1, -(-num_gpus // gpus_per_zone)),
        oversubscription=oversubscription,
        gpu=_h200(),
        links={
            **_H200_LINKS,
            "nic": Link(
                up_bytes_per_s=line,
                down_bytes_per_s=line,
                duplex_bytes_per_s=2 * line,
                latency_us=14.0,
                copy_engines_up=0,
                copy_engines_down=0,
            ),
        },
        tiers={"nvlink": _H200_NVLINK, "zone": zone, "cross_zone": cross},
        sources={
            "": "The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.1",
            "shape.domains_per_zone": "our choice: GEM's zones are not published; Llama 3 has 3,072 GPUs a zone",
            "shape.num_zones": "our choice",
            "links.nic": "400 Gbit/s RoCE NIC per GPU: arXiv 2407.21783, section 3.3.1",
            "links.nic.latency_us": _NCCL_LATENCY,
            "tiers.zone": "estimate: 90 % of the 400 Gbit/s line rate",
            "tiers.cross_zone": f"estimate: the zone's rate / oversubscription {oversubscription:g}",
            **{f"tiers.zone.{c}.latency_us": _NCCL_LATENCY for c in COLLECTIVES},
            **{
                f"tiers.cross_zone.{c}.latency_us": "estimate: two more switch layers than in a zone"
                for c in COLLECTIVES
            },
            **_H200_SOURCES,
        },
    )
    return full.resized(num_gpus)


def gb200_rack(num_gpus: int = 72) -> ClusterSpec:
    """One GB200 NVL72 rack: 72 GPUs on NVLink (give 64 for sizes that are powers of two)."""
    if not 1 <= num_gpus <= 72:
        raise ValueError(f"num_gpus: got {num_gpus}, expected 1..72, the NVLink domain of one rack")
    nominal, h200_nominal = 900e9, 450e9
    nvlink: dict[Collective, Rate] = {
        c: Rate(bytes_per_s=r.bytes_per_s * nominal / h200_nominal, latency_us=r.latency_us)
        for c, r in _H200_NVLINK.items()
    }
    link = _H200_LINKS["nvlink"]
    return ClusterSpec(
        name="gb200-nvl72",
        gpus_per_domain=num_gpus,
        gpu=Gpu(
            name="GB200",
            hbm_bytes=186 * 10**9,
            hbm_bytes_per_s=8e12,
            num_sms=148,
            peak_flops_per_s={"bf16": 2.5e15, "fp16": 2.5e15, "fp8": 5e15, "tf32": 1.25e15},
        ),
        links={
            "host": Link(
                up_bytes_per_s=225e9,
                down_bytes_per_s=225e9,
                duplex_bytes_per_s=450e9,
                latency_us=10.0,
                copy_engines_up=1,
                copy_engines_down=1,
            ),
            "nvlink": Link(
                up_bytes_per_s=2 * link.up_bytes_per_s,
                down_bytes_per_s=2 * link.down_bytes_per_s,
                duplex_bytes_per_s=2 * link.duplex_bytes_per_s,
                latency_us=link.latency_us,
                copy_engines_up=1,
                copy_engines_down=1,
            ),
            "nic": Link(
                up_bytes_per_s=50e9,
                down_bytes_per_s=50e9,
                duplex_bytes_per_s=100e9,
                latency_us=14.0,
                copy_engines_up=0,
                copy_engines_down=0,
            ),
        },
        tiers={"nvlink": nvlink},
        sources={
            "": "NVIDIA GB200 NVL72 datasheet; not run here",
            "gpu.hbm_bytes_per_s": "NVIDIA GB200 NVL72 datasheet, nominal; not run here",
            "gpu.num_sms": "NVIDIA Blackwell (B200) architecture brief",
            "links.host": "NVLink-C2C 900 GB/s per superchip, both ways, shared by its two GPUs; nominal, not run here",
            "links.host.latency_us": "estimate",
            "links.nvlink": "estimate: twice the H200's measured rate (NVLink 5 is nominally twice NVLink 4)",
            "links.nic": "400 Gbit/s ConnectX-7 per GPU, NVIDIA GB200 NVL72 datasheet",
            "tiers.nvlink": "estimate: twice the H200's measured rate, as NVLink 5 is nominally twice NVLink 4",
            **{f"tiers.nvlink.{c}.latency_us": _NCCL_LATENCY for c in COLLECTIVES},
        },
    )
