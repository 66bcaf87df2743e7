// The vector operations the kernels are written in, for AVX-512, AVX2 and anything else.
//
// Vectors are GCC/Clang vector extensions, so + - * / & and comparisons are plain operators.
// A vector has kLanes 32-bit lanes, or 2 * kLanes 16-bit ones. What the operators cannot say
// (conversions, fused and integer multiply-add, horizontal sums) has a function here, with
// intrinsics where the instruction set has them and a loop elsewhere.
#pragma once

#include "common.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#define KVQ_AVX512 1
#include <immintrin.h>
#if defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define KVQ_AMX 1
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KVQ_AVX2 1
#include <immintrin.h>
#elif defined(__SSE2__)  // any x86-64: only where the compiler does not find it by itself
#define KVQ_SSE2 1
#include <emmintrin.h>
#endif

namespace kvq {
namespace {

#if defined(KVQ_AVX512)
constexpr int kLanes = 16;
#elif defined(KVQ_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kShorts = 2 * kLanes;

typedef float VF __attribute__((vector_size(4 * kLanes)));
typedef int32_t VI __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VU __attribute__((vector_size(4 * kLanes)));
typedef int16_t VS __attribute__((vector_size(4 * kLanes)));

// Ask for `bytes` bytes at `p`, any address.
KVQ_INLINE void prefetch(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// Unaligned loads and stores.
template <typename V, typename T>
KVQ_INLINE V load(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
KVQ_INLINE VF loadf(const float* p) { return load<VF>(p); }
template <typename V, typename T>
KVQ_INLINE void store(T* p, V v) {
  memcpy(p, &v, sizeof v);
}

KVQ_INLINE VF splat(float x) { return x - VF{}; }
KVQ_INLINE VI splat(int32_t x) { return x - VI{}; }
KVQ_INLINE VI bits_of(VF v) { return load<VI>(&v); }
KVQ_INLINE VF float_of(VI v) { return load<VF>(&v); }
KVQ_INLINE VF select(VI mask, VF a, VF b) { return mask ? a : b; }
KVQ_INLINE VF abs_of(VF v) { return float_of(bits_of(v) & 0x7fffffff); }

// As the instructions: where an operand is NaN, the result is `b`.
KVQ_INLINE VF min_of(VF a, VF b) {
#if defined(KVQ_AVX512)
  return _mm512_min_ps(a, b);
#elif defined(KVQ_AVX2)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
KVQ_INLINE VF max_of(VF a, VF b) {
#if defined(KVQ_AVX512)
  return _mm512_max_ps(a, b);
#elif defined(KVQ_AVX2)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// a * b + c
KVQ_INLINE VF fma_of(VF a, VF b, VF c) {
#if defined(KVQ_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(KVQ_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

KVQ_INLINE VF to_float(VI v) { return __builtin_convertvector(v, VF); }

// Rounds to nearest even. Only for |v| < 2^22, which lets the portable version do without a
// rounding instruction: at 1.5 * 2^23 the spacing of floats is 1.
KVQ_INLINE VI round_to_int(VF v) {
#if defined(KVQ_AVX512)
  return (VI)_mm512_cvtps_epi32(v);
#elif defined(KVQ_AVX2)
  return (VI)_mm256_cvtps_epi32(v);
#else
  return bits_of(v + 12582912.0f) - 0x4b400000;
#endif
}

// Two vectors of integers within int16's range as one, x's first.
KVQ_INLINE VS pack_shorts(VI x, VI y) {
#if defined(KVQ_AVX512)
  const __m512i packed = _mm512_packs_epi32((__m512i)x, (__m512i)y);  // per 128-bit lane
  return (VS)_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
#elif defined(KVQ_AVX2)
  const __m256i packed = _mm256_packs_epi32((__m256i)x, (__m256i)y);  // per 128-bit lane
  return (VS)_mm256_permute4x64_epi64(packed, 0xd8);
#else
  VS s;
  for (int i = 0; i < kLanes; ++i) {
    s[i] = static_cast<int16_t>(x[i]);
    s[kLanes + i] = static_cast<int16_t>(y[i]);
  }
  return s;
#endif
}

// kShorts bytes, zero-extended.
KVQ_INLINE VS load_bytes(const uint8_t* p) {
#if defined(KVQ_AVX512)
  return (VS)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif defined(KVQ_AVX2)
  return (VS)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kShorts)));
  return __builtin_convertvector(load<Bytes>(p), VS);
#endif
}

// kLanes bytes, zero-extended.
KVQ_INLINE VI load_bytes_as_ints(const uint8_t* p) {
#if defined(KVQ_AVX512)
  return (VI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(KVQ_AVX2)
  return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(load<Bytes>(p), VI);
#endif
}

// The first `n` lanes, values 0..255, as bytes.
KVQ_INLINE void store_as_bytes(uint8_t* p, VI v, int64_t n) {
#if defined(KVQ_AVX512)
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v);
  if (n >= kLanes) return _mm_storeu_si128((__m128i*)p, bytes);
  _mm_mask_storeu_epi8(p, static_cast<__mmask16>((1u << n) - 1), bytes);
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes bytes = __builtin_convertvector(v, Bytes);
  memcpy(p, &bytes, static_cast<size_t>(n < kLanes ? n : kLanes));
#endif
}

// (a * b + 2^14) >> 15 of 16-bit lanes.
KVQ_INLINE VS multiply_high(VS a, VS b) {
#if defined(KVQ_AVX512)
  return (VS)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b);
#elif defined(KVQ_AVX2)
  return (VS)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b);
#else
  VS s;
  for (int i = 0; i < kShorts; ++i) s[i] = static_cast<int16_t>((a[i] * b[i] + (1 << 14)) >> 15);
  return s;
#endif
}

// acc + products of 16-bit lanes, summed over pairs. Which pair goes to which lane differs: every
// user sums all lanes in the end.
KVQ_INLINE VI multiply_add(VI acc, VS a, VS b) {
#if defined(KVQ_AVX512)
  return (VI)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(KVQ_AVX2)
  return acc + (VI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(KVQ_SSE2)
  return acc + (VI)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  typedef int16_t Half __attribute__((vector_size(2 * kLanes)));
  Half x[2], y[2];
  memcpy(x, &a, sizeof x);
  memcpy(y, &b, sizeof y);
  acc += __builtin_convertvector(x[0], VI) * __builtin_convertvector(y[0], VI);
  return acc + __builtin_convertvector(x[1], VI) * __builtin_convertvector(y[1], VI);
#endif
}

// Compute `v` here rather than where the compiler would schedule it. GCC likes to start many
// products before it adds any, and then has no registers left for the sums.
KVQ_INLINE void in_order(VI& v) {
#if defined(KVQ_AVX512) || defined(KVQ_AVX2)
  asm volatile("" : "+v"(v));
#else
  (void)v;
#endif
}

// Lane i of the result is the sum of the lanes of a[i]: a transposition with additions.
KVQ_INLINE VI sums_of(const VI a[kLanes]) {
#if defined(KVQ_AVX512)
  __m512i q[4];  // per 128-bit lane: partial sums of four vectors
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i x = (__m512i)a[4 * i], y = (__m512i)a[4 * i + 1];
    const __m512i z = (__m512i)a[4 * i + 2], w = (__m512i)a[4 * i + 3];
    const __m512i xy = _mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
    const __m512i zw = _mm512_add_epi32(_mm512_unpacklo_epi32(z, w), _mm512_unpackhi_epi32(z, w));
    q[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(xy, zw), _mm512_unpackhi_epi64(xy, zw));
  }
  const __m512i lo = _mm512_add_epi32(_mm512_shuffle_i32x4(q[0], q[1], 0x88),
                                      _mm512_shuffle_i32x4(q[0], q[1], 0xdd));
  const __m512i hi = _mm512_add_epi32(_mm512_shuffle_i32x4(q[2], q[3], 0x88),
                                      _mm512_shuffle_i32x4(q[2], q[3], 0xdd));
  return (VI)_mm512_add_epi32(_mm512_shuffle_i32x4(lo, hi, 0x88),
                              _mm512_shuffle_i32x4(lo, hi, 0xdd));
#elif defined(KVQ_AVX2)
  const __m256i x = _mm256_hadd_epi32(_mm256_hadd_epi32((__m256i)a[0], (__m256i)a[1]),
                                      _mm256_hadd_epi32((__m256i)a[2], (__m256i)a[3]));
  const __m256i y = _mm256_hadd_epi32(_mm256_hadd_epi32((__m256i)a[4], (__m256i)a[5]),
                                      _mm256_hadd_epi32((__m256i)a[6], (__m256i)a[7]));
  return (VI)_mm256_add_epi32(_mm256_permute2x128_si256(x, y, 0x20),
                              _mm256_permute2x128_si256(x, y, 0x31));
#else
  VI sums;
  for (int i = 0; i < kLanes; ++i) sums[i] = a[i][0] + a[i][1] + a[i][2] + a[i][3];
  return sums;
#endif
}

KVQ_INLINE VF sums_of(const VF a[kLanes]) {
#if defined(KVQ_AVX512)
  __m512 q[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 x = a[4 * i], y = a[4 * i + 1], z = a[4 * i + 2], w = a[4 * i + 3];
    const __m512d xy = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    const __m512d zw = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(z, w), _mm512_unpackhi_ps(z, w));
    q[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(xy, zw), (__m512)_mm512_unpackhi_pd(xy, zw));
  }
  const __m512 lo = _mm512_add_ps(_mm512_shuffle_f32x4(q[0], q[1], 0x88),
                                  _mm512_shuffle_f32x4(q[0], q[1], 0xdd));
  const __m512 hi = _mm512_add_ps(_mm512_shuffle_f32x4(q[2], q[3], 0x88),
                                  _mm512_shuffle_f32x4(q[2], q[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(lo, hi, 0x88), _mm512_shuffle_f32x4(lo, hi, 0xdd));
#elif defined(KVQ_AVX2)
  const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  const __m256 y = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
#else
  VF sums;
  for (int i = 0; i < kLanes; ++i) sums[i] = (a[i][0] + a[i][1]) + (a[i][2] + a[i][3]);
  return sums;
#endif
}

KVQ_INLINE float sum_of(VF v) {
#if defined(KVQ_AVX512)
  return _mm512_reduce_add_ps(v);
#elif defined(KVQ_AVX2)
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[kLanes];
  store(lanes, v);
#pragma GCC unroll 4
  for (int n = kLanes / 2; n > 0; n /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  }
  return lanes[0];
#endif
}
KVQ_INLINE float max_lane(VF v) {  // NaN lanes may be missed
#if defined(KVQ_AVX512)
  return _mm512_reduce_max_ps(v);
#elif defined(KVQ_AVX2)
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[kLanes];
  store(lanes, v);
#pragma GCC unroll 4
  for (int n = kLanes / 2; n > 0; n /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
  }
  return lanes[0];
#endif
}
KVQ_INLINE float min_lane(VF v) { return -max_lane(-v); }

// Scale and zero of a part of a key group, as reference.cut_meta: `cuts` has the low end's cut in
// the low nibble. All but the addition is exact.
KVQ_INLINE void cut_meta(VI cuts, VF& scale, VF& zero) {
  const VI low = cuts & 15, high = cuts >> 4;
  zero += scale * (to_float(low * 15) * kCutStep);
  scale *= to_float(32 - low - high) * kCutStep;
}

// kLanes pairs (fp16 scale, fp16 zero).
KVQ_INLINE void load_meta(const uint8_t* p, VF& scale, VF& zero) {
  const VI pairs = load<VI>(p);
#if defined(KVQ_AVX512)
  scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)pairs));
  zero = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)pairs, 16)));
