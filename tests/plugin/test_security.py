"""Files of others cannot run code here, nor make us allocate what their headers claim.

That no request can read another's cache is for `test_schedules.py`, which poisons all memory that
a request does not own, and for `test_exactness.py`, which does so to whole engines.
"""

from __future__ import annotations

import ast
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import with_scales
from support.models import tiny_llama

from kvq_vllm.checkpoint import check_scales
from kvq_vllm.config import KVQConfigError
from kvq_vllm.errors import KVQError
from kvq_vllm.evaluation.files import RunFolder
from kvq_vllm.planning import engine, plan, shape
from kvq_vllm.planning.formula import Sizes
from kvq_vllm.reading import MAX_BYTES, read_json
from kvq_vllm.scales import read_scales

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])


# --- code ------------------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "code"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
"""Plain names are the built-in functions; `re.compile` is something else."""
COMMANDS = {"run", "Popen", "call", "check_call", "check_output"}


def dangers(source: str) -> list[str]:
    """Return what in a source could run code that comes from data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        found += [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Call):
            found += dangers_of_call(node)
    return found


def dangers_of_call(call: ast.Call) -> list[str]:
    name = ast.unparse(call.func)
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    found = [name] if name in FORBIDDEN_CALLS else []
    if name.endswith("torch.load") and options.get("weights_only") != "True":
        found.append("torch.load without weights_only=True")
    if name in ("np.load", "numpy.load") and options.get("allow_pickle") != "False":
        found.append("numpy.load without allow_pickle=False")
    if name.endswith(".from_pretrained") and options.get("trust_remote_code") != "False":
        found.append("from_pretrained without trust_remote_code=False")
    if options.get("trust_remote_code", "False") != "False":
        found.append("trust_remote_code")
    if options.get("shell", "False") != "False":
        found.append("shell")
    if name.startswith("subprocess.") and name.split(".")[1] in COMMANDS:
        command = call.args[0] if call.args else None
        if isinstance(command, (ast.Constant, ast.JoinedStr)):
            found.append("a command in a string")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_from_data(path: Path) -> None:
    assert dangers(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import yaml",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "AutoConfig.from_pretrained(path)",
        "LLM(model, trust_remote_code=True)",
        "LLM(model, trust_remote_code=flag)",
        "subprocess.run(command, shell=True)",
        "subprocess.run('ls')",
        "subprocess.Popen(f'ls {path}')",
    ],
)
def test_the_check_can_tell(source: str) -> None:
    assert len(dangers(source)) == 1


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 50


def test_a_model_that_brings_code_is_not_asked_for_it(tmp_path: Path) -> None:
    """`kvq plan` on a configuration that only its own code can read: the code stays unread."""
    (tmp_path / "configuration_evil.py").write_text("raise SystemExit('ran')")
    config = {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "configuration_evil.Evil"},
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    notes = shape.read_model(tmp_path).notes
    assert any("transformers cannot read this configuration" in note for note in notes)


def test_vllm_is_asked_about_a_model_that_brings_code_without_it(tmp_path: Path) -> None:
    """Beside its `config.json`, nothing of a model is where vLLM reads."""
    (tmp_path / "configuration_evil.py").write_text("raise SystemExit('ran')")
    code = {"auto_map": {"AutoConfig": "configuration_evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(HYBRID | code))
    result = plan(tmp_path, cache_memory=1 << 30, contexts=[4096])
    assert result.model.notes == ()
    for fmt in result.formats:
        assert (fmt.planned_by, fmt.problem) == ("vllm", None)


# --- sizes -----------------------------------------------------------------------------------

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
HYBRID: dict[str, Any] = LLAMA | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 2,
    "layer_types": ["attention", "mamba"],
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 1,
    "mamba_n_groups": 1,
    "mamba_n_heads": 64,
}
DEEP = "[" * 100_000


def assert_one_sentence(error: BaseException, *parts: str) -> None:
    message = str(error)
    assert len(message.splitlines()) == 1
    assert len(message) < 400
    assert message.endswith(".")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**12),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 32.0),
        ("num_hidden_layers", True),
        ("num_hidden_layers", "32"),
        ("num_hidden_layers", 10**400),
        ("num_attention_heads", 0),
        ("num_attention_heads", [32, 32]),
        ("num_key_value_heads", 10**9),
        ("hidden_size", 10**12),
        ("head_dim", -128),
        ("vocab_size", 1e30),
        ("max_position_embeddings", 10**18),
        ("sliding_window", -5),
        ("kv_lora_rank", 10**15),
        ("num_kv_shared_layers", {}),
    ],
    ids=lambda value: str(value)[:24],
)
def test_sizes_of_a_model(field: str, value: Any, tmp_path: Path) -> None:
    for folder, content in (
        ("plain", LLAMA | {field: value}),
        (
            "nested",
            {"architectures": LLAMA["architectures"], "text_config": LLAMA | {field: value}},
        ),
    ):
        path = tmp_path / folder / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(content))
        with pytest.raises(KVQError) as error:
            shape.read_model(path.parent)
        assert_one_sentence(error.value, str(path), field, "must be a whole number from")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mamba_d_state", 10**12),
        ("mamba_d_conv", 0),
        ("mamba_expand", -2),
        ("mamba_n_groups", 1.5),
        ("mamba_n_heads", "64"),
    ],
)
def test_sizes_of_a_state(field: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HYBRID | {field: value}))
    with pytest.raises(KVQError) as error:
        shape.read_model(tmp_path)
    assert_one_sentence(error.value, str(path), field, "must be a whole number from")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mamba_n_heads": 3}, "mamba_n_heads must divide"),
        ({"hidden_act": {}, "mamba_chunk_size": []}, "expected str, got dict"),
        ({"architectures": ["Unknown\nForCausalLM"]}, "are not supported for now"),
        ({"attention_head_dim": 64}, "vLLM reads kv heads and head size"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_vllm_does_not_take(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """It says so in one line of a terminal or two, whatever was in the configuration."""
    (tmp_path / "config.json").write_text(json.dumps(HYBRID | changes))
    model = shape.read_model(tmp_path)
    (answer,) = engine.ask(model, ["auto"], Sizes(), [4096], 1 << 30).values()
    assert answer.concurrency is None
    problem = answer.problem or ""
    assert reason in problem
    assert len(problem) <= 240
    assert len(problem.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"layer_types": ["full_attention"] * 10**6}, "1000000 layer types"),
        ({"layer_types": 5}, "malformed"),
        ({"architectures": 5}, "malformed"),
        ({"quantization_config": {"config_groups": [1]}}, "malformed"),
        ({"intermediate_size": "many"}, "malformed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_shapes_of_a_configuration(changes: dict[str, Any], part: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    with pytest.raises(KVQError) as error:
        shape.read_model(tmp_path)
    assert_one_sentence(error.value, part)


@pytest.mark.parametrize("size", [-1, 10**30, "big", 1e999, None])
def test_the_size_of_the_weights_is_not_taken_from_nonsense(size: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    index = {"metadata": {"total_size": size}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert shape.read_model(tmp_path).weights_from == "estimate"


def test_files_that_are_too_deep_or_too_large(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(DEEP)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(path)
    with pytest.raises(KVQError) as unplanned:
        shape.read_model(tmp_path)
    assert_one_sentence(unplanned.value, str(path))
    with pytest.raises(KVQConfigError) as scales:
        read_scales(str(path), "kvq-fp8")
    assert_one_sentence(scales.value, str(path))
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ValueError, match="more than"):
        read_json(path)


@pytest.mark.parametrize("scale", [True, 10**400, 1e39, 1e-46, "1", [1.0], None])
def test_scales_of_a_file(scale: Any, tmp_path: Path) -> None:
    layer = {"k_scale": [1.0], "v_scale": [scale]}
    path = tmp_path / "scales.json"
    path.write_text(json.dumps({"type": "float8_e4m3fn", "layers": {"layer": layer}}))
    with pytest.raises(KVQConfigError) as error:
        read_scales(str(path), "kvq-fp8")
    assert_one_sentence(error.value, str(path), "layer.v_scale")


class _ModelConfig:
    """What the check of a checkpoint's scales asks of vLLM's."""

    def __init__(self, folder: Path) -> None:
        self.model = str(folder)
        self.hf_config = self.hf_text_config = type("Config", (), {"num_attention_heads": 4})()

    def get_total_num_kv_heads(self) -> int:
        return 2


def write_safetensors(path: Path, header: bytes, size: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if size is None else size) + header)


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (b"{}", 2**63),
        (b"{}", 1000),
        (b"[1, 2]", None),
        (b'{"a.k_scale": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', None),
        (
            b'{"a.k_scale": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4]}}',
            None,
        ),
    ],
    ids=["header of 2**63 bytes", "header beyond the end", "list", "no data", "shape of 2**40"],
)
def test_headers_of_a_checkpoint(header: bytes, size: int | None, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, header, size)
    with pytest.raises(KVQConfigError) as error:
        check_scales(_ModelConfig(tmp_path))
    assert_one_sentence(error.value, str(file), "no valid safetensors file")


def test_a_scale_is_measured_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that calls itself a scale may be as large as its file."""
    monkeypatch.setattr(torch.Tensor, "float", lambda self: pytest.fail("it was read"))
    save_file({"layer.k_scale": torch.ones(1000, 1000)}, tmp_path / "model.safetensors")
    with pytest.raises(KVQConfigError, match="has 1000000 scales") as error:
        check_scales(_ModelConfig(tmp_path))
    assert_one_sentence(error.value)


def test_good_scales_are_still_read(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "llama")
    scales = {f"0.self_attn.{n}_scale": torch.tensor([0.5]) for n in "kv"}
    check_scales(_ModelConfig(with_scales(model, tmp_path / "scaled", scales, "tensor")))
    scales["0.self_attn.k_scale"] = torch.tensor([-0.5])
    with pytest.raises(KVQConfigError, match="must be positive"):
        check_scales(_ModelConfig(with_scales(model, tmp_path / "bad", scales, "tensor")))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", DEEP, "5"], ids=lambda text: text[:4])
def test_results_of_an_earlier_run(content: str, tmp_path: Path) -> None:
    """`kvq eval` goes on with a folder that somebody or a full disk has damaged."""
    run = RunFolder(tmp_path)
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(KVQError) as error:
        run.header()
    assert_one_sentence(error.value, str(tmp_path / "settings.json"), "--out")
    run.result("auto", "next-token").parent.mkdir()
    run.result("auto", "next-token").write_text(content)
    if content != "[]":
        with pytest.raises(KVQError) as error:
            run.records("auto", "next-token")
        assert_one_sentence(error.value, "next-token.json", "--out")
