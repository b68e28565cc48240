// linear_columns for few rows: a thread keeps the sums of a range of channels and iterates over the
// inputs, so that each row of the weight is read in place.
#include "dtypes.h"
#include "linear.h"
#include "parallel.h"

#include <algorithm>

namespace llmc {
namespace {

#ifdef LLMC_AVX512
constexpr int kWide = 24;  // vectors; there are 32 registers
#else
constexpr int kWide = 4;  // vectors of two registers; there are 16
#endif
constexpr int64_t kAhead = 4;  // inputs

// kVectors vectors of channels from n on; the last one has only `lanes` lanes.
template <int kVectors, class T>
void stretch(const LinearArgs& a, const T* x, T* out, int64_t n, int64_t lanes) {
  const T* w = static_cast<const T*>(a.weight) + n;
  v16f sum[kVectors] = {};
  for (int64_t k = 0; k < a.depth; ++k, w += a.weight_stride) {
    const float scale = to_float(x[k]);
#pragma GCC unroll 24
    for (int i = 0; i < kVectors; ++i) {
      if (i * sizeof(T) * kLanes % 64 == 0) __builtin_prefetch(w + kAhead * a.weight_stride + i * kLanes, 0, 3);
      const bool whole = i + 1 < kVectors || lanes == kLanes;
      sum[i] += scale * (whole ? load(w + i * kLanes) : load_n(w + i * kLanes, lanes));
    }
  }
  for (int i = 0; i < kVectors; ++i) {
    const int64_t count = i + 1 < kVectors ? kLanes : lanes, at = n + i * kLanes;
    v16f y = sum[i];
    if (a.bias) y += load_n(static_cast<const T*>(a.bias) + at, count);
    store_n(out + at, y, count);
  }
}

template <class T>
void all(const LinearArgs& a) {
  const int64_t vectors = (a.channels + kLanes - 1) / kLanes;
  parallel_rows(vectors, a.depth * kLanes * a.rows / 4, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < a.rows; ++m) {
      const T* x = static_cast<const T*>(a.x) + m * a.x_stride;
      T* out = static_cast<T*>(a.out) + m * a.out_stride;
      auto lanes = [&](int64_t last) { return std::min<int64_t>(kLanes, a.channels - last * kLanes); };
      int64_t v = begin;
      for (; v + kWide <= end; v += kWide)
        stretch<kWide>(a, x, out, v * kLanes, lanes(v + kWide - 1));
      for (; v + 4 <= end; v += 4) stretch<4>(a, x, out, v * kLanes, lanes(v + 3));
      for (; v < end; ++v) stretch<1>(a, x, out, v * kLanes, lanes(v));
    }
  });
}

}  // namespace

void few_columns(const LinearArgs& a) {
  with_type(a.dtype, [&](auto t) { all<decltype(t)>(a); });
}

}  // namespace llmc
