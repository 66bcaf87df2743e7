"""The interpreter is on."""

import torch
import triton
from triton import language as tl


@triton.jit
def _double(x, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(x + offsets, 2 * tl.load(x + offsets))


def test_kernels_run_on_the_cpu() -> None:
    x = torch.arange(8.0)
    _double[(1,)](x, 8)
    assert x.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
