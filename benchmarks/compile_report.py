"""What the compiler makes of the Triton kernels, for every architecture, without a GPU.

    python benchmarks/compile_report.py [--quick] [--target sm_90] [--kernel decode] [--json FILE]

Prints, per kernel and target: registers, spills, shared memory, and of the kernel's main loop the
width of its loads, its matrix instruction and its instructions per token and kv head.

The kernels' launchers run as they are, on tensors without storage, with a recorder in place of
the GPU's launch (:func:`record`): so what is compiled is what a GPU of that architecture would be
given, with the product's own tuning. To add a kernel, write a function like :func:`decode_cases`
and put it in ``REGISTRY``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvq_kernels import AttentionParams, Batch, Format, LayerCache
from kvq_kernels.fp8 import Fp8Cache, Fp8Format
from kvq_kernels.fp8 import triton as fp8
from kvq_kernels.triton import decode, prefill, store, tuning, write_ring

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""Architecture, as in :mod:`kvq_kernels.triton.tuning`, to Triton's target."""

MULTIPROCESSORS = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 188}
"""Of A100, L40S, H200, B200 and RTX PRO 6000; others count as 304, an MI300X."""

POINTERS = {
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}


# --- cases -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A shape of a kernel.

    Attributes:
        kernel: name in the report.
        fmt: format of the cache.
        gqa: query heads per kv head.
        launch: calls the kernel's launcher on tensors of device "meta".
        function: name of the jit function that is reported; the launcher may launch others too.
        tokens: name of the constant that has the tokens per iteration of the main loop, or None
            for a kernel whose time does not hang on one.
        quick: whether ``--quick`` includes it.

    """

    kernel: str
    fmt: Format | Fp8Format
    gqa: int
    launch: Callable[[], None]
    function: str
    tokens: str | None
    quick: bool = False


def meta_cache(
    fmt: Format, num_requests: int, num_kv_heads: int, dtype: torch.dtype, query_len: int = 1
) -> LayerCache:
    """Return a cache of 64 units per request without storage."""
    pages = (1024, num_kv_heads, fmt.unit_size, fmt.bytes_per_token)
    ring = (1024, num_kv_heads, 32, 2 * fmt.head_size)
    return LayerCache(
        fmt,
        pages=torch.empty(pages, dtype=torch.uint8, device="meta"),
        block_table=torch.empty((num_requests, 64), dtype=torch.int32, device="meta"),
        ring=torch.empty(ring, dtype=dtype, device="meta"),
        ring_table=torch.empty((num_requests, 16), dtype=torch.int32, device="meta"),
        ring_capacity=fmt.unit_size + 32 * (query_len > 1),
    )


def launch_decode(
    fmt: Format,
    gqa: int,
    query_len: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    **params: Any,
) -> None:
    """Decode a batch of 8 requests with 8 kv heads."""
    num_requests, num_kv_heads = 8, 8
    shape = (num_requests * query_len, num_kv_heads * gqa, fmt.head_size)
    query = torch.empty(shape, dtype=dtype, device="meta")
    batch = Batch(
        torch.empty(num_requests + 1, dtype=torch.int32, device="meta"),
        torch.empty(num_requests, dtype=torch.int32, device="meta"),
    )
    cache = meta_cache(fmt, num_requests, num_kv_heads, dtype, query_len)
    decode(query, cache, batch, AttentionParams(fmt.head_size**-0.5, **params), query)


def decode_cases() -> Iterator[Case]:
    """The decode kernel's formats, head sizes and GQA ratios; all its features; its combine."""
    for name in ("kvq-int4", "kvq-k8v4", "kvq-int8"):
        for head_size in (64, 80, 96, 128, 192, 256):
            for gqa in (1, 4, 6, 8, 16):
                fmt = Format.create(name, head_size)
                yield Case(
                    "decode",
                    fmt,
                    gqa,
                    partial(launch_decode, fmt, gqa),
                    function="_attend",
                    tokens="TILE",
                    quick=(head_size, gqa) == (128, 4),
                )
    per_head = torch.empty(32, dtype=torch.float32, device="meta")
    for name, dtype in (("kvq-int4", torch.float16), ("kvq-int8", torch.float32)):
        fmt = Format.create(name, 128)
        yield Case(
            "decode-features",
            fmt,
            4,
            partial(
                launch_decode,
                fmt,
                4,
                query_len=4,
                dtype=dtype,
                soft_cap=50.0,
                sliding_window=4096,
                sinks=per_head,
                alibi_slopes=per_head,
            ),
            function="_attend",
            tokens="TILE",
        )
    for head_size in (80, 128, 256):
        fmt = Format.create("kvq-int4", head_size)
        yield Case(
            "combine",
            fmt,
            4,
            partial(launch_decode, fmt, 4),
            function="_combine",
            tokens=None,
            quick=head_size == 128,
        )


