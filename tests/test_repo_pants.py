"""The Pants files name every package, and their dependency rules are the layers that the import test enforces.

BUILD files are Python with a handful of known names, so they are read by running them with recorders of those names.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TARGET_TYPES = (
    "python_sources",
    "python_tests",
    "python_test_utils",
    "python_distribution",
    "python_requirement",
    "resources",
    "files",
)
TIERS = ("interpret", "compile", "dist", "gpu", "slow")


def read_build(folder: Path) -> tuple[dict[str, list[dict[str, Any]]], list[tuple]]:
    """The targets (type -> keyword arguments of each) and the dependency rules of a BUILD file."""
    targets: dict[str, list[dict[str, Any]]] = {}
    rules: list[tuple] = []

    def recorder(kind):
        return lambda **fields: targets.setdefault(kind, []).append(fields)

    names = {kind: recorder(kind) for kind in TARGET_TYPES} | {
        "__dependencies_rules__": lambda *sets: rules.extend(sets),
        "__defaults__": lambda fields: targets.setdefault("defaults", []).append(fields),
        "parametrize": lambda *values: values,
        "python_artifact": lambda **fields: fields,
    }
    path = folder / "BUILD"
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), names)
    return targets, rules


def tiers_of(path: Path) -> set[str]:
    """The tier markers that a test file sets for all its tests through `pytestmark`."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            return {tier for tier in TIERS if f"pytest.mark.{tier}" in ast.unparse(node.value)}
    return set()


def test_package_has_its_targets(package):
    targets, _ = read_build(package.folder)
    (sources,), (tests,), (distribution,) = (
        targets[kind] for kind in ("python_sources", "python_tests", "python_distribution")
    )
    assert sources["sources"] == ["src/**/*.py"]
    assert tests["sources"] == ["tests/**/test_*.py"]
    # a test may start any program of its package, and import what lies beside it; a target without files has no parts
    helpers = [path for path in (package.folder / "tests").rglob("*.py") if not path.name.startswith("test_")]
    assert tests["dependencies"] == [":src", ":beside", *([":test_utils"] if helpers else [])]
    (beside,) = targets["files"]
    others = {"docs", "benchmarks", "examples", "tools"} & {path.name for path in package.folder.iterdir()}
    data = {path.parent for path in (package.folder / "tests").rglob("*") if path.is_file() and path.suffix != ".py"}
    named = sorted(path.relative_to(package.folder).as_posix() for path in data if path.name != "__pycache__")
    read = ["README.md", *(f"{name}/**/*" for name in sorted(others)), *(f"{name}/*" for name in named)]
    assert beside["sources"] == read, "what tests may read or start, beside Python"
    found = [target["sources"] for target in targets.get("python_test_utils", [])]
    assert found == ([["tests/**/*.py", "!tests/**/test_*.py"]] if helpers else [])
    assert distribution["provides"] == {"name": package.distribution}
    assert distribution["generate_setup"] is False, "the package's own pyproject.toml builds it"
    assert ":src@resolve=cpu" in distribution["dependencies"]
    files = {name for target in targets["resources"] for name in target["sources"]}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/**/py.typed"} <= files


def test_dependency_rules_are_the_layers(package, packages):
    """Equal to `Package.may_import`, which test_repo_layering.py holds the sources to."""
    _, rules = read_build(package.folder)
    ((selector, *allowed, last),) = rules
    assert (selector, last) == ("*", "!*"), "one rule set for all targets, ending in a refusal"
    folders = {p.folder.relative_to(ROOT).as_posix(): p.name for p in packages}
    named = {pattern.removeprefix("//").removesuffix("/**") for pattern in allowed}
    assert {
        folders[name] for name in named - {"constraints", "conftest.py", "docs", "README.md"}
    } == package.may_import | {package.name}


def test_both_kinds_of_machine_are_resolves():
    settings = tomllib.loads((ROOT / "pants.toml").read_text(encoding="utf-8"))
    constraints = settings["python"]["resolves_to_constraints_file"]
    assert constraints == {machine: f"constraints/{machine}.txt" for machine in ("cpu", "cuda")}
    assert settings["python"]["resolves"].keys() == constraints.keys()
    (defaults,) = read_build(ROOT)[0]["defaults"]
    ((kinds, fields),) = defaults.items()
    assert len(kinds) == 4
    assert fields == {"resolve": tuple(constraints)}


def test_pants_leaves_out_what_make_test_leaves_out():
    settings = tomllib.loads((ROOT / "pants.toml").read_text(encoding="utf-8"))
    (marked,) = settings["pytest"]["args"]
    assert f"pytest {marked.replace(chr(39), chr(34))} " in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_every_dependency_of_a_package_is_a_target(packages):
    known = {target["name"] for target in read_build(ROOT / "constraints")[0]["python_requirement"]}
    for package in packages:
        project = package.pyproject["project"]
        extras = project.get("optional-dependencies", {}).values()
        for line in [line for lines in (project["dependencies"], *extras) for line in lines]:
            name = line.split(">")[0].split("[")[0].strip()
            assert name in known or name.startswith("gemworks-"), f"constraints/BUILD lacks {name}"


@pytest.mark.parametrize(
    "folder", ["libs/jagged", "libs/precision", "libs/parallel", "libs/netmem", "recipes/gem", "tools", "."]
)
def test_tests_are_tagged_by_tier(folder):
    """A file whose `pytestmark` names a tier carries it as a tag: `pants --tag=-slow test ::` means what it says."""
    base = ROOT / folder if folder != "." else ROOT / "tests"
    (target,) = read_build(base)[0]["python_tests"]
    tagged = {name: set(fields["tags"]) for name, fields in target.get("overrides", {}).items()}
    marked = {path.relative_to(base).as_posix(): tiers_of(path) for path in sorted(base.rglob("test_*.py"))}
    expected = {name: tiers for name, tiers in marked.items() if tiers}
    assert tagged == expected, f"{base}/BUILD: overrides of python_tests should be {expected}"
