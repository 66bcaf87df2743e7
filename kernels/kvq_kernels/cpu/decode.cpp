// Decode attention: few queries per request, many keys.
//
// A task is (block of queries, split, kv head): the rows of the block, that is its queries times
// the query heads of the kv head, against kSplitTokens tokens of sealed units; the last split of
// a block is the residual ring. Splits follow from lengths alone, so results do not depend on
// the number of threads. Who finishes the last split of a (block, kv head) combines them, and there
// rotates the sealed part back: a second parallel loop would make all threads wait for each other
// once more, which is what costs most when others use the cores too.
//
// Sealed units are never dequantised. Per key group, the key scale is folded into the query, and
// the product rounded to int16 with one factor per row; the logit is then an integer dot product
// with the codes, times that factor, plus the dot product of query and zeros. The same for values:
// the scale of a token is folded into its weight. All sums fit int32: 256 codes of up to 255 times
// 32767 is less than 2^31.
//
// Rounding the products by e_i changes a sum by sum(e_i code_i). What of it does not depend on the
// codes, sum(e_i) times the middle code, goes into the bias, which halves the error.
//
// 4-bit keys have cuts (reference.cut_meta): in a part of 32 tokens, channel i has low_i / 32 of
// its group's range cut off at the low end and high_i / 32 at the high end. With f_i the query
// times the group's scale and n_i = 32 - low_i - high_i, its share of the logit, beside query times
// zero, is
//
//     f_i n_i / 32 code_i + f_i 15 low_i / 32
//
// So the weights of a part are those of the group times n_i / 32, rounded again. Let m = 7.5, the
// middle code. The bias takes the second term, and of the first what rounding loses at m, together
//
//     m sum(f_i) + m / 32 sum(f_i (low_i - high_i)) - m sum(weight_i)
#include "attention.h"

namespace kvq {
namespace {

constexpr int64_t kSplitTokens = 1024;
constexpr int64_t kMaxRows = 64;   // of a task, unless one query has more heads
[[maybe_unused]] constexpr int64_t kThreadWork = 4096;  // query-key products, some 20 us

// --- integer dot products with packed codes -----------------------------------------------------

// A row of packed codes and the int16 weights it is multiplied with, cut into chunks of kShorts
// bytes. With 4-bit codes a chunk has two halves: the low nibbles belong to elements
// [chunk * kShorts ...), the high nibbles to those plus half the row. Weights lie in the order
// of their use, [segment][chunk][half][row][kShorts]; those beyond the end of a row of codes are
// 0, so that whatever bytes follow it count for nothing.
struct Layout {
  int64_t row_bytes, chunks, halves;

  Layout(int64_t row_bytes, int64_t bits)
      : row_bytes(row_bytes), chunks(ceil_div(row_bytes, kShorts)), halves(8 / bits) {}

  int64_t padded() const { return chunks * halves * kShorts; }
  // First element of a chunk's half, in the order of the unpacked row.
  int64_t element(int64_t chunk, int64_t half) const {
    return half * row_bytes + chunk * kShorts;
  }
  // How many of its kShorts elements exist.
  int64_t valid(int64_t chunk) const { return min_of(kShorts, row_bytes - chunk * kShorts); }
};

// `count` rows of packed codes, a multiple of 16, each in `segments` parts. Keys: a row is a token,
// of one segment. Values: a row is a channel, and the blobs of the unit are the segments.
struct PackedRows {
  const Layout& layout;
  const uint8_t* codes;
  int64_t count, segments, segment_stride;
  int64_t next;  // distance to the same codes of the next unit
};

// out[r * out_stride + i] = sum over segments s of codes(s, row i) . weights(s, row r). Meanwhile
// the next unit is fetched: the pages of a request lie anywhere, so the hardware cannot guess it.
template <int kBits, int kRows>
void dot_codes(const PackedRows& rows, const int16_t* weights, int32_t* out, int64_t out_stride) {
  // kLanes sums at a time, which one transposition turns into one vector.
  constexpr int kTile = kLanes / (kRows == 3 ? 4 : kRows);
  const int64_t row_bytes = rows.layout.row_bytes, chunks = rows.layout.chunks;
  for (int64_t i = 0; i < rows.count; i += kTile) {
    VI sums[kLanes] = {};
    const int16_t* w = weights;
    for (int64_t s = 0; s < rows.segments; ++s) {
      const uint8_t* tile = rows.codes + s * rows.segment_stride + i * row_bytes;
      prefetch(tile + rows.next, kTile * row_bytes);
      for (int64_t chunk = 0; chunk < chunks; ++chunk, tile += kShorts) {
        VS packed[kTile];
#pragma GCC unroll 16
        for (int t = 0; t < kTile; ++t) packed[t] = load_bytes(tile + t * row_bytes);
#pragma GCC unroll 2
        for (int half = 0; half < 8 / kBits; ++half, w += kRows * kShorts) {
#pragma GCC unroll 16
          for (int t = 0; t < kTile; ++t) {
            const VS code = kBits == 8 ? packed[t] : half ? packed[t] >> 4 : packed[t] & 15;
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
              VI& sum = sums[r * kTile + t];
              sum = multiply_add(sum, code, load<VS>(w + r * kShorts));
              in_order(sum);
            }
          }
        }
      }
    }
    int32_t tile_sums[kLanes];
    store(tile_sums, sums_of(sums));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      memcpy(out + r * out_stride + i, tile_sums + r * kTile, kTile * sizeof(int32_t));
    }
  }
}

