// The fp8 formats: see formats.py in kvq_kernels/fp8.
//
// A page is, per kv head, one row of 2 * head_size codes per token. Here `unit_size` is the block
// size and `record_bytes` the bytes of such a row.
//
// Writing divides by the scale, as the oracle does, and rounds in integer arithmetic, so codes are
// the same to the bit. Reading goes through fp16, which holds every code: the bits of E5M2 are
// the upper half of an fp16 number, those of E4M3 one that is 256 times too small. The factor and
// the key scale are folded into the query, the value scale into the output.
#include "attention.h"

namespace kvq {
namespace {

constexpr int64_t kSplitTokens = 1024;
constexpr int64_t kMaxRows = 64;  // of a task, unless one query has more heads
[[maybe_unused]] constexpr int64_t kThreadWork = 4096;   // query-key products, some 20 us
[[maybe_unused]] constexpr int64_t kThreadElements = 16384;  // elements to write

inline uint8_t* token_at(const KvqArgs& a, int64_t request, int64_t position, int64_t head) {
  const int64_t block =
      a.block_table[request * a.block_table_stride + position / a.unit_size];
  return a.pages + block * a.pages_block_stride +
         (head * a.unit_size + position % a.unit_size) * a.record_bytes;
}

// --- codes --------------------------------------------------------------------------------------

template <int kType>
struct Fp8 {
  static constexpr bool kE4M3 = kType == KVQ_E4M3;
  static constexpr int kMantissa = kE4M3 ? 3 : 2, kBias = kE4M3 ? 7 : 15;
  static constexpr float kLargest = kE4M3 ? 448.0f : 57344.0f;
  static constexpr float kSmallestNormal = kE4M3 ? 0x1p-6f : 0x1p-14f;
  // Adding it leaves the rounded multiple of the smallest code in the low mantissa bits.
  static constexpr float kSubnormal = kE4M3 ? 0x1p14f : 0x1p7f;
  static constexpr float kReadFactor = kE4M3 ? 256.0f : 1.0f;

  // Round to nearest even, saturate, NaN to 0; a code in each lane.
  static VI code_of(VF x) {
    x = x == x ? x : VF{};
    const VI sign = bits_of(x) >> 24 & 0x80;
    const VF magnitude = min_of(abs_of(x), splat(kLargest));
    constexpr int kShift = 23 - kMantissa;
    const VI bits = bits_of(magnitude);
    const VI odd = bits >> kShift & 1;
    const VI normal =
        ((bits + ((1 << (kShift - 1)) - 1) + odd) >> kShift) - ((127 - kBias) << kMantissa);
    const VI subnormal = bits_of(magnitude + kSubnormal) - bits_of(splat(kSubnormal));
    return sign | (magnitude < kSmallestNormal ? subnormal : normal);
  }

  // kLanes codes as floats, 1 / kReadFactor of their value.
  static VF load_codes(const uint8_t* p) {
    typedef uint16_t Half __attribute__((vector_size(2 * kLanes)));
#if defined(KVQ_AVX512)
    const Half code = (Half)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
#elif defined(KVQ_AVX2)
    const Half code = (Half)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
#else
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    const Half code = __builtin_convertvector(load<Bytes>(p), Half);
#endif
    const Half half = kE4M3 ? (code & 0x80) << 8 | (code & 0x7f) << 7 : code << 8;
    uint16_t halves[kLanes];
    store(halves, half);
    return load_half(halves);
  }

