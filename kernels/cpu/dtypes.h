// Dispatches a run-time dtype to a type.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace llmc {

// run(T()) for T = float, bf16 or f16.
template <class Run>
LLMC_INLINE decltype(auto) with_type(Dtype dtype, const Run& run) {
  switch (dtype) {
    case Dtype::bf16: return run(bf16{});
    case Dtype::f16: return run(f16{});
    default: return run(float{});
  }
}

inline int64_t size_of(Dtype dtype) {  // in bytes, of a dtype for which with_type() is
  return with_type(dtype, [](auto t) { return int64_t(sizeof t); });
}

// to[0, n) = from[at, at + n), and zeros up to a whole vector.
inline void widen_row(Dtype dtype, const void* from, int64_t at, int64_t n, float* to) {
  with_type(dtype, [&](auto t) {
    const auto* p = static_cast<const decltype(t)*>(from) + at;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(p + i));
    if (i < n) store(to + i, load_n(p + i, n - i));
  });
}

// to[at, at + n) = from[0, n), rounded; `from` has a whole last vector.
inline void narrow_row(Dtype dtype, const float* from, int64_t n, void* to, int64_t at) {
  with_type(dtype, [&](auto t) {
    auto* p = static_cast<decltype(t)*>(to) + at;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(p + i, load(from + i));
    if (i < n) store_n(p + i, load(from + i), n - i);
  });
}

}  // namespace llmc