void dot_codes(int64_t bits, int64_t num_weights, const PackedRows& rows, const int16_t* weights,
               int32_t* out, int64_t out_stride) {
  using Kernel = void (*)(const PackedRows&, const int16_t*, int32_t*, int64_t);
  static const Kernel kKernels[2][kRowBlock] = {
      {dot_codes<4, 1>, dot_codes<4, 2>, dot_codes<4, 3>, dot_codes<4, 4>},
      {dot_codes<8, 1>, dot_codes<8, 2>, dot_codes<8, 3>, dot_codes<8, 4>}};
  kKernels[bits == 8][num_weights - 1](rows, weights, out, out_stride);
}

// Rounds products to int16 and keeps what is needed to undo the factor.
struct Int16Weights {
  float to_int, factor;  // factor: of the integer sums
  VF lost = {};          // sum of the rounding errors, times to_int

  explicit Int16Weights(float largest)
      : to_int(largest > 1e-30f ? 32767.0f / largest : 0.0f), factor(largest / 32767.0f) {}

  VS round(VF a, VF b) {
    a *= to_int;
    b *= to_int;
    const VI x = round_to_int(a), y = round_to_int(b);
    lost += (a - to_float(x)) + (b - to_float(y));
    return pack_shorts(x, y);
  }
  float lost_bias(int64_t bits) const {
    return factor * sum_of(lost) * (bits == 4 ? 7.5f : 127.5f);
  }
};

// --- one task -----------------------------------------------------------------------------------

struct Task : Rows {
  const Record rec;
  const Layout key_layout, value_layout;

  // `query` is [rows][padded key elements], scaled and in the order of key weights, for the units.
  float *key_scale, *key_zero;      // [num_blobs][padded key elements]
  float *value_scale, *value_zero;  // [unit_size]
  int16_t* weights;                 // [kRowBlock * the longer of both layouts]
  int16_t* group_weights;           // of keys with cuts, negated; see cut_weights
  int32_t* dots;                    // [kRowBlock][max(part, head_size)]
  float* logits;                    // [kRowBlock][unit_size]

  Task(const KvqArgs& args, const QueryBlock& block, int64_t head)
      : Rows(args, block, head),
        rec(args),
        key_layout(rec.key_row_bytes, args.key_bits),
        value_layout(rec.value_row_bytes, args.value_bits) {
    const size_t bytes = carve(Carver(nullptr));
    carve(Carver(kvq_scratch(KVQ_SCRATCH_OWN, bytes)));
  }

  size_t carve(Carver carver) {
    const int64_t u = rec.unit_size;
    query = carver.take<float>(rows * max_of(key_layout.padded(), d));
    key_scale = carver.take<float>(rec.num_blobs * key_layout.padded());
    key_zero = carver.take<float>(rec.num_blobs * key_layout.padded());
    group_weights = carver.take<int16_t>(rec.has_cuts ? kRowBlock * key_layout.padded() : 0);
    value_scale = carver.take<float>(u);
    value_zero = carver.take<float>(u);
    weights = carver.take<int16_t>(
        kRowBlock * max_of(key_layout.padded(), rec.num_blobs * value_layout.padded()));
    dots = carver.take<int32_t>(kRowBlock * max_of(rec.part, d));
    logits = carver.take<float>(kRowBlock * u);
    tile = carver.take<float>(kTile * 2 * d);
    return carver.used();
  }

