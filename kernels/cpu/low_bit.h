// Internals of quantized_linear: how a line of a weight is read. A line is 64 bytes, four for each
// of 16 channels; a vector lane is a channel, so no sum crosses lanes and scales are one vector.
#pragma once

#include "dtypes.h"
#include "fp8.h"
#include "kernels.h"
#include "vec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <type_traits>

namespace llmc {

constexpr int64_t kChannels = 16, kLineBytes = 64;
constexpr int kExactBits = 24;  // bits of x without rounding
constexpr int64_t kMinGroup = 16, kDepthStep = 32;  // inputs; groups and depths are multiples
constexpr int64_t kSuperblock = 256;                // inputs

// How a weight is stored. Those with tables are all read as `table`: their values come at run time,
// so the kernels for them are compiled once.
enum class Format { int8, int4, fp8, mxfp4, nvfp4, iq4, iq3_s, iq3_xxs, iq2, int5, int6, table };

// The values of a format with codes of four bits: integers times `unit`, a power of two.
struct Codebook {
  std::array<int8_t, 16> integers{};
  float unit = 1;
  int offset = 0, most = 0;  // what makes the integers unsigned, and the largest one then
  std::array<uint8_t, 16> unsigned_bytes{};

  constexpr Codebook() {}
  constexpr Codebook(std::array<int8_t, 16> all, float unit) : integers(all), unit(unit) {
    offset = -*std::min_element(all.begin(), all.end());
    most = *std::max_element(all.begin(), all.end()) + offset;
    for (int i = 0; i < 16; ++i) unsigned_bytes[i] = uint8_t(all[i] + offset);
  }
};
// Codes 8 to 15 are the negatives of the others.
constexpr Codebook with_negatives(std::array<int8_t, 8> sizes, float unit) {
  std::array<int8_t, 16> all{};
  for (int i = 0; i < 16; ++i) all[i] = i < 8 ? sizes[i] : -sizes[i - 8];
  return {all, unit};
}
// kernels/quantized_linear.py says where they come from.
constexpr Codebook codebook_of(Format format) {
  if (format == Format::mxfp4 || format == Format::nvfp4)
    return with_negatives({0, 1, 2, 3, 4, 6, 8, 12}, 0.5f);
  if (format == Format::iq3_s) return with_negatives({1, 3, 5, 7, 9, 11, 13, 15}, 1);
  if (format == Format::iq3_xxs) return with_negatives({2, 6, 10, 14, 18, 22, 26, 31}, 0.5f);
  if (format == Format::iq2) return with_negatives({1, 7, 9, 8, 25, 43, 0, 0}, 0.125f);
  if (format == Format::iq4)
    return {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, 1};
  return {};
}
constexpr bool has_table(Format format) {
  return format >= Format::mxfp4 && format <= Format::iq2;
}
constexpr bool is_4_bit(Format format) {
  return format == Format::int4 || format == Format::table || has_table(format);
}
constexpr bool is_packed(Format format) { return format == Format::int5 || format == Format::int6; }
// The value that stands for zero without zero points and minimums.
constexpr int middle_of(Format format) {
  return format == Format::int4 ? 8 : format == Format::int5 ? 16 : format == Format::int6 ? 32 : 0;
}
// Lines that are stored together, and their inputs.
struct Layout {
  int lines, inputs;
};
constexpr Layout layout_of(Format format) {
  if (format == Format::int5) return {5, 32};
  if (format == Format::int6) return {3, 16};
  if (format == Format::nvfp4 || format == Format::iq4 || format == Format::iq2) return {2, 16};
  if (format == Format::iq3_s || format == Format::iq3_xxs) return {4, 32};
  return {1, is_4_bit(format) ? 8 : 4};
}
// As what most kernels read a format.
constexpr Format read_as(Format stored) {
  return is_packed(stored) ? Format::int8 : has_table(stored) ? Format::table : stored;
}
template <Format kFormat>
using FormatConstant = std::integral_constant<Format, kFormat>;
// Calls run() with a result of read_as() as a constant.
template <class Run>
void with_format(Format format, Run run) {
  if (format == Format::int8) return run(FormatConstant<Format::int8>{});
  if (format == Format::int4) return run(FormatConstant<Format::int4>{});
  if (format == Format::fp8) return run(FormatConstant<Format::fp8>{});
  run(FormatConstant<Format::table>{});
}

// Lines of so many inputs.
constexpr int64_t lines_of(Format format, int64_t inputs) {
  return inputs / layout_of(format).inputs * layout_of(format).lines;
}

struct LowBitArgs {
  Dtype dtype;            // of x, bias and out
  Format format, stored;  // format: read_as(stored), but for kernels that take int5 and int6
  Codebook book;          // of `stored`
  const void* x;
  const uint8_t *weight, *zero;  // zero may be null, and so may bias
  const void *scale, *bias;     // scales of mxfp4 are exponents of two, one byte each
  const void* minimum;  // may be null; for int8 and int4 without zero
  Dtype scale_dtype, minimum_dtype;
  int superblock_parts;  // 1: `scale` has superblocks, 2: with minimums; else 0
  void* out;  // [rows, channels] dense
  int64_t rows, depth, channels, x_stride;
  int64_t group, groups;  // inputs of a group, and how many there are: kernels don't divide
  int threads;
  int x_bits;  // bits that x is rounded to, relative to the largest of a stretch: 8, 16, kExactBits

