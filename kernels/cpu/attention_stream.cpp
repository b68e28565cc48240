// Decode: one token against its keys; every K and V row is read once for all heads of its group.
//
// For each tile of 64 keys: scores by dot products, softmax along the keys, then weights times
// values. Meanwhile the next tile is prefetched, since block tables defeat the hardware prefetcher.
#include "hadamard.h"
#include "stream_integers.h"
#include "stream_pairs.h"
#include "sums.h"

namespace llmc {
namespace {

// How rows of a cache are multiplied by queries, `kStep` elements at a time, and by weights. T: of
// the cache's elements, or what FP8 is converted to. pack_query reads the query at an index of
// `a.query`, and returns a factor for the products.
template <class T>
struct PlainRows {
  using Element = T;
  using Query = float;
  using Sum = vf;
  using Tables = int;
  static constexpr int64_t kStep = kNative;
  static Tables tables(Dtype) { return 0; }
  LLMC_INLINE vf dot(vf acc, const T* key, const float* query, Tables) {
    return acc + load_lanes<vf>(key) * load_lanes<vf>(query);
  }
  // Of elements that fill no step; not inline, since few models have them.
  [[gnu::noinline]] static float dot_rest(const T* key, const float* query, int64_t left) {
    float sum = 0;
    for (int64_t i = 0; i < left; ++i) sum += to_float(key[i]) * query[i];
    return sum;
  }
  static float pack_query(const AttentionArgs& a, int64_t at, float* to) {
    widen_row(a.dtype, a.query, at, a.head_dim, to);
    if constexpr (std::is_same_v<T, int8_t>) rotate_row(to, a.head_dim);  // as the keys are
    return 1;
  }
  template <int G>
  static void add(const Tile<T>& tile, int64_t v_dim, const float (*scores)[kTile], float* acc,
                  int64_t padded, Tables) {
    alignas(64) float scaled[std::is_same_v<T, int8_t> ? G : 1][kTile];
    if constexpr (std::is_same_v<T, int8_t>) {
      for (int g = 0; g < G; ++g)
        for (int64_t k = 0; k < kTile; k += kLanes)
          store(scaled[g] + k, load(scores[g] + k) * load(tile.value_scales + k));
      scores = scaled;
    }
    add_values<T, G>(tile.values, tile.next_values, 0, tile.end, v_dim, {scores[0], kTile, 1}, acc,
                     padded);
  }
  static void order(float* acc, int64_t dim) {
    if (kSplitsPairs && std::is_same_v<T, bf16>) unpermute(acc, dim);
  }
  template <class Body>
  static void walk(const AttentionArgs& a, const Item& item, const Body& body) {
    if constexpr (std::is_same_v<T, int8_t>)
      walk_cached_tiles<T>(a, item, item.first_key, body);
    else
      walk_tiles<T>(a, item, item.first_key, body);
  }
};

#ifdef LLMC_AVX512_BF16
template <class Rows>
struct WholeRows : Rows {  // sizes are multiples of kStep
  using typename Rows::Element;
  template <int G>
  static void add(const Tile<Element>& tile, int64_t v_dim, const float (*scores)[kTile],
                  float* acc, int64_t, const typename Rows::Tables& tables) {
    uint32_t weights[G][kTile / 2];
    for (int g = 0; g < G; ++g) round_weights(scores[g], weights[g]);
    add_pairs<Rows, G>(tile, v_dim, weights, acc, tables);
  }
  static float dot_rest(const Element*, const bf16*, int64_t) { return 0; }
  static void order(float* acc, int64_t dim) { order_sums<Rows>(acc, dim); }
  template <class Body>
  static void walk(const AttentionArgs& a, const Item& item, const Body& body) {
    walk_cached_tiles<Element>(a, item, item.first_key, body);
  }
};

template <class Rows>
bool are_whole(const AttentionArgs& a) {
  return a.head_dim % Rows::kStep == 0 && a.v_dim % Rows::kStep == 0;
}
#endif

// scores[g][key] for the keys of a tile; rows past the end repeat the last.
template <class Rows, int G>
void tile_scores(const typename Rows::Element* const* keys,
                 const typename Rows::Element* const* next, int64_t dim, int64_t padded,
                 const typename Rows::Query* query, float (*scores)[kTile],
                 const typename Rows::Tables& tables) {
  constexpr int kKeys = kSums / G;
  for (int64_t begin = 0; begin < kTile; begin += kKeys) {
    const int64_t k = std::min(begin, kTile - kKeys);  // the last ones overlap those before
    typename Rows::Sum acc[kSums] = {};
    const typename Rows::Element* row[kKeys];
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) {
      row[j] = keys[k + j];
      if (next) prefetch_row(next[k + j], dim);
    }
    int64_t d = 0;
    for (; d + Rows::kStep <= dim; d += Rows::kStep)
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j)
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g)
          acc[g * kKeys + j] =
              Rows::dot(acc[g * kKeys + j], row[j] + d, query + g * padded + d, tables);
    float sums[kSums];
    sum_each(acc, sums);
    if (d < dim)
      for (int i = 0; i < G * kKeys; ++i)
        sums[i] += Rows::dot_rest(row[i % kKeys] + d, query + i / kKeys * padded + d, dim - d);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) std::memcpy(scores[g] + k, sums + g * kKeys, kKeys * sizeof(float));
  }
}

