"""Models for engine tests: the real one from `make setup`, and tiny random ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.setup_env import CORPUS, MODEL

TINY_VOCABULARY = 512

CALM = 0.1
"""Range of weights with which a random model amplifies rounding less than with that of `_sizes`.

With that one, a key that a CPU's sums round to another code moves log probabilities by 0.01, and
fp8 rounds much more.
"""


def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct: 30 layers, 9 query and 3 kv heads of size 64."""
    return MODEL


def corpus_tokens(count: int) -> list[int]:
    """The first tokens of the news corpus, for SmolLM2."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = CORPUS.read_text(encoding="utf-8")[: 8 * count]
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(tokens) >= count
    return tokens[:count]


def tiny_llama(folder: Path, **overrides: Any) -> Path:
    """Save a random Llama: 3 layers, 4 query and 2 kv heads of size 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(folder, LlamaForCausalLM, LlamaConfig(**(_sizes() | overrides)))


def tiny_llama_to_serve(folder: Path) -> Path:
    """Save the random Llama with SmolLM2's tokenizer, which servers need."""
    tiny_llama(folder, vocab_size=49152, initializer_range=0.1)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def tiny_eagle(folder: Path) -> Path:
    """Save a random EAGLE head for the tiny Llama: one layer, its own embeddings."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = _sizes() | {"num_hidden_layers": 1}
    torch.manual_seed(1)
    llama = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.float32)
    hidden = sizes["hidden_size"]
    weights = llama.model.state_dict() | {
        "fc.weight": torch.randn(hidden, 2 * hidden) * sizes["initializer_range"],
    }
    for name in ("norm.weight", "layers.0.input_layernorm.weight"):
        del weights[name]  # an EAGLE head has none
    folder.mkdir(exist_ok=True)
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors")
    config = {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return folder


def tiny_gemma3(folder: Path, **overrides: Any) -> Path:
    """Save a random Gemma 3: two layers with a window of 80 to one that sees everything."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **(
            _sizes()
            | {
                "num_hidden_layers": 6,
                "sliding_window": 80,
                "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
                "query_pre_attn_scalar": 64,
            }
            | overrides
        )
    )
    return _save(folder, Gemma3ForCausalLM, config)


def tiny_gemma2(folder: Path, **overrides: Any) -> Path:
    """Save a random Gemma 2: soft-capped logits, head size 256, alternating windows of 100."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **(
            _sizes()
            | {
                "num_hidden_layers": 4,
                "head_dim": 256,
                "sliding_window": 100,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 30.0,
                "query_pre_attn_scalar": 256,
                "tie_word_embeddings": True,  # all that vLLM loads
            }
            | overrides
        )
    )
    # With tied embeddings of this size, the model would only repeat its last token.
    return _save(folder, Gemma2ForCausalLM, config, embedding_scale=0.02)


def tiny_gemma4(folder: Path, **overrides: Any) -> Path:
    """Save a random Gemma 4: two kv heads in layers with a window of 80, one in the others."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **(
            _sizes()
            | {
                "num_hidden_layers": 6,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "global_head_dim": 64,
                "hidden_size_per_layer_input": 0,
                "sliding_window": 80,
                "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
                "tie_word_embeddings": True,
            }
            | overrides
        )
    )
    return _save(folder, Gemma4ForCausalLM, config, embedding_scale=0.02)