  void load_query() {
    float unpermuted[256];
    const int64_t padded = key_layout.padded();
    memset(query, 0, static_cast<size_t>(rows * padded) * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) {
      to_floats(unpermuted, query_at(r), a.query_dtype, rec.head_size);
      for (int64_t c = 0; c < rec.head_size; ++c) unpermuted[c] *= static_cast<float>(a.scale);
      float* to = query + r * padded;
      for (int64_t chunk = 0; chunk < key_layout.chunks; ++chunk) {
        for (int64_t half = 0; half < key_layout.halves; ++half, to += kShorts) {
          memcpy(to, unpermuted + key_layout.element(chunk, half),
                 static_cast<size_t>(key_layout.valid(chunk)) * sizeof(float));
        }
      }
    }
  }

  // Scales and zeros of a unit as floats, keys' in the order of key weights. Vectors may read a
  // few channels too many; a query that is 0 there keeps them out.
  void load_unit_meta(const uint8_t* record, int64_t next) {
    float *scale = key_scale, *zero = key_zero;
    VF s, z;
    for (int64_t b = 0; b < rec.num_blobs; ++b) {
      const uint8_t* blob = record + b * rec.blob_bytes;
      prefetch(blob + rec.key_meta + next, rec.blob_bytes - rec.key_meta);
      for (int64_t chunk = 0; chunk < key_layout.chunks; ++chunk) {
        for (int64_t half = 0; half < key_layout.halves; ++half) {
          const uint8_t* meta = blob + rec.key_meta + key_layout.element(chunk, half) * 4;
          for (int i = 0; i < kShorts; i += kLanes, scale += kLanes, zero += kLanes) {
            load_meta(meta + i * 4, s, z);
            store(scale, s);
            store(zero, z);
          }
        }
      }
      for (int64_t t = 0; t < rec.group; t += kLanes) {
        load_meta(blob + rec.value_meta + t * 4, s, z);
        store(value_scale + b * rec.group + t, s);
        store(value_zero + b * rec.group + t, z);
      }
    }
  }

  // Fold the key scales of a group into `count` rows of the query, as int16 weights; per row, the
  // factor of the integer dot product and the bias to add. With cuts, the weights are negated, and
  // the bias lacks what depends on the part.
  void fold_key_scales(int64_t blob, int64_t row, int64_t count, float* factor, float* bias) {
    const int64_t padded = key_layout.padded();
    const float *scale = key_scale + blob * padded, *zero = key_zero + blob * padded;
    int16_t* to = rec.has_cuts ? group_weights : weights;
    for (int64_t r = 0; r < count; ++r) {
      const float* q = query + (row + r) * padded;
      VF largest = {}, dot_zero = {}, total = {};
      for (int64_t c = 0; c < padded; c += kLanes) {
        const VF x = loadf(q + c), folded = x * loadf(scale + c);
        largest = max_of(largest, abs_of(folded));
        total += folded;
        dot_zero = fma_of(x, loadf(zero + c), dot_zero);
      }
      Int16Weights rounded(max_lane(largest));
      if (rec.has_cuts) rounded.to_int = -rounded.to_int;
      for (int64_t c = 0; c < padded; c += kShorts) {
        const VF x = loadf(q + c) * loadf(scale + c);
        const VF y = loadf(q + c + kLanes) * loadf(scale + c + kLanes);
        store(to + (c / kShorts * count + r) * kShorts, rounded.round(x, y));
      }
      factor[r] = rounded.factor;
      bias[r] = sum_of(dot_zero) +
                (rec.has_cuts ? 7.5f * sum_of(total) : rounded.lost_bias(a.key_bits));
    }
  }