#elif defined(KVQ_AVX2)
  const __m256i low = _mm256_and_si256((__m256i)pairs, _mm256_set1_epi32(0xffff));
  const __m256i high = _mm256_srli_epi32((__m256i)pairs, 16);
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  scale = _mm256_cvtph_ps(_mm256_castsi256_si128(both));
  zero = _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1));
#else
  for (int i = 0; i < kLanes; ++i) {
    scale[i] = half_to_float(static_cast<uint16_t>(pairs[i]));
    zero[i] = half_to_float(static_cast<uint16_t>(static_cast<uint32_t>(pairs[i]) >> 16));
  }
#endif
}

// Round to fp16, in the low half of each lane.
KVQ_INLINE VI to_half_bits(VF v) {
#if defined(KVQ_AVX512)
  return (VI)_mm512_cvtepu16_epi32(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(KVQ_AVX2)
  return (VI)_mm256_cvtepu16_epi32(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  VI bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = float_to_half(v[i]);
  return bits;
#endif
}

KVQ_INLINE VF from_half_bits(VI bits) {
#if defined(KVQ_AVX512)
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(KVQ_AVX2)
  const __m256i packed = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8)));
#else
  VF v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(static_cast<uint16_t>(bits[i]));
  return v;
#endif
}

KVQ_INLINE VF load_half(const uint16_t* p) {
#if defined(KVQ_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(KVQ_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  VF v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i]);
  return v;
#endif
}

