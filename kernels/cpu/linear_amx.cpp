// linear by tiles: the weight, as it is stored, is the product's A, sixteen rows at once; x is packed
// as its B. So up to sixteen rows of x cost what one does: the time to read the weight.
#include "amx.h"
#include "linear.h"
#include "parallel.h"
#include "transpose.h"

#include <memory>
#include <new>

namespace llmc {

#ifdef LLMC_AMX
namespace {

constexpr int64_t kTile = 16, kStep = 32, kTileWords = kTile * kLanes;
constexpr int64_t kBlock = 2 * kTile;          // channels multiplied together
constexpr int64_t kPackedBytes = 1000 * 1000;  // of x: what stays in the L2 cache beside the weight

struct Packed {  // rows of x from `row` on as panels of 16 rows
  uint32_t* words;
  int64_t panel_words, row, panels;
};

uint32_t* scratch(int64_t words) {
  struct Free {
    void operator()(uint32_t* p) const { operator delete[](p, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<uint32_t, Free> held;
  thread_local int64_t size = 0;
  if (words > size) {
    held.reset(static_cast<uint32_t*>(operator new[](words * 4, std::align_val_t{64})));
    size = words;
  }
  return held.get();
}

// One tile of B: word (k / 2, row) for 16 rows and 32 of K; zeros past the ends.
void pack_tile(const LinearArgs& a, int64_t row, int64_t k, uint32_t* to) {
  const int64_t rows = std::min(kTile, a.rows - row), left = a.depth - k;
  const __mmask32 mask = left < kStep ? (1u << left) - 1 : ~0u;
  __m512i r[16];
  for (int64_t i = 0; i < kTile; ++i)
    r[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, x_row(a, row + i) + k) : __m512i{};
  transpose(r);
  for (int64_t i = 0; i < kTile; ++i) _mm512_store_si512(to + i * kLanes, r[i]);
}

// One step along K for 16 * R channels (tiles 4, 5) and P panels (6, 7); results in 0 to 3.
template <int R, int P>
LLMC_INLINE void step(const bf16* w, int64_t stride, const uint32_t* x, int64_t panel_words) {
  _tile_loadd(4, w, stride * 2);
  _tile_loadd(6, x, 64);
  _tile_dpbf16ps(0, 4, 6);
  if (R > 1) {
    _tile_loadd(5, w + kTile * stride, stride * 2);
    _tile_dpbf16ps(1, 5, 6);
  }
  if (P > 1) {
    _tile_loadd(7, x + panel_words, 64);
    _tile_dpbf16ps(2, 4, 7);
    if (R > 1) _tile_dpbf16ps(3, 5, 7);
  }
}

// sums[panel][channel][row of x]. The CPU's own prefetcher follows the rows of the tiles better than
// requests of ours do.
template <int R, int P>
void product(const LinearArgs& a, int64_t n, const uint32_t* x, int64_t panel_words, float* sums) {
  const bf16* w = weight_row(a, n);
  const int64_t stride = a.weight_stride, whole = a.depth / kStep * kStep;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < whole; k += kStep)
    step<R, P>(w + k, stride, x + k / kStep * kTileWords, panel_words);
  if (whole < a.depth) {  // zeros past the end, where memory may hold anything
    alignas(64) bf16 rest[R * kTile][kStep] = {};
    for (int64_t i = 0; i < R * kTile; ++i)
      std::memcpy(rest[i], w + i * stride + whole, (a.depth - whole) * sizeof(bf16));
    step<R, P>(rest[0], kStep, x + whole / kStep * kTileWords, panel_words);
  }
  _tile_stored(0, sums, 64);
  if (R > 1) _tile_stored(1, sums + kTileWords, 64);
  if (P > 1) _tile_stored(2, sums + 2 * kTileWords, 64);
  if (R > 1 && P > 1) _tile_stored(3, sums + 3 * kTileWords, 64);
}

// Pairs of channels as words of bf16, bias added: word (pair, row of x).
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
void write_rows(const LinearArgs& a, const float* sums, int64_t n, int64_t row) {
  __m512i r[16];
  if (a.bias)
    round_pairs<true>(sums, static_cast<const bf16*>(a.bias) + n, r);
  else
    round_pairs<false>(sums, nullptr, r);
  transpose(r);
  const int64_t rows = std::min(kTile, a.rows - row);
  for (int64_t i = 0; i < rows; ++i)
    _mm512_mask_storeu_epi32(out_row(a, row + i) + n, R > 1 ? 0xffff : 0xff, r[i]);
}

template <int R>
void channel_block(const LinearArgs& a, const Packed& x, int64_t n) {
  alignas(64) float sums[4 * kTileWords] = {};
  for (int64_t p = 0; p < x.panels; p += 2) {
    const uint32_t* words = x.words + p * x.panel_words;
    const bool two = p + 1 < x.panels;
    (two ? &product<R, 2> : &product<R, 1>)(a, n, words, x.panel_words, sums);
    for (int64_t i = 0; i < 1 + two; ++i)
      write_rows<R>(a, sums + i * 2 * kTileWords, n, x.row + (p + i) * kTile);
  }
}

void tile_share(const LinearArgs& a, const Packed& x, int64_t begin, int64_t end) {
  int64_t n = begin;
  enter_amx();
  for (; n + kBlock <= end; n += kBlock) channel_block<2>(a, x, n);
  if (n + kTile <= end) {
    channel_block<1>(a, x, n);
    n += kTile;
  }
  _tile_release();
  if (n < end) dot_share(a, x.row, std::min(x.panels * kTile, a.rows - x.row), n, end);
}

// Panels to pack at a time: an even number, in parts of about the same size.
int64_t panels_at_once(int64_t panels, int64_t panel_words) {
  const int64_t most = std::max<int64_t>(2, kPackedBytes / (panel_words * 4));
  const int64_t parts = (panels + most - 1) / most;
  return std::min(panels, (panels + 2 * parts - 1) / (2 * parts) * 2);
}

}  // namespace

void linear_amx(const LinearArgs& a) {
  const int64_t tiles = (a.depth + kStep - 1) / kStep, panel_words = tiles * kTileWords;
  const int64_t panels = (a.rows + kTile - 1) / kTile;
  const int64_t most = panels_at_once(panels, panel_words);
  uint32_t* const words = scratch(most * panel_words);
  const int64_t blocks = (a.channels + kBlock - 1) / kBlock;
  const int threads = worth_threads(blocks * a.depth * (8 + a.rows / 8), blocks, a.threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < panels; first += most) {
    const Packed x{words, panel_words, first * kTile, std::min(most, panels - first)};
#pragma omp for schedule(static)
    for (int64_t i = 0; i < x.panels * tiles; ++i)
      pack_tile(a, x.row + i / tiles * kTile, i % tiles * kStep, words + i * kTileWords);
#pragma omp for schedule(static, 1)
    for (int t = 0; t < threads; ++t)
      tile_share(a, x, blocks * t / threads * kBlock,
                 std::min(a.channels, blocks * (t + 1) / threads * kBlock));
  }
}

#else

void linear_amx(const LinearArgs&) {}  // never called: amx_ready() is false

#endif

}  // namespace llmc
