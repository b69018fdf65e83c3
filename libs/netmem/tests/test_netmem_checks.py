"""Wrong arguments of the public functions are ValueErrors that name the argument and what was expected."""

# pyright: reportArgumentType=false, reportCallIssue=false
# the arguments are wrong on purpose
from __future__ import annotations

import math

import gemworks.netmem as netmem
import pytest
import torch
from gemworks.netmem import Link, Option, Pace, Region, Segment, StepProfile, Transfer
from gemworks.netmem.movers import InlineMover
from torch import nn

pytestmark = pytest.mark.reference

NAN = float("nan")
KEEP = Option("keep", 1, 2, 10, 12, 14)
AWAY = Option("offload", 1, 2, 0, 12, 14, moved_bytes=10)
STEP = StepProfile((Region("a", (KEEP, AWAY)), Region("b", (KEEP,))), 0, 5, 5, 4)
OTHER = netmem.evaluate(StepProfile((Region("a", (KEEP,)),)), ["keep"])
PLAN = netmem.evaluate(STEP, ["offload", "keep"])
X = torch.randn(2, 4)


def ledger() -> netmem.BandwidthLedger:
    return netmem.BandwidthLedger([Link("host.up", 1e9), Link("host.down", 1e9)], 1e12)


def arena() -> netmem.PinnedArena:
    return netmem.PinnedArena(1 << 16, pin=False)


def engine(**kwargs) -> netmem.OffloadEngine:
    return netmem.OffloadEngine(arena(), device="cpu", **kwargs)


def stash() -> netmem.StateStash:
    return netmem.StateStash(arena(), device="cpu")


def port():
    return netmem.CopyArbiter(InlineMover()).port(0)


def profile(model=None, batch=X, regions=("0",), **kwargs):
    given = {"ledger": ledger(), "engine": engine(), "repeats": 1} | kwargs
    return netmem.profile(model or nn.Sequential(nn.Linear(4, 4)), batch, regions, **given)


def apply(choices, **kwargs):
    return netmem.apply_policy(nn.Sequential(nn.Linear(4, 4)), choices, **kwargs)


