"""Network and memory planned together: budgets, offload, SM-free collectives."""

from gemworks.netmem.arbiter import CopyArbiter
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.budget import CHOICES, Option, Pace, Plan, Region, StepProfile, evaluate
from gemworks.netmem.codec import Bf16Codec, Codec, Fp8Codec, MXFP8Codec, explain_codec, get_codec
from gemworks.netmem.collectives import QuantizedCollective
from gemworks.netmem.copy_engine import (
    CopyEngineAllGather,
    CopyEngineReduceScatter,
    copy_engine_all_gather,
    copy_engine_reduce_scatter,
    few_ctas_options,
    verify_copy_engines,
)
from gemworks.netmem.errors import (
    CodecError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InfeasibleBudgetError,
    ModifiedAfterSaveError,
    NetmemError,
    OversubscribedError,
    ParkedStateError,
    PinnedMemoryExhaustedError,
)
from gemworks.netmem.ledger import BandwidthLedger, Link
from gemworks.netmem.measure import measure
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.overlap import overlap_report
from gemworks.netmem.policy import apply_policy, compile_with_budget
from gemworks.netmem.profiler import profile, table
from gemworks.netmem.rehearsal import Rehearsal, rehearse
from gemworks.netmem.solver import curve, least_feasible, solve
from gemworks.netmem.stash import StateStash
from gemworks.netmem.timeline import Prediction, Segment, Transfer

__all__ = [
    "CHOICES",
    "BandwidthLedger",
    "Bf16Codec",
    "Codec",
    "CodecError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CopyArbiter",
    "CopyEngineAllGather",
    "CopyEngineReduceScatter",
    "Fp8Codec",
    "InfeasibleBudgetError",
    "Link",
    "MXFP8Codec",
    "ModifiedAfterSaveError",
    "NetmemError",
    "OffloadEngine",
    "Option",
    "OversubscribedError",
    "Pace",
    "ParkedStateError",
    "PinnedArena",
    "PinnedMemoryExhaustedError",
    "Plan",
    "Prediction",
    "QuantizedCollective",
    "Region",
    "Rehearsal",
    "Segment",
    "StateStash",
    "StepProfile",
    "Transfer",
    "apply_policy",
    "compile_with_budget",
    "copy_engine_all_gather",
    "copy_engine_reduce_scatter",
    "curve",
    "evaluate",
    "explain_codec",
    "few_ctas_options",
    "get_codec",
    "least_feasible",
    "measure",
    "overlap_report",
    "profile",
    "rehearse",
    "solve",
    "table",
    "verify_copy_engines",
]
