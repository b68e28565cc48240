// linear_columns for few rows: a thread keeps the sums of a range of channels and iterates over the
// inputs, so that each row of the weight is read in place.
#include "dtypes.h"
#include "linear.h"
#include "parallel.h"

#include <algorithm>

namespace llmc {
namespace {

#ifdef LLMC_AVX512
constexpr int kMostSums = 24;  // there are 32 registers
#else
constexpr int kMostSums = 4;  // of two registers; there are 16
#endif
constexpr int kMostRows = 4;
constexpr int64_t kAhead = 4;  // inputs

// M rows of x, from row m on, times kVectors vectors of channels, from n on; the last one has only
// `lanes` lanes. The sums stay in registers only if no index of them varies, so all loops over them
// are unrolled.
template <int M, int kVectors, class T>
void stretch(const LinearArgs& a, int64_t m, int64_t n, int64_t lanes) {
  const T* w = static_cast<const T*>(a.weight) + n;
  const T* x = static_cast<const T*>(a.x) + m * a.x_stride;
  v16f sum[M][kVectors] = {};
  for (int64_t k = 0; k < a.depth; ++k, w += a.weight_stride) {
#pragma GCC unroll 24
    for (int i = 0; i < kVectors; ++i) {
      if (i * sizeof(T) * kLanes % 64 == 0) __builtin_prefetch(w + kAhead * a.weight_stride + i * kLanes, 0, 3);
      const bool whole = i + 1 < kVectors || lanes == kLanes;
      const v16f column = whole ? load(w + i * kLanes) : load_n(w + i * kLanes, lanes);
#pragma GCC unroll 4
      for (int r = 0; r < M; ++r) sum[r][i] += to_float(x[r * a.x_stride + k]) * column;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 24
    for (int i = 0; i < kVectors; ++i) {
      const int64_t count = i + 1 < kVectors ? kLanes : lanes, at = n + i * kLanes;
      v16f y = sum[r][i];
      if (a.bias) y += load_n(static_cast<const T*>(a.bias) + at, count);
      store_n(static_cast<T*>(a.out) + (m + r) * a.out_stride + at, y, count);
    }
}

// M rows of x, from row m on, times the vectors [begin, end) of channels.
template <int M, class T>
void few(const LinearArgs& a, int64_t m, int64_t begin, int64_t end) {
  constexpr int kWide = kMostSums / M, kNarrow = std::max(1, kWide / 4);
  auto lanes = [&](int64_t last) { return std::min<int64_t>(kLanes, a.channels - last * kLanes); };
  int64_t v = begin;
  for (; v + kWide <= end; v += kWide)
    stretch<M, kWide, T>(a, m, v * kLanes, lanes(v + kWide - 1));
  for (; v + kNarrow <= end; v += kNarrow)
    stretch<M, kNarrow, T>(a, m, v * kLanes, lanes(v + kNarrow - 1));
  for (; v < end; ++v) stretch<M, 1, T>(a, m, v * kLanes, lanes(v));
}

template <class T>
void all(const LinearArgs& a) {
  const int64_t vectors = (a.channels + kLanes - 1) / kLanes;
  parallel_rows(vectors, a.depth * kLanes * a.rows / 4, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < a.rows; m += kMostRows) {
      switch (std::min<int64_t>(kMostRows, a.rows - m)) {
        case 1: few<1, T>(a, m, begin, end); break;
        case 2: few<2, T>(a, m, begin, end); break;
        case 3: few<3, T>(a, m, begin, end); break;
        case 4: few<4, T>(a, m, begin, end); break;
      }
    }
  });
}

}  // namespace

void few_columns(const LinearArgs& a) {
  with_type(a.dtype, [&](auto t) { all<decltype(t)>(a); });
}

}  // namespace llmc
