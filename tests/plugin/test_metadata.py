"""The metadata builder: which requests are decodes, and whose tokens are written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from kvq_vllm.backend import KVQMetadataBuilder


def builder(max_num_seqs: int = 8, drafts: int = 0) -> KVQMetadataBuilder:
    speculative = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
    config: Any = SimpleNamespace(
        speculative_config=speculative if drafts else None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
    )
    return KVQMetadataBuilder(SimpleNamespace(), ["layer"], config, torch.device("cpu"))


def common(query_lens: list[int], seq_lens: list[int], slots: list[int]) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens).int(),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.zeros(len(query_lens), 4, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
    )


def test_decodes_come_first_and_prefills_after_them() -> None:
    metadata = builder().build(0, common([1, 1, 3], [5, 9, 3], [4, 8, 0, 1, 2]))
    assert metadata.num_decodes == 2
    assert metadata.decodes is not None
    assert metadata.prefills is not None
    assert metadata.decodes.query_start_loc.tolist() == [0, 1, 2]
    assert metadata.prefills.query_start_loc.tolist() == [2, 5]
    assert metadata.prefills.seq_lens.tolist() == [3]


def test_a_token_and_its_drafts_are_a_decode() -> None:
    metadata = builder(drafts=2).build(0, common([3, 3], [5, 9], [2, 3, 4, 6, 7, 8]))
    assert metadata.prefills is None
    assert metadata.num_decodes == 2


def test_dummy_batches_are_not_written() -> None:
    """Their slots are -1, while their block tables may name blocks in use."""
    metadata = builder().build(0, common([1, 1], [128, 1], [-1, -1]))
    assert metadata.requests.seq_lens.tolist() == [0, 0]


def test_padding_requests_of_a_graph_have_no_rows() -> None:
    metadata = builder().build(0, common([1, 1, 0, 0], [5, 9, 0, 0], [4, 8]))
    assert metadata.requests.seq_lens.tolist() == [5, 9, 0, 0]
    assert metadata.requests.query_start_loc.tolist() == [0, 1, 2, 2, 2]


def test_lengths_stay_at_one_address_for_graphs_to_replay() -> None:
    ours = builder()
    first = ours.build(0, common([1, 1], [5, 9], [4, 8])).requests.seq_lens
    second = ours.build(0, common([1, 1], [6, 10], [5, 9])).requests.seq_lens
    assert first.data_ptr() == second.data_ptr()
    assert first.tolist() == [6, 10]


@pytest.mark.parametrize(
    ("kernels", "support"),
    [("reference", AttentionCGSupport.NEVER), ("cpu", AttentionCGSupport.UNIFORM_BATCH)],
)
def test_full_graphs_need_kernels_that_read_lengths_on_the_device(
    kernels: str, support: AttentionCGSupport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQ_KERNELS", kernels)
    config: Any = SimpleNamespace()
    assert KVQMetadataBuilder.get_cudagraph_support(config, config) is support
