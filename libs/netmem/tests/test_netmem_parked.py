"""What a parked tensor refuses, by whatever way it is used, and what it still says about itself."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from gemworks.netmem.errors import ParkedStateError
from gemworks.netmem.stash import Place
from netmem_ranks import run_ranks
from netmem_stashes import make_stash, make_training, train
from torch import nn

pytestmark = pytest.mark.reference


def test_checkpoint_step_and_eval_on_parked_state_are_refused():
    model, optimizer = make_training()
    stash = make_stash()
    train(model, optimizer, 1)
    stash.add_optimizer("adam", optimizer)
    stash.add_module("table", model[0])
    stash.park("adam", wait=True)
    stash.park("table", wait=True)
    with pytest.raises(ParkedStateError, match=r"state_dict.*'adam'.*restore"):
        optimizer.state_dict()
    with pytest.raises(ParkedStateError, match="step"):
        optimizer.step()
    with pytest.raises(ParkedStateError, match=r"state_dict.*'table'"):
        model.state_dict()
    model.eval()
    with pytest.raises(ParkedStateError, match="eval forward"):
        model(torch.zeros(1, 4, dtype=torch.int64))
    stash.restore("adam")
    stash.restore("table")
    copy.deepcopy(optimizer.state_dict())
    model(torch.zeros(1, 4, dtype=torch.int64))


def collectives_of_parked_memory(rank: int, world: int) -> None:
    own = dict(vars(dist.ProcessGroup))
    stash = make_stash()
    table, free = torch.full((100,), 1.0 + rank), torch.ones(100)
    view = table.view(100)
    stash.add("table", [table])
    stash.park("table", wait=True)
    for x in (table, view):
        with pytest.raises(ParkedStateError, match=r"all_?reduce.*'table'.*restore"):
            dist.all_reduce(x)
    with pytest.raises(ParkedStateError, match=r"broadcast.*'table'"):
        dist.broadcast(table, 0)
    with pytest.raises(ParkedStateError, match="'table'"):
        dist.all_gather([torch.empty(100) for _ in range(world)], table)
    with pytest.raises(ParkedStateError, match="'table'"):
        dist.reduce_scatter(torch.empty(100), [torch.ones(100)] * (world - 1) + [view])
    dist.all_reduce(free)  # what is not parked goes on
    assert free.unique().tolist() == [world]
    stash.restore("table")
    dist.all_reduce(table)
    assert table.unique().tolist() == [3.0]
    assert dict(vars(dist.ProcessGroup)) == own


@pytest.mark.dist
def test_collectives_on_parked_state_are_refused_on_every_rank(tmp_path):
    run_ranks(2, collectives_of_parked_memory, str(tmp_path / "rendezvous"))


@pytest.mark.parametrize(
    "use",
    [
        lambda emb: emb.weight.sum(),
        lambda emb: emb.weight.data,
        lambda emb: emb.weight.data_ptr(),
        lambda emb: torch.add(input=torch.ones(50, 16), other=emb.weight),
        lambda emb: torch.cat([torch.ones(1, 16), emb.weight]),
        lambda emb: torch.save(emb.weight, io.BytesIO()),
        lambda emb: emb.state_dict(),
        lambda emb: copy.deepcopy(emb),
        lambda emb: emb.double(),
        lambda emb: pickle.dumps(emb.weight),
        lambda emb: torch._foreach_add([emb.weight], 1.0),  # pyright: ignore[reportPrivateImportUsage]
        lambda emb: emb.eval()(torch.zeros(1, dtype=torch.int64)),
    ],
)
@pytest.mark.parametrize("wait", [True, False])
def test_a_parked_tensor_refuses_every_use_without_hooks_or_guard(use, wait):
    stash = make_stash()
    embedding = nn.Embedding(50, 16)
    before, kind = embedding.weight.detach().clone(), type(embedding.weight)
    stash.add("table", [embedding.weight])
    stash.park("table", wait=wait)
    with pytest.raises(ParkedStateError, match=r"'table'.*restore"):
        use(embedding)
    stash.restore("table")
    use(embedding)
    assert type(embedding.weight) is kind
    assert torch.equal(embedding.weight.float(), before)


def test_what_a_parked_tensor_says_about_itself_stays_readable():
    stash = make_stash()
    weight = nn.Parameter(torch.ones(50, 16))
    weight.grad = torch.ones(50, 16)
    stash.add("table", [weight])
    stash.park("table", wait=True)
    assert (weight.shape, weight.dtype, weight.numel(), weight.dim()) == ((50, 16), torch.float32, 800, 2)
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight in {weight}
    torch.optim.SGD([weight], lr=0.1).zero_grad()
    assert weight.grad is None


def test_a_tensor_of_two_groups_belongs_to_the_one_that_parked_it():
    stash = make_stash()
    table = torch.ones(100)
    stash.add("a", [table])
    stash.add("b", [table])
    stash.park("a", wait=True)
    stash.park("b", wait=True)
    stash.restore("b")
    with pytest.raises(ParkedStateError, match="'a'"):
        table.sum()
    stash.restore("a")
    assert table.sum() == 100


def test_the_guard_sees_views_from_outside_the_group():
    stash = make_stash()
    table = torch.ones(100)
    view = table[:50]
    stash.add("table", [table])
    stash.park("table", wait=True)
    with stash.guard():
        with pytest.raises(ParkedStateError, match=r"aten.*'table'"):
            view.add_(1)
        stash.restore("table")
        assert view.sum() == 50


def test_copies_of_a_module_have_no_hooks_of_its_stash():
    stash, module = make_stash(), nn.Linear(64, 64)
    stash.add_module("linear", module)
    stash.restore_before_forward("linear", module)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    copied = copy.deepcopy(module)
    stash.park("linear", wait=True)
    for other in (loaded, copied):
        other(torch.ones(1, 64))
        other.state_dict()
        assert stash.place("linear") is Place.PARKED
    with pytest.raises(ParkedStateError, match=r"state_dict.*'linear'"):
        module.state_dict()


def test_a_stash_works_under_the_guard_of_another():
    first, second = make_stash(1), make_stash(2)
    table = torch.ones(100)
    view = table[:]
    second.add("table", [table])
    with first.guard():
        second.park("table", wait=True)
        with pytest.raises(ParkedStateError, match=r"aten.*'table'"):
            view.add_(1)
        second.restore("table")
        assert view.sum() == 100


def test_a_parked_tensor_can_be_printed():
    stash, weight = make_stash(), nn.Parameter(torch.ones(50, 16))
    stash.add("table", [weight])
    stash.park("table", wait=True)
    assert repr({"weight": weight}) == "{'weight': <Parameter (50, 16) torch.float32, parked>}"
    stash.restore("table")
    assert "1." in repr(weight)


@pytest.mark.parametrize("kwargs", [{"foreach": True}, {"fused": True}, {}])
def test_optimizers_of_parked_parameters_are_refused(kwargs):
    stash = make_stash()
    weight = nn.Parameter(torch.ones(50, 16))
    optimizer = torch.optim.Adam([weight], **kwargs)
    weight.grad = torch.ones(50, 16)
    stash.add("table", [weight])
    stash.park("table", wait=True)
    with pytest.raises(ParkedStateError, match="'table'"):
        optimizer.step()
    stash.restore("table")
    optimizer.step()
    assert weight.isfinite().all()


def test_what_was_compiled_before_refuses_parked_tensors_and_runs_after():
    stash = make_stash()
    weight = nn.Parameter(torch.ones(50, 16))
    double = torch.compile(lambda w: (w * 2).sum(), backend="eager")
    assert double(weight) == 1600
    stash.add("table", [weight])
    stash.park("table", wait=True)
    with pytest.raises(Exception, match="'table'"):  # dynamo may wrap the error
        double(weight)
    stash.restore("table")
    assert double(weight) == 1600


def test_a_function_that_saved_the_tensor_itself_is_refused_in_backward():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(w)
            return x * w

        @staticmethod
        def backward(ctx, *grad_outputs):
            (w,) = ctx.saved_tensors
            return grad_outputs[0] * w, None

    stash = make_stash()
    table, x = torch.full((100,), 3.0), torch.ones(100, requires_grad=True)
    out = Scale.apply(x, table).sum()
    stash.add("table", [table])
    stash.park("table", wait=True)
    with pytest.raises(ParkedStateError, match="'table'"):
        out.backward(retain_graph=True)
    stash.restore("table")
    out.backward()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [3.0]
