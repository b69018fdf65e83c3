"""All-gather, reduce-scatter and all-to-all whose payload travels in coded form.

Each rank codes what it sends to each peer as one message of bytes: the codes one after the other, no padding, so that
any size goes, empty and odd ones too. Reductions add the decoded messages in float32, in rank order, so every run
gives the same bits. Shapes are compared across the ranks before any payload moves: a mismatch is an error on every
rank instead of a hang.

Letters: W ranks of the group, R rows of dim 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from gemworks.netmem.codec import Codec, decode_checked, get_codec, kernel_layout
from gemworks.netmem.errors import CodecError, CollectiveMismatchError

_MAX_DIMS = 8
_MAX_LAYOUTS = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank's last call.

    Attributes:
        sent_bytes: coded bytes to other ranks.
        plain_bytes: the same without coding.
    """

    sent_bytes: int
    plain_bytes: int


def split_rows(num_rows: int, world_size: int) -> list[int]:
    """Rows per rank: as equal as possible, the first ranks get one more.

    >>> split_rows(7, 3)
    [3, 2, 2]
    >>> split_rows(1, 3)
    [1, 0, 0]
    """
    return [num_rows // world_size + (r < num_rows % world_size) for r in range(world_size)]


def _all_gather(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    # torch 2.13 renamed it and warns about the old name, torch 2.11 has the old name only
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x, group=group)


class QuantizedCollective:
    """Collectives of one group with coded payloads.

    Args:
        group: the process group (gloo or NCCL); None: the default group.
        codec: `"bf16"`, `"fp8_row"`, `"fp8_block128"`, `"mxfp8"`, or any codec object.
        error_feedback: keep what coding lost in `reduce_scatter` and add it to the next call of the same `key`, so
            that errors don't add up over steps (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014).
        check: `"always"`: compare shapes across the ranks in every call, one small all-gather and one host
            synchronisation; `"never"`: trust the caller.

    Every method is a collective: all ranks of the group call it in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        codec: str | Codec = "bf16",
        *,
        error_feedback: bool = False,
        check: Literal["always", "never"] = "always",
    ) -> None:
        if check not in ("always", "never"):
            raise ValueError(f"check: expected 'always' or 'never', got {check!r}")
        self._group = group
        self._codec = get_codec(codec)
        self._check = check
        self._layouts: dict[tuple[Any, ...], list[tuple[torch.Size, torch.dtype]]] = {}
        self._feedback = error_feedback
        self._residuals: dict[str, torch.Tensor] = {}
        self._rank = dist.get_rank(group)
        self._world = dist.get_world_size(group)
        if self._rank < 0:
            raise ValueError("group: this process is not a member of it; call only on its ranks")
        self.traffic = Traffic(0, 0)

    # -- agreement -----------------------------------------------------------------------------------------------------

    def _problem(self, x: torch.Tensor) -> str | None:
        if x.dtype not in _DTYPES:
            return f"dtype: expected one of {[str(d) for d in _DTYPES]}, got {x.dtype}"
        if not 1 <= x.dim() <= _MAX_DIMS:
            return f"x: expected 1 to {_MAX_DIMS} dims, got {x.dim()}"
        return None

    def _agree(
        self, op: str, x: torch.Tensor, extra: Sequence[int] = (), *, problem: str | None = None
    ) -> list[list[int]]:
        """Exchange what each rank is about to do; raise on every rank if it does not fit. Returns every rank's
        `extra`.
        """
        problem = problem or self._problem(x)
        if self._check == "never":
            if problem:
                raise ValueError(problem)
            return []
        shape = [*x.shape[:_MAX_DIMS], *[-1] * (_MAX_DIMS - x.dim())]
        what = int.from_bytes(hashlib.sha256(f"{op} {self._codec.name}".encode()).digest()[:6], "big")
        dtype = _DTYPES.index(x.dtype) if x.dtype in _DTYPES else -1
        mine = torch.tensor([what, problem is not None, dtype, *shape, *extra], dtype=torch.int64, device=x.device)
        # the lengths of `extra` are those of the group, whatever the caller passed, so this exchange itself can't
        # mismatch
        everyone = torch.empty(self._world * mine.numel(), dtype=torch.int64, device=x.device)
        _all_gather(everyone, mine, self._group)
        rows = everyone.view(self._world, -1).tolist()
        if problem:
            raise ValueError(problem)
        broken = [r for r in range(self._world) if rows[r][1]]
        if broken:
            raise CollectiveMismatchError(f"{op}: ranks {broken} were called with bad arguments; see their errors")
        free_dims = 1 if op == "all_to_all" else 0
        for r, row in enumerate(rows):
            other, here = [*row[:3], *row[3 + free_dims : 3 + _MAX_DIMS]], [*mine.tolist()[:3], *shape[free_dims:]]
            if other != here:
                raise CollectiveMismatchError(
                    f"{op}: rank {self._rank} has {self._describe(mine.tolist())}, rank {r} has {self._describe(row)}; "
                    "call the same collective with the same codec, dtype and shape on every rank"
                )
        return [row[3 + _MAX_DIMS :] for row in rows]

    def _describe(self, row: list[int]) -> str:
        dtype = str(_DTYPES[row[2]]) if 0 <= row[2] < len(_DTYPES) else "another dtype"
        shape = tuple(d for d in row[3 : 3 + _MAX_DIMS] if d >= 0)
        return f"{dtype} {shape}, operation and codec {row[0]:012x}"

    # -- messages ------------------------------------------------------------------------------------------------------

    def _encode(self, parts: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, list[int]]:
        """The messages of the parts, one after the other, uint8; and their sizes."""
        sizes = [self._nbytes(p.shape, p.dtype) for p in parts]
        joined = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        for part, message in zip(parts, torch.split(joined, sizes), strict=True):
            if part.numel() == 0:
                continue
            layout = self._kernel_layout(message, part.shape, part.dtype)
            if layout is not None:
                from gemworks.netmem import kernel_codec

                kernel_codec.encode(part, *layout, out=_halves(message, part.numel(), layout[1]))
                continue
            pieces = [c.contiguous().view(-1).view(torch.uint8) for c in self._codec.encode(part.contiguous())]
            if sum(p.numel() for p in pieces) != message.numel():
                raise CodecError(
                    f"codec {self._codec.name!r}: nbytes() says {message.numel()} for {tuple(part.shape)} "
                    f"{part.dtype}, encode() gave {sum(p.numel() for p in pieces)}"
                )
            torch.cat(pieces, out=message)
        return joined, sizes

    def _kernel_layout(
        self, message: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[int, bool] | None:
        """As `codec.kernel_layout`, for a message whose scales the kernels can reach: float32 ones lie at multiples of
        4.
        """
        layout = kernel_layout(self._codec, shape, dtype, message.device)
        if layout is None or layout[1]:
            return layout
        return layout if (message.storage_offset() + torch.Size(shape).numel()) % 4 == 0 else None

    def _decode(
        self, message: torch.Tensor, shape: Sequence[int], coded: torch.dtype, dtype: torch.dtype
    ) -> torch.Tensor:
        """What a message of a tensor of dtype `coded` says, in `dtype`."""
        if message.numel() == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=message.device)
        codes, start = [], 0
        for code_shape, code_dtype in self._layout(shape, coded):
            size = code_shape.numel() * code_dtype.itemsize
            piece = message[start : start + size]
            # a piece may start at an odd byte, which no wider type can view
            codes.append(
                piece.clone().view(code_dtype).view(code_shape) if code_dtype.itemsize > 1 else piece.view(code_dtype)
            )
            start += size
        return decode_checked(self._codec, tuple(codes), shape, dtype, message.device)

    def _layout(self, shape: Sequence[int], dtype: torch.dtype) -> list[tuple[torch.Size, torch.dtype]]:
        """Shapes and dtypes of the codes. They follow from the tensor's: ask the codec once, without data. Asking takes
        milliseconds.
        """
        key = (*shape, dtype)
        if key not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            empty = torch.zeros(tuple(shape), dtype=dtype, device="meta")
            self._layouts[key] = [(c.shape, c.dtype) for c in self._codec.encode(empty)]
        return self._layouts[key]

    def _decode_into(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """What a message of a tensor of `out`'s shape and dtype says."""
        layout = self._kernel_layout(message, out.shape, out.dtype) if message.numel() else None
        if layout is None:
            out.copy_(self._decode(message, out.shape, out.dtype, out.dtype))
            return
        from gemworks.netmem import kernel_codec

        kernel_codec.decode(*_halves(message, out.numel(), layout[1]), *layout, out.dtype, out=out.view(-1))

    def _sum(
        self, received: torch.Tensor, sizes: list[int], shape: Sequence[int], dtype: torch.dtype, mean: bool
    ) -> torch.Tensor:
        """The messages of all ranks, decoded and added in float32 in rank order."""
        messages = torch.split(received, sizes)
        layouts = {self._kernel_layout(message, shape, dtype) for message in messages}
        layout = layouts.pop() if len(layouts) == 1 else None
        if layout is not None and received.numel():
            from gemworks.netmem import kernel_codec

            numel = torch.Size(shape).numel()
            return kernel_codec.decode_sum(received, self._world, numel, *layout, dtype, mean).view(tuple(shape))
        total = torch.zeros(tuple(shape), dtype=torch.float32, device=received.device)
        for message in messages:
            total += self._decode(message, shape, dtype, torch.float32)
        return (total / self._world if mean else total).to(dtype)

    def _exchange(self, messages: torch.Tensor, sizes: list[int], received_bytes: list[int]) -> torch.Tensor:
        """Message i to rank i; the messages from all ranks, one after the other."""
        received = messages.new_empty(sum(received_bytes))
        dist.all_to_all_single(
            received, messages, output_split_sizes=received_bytes, input_split_sizes=sizes, group=self._group
        )
        return received

    def _note_traffic(self, sizes: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        others = [i for i in range(self._world) if i != self._rank]
        self.traffic = Traffic(
            sum(sizes[i] for i in others), sum(parts[i].numel() * parts[i].element_size() for i in others)
        )

    def _nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return self._codec.nbytes(shape, dtype) if torch.Size(shape).numel() else 0

    # -- the collectives -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, coded, concatenated along dim 0: `[R, ...]` -> `[W * R, ...]`.

        Args:
            x: floating point, 1 to 8 dims, the same shape on every rank; may be empty.

        Returns:
            The same on every rank, this rank's own part decoded like the others.

        Raises:
            CollectiveMismatchError: shapes, dtypes, codecs or operations differ; on every rank.
            ValueError: unsupported dtype or number of dims.
        """
        self._agree("all_gather", x, [0] * self._world)
        message, _ = self._encode([x], x.device)
        everyone = message.new_empty(self._world * message.numel())
        if message.numel():
            _all_gather(everyone, message, self._group)
        out = torch.empty((self._world * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        for m, part in zip(everyone.view(self._world, -1), torch.chunk(out, self._world), strict=False):
            self._decode_into(m, part)
        self.traffic = Traffic((self._world - 1) * message.numel(), (self._world - 1) * x.numel() * x.element_size())
        return out

    @torch.no_grad()
    def reduce_scatter(self, x: torch.Tensor, *, mean: bool = False, key: str = "") -> torch.Tensor:
        """Sum over the ranks of this rank's rows of x: `[R, ...]` -> `[split_rows(R, W)[rank], ...]`.

        Any R goes; `split_rows` says who gets which rows. Messages are added in float32 in rank order.

        Args:
            x: floating point, 1 to 8 dims, the same shape on every rank.
            mean: divide by the number of ranks.
            key: names the tensor, for error feedback.

        Raises:
            CollectiveMismatchError: as in `all_gather`.
            ValueError: as in `all_gather`; or error feedback with a changed shape under the same key.
        """
        problem = None
        residual = self._residuals.get(key) if self._feedback else None
        if residual is not None and residual.shape != x.shape:
            problem = (
                f"x: error feedback {key!r} has shape {tuple(residual.shape)}, got {tuple(x.shape)}; use another key"
            )
        self._agree("reduce_scatter", x, [0] * self._world, problem=problem)
        source = x if residual is None else (x.float() + residual).to(x.dtype)
        rows = split_rows(x.shape[0], self._world)
        parts = list(torch.split(source, rows))
        messages, sent_bytes = self._encode(parts, x.device)
        if self._feedback:
            split = zip(torch.split(messages, sent_bytes), parts, strict=True)
            sent = torch.cat([self._decode(m, p.shape, x.dtype, torch.float32) for m, p in split])
            # the sum before rounding to x's dtype, so that this rounding is fed back too
            exact = x.float() if residual is None else x.float() + residual
            self._residuals[key] = exact - sent
        shape = (rows[self._rank], *x.shape[1:])
        sizes = [self._nbytes(shape, x.dtype)] * self._world
        received = self._exchange(messages, sent_bytes, sizes)
        self._note_traffic(sent_bytes, parts)
        return self._sum(received, sizes, shape, x.dtype, mean)

    @torch.no_grad()
    def all_to_all(self, x: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]) -> torch.Tensor:
        """Send rows to ranks: `[sum(input_splits), ...]` -> `[sum(output_splits), ...]`.

        Args:
            x: floating point, 1 to 8 dims; all dims but the first equal on every rank.
            input_splits: rows for each rank; zeros are fine.
            output_splits: rows from each rank.

        Raises:
            CollectiveMismatchError: as in `all_gather`; or a rank expects another number of rows than it is sent.
            ValueError: splits that are not one per rank, negative, or don't sum to x's rows.
        """
        splits, expected = list(input_splits), list(output_splits)
        problem = None
        if len(splits) != self._world or len(expected) != self._world or min([0, *splits, *expected]) < 0:
            problem = (
                f"input_splits, output_splits: expected {self._world} numbers >= 0 each, got {splits} and {expected}"
            )
        elif x.dim() and sum(splits) != x.shape[0]:
            problem = f"input_splits: expected a sum of {x.shape[0]}, x's rows, got {splits}"
        valid = [*splits, *expected] if problem is None else [0] * 2 * self._world
        everyone = self._agree("all_to_all", x, valid, problem=problem)
        for r, row in enumerate(everyone):
            for s, other in enumerate(everyone):
                if row[self._world + s] != other[r]:
                    raise CollectiveMismatchError(
                        f"all_to_all: rank {r} expects {row[self._world + s]} rows from rank {s}, which sends "
                        f"{other[r]}; "
                        "exchange the splits first"
                    )
        parts = list(torch.split(x, splits))
        messages, sent_bytes = self._encode(parts, x.device)
        shapes = [(n, *x.shape[1:]) for n in expected]
        sizes = [self._nbytes(s, x.dtype) for s in shapes]
        received = torch.split(self._exchange(messages, sent_bytes, sizes), sizes)
        self._note_traffic(sent_bytes, parts)
        out = torch.empty((sum(expected), *x.shape[1:]), dtype=x.dtype, device=x.device)
        for message, part in zip(received, torch.split(out, expected), strict=True):
            self._decode_into(message, part)
        return out


def _halves(message: torch.Tensor, numel: int, mx: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a message."""
    return message[:numel], message[numel:] if mx else message[numel:].view(torch.float32)
