// quantized_linear for several rows on CPUs that multiply pairs of bf16 and have no tiles. A piece
// of a block of channels is multiplied by up to sixteen rows of x as it is unpacked; the unpacked
// values stay in the L1 cache for the other rows. They are exact in bf16; scales are applied to the
// sums of a piece.
#include "attention.h"
#include "low_bit_packed.h"
#include "parallel.h"

namespace llmc {

#ifdef LLMC_AVX512_BF16
namespace {

constexpr int64_t kPiece = 512;        // inputs: 16 KB when unpacked
constexpr int64_t kFirst = 16;         // rows multiplied while a piece is unpacked
constexpr int64_t kMaxRows = 24;       // rows multiplied together: sums use as many registers
constexpr int64_t kPassBytes = 700000; // of x: fits in the L2 cache
constexpr int64_t kMaxPass = 512;      // rows whose sums fit on the stack

// The values of a line as pairs, in the order of PairReader, minus the zero point.
template <Format kFormat>
struct Widen : PairReader<kFormat> {
  LLMC_METHOD Widen(const LowBitArgs& a, v16f) : PairReader<kFormat>(a) {}
};

template <>
struct Widen<Format::int4> {
  static constexpr int kSteps = PairReader<Format::int4>::kSteps;
  v16u offset;  // of a nibble in the table, which has -16 to 15
  Widen(const LowBitArgs&, v16f zero)
      : offset((v16u)convert<v16i>(16 - zero) * 0x10001u) {}
  __attribute__((always_inline)) __m512i get(v16u line, int step) const {
    const v16u nibbles = (v16u)_mm512_srli_epi16((__m512i)line, 4 * step) & 0x000f000fu;
    return _mm512_permutexvar_epi16((__m512i)(nibbles + offset), kSigned.load());
  }
};

// acc[m] += values * x[m] for a pair of inputs of M rows.
template <int M>
LLMC_INLINE void add_pair(__m512 (&acc)[M], const uint32_t* x, __m512i values) {
#pragma GCC unroll 24
  for (int m = 0; m < M; ++m)
    acc[m] = _mm512_dpbf16_ps(acc[m], (__m512bh)_mm512_set1_epi32(int(x[m])), (__m512bh)values);
}

template <int M>
LLMC_INLINE void add_sums(const __m512 (&acc)[M], v16f scale, float* sums) {
#pragma GCC unroll 24
  for (int m = 0; m < M; ++m)
    store(sums + m * kChannels, load(sums + m * kChannels) + (v16f)acc[m] * scale);
}

// Multiplies a piece, as pairs [inputs / 2][channel], by x [inputs / 2][M].
template <int M>
void multiply(const uint32_t* piece, const uint32_t* x, int64_t pairs, v16f scale, float* sums) {
  __m512 acc[M] = {};
#pragma GCC unroll 2
  for (int64_t k = 0; k < pairs; ++k)
    add_pair<M>(acc, x + k * M, _mm512_load_si512(piece + k * kChannels));
  add_sums<M>(acc, scale, sums);
}

using Multiply = decltype(&multiply<4>);
constexpr Multiply kMultiply[] = {multiply<4>,  multiply<8>,  multiply<12>,
                                  multiply<16>, multiply<20>, multiply<24>};

// The same for a piece that is not unpacked yet; unpacks it to `piece`.
template <Format kFormat, int M>
void widen(const LowBitArgs& a, const uint8_t* line, const uint32_t* x, int64_t pairs, v16f zero,
           v16f scale, float* sums, uint32_t* piece) {
  const Widen<kFormat> values(a, zero);
  __m512 acc[M] = {};
  for (int64_t k = 0; k < pairs; k += values.kSteps, line += kLineBytes) {
    __builtin_prefetch(line + 2048, 0, 3);
    const v16u bytes = load_as<v16u>(line);
#pragma GCC unroll 4
    for (int step = 0; step < values.kSteps; ++step) {
      const __m512i word = values.get(bytes, step);
      _mm512_store_si512(piece + (k + step) * kChannels, word);
      add_pair<M>(acc, x + (k + step) * M, word);
    }
  }
  add_sums<M>(acc, scale, sums);
}

// Rows [row, row + rows) of x, in groups whose rows are interleaved pair by pair; the last is
// padded.
struct Pass {
  int64_t row, rows;
  const uint32_t* words;
  const float* totals;  // per row and group, if the reader adds an offset to all values

