// linear: y = x W^T + b for weights in the checkpoint's layout (no packing: a tied embedding is
// stored once, and loading is a plain copy). Few rows are bound by reading the weight. More rows
// use the fastest multiply of the CPU: tiles or pairs of bf16 if it has them, float32 otherwise.
#include "attention.h"
#include "linear.h"
#include "matmul.h"

namespace llmc {
namespace {

constexpr int64_t kMaxTileRows = 192, kTileChannels = 16;
constexpr int64_t kMaxStreamRows = 2;  // up to here, dot products are faster than tiles or pairs
constexpr int64_t kFewRows = 4;        // up to here, linear_columns is faster without panels

bool by_tiles(const LinearArgs& a) {
  return a.dtype == Dtype::bf16 && a.rows > kMaxStreamRows && a.channels >= kTileChannels &&
         amx_ready();
}

bool by_pairs(const LinearArgs& a) {
  return a.dtype == Dtype::bf16 && a.rows > kMaxStreamRows && a.channels >= kTileChannels &&
         has_pairs() && !amx_ready();
}

// Up to here, dot products are faster than panels of sixteen rows in float32.
int64_t max_dot_rows() {
  if (kNative == 8) return 32;
  return has_pairs() && !amx_ready() ? 16 : 24;  // AMD, where a core multiplies half as many floats
}

template <class T>
struct Stored {  // a weight stored [channels, depth]
  static constexpr bool kByInput = false;
  const T* weight;
  int64_t stride;

  void widen(int64_t n, int64_t count, int64_t k, int64_t depth, float* to) const {
    const T* w = weight + n * stride + k;
    for (int64_t m = 0; m < count; ++m, w += stride, to += matmul::kStride) {
      int64_t i = 0;
      for (; i + kLanes <= depth; i += kLanes) store(to + i, load(w + i));
      if (i < depth) store_n(to + i, load_n(w + i, depth - i), depth - i);
    }
  }
  LLMC_METHOD void fetch(int64_t n, int64_t k, int64_t m, int several) const {
    if (k % (64 / sizeof(T))) return;  // in a line that was already prefetched
    for (int j = 0; j < several; ++j) __builtin_prefetch(weight + (n + m + j) * stride + k, 0, 2);
  }
};

template <class T>
struct Columns {  // a weight stored [depth, channels]
  static constexpr bool kByInput = true;
  const T* weight;
  int64_t stride;

  void widen(int64_t n, int64_t count, int64_t k, int64_t depth, float* to) const {
    const T* w = weight + k * stride + n;
    for (int64_t i = 0; i < depth; ++i, w += stride, to += matmul::kBlock)
      for (int64_t c = 0; c < count; c += kLanes)
        store(to + c, count - c < kLanes ? load_n(w + c, count - c) : load(w + c));
  }
  LLMC_METHOD void fetch(int64_t n, int64_t k, int64_t m, int several) const {
    const int64_t first = m * matmul::kFetchStep / matmul::kBlock;
    const int64_t last = (m + several) * matmul::kFetchStep / matmul::kBlock;
    for (int64_t i = first; i < last; ++i)
      for (int64_t c = 0; c < matmul::kBlock; c += 64 / sizeof(T))
        __builtin_prefetch(weight + (k + i) * stride + n + c, 0, 2);
  }
};

}  // namespace

bool takes_linear(const LinearArgs& a) {
  return a.depth > 0 && !(by_tiles(a) && a.rows > kMaxTileRows);
}

void linear(const LinearArgs& a) {
  if (by_tiles(a)) return linear_amx(a);
  if (by_pairs(a)) return linear_pairs(a);
  if (a.rows <= max_dot_rows()) return linear_dot(a);
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    matmul::multiply(a, Stored<T>{static_cast<const T*>(a.weight), a.weight_stride});
  });
}

void linear_columns(const LinearArgs& a) {
  if (a.rows <= kFewRows) return few_columns(a);
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    matmul::multiply(a, Columns<T>{static_cast<const T*>(a.weight), a.weight_stride});
  });
}

void linears(const LinearArgs& a, const Products& p, bool by_columns) {
  const auto product = [&](int64_t i, int threads) {
    LinearArgs own = a;
    own.x = static_cast<const char*>(a.x) + i * p.x_bytes;
    own.weight = static_cast<const char*>(a.weight) + i * p.weight_bytes;
    own.out = static_cast<char*>(a.out) + i * p.out_bytes;
    own.threads = threads;
    by_columns ? linear_columns(own) : linear(own);
  };
  if (p.count < a.threads) {
    for (int64_t i = 0; i < p.count; ++i) product(i, a.threads);
    return;
  }
  // threads take whole products: those of few rows are too small to share out
  const int64_t cost = (a.rows + 3) * a.depth * a.channels / 8;
  parallel_rows(p.count, cost, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) product(i, 1);
  });
}

}  // namespace llmc
