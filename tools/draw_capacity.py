#!/usr/bin/env python3
"""Draw docs/images/capacity.png: requests against context on an 8B model, planned by vLLM.

make pictures
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvq_vllm.planning import GIB, LayerShape, ModelShape, picture, plan

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "capacity.png"
SHAPE_8B = ModelShape(
    name="8B model (32 layers, 8 kv heads, head size 128)",
    layers=(LayerShape(num_kv_heads=8, head_size=128, value_size=128),) * 32,
    num_heads=32,
    max_context=131072,
    dtype="bfloat16",
    weight_bytes=16 * GIB,
)


def main() -> None:
    result = plan(
        SHAPE_8B,
        cache_memory=20 * GIB,
        contexts=picture.contexts(SHAPE_8B.max_context),
        use_vllm=True,
    )
    if problems := [f"{f.cache_dtype}: {f.problem}" for f in result.formats if f.problem]:
        sys.exit("vLLM did not plan " + "; ".join(problems))
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    picture.draw(result, PICTURE)
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
