"""What to measure, and how much of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvq_vllm.errors import KVQError

TASKS = ("next-token", "citation", "multi-turn", "generation")
"""Names of the tasks, in the order in which they run."""

BASELINE = "auto"
"""The cache dtype that everything is compared with."""

CHUNK = 512
"""Tokens per prefill step. Small, because some caches are read back only by later steps."""


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        prompts: per task; each is one observation.
        context: tokens per prompt, at most; a shorter model's own limit holds.
        generated: tokens of each long generation.

    """

    prompts: int
    context: int
    generated: int


FULL = Size(prompts=4, context=3072, generated=2000)
QUICK = Size(prompts=3, context=768, generated=192)


@dataclass(frozen=True)
class Settings:
    """All that decides what the results are, except the formats.

    Attributes:
        model: folder of the model, in Hugging Face form.
        size: how much to measure.
        tasks: some of :data:`TASKS`.
        text: the user's own text, or None for the packaged one.
        dtype: the model's dtype, as vLLM's ``--dtype``.
        seed: of everything that is drawn.
        kvq: options of ``additional_config["kvq"]``.
        engine: further arguments of vLLM's ``LLM``.

    """

    model: Path
    size: Size = FULL
    tasks: tuple[str, ...] = TASKS
    text: Path | None = None
    dtype: str = "auto"
    seed: int = 0
    kvq: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise KVQError(f"Unknown task {unknown[0]!r}: choose from {', '.join(TASKS)}.")
        for name, least in (("prompts", 2), ("context", 512), ("generated", 64)):
            if getattr(self.size, name) < least:
                raise KVQError(
                    f"{name} is {getattr(self.size, name)}: nothing can be said with less "
                    f"than {least}."
                )

    def as_json(self) -> dict[str, Any]:
        """Return what ``json.dumps`` takes."""
        data = asdict(self)
        return data | {"model": str(self.model), "text": str(self.text) if self.text else None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        """Undo :meth:`as_json`."""
        text = data["text"]
        return cls(
            **(
                dict(data)
                | {
                    "model": Path(data["model"]),
                    "text": Path(text) if text else None,
                    "size": Size(**data["size"]),
                    "tasks": tuple(data["tasks"]),
                }
            )
        )

    def fingerprint(self, prompts: Any, versions: Mapping[str, str]) -> str:
        """Return a hash of all that results depend on.

        Args:
            prompts: what the tasks ask, which includes the text.
            versions: of the software.

        """
        model_files = [
            (file.name, file.stat().st_size, file.stat().st_mtime_ns)
            for file in sorted(self.model.iterdir())
            if file.suffix in (".json", ".safetensors", ".bin", ".pt")
        ]
        settings = self.as_json()
        # What is in the prompts or the model's files counts there; which tasks run, nowhere.
        for name in ("model", "size", "tasks", "text"):
            del settings[name]
        parts = [settings, prompts, dict(versions), model_files]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
