// The C interface between the loader (__init__.py) and the kernels.
//
// One plain struct serves every operation; each reads the fields it needs. All fields are eight
// bytes wide, so that the loader can build the struct with one `struct.pack`. Raise
// KVQ_ABI_VERSION, here and in __init__.py, with every change.
#pragma once

#include <cstdint>

#define KVQ_ABI_VERSION 2

enum KvqDtype : int64_t { KVQ_F32 = 0, KVQ_BF16 = 1, KVQ_F16 = 2, KVQ_F64 = 3 };  // F64: out only

enum KvqFp8 : int64_t { KVQ_E4M3 = 0, KVQ_E5M2 = 1 };

// Strides are in bytes. `*_is_64` says whether an index array is int64 rather than int32.
struct KvqArgs {
  // format
  int64_t key_bits, value_bits, anchor, rotate_values;
  int64_t head_size, unit_size, key_group_size, record_bytes;
  // cache
  uint8_t* pages;  // [num_blocks, num_kv_heads, units_per_block, record_bytes]
  int64_t pages_block_stride, units_per_block;
  const int32_t* block_table;
  int64_t block_table_stride;  // in elements
  uint8_t* ring;               // [num_blocks, num_kv_heads, ring_block_size, 2 * head_size]
  int64_t ring_dtype, ring_block_stride, ring_head_stride, ring_slot_stride;
  int64_t ring_block_size, ring_capacity;
  const int32_t* ring_table;
  int64_t ring_table_stride;  // in elements
  // batch
  int64_t num_requests;
  const void* query_start_loc;
  int64_t query_start_loc_is_64;
  const void* seq_lens;
  int64_t seq_lens_is_64;
  // heads and threads
  int64_t num_heads, num_kv_heads, num_threads;
  // this step's tokens, [num_tokens, heads, head_size]
  const uint8_t* query;
  int64_t query_dtype, query_row_stride, query_head_stride;
  const uint8_t* key;
  int64_t key_dtype, key_row_stride, key_head_stride;
  const uint8_t* value;
  int64_t value_dtype, value_row_stride, value_head_stride;
  uint8_t* out;
  int64_t out_dtype, out_row_stride, out_head_stride;
  // attention parameters
  double scale, soft_cap;    // soft_cap 0: none
  int64_t sliding_window;    // 0: none
  const float* sinks;        // [num_heads] or null
  const float* alibi_slopes; // [num_heads] or null
  // fp8 formats; their pages are [num_blocks, num_kv_heads, unit_size, record_bytes]
  int64_t fp8_type;
  const float* key_scale;    // [num_kv_heads]
  const float* value_scale;  // [num_kv_heads]
};
