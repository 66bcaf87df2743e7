"""A paged fp8 cache for kernel tests, and what a dense model sees of an fp8 cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvq_kernels import AttentionParams, Batch
from kvq_kernels.fp8 import Fp8Cache, Fp8Format, reference
from support.paged import Sequence, cdiv

E4M3, E5M2 = "kvq-fp8_e4m3", "kvq-fp8_e5m2"


@dataclass(frozen=True)
class Fp8Layer:
    """A layer's format and scales, ``[num_kv_heads]`` or ``[1]``; see ``support.dense``."""

    fmt: Fp8Format
    key_scale: torch.Tensor
    value_scale: torch.Tensor

    def fake_quantise(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.fake_quantise(key, value, self.key_scale, self.value_scale, self.fmt)


def at_scale_one(name: str, head_size: int) -> Fp8Layer:
    """A layer without calibration."""
    return Fp8Layer(Fp8Format(name, head_size), torch.ones(1), torch.ones(1))


@dataclass
class PagedFp8Cache:
    """Owns the pages of some requests; free memory is 0xFF bytes, NaN in both types."""

    layer: Fp8Layer
    num_requests: int
    max_tokens: int
    block_size: int = 16
    num_speculative_tokens: int = 0
    kernels: Any = reference
    device: torch.device | str = "cpu"
    cache: Fp8Cache = field(init=False)

    def __post_init__(self) -> None:
        fmt, heads = self.layer.fmt, len(self.layer.key_scale)
        blocks = cdiv(self.max_tokens, self.block_size)
        order = torch.randperm(self.num_requests * blocks, dtype=torch.int32) + 1
        # Pages of another layer lie between ours: only the last three dimensions are contiguous.
        shape = (self.num_requests * blocks + 1, 2, heads, self.block_size, fmt.bytes_per_token)
        self.cache = Fp8Cache(
            fmt=fmt,
            pages=torch.full(shape, 0xFF, dtype=torch.uint8, device=self.device)[:, 1],
            block_table=order.view(self.num_requests, -1).to(self.device),
            key_scale=self.layer.key_scale.to(self.device),
            value_scale=self.layer.value_scale.to(self.device),
        )

    def step(
        self, sequences: list[Sequence], new_tokens: list[int], params: AttentionParams
    ) -> list[torch.Tensor]:
        """Run one step as the engine does; return each sequence's new outputs."""
        limit = 1 + self.num_speculative_tokens
        order = sorted(range(len(sequences)), key=lambda i: new_tokens[i] > limit)
        num_decodes = sum(n <= limit for n in new_tokens)
        spans = [(i, sequences[i].computed, sequences[i].computed + new_tokens[i]) for i in order]
        query, key, value = (
            torch.cat([getattr(sequences[i], name)[a:b] for i, a, b in spans]).to(self.device)
            for name in ("query", "key", "value")
        )
        lengths = torch.tensor([0] + [b - a for _, a, b in spans])
        starts = lengths.cumsum(0).to(self.device, torch.int32)
        lens = torch.tensor([b for _, _, b in spans], dtype=torch.int32, device=self.device)
        rows = torch.tensor(order, device=self.device)
        cache = Fp8Cache(
            self.cache.fmt,
            self.cache.pages,
            self.cache.block_table[rows],
            self.cache.key_scale,
            self.cache.value_scale,
        )
        out = torch.full_like(query, torch.nan)
        self.kernels.write(key, value, cache, Batch(starts, lens))
        if num_decodes:
            batch = Batch(starts[: num_decodes + 1], lens[:num_decodes])
            self.kernels.decode(query, cache.requests(0, num_decodes), batch, params, out)
        if num_decodes < len(order):
            batch = Batch(starts[num_decodes:], lens[num_decodes:])
            self.kernels.prefill(query, cache.requests(num_decodes, None), batch, params, out)
        outputs: list[torch.Tensor] = [out] * len(sequences)
        for place, (i, _, b) in enumerate(spans):
            outputs[i] = out[starts[place] : starts[place + 1]].cpu()
            sequences[i].computed = b
        return outputs


def random_scales(num_kv_heads: int) -> torch.Tensor:
    """Scales of heads whose sizes differ by orders of magnitude."""
    return torch.rand(num_kv_heads) * 10.0 ** torch.randint(-3, 1, (num_kv_heads,)) + 1e-4


def dense_attention(sequence: Sequence, layer: Fp8Layer, params: AttentionParams) -> torch.Tensor:
    """Attention in fp64 over what PyTorch's own casts make of keys and values."""
    key, value = (
        _cast(x, scale, layer.fmt)
        for x, scale in ((sequence.key, layer.key_scale), (sequence.value, layer.value_scale))
    )
    num_tokens, num_heads, head_size = sequence.query.shape
    heads = key.shape[1]
    query = sequence.query.double().view(num_tokens, heads, num_heads // heads, head_size)
    logits = torch.einsum("qhgd,khd->hgqk", query, key) * params.scale
    if params.soft_cap:
        logits = params.soft_cap * torch.tanh(logits / params.soft_cap)
    positions = torch.arange(num_tokens)
    distance = positions[None] - positions[:, None]  # key - query
    if params.alibi_slopes is not None:
        logits = logits + params.alibi_slopes.double().view(heads, -1, 1, 1) * distance
    visible = distance <= 0
    if params.sliding_window is not None:
        visible &= distance > -params.sliding_window
    logits = logits.masked_fill(~visible, -torch.inf)
    if params.sinks is not None:
        sinks = params.sinks.double().view(heads, -1, 1, 1).expand(-1, -1, num_tokens, 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, value).reshape_as(sequence.query)


def _cast(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    scaled = (x.float() / scale[:, None]).clamp(-fmt.largest, fmt.largest)
    return scaled.to(fmt.dtype).double() * scale[:, None].double()
