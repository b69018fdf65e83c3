"""Starts several processes of the trainer: `python -m gemworks.gem.launch --nproc-per-node 2 -- --preset tiny`.

It is torchrun with two differences: the trainer's exit codes reach whoever started it (torchrun ends with 1 whatever
happened), so that a scheduler can tell a run to be started again from one that failed; and it needs no script on PATH.
Before `--` come torchrun's own arguments, for instance `--nnodes` and `--rdzv-endpoint`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gemworks.gem.errors import REQUEUE, RUN_FAILED, WRONG_INPUT
from gemworks.gem.process import prepare_process

MODULE = "gemworks.gem.train"
PASSED_ON = (WRONG_INPUT, REQUEUE)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: of the rank that failed first, or 75 if the launcher was stopped."""
    prepare_process()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    parsed = run.parse_args(["-m", *given[:at], MODULE, *given[at + 1 :]])
    try:
        run.run(parsed)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode in PASSED_ON else RUN_FAILED
    except SignalException as error:
        print(f"to be continued: {error}", file=sys.stderr)
        return REQUEUE
    return 0


if __name__ == "__main__":
    sys.exit(main())
