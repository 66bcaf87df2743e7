"""Seal and attend once, and compare with dense attention: do these kernels work here?

``python -m kvq_kernels.selftest`` tries all kernels on all devices and prints JSON.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

import torch

from kvq_kernels import SCHEMES, AttentionParams, Batch, Format, LayerCache, fp8, reference
from kvq_kernels.dispatch import ENV_VAR, Kernels, kernel_names, select_kernels
from kvq_kernels.fp8 import reference as fp8_reference

TOLERANCE = 5e-3
"""Of the largest output: kernels may round to 16 bit what the oracle keeps in 32."""

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, UNIT_SIZE = 8, 2, 128, 128
PROMPT = 2 * UNIT_SIZE - 3
"""The decoded tokens complete the second unit and begin the third."""
DECODED = 5


@dataclass(frozen=True)
class Result:
    """What one set of kernels did on one device.

    Attributes:
        kernels: name, as in ``KVQ_KERNELS``.
        device: such as "cpu".
        unavailable: why they did not run, or None.
        error: largest deviation of an output from the oracle's, over the largest output.
        failure: what went wrong while they ran, or None.

    """

    kernels: str
    device: str
    unavailable: str | None = None
    error: float | None = None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= TOLERANCE


def deviation(kernels: Kernels, device: torch.device, name: str) -> float:
    """Run a prompt and some decoded tokens of one request; return the relative error.

    Args:
        kernels: under test.
        device: where the tensors are.
        name: of the format.

    """
    fmt = Format.create(name, HEAD_SIZE, UNIT_SIZE)
    generator = torch.Generator().manual_seed(0)
    total = PROMPT + DECODED

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(total, heads, HEAD_SIZE, generator=generator).to(device)

    query, key, value = normal(NUM_HEADS), normal(NUM_KV_HEADS), normal(NUM_KV_HEADS)
    params = AttentionParams(scale=HEAD_SIZE**-0.5)
    cache = _empty_cache(fmt, total, device)
    out = torch.empty_like(query)
    _prefill(kernels, query[:PROMPT], key[:PROMPT], value[:PROMPT], cache, params, out[:PROMPT])
    for position in range(PROMPT, total):
        row = slice(position, position + 1)
        batch = _batch(1, position + 1, device)
        kernels.seal(key[row], value[row], cache, batch)
        kernels.write_ring(key[row], value[row], cache, batch)
        kernels.decode(query[row], cache, batch, params, out[row])
    expected = _oracle(query, key, value, fmt, params)
    return float((out - expected).abs().max() / expected.abs().max())


def fp8_deviation(kernels: fp8.Fp8Kernels, device: torch.device, name: str) -> float:
    """Write and attend to a prompt, then to one more token; return the relative error.

    Args:
        kernels: under test, of the fp8 formats.
        device: where the tensors are.
        name: of the format.

    """
    generator = torch.Generator().manual_seed(0)
    fmt = fp8.Fp8Format(name, HEAD_SIZE)

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(PROMPT + 1, heads, HEAD_SIZE, generator=generator).to(device)

    query, key, value = normal(NUM_HEADS), normal(NUM_KV_HEADS), normal(NUM_KV_HEADS)
    params = AttentionParams(scale=HEAD_SIZE**-0.5)
    scales = torch.linspace(0.01, 0.02, NUM_KV_HEADS, device=device)
    blocks = -(-(PROMPT + 1) // 64)
    cache = fp8.Fp8Cache(
        fmt=fmt,
        pages=torch.full(
            (blocks, NUM_KV_HEADS, 64, fmt.bytes_per_token), 0xFF, dtype=torch.uint8, device=device
        ),
        block_table=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        key_scale=scales,
        value_scale=scales,
    )
    out = torch.empty_like(query)
    steps = (kernels.prefill, slice(0, PROMPT)), (kernels.decode, slice(PROMPT, PROMPT + 1))
    for attend, rows in steps:
        batch = _batch(len(query[rows]), rows.stop, device)
        kernels.write(key[rows], value[rows], cache, batch)
        attend(query[rows], cache, batch, params, out[rows])
    keys, values = fp8_reference.fake_quantise(key, value, scales, scales, fmt)
    expected = reference.attention(query, keys, values, params, 0, 0)
    return float((out - expected).abs().max() / expected.abs().max())


def _prefill(
    kernels: Kernels,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    batch = _batch(len(query), len(query), query.device)
    kernels.seal(key, value, cache, batch)
    kernels.prefill(query, key, value, cache, batch, params, out)
    kernels.write_ring(key, value, cache, batch)


def _batch(num_new: int, seq_len: int, device: torch.device) -> Batch:
    return Batch(
        torch.tensor([0, num_new], dtype=torch.int32, device=device),
        torch.tensor([seq_len], dtype=torch.int32, device=device),
    )


def _empty_cache(fmt: Format, num_tokens: int, device: torch.device) -> LayerCache:
    """Return a cache for one request; free memory is 0xFF, which is NaN as a float."""
    units = -(-num_tokens // UNIT_SIZE)
    table = torch.arange(units, dtype=torch.int32, device=device)[None]
    pages = (units, NUM_KV_HEADS, UNIT_SIZE, fmt.bytes_per_token)
    return LayerCache(
        fmt=fmt,
        pages=torch.full(pages, 0xFF, dtype=torch.uint8, device=device),
        block_table=table.flip(1).contiguous(),
        ring=torch.full((1, NUM_KV_HEADS, UNIT_SIZE, 2 * HEAD_SIZE), torch.nan, device=device),
        ring_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        ring_capacity=UNIT_SIZE,
    )


def _oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    fmt: Format,
    params: AttentionParams,
) -> torch.Tensor:
    """Dense attention in which a query sees all units before its own quantised."""
    sealed_key, sealed_value = reference.fake_quantise(key, value, fmt)
    rows = []
    for start in range(0, len(query), UNIT_SIZE):
        own = slice(start, start + UNIT_SIZE)
        keys = torch.cat([sealed_key[:start], key[own]])
        values = torch.cat([sealed_value[:start], value[own]])
        rows.append(reference.attention(query[own], keys, values, params, start, 0))
    return torch.cat(rows)


def run(name: str, device: torch.device) -> Result:
    """Test the kernels of one name on one device, with every format; sets ``KVQ_KERNELS``."""
    os.environ[ENV_VAR] = name
    try:
        kernels = select_kernels(device)
    except ValueError as error:
        return Result(name, device.type, unavailable=str(error))
    try:
        errors = [deviation(kernels, device, scheme) for scheme in SCHEMES]
        fp8_kernels = fp8.select_kernels(device)
        errors += [fp8_deviation(fp8_kernels, device, dtype) for dtype in fp8.FP8_DTYPES]
        return Result(name, device.type, error=max(errors))
    except Exception as error:  # a compiler's, a driver's: it is the result
        return Result(name, device.type, failure=f"{type(error).__name__}: {error}")


def main() -> None:
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    results = [run(name, device) for device in devices for name in kernel_names(device)]
    print(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main()
