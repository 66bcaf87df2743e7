"""The oracle: every operation of the cache in plain PyTorch, fp32 arithmetic, no tricks.

The rule (D = head size, U = unit size): a query at position q reads positions
``>= floor(q / U) * U`` at full precision, from the residual ring or from the keys and values
just computed, and everything before from sealed units. It depends on absolute positions alone.

One step first seals, for all requests of the batch, every unit that it completes, because a
request may read, through the prefix cache, a unit that another one completes in the same step.
Then, for requests with few new tokens, :func:`write_ring` and :func:`decode`, which reads them
from the ring; for the others :func:`prefill`, which reads the new tokens directly and the open
unit from the ring, and :func:`write_ring` only after that, since it may overwrite that unit.

Faster kernels have the same names and signatures as the public functions here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvq_kernels.formats import CUT_STEPS, CUT_TOKENS, MAX_CUT, Format, hadamard
from kvq_kernels.interface import AttentionParams, Batch, LayerCache

FP16_MAX = 65504.0


# --- records ---------------------------------------------------------------------------------


def pack_records(
    key: torch.Tensor, value: torch.Tensor, fmt: Format, first: torch.Tensor | bool = False
) -> torch.Tensor:
    """Quantise whole units into records.

    Elements beyond fp16's range saturate. A NaN or infinite element takes no part in choosing
    scales, so that it costs no other element its precision; it is stored as the nearest value
    its group can represent (NaN as if it were 0). Rotation mixes the channels of one token,
    so there the token's other channels lose precision too, but no other token does.

    Args:
        key: ``[..., unit_size, head_size]``, any float dtype.
        value: as `key`.
        fmt: the format.
        first: bool, or bool tensor ``[...]``: whether the unit is the first of its sequence.

    Returns:
        uint8 ``[..., record_bytes]``.

    """
    lead = key.shape[:-2]
    first = torch.as_tensor(first, device=key.device).expand(lead)
    k, k_finite = _finite(key)
    v, v_finite = _finite(value)
    if fmt.rotate_values:
        v = (v @ hadamard(fmt.head_size, v.device)).clamp(-FP16_MAX, FP16_MAX)
        v_finite = torch.ones_like(v_finite)

    in_range = k_finite.clone()
    if fmt.anchor:
        in_range[..., 0, :] &= ~first[..., None]

    groups = (fmt.num_blobs, fmt.key_group_size)
    k_codes, k_meta, k_cuts = _quantise_keys(
        k.unflatten(-2, groups), in_range.unflatten(-2, groups), fmt
    )
    v_codes, v_meta = _quantise(
        v.unflatten(-2, groups), v_finite.unflatten(-2, groups), fmt.value_bits, dim=-1
    )
    blobs = torch.cat(
        [
            _pack_codes(k_codes, fmt.key_bits).flatten(-2),
            _pack_codes(v_codes.mT, fmt.value_bits).flatten(-2),
            _as_bytes(k_meta),
            k_cuts.flatten(-2),
            _as_bytes(v_meta),
        ],
        dim=-1,
    )
    record = blobs.flatten(-2)
    if fmt.anchor:
        codes, meta = _quantise(k[..., :1, :], k_finite[..., :1, :], 8, dim=-1)
        flag = first[..., None].to(torch.uint8)
        record = torch.cat([record, codes.flatten(-2), _as_bytes(meta), flag], dim=-1)
    return torch.nn.functional.pad(record, (0, fmt.record_bytes - record.shape[-1]))


def unpack_records(records: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantise records.

    Args:
        records: uint8 ``[..., record_bytes]``.
        fmt: the format.

    Returns:
        key and value, fp32 ``[..., unit_size, head_size]``; values are rotated back.

    """
    d, g = fmt.head_size, fmt.key_group_size
    blobs = records[..., : fmt.num_blobs * fmt.blob_bytes].unflatten(-1, (fmt.num_blobs, -1))

    def section(offset: int, size: int) -> torch.Tensor:
        return blobs[..., offset : offset + size]

    k_codes = section(fmt.key_codes_offset, fmt.key_codes_bytes).unflatten(-1, (g, -1))
    v_codes = section(fmt.value_codes_offset, fmt.value_codes_bytes).unflatten(-1, (d, -1))
    k_meta = _as_meta(section(fmt.key_meta_offset, fmt.key_meta_bytes))
    v_meta = _as_meta(section(fmt.value_meta_offset, fmt.value_meta_bytes))
    k_cuts = section(fmt.key_cuts_offset, fmt.key_cuts_bytes).unflatten(-1, (fmt.num_cuts, d))
    k = _dequantise_keys(_unpack_codes(k_codes, fmt.key_bits), k_meta, k_cuts)
    v = _dequantise(_unpack_codes(v_codes, fmt.value_bits).mT, v_meta[..., :, None, :])
    k, v = k.flatten(-3, -2), v.flatten(-3, -2)
    if fmt.anchor:
        codes = records[..., fmt.anchor_codes_offset : fmt.anchor_codes_offset + d]
        meta = _as_meta(records[..., fmt.anchor_meta_offset : fmt.anchor_meta_offset + 4])
        first = records[..., fmt.anchor_flag_offset, None] == 1
        k[..., 0, :] = torch.where(first, _dequantise(codes, meta), k[..., 0, :])
    if fmt.rotate_values:
        v = v @ hadamard(d, v.device).mT
    return k, v


