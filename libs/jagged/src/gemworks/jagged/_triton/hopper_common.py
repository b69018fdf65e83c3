"""What the Hopper (Gluon) kernels share: tile lookup, the walk over tiles, activations on the ALUs."""

import struct

from gemworks.jagged.ops.gdpa import activations as _definition
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

_GELU = _definition.FAST_GELU_COEFFICIENTS
# All threads of one partition; Triton 3.7 has another name for it.
sync_threads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # pyright: ignore[reportAttributeAccessIssue]


def _hex(x: float) -> str:
    return "0f" + struct.pack(">f", x).hex().upper()


def _horner(argument: str, coefficients: list[str], last: str) -> str:
    """PTX: a polynomial in `argument` into register a, and `last` after it."""
    lines = ["{ .reg .f32 a;", f"fma.rn.f32 a, {argument}, {coefficients[-1]}, {coefficients[-2]};"]
    lines += [f"fma.rn.f32 a, a, {argument}, {c};" for c in reversed(coefficients[:-2])]
    return "\n".join([*lines, last, "}"])


# clamp(1/2 + x P(t), 0, 1): the clamp is a modifier (.sat) of the last multiply-add, which the compiler does not find.
_GATE = "fma.rn.sat.f32 $0, $1, a, 0f3F000000;"
GATE_PTX = gl.constexpr(_horner("$2", [_hex(a) for a in _GELU], _GATE))
FOLDED_GATE_PTX = gl.constexpr(_horner("$2", ["$3", "$4", "$5", "$6", "$7"], _GATE))
G0, G1, G2, G3, G4 = (gl.constexpr(a) for a in _GELU)
R0, R1, R2, R3, R4 = (gl.constexpr(a) for a in _definition.FAST_GELU_SLOPE)
S0, S1, S2, S3, S4, S5, S6, S7 = (gl.constexpr(a) for a in _definition.FAST_SILU_COEFFICIENTS)
T0, T1, T2, T3, T4, T5, T6, T7 = (gl.constexpr(a) for a in _definition.FAST_SILU_SLOPE)
GELU_CUT_SQUARED = gl.constexpr(_definition.FAST_GELU_CUT**2)
SILU_CUT = gl.constexpr(_definition.FAST_SILU_CUT)
LEAKY_SLOPE = gl.constexpr(_definition.LEAKY_RELU_SLOPE)


@gluon.jit
def zigzag(i, pid, programs):
    """The i-th tile of program `pid`: rounds run forwards and backwards in turn, so sorted costs even out."""
    turn = i % 2
    return i * programs + gl.where(turn == 0, pid, programs - 1 - pid)


@gluon.jit
def pick(i, pid, programs, HEADS: gl.constexpr):
    """(number, tile, head) of the i-th piece of work of a program."""
    t = zigzag(i, pid, programs)
    return t, t // HEADS, t % HEADS


@gluon.jit
def tile_of(tile, tile_sample, tile_row, bounds_r, bounds_s):
    """(first row of the tile in its sequence, begin and end of that, begin and length of the other side)."""
    sample = gl.load(tile_sample + tile)
    row = gl.load(tile_row + tile)
    r_begin = gl.load(bounds_r + sample)
    r_end = gl.load(bounds_r + sample + 1)
    s_begin = gl.load(bounds_s + sample)
    s_len = gl.load(bounds_s + sample + 1) - s_begin
    return row, r_begin, r_end, s_begin, s_len


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The place after `stage` in a ring, and the phase of its barriers: cheaper than a remainder by three."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def load_rows(desc, begin, length, row, head, barrier, smem):
    """Into smem [rows, H]: rows `row` and after of the `length` rows at `begin`, of one head; zeros past their end.

    `desc` is of `launch_hopper.ragged`, which says why these coordinates name the row begin + row.
    """
    FAR: gl.constexpr = 1 << 30
    box = smem._reinterpret(desc.dtype, [1, 1, smem.shape[0], 1, smem.shape[1]], desc.layout)
    tma.async_copy_global_to_shared(desc, [FAR, begin + length, FAR - length + row, head, 0], barrier, box)


