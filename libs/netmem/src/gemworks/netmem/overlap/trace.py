"""Read a PyTorch profiler trace (Chrome JSON) into classified activities."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gemworks.netmem.checks import check_kind, check_number

Kind = Literal["compute", "communication", "copy"]
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_COMMUNICATION_KERNEL = re.compile(
    r"nccl|rccl|nvshmem|deep_?ep|symm_?mem|(one|two)_shot_all_reduce|multimem|(^|[^a-z])barrier|(put|wait)_signal",
    re.IGNORECASE,
)
_COMMUNICATION_CPU = re.compile(
    r"^(gloo|nccl|ucc|mpi):|^c10d::|^_c10d_functional::|record_param_comms|^FSDP::(all_gather|reduce_scatter|all_reduce)"
)
_MEMCPY = re.compile(r"Memcpy\s+(HtoD|DtoH|DtoD|PtoP|HtoH)")
_LINK_OF_COPY = {"HtoD": "host.down", "DtoH": "host.up", "DtoD": "hbm", "PtoP": "nvlink", "HtoH": "host.memory"}


@dataclass(frozen=True)
class Activity:
    """One span of work.

    Attributes:
        kind: compute, communication or copy. A copy between GPUs is communication, on a copy engine.
        name, lane: what ran and where: `gpu0 stream 7`, or `thread 123` in a trace without GPU.
        start_us, end_us: on the trace's clock.
        link: for copies: `host.up`, `host.down`, `nvlink`, `hbm`.
        num_bytes: for copies.
        num_ctas: for kernels on a GPU: blocks in the grid; 0: runs on no SM.
        collective, group: name and process group of a collective, where the trace has them.
        device: GPU index, -1 for the CPU.
    """

    kind: Kind
    name: str
    lane: str
    start_us: float
    end_us: float
    link: str = ""
    num_bytes: int = 0
    num_ctas: int = 0
    collective: str = ""
    group: str = ""
    device: int = -1

    @property
    def span(self) -> tuple[float, float]:
        return (self.start_us, self.end_us)


@dataclass(frozen=True)
class Trace:
    """Classified activities of one process.

    Attributes:
        activities: in order of start.
        num_sms: by GPU index, where the trace says it.
        rank: of the process, where the trace says it.
        on_gpu: False: no GPU activity in it, CPU operators stand for compute and communication.
    """

    activities: tuple[Activity, ...]
    num_sms: Mapping[int, int]
    rank: int | None
    on_gpu: bool


def _gpu_activity(event: Mapping[str, Any]) -> Activity:
    args, name = event.get("args", {}), str(event["name"])
    start, device = float(event["ts"]), int(args.get("device", 0))
    end = start + float(event["dur"])
    lane = f"gpu{device} stream {args.get('stream', event.get('tid'))}"
    copied = _MEMCPY.search(name)
    if event["cat"] == "gpu_memcpy" or copied:
        link = _LINK_OF_COPY.get(copied.group(1) if copied else "", "unknown")
        kind: Kind = "communication" if link == "nvlink" else "copy"
        return Activity(kind, name, lane, start, end, link=link, num_bytes=int(args.get("bytes", 0)), device=device)
    collective = str(args.get("Collective name", ""))
    is_communication = bool(collective) or bool(_COMMUNICATION_KERNEL.search(name))
    return Activity(
        "communication" if is_communication else "compute",
        name,
        lane,
        start,
        end,
        num_ctas=math.prod(int(n) for n in args.get("grid", [])) if args.get("grid") else 0,
        collective=collective,
        group=str(args.get("Process Group Name", "")),
        device=device,
    )


def _cpu_activity(event: Mapping[str, Any]) -> Activity | None:
    name, args = str(event["name"]), event.get("args", {})
    communicates = bool(_COMMUNICATION_CPU.search(name))
    if event.get("cat") != "cpu_op" and not communicates:
        return None
    start = float(event["ts"])
    collective = str(args.get("Collective name", "")) or (name.split(":", 1)[1] if re.match(r"^\w+:\w", name) else "")
    return Activity(
        "communication" if communicates else "compute",
        name,
        f"thread {event.get('tid')}",
        start,
        start + float(event["dur"]),
        collective=collective if communicates else "",
        group=str(args.get("Process Group Name", "")),
    )


def read_trace(source: str | Path | Mapping[str, Any]) -> Trace:
    """Read a trace that `torch.profiler` exported.

    Args:
        source: a `.json` or `.json.gz` file, or its parsed content.

    Raises:
        ValueError: not a Chrome trace, or nothing in it that could be reported.
    """
    check_kind("source", source, (str, Path, Mapping), "a file that torch.profiler exported, or its parsed content")
    if isinstance(source, Mapping):
        data: Any = source
    else:
        path = Path(source)
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            try:
                data = json.load(file)
            except (json.JSONDecodeError, UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
                raise ValueError(
                    f"source: {path.name} is not JSON ({error}); export it with export_chrome_trace()"
                ) from None
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list):
        raise ValueError("source: expected a Chrome trace with 'traceEvents', got something else")
    spans = [e for e in events if isinstance(e, Mapping) and e.get("ph") == "X" and "ts" in e and "dur" in e]
    for event in spans:
        check_number("ts of an event in the trace", event["ts"], -math.inf)
        check_number("dur of an event in the trace", event["dur"], -math.inf)
    activities = [_gpu_activity(e) for e in spans if e.get("cat") in _GPU_CATEGORIES]
    on_gpu = bool(activities)
    if not on_gpu:
        activities = [a for a in map(_cpu_activity, spans) if a is not None]
    if not activities:
        raise ValueError("source: no kernels, copies or operators in this trace; record CPU or CUDA activities")
    meta = data if isinstance(data, Mapping) else {}
    sms = {int(p["id"]): int(p["numSms"]) for p in meta.get("deviceProperties", []) if "numSms" in p}
    rank = meta.get("distributedInfo", {}).get("rank")
    return Trace(
        tuple(sorted(activities, key=lambda a: (a.start_us, a.end_us))),
        sms,
        None if rank is None else int(rank),
        on_gpu,
    )
