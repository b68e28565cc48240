// The two products of the tile kernel, C[m][16 queries] (+)= A[m][k] * B[k][16 queries], in three
// versions: float, pairs of bf16 (AVX512-BF16) and AMX tiles. Queries are always the sixteen lanes,
// so scores are transposed: softmax works down columns, and its weights are directly the next
// product's B. B is stored as 32-bit words: a float, or two bf16 neighbors along k.
#pragma once

#include "vec.h"

namespace llmc {

constexpr int64_t kTileKeys = 128;
constexpr int64_t kPanelScores = kTileKeys * kLanes;  // floats of one panel's scores

struct FloatWords {
  static constexpr int64_t kKeysPerWord = 1;
  LLMC_INLINE v16f multiply_add(v16f acc, const uint32_t* a, v16f b) {
    float x;
    std::memcpy(&x, a, sizeof x);
    return acc + x * b;
  }
};

#ifdef LLMC_AVX512_BF16
struct PairWords {
  static constexpr int64_t kKeysPerWord = 2;
  LLMC_INLINE v16f multiply_add(v16f acc, const uint32_t* a, v16f b) {
    return (v16f)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(*a)), (__m512bh)b);
  }
};
#endif

#ifdef LLMC_AVX512
constexpr int kRowBlock = 6, kMaxPanels = 4;  // 24 of 32 registers accumulate
#else
constexpr int kRowBlock = 6, kMaxPanels = 1;  // 12 of 16 (sixteen lanes are two registers)
#endif

// M rows of A by P panels of B. A's element (m, k) is a[m * a_row + k * a_col].
template <class Words, int M, int P>
LLMC_INLINE void block_product(const uint32_t* a, int64_t a_row, int64_t a_col, const float* b,
                               int64_t b_panel, int64_t depth, float* c, int64_t c_panel,
                               bool add) {
  v16f acc[M][P];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[m][p] = add ? load(c + p * c_panel + m * kLanes) : v16f{};
  for (int64_t k = 0; k < depth; ++k) {
    v16f column[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) column[p] = load(b + p * b_panel + k * kLanes);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p)
        acc[m][p] = Words::multiply_add(acc[m][p], a + m * a_row + k * a_col, column[p]);
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) store(c + p * c_panel + m * kLanes, acc[m][p]);
}

template <class Words, int P>
void panel_product(const uint32_t* a, int64_t a_row, int64_t a_col, int64_t rows, const float* b,
                   int64_t b_panel, int64_t depth, float* c, int64_t c_panel, bool add) {
  int64_t m = 0;
  for (; m + kRowBlock <= rows; m += kRowBlock)
    block_product<Words, kRowBlock, P>(a + m * a_row, a_row, a_col, b, b_panel, depth,
                                       c + m * kLanes, c_panel, add);
  for (; m < rows; ++m)
    block_product<Words, 1, P>(a + m * a_row, a_row, a_col, b, b_panel, depth, c + m * kLanes,
                               c_panel, add);
}

template <class Words>
void product(int64_t panels, const uint32_t* a, int64_t a_row, int64_t a_col, int64_t rows,
             const float* b, int64_t b_panel, int64_t depth, float* c, int64_t c_panel, bool add) {
  if (panels == 4 && kMaxPanels >= 4)
    panel_product<Words, 4>(a, a_row, a_col, rows, b, b_panel, depth, c, c_panel, add);
  else if (panels == 3 && kMaxPanels >= 4)
    panel_product<Words, 3>(a, a_row, a_col, rows, b, b_panel, depth, c, c_panel, add);
  else if (panels == 2)
    panel_product<Words, 2>(a, a_row, a_col, rows, b, b_panel, depth, c, c_panel, add);
  else
    panel_product<Words, 1>(a, a_row, a_col, rows, b, b_panel, depth, c, c_panel, add);
}

}  // namespace llmc