KVQ_INLINE VF load_bf16(const uint16_t* p) {
  typedef uint16_t Half __attribute__((vector_size(2 * kLanes)));
#if defined(KVQ_AVX512)
  return float_of((VI)_mm512_cvtepu16_epi32((__m256i)load<Half>(p)) << 16);
#elif defined(KVQ_AVX2)
  return float_of((VI)_mm256_cvtepu16_epi32((__m128i)load<Half>(p)) << 16);
#else
  return float_of((VI)(__builtin_convertvector(load<Half>(p), VU) << 16));
#endif
}

// Round to bf16, to nearest even, in the low half of each lane.
KVQ_INLINE VI to_bf16_bits(VF v) {
  const VU bits = (VU)bits_of(v);
  const VU rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return v == v ? (VI)rounded : splat(0x7fc0);
}

// The low halves of all lanes.
KVQ_INLINE void store_halves(uint16_t* p, VI v) {
  typedef uint16_t Half __attribute__((vector_size(2 * kLanes)));
#if defined(KVQ_AVX512)
  store(p, (Half)_mm512_cvtepi32_epi16((__m512i)v));
#elif defined(KVQ_AVX2)
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  store(p, (Half)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8)));
#else
  store(p, __builtin_convertvector(v, Half));
#endif
}

