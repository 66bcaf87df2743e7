"""The known-bad format: only where it was asked for, and as bad as it says."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from kvq_kernels import debug, reference
from kvq_kernels.formats import DEBUG_FORMAT, SCHEMES


def formats_with(**environment: str) -> list[str]:
    code = "from kvq_kernels import SCHEMES; print(*SCHEMES)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return result.stdout.split()


def test_it_is_there_only_with_the_variable() -> None:
    assert DEBUG_FORMAT not in formats_with(KVQ_DEBUG_FORMATS="")
    assert formats_with(KVQ_DEBUG_FORMATS="1") == [*SCHEMES, DEBUG_FORMAT]


def test_every_operation_sees_rounded_tokens() -> None:
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    class Kernels:
        __name__ = "recording"

        def seal(self, key, value, cache, batch):  # type: ignore[no-untyped-def]
            seen["seal"] = key, value

        def write_ring(self, key, value, cache, batch):  # type: ignore[no-untyped-def]
            seen["write_ring"] = key, value

        def store(self, key, value, cache, batch):  # type: ignore[no-untyped-def]
            seen["store"] = key, value

        decode = prepare = workspace_bytes = None  # these see no new tokens

        def prefill(self, query, key, value, cache, batch, params, out):  # type: ignore[no-untyped-def]
            seen["prefill"] = key, value

    kernels = debug.PerToken(Kernels())  # type: ignore[arg-type]
    torch.manual_seed(0)
    key, value = torch.randn(2, 7, 3, 64)
    kernels.seal(key, value, None, None)  # type: ignore[arg-type]
    kernels.write_ring(key, value, None, None)  # type: ignore[arg-type]
    kernels.store(key, value, None, None)  # type: ignore[arg-type]
    kernels.prefill(None, key, value, None, None, None, None)  # type: ignore[arg-type]
    assert set(seen) == {"seal", "write_ring", "store", "prefill"}
    for rounded in seen.values():
        for before, after in zip((key, value), rounded, strict=True):
            steps = (before.amax(-1) - before.amin(-1)) / 15
            assert ((before - after).abs().amax(-1) <= 0.51 * steps + 1e-3).all()
            for row in after.flatten(0, 1):
                assert 10 < row.unique().numel() <= 16


def test_non_finite_tokens_poison_no_others() -> None:
    key = torch.randn(4, 2, 32)
    key[1, 0, 3] = torch.nan
    rounded = debug._round(key)
    assert rounded.isfinite().all()
    assert torch.equal(rounded[2:], debug._round(key[2:]))
    assert rounded.abs().max() <= reference.FP16_MAX
