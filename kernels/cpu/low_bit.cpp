// quantized_linear for few rows: a block of channels is read once, as one stream, and multiplied by
// several rows of x. One row is bound by reading the weight.
#include "low_bit.h"
#include "low_bit_bytes.h"
#include "low_bit_integers.h"
#include "low_bit_packed.h"
#include "parallel.h"

#include <vector>

namespace llmc {
namespace {

// Rows of x rounded to 8 bits, and to 16 bits in short groups and others: for more rows,
// quantized_integer_rows is faster.
constexpr int64_t kMaxByteRows = 2;
#if defined(LLMC_BYTE_PRODUCTS) && defined(LLMC_AVX512)
constexpr int64_t kMaxShortRows = 7, kMaxWordRows = 12;
#else
constexpr int64_t kMaxShortRows = 2, kMaxWordRows = 2;
#endif
#ifdef LLMC_AVX512
constexpr int64_t kMaxBlockRows = 16;  // for more, tiles are faster or, in 16 bits, more exact
constexpr int kBlocks = 2;  // multiplied together by four rows or more: x is read half as often
#else
constexpr int64_t kMaxBlockRows = 8;
constexpr int kBlocks = 1;  // more have too many sums for the registers
#endif
#ifdef LLMC_FOUR_INPUTS  // eight at a time cost less than tiles, and so do four with AVX2
constexpr int64_t kMaxFp8Rows = kNative == 16 ? 40 : 24;
#else
constexpr int64_t kMaxFp8Rows = kMaxBlockRows;
#endif
constexpr int64_t kFewPairRows = 12;  // more rows use pairs of bf16, if there are no tiles
constexpr int64_t kFewFloatRows = 4;  // more rows are rounded, if others can't be pairs of bf16
constexpr int64_t kRounded = 32;  // inputs that are rounded together
constexpr int64_t kAhead = 2048;  // bytes of the weight to prefetch ahead

// x in the reader's words. Rows that are multiplied together are interleaved, word by word, so that
// they are read as one stream.
template <class Reader, int64_t kMost>
struct Input {
  using X = typename Reader::X;
  int64_t stretch, stretches, row_words;
  std::vector<X> words;
  std::vector<Packed> packed;

  // Whether there are so many rows, and their sums fit in half of the registers.
  static constexpr bool kTakesEight =
      kMost > 4 && 8 * kBlocks * sizeof(typename Reader::Sum) <= 1024;

  // How many rows to multiply together if `left` are left. It may be more than there are: unpacking
  // the weight once more takes longer than multiplying it by a row of zeros.
  static int64_t width(int64_t left) {
    if (kTakesEight && left > 5) return 8;
    if (kMost > 2 && left > 2) return 4;
    return kMost > 1 && left > 1 ? 2 : 1;
  }

