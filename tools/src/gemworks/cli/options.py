"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Preset = Annotated[str | None, typer.Option(help="tiny, small, base or large; small if not given.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file laid over the preset.", metavar="FILE")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Values, one or several: a=1 b=2; may be repeated.", metavar="KEY=VALUE"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]
