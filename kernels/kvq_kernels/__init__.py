"""Quantised KV cache formats and kernels. Needs PyTorch only; knows nothing of vLLM."""

from kvq_kernels.formats import SCHEMES, Format, Scheme, hadamard
from kvq_kernels.interface import AttentionParams, Batch, LayerCache

__all__ = [
    "SCHEMES",
    "AttentionParams",
    "Batch",
    "Format",
    "LayerCache",
    "Scheme",
    "hadamard",
]
