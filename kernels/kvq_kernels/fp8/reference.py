"""The oracle of the fp8 formats, in plain PyTorch and fp32 arithmetic.

One step first writes the new tokens of all requests, then attends: every query, also one of the
same step, reads what was written. So the output depends on positions alone, however a prompt is
cut into steps.

Faster kernels have the same names and signatures as the public functions here. They tell
:func:`decode` (few new tokens per request) from :func:`prefill`; here both are :func:`attend`.
"""

from __future__ import annotations

import torch

from kvq_kernels.fp8.formats import Fp8Cache, Fp8Format
from kvq_kernels.interface import AttentionParams, Batch
from kvq_kernels.reference import attention, requests_of


def quantise(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Return the codes of `x`: divided by the scale, rounded to nearest even, saturating.

    NaN becomes 0, as in the other formats: it must not outlive its own step in a page.

    Args:
        x: ``[..., num_kv_heads, head_size]``, any float dtype.
        scale: fp32 ``[num_kv_heads]``.
        fmt: the format.

    Returns:
        uint8, shape of `x`.

    """
    scaled = (x.float() / scale[:, None]).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    return scaled.clamp(-fmt.largest, fmt.largest).to(fmt.dtype).view(torch.uint8)


def dequantise(codes: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Return ``code * scale`` in fp32.

    Args:
        codes: uint8 ``[..., num_kv_heads, head_size]``.
        scale: fp32 ``[num_kv_heads]``.
        fmt: the format.

    """
    return codes.contiguous().view(fmt.dtype).float() * scale[:, None]


def fake_quantise(
    key: torch.Tensor,
    value: torch.Tensor,
    key_scale: torch.Tensor,
    value_scale: torch.Tensor,
    fmt: Fp8Format,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what queries see of these keys and values, fp32, same shapes."""
    return (
        dequantise(quantise(key, key_scale, fmt), key_scale, fmt),
        dequantise(quantise(value, value_scale, fmt), value_scale, fmt),
    )


def write(key: torch.Tensor, value: torch.Tensor, cache: Fp8Cache, batch: Batch) -> None:
    """Quantise this step's tokens into the pages.

    Args:
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``.
        value: as `key`.
        cache: the layer's cache; its pages are written.
        batch: which tokens belong to which request.

    """
    for request, rows, start, end in requests_of(batch):
        blocks, slots = _slots(cache, request, start, end)
        codes = torch.cat(
            [
                quantise(key[rows], cache.key_scale, cache.fmt),
                quantise(value[rows], cache.value_scale, cache.fmt),
            ],
            dim=-1,
        )
        cache.pages[blocks, :, slots] = codes


def attend(
    query: torch.Tensor,
    cache: Fp8Cache,
    batch: Batch,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attend for requests with any number of new tokens.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        cache: the layer's cache, after :func:`write`.
        batch: which tokens belong to which request.
        params: scale and masking.
        out: written, shape of `query`, any float dtype.

    """
    for request, rows, start, end in requests_of(batch):
        lowest = params.lowest_position(start)
        blocks, slots = _slots(cache, request, lowest, end)
        key, value = cache.pages[blocks, :, slots].chunk(2, dim=-1)
        out[rows] = attention(
            query[rows],
            dequantise(key, cache.key_scale, cache.fmt),
            dequantise(value, cache.value_scale, cache.fmt),
            params,
            query_start=start,
            key_start=lowest,
        ).to(out.dtype)


decode = prefill = attend


def _slots(
    cache: Fp8Cache, request: int, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block and the slot in it of positions [start, end) of a request."""
    positions = torch.arange(start, end, device=cache.pages.device)
    block_size = cache.pages.shape[2]
    return cache.block_table[request, positions // block_size].long(), positions % block_size
