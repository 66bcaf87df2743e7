"""``additional_config["kvq"]``."""

import pytest

from kvq_vllm.config import KVQConfig, KVQConfigError, is_kvq


def test_defaults() -> None:
    for additional_config in (None, {}, {"other": 1}, {"kvq": None}, {"kvq": {}}):
        config = KVQConfig.parse(additional_config)
        assert config.unit_size == 128
        assert config.key_group_size is None


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("kvq-int8", {}, (128, 128)),
        ("kvq-k8v4", {}, (128, 128)),
        ("kvq-int4", {}, (128, 128)),
        ("kvq-int4", {"unit_size": 256}, (256, 256)),
        ("kvq-int4", {"key_group_size": 64}, (128, 64)),
    ],
)
def test_sizes_of_a_format(name: str, options: dict[str, int], sizes: tuple[int, int]) -> None:
    config = KVQConfig.parse({"kvq": options})
    fmt = config.format(name, 64)
    assert (fmt.unit_size, fmt.key_group_size) == sizes


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kvq-int4", {"unit_size": 64, "key_group_size": 128}),
        ("kvq-int8", {"key_group_size": 256}),
    ],
)
def test_key_groups_longer_than_a_unit(name: str, options: dict[str, int]) -> None:
    with pytest.raises(KVQConfigError, match=r"has key_group_size .*, above the unit_size"):
        KVQConfig.parse({"kvq": options}).format(name, 64)


def test_values_reach_the_format() -> None:
    config = KVQConfig.parse({"kvq": {"unit_size": 256, "key_group_size": 32}})
    fmt = config.format("kvq-int4", 96)
    assert (fmt.head_size, fmt.unit_size, fmt.key_group_size) == (96, 256, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": 64}, "unknown key 'unit'.*allowed keys: unit_size, key_group_size"),
        ({"unit-size": 64}, "unknown key 'unit-size' .did you mean 'unit_size'"),
        ({"unit_size": 100}, "unit_size is 100 but must be 64, 128 or 256"),
        ({"unit_size": "big"}, "unit_size is 'big' but must be a whole number"),
        ({"unit_size": 128.0}, "unit_size is 128.0 but must be a whole number"),
        ({"key_group_size": True}, "key_group_size is True but must be a whole number"),
        ({"key_group_size": 48}, "key_group_size is 48 but must be 32, 64, 128 or 256"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_sentence(options: object, message: str) -> None:
    with pytest.raises(KVQConfigError, match=message) as error:
        KVQConfig.parse({"kvq": options})
    text = str(error.value)
    assert text.startswith('additional_config["kvq"] is not valid: ')
    assert "\n" not in text


@pytest.mark.parametrize("options", [5, [1, 2], "int4"], ids=str)
def test_options_that_are_no_object(options: object) -> None:
    with pytest.raises(KVQConfigError, match=r"must be an object such as .*unit_size"):
        KVQConfig.parse({"kvq": options})


@pytest.mark.parametrize("key", ["unit_size", "key_group_size", "KVQ", "kvq-vllm"])
def test_misplaced_options_are_refused(key: str) -> None:
    with pytest.raises(KVQConfigError, match=f"additional_config has '{key}' at its top level"):
        KVQConfig.parse({key: 64, "other": 1})


@pytest.mark.parametrize("head_size", [8, 72, 512])
def test_unsupported_head_size(head_size: int) -> None:
    with pytest.raises(KVQConfigError, match=f"head size {head_size}.*--kv-cache-dtype auto"):
        KVQConfig().format("kvq-int4", head_size)


def test_is_kvq() -> None:
    assert is_kvq("kvq-int4")
    assert not any(map(is_kvq, (None, "auto", "fp8", "int4_per_token_head")))
