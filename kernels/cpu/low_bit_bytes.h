// The reader of fp8, and of codes on AVX2, that unpacks all bytes of a register together: four
// inputs. With products of bf16, PairReader is faster.
#pragma once

#include "low_bit.h"
#include "low_bit_integers.h"

#if defined(__AVX2__) && !defined(LLMC_AVX512_BF16)
#define LLMC_FOUR_INPUTS 1
namespace llmc {

// AVX-512 looks up codes as floats faster.
constexpr bool reads_fours(Format format) {
  return format == Format::fp8 || (format == Format::table && kNative == 8);
}

struct FourInputs {
  float value[4];
};

template <Format kFormat>
struct FourReader {
  static constexpr bool kIsFp8 = kFormat == Format::fp8;
  // With AVX-512, eight rows at a time need no more than a register each.
  static constexpr int kAlternating = kNative == 16 ? 1 : 2, kSums = 4 / kAlternating;
  static constexpr int kInputs = kIsFp8 ? 4 : 8, kSteps = kInputs / 4;
  static constexpr int64_t kMaxStretch = 128;
  static constexpr bool kWideWords = true;  // of x: too wide to be kept for a second part
  using X = FourInputs;
  using Line = Register;
  struct V {
    vf value[4];
  };
  struct Sum {
    vf value[kAlternating] = {};
    void operator+=(const Sum& other) {
      for (int i = 0; i < kAlternating; ++i) value[i] += other.value[i];
    }
  };

  // For nibbles, the first step has the low ones: inputs 0, 2, 4 and 6.
  static constexpr int input(int step, int i) { return i * kSteps + step; }
  static Packed pack(const float* x, int64_t count, X* to) {
    for (int64_t k = 0; k < count; k += kInputs)
      for (int step = 0; step < kSteps; ++step, ++to)
        for (int i = 0; i < 4; ++i) to->value[i] = x[k + input(step, i)];
    return {1.0f, sum_of(x, count)};
  }
  vu table;
  LLMC_METHOD explicit FourReader(const LowBitArgs& a) : table(table_of(a.book.integers)) {}
  LLMC_METHOD V get(Line line, int step) const {
    return kIsFp8 ? floats(line) : integers((Register)((vu)line >> (step ? 4 : 0)));
  }
  LLMC_INLINE void add(Sum& sum, const V& w, const X& x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum.value[i % kAlternating] += w.value[i] * x.value[i];
  }
  LLMC_INLINE vf total(const Sum& sum) {
    return kAlternating == 1 ? sum.value[0] : sum.value[0] + sum.value[kAlternating - 1];
  }
  static constexpr float offset() { return 0; }

 private:
  LLMC_METHOD V integers(Register codes) const {
    const auto four = (vi)look_up(table, (vu)codes & 0x0f0f0f0fu);
    return {{convert<vf>(four << 24 >> 24), convert<vf>(four << 16 >> 24),
             convert<vf>(four << 8 >> 24), convert<vf>(four >> 24)}};
  }
  // The bits of fp8 in 16-bit lanes are those of a bfloat16 with another exponent bias. This does
  // not hold for NaN, zeros and subnormals, which are too rare to handle in the fast path.
  LLMC_INLINE V floats(Register codes) {
    if (__builtin_expect(has_rare(codes), 0)) return any_floats(codes);
    const vu even = bfloat16(shift_up(codes)), odd = bfloat16(codes);
    return {{(vf)(even << 16), (vf)(odd << 16), (vf)(even & 0xffff0000u), (vf)(odd & 0xffff0000u)}};
  }
  LLMC_INLINE bool has_rare(Register codes) {  // sizes below 8, or 0x7f
    const Register size = (Register)((vu)codes & 0x7f7f7f7fu);
#ifdef LLMC_AVX512
    const Register above_least = _mm512_sub_epi8(size, _mm512_set1_epi8(8));
    return _mm512_cmpgt_epu8_mask(above_least, _mm512_set1_epi8(0x7e - 8)) != 0;
#else
    const Register above_least = _mm256_sub_epi8(size, _mm256_set1_epi8(8));
    const Register rare = _mm256_subs_epu8(above_least, _mm256_set1_epi8(0x7e - 8));
    return !_mm256_testz_si256(rare, rare);
#endif
  }
  LLMC_INLINE vu bfloat16(Register upper) {  // from the upper bytes
#ifdef LLMC_AVX512
    const vu moved = (vu)_mm512_srai_epi16(upper, 4);
#else
    const vu moved = (vu)_mm256_srai_epi16(upper, 4);
#endif
    return (vu)add_words((Register)(moved & 0x87f087f0u), every_word(120 << 7));
  }
  LLMC_INLINE V any_floats(Register codes) {
    V w;
    for (int i = 0; i < 4; ++i) w.value[i] = decode_lanes<vf, vi>((vu)codes >> (8 * i), kE4m3);
    return w;
  }
};

}  // namespace llmc
#endif
