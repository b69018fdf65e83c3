"""What a failed command says and which code it exits with.

0 fine, 1 the run failed, 2 the user's input is wrong, 75 the run was asked to stop and wants to be started again.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import NoReturn, TextIO

RUN_FAILED = 1
WRONG_INPUT = 2
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: "try again later"
TRACEBACK_VARIABLE = "GEMWORKS_TRACEBACK"
FOLLOWS_SECONDS = 2.0  # torchrun tells the first failure from the others by the whole second


class Preempted(Exception):
    """The run stopped because it was asked to; nothing is wrong with it."""


def exit_code(error: BaseException) -> int:
    """2 for what the caller can correct (a `ValueError` of ours, a file or folder that is missing, of the other kind or
    closed to this user), 75 for a run that shall be started again, 1 for everything else. A `ValueError` that torch or
    another package raised is not an answer to the caller's input, whose checks are ours: the run failed.

    >>> exit_code(ValueError("data.batch_size: got 0")), exit_code(RuntimeError("no memory")), exit_code(Preempted())
    (2, 1, 75)
    >>> exit_code(PermissionError(13, "Permission denied", "run/config.toml")), exit_code(PermissionError(1, "no fork"))
    (2, 1)
    """
    if isinstance(error, Preempted):
        return REQUEUE
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return WRONG_INPUT
    if isinstance(error, (PermissionError, IsADirectoryError)) and error.filename is not None:
        return WRONG_INPUT
    return WRONG_INPUT if isinstance(error, ValueError) and _is_ours(error) else RUN_FAILED


def _is_ours(error: BaseException) -> bool:
    """Whether code of gemworks raised it; one that was never raised counts as ours."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return True
    spec = frames[-1].f_globals.get("__spec__")  # unlike __name__ it knows a module that runs as __main__
    return spec is not None and spec.name.partition(".")[0] == "gemworks"


def report(error: BaseException) -> int:
    """Prints one line about the error, red on a terminal, and returns the exit code.

    A failed run also prints its traceback; the others do so only when the environment sets GEMWORKS_TRACEBACK.
    """
    code = exit_code(error)
    if code == RUN_FAILED or os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    text = str(error).strip() or type(error).__name__
    kind = {WRONG_INPUT: "error", REQUEUE: "to be continued"}.get(code, f"the run failed: {type(error).__name__}")
    print_line(f"{kind}: {text}", sys.stderr)
    return code


def print_line(text: str, stream: TextIO) -> None:
    """One line, whatever breaks are in the text; red on a terminal."""
    line = " ".join(text.split())
    print(f"\x1b[31m{line}\x1b[0m" if stream.isatty() and not os.environ.get("NO_COLOR") else line, file=stream)


def write_error_file(error: BaseException) -> None:
    """Tells torchrun, if that started this process, what it then shows as the first failure of all ranks.

    Call it where the error is being handled: the file holds the current exception's traceback. A `RankFailure`, which
    is another rank's fault, waits until torchrun's clock shows that it came later.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from gemworks.parallel.heartbeat import RankFailure
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        if isinstance(error, RankFailure):
            time.sleep(FOLLOWS_SECONDS)
        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)


def end(code: int) -> NoReturn:
    """Ends the process with an exit code; a failed one of several at once.

    Its threads may still be writing or talking to ranks that have gone; the interpreter would wait for them.
    """
    if code and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
