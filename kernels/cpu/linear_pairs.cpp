// linear with vectors of bf16 pairs, on CPUs that have them but no tiles: words of the weight are
// broadcast to all lanes of a panel. It reaches the CPU's peak multiply rate: docs/cpu.md.
#include "linear_panels.h"

namespace llmc {

#ifdef LLMC_AVX512_BF16
namespace {

using panels::kStep, panels::kTile, panels::kTileWords;

constexpr int64_t kGroup = 8;  // channels: with three panels, sums use 24 of 32 registers

// A word of the weight in every lane, or two alternating words for the two lanes per row of a half
// panel.
LLMC_INLINE __m512bh spread(const bf16* w, bool half) {
  int32_t word;
  int64_t two;
  std::memcpy(&word, w, sizeof word);
  if (!half) return (__m512bh)_mm512_set1_epi32(word);
  std::memcpy(&two, w, sizeof two);
  return (__m512bh)_mm512_set1_epi64(two);
}

// 32 inputs of kGroup channels by P panels. kFetch prefetches the same inputs of the next channels.
template <int P, bool kHalf, bool kFetch>
LLMC_INLINE void step(const bf16* w, int64_t stride, const uint32_t* x, int64_t panel_words,
                      __m512 (&acc)[kGroup][P]) {
  constexpr int kWords = kHalf ? 2 : 1;  // words of the weight per vector of x
  if (kFetch) {
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; ++i) __builtin_prefetch(w + (kGroup + i) * stride, 0, 2);
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < kLanes / kWords; ++k) {
    __m512bh part[P];
#pragma GCC unroll 3
    for (int p = 0; p < P; ++p)
      part[p] = (__m512bh)_mm512_load_si512(x + p * panel_words + k * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; ++i) {
      const __m512bh word = spread(w + i * stride + 2 * k * kWords, kHalf);
#pragma GCC unroll 3
      for (int p = 0; p < P; ++p) acc[i][p] = _mm512_dpbf16_ps(acc[i][p], word, part[p]);
    }
  }
}

// kGroup channels from n on; sums[panel][channel][row].
template <int P, bool kHalf, bool kFetch>
void group(const LinearArgs& a, int64_t n, const uint32_t* x, int64_t panel_words, float* sums) {
  const bf16* w = weight_row(a, n);
  const int64_t stride = a.weight_stride, whole = a.depth / kStep * kStep;
  constexpr int64_t kWords = kHalf ? kTileWords / 2 : kTileWords;  // words of x per 32 inputs
  __m512 acc[kGroup][P] = {};
  for (int64_t k = 0; k < whole; k += kStep, x += kWords)
    step<P, kHalf, kFetch>(w + k, stride, x, panel_words, acc);
  if (whole < a.depth) {  // zeros past the end, since memory there can hold anything
    alignas(64) bf16 rest[kGroup][kStep] = {};
    for (int64_t i = 0; i < kGroup; ++i)
      std::memcpy(rest[i], w + i * stride + whole, (a.depth - whole) * sizeof(bf16));
    step<P, kHalf, false>(rest[0], kStep, x, panel_words, acc);
  }
  for (int i = 0; i < kGroup; ++i)
    for (int p = 0; p < P; ++p) {
      __m512 sum = acc[i][p];
      if (kHalf) {  // adds a row's two lanes, then makes the rows adjacent
        sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
        sum = _mm512_maskz_compress_ps(0x5555, sum);
      }
      _mm512_store_ps(sums + p * 2 * kTileWords + i * kLanes, sum);
    }
}

struct Pairs {
  static constexpr int64_t kPanels = 3;
  static constexpr bool kHalves = true;
  static void enter() {}
  static void leave() {}

  template <int P, bool kHalf>
  static void groups(const LinearArgs& a, int64_t n, int64_t channels, const uint32_t* x,
                     int64_t panel_words, bool fetch, float* sums) {
    for (int64_t i = 0; i < channels; i += kGroup)
      (fetch ? &group<P, kHalf, true> : &group<P, kHalf, false>)(a, n + i, x, panel_words,
                                                                 sums + i * kLanes);
  }
  template <int R>
  static void product(const LinearArgs& a, int64_t n, const uint32_t* x, int64_t panel_words,
                      int64_t count, bool first, float* sums) {
    auto run = count == 3 ? &groups<3, false> : count == 2 ? &groups<2, false> : &groups<1, false>;
    run(a, n, R * kTile, x, panel_words, first, sums);
  }
  template <int R>
  static void half_product(const LinearArgs& a, int64_t n, const uint32_t* x, bool first,
                           float* sums) {
    groups<1, true>(a, n, R * kTile, x, 0, first, sums);
  }
};

}  // namespace

bool has_pairs() {
  return true;
}

void linear_pairs(const LinearArgs& a) {
  panels::linear<Pairs>(a);
}

#else

bool has_pairs() {
  return false;
}
void linear_pairs(const LinearArgs&) {}  // never called

#endif

}  // namespace llmc
