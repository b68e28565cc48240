// Decode: one token against its keys, every K and V row read once for all heads of its group.
//
// Tiles of 64 keys: scores by dot products, softmax along the keys, then weights times values. The
// next tile is prefetched meanwhile, since block tables defeat the hardware's prefetcher.
#include "attention.h"

namespace llmc {
namespace {

constexpr int64_t kTile = 64;
constexpr int64_t kMaxDim = 1024;

// Sums of sixteen vectors, as one vector.
LLMC_INLINE v16f sum_each(const v16f acc[kLanes]) {
#ifdef LLMC_AVX512
  __m512 pair[8], quad[4];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)acc[2 * i], b = (__m512)acc[2 * i + 1];
    pair[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)pair[2 * i], b = (__m512d)pair[2 * i + 1];
    quad[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
  auto fold = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512 low = fold(quad[0], quad[1]), high = fold(quad[2], quad[3]);
  return (v16f)_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                             _mm512_shuffle_f32x4(low, high, 0xdd));
#else
  v16f out;
  for (int i = 0; i < kLanes; ++i) out[i] = sum_lanes(acc[i]);
  return out;
#endif
}

// How a K row meets a query: `kStep` elements at a time.
struct DotFloat {
  using Query = float;
  static constexpr int64_t kStep = 16;
  template <class T>
  LLMC_INLINE v16f dot(v16f acc, const T* key, const float* query, int64_t left) {
    return acc + (left < kStep ? load_n(key, left) : load(key)) * load(query);
  }
};

#ifdef LLMC_AVX512_BF16
struct DotPairs {
  using Query = bf16;
  static constexpr int64_t kStep = 32;
  LLMC_INLINE v16f dot(v16f acc, const bf16* key, const bf16* query, int64_t left) {
    const __mmask32 mask = left < kStep ? (__mmask32)((1u << left) - 1) : ~0u;
    const __m512i k = _mm512_maskz_loadu_epi16(mask, key), q = _mm512_loadu_si512(query);
    return (v16f)_mm512_dpbf16_ps((__m512)acc, (__m512bh)k, (__m512bh)q);
  }
};
#endif

template <class T>
struct DotOf {
  using type = DotFloat;
};
#ifdef LLMC_AVX512_BF16
template <>
struct DotOf<bf16> {
  using type = DotPairs;
};
#endif

template <class T>
LLMC_INLINE void prefetch_row(const T* row, int64_t width) {
  for (int64_t i = 0; i < width; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i, 0, 2);
}

// scores[g][key] for the keys of a tile (a multiple of 16 of them; spare rows repeat the last).
template <class T, int G>
void tile_scores(const T* const* keys, const T* const* next, int64_t dim, int64_t padded,
                 const typename DotOf<T>::type::Query* query, float (*scores)[kTile]) {
  using Dot = typename DotOf<T>::type;
  constexpr int kKeys = kLanes / G;
  for (int64_t k = 0; k < kTile; k += kKeys) {
    v16f acc[kLanes] = {};
    const int n = k + kKeys <= kTile ? kKeys : int(kTile - k);
    const T* row[kKeys];
    for (int j = 0; j < kKeys; ++j) {
      row[j] = keys[k + (j < n ? j : n - 1)];
      if (next) prefetch_row(next[k + (j < n ? j : n - 1)], dim);
    }
    int64_t d = 0;
    for (; d + Dot::kStep <= dim; d += Dot::kStep)
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j)
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g)
          acc[j * G + g] =
              Dot::dot(acc[j * G + g], row[j] + d, query + g * padded + d, Dot::kStep);
    if (d < dim)
      for (int j = 0; j < kKeys; ++j)
        for (int g = 0; g < G; ++g)
          acc[j * G + g] = Dot::dot(acc[j * G + g], row[j] + d, query + g * padded + d, dim - d);
    float sums[kLanes];
    store(sums, sum_each(acc));
    for (int j = 0; j < n; ++j)
      for (int g = 0; g < G; ++g) scores[g][k + j] = sums[j * G + g];
  }
}

// Values are read as float lanes. A bf16 line is split in even and odd elements, which needs no
// shuffle; `unpermute` puts the accumulator back in order at the end.
template <int N>
LLMC_INLINE void load_values(const float* p, v16f out[N]) {
  for (int i = 0; i < N; ++i) out[i] = load(p + i * kLanes);
}

template <int N>
LLMC_INLINE void load_values(const bf16* p, v16f out[N]) {
  static_assert(N % 2 == 0, "a line of bf16 fills two vectors");
  for (int i = 0; i < N / 2; ++i) {
    v16u line;
    std::memcpy(&line, p + 2 * i * kLanes, sizeof line);
    out[2 * i] = (v16f)(line << 16);
    out[2 * i + 1] = (v16f)(line & 0xffff0000u);
  }
}

void unpermute(float* acc, int64_t dim) {
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
LLMC_INLINE void add_columns(const T* const* values, const T* const* next, int64_t n, int64_t d,
                             const float (*weights)[kTile], float* acc, int64_t padded) {
  v16f sum[G][N];
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < N; ++i) sum[g][i] = load(acc + g * padded + d + i * kLanes);
  for (int64_t k = 0; k < n; ++k) {
    v16f value[N];
    load_values<N>(values[k] + d, value);
    if (next) {
      constexpr int kLine = 64 / sizeof(T);
      for (int i = 0; i < N * kLanes; i += kLine) __builtin_prefetch(next[k] + d + i, 0, 2);
    }
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < N; ++i) sum[g][i] += weights[g][k] * value[i];
  }
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < N; ++i) store(acc + g * padded + d + i * kLanes, sum[g][i]);
}

