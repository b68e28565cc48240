// quantized_linear for several rows with integer products, on x86, if x can be rounded: to 16 bits
// (an instruction multiplies two inputs per lane) or to 8 bits (four inputs). Two registers of
// channels are multiplied together, so that each word of x is read for both. A piece of them is
// multiplied by the first group of rows as it is unpacked; the unpacked values stay in the L1 cache
// for the other groups.
#include "arena.h"
#include "low_bit.h"
#include "low_bit_integers.h"
#include "low_bit_packed.h"
#include "parallel.h"

namespace llmc {

#ifdef __AVX2__
namespace {

constexpr int64_t kPiece = 256;     // inputs: 8 KB when unpacked, 16 KB with AVX-512
constexpr int64_t kPassRows = 132;  // of x: so many that unpacking hardly counts
constexpr int64_t kStretch = 32;    // inputs of x that are rounded together, or 16
constexpr int kParts = 2;           // registers of channels
constexpr int64_t kBlocks = kParts * sizeof(Register) / kLineBytes;  // which hold so many blocks
constexpr int64_t kWidth = kBlocks * kChannels;
// Rows that are multiplied together, padded to the step: all if there are few, else so many that
// their sums are never spilled from the registers.
#ifdef LLMC_AVX512
constexpr int64_t kMaxRows = 12, kManyRows = 12, kRowStep = 4;
#else
constexpr int64_t kMaxRows = 6, kManyRows = 4, kRowStep = 1;
#endif

// How a register of a weight, which is a step, is multiplied by a word of x. Sums are per stretch.

struct WordProduct {  // pairs of 16-bit values
  static constexpr int kInputs = 2;
  LLMC_INLINE Register add(Register sum, Register w, Register x) { return add_pairs(sum, w, x); }
  LLMC_INLINE vf total(Register sum) { return convert<vf>((vi)sum); }
};

struct NibbleProduct {  // unsigned bytes of at most 15 by signed ones
  static constexpr int kInputs = 4;
#ifdef LLMC_BYTE_PRODUCTS
  LLMC_INLINE Register add(Register sum, Register w, Register x) { return add_bytes(sum, w, x); }
  LLMC_INLINE vf total(Register sum) { return convert<vf>((vi)sum); }
#else
  LLMC_INLINE Register add(Register sum, Register w, Register x) {
    return add_words(sum, multiply_bytes(w, x));  // at most 32 * 15 * 127 / 2 in 16 bits
  }
  LLMC_INLINE vf total(Register sum) {
    return convert<vf>((vi)multiply_words(sum, every_word(1)));
  }
#endif
};

struct ByteProduct {  // unsigned bytes of at most 63 by signed ones
  static constexpr int kInputs = 4;
#ifdef LLMC_BYTE_PRODUCTS
  LLMC_INLINE Register add(Register sum, Register w, Register x) { return add_bytes(sum, w, x); }
#else
  static constexpr int kTogether = 2;  // steps; their products fit in 16 bits: 4 * 63 * 127
  LLMC_INLINE Register add(Register sum, const Register (&w)[2], const Register (&x)[2]) {
    const Register both = add_words(multiply_bytes(w[0], x[0]), multiply_bytes(w[1], x[1]));
    return (Register)((vi)sum + (vi)multiply_words(both, every_word(1)));
  }
#endif
  LLMC_INLINE vf total(Register sum) { return convert<vf>((vi)sum); }
};

// How a line of a weight is unpacked to kSteps registers, and x is packed to match.

template <Format kFormat>
struct Words : SignedWords<kFormat> {
  using Product = WordProduct;
  static constexpr int kInputs = is_4_bit(kFormat) ? 8 : 4, kSteps = kInputs / 2, kLines = 1;
  static constexpr bool kFoldsZero = false;
  using SignedWords<kFormat>::SignedWords;
  LLMC_INLINE Register load(const uint8_t* at) { return load_as<Register>(at); }
  LLMC_METHOD Register get(Register line, int step, Register zero) const {
    if constexpr (kFormat == Format::int4)
      return subtract_words((Register)((vu)line >> (4 * step) & 0x000f000fu), zero);
    return SignedWords<kFormat>::get(line, step);
  }
  static Packed pack(const float* x, int64_t count, int64_t width, int32_t* to) {
    const FixedPoint<int16_t, 1> fixed(x, count);
    const __m128i order = kSteps == 4  // bytes of pairs
        ? _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
        : _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    for (int64_t i = 0; i < count; i += 8) {
      const auto pairs =
          (__v4si)_mm_shuffle_epi8(load_as<__m128i>(fixed.digit[0].data() + i), order);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j, to += width) *to = pairs[j];
    }
    return fixed.packed;
  }
};

template <Format kFormat>
  requires(is_packed(kFormat))
struct Words<kFormat> : Words<Format::int8> {
  using Words<Format::int8>::Words;
  using Lines = Unit<kFormat, vu>;
  static constexpr int kInputs = Lines::kInputs, kSteps = kInputs / 2, kLines = Lines::kLines;
  LLMC_INLINE Lines load(const uint8_t* at) { return UnsignedBytes<kFormat>::load(at); }
  LLMC_INLINE Register get(const Lines& unit, int step, Register zero) {
    const vu bytes = unit.get(step / 2);
    return subtract_words((Register)((step % 2 ? bytes >> 8 : bytes) & 0x00ff00ffu), zero);
  }
};

struct Nibbles {  // low nibbles of a line's bytes, for even inputs, then high ones
  explicit Nibbles(const LowBitArgs&) {}
  using Product = NibbleProduct;
  static constexpr int kInputs = 8, kSteps = 2, kLines = 1;
  static constexpr bool kFoldsZero = true;  // the zero point is folded into the minimums
  LLMC_INLINE Register load(const uint8_t* at) { return load_as<Register>(at); }
  LLMC_INLINE Register get(Register line, int step, Register) {
    return (Register)((vu)line >> (4 * step) & 0x0f0f0f0fu);
  }
  static Packed pack(const float* x, int64_t count, int64_t width, int32_t* to) {
    DigitWords<1> words[kStretch / 4];
    const Packed packed = pack_nibbles(x, count, words);
    for (int64_t i = 0; i < count / 4; ++i) to[i * width] = words[i].digit[0];
    return packed;
  }
};

template <Format kFormat>
struct PackedBytes {  // int5 and int6 as unsigned bytes
  explicit PackedBytes(const LowBitArgs&) {}
  using Product = ByteProduct;
  using Own = UnsignedBytes<kFormat>;
  static constexpr int kInputs = Own::kInputs, kSteps = kInputs / 4, kLines = Own::kLines;
  static constexpr bool kFoldsZero = true;
  LLMC_INLINE auto load(const uint8_t* at) { return Own::load(at); }
  LLMC_INLINE Register get(const typename Own::Lines& unit, int step, Register) {
    return Own::get(unit, step);
  }
  static Packed pack(const float* x, int64_t count, int64_t width, int32_t* to) {
    DigitWords<1> words[kStretch / 4];
    const Packed packed = Own::pack(x, count, words);
    for (int64_t i = 0; i < count / 4; ++i) to[i * width] = words[i].digit[0];
    return packed;
  }
};

// Scales of the stretches of a piece, and minimums, which are multiplied by sums of x.
struct Stretches {
  alignas(64) float scale[kPiece / kMinGroup][kWidth], minimum[kPiece / kMinGroup][kWidth];
  alignas(64) uint32_t zero[kPiece / kMinGroup][kWidth];  // twice, in 16 bits

