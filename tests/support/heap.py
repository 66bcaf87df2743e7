"""What a worker has allocated, told by itself: ``--worker-extension-cls support.heap.Heap``."""

from __future__ import annotations

import ctypes


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Heap:
    """Mixed into vLLM's worker."""

    def heap_bytes(self) -> dict[str, int]:
        """Bytes in use, tensors on the CPU among them, without what malloc keeps for reuse."""
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _Mallinfo2
        info = mallinfo2()
        return {"bytes": info.uordblks + info.hblkhd}