  Input(const LowBitArgs& a, int64_t most)
      : stretch(stretch_of(a, most)), stretches(a.depth / stretch),
        row_words(a.depth / Reader::kInputs * Reader::kSteps) {
    const int64_t rows = a.rows > 2 ? a.rows + 2 : a.rows;  // with those of zeros
    words.resize(rows * row_words);
    packed.resize(rows * stretches);
    std::vector<float> x(a.depth);
    std::vector<X> row(a.rows > 1 ? row_words : 0);
    for (int64_t first = 0, together = 0; first < a.rows; first += together) {
      together = width(a.rows - first);
      for (int64_t m = 0; m < std::min(together, a.rows - first); ++m) {
        X* const to = words.data() + first * row_words + m;
        X* const own = together > 1 ? row.data() : to;
        widen_row(a.dtype, a.x, (first + m) * a.x_stride, a.depth, x.data());
        for (int64_t s = 0; s < stretches; ++s) {
          Packed& part = packed[first * stretches + s * together + m];
          part = Reader::pack(x.data() + s * stretch, stretch, own + s * row_words / stretches);
          part.scale *= a.book.unit, part.sum *= a.book.unit;  // here rather than for every group
        }
        if (together > 1)
          for (int64_t k = 0; k < row_words; ++k) to[k * together] = row[k];
      }
    }
  }
};

// Sets lanes [part * n, (part + 1) * n) of `all`, where `lanes` has n.
template <class All, class Lanes>
LLMC_INLINE void set_part(All& all, int part, const Lanes& lanes) {
  if constexpr (sizeof(Lanes) == sizeof(All))
    all = lanes;
  else
    (part ? all.hi : all.lo) = lanes;
}

template <class Reader>
constexpr int lines_together() {  // of a weight, that hold kInputs inputs
  if constexpr (requires { Reader::kLines; }) return Reader::kLines;
  return 1;
}

template <class Reader>
LLMC_INLINE auto load_lines(const uint8_t* at) {
  if constexpr (requires { Reader::load(at); })
    return Reader::load(at);
  else
    return load_as<typename Reader::Line>(at);
}

// Multiplies kParts parts of a stretch's lines, from `first` on, in kAdjacent adjacent blocks by M
// rows of x. `apart`: bytes between blocks. `left`: bytes from `line` to the end of its block.
template <class Reader, int M, int kParts, int kAdjacent>
LLMC_INLINE void multiply_parts(const Reader& reader, const uint8_t* line, int64_t apart,
                                int64_t left, const typename Reader::X* words, int64_t lines,
                                int first, v16f (&all)[M][kAdjacent]) {
  // few rows keep several sums each, if a product depends on the previous one
  constexpr int kSums = Reader::kSums == 1 || M > 2 ? 1 : Reader::kSums / M;
  constexpr int kLines = lines_together<Reader>();
  // every stretch has a multiple of these inputs
  constexpr int kUnrolled = std::max<int>(1, kMinGroup / Reader::kInputs);
  using Line = typename Reader::Line;
  typename Reader::Sum sum[M][kParts * kAdjacent][kSums];
  for (int64_t l = 0; l < lines; l += kUnrolled * kLines) {
    // after the end of these blocks, the next ones are read
    const int64_t ahead = kAhead + (left > kAhead ? 0 : (kAdjacent - 1) * apart);
    left -= kUnrolled * kLines * kLineBytes;
#pragma GCC unroll 4
    for (int i = 0; i < kUnrolled; ++i) {
      const uint8_t* const from = line + i * kLines * kLineBytes;
#pragma GCC unroll 10
      for (int b = 0; b < kAdjacent * kLines; ++b)
        if (first == 0)
          __builtin_prefetch(from + b / kLines * apart + b % kLines * kLineBytes + ahead, 0, 3);
#pragma GCC unroll 8
      for (int step = 0; step < Reader::kSteps; ++step) {
        const int word = i * Reader::kSteps + step;
        const auto values = [&](int p) LLMC_LAMBDA {
          const int64_t at = p / kParts * apart + (first + p % kParts) * sizeof(Line);
          return reader.get(load_lines<Reader>(from + at), step);
        };
        const auto add = [&](int m, int p, const auto& own) LLMC_LAMBDA {
          Reader::add(sum[m][p][word % kSums], own, words[word * M + m]);
        };
        if constexpr (kParts * kAdjacent == 2 && requires { Reader::kWideWords; }) {
          const auto one = values(0), other = values(1);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) add(m, 0, one), add(m, 1, other);
        } else {
#pragma GCC unroll 2
          for (int p = 0; p < kParts * kAdjacent; ++p) {
            const auto own = values(p);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) add(m, p, own);
          }
        }
        if constexpr (requires { Reader::kWidenedSteps; })
          if ((word + 1) % Reader::kWidenedSteps == 0)
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
              for (int p = 0; p < kParts * kAdjacent; ++p) Reader::widen(sum[m][p][0]);
      }
    }
    line += kUnrolled * kLines * kLineBytes;
    words += kUnrolled * Reader::kSteps * M;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int p = 0; p < kParts * kAdjacent; ++p) {
      if constexpr (kSums > 1)
        for (int i = 1; i < kSums; ++i) sum[m][p][0] += sum[m][p][i];
      set_part(all[m][p / kParts], first + p % kParts, Reader::total(sum[m][p][0]));
    }
}

// Handles all parts of a line together if their sums fit in registers, so that x is read once.
template <class Reader, int M, int kAdjacent>
LLMC_INLINE void multiply_lines(const Reader& reader, const uint8_t* line, int64_t apart,
                                int64_t left, const typename Reader::X* words, int64_t lines,
                                v16f (&all)[M][kAdjacent]) {
  constexpr int kParts = kLineBytes / sizeof(typename Reader::Line);
  constexpr int kTogether = M == 1 ? kParts : 1;
#pragma GCC unroll 2
  for (int first = 0; first < kParts; first += kTogether)
    multiply_parts<Reader, M, kTogether, kAdjacent>(reader, line, apart, left, words, lines, first,
                                                    all);
}

