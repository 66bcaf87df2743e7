"""C++ kernels for CPUs, with the signatures of :mod:`kvq_kernels.reference`.

They are compiled when the package is installed from source (see :mod:`.build`) into one shared
library, loaded here with ctypes on first use. It holds every kernel for AVX-512 (with VNNI),
AVX2 and anything else, prefill of bf16 models for AMX too, and picks by what the CPU supports. For
debugging, the environment variable ``KVQ_CPU_ISA`` (``portable``, ``avx2``, ``avx512``, ``amx``)
overrides the choice, and ``KVQ_CPU_LIBRARY`` is the path of another build of the library.

Tensors are on the CPU, fp32, bf16 or fp16, and need no copy: rows may be slices of a fused
tensor, only the last dimension must be contiguous. The kernels use ``torch.get_num_threads()``
threads, those of PyTorch where both use the same OpenMP runtime; results do not depend on their
number.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from kvq_kernels.formats import Format
from kvq_kernels.interface import AttentionParams, Batch, LayerCache
from kvq_kernels.reference import prepare, workspace_bytes  # nothing worth counting

__all__ = [
    "decode",
    "is_available",
    "isa",
    "prefill",
    "prepare",
    "seal",
    "select_isa",
    "store",
    "why_unavailable",
    "workspace_bytes",
    "write_ring",
]

_ABI_VERSION = 2  # KVQ_ABI_VERSION in abi.h
_ARGS = struct.Struct("=8q 14q 5q 3q 4q 4q 4q 4q 2d 3q 3q")  # KvqArgs in abi.h
_DTYPES = {torch.float32: (0, 4), torch.bfloat16: (1, 2), torch.float16: (2, 2)}
"""Dtype to its KvqDtype in abi.h and its size in bytes."""
_OUT_DTYPES = {**_DTYPES, torch.float64: (3, 8)}
_NO_ROWS = (0, 0, 0, 0)
_KERNEL_NAMES = ("seal", "write_ring", "decode", "prefill", "fp8_write", "fp8_attend")


class _Unavailable(RuntimeError):
    """The kernels cannot be used; the message says why, and what to do."""


# --- the library -----------------------------------------------------------------------------


def is_available() -> bool:
    """Return whether the kernels can be used on this machine."""
    return why_unavailable() is None


def why_unavailable() -> str | None:
    """Return why the kernels cannot be used and what to do about it, or None if they can."""
    try:
        _library()
    except _Unavailable as error:
        return str(error)
    return None


def isa() -> str:
    """Return the instruction set in use: ``portable``, ``avx2``, ``avx512`` or ``amx``."""
    return _library().kvq_isa().decode()


def select_isa(name: str) -> None:
    """Use another instruction set from now on, for tests and benchmarks.

    Raises:
        ValueError: the library has no such kernels, or this CPU cannot run them.

    """
    if _library().kvq_select_isa(name.encode()):
        raise ValueError(f"The CPU kernels cannot use {name!r} here.")


def _library() -> ctypes.CDLL:
    """Return the loaded library.

    Raises:
        _Unavailable: it is missing, broken or older than its sources.

    """
    library, reason = _load()
    if library is None:
        raise _Unavailable(reason)
    return library


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    """Load and check the library: itself, or None and the reason."""
    from kvq_kernels.cpu.build import LIBRARY_NAME, SOURCE_DIR, source_hash  # may run as a script

    override = os.environ.get("KVQ_CPU_LIBRARY")
    path = Path(override) if override else SOURCE_DIR / LIBRARY_NAME
    rebuild = "install a C++ compiler if there is none and run `python -m kvq_kernels.cpu.build`"
    if not path.exists():
        return None, f"{path} does not exist, the CPU kernels were not built: {rebuild}."
    try:
        library = ctypes.CDLL(str(path))
        library.kvq_source_hash.restype = ctypes.c_char_p
        library.kvq_isa.restype = ctypes.c_char_p
        library.kvq_abi_version.restype = ctypes.c_int64
        library.kvq_args_bytes.restype = ctypes.c_int64
        library.kvq_select_isa.argtypes = [ctypes.c_char_p]
        for name in _KERNEL_NAMES:
            kernel = getattr(library, f"kvq_{name}")
            kernel.argtypes, kernel.restype = [ctypes.c_char_p], None
        abi = library.kvq_abi_version(), library.kvq_args_bytes()
        built_from = library.kvq_source_hash().decode()
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded ({error}): {rebuild}."
    if abi != (_ABI_VERSION, _ARGS.size) or built_from != (source_hash() or built_from):
        return None, f"{path} was built from other sources: {rebuild}."
    wanted = os.environ.get("KVQ_CPU_ISA")
    if wanted and library.kvq_select_isa(wanted.encode()):
        return None, f"KVQ_CPU_ISA={wanted} is unknown or not supported by this CPU."
    return library, ""


# --- operations ------------------------------------------------------------------------------


def seal(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
    """Seal every unit that this step's tokens complete, as :func:`reference.seal`.

    Codes are the reference's to the bit; those of rotated values may differ by one, because the
    rotation adds in another order.

    Args:
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``.
        value: as `key`.
        cache: the layer's cache; its pages are written.
        batch: which tokens belong to which request.

    """
    args = _pack(cache, batch, cache.pages.shape[1], key=key, value=value)
    _library().kvq_seal(args)


def write_ring(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
    """Write this step's tokens to the ring, as :func:`reference.write_ring`.

    Args:
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``.
        value: as `key`.
        cache: the layer's cache; its ring is written.
        batch: which tokens belong to which request.

    """
    if not key.dtype == value.dtype == cache.ring.dtype:
        raise TypeError(f"A ring of {cache.ring.dtype} cannot hold {key.dtype} tokens.")
    args = _pack(cache, batch, cache.pages.shape[1], key=key, value=value)
    _library().kvq_write_ring(args)


def store(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
    """Seal, then write the ring, as :func:`reference.store`.

    Args:
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``.
        value: as `key`.
        cache: the layer's cache; its pages and ring are written.
        batch: which tokens belong to which request.

    """
    seal(key, value, cache, batch)
    write_ring(key, value, cache, batch)


def decode(
    query: torch.Tensor,
    cache: LayerCache,
    batch: Batch,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attend for requests whose new tokens are all in the ring, as :func:`reference.decode`.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        cache: the layer's cache, after :func:`seal` and :func:`write_ring`.
        batch: which tokens belong to which request.
        params: scale and masking.
        out: written, shape of `query`; fp64 is allowed too.

    """
    _check_out(query, out)
    sinks, slopes = _per_head(params.sinks), _per_head(params.alibi_slopes)
    args = _pack(
        cache, batch, query.shape[1], query, out=out, params=params, sinks=sinks, slopes=slopes
    )
    _library().kvq_decode(args)


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    batch: Batch,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attend for requests with any number of new tokens, as :func:`reference.prefill`.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``.
        value: as `key`.
        cache: the layer's cache, after :func:`seal` and before :func:`write_ring`.
        batch: which tokens belong to which request.
        params: scale and masking.
        out: written, shape of `query`; fp64 is allowed too.

    """
    _check_out(query, out)
    sinks, slopes = _per_head(params.sinks), _per_head(params.alibi_slopes)
    args = _pack(cache, batch, query.shape[1], query, key, value, out, params, sinks, slopes)
    _library().kvq_prefill(args)


# --- arguments -------------------------------------------------------------------------------


def _pack(
    cache: LayerCache,
    batch: Batch,
    num_heads: int,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    params: AttentionParams | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> bytes:
    """Return a ``KvqArgs``. It holds addresses: the tensors must outlive the call.

    Every attribute of a tensor costs 0.1 us or more, and small models have as many calls of a
    few microseconds per step as they have layers: each is read once.
    """
    format_args, bytes_per_token = _format_args(cache.fmt)
    head_size, unit_size = format_args[4], format_args[5]
    pages, ring = cache.pages, cache.ring
    _, num_kv_heads, block_size, page_width = pages.shape
    block_stride, head_stride, token_stride, _ = pages.stride()
    if page_width != bytes_per_token or block_size % unit_size:
        raise ValueError(f"pages of shape {tuple(pages.shape)} do not hold units of {cache.fmt}.")
    if (
        pages.dtype != torch.uint8
        or not pages.is_cpu
        or token_stride != page_width
        or (head_stride != block_size * page_width and num_kv_heads > 1)
    ):
        raise ValueError("pages must be a uint8 tensor on the CPU, contiguous within a block.")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} kv heads.")

    _, ring_heads, ring_block_size, ring_width = ring.shape
    *ring_strides, ring_item_stride = ring.stride()
    if ring_heads != num_kv_heads or ring_width != 2 * head_size or ring_item_stride != 1:
        raise ValueError(f"A ring of shape {tuple(ring.shape)} does not match the pages.")
    if cache.ring_capacity % ring_block_size or cache.ring_capacity < unit_size:
        raise ValueError(f"ring_capacity {cache.ring_capacity} does not suit the ring.")
    ring_dtype, item = _dtype(ring, _DTYPES)

    starts, lens = batch.query_start_loc, batch.seq_lens
    (num_requests,) = lens.shape
    if starts.shape[0] <= num_requests or not (starts.is_contiguous() and lens.is_contiguous()):
        raise ValueError("query_start_loc must be contiguous and one longer than seq_lens.")

    return _ARGS.pack(
        *format_args,
        pages.data_ptr(),
        block_stride,
        block_size // unit_size,
        *_table(cache.block_table, num_requests),
        ring.data_ptr(),
        ring_dtype,
        ring_strides[0] * item,
        ring_strides[1] * item,
        ring_strides[2] * item,
        ring_block_size,
        cache.ring_capacity,
        *_table(cache.ring_table, num_requests),
        num_requests,
        starts.data_ptr(),
        _is_64(starts),
        lens.data_ptr(),
        _is_64(lens),
        num_heads,
        num_kv_heads,
        torch.get_num_threads(),
        *(_NO_ROWS if query is None else _rows(query, num_heads, head_size)),
        *(_NO_ROWS if key is None else _rows(key, num_kv_heads, head_size)),
        *(_NO_ROWS if value is None else _rows(value, num_kv_heads, head_size)),
        *(_NO_ROWS if out is None else _rows(out, num_heads, head_size, _OUT_DTYPES)),
        1.0 if params is None else params.scale,
        0.0 if params is None else params.soft_cap or 0.0,
        0 if params is None else params.sliding_window or 0,
        0 if sinks is None else sinks.data_ptr(),
        0 if slopes is None else slopes.data_ptr(),
        *(0, 0, 0),  # fp8 formats only
    )


@lru_cache(maxsize=64)
def _format_args(fmt: Format) -> tuple[tuple[int, ...], int]:
    """Return the first fields of ``KvqArgs``, and the bytes per token."""
    args = (
        fmt.key_bits,
        fmt.value_bits,
        fmt.anchor,
        fmt.rotate_values,
        fmt.head_size,
        fmt.unit_size,
        fmt.key_group_size,
        fmt.record_bytes,
    )
    return args, fmt.bytes_per_token


def _rows(
    x: torch.Tensor,
    num_heads: int,
    head_size: int,
    dtypes: Mapping[torch.dtype, tuple[int, int]] = _DTYPES,
) -> tuple[int, int, int, int]:
    """Return address, dtype and byte strides of ``[num_tokens, num_heads, head_size]``."""
    _, heads, width = x.shape
    row_stride, head_stride, stride = x.stride()
    if heads != num_heads or width != head_size or stride != 1 or not x.is_cpu:
        raise ValueError(
            f"Expected [num_tokens, {num_heads}, {head_size}] on the CPU with a contiguous last "
            f"dimension, got shape {tuple(x.shape)}, strides {x.stride()} on {x.device}."
        )
    dtype, item = _dtype(x, dtypes)
    return x.data_ptr(), dtype, row_stride * item, head_stride * item


def _table(table: torch.Tensor, num_requests: int) -> tuple[int, int]:
    """Return address and row stride of a block table."""
    row_stride, stride = table.stride()
    if table.dtype != torch.int32 or stride != 1 or table.shape[0] < num_requests:
        raise ValueError("Block tables must be int32 with one contiguous row per request.")
    return table.data_ptr(), row_stride


def _dtype(x: torch.Tensor, dtypes: Mapping[torch.dtype, tuple[int, int]]) -> tuple[int, int]:
    """Return the code of a dtype and its bytes."""
    try:
        return dtypes[x.dtype]
    except KeyError:
        raise TypeError(f"The CPU kernels do not support {x.dtype} here.") from None


def _is_64(x: torch.Tensor) -> bool:
    if x.dtype == torch.int64:
        return True
    if x.dtype != torch.int32:
        raise TypeError(f"Positions must be int32 or int64, not {x.dtype}.")
    return False


def _check_out(query: torch.Tensor, out: torch.Tensor) -> None:
    if out.shape[0] < query.shape[0]:
        raise ValueError(f"out has {out.shape[0]} rows, query {query.shape[0]}.")


def _per_head(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return sinks or slopes as the kernels read them."""
    return None if x is None else x.to(torch.float32).contiguous()
