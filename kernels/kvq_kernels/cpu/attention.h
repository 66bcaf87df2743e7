// What the attention kernels share: the logits' transformations, and attention of a few query rows
// to a tile of tokens in fp32.
#pragma once

#include "simd.h"

namespace kvq {
namespace {

// Start of the running maximum of a softmax: below any logit, yet finite, so that a block whose
// logits are all masked (-infinity) gets weights exp(-infinity - kLowest) = 0, not NaN.
constexpr float kLowest = -1e30f;

KVQ_INLINE VF lane_numbers() {
  VF v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(i);
  return v;
}

KVQ_INLINE VF soft_capped(VF logits, float cap) { return cap * tanh_of(logits / cap); }

constexpr int kRowBlock = 4;   // rows that share the work of reading keys and values
constexpr int64_t kTile = 16;  // tokens converted to fp32 at a time

// What a split leaves for the combination: per row, sum of weights times values, running maximum
// and sum of weights.
struct Partial {
  float* acc;  // [rows][head_size]
  float* max;  // [rows]
  float* sum;  // [rows]

  static int64_t floats(int64_t rows, int64_t head_size) {
    return round_up(rows * (head_size + 2), 16);
  }
  Partial(float* base, int64_t rows, int64_t head_size)
      : acc(base), max(base + rows * head_size), sum(max + rows) {}
};

// The rows of one task: the queries of a block, times the query heads of a kv head.
struct QueryRows {
  const KvqArgs& a;
  const QueryBlock block;
  const int64_t head, group_heads, rows;

  QueryRows(const KvqArgs& args, const QueryBlock& block, int64_t head)
      : a(args),
        block(block),
        head(head),
        group_heads(args.num_heads / args.num_kv_heads),
        rows(block.count * group_heads) {}

  int64_t query_head(int64_t row) const { return head * group_heads + row % group_heads; }
  int64_t position(int64_t row) const { return block.position + row / group_heads; }
  const uint8_t* query_at(int64_t row) const {
    return a.query + (block.row + row / group_heads) * a.query_row_stride +
           query_head(row) * a.query_head_stride;
  }
};

// Rows that attend to one tile of tokens after another.
struct Rows : QueryRows {
  const int64_t d;
  const bool plain;  // no soft cap and no ALiBi

  float* query;  // [rows][d], scaled
  float* tile;   // [kTile][2 * d], keys and values

  Rows(const KvqArgs& args, const QueryBlock& block, int64_t head)
      : QueryRows(args, block, head),
        d(args.head_size),
        plain(args.soft_cap == 0 && !args.alibi_slopes) {}

  void load_plain_query(float factor = 1.0f) {
    for (int64_t r = 0; r < rows; ++r) {
      float* q = query + r * d;
      to_floats(q, query_at(r), a.query_dtype, d);
      for (int64_t c = 0; c < d; ++c) q[c] *= static_cast<float>(a.scale) * factor;
    }
  }

  void start(Partial& partial) const {
    memset(partial.acc, 0, static_cast<size_t>(rows * d) * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) {
      partial.max[r] = kLowest;
      partial.sum[r] = 0;
    }
  }

  // Soft cap, ALiBi and masks on logits[0, count) of a row with the keys from `key` on. `visible`
  // says how many of them are not beyond the query.
  void transform(float* row_logits, int64_t row, int64_t key, int64_t count, int64_t visible) {
    const int64_t query_position = position(row);
    if (!plain) {
      const float cap = static_cast<float>(a.soft_cap);
      const float slope = a.alibi_slopes ? a.alibi_slopes[query_head(row)] : 0.0f;
      VF distance = lane_numbers() + static_cast<float>(key - query_position);
      for (int64_t t = 0; t < count; t += kLanes, distance += static_cast<float>(kLanes)) {
        VF x = loadf(row_logits + t);
        if (cap != 0.0f) x = soft_capped(x, cap);
        store(row_logits + t, fma_of(distance, splat(slope), x));
      }
    }
    const int64_t hidden = min_of(count, lowest_position(a, query_position) - key);
    for (int64_t t = 0; t < hidden; ++t) row_logits[t] = -__builtin_inff();
    for (int64_t t = max_of(0, visible); t < count; ++t) row_logits[t] = -__builtin_inff();
  }

  // Running softmax of one row: logits become weights. Returns the factor for what was summed
  // before.
  float softmax(float* row_logits, int64_t count, float& running_max, float& running_sum) {
    VF most = splat(running_max);
    for (int64_t t = 0; t < count; t += kLanes) most = max_of(most, loadf(row_logits + t));
    const float new_max = max_lane(most);
    VF sum = {};
    for (int64_t t = 0; t < count; t += kLanes) {
      const VF weight = exp_of(loadf(row_logits + t) - new_max);
      sum += weight;
      store(row_logits + t, weight);
    }
    const float rescale = exp_of(running_max - new_max);
    running_sum = running_sum * rescale + sum_of(sum);
    running_max = new_max;
    return rescale;
  }

  // All rows against the `count` tokens in `tile`, which start at position `key`.
  void attend_tile(int64_t key, int64_t count, Partial& partial) {
    memset(tile + count * 2 * d, 0, static_cast<size_t>((kTile - count) * 2 * d) * sizeof(float));
    for (int64_t r = 0; r < rows; r += kRowBlock) {
      switch (min_of(kRowBlock, rows - r)) {
        case 4: attend_rows<4>(r, key, partial); break;
        case 3: attend_rows<3>(r, key, partial); break;
        case 2: attend_rows<2>(r, key, partial); break;
        default: attend_rows<1>(r, key, partial);
      }
    }
  }

  // Rows [row, row + kRows) against the tokens in `tile`.
  template <int kRows>
  void attend_rows(int64_t row, int64_t key, Partial& partial) {
    float p[kRows][kTile];
    tile_logits<kRows>(query + row * d, p);
    VF rescale[kRows];
    for (int r = 0; r < kRows; ++r) {
      transform(p[r], row + r, key, kTile, position(row + r) + 1 - key);
      rescale[r] =
          splat(softmax(p[r], kTile, partial.max[row + r], partial.sum[row + r]));
    }
    float* acc = partial.acc + row * d;
    for (int64_t c = 0; c < d; c += kLanes) {
      VF sums[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[r] = loadf(acc + r * d + c) * rescale[r];
      for (int64_t t = 0; t < kTile; ++t) {
        const VF value = loadf(tile + t * 2 * d + d + c);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums[r] = fma_of(splat(p[r][t]), value, sums[r]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) store(acc + r * d + c, sums[r]);
    }
  }

  // logits[r][t] = query row r . key of token t.
  template <int kRows>
  void tile_logits(const float* q, float (*p)[kTile]) {
    constexpr int kTokens = kLanes / (kRows == 3 ? 4 : kRows);
    for (int64_t t = 0; t < kTile; t += kTokens) {
      VF sums[kLanes] = {};
      for (int64_t c = 0; c < d; c += kLanes) {
        VF keys[kTokens];
#pragma GCC unroll 16
        for (int i = 0; i < kTokens; ++i) keys[i] = loadf(tile + (t + i) * 2 * d + c);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const VF row_query = loadf(q + r * d + c);
#pragma GCC unroll 16
          for (int i = 0; i < kTokens; ++i) {
            sums[r * kTokens + i] = fma_of(keys[i], row_query, sums[r * kTokens + i]);
          }
        }
      }
      float tile_sums[kLanes];
      store(tile_sums, sums_of(sums));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        memcpy(p[r] + t, tile_sums + r * kTokens, kTokens * sizeof(float));
      }
    }
  }
};

}  // namespace
}  // namespace kvq
