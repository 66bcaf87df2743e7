"""Bytes of cache by the formula: what a request costs, without asking vLLM.

    bytes = sum over layers of kv heads x bytes per token and head x tokens

A page of every layer makes a block; a request takes whole blocks. With a kvq format it also
takes the blocks of its residual ring. Layers of one kind are counted as vLLM counts them, to
the block; where kinds are mixed, vLLM's planner may add padding, which is left out here.

Beside layers that keep a state, pages are as large as that state: blocks have more tokens then, and
each such layer takes whole pages of a request. Padding is at most one group of layers per kind
there, a few percent of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvq_kernels.formats import SCHEMES, Format, ring_block_size
from kvq_kernels.fp8 import Fp8Format, is_fp8
from kvq_vllm.config import KVQConfig
from kvq_vllm.planning.shape import DTYPE_BYTES, LayerShape, ModelShape

DEFAULT_BLOCK_SIZE = 16
"""vLLM's own on GPUs; formats made of units have one unit to a block. (On CPUs it is 128.)"""


@dataclass(frozen=True)
class CacheFormat:
    """A value of ``--kv-cache-dtype``, as far as its size goes.

    Attributes:
        name: the value.
        token_bytes: bytes per token and head, of a layer, unquantised element size and options.
        has_ring: whether the newest tokens are kept unquantised beside the pages.
        ours: whether this plugin brings it.

    """

    name: str
    token_bytes: Callable[[LayerShape, int, KVQConfig], int]
    has_ring: bool = False
    ours: bool = False

    def block_size(self, config: KVQConfig) -> int:
        return config.unit_size if self.has_ring else DEFAULT_BLOCK_SIZE


def _unquantised(layer: LayerShape, itemsize: int, config: KVQConfig) -> int:
    return (layer.head_size + layer.value_size) * itemsize


def _one_byte(layer: LayerShape, itemsize: int, config: KVQConfig) -> int:
    return layer.head_size + layer.value_size


def _sealed(name: str) -> CacheFormat:
    def token_bytes(layer: LayerShape, itemsize: int, config: KVQConfig) -> int:
        return config.format(name, layer.head_size).bytes_per_token

    return CacheFormat(name, token_bytes, has_ring=True, ours=True)


FORMATS: tuple[CacheFormat, ...] = (
    CacheFormat("auto", _unquantised),
    CacheFormat("fp8", _one_byte),
    CacheFormat("kvq-fp8", _one_byte, ours=True),
    *(_sealed(name) for name in SCHEMES),
)
"""Every cache dtype that is planned, in the order of the tables."""


