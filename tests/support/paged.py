"""A paged cache for kernel tests: scattered blocks, poisoned free memory, any schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvq_kernels import AttentionParams, Batch, Format, LayerCache, reference


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class Sequence:
    """One request's queries, keys and values for all positions, and its progress."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    computed: int = 0


@dataclass
class PagedCache:
    """Owns pages and ring of some requests; free memory is 0xFF bytes (NaN as floats)."""

    fmt: Format
    num_requests: int
    num_kv_heads: int
    max_tokens: int
    block_size: int
    ring_block_size: int = 32
    num_speculative_tokens: int = 0
    dtype: torch.dtype = torch.float32
    kernels: Any = reference
    cache: LayerCache = field(init=False)

    def __post_init__(self) -> None:
        fmt = self.fmt
        blocks = cdiv(self.max_tokens, self.block_size)
        ring_blocks = cdiv(fmt.unit_size + self.num_speculative_tokens, self.ring_block_size)
        num_blocks = self.num_requests * (blocks + ring_blocks) + 1
        order = torch.randperm(num_blocks - 1, dtype=torch.int32) + 1
        order = order.view(self.num_requests, -1)
        # Pages of another layer lie between ours: only the last three dimensions are contiguous.
        shape = (num_blocks, 2, self.num_kv_heads, self.block_size, fmt.bytes_per_token)
        ring_shape = (num_blocks, 2, self.num_kv_heads, self.ring_block_size, 2 * fmt.head_size)
        pages = torch.full(shape, 0xFF, dtype=torch.uint8)
        self.cache = LayerCache(
            fmt=fmt,
            pages=pages[:, 1],
            block_table=order[:, :blocks].contiguous(),
            ring=torch.full(ring_shape, torch.nan, dtype=self.dtype)[:, 1],
            ring_table=order[:, blocks:].contiguous(),
            ring_capacity=ring_blocks * self.ring_block_size,
        )

    def step(
        self, sequences: list[Sequence], new_tokens: list[int], params: AttentionParams
    ) -> list[torch.Tensor]:
        """Run one step as the engine does; return each sequence's new outputs."""
        limit = 1 + self.num_speculative_tokens
        order = sorted(range(len(sequences)), key=lambda i: new_tokens[i] > limit)
        num_decodes = sum(n <= limit for n in new_tokens)
        spans = [(i, sequences[i].computed, sequences[i].computed + new_tokens[i]) for i in order]
        query = torch.cat([sequences[i].query[a:b] for i, a, b in spans])
        key = torch.cat([sequences[i].key[a:b] for i, a, b in spans])
        value = torch.cat([sequences[i].value[a:b] for i, a, b in spans])
        lengths = torch.tensor([0] + [b - a for _, a, b in spans], dtype=torch.int32)
        starts = lengths.cumsum(0).to(torch.int32)
        lens = torch.tensor([b for _, _, b in spans], dtype=torch.int32)
        rows = torch.tensor(order)
        cache = LayerCache(
            self.fmt,
            self.cache.pages,
            self.cache.block_table[rows],
            self.cache.ring,
            self.cache.ring_table[rows],
            self.cache.ring_capacity,
        )
        out = torch.full_like(query, torch.nan)
        kernels = self.kernels
        kernels.seal(key, value, cache, Batch(starts, lens))
        if num_decodes:
            batch = Batch(starts[: num_decodes + 1], lens[:num_decodes])
            part = cache.requests(0, num_decodes)
            kernels.write_ring(key, value, part, batch)
            kernels.decode(query, part, batch, params, out)
        if num_decodes < len(order):
            batch = Batch(starts[num_decodes:], lens[num_decodes:])
            part = cache.requests(num_decodes, None)
            kernels.prefill(query, key, value, part, batch, params, out)
            kernels.write_ring(key, value, part, batch)
        outputs: list[torch.Tensor] = [out] * len(sequences)
        for position, (i, _, b) in enumerate(spans):
            outputs[i] = out[starts[position] : starts[position + 1]]
            sequences[i].computed = b
        return outputs

    def sealed_records(self, request: int, num_units: int) -> torch.Tensor:
        """The records of a request's first units."""
        per_block = self.block_size // self.fmt.unit_size
        blocks = self.cache.block_table[request, : cdiv(num_units, per_block)].long()
        records = self.cache.pages[blocks].unflatten(2, (per_block, self.fmt.unit_size))
        return records.flatten(-2).transpose(1, 2).flatten(0, 1)[:num_units]


def random_sequence(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype = torch.float32,
) -> Sequence:
    """Normal queries, keys with two outlier channels, values; a large first key."""
    key = torch.randn(num_tokens, num_kv_heads, head_size)
    key[..., 1] += 12
    key[..., head_size // 2] *= 6
    key[0] *= 4
    return Sequence(
        torch.randn(num_tokens, num_heads, head_size).to(dtype),
        key.to(dtype),
        torch.randn(num_tokens, num_kv_heads, head_size).to(dtype),
    )


def attend_by_the_rule(
    sequence: Sequence, fmt: Format | None, params: AttentionParams
) -> torch.Tensor:
    """Dense attention where a query sees all units before its own quantised, if at all."""
    key, value = sequence.key.float(), sequence.value.float()
    if fmt is None:
        return reference.attention(sequence.query, key, value, params, 0, 0)
    sealed_key, sealed_value = reference.fake_quantise(sequence.key, sequence.value, fmt)
    out = torch.empty_like(sequence.query, dtype=torch.float32)
    for start in range(0, len(key), fmt.unit_size):
        end = min(len(key), start + fmt.unit_size)
        out[start:end] = reference.attention(
            sequence.query[start:end],
            torch.cat([sealed_key[:start], key[start:end]]),
            torch.cat([sealed_value[:start], value[start:end]]),
            params,
            query_start=start,
            key_start=0,
        )
    return out
