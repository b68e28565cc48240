// The reader of fp8 and of formats with tables for AVX2, which unpacks all bytes of a register
// together: four inputs for eight channels.
#pragma once

#include "low_bit.h"
#include "low_bit_integers.h"

#if defined(__AVX2__) && !defined(LLMC_AVX512)
#define LLMC_FOUR_INPUTS 1
namespace llmc {

struct FourInputs {
  float value[4];
};

template <Format kFormat>
struct FourReader {
  static constexpr bool kIsFp8 = kFormat == Format::fp8;
  static constexpr int kInputs = kIsFp8 ? 4 : 8, kSteps = kInputs / 4, kSums = 2;
  static constexpr int64_t kMaxStretch = 128;
  using X = FourInputs;
  using Line = __m256i;
  struct V {
    vf value[4];
  };
  struct Sum {
    vf value[2] = {};
    void operator+=(const Sum& other) {
      for (int i = 0; i < 2; ++i) value[i] += other.value[i];
    }
  };

  // For nibbles, the first step has the low ones: inputs 0, 2, 4 and 6.
  static constexpr int input(int step, int i) { return i * kSteps + step; }
  static constexpr float kScale = unit_of(kFormat);  // of the result of get()

  static Packed pack(const float* x, int64_t count, X* to) {
    for (int64_t k = 0; k < count; k += kInputs)
      for (int step = 0; step < kSteps; ++step, ++to)
        for (int i = 0; i < 4; ++i) to->value[i] = x[k + input(step, i)];
    return {kScale, std::accumulate(x, x + count, 0.0f)};
  }
  LLMC_INLINE V get(Line line, int step) {
    return kIsFp8 ? floats(line) : integers(step ? _mm256_srli_epi16(line, 4) : line);
  }
  LLMC_INLINE void add(Sum& sum, const V& w, const X& x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum.value[i % 2] += w.value[i] * x.value[i];
  }
  LLMC_INLINE vf total(const Sum& sum) { return sum.value[0] + sum.value[1]; }
  static constexpr float kOffset = 0;

 private:
  LLMC_INLINE V integers(__m256i codes) {
    const auto four = (vi)look_up(integers_of_codes<kFormat>(),
                                  _mm256_and_si256(codes, _mm256_set1_epi8(15)));
    return {{convert<vf>(four << 24 >> 24), convert<vf>(four << 16 >> 24),
             convert<vf>(four << 8 >> 24), convert<vf>(four >> 24)}};
  }
  // The bits of fp8 in 16-bit lanes are those of a bfloat16 with another exponent bias. This does
  // not hold for NaN, zeros and subnormals, which are too rare to handle in the fast path.
  LLMC_INLINE V floats(__m256i codes) {
    const __m256i size = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
    const __m256i above_least = _mm256_sub_epi8(size, _mm256_set1_epi8(8));
    const __m256i rare = _mm256_subs_epu8(above_least, _mm256_set1_epi8(0x7e - 8));
    if (__builtin_expect(!_mm256_testz_si256(rare, rare), 0)) return any_floats(codes);
    const vu even = bfloat16(_mm256_slli_epi16(codes, 8)), odd = bfloat16(codes);
    return {{(vf)(even << 16), (vf)(odd << 16), (vf)(even & 0xffff0000u), (vf)(odd & 0xffff0000u)}};
  }
  LLMC_INLINE vu bfloat16(__m256i upper) {  // from the upper bytes
    const __m256i moved = _mm256_srai_epi16(upper, 4);
    const __m256i bits = _mm256_and_si256(moved, _mm256_set1_epi16(short(0x87f0)));
    return (vu)_mm256_add_epi16(bits, _mm256_set1_epi16(120 << 7));
  }
  __attribute__((noinline)) static V any_floats(__m256i codes) {
    V w;
    for (int i = 0; i < 4; ++i) w.value[i] = fp8_floats<vf, vi>((vu)codes >> (8 * i));
    return w;
  }
};

}  // namespace llmc
#endif
