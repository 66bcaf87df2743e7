// Prefill attention: many queries per request.
//
// A task is (block of queries, kv head); its rows are the block's queries times the query heads
// of the kv head. They lie in panels of kPanel rows, transposed, so that one vector holds the
// same element of kLanes rows: logits and weights need no horizontal operation, and the record's
// own orientation is right for both products:
//
//     logits[token][row]  = key[token][channel]   . query[channel][row]
//     out[channel][row]  += value[channel][token] . weights[token][row]
//
// Each sealed unit is dequantised once per task, to fp32. The sealed part is rotated back before
// the block's own unit is added, which is read at full precision.
#include "attention.h"

namespace kvq {
namespace {

constexpr int64_t kMaxRows = 512;  // of a task: its panels fit a second-level cache

[[maybe_unused]] constexpr int64_t kThreadWork = 2048;  // query-key products, some 20 us

// The register tile of `multiply`: kTileRows x kPanelVectors accumulators.
#if defined(KVQ_AVX512)
constexpr int kTileRows = 8, kPanelVectors = 3;
#elif defined(KVQ_AVX2)
constexpr int kTileRows = 4, kPanelVectors = 3;
#else
constexpr int kTileRows = 4, kPanelVectors = 2;
#endif
static_assert(16 % kTileRows == 0, "head and unit sizes are multiples of 16 only");
constexpr int64_t kTransposed = 16;  // value rows transposed at a time
constexpr int kPanel = kPanelVectors * kLanes;

// c = a b, or with `rescale` c = c * rescale + a b. a is [rows][inner] with `a_stride` floats
// between rows, b is [inner][kPanel], c is [rows][kPanel]; `rows` a multiple of kTileRows.
template <bool kRescale>
void multiply(const float* a, int64_t a_stride, int64_t rows, int64_t inner, const float* b,
              float* c, const VF* rescale) {
  for (int64_t i = 0; i < rows; i += kTileRows, a += kTileRows * a_stride) {
    VF sums[kTileRows][kPanelVectors];
    float* tile = c + i * kPanel;
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) {
        sums[r][v] = kRescale ? loadf(tile + r * kPanel + v * kLanes) * rescale[v] : VF{};
      }
    }
    for (int64_t k = 0; k < inner; ++k) {
      VF columns[kPanelVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) columns[v] = loadf(b + k * kPanel + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kTileRows; ++r) {
        const VF x = splat(a[r * a_stride + k]);
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = fma_of(x, columns[v], sums[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) store(tile + r * kPanel + v * kLanes, sums[r][v]);
    }
  }
}

// Scales and zeros of some channels or tokens.
struct Meta {
  float *scale, *zero;
};

struct Task {
  const KvqArgs& a;
  const Record rec;
  const QueryBlock block;
  const int64_t head, group_heads, rows, panels;

  float* key;          // [unit_size][head_size]
  float* value;        // [head_size][unit_size]
  Meta blob_meta;      // of a blob's channels or tokens
  Meta part_meta;      // of a part's channels, for keys with cuts
  float* query;        // [panels][head_size][kPanel], scaled
  float* acc;          // [panels][head_size][kPanel]
  float *max, *sum;    // [panels][kPanel]
  float* position;     // [panels][kPanel], relative to the start of the block's unit
  float* slope;        // [panels][kPanel]
  float* logits;       // [unit_size][kPanel]
  float* rows_buffer;  // [kTransposed][head_size]

  Task(const KvqArgs& args, const QueryBlock& block, int64_t head)
      : a(args),
        rec(args),
        block(block),
        head(head),
        group_heads(args.num_heads / args.num_kv_heads),
        rows(block.count * group_heads),
        panels(ceil_div(rows, kPanel)) {
    const size_t bytes = carve(Carver(nullptr));
    carve(Carver(kvq_scratch(KVQ_SCRATCH_OWN, bytes)));
  }

