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
// Each sealed unit is dequantised once per task, to what the product multiplies: fp32, or bf16 for
// bf16 models where there is AMX. The sealed part is rotated back before the block's own unit is
// added, which is read at full precision.
#include "attention.h"
#include "products.h"

namespace kvq {
namespace {

constexpr int64_t kMaxRows = 512;  // of a task: its panels fit a second-level cache

[[maybe_unused]] constexpr int64_t kThreadWork = 2048;  // query-key products, some 20 us

constexpr int64_t kTransposed = 32;  // rows of values transposed at a time

// Scales and zeros of some channels or tokens.
struct Meta {
  float *scale, *zero;
};

template <class Product>
struct Task : QueryRows {
  using Element = typename Product::Element;
  static constexpr int kPanel = Product::kPanel;
  static_assert(kTransposed % Product::kStep == 0);

  const Record rec;
  const int64_t panels;
  const int64_t width;  // of a key and a query: the head size and what a product needs beyond

  Element* key;        // [unit_size][width]
  Element* value;      // [head_size][unit_size]
  Meta blob_meta;      // of a blob's channels or tokens
  Meta part_meta;      // of a part's channels, for keys with cuts
  Element* query;      // [panels], each an operand b of [width][kPanel]
  float* acc;          // [panels][head_size][kPanel]
  float *max, *sum;    // [panels][kPanel]
  float* offset;       // [panels][kPanel], of positions from the start of the block's unit
  float* slope;        // [panels][kPanel]
  float* logits;       // [unit_size][kPanel]
  Element* weights;    // the logits' softmax, an operand b; it may take their place
  float* rows_buffer;  // [kTransposed][width]
  float* columns;      // [head_size][kTransposed]

  Task(const KvqArgs& args, const QueryBlock& block, int64_t head)
      : QueryRows(args, block, head),
        rec(args),
        panels(ceil_div(rows, kPanel)),
        width(round_up(rec.head_size, Product::kStep)) {
    const size_t bytes = carve(Carver(nullptr));
    carve(Carver(kvq_scratch(KVQ_SCRATCH_OWN, bytes)));
  }

  size_t carve(Carver carver) {
    const int64_t u = rec.unit_size, d = rec.head_size;
    key = carver.take<Element>(u * width + kLanes);  // see dequantise_row
    value = carver.take<Element>(d * u);
    blob_meta.scale = carver.take<float>(max_of(d, u) + kLanes);
    blob_meta.zero = carver.take<float>(max_of(d, u) + kLanes);
    part_meta.scale = carver.take<float>(d + kLanes);
    part_meta.zero = carver.take<float>(d + kLanes);
    query = carver.take<Element>(panels * width * kPanel);
    acc = carver.take<float>(panels * d * kPanel);
    max = carver.take<float>(panels * kPanel);
    sum = carver.take<float>(panels * kPanel);
    offset = carver.take<float>(panels * kPanel);
    slope = carver.take<float>(panels * kPanel);
    logits = carver.take<float>(u * kPanel);
    weights = Product::kInPlace ? reinterpret_cast<Element*>(logits)
                                : carver.take<Element>(u * kPanel);
    rows_buffer = carver.take<float>(kTransposed * width);
    columns = carver.take<float>(d * kTransposed);
    return carver.used();
  }

  void load_queries() {
    const int64_t d = rec.head_size;
    const int64_t head_bytes = d * static_cast<int64_t>(dtype_bytes(a.query_dtype));
    memset(acc, 0, static_cast<size_t>(panels * d * kPanel) * sizeof(float));
    for (int64_t r = 0; r < panels * kPanel; ++r) {
      const int64_t real = min_of(r, rows - 1);  // what fills up the last panel is never written
      const int64_t h = query_head(real);
      max[r] = a.sinks ? a.sinks[h] : kLowest;
      sum[r] = a.sinks ? 1.0f : 0.0f;
      slope[r] = a.alibi_slopes ? a.alibi_slopes[h] : 0.0f;
      offset[r] = static_cast<float>(position(real) - block.open_start);
    }
    for (int64_t r = 0; r < panels * kPanel; r += kLanes) {
      memset(rows_buffer, 0, static_cast<size_t>(kLanes * width) * sizeof(float));
      for (int64_t i = r; i < min_of(r + kLanes, rows); ++i) {
        prefetch(query_at(min_of(i + kLanes, rows - 1)), head_bytes);
        load_query(i, rows_buffer + (i - r) * width);
      }
      Product::put_columns(query + r / kPanel * width * kPanel, r % kPanel, rows_buffer, width);
    }
  }

