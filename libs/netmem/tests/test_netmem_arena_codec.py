"""The pinned arena and the built-in codecs."""

from __future__ import annotations

import math

import pytest
import torch
from gemworks.netmem.arena import ALIGNMENT_BYTES, PinnedArena
from gemworks.netmem.codec import BUILTIN, Fp8Codec, MXFP8Codec
from gemworks.netmem.errors import PinnedMemoryExhaustedError
from gemworks.netmem.offload import OffloadEngine
from gemworks.netmem.overlap import overlap_report
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

pytestmark = pytest.mark.reference


class ArenaMachine(RuleBasedStateMachine):
    """Random requests and returns: no overlap, contents survive, everything merges back."""

    @initialize()
    def start(self):
        self.arena = PinnedArena(1 << 16, pin=False)
        self.live = {}
        self.next = 1

    @rule(size=st.integers(0, 20_000))
    def allocate(self, size):
        try:
            block = self.arena.allocate(size)
        except PinnedMemoryExhaustedError:
            assert max((s for _, s in self.arena._free), default=0) < max(size, 1)
            return
        assert block.data.numel() == size
        assert block.offset_bytes % ALIGNMENT_BYTES == 0
        block.data.fill_(self.next % 251)
        self.live[self.next] = block
        self.next += 1

    @rule(data=st.data())
    def free(self, data):
        if self.live:
            key = data.draw(st.sampled_from(sorted(self.live)))
            self.arena.free(self.live.pop(key))

    @invariant()
    def contents_and_counts(self):
        for key, block in self.live.items():
            assert bool((block.data == key % 251).all())
        stats = self.arena.stats()
        assert stats.requested_bytes == sum(b.size_bytes for b in self.live.values())
        assert stats.reserved_bytes + sum(s for _, s in self.arena._free) == stats.capacity_bytes
        assert all(a[0] + a[1] < b[0] for a, b in zip(self.arena._free, self.arena._free[1:], strict=False))  # merged


def test_arena_random_walk():
    run_state_machine_as_test(ArenaMachine, settings=settings(max_examples=30, stateful_step_count=30, deadline=None))


def test_waste_is_at_most_one_percent_for_activation_sizes():
    arena = PinnedArena(64 << 20, pin=False)
    for size in [65_537, 1_000_003, 3 * 5_000_001, 129 * 512 * 2, (1 << 20) + 1]:
        arena.allocate(size)
    assert arena.stats().waste <= 0.01


def test_nothing_is_taken_before_the_first_request_and_errors_name_the_sizes():
    arena = PinnedArena(4096, pin=False)
    assert arena.stats().registered_bytes == 0
    block = arena.allocate(4000)
    assert arena.stats().registered_bytes == 4096
    with pytest.raises(PinnedMemoryExhaustedError, match="5000"):
        arena.allocate(5000)
    assert arena.stats().num_exhausted == 1
    arena.free(block)
    with pytest.raises(ValueError, match="free it once"):
        arena.free(block)


class _Pending:
    finished = False

    def done(self) -> bool:
        return self.finished


def test_a_piece_without_pending_work_is_preferred():
    arena = PinnedArena(3 * 256, pin=False)
    blocks = [arena.allocate(256) for _ in range(3)]
    fence = _Pending()
    arena.free(blocks[0], [fence])
    arena.free(blocks[2])
    assert arena.allocate(256).offset_bytes == 512
    assert arena.allocate(256).fences == [fence]
    fence.finished = True


@pytest.mark.parametrize("name", sorted(BUILTIN))
@given(shape=st.lists(st.integers(0, 70), max_size=3), seed=st.integers(0, 1000), log_scale=st.integers(-30, 30))
@settings(max_examples=40, deadline=None)
def test_codecs_take_any_shape_and_say_their_bytes(name, shape, seed, log_scale):
    codec = BUILTIN[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**log_scale
    codes = codec.encode(x)
    assert sum(c.numel() * c.element_size() for c in codes) == codec.nbytes(x.shape, x.dtype)
    y = codec.decode(codes, x.shape, x.dtype)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    # 3 mantissa bits: half a unit in the last place is 2^-4 of a normal value; below that the step is that of the
    # block's scale
    step = {"bf16": 2.0**-8, "mxfp8": 2.0**-4, "fp8_row": 2.0**-4, "fp8_block128": 2.0**-4}[name]
    floor = 0 if name == "bf16" else (x.abs().max() if x.numel() else torch.tensor(0.0)) * 2.0**-16
    assert bool(((x - y).abs() <= step * x.abs() * 1.0001 + floor).all())


def test_mx_codec_against_the_definition_element_by_element():
    x = torch.randn(7, 45, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 45)
    x[0, :32] = 0
    raw, byte = MXFP8Codec().encode(x)
    flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 32)).view(-1, 32)
    for block, e in zip(flat.tolist(), byte.tolist(), strict=True):
        amax = max(abs(v) for v in block)
        expected = 0 if amax == 0 else max(0, min(254, math.ceil(math.log2(amax / 448)) + 127))
        assert e == expected
    scale = 2.0 ** (byte.double() - 127).repeat_interleave(32)[: x.numel()]
    codes = (x.flatten().double() / scale).float().to(torch.float8_e4m3fn)
    assert torch.equal(raw, codes.view(torch.uint8))


@pytest.mark.parametrize("codec", [Fp8Codec(), Fp8Codec(128), MXFP8Codec()], ids=lambda c: c.name)
def test_codecs_at_the_edges_of_float32(codec):
    tiny = torch.full((64,), 1e-37)
    assert torch.allclose(codec.decode(codec.encode(tiny), (64,), torch.float32), tiny, rtol=0.07, atol=0)
    zeros = torch.zeros(64)
    assert torch.equal(codec.decode(codec.encode(zeros), (64,), torch.float32), zeros)
    huge = torch.full((64,), 3e38)
    assert torch.allclose(codec.decode(codec.encode(huge), (64,), torch.float32), huge, rtol=0.07)
    for bad in (math.nan, math.inf):
        x = torch.ones(64)
        x[3] = bad
        assert not codec.decode(codec.encode(x), (64,), torch.float32)[3].isfinite()


def test_bad_block():
    with pytest.raises(ValueError, match="block"):
        Fp8Codec(0)


def test_wrong_kinds_of_argument_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"capacity_bytes: expected a whole number above 0, got '1GB'; 16"):
        PinnedArena("1GB")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="arena: expected a PinnedArena, or None for one of 16 GiB, got int"):
        OffloadEngine(1 << 20, device="cpu")  # pyright: ignore[reportArgumentType]
    for name, content in (("a.json.gz", b"no gzip"), ("b.json", b"\xff\xfe\x00"), ("c.json", b"{")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"source: {name} is not JSON"):
            overlap_report(tmp_path / name)
