"""One attention layer of vLLM on vLLM's own block manager: an engine without model and scheduler.

The configuration, the layer, its companion, the cache plan, the block pool, the metadata builder
and the impl are the real ones. Tests decide what a scheduler would: who runs, how many tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvq_kernels import reference
from kvq_kernels.fp8 import is_fp8
from kvq_kernels.fp8 import reference as fp8_reference
from kvq_vllm.planning.engine import cache_config
from kvq_vllm.residual import LAYER_SUFFIX

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16
UNIT_SIZE = 64
MAX_TOKENS = 320
"""Longest request: five units."""
MAX_REQUESTS = 6
NUM_BLOCKS = 48
"""Three or four long requests, each of five pages and a ring of nine blocks."""
NAME = "model.layers.0.self_attn.attn"


@dataclass(frozen=True)
class Setup:
    """What a :class:`OneLayer` is made of.

    Attributes:
        cache_dtype: value of ``--kv-cache-dtype``.
        kernels: "best" for this machine, or "reference".
        block_size: tokens per page.
        window: of the layer's attention, or None.
        drafts: speculative tokens per step.

    """

    cache_dtype: str
    kernels: str = "best"
    block_size: int = 64
    window: int | None = None
    drafts: int = 3


@dataclass(frozen=True)
class Scheduled:
    """A request's share of a step.

    Attributes:
        request_id: whose blocks are used.
        rows: of the new tokens, ``[n]``, in the step's queries, keys and values.
        end: the request's length with them.

    """

    request_id: str
    rows: torch.Tensor
    end: int


class OneLayer:
    """The layer, its memory and the block manager.

    Attributes:
        manager: vLLM's ``KVCacheManager``.
        memory: all blocks, uint8 ``[num_blocks, page_bytes]``.
        impl: the layer's attention impl.

    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.config = _vllm_config(setup)
        self.layer, layers = _make_layers(self.config, setup)
        self.impl = self.layer.impl
        if setup.kernels == "reference":
            self.impl.kernels = fp8_reference if is_fp8(setup.cache_dtype) else reference
        self.config.cache_config.kv_cache_layout = "BLHNC"  # one layer: any is the same
        specs = {name: _spec(layer, self.config) for name, layer in layers.items()}
        self.plan = cache_config(self.config, specs, 1 << 20)
        self.specs = {
            name: group.kv_cache_spec
            for group in self.plan.kv_cache_groups
            for name in group.layer_names
        }
        self.builders = {
            name: layer.get_attn_backend().get_builder_cls()(
                self.specs[name], [name], self.config, torch.device("cpu")
            )
            for name, layer in layers.items()
        }
        self.pages_group = self._group_of(NAME)
        page_bytes = self.specs[NAME].page_size_bytes
        self.memory = torch.empty(NUM_BLOCKS, page_bytes, dtype=torch.uint8)
        self.pages = self._view(self.specs[NAME])
        if ring := layers.get(NAME + LAYER_SUFFIX):
            ring.kv_cache = self._view(self.specs[NAME + LAYER_SUFFIX])
        self.reset(0xFF)

    def reset(self, poison: int) -> None:
        """Start over: a new block manager on memory full of `poison`."""
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        self.poison = poison
        self.memory.fill_(poison)
        scheduler_block_size, self.hash_block_size = resolve_kv_cache_block_sizes(
            self.plan, self.config
        )
        self.manager = KVCacheManager(
            self.plan,
            max_model_len=MAX_TOKENS,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=self.hash_block_size,
        )

    def new_request(self, request_id: str, tokens: list[int]) -> Any:
        """Return a request of vLLM's, for the block manager."""
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        return Request(
            request_id,
            tokens,
            SamplingParams(max_tokens=MAX_TOKENS),
            None,
            block_hasher=get_request_block_hasher(self.hash_block_size, sha256),
        )

    def poison_blocks(self, blocks: Sequence[Any]) -> None:
        """Overwrite blocks, as if another request had used them."""
        self.memory[[block.block_id for block in blocks]] = self.poison

    def poison_free_blocks(self) -> None:
        """Overwrite all blocks that belong to nobody and are not kept for prefix hits."""
        blocks = self.manager.block_pool.blocks
        self.poison_blocks([b for b in blocks if b.ref_cnt == 0 and b.block_hash is None])

    def forward(
        self,
        batch: Sequence[Scheduled],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dummy: bool = False,
    ) -> torch.Tensor:
        """Run the impl on a step.

        Args:
            batch: requests in the order of their rows, those with few new tokens first.
            query: ``[>= num_tokens, HEADS, HEAD_SIZE]``; the rest is padding.
            key: ``[>= num_tokens, KV_HEADS, HEAD_SIZE]``.
            value: as `key`.
            dummy: whether it is one of vLLM's dummy batches, whose tokens have no slot.

        Returns:
            shape of `query`, NaN where nothing was written.

        """
        from vllm.forward_context import set_forward_context

        metadata = {
            name: builder.build(0, self._common(batch, self._group_of(name), dummy))
            for name, builder in self.builders.items()
        }
        output = torch.full_like(query, torch.nan)
        with set_forward_context(metadata, self.config, num_tokens=len(query)):
            self.impl.forward(self.layer, query, key, value, self.pages, metadata[NAME], output)
        return output

    def _group_of(self, name: str) -> int:
        groups = self.plan.kv_cache_groups
        return next(i for i, group in enumerate(groups) if name in group.layer_names)

    def _view(self, spec: Any) -> torch.Tensor:
        """View the memory as blocks of `spec`, ``[num_blocks, heads, block_size, bytes]``."""
        shape = (NUM_BLOCKS, spec.num_kv_heads, spec.block_size, spec.state_content_bytes)
        row = spec.block_size * spec.state_content_bytes
        return self.memory.as_strided(shape, (self.memory.shape[1], row, shape[3], 1))

    def _common(self, batch: Sequence[Scheduled], group: int, dummy: bool) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        lengths = [len(share.rows) for share in batch]
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([share.end for share in batch]).int(),
            num_reqs=len(batch),
            num_actual_tokens=sum(lengths),
            max_query_len=max(lengths),
            max_seq_len=max(share.end for share in batch),
            block_table_tensor=self._block_table(batch, group),
            slot_mapping=torch.full((sum(lengths),), -1 if dummy else 0),
        )

    def _block_table(self, batch: Sequence[Scheduled], group: int) -> torch.Tensor:
        """Return the rows of a group's block table; behind their ends they name any block."""
        width = MAX_TOKENS // 8 + 2
        table = (torch.arange(len(batch) * width) * 7 % NUM_BLOCKS).int().view(-1, width)
        for row, share in zip(table, batch, strict=True):
            blocks = self.manager.get_block_ids(share.request_id)[group]
            row[: len(blocks)] = torch.tensor(blocks)
        return table