def launch_step(operation: Callable[..., None], fmt: Format, gqa: int, dtype: torch.dtype) -> None:
    """Launch `operation`, store, write_ring or prefill, on a chunk of one request."""
    num_tokens, num_kv_heads = 1024, 8
    cache = meta_cache(fmt, 1, num_kv_heads, dtype)
    batch = Batch(
        torch.empty(2, dtype=torch.int32, device="meta"),
        torch.empty(1, dtype=torch.int32, device="meta"),
    )
    shape = (num_tokens, num_kv_heads, fmt.head_size)
    key = torch.empty(shape, dtype=dtype, device="meta")
    if operation is prefill:
        shape = (num_tokens, num_kv_heads * gqa, fmt.head_size)
        query = torch.empty(shape, dtype=dtype, device="meta")
        params = AttentionParams(fmt.head_size**-0.5)
        prefill(query, key, key, cache, batch, params, torch.empty_like(query))
    else:
        operation(key, key, cache, batch)


def store_cases() -> Iterator[Case]:
    """Sealing with the ring write in it, and the ring write alone. No kernel has a hot loop."""
    for name in ("kvq-int4", "kvq-k8v4", "kvq-int8"):
        for head_size in (64, 80, 96, 128, 192, 256):
            fmt = Format.create(name, head_size)
            launch = partial(launch_step, store, fmt, 1, torch.bfloat16)
            yield Case("store", fmt, 1, launch, "_seal_kernel", None, quick=head_size == 128)
    fmt = Format.create("kvq-int4", 128)
    launch = partial(launch_step, write_ring, fmt, 1, torch.bfloat16)
    yield Case("write_ring", fmt, 1, launch, "_write_ring_kernel", None, quick=True)


def prefill_cases() -> Iterator[Case]:
    """Formats, head sizes and GQA ratios of the prefill kernel, in bf16.

    Instructions per token-head are those for all query rows of a program.
    """
    for name in ("kvq-int4", "kvq-k8v4", "kvq-int8"):
        for head_size in (64, 80, 96, 128, 192, 256):
            for gqa in (1, 4, 6, 8, 16):
                fmt = Format.create(name, head_size)
                launch = partial(launch_step, prefill, fmt, gqa, torch.bfloat16)
                quick = (head_size, gqa) == (128, 4)
                yield Case("prefill", fmt, gqa, launch, "_prefill_kernel", "SEALED_TILE", quick)


def fp8_cases() -> Iterator[Case]:
    """The kernels of the fp8 formats, in bf16."""
    for name in ("kvq-fp8_e4m3", "kvq-fp8_e5m2"):
        for head_size in (64, 96, 128, 256):
            fmt = Fp8Format(name, head_size)
            quick = head_size == 128
            launch = partial(launch_fp8, fp8.write, fmt, 1)
            yield Case("fp8-write", fmt, 1, launch, "_write", None, quick)
            launch = partial(launch_fp8, fp8.decode, fmt, 4)
            yield Case("fp8-decode", fmt, 4, launch, "_attend", "TILE", quick)
            yield Case("fp8-combine", fmt, 4, launch, "_combine", None, quick)
            launch = partial(launch_fp8, fp8.prefill, fmt, 4)
            yield Case("fp8-prefill", fmt, 4, launch, "_attend", "TILE", quick)


