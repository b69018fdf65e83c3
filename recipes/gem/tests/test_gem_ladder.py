"""The ladder: rows are configurations, equal where they must be, resumed, and never dropped."""

import csv
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gemworks.gem.config import ConfigError, GemConfig
from gemworks.gem.data import open_source
from gemworks.gem.efficiency import count_expected_flops
from gemworks.gem.implement import implement, quantise_linears
from gemworks.gem.ladder.__main__ import main, planned_rows
from gemworks.gem.ladder.rows import COLUMNS, NE_TOLERANCE, Case, make_row, wrong_answer
from gemworks.gem.ladder.settings import FULL_STACK, OTHER_BATCHES, RUNGS, SETTINGS, WITHOUT, build
from gemworks.gem.ladder.step import (
    StepCost,
    TrainingRow,
    fp8_flops,
    padding_share,
    read_batches,
    recompute_share,
    run_steps,
)
from gemworks.gem.layers.__main__ import arguments, cases_of
from gemworks.gem.model import Gem
from gemworks.gem.presets import get_preset, load_config

pytestmark = pytest.mark.reference
CPU = torch.device("cpu")


def tiny(**sets: str) -> GemConfig:
    texts = [f"{key.replace('__', '.')}={value}" for key, value in sets.items()]
    return load_config("tiny", sets=["data.batch_size=8", "train.dtype=float32", *texts])


def differing(a: object, b: object, path: str = "") -> set[str]:
    """Dotted keys in which two mappings differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {name for key in a for name in differing(a[key], b[key], f"{path}.{key}" if path else key)}
    return set() if a == b else {path}


def test_fp8_attention_is_a_row_of_full_attention_only():
    """Codes in, and a training step near the one without them; the ladder of block attention says why it has none."""
    block, full = tiny(), tiny(model__attention="full")
    assert SETTINGS["fp8_attention"](full).kernels.attention_format == "fp8"
    with pytest.raises(ConfigError, match="full attention only"):
        SETTINGS["fp8_attention"](block)
    with pytest.raises(ConfigError, match="attention_format: got"):
        block.with_kernels(attention_format="fp8")
    source = open_source(full.data)
    batches = read_batches(full, source, 3, pin=False)
    plain = run_steps(full, source, batches, CPU, warmup=1).loss
    coded = run_steps(full.with_kernels(attention_format="fp8"), source, batches, CPU, warmup=1).loss
    assert coded == pytest.approx(plain, rel=2e-2)
    assert coded != plain


def test_every_row_adds_one_thing():
    """A row changes its own few keys of the configuration above it, and a row that cannot run changes none."""
    config = get_preset("large")
    configs = build(config)
    above, changed = config, {}
    for rung in RUNGS:
        changed[rung.name] = differing(above.to_mapping(), configs[rung.name].to_mapping())
        if not rung.side:
            above = configs[rung.name]
    sets = {
        "padded_compiled": {"train.compile"},
        "jagged_varlen_eager": {"kernels.layout", "kernels.attention", "kernels.pooling"},
        "attention": {"kernels.attention"},
        "gdpa": {"kernels.pffn", "kernels.pooling"},
        "fused_qk": {"kernels.fused_qk"},
        "norms": {"kernels.norm"},
        "stream": {"kernels.stream"},
        "compiled": {"train.compile"},
        "fast_gelu": {"model.pffn_activation"},
        "fp8_linears": {"kernels.linears"},
        "batch_x2": {"kernels.linears", "data.batch_size"},
        "bf16_batch_x2": {"data.batch_size"},
        "bbs": {"data.balance_window"},
    }
    for name, keys in sets.items():
        assert changed[name] == keys, name
    for rung in RUNGS:
        assert bool(changed[rung.name]) != bool(rung.refusal(config)), rung.name
    stacks = configs[FULL_STACK], configs["half_tables"]
    for name, change in WITHOUT.items():
        assert any(differing(stack.to_mapping(), change(stack).to_mapping()) for stack in stacks), name
    left_out = {plan.name for plan in planned_rows(config, leave_one_out=True, stack="half_tables")}
    assert "half_tables without fused norms" in left_out
    assert "half_tables without torch.compile" not in left_out
    assert "without torch.compile" in {plan.name for plan in planned_rows(config, leave_one_out=True)}


def test_leave_one_out_of_any_row_has_every_row():
    """A stack whose other settings need what is taken away says so; nothing else of it is lost."""
    base = load_config("tiny", sets=["model.attention=full"])
    for rung in RUNGS:
        plans = {plan.name: plan for plan in planned_rows(base, leave_one_out=True, stack=rung.name)}
        compiled = build(base)[rung.name].train.compile
        names = [name for name in plans if name.endswith("without torch.compile")]
        assert len(names) == compiled, rung.name
        if compiled and rung.name != "region_budgets":
            assert not plans[names[0]].config.train.compile
    refused = {p.name: p.refusal for p in planned_rows(base, leave_one_out=True, stack="region_budgets") if p.refusal}
    assert list(refused) == ["region_budgets without torch.compile"]
    assert "kernels.activations: got 'recompute@0.5'" in next(iter(refused.values()))


@pytest.mark.parametrize(
    "options",
    [
        ["--rows", "norm"],
        ["--profile", "norm"],
        ["--local", "norm"],
        ["--leave-one-out", "--rows", "without fused norms"],
    ],
)
def test_a_row_that_no_ladder_has_is_refused(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It would be left out without a word, on a machine that is lent for minutes."""
    assert main(["--smoke", "--out", str(tmp_path), *options]) == 2
    assert f"{options[-2]}: got '{options[-1]}', expected some of " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("attention", ["block", "full"])