  size_t carve(Carver carver) {
    const int64_t u = rec.unit_size, d = rec.head_size;
    key = carver.take<float>(u * d + kLanes);  // see dequantise_row
    value = carver.take<float>(d * u);
    blob_meta.scale = carver.take<float>(max_of(d, u) + kLanes);
    blob_meta.zero = carver.take<float>(max_of(d, u) + kLanes);
    part_meta.scale = carver.take<float>(d + kLanes);
    part_meta.zero = carver.take<float>(d + kLanes);
    query = carver.take<float>(panels * d * kPanel);
    acc = carver.take<float>(panels * d * kPanel);
    max = carver.take<float>(panels * kPanel);
    sum = carver.take<float>(panels * kPanel);
    position = carver.take<float>(panels * kPanel);
    slope = carver.take<float>(panels * kPanel);
    logits = carver.take<float>(u * kPanel);
    rows_buffer = carver.take<float>(kTransposed * d);
    return carver.used();
  }

  int64_t query_head(int64_t row) const { return head * group_heads + row % group_heads; }
  int64_t query_position(int64_t row) const { return block.position + row / group_heads; }

  void load_queries() {
    const int64_t d = rec.head_size;
    memset(query, 0, static_cast<size_t>(panels * d * kPanel) * sizeof(float));
    memset(acc, 0, static_cast<size_t>(panels * d * kPanel) * sizeof(float));
    for (int64_t r = 0; r < panels * kPanel; ++r) {
      const int64_t real = min_of(r, rows - 1);  // what fills up the last panel is never written
      const int64_t h = query_head(real);
      max[r] = a.sinks ? a.sinks[h] : kLowest;
      sum[r] = a.sinks ? 1.0f : 0.0f;
      slope[r] = a.alibi_slopes ? a.alibi_slopes[h] : 0.0f;
      position[r] = static_cast<float>(query_position(real) - block.open_start);
      if (r >= rows) continue;
      to_floats(rows_buffer,
                a.query + (block.row + r / group_heads) * a.query_row_stride +
                    h * a.query_head_stride,
                a.query_dtype, d);
      float* column = query + r / kPanel * d * kPanel + r % kPanel;
      for (int64_t c = 0; c < d; ++c) {
        column[c * kPanel] = rows_buffer[c] * static_cast<float>(a.scale);
      }
    }
  }

  // --- keys and values ---

  void load_blob_meta(const uint8_t* from, int64_t count) {
    VF s, z;
    for (int64_t i = 0; i < count; i += kLanes) {
      load_meta(from + i * 4, s, z);
      store(blob_meta.scale + i, s);
      store(blob_meta.zero + i, z);
    }
  }

  // Of a part's channels, from what is loaded of its group's.
  void cut_blob_meta(const uint8_t* cuts) {
    for (int64_t c = 0; c < rec.head_size; c += kLanes) {
      VF s = loadf(blob_meta.scale + c), z = loadf(blob_meta.zero + c);
      cut_meta(load_bytes_as_ints(cuts + c), s, z);
      store(part_meta.scale + c, s);
      store(part_meta.zero + c, z);
    }
  }

  // One row of packed codes to floats. With 4 bits, head size 80 and AVX-512 the low half may
  // spill into the high half, and that into the next row; each is written later.
  template <int kBits>
  static void dequantise_row(float* to, const uint8_t* codes, int64_t bytes, Meta meta) {
    for (int half = 0; half < 8 / kBits; ++half) {
      const int64_t offset = half * bytes;
      for (int64_t i = 0; i < bytes; i += kLanes) {
        VI code = load_bytes_as_ints(codes + i);
        if (kBits == 4) code = half ? code >> 4 : code & 15;
        store(to + offset + i, fma_of(to_float(code), loadf(meta.scale + offset + i),
                                      loadf(meta.zero + offset + i)));
      }
    }
  }

  void dequantise_keys(const uint8_t* blob, float* to) {
    const int64_t d = rec.head_size, bytes = rec.key_row_bytes;
    const auto dequantise = a.key_bits == 4 ? dequantise_row<4> : dequantise_row<8>;
    load_blob_meta(blob + rec.key_meta, d);
    const uint8_t *codes = blob, *cuts = blob + rec.key_cuts;
    for (int64_t part = 0; part < rec.num_parts; ++part, cuts += d) {
      if (rec.has_cuts) cut_blob_meta(cuts);
      const Meta meta = rec.has_cuts ? part_meta : blob_meta;
      for (int64_t t = 0; t < rec.part; ++t, codes += bytes, to += d) {
        dequantise(to, codes, bytes, meta);
      }
    }
  }

