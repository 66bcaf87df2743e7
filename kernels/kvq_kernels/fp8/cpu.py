"""C++ kernels of the fp8 formats for CPUs, with the signatures of :mod:`.reference`.

They are part of the library that :mod:`kvq_kernels.cpu` loads; what is said there about tensors
and threads holds here.
"""

from __future__ import annotations

import torch

from kvq_kernels import cpu
from kvq_kernels.cpu import _NO_ROWS, _OUT_DTYPES, _check_out, _is_64, _per_head, _rows, _table
from kvq_kernels.fp8.formats import Fp8Cache
from kvq_kernels.interface import AttentionParams, Batch

_TYPES = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}  # KvqFp8 in abi.h


def write(key: torch.Tensor, value: torch.Tensor, cache: Fp8Cache, batch: Batch) -> None:
    """Quantise this step's tokens into the pages, as :func:`.reference.write`, to the bit.

    Args:
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``.
        value: as `key`.
        cache: the layer's cache; its pages are written.
        batch: which tokens belong to which request.

    """
    args = _pack(cache, batch, cache.pages.shape[1], key=key, value=value)
    cpu._library().kvq_fp8_write(args)


def attend(
    query: torch.Tensor,
    cache: Fp8Cache,
    batch: Batch,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attend for requests with any number of new tokens, as :func:`.reference.attend`.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        cache: the layer's cache, after :func:`write`.
        batch: which tokens belong to which request.
        params: scale and masking.
        out: written, shape of `query`; fp64 is allowed too.

    """
    _check_out(query, out)
    sinks, slopes = _per_head(params.sinks), _per_head(params.alibi_slopes)
    args = _pack(
        cache, batch, query.shape[1], query, out=out, params=params, sinks=sinks, slopes=slopes
    )
    cpu._library().kvq_fp8_attend(args)


decode = prefill = attend


def _pack(
    cache: Fp8Cache,
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
    fmt, pages = cache.fmt, cache.pages
    head_size, row_bytes = fmt.head_size, fmt.bytes_per_token
    _, num_kv_heads, block_size, page_width = pages.shape
    block_stride, head_stride, token_stride, _ = pages.stride()
    if (
        page_width != row_bytes
        or pages.dtype != torch.uint8
        or not pages.is_cpu
        or token_stride != page_width
        or (head_stride != block_size * page_width and num_kv_heads > 1)
    ):
        raise ValueError(
            f"pages must be uint8 [num_blocks, num_kv_heads, block_size, {row_bytes}] on the CPU, "
            f"contiguous within a block, not {pages.dtype} {tuple(pages.shape)}."
        )
    for scale in (cache.key_scale, cache.value_scale):
        if scale.shape != (num_kv_heads,) or scale.dtype != torch.float32 or not scale.is_cpu:
            raise ValueError(
                f"scales must be fp32 [{num_kv_heads}] on the CPU, not {scale.dtype} "
                f"{tuple(scale.shape)}."
            )
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} kv heads.")
    starts, lens = batch.query_start_loc, batch.seq_lens
    (num_requests,) = lens.shape
    if starts.shape[0] <= num_requests or not (starts.is_contiguous() and lens.is_contiguous()):
        raise ValueError("query_start_loc must be contiguous and one longer than seq_lens.")
    return cpu._ARGS.pack(
        *(8, 8, 0, 0),
        *(head_size, block_size, block_size, row_bytes),
        *(pages.data_ptr(), block_stride, 1),
        *_table(cache.block_table, num_requests),
        *(0,) * 9,  # no ring
        num_requests,
        *(starts.data_ptr(), _is_64(starts)),
        *(lens.data_ptr(), _is_64(lens)),
        *(num_heads, num_kv_heads, torch.get_num_threads()),
        *(_NO_ROWS if query is None else _rows(query, num_heads, head_size)),
        *(_NO_ROWS if key is None else _rows(key, num_kv_heads, head_size)),
        *(_NO_ROWS if value is None else _rows(value, num_kv_heads, head_size)),
        *(_NO_ROWS if out is None else _rows(out, num_heads, head_size, _OUT_DTYPES)),
        1.0 if params is None else params.scale,
        0.0 if params is None else params.soft_cap or 0.0,
        0 if params is None else params.sliding_window or 0,
        0 if sinks is None else sinks.data_ptr(),
        0 if slopes is None else slopes.data_ptr(),
        *(_TYPES[fmt.dtype], cache.key_scale.data_ptr(), cache.value_scale.data_ptr()),
    )
