// Products of many rows in float32, for every CPU and every weight format: y = x W^T + b.
//
// Rows of x are converted once and packed in panels of sixteen lanes. A block of channels of the
// weight is converted, a range of inputs at a time, to a buffer that fits in the caches. A tile of
// a few channels by one panel has all its sums in registers.
//
// A Source of weights has: kByInput (whether it writes [input][kBlock], else [channel][kStride]);
// widen(n, count, k, depth, to), which converts channels [n, n + count) and inputs [k, k + depth),
// where channels of `to` past `count` can have any value; and fetch(n, k, m, several), which
// prefetches inputs [k, k + kFetchStep) of `several` of the kBlock channels from n on: the first
// panel's products do this for the next range.
#pragma once

#include "arena.h"
#include "dtypes.h"
#include "parallel.h"
#include "transpose.h"

namespace llmc::matmul {

constexpr int64_t kBlock = 48;   // channels per work item
constexpr int64_t kDepth = 256;  // inputs at a time: a panel of them fits in the L1 cache
constexpr int64_t kShort = 64;   // the same for few panels, so that a block fits in L1 too
constexpr int64_t kStride = kDepth + 16;  // not a power of two: rows would share cache sets
constexpr int64_t kFetchStep = 16;
constexpr int64_t kPackedBytes = 8 << 20;  // of x at a time
constexpr int64_t kMaxRows = 512;          // rows whose sums stay in the L2 cache

#ifdef LLMC_AVX512
constexpr int64_t kHalf = kLanes;  // a panel can't be narrower than a register
constexpr int kGroup = 24, kHalfGroup = 24;  // channels whose sums fit in registers
constexpr int kPairGroup = 12;               // the same by two panels
#else
constexpr int64_t kHalf = kLanes / 2;
constexpr int kGroup = 6, kHalfGroup = 12;
constexpr int kPairGroup = 0;  // a panel is two registers already
#endif

static_assert(!kPairGroup || kHalf == kLanes);

// One of each per thread, shared by all types.
inline Arena& panel_arena() {
  static thread_local Arena arena;
  return arena;
}

inline Arena& block_arena() {
  static thread_local Arena arena;
  return arena;
}

struct Next {  // the part of the weight to prefetch, and the channel of it that a tile begins with
  int64_t n, k, m;
};

// c[panel][M][kLanes] (+)= w[M] by the first kRows lanes of P panels, which are `apart` in x. Each
// value of the weight that is loaded is multiplied by P * kRows / kNative registers: with one, as
// many loads as products are under way, which Intel's processors can't keep up with.
template <class Source, int M, int kRows, int P = 1>
void tile(const Source& source, const float* w, const float* x, int64_t apart, int64_t depth,
          float* c, bool add, const Next* next) {
  constexpr int kEach = kRows / kNative, V = P * kEach;
  const auto sums = [c](int m, int v) {
    return c + (v / kEach * kBlock + m) * kLanes + v % kEach * kNative;
  };
  vf acc[M][V];
#pragma GCC unroll 24
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[m][v] = add ? load_as<vf>(sums(m, v)) : vf{};
  for (int64_t first = 0; first < depth; first += kFetchStep) {
    if (next) source.fetch(next->n, next->k + first, next->m, M);
    const int64_t end = std::min(first + kFetchStep, depth);
    for (int64_t k = first; k < end; ++k, x += kRows) {
      vf lane[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
        lane[v] = load_as<vf>(x + v / kEach * apart + v % kEach * kNative);
#pragma GCC unroll 24
      for (int m = 0; m < M; ++m) {
        const float value = Source::kByInput ? w[k * kBlock + m] : w[m * kStride + k];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[m][v] += value * lane[v];
      }
    }
  }
#pragma GCC unroll 24
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store_as(sums(m, v), acc[m][v]);
}

struct Panels {  // rows [row, row + rows) of x; the last panel may be a half one
  const float* data;
  int64_t row, rows, count, floats;  // `floats` are per whole panel
  bool half;
};

// Packs inputs [k, k + n) of up to sixteen rows as [input][width].
inline void pack(const LinearArgs& a, int64_t row, int64_t rows, int64_t k, int64_t n,
                 int64_t width, float* to) {
  alignas(64) float lines[kLanes][kLanes] = {}, turned[kLanes][kLanes];
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = std::min<int64_t>(kLanes, n - i);
    with_type(a.dtype, [&](auto t) {
      for (int64_t m = 0; m < rows; ++m) {
        const auto* from = static_cast<const decltype(t)*>(a.x) + (row + m) * a.x_stride + k + i;
        store(lines[m], left == kLanes ? load(from) : load_n(from, left));
      }
    });
    transpose(lines[0], kLanes, turned[0], kLanes);
    for (int64_t j = 0; j < left; ++j)
      std::memcpy(to + (i + j) * width, turned[j], width * sizeof(float));
  }
}

// Writes sums [channel][kLanes] of `count` channels from n on to rows of the output.
inline void write(const LinearArgs& a, const float* sums, int64_t n, int64_t count, int64_t row,
                  int64_t rows) {
  alignas(64) float lines[kLanes][kLanes];
  for (int64_t c = 0; c < count; c += kLanes) {
    const int64_t left = std::min<int64_t>(kLanes, count - c);
    transpose(sums + c * kLanes, kLanes, lines[0], kLanes);
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      v16f bias = {};
      if (a.bias) {
        const T* from = static_cast<const T*>(a.bias) + n + c;
        bias = left == kLanes ? load(from) : load_n(from, left);
      }
      for (int64_t m = 0; m < rows; ++m) {
        T* to = static_cast<T*>(a.out) + (row + m) * a.out_stride + n + c;
        const v16f y = load(lines[m]) + bias;
        left == kLanes ? store(to, y) : store_n(to, y, left);
      }
    });
  }
}

