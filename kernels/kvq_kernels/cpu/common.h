// What the kernels share that does not depend on the instruction set: where a record's sections
// lie, where a token of the cache lies, and how a batch is cut into blocks of queries.
//
// The kernels are compiled once per instruction set and linked into one library. An inline
// function with external linkage would exist in several of those objects, and the linker might
// keep the AVX-512 one for everybody. So everything in these headers is in an anonymous
// namespace, and the kernels use no inline or template code of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "abi.h"

#define KVQ_INLINE static inline __attribute__((always_inline))

// Scratch memory of the calling thread, 64-byte aligned, at least `bytes` long. It grows and is
// kept, so that a steady state allocates nothing. A thread has two: what it shares with the
// threads of a parallel region, and what it uses itself as one of them.
enum KvqScratch { KVQ_SCRATCH_SHARED = 0, KVQ_SCRATCH_OWN = 1 };
extern "C" __attribute__((visibility("hidden"))) void* kvq_scratch(KvqScratch which, size_t bytes);

namespace kvq {
namespace {

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

constexpr float kFp16Max = 65504.0f;

inline size_t dtype_bytes(int64_t dtype) {
  return dtype == KVQ_F32 ? 4 : dtype == KVQ_F64 ? 8 : 2;
}

// --- half precision in portable code; rounds to nearest even ------------------------------------

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t rest = h & 0x7fff;
  uint32_t bits;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;  // infinity, NaN
  } else if (rest >= 0x400) {
    bits = sign | ((rest << 13) + (112u << 23));
  } else {  // zero, subnormal: rest * 2^-24, exact in fp32
    const float magnitude = static_cast<float>(rest) * 5.9604644775390625e-8f;
    memcpy(&bits, &magnitude, 4);
    bits |= sign;
  }
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t float_to_half(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  uint32_t half;
  if (rest > 0x7f800000) {
    half = 0x7e00;  // NaN
  } else if (rest >= 0x477ff000) {
    half = 0x7c00;  // rounds to infinity
  } else if (rest >= 0x38800000) {
    const uint32_t odd = rest >> 13 & 1;
    half = (rest - (112u << 23) + 0xfff + odd) >> 13;
  } else {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits
    float magnitude;
    memcpy(&magnitude, &rest, 4);
    magnitude += 0.5f;
    memcpy(&half, &magnitude, 4);
    half -= 0x3f000000;
  }
  return static_cast<uint16_t>(sign | half);
}

// --- records: see formats.py --------------------------------------------------------------------

constexpr int64_t kMaxUnit = 256;

constexpr int64_t kCutTokens = 32;
constexpr float kCutStep = 1.0f / 32;  // a cut of 1, of its key group's range
constexpr float kMaxCut = 15.0f;

struct Record {
  int64_t head_size, unit_size, group, num_blobs;
  int64_t part, num_parts;  // tokens with one key scale and zero per channel; parts of a group
  int64_t key_row_bytes, value_row_bytes;  // K codes of a token, V codes of a channel
  int64_t value_codes, key_meta, key_cuts, value_meta, blob_bytes;  // in a blob; K codes at 0
  int64_t anchor_codes, anchor_meta, anchor_flag, content_bytes;  // offsets in the record
  bool anchor, has_cuts;

  explicit Record(const KvqArgs& a) {
    head_size = a.head_size;
    unit_size = a.unit_size;
    group = a.key_group_size;
    num_blobs = unit_size / group;
    has_cuts = a.key_bits == 4;
    part = has_cuts ? kCutTokens : group;
    num_parts = group / part;
    key_row_bytes = head_size * a.key_bits / 8;
    value_row_bytes = group * a.value_bits / 8;
    value_codes = group * key_row_bytes;
    key_meta = value_codes + head_size * value_row_bytes;
    key_cuts = key_meta + head_size * 4;
    value_meta = key_cuts + (has_cuts ? num_parts * head_size : 0);
    blob_bytes = value_meta + group * 4;
    anchor_codes = num_blobs * blob_bytes;
    anchor_meta = anchor_codes + head_size;
    anchor_flag = anchor_meta + 4;
    anchor = a.anchor != 0;
    content_bytes = anchor ? anchor_flag + 1 : anchor_codes;
  }
};

inline uint8_t* record_at(const KvqArgs& a, int64_t request, int64_t unit, int64_t head) {
  const int64_t block = a.block_table[request * a.block_table_stride + unit / a.units_per_block];
  return a.pages + block * a.pages_block_stride +
         (head * a.units_per_block + unit % a.units_per_block) * a.record_bytes;
}

// Key of one token in the ring; its value follows.
inline uint8_t* ring_at(const KvqArgs& a, int64_t request, int64_t position, int64_t head) {
  const int64_t slot = position % a.ring_capacity;
  const int64_t block = a.ring_table[request * a.ring_table_stride + slot / a.ring_block_size];
  return a.ring + block * a.ring_block_stride + head * a.ring_head_stride +
         slot % a.ring_block_size * a.ring_slot_stride;
}

// --- batches ------------------------------------------------------------------------------------

inline int64_t index_at(const void* indices, int64_t is_64, int64_t i) {
  return is_64 ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
}

// The new tokens of one request: rows [row, row + end - start) are positions [start, end).
struct Request {
  int64_t row, start, end;
};

inline Request request_at(const KvqArgs& a, int64_t request) {
  const int64_t row = index_at(a.query_start_loc, a.query_start_loc_is_64, request);
  const int64_t stop = index_at(a.query_start_loc, a.query_start_loc_is_64, request + 1);
  const int64_t end = index_at(a.seq_lens, a.seq_lens_is_64, request);
  // Padding has no rows and any length; a dummy request has any rows and length 0.
  if (stop <= row || end <= 0) return {row, 0, 0};
  return {row, end - (stop - row), end};
}

// Lowest position that a query at `position` sees.
inline int64_t lowest_position(const KvqArgs& a, int64_t position) {
  return a.sliding_window ? max_of(0, position - a.sliding_window + 1) : 0;
}

// Queries of one request that lie in one unit, so that they read the same sealed units,
// [first_unit, end_unit), and from `open_start` on full precision.
struct QueryBlock {
  int64_t request, row, position, count;
  int64_t first_unit, end_unit, open_start;
};

// Cut a request into blocks of at most `max_count` queries and call `visit` with each.
template <typename Visit>
inline void for_each_query_block(const KvqArgs& a, int64_t max_count, Visit visit) {
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const Request q = request_at(a, r);
    for (int64_t position = q.start; position < q.end;) {
      const int64_t unit = position / a.unit_size;
      const int64_t stop = min_of(min_of(q.end, (unit + 1) * a.unit_size), position + max_count);
      const int64_t first_unit = lowest_position(a, position) / a.unit_size;
      visit(QueryBlock{r, q.row + position - q.start, position, stop - position, first_unit, unit,
                       unit * a.unit_size});
      position = stop;
    }
  }
}

// How many threads `work` is worth, in units of the `enough` that pays for waking one.
inline int threads_for(const KvqArgs& a, int64_t work, int64_t enough) {
  return static_cast<int>(max_of(1, min_of(a.num_threads, work / enough)));
}

// Carves aligned arrays from one scratch buffer. With a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<uint8_t*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return p;
  }

  size_t used() const { return static_cast<size_t>(used_); }

 private:
  uint8_t* base_;
  int64_t used_ = 0;
};

}  // namespace
}  // namespace kvq
