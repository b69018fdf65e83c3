"""gemworks doctor: complete, and alive where packages are missing or broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from gemworks.cli import doctor
from gemworks.cli.app import run
from gemworks.cli.doctor import Package, look_at

pytestmark = pytest.mark.reference


def test_json_names_versions_devices_and_a_reason_per_op(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from gemworks import jagged
    from gemworks.precision import explain, support_table
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
    supported = {(op, kind, kernel) for _, op, kind, kernel in support_table(("cpu",))}
    for item in rows["precision"]:
        if item["device"] == "cpu":
            product_or_cast = item["op"].rsplit(" ", 1)[-1]
            assert (product_or_cast, item["dtype"], f"{item['backend']}: {item['config']}") in supported
    mxfp8 = explain(doctor.LINEAR_SHAPE, "mxfp8", "cpu")
    found = [
        (i["op"], i["backend"], i["config"]) for i in rows["precision"] if (i["device"], i["dtype"]) == ("cpu", "mxfp8")
    ]
    assert found == [(f"linear {name} {c.op}", c.backend, c.kernel) for name, c in mxfp8.choices]
    assert len(findings["ops"]) == len(rows["jagged"]) + len(rows["precision"])
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


def test_missing_packages_say_what_they_are_for() -> None:
    finding = look_at(Package("no-such-package", "no_such_package", "nothing"))
    assert (finding["state"], finding["advice"]) == ("missing", "optional, for nothing")


def test_doctor_survives_without_its_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("libtorch is gone")

    monkeypatch.setattr(doctor, "PACKAGES", [Package("no-torch", "no_torch", "everything", required=True)])
    monkeypatch.setattr(doctor, "_devices", broken)
    findings = doctor.examine()
    assert findings["devices"] == []
    assert any("could not look at the devices: OSError: libtorch is gone" in text for text in findings["problems"])
    assert any("no-torch is missing: training will not work" in text for text in findings["problems"])