def test_rows_train_to_the_same_loss(attention: str):
    """Real steps: the padded row, and each row that only changes kernels, take the same path in float32."""
    base = tiny(model__attention=attention)
    source = open_source(base.data)
    batches = read_batches(base, source, 3, pin=False)
    configs = build(base)
    losses = {
        name: run_steps(configs[name], source, batches, CPU, warmup=1).loss
        for name in ("padded_eager", "gdpa", "fused_qk", "norms", "stream")
    }
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["norms"], rel=2e-5), (name, losses)


@pytest.mark.filterwarnings("ignore::gemworks.precision.PrecisionCostWarning")
def test_probed_linears_are_those_that_fit():
    """On a CPU, where speed says nothing, every layer that is exact enough and whose sizes fit; the loss is near."""
    base = tiny(model__dim="128", kernels__linears_min_features="128")
    source = open_source(base.data)
    batches = read_batches(base, source, 3, pin=False)
    config = base.with_kernels(linears="probe")
    row = TrainingRow(config, source, batches, CPU, warmup=1)
    cost = row.measure()
    assert fp8_flops(row.trainer.model, config, batches[0]) > 0
    assert cost.loss == pytest.approx(run_steps(base, source, batches, CPU, warmup=1).loss, rel=2e-2)
    model = Gem(source.schema, config)
    with pytest.raises(ValueError, match="without what a probe chose"):
        implement(model, config)


@pytest.mark.filterwarnings("ignore::gemworks.precision.PrecisionCostWarning")
def test_a_probed_row_has_no_local_mfu_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The layers alone are no model to probe; `layers` refuses what would be."""
    eager = {"fp8_probed": tiny(model__dim="128", kernels__linears_min_features="128", kernels__linears="probe")}
    monkeypatch.setattr("gemworks.gem.ladder.__main__.build", lambda base: dict.fromkeys(build(base), tiny()) | eager)
    command = ["--smoke", "--attention", "block", "--rows", "fp8_probed", "--out", str(tmp_path)]
    assert main(command) == 0
    with (tmp_path / "ladder_h200.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["samples_per_s"]
    assert row["note"] == "no Local MFU: what a probe chose is of a whole model"
    with pytest.raises(ConfigError, match=r"kernels.linears: got 'probe', expected .* in setting 'fp8_probed'"):
        cases_of(arguments(["--smoke", "--setting", "fp8_probed"]), CPU)


def test_other_batches_have_another_ne(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A row that deals samples otherwise is neither held to the others' NE nor the measure of theirs."""
    rows = [part for name in ("bbs", "padded_eager") for part in ("--rows", name)]
    sets = ["--set", "train.max_steps=3"]
    command = ["--smoke", "--attention", "block", "--no-local", *sets, "--out", str(tmp_path), *rows]
    eager = {
        name: replace(c, train=replace(c.train, compile=c.train.compile and name not in ("bbs", "padded_eager")))
        for name, c in build(tiny()).items()
    }
    assert {n for n, c in eager.items() if c.data.balance_window} == OTHER_BATCHES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gemworks.gem.ladder.__main__.build", lambda base: eager)
        assert main(command) == 0
    with (tmp_path / "ladder_h200.csv").open(newline="") as file:
        found = {row["row"]: row for row in csv.DictReader(file)}
    assert abs(float(found["bbs"]["ne"]) / float(found["padded_eager"]["ne"]) - 1) > NE_TOLERANCE


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own imports, which differ by the order of tests
@pytest.mark.parametrize("attention", ["block", "full"])
def test_every_row_trains_on_a_cpu(attention: str, monkeypatch: pytest.MonkeyPatch):
    """All of them but torch's `varlen_attn`, which has no CPU kernel: finite, and the first row's NE where a row learns
    from its batches. Compiled rows are traced and not generated: that takes minutes on a CPU."""
    monkeypatch.setattr("gemworks.gem.implement.INNER", "eager")
    base = tiny(model__attention=attention, model__dim="128", kernels__linears_min_features="128")
    source, configs = open_source(base.data), build(base)
    assert "qkv" in quantise_linears(Gem(source.schema, base), configs["fp8_linears"].kernels)
    wanted: float | None = None
    for rung in RUNGS:
        config = configs[rung.name]
        if rung.refusal(base) or "varlen" in (config.kernels.attention, config.kernels.pooling):
            continue
        torch._dynamo.reset()
        cost = run_steps(config, source, read_batches(config, source, 3, pin=False), CPU, warmup=1)
        assert cost.ne is not None
        assert math.isfinite(cost.ne), rung.name
        assert not cost.num_skipped, rung.name
        wanted = wanted or cost.ne
        if config.data == base.data:
            assert cost.ne == pytest.approx(wanted, rel=NE_TOLERANCE), rung.name


