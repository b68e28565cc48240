// As many sums as fit in registers along with their operands, and the reduction of their lanes.
#pragma once

#include "vec.h"

namespace llmc {

#ifdef LLMC_AVX512
constexpr int kSums = 16;  // of 32 registers
#else
constexpr int kSums = 12;  // of 16 registers
#endif

#if defined(__AVX__) && !defined(LLMC_AVX512)
LLMC_INLINE vf add_neighbors(vf a, vf b) {
  return (vf)_mm256_hadd_ps((__m256)a, (__m256)b);
}
LLMC_INLINE vi add_neighbors(vi a, vi b) {
  return (vi)_mm256_hadd_epi32((__m256i)a, (__m256i)b);
}
#endif

// Reduces the lanes of kSums vectors to kSums sums, in order. It uses a tree, so that the loads of
// the next block do not wait for hundreds of instructions. V: vf, or vi with sums below 2^31.
template <class V>
LLMC_INLINE void sum_each(const V* acc, float* sums) {
#if defined(LLMC_AVX512)
  const auto plus = [](__m512 a, __m512 b) { return (__m512)((V)a + (V)b); };
  __m512 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // lanes 0, 1 of each 128 bits: vectors 2i, 2i + 1
    const __m512 a = (__m512)acc[2 * i], b = (__m512)acc[2 * i + 1];
    t[i] = plus(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)  // lanes 0 to 3: vectors 4i to 4i + 3
    t[i] = plus(_mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44),
                _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    t[i] = plus(_mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0x88),
                _mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0xdd));
  const __m512 all = plus(_mm512_shuffle_f32x4(t[0], t[1], 0x88),
                          _mm512_shuffle_f32x4(t[0], t[1], 0xdd));
  store(sums, convert<vf>((V)all));
#elif defined(__AVX__)
#pragma GCC unroll 3
  for (int i = 0; i < kSums; i += 4) {
    const V four = add_neighbors(add_neighbors(acc[i], acc[i + 1]),
                                 add_neighbors(acc[i + 2], acc[i + 3]));  // of each half
    const __m256 both = (__m256)convert<vf>(four);
    _mm_storeu_ps(sums + i, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
  }
#else
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) sums[i] = sum_lanes(acc[i]);
#endif
}

}  // namespace llmc
