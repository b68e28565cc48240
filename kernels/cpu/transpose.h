// Transposes 16 x 16 words, for panels whose lanes are rows.
#pragma once

#include "vec.h"

namespace llmc {

#ifdef LLMC_AVX512
// 16 x 16 words: row i of the result is column i of the rows.
LLMC_INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
#elif defined(__AVX2__)
// to[j][i] = from[i][j] for 8 x 8 floats.
LLMC_INLINE void transpose_eight(const float* from, int64_t from_stride, float* to,
                                 int64_t to_stride) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#endif

// to[j][i] = from[i][j] for 16 x 16 floats.
LLMC_INLINE void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#if defined(LLMC_AVX512)
  __m512i block[16];
  for (int i = 0; i < kLanes; ++i) block[i] = _mm512_loadu_si512(from + i * from_stride);
  transpose(block);
  for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(to + i * to_stride, block[i]);
#elif defined(__AVX2__)
  for (int i = 0; i < kLanes; i += 8)
    for (int j = 0; j < kLanes; j += 8)
      transpose_eight(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
#else
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

// rows[lane][d] = columns[d][lane] for n columns of sixteen floats.
inline void columns_to_rows(const float* columns, int64_t n, float* rows, int64_t row_stride) {
  int64_t d = 0;
  for (; d + kLanes <= n; d += kLanes) transpose(columns + d * kLanes, kLanes, rows + d, row_stride);
  for (; d < n; ++d)
    for (int i = 0; i < kLanes; ++i) rows[i * row_stride + d] = columns[d * kLanes + i];
}

}  // namespace llmc