  static void write_row(uint8_t* to, const uint8_t* from, int64_t dtype, float scale, int64_t d) {
    float row[256];
    to_floats(row, from, dtype, d);
    for (int64_t c = 0; c < d; c += kLanes) {
      store_as_bytes(to + c, code_of(loadf(row + c) / scale), kLanes);
    }
  }
};

template <int kType>
void write(const KvqArgs& a) {
  const int64_t d = a.head_size, heads = a.num_kv_heads;
  // Rows [first, end) of all requests, of which there may be none in between.
  const int64_t first = index_at(a.query_start_loc, a.query_start_loc_is_64, 0);
  const int64_t end = index_at(a.query_start_loc, a.query_start_loc_is_64, a.num_requests);
#pragma omp parallel num_threads(threads_for(a, (end - first) * heads * 2 * d, kThreadElements))
  {
    int64_t request = 0;  // a thread's rows come in ascending order
    Request tokens = request_at(a, request);
#pragma omp for schedule(static)
    for (int64_t row = first; row < end; ++row) {
      while (row >= index_at(a.query_start_loc, a.query_start_loc_is_64, request + 1)) {
        tokens = request_at(a, ++request);
      }
      if (tokens.end == 0) continue;  // a dummy request
      for (int64_t head = 0; head < heads; ++head) {
        uint8_t* to = token_at(a, request, tokens.start + row - tokens.row, head);
        Fp8<kType>::write_row(to, a.key + row * a.key_row_stride + head * a.key_head_stride,
                              a.key_dtype, a.key_scale[head], d);
        Fp8<kType>::write_row(to + d,
                              a.value + row * a.value_row_stride + head * a.value_head_stride,
                              a.value_dtype, a.value_scale[head], d);
      }
    }
  }
}

// --- attention ----------------------------------------------------------------------------------

// Some queries of a request and how their keys, [block.open_start, end), are split.
struct Plan {
  QueryBlock block;
  int64_t splits;
  int64_t first_task;
  int64_t partials;  // offset of its partials, in floats: [kv head][split]

  int64_t rows(const KvqArgs& a) const { return block.count * (a.num_heads / a.num_kv_heads); }
  int64_t partial_floats(const KvqArgs& a) const { return Partial::floats(rows(a), a.head_size); }
};

// Blocks of queries of all requests. Keys are split only where a request has one block: its other
// blocks keep the threads busy. So how a request is computed depends on its own lengths alone.
template <typename Visit>
void for_each_plan(const KvqArgs& a, Visit visit) {
  const int64_t max_count = max_of(1, kMaxRows / (a.num_heads / a.num_kv_heads));
  int64_t tasks = 0, floats = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const Request q = request_at(a, r);
    for (int64_t position = q.start; position < q.end; position += max_count) {
      const int64_t count = min_of(max_count, q.end - position);
      const int64_t lowest = lowest_position(a, position);
      const int64_t keys = position + count - lowest;
      Plan plan{{r, q.row + position - q.start, position, count, 0, 0, lowest},
                q.end - q.start <= max_count ? ceil_div(keys, kSplitTokens) : 1, tasks, floats};
      visit(plan);
      tasks += plan.splits * a.num_kv_heads;
      if (plan.splits > 1) floats += plan.splits * a.num_kv_heads * plan.partial_floats(a);
    }
  }
}

template <int kType>
struct Task : Rows {
  float* own_partial;

  Task(const KvqArgs& args, const Plan& plan, int64_t head) : Rows(args, plan.block, head) {
    const size_t bytes = carve(Carver(nullptr));
    carve(Carver(kvq_scratch(KVQ_SCRATCH_OWN, bytes)));
  }

  size_t carve(Carver carver) {
    query = carver.take<float>(rows * d);
    tile = carver.take<float>(kTile * 2 * d);
    own_partial = carver.take<float>(Partial::floats(rows, d));
    return carver.used();
  }

  void attend(int64_t key, int64_t end, Partial partial) {
    load_plain_query(a.key_scale[head] * Fp8<kType>::kReadFactor);
    start(partial);
    for (; key < end; key += kTile) {
      const int64_t count = min_of(kTile, end - key);
      for (int64_t t = 0; t < count; ++t) load_token(tile + t * 2 * d, key + t);
      attend_tile(key, count, partial);
    }
  }

