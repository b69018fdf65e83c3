"""Compile the norm-and-rotate kernels for a GPU that need not be there; one JSON line per kernel.

python compile_rope_kernels.py sm_90
"""

from __future__ import annotations

import json
import sys

from gemworks.jagged.ops.rope import kernel_rope
from gemworks.jagged.ops.rope.launch import MAX_HEADS, NUM_WARPS, rows_of_tile


def main(architecture: str) -> None:
    # beside this script; a test run that collects doctests has no such path
    from compile_tile_kernels import compile_kernel

    for width in (32, 64, 128, 256):
        for backward, scales in ((False, False), (True, False), (False, True)):
            constants = {
                "N": 8, "J": width // 2, "BLOCK_J": width // 2, "ROWS": rows_of_tile(width // 2), "HEADS": MAX_HEADS,
                "NORM": True, "TURN": True, "HAS_END": True, "BACKWARD": backward,
            }  # fmt: skip
            if not scales:
                constants["scale_ptr"] = None
            types = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "end_ptr": "*i64", "scale_ptr": "*fp32"}
            facts = compile_kernel(
                kernel_rope.norm_rope_kernel, lambda name, types=types: types.get(name, "*bf16"), constants,
                int(architecture.removeprefix("sm_")), num_warps=NUM_WARPS,
            )  # fmt: skip
            direction = "backward" if backward else "forward"
            print(json.dumps({"kernel": f"{direction} {width}{' with scales' if scales else ''}", **facts}))


if __name__ == "__main__":
    main(sys.argv[1])
