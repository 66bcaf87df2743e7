"""Everything that touches vLLM's registries, per vLLM version.

What it relies on, beyond public names, is listed in ``tests/plugin/test_contract.py``.
Every function may be called any number of times.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvq_kernels.fp8 import is_fp8
from kvq_vllm.checks import OUR_BACKEND, check_config, refuse_drafter
from kvq_vllm.config import OPTION, KVQConfig, KVQConfigError, dtype_names, is_kvq
from kvq_vllm.wrapping import wrap_once

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's logger, which prints it

UNUSED_OPTIONS = (
    f"{OPTION} has no effect: --kv-cache-dtype is not one of {', '.join(dtype_names())}."
)
BACKEND_PATH = "kvq_vllm.backend.KVQBackend"
FP8_BACKEND_PATH = "kvq_vllm.fp8.Fp8Backend"


def register_dtypes() -> None:
    """Add our names to what ``--kv-cache-dtype`` and ``kv_cache_dtype=`` accept."""
    import vllm.config.cache as cache

    if hasattr(cache, "register_kv_cache_dtype"):
        _register_handlers(cache)
    else:
        _extend_literal(cache)


def _register_handlers(cache: Any) -> None:
    """vLLM 0.33 and later: the registry made for this."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        name: str

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> KVQuantMode:
            # FP8 makes vLLM load the checkpoint's scales. The others have theirs in the page:
            # vLLM has none to load, apply or warn about.
            return KVQuantMode.FP8_PER_TENSOR if is_fp8(self.name) else KVQuantMode.NONE

    for name in dtype_names():
        if not cache.is_known_kv_cache_dtype(name):
            cache.register_kv_cache_dtype(name)(type("Handler", (Handler,), {"name": name}))


def _extend_literal(cache: Any) -> None:
    """vLLM 0.32: the names are a closed Literal, compiled into pydantic validators.

    The Literal object is shared by every module that imported it, so it is extended in place;
    then the classes whose validators embed it are rebuilt, innermost first.
    """
    import vllm.config
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    known = cache.CacheDType.__args__
    new = tuple(name for name in dtype_names() if name not in known)
    if not new:
        return
    STR_DTYPE_TO_TORCH_DTYPE.update(dict.fromkeys(new, torch.uint8))
    cache.CacheDType.__args__ = (*known, *new)
    for config_class in (
        cache.CacheConfig,
        vllm.config.SpeculativeConfig,
        vllm.config.VllmConfig,
    ):
        rebuild_dataclass(config_class, force=True)
    if arg_utils := sys.modules.get("vllm.engine.arg_utils"):
        arg_utils._compute_kwargs.cache_clear()  # the choices of the command line


def register_routing() -> None:
    """Send layers with a kvq dtype to our backend, and no others."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if OUR_BACKEND not in AttentionBackendEnum.__members__:
        register_backend(OUR_BACKEND, BACKEND_PATH)

    def route(original: Callable[..., str]) -> Callable[..., str]:
        def get_attn_backend_cls(
            cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
        ) -> str:
            if is_kvq(attn_selector_config.kv_cache_dtype):
                capability = current_platform.get_device_capability()
                if is_fp8(attn_selector_config.kv_cache_dtype):
                    from kvq_vllm import fp8

                    fp8.check_layer(attn_selector_config, capability)
                    return FP8_BACKEND_PATH
                from kvq_vllm import backend

                backend.check_layer(attn_selector_config, capability)
                return BACKEND_PATH
            return original(cls, selected_backend, attn_selector_config, *args, **kwargs)

        return get_attn_backend_cls

    wrap_once(type(current_platform), "get_attn_backend_cls", route)


def register_config_check() -> None:
    """Check every ``VllmConfig`` as it is made, before anything loads."""
    from vllm.platforms import current_platform

    def check(original: Callable[..., None]) -> Callable[..., None]:
        def check_and_update_config(cls: type, vllm_config: Any) -> None:
            original(cls, vllm_config)
            if is_kvq(vllm_config.cache_config.cache_dtype):
                _default_block_size(vllm_config)
                check_config(vllm_config)
                return
            if _drafter_dtype(vllm_config) == vllm_config.cache_config.cache_dtype:
                return  # possibly the drafter's configuration, made of a kvq target's
            if is_kvq(_drafter_dtype(vllm_config)):
                refuse_drafter(vllm_config)
            if KVQConfig.is_given(vllm_config.additional_config):
                logger.warning(UNUSED_OPTIONS)

        return check_and_update_config

    wrap_once(type(current_platform), "check_and_update_config", check)


def _drafter_dtype(vllm_config: Any) -> str | None:
    """Return the cache dtype that the user chose for a drafter, if any."""
    return getattr(vllm_config.speculative_config, "kv_cache_dtype", None)


def _default_block_size(vllm_config: Any) -> None:
    """Where the user chose no block size, make it hold whole units."""
    cache_config = vllm_config.cache_config
    if is_fp8(cache_config.cache_dtype):
        return  # any block size of vLLM's
    config = KVQConfig.parse(vllm_config.additional_config)
    unit_size = config.unit_size
    if not cache_config.user_specified_block_size and cache_config.block_size % unit_size:
        cache_config.block_size = unit_size


def refuse_dtypes(reason: str) -> None:
    """Fail with `reason` as soon as someone chooses a kvq dtype.

    Raises:
        KVQConfigError: at once, when this process's command line already asks for one; vLLM's
            own argument parser would call the name unknown and say nothing else.

    """
    import vllm.config

    if is_kvq(_command_line_dtype(sys.argv)):
        raise KVQConfigError(reason)

    def refusing(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if is_kvq(kwargs.get("cache_dtype")):
                raise KVQConfigError(reason)
            original(self, *args, **kwargs)

        return init

    wrap_once(vllm.config.CacheConfig, "__init__", refusing)


def _command_line_dtype(arguments: Sequence[str]) -> str | None:
    """Return the value of ``--kv-cache-dtype`` in any of the spellings that vLLM takes."""
    for argument, following in itertools.pairwise([*arguments, ""]):
        option, equals, value = argument.partition("=")
        if option.replace("_", "-") == "--kv-cache-dtype":
            return value if equals else following
    return None
