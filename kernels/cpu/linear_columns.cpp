// linear_columns for few rows. A piece of work is a range of inputs: its rows of the weight are read
// from one end to the other, which is fastest, and added to sums of its own. The sums of all pieces
// are added at the end. Pieces do not depend on the number of threads, so neither do results.
#include "arena.h"
#include "dtypes.h"
#include "linear.h"
#include "parallel.h"

#include <algorithm>

namespace llmc {
namespace {

constexpr int64_t kPieces = 32, kLeastInputs = 64;  // of a piece; its sums cost memory traffic too
constexpr int64_t kBlock = 8192;  // channels whose sums stay in the first-level cache
constexpr int kMostRows = 4;
constexpr int kInputs = 8;  // rows of the weight that are added at a time

// Adds N rows of the weight, from input k and channel n on, to the sums of `width` channels of each
// of M rows of x. It fetches the rows after them into the second-level cache: read by hardware's
// prefetches alone, N short stretches at a time take up to twice as long.
template <int M, int N, class T>
void add_inputs(const LinearArgs& a, int64_t m, int64_t n, int64_t width, int64_t k, float* sums) {
  const T* w = static_cast<const T*>(a.weight) + k * a.weight_stride + n;
  const T* x = static_cast<const T*>(a.x) + m * a.x_stride + k;
  float factor[M][N];
  for (int r = 0; r < M; ++r)
    for (int i = 0; i < N; ++i) factor[r][i] = to_float(x[r * a.x_stride + i]);
  each_vector(width, [&](int64_t v, int64_t count) LLMC_LAMBDA {
    v16f sum[M];
#pragma GCC unroll 4
    for (int r = 0; r < M; ++r) sum[r] = load_up_to(sums + r * a.channels + v, count);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      if (v * sizeof(T) % 64 == 0) __builtin_prefetch(w + (i + N) * a.weight_stride + v, 0, 2);
      const v16f column = load_up_to(w + i * a.weight_stride + v, count);
#pragma GCC unroll 4
      for (int r = 0; r < M; ++r) sum[r] += factor[r][i] * column;
    }
#pragma GCC unroll 4
    for (int r = 0; r < M; ++r) store_up_to(sums + r * a.channels + v, sum[r], count);
  });
}

// sums [M, channels] = M rows of x, from row m on, times inputs [begin, end) of the weight.
template <int M, class T>
void piece(const LinearArgs& a, int64_t m, int64_t begin, int64_t end, float* sums) {
  std::fill_n(sums, M * a.channels, 0.0f);
  for (int64_t n = 0; n < a.channels; n += kBlock) {
    const int64_t width = std::min(kBlock, a.channels - n);
    int64_t k = begin;
    for (; k + kInputs <= end; k += kInputs)
      add_inputs<M, kInputs, T>(a, m, n, width, k, sums + n);
    for (; k < end; ++k)
      for (int64_t r = 0; r < M; ++r)
        add_inputs<1, 1, T>(a, m + r, n, width, k, sums + r * a.channels + n);
  }
}

// The output of row m, channels [begin, end): the pieces' sums, `step` apart, and the bias.
template <class T>
void total(const LinearArgs& a, int64_t m, int64_t begin, int64_t end, const float* sums,
           int64_t pieces, int64_t step) {
  for (int64_t n = begin; n < end; n += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, end - n);
    v16f y = load_n(sums + n, count);
    for (int64_t p = 1; p < pieces; ++p) y += load_n(sums + p * step + n, count);
    if (a.bias) y += load_n(static_cast<const T*>(a.bias) + n, count);
    store_n(static_cast<T*>(a.out) + m * a.out_stride + n, y, count);
  }
}

template <class T>
void all(const LinearArgs& a) {
  static thread_local Arena arena;
  const int64_t inputs = std::max(kLeastInputs, a.depth / kPieces / kInputs * kInputs);
  const int64_t pieces = std::max<int64_t>(1, (a.depth + inputs - 1) / inputs);
  const int64_t step = a.rows * a.channels;
  arena.reset(pieces * step * sizeof(float));
  float* sums = arena.take<float>(pieces * step);
  const int threads = worth_threads(a.depth * step / 4, pieces, a.threads);
  parallel_stretches(pieces, threads, [&](int64_t p) {
    const int64_t begin = p * inputs, end = std::min(begin + inputs, a.depth);
    for (int64_t m = 0; m < a.rows; m += kMostRows) {
      float* to = sums + p * step + m * a.channels;
      switch (std::min<int64_t>(kMostRows, a.rows - m)) {
        case 1: piece<1, T>(a, m, begin, end, to); break;
        case 2: piece<2, T>(a, m, begin, end, to); break;
        case 3: piece<3, T>(a, m, begin, end, to); break;
        case 4: piece<4, T>(a, m, begin, end, to); break;
      }
    }
  });
  parallel_rows(a.channels, a.rows * pieces, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < a.rows; ++m)
      total<T>(a, m, begin, end, sums + m * a.channels, pieces, step);
  });
}

}  // namespace

void few_columns(const LinearArgs& a) {
  with_type(a.dtype, [&](auto t) { all<decltype(t)>(a); });
}

}  // namespace llmc
