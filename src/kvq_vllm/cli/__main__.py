"""``python -m kvq_vllm.cli``, the same as ``kvq``."""

from kvq_vllm.cli import main

main()
