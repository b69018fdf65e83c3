"""Fully sharded tables from torchrec's configs and batches on two ranks, against torchrec's unsharded collection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gemworks.parallel import ParallelPlan, build_meshes, presets
from gemworks.parallel.embeddings import FullyShardedEmbeddings, from_torchrec
from gemworks.parallel.sparse_optim import RowSGD
from parallel_spawn import spawn

NCCL = pytest.param("nccl", marks=pytest.mark.gpu)
GLOO = pytest.param("gloo", marks=pytest.mark.dist)
PLANS = {
    "groups": {"table_group": 2, "replica_shard": 1},
    "sharded replicas": {"table_group": 1, "replica_shard": 2},
}
ROWS, DIM, SAMPLES, STEPS, LR = (1009, 523), 16, 64, 8, 0.5


def _compare(rank: int, world: int, kind: str) -> dict[str, Any]:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.embedding_configs import PoolingType

    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    poolings = (PoolingType.SUM, PoolingType.MEAN)
    configs = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=n, embedding_dim=DIM, feature_names=[f"f{i}"], pooling=p)
        for i, (n, p) in enumerate(zip(ROWS, poolings, strict=True))
    ]

    def batch(step: int, of: int) -> KeyedJaggedTensor:
        g = torch.Generator().manual_seed(100 * step + of)
        lengths = torch.randint(0, 6, (2 * SAMPLES,), generator=g)
        parts = [
            torch.randint(0, n, (int(lengths[i * SAMPLES : (i + 1) * SAMPLES].sum()),), generator=g)
            for i, n in enumerate(ROWS)
        ]
        keys = [f"f{i}" for i in range(len(ROWS))]
        return KeyedJaggedTensor(keys=keys, values=torch.cat(parts).to(device), lengths=lengths.to(device))

    found: dict[str, Any] = {}
    for name, plan_args in PLANS.items():
        plan = ParallelPlan.for_world(world, shard=1, **plan_args)
        meshes = build_meshes(plan, presets.h200_host(world), device_type=kind)
        emb = FullyShardedEmbeddings(*from_torchrec(configs), meshes, RowSGD(lr=LR), device=device, seed=0)
        whole: Any = EmbeddingBagCollection(tables=configs, device=device)
        with torch.no_grad():
            for i in range(len(ROWS)):
                whole.embedding_bags[f"t{i}"].weight.copy_(emb.full_table(f"t{i}"))
        optimizer = torch.optim.SGD(whole.parameters(), lr=LR)
        worst = 0.0
        for step in range(STEPS):
            emb.prefetch()
            out = emb(batch(step, rank))
            loss = torch.stack([(out[f"f{i}"] - 0.3).pow(2).mean() for i in range(len(ROWS))]).sum()
            emb.gather_in_backward_of(loss).backward()
            each = []
            for r in range(world):
                kjt = whole(batch(step, r))
                each.append(torch.stack([(kjt[f"f{i}"] - 0.3).pow(2).mean() for i in range(len(ROWS))]).sum())
            worst = max(worst, abs(float(each[rank].detach()) - float(loss.detach())))
            torch.stack(each).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        tables = [
            float((emb.full_table(f"t{i}").cpu() - whole.embedding_bags[f"t{i}"].weight.detach().cpu()).abs().max())
            for i in range(len(ROWS))
        ]
        found[name] = {"loss": worst, "tables": max(tables), "backend": dist.get_backend()}
    return found


@pytest.mark.parametrize("backend", [NCCL, GLOO])
def test_sharded_tables_equal_torchrecs_unsharded_ones(backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    kind = "cuda" if backend == "nccl" else "cpu"
    for result in spawn(_compare, 2, kind, backend=backend):
        for name in PLANS:
            assert result[name]["backend"] == backend
            assert result[name]["loss"] < 1e-4
            assert result[name]["tables"] < 1e-4
