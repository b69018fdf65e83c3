"""What a failed command says and which code it exits with: 0 fine, 1 the run failed, 2 the user's input is wrong."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TextIO

RUN_FAILED = 1
WRONG_INPUT = 2
TRACEBACK_VARIABLE = "GEMWORKS_TRACEBACK"


def exit_code(error: BaseException) -> int:
    """2 for what the caller can correct (a `ValueError`, a missing file or folder), 1 for everything else.

    >>> exit_code(ValueError("data.batch_size: got 0")), exit_code(RuntimeError("no memory"))
    (2, 1)
    """
    return WRONG_INPUT if isinstance(error, (ValueError, FileNotFoundError, NotADirectoryError)) else RUN_FAILED


def report(error: BaseException, stream: TextIO | None = None) -> int:
    """Prints one line about the error, red on a terminal, and returns the exit code.

    A failed run also prints its traceback; wrong input does so only when the environment sets GEMWORKS_TRACEBACK.
    """
    out: TextIO = sys.stderr if stream is None else stream
    code = exit_code(error)
    if code == RUN_FAILED or os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error, file=out)
    text = " ".join(str(error).split()) or type(error).__name__
    kind = "error" if code == WRONG_INPUT else f"the run failed: {type(error).__name__}"
    line = f"{kind}: {text}"
    print(f"\x1b[31m{line}\x1b[0m" if out.isatty() and not os.environ.get("NO_COLOR") else line, file=out)
    return code