template <class Source>
void block(const LinearArgs& a, const Source& source, const Panels& x, int64_t n) {
  Arena& arena = block_arena();
  arena.reset((kBlock * kStride + x.count * kBlock * kLanes) * sizeof(float));
  float* weight = arena.take<float>(kBlock * kStride);
  float* sums = arena.take<float>(x.count * kBlock * kLanes);
  const int64_t count = std::min(kBlock, a.channels - n);
  const int64_t step = x.count > 2 ? kDepth : kShort;
  for (int64_t k = 0; k < a.depth; k += step) {
    const int64_t depth = std::min(step, a.depth - k);
    source.widen(n, count, k, depth, weight);
    const bool ends = k + step >= a.depth;
    Next next{ends ? n + kBlock : n, ends ? 0 : k + step, 0};
    for (int64_t p = 0; p < x.count;) {
      const bool half = x.half && p + 1 == x.count;
      const bool pair = kPairGroup && p + 2 <= x.count;  // then a half panel is as wide as others
      const float* panel = x.data + p * x.floats + k * (half ? kHalf : kLanes);
      int group = half ? kHalfGroup : kGroup;
      auto run = half ? &tile<Source, kHalfGroup, kHalf> : &tile<Source, kGroup, kLanes>;
      if constexpr (kPairGroup)
        if (pair) group = kPairGroup, run = &tile<Source, kPairGroup, kLanes, 2>;
      for (int64_t m = 0; m < count; m += group) {
        next.m = m;
        run(source, weight + m * (Source::kByInput ? 1 : kStride), panel, x.floats, depth,
            sums + (p * kBlock + m) * kLanes, k > 0, p == 0 ? &next : nullptr);
      }
      p += pair ? 2 : 1;
    }
  }
  for (int64_t p = 0; p < x.count; ++p)
    write(a, sums + p * kBlock * kLanes, n, count, x.row + p * kLanes,
          std::min<int64_t>(kLanes, x.rows - p * kLanes));
}

template <class Source>
void multiply(const LinearArgs& a, const Source& source) {
  constexpr int64_t kPiece = 2 * kDepth;  // inputs of a panel that are packed at a time
  const int64_t fit = kPackedBytes / (a.depth * sizeof(float)) / kLanes * kLanes;
  const int64_t most = std::clamp<int64_t>(fit, 4 * kLanes, kMaxRows);
  const int64_t chunks = (a.rows + most - 1) / most;
  const int64_t chunk = (a.rows + chunks * kLanes - 1) / (chunks * kLanes) * kLanes;
  const int64_t pieces = (a.depth + kPiece - 1) / kPiece;
  const int64_t blocks = (a.channels + kBlock - 1) / kBlock;
  Arena& arena = panel_arena();
  arena.reset(chunk * a.depth * sizeof(float));
  float* const data = arena.take<float>(chunk * a.depth);
  const int threads = worth_threads(blocks * a.depth * (8 + a.rows) * 2, blocks, a.threads);
  for (int64_t row = 0; row < a.rows; row += chunk) {
    const int64_t rows = std::min(chunk, a.rows - row), rest = rows % kLanes;
    const int64_t panels = (rows + kLanes - 1) / kLanes;
    const Panels x{data, row, rows, panels, a.depth * kLanes, rest > 0 && rest <= kHalf};
    parallel_items(panels * pieces, threads, [&](int64_t i) {
      const int64_t p = i / pieces, k = i % pieces * kPiece;
      const int64_t width = x.half && p + 1 == panels ? kHalf : kLanes;
      pack(a, row + p * kLanes, std::min<int64_t>(kLanes, rows - p * kLanes), k,
           std::min(kPiece, a.depth - k), width, data + p * x.floats + k * width);
    });
    parallel_pieces(blocks, threads, [&](int64_t i) { block(a, source, x, i * kBlock); });
  }
}

}  // namespace llmc::matmul
