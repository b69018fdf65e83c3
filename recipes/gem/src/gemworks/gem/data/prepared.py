"""Data sets made once from the files of a public log, and found again: beside those files, in a folder `.gemworks`.

The folder's name holds a hash of what the data set depends on: files with their sizes and times, and settings. Several
processes may ask at once; one prepares, the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

FORMAT = 1  # of what is prepared; another number prepares again


def prepared_folder(
    files: Sequence[Path], source: str, settings: Mapping[str, object], prepare: Callable[[Path], object]
) -> Path:
    """The prepared data set, made by `prepare(folder)` if it isn't there.

    Raises:
        ValueError: nothing can be written beside the files.
    """
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([FORMAT, source, facts, dict(settings)], sort_keys=True)
    home = files[0].parent / ".gemworks"
    folder = home / f"{source}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    try:
        home.mkdir(exist_ok=True)
        lock = (home / "lock").open("w")
    except OSError as error:
        raise ValueError(
            f"{home}: cannot write there ({error.strerror}); the prepared data set goes there, so copy the files to a "
            "folder that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            prepare(folder)
    return folder
