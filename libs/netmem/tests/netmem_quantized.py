"""What quantized collectives have to give: for processes that are started afresh, which import it by name."""

from __future__ import annotations

import time

import torch
from gemworks.netmem.codec import BUILTIN, get_codec
from gemworks.netmem.collectives import QuantizedCollective, split_rows


def tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(17 * rank + sum(shape)))
    return values.to(device, dtype)


def coded(codec: str, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What the other side reads, in dtype."""
    c = get_codec(codec)
    return c.decode(c.encode(x), x.shape, dtype or x.dtype) if x.numel() else x.to(dtype or x.dtype)


SHAPES = [(0,), (1,), (3,), (7, 5), (0, 5), (8, 0), (33, 3), (2, 3, 129), (5, 1)]
ALL_CASES = [(name, dtype) for name in sorted(BUILTIN) for dtype in (torch.float32, torch.bfloat16)]
FEW_CASES = [("fp8_row", torch.float32), ("mxfp8", torch.bfloat16)]


def check_everything(rank: int, world: int) -> None:
    check_cases(rank, world, ALL_CASES if world == 3 else FEW_CASES, "cpu")


def check_codec_on_gpus(rank: int, world: int, codec: str) -> None:
    for case in [case for case in ALL_CASES if case[0] == codec]:
        start = time.monotonic()
        check_cases(rank, world, [case], f"cuda:{rank}")
        print(f"rank {rank}: {case}, {len(SHAPES)} shapes, {time.monotonic() - start:.1f} s", flush=True)


def check_cases(rank: int, world: int, cases: list[tuple[str, torch.dtype]], device: str) -> None:
    """All three collectives against the codec alone, on this rank's device, for odd and empty sizes."""
    for codec, dtype in cases:
        q = QuantizedCollective(codec=codec)
        for shape in SHAPES:
            inputs = [tensor(r, shape, dtype, device) for r in range(world)]
            gathered = q.all_gather(inputs[rank])
            assert torch.equal(gathered, torch.cat([coded(codec, x) for x in inputs])), (codec, shape)

            rows = split_rows(shape[0], world)
            mine = [torch.split(x, rows)[rank] for x in inputs]
            total = torch.zeros(mine[0].shape, device=device)
            for part in mine:
                total += coded(codec, part, torch.float32)
            for mean in (False, True):
                got = q.reduce_scatter(inputs[rank], mean=mean)
                assert torch.equal(got, (total / world if mean else total).to(dtype)), (codec, shape)

            sends = [[(3 * s + 5 * d + shape[0]) % 4 for d in range(world)] for s in range(world)]
            if shape[0] == 0:
                sends = [[0] * world for _ in range(world)]
            xs = [tensor(s, (sum(sends[s]), *shape[1:]), dtype, device) for s in range(world)]
            got = q.all_to_all(xs[rank], sends[rank], [sends[s][rank] for s in range(world)])
            expected = torch.cat([coded(codec, torch.split(xs[s], sends[s])[rank]) for s in range(world)])
            assert torch.equal(got, expected), (codec, shape)