def fake_quantise(
    key: torch.Tensor, value: torch.Tensor, fmt: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a sequence looks like after all its complete units were sealed.

    Args:
        key: ``[num_tokens, num_kv_heads, head_size]``, position 0 first.
        value: as `key`.
        fmt: the format.

    Returns:
        key and value, fp32, same shape; the incomplete last unit is unchanged.

    """
    sealed = key.shape[0] // fmt.unit_size * fmt.unit_size
    if sealed == 0:
        return key.float(), value.float()
    units = (sealed // fmt.unit_size, fmt.unit_size)
    k = key[:sealed].unflatten(0, units).transpose(1, 2)  # [units, heads, unit_size, head_size]
    v = value[:sealed].unflatten(0, units).transpose(1, 2)
    first = torch.arange(units[0], device=key.device)[:, None] == 0
    k, v = unpack_records(pack_records(k, v, fmt, first), fmt)
    k, v = k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)
    return torch.cat([k, key[sealed:].float()]), torch.cat([v, value[sealed:].float()])


def _finite(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in fp32, limited to fp16's range, and which of its elements were finite."""
    finite = x.isfinite()
    x = x.float().nan_to_num(nan=0.0, posinf=FP16_MAX, neginf=-FP16_MAX)
    return x.clamp(-FP16_MAX, FP16_MAX), finite


def cut_meta(meta: torch.Tensor, cuts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero of the parts of 4-bit key groups, whose ranges are cut.

    A key group has one scale and zero per channel, and every 32 tokens of it, a part, two 4-bit
    numbers: in units of 1/32 of the group's range, what the part leaves out at its low and at its
    high end. So a part's range is nearly its own, for a quarter of the bytes.

    Args:
        meta: fp16 scale and zero of groups, ``[..., head_size, 2]``.
        cuts: uint8 ``[..., num_cuts, head_size]``, low end in the low nibble.

    Returns:
        scale and zero, fp32 ``[..., num_cuts, head_size]``. All but the addition is exact.

    """
    low, high = (cuts & 15).float(), (cuts >> 4).float()
    scale, zero = meta[..., None, :, 0].float(), meta[..., None, :, 1].float()
    return scale * ((CUT_STEPS - low - high) / CUT_STEPS), zero + scale * (low * 15 / CUT_STEPS)


def _quantise_keys(
    x: torch.Tensor, in_range: torch.Tensor, fmt: Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise key groups, fp32 ``[..., key_group_size, head_size]``.

    The cuts are rounded to nearest: what one clips, at most 1/64 of the group's range, is less
    than what a finer step brings.

    Returns:
        codes, uint8, shape of `x`; meta, fp16 ``[..., head_size, 2]``; cuts, uint8
        ``[..., num_cuts, head_size]``.

    """
    if not fmt.num_cuts:
        codes, meta = _quantise(x, in_range, fmt.key_bits, dim=-2)
        return codes, meta, codes[..., :0, :]
    levels = 2**fmt.key_bits - 1
    scale, zero = _choose_meta(x, in_range, levels, dim=-2)
    inverse = _inverse(scale)

    parts = (fmt.num_cuts, CUT_TOKENS)
    x, in_range = x.unflatten(-2, parts), in_range.unflatten(-2, parts)
    lo, hi = _range(x, in_range, dim=-2)
    zeros, inverses = zero.float()[..., None, :], inverse[..., None, :]
    low = (lo - zeros) * inverses * (CUT_STEPS / levels)
    high = (levels - (hi - zeros) * inverses) * (CUT_STEPS / levels)
    ends = torch.stack([low, high]).round().clamp(0, MAX_CUT).masked_fill(lo > hi, 0)
    cuts = (ends[0].to(torch.uint8) | ends[1].to(torch.uint8) << 4).squeeze(-2)

    meta = torch.stack([scale, zero], dim=-1).squeeze(-3)
    part_scale, part_zero = (m.unsqueeze(-2) for m in cut_meta(meta, cuts))
    codes = _encode(x, part_zero, _inverse(part_scale), levels)
    return codes.flatten(-3, -2), meta, cuts


def _dequantise_keys(codes: torch.Tensor, meta: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
    """Undo :func:`_quantise_keys`; fp32."""
    if not cuts.shape[-2]:
        return _dequantise(codes, meta[..., None, :, :])
    scale, zero = (m.unsqueeze(-2) for m in cut_meta(meta, cuts))
    return (codes.unflatten(-2, (cuts.shape[-2], -1)).float() * scale + zero).flatten(-3, -2)


def _quantise(
    x: torch.Tensor, in_range: torch.Tensor, bits: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Asymmetric quantisation of fp32 `x` with one scale and zero along `dim`.

    Only elements with `in_range` choose the range; the others saturate.

    Returns:
        codes, uint8, shape of `x`; meta, fp16, shape of `x` without `dim`, plus ``[2]``.

    """
    levels = 2**bits - 1
    scale, zero = _choose_meta(x, in_range, levels, dim)
    codes = _encode(x, zero.float(), _inverse(scale), levels)
    return codes, torch.stack([scale, zero], dim=-1).squeeze(dim - 1)


def _choose_meta(
    x: torch.Tensor, in_range: torch.Tensor, levels: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero, fp16, that span the elements with `in_range` along `dim`."""
    lo, hi = _range(x, in_range, dim)
    empty = lo > hi
    lo, hi = lo.masked_fill(empty, 0.0), hi.masked_fill(empty, 0.0)
    return ((hi - lo) / levels).half(), lo.half()


def _range(x: torch.Tensor, in_range: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and greatest element with `in_range`; infinity and -infinity if none is."""
    lo = x.masked_fill(~in_range, torch.inf).amin(dim, keepdim=True)
    hi = x.masked_fill(~in_range, -torch.inf).amax(dim, keepdim=True)
    return lo, hi


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale in fp32, 0 where it is 0: there, every element is the zero."""
    return torch.where(scale > 0, 1.0 / scale.float(), 0.0)


def _encode(
    x: torch.Tensor, zero: torch.Tensor, inverse: torch.Tensor, levels: int
) -> torch.Tensor:
    """Return uint8 codes with the *rounded* scale and zero, so that errors do not add up."""
    return ((x - zero) * inverse).round().clamp(0, levels).to(torch.uint8)


def _dequantise(codes: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """Return codes * scale + zero in fp32; `meta` ``[..., 2]`` broadcasts against `codes`."""
    return codes.float() * meta[..., 0].float() + meta[..., 1].float()


def _pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack along the last dimension: at 4 bits, byte i holds codes i and i + n/2."""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4


def _unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    return packed if bits == 8 else torch.cat([packed & 15, packed >> 4], dim=-1)


def _as_bytes(meta: torch.Tensor) -> torch.Tensor:
    """View fp16 ``[..., n, 2]`` as bytes ``[..., n * 4]``."""
    return meta.contiguous().view(torch.uint8).flatten(-2)


def _as_meta(section: torch.Tensor) -> torch.Tensor:
    """Copy bytes ``[..., n * 4]`` to fp16 ``[..., n, 2]``."""
    copy = section.clone(memory_format=torch.contiguous_format)
    return copy.view(torch.float16).unflatten(-1, (-1, 2))


# --- paged cache -----------------------------------------------------------------------------


def seal(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
    """Seal every unit that this step's tokens complete.

    Reads the unit's earlier tokens from the ring, so it must run before :func:`write_ring`
    overwrites them. Sealing a unit again is harmless.

    Args:
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``.
        value: as `key`.
        cache: the layer's cache; its pages are written.
        batch: which tokens belong to which request.

    """
    fmt = cache.fmt
    for request, rows, start, end in requests_of(batch):
        first_unit, end_unit = start // fmt.unit_size, end // fmt.unit_size
        if first_unit == end_unit:
            continue
        k, v = _open_unit(cache, request, start)
        k = torch.cat([k, key[rows]])[: (end_unit - first_unit) * fmt.unit_size]
        v = torch.cat([v, value[rows]])[: (end_unit - first_unit) * fmt.unit_size]
        k = k.unflatten(0, (-1, fmt.unit_size)).transpose(1, 2)
        v = v.unflatten(0, (-1, fmt.unit_size)).transpose(1, 2)
        units = torch.arange(first_unit, end_unit, device=key.device)
        records = pack_records(k, v, fmt, units[:, None] == 0)
        blocks, slots = _unit_slots(cache, request, units)
        _records(cache)[blocks, :, slots] = records


def write_ring(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
    """Write this step's tokens to the ring, at slot ``position % ring_capacity``.

    Of a request with more new tokens than the ring holds, only the newest are written.

    Args:
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``.
        value: as `key`.
        cache: the layer's cache; its ring is written.
        batch: which tokens belong to which request.

    """
    for request, rows, start, end in requests_of(batch):
        written = max(start, end - cache.ring_capacity)
        positions = torch.arange(written, end, device=key.device)
        blocks, slots = _ring_slots(cache, request, positions)
        fresh = slice(rows.start + written - start, rows.stop)
        cache.ring[blocks, :, slots] = torch.cat([key[fresh], value[fresh]], dim=-1)


def store(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
    """:func:`seal`, then :func:`write_ring`, for requests that :func:`decode` can serve.

    With no more than ``1 + ring_capacity - unit_size`` new tokens per request, no token written
    takes the slot of one that sealing reads, so that one pass can do both.

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
    """Attend for requests whose new tokens are all in the ring already.

    That holds for up to ``1 + ring_capacity - unit_size`` new tokens per request: one token and
    the speculative ones.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        cache: the layer's cache, after :func:`store`, or :func:`seal` and :func:`write_ring`.
        batch: which tokens belong to which request.
        params: scale and masking.
        out: written, shape of `query`, any float dtype.

    """
    for request, rows, start, end in requests_of(batch):
        open_start = start // cache.fmt.unit_size * cache.fmt.unit_size
        k, v = _ring_tokens(cache, request, open_start, end)
        _attend(query, k, v, cache, request, rows, start, params, out)


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    batch: Batch,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attend for requests with any number of new tokens.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        key: this step's keys, ``[num_tokens, num_kv_heads, head_size]``.
        value: as `key`.
        cache: the layer's cache, after :func:`seal` and before :func:`write_ring`.
        batch: which tokens belong to which request.
        params: scale and masking.
        out: written, shape of `query`, any float dtype.

    """
    for request, rows, start, _ in requests_of(batch):
        k, v = _open_unit(cache, request, start)
        k, v = torch.cat([k, key[rows]]), torch.cat([v, value[rows]])
        _attend(query, k, v, cache, request, rows, start, params, out)


def prepare(fmt: Format, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Create what the kernels keep on `device` for layers of `fmt`, and return it: nothing, here.

    It comes once per layer before the first step: tensors made by a step that is captured into a
    CUDA graph would belong to the graph. Whoever takes the device's memory away for a while has
    to put the tensors back in place.
    """
    return ()


def workspace_bytes(
    fmt: Format,
    max_num_requests: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    max_model_len: int,
    device: torch.device,
) -> int:
    """Return the device memory that one call of :func:`decode` allocates at most, in bytes.

    The oracle is not meant for places where that matters, and says 0.

    Args:
        fmt: format of the pages.
        max_num_requests: requests in a batch.
        max_query_len: new tokens of a request.
        num_heads: query heads.
        num_kv_heads: kv heads.
        max_model_len: tokens that a row of the block table covers.
        device: where it runs.

    """
    return 0


def requests_of(batch: Batch) -> Iterator[tuple[int, slice, int, int]]:
    """Yield (request, rows of its new tokens, first position, end position)."""
    starts, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for request, end in enumerate(lens):
        rows = slice(starts[request], starts[request + 1])
        if rows.stop > rows.start and end > 0:
            yield request, rows, end - (rows.stop - rows.start), end


def _records(cache: LayerCache) -> torch.Tensor:
    """View the pages as records, ``[num_blocks, num_kv_heads, units_per_block, record_bytes]``."""
    num_blocks, num_kv_heads, block_size, _ = cache.pages.shape
    units_per_block = block_size // cache.fmt.unit_size
    return cache.pages.view(num_blocks, num_kv_heads, units_per_block, cache.fmt.record_bytes)


def _unit_slots(
    cache: LayerCache, request: int, units: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block and the record index in it of each unit of a request."""
    units_per_block = cache.pages.shape[2] // cache.fmt.unit_size
    return cache.block_table[request, units // units_per_block].long(), units % units_per_block


def _ring_slots(
    cache: LayerCache, request: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ring block and the slot in it of each position of a request."""
    slots, block_size = positions % cache.ring_capacity, cache.ring.shape[2]
    return cache.ring_table[request, slots // block_size].long(), slots % block_size


def _ring_tokens(
    cache: LayerCache, request: int, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read positions [start, end) from the ring: key, value ``[n, num_kv_heads, head_size]``."""
    positions = torch.arange(start, end, device=cache.ring.device)
    blocks, slots = _ring_slots(cache, request, positions)
    key, value = cache.ring[blocks, :, slots].chunk(2, dim=-1)
    return key, value


def _open_unit(cache: LayerCache, request: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read from the ring what precedes position `start` in its unit."""
    return _ring_tokens(cache, request, start // cache.fmt.unit_size * cache.fmt.unit_size, start)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    request: int,
    rows: slice,
    start: int,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Attend for one request, a unit of queries at a time.

    `key` and `value` hold the full-precision tokens from the start of the unit of `start` on.
    """
    unit_size = cache.fmt.unit_size
    open_start = start // unit_size * unit_size
    end = start + rows.stop - rows.start
    for unit_start in range(open_start, end, unit_size):
        first, last = max(start, unit_start), min(end, unit_start + unit_size)
        lowest = params.lowest_position(first) // unit_size  # the first unit in the window
        k, v = _sealed_tokens(cache, request, lowest, unit_start // unit_size)
        fresh = slice(unit_start - open_start, last - open_start)
        k, v = torch.cat([k, key[fresh].float()]), torch.cat([v, value[fresh].float()])
        chunk = slice(rows.start + first - start, rows.start + last - start)
        out[chunk] = attention(
            query[chunk], k, v, params, query_start=first, key_start=last - k.shape[0]
        ).to(out.dtype)


def _sealed_tokens(
    cache: LayerCache, request: int, first_unit: int, end_unit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantise units [first_unit, end_unit) of a request, ``[n, num_kv_heads, head_size]``."""
    units = torch.arange(first_unit, end_unit, device=cache.pages.device)
    blocks, slots = _unit_slots(cache, request, units)
    k, v = unpack_records(_records(cache)[blocks, :, slots], cache.fmt)
    return k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: AttentionParams,
    query_start: int,
    key_start: int,
) -> torch.Tensor:
    """Dense causal attention of one sequence in fp32.

    Args:
        query: ``[num_queries, num_heads, head_size]``.
        key: ``[num_keys, num_kv_heads, head_size]``.
        value: as `key`.
        params: scale and masking.
        query_start: position of the first query.
        key_start: position of the first key.

    Returns:
        fp32 ``[num_queries, num_heads, head_size]``.

    """
    num_queries, num_heads, head_size = query.shape
    num_keys, num_kv_heads, _ = key.shape
    device = query.device
    q_pos = torch.arange(query_start, query_start + num_queries, device=device)[:, None]
    k_pos = torch.arange(key_start, key_start + num_keys, device=device)[None]

    q = query.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_size)
    logits = torch.einsum("qhgd,khd->hgqk", q, key.float()) * params.scale
    if params.soft_cap:
        logits = params.soft_cap * torch.tanh(logits / params.soft_cap)
    if params.alibi_slopes is not None:
        slopes = params.alibi_slopes.float().view(num_kv_heads, -1, 1, 1)
        logits = logits + slopes * (k_pos - q_pos)
    visible = k_pos <= q_pos
    if params.sliding_window is not None:
        visible &= k_pos > q_pos - params.sliding_window
    logits = logits.masked_fill(~visible, -torch.inf)
    if params.sinks is not None:  # one more logit per head, with no value behind it
        sinks = params.sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_queries, 1)
        weights = torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, value.float()).reshape(query.shape)
