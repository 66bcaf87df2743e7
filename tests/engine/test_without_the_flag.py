"""Without a kvq dtype everything is as if the plugin were not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import models

_RUN = """
import json, sys
from vllm import LLM, SamplingParams

def describe(config):
    # The volatile parts are ids and timings of this very start.
    return {
        "cache": {k: v for k, v in sorted(vars(config.cache_config).items())},
        "backend": str(config.attention_config.backend),
        "scheduler": {k: v for k, v in sorted(vars(config.scheduler_config).items())},
    }

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], enforce_eager=True, max_model_len=512,
              skip_tokenizer_init=True, **json.loads(sys.argv[2]))
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    layers = engine.vllm_config.compilation_config.static_forward_context
    prompts = [{"prompt_token_ids": list(range(3, n))} for n in (40, 140, 300)]
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0,
                              detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    print(json.dumps({
        "config": describe(engine.vllm_config),
        "groups": [[str(g.kv_cache_spec), g.layer_names] for g in groups],
        "blocks": core.scheduler.kv_cache_config.num_blocks,
        "layers": {name: [type(l).__name__, l.get_attn_backend().get_name(),
                          str(l.kv_cache.shape), str(l.kv_cache.dtype)]
                   for name, l in layers.items()},
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "logprobs": [o.outputs[0].cumulative_logprob for o in outputs],
    }, default=str))
"""


def run(model: Path, options: dict[str, Any], plugins: str | None) -> Any:
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment.pop("VLLM_PLUGINS", None)
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    result = subprocess.run(
        [sys.executable, "-c", _RUN, str(model), json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
        {"dtype": "float32", "block_size": 32, "enable_prefix_caching": False},
    ],
    ids=["default", "in-tree dtype", "small blocks"],
)
def test_engine_is_the_same_with_and_without_the_plugin(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = models.tiny_llama(tmp_path)
    assert run(model, options, plugins=None) == run(model, options, plugins="")
