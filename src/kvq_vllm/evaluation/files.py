"""A run's folder: what lies where.

::

    settings.json             the settings, and a hash of all that results depend on
    prompts.json              what the tasks ask
    CACHE_DTYPE/TASK.json     one record per prompt; written once a task is done
    CACHE_DTYPE/judged.json   likelihood of what it generated, under the unquantised cache
    CACHE_DTYPE/log.txt       what vLLM printed
    auto/predictions-N.npz    predictions for the N-th long text
    results.json, report.html, *.png
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvq_vllm.errors import KVQError
from kvq_vllm.evaluation.settings import BASELINE, Settings
from kvq_vllm.evaluation.tasks import Prompt
from kvq_vllm.reading import read_json


def write_json(path: Path, data: Any) -> None:
    """Write a file that is either complete or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(data) + "\n", encoding="utf-8")
    os.replace(temporary, path)


class RunFolder:
    """Names and reads the files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(
        self, settings: Settings, prompts: dict[str, list[Prompt]], versions: dict[str, str]
    ) -> None:
        """Begin a run here, or go on with the one that was begun.

        Raises:
            KVQError: the folder holds another run, or cannot be written.

        """
        plain = {task: [asdict(prompt) for prompt in ps] for task, ps in prompts.items()}
        fingerprint = settings.fingerprint(plain, versions)
        file = self.path / "settings.json"
        try:
            if file.exists():
                if self.header()["fingerprint"] != fingerprint:
                    raise KVQError(
                        f"{self.path} holds results of another model, text, size, option or "
                        "version: name another folder with --out, or delete it."
                    )
            elif self.path.exists() and any(self.path.iterdir()):
                raise KVQError(
                    f"{self.path} is not empty and holds no run: name another folder with --out."
                )
            write_json(self.path / "prompts.json", plain)
            header = {"fingerprint": fingerprint, "settings": settings.as_json()}
            write_json(file, header | {"versions": versions})
        except OSError as error:
            raise KVQError(
                f"Results cannot be kept in {self.path} ({error}): name another folder with --out."
            ) from None

    def header(self) -> dict[str, Any]:
        """Return what settings.json holds: "fingerprint", "settings" and "versions"."""
        header: dict[str, Any] = self._read(self.path / "settings.json", dict)
        if missing := {"fingerprint", "settings", "versions"} - header.keys():
            raise self._unreadable(self.path / "settings.json", f"no {min(missing)}")
        return header

    def settings(self) -> Settings:
        return Settings.from_json(self.header()["settings"])

    def prompts(self) -> dict[str, list[Prompt]]:
        plain = self._read(self.path / "prompts.json", dict)
        return {task: [Prompt.from_json(p) for p in ps] for task, ps in plain.items()}

    def result(self, cache_dtype: str, task: str) -> Path:
        return self.path / cache_dtype / f"{task}.json"

    def has_result(self, cache_dtype: str, task: str) -> bool:
        return self.result(cache_dtype, task).exists()

    def records(self, cache_dtype: str, task: str) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = self._read(self.result(cache_dtype, task), list)
        return records

    def _read(self, file: Path, kind: type) -> Any:
        """Return a file's contents.

        Raises:
            KVQError: it is not there, no JSON, or holds something else.

        """
        try:
            data = read_json(file)
        except (OSError, ValueError) as error:
            raise self._unreadable(file, error) from None
        if not isinstance(data, kind):
            raise self._unreadable(file, f"it holds no {kind.__name__}")
        return data

    def _unreadable(self, file: Path, reason: object) -> KVQError:
        return KVQError(
            f"{file} cannot be read ({reason}): delete {self.path} and run again, or name another "
            "folder with --out."
        )

    def predictions(self, prompt: int) -> Path:
        return self.path / BASELINE / f"predictions-{prompt}.npz"

    def judgement(self, cache_dtype: str) -> Path:
        return self.result(cache_dtype, "judged")

    def log(self, cache_dtype: str) -> Path:
        return self.path / cache_dtype / "log.txt"

    def to_judge(self) -> list[str]:
        """Cache dtypes that generated something which was not judged yet."""
        return [
            file.parent.name
            for file in sorted(self.path.glob("*/generation.json"))
            if not self.judgement(file.parent.name).exists()
        ]
