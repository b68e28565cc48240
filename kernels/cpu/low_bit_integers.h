// Readers of integers and of codes that stand for integers, on x86. x is in fixed point, in digits
// of one or two bytes, relative to the largest of its stretch: bf16 and f16 use 16 bits, which is
// finer than their own rounding, and float32 uses 24, which is similar to its own.
#pragma once

#include "integer_products.h"
#include "low_bit.h"
#include "low_bit_packed.h"

#include <array>
#include <limits>

#ifdef __AVX2__
namespace llmc {

// x [count] as signed digits, lowest first, with a common scale.
template <class Digit, int kDigits, int kBits = 8 * sizeof(Digit)>
struct FixedPoint {
  std::array<std::array<Digit, 128>, kDigits> digit;
  Packed packed;

  FixedPoint(const float* x, int64_t count) {
    const float largest = largest_magnitude(x, count);
    if (!(largest <= std::numeric_limits<float>::max())) {  // which the result must show
      constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
      packed = {kNan, kNan};
      digit = {};
      return;
    }
    // Not the least scale for zeros: its products with a weight's scales would be subnormal, which
    // take a hundred times as long.
    const bool is_zero = largest <= 1e-30f;
    const float scale = is_zero ? 0 : scale_for(largest), inverse = is_zero ? 0 : 1 / scale;
    v16i sum = {};  // at most 128 values of 24 bits
    for (int64_t k = 0; k < count; k += kLanes) {
      v16i values = round_to_int(load(x + k) * inverse);
      sum += values;
      for (int d = 0; d < kDigits; ++d) {
        const v16i low = (values << (32 - kBits)) >> (32 - kBits);
        narrow_to<std::make_unsigned_t<Digit>>(digit[d].data() + k, (v16u)low);
        if (d + 1 < kDigits) values = (values - low) >> kBits;
      }
    }
    packed = {scale, scale * float(sum_ints(sum))};
  }

  // The smallest power of two with which the digits can represent `largest`; a single byte uses its
  // full range instead.
  static float scale_for(float largest) {
    if (kDigits * kBits == 8) return largest / 127;
    constexpr int kTotal = kBits * kDigits - 1;
    float limit = 0;  // every signed byte at its largest, also if the digits are words
    for (int bits = 0; bits < kTotal; bits += 8) limit = limit * 256 + 127;
    // largest = part * 2^exponent with part in [0.5, 1)
    const uint32_t bits = std::bit_cast<uint32_t>(largest);
    const int exponent = int(bits >> 23) - 126;
    const float part = std::bit_cast<float>((bits & 0x7fffffu) | 126u << 23);
    const bool is_over = part * float(1u << kTotal) > limit - 1;
    return std::bit_cast<float>(uint32_t(std::max(1, exponent - kTotal + is_over + 127)) << 23);
  }
};

constexpr int kShortTable = 30;  // the largest integer, plus its offset, of a table with short sums

template <int kDigits>
struct DigitWords {  // the inputs of a step: a word of four bytes per digit
  int32_t digit[kDigits];
};

// Signed bytes of a line's eight inputs: even ones are for its low nibbles, odd ones for its high
// ones.
template <int kDigits>
Packed pack_nibbles(const float* x, int64_t count, DigitWords<kDigits>* to) {
  const FixedPoint<int8_t, kDigits> fixed(x, count);
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  for (int64_t k = 0; k < count; k += 16, to += 4) {
    __m128i words[kDigits];
    for (int d = 0; d < kDigits; ++d)
      words[d] = _mm_shuffle_epi8(load_as<__m128i>(fixed.digit[d].data() + k), order);
    if constexpr (kDigits == 2) {
      store_as(to, _mm_unpacklo_epi32(words[0], words[1]));
      store_as(to + 2, _mm_unpackhi_epi32(words[0], words[1]));
    } else {
      for (int d = 0; d < kDigits; ++d)
        for (int i = 0; i < 4; ++i) to[i].digit[d] = ((__v4si)words[d])[i];
    }
  }
  return fixed.packed;
}

// Signed 16-bit values of a step of int8 or of codes: inputs j and j + kSteps of a line are a pair.
template <Format kFormat>
struct SignedWords {
  vu table;
  LLMC_METHOD explicit SignedWords(const LowBitArgs& a) : table(table_of(a.book.integers)) {}
  LLMC_METHOD Register get(Register line, int step) const {
    if constexpr (kFormat == Format::int8) return shift_down(step ? line : shift_up(line));
    const vu words = (vu)line;  // in the upper bytes, whose signs reach the lower ones
    const vu codes = (step < 3 ? words << (8 - 4 * step) : words >> 4) & 0x0f000f00u;
    return shift_down((Register)look_up(table, codes));
  }
};

// Unsigned bytes, four inputs a step, from the lines that are stored together: nibbles of int4 as
// stored, or the integers of codes plus offset().
template <Format kFormat>
struct UnsignedBytes {
  static constexpr bool kIsTable = kFormat != Format::int4;
  static constexpr int kInputs = 8, kLines = 1;
  static constexpr int kMost = kIsTable ? kShortTable : 15;  // for ShortReader
  vu table;
  int added;