template <class T, int G>
void add_values(const T* const* values, const T* const* next, int64_t n, int64_t dim,
                const float (*weights)[kTile], float* acc, int64_t padded) {
  constexpr int kWide = G <= 2 ? 8 : G <= 5 ? 4 : 2;
  int64_t d = 0;
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes)
    add_columns<T, G, kWide>(values, next, n, d, weights, acc, padded);
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes)
    add_columns<T, G, 2>(values, next, n, d, weights, acc, padded);
  for (; d < dim; d += kLanes) {
    const int64_t left = std::min<int64_t>(kLanes, dim - d);
    for (int64_t k = 0; k < n; ++k) {
      const v16f value = load_n(values[k] + d, left);
      for (int g = 0; g < G; ++g) {
        float* to = acc + g * padded + d;
        store(to, load(to) + weights[g][k] * value);
      }
    }
  }
}

struct Transform {  // from a raw dot product to a score in units of log2
  float scale, softcap, slope;
  int64_t position;
};

LLMC_INLINE void finish_scores(float* scores, int64_t first, int64_t n, const Transform& t) {
  const v16f lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t i = 0; i < kTile; i += kLanes) {
    v16f x = load(scores + i) * t.scale;
    if (t.softcap > 0) x = t.softcap * tanh_lanes(x / t.softcap);
    x += t.slope * (lane + float(first + i - t.position));
    x *= kLog2e;
    store(scores + i, select(lane < splat(float(n - i)), x, splat(-kInf)));
  }
}

// scores become weights 2^(score - m); m and l move on; returns the factor for what came before.
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

template <class T>
void pack_query(const T* query, int64_t dim, int64_t padded, float* to) {
  for (int64_t i = 0; i < padded; ++i) to[i] = i < dim ? to_float(query[i]) : 0.0f;
}

void pack_query(const bf16* query, int64_t dim, int64_t padded, bf16* to) {
  for (int64_t i = 0; i < padded; ++i) to[i] = i < dim ? query[i] : bf16{0};
}

template <class T, int G>
void stream(const Plan& plan, const Item& item) {
  using Query = typename DotOf<T>::type::Query;
  const AttentionArgs& a = plan.a;
  const int64_t dim = (a.head_dim + 31) / 32 * 32, v_dim = (a.v_dim + 31) / 32 * 32;
  static thread_local Arena arena;
  arena.reset(G * (dim + v_dim) * sizeof(float) + 4096);
  Query* query = arena.take<Query>(G * dim);
  float* acc = arena.take<float>(G * v_dim);
  std::fill(acc, acc + G * v_dim, 0.0f);
  float m[G], l[G] = {};
  for (int g = 0; g < G; ++g) {
    m[g] = -kInf;
    pack_query(static_cast<const T*>(a.query) + item.token * a.query_stride[0] +
                   (item.kv_head * G + g) * a.query_stride[1],
               a.head_dim, dim, query + g * dim);
  }
  const T* rows[2][2][kTile];  // [tile parity][keys, values]
  alignas(64) float scores[G][kTile];
  auto find = [&](int64_t first, const T** keys, const T** values) {
    const int64_t n = std::min(kTile, item.last_key - first);
    find_rows(a, item, first, n, keys, values);
    for (int64_t i = n; i < kTile; ++i) keys[i] = keys[n - 1], values[i] = values[n - 1];
  };
  find(item.first_key, rows[0][0], rows[0][1]);
  int parity = 0;
  for (int64_t first = item.first_key; first < item.last_key; first += kTile, parity ^= 1) {
    const bool more = first + kTile < item.last_key;
    const int64_t n = std::min(kTile, item.last_key - first);
    const T* const* next_keys = nullptr;
    const T* const* next_values = nullptr;
    if (more) {
      find(first + kTile, rows[parity ^ 1][0], rows[parity ^ 1][1]);
      next_keys = rows[parity ^ 1][0], next_values = rows[parity ^ 1][1];
    }
    tile_scores<T, G>(rows[parity][0], next_keys, a.head_dim, dim, query, scores);
    for (int g = 0; g < G; ++g) {
      const float slope = a.slopes ? a.slopes[item.kv_head * G + g] : 0.0f;
      finish_scores(scores[g], first, n, {a.scale, a.softcap, slope, item.position});
      const float factor = softmax(scores[g], m[g], l[g]);
      if (factor != 1)
        for (int64_t i = 0; i < v_dim; i += kLanes)
          store(acc + g * v_dim + i, load(acc + g * v_dim + i) * factor);
    }
    add_values<T, G>(rows[parity][1], next_values, n, a.v_dim, scores, acc, v_dim);
  }
  for (int g = 0; g < G; ++g) {
    if (sizeof(T) == 2) unpermute(acc + g * v_dim, a.v_dim);
    finish_row<T>(plan, item, g, m[g], l[g], acc + g * v_dim);
  }
}

template <class T>
void stream_group(const Plan& plan, const Item& item) {
  switch (plan.group) {
    case 1: return stream<T, 1>(plan, item);
    case 2: return stream<T, 2>(plan, item);
    case 3: return stream<T, 3>(plan, item);
    case 4: return stream<T, 4>(plan, item);
    case 5: return stream<T, 5>(plan, item);
    case 6: return stream<T, 6>(plan, item);
    case 7: return stream<T, 7>(plan, item);
    case 8: return stream<T, 8>(plan, item);
  }
}

}  // namespace

int64_t stream_limit(Dtype) {
  return kMaxStreamRows;
}

void run_stream(const Plan& plan, const Item& item) {
  plan.a.dtype == Dtype::f32 ? stream_group<float>(plan, item) : stream_group<bf16>(plan, item);
}

}  // namespace llmc
