// Decode in bf16 with products of pairs, for bf16 and FP8 caches: a row of K times a query, and two
// rows of V times their weights, which are rounded to bf16. FP8 codes are converted to bf16 in
// registers, so that a cache with half the bytes is read at about twice the rate.
#pragma once

#include "stream_values.h"

namespace llmc {

#ifdef LLMC_AVX512_BF16
struct PairRows {  // rows of bf16
  using Element = bf16;
  using Query = bf16;
  using Sum = v16f;
  static constexpr int64_t kStep = 32, kVectors = 2;  // elements, and vectors of pairs of them
  using Tables = int;
  static Tables tables(Dtype) { return 0; }

  LLMC_INLINE v16f dot(v16f acc, const bf16* key, const bf16* query, Tables) {
    const __m512bh k = (__m512bh)_mm512_loadu_si512(key);
    return (v16f)_mm512_dpbf16_ps((__m512)acc, k, (__m512bh)_mm512_loadu_si512(query));
  }
  LLMC_INLINE void pair(const bf16* a, const bf16* b, __m512i out[kVectors], Tables) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    out[0] = _mm512_unpacklo_epi16(x, y);
    out[1] = _mm512_unpackhi_epi16(x, y);
  }
  static float pack_query(const AttentionArgs& a, int64_t at, bf16* to) {
    std::memcpy(to, static_cast<const bf16*>(a.query) + at, a.head_dim * sizeof(bf16));
    return 1;
  }
};

#ifdef LLMC_FP8_BYTES
struct CodeRows {  // rows of FP8 codes
  using Element = uint8_t;
  using Query = bf16;
  using Sum = v16f;
  static constexpr int64_t kStep = 64, kVectors = 4;
  using Tables = Fp8Bytes;
  static Tables tables(Dtype cache) { return Tables(fp8_table(cache)); }

  LLMC_INLINE v16f dot(v16f acc, const uint8_t* key, const bf16* query, const Tables& t) {
    const Fp8Bytes::Parts p = t.parts(_mm512_loadu_si512(key));
    const __m512i low = _mm512_unpacklo_epi8(p.low, p.high);
    const __m512i high = _mm512_unpackhi_epi8(p.low, p.high);
    const __m512 sum = _mm512_dpbf16_ps((__m512)acc, (__m512bh)low, load_query(query));
    return (v16f)_mm512_dpbf16_ps(sum, (__m512bh)high, load_query(query + 32));
  }
  LLMC_INLINE void pair(const uint8_t* a, const uint8_t* b, __m512i out[kVectors],
                        const Tables& t) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    const Fp8Bytes::Parts low = t.parts(_mm512_unpacklo_epi8(x, y));
    const Fp8Bytes::Parts high = t.parts(_mm512_unpackhi_epi8(x, y));
    out[0] = _mm512_unpacklo_epi8(low.low, low.high);
    out[1] = _mm512_unpackhi_epi8(low.low, low.high);
    out[2] = _mm512_unpacklo_epi8(high.low, high.high);
    out[3] = _mm512_unpackhi_epi8(high.low, high.high);
  }
  LLMC_INLINE __m512bh load_query(const bf16* query) {
    return (__m512bh)_mm512_loadu_si512(query);
  }
  // In the order in which 64 codes are unpacked: the low halves of each 16 first.
  static float pack_query(const AttentionArgs& a, int64_t at, bf16* to) {
    const bf16* query = static_cast<const bf16*>(a.query) + at;
    for (int64_t d = 0; d < a.head_dim; d += 64)
      for (int64_t i = 0; i < 64; i += 8)
        std::memcpy(to + d + i % 16 * 4 + i / 16 * 8, query + d + i, 8 * sizeof(bf16));
    return 1;
  }
};
#endif

// Adds to N vectors of sums for G heads, from column d on.
template <class Rows, int G, int N>
LLMC_INLINE void add_pair_columns(const Tile<typename Rows::Element>& tile, int64_t d,
                                  const uint32_t (*weights)[kTile / 2], float* acc,
                                  int64_t v_dim, const typename Rows::Tables& tables) {
  constexpr int64_t kElements = N / Rows::kVectors * Rows::kStep;
  using Element = typename Rows::Element;
  __m512 sum[G][N];
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < N; ++i) sum[g][i] = _mm512_loadu_ps(acc + g * v_dim + d + i * kLanes);
  for (int64_t k = 0; k < tile.end; k += 2) {
    if (tile.next_values) {
      prefetch_row(tile.next_values[k] + d, kElements);
      prefetch_row(tile.next_values[k + 1] + d, kElements);
    }
    const Element *a = tile.values[k] + d, *b = tile.values[k + 1] + d;
#pragma GCC unroll 4
    for (int i = 0; i < N; i += Rows::kVectors) {
      __m512i pairs[Rows::kVectors];
      const int64_t at = i / Rows::kVectors * Rows::kStep;
      Rows::pair(a + at, b + at, pairs, tables);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        const __m512bh w = (__m512bh)_mm512_set1_epi32(int(weights[g][k / 2]));
#pragma GCC unroll 4
        for (int v = 0; v < Rows::kVectors; ++v)
          sum[g][i + v] = _mm512_dpbf16_ps(sum[g][i + v], (__m512bh)pairs[v], w);
      }
    }
  }
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < N; ++i) _mm512_storeu_ps(acc + g * v_dim + d + i * kLanes, sum[g][i]);
}

template <class Rows, int G>
void add_pairs(const Tile<typename Rows::Element>& tile, int64_t v_dim,
               const uint32_t (*weights)[kTile / 2], float* acc,
               const typename Rows::Tables& tables) {
  if constexpr (G * Rows::kVectors > 24) {  // more sums than registers
    add_pairs<Rows, 4>(tile, v_dim, weights, acc, tables);
    add_pairs<Rows, G - 4>(tile, v_dim, weights + 4, acc + 4 * v_dim, tables);
  } else {
    constexpr int kMost = G <= 2 ? 8 : 4;
    constexpr int kWide = G * kMost > 24 ? int(Rows::kVectors) : kMost;
    constexpr int64_t kElements = kWide / Rows::kVectors * Rows::kStep;
    int64_t d = 0;
    for (; d + kElements <= v_dim; d += kElements)
      add_pair_columns<Rows, G, kWide>(tile, d, weights, acc, v_dim, tables);
    for (; d < v_dim; d += Rows::kStep)
      add_pair_columns<Rows, G, Rows::kVectors>(tile, d, weights, acc, v_dim, tables);
  }
}

// Restores the row's order of sums: each vector has four from every quarter of kStep elements.
template <class Rows>
void order_sums(float* acc, int64_t dim) {
  for (int64_t d = 0; d < dim; d += Rows::kStep) {
    float row[Rows::kStep];
    for (int64_t v = 0; v < Rows::kVectors; ++v)
      for (int64_t q = 0; q < 4; ++q)
        std::memcpy(row + q * Rows::kStep / 4 + 4 * v, acc + d + v * kLanes + 4 * q, 16);
    std::memcpy(acc + d, row, sizeof row);
  }
}

inline void round_weights(const float* scores, uint32_t* weights) {
  for (int64_t k = 0; k < kTile; k += 32) {
    const __m512 low = _mm512_loadu_ps(scores + k), high = _mm512_loadu_ps(scores + k + kLanes);
    _mm512_storeu_si512(weights + k / 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}
#endif

}  // namespace llmc
