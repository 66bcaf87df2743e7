"""KV offloading on a CPU: vLLM's offloading connector over a stand-in for its copies.

vLLM moves the pages with CUDA streams and refuses to on a CPU. What to move, when and where to is
decided in plain Python, which runs here as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory


class CopyingWorker(OffloadingWorker):
    """Copies whole pages at once, and reports it a step later, as a stream might."""

    def __init__(self, caches: CanonicalKVCaches, num_pages: int) -> None:
        self.caches = caches
        self.memory = [
            torch.full((num_pages, tensor.page_size_bytes), -1, dtype=torch.int8)
            for tensor in caches.tensors
        ]
        self.pages_moved = {"store": 0, "load": 0}
        self._finished: list[TransferResult] = []
        self._submitted: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._copy("store", job_id, src_spec, src_spec.block_ids, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        pages: Any = src_spec
        return self._copy("load", job_id, dst_spec, dst_spec.block_ids, pages.block_ids)

    def _copy(
        self, kind: str, job_id: int, spec: GPULoadStoreSpec, here: np.ndarray, there: np.ndarray
    ) -> bool:
        assert len(here) == len(there)
        ends = np.cumsum(spec.group_sizes)
        for refs, start, end in zip(
            self.caches.group_data_refs, ends - spec.group_sizes, ends, strict=True
        ):
            ours, theirs = (torch.from_numpy(x[start:end].astype(np.int64)) for x in (here, there))
            for ref in refs:
                cache, memory = self.caches.tensors[ref.tensor_idx].tensor, self.memory
                size = slice(ref.page_size_bytes)
                if kind == "store":
                    memory[ref.tensor_idx][theirs, size] = cache[ours, size]
                else:
                    cache[ours, size] = memory[ref.tensor_idx][theirs, size]
        self.pages_moved[kind] += len(here)
        self._submitted.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished, self._submitted = self._finished, self._submitted, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass  # copied when submitted


class CopyingSpec(CPUOffloadingSpec):
    """Keeps the last worker, for tests to look at."""

    last_worker: CopyingWorker

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        if self._worker is None:
            self._worker = CopyingSpec.last_worker = CopyingWorker(kv_caches, self.num_chunks)
        return self._worker


def make_possible(monkeypatch: Any) -> None:
    """Give engines started from now on KV offloading to CPU memory."""
    monkeypatch.setitem(OffloadingSpecFactory._registry, "CPUOffloadingSpec", lambda: CopyingSpec)