// Up to kAdjacent blocks, before `end`, by M rows. If there are fewer, the first one is computed
// again in place of the others.
template <class Reader, int64_t kMost, int M, int kAdjacent>
void multiply(const LowBitArgs& a, const Input<Reader, kMost>& x, int64_t row, int64_t block,
              int64_t end) {
  const int64_t lines = lines_of(a.format, x.stretch), words_of = x.row_words / x.stretches;
  const int64_t of_group = a.group / x.stretch, block_bytes = a.lines() * kLineBytes;
  const int64_t next = block + kAdjacent <= end;
  const bool unpacks = a.format == Format::int8 && is_packed(a.stored);
  alignas(64) uint8_t room[kAdjacent][Reader::kMaxStretch * kChannels];
  const int64_t apart = unpacks ? sizeof room[0] : next * block_bytes;
  int64_t left = block_bytes;
  const uint8_t* line = a.weight + block * block_bytes;
  const typename Reader::X* words = x.words.data() + row * x.row_words;
  const Packed* part = x.packed.data() + row * x.stretches;
  v16f total[M][kAdjacent] = {};
  GroupScales scales[kAdjacent];
  const Reader reader(a);
  const float added = reader.offset();
  for (int64_t group = 0; group < a.groups; ++group) {
    v16f scale[kAdjacent], offset[kAdjacent];  // offset: of scaled values
#pragma GCC unroll 2
    for (int b = 0; b < kAdjacent; ++b) {
      scales[b].read(a, block + b * next, group);
      scale[b] = scales[b].scale;
      offset[b] = scales[b].minimum;
      if (middle_of(a.format))
        offset[b] -= scale[b] * (zero_of(a, block + b * next, group) + added);
      else if (added != 0)
        offset[b] -= scale[b] * added;
    }
    for (int64_t i = 0; i < of_group; ++i, part += M) {
      v16f all[M][kAdjacent];
      if (unpacks) {
        const int64_t k = group * a.group + i * x.stretch;
        for (int b = 0; b < kAdjacent; ++b) int8_lines(a, block + b * next, k, x.stretch, room[b]);
        line = room[0];
      }
      multiply_lines<Reader, M, kAdjacent>(reader, line, apart, left, words, lines, all);
      line += lines * kLineBytes;
      left -= lines * kLineBytes;
      words += words_of * M;
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int b = 0; b < kAdjacent; ++b)
          total[m][b] += scale[b] * (all[m][b] * part[m].scale) + offset[b] * part[m].sum;
    }
  }
  for (int m = 0; m < M && row + m < a.rows; ++m)
    for (int b = 0; b < kAdjacent; ++b) write_block(a, row + m, block + b * next, total[m][b]);
}

// kMost: the maximum number of rows for this reader.
template <class Reader, int64_t kMost = kMaxFewRows>
void by_blocks(const LowBitArgs& a) {
  using In = Input<Reader, kMost>;
  const In x(a, a.x_bits < kExactBits ? kRounded : Reader::kMaxStretch);
  const int64_t step = a.rows > 2 ? kBlocks : 1;
  parallel_rows(a.channels / kChannels, a.depth * kChannels * (a.rows + 3) / 8, a.threads,
                [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block += step)
      for (int64_t m = 0, together = 0; m < a.rows; m += together) {
        together = In::width(a.rows - m);
        if constexpr (In::kTakesEight)
          if (together == 8) multiply<Reader, kMost, 8, kBlocks>(a, x, m, block, end);
        if constexpr (kMost > 2)
          if (together == 4) multiply<Reader, kMost, 4, kBlocks>(a, x, m, block, end);
        if (together > 2) continue;
        for (int64_t one = block; one < std::min(block + step, end); ++one) {
          if constexpr (kMost > 1)
            if (together == 2) multiply<Reader, kMost, 2, 1>(a, x, m, one, end);
          if (together == 1) multiply<Reader, kMost, 1, 1>(a, x, m, one, end);
        }
      }
  });
}

