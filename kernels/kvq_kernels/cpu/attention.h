// What decode and prefill share: the logits' transformations.
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

}  // namespace
}  // namespace kvq
