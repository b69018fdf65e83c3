"""Each wheel builds and holds what it should; each library's wheel works alone, with torch and nothing else."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints" / ("cuda.txt" if torch.version.cuda else "cpu.txt")
# torch itself warns at import where numpy is missing, and nothing here asks for numpy.
STRICT = ("-I", "-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning")

# Imports the library and every module of it, then says what else came along. Kernels and what launches them may ask for
# Triton, which is not here; importing the library itself may not.
IMPORT_ALL = """
import importlib, importlib.metadata, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] != "triton":
            raise
import torch
print(json.dumps({
    "file": package.__file__,
    "gemworks": sorted({m.split(".")[1] for m in sys.modules if m.startswith("gemworks.")}),
    "distributions": sorted({d.name.lower() for d in importlib.metadata.distributions()}),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def command(*words: str | Path, folder: Path | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def pip(python: Path, *words: str | Path) -> None:
    command(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *words)


def new_environment(folder: Path) -> Path:
    """A virtual environment without packages; returns its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def site_packages(python: Path) -> Path:
    return Path(command(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory, packages) -> dict[str, Path]:
    """Package name -> its wheel, built from a copy of the package's folder, so that nothing beside it is needed."""
    folder = tmp_path_factory.mktemp("wheels")
    built = {}
    for package in packages:
        copy = folder / "source" / package.name
        shutil.copytree(package.folder, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "dist"))
        out = folder / package.name
        command(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy)
        (built[package.name],) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def torch_environment(tmp_path_factory) -> Path:
    """An environment that holds torch and what torch asks for, from the registry; returns its site-packages."""
    python = new_environment(tmp_path_factory.mktemp("torch") / "venv")
    pip(python, "install", "--quiet", "--constraint", CONSTRAINTS, "torch")
    return site_packages(python)


def test_wheel_holds_the_package_and_nothing_else(package, wheels):
    with zipfile.ZipFile(wheels[package.name]) as archive:
        names = archive.namelist()
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        licence = archive.read(f"{info}/licenses/LICENSE")
    prefix = f"gemworks/{package.name}/"
    assert {name.split("/")[0] for name in names} == {"gemworks", info}
    assert all(name.startswith((prefix, f"{info}/")) for name in names)
    sources = {f"{prefix}{p.relative_to(package.source)}" for p in package.source.rglob("*.py")}
    assert sources <= set(names)
    assert f"{prefix}py.typed" in names
    assert licence == (ROOT / "LICENSE").read_bytes()
    project = package.pyproject["project"]
    assert metadata["Name"] == package.distribution
    assert metadata["Version"] == project["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(required) == len(project["dependencies"])
    assert str(metadata.get_payload()).strip() == (package.folder / "README.md").read_text(encoding="utf-8").strip()


def test_j10_library_works_alone_with_torch(library, wheels, torch_environment, tmp_path):
    """Case J10: importing it needed a package that nobody else has.

    The wheel is installed by pip in a clean environment with its dependencies checked, imported from elsewhere with all
    its modules, and its README example run.
    """
    python = new_environment(tmp_path / "venv")
    (site_packages(python) / "torch.pth").write_text(f"{torch_environment}\n")
    before = set(json.loads(command(python, "-c", IMPORT_ALL, "json"))["distributions"])
    pip(python, "install", "--quiet", "--no-index", wheels[library.name])
    pip(python, "check")

    folder = tmp_path / "elsewhere"
    folder.mkdir()
    got = json.loads(command(python, *STRICT, "-c", IMPORT_ALL, library.module, folder=folder))
    assert Path(got["file"]).is_relative_to(tmp_path / "venv")
    assert set(got["distributions"]) - before == {library.distribution}
    assert got["gemworks"] == [library.name]
    assert not got["cuda"]

    readme = (library.folder / "README.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert example, "no example in the README"
    (folder / "example.py").write_text(example.group(1), encoding="utf-8")
    command(python, *STRICT, "example.py", folder=folder)


def test_the_command_line_is_a_program_of_its_wheel(wheels, tmp_path):
    """All six wheels in an environment that sees this one's packages: the console script, and its doctor."""
    python = new_environment(tmp_path / "venv")
    (site_packages(python) / "others.pth").write_text(f"{site_packages(Path(sys.executable))}\n")
    pip(python, "install", "--quiet", "--no-index", "--no-deps", "--ignore-installed", *wheels.values())
    program, folder = tmp_path / "venv/bin/gemworks", tmp_path / "elsewhere"
    folder.mkdir()
    version = tomllib.loads((ROOT / "tools/pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert command(program, "--version", folder=folder) == f"gemworks {version}\n"
    assert "Usage: gemworks" in command(program, "--help", folder=folder)
    assert 'preset = "small"' in command(program, "config", folder=folder)
    found = json.loads(command(program, "doctor", "--json", folder=folder))
    ours = {item["name"]: item for item in found["packages"] if item["name"].startswith("gemworks-")}
    assert {name: item["state"] for name, item in ours.items()} == dict.fromkeys(ours, "ok")
    assert len(ours) == 6
    where = "import gemworks.cli, gemworks.gem; print(gemworks.cli.__file__, gemworks.gem.__file__)"
    assert all(word.startswith(str(tmp_path)) for word in command(python, "-c", where, folder=folder).split())