def _vllm_config(setup: Setup) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": MAX_TOKENS,
        "vocab_size": 1024,
        "dtype": "float32",
    }
    drafter = {
        "method": "ngram",
        "num_speculative_tokens": setup.drafts,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            kv_cache_dtype=setup.cache_dtype,
            block_size=setup.block_size,
            max_model_len=MAX_TOKENS,
            max_num_seqs=MAX_REQUESTS,
            num_gpu_blocks_override=NUM_BLOCKS,
            enable_prefix_caching=True,
            speculative_config=drafter if setup.drafts else None,
            additional_config={}
            if is_fp8(setup.cache_dtype)
            else {"kvq": {"unit_size": UNIT_SIZE, "key_group_size": 32}},
        ).create_engine_config()


def _make_layers(config: Any, setup: Setup) -> tuple[Any, dict[str, Any]]:
    """Return the attention layer, and all layers with a cache by name."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    with set_current_vllm_config(config):
        layer = Attention(
            num_heads=HEADS,
            head_size=HEAD_SIZE,
            scale=0.5,  # some keys clearly matter more than others
            num_kv_heads=KV_HEADS,
            cache_config=config.cache_config,
            per_layer_sliding_window=setup.window,
            prefix=NAME,
        )
        layer.process_weights_after_loading(torch.float32)
    return layer, config.compilation_config.static_forward_context


def _spec(layer: Any, config: Any) -> Any:
    return layer.get_attn_backend().customize_spec(layer.get_kv_cache_spec(config))
