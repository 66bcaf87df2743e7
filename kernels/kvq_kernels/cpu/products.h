// Matrix products c = a b for prefill attention:
//
//   FloatProduct   fp32 operands, on any CPU
//   TileProduct    bf16 operands and fp32 sums, on the matrix unit of CPUs with AMX
//
// a is [rows][inner] and c is [rows][kPanel], fp32, both row by row. b is [inner][kPanel] in an
// order that is the product's own: put_columns and put_rows write it. `rows` is a multiple of 16,
// `inner` of kStep.
#pragma once

#include "simd.h"

namespace kvq {
namespace {

struct FloatProduct {
  using Element = float;
  static constexpr bool kInPlace = true;  // an operand b can take the place of a c

  // The register tile: kRows x kVectors accumulators.
#if defined(KVQ_AVX512)
  static constexpr int kRows = 8, kVectors = 3;
#elif defined(KVQ_AVX2)
  static constexpr int kRows = 4, kVectors = 3;
#else
  static constexpr int kRows = 4, kVectors = 2;
#endif
  static_assert(16 % kRows == 0);
  static constexpr int kPanel = kVectors * kLanes;
  static constexpr int64_t kStep = kRows;
  static constexpr bool kScalesQueries = true;  // rather than logits

  static void begin() {}
  static void end() {}

  KVQ_INLINE void put(float* to, VF x) { store(to, x); }

  // rows[kLanes][inner] as columns of an operand b, from `column` on. It may overwrite the rows.
  static void put_columns(float* b, int64_t column, float* rows, int64_t inner) {
    transpose(rows, inner, kLanes, inner, b + column, kPanel);
  }

  // Two rows of an operand b at kLanes columns.
  KVQ_INLINE void put_rows(float* b, int64_t k, int64_t column, VF even, VF odd) {
    store(b + k * kPanel + column, even);
    store(b + (k + 1) * kPanel + column, odd);
  }

  // c = a b, or with `rescale` c = c * rescale + a b, `rescale` being one factor per column.
  template <bool kRescale>
  static void multiply(const float* a, int64_t a_stride, int64_t rows, int64_t inner,
                       const float* b, float* c, const VF* rescale) {
    for (int64_t i = 0; i < rows; i += kRows, a += kRows * a_stride) {
      VF sums[kRows][kVectors];
      float* tile = c + i * kPanel;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = kRescale ? loadf(tile + r * kPanel + v * kLanes) * rescale[v] : VF{};
        }
      }
      for (int64_t k = 0; k < inner; ++k) {
        VF columns[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) columns[v] = loadf(b + k * kPanel + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const VF x = splat(a[r * a_stride + k]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[r][v] = fma_of(x, columns[v], sums[r][v]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(tile + r * kPanel + v * kLanes, sums[r][v]);
      }
    }
  }
};

#if defined(KVQ_AMX)
// Tiles are 16 rows of 64 bytes: 16 x 32 of a, 16 x 16 of c, and of b 16 columns of 16 pairs, since
// the unit wants two successive rows' elements of a column side by side.
struct TileProduct {
  using Element = uint16_t;  // bf16
  static constexpr bool kInPlace = false;

  static constexpr int kTile = 16;
  static constexpr int kVectors = 2;
  static constexpr int kPanel = kVectors * kLanes;
  static constexpr int64_t kStep = 32;
  static constexpr bool kScalesQueries = false;  // in bf16 they are exact as they are

  // Between the two calls the thread's tile registers are set up for this product.
  static void begin() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config;
    for (int i = 0; i < 16; ++i) {
      config.row_bytes[i] = i < 8 ? 64 : 0;
      config.rows[i] = i < 8 ? kTile : 0;
    }
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

  KVQ_INLINE void put(uint16_t* to, VF x) { store(to, (Half)_mm512_cvtneps_pbh(x)); }

  static void put_columns(uint16_t* b, int64_t column, float* rows, int64_t inner) {
    // In place: pairs of bf16 where there were floats, in the first half of each row.
    for (int64_t r = 0; r < kLanes; ++r) {
      float* row = rows + r * inner;
      for (int64_t k = 0; k < inner; k += kLanes) {
        put(reinterpret_cast<uint16_t*>(row) + k, loadf(row + k));
      }
    }
    transpose(rows, inner, kLanes, inner / 2, reinterpret_cast<float*>(b) + column, kPanel);
  }

  KVQ_INLINE void put_rows(uint16_t* b, int64_t k, int64_t column, VF even, VF odd) {
    const VS halves = (VS)_mm512_cvtne2ps_pbh(odd, even);
    store(b + k * kPanel + 2 * column, interleaved(halves));
  }

  template <bool kRescale>
  static void multiply(const uint16_t* a, int64_t a_stride, int64_t rows, int64_t inner,
                       const uint16_t* b, float* c, const VF* rescale) {
    if (kRescale && (_mm512_cmpneq_ps_mask(rescale[0], splat(1.0f)) |
                     _mm512_cmpneq_ps_mask(rescale[1], splat(1.0f)))) {
      for (int64_t i = 0; i < rows * kPanel; i += kPanel) {
        store(c + i, loadf(c + i) * rescale[0]);
        store(c + i + kLanes, loadf(c + i + kLanes) * rescale[1]);
      }
    }
    // GCC's tile loads do not say that they read memory.
    __asm__ volatile("" ::: "memory");
    int64_t i = 0;
    for (; i + 2 * kTile <= rows; i += 2 * kTile) {
      multiply_rows<2, kRescale>(a + i * a_stride, a_stride, inner, b, c + i * kPanel);
    }
    if (i < rows) multiply_rows<1, kRescale>(a + i * a_stride, a_stride, inner, b, c + i * kPanel);
    __asm__ volatile("" ::: "memory");
  }

 private:
  typedef uint16_t Half __attribute__((vector_size(2 * kLanes)));

  // The first half's elements, each followed by its fellow of the second half.
  KVQ_INLINE VS interleaved(VS v) {
    typedef uint16_t Index __attribute__((vector_size(64)));
    const Index index = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (VS)_mm512_permutexvar_epi16((__m512i)index, (__m512i)v);
  }

  // kTiles * kTile rows of c, all columns.
  template <int kTiles, bool kAdd>
  KVQ_INLINE void multiply_rows(const uint16_t* a, int64_t a_stride, int64_t inner,
                                const uint16_t* b, float* c) {
    constexpr int64_t kRowBytes = kPanel * 4;  // of c, and of a pair of rows of b
    const int64_t a_bytes = a_stride * 2;
    float* lower = c + kTile * kPanel;
    if (kAdd) {
      _tile_loadd(0, c, kRowBytes);
      _tile_loadd(1, c + kTile, kRowBytes);
      if (kTiles == 2) {
        _tile_loadd(2, lower, kRowBytes);
        _tile_loadd(3, lower + kTile, kRowBytes);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      if (kTiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    for (int64_t k = 0; k < inner; k += kStep) {
      _tile_loadd(6, b + k * kPanel, kRowBytes);
      _tile_loadd(7, b + k * kPanel + 2 * kTile, kRowBytes);
      _tile_loadd(4, a + k, a_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (kTiles == 2) {
        _tile_loadd(5, a + kTile * a_stride + k, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, kRowBytes);
    _tile_stored(1, c + kTile, kRowBytes);
    if (kTiles == 2) {
      _tile_stored(2, lower, kRowBytes);
      _tile_stored(3, lower + kTile, kRowBytes);
    }
  }
};
#endif

}  // namespace
}  // namespace kvq