  void load_query(int64_t row, float* to) {
    to_floats(to, query_at(row), a.query_dtype, rec.head_size);
    if (!Product::kScalesQueries) return;
    for (int64_t c = 0; c < rec.head_size; c += kLanes) {
      store(to + c, loadf(to + c) * static_cast<float>(a.scale));
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

  static void put_row(Element* to, const float* from, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) Product::put(to + i, loadf(from + i));
  }

  // What a product reads of a key beyond the head.
  void clear_padding(Element* row) {
    memset(row + rec.head_size, 0, static_cast<size_t>(width - rec.head_size) * sizeof(Element));
  }

  // One row of packed codes dequantised. With 4 bits, head size 80 and AVX-512 the low half may
  // spill into the high half, and that into the next row; each is written later.
  template <int kBits>
  static void dequantise_row(Element* to, const uint8_t* codes, int64_t bytes, Meta meta) {
    for (int half = 0; half < 8 / kBits; ++half) {
      const int64_t offset = half * bytes;
      for (int64_t i = 0; i < bytes; i += kLanes) {
        VI code = load_bytes_as_ints(codes + i);
        if (kBits == 4) code = half ? code >> 4 : code & 15;
        Product::put(to + offset + i, fma_of(to_float(code), loadf(meta.scale + offset + i),
                                             loadf(meta.zero + offset + i)));
      }
    }
  }

  void dequantise_keys(const uint8_t* blob, Element* to) {
    const int64_t d = rec.head_size, bytes = rec.key_row_bytes;
    const auto dequantise = a.key_bits == 4 ? dequantise_row<4> : dequantise_row<8>;
    load_blob_meta(blob + rec.key_meta, d);
    const uint8_t *codes = blob, *cuts = blob + rec.key_cuts;
    for (int64_t part = 0; part < rec.num_parts; ++part, cuts += d) {
      if (rec.has_cuts) cut_blob_meta(cuts);
      const Meta meta = rec.has_cuts ? part_meta : blob_meta;
      for (int64_t t = 0; t < rec.part; ++t, codes += bytes, to += width) {
        dequantise(to, codes, bytes, meta);
        clear_padding(to);
      }
    }
  }

  void dequantise_values(const uint8_t* blob, Element* to) {
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
      rows_buffer[c] = static_cast<float>(record[rec.anchor_codes + c]) * half_to_float(meta[0]) +
                       half_to_float(meta[1]);
    }
    put_row(key, rows_buffer, rec.head_size);
  }

  void dequantise_unit(int64_t unit) {
    const uint8_t* record = record_at(a, block.request, unit, head);
    for (int64_t b = 0; b < rec.num_blobs; ++b) {
      const uint8_t* blob = record + b * rec.blob_bytes;
      dequantise_keys(blob, key + b * rec.group * width);
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
        load_key(a, block.request, tokens, block.open_start + t + i, head, rows_buffer);
        put_row(key + (t + i) * width, rows_buffer, d);
        clear_padding(key + (t + i) * width);
      }
      for (int64_t i = 0; i < real; ++i) {
        load_value(a, block.request, tokens, block.open_start + t + i, head, rows_buffer + i * d);
      }
      const int64_t missing = kTransposed - real;
      memset(key + (t + real) * width, 0, static_cast<size_t>(missing * width) * sizeof(Element));
      memset(rows_buffer + real * d, 0, static_cast<size_t>(missing * d) * sizeof(float));
      transpose(rows_buffer, d, kTransposed, d, columns, kTransposed);
      for (int64_t c = 0; c < d; ++c) {
        put_row(value + c * u + t, columns + c * kTransposed, kTransposed);
      }
    }
  }

  // --- attention ---

  // Scale, soft cap, ALiBi and masks on a panel's logits with `count` keys from position
  // `first_key` on. Returns the factor that the logits still lack.
  float transform(int64_t panel, int64_t first_key, int64_t count, bool masked) {
    const float factor = Product::kScalesQueries ? 1.0f : static_cast<float>(a.scale);
    const float cap = static_cast<float>(a.soft_cap);
    const bool plain = cap == 0.0f && !a.alibi_slopes;
    if (plain && !masked && factor > 0.0f) return factor;
    const float window = a.sliding_window ? static_cast<float>(a.sliding_window) : __builtin_inff();
    for (int v = 0; v < Product::kVectors; ++v) {
      const int64_t lane = panel * kPanel + v * kLanes;
      const VF lane_slope = loadf(slope + lane);
      VF distance = static_cast<float>(first_key - block.open_start) - loadf(offset + lane);
      for (int64_t t = 0; t < count; ++t, distance += 1.0f) {
        float* p = logits + t * kPanel + v * kLanes;
        VF x = loadf(p) * factor;
        if (cap != 0.0f) x = soft_capped(x, cap);
        if (!plain) x = fma_of(distance, lane_slope, x);
        if (masked) x = select((distance <= 0.0f) & (distance > -window), x,
                               splat(-__builtin_inff()));
        store(p, x);
      }
    }
    return 1.0f;
  }