def launch_fp8(operation: Callable[..., None], fmt: Fp8Format, gqa: int) -> None:
    """Launch `operation`, write, decode or prefill: 8 decodes, or a chunk of one request."""
    num_requests, num_tokens = (8, 8) if operation is fp8.decode else (1, 1024)
    num_kv_heads = 8
    scale = torch.empty(num_kv_heads, dtype=torch.float32, device="meta")
    pages = (1024, num_kv_heads, 16, fmt.bytes_per_token)
    cache = Fp8Cache(
        fmt,
        pages=torch.empty(pages, dtype=torch.uint8, device="meta"),
        block_table=torch.empty((num_requests, 512), dtype=torch.int32, device="meta"),
        key_scale=scale,
        value_scale=scale,
    )
    batch = Batch(
        torch.empty(num_requests + 1, dtype=torch.int32, device="meta"),
        torch.empty(num_requests, dtype=torch.int32, device="meta"),
    )

    def tokens(heads: int) -> torch.Tensor:
        shape = (num_tokens, heads, fmt.head_size)
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    if operation is fp8.write:
        operation(tokens(num_kv_heads), tokens(num_kv_heads), cache, batch)
    else:
        query = tokens(num_kv_heads * gqa)
        params = AttentionParams(fmt.head_size**-0.5)
        operation(query, cache, batch, params, torch.empty_like(query))


REGISTRY: list[Callable[[], Iterator[Case]]] = [
    decode_cases,
    store_cases,
    prefill_cases,
    fp8_cases,
]


# --- recording launches ----------------------------------------------------------------------


@dataclass
class Launch:
    """One launch of a kernel: what Triton needs to compile it."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: list[int]
    options: dict[str, int]

    def compile(self, target: GPUTarget) -> Any:
        attrs = {(i,): [["tt.divisibility", 16]] for i in self.divisible}
        source = ASTSource(self.kernel, self.signature, self.constants, attrs)
        return triton.compile(source, target=target, options=self.options)


@contextmanager
def record(arch: str) -> Iterator[list[Launch]]:
    """Collect launches instead of making them, as if on a device of `arch`."""
    launches: list[Launch] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_launch(kernel, args, kwargs))

    device = tuning.DeviceInfo(arch, MULTIPROCESSORS.get(arch, 304))
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(tuning, "device_info", return_value=device),
    ):
        yield launches


def _launch(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """Specialise arguments as Triton does: 1 and None are constants, multiples of 16 are noted."""
    options = {name: kwargs.pop(name) for name in set(kwargs) - set(kernel.arg_names)}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, divisible = {}, {}, []
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[param.name] = "constexpr"
            constants[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
            divisible.append(index)
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32"
            if value % 16 == 0:
                divisible.append(index)
    return Launch(kernel, signature, constants, divisible, options)


# --- reading the compiler's output -----------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the report; what is in the main loop is counted per iteration of a warp.

    Attributes:
        kernel, format, head_size, gqa, target, warps, stages: what was compiled.
        registers: 32-bit registers per thread.
        spill_bytes: stack per thread; these kernels have no other use for one.
        shared_bytes: per program.
        load_bits: width of the global loads that bring most of the bytes.
        wide_bytes: bytes per iteration of the program that come in 128-bit loads.
        tokens: per iteration.
        mma: the matrix instruction.
        instructions_per_token_head: of all warps, per sealed token of a kv head; None, and what
            precedes it empty, for kernels without such a loop.

    """

    kernel: str
    format: str
    head_size: int
    gqa: int
    target: str
    warps: int
    stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    load_bits: int
    wide_bytes: int
    tokens: int
    mma: str
    instructions_per_token_head: float | None


@dataclass
class Code:
    """A kernel's machine code and what it needs."""

    registers: int
    spill_bytes: int
    lanes: int
    instructions: list[str]
    labels: dict[str, int] = field(default_factory=dict)

    def main_loop(self) -> list[str]:
        """Return the instructions of the innermost loop with the most byte permutations.

        Only the loop over packed codes has any to speak of.
        """
        loops = []
        for i, instruction in enumerate(self.instructions):
            match = re.match(
                r"(?:@!?\w+ )?(?:BRA|s_cbranch\w*|s_branch)\b.*?(\.?L\w+)", instruction
            )
            if match and (begin := self.labels.get(match[1], i)) < i:
                loops.append((begin, i + 1))
        innermost = [
            (a, b)
            for a, b in loops
            if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)
        ]
        bodies = [self.instructions[a:b] for a, b in innermost]
        return max(bodies, key=lambda body: sum(bool(UNPACK.search(i)) for i in body), default=[])


UNPACK = re.compile(r"PRMT|LOP3|v_perm|v_and_or|v_bfi")
MMA = re.compile(r"\b(\w*MMA\S*|v_mfma\w+)")
GLOBAL_LOAD = re.compile(r"\b(?:LDGSTS|LDG)\.E\S*|(?:global|buffer)_load_\w+")