  // The weights and biases of a part from those of its group. A weight is the negated one times
  // -1024 n_i / 2^15: without cuts n_i is 32, and 1024 * 32 does not fit int16. Vectors may read
  // more cuts than there are channels; weights are 0 there.
  template <int kRows>
  void cut_weights(const uint8_t* cuts, const float* factor, const float* group_bias,
                   float* bias) {
    VI sum[kRows] = {};  // of 32 weight_i - f_i (low_i - high_i)
    const int16_t* from = group_weights;
    int16_t* to = weights;
    const int64_t chunks = key_layout.chunks, row_bytes = key_layout.row_bytes;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t half = 0; half < 2; ++half) {
        const VS both = load_bytes(cuts + half * row_bytes + chunk * kShorts);
        const VS low = both & 15, high = both >> 4;
        const VS scale = (low + high - 32) << 10, shift = low - high;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r, from += kShorts, to += kShorts) {
          const VS negated = load<VS>(from);
          const VS weight = multiply_high(negated, scale);
          store(to, weight);
          sum[r] = multiply_add(sum[r], weight, VS{} + 32);
          sum[r] = multiply_add(sum[r], negated, shift);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      bias[r] = group_bias[r] - 7.5f * kCutStep * factor[r] * sum_of(to_float(sum[r]));
    }
  }

  void cut_weights(const uint8_t* cuts, int64_t count, const float* factor,
                   const float* group_bias, float* bias) {
    switch (count) {
      case 4: return cut_weights<4>(cuts, factor, group_bias, bias);
      case 3: return cut_weights<3>(cuts, factor, group_bias, bias);
      case 2: return cut_weights<2>(cuts, factor, group_bias, bias);
      default: return cut_weights<1>(cuts, factor, group_bias, bias);
    }
  }

  // Logits of `count` rows with the tokens of a unit, group by group and part by part.
  void key_logits(const uint8_t* record, int64_t next, int64_t unit, int64_t row, int64_t count) {
    float factor[kRowBlock], group_bias[kRowBlock], part_bias[kRowBlock];
    float* to = logits;
    for (int64_t b = 0; b < rec.num_blobs; ++b) {
      const uint8_t* blob = record + b * rec.blob_bytes;
      fold_key_scales(b, row, count, factor, group_bias);
      for (int64_t part = 0; part < rec.num_parts; ++part, to += rec.part) {
        const uint8_t* codes = blob + part * rec.part * rec.key_row_bytes;
        if (rec.has_cuts) {
          cut_weights(blob + rec.key_cuts + part * d, count, factor, group_bias, part_bias);
        }
        part_logits(codes, next, count, factor, rec.has_cuts ? part_bias : group_bias, to);
      }
    }
    if (rec.anchor && unit == 0 && record[rec.anchor_flag] == 1) {
      for (int64_t r = 0; r < count; ++r) {
        logits[r * rec.unit_size] = anchor_logit(record, row + r);
      }
    }
  }

  // Logits of `count` rows with the tokens of a part, whose weights are ready. Rows of `to` are a
  // unit apart.
  void part_logits(const uint8_t* codes, int64_t next, int64_t count, const float* factor,
                   const float* bias, float* to) {
    dot_codes(a.key_bits, count, {key_layout, codes, rec.part, 1, 0, next}, weights, dots,
              rec.part);
    for (int64_t r = 0; r < count; ++r, to += rec.unit_size) {
      const VF f = splat(factor[r]), z = splat(bias[r]);
      for (int64_t t = 0; t < rec.part; t += kLanes) {
        store(to + t, fma_of(to_float(load<VI>(dots + r * rec.part + t)), f, z));
      }
    }
  }

  // Logit of the sequence's first token, whose key is kept apart.
  float anchor_logit(const uint8_t* record, int64_t row) const {
    const float* q = query + row * key_layout.padded();
    const uint8_t* codes = record + rec.anchor_codes;
    uint16_t meta[2];
    memcpy(meta, record + rec.anchor_meta, sizeof meta);
    float dot = 0, total = 0;
    for (int64_t chunk = 0; chunk < key_layout.chunks; ++chunk) {
      for (int64_t half = 0; half < key_layout.halves; ++half, q += kShorts) {
        for (int64_t i = 0; i < key_layout.valid(chunk); ++i) {
          dot += q[i] * static_cast<float>(codes[key_layout.element(chunk, half) + i]);
          total += q[i];
        }
      }
    }
    return dot * half_to_float(meta[0]) + total * half_to_float(meta[1]);
  }

  // Fold the value scales into the softmax weights of row `r` of `count`, as int16 weights; the
  // factor of the integer sums and the bias to add.
  void fold_value_scales(const float* p, int64_t r, int64_t count, float& factor, float& bias) {
    VF largest = {}, dot_zero = {};
    for (int64_t t = 0; t < rec.unit_size; t += kLanes) {
      const VF x = loadf(p + t);
      largest = max_of(largest, x * loadf(value_scale + t));
      dot_zero = fma_of(x, loadf(value_zero + t), dot_zero);
    }
    Int16Weights rounded(max_lane(largest));
    int16_t* to = weights + r * kShorts;
    for (int64_t b = 0; b < rec.num_blobs; ++b) {
      for (int64_t chunk = 0; chunk < value_layout.chunks; ++chunk) {
        for (int64_t half = 0; half < value_layout.halves; ++half, to += count * kShorts) {
          const int64_t t = b * rec.group + value_layout.element(chunk, half);
          const VF x = loadf(p + t) * loadf(value_scale + t);
          VF y = {};  // a row of codes may be half a chunk: 32 tokens of 4 bits with AVX-512
          if (value_layout.valid(chunk) > kLanes) {
            y = loadf(p + t + kLanes) * loadf(value_scale + t + kLanes);
          }
          store(to, rounded.round(x, y));
        }
      }
    }
    factor = rounded.factor;
    bias = sum_of(dot_zero) + rounded.lost_bias(a.value_bits);
  }

  // `next`: from this record to that of the next unit.
  void attend_unit(const uint8_t* record, int64_t next, int64_t unit, int64_t row, int64_t count,
                   Partial& partial) {
    const int64_t u = rec.unit_size;
    key_logits(record, next, unit, row, count);
    float rescale[kRowBlock], factor[kRowBlock], bias[kRowBlock];
    for (int64_t r = 0; r < count; ++r) {
      float* p = logits + r * u;
      transform(p, row + r, unit * u, u, u);
      rescale[r] = softmax(p, u, partial.max[row + r], partial.sum[row + r]);
      fold_value_scales(p, r, count, factor[r], bias[r]);
    }
    dot_codes(a.value_bits, count,
              {value_layout, record + rec.value_codes, d, rec.num_blobs, rec.blob_bytes, next},
              weights, dots, d);
    for (int64_t r = 0; r < count; ++r) {
      float* acc = partial.acc + (row + r) * d;
      const VF f = splat(factor[r]), z = splat(bias[r]), old = splat(rescale[r]);
      for (int64_t c = 0; c < d; c += kLanes) {
        const VF fresh = fma_of(to_float(load<VI>(dots + r * d + c)), f, z);
        store(acc + c, fma_of(loadf(acc + c), old, fresh));
      }
    }
  }

  void attend_units(int64_t first_unit, int64_t end_unit, Partial partial) {
    load_query();
    start(partial);
    for (int64_t unit = first_unit; unit < end_unit; ++unit) {
      const uint8_t* record = record_at(a, block.request, unit, head);
      const int64_t next =
          unit + 1 < end_unit ? record_at(a, block.request, unit + 1, head) - record : 0;
      load_unit_meta(record, next);
      for (int64_t row = 0; row < rows; row += kRowBlock) {
        attend_unit(record, row == 0 ? next : 0, unit, row, min_of(kRowBlock, rows - row), partial);
      }
    }
  }

  // --- the residual ring, in fp32 ---

  void attend_ring(Partial partial) {
    const int64_t end = block.position + block.count;
    load_plain_query();
    start(partial);
    const int64_t lowest = lowest_position(a, block.position);
    for (int64_t key = max_of(block.open_start, lowest); key < end; key += kTile) {
      const int64_t count = min_of(kTile, end - key);
      for (int64_t t = 0; t < count; ++t) {
        to_floats(tile + t * 2 * d, ring_at(a, block.request, key + t, head), a.ring_dtype, 2 * d);
      }
      attend_tile(key, count, partial);
    }
  }
};

