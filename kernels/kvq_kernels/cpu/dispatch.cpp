// The library's entry points: pick the best instruction set once, hand each call to it.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common.h"

#ifdef KVQ_WITH_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define KVQ_EXPORT extern "C" __attribute__((visibility("default")))
#define KVQ_DECLARE(isa)                        \
  extern "C" {                                  \
  void kvq_seal_##isa(const KvqArgs*);          \
  void kvq_write_ring_##isa(const KvqArgs*);    \
  void kvq_decode_##isa(const KvqArgs*);        \
  void kvq_prefill_##isa(const KvqArgs*);       \
  void kvq_fp8_write_##isa(const KvqArgs*);     \
  void kvq_fp8_attend_##isa(const KvqArgs*);    \
  }
#define KVQ_KERNELS(isa)                                                              \
  {#isa,           kvq_seal_##isa,      kvq_write_ring_##isa, kvq_decode_##isa, \
   kvq_prefill_##isa, kvq_fp8_write_##isa, kvq_fp8_attend_##isa}

KVQ_DECLARE(portable)
#ifdef KVQ_WITH_X86
KVQ_DECLARE(avx2)
KVQ_DECLARE(avx512)
#endif
#ifdef KVQ_WITH_AMX
extern "C" void kvq_prefill_amx(const KvqArgs*);
#endif

namespace {

using Kernel = void (*)(const KvqArgs*);

struct Kernels {
  const char* isa;
  Kernel seal, write_ring, decode, prefill, fp8_write, fp8_attend;
};

// Best last.
const Kernels kKernels[] = {
    KVQ_KERNELS(portable),
#ifdef KVQ_WITH_X86
    KVQ_KERNELS(avx2),
    KVQ_KERNELS(avx512),
#endif
#ifdef KVQ_WITH_AMX  // a matrix unit is of use where there are many queries
    {"amx", kvq_seal_avx512, kvq_write_ring_avx512, kvq_decode_avx512, kvq_prefill_amx,
     kvq_fp8_write_avx512, kvq_fp8_attend_avx512},
#endif
};

#ifdef KVQ_WITH_AMX
// Whether the CPU has AMX with bf16 and AVX-512 with bf16, and Linux lets this process use it.
bool may_use_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = d >> 24 & 1, amx_bf16 = d >> 22 & 1;
  if (!tiles || !amx_bf16) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl(2)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool supported(const char* isa) {
#ifdef KVQ_WITH_X86
  __builtin_cpu_init();  // this may run before the compiler's own constructors
  // These also check that the operating system saves the registers.
  if (!strcmp(isa, "avx2")) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  }
  if (!strcmp(isa, "avx512")) {  // Cascade Lake, Ice Lake, Zen 4 and later
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
  }
#endif
#ifdef KVQ_WITH_AMX
  if (!strcmp(isa, "amx")) return supported("avx512") && may_use_amx();
#endif
  return !strcmp(isa, "portable");
}

const Kernels* best() {
  const Kernels* found = nullptr;
  for (const Kernels& k : kKernels) {
    if (supported(k.isa)) found = &k;
  }
  return found;
}

const Kernels* selected = best();

struct Scratch {
  void* memory = nullptr;
  size_t bytes = 0;
  ~Scratch() { free(memory); }
};

thread_local Scratch scratch[2];

}  // namespace

extern "C" void* kvq_scratch(KvqScratch which, size_t bytes) {
  Scratch& s = scratch[which];
  if (s.bytes < bytes) {
    free(s.memory);
    s.bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    s.memory = aligned_alloc(4096, s.bytes);
    if (!s.memory) {  // no way to report from the middle of a parallel region
      fprintf(stderr, "kvq: out of memory: %zu bytes of scratch\n", s.bytes);
      abort();
    }
  }
  return s.memory;
}

KVQ_EXPORT int64_t kvq_abi_version() { return KVQ_ABI_VERSION; }
KVQ_EXPORT int64_t kvq_args_bytes() { return sizeof(KvqArgs); }
KVQ_EXPORT const char* kvq_source_hash() { return KVQ_SOURCE_HASH; }
KVQ_EXPORT const char* kvq_isa() { return selected->isa; }

// Returns 0, or -1 where the instruction set is unknown or this CPU lacks it.
KVQ_EXPORT int kvq_select_isa(const char* isa) {
  for (const Kernels& k : kKernels) {
    if (!strcmp(isa, k.isa) && supported(isa)) {
      selected = &k;
      return 0;
    }
  }
  return -1;
}

KVQ_EXPORT void kvq_seal(const KvqArgs* a) { selected->seal(a); }
KVQ_EXPORT void kvq_write_ring(const KvqArgs* a) { selected->write_ring(a); }
KVQ_EXPORT void kvq_decode(const KvqArgs* a) { selected->decode(a); }
KVQ_EXPORT void kvq_prefill(const KvqArgs* a) { selected->prefill(a); }
KVQ_EXPORT void kvq_fp8_write(const KvqArgs* a) { selected->fp8_write(a); }
KVQ_EXPORT void kvq_fp8_attend(const KvqArgs* a) { selected->fp8_attend(a); }