def test_the_padded_row_knows_its_padding():
    base = tiny()
    batches = read_batches(base, open_source(base.data), 2, pin=False)
    padded = build(base)["padded_eager"]
    rows = sum(8 * e.max_length for b in batches for e in b.events.values())
    tokens = sum(int(e.offsets_S[-1]) for b in batches for e in b.events.values())
    assert padding_share(padded, batches) == pytest.approx(1 - tokens / rows)
    assert padding_share(base, batches) == 0.0


def test_recompute_counts_the_layers_once_more():
    config = tiny(kernels__activations="recompute")
    count = count_expected_flops(config, open_source(config.data).schema)
    share = recompute_share(config, count)
    assert share is not None
    assert 0.3 < share < 1 / 3  # a third of forward + backward, without what lies outside the layers
    assert recompute_share(tiny(), count) == 0.0


def test_what_a_budget_computes_again_is_not_stated():
    """The compiler decides it, so the cell is empty, and not 0."""
    base = tiny()
    source = open_source(base.data)
    cost = run_steps(base, source, read_batches(base, source, 2, pin=False), CPU, warmup=1)
    case = Case("block", 8, "uniform", 64)
    for share, cell in ((cost.recompute, "0.0000"), (None, "")):
        row = make_row("norms", "", case, base, replace(cost, recompute=share), None, {}, steps=1)
        assert row["recompute"] == cell
    with_budget = replace(base.train, compile=True)
    config = replace(base, train=with_budget).with_kernels(compile_scope="layers", activations="recompute@0.5")
    assert recompute_share(config, count_expected_flops(config, source.schema)) is None


def test_fp8_flops_are_those_of_the_converted_linears():
    """On a model whose linears are all converted, the share of the projections is theirs by the counter."""
    base = get_preset("tiny").with_model(
        dim=256, num_heads=2, mask_dim=128, embedding_dim=64, expert_dim=128, wukong_rank=8, gate_dim=128
    )
    config = base.with_data(batch_size=4).with_kernels(linears="fp8_block128", linears_min_features=128)
    source = open_source(config.data)
    (batch,) = read_batches(config, source, 1, pin=False)
    model = Gem(source.schema, config)
    report = quantise_linears(model, config.kernels)
    assert "attention.qkv" in report
    tokens = sum(int(e.offsets_S[-1]) for e in batch.events.values())
    sequence = 3 * tokens * (8 * 256**2 * config.model.num_layers + 4 * 256**2)  # HSP is reused in the odd layer
    total = fp8_flops(model, config, batch)
    assert sequence <= total < 2 * sequence
    assert fp8_flops(model, base, batch) == 0.0


