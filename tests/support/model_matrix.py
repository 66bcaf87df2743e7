"""The models that every format is tried on: for the tests, and for the table in the docs.

Each stands for a kind of model by what is special about its attention or its cache. They are tiny
and random; those that are refused have a configuration only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvq_kernels import SCHEMES
from support import models

FORMATS = (*SCHEMES, "kvq-fp8")


@dataclass(frozen=True)
class ModelKind:
    """One row of the table.

    Attributes:
        name: of the model, and of those that are alike.
        special: what a cache has to cope with.
        make: saves it to a folder, with overrides of its configuration.
        head_size: of keys and values.
        options: arguments of ``LLM`` that it needs.
        refusal: why every format refuses it, as a regular expression, or None if they serve it.

    """

    name: str
    special: str
    make: Callable[..., Path]
    head_size: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    refusal: str | None = None


SERVED = (
    ModelKind("Llama, Mistral", "grouped-query attention", models.tiny_llama),
    ModelKind("Qwen 2", "large biases on keys", partial(models.tiny_qwen2, key_bias=50.0)),
    ModelKind("Qwen 3", "normalised queries and keys, head size 128", models.tiny_qwen3, 128),
    ModelKind("Phi 3", "head size 96", models.tiny_phi3, 96),
    ModelKind("Gemma 2", "soft-capped logits, head size 256", models.tiny_gemma2, 256),
    ModelKind(
        "Gemma 3",
        "five layers with a sliding window to one without",
        partial(models.tiny_gemma3, layer_types=["sliding_attention"] * 5 + ["full_attention"]),
    ),
    ModelKind("Gemma 3n", "layers that share caches", models.tiny_gemma3n),
    ModelKind(
        "Gemma 4", "layers that differ in kv heads; head sizes up to 256", models.tiny_gemma4
    ),
    ModelKind(
        "Gemma 4 E2B, E4B",
        "layers that share caches; head sizes up to 256",
        models.tiny_gemma4_sharing,
    ),
    ModelKind(
        "GPT-OSS",
        "attention sinks, sliding windows, mixture of experts",
        models.tiny_gpt_oss,
    ),
    ModelKind("Mixtral", "mixture of experts", models.tiny_mixtral),
    ModelKind(
        "Qwen 3 MoE", "mixture of experts, normalised queries and keys", models.tiny_qwen3_moe
    ),
    ModelKind(
        "Idefics 3, SmolVLM",
        "text path of a vision model",
        models.tiny_idefics3,
        options={"language_model_only": True},
    ),
    ModelKind("Granite 4", "Mamba 2 beside attention", models.tiny_granite_hybrid),
)

_DECODER = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _configuration(folder: Path, class_name: str, architecture: str, **values: Any) -> Path:
    """Save a configuration alone, which is all that vLLM reads before a refusal."""
    import transformers

    config_class = getattr(transformers, class_name)
    config_class(architectures=[architecture], **values).save_pretrained(folder)
    return folder


def _refused(
    name: str, special: str, refusal: str, class_name: str, architecture: str, **values: Any
) -> ModelKind:
    """Return a row of a model that is refused, from a class of transformers and its arguments."""
    make = partial(
        _configuration, class_name=class_name, architecture=architecture, **(_DECODER | values)
    )
    return ModelKind(name, special, make, refusal=refusal)


REFUSED = (
    _refused(
        "DeepSeek V3",
        "multi-head latent attention",
        r"multi-head latent attention \(MLA\)",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
    ),
    _refused(
        "Gemma 4 as released",
        "layers with head size 512",
        r"head size 512: it must be a multiple of 16 up to 256\.",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        num_hidden_layers=6,
        global_head_dim=512,
    ),
    _refused(
        "Llama 4",
        "chunked local attention",
        "chunked local attention, whose chunks .*",
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        head_dim=64,
    ),
    _refused(
        "BERT",
        "encoder only",
        "encoder-only attention, which keeps no KV cache",
        "BertConfig",
        "BertModel",
    ),
    _refused(
        "Whisper",
        "encoder and decoder",
        r"encoder-decoder models \(cross attention\)",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
    ),
)

MODELS = (*SERVED, *REFUSED)