  LLMC_METHOD explicit UnsignedBytes(const LowBitArgs& a)
      : table(table_of(a.book.unsigned_bytes)), added(a.book.offset) {}
  LLMC_METHOD float offset() const { return kIsTable ? float(added) : 0.0f; }
  LLMC_INLINE Register load(const uint8_t* at) { return load_as<Register>(at); }
  LLMC_METHOD Register get(Register line, int step) const {
    const Register codes = (Register)((vu)line >> (step ? 4 : 0) & 0x0f0f0f0fu);
    return kIsTable ? look_up(table, codes) : codes;
  }
  template <int kDigits>
  static Packed pack(const float* x, int64_t count, DigitWords<kDigits>* to) {
    return pack_nibbles(x, count, to);
  }
};

// int8 plus 128.
template <>
struct UnsignedBytes<Format::int8> {
  static constexpr int kInputs = 4, kLines = 1;

  explicit UnsignedBytes(const LowBitArgs&) {}
  static constexpr float offset() { return 128; }
  LLMC_INLINE Register load(const uint8_t* at) { return load_as<Register>(at); }
  LLMC_INLINE Register get(Register line, int) { return (Register)((vu)line ^ 0x80808080u); }
  template <int kDigits>
  static Packed pack(const float* x, int64_t count, DigitWords<kDigits>* to) {
    const FixedPoint<int8_t, kDigits> fixed(x, count);
    for (int d = 0; d < kDigits; ++d)
      for (int64_t k = 0; k < count; k += 4)
        std::memcpy(&to[k / 4].digit[d], fixed.digit[d].data() + k, 4);
    return fixed.packed;
  }
};

// int5 and int6 as stored.
template <Format kFormat>
  requires(is_packed(kFormat))
struct UnsignedBytes<kFormat> : UnsignedBytes<Format::int8> {
  using Lines = Unit<kFormat, vu>;
  static constexpr int kInputs = Lines::kInputs, kLines = Lines::kLines;
  static constexpr int kMost = 2 * middle_of(kFormat) - 1;

  using UnsignedBytes<Format::int8>::UnsignedBytes;
  static constexpr float offset() { return 0; }
  LLMC_INLINE Lines load(const uint8_t* at) {
    Lines unit;
#pragma GCC unroll 5
    for (int i = 0; i < kLines; ++i) unit.line[i] = load_as<vu>(at + i * kLineBytes);
    return unit;
  }
  LLMC_INLINE Register get(const Lines& unit, int step) { return (Register)unit.get(step); }
};

// Inputs whose products by digits of one byte, two of them in each 16-bit sum, can't overflow it.
constexpr int64_t inputs_per_sum(int most, int64_t stretch) {
  return stretch / 2 * most * 128 < 1 << 15 ? stretch : inputs_per_sum(most, stretch / 2);
}

// Fewer than 8 bits with one-byte digits, whose products are added up in 16 bits. Tables may have
// integers up to kShortTable.
template <Format kFormat, int kDigits>
struct ShortReader : UnsignedBytes<kFormat> {
  using Bytes = UnsignedBytes<kFormat>;
  using Bytes::Bytes;
  static constexpr int kSteps = Bytes::kInputs / 4, kSums = 1;
  static constexpr int64_t kMaxStretch = 32;
  static constexpr int64_t kAdded = inputs_per_sum(Bytes::kMost, kMaxStretch);
  static constexpr bool kWidens = kAdded < kMaxStretch;
  static constexpr int kWidenedSteps = kAdded / 4;
  using X = DigitWords<kDigits>;
  using Line = Register;
  struct Sum {
    Register digit[kDigits] = {}, wide[kWidens ? kDigits : 1] = {};  // of 16 and 32 bits
  };
  LLMC_INLINE void add(Sum& sum, Register w, const X& x) {
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; ++d)
      sum.digit[d] = add_words(sum.digit[d], multiply_bytes(w, every_pair(x.digit[d])));
  }
  // After kWidenedSteps.
  LLMC_INLINE void widen(Sum& sum) {
#pragma GCC unroll 3
    for (int d = 0; kWidens && d < kDigits; ++d) {
      sum.wide[d] = (Register)((vi)sum.wide[d] + (vi)multiply_words(sum.digit[d], every_word(1)));
      sum.digit[d] = Register{};
    }
  }
  LLMC_INLINE vf as_floats(const Sum& sum, int d) {
    if constexpr (kWidens) return convert<vf>((vi)sum.wide[d]);
    return convert<vf>((vi)multiply_words(sum.digit[d], every_word(1)));
  }
  LLMC_INLINE vf total(const Sum& sum) {
    vf all = as_floats(sum, kDigits - 1);
#pragma GCC unroll 3
    for (int d = kDigits - 2; d >= 0; --d) all = 256.0f * all + as_floats(sum, d);
    return all;
  }
};