  // Running softmax down the tokens of logits that lack a positive `factor`; `rescale` is the
  // factor of what was summed before.
  void softmax(int64_t panel, int64_t count, float factor, VF* rescale) {
    VF most[Product::kVectors];
    for (int v = 0; v < Product::kVectors; ++v) most[v] = splat(-__builtin_inff());
    for (int64_t t = 0; t < count; ++t) {
      for (int v = 0; v < Product::kVectors; ++v) {
        most[v] = max_of(most[v], loadf(logits + t * kPanel + v * kLanes));
      }
    }
    for (int v = 0; v < Product::kVectors; ++v) {
      const float* column = logits + v * kLanes;
      float* running_max = max + panel * kPanel + v * kLanes;
      float* running_sum = sum + panel * kPanel + v * kLanes;
      const VF old_max = loadf(running_max), new_max = max_of(old_max, most[v] * factor);
      VF total = {};
      for (int64_t t = 0; t < count; t += 2) {
        const VF even = exp_of(fma_of(loadf(column + t * kPanel), splat(factor), -new_max));
        const VF odd = exp_of(fma_of(loadf(column + (t + 1) * kPanel), splat(factor), -new_max));
        total = total + even + odd;
        Product::put_rows(weights, t, v * kLanes, even, odd);
      }
      rescale[v] = exp_of(old_max - new_max);
      store(running_max, new_max);
      store(running_sum, fma_of(loadf(running_sum), rescale[v], total));
    }
  }

  // `count` keys from position `first_key` on, a multiple of the product's step.
  void attend(int64_t panel, int64_t first_key, int64_t count, bool masked) {
    const int64_t d = rec.head_size;
    VF rescale[Product::kVectors];
    Product::template multiply<false>(key, width, count, width, query + panel * width * kPanel,
                                      logits, nullptr);
    const float factor = transform(panel, first_key, count, masked);
    softmax(panel, count, factor, rescale);
    Product::template multiply<true>(value, rec.unit_size, d, count, weights,
                                     acc + panel * d * kPanel, rescale);
  }

  int64_t first_position(int64_t panel) const { return position(panel * kPanel); }
  int64_t last_position(int64_t panel) const {
    return position(min_of((panel + 1) * kPanel, rows) - 1);
  }

  void run() {
    const int64_t d = rec.head_size, u = rec.unit_size;
    Product::begin();
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
      attend(p, block.open_start, round_up(count, Product::kStep), true);
    }
    Product::end();
    write_out();
  }

  void write_out() {
    const int64_t d = rec.head_size;
    for (int64_t r = 0; r < rows; r += kLanes) {
      const float* columns = acc + r / kPanel * d * kPanel + r % kPanel;
      transpose(columns, kPanel, d, kLanes, rows_buffer, d);
      for (int64_t i = 0; i < min_of(kLanes, rows - r); ++i) write_row(r + i, rows_buffer + i * d);
    }
  }

  void write_row(int64_t row, float* from) {
    const VF inverse = splat(1.0f / sum[row]);
    for (int64_t c = 0; c < rec.head_size; c += kLanes) {
      store(from + c, loadf(from + c) * inverse);
    }
    from_floats(a.out + (block.row + row / group_heads) * a.out_row_stride +
                    query_head(row) * a.out_head_stride,
                from, a.out_dtype, rec.head_size);
  }
};

void run_task(const KvqArgs& a, const QueryBlock& block, int64_t head) {
#if defined(KVQ_AMX)
  // Such a model's own keys and values are bf16: rounding dequantised ones to it adds little.
  if (a.query_dtype == KVQ_BF16) return Task<TileProduct>(a, block, head).run();
#endif
  Task<FloatProduct>(a, block, head).run();
}

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
    run_task(a, blocks[i / a.num_kv_heads], i % a.num_kv_heads);
  }
}