  int64_t lines() const { return lines_of(stored, depth); }  // per block
  bool has_minimum() const { return minimum || superblock_parts == 2; }
};

void quantized_linear(const LowBitArgs&);  // few rows by dot products, many by float32 tiles
#ifdef LLMC_AVX512
constexpr int64_t kMaxFewRows = 8;  // rows multiplied together
#else
constexpr int64_t kMaxFewRows = 4;
#endif
void quantized_many_rows(const LowBitArgs&);
bool rounds_x();                           // whether this CPU supports x_bits below kExactBits
void quantized_integer_rows(const LowBitArgs&);
bool has_pair_rows();  // whether this CPU supports the next, for more bf16 rows
void quantized_pair_rows(const LowBitArgs&);
bool widens_weights();                     // whether this CPU supports the next two, for many rows
// x in the order in which a line's values are unpacked, for the product with dequantized weights.
void reorder_x(const LowBitArgs&, bf16* to);
// Channels [begin, end) as rows of bf16 in that order, scaled.
void widen_channels(const LowBitArgs&, int64_t begin, int64_t end, bf16* to);
// Row m of out: channel ids[m], or zeros for an invalid id; x and bias are not used.
void quantized_embedding(const LowBitArgs&, const int64_t* ids);

// x is read in stretches, each within one group of the weight; this is their length.
inline int64_t stretch_of(const LowBitArgs& a, int64_t most) {
  for (int64_t n = most; n > kMinGroup; n /= 2)
    if (a.group % n == 0) return n;
  return kMinGroup;
}

// 2^(e - 127) for bytes e: 0 is the smallest, which is subnormal, and 255 is NaN.
LLMC_INLINE v16f powers_of_two(const uint8_t* exponents) {
  const v16u e = widen_from<v16u, uint8_t>(exponents);
  const v16u rare = (v16u)((v16i)e < 1) | (v16u)((v16i)e > 254);
  return (v16f)(e << 23 | (rare & 0x400000u));
}

// Groups of a superblock.
inline int64_t steps_of(const LowBitArgs& a) { return a.group == 32 ? 8 : 16; }

// The scales of groups in superblocks: 8-bit steps times a float16 factor of 256 inputs, and so are
// minimums, if there are any. See kernels/quantized_linear.py for the order of the words.
struct Superblock {
  const uint16_t* words;
  int64_t steps;  // groups
  int parts;
  v16f factor, least;