// exp(x) for x <= 0 or so (below 88), to 2 ulp; exactly 0 from x = -88 down, so that masked
// logits (-infinity) weigh nothing. NaN stays NaN.
KVQ_INLINE VF exp_of(VF x) {
  const VF scaled = max_of(splat(-127.0f), x * 1.44269504088896341f);  // exp(x) = 2^scaled
  const VI whole = round_to_int(scaled);
  const VF f = scaled - to_float(whole);  // in [-0.5, 0.5]
  VF p = fma_of(splat(1.535336188319500e-4f), f, splat(1.339887440266574e-3f));
  p = fma_of(p, f, splat(9.618437357674640e-3f));
  p = fma_of(p, f, splat(5.550332471162809e-2f));
  p = fma_of(p, f, splat(2.402264791363012e-1f));
  p = fma_of(p, f, splat(6.931472028550421e-1f));
  p = fma_of(p, f, splat(1.0f));
  return p * float_of((whole + 127) << 23);
}

KVQ_INLINE float exp_of(float x) { return exp_of(splat(x))[0]; }

KVQ_INLINE VF tanh_of(VF x) {
  const VF e = exp_of(-2.0f * abs_of(x));
  const VF t = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -t : t;
}

// --- rows of any dtype --------------------------------------------------------------------------

