"""Replace functions of vLLM's where it has no door for plugins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function, method or classmethod by ``wrap(function)``, once however often asked."""
    found = getattr(owner, name)
    function = getattr(found, "__func__", found)  # of a classmethod
    if getattr(function, "_kvq", False):
        return
    wrapped = functools.update_wrapper(wrap(function), function)
    wrapped._kvq = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped if function is found else classmethod(wrapped))