// Branches that can't be reached are not compiled: each reader is a dozen unrolled loops.
template <Format kFormat>
void run(const LowBitArgs& a) {
  // whether two products of bytes fit in 16 bits, or those of 16-bit values are used
  constexpr bool kIsShort = kFormat == Format::int4;
  constexpr bool kIsWords = !kIsShort && kFormat != Format::fp8;
#ifdef LLMC_BYTE_PRODUCTS
  constexpr bool kMultipliesBytes = kFormat != Format::fp8;
#else
  constexpr bool kMultipliesBytes = false;
#endif
#ifdef __AVX2__
  // integers cost less per value of the weight and more per row of x
  [[maybe_unused]] const bool is_narrow = a.dtype != Dtype::f32;
  if constexpr (kFormat == Format::int4)
    if (a.x_bits == 8) return by_blocks<DigitReader<kFormat, 1>, kMaxByteRows>(a);
#ifdef LLMC_BYTE_PRODUCTS
  if constexpr (kMultipliesBytes)
    if (a.x_bits == 16 || is_narrow) return by_blocks<ByteReader<kFormat, 2>>(a);
#endif
  const bool is_short = kIsShort || (kFormat == Format::table && a.book.most <= kShortTable);
  if constexpr (!kMultipliesBytes && is_4_bit(kFormat))
    if (is_short && (a.x_bits == 16 || (is_narrow && a.rows <= 2)))
      return by_blocks<ShortReader<kFormat, 2>, 2>(a);
  if constexpr (!kMultipliesBytes && kIsWords)
    if (a.x_bits == 16 || (is_narrow && a.rows <= 2))
      return by_blocks<WordReader<kFormat, 1>, 2>(a);
  if constexpr (kIsShort)
    if (a.rows == 1) return by_blocks<ShortReader<kFormat, 3>, 1>(a);
  if constexpr (kIsWords)
    if (a.rows == 1) return by_blocks<WordReader<kFormat, 2>, 1>(a);
#endif
#ifdef LLMC_AVX512_BF16
  if constexpr (!kMultipliesBytes)
    if (a.dtype == Dtype::bf16) return by_blocks<PairReader<kFormat>>(a);
#endif
#ifdef LLMC_FOUR_INPUTS
  constexpr bool kReadsFours = reads_fours(kFormat);
  if constexpr (kReadsFours) return by_blocks<FourReader<kFormat>>(a);
#else
  constexpr bool kReadsFours = false;
#endif
  if constexpr (!kReadsFours) by_blocks<FloatReader<kFormat>>(a);
}

#ifdef __AVX2__
// int5 and int6 as they are stored, with x in 16 or 8 bits.
#ifdef LLMC_BYTE_PRODUCTS
constexpr int64_t kMaxPackedRows = kMaxBlockRows;
#else
constexpr int64_t kMaxPackedRows = 2;
#endif
template <Format kFormat>
void run_packed(LowBitArgs a) {
  a.format = kFormat;
  if (a.x_bits == 8) return by_blocks<DigitReader<kFormat, 1>, kMaxByteRows>(a);
  by_blocks<DigitReader<kFormat, 2>, kMaxPackedRows>(a);
}
#endif

}  // namespace

void quantized_linear(const LowBitArgs& given) {
  LowBitArgs a = given;
  if (a.dtype == Dtype::bf16 && a.x_bits == kExactBits && has_pair_rows()) {
    const bool takes_pairs = !a.has_minimum() && a.group % kDepthStep == 0;
    if (takes_pairs && a.rows > kFewPairRows) return quantized_pair_rows(a);
    // 16 bits are finer than the rounding of bfloat16, and faster than short groups of pairs
    if (!takes_pairs && a.rows > kFewFloatRows && a.format != Format::fp8) a.x_bits = 16;
  }
  const int64_t most_words = a.group % kRounded ? kMaxShortRows : kMaxWordRows;
  const int64_t most = a.x_bits == 8 ? kMaxByteRows : most_words;
  if (a.x_bits < kExactBits && a.rows > most) return quantized_integer_rows(a);
  const bool is_widened = a.dtype == Dtype::bf16 && widens_weights();
  const int64_t most_blocks = a.format == Format::fp8 ? kMaxFp8Rows : kMaxBlockRows;
  if (a.rows > most_blocks && !is_widened) return quantized_many_rows(a);
#ifdef __AVX2__
  if (is_packed(a.stored) && (a.x_bits <= 16 || a.dtype != Dtype::f32) && a.rows <= kMaxPackedRows)
    return a.stored == Format::int6 ? run_packed<Format::int6>(a) : run_packed<Format::int5>(a);
#endif
  with_format(a.format, [&](auto format) { run<format()>(a); });
}

}  // namespace llmc