// int8, or integers of codes, with one digit of 16 bits, or two of 12, of two inputs.
template <Format kFormat, int kDigits>
struct WordReader : SignedWords<kFormat> {
  using SignedWords<kFormat>::SignedWords;
  static constexpr int kBits = kDigits == 1 ? 16 : 12;
  static constexpr int kInputs = is_4_bit(kFormat) ? 8 : 4, kSteps = kInputs / 2, kSums = 1;
  static constexpr int64_t kMaxStretch = 32;  // products of 2^15 * 2^7: the sums fit in 32 bits
  using X = DigitWords<kDigits>;
  using Line = Register;
  using V = Register;
  struct Sum {
    vi digit[kDigits] = {};
  };
  static Packed pack(const float* x, int64_t count, X* to) {
    const FixedPoint<int16_t, kDigits, kBits> fixed(x, count);
    for (int d = 0; d < kDigits; ++d)
      for (int64_t k = 0; k < count; k += kInputs) {
        const int16_t* own = fixed.digit[d].data() + k;
        for (int64_t i = 0; i < kSteps; ++i)
          to[k / 2 + i].digit[d] = int32_t(uint32_t(own[i + kSteps]) << 16 | uint16_t(own[i]));
      }
    return fixed.packed;
  }
  LLMC_INLINE void add(Sum& sum, V w, const X& x) {
#pragma GCC unroll 2
    for (int d = 0; d < kDigits; ++d)
      sum.digit[d] = (vi)add_pairs((Register)sum.digit[d], w, every_pair(x.digit[d]));
  }
  LLMC_INLINE vf total(const Sum& sum) {
    vf all = convert<vf>(sum.digit[kDigits - 1]);
    if (kDigits == 2) all = float(1 << kBits) * all + convert<vf>(sum.digit[0]);
    return all;
  }
  static constexpr float offset() { return 0; }
};

#ifdef LLMC_BYTE_PRODUCTS
// Integers and codes with one-byte digits, four products per lane and instruction. More sums than
// one per digit would take longer to add up than they save: stretches overlap anyway.
template <Format kFormat, int kDigits>
struct ByteReader : UnsignedBytes<kFormat> {
  using UnsignedBytes<kFormat>::UnsignedBytes;
  static constexpr int kSteps = UnsignedBytes<kFormat>::kInputs / 4, kSums = 1;
  static constexpr int64_t kMaxStretch = 128;
  using X = DigitWords<kDigits>;
  using Line = Register;
  struct Sum {
    Register digit[kDigits] = {};
  };
  LLMC_INLINE void add(Sum& sum, Register w, const X& x) {
#pragma GCC unroll 2
    for (int d = 0; d < kDigits; ++d)
      sum.digit[d] = add_bytes(sum.digit[d], w, every_pair(x.digit[d]));
  }
  LLMC_INLINE vf total(const Sum& sum) {
    const vf highest = convert<vf>((vi)sum.digit[kDigits - 1]);
    return kDigits == 1 ? highest : 256.0f * highest + convert<vf>((vi)sum.digit[0]);
  }
};
#endif

// Fewer than 8 bits with one-byte digits.
#ifdef LLMC_BYTE_PRODUCTS
template <Format kFormat, int kDigits>
using DigitReader = ByteReader<kFormat, kDigits>;
#else
template <Format kFormat, int kDigits>
using DigitReader = ShortReader<kFormat, kDigits>;
#endif

}  // namespace llmc
#endif