  void dequantise_values(const uint8_t* blob, float* to) {
    const int64_t bytes = rec.value_row_bytes;
    const auto dequantise = a.value_bits == 4 ? dequantise_row<4> : dequantise_row<8>;
    load_blob_meta(blob + rec.value_meta, rec.group);
    const uint8_t* codes = blob + rec.value_codes;
    for (int64_t c = 0; c < rec.head_size; ++c, codes += bytes, to += rec.unit_size) {
      dequantise(to, codes, bytes, blob_meta);
    }
  }

  void dequantise_anchor(const uint8_t* record) {
    uint16_t meta[2];
    memcpy(meta, record + rec.anchor_meta, sizeof meta);
    for (int64_t c = 0; c < rec.head_size; ++c) {
      key[c] = static_cast<float>(record[rec.anchor_codes + c]) * half_to_float(meta[0]) +
               half_to_float(meta[1]);
    }
  }

  void dequantise_unit(int64_t unit) {
    const uint8_t* record = record_at(a, block.request, unit, head);
    for (int64_t b = 0; b < rec.num_blobs; ++b) {
      const uint8_t* blob = record + b * rec.blob_bytes;
      dequantise_keys(blob, key + b * rec.group * rec.head_size);
      dequantise_values(blob, value + b * rec.group);
    }
    if (rec.anchor && unit == 0 && record[rec.anchor_flag] == 1) dequantise_anchor(record);
  }

  // The block's own unit up to its last query: older tokens from the ring, new ones directly.
  // Up to the next multiple of kTransposed, zeros: masked, but they must be finite.
  void load_own_unit() {
    const int64_t d = rec.head_size, u = rec.unit_size;
    const int64_t count = block.position + block.count - block.open_start;
    const Request tokens = request_at(a, block.request);
    for (int64_t t = 0; t < count; t += kTransposed) {
      const int64_t real = min_of(kTransposed, count - t);
      for (int64_t i = 0; i < real; ++i) {
        const int64_t position = block.open_start + t + i;
        load_key(a, block.request, tokens, position, head, key + (t + i) * d);
        load_value(a, block.request, tokens, position, head, rows_buffer + i * d);
      }
      const size_t missing = static_cast<size_t>((kTransposed - real) * d) * sizeof(float);
      memset(key + (t + real) * d, 0, missing);
      memset(rows_buffer + real * d, 0, missing);
      transpose(rows_buffer, kTransposed, d, value + t, u);
    }
  }

  // --- attention ---

  // Soft cap, ALiBi and masks on a panel's logits with `count` keys from position `first_key` on.
  void transform(int64_t panel, int64_t first_key, int64_t count, bool masked) {
    const float cap = static_cast<float>(a.soft_cap);
    const bool plain = cap == 0.0f && !a.alibi_slopes;
    if (plain && !masked) return;
    const float window = a.sliding_window ? static_cast<float>(a.sliding_window) : __builtin_inff();
    for (int v = 0; v < kPanelVectors; ++v) {
      const int64_t lane = panel * kPanel + v * kLanes;
      const VF lane_slope = loadf(slope + lane);
      VF distance = static_cast<float>(first_key - block.open_start) - loadf(position + lane);
      for (int64_t t = 0; t < count; ++t, distance += 1.0f) {
        float* p = logits + t * kPanel + v * kLanes;
        VF x = loadf(p);
        if (cap != 0.0f) x = soft_capped(x, cap);
        if (!plain) x = fma_of(distance, lane_slope, x);
        if (masked) x = select((distance <= 0.0f) & (distance > -window), x,
                               splat(-__builtin_inff()));
        store(p, x);
      }
    }
  }

