// FP8 formats of the KV cache: e4m3 (no infinities, maximum 448) and e5m2 (maximum 57344).
//
// All their values are exact in bfloat16, so AVX-512 looks magnitudes up in a table of 128; others
// compute them. Writes saturate and round to nearest, ties to even, with integer arithmetic.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace llmc {

struct Fp8Format {
  int mantissa, bias;     // bits, and of the exponent
  uint8_t nan, infinite;  // codes: from `infinite` on, magnitudes are not finite
  float largest, least;   // normal values
};

constexpr Fp8Format kE4m3{3, 7, 0x7f, 0x7f, 448.0f, 0x1p-6f};
constexpr Fp8Format kE5m2{2, 15, 0x7f, 0x7c, 57344.0f, 0x1p-14f};

inline Fp8Format fp8_format(Dtype dtype) {
  return dtype == Dtype::e4m3 ? kE4m3 : kE5m2;
}

// The floats of the codes in the lowest byte of each lane. All are read as if they were normal:
// twice that minus the least normal value is smaller only for subnormal codes, whose value it is.
template <class Floats, class Integers, class Lanes>
LLMC_INLINE Floats decode_lanes(const Lanes& codes, const Fp8Format& f) {
  const Lanes size = codes & 0x7fu, sign = codes << 24 & 0x80000000u;
  const Floats normal = (Floats)((size << (23 - f.mantissa)) + (uint32_t(127 - f.bias) << 23));
  const Floats value = vmin(normal, 2.0f * normal - f.least);
  const Lanes infinite = (Lanes)((Integers)size > f.infinite - 1) & 0x7f800000u;
  return (Floats)((Lanes)value | infinite | sign);
}

// The codes of sixteen floats.
LLMC_INLINE v16u encode(v16f x, const Fp8Format& f) {
  const v16u sign = ((v16u)x >> 24) & 0x80u;
  v16f a = (v16f)((v16u)x & 0x7fffffffu);
  const v16u nan = (v16u)(a != a);
  a = select(a > splat(f.largest), splat(f.largest), a);
  // for subnormals the step is constant: adding 2^23 steps leaves the step count in the low bits
  const int step = 1 - f.bias - f.mantissa;
  const v16u shifter = (v16u)splat_int((127 + 23 + step) << 23);
  const v16u low = (v16u)(a + (v16f)shifter) - shifter;
  const int drop = 23 - f.mantissa;
  const v16u bits = (v16u)a;
  const v16u odd = (bits >> drop) & 1u;
  const v16u high = ((bits + odd + uint32_t((1 << (drop - 1)) - 1)) >> drop) -
                    (uint32_t(127 - f.bias) << f.mantissa);
  const v16u normal = (v16u)(bits >= (v16u)splat_int((128 - f.bias) << 23));
  v16u code = (high & normal) | (low & ~normal);
  code = (code & ~nan) | (nan & uint32_t(f.nan));
  return code | sign;
}

// The codes of n floats, each divided by `scale`.
template <class T>
inline void encode_row(const T* from, int64_t n, float scale, const Fp8Format& f, uint8_t* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    narrow_to<uint8_t>(to + i, encode(load(from + i) / scale, f));
  }
  if (i < n) {
    uint8_t codes[kLanes];
    narrow_to<uint8_t>(codes, encode(load_n(from + i, n - i) / scale, f));
    std::memcpy(to + i, codes, n - i);
  }
}

#ifdef LLMC_AVX512
struct Fp8Table {  // bfloat16 bits of the codes 0 to 127
  alignas(64) uint16_t bits[128];

  explicit Fp8Table(Dtype dtype) {
    const Fp8Format f = fp8_format(dtype);
    const int one = 1 << f.mantissa;
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> f.mantissa, m = code & (one - 1);
      const float value = exponent == 0 ? std::ldexp(float(m), 1 - f.bias - f.mantissa)
                                        : std::ldexp(float(one + m), exponent - f.bias - f.mantissa);
      bits[code] = to_bf16(value).bits;
    }
    if (dtype == Dtype::e4m3) {
      bits[0x7f] = 0x7fc0;
    } else {
      bits[0x7c] = 0x7f80;
      for (int code = 0x7d; code < 128; ++code) bits[code] = 0x7fc0;
    }
  }
};

