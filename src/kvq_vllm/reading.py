"""JSON that others wrote, read with bounds: configurations, scales, results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvq_vllm.errors import KVQError

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


def read_config(path: Path) -> dict[str, Any]:
    """Return what a model's ``config.json`` holds.

    Raises:
        KVQError: it cannot be read, or holds no object.

    """
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise KVQError(f"{path} cannot be read ({error}): give a valid config.json.") from None
    if not isinstance(config, dict):
        raise KVQError(f"{path} does not hold a model's configuration: give a valid config.json.")
    return config
