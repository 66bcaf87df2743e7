"""The record layout: sizes, alignment, and errors."""

import itertools
from typing import Any

import pytest
import torch

from kvq_kernels import SCHEMES, Format, hadamard
from kvq_kernels.formats import SECTION_ALIGNMENT, UNIT_SIZES

HEAD_SIZES = [16, 64, 80, 96, 112, 128, 160, 192, 256]
ALL = [
    Format(name, head_size, unit_size, group_size)
    for name, head_size, unit_size in itertools.product(SCHEMES, HEAD_SIZES, UNIT_SIZES)
    for group_size in (32, 64, 128, 256)
    if group_size <= unit_size
]


def _id(fmt: Format) -> str:
    return f"{fmt.name}-D{fmt.head_size}-U{fmt.unit_size}-g{fmt.key_group_size}"


@pytest.mark.parametrize(
    ("name", "group_size", "expected"),
    [
        ("kvq-int4", 64, 146),
        ("kvq-int4", None, 142),
        ("kvq-k8v4", None, 200),
        ("kvq-int8", None, 264),
    ],
)
def test_bytes_per_token_at_head_size_128(name: str, group_size: int | None, expected: int) -> None:
    assert Format.create(name, 128, 128, group_size).bytes_per_token == expected


@pytest.mark.parametrize("fmt", ALL, ids=_id)
def test_sections_are_aligned_and_adjacent(fmt: Format) -> None:
    sections = [
        (fmt.key_codes_offset, fmt.key_codes_bytes),
        (fmt.value_codes_offset, fmt.value_codes_bytes),
        (fmt.key_meta_offset, fmt.key_meta_bytes),
        (fmt.key_cuts_offset, fmt.key_cuts_bytes),
        (fmt.value_meta_offset, fmt.value_meta_bytes),
    ]
    end = 0
    for offset, size in sections:
        assert offset == end
        end = offset + size
    assert end == fmt.blob_bytes
    offsets = [offset for offset, _ in sections] + [fmt.blob_bytes, fmt.record_bytes]
    if fmt.anchor:
        offsets += [fmt.anchor_codes_offset, fmt.anchor_meta_offset]
    assert all(offset % SECTION_ALIGNMENT == 0 for offset in offsets)
    assert fmt.num_blobs * fmt.blob_bytes <= fmt.content_bytes <= fmt.record_bytes
    assert fmt.record_bytes == fmt.bytes_per_token * fmt.unit_size
    assert fmt.record_bytes - fmt.content_bytes < fmt.unit_size


def test_default_sizes() -> None:
    def sizes(*arguments: Any) -> tuple[int, int]:
        fmt = Format.create(*arguments)
        return fmt.unit_size, fmt.key_group_size

    assert sizes("kvq-int4", 64) == (128, 128)
    assert sizes("kvq-int4", 64, 256) == (256, 256)
    assert sizes("kvq-int4", 64, 256, 64) == (256, 64)
    assert sizes("kvq-int8", 64) == (128, 128)
    assert sizes("kvq-int8", 64, 256) == (256, 256)
    assert sizes("kvq-k8v4", 64) == (128, 128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kvq-int3", 64), "Unknown format 'kvq-int3'.*kvq-int4"),
        (("kvq-int4", 72), "head size 72.*multiple of 16 up to 256"),
        (("kvq-int4", 272), "head size 272"),
        (("kvq-int4", 0), "head size 0"),
        (("kvq-int4", 64, 96), "unit_size 96.*64, 128, 256"),
        (("kvq-int4", 64, 128, 48), "key_group_size 48"),
        (("kvq-int4", 64, 128, 16), "key_group_size 16"),
        (("kvq-int4", 64, 64, 128), "key_group_size 128"),
    ],
    ids=str,
)
def test_unsupported_sizes_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Format.create(*arguments)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_hadamard_is_orthonormal_and_symmetric(head_size: int) -> None:
    matrix = hadamard(head_size)
    torch.testing.assert_close(matrix @ matrix, torch.eye(head_size), atol=1e-6, rtol=0)
    assert torch.equal(matrix, matrix.T)


def test_hadamard_is_fp32_whatever_the_default_dtype() -> None:
    """While vLLM loads a model, the model's dtype is the default."""
    expected = hadamard(128).clone()
    hadamard.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        matrix = hadamard(128)
    finally:
        torch.set_default_dtype(torch.float32)
        hadamard.cache_clear()
    assert matrix.dtype == torch.float32
    assert torch.equal(matrix, expected)


def test_hadamard_is_block_diagonal_for_sums_of_powers_of_two() -> None:
    matrix = hadamard(96)
    assert torch.equal(matrix[:64, :64], hadamard(64))
    assert torch.equal(matrix[64:, 64:], hadamard(32))
    assert not matrix[:64, 64:].any()
