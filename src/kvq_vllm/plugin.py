"""Entry point of the group ``vllm.general_plugins``."""

from __future__ import annotations

from kvq_vllm.checks import version_problem


def register() -> None:
    """Teach this process's vLLM the kvq cache dtypes.

    vLLM calls it in every process, possibly more than once. Nothing changes for other cache
    dtypes. With an unsupported vLLM nothing is registered, and choosing a kvq dtype fails with
    the reason.
    """
    import vllm

    from kvq_vllm import registration

    if problem := version_problem(vllm.__version__):
        registration.refuse_dtypes(problem)
        return
    registration.register_dtypes()
    registration.register_routing()
    registration.register_config_check()
