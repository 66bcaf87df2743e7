"""Replace functions of vLLM's where it has no door for plugins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function of a module or class by ``wrap(function)``, however often it is asked."""
    function = getattr(owner, name)
    if getattr(function, "_kvq", False):
        return
    wrapped = functools.update_wrapper(wrap(function), function)
    wrapped._kvq = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