def test_command_appends_resumes_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [
        part for name in ("norms", "padded_eager", "fp8_attention", "jagged_varlen_eager") for part in ("--rows", name)
    ]
    command = ["--smoke", "--attention", "block", "--no-local", "--out", str(tmp_path), *rows]
    assert main(command) == 0
    path = tmp_path / "ladder_h200.csv"
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert tuple(found[0]) == COLUMNS
    assert [row["row"] for row in found] == ["norms", "padded_eager", "fp8_attention", "jagged_varlen_eager"]
    by_name = {row["row"]: row for row in found}
    assert by_name["fp8_attention"]["note"].startswith("not measured: ")
    assert "Error" in by_name["jagged_varlen_eager"]["note"]  # no CPU kernel
    assert by_name["norms"]["ne"] == by_name["padded_eager"]["ne"]
    assert by_name["norms"]["step_mfu"] == ""  # a CPU has no peak
    assert float(by_name["padded_eager"]["padding"]) > 0.2
    capsys.readouterr()
    assert main(command) == 0  # everything is there: nothing is measured again
    assert "samples/s" not in capsys.readouterr().out
    page = tmp_path / "docs" / "ladder.md"
    assert main(["--page", str(page), "--out", str(tmp_path)]) == 0
    text = page.read_text()
    assert "not measured: " in text
    assert text.index("| padded_eager |") < text.index("| norms |")
    assert "`norms` over `padded_eager`: x" in text
    details = page.with_name("ladder_details.md").read_text()
    assert "[the ladder](ladder.md)" in details
    assert "| norms | 8 |" in details


def test_a_row_with_a_wrong_answer_gets_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Not finite, or another NE than the first row's on the same batches: no number, its reason, exit code 1."""
    measured = TrainingRow.measure

    def wrong(row: TrainingRow, **options: bool) -> StepCost:
        cost = measured(row, **options)
        changed = {"norms": {"ne": 1.01 * (cost.ne or 0)}, "gdpa": {"loss": math.nan}}
        name = "norms" if row.config.kernels.norm == "gemworks" else "gdpa"
        return cost if row.config.kernels.layout == "padded" else replace(cost, **changed[name])

    monkeypatch.setattr(TrainingRow, "measure", wrong)
    names = [part for name in ("padded_eager", "gdpa", "norms") for part in ("--rows", name)]
    assert main(["--smoke", "--attention", "block", "--no-local", "--out", str(tmp_path), *names]) == 1
    with (tmp_path / "ladder_h200.csv").open(newline="") as file:
        found = {row["row"]: row for row in csv.DictReader(file)}
    assert found["padded_eager"]["ms"]
    assert (found["gdpa"]["ms"], found["gdpa"]["note"]) == ("", "WrongAnswer: the loss is nan")
    assert found["norms"]["samples_per_s"] == ""
    assert re.match(r"WrongAnswer: NE \S+, and \S+ on the same batches in row padded_eager", found["norms"]["note"])
    assert "[3/3] norms, block attention" in capsys.readouterr().out


def test_a_row_with_a_skipped_step_gets_no_number():
    base = tiny()
    source = open_source(base.data)
    batches = read_batches(base, source, 3, pin=False)
    batches[1].dense_BC[0, 0] = math.nan
    cost = run_steps(base, source, batches, CPU, warmup=1)
    assert cost.num_skipped == 1
    assert "1 steps had a loss" in wrong_answer(Path("none.csv"), "norms", Case("block", 8, "uniform", 64), 2, cost)


def test_budget_stops_before_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["--smoke", "--attention", "block", "--no-local", "--rows", "norms", "--out", str(tmp_path)]
    assert main([*command, "--budget-s", "-1"]) == 0
    assert "start the same command again" in capsys.readouterr().out
    assert not (tmp_path / "ladder_h200.csv").exists()


def test_wrong_settings_are_the_callers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--smoke", "--set", "model.dimm=3", "--out", str(tmp_path)]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_the_largest_batch_stops_where_memory_does(monkeypatch: pytest.MonkeyPatch):
    """Running out of memory at 5 samples or more: the last size of the search that fits is 4."""
    from gemworks.gem.ladder import __main__ as ladder

    def steps(config: GemConfig, *args: object, **options: object) -> None:
        assert config.kernels.layout == "padded"
        if config.data.batch_size > 4:
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(ladder, "run_steps", steps)
    assert ladder.largest_batch(tiny(), CPU, limit=64) == 4
    assert ladder.largest_batch(tiny(), CPU, limit=3) == 3


@pytest.mark.parametrize(("error", "stays"), [(RuntimeError, True), (ImportError, True), (AssertionError, False)])
def test_a_row_may_be_refused_and_may_not_be_broken(
    error: type[Exception], stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: object, **options: object) -> None:
        raise error("why")

    monkeypatch.setattr("gemworks.gem.ladder.__main__.TrainingRow", fail)
    command = ["--smoke", "--attention", "block", "--no-local", "--rows", "norms", "--out", str(tmp_path)]
    if not stays:
        with pytest.raises(error, match="why"):
            main(command)
        return
    assert main(command) == 0
    with (tmp_path / "ladder_h200.csv").open(newline="") as file:
        assert [row["note"] for row in csv.DictReader(file)] == [f"{error.__name__}: why"]