// Multiplies scores by the scales of their keys.
LLMC_INLINE void scale_scores(float* scores, const float* scales) {
  for (int64_t i = 0; i < kTile; i += kLanes) store(scores + i, load(scores + i) * load(scales + i));
}

struct Transform {  // from a raw dot product to a score in units of log2
  float scale, softcap, slope;
  int64_t position;
};

LLMC_INLINE void finish_scores(float* scores, int64_t first, int64_t n, const Transform& t) {
  const v16f lane = lane_numbers();
  for (int64_t i = 0; i < kTile; i += kLanes) {
    v16f x = load(scores + i) * t.scale;
    if (t.softcap > 0) x = t.softcap * tanh_lanes(x / t.softcap);
    x += t.slope * (lane + float(first + i - t.position));
    x *= kLog2e;
    store(scores + i, select(lane < splat(float(n - i)), x, splat(-kInf)));
  }
}

// Turns scores into weights 2^(score - m) and updates m and l; returns the factor for earlier sums.
LLMC_INLINE float softmax(float* scores, float& m, float& l) {
  v16f top = load(scores);
  for (int64_t i = kLanes; i < kTile; i += kLanes) top = vmax(top, load(scores + i));
  const float new_m = std::max(m, max_lanes(top)), factor = std::exp2(m - new_m);
  v16f sum = {};
  for (int64_t i = 0; i < kTile; i += kLanes) {
    const v16f p = exp2_lanes(load(scores + i) - new_m);
    sum += p;
    store(scores + i, p);
  }
  m = new_m;
  l = l * factor + sum_lanes(sum);
  return factor;
}

// One tile for all heads of a group (at most kMaxStreamRows). The products handle up to four heads
// at a time; the tile stays in the L1 cache in between.
template <class Rows, class Body>
LLMC_INLINE void each_heads(const Tile<typename Rows::Element>& tile, int64_t group, const Body& body) {
  Tile<typename Rows::Element> rest = tile;
  rest.next_keys = rest.next_values = nullptr;  // prefetched only once
  const int64_t parts = (group + 3) / 4;
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t first = group * i / parts, count = group * (i + 1) / parts - first;
    const Tile<typename Rows::Element>& part = i == 0 ? tile : rest;
    switch (count) {
      case 1: body(part, first, std::integral_constant<int, 1>()); break;
      case 2: body(part, first, std::integral_constant<int, 2>()); break;
      case 3: body(part, first, std::integral_constant<int, 3>()); break;
      case 4: body(part, first, std::integral_constant<int, 4>()); break;
    }
  }
}

