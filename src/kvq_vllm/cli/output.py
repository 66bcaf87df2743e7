"""What the commands print with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import typer


def print_json(result: Any) -> None:
    """Print a dataclass, or anything JSON holds, as one JSON document."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = dataclasses.asdict(result)
    typer.echo(json.dumps(result, indent=1, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
