"""Quantized collectives on gloo, 2 to 4 processes. Case O7."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gemworks.netmem.codec import BUILTIN
from gemworks.netmem.collectives import QuantizedCollective, split_rows
from gemworks.netmem.errors import CodecError, CollectiveMismatchError
from netmem_quantized import check_codec_on_gpus, check_everything, tensor
from netmem_ranks import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_o7_any_size_equals_one_process(world, tmp_path):
    run_ranks(world, check_everything, str(tmp_path / "rendezvous"))


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="needs two CUDA devices, NCCL"
)
@pytest.mark.parametrize("codec", sorted(BUILTIN))  # a test each: most of the time goes into compiling kernels
def test_o7_any_size_equals_one_process_on_two_gpus(codec, tmp_path):
    work = functools.partial(check_codec_on_gpus, codec=codec)
    run_ranks(2, work, str(tmp_path / "rendezvous"), backend="nccl", limit_s=60)


def refused(call: Callable[[], Any], *named: str) -> None:
    with pytest.raises((CollectiveMismatchError, ValueError)) as caught:
        call()
    assert any(n in str(caught.value) for n in named), str(caught.value)


def check_mismatches(rank: int, world: int) -> None:
    q = QuantizedCollective(codec="fp8_row")
    x = torch.ones(4, 6)

    refused(lambda: q.all_gather(x if rank else x[:3]), "(3, 6)")
    refused(lambda: q.all_gather(x if rank else x.bfloat16()), "bfloat16")
    refused(lambda: q.reduce_scatter(x if rank else x.view(-1)), "(24,)")
    refused(lambda: q.all_gather(x) if rank else q.reduce_scatter(x), "operation")
    other = QuantizedCollective(codec="mxfp8" if rank else "bf16")
    refused(lambda: other.all_gather(x), "codec")
    splits = [2] * (world - 1) + [4 - 2 * (world - 1)] if world == 2 else [1] * world
    wrong = [*splits[:-1], splits[-1] + (rank == 0)]
    refused(lambda: q.all_to_all(x, splits, wrong), "expects")
    refused(lambda: q.all_to_all(x, splits if rank else [9] * world, splits), "input_splits", "bad arguments")
    refused(lambda: q.all_to_all(x, splits if rank else splits[:-1], splits), "input_splits", "bad arguments")
    refused(lambda: q.all_gather(x if rank else x.long()), "dtype", "bad arguments")
    refused(lambda: q.all_gather(x if rank else torch.ones(())), "dims", "bad arguments")
    # and the group still works
    assert torch.equal(q.all_gather(x), torch.ones(4 * world, 6))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_mismatched_calls_are_errors_on_every_rank_and_nothing_hangs(world, tmp_path):
    run_ranks(world, check_mismatches, str(tmp_path / "rendezvous"))


def check_feedback(rank: int, world: int) -> None:
    gradient = [tensor(r, (6, 40), torch.float32) for r in range(world)]
    exact = torch.split(sum(gradient, torch.zeros(6, 40)), split_rows(6, world))[rank]
    errors = {}
    for feedback in (False, True):
        q = QuantizedCollective(codec="fp8_row", error_feedback=feedback)
        total = torch.zeros_like(exact)
        for _ in range(20):
            total += q.reduce_scatter(gradient[rank], key="w")
        errors[feedback] = float((total / 20 - exact).norm() / exact.norm())
    assert errors[True] < errors[False] / 5, errors
    unchecked = QuantizedCollective(codec="fp8_row", check="never")
    refused(lambda: unchecked.all_gather(torch.ones(2, dtype=torch.int64)), "dtype")
    q = QuantizedCollective(codec="bf16", error_feedback=True)
    q.reduce_scatter(torch.ones(4), key="a")
    refused(lambda: q.reduce_scatter(torch.ones(5), key="a"), "another key")
    q.reduce_scatter(torch.ones(4, requires_grad=True), key="a")
    assert not q._residuals["a"].requires_grad  # else each step's graph would hold the one before
    q.all_gather(torch.ones(1000))
    assert q.traffic.sent_bytes == (world - 1) * 2000
    assert q.traffic.plain_bytes == (world - 1) * 4000


def test_error_feedback_makes_the_mean_of_many_steps_exact(tmp_path):
    run_ranks(2, check_feedback, str(tmp_path / "rendezvous"))


def check_nothing_is_lost(rank: int, world: int) -> None:
    """What was sent and what is left over add up to what was given, the roundings to bf16 included."""
    q = QuantizedCollective(codec="mxfp8", error_feedback=True)  # its values are bf16's to the bit
    x = tensor(0, (4, 64), torch.bfloat16)
    sent = sum((q.reduce_scatter(x).float() for _ in range(50)), torch.zeros(4, 64))
    torch.testing.assert_close(sent + q._residuals[""], 50 * x.float(), rtol=1e-5, atol=1e-5)


def test_error_feedback_loses_nothing(tmp_path):
    run_ranks(1, check_nothing_is_lost, str(tmp_path / "rendezvous"))


class Liar:
    """Says other sizes than it makes."""

    name = "liar"

    def encode(self, x):
        return (x.to(torch.bfloat16),)

    def decode(self, codes, shape, dtype):
        return codes[0].view(tuple(shape)).to(dtype)

    def nbytes(self, shape, dtype):
        return torch.Size(shape).numel()


def check_liar(rank: int, world: int) -> None:
    with pytest.raises(CodecError, match=r"nbytes\(\) says 6"):
        QuantizedCollective(codec=Liar()).all_gather(torch.ones(2, 3))


def test_a_codec_that_misstates_its_bytes_is_named(tmp_path):
    run_ranks(1, check_liar, str(tmp_path / "rendezvous"))


def check_subgroup(rank: int, world: int) -> None:
    group = dist.new_group([0, 2])
    if rank in (0, 2):
        assert isinstance(group, dist.ProcessGroup)
        q = QuantizedCollective(group, codec="mxfp8")
        got = q.all_gather(torch.full((3,), float(rank)))
        assert got.tolist() == [0.0] * 3 + [2.0] * 3
    dist.barrier()


@pytest.mark.slow
def test_a_subgroup(tmp_path):
    run_ranks(3, check_subgroup, str(tmp_path / "rendezvous"))
