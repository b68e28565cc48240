// The C function with which Python repacks GGUF files (pack_gguf.py).
#include "table.h"

extern "C" bool llmc_pack_gguf(int32_t type, const uint8_t* rows, int64_t row_bytes,
                               const int64_t* order, int64_t channels, int64_t depth,
                               uint8_t* weight, void* scale, void* minimum) {
  return llmc::chosen_kernels->pack_gguf(
      {type, rows, row_bytes, order, channels, depth, weight, scale, minimum});
}
