// linear by panels: sixteen rows of x side by side in the lanes of a vector, pairs of inputs
// consecutive. The weight is read in its stored layout. An engine (AMX tiles, or pairs of bf16 in
// vectors) multiplies a block of channels by a few panels at a time.
//
// An engine has: kPanels (panels multiplied together), kHalves (whether it supports panels of eight
// rows, in which each row has two lanes), enter, leave, product and half_product.
#pragma once

#include "attention.h"
#include "linear.h"
#include "parallel.h"
#include "transpose.h"

namespace llmc {

#ifdef LLMC_AVX512_BF16
namespace panels {

constexpr int64_t kTile = 16, kStep = 32, kTileWords = kTile * kLanes;
constexpr int64_t kBlock = 2 * kTile;          // channels multiplied together
constexpr int64_t kPackedBytes = 1000 * 1000;  // of x: fits in the L2 cache next to the weight
constexpr int64_t kHalf = kTile / 2, kDotRows = 2;

// How the rows from `row` on are divided: panels, then possibly a panel of eight rows, and the last
// few for dot products, which need no padding.
struct Packed {
  uint32_t* words;
  int64_t panel_words, row, panels, halves, rest;

  int64_t half_row() const { return row + panels * kTile; }
  int64_t rest_row() const { return half_row() + halves * kHalf; }
};

// 32 inputs of a panel: word (k / 2, row); zeros past the ends.
inline void pack_tile(const LinearArgs& a, int64_t row, int64_t k, uint32_t* to) {
  const int64_t rows = std::min(kTile, a.rows - row), left = a.depth - k;
  const __mmask32 mask = left < kStep ? (1u << left) - 1 : ~0u;
  __m512i r[16];
  for (int64_t i = 0; i < kTile; ++i)
    r[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, x_row(a, row + i) + k) : __m512i{};
  transpose(r);
  for (int64_t i = 0; i < kTile; ++i) _mm512_store_si512(to + i * kLanes, r[i]);
}

// The same for a half panel: two words (k / 4, row, k / 2 % 2); missing rows repeat the last one.
inline void pack_half_tile(const LinearArgs& a, int64_t row, int64_t k, uint32_t* to) {
  const int64_t left = std::min(kStep, a.depth - k);
  alignas(64) uint32_t words[kLanes];
  for (int64_t i = 0; i < kHalf; ++i) {
    std::memset(words, 0, sizeof words);
    std::memcpy(words, x_row(a, std::min(row + i, a.rows - 1)) + k, left * sizeof(bf16));
    for (int64_t w = 0; w < kLanes; w += 2) std::memcpy(to + w / 2 * kLanes + 2 * i, words + w, 8);
  }
}

// Pairs of channels as words of bf16, with the bias added: word (pair, row of x).
template <bool kBias>
LLMC_INLINE void round_pairs(const float* sums, const bf16* bias, __m512i pairs[16]) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    v16f low = load(sums + 2 * i * kLanes), high = load(sums + (2 * i + 1) * kLanes);
    if (kBias) {
      low += to_float(bias[2 * i]);
      high += to_float(bias[2 * i + 1]);
    }
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    pairs[i] = _mm512_permutexvar_epi16(order, both);
  }
}

// 16 * R channels of up to 16 rows, back to rows of channels.
template <int R>
void write_rows(const LinearArgs& a, const float* sums, int64_t n, int64_t row, int64_t rows) {
  __m512i r[16];
  if (!a.bias)
    round_pairs<false>(sums, nullptr, r);
  else if (R > 1)
    round_pairs<true>(sums, static_cast<const bf16*>(a.bias) + n, r);
  else {
    bf16 bias[kBlock] = {};
    std::memcpy(bias, static_cast<const bf16*>(a.bias) + n, kTile * sizeof(bf16));
    round_pairs<true>(sums, bias, r);
  }
  transpose(r);
  for (int64_t i = 0; i < rows; ++i)
    _mm512_mask_storeu_epi32(out_row(a, row + i) + n, R > 1 ? 0xffff : 0xff, r[i]);
}

