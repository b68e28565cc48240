// AMX: eight tile registers of 16 rows of 64 bytes.
#pragma once

#include "vec.h"

#if defined(LLMC_AVX512_BF16) && defined(__AMX_BF16__) && defined(__linux__)
#define LLMC_AMX 1

namespace llmc {

// All tiles at full size. They are released before an op returns, since other code on this thread
// (oneDNN) sets its own shapes.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
// Not a local: GCC 12 assumes that the instruction reads only eight bytes, and drops other stores.
static const TileConfig kFullTiles = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

LLMC_INLINE void enter_amx() {
  _tile_loadconfig(&kFullTiles);
}

}  // namespace llmc
#endif
