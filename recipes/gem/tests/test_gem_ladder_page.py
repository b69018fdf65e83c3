"""The ladder's page: which row stands beside which, what is compared with what, and nothing that no row says."""

from __future__ import annotations

from pathlib import Path

import pytest
from gemworks.gem.ladder.page import write_page
from gemworks.gem.ladder.pair_page import latest_in_order
from gemworks.gem.ladder.rows import COLUMNS, Case, done, key_of
from gemworks.gem.ladder.sequence import local_of, sequence_runs, sequence_table
from gemworks.gem.ladder.short_page import in_short
from gemworks.gem.ladder.tables import by_attention, cases, in_order, ladder_table, repeated, takeaways
from gemworks.gem.layers.report import COLUMNS as LAYER_COLUMNS
from gemworks.gem.layers.report import append_csv
from gemworks.gem.layers.report import done as layers_done

pytestmark = pytest.mark.reference


def test_the_page_states_no_ne_where_no_row_has_one():
    row = {"row": "norms", "batch": "8", "samples_per_s": "2", "ne": ""}
    text = in_short({"block": [row]}, [])
    assert "2 samples/s in `norms`" in text
    assert "NE" not in text
    assert "NE of these 1 rows: 0.9000 to 0.9000." in in_short({"block": [row, row | {"ne": "0.9"}]}, [])


def test_page_without_measurements_says_so(tmp_path: Path):
    write_page(tmp_path / "ladder.md", tmp_path)
    assert "Not measured yet" in (tmp_path / "ladder.md").read_text()


def ladder_row(name: str, **cells: str) -> dict[str, str]:
    """A measured row; cells say what differs."""
    given = {"row": name, "attention": "block", "batch": "8", "samples_per_s": "100", "commit": "a"}
    return dict.fromkeys(COLUMNS, "") | {"max_len": "64", "law": "uniform"} | given | cells


def test_a_row_is_compared_with_what_it_builds_on():
    """The row above that is not beside the ladder, or the one that its rung names; another commit is marked.

    `graphs_all` names a row that has no number here, nor has the one which that names.
    """
    rows = in_order([
        ladder_row("norms"), ladder_row("fast_gelu", samples_per_s="150", commit="b"),
        ladder_row("cuda_graphs", samples_per_s="300", commit="b"),
        ladder_row("graphs_less_kept", samples_per_s="330", commit="b"),
        ladder_row("graphs_all", samples_per_s="363", commit="b"),
        ladder_row("less_kept", samples_per_s="", note="OutOfMemoryError: full"),
        ladder_row("bf16_batch_x2", batch="16", samples_per_s="151", commit="b"),
    ])  # fmt: skip
    lines = {line.split(" |")[0].removeprefix("| "): line for line in ladder_table(rows).splitlines()}
    over = {name: line.split(" | ")[3] for name, line in lines.items() if " x" in line}
    assert over == {
        "fast_gelu": "x1.500\\*", "+ cuda_graphs": "x2.000", "+ graphs_less_kept": "x1.100 `cuda_graphs`",
        "+ graphs_all": "x1.100 `graphs_less_kept`", "bf16_batch_x2": "x1.007",
    }  # fmt: skip
    assert "No number: OutOfMemoryError: full" in lines["+ less_kept"]
    assert "; 16 samples" in lines["bf16_batch_x2"]
    text = takeaways(rows)
    assert "- Nearly flat in this run: `bf16_batch_x2` x1.007." in text
    assert "`bf16_batch_x2` over `norms`: x1.51 samples/s" in text
    alone = [ladder_row("full stack"), ladder_row("without GDPA", samples_per_s="90")]
    other = [ladder_row("half_tables"), ladder_row("half_tables without GDPA"), ladder_row("full stack", batch="16")]
    assert [len(group) for group in cases([*alone, *other], chained=False).values()] == [2, 2, 1]
    assert "- Loses: `without GDPA` x0.900." in takeaways(alone, chained=False)


def test_rows_whose_steps_overlap_are_uncertain():
    """However large the ratio; ranges are of samples/s, so rows of other batches compare too."""
    rows = [
        ladder_row("norms", ms_p20="70", ms_p80="90"),
        ladder_row("fast_gelu", samples_per_s="125", ms_p20="50", ms_p80="69"),
        ladder_row("bf16_batch_x2", batch="16", samples_per_s="200", ms_p20="70", ms_p80="150"),
    ]
    text = takeaways(rows)
    assert "- Gains: `fast_gelu` x1.250 (1.01-1.80)." in text
    assert "- Uncertain (the ranges overlap): `bf16_batch_x2` x1.600 (0.67-1.97)." in text
    assert "| x1.250 (1.01-1.80) |" in ladder_table(rows)
    alone = [ladder_row("full stack", samples_per_s="150", commit="b"), ladder_row("without GDPA", samples_per_s="10")]
    assert "`fast_gelu` with block attention and 8 samples gave 125 (a), 150 (b) samples/s (commit), x1.20 apart" in (
        repeated(rows, alone)
    )
    assert repeated(rows) == repeated([]) == ""


def test_rows_of_another_model_are_a_case_of_their_own():
    """What `--set` changed is in the title, and such rows neither mix with the ladder's nor replace them."""
    command = "python -m gemworks.gem.ladder --set data.num_ids=9 --steps 6"
    rows = [ladder_row("norms"), ladder_row("norms", command=command), ladder_row("norms", setting="half_tables")]
    titles = [title.partition("a CPU")[2] for title in cases(rows)]
    assert titles == ["", ", with `data.num_ids=9`", ", from `half_tables`"]
    assert by_attention([rows[1], rows[0], rows[1]])["block"] == [rows[0]]


