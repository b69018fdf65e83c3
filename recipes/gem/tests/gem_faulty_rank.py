"""A rank that fails as told, for torchrun: `gem_faulty_rank.py KIND:RANK:STEP <arguments of the trainer>`.

Kinds: none; kill (SIGKILL in the middle of the step, after forward); raise (a ValueError there); seal (sealing the
checkpoint of that step finds a full disk).
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    """Trains; does not return."""
    warnings.simplefilter("ignore")
    from gemworks.gem import checkpoint_files as files
    from gemworks.gem.errors import end
    from gemworks.gem.train import main as train
    from gemworks.gem.trainer import Trainer

    kind, rank, step = sys.argv[1].split(":")
    mine = int(os.environ.get("RANK", "0")) == int(rank)
    forward, seal = Trainer._forward, files.seal

    def failing_forward(self: Any, batch: Any) -> Any:
        found = forward(self, batch)
        if mine and self.step == int(step):
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "raise":
                raise ValueError("data.path: row 7 is bad")
        return found

    def failing_seal(folder: Path) -> None:
        if folder.name.endswith(f"step_{int(step):08d}"):
            raise OSError(28, "No space left on device")
        seal(folder)

    Trainer._forward = failing_forward  # type: ignore[method-assign]
    if mine and kind == "seal":
        files.seal = failing_seal
    end(train(sys.argv[2:]))


if __name__ == "__main__":
    main()
