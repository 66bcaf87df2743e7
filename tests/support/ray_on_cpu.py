"""Let vLLM's Ray executor place workers on a CPU machine.

vLLM's CPU platform has no name for the resource that a worker takes, and so refuses Ray. With
Ray's own name for GPUs, of which a test cluster may claim any number, all else is as on GPUs:
actors, placement, the environment they get, and the way the configuration reaches them.
"""

from __future__ import annotations


def pretend() -> None:
    """Name the resource, in this process. Ray calls it in every worker that it starts."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"