def test_a_row_without_a_law_has_the_ladders(tmp_path: Path):
    """Of a CSV from before there were others."""
    path, columns = tmp_path / "ladder_h200.csv", [name for name in COLUMNS if name != "law"]
    row = ladder_row("norms")
    row.pop("law")
    append_csv(path, [row], columns)
    assert done(path) == {key_of("norms", Case("block", 8, "uniform", 64))}
    layers = tmp_path / "layers_h200.csv"
    total = {key: cell for key, cell in layer_rows("norms", "8", "2")[0].items() if key != "law"}
    append_csv(layers, [total | {"layer": "sequence layers"}], [name for name in LAYER_COLUMNS if name != "law"])
    assert layers_done(layers) == {("block", "norms", "8", "uniform")}
    with pytest.raises(ValueError, match=r"path: got .* with the columns .*, expected .* write to another folder"):
        append_csv(path, [ladder_row("norms")], COLUMNS)


def test_laws_are_tables_of_their_own(tmp_path: Path):
    """Rows of another law neither mix with the ladder's nor overwrite its chart; layers of that law are its own."""
    rows = [ladder_row("norms", law="uniform_0.7", samples_per_s="7"), ladder_row("norms")]
    assert [group[0]["law"] for group in cases(rows).values()] == ["uniform", "uniform_0.7"]
    assert by_attention(rows)["block"] == [rows[1]]
    append_csv(tmp_path / "ladder_h200.csv", rows, COLUMNS)
    write_page(tmp_path / "ladder.md", tmp_path)
    text = (tmp_path / "ladder.md").read_text()
    assert "(mean/max 0.7), a CPU" in text
    assert "7 samples/s in `norms`" in text.split("law `uniform_0.7`")[1]
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "ladder_h200_block.png", "ladder_h200_block_uniform_0.7.png",
    }  # fmt: skip


def layer_rows(setting: str, batch: str, ms: str, **cells: str) -> list[dict[str, str]]:
    """A run of `layers`: each of the three parts 989 GFLOP, twice in the model."""
    facts = {"attention": "block", "setting": setting, "batch": batch, "count": "2", "ms": ms, "bound_ms": "1"}
    facts |= {"tflops": f"{989 / float(ms)}", "law": "uniform"}
    names = ("hsp", "pffn", "attention")
    return [dict.fromkeys(LAYER_COLUMNS, "") | facts | cells | {"layer": name} for name in names]


def test_local_mfu_of_the_last_run():
    """The last run of a setting and batch; a row takes its own batch's, or says which it is of; events are apart."""
    events = layer_rows("norms", "8", "2")[0] | {"layer": "events", "count": "1", "tflops": "0", "ms": "12"}
    graph = layer_rows("norms", "8", "2")[0] | {"layer": "layer", "count": "0", "ms": "1.25", "tflops": f"{989 / 1.25}"}
    runs = sequence_runs([*layer_rows("norms", "8", "4"), *layer_rows("norms", "8", "2"), events, graph])
    (run,) = runs
    assert (run.ms, run.apart, run.bound) == pytest.approx((12.0, 0.5, 1.0))
    assert (run.with_events, run.one_graph, run.best) == pytest.approx((0.25, 0.8, 0.8))
    assert local_of(ladder_row("norms"), runs) == "50.0 %"
    assert local_of(ladder_row("norms", batch="16"), runs) == "50.0 % at 8"
    assert local_of(ladder_row("norms", local_mfu="0.1"), runs) == "10.0 %"
    assert local_of(ladder_row("norms", law="zipf"), runs) == local_of(ladder_row("gdpa"), runs) == ""
    assert "| 50.0 % | 80.0 % | 25.0 % | 40.0 % | 100.0 % | 80.0 % |" in sequence_table(runs)
    (partial,) = sequence_runs(layer_rows("norms", "8", "2")[:2])
    assert local_of(ladder_row("norms"), [partial]) == ""
    assert "50.0 % (no attention)" in sequence_table([partial])
    assert "80.0 % (`norms`, batch 8, as one graph)" in in_short({}, runs)


def test_page_takes_the_last_measurement_in_the_ladders_order():
    rows = [
        {"row": name, "batch": "8", "ms": ms} for name, ms in (("norms", "1"), ("padded_eager", "2"), ("norms", "3"))
    ]
    assert [(row["row"], row["ms"]) for row in in_order(rows)] == [("padded_eager", "2"), ("norms", "3")]


def test_a_row_that_was_not_tried_hides_no_number():
    found = ladder_row("norms", num_gpus="1")
    refused = ladder_row("norms", num_gpus="1", samples_per_s="", note="NoRoom: expected 90.0 GiB")
    failed = ladder_row("norms", num_gpus="1", samples_per_s="", note="OutOfMemoryError: full")
    assert in_order([found, refused]) == [found]
    assert in_order([refused, found]) == [found]
    assert in_order([refused]) == [refused]
    assert in_order([found, failed, refused]) == [failed]
    pair = [row | {"row": "fsdp"} for row in (found, refused)]
    assert latest_in_order(pair) == pair[:1]
