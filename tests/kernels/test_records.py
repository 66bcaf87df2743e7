"""Sealing and unpacking one record."""

import pytest
import torch

from kvq_kernels import SCHEMES, Format, hadamard
from kvq_kernels.reference import FP16_MAX, fake_quantise, pack_records, unpack_records

FORMATS = [
    Format(name, head_size, unit_size, group_size)
    for name in SCHEMES
    for head_size, unit_size, group_size in [
        (64, 128, 64),
        (96, 64, 32),
        (80, 64, 64),
        (128, 128, 128),
        (256, 256, 64),
    ]
]


def _id(fmt: Format) -> str:
    return f"{fmt.name}-D{fmt.head_size}-U{fmt.unit_size}-g{fmt.key_group_size}"


every_format = pytest.mark.parametrize("fmt", FORMATS, ids=_id)


def _random_unit(fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(fmt.head_size + fmt.unit_size)
    key = torch.randn(fmt.unit_size, fmt.head_size)
    key[:, 3] += 20
    return key, torch.randn(fmt.unit_size, fmt.head_size)


def _bound(x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Largest error of one scale and zero along `dim`.

    Half a step of the rounded scale, plus what rounding scale (times the number of levels)
    and zero to fp16 can add: half a unit in the last of 11 bits each, or half of fp16's
    smallest denormal, 2**-25.
    """
    levels = 2**bits - 1
    lo, hi = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = (hi - lo) / levels
    rounding = levels * (scale * 2**-11 + 2**-25) + lo.abs() * 2**-11 + 2**-25
    return 0.5 * scale * (1 + 2**-11) + rounding + 1e-6 * x.abs().amax(dim, keepdim=True)


def _assert_within_bound(key: torch.Tensor, value: torch.Tensor, fmt: Format) -> None:
    k, v = unpack_records(pack_records(key, value, fmt), fmt)
    key, value = key.float(), value.float()
    groups = key.unflatten(0, (fmt.num_blobs, fmt.key_group_size))
    bound = _bound(groups, fmt.key_bits, 1).expand_as(groups).flatten(0, 1)
    assert ((k - key).abs() <= bound).all()
    if fmt.rotate_values:  # the bound holds for the rotated values
        rotation = hadamard(fmt.head_size)
        v, value = v @ rotation, value @ rotation
        slack = 4e-6 * value.abs().amax()  # of rotating back and forth in fp32
    else:
        slack = torch.tensor(0.0)
    assert ((v - value).abs() <= _bound(value, fmt.value_bits, 1) + slack).all()


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_round_trip_is_within_the_bound(fmt: Format, dtype: torch.dtype) -> None:
    key, value = _random_unit(fmt)
    _assert_within_bound(key.to(dtype), value.to(dtype), fmt)


@every_format
@pytest.mark.parametrize(
    "special", ["zeros", "constant channels", "outliers", "denormals", "bias", "one token"]
)
def test_special_values_are_within_the_bound(fmt: Format, special: str) -> None:
    key, value = _random_unit(fmt)
    if special == "zeros":
        key, value = torch.zeros_like(key), torch.zeros_like(value)
    elif special == "constant channels":
        key[:, ::3] = 1.25
    elif special == "outliers":
        key[5, 7], value[6, 8] = 1e4, -1e4
    elif special == "denormals":
        key, value = key * 1e-7, value * 1e-7
    elif special == "bias":
        key += 50
    elif special == "one token":
        key[1:], value[1:] = 0, 0
    _assert_within_bound(key, value, fmt)


@every_format
def test_constant_channels_are_exact(fmt: Format) -> None:
    key, value = _random_unit(fmt)
    key[:, 5] = -3.5
    key[:, 6] = 0
    k, v = unpack_records(pack_records(key, torch.zeros_like(value), fmt), fmt)
    assert (k[:, 5] == -3.5).all()
    assert (k[:, 6] == 0).all()
    assert (v == 0).all()


def test_a_record_decoded_by_hand() -> None:
    """Read every field of an int4 record by the layout in the docstring of formats.py."""
    fmt = Format("kvq-int4", head_size=16, unit_size=128, key_group_size=64)
    torch.manual_seed(0)
    key, value = torch.randn(128, 16), torch.randn(128, 16)
    raw = pack_records(key, value, fmt, first=True)
    k, v = unpack_records(raw, fmt)
    data = bytes(raw.tolist())

    def fp16(offset: int) -> float:
        return torch.frombuffer(bytearray(data[offset : offset + 2]), dtype=torch.float16).item()

    v_codes = 64 * 8
    k_meta = v_codes + 16 * 32
    k_cuts = k_meta + 16 * 4
    v_meta = k_cuts + 2 * 16
    blob_bytes = v_meta + 64 * 4
    rotated = torch.empty(128, 16)
    cuts = set()
    for token in range(128):
        blob, t = divmod(token, 64)
        base = blob * blob_bytes
        for channel in range(16):
            byte = data[base + t * 8 + channel % 8]
            code = byte & 15 if channel < 8 else byte >> 4
            scale, zero = (fp16(base + k_meta + channel * 4 + i) for i in (0, 2))
            cut = data[base + k_cuts + t // 32 * 16 + channel]
            low, high = cut & 15, cut >> 4
            cuts.add(cut)
            if token > 0:
                expected = code * scale * (32 - low - high) / 32 + (zero + scale * low * 15 / 32)
                assert k[token, channel].item() == pytest.approx(expected, abs=1e-6)
            byte = data[base + v_codes + channel * 32 + t % 32]
            code = byte & 15 if t < 32 else byte >> 4
            meta = base + v_meta + t * 4
            rotated[token, channel] = code * fp16(meta) + fp16(meta + 2)
    assert len(cuts) > 8
    torch.testing.assert_close(v, rotated @ hadamard(16), atol=1e-6, rtol=0)
    anchor = 2 * blob_bytes
    for channel in range(16):
        expected = data[anchor + channel] * fp16(anchor + 16) + fp16(anchor + 18)
        assert k[0, channel] == expected
    assert data[anchor + 20] == 1
    assert not any(data[anchor + 21 :])


@pytest.mark.parametrize("group_size", [64, 256])
def test_an_outlier_costs_only_its_own_32_tokens_their_precision(group_size: int) -> None:
    fmt = Format("kvq-int4", head_size=64, unit_size=256, key_group_size=group_size)
    torch.manual_seed(0)
    key = torch.rand(256, 64) * 2 - 1
    key[40], key[41] = 8, -8
    k, _ = unpack_records(pack_records(key, torch.zeros_like(key), fmt), fmt)
    error = (k - key).abs()
    step = 16 / 15  # of the range with the outliers
    assert error[32:64].max() > 0.4 * step
    error[32:64] = 0
    # At most 15/32 are cut at either end. Rounded ends may clip 1/64 of the range, 15/64 steps.
    assert error.max() <= 15 / 64 * step + 0.01
    assert error[:group_size].mean() < 0.05 * step


def test_a_part_without_finite_keys_is_not_cut() -> None:
    fmt = Format.create("kvq-int4", 64, 256)
    key, value = _random_unit(fmt)
    key[32:64] = torch.nan
    key[64:96] = torch.inf
    record = pack_records(key, value, fmt)
    cuts = record[fmt.key_cuts_offset : fmt.value_meta_offset].view(8, 64)
    assert (cuts[1:3] == 0).all()
    assert (cuts[3:] > 0).any()
    k, _ = unpack_records(record, fmt)
    others = torch.cat([key[:32], key[96:]]).amax(0)
    torch.testing.assert_close(k[64], others, atol=0.02, rtol=0.001)
    assert k[32:64, 4:].abs().max() < 0.3  # NaN as if it were 0


def test_int8_keys_and_values_are_stored_as_bytes() -> None:
    fmt = Format("kvq-int8", head_size=16, unit_size=64, key_group_size=32)
    key = torch.arange(64.0)[:, None].repeat(1, 16)  # 0..31 and 32..63 per group
    record = pack_records(key, key, fmt)
    codes = record[: 32 * 16].view(32, 16)
    assert codes[0].eq(0).all()
    assert codes[31].eq(255).all()
    value_codes = record[32 * 16 : 2 * 32 * 16].view(16, 32)
    assert value_codes.eq(0).all()  # every token is constant over its channels


@pytest.mark.parametrize("first", [True, False], ids=["first unit", "later unit"])
def test_anchor_takes_the_first_key_out_of_its_group(first: bool) -> None:
    fmt = Format.create("kvq-int4", 64)
    key, value = _random_unit(fmt)
    key[0] *= 100
    k, _ = unpack_records(pack_records(key, value, fmt, first), fmt)
    others = (k[1 : fmt.key_group_size] - key[1 : fmt.key_group_size]).abs().max()
    if first:
        step = (key[0].max() - key[0].min()) / 255
        assert (k[0] - key[0]).abs().max() <= step
        assert others < 0.5
    else:
        assert others > 2


@every_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_non_finite_elements_cost_others_nothing(fmt: Format, bad: float) -> None:
    key, value = _random_unit(fmt)
    clean_k, clean_v = unpack_records(pack_records(key, value, fmt), fmt)
    key[10, 20], value[11, 21] = bad, bad
    k, v = unpack_records(pack_records(key, value, fmt), fmt)
    assert k.isfinite().all()
    assert v.isfinite().all()
    # Keys share a scale over the tokens of a channel: the range now lacks one element.
    others = torch.ones_like(key, dtype=torch.bool)
    others[10, 20] = False
    step = (key[others].max() - key[others].min()) / (2**fmt.key_bits - 1)
    assert ((k - clean_k).abs()[others] <= step).all()
    channel = torch.ones(fmt.head_size, dtype=torch.bool)
    channel[20] = False
    assert torch.equal(k[:, channel], clean_k[:, channel])
    tokens = torch.ones(fmt.unit_size, dtype=torch.bool)
    tokens[11] = False
    assert torch.equal(v[tokens], clean_v[tokens])


@every_format
def test_whole_groups_of_non_finite_elements(fmt: Format) -> None:
    key = torch.full((fmt.unit_size, fmt.head_size), torch.nan)
    value = torch.full_like(key, torch.inf)
    k, v = unpack_records(pack_records(key, value, fmt, True), fmt)
    assert (k == 0).all()
    assert v.isfinite().all()


@every_format
def test_elements_beyond_fp16_saturate(fmt: Format) -> None:
    key, value = _random_unit(fmt)
    key[3, 4], value[3, 4] = 1e30, -1e30
    k, v = unpack_records(pack_records(key, value, fmt, True), fmt)
    assert k.isfinite().all()
    assert v.isfinite().all()
    assert k[3, 4] == pytest.approx(FP16_MAX, rel=2e-3)


def test_records_of_many_units_at_once_equal_one_by_one() -> None:
    fmt = Format.create("kvq-int4", 64)
    torch.manual_seed(1)
    key, value = (torch.randn(3, 2, fmt.unit_size, 64) for _ in range(2))
    first = torch.tensor([True, False, True])[:, None]
    together = pack_records(key, value, fmt, first)
    for unit in range(3):
        for head in range(2):
            one = pack_records(key[unit, head], value[unit, head], fmt, bool(first[unit]))
            assert torch.equal(together[unit, head], one)


@pytest.mark.parametrize("num_tokens", [0, 1, 255, 256, 257, 600])
def test_fake_quantise_leaves_the_open_unit_alone(num_tokens: int) -> None:
    fmt = Format.create("kvq-int4", 64)
    key, value = torch.randn(num_tokens, 2, 64), torch.randn(num_tokens, 2, 64)
    k, v = fake_quantise(key, value, fmt)
    sealed = num_tokens // fmt.unit_size * fmt.unit_size
    assert k.shape == key.shape
    assert torch.equal(k[sealed:], key[sealed:])
    assert torch.equal(v[sealed:], value[sealed:])
    if sealed:
        assert not torch.equal(k[:sealed], key[:sealed])