template <class Rows>
void stream(const Plan& plan, const Item& item) {
  using Query = typename Rows::Query;
  const AttentionArgs& a = plan.a;
  const int64_t dim = (a.head_dim + 31) / 32 * 32, v_dim = (a.v_dim + 31) / 32 * 32;
  const int64_t group = plan.group, rows = item.num_heads * group;
  static thread_local Arena arena;
  arena.reset(rows * (dim + v_dim + 3) * sizeof(float) + 4096);
  Query* query = arena.take<Query>(rows * dim);
  float* acc = arena.take<float>(rows * v_dim);
  float *m = arena.take<float>(rows), *l = arena.take<float>(rows);
  float* factor_of = arena.take<float>(rows);  // of a query's products
  std::memset(query, 0, rows * dim * sizeof(Query));
  std::fill(acc, acc + rows * v_dim, 0.0f);
  std::fill(m, m + rows, -kInf);
  std::fill(l, l + rows, 0.0f);
  for (int64_t row = 0; row < rows; ++row)
    factor_of[row] = Rows::pack_query(
        a, item.token * a.query_stride[0] + (item.kv_head * group + row) * a.query_stride[1],
        query + row * dim);
  const typename Rows::Tables tables = Rows::tables(a.cache);
  alignas(64) float scores[kMaxStreamRows][kTile];
  using Keys = Tile<typename Rows::Element>;
  Rows::walk(a, item, [&](const Keys& tile) __attribute__((noinline)) {
    const int64_t row = tile.head * group;
    const float scale = a.scale * a.scales.key_of(item.kv_head + tile.head);
    each_heads<Rows>(tile, group, [&](const Keys& part, int64_t first, auto heads) {
      tile_scores<Rows, heads>(part.keys, part.next_keys, a.head_dim, dim,
                               query + (row + first) * dim, scores + first, tables);
    });
    for (int64_t g = 0; g < group; ++g) {
      const float slope = a.slopes ? a.slopes[item.kv_head * group + row + g] : 0.0f;
      if (tile.key_scales) scale_scores(scores[g], tile.key_scales);
      finish_scores(scores[g], tile.first, tile.end,
                    {scale * factor_of[row + g], a.softcap, slope, item.position});
      if (a.distance_bias.data != nullptr)
        add_distance_bias(a, item.token, item.kv_head * group + row + g, item.position, tile.first,
                          tile.end, scores[g], 1);
      const float factor = softmax(scores[g], m[row + g], l[row + g]);
      if (factor != 1) scale_row(acc + (row + g) * v_dim, v_dim, factor);
    }
    each_heads<Rows>(tile, group, [&](const Keys& part, int64_t first, auto heads) {
      Rows::template add<heads>(part, a.v_dim, scores + first, acc + (row + first) * v_dim, v_dim, tables);
    });
  });
  for (int64_t row = 0; row < rows; ++row) {
    Rows::order(acc + row * v_dim, a.v_dim);
    finish_row(plan, item, row, m[row], l[row], acc + row * v_dim);
  }
}

}  // namespace

void run_stream(const Plan& plan, const Item& item) {
  const Dtype dtype = plan.a.dtype, cache = plan.a.cache;
  if (cache == Dtype::i8) {
#ifdef __AVX2__
    if (IntegerRows::are_whole(plan.a)) return stream<IntegerRows>(plan, item);
#endif
    return stream<PlainRows<int8_t>>(plan, item);
  }
#ifdef LLMC_AVX512_BF16
  if (dtype == Dtype::bf16) {
#ifdef LLMC_FP8_BYTES
    if (is_fp8(cache) && are_whole<CodeRows>(plan.a))
      return stream<WholeRows<CodeRows>>(plan, item);
#endif
    if (!is_fp8(cache) && are_whole<PairRows>(plan.a))
      return stream<WholeRows<PairRows>>(plan, item);
  }
#endif
  with_type(is_fp8(cache) ? dtype : cache, [&](auto element) {
    stream<PlainRows<decltype(element)>>(plan, item);
  });
}

}  // namespace llmc
