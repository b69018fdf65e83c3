"""The two optimizers: the tables' fused update, the gate before it, accumulation, and what it all equals."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gemworks.gem.config import OptimizerConfig
from gemworks.gem.data import open_source
from gemworks.gem.loss import task_loss
from gemworks.gem.model.gate import GradientGate
from gemworks.gem.model.gem import Gem
from gemworks.gem.optim import ADAGRAD_EPS, Optimizers
from gemworks.gem.presets import load_config
from gemworks.gem.ranks import Ranks
from gemworks.gem.trainer import Trainer

pytestmark = pytest.mark.reference

CPU = torch.device("cpu")
SETTINGS = (
    "data.num_samples=384",
    "data.batch_size=32",
    "data.max_length=16",
    "data.prefetch=0",
    "model.dim=32",
    "optimizer.warmup_steps=3",
)


def make(*settings: str) -> Trainer:
    config = load_config("tiny", sets=[*SETTINGS, *settings])
    return Trainer(config, open_source(config.data), CPU)


def test_fused_update_equals_row_wise_adagrad_that_steps_afterwards() -> None:
    """Four steps against the formula, written out, on gradients taken from a copy of the model without hooks."""
    trainer = make("optimizer.decay=constant", "optimizer.warmup_steps=0")
    model, optimizers = trainer.model, trainer.optimizers
    config = trainer.config.optimizer
    sums = {name: torch.zeros(p.shape[0], 1) for name, p in model.embeddings.named_parameters()}
    twin = Gem(trainer.schema, trainer.config, device=CPU)
    for step, batch in zip(range(4), trainer.loader, strict=False):
        twin.load_state_dict(copy.deepcopy(model.state_dict()))
        twin.zero_grad()
        task_loss(twin(batch), batch.labels_BK, torch.ones(2)).backward()
        optimizers.begin(step)
        task_loss(model(batch), batch.labels_BK, torch.ones(2)).backward()
        moved = 0
        for (name, p), reference in zip(model.embeddings.named_parameters(), twin.embeddings.parameters(), strict=True):
            assert p.grad is None
            assert reference.grad is not None
            sums[name] += reference.grad.square().mean(1, keepdim=True)
            expected = reference.detach() - config.sparse_lr * reference.grad / (sums[name].sqrt() + ADAGRAD_EPS)
            torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-7)
            moved += int((p.detach() != reference.detach()).any())
        assert moved == len(sums)
        optimizers.clip()
        optimizers.step_dense()


def test_weights_decay_and_vectors_do_not() -> None:
    groups = make("optimizer.weight_decay=0.1").optimizers.dense.param_groups
    assert {(p.ndim >= 2, group["weight_decay"]) for group in groups for p in group["params"]} == {
        (True, 0.1),
        (False, 0.0),
    }


@pytest.mark.parametrize("clip_norm", [1e-3, 1e6])
def test_parameters_of_several_meshes_are_clipped_by_one_norm(clip_norm: float) -> None:
    """As where experts are spread: their norms add up to the whole gradient's, and a small gradient stays as it is."""
    trainer = make(f"optimizer.clip_norm={clip_norm}")
    experts = frozenset(name for name, _ in trainer.model.named_parameters() if ".interaction.experts." in name)
    tables = trainer.optimizers.tables
    spread: Any = SimpleNamespace(tables=tables, experts=experts, expert_group=None)
    optimizers = Optimizers(trainer.model, trainer.config.optimizer, 10, spread)
    parameters = [p for p in trainer.model.dense_parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(p.shape, generator=generator) for p in parameters]
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient.clone()
    norm = optimizers.clip()
    wanted = torch.cat([g.flatten() for g in gradients]).norm()
    torch.testing.assert_close(norm, wanted)
    factor = min(1.0, clip_norm / (float(wanted) + 1e-6))
    for p, gradient in zip(parameters, gradients, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, gradient * factor)


def test_the_gate_remembers_a_refusal_until_it_is_reset() -> None:
    """Of several batches of a step one is enough, whichever it is."""
    for bad in (0, 1):
        gate = GradientGate()
        for batch in range(3):
            (y,) = gate(torch.ones(2, requires_grad=True))
            (y * (math.inf if batch == bad else 1.0)).sum().backward()
        assert gate.finite is not None
        assert not gate.finite
        gate.reset()
        assert gate.finite is None


