// The part of decode that both stream kernels share: weights times values, and iteration over
// tiles.
#pragma once

#include "attention.h"

namespace llmc {

constexpr int64_t kTile = 64;  // keys

struct Weights {  // weight of head g and key k of a tile, in either layout
  const float* data;
  int64_t of_head, of_key;
  float operator()(int64_t g, int64_t k) const {
    return data[g * of_head + k * of_key];
  }
};

template <class T>
LLMC_INLINE void prefetch_row(const T* row, int64_t width) {
  for (int64_t i = 0; i < width; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i, 0, 2);
}

// Values are read as float lanes. If a register holds a cache line, a line of bf16 is split into
// even and odd elements, which needs no shuffle; `unpermute` restores the accumulator's order at
// the end.
#ifdef LLMC_AVX512
constexpr bool kSplitsPairs = true;
#else
constexpr bool kSplitsPairs = false;
#endif

template <int N, class T>
LLMC_INLINE void load_values(const T* p, vf out[N]) {
  if constexpr (kSplitsPairs && std::is_same_v<T, bf16>) {
    static_assert(N % 2 == 0, "a line of bf16 fills two vectors");
#pragma GCC unroll 4
    for (int i = 0; i < N; i += 2) {
      const vu line = load_as<vu>(p + i * kNative);
      out[i] = (vf)(line << 16);
      out[i + 1] = (vf)(line & 0xffff0000u);
    }
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) out[i] = load_lanes<vf>(p + i * kNative);
  }
}

inline void unpermute(float* acc, int64_t dim) {
  for (int64_t d = 0; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    float line[2 * kLanes];
    for (int i = 0; i < kLanes; ++i) {
      line[2 * i] = acc[d + i];
      line[2 * i + 1] = acc[d + kLanes + i];
    }
    std::memcpy(acc + d, line, sizeof line);
  }
}

template <class T, int G, int N>
LLMC_INLINE void add_columns(const T* const* values, const T* const* next, int64_t begin, int64_t end, int64_t d,
                             const Weights& weights, float* acc, int64_t padded) {
  constexpr int kLine = 64 / sizeof(T);
  const bool asks = next && d % kLine == 0;  // prefetch once for all columns of a line
  vf sum[G][N];  // in registers only if no index of it varies, so every loop is unrolled
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) sum[g][i] = load_as<vf>(acc + g * padded + d + i * kNative);
  for (int64_t k = begin; k < end; ++k) {
    vf value[N];
    load_values<N>(values[k] + d, value);
    if (asks)
      for (int i = 0; i < N * kNative; i += kLine) __builtin_prefetch(next[k] + d + i, 0, 2);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) sum[g][i] += weights(g, k) * value[i];
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) store_as(acc + g * padded + d + i * kNative, sum[g][i]);
}

// The columns from d on that fill no vector, for G heads. Not inline, since few models have them.
template <class T>
[[gnu::noinline]] void add_last_columns(int G, const T* const* values, int64_t begin, int64_t end,
                                        int64_t d, int64_t dim, const Weights& weights, float* acc,
                                        int64_t padded) {
  for (; d < dim; d += kLanes) {
    const int64_t left = std::min<int64_t>(kLanes, dim - d);
    for (int64_t k = begin; k < end; ++k) {
      const v16f value = load_n(values[k] + d, left);
      for (int g = 0; g < G; ++g) {
        float* to = acc + g * padded + d;
        store(to, load(to) + weights(g, k) * value);
      }
    }
  }
}

template <class T, int G>
void add_values(const T* const* values, const T* const* next, int64_t begin, int64_t end, int64_t dim,
                const Weights& weights, float* acc, int64_t padded) {
#ifdef LLMC_AVX512
  constexpr int kWide = G <= 2 ? 8 : G <= 5 ? 4 : 2, kLeast = 2;
#else  // half as many registers
  constexpr int kWide = G == 1 ? 8 : G <= 3 ? 4 : G <= 6 ? 2 : 1, kLeast = 1;
#endif
  int64_t d = 0;
  for (; d + kWide * kNative <= dim; d += kWide * kNative)
    add_columns<T, G, kWide>(values, next, begin, end, d, weights, acc, padded);
  for (; d + kLeast * kNative <= dim; d += kLeast * kNative)
    add_columns<T, G, kLeast>(values, next, begin, end, d, weights, acc, padded);
  if (d < dim) add_last_columns(G, values, begin, end, d, dim, weights, acc, padded);
}

