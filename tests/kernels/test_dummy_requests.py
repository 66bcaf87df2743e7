"""A request of length 0 is a dummy, whatever rows it has: vLLM's warm-up batches must not write."""

import dataclasses
import types

import pytest
import torch
from support.fp8 import Fp8Layer, PagedFp8Cache
from support.paged import PagedCache

from kvq_kernels import SCHEMES, AttentionParams, Batch, Format, cpu, reference
from kvq_kernels.fp8 import FP8_DTYPES, Fp8Format
from kvq_kernels.fp8 import cpu as fp8_cpu
from kvq_kernels.fp8 import reference as fp8_reference


@pytest.mark.parametrize("kernels", [reference, cpu], ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_request_of_length_zero_touches_nothing(name: str, kernels: types.ModuleType) -> None:
    fmt = Format.create(name, 64, unit_size=64)
    paged = PagedCache(fmt, 2, 2, 256, block_size=128, num_speculative_tokens=2)
    nowhere = torch.full((2, 2), 2**31 - 1, dtype=torch.int32)
    cache = dataclasses.replace(paged.cache, block_table=nowhere, ring_table=nowhere)
    before = cache.pages.clone(), cache.ring.clone()
    batch = Batch(torch.tensor([0, 3, 67]).int(), torch.zeros(2, dtype=torch.int32))
    query, key, value = torch.randn(67, 4, 64), torch.randn(67, 2, 64), torch.randn(67, 2, 64)
    out = torch.full_like(query, -77.0)
    params = AttentionParams(scale=0.125)

    kernels.store(key, value, cache, batch)
    kernels.seal(key, value, cache, batch)
    kernels.write_ring(key, value, cache, batch)
    kernels.decode(query, cache, batch, params, out)
    kernels.prefill(query, key, value, cache, batch, params, out)

    assert torch.equal(cache.pages, before[0])
    assert torch.equal(cache.ring.view(torch.int32), before[1].view(torch.int32))
    assert (out == -77.0).all()


@pytest.mark.parametrize("kernels", [fp8_reference, fp8_cpu], ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", FP8_DTYPES)
def test_nor_does_it_in_an_fp8_cache(name: str, kernels: types.ModuleType) -> None:
    layer = Fp8Layer(Fp8Format(name, 64), torch.ones(2), torch.ones(2))
    cache = PagedFp8Cache(layer, 3, 128).cache  # the block tables name real blocks
    before = cache.pages.clone()
    batch = Batch(torch.tensor([0, 3, 4, 68]).int(), torch.tensor([0, 5, 0]).int())
    query, key, value = torch.randn(68, 4, 64), torch.randn(68, 2, 64), torch.randn(68, 2, 64)
    out = torch.full_like(query, -77.0)

    kernels.write(key, value, cache, batch)
    kernels.decode(query, cache, batch, AttentionParams(scale=0.125), out)

    changed = (cache.pages != before).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == [int(cache.block_table[1, 0])]
    dummies = torch.ones(68, dtype=torch.bool)
    dummies[3] = False
    assert (out[dummies] == -77.0).all()
