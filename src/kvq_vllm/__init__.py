"""Quantised KV caches for stock vLLM: ``--kv-cache-dtype kvq-int4`` and friends."""

from importlib.metadata import version

__version__ = version("kvq-vllm")
