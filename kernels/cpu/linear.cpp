// linear: y = x W^T + b for bf16 weights as the checkpoint stores them (no packing: a tied embedding
// is held once, and loading is a plain copy). Few rows are bound by reading the weight. Many go to
// the library where it computes as fast: with tiles, and where bf16 has no products in hardware.
#include "attention.h"
#include "linear.h"
#include "parallel.h"

namespace llmc {
namespace {

constexpr int64_t kMaxDotRows = 16, kMaxTileRows = 192, kTileChannels = 16;
constexpr int64_t kMaxStreamRows = 2;  // up to here reading is faster line by line than by tiles
constexpr int64_t kMaxPairRows = 4;    // and by dot products than by pairs

bool by_tiles(const LinearArgs& a) {
  return a.rows > kMaxStreamRows && a.channels >= kTileChannels && amx_ready();
}

bool by_pairs(const LinearArgs& a) {
  return a.rows > kMaxPairRows && a.channels >= kTileChannels && has_pairs() && !amx_ready();
}

}  // namespace

bool takes_linear(const LinearArgs& a) {
  return a.depth > 0 && (by_pairs(a) || a.rows <= (by_tiles(a) ? kMaxTileRows : kMaxDotRows));
}

void linear(const LinearArgs& a) {
  if (by_tiles(a)) return linear_amx(a);
  if (by_pairs(a)) return linear_pairs(a);
  parallel_rows(a.channels, a.depth * (a.rows + 3) / 4, a.threads,
                [&](int64_t begin, int64_t end) { dot_share(a, 0, a.rows, begin, end); });
}

}  // namespace llmc
