"""What every kernel takes: one layer's cache, one step's batch, the attention parameters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvq_kernels.formats import Format

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer, with the block tables of one batch.

    Attributes:
        fmt: format of the pages.
        pages: sealed units, uint8 ``[num_blocks, num_kv_heads, block_size, bytes_per_token]``.
            The last three dimensions are contiguous: per block and head, ``block_size /
            unit_size`` records.
        block_table: int32 ``[num_requests, >= max_blocks]``, blocks of `pages` in the order of
            positions. Entries below a sliding window may point anywhere and are not read.
        ring: the residual ring, keys then values, of the model's dtype,
            ``[num_blocks, num_kv_heads, ring_block_size, 2 * head_size]``.
        ring_table: int32 ``[num_requests, >= ring_capacity / ring_block_size]``.
        ring_capacity: tokens the ring of one request holds, a multiple of `ring_block_size`,
            at least unit_size plus the number of speculative tokens. Position p is at slot
            ``p % ring_capacity``.

    """

    fmt: Format
    pages: torch.Tensor
    block_table: torch.Tensor
    ring: torch.Tensor
    ring_table: torch.Tensor
    ring_capacity: int

    def requests(self, start: int, end: int | None) -> LayerCache:
        """Return the same cache with the block tables of requests [start, end)."""
        if start == 0 and end == self.block_table.shape[0]:
            return self
        return dataclasses.replace(
            self,
            block_table=self.block_table[start:end],
            ring_table=self.ring_table[start:end],
        )


@dataclass(frozen=True)
class Batch:
    """Which of a step's tokens belong to which request.

    Attributes:
        query_start_loc: int32 ``[num_requests + 1]``, the row of each request's first new token
            in the step's queries, keys and values. Rows before the first and after the last
            belong to others and are not touched.
        seq_lens: int32 ``[num_requests]``, tokens of each request including the new ones. 0 marks
            a dummy request, whatever rows it has: nothing of it is read, written or attended to.

    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True)
class AttentionParams:
    """What attention computes, apart from where its data lies.

    Attributes:
        scale: factor of the logits.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``; None for no cap.
        sliding_window: number of positions that a query sees, itself included; None for all.
        sinks: one extra softmax logit per head, ``[num_heads]``, or None.
        alibi_slopes: ``[num_heads]``; the bias is slope * (key position - query position).

    """

    scale: float
    soft_cap: float | None = None
    sliding_window: int | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    def lowest_position(self, query_position: int) -> int:
        """Return the lowest position that a query at `query_position` sees."""
        if self.sliding_window is None:
            return 0
        return max(0, query_position - self.sliding_window + 1)
