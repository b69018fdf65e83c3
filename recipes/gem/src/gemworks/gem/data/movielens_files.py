"""MovieLens-100K on disk: fetched out of a public wheel, checked by hash, parsed into arrays.

The data set's licence forbids passing it on, so it is never committed: it comes from the `ml-100k` folder of the
PyPI wheel `recbole==1.2.1` and stays in a cache folder that git ignores.
(F. M. Harper, J. A. Konstan: "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015.)

Shapes: N ratings, U users, I items, G genres.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WHEEL = "recbole==1.2.1"
WHEEL_FOLDER = "recbole/dataset_example/ml-100k"
SHA256 = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
}
DEFAULT_CACHE = Path(".cache/gemworks/ml-100k")
COLUMNS = {
    "ml-100k.inter": ("user_id:token", "item_id:token", "rating:float", "timestamp:float"),
    "ml-100k.item": ("item_id:token", "movie_title:token_seq", "release_year:token", "class:token_seq"),
    "ml-100k.user": ("user_id:token", "age:token", "gender:token", "occupation:token", "zip_code:token"),
}


@dataclass(frozen=True)
class RatingLog:
    """The ratings in time order (ties in file order) with user and item profiles.

    Attributes:
        user_N, item_N: int64 [N], indices into the profiles below.
        rating_N: int64 [N], 1 to 5.
        timestamp_N: int64 [N], seconds, non-decreasing.
        age_U: int64 [U], years. gender_U, occupation_U, zip_U: str [U].
        year_I: int64 [I], release year, 0 where unknown.
        genres_IG: bool [I, G]; every item has at least one genre ("unknown" is one).
        genre_names: G names.
        user_ids_U, item_ids_I: int64, the ids in the files.
    """

    user_N: NDArray[np.int64]
    item_N: NDArray[np.int64]
    rating_N: NDArray[np.int64]
    timestamp_N: NDArray[np.int64]
    age_U: NDArray[np.int64]
    gender_U: NDArray[np.str_]
    occupation_U: NDArray[np.str_]
    zip_U: NDArray[np.str_]
    year_I: NDArray[np.int64]
    genres_IG: NDArray[np.bool_]
    genre_names: tuple[str, ...]
    user_ids_U: NDArray[np.int64]
    item_ids_I: NDArray[np.int64]


def fetch(cache_dir: str | Path | None = None) -> Path:
    """Make sure the three files lie in `cache_dir`, downloading the wheel with pip if they don't.

    A wheel file already lying in the folder is used instead of a download (machines without a network).

    Args:
        cache_dir: folder; None: `.cache/gemworks/ml-100k` under the current folder.

    Returns:
        The folder, with all three files present and their hashes checked.

    Raises:
        RuntimeError: the download failed; the message ends with pip's own words.
        ValueError: a file has the wrong hash (truncated or changed).
    """
    folder = Path(cache_dir) if cache_dir is not None else DEFAULT_CACHE
    if all((folder / name).is_file() for name in SHA256):
        for name in SHA256:
            _check_hash((folder / name).read_bytes(), name, label=str(folder / name))
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"data.path: cannot make the folder {str(folder)!r} ({error.strerror}); name a folder that can be "
            f"written, or one that holds {', '.join(SHA256)}"
        ) from error
    wheels = sorted(folder.glob("recbole-1.2.1-*.whl"))
    if wheels:
        _unpack(wheels[0], folder)
        return folder
    with tempfile.TemporaryDirectory() as download_dir:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--dest", download_dir, WHEEL], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"could not download {WHEEL} with `{' '.join([*command, WHEEL])}` (exit {done.returncode}); without a "
                f"network put its wheel file into {folder} and try again. pip said: {done.stderr.strip()[-500:]}"
            )
        _unpack(next(Path(download_dir).glob("*.whl")), folder)
    return folder


def _unpack(wheel: Path, folder: Path) -> None:
    """Take the three files out of the wheel; each appears in the folder whole and right, or not at all."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            contents = {name: archive.read(f"{WHEEL_FOLDER}/{name}") for name in SHA256}
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel}: not a whole {WHEEL} wheel ({error}); delete it and fetch again") from error
    for name, content in contents.items():
        _check_hash(content, name, label=f"{name} in {wheel}")
        part = folder / f"{name}.{os.getpid()}.part"
        part.write_bytes(content)
        os.replace(part, folder / name)