  // Of one block of the piece's, whose channels begin at `at`.
  void read(const LowBitArgs& a, int64_t block, int64_t at, int64_t k, int64_t stretch,
            int64_t count, bool folds_zero) {
    int64_t group = k / a.group, end = (group + 1) * a.group - k;
    for (int64_t s = 0; s < count; ++s) {
      if (s * stretch == end) ++group, end += a.group;
      const v16f factor = scale_of(a, block, group);
      v16f least = minimum_of(a, block, group);
      store(scale[s] + at, factor);
      if (middle_of(a.format)) {
        const v16f nought = zero_of(a, block, group);
        if (folds_zero)
          least -= nought * factor;
        else
          store_as(zero[s] + at, (v16u)convert<v16i>(nought) * 0x10001u);
      }
      store(minimum[s] + at, least);
    }
  }
};

struct PackedRows {  // M rows of x: words [word][M], and scales and sums [stretch][M]
  int32_t* words;
  float *scale, *sum;
};

template <int M>
void add_minimums(const Stretches& weight, const float* x, int64_t count, float* sums) {
  vf acc[M][kParts];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) acc[m][p] = load_as<vf>(sums + m * kWidth + p * kNative);
  for (int64_t s = 0; s < count; ++s, x += M)
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p)
        acc[m][p] += load_as<vf>(weight.minimum[s] + p * kNative) * x[m];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) store_as(sums + m * kWidth + p * kNative, acc[m][p]);
}

template <class Product>
constexpr int steps_together() {
  if constexpr (requires { Product::kTogether; }) return Product::kTogether;
  return 1;
}