  void load_token(float* to, int64_t position) const {
    const uint8_t* token = token_at(a, block.request, position, head);
    for (int64_t c = 0; c < 2 * d; c += kLanes) store(to + c, Fp8<kType>::load_codes(token + c));
  }
};

// Merge the splits of one (block, kv head) and write the output.
template <int kType>
void combine(const KvqArgs& a, const Plan& plan, int64_t head, float* partials) {
  const int64_t d = a.head_size, rows = plan.rows(a), stride = plan.partial_floats(a);
  const int64_t group_heads = a.num_heads / a.num_kv_heads;
  const float scale = a.value_scale[head] * Fp8<kType>::kReadFactor;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query_head = head * group_heads + r % group_heads;
    float most = a.sinks ? a.sinks[query_head] : kLowest;
    for (int64_t s = 0; s < plan.splits; ++s) {
      const float split_max = Partial(partials + s * stride, rows, d).max[r];
      most = split_max > most ? split_max : most;
    }
    float sum = a.sinks ? exp_of(a.sinks[query_head] - most) : 0.0f;
    float acc[256] = {};
    for (int64_t s = 0; s < plan.splits; ++s) {
      const Partial p(partials + s * stride, rows, d);
      const float weight = exp_of(p.max[r] - most);
      sum += p.sum[r] * weight;
      for (int64_t c = 0; c < d; c += kLanes) {
        store(acc + c, fma_of(loadf(p.acc + r * d + c), splat(weight), loadf(acc + c)));
      }
    }
    for (int64_t c = 0; c < d; c += kLanes) store(acc + c, loadf(acc + c) * (scale / sum));
    from_floats(a.out + (plan.block.row + r / group_heads) * a.out_row_stride +
                    query_head * a.out_head_stride,
                acc, a.out_dtype, d);
  }
}

template <int kType>
void attend(const KvqArgs& a) {
  const int64_t heads = a.num_kv_heads;
  int64_t num_plans = 0, num_tasks = 0, floats = 0, work = 0;
  for_each_plan(a, [&](const Plan& p) {
    ++num_plans;
    num_tasks = p.first_task + p.splits * heads;
    if (p.splits > 1) floats = p.partials + p.splits * heads * p.partial_floats(a);
    work += (p.block.position + p.block.count - p.block.open_start) * p.rows(a) * heads;
  });
  if (num_plans == 0) return;
  Plan* plans = nullptr;
  float* partials = nullptr;
  const auto carve = [&](Carver carver) {
    plans = carver.take<Plan>(num_plans);
    partials = carver.take<float>(floats);
    return carver.used();
  };
  carve(Carver(kvq_scratch(KVQ_SCRATCH_SHARED, carve(Carver(nullptr)))));
  num_plans = 0;
  for_each_plan(a, [&](const Plan& p) { plans[num_plans++] = p; });
  const auto shared_partials = [&](const Plan& p, int64_t head) {
    return partials + p.partials + head * p.splits * p.partial_floats(a);
  };

#pragma omp parallel num_threads(threads_for(a, work, kThreadWork))
  {
    int64_t n = 0;  // a thread's tasks come in ascending order
#pragma omp for schedule(monotonic : dynamic, 1)
    for (int64_t i = 0; i < num_tasks; ++i) {
      while (n + 1 < num_plans && plans[n + 1].first_task <= i) ++n;
      const Plan& p = plans[n];
      const int64_t split = (i - p.first_task) / heads, head = (i - p.first_task) % heads;
      Task<kType> task(a, p, head);
      const int64_t end = p.block.position + p.block.count;
      if (p.splits == 1) {
        task.attend(p.block.open_start, end, Partial(task.own_partial, task.rows, task.d));
        combine<kType>(a, p, head, task.own_partial);
      } else {
        const int64_t first = p.block.open_start + split * kSplitTokens;
        task.attend(first, min_of(first + kSplitTokens, end),
                    Partial(shared_partials(p, head) + split * p.partial_floats(a), task.rows,
                            task.d));
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_plans * heads; ++i) {
      const Plan& p = plans[i / heads];
      if (p.splits > 1) combine<kType>(a, p, i % heads, shared_partials(p, i % heads));
    }
  }
}

}  // namespace
}  // namespace kvq

using namespace kvq;

extern "C" void KVQ_NAME(fp8_write)(const KvqArgs* a) {
  a->fp8_type == KVQ_E4M3 ? write<KVQ_E4M3>(*a) : write<KVQ_E5M2>(*a);
}

extern "C" void KVQ_NAME(fp8_attend)(const KvqArgs* a) {
  a->fp8_type == KVQ_E4M3 ? attend<KVQ_E4M3>(*a) : attend<KVQ_E5M2>(*a);
}