  Superblock() {}
  LLMC_METHOD Superblock(const LowBitArgs& a, int64_t block, int64_t group) {
    steps = steps_of(a), parts = a.superblock_parts;
    const int64_t count = parts + steps / 2 * parts, first = group >> (steps == 8 ? 3 : 4);
    words = static_cast<const uint16_t*>(a.scale) +
            (block * (a.depth / kSuperblock) + first) * count * kChannels;
    factor = load(reinterpret_cast<const f16*>(words));
    if (parts == 2) least = load(reinterpret_cast<const f16*>(words + kChannels));
  }
  // With minimums, a group has a word of both; else two groups share one.
  LLMC_METHOD v16i word(int64_t group) const {
    const int64_t step = group & (steps - 1), at = parts == 2 ? 2 + step : 1 + step / 2;
    return (v16i)widen_from<v16u, uint16_t>(words + at * kChannels);
  }
  LLMC_METHOD v16f scale(v16i word, int64_t group) const {
    const bool is_low = parts == 2 || group % 2 == 0;
    return factor * convert<v16f>(word << (is_low ? 24 : 16) >> 24);
  }
  LLMC_METHOD v16f minimum(v16i word) const { return least * convert<v16f>(word << 16 >> 24); }
};

LLMC_INLINE v16f stored_scale(const LowBitArgs& a, int64_t block, int64_t group) {
  if (a.superblock_parts) {
    const Superblock super(a, block, group);
    return super.scale(super.word(group), group);
  }
  const int64_t at = (block * a.groups + group) * kChannels;
  if (a.stored == Format::mxfp4) return powers_of_two(static_cast<const uint8_t*>(a.scale) + at);
  if (a.scale_dtype == Dtype::bf16) return load(static_cast<const bf16*>(a.scale) + at);
  if (a.scale_dtype == Dtype::f16) return load(static_cast<const f16*>(a.scale) + at);
  return load(static_cast<const float*>(a.scale) + at);
}

// What the integers that readers return are multiplied by.
LLMC_INLINE v16f scale_of(const LowBitArgs& a, int64_t block, int64_t group) {
  return stored_scale(a, block, group) * a.book.unit;
}

// The value that stands for zero.
LLMC_INLINE v16f zero_of(const LowBitArgs& a, int64_t block, int64_t group) {
  if (!a.zero) return splat(a.has_minimum() ? 0.0f : float(middle_of(a.format)));
  const uint8_t* from = a.zero + (block * a.groups + group) * kChannels;
  return convert<v16f>((v16i)widen_from<v16u, uint8_t>(from));
}

// The value added to all scaled values of a group.
LLMC_INLINE v16f minimum_of(const LowBitArgs& a, int64_t block, int64_t group) {
  if (a.superblock_parts == 2) {
    const Superblock super(a, block, group);
    return super.minimum(super.word(group));
  }
  const int64_t at = (block * a.groups + group) * kChannels;
  if (!a.minimum) return v16f{};
  return a.minimum_dtype == Dtype::f16 ? load(static_cast<const f16*>(a.minimum) + at)
                                       : load(static_cast<const float*>(a.minimum) + at);
}

// The scale, without the table's unit, and minimum of one group after another.
struct GroupScales {
  v16f scale, minimum;
  Superblock super;

  LLMC_METHOD void read(const LowBitArgs& a, int64_t block, int64_t group) {
    if (!a.superblock_parts) {
      scale = stored_scale(a, block, group), minimum = minimum_of(a, block, group);
      return;
    }
    if ((group & (steps_of(a) - 1)) == 0) super = Superblock(a, block, group);
    const v16i word = super.word(group);
    scale = super.scale(word, group);
    minimum = super.parts == 2 ? super.minimum(word) : v16f{};
  }
};

// Writes one row of a block's channels, after adding the bias.
LLMC_INLINE void write_block(const LowBitArgs& a, int64_t row, int64_t block, v16f y) {
  const int64_t n = block * kChannels, at = row * a.channels + n;
  with_type(a.dtype, [&](auto t) __attribute__((always_inline)) {
    using T = decltype(t);
    if (a.bias) y += load(static_cast<const T*>(a.bias) + n);
    store(static_cast<T*>(a.out) + at, y);
  });
}

// In double, since float would lose as much as the product itself.
inline float sum_of(const float* x, int64_t count) {
  return float(std::accumulate(x, x + count, 0.0));
}

struct Packed {  // a packed stretch of x: values are words times `scale` and add up to `sum`
  float scale, sum;
};

// Sixteen bytes, repeated to fill a register: a table for look_up().
template <class Byte>
LLMC_INLINE vu table_of(const std::array<Byte, 16>& bytes) {
#if defined(LLMC_AVX512)
  return (vu)_mm512_broadcast_i32x4(load_as<__m128i>(bytes.data()));
#elif defined(__AVX2__)
  return (vu)_mm256_broadcastsi128_si256(load_as<__m128i>(bytes.data()));
#else
  return load_as<vu>(bytes.data());
#endif
}

// The table's byte for each byte of `codes`, which are below 16.
template <class V>
LLMC_INLINE V look_up(vu table, const V& codes) {
  if constexpr (kIsPair<V>) {
    return {look_up(table, codes.lo), look_up(table, codes.hi)};
  } else {
#if defined(LLMC_AVX512)
    return (V)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__)
    return (V)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif defined(__aarch64__)
    return (V)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#else
    V values;
    for (size_t i = 0; i < sizeof codes; ++i)
      reinterpret_cast<uint8_t*>(&values)[i] =
          reinterpret_cast<const uint8_t*>(&table)[reinterpret_cast<const uint8_t*>(&codes)[i]];
    return values;
#endif
  }
}

LLMC_INLINE v16f floats_of(const Codebook& book) {
  return convert<v16f>(widen_from<v16i, int8_t>(book.integers.data()));
}

