# pyright: reportArgumentType=false
"""Wrong types, worlds that do not match, zeros and NaN: every public name says what it got and what it expects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gemworks.parallel import (
    BaseBatchShuffler,
    ClusterSpec,
    CostModel,
    DensePlan,
    EnsembleExperts,
    ExpertExchange,
    FeatureSpec,
    FsdpPolicy,
    FullyShardedEmbeddings,
    Gpu,
    GroupShape,
    LayerProfile,
    Layout,
    LengthLaw,
    Link,
    ModelProfile,
    ParallelPlan,
    Rate,
    RowSGD,
    RowWiseAdagrad,
    SimulationConfig,
    TableSpec,
    Traffic,
    apply_fsdp,
    collective_cost,
    default_traffic,
    describe,
    edge_bytes,
    fit_cost_model,
    place,
    presets,
    search,
    simulate,
)
from gemworks.parallel.profile import gem_like
from torch import nn

NAN = float("nan")
CLUSTER = presets.roce_cluster(64)
HOST = presets.h200_host(8)
FILE = CLUSTER.to_dict()
PLAN = ParallelPlan.for_world(8, shard=8)
LAYOUT = Layout.row_major(PLAN)
MODEL = gem_like(num_layers=1, table_rows=10**6)
FULL = ParallelPlan.for_world(8, shard=8, expert=2, table_group=8)
LENGTHS = [torch.tensor([1]), torch.tensor([2])]


def traffic(**changes: Any) -> Traffic:
    return Traffic(**{"view": "dense", "axis": "shard", "collective": "all_gather", "nbytes": 1.0} | changes)


def changed(name: str, value: Any) -> ClusterSpec:
    return ClusterSpec.from_dict({**FILE, name: value})


def layer(**changes: Any) -> LayerProfile:
    return LayerProfile(**{"name": "a", "params": 1, "flops": 1.0} | changes)


class NoState:
    def __iter__(self) -> Any:
        return iter([])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: ParallelPlan.for_world("8", shard=2), r"world_size: got '8', expected an int >= 1"),
    (lambda: ParallelPlan.for_world(0, shard=1), r"world_size: got 0"),
    (lambda: ParallelPlan.for_world(8, shard=NAN), r"dense.shard: got nan"),
    (lambda: ParallelPlan.for_world(8, shard=8, expert_shard=4), r"expert_shard: got 4 without expert"),
    (lambda: ParallelPlan.for_world(8, shard=8, replica_shard=4), r"replica_shard: got 4 without table_group"),
    (lambda: ParallelPlan.for_world(8, shard=8, sync_every=4), r"sync_every: got 4 without table_group"),
    (lambda: ParallelPlan.for_world(8, shard=8, table_group=8, sync_every=True), r"sync_every: got True"),
    (lambda: ParallelPlan(dense=None), r"dense: got NoneType, expected DensePlan"),
    (lambda: ParallelPlan(dense=DensePlan(shard=8), experts=DensePlan(shard=8)), r"experts: got DensePlan"),
    (lambda: ParallelPlan.from_dict({"dense": {}}), r"dense: got \[\], expected the axes \['shard'\]"),
    (lambda: ParallelPlan.from_dict({"dense": {"shard": 8}, "sparse": None}), r"sparse: got None"),
    (lambda: PLAN.validate(None), r"cluster: got NoneType, expected ClusterSpec; take one of presets"),
    (lambda: FULL.validate(HOST, num_experts=0), r"num_experts: got 0"),
    (lambda: Layout(plan=PLAN, ranks={"dense": [[0, 1]]}), r"ranks\['dense'\]: got list, expected an int64 tensor"),
    (lambda: Layout(plan=PLAN, ranks={"dense": torch.arange(8.0)[None]}), r"got torch.float32, expected an int64"),
    (lambda: Layout.row_major(None), r"plan: got NoneType"),
    (lambda: LAYOUT.group_of(1.5, "dense", "shard"), r"rank: got 1.5, expected 0..7"),
    (lambda: traffic(view="nope"), r"view: got 'nope', expected one of \('dense'"),
    (lambda: traffic(axis="expert"), r"axis of dense: got 'expert'"),
    (lambda: traffic(collective="gather"), r"collective: got 'gather'"),
    (lambda: traffic(nbytes=NAN), r"nbytes: got nan, expected a finite number >= 0"),
    (lambda: traffic(calls=-1), r"calls: got -1"),
    (lambda: place(None, HOST), r"plan: got NoneType"),
    (lambda: place(PLAN, CLUSTER), r"the plan has 8 ranks, the cluster 64 GPUs"),
    (lambda: place(PLAN, HOST, constraints={("dense", "shard"): "ether"}), r"tier of dense.shard: got 'ether'"),
    (lambda: place(PLAN, HOST, constraints={("dense", "nope"): "zone"}), r"axis of dense: got 'nope'"),
    (lambda: place(PLAN, HOST, constraints={("sparse", "replica"): "zone"}), r"view: got 'sparse'"),
    (lambda: default_traffic(None), r"plan: got NoneType"),
    (lambda: describe(LAYOUT, CLUSTER), r"the plan has 8 ranks, the cluster 64 GPUs"),
    (lambda: describe(Layout.row_major(FULL), HOST, tables=["x"]), r"tables: got str, expected TableSpec"),
    (lambda: describe(Layout.row_major(FULL), HOST, num_experts=0), r"num_experts: got 0"),
    (lambda: collective_cost("gather", GroupShape(size=8), 1.0, HOST), r"collective: got 'gather'"),
    (lambda: collective_cost("all_gather", GroupShape(size=8), NAN, HOST), r"nbytes: got nan"),
    (lambda: collective_cost("all_reduce", GroupShape(size=8), 1.0, HOST, "butterfly"), r"algorithm: got 'butterfly'"),
    (lambda: collective_cost("all_reduce", [[0, 1]], 1.0, HOST), r"groups: got list, expected a GroupShape"),
    (lambda: collective_cost("all_reduce", torch.empty(0, 2).long(), 1.0, HOST), r"groups: got torch.int64 \(0, 2\)"),
    (lambda: GroupShape(size=0), r"GroupShape: size: got 0"),
    (lambda: GroupShape(size=4, num_domains=0), r"GroupShape: num_domains: got 0"),
    (lambda: GroupShape(size="4"), r"GroupShape: size: got '4'"),
    (lambda: edge_bytes("gather", 4, 1.0), r"collective: got 'gather'"),
    (lambda: edge_bytes("all_gather", 0, 1.0), r"size: got 0"),
    (lambda: edge_bytes("all_gather", 4, NAN), r"nbytes: got nan"),
    (lambda: Rate(bytes_per_s="1e9", latency_us=1), r"bytes_per_s: got '1e9', expected a finite number > 0"),
    (lambda: Rate(bytes_per_s=float("inf"), latency_us=1), r"bytes_per_s: got inf"),
    (lambda: dataclasses.replace(HOST.links["host"], up_bytes_per_s=None), r"up_bytes_per_s: got None"),
    (lambda: Link(**dataclasses.asdict(HOST.links["host"]) | {"latency_us": NAN}), r"latency_us: got nan"),
    (lambda: dataclasses.replace(HOST.gpu, peak_flops_per_s=None), r"peak_flops_per_s: got None, expected a table"),
    (lambda: Gpu(name="x", hbm_bytes=0, hbm_bytes_per_s=1.0, num_sms=1, peak_flops_per_s={}), r"hbm_bytes: got 0"),
    (lambda: changed("links", []), r"links: got \[\], expected a table"),
    (lambda: changed("sources", ["x"]), r"sources: got \['x'\]"),
    (lambda: changed("extra", "x"), r"extra: got 'x'"),
    (lambda: changed("gpu", {**FILE["gpu"], "peak_flops_per_s": [1]}), r"gpu.peak_flops_per_s: got \[1\]"),
    (lambda: changed("shape", {**FILE["shape"], "oversubscription": NAN}), r"oversubscription: got nan"),
    (lambda: CLUSTER.resized(8.0), r"num_gpus: got 8.0"),
    (lambda: CLUSTER.scaled("nvlink", NAN), r"factor: got nan"),
    (lambda: ClusterSpec.measure(HOST), r"base: got 8 GPUs, expected the 0 ranks"),
    (lambda: presets.h200_host(16), r"num_gpus: got 16, expected 1..8"),
    (lambda: presets.roce_cluster(64, gpus_per_zone=12), r"gpus_per_zone: got 12, expected a multiple of the 8"),
    (lambda: LengthLaw(name="zipf", max_len=10, exponent=NAN), r"exponent: got nan"),
    (lambda: LengthLaw(name="uniform", max_len=10.5), r"max_len: got 10.5"),
    (lambda: LengthLaw(name="normal", max_len=10), r"name: got 'normal'"),
    (lambda: CostModel(linear=NAN), r"linear: got nan, expected a finite number >= 0"),
    (lambda: CostModel(linear=-1.0), r"linear: got -1.0"),
    (lambda: CostModel(linear=1.0).of_lengths([1, 2]), r"lengths: got list, expected a tensor"),
    (lambda: fit_cost_model(LENGTHS, [1.0, NAN]), r"times: got nan, expected a finite number > 0"),
    (lambda: fit_cost_model([[1], [2]], [1.0, 2.0]), r"batches: got \[1\], expected tensors"),
    (lambda: fit_cost_model([], []), r"at least two"),
    (lambda: BaseBatchShuffler([1], float, sub_batches_per_batch=1.5), r"sub_batches_per_batch: got 1.5"),
    (lambda: BaseBatchShuffler(None, float), r"source: got NoneType, expected an iterable"),
    (lambda: BaseBatchShuffler([1], 3), r"cost: got int, expected a function"),
    (lambda: list(BaseBatchShuffler([1], lambda x: NAN)), r"cost of a sub-batch: got nan"),
    (
        lambda: BaseBatchShuffler(NoState(), float).load_state_dict({}),
        r"state: lacks \['emitted', 'source', 'window'\]",
    ),
    (lambda: TableSpec(name="a", num_rows="4", dim=4), r"table 'a': num_rows: got '4'"),
    (lambda: TableSpec(name="a", num_rows=NAN, dim=4), r"table 'a': num_rows: got nan"),
    (lambda: TableSpec(name="a", num_rows=4, dim=4, sharding="column_wise"), r"sharding: got 'column_wise'"),
    (lambda: FeatureSpec(name="a", table="t", pooling="max"), r"feature 'a': pooling: got 'max'"),
    (lambda: RowSGD(lr=NAN), r"lr: got nan"),
    (lambda: RowSGD(lr="0.1"), r"lr: got '0.1'"),
    (lambda: RowWiseAdagrad(lr=0.1, moment_scale=-1), r"moment_scale: got -1"),
    (lambda: RowWiseAdagrad(lr=0.1, eps=-1.0), r"eps: got -1.0"),
    (lambda: EnsembleExperts(lambda i: nn.Identity(), 0), r"num_experts: got 0"),
    (lambda: EnsembleExperts(lambda i: nn.Identity(), "2"), r"num_experts: got '2'"),
    (lambda: ExpertExchange(2, gradient="max"), r"gradient: got 'max'"),
    (lambda: EnsembleExperts(lambda i: None, 2), r"make_expert: got \{0: 'NoneType'"),
    (lambda: EnsembleExperts(lambda i: nn.Linear(2, 2 + i), 2)(torch.ones(2, 2)), r"experts: got outputs .* one shape"),
    (lambda: FsdpPolicy(min_shard_numel=-1), r"min_shard_numel: got -1"),
    (lambda: FsdpPolicy(keep_bytes=NAN), r"keep_bytes: got nan"),
    (lambda: FsdpPolicy(param_dtype="bf16"), r"param_dtype: got 'bf16', expected a torch dtype"),
    (lambda: apply_fsdp(None, None, []), r"model: got NoneType, expected Module"),
    (lambda: apply_fsdp(nn.Linear(1, 1), None, []), r"meshes: got NoneType, expected Meshes; make them"),
    (lambda: FullyShardedEmbeddings([], [], None, RowSGD(lr=0.1)), r"meshes: got NoneType, expected Meshes"),
    (lambda: layer(params=-1), r"layer 'a': params: got -1"),
    (lambda: layer(efficiency=45.0), r"layer 'a': efficiency: got 45.0, expected a share"),
    (lambda: layer(kind="moe"), r"layer 'a': kind: got 'moe'"),
    (lambda: layer(flops=NAN), r"layer 'a': flops: got nan"),
    (lambda: layer(forward_host_us=-1.0), r"layer 'a': forward_host_us: got -1.0"),
    (lambda: layer(length_share=2), r"layer 'a': length_share: got 2, expected a share"),
    (lambda: dataclasses.replace(MODEL, weight_bytes=-1.0), r"weight_bytes: got -1.0"),
    (lambda: dataclasses.replace(MODEL, ids_per_batch=NAN), r"ids_per_batch: got nan"),
    (lambda: dataclasses.replace(MODEL, optimizer_bytes=None), r"optimizer_bytes: got None"),
    (lambda: dataclasses.replace(MODEL, lookup_us=-3), r"lookup_us: got -3"),
    (lambda: dataclasses.replace(MODEL, num_experts="2"), r"num_experts: got '2'"),
    (lambda: dataclasses.replace(MODEL, tables=("t",)), r"tables: got str, expected TableSpec"),
    (lambda: dataclasses.replace(MODEL, law="uniform"), r"law: got str, expected LengthLaw"),
    (lambda: dataclasses.replace(MODEL, cost=1.0), r"cost: got float, expected CostModel"),
    (lambda: ModelProfile(name="a", layers=("x",)), r"layers: got str, expected LayerProfile"),
    (lambda: dataclasses.replace(MODEL, samples_per_rank=0), r"samples_per_rank: got 0"),
    (lambda: simulate(FULL, dataclasses.replace(MODEL, dtype="bf17"), HOST), r"model.dtype: got 'bf17'"),
    (lambda: SimulationConfig(balance="luck"), r"balance: got 'luck'"),
    (lambda: SimulationConfig(sm_slowdown=NAN), r"sm_slowdown: got nan"),
    (lambda: SimulationConfig(wire_factor={"gather": 2.0}), r"wire_factor: got 'gather'"),
    (lambda: SimulationConfig(wire_factor={"all_gather": NAN}), r"wire_factor of all_gather: got nan"),
    (lambda: SimulationConfig(balance_gain={"none": 0.0}), r"balance: a method of balance_gain: got 'bbs'"),
    (lambda: SimulationConfig(balance_gain={"bbs": "much"}), r"balance_gain of bbs: got 'much'"),
    (lambda: simulate(None, MODEL, HOST), r"plan: got NoneType"),
    (lambda: simulate(FULL, None, HOST), r"model: got NoneType, expected ModelProfile; gem_like"),
    (lambda: simulate(PLAN, MODEL, HOST), r"has no experts view, but gem-like-1x512 has expert layers; give expert"),
    (
        lambda: simulate(ParallelPlan.for_world(8, shard=8, expert=2), MODEL, HOST),
        r"has no sparse view, but gem-like-1x512 has 8 tables; give table_group, 8 for one copy",
    ),
    (lambda: simulate(FULL, MODEL, HOST, splits={"dense": {}}), r"splits: got \{\} for dense"),
    (
        lambda: simulate(FULL, MODEL, HOST, splits={"dense": {"shard": (2, 1, 1), "replica": (1, 1, 1)}}),
        r"splits: got .*\(2, 1, 1\).* place_splits finds them",
    ),
    (lambda: search(None, HOST), r"model: got NoneType"),
    (lambda: search(MODEL, HOST, keep="2"), r"keep: got '2'"),
    (lambda: search(gem_like(num_layers=1, num_tables=0), HOST), r"num_tables: got 0"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[m[:48] for _, m in CALLS])
def test_a_wrong_call_says_what_it_got_and_what_it_expects(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    for read in (ClusterSpec.from_toml, ModelProfile.from_json):
        with pytest.raises(FileNotFoundError, match=r"missing\.file"):
            read(tmp_path / "missing.file")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bytes\.toml': not TOML"):
        ClusterSpec.from_toml(tmp_path / "bytes.toml")
    (tmp_path / "model.json").write_text(MODEL.to_json().replace('"weight_bytes": 2.0', '"weight_bytes": -2.0'))
    with pytest.raises(ValueError, match=r"model profile '.*model\.json': weight_bytes: got -2.0"):
        ModelProfile.from_json(tmp_path / "model.json")
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model profile '.*model\.json': no 'layers' in it"):
        ModelProfile.from_json(tmp_path / "model.json")


def test_tables_count_whole_where_a_plan_does_not_shard_them() -> None:
    from gemworks.parallel.memory import estimate_memory

    found = estimate_memory(PLAN, MODEL, HOST, 0)
    assert found.parts["tables and row optimizer"] == MODEL.table_bytes
