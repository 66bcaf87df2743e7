"""What cannot work is refused when vLLM makes its configuration, before the model loads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import models
from support.model_matrix import FORMATS, REFUSED, ModelKind

from kvq_vllm import checks, registration
from kvq_vllm.config import KVQConfig, KVQConfigError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("llama"))


def create_config(model: Path, **options: Any) -> Any:
    """Make the configuration of an engine, as ``LLM`` and ``vllm serve`` do first."""
    from vllm.engine.arg_utils import EngineArgs

    defaults = {"kv_cache_dtype": "kvq-int4", "skip_tokenizer_init": True, "dtype": "float32"}
    return EngineArgs(model=str(model), **(defaults | options)).create_engine_config()


def assert_refused(model: Path, message: str, **options: Any) -> str:
    """Make a configuration that must be refused; return the message."""
    with pytest.raises(KVQConfigError, match=message) as error:
        create_config(model, **options)
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def test_a_plain_configuration_is_accepted(llama: Path) -> None:
    config = create_config(llama)
    assert config.cache_config.cache_dtype == "kvq-int4"
    assert config.cache_config.block_size % 128 == 0


@pytest.mark.parametrize("unit_size", [64, 128, 256])
def test_default_block_size_holds_whole_units(llama: Path, unit_size: int) -> None:
    config = create_config(llama, additional_config={"kvq": {"unit_size": unit_size}})
    assert config.cache_config.block_size % unit_size == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 64}, "--block-size 64 is no multiple of the kvq unit size 128: use a"),
        ({"block_size": 192}, "--block-size 192 is no multiple"),
        ({"prefix_match_unit": 64}, "--prefix-match-unit 64 is not the block size 128"),
        ({"prefix_match_unit": 512}, "--prefix-match-unit 512 is not the block size 128"),
        ({"additional_config": {"kvq": {"bits": 4}}}, "unknown key 'bits'"),
        ({"additional_config": {"kvq": {"unit_size": 96}}}, "unit_size is 96 but must be"),
        (
            {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
            "--kv-offloading-size with connector LMCacheMPConnector is not known to work",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
            "--kv-transfer-config with connector NixlConnector is not known to work with "
            "--kv-cache-dtype kvq-int4, whose newest tokens lie outside the pages that it moves: "
            "use OffloadingConnector, --kv-cache-dtype kvq-fp8, or --kv-cache-dtype auto",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector"}},
            "connector ExampleConnector is not known to work with --kv-cache-dtype kvq-int4, whose",
        ),
        (
            {
                "kv_cache_dtype": "kvq-fp8",
                "kv_transfer_config": {"kv_connector": "NixlConnector"},
            },
            "NixlConnector is not known to work with --kv-cache-dtype kvq-fp8: use Example"
            "Connector or OffloadingConnector, or --kv-cache-dtype auto",
        ),
        (
            {
                "kv_cache_dtype": "kvq-fp8",
                "kv_transfer_config": {"kv_connector": "ExampleConnector"},
                "additional_config": {"kvq": {"scales": "warmup"}},
            },
            'cannot be combined with "scales": "warmup", because every engine .*"scales_in"',
        ),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "OffloadingConnector",
                    "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec"},
                }
            },
            '"spec_name": "TieringOffloadingSpec" keeps pages under names that do not tell',
        ),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "OffloadingConnector",
                    "kv_connector_module_path": "somewhere.outside",
                }
            },
            "connector OffloadingConnector of somewhere.outside is not known to work",
        ),
        (
            {"attention_backend": "CPU_ATTN"},
            "--attention-backend CPU_ATTN cannot read --kv-cache-dtype kvq-int4",
        ),
        (
            {"attention_config": {"backend_per_kind": {"full_attention": "CPU_ATTN"}}},
            "--attention-backend CPU_ATTN cannot read --kv-cache-dtype kvq-int4",
        ),
        ({"attention_config": {"use_non_causal": True}}, "does not support non-causal attention"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options(llama: Path, options: dict[str, Any], message: str) -> None:
    if "kv_transfer_config" in options:
        from vllm.config import KVTransferConfig

        transfer = {"kv_role": "kv_both"} | options["kv_transfer_config"]
        options = options | {"kv_transfer_config": KVTransferConfig(**transfer)}
    assert_refused(llama, message, **options)


@pytest.mark.parametrize("simple", ["0", "1"])
def test_offloading_to_cpu_memory(
    llama: Path, simple: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same option means another connector with ``VLLM_USE_SIMPLE_KV_OFFLOAD``."""
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", simple)
    if simple == "1":
        assert_refused(llama, "--kv-offloading-size with connector Simple", kv_offloading_size=1.0)
    else:
        transfer = create_config(llama, kv_offloading_size=1.0).kv_transfer_config
        assert transfer.kv_connector == "OffloadingConnector"


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.name)
@pytest.mark.parametrize("name", FORMATS)
def test_models(
    name: str, model: ModelKind, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """docs/models.md quotes what this test records."""
    record_property("model", model.name)
    record_property("format", name)
    assert model.refusal is not None
    error = assert_refused(model.make(tmp_path), model.refusal, kv_cache_dtype=name)
    assert error.lower().endswith("use --kv-cache-dtype auto for this model.")
    record_property("refusal", error)


def test_options_of_layers_that_share_caches(tmp_path: Path) -> None:
    model = models.tiny_gemma4_sharing(tmp_path)
    create_config(model, kv_cache_dtype_skip_layers=["sliding_window"])
    assert_refused(
        model, "--kv-cache-dtype-skip-layers with numbers", kv_cache_dtype_skip_layers=["5"]
    )
    assert_refused(model, "--kv-sharing-fast-prefill has layers", kv_sharing_fast_prefill=True)


def test_skipped_layers_beside_mamba(tmp_path: Path) -> None:
    model = models.tiny_granite_hybrid(tmp_path)
    create_config(model)
    assert_refused(model, "--kv-cache-dtype-skip-layers .* Mamba", kv_cache_dtype_skip_layers=["2"])


def test_value_head_size() -> None:
    model_config = _Anything(
        use_mla=False,
        attn_type="decoder",
        attention_chunk_size=None,
        hf_text_config=_Anything(v_head_dim=128),
        get_head_size=lambda: 192,
    )
    with pytest.raises(KVQConfigError, match="values of another head size than keys"):
        checks._check_model("kvq-int4", model_config, KVQConfig())


def test_unknown_kernels(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_KERNELS", "fastest")
    assert_refused(llama, "KVQ_KERNELS=fastest is unknown: choose one of reference, cpu")


def test_head_size(tmp_path: Path) -> None:
    model = models.tiny_llama(tmp_path, head_dim=72)
    assert_refused(model, "head size 72: it must be a multiple of 16 up to 256.*auto")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"head_size": 72}, "head size 72"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_single_layers(llama: Path, changes: dict[str, Any], reason: str) -> None:
    """What only shows when a layer is built, still without its weights."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    plain = AttentionSelectorConfig(64, torch.float32, "kvq-int4", None)
    with set_current_vllm_config(create_config(llama)):
        assert "kvq" in current_platform.get_attn_backend_cls(None, plain)
        with pytest.raises(KVQConfigError, match=f"{reason}.*--kv-cache-dtype auto"):
            current_platform.get_attn_backend_cls(None, plain._replace(**changes))


class _Anything:
    """Attributes of a configuration that vLLM itself refuses on this platform."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize("field", ["decode", "prefill"])
def test_context_parallel(field: str) -> None:
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    sizes[f"{field}_context_parallel_size"] = 2
    with pytest.raises(KVQConfigError, match=f"--{field}-context-parallel-size above 1 is not"):
        checks._check_parallel("kvq-int4", _Anything(**sizes))


def test_connectors_with_mixed_mamba_models() -> None:
    config = _Anything(
        cache_config=_Anything(kv_offloading_size=1.0, kv_offloading_backend="native"),
        kv_transfer_config=None,
        model_config=_Anything(attn_type="hybrid"),
    )
    with pytest.raises(KVQConfigError, match="OffloadingConnector may end a hit inside a page"):
        checks._check_connectors("kvq-int4", config, KVQConfig())


@pytest.mark.parametrize("method", ["eagle3", "mtp", "medusa", "suffix"])
def test_methods_of_speculation(method: str) -> None:
    speculation = _Anything(method=method)
    with pytest.raises(KVQConfigError, match=f"method {method} is not .*use one of draft_model, "):
        checks._check_speculation("kvq-int4", speculation, KVQConfig())


@pytest.mark.parametrize(
    ("name", "changes", "kvq", "message"),
    [
        ("kvq-int4", {"parallel_drafting": True}, {}, "parallel_drafting is not supported.*out"),
        ("kvq-fp8", {}, {"scales": "warmup"}, 'target model alone: add "kv_cache_dtype": "auto"'),
        ("auto", {"kv_cache_dtype": "kvq-int4"}, {}, "needs a kvq --kv-cache-dtype for the target"),
    ],
    ids=["parallel drafting", "measured scales", "target without"],
)
def test_drafters(
    llama: Path, name: str, changes: dict[str, Any], kvq: dict[str, Any], message: str
) -> None:
    drafter = {"method": "draft_model", "model": str(llama), "num_speculative_tokens": 2}
    options = {"additional_config": {"kvq": kvq}} if kvq else {}
    assert_refused(
        llama, message, kv_cache_dtype=name, speculative_config=drafter | changes, **options
    )


def test_a_drafter_whose_layers_no_kvq_cache_can_serve(llama: Path, tmp_path: Path) -> None:
    other = models.tiny_llama(tmp_path, head_dim=72)
    drafter = {"method": "draft_model", "model": str(other), "num_speculative_tokens": 2}
    assert_refused(llama, "head size 72: it must be a multiple", speculative_config=drafter)
    assert create_config(llama, speculative_config=drafter | {"kv_cache_dtype": "auto"})


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "0.34.0rc1+cpu", "nonsense"])
def test_versions_outside_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = checks.version_problem(version)
    assert problem is not None
    assert "<0.34" in problem
    assert f"found {version}: install a supported version" in problem
    monkeypatch.setenv(checks.ALLOW_UNTESTED, "1")
    assert checks.version_problem(version) is None


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1rc2", "0.33.0.dev5"])
def test_versions_inside_the_range(version: str) -> None:
    assert checks.version_problem(version) is None


