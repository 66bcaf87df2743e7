"""JSON that others wrote, read with bounds: configurations, scales, results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""More than any such file has: the index of a checkpoint with a million tensors is smaller."""


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than :data:`MAX_BYTES`, no JSON, or nested without end.

    """
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{size} bytes are more than the {MAX_BYTES} that such a file may have")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
