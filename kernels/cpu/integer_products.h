// Registers of 8- and 16-bit integers on x86, and sums of their products in 32 bits.
#pragma once

#include "vec.h"

#ifdef __AVX2__
namespace llmc {

LLMC_INLINE vi round_to_int(vf x) {
#ifdef LLMC_AVX512
  return (vi)_mm512_cvtps_epi32((__m512)x);
#else
  return (vi)_mm256_cvtps_epi32((__m256)x);
#endif
}

template <class Half>
LLMC_INLINE v16i round_to_int(const Pair<float, Half>& x) {
  return {round_to_int(x.lo), round_to_int(x.hi)};
}

// The sum of the lanes.
#ifdef LLMC_AVX512
LLMC_INLINE int32_t sum_ints(vi x) { return _mm512_reduce_add_epi32((__m512i)x); }
#else
LLMC_INLINE int32_t sum_ints(vi x) {
  const __m256i all = (__m256i)x;
  __m128i part = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  part = _mm_add_epi32(part, _mm_shuffle_epi32(part, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(part, _mm_shuffle_epi32(part, 0xb1)));
}
#endif
template <class Half>
LLMC_INLINE int32_t sum_ints(const Pair<int32_t, Half>& x) {
  return sum_ints(x.lo + x.hi);
}

#ifdef LLMC_AVX512
using Register = __m512i;
LLMC_INLINE Register multiply_bytes(Register w, Register x) { return _mm512_maddubs_epi16(w, x); }
LLMC_INLINE Register multiply_words(Register w, Register x) { return _mm512_madd_epi16(w, x); }
LLMC_INLINE Register add_words(Register a, Register b) { return _mm512_add_epi16(a, b); }
LLMC_INLINE Register subtract_words(Register a, Register b) { return _mm512_sub_epi16(a, b); }
LLMC_INLINE Register every_word(int x) { return _mm512_set1_epi16(short(x)); }
LLMC_INLINE Register every_pair(int32_t x) { return _mm512_set1_epi32(x); }
LLMC_INLINE Register shift_up(Register x) { return _mm512_slli_epi16(x, 8); }
LLMC_INLINE Register shift_down(Register x) { return _mm512_srai_epi16(x, 8); }
#else
using Register = __m256i;
LLMC_INLINE Register multiply_bytes(Register w, Register x) { return _mm256_maddubs_epi16(w, x); }
LLMC_INLINE Register multiply_words(Register w, Register x) { return _mm256_madd_epi16(w, x); }
LLMC_INLINE Register add_words(Register a, Register b) { return _mm256_add_epi16(a, b); }
LLMC_INLINE Register subtract_words(Register a, Register b) { return _mm256_sub_epi16(a, b); }
LLMC_INLINE Register every_word(int x) { return _mm256_set1_epi16(short(x)); }
LLMC_INLINE Register every_pair(int32_t x) { return _mm256_set1_epi32(x); }
LLMC_INLINE Register shift_up(Register x) { return _mm256_slli_epi16(x, 8); }
LLMC_INLINE Register shift_down(Register x) { return _mm256_srai_epi16(x, 8); }
#endif

// LLMC_BYTE_PRODUCTS: sum + w * x in 32 bits, of four unsigned by signed bytes or two words per lane.
#if defined(LLMC_AVX512) && defined(__AVX512VNNI__)
#define LLMC_BYTE_PRODUCTS 1
LLMC_INLINE Register add_bytes(Register sum, Register w, Register x) {
  return _mm512_dpbusd_epi32(sum, w, x);
}
LLMC_INLINE Register add_pairs(Register sum, Register w, Register x) {
  return _mm512_dpwssd_epi32(sum, w, x);
}
#elif !defined(LLMC_AVX512) && defined(__AVXVNNI__)
#define LLMC_BYTE_PRODUCTS 1
LLMC_INLINE Register add_bytes(Register sum, Register w, Register x) {
  return _mm256_dpbusd_avx_epi32(sum, w, x);
}
LLMC_INLINE Register add_pairs(Register sum, Register w, Register x) {
  return _mm256_dpwssd_avx_epi32(sum, w, x);
}
#else
LLMC_INLINE Register add_pairs(Register sum, Register w, Register x) {
  return (Register)((vi)sum + (vi)multiply_words(w, x));
}
#endif

}  // namespace llmc
#endif
