// quantized_linear for few rows: a block of channels is read once, as one stream, and meets
// several rows of x. One row is bound by reading the weight.
#include "low_bit.h"
#include "parallel.h"

#include <vector>

namespace llmc {
namespace {

constexpr int64_t kAhead = 2048;  // bytes of the weight to ask for before they are read

template <class Reader>
struct Input {  // x in the reader's words
  using X = typename Reader::X;
  int64_t stretch, stretches, row_words;
  std::vector<X> words;
  std::vector<Packed> packed;

  explicit Input(const LowBitArgs& a)
      : stretch(stretch_of(a)), stretches(a.depth / stretch),
        row_words(a.depth / Reader::kInputs * Reader::kSteps), words(a.rows * row_words),
        packed(a.rows * stretches) {
    std::vector<float> x(a.depth);
    for (int64_t m = 0; m < a.rows; ++m) {
      with_type(a.dtype, [&](auto t) {
        const auto* from = static_cast<const decltype(t)*>(a.x) + m * a.x_stride;
        for (int64_t k = 0; k < a.depth; k += kLanes) store(x.data() + k, load(from + k));
      });
      for (int64_t s = 0; s < stretches; ++s) {
        const int64_t at = m * stretches + s;
        packed[at] = Reader::pack(x.data() + s * stretch, stretch,
                                  words.data() + at * (row_words / stretches));
      }
    }
  }
};

// One block by M rows. Few rows keep several sums each, or a product would wait for the last one.
template <class Reader, int M>
void multiply(const LowBitArgs& a, const Input<Reader>& x, int64_t row, int64_t block) {
  constexpr int kSums = M == 1 ? 4 : M == 2 ? 2 : 1;
  constexpr int kUnrolled = kMinGroup / Reader::kInputs;  // lines: every stretch has a multiple
  const int64_t lines = a.lines() / x.stretches;
  const uint8_t* line = a.weight + block * a.lines() * kLineBytes;
  const typename Reader::X* words = x.words.data() + row * x.row_words;
  v16f total[M] = {};
  for (int64_t s = 0; s < x.stretches; ++s) {
    typename Reader::Sum sum[M][kSums];
    for (int64_t l = 0; l < lines; l += kUnrolled) {
#pragma GCC unroll 4
      for (int i = 0; i < kUnrolled; ++i) {
        __builtin_prefetch(line + kAhead + i * kLineBytes, 0, 3);
        const v16u bytes = load_as<v16u>(line + i * kLineBytes);
#pragma GCC unroll 8
        for (int step = 0; step < Reader::kSteps; ++step) {
          const int word = i * Reader::kSteps + step;
          const auto values = Reader::get(bytes, step);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m)
            Reader::add(sum[m][word % kSums], values, words[m * x.row_words + word]);
        }
      }
      line += kUnrolled * kLineBytes;
      words += kUnrolled * Reader::kSteps;
    }
    const int64_t group = s * x.stretch / a.group;
    const v16f scale = scale_of(a, block, group);
    const v16f zero =
        a.format == Format::int4 ? zero_of(a, block, group) : splat(Reader::kOffset);
    const v16f minimum = minimum_of(a, block, group);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Packed& part = x.packed[(row + m) * x.stretches + s];
      v16f all = Reader::total(sum[m][0]);
      for (int i = 1; i < kSums; ++i) all += Reader::total(sum[m][i]);
      total[m] += scale * (all * part.scale - zero * part.sum) + minimum * part.sum;
    }
  }
  for (int m = 0; m < M; ++m) write_block(a, row + m, block, total[m]);
}

template <class Reader>
void by_blocks(const LowBitArgs& a) {
  const Input<Reader> x(a);
  parallel_rows(a.channels / kChannels, a.depth * kChannels * (a.rows + 3) / 8, a.threads,
                [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int64_t m = 0;
      for (; m + kMaxFewRows <= a.rows; m += kMaxFewRows)
        multiply<Reader, kMaxFewRows>(a, x, m, block);
      if (m + 4 <= a.rows) multiply<Reader, 4>(a, x, m, block), m += 4;
      if (m + 2 <= a.rows) multiply<Reader, 2>(a, x, m, block), m += 2;
      if (m < a.rows) multiply<Reader, 1>(a, x, m, block);
    }
  });
}

template <Format kFormat>
void run(const LowBitArgs& a) {
  if (a.dtype == Dtype::bf16) {
#if defined(LLMC_AVX512) && defined(__AVX512VNNI__)
    if constexpr (kFormat != Format::fp8) return by_blocks<ByteReader<kFormat>>(a);
#endif
#ifdef LLMC_AVX512_BF16
    return by_blocks<PairReader<kFormat>>(a);
#endif
  }
  by_blocks<FloatReader<kFormat>>(a);
}

}  // namespace

void quantized_linear(const LowBitArgs& a) {
  const bool is_widened = a.dtype == Dtype::bf16 && widens_weights();
  if (a.rows > kMaxFewRows && !is_widened) return quantized_many_rows(a);
  switch (a.format) {
    case Format::int8: return run<Format::int8>(a);
    case Format::int4: return run<Format::int4>(a);
    case Format::fp8: return run<Format::fp8>(a);
  }
}

}  // namespace llmc