LLMC_INLINE void scale_row(float* row, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += kLanes) store(row + i, load(row + i) * factor);
}

template <class T>
struct Tile {  // the keys [first, first + end) of one KV head; row pointers past `end` repeat the last
  int64_t head, first, end;
  const T* const *keys, *const *values;
  const T* const *next_keys, *const *next_values;  // of the next tile, or null
  const float *key_scales, *value_scales;  // of an int8 cache, zeros past `end`; else null
};

// Calls body(tile) for every tile from `start` on and each of the item's heads, with rows as stored
// in the cache.
template <class T, class Body>
void walk_cached_tiles(const AttentionArgs& a, const Item& item, int64_t start, const Body& body) {
  const T* rows[2][2][kTile];  // [this, next][keys, values]
  auto count = [&](int64_t first) { return std::min(kTile, item.last_key - first); };
  Item of_head = item;
  auto find = [&](int64_t first, int64_t head, const T** keys, const T** values) {
    const int64_t n = count(first);
    of_head.kv_head = item.kv_head + head;
    find_rows(a, of_head, first, n, keys, values);
    std::fill(keys + n, keys + kTile, keys[n - 1]);
    std::fill(values + n, values + kTile, values[n - 1]);
  };
  constexpr bool kScaled = std::is_same_v<T, int8_t>;
  alignas(64) float scales[2][kScaled ? kTile : 1] = {};
  int now = 0;
  find(start, 0, rows[0][0], rows[0][1]);
  for (int64_t i = 0; i < count(start); ++i) prefetch_row(rows[0][0][i], a.head_dim);
  for (int64_t i = 0; i < count(start); ++i) prefetch_row(rows[0][1][i], a.v_dim);
  for (int64_t first = start; first < item.last_key; first += kTile)
    for (int64_t head = 0; head < item.num_heads; ++head, now ^= 1) {
      const bool same = head + 1 < item.num_heads;
      const bool more = same || first + kTile < item.last_key;
      if constexpr (kScaled) {
        std::fill(scales[0], scales[2], 0.0f);
        of_head.kv_head = item.kv_head + head;
        copy_scales(a, of_head, first, count(first), scales[0], scales[1]);
      }
      if (more)
        find(same ? first : first + kTile, same ? head + 1 : 0, rows[now ^ 1][0],
             rows[now ^ 1][1]);
      body(Tile<T>{head, first, count(first), rows[now][0], rows[now][1],
                   more ? rows[now ^ 1][0] : nullptr, more ? rows[now ^ 1][1] : nullptr,
                   kScaled ? scales[0] : nullptr, kScaled ? scales[1] : nullptr});
    }
}

// The same with rows as T: FP8 rows are converted first, while the next tile's are prefetched.
template <class T, class Body>
void walk_tiles(const AttentionArgs& a, const Item& item, int64_t start, const Body& body) {
  if (!is_fp8(a.cache)) return walk_cached_tiles<T>(a, item, start, body);
  static thread_local Arena arena;
  arena.reset(kTile * (a.head_dim + a.v_dim) * sizeof(T) + 4096);
  T* keys = arena.take<T>(kTile * a.head_dim);
  T* values = arena.take<T>(kTile * a.v_dim);
  const T *key_rows[kTile], *value_rows[kTile];
  walk_cached_tiles<uint8_t>(a, item, start, [&](const Tile<uint8_t>& codes) {
    if (codes.next_keys)
      for (int64_t k = 0; k < kTile; ++k) {
        prefetch_row(codes.next_keys[k], a.head_dim);
        prefetch_row(codes.next_values[k], a.v_dim);
      }
    widen_rows(a.cache, kTile, a.head_dim, codes.keys, keys, key_rows);
    widen_rows(a.cache, kTile, a.v_dim, codes.values, values, value_rows);
    body(Tile<T>{codes.head, codes.first, codes.end, key_rows, value_rows, nullptr, nullptr,
                 nullptr, nullptr});
  });
}

}  // namespace llmc