  int64_t first() const { return rows > kFirst - 4 ? kFirst : kFirst / 2; }
  int64_t groups() const {
    return 1 + std::max<int64_t>(0, (rows - first() + kMaxRows - 1) / kMaxRows);
  }
  int64_t width(int64_t group, int64_t done) const {
    if (group == 0) return first();
    const int64_t left = groups() - group;
    return ((rows - done + left - 1) / left + 3) / 4 * 4;
  }
};

float total(const bf16* x, int64_t depth) {
  v16f sum = {};
  for (int64_t k = 0; k < depth; k += kLanes) sum += load(x + k);
  return sum_lanes(sum);
}

template <Format kFormat>
void pack_rows(const LowBitArgs& a, int64_t row, int64_t rows, int64_t width, uint32_t* to,
               float* totals) {
  using Reader = PairReader<kFormat>;
  for (int64_t m = 0; m < width; ++m) {
    const bf16* x = static_cast<const bf16*>(a.x) + (row + m) * a.x_stride;
    if (Reader::offset() && m < rows)
      for (int64_t g = 0; g < a.groups; ++g)
        totals[m * a.groups + g] = total(x + g * a.group, a.group);
    for (int64_t k = 0; k < a.depth; k += Reader::kInputs) {
      bf16 line[Reader::kInputs] = {};
      if (m < rows)
        for (int64_t i = 0; i < Reader::kInputs; ++i) line[Reader::place(i)] = x[k + i];
      for (int64_t i = 0; i < Reader::kSteps; ++i)
        std::memcpy(to + (k / 2 + i) * width + m, line + 2 * i, sizeof *to);
    }
  }
}

template <Format kFormat>
void block_rows(const LowBitArgs& a, const Pass& x, int64_t block) {
  alignas(64) uint32_t piece[kPiece / 2 * kChannels];
  alignas(64) float sums[(kMaxPass + kMaxRows) * kChannels];
  alignas(64) uint8_t room[kPiece * kChannels];
  std::memset(sums, 0, (x.rows + kMaxRows) * kChannels * sizeof(float));
  for (int64_t k = 0; k < a.depth;) {
    const int64_t group = k / a.group, inputs = std::min(kPiece, (group + 1) * a.group - k);
    const uint8_t* const line = int8_lines(a, block, k, inputs, room);
    const v16f zero = kFormat == Format::int4 ? zero_of(a, block, group) : v16f{};
    const v16f scale = scale_of(a, block, group);
    int64_t done = x.first();
    (done == kFirst ? &widen<kFormat, kFirst> : &widen<kFormat, kFirst / 2>)(
        a, line, x.words + k / 2 * done, inputs / 2, zero, scale, sums, piece);
    for (int64_t g = 1; g < x.groups(); ++g) {
      const int64_t width = x.width(g, done);
      kMultiply[width / 4 - 1](piece, x.words + done * a.depth / 2 + k / 2 * width, inputs / 2,
                               scale, sums + done * kChannels);
      done += width;
    }
    k += inputs;
  }
  for (int64_t m = 0; m < x.rows; ++m) {
    v16f y = load(sums + m * kChannels);
    if (PairReader<kFormat>::offset())
      for (int64_t g = 0; g < a.groups; ++g)
        y -= PairReader<kFormat>::offset() * x.totals[m * a.groups + g] * scale_of(a, block, g);
    write_block(a, x.row + m, block, y);
  }
}

template <Format kFormat>
void by_passes(const LowBitArgs& a) {
  const int64_t most = std::clamp<int64_t>(kPassBytes / (2 * a.depth), 2 * kMaxRows, kMaxPass);
  const int64_t passes = (a.rows + most - 1) / most, blocks = a.channels / kChannels;
  static thread_local Arena arena;
  const int64_t room = std::min(a.rows, most) + kMaxRows;
  arena.reset(room * (a.depth * sizeof(bf16) + a.groups * sizeof(float)) + 4096);
  uint32_t* const words = arena.take<uint32_t>(room * a.depth / 2);
  float* const totals = arena.take<float>(room * a.groups);
  const int threads = worth_threads(blocks * a.depth * (8 + a.rows / 2), blocks, a.threads);
  for (int64_t p = 0; p < passes; ++p) {
    const int64_t row = a.rows * p / passes, rows = a.rows * (p + 1) / passes - row;
    const Pass x{row, rows, words, totals};
    parallel_items(x.groups(), threads, [&](int64_t g) {
      int64_t done = 0;
      for (int64_t i = 0; i < g; ++i) done += x.width(i, done);
      pack_rows<kFormat>(a, row + done, rows - done, x.width(g, done),
                         words + done * a.depth / 2, totals + done * a.groups);
    });
    parallel_pieces(blocks, threads, [&](int64_t block) { block_rows<kFormat>(a, x, block); });
  }
}

}  // namespace

bool has_pair_rows() {
  return !amx_ready();
}

void quantized_pair_rows(const LowBitArgs& a) {
  with_format(a.format, [&](auto format) { by_passes<format()>(a); });
}

#else

bool has_pair_rows() {
  return false;
}
void quantized_pair_rows(const LowBitArgs&) {}  // never called

#endif

}  // namespace llmc