// --- the whole batch ----------------------------------------------------------------------------

struct PlannedBlock {
  QueryBlock block;
  int64_t splits;    // of sealed units; the ring is one more
  int64_t partials;  // offset of its partials, in floats: [kv head][split]
  int64_t first_task;
  int64_t unfinished;  // index of its counters of unfinished splits, [kv head]

  int64_t rows(const KvqArgs& a) const { return block.count * (a.num_heads / a.num_kv_heads); }
  int64_t partial_floats(const KvqArgs& a) const { return Partial::floats(rows(a), a.head_size); }
};

// Merge the splits of one (block, kv head) and write the output.
void combine(const KvqArgs& a, const PlannedBlock& planned, float* partials, int64_t head) {
  const int64_t d = a.head_size, rows = planned.rows(a), splits = planned.splits + 1;
  const int64_t stride = planned.partial_floats(a), group_heads = a.num_heads / a.num_kv_heads;
  float* base = partials + planned.partials + head * splits * stride;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query_head = head * group_heads + r % group_heads;
    float most = a.sinks ? a.sinks[query_head] : kLowest;
    for (int64_t s = 0; s < splits; ++s) {
      const float split_max = Partial(base + s * stride, rows, d).max[r];
      most = split_max > most ? split_max : most;
    }
    float sum = a.sinks ? exp_of(a.sinks[query_head] - most) : 0.0f;
    float acc[256] = {};
    for (int64_t s = 0; s < splits; ++s) {
      if (s == planned.splits && s > 0 && a.rotate_values) rotate_row(acc, d);  // the ring is next
      const Partial p(base + s * stride, rows, d);
      const float weight = exp_of(p.max[r] - most);
      sum += p.sum[r] * weight;
      const VF w = splat(weight);
      for (int64_t c = 0; c < d; c += kLanes) {
        store(acc + c, fma_of(loadf(p.acc + r * d + c), w, loadf(acc + c)));
      }
    }
    for (int64_t c = 0; c < d; c += kLanes) store(acc + c, loadf(acc + c) / sum);
    from_floats(a.out + (planned.block.row + r / group_heads) * a.out_row_stride +
                    query_head * a.out_head_stride,
                acc, a.out_dtype, d);
  }
}

}  // namespace
}  // namespace kvq

