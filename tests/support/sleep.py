"""Sleep mode on a CPU: vLLM's own worker code over a stand-in for its allocator.

vLLM's allocator for sleep mode exists for GPUs only, and its CPU worker ignores sleep. Everything
above the allocator is plain Python, so it runs here: the worker's ``sleep`` and ``wake_up``, the
tags, the buffers that are saved at level 2, and the reload.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

GARBAGE = 0xFF
"""NaN in every float format."""


class Allocator:
    """Does to tensors what ``CuMemAllocator`` does to the memory below them.

    It owns what PyTorch calls create on the device inside :meth:`use_memory_pool`, by tag. Asleep
    and after waking, what was not offloaded holds garbage.
    """

    def __init__(self) -> None:
        self.owned: dict[int, tuple[str, torch.Tensor]] = {}  # by address
        self.saved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self.discarded: set[str] = set()  # tags of the last sleep

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        with _Recorder(self.owned, tag):
            yield

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        self.discarded = set()
        for tag, tensor in self.owned.values():
            storage = tensor.untyped_storage()
            if tag in offload_tags:
                self.saved.append((storage, storage.clone()))
            else:
                self.discarded.add(tag)
            storage.fill_(GARBAGE)

    def wake_up(self, tags: list[str] | None) -> None:
        assert tags is None, "the tests wake everything at once"
        for storage, content in self.saved:
            storage.copy_(content)
        self.saved.clear()


class _Recorder(TorchFunctionMode):
    """Notes the tensors that would lie on a GPU.

    Here all is CPU. A tensor counts as the device's if its call names a ``torch.device``, as vLLM
    does for its worker's device, and not the string "cpu", or if it is made of such tensors. Wide
    integers do not count: vLLM's CPU kernels keep pointers to memory of their own in them.
    """

    def __init__(self, owned: dict[int, tuple[str, torch.Tensor]], tag: str) -> None:
        super().__init__()
        self.owned = owned
        self.tag = tag

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        arguments = [*args, *kwargs.values()]
        if function is torch.Tensor.cpu or any(
            isinstance(x, str) and x == "cpu" for x in arguments
        ):
            return result
        named = any(isinstance(x, torch.device) for x in arguments)
        inputs = {_address(x) for x in _tensors(arguments)}
        if named or inputs & self.owned.keys():
            for tensor in _tensors([result]):
                address = _address(tensor)
                narrow = tensor.is_floating_point() or tensor.element_size() == 1
                if address and narrow and (named or address not in inputs):
                    self.owned[address] = (self.tag, tensor)  # the innermost pool comes last
        return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory begins, 0 where it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.device.type == "cpu" else 0


def make_possible(monkeypatch: Any) -> Allocator:
    """Give engines started from now on the GPU worker's sleep mode; return their allocator."""
    from vllm import device_allocator
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    allocator = Allocator()
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
    for name in ("sleep", "wake_up"):
        monkeypatch.setattr(CPUWorker, name, getattr(Worker, name))
    monkeypatch.setattr(
        CPUWorker,
        "_maybe_get_memory_pool_context",
        lambda worker, tag: allocator.use_memory_pool(tag),
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (1 << 30, 1 << 31))
    return allocator
