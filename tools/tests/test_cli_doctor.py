"""gemworks doctor: complete, and alive where packages are missing or broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gemworks.cli import doctor
from gemworks.cli.app import run
from gemworks.cli.doctor import Package, look_at
from gemworks.cli.remedies import Gpus, advise, alternatives, outside_ranges
from gemworks.jagged import dispatch
from gemworks.precision import backends

pytestmark = pytest.mark.reference


def test_json_names_versions_devices_and_a_reason_per_op(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from gemworks import jagged
    from gemworks.netmem import explain_codec
    from gemworks.netmem.codec import BUILTIN
    from gemworks.precision import explain
    from gemworks.precision.recipe import PRESETS

    # the peers are slow to import, and whether they are installed is this machine's business
    monkeypatch.setattr(doctor, "PACKAGES", [p for p in doctor.PACKAGES if p.required])
    assert run(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    versions = {item["name"]: item["version"] for item in findings["packages"]}
    assert versions["torch"] == torch.__version__
    assert {item["state"] for item in findings["packages"]} == {"ok"}
    assert findings["devices"][0]["name"] == "cpu"
    rows = {name: [item for item in findings["ops"] if item["library"] == name] for name in ("jagged", "precision")}
    assert {item["op"] for item in rows["jagged"]} == {row.op for row in jagged.support()}
    for item in rows["jagged"]:
        chosen = jagged.explain(item["op"], dtype=getattr(torch, item["dtype"]), device=item["device"])
        assert (item["backend"], item["reason"]) == (chosen.backend, chosen.reason)
    assert {item["dtype"] for item in rows["precision"]} == set(PRESETS)
    for preset in PRESETS:
        found = [
            (item["op"], item["backend"], item["config"])
            for item in rows["precision"]
            if (item["device"], item["dtype"]) == ("cpu", preset)
        ]
        chosen = explain(doctor.LINEAR_SHAPE, preset, "cpu").choices
        assert found == [(f"linear {name} {c.op}", c.backend, c.kernel) for name, c in chosen]
    codecs = {item["op"]: item for item in findings["ops"] if item["library"] == "netmem" and item["device"] == "cpu"}
    assert codecs["codec mxfp8"]["backend"] == "torch"
    assert f"torch: {codecs['codec mxfp8']['reason']}" == explain_codec("mxfp8", torch.zeros(2))
    assert {f"codec {name}" for name in BUILTIN} == codecs.keys()
    assert findings["problems"] == []


def test_tables_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", [p for p in doctor.PACKAGES if p.required])
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("torchrec", "device cpu", "block_attention", "reference", "linear wgrad gemm", "mxfp8"):
        assert word in out


@pytest.mark.parametrize(
    ("text", "state", "advice"),
    [
        ("raise RuntimeError('no GPU here\\nsecond line')", "broken", "importing it fails: RuntimeError: no GPU here"),
        ("raise OSError('undefined symbol: x')", "broken", "importing it fails: OSError: undefined symbol: x"),
        ("import sys; sys.exit(3)", "broken", "importing it fails: SystemExit: 3"),
        ("import no_such_dependency", "broken", "importing it fails: ModuleNotFoundError"),
        ("1 / 0", "broken", "importing it fails: ZeroDivisionError"),
        ("print('hello')", "ok", ""),
    ],
)
def test_broken_package_is_a_finding(
    text: str,
    state: str,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"fake_package_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    finding = look_at(Package(name, name, "a test"))
    sys.modules.pop(name, None)
    assert finding["state"] == state
    assert finding["advice"].startswith(advice)
    assert capsys.readouterr().out == ""


def test_a_package_whose_module_is_gone_is_broken_and_not_missing() -> None:
    """pip has it, so that installing it again is what helps."""
    finding = look_at(Package("pytest", "no_such_module", "a test"))
    assert (finding["version"], finding["state"]) == (pytest.__version__, "broken")
    assert finding["advice"] == "importing it fails: ModuleNotFoundError: No module named 'no_such_module'"


def test_only_backends_that_are_tried_first_are_alternatives() -> None:
    table = [("gluon", "bf16", "sm_90"), ("triton", "bf16", "sm_80"), ("reference", "bf16", "cpu")]
    assert alternatives(table, "bf16", "sm_80", "triton") == [
        {"backend": "gluon", "dtypes": [], "architectures": ["sm_90"]}
    ]


def test_gpus_with_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Properties:
        name, total_memory, major, minor = "H200", 139 * 2**30, 9, 0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: 2 not in (a, b))
    found = {device["name"]: device["description"] for device in doctor._devices()}
    assert found["cuda:0"] == "H200, 139 GiB, sm_90, reaches cuda:1 directly"
    assert found["cuda:2"] == "H200, 139 GiB, sm_90, reaches other GPUs through the host only"


def test_links_and_gpus_as_nvidia_smi_says_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name answers; one that fails, hangs or is missing is no finding."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$1" in *name*) echo "NVIDIA H200";; *) echo none >&2; exit 6;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor.ask_nvidia_smi("--query-gpu=name", "--format=csv,noheader") == ["NVIDIA H200"]
    assert doctor.ask_nvidia_smi("nvlink", "--status") == []
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.ask_nvidia_smi("nvlink", "--status") == []


def test_missing_packages_say_what_they_are_for() -> None:
    finding = look_at(Package("no-such-package", "no_such_package", "nothing"))
    advice = "optional, for nothing: pip install no-such-package"
    assert (finding["state"], finding["advice"]) == ("missing", advice)
    finding = look_at(Package("no-such-package", "no_such_package", "nothing", install="gemworks-gem[more]"))
    assert finding["advice"].endswith("pip install 'gemworks-gem[more]'")


def test_doctor_survives_without_its_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("libtorch is gone")

    monkeypatch.setattr(doctor, "PACKAGES", [Package("no-torch", "no_torch", "everything", required=True)])
    monkeypatch.setattr(doctor, "_devices", broken)
    findings = doctor.examine()
    assert findings["devices"] == []
    assert any("could not look at the devices: OSError: libtorch is gone" in text for text in findings["problems"])
    assert any("no-torch is missing: training will not work" in text for text in findings["problems"])


H200 = Gpus(("NVIDIA H200",), 1, "2.11.0+cu130", "13.0")
NONE = Gpus((), 0, "2.13.0+cpu", None)
PACKAGES = [{"name": name, "state": "ok", "version": "1"} for name in ("triton", "fbgemm-gpu", "transformer-engine")]


def ops_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> list[dict[str, Any]]:
    """What the libraries say of a machine with one GPU of this capability, or of one without a GPU."""
    if capability is None:
        return [*doctor._jagged_ops(["cpu"]), *doctor._precision_ops(["cpu"])]
    gpu = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)
    asked_once = (backends._cuda_spec, dispatch._gpu)  # they remember what torch said of a device
    for function in asked_once:
        function.cache_clear()
    try:
        return [*doctor._jagged_ops(["cpu", "cuda:0"]), *doctor._precision_ops(["cpu", "cuda:0"])]
    finally:
        for function in asked_once:
            function.cache_clear()


def test_nothing_helps_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = advise(NONE, PACKAGES, ops_on(monkeypatch, None))
    assert {item["do"] for item in advice} == {None}
    by_op = {op: item["why"] for item in advice for op in item["ops"]}
    from gemworks import jagged

    for op in ("flash_attention", "rms_norm"):
        for row in jagged.support():
            if row.op == op and row.backend != "reference":
                assert row.backend in by_op[op]
                assert row.architecture in by_op[op]
    assert "scaled_mm on" in by_op["linear"]
    assert "sum_pool" not in by_op, "there is no other backend of it anywhere"


def test_a_gpu_that_torch_cannot_see_is_what_to_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ops_on(monkeypatch, None)
    (found,) = advise(Gpus(("NVIDIA H200",) * 2, 0, "2.13.0+cpu", None), PACKAGES, ops)
    assert found["do"] == "install the CUDA build of torch"
    assert found["why"] == "the driver sees 2 x NVIDIA H200, and torch 2.13.0+cpu is built without CUDA"
    assert {"flash_attention", "linear forward gemm"} <= set(found["ops"])
    (found,) = advise(Gpus(("NVIDIA H200",), 0, "2.11.0", "13.0", "The NVIDIA driver is too old"), PACKAGES, ops)
    assert found["do"].startswith("make the GPU usable for torch")
    assert found["why"].endswith("torch (CUDA 13.0) none. The NVIDIA driver is too old")


def test_what_a_hopper_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ops_on(monkeypatch, (9, 0))
    in_float32 = (["token_map"], None)  # the one op whose kernels take half precision alone
    assert [(line["ops"], line["do"]) for line in advise(H200, PACKAGES, ops)] == [in_float32]
    changed = [
        {"name": "triton", "state": "missing", "version": None},
        {"name": "fbgemm-gpu", "state": "ok", "version": "1.8.0+cpustub"},
        {"name": "transformer-engine", "state": "missing", "version": None},
    ]
    triton, fbgemm, peer, *rest = advise(H200, changed, ops)
    assert [(line["ops"], line["do"]) for line in rest] == [in_float32]
    assert triton["do"] == "pip install 'gemworks-gem[triton]'"
    assert {"flash_attention", "rms_norm", "block_attention", "linear forward cast"} <= set(triton["ops"])
    assert "sum_pool" not in triton["ops"]
    assert (fbgemm["ops"], peer["do"]) == (["embedding tables"], "pip install 'gemworks-precision[transformer-engine]'")


def test_an_older_gpu_has_fewer_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = advise(H200, PACKAGES, ops_on(monkeypatch, (8, 0)))
    by_op = {op: item["why"] for item in advice for op in item["ops"]}
    assert "triton on sm_90" in by_op["rms_norm"]
    assert "flash_attention" not in by_op, "triton has it"


def test_versions_outside_of_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.10.1", "triton": "3.7.1", "rich": "14.0"}
    asked = ["torch<2.14,>=2.11", "rich>=13", 'triton<3.9,>=3.6; extra == "triton"', 'wandb>=99; extra == "wandb"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: asked)
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    assert outside_ranges(["gemworks-gem"]) == [
        "torch is 2.10.1, and gemworks-gem asks for torch<2.14,>=2.11: pip install 'torch<2.14,>=2.11'"
    ]
    versions |= {"torch": "2.13.0", "triton": "3.5.1"}  # asked for by an extra
    assert outside_ranges(["gemworks-gem"]) == [
        "triton is 3.5.1, and gemworks-gem asks for triton<3.9,>=3.6: pip install 'triton<3.9,>=3.6'"
    ]
