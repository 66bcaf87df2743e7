// Sealing units into records, and writing the residual ring.
//
// The codes are those of reference._quantise to the bit, which is why every step below is in
// its order: scale and zero rounded to fp16 first, a reciprocal multiplied, ties to even. Only
// the rotation of values sums in another order (a fast Walsh-Hadamard transform), so that
// rotated codes may differ by one.
#include "simd.h"

namespace kvq {
namespace {

constexpr int64_t kTransposed = 16;  // rows at a time: one line of cache per column
constexpr float kInfinity = __builtin_inff();

// Range of a group and what follows from it, one group per lane.
struct Quantiser {
  VF lo = splat(kInfinity), hi = splat(-kInfinity);
  VF zero, inverse;
  VI meta;  // fp16 scale, fp16 zero

  KVQ_INLINE void extend(Quantiser& q, VF x, VI in_range) {
    q.lo = min_of(select(in_range, x, splat(kInfinity)), q.lo);
    q.hi = max_of(select(in_range, x, splat(-kInfinity)), q.hi);
  }

  KVQ_INLINE void finish(Quantiser& q, float levels) {
    const VI empty = q.lo > q.hi;
    const VF lo = select(empty, VF{}, q.lo), hi = select(empty, VF{}, q.hi);
    const VI scale_bits = to_half_bits((hi - lo) / levels), zero_bits = to_half_bits(lo);
    const VF scale = from_half_bits(scale_bits);
    q.zero = from_half_bits(zero_bits);
    q.inverse = select(scale > 0.0f, 1.0f / scale, VF{});
    q.meta = scale_bits | zero_bits << 16;
  }
};

KVQ_INLINE VI code_of(VF x, VF zero, VF inverse, float levels) {
  const VF code = (x - zero) * inverse;
  return round_to_int(min_of(splat(levels), max_of(VF{}, code)));
}

KVQ_INLINE VI is_finite(VF x) { return abs_of(x) < kInfinity; }

// As reference._finite: NaN becomes 0, everything else is limited to fp16's range.
KVQ_INLINE VF sanitised(VF x) {
  const VF limited = min_of(splat(kFp16Max), max_of(splat(-kFp16Max), x));
  return select(x == x, limited, VF{});
}

// Key of the first token of a unit, with one scale and zero: the anchor of unit 0.
void seal_anchor(const Record& rec, const float* key, bool first, uint8_t* record) {
  Quantiser q;
  for (int64_t c = 0; c < rec.head_size; c += kLanes) {
    const VF x = loadf(key + c);
    Quantiser::extend(q, sanitised(x), is_finite(x));
  }
  q.lo = splat(min_lane(q.lo));
  q.hi = splat(max_lane(q.hi));
  Quantiser::finish(q, 255.0f);
  for (int64_t c = 0; c < rec.head_size; c += kLanes) {
    const VI code = code_of(sanitised(loadf(key + c)), q.zero, q.inverse, 255.0f);
    store_as_bytes(record + rec.anchor_codes + c, code, kLanes);
  }
  const int32_t meta = q.meta[0];
  memcpy(record + rec.anchor_meta, &meta, 4);
  record[rec.anchor_flag] = first;
}

// `bytes` bytes of packed codes: one token's key, or one channel's values in a blob.
template <int kBits>
void seal_row(const float* row, const float* zero, const float* inverse, int64_t bytes,
              uint8_t* codes) {
  const float levels = kBits == 4 ? 15.0f : 255.0f;
  for (int64_t i = 0; i < bytes; i += kLanes) {
    VI code = code_of(loadf(row + i), loadf(zero + i), loadf(inverse + i), levels);
    if (kBits == 4) {
      const int64_t high = i + bytes;
      code |= code_of(loadf(row + high), loadf(zero + high), loadf(inverse + high), levels) << 4;
    }
    store_as_bytes(codes + i, code, bytes - i);
  }
}

// Cuts of the range of a key group for one part of it, whose range is known: low end, high end.
KVQ_INLINE VI cuts_of(const Quantiser& part, const Quantiser& group, float levels) {
  const VF per_level = splat(1.0f / kCutStep / levels), most = splat(kMaxCut);
  const VF low = (part.lo - group.zero) * group.inverse * per_level;
  const VF high = (levels - (part.hi - group.zero) * group.inverse) * per_level;
  const VI cuts = round_to_int(min_of(most, max_of(VF{}, low))) |
                  round_to_int(min_of(most, max_of(VF{}, high))) << 4;
  return cuts & ~(part.lo > part.hi);  // a part without finite keys is not cut
}

// Keys of one blob, fp32 [group][head_size]. `skip_first` keeps token 0 out of the ranges. `zero`
// and `inverse` are [num_parts][head_size].
template <int kBits>
void seal_keys(const Record& rec, float* key, bool skip_first, float* zero, float* inverse,
               uint8_t* blob) {
  const int64_t d = rec.head_size;
  const float levels = kBits == 4 ? 15.0f : 255.0f;
  for (int64_t c = 0; c < d; c += kLanes) {
    Quantiser group, parts[kMaxUnit / kCutTokens];
    for (int64_t p = 0; p < rec.num_parts; ++p) {
      Quantiser part;
      for (int64_t t = p * rec.part; t < (p + 1) * rec.part; ++t) {
        const VF raw = loadf(key + t * d + c), x = sanitised(raw);
        store(key + t * d + c, x);
        if (t > 0 || !skip_first) Quantiser::extend(part, x, is_finite(raw));
      }
      group.lo = min_of(part.lo, group.lo);
      group.hi = max_of(part.hi, group.hi);
      parts[p] = part;
    }
    Quantiser::finish(group, levels);
    store(blob + rec.key_meta + c * 4, group.meta);
    for (int64_t p = 0; p < rec.num_parts; ++p) {
      VF part_zero = group.zero, part_inverse = group.inverse;
      if (kBits == 4) {
        const VI cuts = cuts_of(parts[p], group, levels);
        store_as_bytes(blob + rec.key_cuts + p * d + c, cuts, kLanes);
        VF scale = from_half_bits(group.meta & 0xffff);
        cut_meta(cuts, scale, part_zero);
        part_inverse = select(scale > 0.0f, 1.0f / scale, VF{});
      }
      store(zero + p * d + c, part_zero);
      store(inverse + p * d + c, part_inverse);
    }
  }
  for (int64_t t = 0; t < rec.group; ++t) {
    const int64_t part = t / rec.part * d;
    seal_row<kBits>(key + t * d, zero + part, inverse + part, rec.key_row_bytes,
                    blob + t * rec.key_row_bytes);
  }
}

// Values of one blob, transposed fp32 [head_size][unit_size] from the blob's first token on;
// one scale and zero per token, that is per lane.
template <int kBits>
void seal_values(const Record& rec, float* value, bool all_in_range, float* zero, float* inverse,
                 uint8_t* blob) {
  const float levels = kBits == 4 ? 15.0f : 255.0f;
  for (int64_t t = 0; t < rec.group; t += kLanes) {
    Quantiser q;
    for (int64_t c = 0; c < rec.head_size; ++c) {
      float* p = value + c * rec.unit_size + t;
      const VF raw = loadf(p), x = sanitised(raw);
      store(p, x);
      Quantiser::extend(q, x, all_in_range ? VI{} == 0 : is_finite(raw));
    }
    Quantiser::finish(q, levels);
    store(blob + rec.value_meta + t * 4, q.meta);
    store(zero + t, q.zero);
    store(inverse + t, q.inverse);
  }
  for (int64_t c = 0; c < rec.head_size; ++c) {
    seal_row<kBits>(value + c * rec.unit_size, zero, inverse, rec.value_row_bytes,
                    blob + rec.value_codes + c * rec.value_row_bytes);
  }
}

// A unit that the step completes, and the new tokens of its request.
struct Unit {
  int64_t request, number;
  Request tokens;
};

void seal_unit(const KvqArgs& a, const Record& rec, const Unit& unit, int64_t head) {
  const int64_t d = rec.head_size, u = rec.unit_size;
  float *rows = nullptr, *value = nullptr, *zero = nullptr, *inverse = nullptr;
  const auto carve = [&](Carver carver) {
    rows = carver.take<float>(u * d + kLanes);  // vectors may read past the last row
    value = carver.take<float>(d * u);
    zero = carver.take<float>(max_of(rec.num_parts * d, u) + kLanes);
    inverse = carver.take<float>(max_of(rec.num_parts * d, u) + kLanes);
    return carver.used();
  };
  carve(Carver(kvq_scratch(KVQ_SCRATCH_OWN, carve(Carver(nullptr)))));
  uint8_t* record = record_at(a, unit.request, unit.number, head);
  const bool first = rec.anchor && unit.number == 0;
  const int64_t start = unit.number * u;

  for (int64_t t = 0; t < u; t += kTransposed) {
    for (int64_t i = 0; i < kTransposed; ++i) {
      load_value(a, unit.request, unit.tokens, start + t + i, head, rows + i * d);
    }
    transpose(rows, d, kTransposed, d, value + t, u);
  }
  if (a.rotate_values) {
    for (int64_t i = 0; i < d * u; i += kLanes) store(value + i, sanitised(loadf(value + i)));
    rotate_columns(value, d, u);
  }
  for (int64_t t = 0; t < u; ++t) {
    load_key(a, unit.request, unit.tokens, start + t, head, rows + t * d);
  }
  if (rec.anchor) seal_anchor(rec, rows, first, record);
  for (int64_t b = 0; b < rec.num_blobs; ++b) {
    uint8_t* blob = record + b * rec.blob_bytes;
    const auto seal_v = a.value_bits == 4 ? seal_values<4> : seal_values<8>;
    const auto seal_k = a.key_bits == 4 ? seal_keys<4> : seal_keys<8>;
    seal_v(rec, value + b * rec.group, a.rotate_values != 0, zero, inverse, blob);
    seal_k(rec, rows + b * rec.group * d, first && b == 0, zero, inverse, blob);
  }
  memset(record + rec.content_bytes, 0, static_cast<size_t>(a.record_bytes - rec.content_bytes));
}

}  // namespace
}  // namespace kvq