def test_no_gradient_of_a_tables_size_survives_backward() -> None:
    trainer = make()
    sizes = {p.numel() for p in trainer.model.sparse_parameters()}
    next(iter(trainer.steps()))
    assert all(p.grad is None for p in trainer.model.sparse_parameters())
    assert all(p.grad is not None for p in trainer.model.dense_parameters() if p.numel() in sizes)


def test_sharding_reads_the_declaration_off_the_tables() -> None:
    """What `DistributedModelParallel` looks at when it chooses fbgemm's kernel."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

    trainer = make("optimizer.sparse_lr=0.25")
    for p in trainer.model.sparse_parameters():
        declared: Any = p
        assert [optimizer_type_to_emb_opt_type(c) for c in declared._optimizer_classes] == [
            EmbOptimType.EXACT_ROWWISE_ADAGRAD
        ]
        assert declared._optimizer_kwargs == [{"lr": 0.25, "eps": ADAGRAD_EPS}]


def test_gate_closes_for_all_tensors_when_one_gradient_is_not_finite() -> None:
    gate = GradientGate()
    x, y = torch.ones(3, requires_grad=True), torch.ones(2, 2, requires_grad=True)

    def gradients(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        gate.reset()
        x.grad = y.grad = None
        a, b = gate(x, y)
        (2 * a.sum() + (factor * b).sum()).backward()
        assert x.grad is not None
        assert y.grad is not None
        return x.grad, y.grad

    dx, dy = gradients(3.0)
    assert (dx.tolist(), dy.tolist()) == ([2.0] * 3, [[3.0] * 2] * 2)
    assert bool(gate.finite)
    # 1e30 is finite, its square is not: the accumulator would freeze the row for good
    for bad in (math.nan, math.inf, -math.inf, 1e30):
        dx, dy = gradients(bad)
        assert (dx.tolist(), dy.tolist()) == ([0.0] * 3, [[0.0] * 2] * 2)
        assert gate.finite is not None
        assert not bool(gate.finite)
    gate.closed = True
    assert gradients(3.0)[0].tolist() == [0.0] * 3
    assert bool(gate.finite)


def test_gate_remembers_over_the_batches_of_a_step() -> None:
    gate, x = GradientGate(), torch.ones(1, requires_grad=True)
    for factor in (math.nan, 1.0):
        (gate(x)[0] * factor).sum().backward()
    assert gate.finite is not None
    assert not bool(gate.finite)
    with torch.no_grad():
        assert gate(x)[0] is x


def test_accumulated_dense_gradient_is_that_of_the_large_batch() -> None:
    """Three batches of 32 against one of 96; the tables differ by design (they move after each batch): held still."""
    still = ("optimizer.sparse_lr=1e-30", "optimizer.warmup_steps=0", "optimizer.decay=constant")
    parts, whole = make("train.accumulate=3", *still), make("data.batch_size=96", *still)
    assert parts.total_steps == whole.total_steps == 4
    for _ in zip(parts.steps(), whole.steps(), strict=True):
        ours, theirs = parts.take_row(), whole.take_row()
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert ours.ne == pytest.approx(theirs.ne, rel=1e-6)
    for (name, a), b in zip(parts.model.named_parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5, msg=name)


def test_accumulation_takes_what_is_left_and_weighs_by_samples() -> None:
    """The last step of an epoch has fewer batches, and its last batch fewer samples."""
    trainer = make("train.accumulate=5", "data.num_samples=410", "train.epochs=2")
    num = trainer.loader.num_samples
    per_epoch = -(-num // (5 * 32))
    assert trainer.total_steps == 2 * per_epoch
    seen = 0
    for step in trainer.steps():
        trainer.take_row()
        assert trainer.total.num_steps == step
        assert trainer.total.num_samples - seen <= 160
        seen = trainer.total.num_samples
    assert seen == 2 * num


def test_tables_move_once_per_accumulated_batch() -> None:
    trainer = make("train.accumulate=3")
    next(iter(trainer.steps()))
    tables = list(trainer.model.sparse_parameters())
    assert tables
    for table in tables:
        (optimizer,) = table._in_backward_optimizers  # type: ignore[attr-defined]
        assert int(optimizer.state[table]["step"]) == 3


def test_learning_rate_reaches_every_table() -> None:
    config = load_config("tiny", sets=SETTINGS)
    model = Gem(open_source(config.data).schema, config, device=CPU)
    optimizers = Optimizers(model, OptimizerConfig(sparse_lr=0.5, warmup_steps=4), 10)
    optimizers.begin(1)
    groups = optimizers.tables.param_groups
    assert [group["lr"] for group in groups] == [0.25] * len(list(model.sparse_parameters()))


def test_second_optimizers_of_one_model_are_refused() -> None:
    model = make().model
    with pytest.raises(ValueError, match="its tables have optimizers already"):
        Optimizers(model, OptimizerConfig(), 10)


def test_ranks() -> None:
    assert Ranks().alone
    assert torch.equal(Ranks().sum(torch.ones(2)), torch.ones(2))
    assert not Ranks(1, 2).is_first
    with pytest.raises(ValueError, match="rank: got 2 of 2"):
        Ranks(2, 2)


@pytest.mark.slow
# importing inductor uses torch.jit, which torch 2.13 itself has deprecated
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
# dynamo looks at .grad of whatever comes in
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_compiled_layers_train_like_eager_ones() -> None:
    eager, compiled = make("train.max_steps=4"), make("train.max_steps=4", "train.compile=true")
    for _ in zip(eager.steps(), compiled.steps(), strict=True):
        assert compiled.take_row().loss == pytest.approx(eager.take_row().loss, rel=1e-4)
    assert set(compiled.model.state_dict()) == set(eager.model.state_dict())  # checkpoints are the same
    assert hasattr(compiled.model.head.mlp.forward, "_torchdynamo_orig_callable")
    assert not hasattr(eager.model.head.mlp.forward, "_torchdynamo_orig_callable")


def test_parked_state_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps the moments have no memory; losses, weights and a checkpoint's state are those of a run without."""
    monkeypatch.setattr("gemworks.gem.optim.MIN_PARKED_BYTES", 256)
    seen = {}
    for place in ("device", "host"):
        trainer = make(f"optimizer.state_place={place}", "train.max_steps=4")
        losses, sizes = [], set()
        for _ in trainer.steps():
            losses.append(trainer.take_row().loss)
            moments = [entry["exp_avg"] for entry in trainer.optimizers.dense.state.values()]
            sizes.add(max(x.untyped_storage().nbytes() for x in moments) >= 256)
        assert sizes == {place == "device"}
        state = trainer.optimizers.state_dict()["state"]
        seen[place] = losses, {name: entry["exp_avg"].clone() for name, entry in state.items() if "exp_avg" in entry}
    assert seen["host"][0] == seen["device"][0]
    for name, moment in seen["device"][1].items():
        assert torch.equal(seen["host"][1][name], moment), name


