"""Drafter models beside or on a kvq cache, on vLLM's model runner V1.

A drafter's layers are ordinary attention layers with pages of their own, in one KV cache group,
and rings in another where their dtype has them. Runner V2 builds a drafter's metadata for all
of its layers and groups, and needs nothing from here. V1 takes three things for granted that do
not hold:

- All layers that loading the drafter adds are in one group. Companion layers are in another.
- So metadata of that group is all that the drafter's layers read. Ours read the ring's as well.
- A draft model's blocks are those of the first group. They are only where it has the target's
  dtype and sizes; elsewhere it would write to blocks that hold the target's pages.

What this relies on is listed in ``tests/plugin/test_contract.py``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from kvq_vllm.residual import LAYER_SUFFIX
from kvq_vllm.wrapping import wrap_once

DRAFT_MODEL = "draft_model"


def take_over() -> None:
    """Replace the methods of runner V1 and of its drafters, once per process.

    They are looked up anew at each call: any time before the drafter loads is early enough.
    Without kvq layers in the process this is never called.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap_once(SpecDecodeBaseProposer, "load_model", _leave_companions_out)
    wrap_once(SpecDecodeBaseProposer, "initialize_attn_backend", _find_rings)
    wrap_once(GPUModelRunner, "propose_draft_token_ids", _hand_over_block_tables)
    wrap_once(SpecDecodeBaseProposer, "build_per_group_and_layer_attn_metadata", _add_rings)


def _leave_companions_out(load_model: Callable[..., None]) -> Callable[..., None]:
    def wrapped(self: Any, target_model: Any) -> None:
        load_model(self, target_model)
        names = self._draft_attn_layer_names
        self._draft_attn_layer_names = {n for n in names if not n.endswith(LAYER_SUFFIX)}

    return wrapped


def _find_rings(initialize: Callable[..., None]) -> Callable[..., None]:
    def wrapped(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, kv_cache_config, *args, **kwargs)
        rings = {name + LAYER_SUFFIX for name in self._draft_attn_layer_names}
        self.kvq_ring_groups = {
            layer: index
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            for layer in rings.intersection(group.layer_names)
        }

    return wrapped


def _hand_over_block_tables(propose: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(propose)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        drafter = self.drafter
        if hasattr(drafter, "kvq_ring_groups"):  # not n-gram and the like
            common = call.arguments["common_attn_metadata"]
            tables = [
                t.get_device_tensor(common.num_reqs)
                for t in self.input_batch.block_table.block_tables
            ]
            drafter.kvq_ring_tables = {
                layer: tables[group] for layer, group in drafter.kvq_ring_groups.items()
            }
            if drafter.method == DRAFT_MODEL:
                own = common.replace(block_table_tensor=tables[drafter.kv_cache_gid])
                call.arguments["common_attn_metadata"] = own
        return propose(*call.args, **call.kwargs)

    return wrapped


def _add_rings(build: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        per_group, per_layer = build(self, *args, **kwargs)
        for name, table in self.kvq_ring_tables.items():
            pages = per_layer[name.removesuffix(LAYER_SUFFIX)]
            per_layer[name] = dataclasses.replace(pages, block_table=table)
        return per_group, per_layer

    return wrapped
