// quantized_linear for few rows: a block of channels is read once, as one stream, and multiplied by
// several rows of x. One row is bound by reading the weight.
#include "low_bit.h"
#include "low_bit_bytes.h"
#include "low_bit_integers.h"
#include "parallel.h"

#include <vector>

namespace llmc {
namespace {

// Rows of x rounded to 8 and 16 bits: for more rows, quantized_integer_rows is faster.
constexpr int64_t kMaxByteRows = 2;
#ifdef LLMC_BYTE_PRODUCTS
constexpr int64_t kMaxWordRows = 7;
#else
constexpr int64_t kMaxWordRows = 2;
#endif
constexpr int64_t kRounded = 32;  // inputs that are rounded together
constexpr int64_t kMaxBlockRows = std::max<int64_t>(8, kMaxFewRows);  // for more, tiles are faster
constexpr int64_t kAhead = 2048;  // bytes of the weight to prefetch ahead

template <class Reader>
struct Input {  // x in the reader's words
  using X = typename Reader::X;
  int64_t stretch, stretches, row_words;
  std::vector<X> words;
  std::vector<Packed> packed;

  Input(const LowBitArgs& a, int64_t most)
      : stretch(stretch_of(a, most)), stretches(a.depth / stretch),
        row_words(a.depth / Reader::kInputs * Reader::kSteps), words(a.rows * row_words),
        packed(a.rows * stretches) {
    std::vector<float> x(a.depth);
    for (int64_t m = 0; m < a.rows; ++m) {
      widen_row(a.dtype, a.x, m * a.x_stride, a.depth, x.data());
      for (int64_t s = 0; s < stretches; ++s) {
        const int64_t at = m * stretches + s;
        packed[at] = Reader::pack(x.data() + s * stretch, stretch,
                                  words.data() + at * (row_words / stretches));
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

// Adds the products of kParts parts of a stretch's lines, from `first` on, to the sums of M rows.
template <class Reader, int M, int kParts>
LLMC_INLINE void multiply_parts(const uint8_t* line, const typename Reader::X* words,
                                int64_t row_words, int64_t lines, int first, v16f (&all)[M]) {
  // few rows keep several sums each, if a product depends on the previous one
  constexpr int kSums = Reader::kSums == 1 || M > 2 ? 1 : Reader::kSums / M;
  constexpr int kUnrolled = kMinGroup / Reader::kInputs;  // lines: every stretch has a multiple
  using Line = typename Reader::Line;
  typename Reader::Sum sum[M][kParts][kSums];
  for (int64_t l = 0; l < lines; l += kUnrolled) {
#pragma GCC unroll 4
    for (int i = 0; i < kUnrolled; ++i) {
      if (first == 0) __builtin_prefetch(line + kAhead + i * kLineBytes, 0, 3);
      const uint8_t* const from = line + i * kLineBytes + first * sizeof(Line);
#pragma GCC unroll 8
      for (int step = 0; step < Reader::kSteps; ++step) {
        const int word = i * Reader::kSteps + step;
#pragma GCC unroll 2
        for (int p = 0; p < kParts; ++p) {
          const auto values = Reader::get(load_as<Line>(from + p * sizeof(Line)), step);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m)
            Reader::add(sum[m][p][word % kSums], values, words[m * row_words + word]);
        }
      }
    }
    line += kUnrolled * kLineBytes;
    words += kUnrolled * Reader::kSteps;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) {
      if constexpr (kSums > 1)
        for (int i = 1; i < kSums; ++i) sum[m][p][0] += sum[m][p][i];
      set_part(all[m], first + p, Reader::total(sum[m][p][0]));
    }
}

// Handles all parts of a line together if their sums fit in registers, so that x is read once.
template <class Reader, int M>
LLMC_INLINE void multiply_lines(const uint8_t* line, const typename Reader::X* words,
                                int64_t row_words, int64_t lines, v16f (&all)[M]) {
  constexpr int kParts = kLineBytes / sizeof(typename Reader::Line);
  constexpr int kTogether = M == 1 ? kParts : 1;
#pragma GCC unroll 2
  for (int first = 0; first < kParts; first += kTogether)
    multiply_parts<Reader, M, kTogether>(line, words, row_words, lines, first, all);
}

// One block by M rows.
template <class Reader, int M>
void multiply(const LowBitArgs& a, const Input<Reader>& x, int64_t row, int64_t block) {
  const int64_t lines = a.lines() / x.stretches, words_of = x.row_words / x.stretches;
  const int64_t of_group = a.group / x.stretch;
  const uint8_t* line = a.weight + block * a.lines() * kLineBytes;
  const typename Reader::X* words = x.words.data() + row * x.row_words;
  const bool has_zero = a.format == Format::int4 ? a.zero || !a.minimum : Reader::kOffset != 0;
  v16f total[M] = {};
  for (int64_t group = 0, s = 0; group < a.groups(); ++group) {
    const v16f scale = scale_of(a, block, group);
    const v16f zero = a.format == Format::int4 ? zero_of(a, block, group) : splat(Reader::kOffset);
    const v16f minimum = minimum_of(a, block, group);
    for (int64_t i = 0; i < of_group; ++i, ++s) {
      v16f all[M];
      multiply_lines<Reader, M>(line, words, x.row_words, lines, all);
      line += lines * kLineBytes;
      words += words_of;
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Packed& part = x.packed[(row + m) * x.stretches + s];
        v16f scaled = all[m] * part.scale;
        if (M > 1 || has_zero) scaled -= zero * part.sum;
        total[m] += scale * scaled + minimum * part.sum;
      }
    }
  }
  for (int m = 0; m < M; ++m) write_block(a, row + m, block, total[m]);
}

// kMost: the maximum number of rows for this reader. `stretch`: the maximum length of a stretch of
// x.
template <class Reader, int64_t kMost = kMaxFewRows>
void by_blocks(const LowBitArgs& a, int64_t stretch = Reader::kMaxStretch) {
  const Input<Reader> x(a, stretch);
  parallel_rows(a.channels / kChannels, a.depth * kChannels * (a.rows + 3) / 8, a.threads,
                [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int64_t m = 0;
      if constexpr (kMost > 4)
        for (; m + 8 <= a.rows; m += 8) multiply<Reader, 8>(a, x, m, block);
      if constexpr (kMost > 2)
        for (; m + 4 <= a.rows; m += 4) multiply<Reader, 4>(a, x, m, block);
      if constexpr (kMost > 1)
        for (; m + 2 <= a.rows; m += 2) multiply<Reader, 2>(a, x, m, block);
      if (m < a.rows) multiply<Reader, 1>(a, x, m, block);
    }
  });
}

// Branches that can't be reached are not compiled: each reader is a dozen unrolled loops.
template <Format kFormat>
void run(const LowBitArgs& a) {
  constexpr bool kIsNibbles = is_4_bit(kFormat), kIsBytes = kFormat == Format::int8;
#ifdef LLMC_BYTE_PRODUCTS
  constexpr bool kMultipliesBytes = kFormat != Format::fp8;
#else
  constexpr bool kMultipliesBytes = false;
#endif
#ifdef __AVX2__
  // integers cost less per value of the weight and more per row of x
  [[maybe_unused]] const bool is_narrow = a.dtype != Dtype::f32;
  if constexpr (kFormat == Format::int4)
    if (a.x_bits == 8) return by_blocks<NibbleReader<kFormat, 1>, kMaxByteRows>(a);
  if constexpr (kFormat == Format::int8 || kFormat == Format::int4)
    if (a.x_bits == 16) {
#ifdef LLMC_BYTE_PRODUCTS
      if (a.rows > 1) return by_blocks<ByteReader<kFormat>>(a, kRounded);
#endif
      if constexpr (kIsNibbles) return by_blocks<NibbleReader<kFormat, 2>, 2>(a);
      if constexpr (kIsBytes) return by_blocks<WordReader<1>, 2>(a);
    }
#ifdef LLMC_BYTE_PRODUCTS
  if constexpr (kMultipliesBytes)
    if (is_narrow) return by_blocks<ByteReader<kFormat>>(a);
#endif
  if constexpr (!kMultipliesBytes && kIsNibbles)
    if (is_narrow && a.rows <= 2) return by_blocks<NibbleReader<kFormat, 2>, 2>(a);
  if constexpr (!kMultipliesBytes && kIsBytes)
    if (is_narrow && a.rows <= 2) return by_blocks<WordReader<1>, 2>(a);
  if constexpr (kIsNibbles)
    if (a.rows == 1) return by_blocks<NibbleReader<kFormat, 3>, 1>(a);
  if constexpr (kIsBytes)
    if (a.rows == 1) return by_blocks<WordReader<2>, 1>(a);
#endif
#ifdef LLMC_AVX512_BF16
  if constexpr (!kMultipliesBytes)
    if (a.dtype == Dtype::bf16) return by_blocks<PairReader<kFormat>>(a);
#endif
#ifdef LLMC_FOUR_INPUTS
  constexpr bool kReadsFours = kFormat == Format::fp8 || kFormat == Format::mxfp4;
  if constexpr (kReadsFours) return by_blocks<FourReader<kFormat>>(a);
#else
  constexpr bool kReadsFours = false;
#endif
  if constexpr (!kReadsFours) by_blocks<FloatReader<kFormat>>(a);
}

}  // namespace

void quantized_linear(const LowBitArgs& a) {
  const int64_t most = a.x_bits == 8 ? kMaxByteRows : kMaxWordRows;
  if (a.x_bits < kExactBits && a.rows > most) return quantized_integer_rows(a);
  const bool is_widened = a.dtype == Dtype::bf16 && widens_weights();
  if (a.rows > kMaxBlockRows && !is_widened) return quantized_many_rows(a);
  switch (a.format) {
    case Format::int8: return run<Format::int8>(a);
    case Format::int4: return run<Format::int4>(a);
    case Format::fp8: return run<Format::fp8>(a);
    case Format::mxfp4: return run<Format::mxfp4>(a);
  }
}

}  // namespace llmc
