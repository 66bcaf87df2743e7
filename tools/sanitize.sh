#!/bin/sh
# Run the CPU kernels' tests on a build with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   tools/sanitize.sh [arguments for pytest]
#
# PYTHON is the interpreter (default: .venv/bin/python), CXX the compiler. GCC is the one whose
# runtime libraries are found here; with clang, set SANITIZER_LIBRARIES to the list to preload.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
compiler=${CXX:-g++}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

export PYTHONPATH="kernels${PYTHONPATH:+:$PYTHONPATH}"
# -O1: the vector code needs inlining to compile at all.
CXX=$compiler "$python" -m kvq_kernels.cpu.build --output "$build/libkvq_cpu.so" \
    --flags "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"

# The interpreter is not built with sanitizers, so their runtimes go first. libstdc++ must be
# there when they start, or C++ exceptions of PyTorch are not intercepted.
libraries=${SANITIZER_LIBRARIES:-$("$compiler" -print-file-name=libasan.so) \
$("$compiler" -print-file-name=libubsan.so) $("$compiler" -print-file-name=libstdc++.so)}
# Python itself leaks by design; only errors of memory use count.
LD_PRELOAD=$libraries \
ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 \
UBSAN_OPTIONS=print_stacktrace=1 \
PYTHONMALLOC=malloc \
KVQ_CPU_LIBRARY=$build/libkvq_cpu.so \
    "$python" -m pytest tests/kernels/test_cpu.py -q -p no:cacheprovider "$@"