def test_parked_state_stays_parked_after_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving and loading bring the moments back; the next step begins without them, and learns the same."""
    monkeypatch.setattr("gemworks.gem.optim.MIN_PARKED_BYTES", 256)
    seen = {}
    for place in ("device", "host"):
        settings = (f"optimizer.state_place={place}", "train.max_steps=6")
        first = make(*settings)
        for step in first.steps():
            if step == 3:
                break
        path = first.save(tmp_path / place)
        trainer = make(*settings)
        trainer.load(path)
        sizes: list[int] = []

        def look(*args: object, of: Trainer = trainer, into: list[int] = sizes) -> None:
            moments = [entry["exp_avg"] for entry in of.optimizers.dense.state.values()]
            into.append(max(x.untyped_storage().nbytes() for x in moments))

        trainer.model.register_forward_pre_hook(look)
        losses = []
        for step in trainer.steps():
            losses.append(trainer.take_row().loss)
            if step == 4:
                trainer.save(tmp_path / f"{place}_again")
        assert len(sizes) == 3
        assert {size >= 256 for size in sizes} == {place == "device"}
        state = trainer.optimizers.state_dict()["state"]
        seen[place] = losses, {name: entry["exp_avg"].clone() for name, entry in state.items() if "exp_avg" in entry}
    assert seen["host"][0] == seen["device"][0]
    for name, moment in seen["device"][1].items():
        assert torch.equal(seen["host"][1][name], moment), name


def test_no_memory_to_park_in_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemworks.netmem.arena.available_memory_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"optimizer.state_place: 'host': capacity_bytes: .*or set it to 'device'"):
        make("optimizer.state_place=host")
