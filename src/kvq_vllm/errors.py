"""The base of every error that a user can put right."""

from __future__ import annotations


class KVQError(RuntimeError):
    """Something the user can put right; the message is one sentence with the way out.

    Not a ValueError, because pydantic would wrap that in a report about vLLM's own classes.
    """
