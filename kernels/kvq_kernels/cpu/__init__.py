"""C++ kernels for CPUs, with the signatures of :mod:`kvq_kernels.reference`.

They are compiled when the package is installed from source (see :mod:`.build`) into one shared
library, loaded here with ctypes on first use. It holds every kernel for AVX-512 (with VNNI),
AVX2 and anything else, and picks by what the CPU supports. For debugging, the environment
variable ``KVQ_CPU_ISA`` (``portable``, ``avx2``, ``avx512``) overrides the choice, and
``KVQ_CPU_LIBRARY`` is the path of another build of the library.

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

__all__ = [
    "decode",
    "is_available",
    "isa",
    "prefill",
    "seal",
    "select_isa",
    "why_unavailable",
    "write_ring",
]

_ABI_VERSION = 1  # KVQ_ABI_VERSION in abi.h
_ARGS = struct.Struct("=8q 14q 5q 3q 4q 4q 4q 4q 2d 3q")  # KvqArgs in abi.h
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_OUT_DTYPES = {**_DTYPES, torch.float64: 3}
_NO_ROWS = (0, 0, 0, 0)


class _Unavailable(Exception):
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
    """Return the instruction set in use: ``portable``, ``avx2`` or ``avx512``."""
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
        for name in ("kvq_seal", "kvq_write_ring", "kvq_decode", "kvq_prefill"):
            kernel = getattr(library, name)
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
    args = _pack(
        cache, batch, query.shape[1], query, key, value, out, params, sinks, slopes
    )
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
    """Return a ``KvqArgs``. It holds addresses: the tensors must outlive the call."""
    fmt, pages, ring = cache.fmt, cache.pages, cache.ring
    starts, lens = batch.query_start_loc, batch.seq_lens
    block_table, ring_table = cache.block_table, cache.ring_table
    num_kv_heads, num_requests, d = pages.shape[1], lens.shape[0], fmt.head_size
    units_per_block = pages.shape[2] // fmt.unit_size

    if pages.dtype != torch.uint8 or not pages.is_cpu or not pages[0].is_contiguous():
        raise ValueError("pages must be a uint8 tensor on the CPU, contiguous within a block.")
    if pages.shape[3] != fmt.bytes_per_token or pages.shape[2] % fmt.unit_size:
        raise ValueError(f"pages of shape {tuple(pages.shape)} do not hold units of {fmt}.")
    if ring.shape[1] != num_kv_heads or ring.shape[3] != 2 * d or ring.stride(3) != 1:
        raise ValueError(f"A ring of shape {tuple(ring.shape)} does not match the pages.")
    if cache.ring_capacity % ring.shape[2] or cache.ring_capacity < fmt.unit_size:
        raise ValueError(f"ring_capacity {cache.ring_capacity} does not suit the ring.")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} kv heads.")
    for table in (block_table, ring_table):
        if table.dtype != torch.int32 or table.stride(-1) != 1 or len(table) < num_requests:
            raise ValueError("Block tables must be int32 with one contiguous row per request.")
    if len(starts) <= num_requests or not (starts.is_contiguous() and lens.is_contiguous()):
        raise ValueError("query_start_loc must be contiguous and one longer than seq_lens.")

    item = ring.element_size()
    ring_strides = ring.stride()
    return _ARGS.pack(
        *_format_args(fmt),
        pages.data_ptr(),
        pages.stride(0),
        units_per_block,
        block_table.data_ptr(),
        block_table.stride(0),
        ring.data_ptr(),
        _dtype_code(ring),
        *(stride * item for stride in ring_strides[:3]),
        ring.shape[2],
        cache.ring_capacity,
        ring_table.data_ptr(),
        ring_table.stride(0),
        num_requests,
        starts.data_ptr(),
        _is_64(starts),
        lens.data_ptr(),
        _is_64(lens),
        num_heads,
        num_kv_heads,
        torch.get_num_threads(),
        *(_NO_ROWS if query is None else _rows(query, num_heads, d)),
        *(_NO_ROWS if key is None else _rows(key, num_kv_heads, d)),
        *(_NO_ROWS if value is None else _rows(value, num_kv_heads, d)),
        *(_NO_ROWS if out is None else _rows(out, num_heads, d, _OUT_DTYPES)),
        1.0 if params is None else params.scale,
        0.0 if params is None else params.soft_cap or 0.0,
        0 if params is None else params.sliding_window or 0,
        0 if sinks is None else sinks.data_ptr(),
        0 if slopes is None else slopes.data_ptr(),
    )


@lru_cache(maxsize=64)
def _format_args(fmt: Format) -> tuple[int, ...]:
    return (
        fmt.key_bits,
        fmt.value_bits,
        fmt.anchor,
        fmt.rotate_values,
        fmt.head_size,
        fmt.unit_size,
        fmt.key_group_size,
        fmt.record_bytes,
    )


def _rows(
    x: torch.Tensor, num_heads: int, head_size: int, dtypes: Mapping[torch.dtype, int] = _DTYPES
) -> tuple[int, int, int, int]:
    """Return address, dtype and byte strides of ``[num_tokens, num_heads, head_size]``."""
    row_stride, head_stride, stride = x.stride()
    if x.shape[1] != num_heads or x.shape[2] != head_size or stride != 1 or not x.is_cpu:
        raise ValueError(
            f"Expected [num_tokens, {num_heads}, {head_size}] on the CPU with a contiguous last "
            f"dimension, got shape {tuple(x.shape)}, strides {x.stride()} on {x.device}."
        )
    item = x.element_size()
    return x.data_ptr(), _dtype_code(x, dtypes), row_stride * item, head_stride * item


def _dtype_code(x: torch.Tensor, dtypes: Mapping[torch.dtype, int] = _DTYPES) -> int:
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