// A reader unpacks a line, or each part of it that fits in a register, in kSteps steps; a step is
// multiplied by one word of x. Zero points are not subtracted from the values: for a whole stretch
// at once, they are multiplied by the sum of x. Stretches have at most kMaxStretch inputs. If a
// product depends on the previous one, few rows need kSums sums each to hide the latency. offset():
// what get() adds to every value as stored. A reader of codes holds their table.
template <Format kFormat>
struct FloatReader {  // any CPU
  static constexpr int kInputs = is_4_bit(kFormat) ? 8 : 4, kSteps = kInputs, kSums = 4;
  static constexpr int64_t kMaxStretch = 128;
  using X = float;
  using Line = v16u;
  using V = v16f;
  struct Sum {
    v16f value = {};
    void operator+=(const Sum& other) { value += other.value; }
  };
  static Packed pack(const float* x, int64_t count, X* to) {
    std::copy(x, x + count, to);
    return {1.0f, sum_of(x, count)};
  }
#ifdef LLMC_AVX512
  v16f table = {};
  LLMC_METHOD explicit FloatReader(const LowBitArgs& a) {
    if (kFormat == Format::table) table = floats_of(a.book);
    if (kFormat == Format::int4)
      for (int i = 0; i < 16; ++i) table[i] = i + offset();
  }
#else
  vu table;
  LLMC_METHOD explicit FloatReader(const LowBitArgs& a) : table(table_of(a.book.integers)) {}
#endif
  LLMC_METHOD V get(v16u line, int step) const {
    if (kFormat == Format::int8)
      return convert<v16f>((v16i)(line << (24 - 8 * step)) >> 24);
#ifdef LLMC_AVX512
    if constexpr (is_4_bit(kFormat))
      return (v16f)_mm512_permutexvar_ps((__m512i)(line >> (4 * step)), (__m512)table);
#else
    if (kFormat == Format::int4)
      return convert<v16f>((v16i)((line ^ 0x88888888u) << (28 - 4 * step)) >> 28);
    if constexpr (kFormat == Format::table) {
      const v16u four = look_up(table, (step % 2 ? line >> 4 : line) & 0x0f0f0f0fu);
      return convert<v16f>((v16i)(four << (24 - step / 2 * 8)) >> 24);
    }
#endif
    return decode_lanes<v16f, v16i>(line >> (8 * step), kE4m3);
  }
  LLMC_INLINE void add(Sum& sum, V w, const X& x) { sum.value += w * x; }
  LLMC_INLINE v16f total(const Sum& sum) { return sum.value; }
  // Codes around 0, since with those as stored, rounding errors of up to eight times the sum of x
  // would remain after the zero point is subtracted.
  static constexpr float offset() { return kFormat == Format::int4 ? -middle_of(kFormat) : 0; }
};

#ifdef LLMC_AVX512_BF16
struct Table {  // value(i) in bf16 for the low five bits i of an index
  alignas(64) uint16_t bits[32];
  template <class Value>
  constexpr explicit Table(Value value) : bits{} {
    for (int i = 0; i < 32; ++i)
      bits[i] = uint16_t(std::bit_cast<uint32_t>(float(value(i))) >> 16);  // all are exact
  }
  __attribute__((always_inline)) __m512i load() const { return _mm512_load_si512(bits); }
};
inline constexpr Table kUnsigned([](int i) { return i % 16; });
inline constexpr Table kSigned([](int i) { return i - 16; });
inline constexpr Table kTiny([](int i) { return i % 8 / 512.0f; });

#ifdef __AVX512VBMI__
// Low and high bytes of codes 0 to 127 in bf16: e4m3 without its sign, or integers.
template <Format kFormat>
struct ByteTables {
  alignas(64) uint8_t low[128], high[128];
  constexpr ByteTables() : low{}, high{} {
    for (int code = 0; code < 128; ++code) {
      uint32_t bits = std::bit_cast<uint32_t>(value_of(code)) >> 16;  // all are exact
      if (kFormat == Format::fp8 && code == 127) bits = 0x7fc0;       // NaN
      low[code] = uint8_t(bits), high[code] = uint8_t(bits >> 8);
    }
  }
  static constexpr float value_of(int code) {
    if (kFormat == Format::int8) return float(code);
    const int exponent = code >> 3, mantissa = code & 7;
    const float steps = exponent ? 8.0f + mantissa : 2.0f * mantissa;
    return steps * std::bit_cast<float>(uint32_t(127 + exponent - 10) << 23);
  }
  LLMC_INLINE __m512i look_up(const uint8_t (&table)[128], __m512i codes) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
  }
};
template <Format kFormat>
inline constexpr ByteTables<kFormat> kBytes;

struct Bytes {
  __m512i low, high;
};