struct Unpacked {  // reads steps that were unpacked before
  static constexpr int kSteps = 4, kLines = 0;  // a stretch has a multiple of 4 steps
  explicit Unpacked(const LowBitArgs&) {}
};

// A piece [step][part] by M rows. Readers of the parts' lines also write their steps to `piece`.
// sums: [M][kWidth].
template <class Product, class Reader, int M>
void multiply(const LowBitArgs& a, const uint8_t* const (&lines)[kParts], Register* piece,
              const Stretches& weight, const PackedRows& rows, int64_t stretch, int64_t count,
              bool has_minimum, float* sums) {
  const Reader reader(a);
  constexpr int T = steps_together<Product>();
  const int32_t* x = rows.words;
  int64_t at = 0;  // in the lines
  for (int64_t s = 0; s < count; ++s) {
    Register acc[M][kParts] = {};
    for (int64_t k = 0; k < stretch; k += Reader::kSteps * Product::kInputs) {
#pragma GCC unroll 10
      for (int i = 0; i < kBlocks * Reader::kLines; ++i)
        __builtin_prefetch(lines[i % kBlocks] + at + i / kBlocks * kLineBytes + 2048, 0, 3);
#pragma GCC unroll 16
      for (int step = 0; step < Reader::kSteps; step += T, piece += T * kParts, x += T * M) {
        Register w[kParts][T];
#pragma GCC unroll 4
        for (int i = 0; i < T * kParts; ++i) {
          const int t = i / kParts, p = i % kParts;
          if constexpr (Reader::kLines > 0)
            piece[i] = reader.get(Reader::load(lines[p] + at), step + t,
                                  load_as<Register>(weight.zero[s] + p * kNative));
          w[p][t] = piece[i];
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          Register both[T];
#pragma GCC unroll 2
          for (int t = 0; t < T; ++t) both[t] = every_pair(x[t * M + m]);
#pragma GCC unroll 2
          for (int p = 0; p < kParts; ++p) {
            if constexpr (T == 1)
              acc[m][p] = Product::add(acc[m][p], w[p][0], both[0]);
            else
              acc[m][p] = Product::add(acc[m][p], w[p], both);
            asm volatile("" : "+v"(acc[m][p]));  // else GCC interleaves steps and spills registers
          }
        }
      }
      at += Reader::kLines * kLineBytes;
    }
    const float* const scale = rows.scale + s * M;
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p) {
        const vf both = load_as<vf>(weight.scale[s] + p * kNative) * scale[m];
        float* const to = sums + m * kWidth + p * kNative;
        store_as(to, load_as<vf>(to) + Product::total(acc[m][p]) * both);
      }
    asm volatile("" ::: "memory");  // else GCC keeps the sums on the stack during the loop
  }
  if (has_minimum) add_minimums<M>(weight, rows.sum, count, sums);
}

using Multiply = decltype(&multiply<WordProduct, Unpacked, 4>);

template <class Product, class Reader>
Multiply multiply_rows(int64_t rows) {
#ifdef LLMC_AVX512
  constexpr Multiply kAll[] = {multiply<Product, Reader, 4>, multiply<Product, Reader, 8>,
                               multiply<Product, Reader, 12>};
#else
  constexpr Multiply kAll[] = {multiply<Product, Reader, 1>, multiply<Product, Reader, 2>,
                               multiply<Product, Reader, 3>, multiply<Product, Reader, 4>,
                               multiply<Product, Reader, 5>, multiply<Product, Reader, 6>};
#endif
  return kAll[rows / kRowStep - 1];
}

// Rows [row, row + rows) of x, in separately packed groups of similar size.
struct Pass {
  int64_t row, rows, stretch, row_words, stretches;
  PackedRows all;

  int64_t groups() const { return rows <= kMaxRows ? 1 : (rows + kManyRows - 1) / kManyRows; }
  int64_t first(int64_t group) const {
    const int64_t steps = (rows + kRowStep - 1) / kRowStep;
    return steps * group / groups() * kRowStep;
  }
  int64_t width(int64_t group) const { return first(group + 1) - first(group); }
  PackedRows packed(int64_t group, int64_t s) const {  // from stretch s on
    const int64_t done = first(group), at = done * stretches + s * width(group);
    return {all.words + done * row_words + s * (row_words / stretches) * width(group),
            all.scale + at, all.sum + at};
  }
};