@dataclass(frozen=True)
class Sizes:
    """What the formula needs besides the model.

    Attributes:
        tensor_parallel_size: devices that share the heads.
        in_flight_tokens: tokens of one step, which a sliding window must hold beside itself.
        config: options of the kvq formats.

    """

    tensor_parallel_size: int = 1
    in_flight_tokens: int = 8192
    config: KVQConfig = field(default_factory=lambda: KVQConfig.parse(None))

    def kv_heads(self, layer: LayerShape) -> int:
        """Heads of one device; heads that are fewer than devices are replicated."""
        return max(1, layer.num_kv_heads // self.tensor_parallel_size)


def bytes_per_token(
    shape: ModelShape, fmt: CacheFormat, sizes: Sizes, windowed: bool = True
) -> int:
    """Bytes on one device of one more token of a request.

    Args:
        shape: the model.
        fmt: of the cache.
        sizes: how it is served.
        windowed: whether layers with a sliding window count; beyond the window they do not grow.

    """
    return sum(
        _token_bytes(shape, layer, fmt, sizes)
        for layer in shape.layers
        if windowed or layer.sliding_window is None
    )


def block_bytes(shape: ModelShape, fmt: CacheFormat, sizes: Sizes) -> int:
    """Bytes on one device of one block: a page of every layer."""
    return bytes_per_token(shape, fmt, sizes) * _block_size(shape, fmt, sizes)


def request_bytes(shape: ModelShape, fmt: CacheFormat, sizes: Sizes, context: int) -> int:
    """Bytes on one device of a request of `context` tokens, its residual ring included."""
    block_size = _block_size(shape, fmt, sizes)
    total = state_bytes(shape, fmt, sizes) or 0
    for layer in shape.layers:
        tokens, spare = context, 0
        if layer.sliding_window is not None:
            # As vLLM reserves it: the window may start anywhere in a block.
            tokens = min(context, layer.sliding_window - 1 + sizes.in_flight_tokens)
            spare = 1
        page = _token_bytes(shape, layer, fmt, sizes) * block_size
        total += (-(-tokens // block_size) + spare) * page
    return total + ring_bytes(shape, fmt, sizes, context)


def ring_bytes(shape: ModelShape, fmt: CacheFormat, sizes: Sizes, context: int) -> int:
    """Bytes on one device of the residual ring of a request; 0 for formats without one."""
    if not fmt.has_ring:
        return 0
    block_size, page = _block_size(shape, fmt, sizes), _largest_page(shape, fmt, sizes)
    capacity = min(context, sizes.config.unit_size)
    blocks = 0
    for layer in shape.layers:
        token = sizes.kv_heads(layer) * _unquantised(layer, DTYPE_BYTES[shape.dtype], sizes.config)
        blocks += -(-capacity // ring_block_size(block_size, page, token))
    return blocks * page


def state_bytes(shape: ModelShape, fmt: CacheFormat, sizes: Sizes) -> int | None:
    """Bytes on one device of a request's state of fixed size; None where it is not known."""
    if shape.state is None:
        return None if shape.state_layers else 0
    pages = shape.state.per_request * len(shape.state_layers)
    return pages * _largest_page(shape, fmt, sizes)


def read_bytes(shape: ModelShape, fmt: CacheFormat, sizes: Sizes, context: int) -> int:
    """Bytes on one device that decoding the next token of one request reads."""
    state = shape.state.num_bytes(shape.dtype, sizes.tensor_parallel_size) if shape.state else 0
    return len(shape.state_layers) * state + sum(
        _token_bytes(shape, layer, fmt, sizes) * min(context, layer.sliding_window or context)
        for layer in shape.layers
    )


def _token_bytes(shape: ModelShape, layer: LayerShape, fmt: CacheFormat, sizes: Sizes) -> int:
    return sizes.kv_heads(layer) * fmt.token_bytes(layer, DTYPE_BYTES[shape.dtype], sizes.config)


def _largest_token(shape: ModelShape, fmt: CacheFormat, sizes: Sizes) -> int:
    return max(_token_bytes(shape, layer, fmt, sizes) for layer in shape.layers)


def _largest_page(shape: ModelShape, fmt: CacheFormat, sizes: Sizes) -> int:
    return _largest_token(shape, fmt, sizes) * _block_size(shape, fmt, sizes)


def _block_size(shape: ModelShape, fmt: CacheFormat, sizes: Sizes) -> int:
    """Tokens per block, of which vLLM takes as many as a page needs to hold a layer's state."""
    size = fmt.block_size(sizes.config)
    if shape.state is None:
        return size
    token = _largest_token(shape, fmt, sizes)
    state = shape.state.num_bytes(shape.dtype, sizes.tensor_parallel_size)
    return size * max(1, -(-state // (size * token)))


def concurrency(
    shape: ModelShape, fmt: CacheFormat, sizes: Sizes, context: int, memory: int
) -> float:
    """Requests of `context` tokens that `memory` bytes of one device hold, as vLLM counts.

    Not rounded, and the one block that vLLM keeps for itself is not taken off.
    """
    block = block_bytes(shape, fmt, sizes)
    return memory // block * block / request_bytes(shape, fmt, sizes, context)


def supports(shape: ModelShape, fmt: CacheFormat, config: KVQConfig) -> str | None:
    """Return why `fmt` cannot serve the model, or None."""
    if not fmt.ours:
        return None
    if shape.unsupported:
        return shape.unsupported
    for layer in shape.layers:
        try:
            if is_fp8(fmt.name):
                Fp8Format(fmt.name, layer.head_size)
                continue
            Format.create(fmt.name, layer.head_size, config.unit_size, config.key_group_size)
        except ValueError as error:
            return str(error).rstrip(".")
    return None