// The bytes of 64 codes in bf16; for int8 it is the value plus 128, whose upper half needs no
// table.
template <Format kFormat>
LLMC_INLINE Bytes bytes_of(__m512i codes) {
  const auto& t = kBytes<kFormat>;
  const __m512i high = t.look_up(t.high, codes);
  if (kFormat == Format::fp8)
    return {t.look_up(t.low, codes),
            _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), 0xf8)};  // the sign
  const __mmask64 negative = _mm512_movepi8_mask(codes);
  return {_mm512_mask_blend_epi8(negative, codes, t.look_up(t.low, codes)),
          _mm512_mask_blend_epi8(negative, _mm512_set1_epi8(0x43), high)};
}
#endif

// A word of x is two bf16, and so is each lane of a step's result. All values are exact in bf16.
template <Format kFormat>
struct PairReader {
  static constexpr int kInputs = is_4_bit(kFormat) ? 8 : 4, kSteps = kInputs / 2, kSums = 4;
  static constexpr int64_t kMaxStretch = 128;
  using X = uint32_t;
  using Line = v16u;
  using V = __m512i;
  struct Sum {
    v16f value = {};
    void operator+=(const Sum& other) { value += other.value; }
  };
  // half the inputs are in the low 16 bits of a word: input j is paired with input j + kSteps
  static int64_t place(int64_t k) {
    const int64_t first = k / kInputs * kInputs, j = k % kInputs;
    return first + j % kSteps * 2 + j / kSteps;
  }
  static Packed pack(const float* x, int64_t count, X* to) {
    for (int64_t k = 0; k < count; ++k) reinterpret_cast<bf16*>(to)[place(k)] = to_bf16(x[k]);
    return {1.0f, sum_of(x, count)};
  }
  __m512i table;  // of codes, twice
  LLMC_METHOD explicit PairReader(const LowBitArgs& a) {
    table = kUnsigned.load();
    if (kFormat == Format::table) {
      const __m256i bits = _mm512_cvtepi32_epi16((__m512i)((v16u)floats_of(a.book) >> 16));
      table = _mm512_broadcast_i64x4(bits);
    }
  }
  LLMC_METHOD V get(v16u words, int step) const {
    const __m512i line = (__m512i)words;
    if (is_4_bit(kFormat))
      return _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4 * step), table);
#ifdef __AVX512VBMI__
    constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaaull;
    const Bytes b = bytes_of<kFormat>(line);
    return step ? _mm512_mask_blend_epi8(kOdd, _mm512_srli_epi16(b.low, 8), b.high)
                : _mm512_mask_blend_epi8(kOdd, b.low, _mm512_slli_epi16(b.high, 8));
#else
    if (kFormat == Format::int8) {
      const v16u even = words << (step ? 16 : 24), odd = words << (step ? 0 : 8);
      const v16f low = convert<v16f>((v16i)even >> 24);
      const v16f high = convert<v16f>((v16i)odd >> 24);
      return (V)((v16u)low >> 16 | (v16u)high);
    }
    const __m512i sign = step ? line : _mm512_slli_epi16(line, 8);
    const __m512i low = step ? _mm512_srli_epi16(line, 8) : line;
    const __m512i shifted = step ? _mm512_srli_epi16(line, 4) : _mm512_slli_epi16(line, 4);
    const __m512i size = _mm512_and_si512(shifted, _mm512_set1_epi16(0x7f0));
    const __m512i normal = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
    const __mmask32 tiny = _mm512_testn_epi16_mask(low, _mm512_set1_epi16(0x78));
    const __m512i finite = _mm512_mask_permutexvar_epi16(normal, tiny, low, kTiny.load());
    const __m512i nan = _mm512_set1_epi16(0x7f0);
    const __mmask32 bad = _mm512_cmpeq_epi16_mask(size, nan);
    const __m512i value = _mm512_mask_mov_epi16(finite, bad, _mm512_set1_epi16(0x7fc0));
    return _mm512_ternarylogic_epi32(value, sign, _mm512_set1_epi16(-0x8000), 0xf8);
#endif
  }
  LLMC_INLINE void add(Sum& sum, V w, const X& x) {
    const __m512bh both = (__m512bh)_mm512_set1_epi32(int(x));
    sum.value = (v16f)_mm512_dpbf16_ps((__m512)sum.value, (__m512bh)w, both);
  }
  LLMC_INLINE v16f total(const Sum& sum) { return sum.value; }
#ifdef __AVX512VBMI__
  static constexpr float offset() { return kFormat == Format::int8 ? 128 : 0; }
#else
  static constexpr float offset() { return 0; }
#endif
};
#endif

}  // namespace llmc
