"""``kvq plan``: what it reads, what it counts, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvq_kernels import SCHEMES
from kvq_vllm import cli
from kvq_vllm.cli.plan import parse_size
from kvq_vllm.config import KVQConfig
from kvq_vllm.errors import KVQError
from kvq_vllm.planning import FORMATS, LayerShape, ModelShape, engine, formula, plan, read_model
from kvq_vllm.planning.formula import Sizes
from kvq_vllm.planning.shape import StateShape

GIB = 1 << 30

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
# As on the hub: what is default in transformers is left out, as are the kinds of the layers.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "max_position_embeddings": 163840,
    "vocab_size": 129280,
}
MOE_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": None,
    "vocab_size": 151936,
}
# Sizes of Granite 4 H Small, and of a Nemotron-H, which names its layers by letters on the hub.
GRANITE_H = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "intermediate_size": 768,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEM-",
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "max_position_embeddings": 262144,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "ssm_state_size": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}


@pytest.fixture
def model(tmp_path: Path) -> Any:
    def write(config: dict[str, Any], **overrides: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config | overrides))
        return tmp_path

    return write


# --- reading ---------------------------------------------------------------------------------


def test_reads_a_grouped_query_model(model: Any) -> None:
    shape = read_model(model(LLAMA_8B))
    assert shape.layers == (LayerShape(8, 128, 128),) * 32
    assert (shape.num_heads, shape.max_context, shape.dtype) == (32, 131072, "bfloat16")
    # 8.03 billion parameters
    assert shape.weight_bytes == pytest.approx(2 * 8.03e9, rel=0.002)
    assert read_model(model(LLAMA_8B) / "config.json").layers == shape.layers


def test_reads_what_only_transformers_knows(model: Any) -> None:
    """Gemma 3's heads, and that every sixth of its layers sees everything."""
    shape = read_model(model(GEMMA3_4B))
    assert len(shape.layers) == 34
    assert [i for i, layer in enumerate(shape.layers) if layer.sliding_window is None] == [
        *(5, 11, 17, 23, 29)
    ]
    assert {layer.sliding_window for layer in shape.layers} == {None, 1024}
    assert {(layer.num_kv_heads, layer.head_size) for layer in shape.layers} == {(4, 256)}


def test_a_window_on_all_layers_and_one_that_is_switched_off(model: Any) -> None:
    mistral = read_model(model(LLAMA_8B, model_type="mistral", sliding_window=4096))
    assert {layer.sliding_window for layer in mistral.layers} == {4096}
    off = {"sliding_window": 4096, "use_sliding_window": False, "model_type": "qwen2"}
    assert read_model(model(LLAMA_8B, **off)).num_windowed == 0


def test_multi_query_attention_has_one_kv_head(model: Any) -> None:
    shape = read_model(model(LLAMA_8B, multi_query=True))
    assert {layer.num_kv_heads for layer in shape.layers} == {1}


def test_experts_are_counted_in_the_weights(model: Any) -> None:
    assert read_model(model(MOE_30B)).weight_bytes == pytest.approx(2 * 30.5e9, rel=0.01)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "mxfp4"}, 4),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            4,
        ),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else None,
)
def test_quantised_weights(model: Any, quantization: dict[str, Any], bits: int) -> None:
    shape = read_model(model(LLAMA_8B, quantization_config=quantization))
    assert shape.weight_bits == bits
    embeddings = 2 * 2 * 4096 * 128256
    assert shape.weight_bytes == pytest.approx(
        (2 * 8.03e9 - embeddings) * bits / 16 + embeddings, rel=0.002
    )


