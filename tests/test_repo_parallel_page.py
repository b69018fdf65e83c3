"""docs/parallel.md shows one plan: its picture, placement and prediction are what the library says of it today."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gemworks.parallel import ParallelPlan, place, presets
from gemworks.parallel.command import Request, answer
from gemworks.parallel.picture import draw_plan
from gemworks.parallel.profile import gem_like
from gemworks.parallel.splits import model_traffic

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/parallel.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def request() -> Request:
    """The plan of the command that the page names."""
    (line,) = re.findall(r"`python -m gemworks.parallel place (--.*?)`", PAGE)
    words = {name.replace("-", "_"): int(value) for name, value in re.findall(r"--([a-z-]+) (\d+)", line)}
    return Request(cluster="roce", **words)  # pyright: ignore[reportArgumentType]


def test_the_picture_is_of_the_plan_below_it() -> None:
    """Placed by what the model's axes carry, as `place` and `simulate` do."""
    assert "](assets/five_dimensions.svg)" in PAGE
    asked = request()
    assert asked.gpus is not None
    plan = ParallelPlan.for_world(
        asked.gpus,
        shard=asked.shard,
        expert=asked.expert,
        expert_shard=asked.expert_shard,
        table_group=asked.table_group,
        replica_shard=asked.replica_shard,
        sync_every=asked.sync_every,
    )
    cluster = presets.roce_cluster(asked.gpus)
    svg = draw_plan(place(plan, cluster, model_traffic(plan, gem_like())).layout, cluster)
    path = ROOT / "docs/assets/five_dimensions.svg"
    if os.environ.get("GEMWORKS_UPDATE_GOLDEN") == "1":
        path.write_text(svg, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == svg


def test_placement_and_prediction_are_what_the_library_prints() -> None:
    assert BLOCKS[0].rstrip() in answer("place", request()).text
    assert answer("simulate", request()).text.rstrip() == BLOCKS[1].rstrip()
