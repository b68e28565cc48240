// The sampler's noise: Philox4x32-10 (Salmon et al., SC 2011) and -log(-log(u)), sixteen at a time.
#pragma once

#include "vec.h"

namespace llmc {

LLMC_INLINE void multiply_wide(uint32_t a, v16u b, v16u& high, v16u& low) {
#ifdef LLMC_AVX512
  const __m512i m = _mm512_set1_epi64(a);
  const __m512i even = _mm512_mul_epu32((__m512i)b, m);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)b, 32), m);
  low = (v16u)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  high = (v16u)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#else
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = uint64_t(a) * b[i];
    high[i] = uint32_t(product >> 32);
    low[i] = uint32_t(product);
  }
#endif
}

struct Philox {  // one request at one position
  uint32_t key0, key1, position;

  Philox(int64_t seed, int64_t pos)
      : key0(uint32_t(seed)), key1(uint32_t(uint64_t(seed) >> 32)), position(uint32_t(pos)) {}

  // Four words for each of sixteen groups of four tokens.
  LLMC_INLINE void words(const Philox& p, v16u group, v16u out[4]) {
    v16u c0 = group, c1 = p.position - v16u{}, c2 = {}, c3 = {};
    uint32_t k0 = p.key0, k1 = p.key1;
    for (int round = 0; round < 10; ++round) {
      v16u hi0, lo0, hi1, lo1;
      multiply_wide(0xD2511F53u, c0, hi0, lo0);
      multiply_wide(0xCD9E8D57u, c2, hi1, lo1);
      c0 = hi1 ^ c1 ^ k0;
      c1 = lo1;
      c2 = hi0 ^ c3 ^ k1;
      c3 = lo0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
  }
};

// Natural logarithm of positive normal numbers to about one unit in the last place: the
// polynomial of the Cephes library (Moshier).
LLMC_INLINE v16f log_lanes(v16f x) {
  v16i exponent = (v16i)((v16u)x >> 23) - 126;
  v16f m = (v16f)(((v16u)x & 0x007fffffu) | 0x3f000000u);  // [0.5, 1)
  v16i small = m < splat(0.707106781186547524f);
  exponent += small;
  m = m + (v16f)((v16i)m & small) - 1.0f;
  const v16f e = convert<v16f>(exponent), z = m * m;
  v16f p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const v16f y = p * m * z - 2.12194440e-4f * e - 0.5f * z;
  return m + y + 0.693359375f * e;
}

// The largest value gumbel() can take is -log(-log(1 - 2^-24)) = 16.64.
constexpr float kMaxGumbel = 16.7f;

LLMC_INLINE v16f gumbel(v16u word) {
  const v16f u = (convert<v16f>((v16i)(word >> 9)) + 0.5f) * 0x1p-23f;
  return -log_lanes(-log_lanes(u));
}

}  // namespace llmc
