"""Measure the links of this machine and write them as a cluster file.

On a GPU: device-memory copy, host link each way and both ways at once through pinned memory, latency of a small copy,
and the push to a peer GPU of the same host. Without one: plain memory copies stand in, and every source says so, so
that the software above can be tried anywhere but its figures can't be mistaken for a GPU's.
"""

from __future__ import annotations

import copy
import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from gemworks.netmem import cluster_file
from gemworks.netmem.checks import check_kind, check_number, checked_device
from gemworks.netmem.ledger import BandwidthLedger

# Nominal dense bf16 peaks by device name, FLOP/s. Source: NVIDIA data sheets of H100 SXM and H200.
NOMINAL_BF16 = {"H100": 9.89e14, "H200": 9.89e14}


def _median_s(run: Callable[[], Any], sync: Callable[[], None], repeats: int) -> float:
    run()
    sync()
    times = []
    for _ in range(repeats):
        sync()
        start = time.perf_counter()
        run()
        sync()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _matmul_flops_per_s(device: torch.device, sync: Callable[[], None], size: int, repeats: int) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _median_s(lambda: a @ b, sync, repeats)


def _ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _empty_file(name: str) -> dict[str, Any]:
    return {
        "schema": cluster_file.SCHEMA,
        "name": name,
        "shape": {"gpus_per_domain": 1, "domains_per_zone": 1, "num_zones": 1, "oversubscription": 1.0},
        "gpu": {},
        "links": {},
        "tiers": {},
        "sources": {},
    }


