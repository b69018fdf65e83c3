"""The pinned arena and the built-in codecs."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from gemworks.netmem import arena as arena_module
from gemworks.netmem.arena import ALIGNMENT_BYTES, PinnedArena
from gemworks.netmem.codec import BUILTIN, Bf16Codec, Fp8Codec, MXFP8Codec, decode_checked
from gemworks.netmem.errors import CodecError, PinnedMemoryExhaustedError
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


class _Cudart:
    """Pins nothing, or refuses to."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.num_asked = error, 0

    def cudaHostRegister(self, address, size_bytes, flags):
        self.num_asked += 1
        return self.error

    def cudaHostUnregister(self, address):
        return 0


@pytest.fixture
def available(monkeypatch):
    """Memory of a machine that has 1000 MiB, in a list of one."""
    left = [1000 << 20]
    monkeypatch.setattr(arena_module, "_arenas", weakref.WeakSet())
    monkeypatch.setattr(arena_module, "available_memory_bytes", lambda: left[0])
    monkeypatch.setattr(arena_module, "_cudart", _Cudart)
    return left


@pytest.mark.parametrize("pin", [True, False])
def test_arenas_together_promise_at_most_ninety_percent(available, pin):
    first = PinnedArena(600 << 20, pin=pin)
    with pytest.raises(ValueError, match=r"90% of the 0.98 GiB available, got 0.39 GiB.*0.59 GiB that other arenas"):
        PinnedArena(400 << 20, pin=pin)
    assert PinnedArena(300 << 20, pin=pin).capacity_bytes == 300 << 20
    del first
    PinnedArena(600 << 20, pin=pin)


def test_an_arena_that_only_a_cycle_holds_is_in_nobodys_way(available):
    cycle: list = [PinnedArena(600 << 20, pin=False)]
    cycle.append(cycle)
    del cycle
    PinnedArena(600 << 20, pin=False)


def test_what_is_pinned_is_not_counted_twice(available):
    first = PinnedArena(8 << 20, pin=True)
    first.prepare()
    available[0] = 8 << 20  # without what is pinned
    PinnedArena(7 << 20, pin=True)


def test_plain_memory_is_taken_as_it_is_written(available):
    first = PinnedArena(8 << 20, pin=False)
    blocks = [first.allocate(2 << 20) for _ in range(3)]
    available[0] = 8 << 20  # without the 6 MiB that were handed out
    with pytest.raises(ValueError, match="besides"):
        PinnedArena(6 << 20, pin=False)  # and 2 MiB that the first one may still write
    first.free(blocks.pop())
    assert PinnedArena(5 << 20, pin=False).capacity_bytes == 5 << 20


def test_memory_is_looked_at_again_where_it_is_pinned(available):
    arena = PinnedArena(8 << 20, pin=True)
    available[0] = 8 << 20
    with pytest.raises(PinnedMemoryExhaustedError, match=r"90% of the 0\.01 GiB"):
        arena.allocate(100)
    assert arena.region is None
    available[0] = 1000 << 20
    with pytest.raises(PinnedMemoryExhaustedError, match="90%"):  # remembered
        arena.allocate(100)
    arena.prepare()
    assert arena.allocate(100).data.numel() == 100


def test_a_refused_pin_is_asked_for_once_and_tensors_stay(available, monkeypatch):
    cudart = _Cudart(error=2)
    monkeypatch.setattr(arena_module, "_cudart", lambda: cudart)
    arena = PinnedArena(1 << 20, pin=True)
    engine = OffloadEngine(arena, device="cpu", min_bytes=0)
    x = torch.ones(64, requires_grad=True)

    def forward():
        y = x
        with engine.saving():
            for _ in range(20):
                y = y.sin()
        return y.sum()

    with pytest.warns(RuntimeWarning, match="CUDA refused to pin"):
        y = forward()
    y.backward()
    assert x.grad is not None
    assert engine.stats().num_exhausted >= 20
    assert cudart.num_asked == 1
    with pytest.raises(PinnedMemoryExhaustedError, match="refused"):
        arena.prepare()
    assert cudart.num_asked == 2


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_counts(tmp_path, monkeypatch, version):
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    cache = "inactive_file" if version == 2 else "total_inactive_file"
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    root = groups if version == 2 else groups / "memory"
    (proc / "self").mkdir(parents=True)
    (root / "a/b").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (proc / "self/cgroup").write_text("0::/a/b\n" if version == 2 else "3:cpu:/\n2:memory:/a/b\n")
    monkeypatch.setattr(arena_module, "_PROC", proc)
    monkeypatch.setattr(arena_module, "_CGROUP", groups)
    assert arena_module.available_memory_bytes() == 8000 * 1024

    def limit(group, most, used):
        for name, value in zip(names, (most, used), strict=True):
            (root / group / name).write_text(f"{value}\n")
        (root / group / "memory.stat").write_text(f"anon 7\n{cache} 1000\n")

    unlimited = "max" if version == 2 else 2**63 - 4096
    limit("a/b", unlimited, 3_000_000)
    assert arena_module.available_memory_bytes() == 8000 * 1024
    limit("a", 5_000_000, 3_000_000)  # of the group above
    assert arena_module.available_memory_bytes() == 2_001_000
    limit("", 4_000_000, 3_000_000)
    assert arena_module.available_memory_bytes() == 1_001_000
    (proc / "self/cgroup").write_text("0::/elsewhere\n" if version == 2 else "2:memory:/elsewhere\n")
    assert arena_module.available_memory_bytes() == 1_001_000  # a path of the host, not mounted here
    limit("", 4_000_000, 6_000_000)
    assert arena_module.available_memory_bytes() == 0


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


@pytest.mark.parametrize(("largest", "exponent"), [(448.0, 0), (449.0, 1), (224.0, -1), (-448.0, 0)])
def test_mx_scale_is_the_least_that_holds_the_largest(largest, exponent):
    codec = MXFP8Codec()
    codes, scale = codec.encode(torch.tensor([largest, 1.0]))
    assert scale.tolist() == [127 + exponent]
    if abs(largest) != 449.0:
        assert codec.decode((codes, scale), (2,), torch.float32).tolist() == [largest, 1.0]


def test_a_codec_that_changes_shape_dtype_or_device_is_named():
    class Wrong(Bf16Codec):
        def decode(self, codes, shape, dtype):
            return codes[0]

    for found in (torch.empty(2, 3), torch.empty(3, 2, dtype=torch.float64), torch.empty(3, 2, device="meta")):
        with pytest.raises(CodecError, match=r"expected \(3, 2\) torch.float32 on cpu back"):
            decode_checked(Wrong(), (found,), (3, 2), torch.float32, torch.device("cpu"))


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
