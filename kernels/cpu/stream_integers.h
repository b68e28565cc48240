// Decode with an int8 cache: its codes times 16-bit integers, with sums in 32 bits, on x86.
//
// A query is rounded to 16 bits relative to its largest value, and so are the weights of a tile's
// values times their scales: 2^-16 of the largest, beside 2^-8 for the codes themselves.
#pragma once

#include "hadamard.h"
#include "integer_products.h"
#include "stream_values.h"

#include <vector>

#ifdef __AVX2__
namespace llmc {

// to[0, n) = x / scale as integers of 16 bits; returns the scale. n is a multiple of 16.
inline float round_to_words(const float* x, int64_t n, int16_t* to) {
  const float largest = largest_magnitude(x, n);
  const bool is_finite = largest < kInf, is_zero = largest <= 1e-30f;
  const float inverse = is_finite && !is_zero ? 32767 / largest : 0.0f;
  for (int64_t i = 0; i < n; i += kLanes)
    narrow_to<uint16_t>(to + i, (v16u)(is_finite ? round_to_int(load(x + i) * inverse) : v16i{}));
  if (!is_finite) return std::numeric_limits<float>::quiet_NaN();  // which the result must show
  return is_zero ? 0.0f : largest / 32767;
}

LLMC_INLINE Register widen_words(const int8_t* p) {
#ifdef LLMC_AVX512
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#else
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#endif
}

struct IntegerRows {
  using Element = int8_t;
  using Query = int16_t;
  using Sum = vi;
  using Tables = int;
  static constexpr int64_t kStep = 2 * kNative;
  static constexpr int kWide = kNative == 16 ? 4 : 2;  // vectors of sums
  static Tables tables(Dtype) { return 0; }
  static constexpr int64_t kMostDim = 512;  // so many products of 2^15 and 127 fit in 32 bits
  static bool are_whole(const AttentionArgs& a) {
    return a.head_dim % kStep == 0 && a.head_dim <= kMostDim && a.v_dim % kStep == 0;
  }

  LLMC_INLINE vi dot(vi acc, const int8_t* key, const int16_t* query, Tables) {
    return (vi)add_pairs((Register)acc, widen_words(key), load_as<Register>(query));
  }
  static float dot_rest(const int8_t*, const int16_t*, int64_t) { return 0; }
  static float pack_query(const AttentionArgs& a, int64_t at, int16_t* to) {
    static thread_local std::vector<float> rotated;
    rotated.resize(a.head_dim);
    widen_row(a.dtype, a.query, at, a.head_dim, rotated.data());
    rotate_row(rotated.data(), a.head_dim);  // as the keys are
    return round_to_words(rotated.data(), a.head_dim, to);
  }

  // Two rows, as pairs of the same channel: in each half of a line of 32 channels, those of its
  // first and third 8 come first.
  LLMC_INLINE void pair(const int8_t* a, const int8_t* b, Register out[2]) {
#ifdef LLMC_AVX512
    const __m256i x = load_as<__m256i>(a), y = load_as<__m256i>(b);
    out[0] = _mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(x, y));
    out[1] = _mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(x, y));
#else
    const __m128i x = load_as<__m128i>(a), y = load_as<__m128i>(b);
    out[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y));
    out[1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x, y));
#endif
  }
  LLMC_INLINE void order(vf sums[2]) {
#ifdef LLMC_AVX512
    const __m512 a = (__m512)sums[0], b = (__m512)sums[1];
    sums[0] = (vf)_mm512_shuffle_f32x4(a, b, 0x44);
    sums[1] = (vf)_mm512_shuffle_f32x4(a, b, 0xee);
#endif
  }

  template <int G, int N>
  LLMC_INLINE void add_columns(const Tile<int8_t>& tile, int64_t d, const uint32_t (*weights)[kTile / 2],
                               const float* scale, float* acc, int64_t padded) {
    Register sum[G][N] = {};
    const bool asks = tile.next_values && d % 64 == 0;
    for (int64_t k = 0; k < tile.end; k += 2) {
      const int8_t *a = tile.values[k] + d, *b = tile.values[k + 1] + d;
      if (asks) {
        __builtin_prefetch(tile.next_values[k] + d, 0, 2);
        __builtin_prefetch(tile.next_values[k + 1] + d, 0, 2);
      }
#pragma GCC unroll 4
      for (int i = 0; i < N; i += 2) {
        Register pairs[2];
        pair(a + i * kNative, b + i * kNative, pairs);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) {
          const Register w = every_pair(int32_t(weights[g][k / 2]));
          sum[g][i] = add_pairs(sum[g][i], pairs[0], w);
          sum[g][i + 1] = add_pairs(sum[g][i + 1], pairs[1], w);
        }
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
      for (int i = 0; i < N; i += 2) {
        vf sums[2] = {convert<vf>((vi)sum[g][i]), convert<vf>((vi)sum[g][i + 1])};
        order(sums);
        for (int j = 0; j < 2; ++j) {
          float* to = acc + g * padded + d + (i + j) * kNative;
          store_as(to, load_as<vf>(to) + sums[j] * scale[g]);
        }
      }
  }

  template <int G>
  static void add(const Tile<int8_t>& tile, int64_t v_dim, const float (*scores)[kTile], float* acc,
                  int64_t padded, Tables) {
    alignas(64) uint32_t weights[G][kTile / 2];
    float scale[G];
    for (int g = 0; g < G; ++g) {
      alignas(64) float scaled[kTile];
      for (int64_t k = 0; k < kTile; k += kLanes)
        store(scaled + k, load(scores[g] + k) * load(tile.value_scales + k));
      scale[g] = round_to_words(scaled, kTile, reinterpret_cast<int16_t*>(weights[g]));
    }
    int64_t d = 0;
    for (; d + kWide * kNative <= v_dim; d += kWide * kNative)
      add_columns<G, kWide>(tile, d, weights, scale, acc, padded);
    for (; d < v_dim; d += 2 * kNative) add_columns<G, 2>(tile, d, weights, scale, acc, padded);
  }
  static void order(float*, int64_t) {}
  template <class Body>
  static void walk(const AttentionArgs& a, const Item& item, const Body& body) {
    walk_cached_tiles<int8_t>(a, item, item.first_key, body);
  }
};

}  // namespace llmc
#endif
