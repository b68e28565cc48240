// quantized_linear for many rows: a part of the weight that fits in the caches is dequantized to
// bf16 rows, for a product with tiles. Their inputs are in the order in which a line is unpacked,
// and x is reordered once to match.
#include "attention.h"
#include "low_bit_packed.h"
#include "parallel.h"
#include "transpose.h"

namespace llmc {

#ifdef LLMC_AVX512_BF16
namespace {

// Lanes of two bf16, each times a scale and minus an offset.
LLMC_INLINE __m512i scaled(v16f even, v16f odd, v16f scale, v16f offset) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512 low = (__m512)(even * scale - offset), high = (__m512)(odd * scale - offset);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

template <Format kFormat>
void widen_block(const LowBitArgs& a, int64_t block, bf16* to) {
  using Reader = PairReader<kFormat>;
  const Reader reader(a);
  constexpr int kLines = 16 / Reader::kSteps;  // 32 inputs
  alignas(64) uint8_t room[32 * kChannels];
  v16f scale = {}, offset = {};
  int64_t group = 0;
  for (int64_t k = 0; k < a.depth; k += 32) {
    const uint8_t* const line = int8_lines(a, block, k, 32, room);
    __m512i tile[16];
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      const int64_t input = i * Reader::kInputs;
      if (input % kMinGroup == 0 && k + input == group * a.group) {
        scale = scale_of(a, block, group);
        offset = scale * (kFormat == Format::int4 ? zero_of(a, block, group)
                                                  : splat(Reader::offset())) -
                 minimum_of(a, block, group);
        ++group;
      }
      const v16u bytes = load_as<v16u>(line + i * kLineBytes);
#pragma GCC unroll 4
      for (int step = 0; step < Reader::kSteps; ++step) {
        const v16u pairs = (v16u)reader.get(bytes, step);
        const v16f even = (v16f)(pairs << 16), odd = (v16f)(pairs & 0xffff0000u);
        tile[i * Reader::kSteps + step] = scaled(even, odd, scale, offset);
      }
    }
    transpose(tile);
    for (int64_t c = 0; c < kChannels; ++c) _mm512_storeu_si512(to + c * a.depth + k, tile[c]);
  }
}

}  // namespace

bool widens_weights() {
  return amx_ready();
}

void reorder_x(const LowBitArgs& a, bf16* to) {
  auto place = is_4_bit(a.format) ? &PairReader<Format::int4>::place
                                        : &PairReader<Format::int8>::place;
  int64_t order[32];
  for (int64_t k = 0; k < 32; ++k) order[k] = place(k);
  parallel_rows(a.rows, a.depth / 4, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const bf16* x = static_cast<const bf16*>(a.x) + m * a.x_stride;
      for (int64_t k = 0; k < a.depth; k += 32)
        for (int64_t i = 0; i < 32; ++i) to[m * a.depth + k + order[i]] = x[k + i];
    }
  });
}

void widen_channels(const LowBitArgs& a, int64_t begin, int64_t end, bf16* to) {
  const int64_t first = begin / kChannels;
  parallel_rows(end / kChannels - first, a.depth * kChannels / 8, a.threads,
                [&](int64_t from, int64_t until) {
    with_format(a.format, [&](auto format) {
      for (int64_t b = from; b < until; ++b)
        widen_block<format()>(a, first + b, to + b * kChannels * a.depth);
    });
  });
}

#else

bool widens_weights() {
  return false;
}
void reorder_x(const LowBitArgs&, bf16*) {}  // never called
void widen_channels(const LowBitArgs&, int64_t, int64_t, bf16*) {}

#endif

}  // namespace llmc
