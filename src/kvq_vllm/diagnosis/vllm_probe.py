"""Runs in a process of its own: what vLLM says about itself, and whether our dtypes get through.

``python -m kvq_vllm.diagnosis.vllm_probe OUT`` writes a JSON object with what it found so far to
the file OUT after every step, so that a crash leaves the steps before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvq_vllm.checks import OUR_BACKEND
from kvq_vllm.config import dtype_names


def main(out: Path) -> None:
    found: dict[str, Any] = {}

    def report(**values: Any) -> None:
        found.update(values)
        out.write_text(json.dumps(found))

    import vllm

    report(version=vllm.__version__)
    from vllm.platforms import current_platform

    report(device=str(current_platform.device_type), platform=type(current_platform).__name__)
    from vllm import envs

    report(reads_backend_variable="VLLM_ATTENTION_BACKEND" in envs.environment_variables)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if not current_platform.device_type:
        return  # no device: vLLM cannot make a configuration
    report(backends={name: _backend_of(name) for name in ("auto", *dtype_names())})


def _backend_of(cache_dtype: str) -> str:
    """Make an engine's configuration and a layer; return the backend that the layer got.

    The first half is the dtype's registration, with our checks; the second the routing.
    """
    from kvq_vllm.planning.engine import engine_config, make_layers, plain_decoder
    from kvq_vllm.planning.shape import LayerShape

    layers = [LayerShape(num_kv_heads=1, head_size=128, value_size=128)]
    try:
        model = plain_decoder(layers, max_context=1024)
        vllm_config = engine_config(model, "bfloat16", cache_dtype, {}, 1024, None)
        make_layers(vllm_config, layers, "bfloat16")
    except Exception as error:  # whatever vLLM raises is the finding
        return f"error: {type(error).__name__}: {str(error).strip().splitlines()[-1].strip()}"
    attention = vllm_config.compilation_config.static_forward_context
    return str(next(iter(attention.values())).get_attn_backend().get_name())


def is_ours(backend: str) -> bool:
    return backend == OUR_BACKEND


if __name__ == "__main__":
    main(Path(sys.argv[1]))