// `n` is a multiple of 16, as head sizes are.
inline void to_floats(float* dst, const void* src, int64_t dtype, int64_t n) {
  const uint16_t* halves = static_cast<const uint16_t*>(src);
  if (dtype == KVQ_F32) {
    memcpy(dst, src, static_cast<size_t>(n) * 4);
  } else if (dtype == KVQ_BF16) {
    for (int64_t i = 0; i < n; i += kLanes) store(dst + i, load_bf16(halves + i));
  } else {
    for (int64_t i = 0; i < n; i += kLanes) store(dst + i, load_half(halves + i));
  }
}

inline void from_floats(void* dst, const float* src, int64_t dtype, int64_t n) {
  uint16_t* halves = static_cast<uint16_t*>(dst);
  if (dtype == KVQ_F32) {
    memcpy(dst, src, static_cast<size_t>(n) * 4);
  } else if (dtype == KVQ_BF16) {
    for (int64_t i = 0; i < n; i += kLanes) store_halves(halves + i, to_bf16_bits(loadf(src + i)));
  } else if (dtype == KVQ_F16) {
    for (int64_t i = 0; i < n; i += kLanes) store_halves(halves + i, to_half_bits(loadf(src + i)));
  } else {
    for (int64_t i = 0; i < n; ++i) static_cast<double*>(dst)[i] = static_cast<double>(src[i]);
  }
}

// Key at a position of a request whose new tokens are `tokens`: those are the step's own, earlier
// ones are in the ring.
inline void load_key(const KvqArgs& a, int64_t request, const Request& tokens, int64_t position,
                     int64_t head, float* dst) {
  if (position < tokens.start) {
    return to_floats(dst, ring_at(a, request, position, head), a.ring_dtype, a.head_size);
  }
  const int64_t row = tokens.row + position - tokens.start;
  to_floats(dst, a.key + row * a.key_row_stride + head * a.key_head_stride, a.key_dtype,
            a.head_size);
}

// As load_key, the value.
inline void load_value(const KvqArgs& a, int64_t request, const Request& tokens, int64_t position,
                       int64_t head, float* dst) {
  if (position < tokens.start) {
    const size_t key_bytes = static_cast<size_t>(a.head_size) * dtype_bytes(a.ring_dtype);
    return to_floats(dst, ring_at(a, request, position, head) + key_bytes, a.ring_dtype,
                     a.head_size);
  }
  const int64_t row = tokens.row + position - tokens.start;
  to_floats(dst, a.value + row * a.value_row_stride + head * a.value_head_stride, a.value_dtype,
            a.head_size);
}

#if defined(KVQ_AVX512)
// Transposes a square of 16 vectors.
KVQ_INLINE void transpose_square(VF v[16]) {
  __m512 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  __m512 u[16];  // u[4 i + j]: in 128-bit lane k, rows 4 i to 4 i + 3 of column 4 k + j
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = (__m512d)t[i], b = (__m512d)t[i + 1];
    const __m512d c = (__m512d)t[i + 2], d = (__m512d)t[i + 3];
    u[i] = (__m512)_mm512_unpacklo_pd(a, c);
    u[i + 1] = (__m512)_mm512_unpackhi_pd(a, c);
    u[i + 2] = (__m512)_mm512_unpacklo_pd(b, d);
    u[i + 3] = (__m512)_mm512_unpackhi_pd(b, d);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 a = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
    v[j] = _mm512_shuffle_f32x4(a, c, 0x88);
    v[4 + j] = _mm512_shuffle_f32x4(b, d, 0x88);
    v[8 + j] = _mm512_shuffle_f32x4(a, c, 0xdd);
    v[12 + j] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}
