#!/usr/bin/env python3
"""Pick a cache dtype in Python: the most precise one that holds the load.

    python examples/plan_in_python.py MODEL_FOLDER [REQUESTS [CONTEXT]]

Needs no GPU, and no vLLM either: without it, the formula plans.
"""

import sys

from kvq_vllm.planning import plan

GIB = 1 << 30
BY_PRECISION = ("auto", "kvq-int8", "kvq-k8v4", "kvq-int4")


def main(model: str, requests: int = 400, context: int = 4096) -> None:
    result = plan(model, memory=24 * GIB, contexts=[context])
    print(f"{result.model.name}: {result.cache_bytes / GIB:.1f} GiB of cache on a 24 GiB device")
    for cache_dtype in BY_PRECISION:
        fit = result.format(cache_dtype).at(context)
        print(f"  {cache_dtype:10} {fit.requests:5} requests of {context} tokens")
        if fit.requests >= requests:
            print(f"For {requests} requests, serve with --kv-cache-dtype {cache_dtype}")
            return
    sys.exit(f"{requests} requests do not fit: use more devices or a shorter context")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], *(int(word) for word in sys.argv[2:]))