_WITH_OTHER_VERSION = """
import sys, vllm
vllm.__version__ = "0.99.0"
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=sys.argv[1], kv_cache_dtype=sys.argv[2]).create_engine_config()
print("accepted")
"""


@pytest.mark.parametrize(("name", "override"), [("kvq-int4", ""), ("auto", ""), ("kvq-int4", "1")])
def test_unsupported_vllm_only_matters_to_those_who_use_us(
    llama: Path, name: str, override: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _WITH_OTHER_VERSION, str(llama), name],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {checks.ALLOW_UNTESTED: override},
    )
    if name == "auto" or override:
        assert result.returncode == 0, result.stderr
        assert "accepted" in result.stdout
    else:
        last = result.stderr.strip().splitlines()[-1]
        assert "KVQConfigError: kvq cache dtypes need vLLM" in last
        assert "found 0.99.0" in last


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ("serve m --kv-cache-dtype kvq-int4", "kvq-int4"),
        ("serve m --kv_cache_dtype=kvq-int8 --port 1", "kvq-int8"),
        ("serve kvq-demo --served-model-name=kvq-demo --kv-cache-dtype", ""),
        ("serve kvq-demo --served-model-name kvq-demo", None),
    ],
)
def test_only_the_value_of_the_option_counts(arguments: str, dtype: str | None) -> None:
    assert registration._command_line_dtype(arguments.split()) == dtype


def test_unknown_kvq_dtype(llama: Path) -> None:
    with pytest.raises(Exception, match="kvq-int4") as error:
        create_config(llama, kv_cache_dtype="kvq-int3")
    assert "kvq-int3" in str(error.value)


def test_registration_may_happen_again(llama: Path) -> None:
    from kvq_vllm.plugin import register

    register()
    register()
    from vllm.platforms import current_platform

    wrapped = type(current_platform).get_attn_backend_cls.__func__
    assert wrapped._kvq
    assert not getattr(wrapped.__wrapped__, "_kvq", False)
    assert create_config(llama, kv_cache_dtype="kvq-int8")


def test_options_without_a_kvq_dtype_are_not_ignored_silently(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration.logger.parent, "propagate", True)
    config = create_config(
        llama, kv_cache_dtype="auto", additional_config={"kvq": {"unit_size": 64}}
    )
    assert config.cache_config.cache_dtype == "auto"
    assert registration.UNUSED_OPTIONS in caplog.text