@gluon.jit
def attention_barriers(STAGES: gl.constexpr, QSTAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """(full, free) of q's ring, of k's and of v's: the producer fills a stage, each consumer signals it free."""
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QSTAGES, 1], BAR)
    q_free = gl.allocate_shared_memory(gl.int64, [QSTAGES, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for s in gl.static_range(QSTAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(q_free.index(s), count=CONSUMERS)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_free.index(s), count=CONSUMERS)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_free.index(s), count=CONSUMERS)
    return q_full, q_free, k_full, k_free, v_full, v_free


@gluon.jit
def load_query_tile(
    desc, begin, length, row, head, qi, smem, full, free,
    H: gl.constexpr, QSTAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The producer's qi-th query tile: 64 rows for each of GROUPS consumers."""
    qs = qi % QSTAGES
    mbarrier.wait(free.index(qs), ((qi // QSTAGES) & 1) ^ 1)
    mbarrier.expect(full.index(qs), GROUPS * 64 * H * 2)
    for g in gl.static_range(GROUPS):
        load_rows(desc, begin, length, row + g * 64, head, full.index(qs), smem.index(GROUPS * qs + g))


@gluon.jit
def load_keys(
    k_desc, v_desc, k_begin, k_len, j, head, fill, k_smem, v_smem, k_full, k_free, v_full, v_free,
    H: gl.constexpr, HV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, ONE_RELEASE: gl.constexpr,
):  # fmt: skip
    """The producer's fill-th tile of keys and values, rows j to j + BN.

    ONE_RELEASE: the consumers' n-th signal says that K of the n-th tile and V of the one before are done with.
    """
    s = fill % STAGES
    phase = ((fill // STAGES) & 1) ^ 1
    mbarrier.wait(k_free.index(s), phase)
    mbarrier.expect(k_full.index(s), BN * H * 2)
    load_rows(k_desc, k_begin, k_len, j, head, k_full.index(s), k_smem.index(s))
    if ONE_RELEASE:
        mbarrier.wait(k_free.index((fill + 1) % STAGES), (((fill + 1) // STAGES) & 1) ^ 1)
    else:
        mbarrier.wait(v_free.index(s), phase)
    mbarrier.expect(v_full.index(s), BN * HV * 2)
    load_rows(v_desc, k_begin, k_len, j, head, v_full.index(s), v_smem.index(s))


@gluon.jit
def pass_over(trips, fill, k_full, k_free, v_full, v_free, STAGES: gl.constexpr):
    """A consumer without rows in a tile hands its `trips` stages on, from the fill-th: the next one."""
    for _j in range(trips):
        s = fill % STAGES
        mbarrier.wait(k_full.index(s), (fill // STAGES) & 1)
        mbarrier.arrive(k_free.index(s), count=1)
        mbarrier.wait(v_full.index(s), (fill // STAGES) & 1)
        mbarrier.arrive(v_free.index(s), count=1)
        fill += 1
    return fill


@gluon.jit
def store_rows(ptr, x, first, end, head, stride_t, stride_n):
    """x [64, W] to rows `first` and after of one head, as far as `end`, in 16-byte pieces."""
    W: gl.constexpr = x.shape[1]
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (W // 8), W // 8], [4, 1], [1, 0])
    rows = first + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    cols = gl.arange(0, W, layout=gl.SliceLayout(0, STORE))
    at = ptr + (rows.to(gl.int64) * stride_t)[:, None] + head.to(gl.int64) * stride_n + cols[None, :]
    gl.store(at, gl.convert_layout(x.to(ptr.dtype.element_ty), STORE), mask=(rows < end)[:, None])


@gluon.jit
def _gate(x, t):
    return gl.inline_asm_elementwise(GATE_PTX, "=f,f,f", [x, t], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _gelu_slope(x, t):
    """1/2 + x R(t) inside the gate, 0 or 1 (by the sign) outside."""
    slope = x * ((((t * R4 + R3) * t + R2) * t + R1) * t + R0) + 0.5
    step = gl.inline_asm_elementwise(
        "mul.rn.sat.f32 $0, $1, 0f7F000000;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.where(t < GELU_CUT_SQUARED, slope, step)


@gluon.jit
def _silu_gate(u, t):
    return u * (((((((t * S7 + S6) * t + S5) * t + S4) * t + S3) * t + S2) * t + S1) * t + S0)


@gluon.jit
def _clamp(x, low, high):
    return gl.minimum(gl.maximum(x, low), high)


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _normal_cdf(x):
    """(Phi(x), exp(-x^2 / 2)); erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7."""
    t = 1.0 / (1.0 + 0.23164189 * gl.abs(x))
    e = gl.exp(-0.5 * x * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    half = 0.5 * poly * e
    return gl.where(x < 0.0, half, 1.0 - half), e


@gluon.jit
def activate(x, ACT: gl.constexpr):
    if ACT == "identity":
        return x
    elif ACT == "relu":
        return gl.maximum(x, 0.0)
    elif ACT == "squared_relu":
        y = gl.maximum(x, 0.0)
        return y * y
    elif ACT == "leaky_relu":
        return gl.where(x > 0.0, x, x * LEAKY_SLOPE)
    elif ACT == "gelu":
        phi, _e = _normal_cdf(x)
        return x * phi
    elif ACT == "gelu_tanh":
        return x * _sigmoid(x * (x * x * 0.044715 + 1.0) * 1.5957691216057308)
    elif ACT == "fast_gelu":
        return x * _gate(x, x * x)
    elif ACT == "silu":
        return x * _sigmoid(x)
    elif ACT == "fast_silu":
        u = _clamp(x, -8.0, 8.0)
        return x * (_clamp(_silu_gate(u, u * u), -0.5, 0.5) + 0.5)
    elif ACT == "hardswish":
        return x * _clamp(x * 0.16666666666666666 + 0.5, 0.0, 1.0)
    else:
        gl.static_assert(ACT == "tanh")
        return 2.0 * _sigmoid(2.0 * x) - 1.0


@gluon.jit
def activate_with_grad(x, ACT: gl.constexpr):
    """(act(x), act'(x))."""
    if ACT == "identity":
        return x, gl.full(x.shape, 1.0, gl.float32, x.type.layout)
    elif ACT == "relu":
        return gl.maximum(x, 0.0), gl.where(x > 0.0, 1.0, 0.0)
    elif ACT == "squared_relu":
        y = gl.maximum(x, 0.0)
        return y * y, 2.0 * y
    elif ACT == "leaky_relu":
        slope = gl.where(x > 0.0, 1.0, LEAKY_SLOPE)
        return x * slope, slope
    elif ACT == "gelu":
        phi, e = _normal_cdf(x)
        return x * phi, phi + x * e * 0.3989422804014327
    elif ACT == "gelu_tanh":
        u = _clamp(x, -20.0, 20.0)
        s = _sigmoid(u * (u * u * 0.044715 + 1.0) * 1.5957691216057308)
        return x * s, s + u * s * (1.0 - s) * 1.5957691216057308 * (u * u * 0.134145 + 1.0)
    elif ACT == "fast_gelu":
        t = x * x
        gate = _gate(x, t)
        slope = x * ((((t * R4 + R3) * t + R2) * t + R1) * t + R0) + 0.5
        return x * gate, gl.where(t < GELU_CUT_SQUARED, slope, gate)
    elif ACT == "silu":
        s = _sigmoid(x)
        y = x * s
        return y, s + y * (1.0 - s)
    elif ACT == "fast_silu":
        u = _clamp(x, -8.0, 8.0)
        t = u * u
        gate = _silu_gate(u, t)
        slope = u * (((((((t * T7 + T6) * t + T5) * t + T4) * t + T3) * t + T2) * t + T1) * t + T0) + 0.5
        clamped = _clamp(gate, -0.5, 0.5)
        inside = (gl.abs(x) <= SILU_CUT) & (gl.abs(gate) <= 0.5)
        return x * (clamped + 0.5), gl.where(inside, slope, clamped + 0.5)
    elif ACT == "hardswish":
        gate = _clamp(x * 0.16666666666666666 + 0.5, 0.0, 1.0)
        return x * gate, gl.where(gl.abs(x) < 3.0, x * 0.3333333333333333 + 0.5, gate)
    else:
        gl.static_assert(ACT == "tanh")
        y = 2.0 * _sigmoid(2.0 * x) - 1.0
        return y, 1.0 - y * y


@gluon.jit
def slope_only(x, ACT: gl.constexpr):
    """act'(x) where act(x) itself is not needed."""
    if ACT == "fast_gelu":
        return _gelu_slope(x, x * x)
    else:
        _y, slope = activate_with_grad(x, ACT)
        return slope


@gluon.jit
def fold(scale, ACT: gl.constexpr, FOLD: gl.constexpr):
    """Coefficients of the gate in terms of the raw score s = x / scale: scale^(2 k + 1) G_k."""
    t = scale * scale
    b0 = scale * G0
    b1 = scale * t * G1
    b2 = scale * t * t * G2
    b3 = scale * t * t * t * G3
    b4 = scale * t * t * t * t * G4
    return b0, b1, b2, b3, b4


@gluon.jit
def weigh(s, scale, b0, b1, b2, b3, b4, ACT: gl.constexpr, FOLD: gl.constexpr):
    """act(scale s); with FOLD act(scale s) / scale, one product less."""
    if FOLD:
        gl.static_assert(ACT == "fast_gelu")
        t = s * s
        gate = gl.inline_asm_elementwise(
            FOLDED_GATE_PTX, "=f,f,f,f,f,f,f,f", [s, t, b0, b1, b2, b3, b4], dtype=gl.float32, is_pure=True, pack=1
        )
        return s * gate
    else:
        return activate(s * scale, ACT)
