"""The Triton kernels, for CUDA and ROCm; on a CPU in Triton's interpreter only."""

from kvq_kernels.triton.blocks import prepare
from kvq_kernels.triton.decode import decode, workspace_bytes
from kvq_kernels.triton.prefill import prefill
from kvq_kernels.triton.store import seal, store, write_ring

__all__ = ["decode", "prefill", "prepare", "seal", "store", "workspace_bytes", "write_ring"]
