"""Golden texts of commands whose output holds times, rates and hashes, or the figures of a run, whose last digits
machines differ in: a placeholder stands for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from gemworks.cli.app import run

pytestmark = pytest.mark.reference
Golden = Callable[[str, str], None]

TINY = (
    "data.num_samples=128 data.batch_size=32 data.max_length=8 data.prefetch=0 model.dim=32 train.max_steps=2 "
    "train.log_every=1 train.eval_every=1"
)


MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)), [torch.randn(64, 128)]
"""


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, where there is one, would have its name in the text, and its own times."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def settled(text: str) -> str:
    """Without what changes from run to run: 123 samples/s -> N samples/s, 0.7013 -> #.####, 1 thread -> N threads."""
    text = re.sub(r"[\d.,]+k? (?=samples/s|tokens/s|ms/step|s\b)", "N ", text)
    text = re.sub(r"[\d.]+ [kMGTP]?FLOP/s", "N FLOP/s", text)
    text = re.sub(
        r"(best step) \d+", r"\1 N", text.replace("  best so far", "")
    )  # whether it is depends on the figures
    text = re.sub(r"\d+ threads?", "N threads", text)
    return re.sub(r"\d+\.\d+", lambda number: re.sub(r"\d", "#", number[0]), text)


def shown(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run(arguments.split()) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    return f"$ gemworks {arguments}\n{settled(out)}" + (f"--- standard error\n{settled(err)}" if err else "")


def test_settled_keeps_what_is_the_commands_own() -> None:
    text = "step 2 of 2, 12 s, 1.33k tokens/s, 360 MFLOP/s on CPU, 1 thread; NE 0.4602, 16,384 samples"
    assert settled(text) == "step 2 of 2, N s, N tokens/s, N FLOP/s on CPU, N threads; NE #.####, 16,384 samples"


def test_train_convert_and_reshard(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    pytest.importorskip("safetensors.torch")
    train = f"train --preset tiny --set {TINY} --run-dir first"
    convert = "checkpoint convert first model.safetensors --checkpoint last"
    texts = [shown(words, capsys) for words in (train, convert, "checkpoint reshard first second --parts 3")]
    # one checkpoint or two are copied: the last, and the best where it is another
    texts[-1] = re.sub(r"step (1 and )?2 in 3 parts", "step STEPS in 3 parts", texts[-1])
    golden("runs.txt", "\n".join(texts))


def test_data_fetch(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    Path("taobao").mkdir()
    rows = "".join(f"1,{i},3,pv,{100 + i}\n" for i in range(20))
    Path("taobao/UserBehavior.csv").write_text(rows, encoding="utf-8")
    taobao = "--set data.source=taobao data.path=taobao data.max_length=4"
    texts = [shown(f"data fetch {which}", capsys) for which in ("--preset tiny", taobao)]
    golden("data_fetch.txt", re.sub(r"taobao-[0-9a-f]+", "taobao-HASH", "\n".join(texts)))


def test_probe(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    Path("their_model_3.py").write_text(MODEL, encoding="utf-8")
    golden("probe.txt", shown("probe their_model_3:make --candidate mxfp8 --min-sqnr-db 10", capsys))
