"""The corridor of the design: libraries know nothing of each other, the recipe composes them, tools sit on top."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Names that importing a library must not bring in beyond what `import torch` already does.
HEAVY = ("torchrec", "fbgemm_gpu", "triton", "torchx", "tensordict", "matplotlib", "pyarrow", "torchao")

PROBE = """
import json, sys
import torch
before = set(sys.modules)
import {module}
print(json.dumps({{
    "new": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "process_group": torch.distributed.is_available() and torch.distributed.is_initialized(),
}}))
"""


def gemworks_imports(package, *subfolders) -> list[tuple[str, str]]:
    """(name under gemworks, where) of each import of a gemworks package other than its own."""
    found = []
    for item in package.imports(*subfolders):
        parts = item.module.split(".")
        if parts[0] == "gemworks" and len(parts) > 1 and parts[1] != package.name:
            found.append((parts[1], f"{item.path}:{item.line}"))
    return found


def test_sources_import_only_what_their_layer_may(package):
    wrong = [
        f"{where} imports gemworks.{name}"
        for name, where in gemworks_imports(package, "src")
        if name not in package.may_import
    ]
    assert not wrong, "\n".join(wrong)


def test_tests_and_benchmarks_of_a_library_stay_inside_it(library):
    wrong = [f"{where} imports gemworks.{name}" for name, where in gemworks_imports(library, "tests", "benchmarks")]
    assert not wrong, "\n".join(wrong) + "\nwhat crosses libraries is tested in recipes/gem/tests or tests/"


def test_only_the_recipe_composes_libraries(packages):
    composers = {p.name for p in packages if len({n for n, _ in gemworks_imports(p, "src") if n != "gem"}) > 1}
    assert composers <= {"gem", "cli"}, composers


def test_import_finder_sees_every_way_to_import(tmp_path, packages):
    """The layering tests rest on it: plain, from, relative, nested, dynamic."""
    source = tmp_path / "gemworks" / "jagged" / "ops"
    source.mkdir(parents=True)
    path = source / "softmax.py"
    path.write_text(
        "import gemworks.parallel\n"
        "from gemworks import precision\n"
        "from ...netmem import arena\n"
        "from . import kernel\n"
        "def f():\n    import importlib\n    return importlib.import_module('gemworks.gem')\n"
        "try:\n    import triton\nexcept ImportError:\n    triton = None\n"
    )
    conftest = sys.modules[type(packages[0]).__module__]
    got = {(i.module, i.optional) for i in conftest.file_imports(path, tmp_path)}
    assert got == {
        ("gemworks.parallel", False),
        ("gemworks.precision", False),
        ("gemworks.netmem.arena", False),
        ("gemworks.jagged.ops.kernel", False),
        ("importlib", True),
        ("gemworks.gem", True),
        ("triton", True),
    }


def probe(module: str, folder: Path) -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE.format(module=module)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_a_library_is_light_and_touches_no_device(library, tmp_path):
    """No other library, no torchrec, no Triton, no CUDA context, no process group."""
    got = probe(library.module, tmp_path)
    others = [m for m in got["new"] if m.startswith("gemworks.") and m.split(".")[1] != library.name]
    assert library.module in got["new"]
    assert not others
    assert not [m for m in got["new"] if m.split(".")[0] in HEAVY]
    assert not got["cuda"]
    assert not got["process_group"]