#endif

// to[c][r] = from[r][c]. `rows` and `columns` are multiples of kLanes; strides are in elements.
inline void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns,
                      float* to, int64_t to_stride) {
#if defined(KVQ_AVX512)
  for (int64_t r = 0; r < rows; r += 16) {
    for (int64_t c = 0; c < columns; c += 16) {
      VF square[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) square[i] = loadf(from + (r + i) * from_stride + c);
      transpose_square(square);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) store(to + (c + i) * to_stride + r, square[i]);
    }
  }
#else
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) to[c * to_stride + r] = from[r * from_stride + c];
  }
#endif
}

// --- Hadamard rotation, see formats.hadamard ----------------------------------------------------

// Size of the first diagonal block of the rotation of `n` channels: the largest power of two.
inline int64_t hadamard_block(int64_t n) {
  int64_t size = 16;
  while (size * 2 <= n) size *= 2;
  return size;
}

inline float hadamard_norm(int64_t size) {
  return size == 256   ? 0.0625f
         : size == 128 ? 0.08838834764831845f
         : size == 64  ? 0.125f
         : size == 32  ? 0.17677669529663689f
                       : 0.25f;
}

// Rotate the columns of x, [head_size][columns], `columns` a multiple of kLanes: fast
// Walsh-Hadamard transform down the rows, one vector of columns at a time. It works on a copy
// without gaps: rows a power of two apart compete for the same few lines of the cache.
inline void rotate_columns(float* x, int64_t head_size, int64_t columns) {
  float copy[256 * kLanes];
  for (int64_t done = 0; done < head_size;) {
    const int64_t size = hadamard_block(head_size - done);
    const float norm = hadamard_norm(size);
    for (int64_t column = 0; column < columns; column += kLanes) {
      float* block = x + done * columns + column;
      for (int64_t i = 0; i < size; ++i) store(copy + i * kLanes, loadf(block + i * columns));
      for (int64_t half = 1; half < size; half *= 2) {
        for (int64_t i = 0; i < size; i += 2 * half) {
          for (int64_t j = i; j < i + half; ++j) {
            float *p = copy + j * kLanes, *q = p + half * kLanes;
            const VF a = loadf(p), b = loadf(q);
            store(p, a + b);
            store(q, a - b);
          }
        }
      }
      for (int64_t i = 0; i < size; ++i) {
        store(block + i * columns, loadf(copy + i * kLanes) * norm);
      }
    }
    done += size;
  }
}

// Sylvester's Hadamard matrix of one vector's size.
struct SmallHadamard {
  float rows[kLanes][kLanes];
  constexpr SmallHadamard() : rows() {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < kLanes; ++j) rows[i][j] = __builtin_parity(i & j) ? -1.0f : 1.0f;
    }
  }
};
constexpr SmallHadamard kSmallHadamard;

// Rotate one row of head_size channels: butterflies between vectors, and inside a vector a
// multiplication by the small Hadamard matrix.
inline void rotate_row(float* x, int64_t head_size) {
  for (int64_t done = 0; done < head_size;) {
    const int64_t size = hadamard_block(head_size - done);
    const float norm = hadamard_norm(size);
    float* block = x + done;
    for (int64_t half = kLanes; half < size; half *= 2) {
      for (int64_t i = 0; i < size; i += 2 * half) {
        for (int64_t j = i; j < i + half; j += kLanes) {
          const VF a = loadf(block + j), b = loadf(block + j + half);
          store(block + j, a + b);
          store(block + j + half, a - b);
        }
      }
    }
    for (int64_t i = 0; i < size; i += kLanes) {
      VF sum = {};
      for (int j = 0; j < kLanes; ++j) {
        sum = fma_of(splat(block[i + j]), loadf(kSmallHadamard.rows[j]), sum);
      }
      store(block + i, sum * norm);
    }
    done += size;
  }
}

}  // namespace
}  // namespace kvq
