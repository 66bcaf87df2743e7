"""Generate with the reference and with the Triton kernels, in Triton's interpreter.

    python interpreted_engine.py V1|V2 MODEL

Prints a JSON object: format to kernels to tokens. A program of its own, because Triton decides at
import whether it interprets, and vLLM whether it has Triton.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from kvq_kernels import SCHEMES, reference
from support import engines
from support.models import TINY_VOCABULARY

KERNELS = "triton"
NEW_TOKENS = 5
UNIT_SIZE = 64
LENGTHS = [3, 62, 64, 130]
"""No sealed unit, one that decoding completes, a whole one, two of them."""
CHUNK = 96


class InterpreterDriver:
    """Stands in for a GPU's driver: all that vLLM asks is whether it is active."""

    @staticmethod
    def is_active() -> bool:
        return True


def use_runner(runner: str) -> None:
    """Choose vLLM's model runner; the second one consists of Triton kernels."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "V2"))
    if runner == "V2":
        import triton.backends

        triton.backends.backends["cpu"] = SimpleNamespace(driver=InterpreterDriver)


def prompts() -> list[list[int]]:
    return [
        [(7 * i + 31 * j) % (TINY_VOCABULARY - 1) + 1 for i in range(length)]
        for j, length in enumerate(LENGTHS)
    ]


def generate(name: str, runner: str, model: str) -> dict[str, list[list[int]]]:
    """Tokens with the Triton kernels, then with the reference in the same engine."""
    with engines.engine(
        model,
        kv_cache_dtype=name,
        skip_tokenizer_init=True,
        max_num_batched_tokens=CHUNK,
        additional_config={"kvq": {"unit_size": UNIT_SIZE}},
    ) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        module = type(worker.model_runner).__module__
        assert module.endswith("cpu_model_runner" if runner == "V1" else "cpu.model_runner")
        tokens = {}
        layers = worker.model_runner.compilation_config.static_forward_context.values()
        impls = [layer.impl for layer in layers if hasattr(layer, "impl")]
        for kernels in (KERNELS, "reference"):
            assert impls[0].kernels.__name__ == f"kvq_kernels.{kernels}"
            tokens[kernels] = engines.generate(llm, prompts(), NEW_TOKENS)
            for impl in impls:
                impl.kernels = reference
        return tokens


def main(runner: str, model: str) -> None:
    os.environ["KVQ_KERNELS"] = KERNELS
    use_runner(runner)
    print(json.dumps({name: generate(name, runner, model) for name in SCHEMES}))


if __name__ == "__main__":
    main(*sys.argv[1:])
