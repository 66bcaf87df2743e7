"""What an impl keeps on the device besides weights and cache: buffers, which sleep mode saves."""

from __future__ import annotations

import torch

from kvq_kernels import AttentionParams
from kvq_vllm.backend import KVQImpl


def test_alibi_slopes_stay_where_they_are_when_weights_are_reloaded() -> None:
    impl, layer, device = KVQImpl.__new__(KVQImpl), torch.nn.Module(), torch.device("cpu")
    impl.alibi_slopes, impl.sinks, impl.params = [0.5, 0.25], None, AttentionParams(1.0)
    impl.complete_params(layer, device)
    slopes = impl.params.alibi_slopes
    assert slopes is not None
    assert slopes.tolist() == [0.5, 0.25]
    impl.complete_params(layer, device)
    assert impl.params.alibi_slopes is slopes
    assert dict(layer.named_buffers())["_kvq_alibi_slopes"] is slopes
    assert not layer.state_dict()  # no checkpoint has them