// sums[panel][channel][row of x]
template <class Engine, int R>
void channel_block(const LinearArgs& a, const Packed& x, int64_t n) {
  alignas(64) float sums[Engine::kPanels * 2 * kTileWords] = {};
  const uint32_t* words = x.words;
  for (int64_t p = 0; p < x.panels; p += Engine::kPanels) {
    const int64_t count = std::min<int64_t>(Engine::kPanels, x.panels - p);
    const int64_t row = x.row + p * kTile, end = std::min(a.rows, row + count * kTile);
    for (int64_t m = row; m < end; ++m) __builtin_prefetch(out_row(a, m) + n, 1, 3);
    Engine::template product<R>(a, n, words, x.panel_words, count, p == 0, sums);
    words += count * x.panel_words;
    for (int64_t i = 0, m = row; i < count; ++i, m += kTile)
      write_rows<R>(a, sums + i * 2 * kTileWords, n, m, std::min(kTile, end - m));
  }
  if constexpr (Engine::kHalves)
    if (x.halves) {
      Engine::template half_product<R>(a, n, words, x.panels == 0, sums);
      write_rows<R>(a, sums, n, x.half_row(), std::min(kHalf, a.rows - x.half_row()));
    }
  if (x.rest) dot_share(a, x.rest_row(), x.rest, n, n + R * kTile);
}

template <class Engine>
void share(const LinearArgs& a, const Packed& x, int64_t begin, int64_t end) {
  int64_t n = begin;
  Engine::enter();
  for (; n + kBlock <= end; n += kBlock) channel_block<Engine, 2>(a, x, n);
  if (n + kTile <= end) {
    channel_block<Engine, 1>(a, x, n);
    n += kTile;
  }
  Engine::leave();
  if (n < end) dot_share(a, x.row, std::min(x.rest_row() + x.rest, a.rows) - x.row, n, end);
}

// Panels to pack at a time: a multiple of those multiplied together, in parts of similar size.
inline int64_t panels_at_once(int64_t panels, int64_t panel_words, int64_t together) {
  const int64_t most = std::max(together, kPackedBytes / (panel_words * 4));
  const int64_t parts = std::max<int64_t>(1, (panels + most - 1) / most), step = together * parts;
  return std::min(panels, (panels + step - 1) / step * together);
}

template <class Engine>
void linear(const LinearArgs& a) {
  const int64_t tiles = (a.depth + kStep - 1) / kStep, panel_words = tiles * kTileWords;
  int64_t panels = a.rows / kTile, rest = a.rows % kTile;
  bool half = false;
  if (Engine::kHalves && rest <= kHalf + kDotRows) {
    half = rest > kDotRows;
    rest = half ? std::max<int64_t>(0, rest - kHalf) : rest;
  } else {
    panels += rest > 0;
    rest = 0;
  }
  const int64_t most = panels_at_once(panels, panel_words, Engine::kPanels);
  static thread_local Arena arena;
  arena.reset((most + half) * panel_words * 4);
  uint32_t* const words = arena.take<uint32_t>((most + half) * panel_words);
  const int64_t blocks = (a.channels + kBlock - 1) / kBlock;
  const int threads = worth_threads(blocks * a.depth * (8 + a.rows / 8), blocks, a.threads);
  for (int64_t first = 0; first < panels || first == 0; first += std::max<int64_t>(1, most)) {
    const bool last = first + most >= panels;
    const Packed x{words, panel_words, first * kTile, std::min(most, panels - first),
                   last && half, last ? rest : 0};
    parallel_pieces((x.panels + x.halves) * tiles, threads, [&](int64_t i) {
      if (i < x.panels * tiles)
        pack_tile(a, x.row + i / tiles * kTile, i % tiles * kStep, words + i * kTileWords);
      else
        pack_half_tile(a, x.half_row(), i % tiles * kStep,
                       words + x.panels * panel_words + i % tiles * kTileWords / 2);
    });
    parallel_items(threads, threads, [&](int64_t t) {
      share<Engine>(a, x, blocks * t / threads * kBlock,
                    std::min(a.channels, blocks * (t + 1) / threads * kBlock));
    });
  }
}

}  // namespace panels
#endif

}  // namespace llmc