template <class Reader>
void pack_group(const LowBitArgs& a, const Pass& x, int64_t group) {
  const int64_t width = x.width(group);
  alignas(64) float values[kStretch];
  for (int64_t m = 0; m < width; ++m) {
    const int64_t row = x.first(group) + m;
    for (int64_t s = 0; s < x.stretches; ++s) {
      const PackedRows to = x.packed(group, s);
      with_type(a.dtype, [&](auto t) __attribute__((always_inline)) {
        const auto* from = static_cast<const decltype(t)*>(a.x) + (x.row + row) * a.x_stride;
        for (int64_t i = 0; i < x.stretch; i += kLanes)
          store(values + i, row < x.rows ? load(from + s * x.stretch + i) : v16f{});
      });
      const Packed stretch = Reader::pack(values, x.stretch, width, to.words + m);
      to.scale[m] = stretch.scale;
      to.sum[m] = stretch.sum;
    }
  }
}

// kBlocks blocks from `block` on, if there are as many.
template <class Reader>
void block_rows(const LowBitArgs& a, const Pass& x, int64_t block) {
  using Product = typename Reader::Product;
  Register piece[kPiece / Product::kInputs * kParts];
  alignas(64) float sums[(kPassRows + kMaxRows) * kWidth];
  Stretches weight;
  const int64_t groups = x.groups(), last = a.channels / kChannels - 1;
  const bool has_minimum = a.has_minimum() || (Reader::kFoldsZero && middle_of(a.format));
  std::memset(sums, 0, x.first(groups) * kWidth * sizeof(float));
  for (int64_t k = 0; k < a.depth; k += kPiece) {
    const int64_t inputs = std::min(kPiece, a.depth - k), count = inputs / x.stretch;
    const uint8_t* lines[kParts];
    for (int p = 0; p < kParts; ++p) {
      const int64_t own = std::min(block + p * kBlocks / kParts, last);
      const int64_t line = own * a.lines() + lines_of(a.format, k);
      lines[p] = a.weight + line * kLineBytes + p * sizeof(Register) % kLineBytes;
    }
    for (int64_t b = 0; b < kBlocks; ++b)
      weight.read(a, std::min(block + b, last), b * kChannels, k, x.stretch, count,
                  Reader::kFoldsZero);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t width = x.width(g);
      const auto run = g ? multiply_rows<Product, Unpacked>(width)
                         : multiply_rows<Product, Reader>(width);
      run(a, lines, piece, weight, x.packed(g, k / x.stretch), x.stretch, count, has_minimum,
          sums + x.first(g) * kWidth);
    }
  }
  for (int64_t m = 0; m < x.rows; ++m)
    for (int64_t b = 0; b < kBlocks && block + b <= last; ++b)
      write_block(a, x.row + m, block + b, load(sums + m * kWidth + b * kChannels));
}

template <class Reader>
void by_passes(const LowBitArgs& a) {
  Pass x{};
  x.stretch = stretch_of(a, kStretch);
  x.stretches = a.depth / x.stretch;
  x.row_words = a.depth / Reader::kInputs * Reader::kSteps;
  const int64_t passes = (a.rows + kPassRows - 1) / kPassRows;
  const int64_t blocks = (a.channels / kChannels + kBlocks - 1) / kBlocks;
  const int64_t room = (a.rows + passes - 1) / passes + kRowStep;
  static thread_local Arena arena;
  arena.reset(4 * room * (x.row_words + 2 * x.stretches) + 4096);
  x.all = {arena.take<int32_t>(room * x.row_words), arena.take<float>(room * x.stretches),
           arena.take<float>(room * x.stretches)};
  const int threads = worth_threads(blocks * kBlocks * a.depth * (8 + a.rows), blocks, a.threads);
  for (int64_t p = 0; p < passes; ++p) {
    x.row = a.rows * p / passes;
    x.rows = a.rows * (p + 1) / passes - x.row;
    parallel_items(x.groups(), threads, [&](int64_t g) { pack_group<Reader>(a, x, g); });
    parallel_pieces(blocks, threads, [&](int64_t i) { block_rows<Reader>(a, x, i * kBlocks); });
  }
}

}  // namespace

bool rounds_x() {
  return true;
}

void quantized_integer_rows(const LowBitArgs& given) {
  LowBitArgs a = given;
  a.format = a.stored;
  if (a.format == Format::int6)
    return a.x_bits > 8 ? by_passes<Words<Format::int6>>(a) : by_passes<PackedBytes<Format::int6>>(a);
  if (a.format == Format::int5)
    return a.x_bits > 8 ? by_passes<Words<Format::int5>>(a) : by_passes<PackedBytes<Format::int5>>(a);
  if (a.x_bits == 8) return by_passes<Nibbles>(a);
  with_format(a.format, [&](auto format) {
    if constexpr (format() != Format::fp8) by_passes<Words<format()>>(a);
  });
}

#else

bool rounds_x() {
  return false;
}
void quantized_integer_rows(const LowBitArgs&) {}  // never called

#endif

}  // namespace llmc