def tiny_gpt_oss(folder: Path, **overrides: Any) -> Path:
    """Save a random GPT-OSS: attention sinks, a mixture of experts, alternating windows of 80."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **(
            _sizes()
            | {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 80,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            }
            | overrides
        )
    )
    return _save(folder, GptOssForCausalLM, config)


def tiny_qwen2(folder: Path, key_bias: float = 0.0, **overrides: Any) -> Path:
    """Save a random Qwen 2: biases on queries, keys and values.

    Args:
        folder: to save to.
        key_bias: added to the keys' biases in the channels that rotate slowest. The real models
            have large ones there: they hardly change attention, but ruin keys that are not
            quantised per channel.
        overrides: of the configuration.

    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def add_bias(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.data.view(-1, 2, 32)[..., -4:] += key_bias

    # Qwen 2 has no head_dim of its own in vLLM: heads share the hidden size.
    config = Qwen2Config(**(_sizes() | {"hidden_size": 256} | overrides))
    return _save(folder, Qwen2ForCausalLM, config, edit=add_bias)


def tiny_qwen3(folder: Path, **overrides: Any) -> Path:
    """Save a random Qwen 3: normalised queries and keys, head size 128."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**(_sizes() | {"head_dim": 128} | overrides))
    return _save(folder, Qwen3ForCausalLM, config)


def tiny_phi3(folder: Path, **overrides: Any) -> Path:
    """Save a random Phi 3: head size 96, one matrix for queries, keys and values."""
    from transformers import Phi3Config, Phi3ForCausalLM

    # As in Phi 3 mini, heads share the hidden size.
    sizes = _sizes() | {"hidden_size": 384, "head_dim": 96, "initializer_range": 0.06}
    return _save(folder, Phi3ForCausalLM, Phi3Config(**(sizes | overrides)))


def tiny_mixtral(folder: Path, **overrides: Any) -> Path:
    """Save a random Mixtral: a mixture of experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = _sizes() | {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _save(folder, MixtralForCausalLM, MixtralConfig(**(sizes | overrides)))


def tiny_qwen3_moe(folder: Path, **overrides: Any) -> Path:
    """Save a random Qwen 3 MoE: a mixture of experts, normalised queries and keys."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = _sizes() | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return _save(folder, Qwen3MoeForCausalLM, Qwen3MoeConfig(**(sizes | overrides)))


def tiny_gemma3n(folder: Path, **overrides: Any) -> Path:
    """Save a random Gemma 3n: of ten layers, the last five read caches of the first five."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        **(
            _sizes()
            | {
                "num_hidden_layers": 10,
                "num_kv_shared_layers": 5,
                "sliding_window": 80,
                "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
                "vocab_size_per_layer_input": TINY_VOCABULARY,
                "hidden_size_per_layer_input": 16,
                "laurel_rank": 16,
                "activation_sparsity_pattern": [0.0] * 10,
                "tie_word_embeddings": True,
            }
            | overrides
        )
    )
    return _save(folder, Gemma3nForCausalLM, config, embedding_scale=0.02)


def tiny_gemma4_sharing(folder: Path, **overrides: Any) -> Path:
    """Save a random Gemma 4 whose last three of six layers read caches of the first three."""
    return tiny_gemma4(
        folder, **({"num_kv_shared_layers": 3, "attention_k_eq_v": False} | overrides)
    )


def tiny_granite_hybrid(folder: Path, **overrides: Any) -> Path:
    """Save a random Granite 4: three layers of Mamba 2 to one of attention."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    sizes = _sizes()
    del sizes["head_dim"]
    config = GraniteMoeHybridConfig(
        **(
            sizes
            | {
                "hidden_size": 256,
                "num_hidden_layers": 4,
                "layer_types": ["mamba", "mamba", "attention", "mamba"],
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "shared_intermediate_size": 128,
                "attention_multiplier": 0.125,
                # A state so small that its page holds fewer tokens than a short prompt.
                "mamba_expand": 1,
                "mamba_n_heads": 4,
                "mamba_d_head": 64,
                "mamba_d_state": 8,
            }
            | overrides
        )
    )
    return _save(folder, GraniteMoeHybridForCausalLM, config)


def tiny_idefics3(folder: Path, **overrides: Any) -> Path:
    """Save a random Idefics 3: a Llama behind a vision tower."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    config = Idefics3Config(
        text_config=_sizes() | {"model_type": "llama"} | overrides,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        image_token_id=TINY_VOCABULARY - 1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return _save(folder, Idefics3ForConditionalGeneration, config)


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,  # large enough for attention to matter to the logits
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _save(
    folder: Path,
    model_class: Any,
    config: Any,
    embedding_scale: float = 1.0,
    edit: Callable[[Any], None] = lambda model: None,
) -> Path:
    torch.manual_seed(0)
    model = model_class(config).to(torch.float32)
    model.get_input_embeddings().weight.data *= embedding_scale
    edit(model)
    model.save_pretrained(folder)
    return folder
