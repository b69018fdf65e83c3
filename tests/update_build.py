"""Rewrites the tags of test files in the BUILD files from the tiers that their `pytestmark` names.

python tests/update_build.py    # after adding a test file with a tier; test_repo_pants.py says when it is needed
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASES = ("libs/jagged", "libs/precision", "libs/parallel", "libs/netmem", "recipes/gem", "tools", "tests")


def _tiers_of(path: Path) -> set[str]:
    spec = importlib.util.spec_from_file_location("pants_test", ROOT / "tests/test_repo_pants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tiers_of(path)


def python_tests(text: str) -> str:
    """The `python_tests(...)` call in a BUILD file's text."""
    begin, depth = text.index("python_tests("), 0
    for end in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if text[end] == ")" and depth == 0:
            return text[begin : end + 1]
    raise ValueError("python_tests: its parenthesis is not closed")


def rewritten(call: str, tags: dict[str, list[str]]) -> str:
    """The call with other overrides."""
    fields = [
        re.search(rf"{name}=(\[[^\]]*\]|\"[^\"]*\")", call) for name in ("name", "sources", "dependencies", "tags")
    ]
    kept = [match[0] for match in fields if match is not None]
    if not tags:
        return f"python_tests({', '.join(kept)})"
    lines = [f'        "{name}": {{"tags": {json.dumps(tiers)}}},' for name, tiers in tags.items()]
    body = "\n".join(f"    {field}," for field in kept)
    return "\n".join(["python_tests(", body, "    overrides={", *lines, "    },", ")"])


def main() -> None:
    for base in BASES:
        path = ROOT / base / "BUILD"
        text = path.read_text(encoding="utf-8")
        tests = sorted((ROOT / base).rglob("test_*.py"))
        tags = {test.relative_to(ROOT / base).as_posix(): sorted(_tiers_of(test)) for test in tests}
        call = python_tests(text)
        new = rewritten(call, {name: tiers for name, tiers in tags.items() if tiers})
        if new != call:
            path.write_text(text.replace(call, new), encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