inline const Fp8Table& fp8_table(Dtype dtype) {
  static const Fp8Table e4m3(Dtype::e4m3), e5m2(Dtype::e5m2);
  return dtype == Dtype::e4m3 ? e4m3 : e5m2;
}

#ifdef __AVX512VBMI__
#define LLMC_FP8_BYTES 1
// The table split into low and high bytes, so that one lookup handles 64 codes.
struct Fp8Bytes {
  __m512i low[2], high[2];

  explicit Fp8Bytes(const Fp8Table& table) {
    alignas(64) uint8_t bytes[2][128];
    for (int code = 0; code < 128; ++code) {
      bytes[0][code] = uint8_t(table.bits[code]);
      bytes[1][code] = uint8_t(table.bits[code] >> 8);
    }
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(bytes[0] + 64 * i);
      high[i] = _mm512_load_si512(bytes[1] + 64 * i);
    }
  }
  struct Parts {
    __m512i low, high;
  };
  __attribute__((always_inline)) Parts parts(__m512i codes) const {
    const __m512i upper = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    return {_mm512_permutex2var_epi8(low[0], codes, low[1]),
            _mm512_ternarylogic_epi32(upper, codes, _mm512_set1_epi8(-128), 0xf8)};  // the sign
  }
};
#endif

LLMC_INLINE void put_line(bf16* to, __m512i words) {
  _mm512_storeu_si512(to, words);
}

LLMC_INLINE void put_line(float* to, __m512i words) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(words));
  const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1));
  _mm512_storeu_si512(to, _mm512_slli_epi32(low, 16));
  _mm512_storeu_si512(to + kLanes, _mm512_slli_epi32(high, 16));
}

LLMC_INLINE void put_line(f16* to, __m512i words) {
  float wide[2 * kLanes];
  put_line(wide, words);
  store(to, load(wide));
  store(to + kLanes, load(wide + kLanes));
}
#endif

LLMC_INLINE void store_exact(bf16* to, v16f x) {
  narrow_to<uint16_t>(to, (v16u)x >> 16);
}

template <class T>
LLMC_INLINE void store_exact(T* to, v16f x) {
  store(to, x);
}

// Decodes n codes to T, exactly.
template <class T>
inline void decode_row(Dtype dtype, const uint8_t* from, int64_t n, T* to) {
  const Fp8Format format = fp8_format(dtype);
  int64_t i = 0;
#ifdef LLMC_AVX512
  const __m512i* magnitudes = reinterpret_cast<const __m512i*>(fp8_table(dtype).bits);
  const __m512i t0 = magnitudes[0], t1 = magnitudes[1], t2 = magnitudes[2], t3 = magnitudes[3];
  for (; i + 32 <= n; i += 32) {
    const __m512i code = _mm512_cvtepu8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    const __mmask32 upper = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
    const __m512i small = _mm512_permutex2var_epi16(t0, code, t1);
    const __m512i large = _mm512_permutex2var_epi16(t2, code, t3);
    const __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(code, 7), 15);
    put_line(to + i, _mm512_or_si512(_mm512_mask_mov_epi16(small, upper, large), sign));
  }
#endif
  const auto decode = [&](const uint8_t* codes) LLMC_LAMBDA {
    return decode_lanes<v16f, v16i>(widen_from<v16u, uint8_t>(codes), format);
  };
  for (; i + kLanes <= n; i += kLanes) store_exact(to + i, decode(from + i));
  if (i < n) {
    uint8_t rest[kLanes] = {};
    std::memcpy(rest, from + i, n - i);
    store_n(to + i, decode(rest), n - i);
  }
}

}  // namespace llmc
