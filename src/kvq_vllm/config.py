"""What users set: the cache dtype, and ``additional_config["kvq"]`` for its tuning."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvq_kernels.formats import DEFAULT_UNIT_SIZE, DTYPE_PREFIX, SCHEMES, Format
from kvq_kernels.fp8 import FP8_DTYPES, Fp8Format, is_fp8
from kvq_vllm.errors import KVQError

OPTION = 'additional_config["kvq"]'

UNIT_KEYS = frozenset({"unit_size", "key_group_size"})
"""Options of the formats that seal units; all others are those of the fp8 formats."""


class KVQConfigError(KVQError):
    """A configuration that cannot work."""


class KVQConfig(BaseModel):
    """The options under ``--additional-config '{"kvq": {...}}'``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unit_size: Literal[64, 128, 256] = Field(
        DEFAULT_UNIT_SIZE,
        description="Tokens sealed together; the newest up to this many stay unquantised.",
    )
    key_group_size: Literal[32, 64, 128, 256] | None = Field(
        None,
        description="Tokens that share a scale per key channel; None: unit_size.",
    )
    scales: Literal["checkpoint", "ones", "warmup"] = Field(
        "checkpoint",
        description="Where fp8 scales come from: the checkpoint, 1.0 where it has none; always "
        "1.0; or measured on random tokens at start-up.",
    )
    scale_per: Literal["tensor", "head"] = Field(
        "head", description="What shares a scale that is measured at start-up."
    )
    scales_out: str | None = Field(
        None, description="File to write the scales to that were measured at start-up."
    )
    scales_in: str | None = Field(
        None, description="File to read fp8 scales from, instead of any other source."
    )

    @field_validator("unit_size", "key_group_size", mode="before")
    @classmethod
    def _whole_number(cls, value: Any) -> Any:
        if value is not None and type(value) is not int:  # 128.0 and true would pass as equal
            raise ValueError(f"is {value!r} but must be a whole number")
        return value

    @model_validator(mode="after")
    def _scale_options_fit(self) -> KVQConfig:
        given = self.model_fields_set
        if self.scales_in is not None:
            if others := sorted(given & {"scales", "scale_per", "scales_out"}):
                raise ValueError(f"scales_in replaces {others[0]}, so leave one of them out")
        elif self.scales != "warmup" and (useless := sorted(given & {"scale_per", "scales_out"})):
            raise ValueError(f'{useless[0]} has an effect only with "scales": "warmup"')
        return self

    @classmethod
    def is_given(cls, additional_config: Any) -> bool:
        """Whether vLLM's ``additional_config`` has a "kvq" entry."""
        return isinstance(additional_config, Mapping) and "kvq" in additional_config

    @classmethod
    def parse(cls, additional_config: Any) -> KVQConfig:
        """Read the "kvq" entry of vLLM's ``additional_config``.

        Raises:
            KVQConfigError: an unknown key or a value that is not allowed.

        """
        if not isinstance(additional_config, Mapping):
            return cls.model_validate({})
        if misplaced := [key for key in additional_config if _is_meant_for_us(key)]:
            raise KVQConfigError(
                f"additional_config has {misplaced[0]!r} at its top level, where it has no effect: "
                f'write it as {{"kvq": {{...}}}} (allowed keys: {_allowed_keys()}).'
            )
        options = additional_config.get("kvq")
        if options is not None and not isinstance(options, Mapping):
            raise KVQConfigError(
                f"{OPTION} is {options!r} but must be an object such as "
                f'{{"unit_size": 128}} (allowed keys: {_allowed_keys()}).'
            )
        try:
            return cls.model_validate(options or {})
        except ValidationError as error:
            raise KVQConfigError(_describe(error)) from None

    def refuse_useless(self, cache_dtype: str) -> None:
        """Refuse options that are given but mean nothing to `cache_dtype`.

        Raises:
            KVQConfigError: there is such an option.

        """
        fp8_keys = self.model_fields_set - UNIT_KEYS
        useless = self.model_fields_set & UNIT_KEYS if is_fp8(cache_dtype) else fp8_keys
        if useless:
            raise KVQConfigError(
                f"{OPTION} has {sorted(useless)[0]}, which has no effect with --kv-cache-dtype "
                f"{cache_dtype}: leave it out."
            )

    def fp8_format(self, cache_dtype: str, head_size: int) -> Fp8Format:
        """Return the fp8 format of a layer with `head_size`.

        Raises:
            KVQConfigError: a head size without kernels.

        """
        try:
            return Fp8Format(cache_dtype, head_size)
        except ValueError as error:
            raise _unusable(cache_dtype, error) from None

    def format(self, cache_dtype: str, head_size: int) -> Format:
        """Return the format of a layer with `head_size`.

        Raises:
            KVQConfigError: an unknown dtype, a head size without kernels, or key groups longer
                than a unit.

        """
        try:
            if self.key_group_size is not None and self.key_group_size > self.unit_size:
                raise KVQConfigError(
                    f"{OPTION} has key_group_size {self.key_group_size}, above the unit_size "
                    f"{self.unit_size}: choose a smaller one, or a larger unit_size."
                )
            return Format.create(cache_dtype, head_size, self.unit_size, self.key_group_size)
        except ValueError as error:
            raise _unusable(cache_dtype, error) from None


def is_kvq(cache_dtype: str | None) -> bool:
    """Whether a cache dtype is one of ours, by name."""
    return cache_dtype is not None and cache_dtype.startswith(DTYPE_PREFIX)


def dtype_names() -> tuple[str, ...]:
    return (*SCHEMES, *FP8_DTYPES)


def _unusable(cache_dtype: str, error: ValueError) -> KVQConfigError:
    return KVQConfigError(
        f"--kv-cache-dtype {cache_dtype} cannot be used: {error} "
        "Use --kv-cache-dtype auto for this model."
    )


def _allowed_keys() -> str:
    return ", ".join(KVQConfig.model_fields)


def _is_meant_for_us(key: str) -> bool:
    """Whether a key beside "kvq" looks as if it should have been it, or in it."""
    return key in KVQConfig.model_fields or (key != "kvq" and key.lower().startswith("kvq"))


def _suggestion(key: str) -> str:
    close = difflib.get_close_matches(key.replace("-", "_").lower(), KVQConfig.model_fields, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _describe(error: ValidationError) -> str:
    """Turn pydantic's report into one sentence."""
    problems = []
    for item in error.errors():
        name = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            problems.append(f"unknown key {name!r}{_suggestion(name)}")
        elif item["type"] == "literal_error":
            problems.append(f"{name} is {item['input']!r} but must be {item['ctx']['expected']}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            problems.append(f"{name} {message}" if name else message)
    return f"{OPTION} is not valid: {'; '.join(problems)} (allowed keys: {_allowed_keys()})."
