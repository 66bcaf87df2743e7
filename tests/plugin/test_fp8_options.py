"""fp8 caches: options and checkpoints that cannot work are refused before the model loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkpoints, models
from test_refusals import assert_refused, create_config

from kvq_vllm import checks, scales
from kvq_vllm.config import KVQConfigError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("llama"))


def kvq(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"kvq": options}}


@pytest.mark.parametrize("name", ["kvq-fp8", "kvq-fp8_e4m3", "kvq-fp8_e5m2"])
@pytest.mark.parametrize("block_size", [None, 16, 48])
def test_plain_configurations(llama: Path, name: str, block_size: int | None) -> None:
    options = {} if block_size is None else {"block_size": block_size}
    config = create_config(llama, kv_cache_dtype=name, **options)
    assert config.cache_config.cache_dtype == name
    assert config.cache_config.block_size == (block_size or config.cache_config.block_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (kvq(unit_size=64), "has unit_size, which has no effect with --kv-cache-dtype kvq-fp8: le"),
        (kvq(key_group_size=64), "has key_group_size, which has no effect"),
        (kvq(scales="best"), "scales is 'best' but must be 'checkpoint', 'ones' or 'warmup'"),
        (kvq(scale_per="head"), 'scale_per has an effect only with "scales": "warmup"'),
        (kvq(scales="ones", scales_out="x"), "scales_out has an effect only with"),
        (kvq(scales="ones", scales_in="x"), "scales_in replaces scales, so leave one of them out"),
        (kvq(scales="warmup", scales_out="/nowhere/x"), "scales_out /nowhere/x cannot be written"),
        (kvq(scales_in="/nowhere/x"), "scales_in /nowhere/x cannot be read .FileNotFoundError"),
        (
            {"block_size": 24},
            "--block-size 24 is no multiple of 16: use a multiple of 16, or leave",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_options(llama: Path, options: dict[str, Any], message: str) -> None:
    assert_refused(llama, message, kv_cache_dtype="kvq-fp8", **options)


@pytest.mark.parametrize("option", [{"scales": "ones"}, {"scales_in": "x"}], ids=str)
def test_scales_mean_nothing_to_other_formats(llama: Path, option: dict[str, str]) -> None:
    assert_refused(llama, "which has no effect with --kv-cache-dtype kvq-int4", **kvq(**option))


def test_measuring_needs_all_layers_and_no_adapters(llama: Path) -> None:
    config = create_config(llama, kv_cache_dtype="kvq-fp8", **kvq(scales="warmup"))
    checks.check_config(config)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(KVQConfigError, match=r"--pipeline-parallel-size above 1.*scales_in"):
        checks.check_config(config)
    config.parallel_config.pipeline_parallel_size = 1
    config.lora_config = object()
    with pytest.raises(KVQConfigError, match=r"--enable-lora cannot be combined.*scales_in"):
        checks.check_config(config)


# --- files ---------------------------------------------------------------------------------------

GOOD = {"type": "float8_e4m3fn", "layers": {"a": {"k_scale": [0.5], "v_scale": [0.25, 1]}}}


def test_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(GOOD))
    assert scales.read_scales(str(path), "kvq-fp8") == GOOD["layers"]
    with pytest.raises(KVQConfigError, match=r"is for float8_e4m3fn, but --kv-cache-dtype kvq-fp8"):
        scales.read_scales(str(path), "kvq-fp8_e5m2")


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[]",
        "{}",
        json.dumps(GOOD | {"layers": {"a": {"k_scale": [0.5]}}}),
        *(
            json.dumps(GOOD | {"layers": {"a": {"k_scale": scale, "v_scale": [1]}}})
            for scale in ([0], [-1], [float("nan")], [float("inf")], [], 0.5, ["x"], [True, None])
        ),
    ],
)
def test_bad_files(content: str, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text(content)
    with pytest.raises(KVQConfigError, match=r"scales\.json.*write it again") as error:
        scales.read_scales(str(path), "kvq-fp8")
    assert "\n" not in str(error.value)


# --- checkpoints -----------------------------------------------------------------------------


def scaled(model: Path, folder: Path, changes: Mapping[str, Any], strategy: str) -> Path:
    """A checkpoint with good scales but for `changes`; None takes one away."""
    lengths = {"q": 4, "k": 2, "v": 2} if strategy == "attn_head" else dict.fromkeys("qkv", 1)
    tensors = {
        f"{i}.self_attn.{kind}_scale": torch.full((n, 1, 1) if n > 1 else (1,), 0.25)
        for i in range(3)
        for kind, n in lengths.items()
    }
    for name, scale in changes.items():
        del tensors[name]
        if scale is not None:
            tensors[name] = torch.tensor(scale)
    return checkpoints.with_scales(model, folder, tensors, strategy)


BAD = [
    ("tensor", {"1.self_attn.k_scale": [0.0]}, r"is \[0\.0\] but must be positive and finite"),
    ("tensor", {"1.self_attn.v_scale": [-0.5]}, r"is \[-0\.5\] but must be positive"),
    ("tensor", {"1.self_attn.v_scale": [float("nan")]}, r"is \[nan\] but must be positive"),
    ("tensor", {"1.self_attn.k_scale": [float("inf")]}, r"is \[inf\] but must be positive"),
    ("tensor", {"1.self_attn.k_scale": [0.5, 0.5]}, "has 2 scales, but the model .* need 1"),
    ("attn_head", {"1.self_attn.k_scale": [0.5, 0.0]}, r"is \[0\.5, 0\.0\] but must be"),
    ("attn_head", {"1.self_attn.k_scale": [0.5]}, "has 1 scales, but .* need 2"),
    ("attn_head", {"1.self_attn.v_scale": [0.5] * 4}, "has 4 scales, but .* need 2"),
    ("attn_head", {"1.self_attn.q_scale": [0.5] * 2}, "has 2 scales, but .* need 4"),
    ("attn_head", {"1.self_attn.v_scale": None}, "k_scale has no counterpart for the values"),
]


@pytest.mark.parametrize(("strategy", "changes", "message"), BAD, ids=lambda x: str(x)[:40])
def test_bad_scales_name_the_tensor_and_the_file(
    llama: Path, tmp_path: Path, strategy: str, changes: dict[str, Any], message: str
) -> None:
    model = scaled(llama, tmp_path / "model", changes, strategy)
    (name,) = changes
    shown = name.replace("v_scale", "k_scale") if changes[name] is None else name
    pattern = rf"{model}/model.safetensors: model.layers.{shown} .*{message.split('k_scale ')[-1]}"
    assert_refused(model, pattern, kv_cache_dtype="kvq-fp8")
    create_config(model, kv_cache_dtype="kvq-int4")  # has no use for them
    create_config(model, kv_cache_dtype="kvq-fp8", **kvq(scales="ones"))


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("missing", ["q", "qkv"])
def test_missing_scales(llama: Path, tmp_path: Path, strategy: str, missing: str) -> None:
    changes = {f"{i}.self_attn.{kind}_scale": None for i in range(3) for kind in missing}
    model = scaled(llama, tmp_path / "model", changes, strategy)
    create_config(model, kv_cache_dtype="kvq-fp8")
