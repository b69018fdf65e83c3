"""Rotary embedding on position and on log time: spec, tables and rotation.

Letters: T rows, N heads, H head width, J = H / 2 rotated pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gemworks.jagged._checks import check_offsets
from gemworks.jagged._dense import compute_dtype
from gemworks.jagged._packing import segment_ids
from gemworks.jagged.ops.rope.custom_op import norm_rope_op, runs_in_one_pass
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How rows are rotated before their dot product.

    Pair j of a head is (x[j], x[j + J]), J = H / 2. The first `J - Jt` pairs turn by position, the last `Jt` by time:

        position: angle = p * base^(-j / Jp),            Jp = J - Jt
        time:     angle = log(1 + dt / time_scale) * time_frequency * time_base^(-j / Jt)

    so the product of a rotated q and k depends on the difference of positions and on the ratio of
    (1 + dt / time_scale) alone. `dt >= 0` is the age of the event, e.g. seconds before the sample was scored.

    Args:
        base: ratio of the slowest to the fastest wavelength of positions (RoFormer's 10000).
        time_fraction: share of the pairs that turn by time; 0 for position only.
        time_scale: ages below it count as "now"; in the unit of dt.
        time_frequency: radians per e-fold of age, for the fastest pair.
        time_base: as `base`, for time.

    Source: Su et al., RoFormer, arXiv 2104.09864, for position; Kunlun, arXiv 2602.10016, for the log of the age.
    """

    base: float = 10_000.0
    time_fraction: float = 0.0
    time_scale: float = 60.0
    time_frequency: float = 4.0
    time_base: float = 100.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.time_fraction <= 1.0:
            raise ValueError(f"time_fraction: got {self.time_fraction}, expected 0..1; it is a share of the head width")
        for name in ("base", "time_scale", "time_frequency", "time_base"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected > 0; see the class for its meaning")

    def num_time_pairs(self, head_dim: int) -> int:
        """Jt."""
        return round(head_dim // 2 * self.time_fraction)

    def tables(
        self,
        offsets: Tensor,
        head_dim: int,
        *,
        total: int,
        dt: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> RopeTables:
        """Cosines and sines of every packed row; build them once per batch and give them to every layer.

        Args:
            offsets: int32 or int64 [B + 1]; positions count from 0 in each sequence.
            head_dim: H, even.
            total: T.
            dt: [T], age of each row >= 0 (smaller counts as 0); needed when time_fraction > 0.
            dtype: of the tables; float64 for float64 inputs.

        Returns:
            `RopeTables` of [T, H / 2].

        Raises:
            ValueError: odd head width, missing or misshaped dt, offsets that do not fit.
        """
        if head_dim % 2 or head_dim < 2:
            raise ValueError(f"head_dim: got {head_dim}, expected an even number; rope turns pairs of columns")
        check_offsets("offsets", offsets, total=total, max_length=None)
        num_time = self.num_time_pairs(head_dim)
        num_position = head_dim // 2 - num_time
        sequence_T = segment_ids(offsets, total)
        start_T = offsets.to(torch.int64)[sequence_T]
        position_T = (torch.arange(total, device=offsets.device) - start_T).to(torch.float64)
        angles = [position_T[:, None] * _frequencies(self.base, num_position, offsets.device)]
        if num_time:
            if dt is None:
                raise ValueError(
                    f"dt: missing, but time_fraction is {self.time_fraction}; pass the age of each row [T]"
                )
            if dt.shape != (total,) or dt.device != offsets.device:
                raise ValueError(
                    f"dt: got {tuple(dt.shape)} on {dt.device}, expected [{total}] on {offsets.device}; one age per row"
                )
            log_age_T = torch.log1p(dt.to(torch.float64).clamp(min=0) / self.time_scale)
            angles.append(
                log_age_T[:, None] * self.time_frequency * _frequencies(self.time_base, num_time, offsets.device)
            )
        angle_TJ = torch.cat(angles, dim=1)
        return RopeTables(angle_TJ.cos().to(dtype), angle_TJ.sin().to(dtype))


@dataclass(frozen=True, eq=False)
class RopeTables:
    """Cosine and sine of each packed row's angles, [T, H / 2] each, shared by all heads."""

    cos_TJ: Tensor
    sin_TJ: Tensor

    def check(self, name: str, *, total: int, head_dim: int, device: torch.device) -> None:
        """Raise ValueError unless the tables are [total, head_dim / 2] on `device`."""
        if not isinstance(self, RopeTables):  # called as RopeTables.check(x, ...), where x is what a caller passed
            kind = type(self).__name__
            raise ValueError(
                f"{name}: got {kind}, expected RopeTables; Rope.tables(offsets, head_dim, total=T) makes them"
            )
        for part, x in (("cos_TJ", self.cos_TJ), ("sin_TJ", self.sin_TJ)):
            if head_dim % 2 or x.shape != (total, head_dim // 2) or x.device != device:
                raise ValueError(
                    f"{name}.{part}: got {tuple(x.shape)} on {x.device}, expected [{total}, {head_dim / 2:g}] on "
                    f"{device}; build it with Rope.tables from the same offsets and head width"
                )


def _frequencies(base: float, count: int, device: torch.device) -> Tensor:
    """`base^(-j / count)`, float64 [count]."""
    j = torch.arange(count, dtype=torch.float64, device=device)
    return torch.pow(base, -j / max(count, 1))  # a number, not a tensor: that would wait for the device


class _Rotate(torch.autograd.Function):
    """Rotation of the pairs (x[j], x[j + J]); its adjoint turns back. Tables are constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.back = back
        out = torch.empty_like(x)
        (a, b), (c, d) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
        sign = -1.0 if back else 1.0
        torch.mul(a, cos, out=c).addcmul_(b, sin, value=-sign)
        torch.mul(b, cos, out=d).addcmul_(a, sin, value=sign)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grads[0], cos, sin, not ctx.back), None, None, None


def apply_rope(x_TNH: Tensor, tables: RopeTables) -> Tensor:
    """Rotate packed [T, N, H] by [T, H / 2] tables; same dtype out, computed in float32 or float64.

    >>> offsets = torch.tensor([0, 2])
    >>> x = torch.ones(2, 1, 2)
    >>> apply_rope(x, Rope().tables(offsets, 2, total=2))[0].tolist()  # position 0 does not turn
    [[1.0, 1.0]]
    """
    if x_TNH.dim() != 3:
        shape = tuple(x_TNH.shape)
        raise ValueError(
            f"x: got shape {shape}, expected packed [T, N, H]; split the heads with .unflatten(-1, (N, H))"
        )
    RopeTables.check(tables, "tables", total=x_TNH.shape[0], head_dim=x_TNH.shape[-1], device=x_TNH.device)
    if runs_in_one_pass(x_TNH):
        return norm_rope_op(x_TNH, tables.cos_TJ, tables.sin_TJ, None, None)
    dtype = x_TNH.dtype
    x = x_TNH.to(compute_dtype(dtype))
    if torch.compiler.is_compiling():  # the same without writing into slices, which a compiler can fuse
        (a, b), cos, sin = x.chunk(2, dim=-1), tables.cos_TJ.to(x.dtype)[:, None], tables.sin_TJ.to(x.dtype)[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(dtype)
    out = _Rotate.apply(x, tables.cos_TJ.to(x.dtype)[:, None], tables.sin_TJ.to(x.dtype)[:, None], False)
    return out.to(dtype)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
