// As many sums as fit in registers along with their operands, and the reduction of their lanes.
#pragma once

#include "vec.h"

namespace llmc {

#ifdef LLMC_AVX512
constexpr int kSums = 16;  // of 32 registers
#else
constexpr int kSums = 12;  // of 16 registers
#endif

// Reduces the lanes of kSums vectors to kSums sums, in order. It uses a tree, so that the loads of
// the next block do not wait for hundreds of instructions.
LLMC_INLINE void sum_each(const vf* acc, float* sums) {
#if defined(LLMC_AVX512)
  __m512 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // lanes 0, 1 of each 128 bits: vectors 2i, 2i + 1
    const __m512 a = (__m512)acc[2 * i], b = (__m512)acc[2 * i + 1];
    t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)  // lanes 0 to 3: vectors 4i to 4i + 3
    t[i] = _mm512_add_ps(_mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44),
                         _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    t[i] = _mm512_add_ps(_mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0xdd));
  store(sums, (vf)_mm512_add_ps(_mm512_shuffle_f32x4(t[0], t[1], 0x88),
                                _mm512_shuffle_f32x4(t[0], t[1], 0xdd)));
#elif defined(__AVX__)
#pragma GCC unroll 3
  for (int i = 0; i < kSums; i += 4) {
    const __m256 a = _mm256_hadd_ps((__m256)acc[i], (__m256)acc[i + 1]);
    const __m256 b = _mm256_hadd_ps((__m256)acc[i + 2], (__m256)acc[i + 3]);
    const __m256 four = _mm256_hadd_ps(a, b);  // of each half
    _mm_storeu_ps(sums + i, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
  }
#else
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) sums[i] = sum_lanes(acc[i]);
#endif
}

}  // namespace llmc