def test_weights_are_those_of_the_files(model: Any) -> None:
    folder = model(LLAMA_8B)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"x" * 1000)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"x" * 500)
    assert read_model(folder).weight_bytes == 1500
    index = {"metadata": {"total_size": 1234}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shape = read_model(folder)
    assert (shape.weight_bytes, shape.weights_from) == (1234, "files")


def test_layers_that_share_a_cache(model: Any) -> None:
    shared = read_model(model(LLAMA_8B, num_kv_shared_layers=12))
    assert len(shared.layers) == 20
    assert shared.unsupported is None


def test_layers_that_keep_a_state(model: Any) -> None:
    granite = read_model(model(GRANITE_H))
    attention = LayerShape(8, 128, 128)
    assert granite.in_order == [attention if i in (5, 15, 25, 35) else None for i in range(40)]
    assert granite.state == StateShape(8192, num_groups=1, state_size=128, conv_width=4)
    # 2 x (3 x (8192 + 2 x 128) + 8192 x 128), and a quarter of the channels, but the whole group
    assert granite.state.num_bytes("bfloat16", devices=1) == 2_147_840
    assert granite.state.num_bytes("bfloat16", devices=4) == 538_112
    assert granite.weight_bytes is None  # nothing tells the size of these layers' weights


def test_layers_that_keep_a_state_and_are_only_known_to_transformers(model: Any) -> None:
    nemotron = read_model(model(NEMOTRON_H))
    attention = LayerShape(2, 128, 128)
    assert nemotron.in_order == [*[None] * 3, attention, *[None] * 3, attention, *[None] * 2]
    assert nemotron.state == StateShape(4096, 8, 128, 4, dtype="float32")


def test_layers_with_both_a_cache_and_a_state(model: Any) -> None:
    sizes = {"mamba_d_ssm": 3072, "mamba_d_head": 128, "mamba_n_heads": 24, "mamba_d_state": 256}
    falcon = read_model(model(LLAMA_8B, model_type="falcon_h1", **sizes))
    assert falcon.in_order == [LayerShape(8, 128, 128), None] * 32
    assert falcon.state == StateShape(3072, num_groups=1, state_size=256, conv_width=4)


def test_a_state_that_nobody_knows_is_noted(model: Any) -> None:
    """A Llama with layers of another kind: neither vLLM nor the formula knows what these keep."""
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 8
    hybrid = read_model(model(LLAMA_8B, layer_types=kinds))
    assert len(hybrid.layers) == 8
    result = plan(hybrid, cache_memory=20 * GIB)
    assert {f.planned_by for f in result.formats} == {"formula"}
    assert {f.state_bytes for f in result.formats} == {None}
    assert "no layers of LlamaForCausalLM keep a state" in str(result.format("auto").problem)
    assert "24 layers without a KV cache is not counted" in result.model.notes[-1]


def test_a_model_in_the_hub_cache(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    config = model(LLAMA_8B) / "config.json"
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda name, file: str(config) if (name, file) == ("org/name", "config.json") else None,
    )
    assert read_model("org/name").name == "org/name"


# --- counting --------------------------------------------------------------------------------


def test_the_formula_of_the_readme() -> None:
    """2 x 32 layers x 8 kv heads x 128 x 2 bytes are 128 KiB per token."""
    shape = _shape()
    auto, fp8, ours_fp8, *sealed = FORMATS
    assert formula.bytes_per_token(shape, auto, Sizes()) == 128 * 1024
    for one_byte in (fp8, ours_fp8):
        assert formula.bytes_per_token(shape, one_byte, Sizes()) == 64 * 1024
    assert [f.name for f in sealed] == list(SCHEMES)
    per_head = {"kvq-int8": 264, "kvq-k8v4": 200, "kvq-int4": 142}
    for fmt in sealed:
        assert formula.bytes_per_token(shape, fmt, Sizes()) == 32 * 8 * per_head[fmt.name]
    assert formula.request_bytes(shape, auto, Sizes(), 32768) == 4 * GIB


def test_a_window_stops_growing() -> None:
    window = LayerShape(8, 128, 128, sliding_window=1024)
    shape = _shape(layers=(window, LayerShape(8, 128, 128)))
    sizes = Sizes(in_flight_tokens=2048)
    auto = FORMATS[0]
    long, longer = (formula.request_bytes(shape, auto, sizes, c) for c in (65536, 131072))
    assert longer - long == 65536 * 4096  # the layer that sees everything
    reads = [formula.read_bytes(shape, auto, sizes, c) for c in (512, 65536)]
    assert reads == [2 * 512 * 4096, (1024 + 65536) * 4096]
    token = formula.bytes_per_token(shape, auto, sizes)
    assert token == 2 * formula.bytes_per_token(shape, auto, sizes, windowed=False)


def _shape(**overrides: Any) -> ModelShape:
    values = {
        "name": "8B",
        "layers": (LayerShape(8, 128, 128),) * 32,
        "num_heads": 32,
        "max_context": 131072,
        "dtype": "bfloat16",
        "weight_bytes": 16 * GIB,
    }
    return ModelShape(**(values | overrides))  # type: ignore[arg-type]


@pytest.mark.parametrize(("devices", "unit_size"), [(1, 128), (4, 256)])
def test_the_formula_is_what_vllm_plans(devices: int, unit_size: int) -> None:
    """To the block, where all layers are alike; nothing of vLLM's is shared."""
    shape = _shape(layers=(LayerShape(8, 96, 96),) * 5)
    sizes = Sizes(devices, config=KVQConfig.parse({"kvq": {"unit_size": unit_size}}))
    contexts, memory = (700, 8192, 100_000), 3 * GIB + 12345
    answers = engine.ask(shape, list(SCHEMES), sizes, contexts, memory)
    for fmt in FORMATS[3:]:
        answer = answers[fmt.name]
        assert answer.problem is None
        assert answer.num_blocks == memory // formula.block_bytes(shape, fmt, sizes)
        for context in contexts:
            expected = formula.concurrency(shape, fmt, sizes, context, memory)
            assert answer.concurrency[context] == pytest.approx(expected, rel=1e-12)


def test_mixed_windows_by_the_formula_are_close_to_vllms_plan() -> None:
    """vLLM pads groups of layers, so it can only hold less; here at most 10%."""
    layers = (LayerShape(16, 128, 128, 1024),) * 25 + (LayerShape(16, 128, 128),) * 5
    shape = _shape(layers=layers)
    sizes = Sizes(in_flight_tokens=2048)
    names = [fmt.name for fmt in FORMATS]
    answers = engine.ask(shape, names, sizes, [8192, 65536], 16 * GIB, 2048)
    for fmt in FORMATS:
        for context, theirs in (answers[fmt.name].concurrency or {}).items():
            ours = formula.concurrency(shape, fmt, sizes, context, 16 * GIB)
            assert 0.9 * ours <= theirs <= 1.02 * ours, (fmt.name, context)


@pytest.mark.parametrize("config", [GRANITE_H, NEMOTRON_H], ids=lambda c: c["model_type"])
def test_states_by_the_formula_are_close_to_vllms_plan(config: dict[str, Any], model: Any) -> None:
    """vLLM pads groups of layers, so it can only hold less; here at most 8%.

    In 32 bit, because a CPU build of vLLM may take that for states whatever the model's dtype. The
    formats with units, whose blocks are not larger on CPUs either.
    """
    shape = replace(read_model(model(config)), dtype="float32")
    devices, contexts, memory = 2, (4096, 131072), 20 * GIB
    sizes = Sizes(devices)
    answers = engine.ask(shape, list(SCHEMES), sizes, contexts, memory)
    for fmt in FORMATS[3:]:
        answer = answers[fmt.name]
        assert answer.problem is None
        assert answer.state_bytes == formula.state_bytes(shape, fmt, sizes)
        assert answer.ring_bytes == formula.ring_bytes(shape, fmt, sizes, shape.max_context)
        assert answer.concurrency is not None
        for context in contexts:
            ours = formula.concurrency(shape, fmt, sizes, context, memory)
            assert 0.92 * ours <= answer.concurrency[context] <= ours, (fmt.name, context)


def test_what_the_plugin_refuses_is_not_planned(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with its own configuration in vLLM; of others, the formula's figures stand."""
    monkeypatch.setenv("KVQ_KERNELS", "fastest")
    hybrid = plan(model(GRANITE_H), cache_memory=20 * GIB)
    assert hybrid.format("auto").planned_by == "vllm"
    for name in SCHEMES:
        assert hybrid.format(name).planned_by is None
        assert "KVQ_KERNELS=fastest is unknown" in str(hybrid.format(name).problem)
    assert "kvq formats do not serve this model" in hybrid.advice[0]
    assert plan(_shape()).format("kvq-int4").planned_by == "formula"


def test_devices_share_heads_and_weights_until_heads_are_replicated() -> None:
    plans = [plan(_shape(), tensor_parallel_size=n, use_vllm=False) for n in (1, 8, 16)]
    one, eight, sixteen = (p.format("kvq-int4") for p in plans)
    assert one.bytes_per_token == 8 * eight.bytes_per_token
    assert eight.bytes_per_token == sixteen.bytes_per_token
    assert any(
        "replicated" in a for a in plan(_shape(), tensor_parallel_size=16, use_vllm=False).advice
    )


def test_requests_are_whole_and_leave_vllms_own_block() -> None:
    shape = _shape(layers=(LayerShape(8, 128, 128),))
    request = formula.request_bytes(shape, FORMATS[0], Sizes(), 1024)
    exact = plan(shape, cache_memory=2 * request, contexts=[1024], use_vllm=False)
    assert exact.format("auto").at(1024).concurrency == 2
    assert exact.format("auto").at(1024).requests == 1


def test_mla_is_explained(model: Any) -> None:
    shape = read_model(model(DEEPSEEK_V3))
    result = plan(shape, cache_memory=20 * GIB)
    # (512 + 64) numbers of 2 bytes in each of 61 layers, whatever the number of heads
    assert result.format("auto").bytes_per_token == 576 * 2 * 61
    for name in SCHEMES:
        assert result.format(name).planned_by is None
        assert "latent" in (result.format(name).problem or "")
    assert "MLA" in result.advice[0]


def test_what_to_shrink_first() -> None:
    big_cache = plan(_shape(), memory=80 * GIB, contexts=[32768], use_vllm=False)
    assert big_cache.advice[0].startswith("Shrink the cache first.")
    big_weights = plan(
        _shape(weight_bytes=70 * GIB), memory=80 * GIB, contexts=[32768], use_vllm=False
    )
    assert big_weights.advice[0].startswith("Shrink the weights first.")
    small = _shape(weight_bytes=4 * GIB, weight_bits=4)
    assert "4-bit already" in plan(small, use_vllm=False).advice[0]


def test_without_vllm_the_formula_plans_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Any
) -> None:
    monkeypatch.setattr(engine, "is_available", lambda: False)
    status, out, _ = kvq(capsys, monkeypatch, "plan", str(model(LLAMA_8B)))
    assert status == 0
    assert "planned by the formula" in " ".join(out.split())
    with pytest.raises(KVQError, match="vLLM is not installed"):
        plan(_shape(), use_vllm=True)


def test_a_crash_of_vllm_leaves_the_formula_and_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so missing')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    result = plan(_shape())
    assert {f.planned_by for f in result.formats} == {"formula"}
    assert "libcudart.so missing" in (result.format("auto").problem or "")


# --- the command -----------------------------------------------------------------------------


def kvq(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """Run ``kvq`` in this process."""
    monkeypatch.setattr(sys, "argv", ["kvq", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/model"], "/nowhere/model is neither a folder with a config.json"),
        (["org/unknown-model"], "nor a model in the local hub cache: check the path"),
        (["{empty}"], "has no config.json: give a model in Hugging Face's format."),
        (["{broken}"], "cannot be read"),
        (["{list}"], "does not hold a model's configuration"),
        (["{bert}"], "keeps no KV cache, so there is nothing to plan"),
        (["{t5}"], "is an encoder-decoder model"),
        (["{llama}", "--memory", "16GiB"], "leave no room for a cache in 92% of 16.0 GiB: give"),
        (["{llama}", "--kv-cache-memory", "64k"], "of 4096 tokens fits in 0.1 MiB"),
        (["{llama}", "--kv-cache-memory", "100m"], "of 4096 tokens fits in 100.0 MiB"),
        (["{llama}", "--context", "1m"], "--context 1048576 is longer than the 131072 positions"),
        (["{llama}", "--context", "0"], "--context 0 is no number of tokens"),
        (["{llama}", "--tp", "3"], "--tensor-parallel-size 3 does not divide the 32 query heads"),
        (["{llama}", "--gpu-memory-utilization", "1.5"], "is no share: give more than 0"),
        (["{llama}", "--dtype", "int8"], "--dtype int8 is unknown: give bfloat16"),
        (["{llama}", "--unit-size", "96"], "unit_size is 96 but must be 64, 128 or 256"),
        (["{llama}", "--plot", "/nowhere/p.png"], "--plot /nowhere/p.png cannot be written"),
        (["{deepseek}"], "The size of the weights is not known: give it with --weights"),
        ([], "Give either MODEL, or --layers and --kv-heads"),
        (["--layers", "32"], "A model by hand needs --layers and --kv-heads"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_errors_are_one_line_and_status_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contents = {
        "empty": None,
        "broken": "{",
        "list": "[]",
        "bert": json.dumps(LLAMA_8B | {"architectures": ["BertForMaskedLM"]}),
        "t5": json.dumps({"is_encoder_decoder": True}),
        "llama": json.dumps(LLAMA_8B),
        "deepseek": json.dumps(DEEPSEEK_V3),
    }
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "config.json").write_text(content)
    folders = {name: tmp_path / name for name in contents}
    arguments = [a.format(**folders) if "{" in a else a for a in arguments]
    status, out, err = kvq(capsys, monkeypatch, "plan", *arguments, "--formula")
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert message in err
    assert err.strip().endswith(".")


def test_json_has_everything_and_nothing_else(
    model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(model(LLAMA_8B))
    status, out, _ = kvq(capsys, monkeypatch, "plan", folder, "--formula", "--json")
    result = json.loads(out)
    assert status == 0
    by_name = {f["cache_dtype"]: f for f in result["formats"]}
    assert set(by_name) == {"auto", "fp8", "kvq-fp8", *SCHEMES}
    assert by_name["kvq-int4"]["fits"][1]["gain"] == pytest.approx(3.55, abs=0.05)
    assert result["vllm_version"] is None


def test_states_are_shown(
    model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("plan", str(model(GRANITE_H)), "--kv-cache-memory", "20GiB", "--formula")
    status, out, _ = kvq(capsys, monkeypatch, *arguments)
    text = " ".join(out.split())
    assert status == 0
    assert "4 layers with a cache, 36 with a state" in text
    assert "36 layers keep a state of fixed size" in text
    status, out, _ = kvq(capsys, monkeypatch, *arguments, "--json")
    result = json.loads(out)
    auto = result["formats"][0]
    # 3 states in each of 36 layers, in pages of 528 tokens
    assert auto["state_bytes"] == 3 * 36 * 528 * 2 * 8 * 128 * 2
    assert len(result["model"]["state_layers"]) == 36


def test_a_model_by_hand_equals_the_same_model_by_its_configuration(
    model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--kv-cache-memory", "20GiB", "--context", "32k", "--formula", "--json")
    _, read, _ = kvq(capsys, monkeypatch, "plan", str(model(LLAMA_8B)), *common)
    by_hand = ("--layers", "32", "--heads", "32", "--kv-heads", "8", "--head-size", "128")
    _, hand, _ = kvq(capsys, monkeypatch, "plan", *by_hand, *common)
    assert json.loads(read)["formats"] == json.loads(hand)["formats"]


def test_the_formula_alone_imports_nothing_heavy(model: Any) -> None:
    """So that it answers at once, and where nothing but this package is installed."""
    code = (
        "import sys; from kvq_vllm.cli import app\n"
        f"try: app(['plan', {str(model(LLAMA_8B))!r}, '--formula'])\n"
        "finally: print(sorted({'torch', 'vllm', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_picture_has_a_line_for_every_format(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "plan.svg"
    status, out, _ = kvq(
        capsys, monkeypatch, "plan", str(model(LLAMA_8B)), "--formula", "--plot", str(picture)
    )
    assert status == 0
    assert "kvq-int4" in out
    text = picture.read_text()
    for name in ("auto", "fp8, kvq-fp8", *SCHEMES):  # equal lines are drawn once
        assert f"<!-- {name} -->" in text  # matplotlib's comment beside a label
    assert text.count('<g id="line2d') > len(FORMATS)


def test_a_picture_without_matplotlib(
    model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ("plan", str(model(LLAMA_8B)), "--formula", "--plot", "p.png")
    status, _, err = kvq(capsys, monkeypatch, *arguments)
    assert status == 2
    assert "pip install 'kvq-vllm[plots]'" in err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * GIB),
        ("24g", 24 * GIB),
        ("80GB", 80 * 10**9),
        ("32k", 32768),
        ("1.5 MiB", 3 << 19),
        ("7", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "20 parsecs", "-3", "GiB", "1,5g"])
def test_no_sizes(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = kvq(capsys, monkeypatch, "plan", "--memory", text, "x")
    assert (status, err) == (2, f"kvq: {text!r} is no size: write it like 20GiB, 80GB or 32k.\n")


def test_layers_that_differ_in_kv_heads_get_a_warning() -> None:
    mixed = _shape(layers=(LayerShape(8, 128, 128), LayerShape(4, 128, 128)))
    advice = " ".join(plan(mixed, use_vllm=False).advice)
    assert "differ in kv heads" in advice
    assert "differ in kv heads" not in " ".join(plan(_shape(), use_vllm=False).advice)


@pytest.mark.parametrize("head_size", [40, 512])
def test_a_head_size_without_kernels(
    model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, head_size: int
) -> None:
    folder = str(model(LLAMA_8B | {"head_dim": head_size}))
    status, out, _ = kvq(capsys, monkeypatch, "plan", folder, "--formula")
    assert status == 0
    text = " ".join(out.split())
    assert (
        f"kvq formats do not serve this model (kvq-int8 does not support head size {head_size}"
        in text
    )


def test_chunked_attention_is_not_served(model: Any) -> None:
    shape = read_model(model(LLAMA_8B | {"attention_chunk_size": 8192}))
    assert shape.unsupported == "its layers use chunked local attention"


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert", "mamba", "mamba2"])
def test_models_without_a_cache(model: Any, kind: str) -> None:
    with pytest.raises(KVQError, match="keeps no KV cache, so there is nothing to plan"):
        read_model(model({"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2}))