def _check_hash(content: bytes, name: str, *, label: str) -> None:
    got = hashlib.sha256(content).hexdigest()
    if got != SHA256[name]:
        raise ValueError(
            f"{label}: SHA-256 is {got}, expected {SHA256[name]} ({len(content)} bytes read): the file is truncated or "
            "changed; delete it and fetch again"
        )


def read_log(folder: str | Path) -> RatingLog:
    """Parse the three files of a folder. Hashes are not checked here: `fetch` does that.

    Raises:
        ValueError: a missing file, a wrong header, a short line or a value that is no number; names file, line, column.
    """
    folder = Path(folder)
    inter = _read_columns(folder / "ml-100k.inter")
    item = _read_columns(folder / "ml-100k.item")
    user = _read_columns(folder / "ml-100k.user")
    path = folder / "ml-100k.inter"
    user_ids_U, user_order = np.unique(_integers(user, "user_id:token", folder / "ml-100k.user"), return_index=True)
    item_ids_I, item_order = np.unique(_integers(item, "item_id:token", folder / "ml-100k.item"), return_index=True)
    user_N = _lookup(_integers(inter, "user_id:token", path), user_ids_U, "user_id", path)
    item_N = _lookup(_integers(inter, "item_id:token", path), item_ids_I, "item_id", path)
    timestamp_N = _integers(inter, "timestamp:float", path)
    order = np.argsort(timestamp_N, kind="stable")
    genre_lists = [item["class:token_seq"][i].split() or ["unknown"] for i in item_order]
    genre_names = tuple(sorted({name for names in genre_lists for name in names}))
    genres_IG = np.zeros((len(item_ids_I), len(genre_names)), dtype=bool)
    for row, names in enumerate(genre_lists):
        genres_IG[row, [genre_names.index(name) for name in names]] = True
    years = [item["release_year:token"][i] for i in item_order]
    return RatingLog(
        user_N=user_N[order],
        item_N=item_N[order],
        rating_N=_integers(inter, "rating:float", path)[order],
        timestamp_N=timestamp_N[order],
        age_U=_integers(user, "age:token", folder / "ml-100k.user")[user_order],
        gender_U=np.array(user["gender:token"])[user_order],
        occupation_U=np.array(user["occupation:token"])[user_order],
        zip_U=np.array(user["zip_code:token"])[user_order],
        year_I=np.array([int(y) if y.isdigit() and len(y) == 4 else 0 for y in years], dtype=np.int64),
        genres_IG=genres_IG,
        genre_names=genre_names,
        user_ids_U=user_ids_U,
        item_ids_I=item_ids_I,
    )


def _read_columns(path: Path) -> dict[str, list[str]]:
    if not path.is_file():
        raise ValueError(f"{path} is missing; fetch the data first (`fetch(cache_dir)`), or correct data.path")
    lines = path.read_text(encoding="utf-8").splitlines()
    header, expected = tuple(lines[0].split("\t") if lines else ()), COLUMNS[path.name]
    if header != expected:
        raise ValueError(f"{path}, line 1: columns are {header}, expected {expected}; delete the file and fetch again")
    rows = [line.split("\t") for line in lines[1:]]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(expected):
            raise ValueError(
                f"{path}, line {number}: {len(row)} columns, expected {len(expected)}: the file is truncated or "
                "changed; delete it and fetch again"
            )
    return {name: [row[i] for row in rows] for i, name in enumerate(expected)}


def _integers(columns: dict[str, list[str]], name: str, path: Path) -> NDArray[np.int64]:
    values = columns[name]
    try:
        return np.array(values, dtype=np.int64)
    except ValueError:
        line = next(i for i, v in enumerate(values, start=2) if not v.lstrip("-").isdigit())
        raise ValueError(
            f"{path}, line {line}: column {name!r} holds {values[line - 2]!r}, expected a whole number; delete the "
            "file and fetch again"
        ) from None


def _lookup(ids_N: NDArray[np.int64], known: NDArray[np.int64], name: str, path: Path) -> NDArray[np.int64]:
    index_N = np.minimum(np.searchsorted(known, ids_N), len(known) - 1)
    bad = np.flatnonzero(known[index_N] != ids_N)
    if len(bad):
        raise ValueError(
            f"{path}, line {bad[0] + 2}: {name} {ids_N[bad[0]]} has no profile in the .user or .item file; delete the "
            "three files and fetch again"
        )
    return index_N.astype(np.int64)
