"""docs/cases.md names tests that exist, and each of them carries the id of its case."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| ([A-Z]\d+) \|.*\| ([^|]+) \|$", re.MULTILINE)
LINK = re.compile(r"\[`(\w+)`\]\(\.\./([^)]+)\)")
CASES = [
    (case, test, path)
    for case, tests in ROW.findall((ROOT / "docs" / "cases.md").read_text(encoding="utf-8"))
    for test, path in LINK.findall(tests)
]


def test_every_case_has_a_row():
    numbers = {"J": 11, "T": 4, "D": 2, "P": 11, "M": 8, "O": 7, "L": 5}
    assert {case for case, _, _ in CASES} == {f"{kind}{i}" for kind, n in numbers.items() for i in range(1, n + 1)}
    assert len({case for case, _, _ in CASES}) == len(ROW.findall((ROOT / "docs" / "cases.md").read_text("utf-8")))


@pytest.mark.parametrize(("case", "test", "path"), CASES)
def test_a_case_has_its_test(case: str, test: str, path: str):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == test]
    assert found, f"{path} has no {test}"
    words = [*test.upper().split("_"), *re.findall(r"\w+", ast.get_docstring(found[0]) or "")]
    assert case in words, f"{test} does not name {case}"