def _measure_cpu(num_bytes: int, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    copy_s = _median_s(lambda: target.copy_(source), lambda: None, repeats)
    small_s = _median_s(lambda: target[:64].copy_(source[:64]), lambda: None, repeats)
    gpu = {
        "name": "cpu",
        "hbm_bytes": _ram_bytes(),
        "hbm_bytes_per_s": 2 * num_bytes / copy_s,
        "num_sms": os.cpu_count() or 1,
        "peak_flops_per_s": {"bf16": _matmul_flops_per_s(torch.device("cpu"), lambda: None, 256, repeats)},
    }
    host = {
        "up_bytes_per_s": num_bytes / copy_s,
        "down_bytes_per_s": num_bytes / copy_s,
        "duplex_bytes_per_s": num_bytes / copy_s,
        "latency_us": small_s * 1e6,
        "copy_engines_up": 1,
        "copy_engines_down": 1,
    }
    return gpu, {"host": host}


def _measure_cuda(device: torch.device, num_bytes: int, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    def sync() -> None:
        torch.cuda.synchronize(device)

    properties = torch.cuda.get_device_properties(device)
    on_device = [torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.ones(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def up() -> None:
        with torch.cuda.stream(streams[0]):
            on_host[0].copy_(on_device[0], non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(streams[1]):
            on_device[1].copy_(on_host[1], non_blocking=True)

    def both() -> None:
        up()
        down()

    def small() -> None:
        with torch.cuda.stream(streams[1]):
            on_device[1][:64].copy_(on_host[1][:64], non_blocking=True)

    up_rate, down_rate = (num_bytes / _median_s(f, sync, repeats) for f in (up, down))
    duplex = min(2 * num_bytes / _median_s(both, sync, repeats), up_rate + down_rate)
    peak = next((flops for name, flops in NOMINAL_BF16.items() if name in properties.name), None)
    gpu = {
        "name": properties.name,
        "hbm_bytes": properties.total_memory,
        "hbm_bytes_per_s": 2 * num_bytes / _median_s(lambda: on_device[1].copy_(on_device[0]), sync, repeats),
        "num_sms": properties.multi_processor_count,
        "peak_flops_per_s": {"bf16": peak or _matmul_flops_per_s(device, sync, 8192, repeats)},
    }
    links = {
        "host": {
            "up_bytes_per_s": up_rate,
            "down_bytes_per_s": down_rate,
            "duplex_bytes_per_s": duplex,
            "latency_us": _median_s(small, sync, repeats) * 1e6,
            "copy_engines_up": 1,
            "copy_engines_down": 1,
        }
    }
    index = device.index or 0
    peers = [i for i in range(torch.cuda.device_count()) if i != index and torch.cuda.can_device_access_peer(index, i)]
    if peers:
        peer = torch.device("cuda", peers[0])
        remote = [torch.empty(num_bytes, dtype=torch.uint8, device=peer) for _ in range(2)]

        def sync_both() -> None:
            torch.cuda.synchronize(device)
            torch.cuda.synchronize(peer)

        def push() -> None:
            with torch.cuda.stream(streams[0]):
                remote[0].copy_(on_device[0], non_blocking=True)

        def pull() -> None:
            with torch.cuda.stream(streams[1]):
                on_device[1].copy_(remote[1], non_blocking=True)

        def exchange() -> None:
            push()
            pull()

        push_rate, pull_rate = (num_bytes / _median_s(f, sync_both, repeats) for f in (push, pull))
        links["nvlink"] = {
            "up_bytes_per_s": push_rate,
            "down_bytes_per_s": pull_rate,
            "duplex_bytes_per_s": min(2 * num_bytes / _median_s(exchange, sync_both, repeats), push_rate + pull_rate),
            "latency_us": _median_s(lambda: remote[0][:64].copy_(on_device[0][:64]), sync_both, repeats) * 1e6,
            "copy_engines_up": 1,
            "copy_engines_down": 1,
        }
    return gpu, links


def measure(
    device: str | torch.device | None = None,
    *,
    name: str = "this-machine",
    num_bytes: int = 256 << 20,
    repeats: int = 7,
    base: dict[str, Any] | None = None,
) -> BandwidthLedger:
    """Measure this machine's links.

    Args:
        device: a CUDA device, or `"cpu"`; None: the current CUDA device if there is one.
        name: cluster name, when there is no `base`.
        num_bytes: size of the bulk copies.
        repeats: runs of which the median counts.
        base: a parsed cluster file whose other figures (shape, tiers, links not measured here) and sources are kept.

    Returns:
        A ledger whose `to_toml` writes the file, with a source for every figure. Copy engines are assumed, not
        measured.

    Raises:
        ValueError: `num_bytes` below 64, `repeats` below 1, a device that is not there, a `base` that is no cluster
            file.
    """
    check_number("num_bytes", num_bytes, 64, whole=True)
    check_number("repeats", repeats, 1, whole=True)
    check_kind("name", name, str)
    if base is not None:
        check_kind("base", base, dict, "a parsed cluster file")
        base = cluster_file.check(copy.deepcopy(base))
    device = checked_device(device)
    on_gpu = device.type == "cuda"
    gpu, links = _measure_cuda(device, num_bytes, repeats) if on_gpu else _measure_cpu(num_bytes, repeats)
    data = copy.deepcopy(base) if base is not None else _empty_file(name)
    kept_peaks = data["gpu"].get("peak_flops_per_s", {})
    data["gpu"] = gpu | {"peak_flops_per_s": gpu["peak_flops_per_s"] | kept_peaks}
    data["links"] |= links
    how = "measured" if on_gpu else "plain CPU memory copies standing in for a GPU's links, measured"
    sentence = f"{how} on {gpu['name']}, torch {torch.__version__}, {datetime.date.today().isoformat()}"
    for prefix in ("gpu", *(f"links.{link}" for link in links)):
        for path in [p for p in data["sources"] if p.startswith(f"{prefix}.") and "peak_flops" not in p]:
            del data["sources"][path]
        data["sources"][prefix] = sentence
    # No runtime call says how many engines drive one way of a link, and copies alone don't show it.
    for link in links:
        for way in ("up", "down"):
            data["sources"][f"links.{link}.copy_engines_{way}"] = "assumed: one each way"
    nominal = any(known in gpu["name"] for known in NOMINAL_BF16)
    tried = "NVIDIA data sheet, dense" if nominal else f"largest square matmul tried, {sentence}"
    kept = cluster_file.source_of(base, "gpu.peak_flops_per_s.bf16") if base is not None else None
    data["sources"]["gpu.peak_flops_per_s"] = kept or tried
    return BandwidthLedger.from_dict(data)