using namespace kvq;

extern "C" void KVQ_NAME(decode)(const KvqArgs* args) {
  const KvqArgs& a = *args;
  const int64_t heads = a.num_kv_heads, group_heads = a.num_heads / heads;
  const int64_t max_count = max_of(1, kMaxRows / group_heads);
  const int64_t split_units = kSplitTokens / a.unit_size;

  int64_t num_blocks = 0, num_tasks = 0, floats = 0, work = 0;
  PlannedBlock* plan = nullptr;
  int32_t* unfinished = nullptr;
  const auto visit = [&](const QueryBlock& block) {
    PlannedBlock p{block, ceil_div(block.end_unit - block.first_unit, split_units), floats,
                   num_tasks, num_blocks * heads};
    if (plan) {
      plan[num_blocks] = p;
      for (int64_t h = 0; h < heads; ++h) {
        unfinished[p.unfinished + h] = static_cast<int32_t>(p.splits + 1);
      }
    }
    ++num_blocks;
    work += (block.position + block.count - block.first_unit * a.unit_size) * p.rows(a) * heads;
    num_tasks += (p.splits + 1) * heads;
    floats += (p.splits + 1) * heads * p.partial_floats(a);
  };
  for_each_query_block(a, max_count, visit);
  if (num_blocks == 0) return;
  float* partials = nullptr;
  const auto carve = [&](Carver carver) {
    plan = carver.take<PlannedBlock>(num_blocks);
    unfinished = carver.take<int32_t>(num_blocks * heads);
    partials = carver.take<float>(floats);
    return carver.used();
  };
  carve(Carver(kvq_scratch(KVQ_SCRATCH_SHARED, carve(Carver(nullptr)))));
  num_blocks = num_tasks = floats = work = 0;
  for_each_query_block(a, max_count, visit);

#pragma omp parallel num_threads(threads_for(a, work, kThreadWork))
  {
    int64_t b = 0;  // a thread's tasks come in ascending order
#pragma omp for schedule(monotonic : dynamic, 1) nowait
    for (int64_t i = 0; i < num_tasks; ++i) {
      while (b + 1 < num_blocks && plan[b + 1].first_task <= i) ++b;
      const PlannedBlock& planned = plan[b];
      const int64_t split = (i - planned.first_task) / heads;
      const int64_t head = (i - planned.first_task) % heads;
      float* base = partials + planned.partials +
                    (head * (planned.splits + 1) + split) * planned.partial_floats(a);
      Task task(a, planned.block, head);
      const Partial partial(base, task.rows, a.head_size);
      if (split == planned.splits) {
        task.attend_ring(partial);
      } else {
        const int64_t first = planned.block.first_unit + split * split_units;
        task.attend_units(first, min_of(first + split_units, planned.block.end_unit), partial);
      }
      // Acquire and release: whoever is last sees what the others wrote.
      if (__atomic_sub_fetch(unfinished + planned.unfinished + head, 1, __ATOMIC_ACQ_REL) == 0) {
        combine(a, planned, partials, head);
      }
    }
  }
}
