"""Nothing in the tracked files ties the repository to the machine that it was written on."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest

ROOT = Path(__file__).resolve().parents[1]


def output(*command: str) -> str:
    """What a command prints, or nothing where it cannot run."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False).stdout


def registry_hosts() -> set[str]:
    """Hosts of the package registries that pip and npm use on this machine, configured or built in."""
    text = output(sys.executable, "-m", "pip", "config", "list") + output("npm", "config", "get", "registry")
    built_in = "from pip._internal.models.index import PyPI; print(PyPI.url, 'https://' + PyPI.file_storage_domain)"
    text += output(sys.executable, "-c", built_in)
    return {host for url in re.findall(r"https?://[^\s'\"]+", text) if (host := urlparse(url).hostname)}


def tracked_text() -> dict[str, str]:
    """Path -> text of every tracked file that is text."""
    texts = {}
    for name in output("git", "ls-files", "-z").split("\0"):
        path = ROOT / name
        if name and path.is_file() and b"\0" not in (content := path.read_bytes()):
            texts[name] = content.decode("utf-8", errors="replace")
    return texts


def findings(texts: dict[str, str], words: set[str]) -> list[str]:
    """`path: word` for each word that a text holds."""
    return [f"{name}: {word}" for name, text in texts.items() for word in sorted(words) if word in text]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    found = tracked_text()
    if not found:
        pytest.skip("not a git checkout")
    return found


def test_no_registry_host(texts):
    assert not findings(texts, registry_hosts())


def test_no_path_of_this_machine(texts):
    folders = {path for path in (Path.home(), ROOT) if path != Path("/")}
    assert not findings(texts, {f"{path}/" for path in folders})


def test_no_url_in_constraints():
    for path in (ROOT / "constraints").glob("*.txt"):
        assert "://" not in path.read_text(encoding="utf-8")


def test_finder_finds():
    assert registry_hosts()
    assert findings({"a.txt": "see host.example"}, {"host.example", "other.example"}) == ["a.txt: host.example"]