def read_nvidia(kernel: Any) -> Code:
    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        sass = _output(tools / "nvdisasm", "-c", file.name)
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match, usage
    code = Code(int(match[1]), int(match[2]), 32, [])
    for line in sass.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            code.labels[label[1]] = len(code.instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            code.instructions.append(instruction[1])
    return code


def read_amd(kernel: Any) -> Code:
    text = kernel.asm["amdgcn"]

    def number(key: str) -> int:
        match = re.search(rf"\.{key}:\s+(\d+)", text)
        assert match, key
        return int(match[1])

    code = Code(
        number("vgpr_count") + number("agpr_count"), number("private_segment_fixed_size"), 64, []
    )
    for line in text.splitlines():
        if label := re.match(r"(\.?L\w+):", line):
            code.labels[label[1]] = len(code.instructions)
        elif instruction := re.match(r"\t([a-z]\w+(?:\s.*)?)$", line):
            code.instructions.append(instruction[1].split(";")[0].strip())
    return code


def _output(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _load_bits(instruction: str) -> int:
    if match := re.search(r"dwordx(\d)", instruction):
        return 32 * int(match[1])
    if match := re.search(r"\.(128|64|U8|S8|U16|S16)\b|_(ubyte|ushort|sbyte|short)", instruction):
        width = match[1] or match[2]
        return {"128": 128, "64": 64}.get(width, 8 if "8" in width or "byte" in width else 16)
    return 32


def report(case: Case, target: str) -> Row:
    """Compile a case for a target and read the result."""
    with record(target) as launches:
        case.launch()
    launch = next(each for each in launches if each.kernel.__name__ == case.function)
    compiled = launch.compile(TARGETS[target])
    code = (read_nvidia if target.startswith("sm_") else read_amd)(compiled)
    loop = code.main_loop() if case.tokens else []
    warps = launch.options["num_warps"]
    tokens = launch.constants[case.tokens] if case.tokens else 0
    loaded: Counter[int] = Counter()
    for instruction in loop:
        if GLOBAL_LOAD.search(instruction):
            bits = _load_bits(instruction)
            loaded[bits] += bits // 8 * code.lanes * warps
    matrix = Counter(match[1] for each in loop if (match := MMA.search(each)))
    return Row(
        kernel=case.kernel,
        format=case.fmt.name,
        head_size=case.fmt.head_size,
        gqa=case.gqa,
        target=target,
        warps=warps,
        stages=launch.options.get("num_stages", 0),
        registers=code.registers,
        spill_bytes=code.spill_bytes,
        shared_bytes=compiled.metadata.shared,
        load_bits=max(loaded, key=lambda bits: loaded[bits], default=0),
        wide_bytes=loaded[128],
        tokens=tokens,
        mma=matrix.most_common(1)[0][0] if matrix else "none",
        instructions_per_token_head=round(len(loop) * warps / tokens, 1) if tokens else None,
    )


def _print(row: Row) -> None:
    resources = (
        f"{row.kernel:8} {row.format:9} D={row.head_size:<3} gqa={row.gqa:<2} {row.target:6} "
        f"{row.warps} warps {row.registers:3} registers {row.spill_bytes:4} B spilled "
        f"{row.shared_bytes:6} B shared"
    )
    loop = (
        f"  {row.load_bits}-bit loads  {row.mma}"
        f"  {row.instructions_per_token_head} instructions per token-head"
    )
    print(resources + (loop if row.tokens else ""), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one head size and GQA per format")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--kernel", help="only this kernel")
    parser.add_argument("--format", help="only this format")
    parser.add_argument("--head-size", type=int, help="only this head size")
    parser.add_argument("--gqa", type=int, help="only this GQA")
    parser.add_argument("--json", type=Path, help="write the rows here, as a list of objects")
    args = parser.parse_args()
    # The launchers say what they want; Triton 3.9 warns about its default all the same.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    rows = []
    for case in (case for cases in REGISTRY for case in cases()):
        if (
            (args.quick and not case.quick)
            or (args.kernel not in (None, case.kernel))
            or (args.format not in (None, case.fmt.name))
            or (args.head_size not in (None, case.fmt.head_size))
            or (args.gqa not in (None, case.gqa))
        ):
            continue
        for target in args.target or TARGETS:
            rows.append(report(case, target))
            _print(rows[-1])
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
