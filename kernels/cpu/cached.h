// Caches of keys and values in a narrower type than the inputs: FP8, int8, or 16 bits for float32.
#pragma once

#include "dtypes.h"
#include "fp8.h"

#include <cstring>
#include <type_traits>

namespace llmc {

// run(E()) for the type of a cache's elements, where T is that of the inputs.
template <class T, class Run>
LLMC_INLINE decltype(auto) with_element(Dtype cache, const Run& run) {
  if (is_fp8(cache)) return run(uint8_t{});
  if (cache == Dtype::i8) return run(int8_t{});
  if constexpr (std::is_same_v<T, float>)
    return with_type(cache, run);
  else
    return run(T{});
}

// to[0, n) = the cached elements from[0, n), exactly, or times the scale of their row.
template <class T, class E>
void widen_cached(const E* from, int64_t n, Dtype cache, T* to, float scale = 1) {
  if constexpr (std::is_same_v<E, uint8_t>) {
    decode_row(cache, from, n, to);
  } else if constexpr (std::is_same_v<E, T>) {
    std::memcpy(to, from, n * sizeof(T));
  } else {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i) * scale);
    for (; i < n; ++i) assign(to[i], to_float(from[i]) * scale);
  }
}

// The scales of a block's tokens in an int8 cache, behind their rows; `stride`: of a row.
template <class Code>  // int8_t, const or not
LLMC_INLINE auto* block_scales(Code* block, int64_t block_size, int64_t stride) {
  using Scale = std::conditional_t<std::is_const_v<Code>, const float, float>;
  return reinterpret_cast<Scale*>(block + block_size * stride);
}

}  // namespace llmc
