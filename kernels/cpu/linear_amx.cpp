// linear with AMX tiles: the weight, in its stored layout, is the product's A, sixteen rows at
// once; panels of x are its B. So up to sixteen rows of x cost as much as one: the time to read the
// weight.
#include "amx.h"
#include "linear_panels.h"

namespace llmc {

#ifdef LLMC_AMX
namespace {

using panels::kStep, panels::kTile, panels::kTileWords;

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

// The hardware prefetcher follows the rows of the tiles better than software prefetching.
template <int R, int P>
void multiply(const LinearArgs& a, int64_t n, const uint32_t* x, int64_t panel_words,
              float* sums) {
  const bf16* w = weight_row(a, n);
  const int64_t stride = a.weight_stride, whole = a.depth / kStep * kStep;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < whole; k += kStep)
    step<R, P>(w + k, stride, x + k / kStep * kTileWords, panel_words);
  if (whole < a.depth) {  // zeros past the end, since memory there can hold anything
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

struct Tiles {
  static constexpr int64_t kPanels = 2;
  static constexpr bool kHalves = false;
  static void enter() { enter_amx(); }
  static void leave() { _tile_release(); }
  template <int R>
  static void product(const LinearArgs& a, int64_t n, const uint32_t* x, int64_t panel_words,
                      int64_t count, bool, float* sums) {
    (count > 1 ? &multiply<R, 2> : &multiply<R, 1>)(a, n, x, panel_words, sums);
  }
};

}  // namespace

void linear_amx(const LinearArgs& a) {
  panels::linear<Tiles>(a);
}

#else

void linear_amx(const LinearArgs&) {}  // never called: amx_ready() is false

#endif

}  // namespace llmc