using namespace kvq;

extern "C" void KVQ_NAME(seal)(const KvqArgs* args) {
  const KvqArgs& a = *args;
  int64_t count = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const Request q = request_at(a, r);
    count += q.end / a.unit_size - q.start / a.unit_size;
  }
  if (count == 0) return;
  Unit* units = static_cast<Unit*>(
      kvq_scratch(KVQ_SCRATCH_SHARED, static_cast<size_t>(count) * sizeof(Unit)));
  Unit* next = units;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const Request q = request_at(a, r);
    for (int64_t u = q.start / a.unit_size; u < q.end / a.unit_size; ++u) *next++ = {r, u, q};
  }
  const Record rec(a);
#pragma omp parallel for num_threads(static_cast<int>(a.num_threads)) schedule(dynamic, 1)
  for (int64_t i = 0; i < count * a.num_kv_heads; ++i) {
    seal_unit(a, rec, units[i / a.num_kv_heads], i % a.num_kv_heads);
  }
}

extern "C" void KVQ_NAME(write_ring)(const KvqArgs* args) {
  const KvqArgs& a = *args;
  const size_t ring_row = static_cast<size_t>(a.head_size) * dtype_bytes(a.ring_dtype);
#pragma omp parallel for num_threads(threads_for(a, a.num_requests * a.num_kv_heads, 256))
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const Request q = request_at(a, r);
    for (int64_t p = max_of(q.start, q.end - a.ring_capacity); p < q.end; ++p) {
      const int64_t row = q.row + p - q.start;
      for (int64_t h = 0; h < a.num_kv_heads; ++h) {
        uint8_t* dst = ring_at(a, r, p, h);
        memcpy(dst, a.key + row * a.key_row_stride + h * a.key_head_stride, ring_row);
        memcpy(dst + ring_row, a.value + row * a.value_row_stride + h * a.value_head_stride,
               ring_row);
      }
    }
  }
}
