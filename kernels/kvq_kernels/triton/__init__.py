"""The Triton kernels, for CUDA and ROCm; on a CPU in Triton's interpreter only."""

from kvq_kernels.triton.decode import decode

__all__ = ["decode"]