CALLS = {
    "solve": [
        ("profile", lambda: netmem.solve(None, 1)),
        ("budget_bytes", lambda: netmem.solve(STEP, NAN)),
        ("budget_bytes", lambda: netmem.solve(STEP, "1GB")),
        ("rel_gap", lambda: netmem.solve(STEP, 100, rel_gap=NAN)),
        ("max_labels", lambda: netmem.solve(STEP, 100, max_labels=1.5)),
    ],
    "curve": [
        ("profile", lambda: netmem.curve(None, [1])),
        ("budgets_bytes", lambda: netmem.curve(STEP, 100)),
        ("budgets_bytes", lambda: netmem.curve(STEP, [NAN])),
    ],
    "least_feasible": [("profile", lambda: netmem.least_feasible([KEEP]))],
    "evaluate": [
        ("profile", lambda: netmem.evaluate(None, ["keep"])),
        ("choices", lambda: netmem.evaluate(STEP, None)),
        ("choices: no region is called 'c'", lambda: netmem.evaluate(STEP, {"a": "keep", "b": "keep", "c": "keep"})),
    ],
    "rehearse": [
        ("profile", lambda: netmem.rehearse(None, PLAN)),
        ("plan", lambda: netmem.rehearse(STEP, None)),
        ("plan", lambda: netmem.rehearse(STEP, OTHER)),
        ("duplex_bytes_per_s", lambda: netmem.rehearse(STEP, PLAN, duplex_bytes_per_s=NAN)),
        ("num_steps", lambda: netmem.rehearse(STEP, PLAN, num_steps=1.5)),
    ],
    "table": [("profile", lambda: netmem.table(None)), ("plan", lambda: netmem.table(STEP, OTHER))],
    "Option": [
        ("forward_s", lambda: Option("k", NAN, 1, 1, 1, 1)),
        ("forward_s", lambda: Option("k", None, 1, 1, 1, 1)),
        ("forward_s", lambda: Option("k", math.inf, 1, 1, 1, 1)),
        ("held_bytes", lambda: Option("k", 1, 1, -1, 1, 1)),
        ("parcel_bytes", lambda: Option("k", 1, 1, 1, 1, 1, 2, parcel_bytes=(3, -1))),
        ("choice", lambda: Option(3, 1, 1, 1, 1, 1)),
    ],
    "Region": [
        ("name", lambda: Region(None, (KEEP,))),
        ("options", lambda: Region("a", KEEP)),
        ("options", lambda: Region("a", ("keep",))),
    ],
    "StepProfile": [
        ("regions", lambda: StepProfile(None)),
        ("up_bytes_per_s", lambda: StepProfile((), up_bytes_per_s=NAN)),
        ("base_bytes", lambda: StepProfile((), base_bytes=NAN)),
        ("window_bytes", lambda: StepProfile((), window_bytes=None)),
    ],
    "Pace": [("leaving_bytes", lambda: Pace(-1, 0)), ("staying_bytes", lambda: Pace(1, 1, NAN))],
    "BandwidthLedger": [
        ("bytes_per_s", lambda: Link("x", "1")),
        ("latency_s", lambda: Link("x", 1, latency_s=NAN)),
        ("resources", lambda: Link("x", 1, resources="hbm")),
        ("links", lambda: netmem.BandwidthLedger(None, 1)),
        ("links", lambda: netmem.BandwidthLedger([Link("a", 1), Link("a", 2)], 1)),
        ("hbm_bytes_per_s", lambda: netmem.BandwidthLedger([], NAN)),
        ("path", lambda: netmem.BandwidthLedger.from_toml(None)),
        ("num_bytes", lambda: ledger().reserve("host.up", NAN, start_s=0, end_s=1, owner="x")),
        ("end_s", lambda: ledger().reserve("host.up", 1, start_s=0, end_s=math.inf, owner="x")),
        ("start_s", lambda: ledger().free_bytes("host.up", NAN, 1)),
        ("num_bytes", lambda: ledger().fit("host.up", -5, start_s=0, owner="x")),
        ("deadline_s", lambda: ledger().fit("host.up", 5, start_s=0, owner="x", deadline_s=NAN)),
        ("reservation", lambda: ledger().release(None)),
        ("segments", lambda: ledger().predict(["a"], [])),
        ("duration_s", lambda: Segment("a", NAN)),
        ("num_bytes", lambda: Transfer("a", -1, "host.up")),
        ("link", lambda: Transfer("a", 1, None)),
    ],
    "measure": [
        ("device", lambda: netmem.measure("gpu9")),
        ("num_bytes", lambda: netmem.measure("cpu", num_bytes=1e6)),
        ("base", lambda: netmem.measure("cpu", base="cluster.toml")),
        ("missing", lambda: netmem.measure("cpu", base={})),
    ],
    "PinnedArena": [
        ("size_bytes", lambda: arena().allocate(None)),
        ("block", lambda: arena().free(None)),
        ("capacity_bytes", lambda: netmem.PinnedArena(NAN)),
    ],
    "OffloadEngine": [
        ("window_bytes", lambda: engine(window_bytes=NAN)),
        ("min_bytes", lambda: engine(min_bytes=None)),
        ("mover", lambda: engine(mover=3)),
        ("device", lambda: netmem.OffloadEngine(arena(), device="gpu7")),
        ("device", lambda: netmem.OffloadEngine(arena(), device="meta")),
        ("modules", lambda: engine().saving(3).__enter__()),
        ("leaving_bytes", lambda: engine().end_forward(NAN)),
        ("end", lambda: engine().begin_backward(5, 2, 0)),
    ],
    "CopyArbiter": [
        ("mover", lambda: netmem.CopyArbiter(None)),
        ("urgency", lambda: netmem.CopyArbiter(InlineMover()).port("high")),
        ("x", lambda: port().to_device(None, torch.device("cpu"))),
        ("way", lambda: port().copy("left", X, X, [])),
        ("target", lambda: port().copy("up", X.view(-1), X.view(-1), [])),
    ],
    "StateStash": [
        ("arena", lambda: netmem.StateStash(None)),
        ("tensors", lambda: stash().add("a", ["x"])),
        ("optimizer", lambda: stash().add_optimizer("o", None)),
        ("module", lambda: stash().add_module("m", None)),
        ("name", lambda: stash().add(None, [X])),
    ],
    "codecs": [
        ("block", lambda: netmem.Fp8Codec(1.5)),
        ("x", lambda: netmem.Fp8Codec().encode(None)),
        ("x", lambda: netmem.MXFP8Codec().encode(torch.ones(3, dtype=torch.int32))),
        ("codes", lambda: netmem.Fp8Codec().decode((torch.zeros(3, dtype=torch.uint8), X), (4,), X.dtype)),
        ("codes", lambda: netmem.Bf16Codec().decode((X,), (4,), X.dtype)),
        ("x", lambda: netmem.explain_codec("mxfp8", None)),
    ],
    "copy engines": [
        ("model", lambda: netmem.copy_engine_all_gather(None)),
        ("model", lambda: netmem.copy_engine_reduce_scatter(None)),
        ("group", lambda: netmem.CopyEngineAllGather(None, torch.device("cpu"))),
        ("device", lambda: netmem.CopyEngineReduceScatter(None, None)),
        ("max_ctas", lambda: netmem.few_ctas_options(None)),
        ("source", lambda: netmem.verify_copy_engines(None)),
        (
            "dur of an event",
            lambda: netmem.overlap_report(
                {"traceEvents": [{"ph": "X", "ts": 0, "dur": NAN, "cat": "kernel", "name": "k"}]}
            ),
        ),
    ],
    "apply_policy": [
        ("model", lambda: netmem.apply_policy(None, {})),
        ("choices", lambda: apply(None)),
        ("choices", lambda: apply({0: "keep"})),
        ("choice", lambda: apply({"0": None})),
        ("engine", lambda: apply({"0": "offload"}, engine=5)),
        ("compile_kwargs", lambda: apply({"0": "keep"}, compile_kwargs=5)),
        ("forward", lambda: netmem.compile_with_budget(None, 0.5)),
        ("budget", lambda: netmem.compile_with_budget(nn.Identity(), "half")),
    ],
    "profile": [
        ("model", lambda: profile(model=3)),
        ("regions", lambda: profile(regions=[])),
        ("regions", lambda: profile(regions="0")),
        ("regions", lambda: profile(regions=["0", "0"])),
        ("ledger", lambda: profile(ledger=None)),
        ("engine", lambda: profile(engine=None)),
        ("repeats", lambda: profile(repeats=0)),
        ("choices", lambda: profile(choices=[])),
        ("choices", lambda: profile(choices=["keep", "keep"])),
        ("base_bytes", lambda: profile(base_bytes=-1)),
    ],
}


@pytest.mark.parametrize("function", CALLS)
def test_a_wrong_argument_is_named(function):
    for named, call in CALLS[function]:
        with pytest.raises(ValueError, match=named) as found:
            call()
        assert "expected" in str(found.value) or named == "missing", found.value


def test_what_is_unusual_and_right_passes():
    assert netmem.solve(STEP, math.inf).choices == {"a": "keep", "b": "keep"}
    assert netmem.curve(STEP, (b for b in [-1.0, 100.0]))[0] is None
    links = (Link(name, 1e9) for name in ("host.up", "host.down"))
    assert set(netmem.BandwidthLedger(links, 1e12).links) == {"host.up", "host.down"}
    assert ledger().predict((Segment(n, 1.0) for n in "ab"), iter(())).total_s == 2.0
    state = stash()
    state.add("views", (x for x in X))
    assert state.place("views").value == "on the device"
    engine().end_forward(math.inf)