  // Running softmax down the tokens; `rescale` is the factor of what was summed before.
  void softmax(int64_t panel, int64_t count, VF* rescale) {
    for (int v = 0; v < kPanelVectors; ++v) {
      float* column = logits + v * kLanes;
      float* running_max = max + panel * kPanel + v * kLanes;
      float* running_sum = sum + panel * kPanel + v * kLanes;
      const VF old_max = loadf(running_max);
      VF new_max = old_max, total = {};
      for (int64_t t = 0; t < count; ++t) new_max = max_of(new_max, loadf(column + t * kPanel));
      for (int64_t t = 0; t < count; ++t) {
        const VF weight = exp_of(loadf(column + t * kPanel) - new_max);
        total += weight;
        store(column + t * kPanel, weight);
      }
      rescale[v] = exp_of(old_max - new_max);
      store(running_max, new_max);
      store(running_sum, fma_of(loadf(running_sum), rescale[v], total));
    }
  }

  // `count` keys from position `first_key` on, a multiple of kTileRows.
  void attend(int64_t panel, int64_t first_key, int64_t count, bool masked) {
    const int64_t d = rec.head_size;
    VF rescale[kPanelVectors];
    multiply<false>(key, d, count, d, query + panel * d * kPanel, logits, nullptr);
    transform(panel, first_key, count, masked);
    softmax(panel, count, rescale);
    multiply<true>(value, rec.unit_size, d, count, logits, acc + panel * d * kPanel, rescale);
  }

  int64_t first_position(int64_t panel) const { return query_position(panel * kPanel); }
  int64_t last_position(int64_t panel) const {
    return query_position(min_of((panel + 1) * kPanel, rows) - 1);
  }

  void run() {
    const int64_t d = rec.head_size, u = rec.unit_size;
    load_queries();
    for (int64_t unit = block.first_unit; unit < block.end_unit; ++unit) {
      dequantise_unit(unit);
      for (int64_t p = 0; p < panels; ++p) {
        if (lowest_position(a, first_position(p)) >= (unit + 1) * u) continue;
        attend(p, unit * u, u, lowest_position(a, last_position(p)) > unit * u);
      }
    }
    if (a.rotate_values && block.first_unit < block.end_unit) {
      for (int64_t p = 0; p < panels; ++p) rotate_columns(acc + p * d * kPanel, d, kPanel);
    }
    load_own_unit();
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t count = last_position(p) + 1 - block.open_start;
      attend(p, block.open_start, round_up(count, kTileRows), true);
    }
    write_out();
  }

  void write_out() {
    const int64_t d = rec.head_size;
    for (int64_t r = 0; r < rows; ++r) {
      const float* column = acc + r / kPanel * d * kPanel + r % kPanel;
      for (int64_t c = 0; c < d; ++c) rows_buffer[c] = column[c * kPanel] / sum[r];
      from_floats(a.out + (block.row + r / group_heads) * a.out_row_stride +
                      query_head(r) * a.out_head_stride,
                  rows_buffer, a.out_dtype, d);
    }
  }
};

}  // namespace
}  // namespace kvq

using namespace kvq;

extern "C" void KVQ_NAME(prefill)(const KvqArgs* args) {
  const KvqArgs& a = *args;
  const int64_t max_count = max_of(1, kMaxRows / (a.num_heads / a.num_kv_heads));
  int64_t count = 0, work = 0;
  for_each_query_block(a, max_count, [&](const QueryBlock& block) {
    ++count;
    work += (block.position + block.count - block.first_unit * a.unit_size) * block.count *
            a.num_heads;
  });
  if (count == 0) return;
  QueryBlock* blocks = static_cast<QueryBlock*>(
      kvq_scratch(KVQ_SCRATCH_SHARED, static_cast<size_t>(count) * sizeof(QueryBlock)));
  count = 0;
  for_each_query_block(a, max_count, [&](const QueryBlock& block) { blocks[count++] = block; });
  // The last block of a request has the most keys: start with it.
#pragma omp parallel for num_threads(threads_for(a, work, kThreadWork)) schedule(dynamic, 1)
  for (int64_t i = count * a.num_kv_heads - 1; i >= 0; --i) {
    Task(a, blocks[i / a.num_kv_heads], i % a.num_kv_heads).run();
  }
}
