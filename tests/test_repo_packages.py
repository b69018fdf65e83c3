"""Each package's metadata says what the package is, and asks for what it imports: no more, no less."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("cpu", "cuda")
# A module of one distribution that needs another at run time.
ALSO_NEEDS = {"torch.utils.tensorboard": "tensorboard"}
# Files of the recipe that only the package of an extra ever loads; they may import it at the top.
LOADED_BY_AN_EXTRA = {
    "recipes/gem/src/gemworks/gem/components.py": "torchx",
    "recipes/gem/src/gemworks/gem/schedulers/app.py": "torchx",
    "recipes/gem/src/gemworks/gem/schedulers/slurm.py": "torchx",
    "recipes/gem/src/gemworks/gem/schedulers/volcano.py": "torchx",
}
# Peers of benchmarks: imported in a function if they are there, and never installed for anybody.
PEERS = {"flash-attn", "liger-kernel"}
# Extras that no constraints file pins, because they need a compiler for the GPU at hand.
NOT_PINNED = {"transformer-engine"}


def pins(name: str) -> dict[str, Version]:
    """The pins of a constraints file."""
    lines = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), f"{name}.txt holds `name==version` lines and comments only"
    found = {str(canonicalize_name(package)): Version(version) for package, version in pairs}
    assert len(found) == len(pairs), f"{name}.txt pins a package twice"
    return found


def requirements(project: Mapping, *, optional: bool) -> dict[str, Requirement]:
    """The declared dependencies by canonical name; with `optional` those of the extras."""
    lists = project.get("optional-dependencies", {}).values() if optional else [project.get("dependencies", [])]
    parsed = [Requirement(line) for lines in lists for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def loaded_at_import(package) -> set[Path]:
    """The files of a library that `import gemworks.<library>` runs; the others may import an extra at the top."""
    edges: dict[Path, set[Path]] = {}
    for item in package.imports("src"):
        if not item.optional and item.module.startswith(f"{package.module}."):
            parts = item.module.split(".")
            stems = [package.folder.joinpath("src", *parts[:n]) for n in range(3, len(parts) + 1)]
            files = {path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py")}
            edges.setdefault(item.path, set()).update(path for path in files if path.is_file())
    reached, new = set[Path](), {package.source / "__init__.py"}
    while new:
        reached |= new
        new = {target for path in new for target in edges.get(path, set())} - reached
    return reached


def needs(package) -> dict[str, tuple[bool, str]]:
    """Distribution -> (optional, where): what the sources import beyond the standard library and themselves."""
    eager = loaded_at_import(package) if package.is_library else None
    providers = importlib.metadata.packages_distributions()
    found: dict[str, tuple[bool, str]] = {}
    for item in package.imports("src"):
        top = item.module.split(".")[0]
        if top in sys.stdlib_module_names or f"{item.module}.".startswith(f"{package.module}."):
            continue
        if top == "gemworks":
            names = [f"gemworks-{item.module.split('.')[1]}"]
        else:
            names = [canonicalize_name(providers[top][0] if top in providers else top)]
            names += [needed for module, needed in ALSO_NEEDS.items() if f"{item.module}.".startswith(f"{module}.")]
        for name in names:
            is_lazy = eager is not None and name != "torch" and item.path not in eager
            is_optional = (
                item.optional or is_lazy or LOADED_BY_AN_EXTRA.get(item.path.relative_to(ROOT).as_posix()) == name
            )
            optional = is_optional and found.get(name, (True, ""))[0]
            found[name] = (optional, f"{item.path}:{item.line}")
    return found


def test_build_backend_and_layout(package):
    pyproject = package.pyproject
    assert pyproject["build-system"]["build-backend"] == "hatchling.build"
    assert pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/gemworks"]
    assert (package.source / "__init__.py").is_file()
    assert (package.source / "py.typed").read_text() == ""
    assert not (package.folder / "src/gemworks/__init__.py").exists(), "gemworks is a namespace package"
    assert [p.name for p in (package.folder / "src/gemworks").iterdir() if p.name != "__pycache__"] == [package.name]


def test_metadata(package):
    project = package.pyproject["project"]
    assert project["name"] == package.distribution
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert project["readme"] == "README.md"
    assert 20 <= len(project["description"]) <= 100
    for classifier in (
        "Typing :: Typed",
        "Intended Audience :: Developers",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)),
    ):
        assert classifier in project["classifiers"]
    assert not [c for c in project["classifiers"] if c.startswith("License ::")], "PEP 639: `license` says it"


def test_licence_is_the_repositorys(package):
    assert (package.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_changelog_has_the_version(package):
    project = package.pyproject["project"]
    headings = re.findall(r"^## (\S+)", (package.folder / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == project["version"], "the newest entry is the version of pyproject.toml"


def test_libraries_depend_on_torch_only(library):
    assert requirements(library.pyproject["project"], optional=False).keys() <= {"torch", "triton"}


def test_everything_imported_is_declared(package):
    project = package.pyproject["project"]
    required, optional = (requirements(project, optional=o) for o in (False, True))
    missing = [
        f"{where} imports {name}, which pyproject.toml does not ask for"
        for name, (is_optional, where) in needs(package).items()
        if name not in required and not (is_optional and (name in optional or name in PEERS))
    ]
    assert not missing, "\n".join(missing)


def test_everything_declared_is_imported(package):
    declared = requirements(package.pyproject["project"], optional=False)
    assert declared.keys() <= needs(package).keys(), "pyproject.toml asks for what no source file imports"


def test_torchx_is_asked_for_by_an_extra_only(packages):
    """torchx pins urllib3 < 1.27; who trains does not get it unless he launches from that environment too."""
    asked = {
        (p.name, extra)
        for p in packages
        for extra, lines in {
            None: p.pyproject["project"]["dependencies"],
            **p.pyproject["project"].get("optional-dependencies", {}),
        }.items()
        for line in lines
        if line.startswith(("torchx", "urllib3"))
    }
    assert asked == {("gem", "launch")}


def test_torch_ranges_agree(packages):
    asked = {p.name: requirements(p.pyproject["project"], optional=False)["torch"].specifier for p in packages}
    assert set(asked.values()) == {SpecifierSet(">=2.11,<2.14")}, asked


@pytest.mark.parametrize("machine", MACHINES)
def test_constraints_pin_every_dependency_inside_its_range(package, machine):
    pinned = pins(machine)
    project = package.pyproject["project"]
    for optional in (False, True):
        for name, requirement in requirements(project, optional=optional).items():
            if not name.startswith("gemworks-") and name not in NOT_PINNED:
                assert name in pinned
                assert pinned[name] in requirement.specifier


@pytest.mark.parametrize("machine", MACHINES)
def test_constraints_pin_the_development_tools(machine):
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    names = {canonicalize_name(line) for line in lines if line and not line.startswith("#")}
    assert names <= pins(machine).keys()


def test_machines_differ_only_in_cuda():
    cpu, cuda = (pins(machine) for machine in MACHINES)
    assert all(cpu[name] == cuda[name] for name in cpu.keys() & cuda.keys())
    assert cpu.keys() - cuda.keys() == {"fbgemm-gpu-cpu"}
    assert all(n.startswith(("nvidia-", "cuda-")) or n == "fbgemm-gpu" for n in cuda.keys() - cpu.keys())
    assert cpu["fbgemm-gpu-cpu"] == cuda["fbgemm-gpu"], "both kinds of machine run the same fbgemm"
    assert pins("interpret").keys() == {"triton"}
