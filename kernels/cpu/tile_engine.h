// How a tile of keys is packed and multiplied, by element type and CPU features.
//
// An engine has: T (cache element), kPanels (panels of 16 query rows multiplied together), kKeyStep
// (keys are padded to a multiple of it), kDimStep (the same for head sizes), pack_panel, pack_keys,
// pack_values, store_weights, scores and add_values. Keys past `n` are packed as zeros. kPlainRows:
// packed keys and values are rows of float, values `row` apart, so dense ones need not be packed.
#pragma once

#include "amx.h"
#include "attention.h"
#include "tile_gemm.h"
#include "transpose.h"


namespace llmc {

inline int64_t round_up(int64_t x, int64_t step) {
  return (x + step - 1) / step * step;
}

// Any T with float arithmetic: the portable engine, and the exact one for float32.
template <class Element>
struct FloatEngine {
  using T = Element;
  static constexpr int64_t kPanels = kMaxPanels, kKeyStep = 1, kDimStep = 1;
  static constexpr bool kExact = true;
  static constexpr bool kPlainRows = std::is_same_v<Element, float>;
  static void enter() {}
  static void leave() {}
  static int64_t query_words(int64_t dim) { return dim; }

  static void pack_panel(const T* const* rows, int64_t dim, uint32_t* panel, int64_t) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int64_t d = 0; d < dim; ++d) {
        const float x = rows[lane] ? to_float(rows[lane][d]) : 0.0f;
        std::memcpy(panel + d * kLanes + lane, &x, sizeof x);
      }
  }
  static void pack_rows(const T* const* rows, int64_t n, int64_t dim, uint32_t* to) {
    for (int64_t k = 0; k < n; ++k) {
      float* out = reinterpret_cast<float*>(to + k * dim);
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes) store(out + d, load(rows[k] + d));
      for (; d < dim; ++d) out[d] = to_float(rows[k][d]);
    }
  }
  static void pack_keys(const T* const* rows, int64_t n, int64_t, int64_t dim, uint32_t* to,
                        int64_t) {
    pack_rows(rows, n, dim, to);
  }
  static void pack_values(const T* const* rows, int64_t n, int64_t, int64_t dim, uint32_t* to,
                          int64_t) {
    pack_rows(rows, n, dim, to);
  }
  LLMC_INLINE void store_weights(uint32_t* weights, int64_t key, v16f a, v16f b) {
    store(reinterpret_cast<float*>(weights) + key * kLanes, a);
    store(reinterpret_cast<float*>(weights) + (key + 1) * kLanes, b);
  }
  static void scores(int64_t panels, const uint32_t* keys, int64_t n, int64_t dim,
                     const uint32_t* query, float* out) {
    product<FloatWords>(panels, keys, dim, 1, n, reinterpret_cast<const float*>(query),
                        dim * kLanes, dim, out, kPanelScores, false);
  }
  static void add_values(int64_t panels, const uint32_t* values, int64_t row, int64_t n, int64_t dim,
                         const uint32_t* weights, float* acc) {
    product<FloatWords>(panels, values, 1, row, dim, reinterpret_cast<const float*>(weights),
                        kPanelScores, n, acc, dim * kLanes, true);
  }
};

#ifdef LLMC_AVX512_BF16
LLMC_INLINE v16u load_words(const bf16* p, int64_t n) {  // n < 16 elements as 32-bit words
  const __mmask16 mask = n < kLanes ? (__mmask16)((1u << n) - 1) : (__mmask16)0xffff;
  return (v16u)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
}

// Shared by the two bf16 engines: queries and weights as pairs, keys as padded rows.
template <int64_t kStep>
struct PairPacking {
  using T = bf16;
  static constexpr int64_t kDimStep = kStep;
  static constexpr bool kExact = false;  // weights are rounded to bf16 anyway
  static constexpr bool kPlainRows = false;
  static int64_t query_words(int64_t dim) { return dim / 2; }

  // Packs whole panels in blocks of 16 words; pack_query does the rest.
  static void pack_panel(const bf16* const* rows, int64_t dim, uint32_t* panel, int64_t padded) {
    int64_t w = 0;
    for (; 2 * w + 32 <= dim; w += kLanes) {
      __m512i block[16];
      for (int lane = 0; lane < kLanes; ++lane)
        block[lane] = rows[lane] ? _mm512_loadu_si512(rows[lane] + 2 * w) : _mm512_setzero_si512();
      transpose(block);
      for (int i = 0; i < kLanes; ++i)
        _mm512_storeu_si512(panel + (w + i) * kLanes, block[i]);
    }
    for (int lane = 0; lane < kLanes; ++lane) pack_query(rows[lane], dim, lane, panel, padded, w);
  }
  static void pack_query(const bf16* row, int64_t dim, int lane, uint32_t* panel, int64_t padded,
                         int64_t from) {
    for (int64_t w = from; w < padded / 2; ++w) {
      const uint32_t low = row && 2 * w < dim ? row[2 * w].bits : 0;
      const uint32_t high = row && 2 * w + 1 < dim ? row[2 * w + 1].bits : 0;
      panel[w * kLanes + lane] = low | high << 16;
    }
  }
  static void pack_keys(const bf16* const* rows, int64_t n, int64_t padded_n, int64_t dim,
                        uint32_t* to, int64_t padded) {
    for (int64_t k = 0; k < padded_n; ++k) {
      bf16* out = reinterpret_cast<bf16*>(to) + k * padded;
      if (k >= n) {
        std::memset(out, 0, padded * sizeof(bf16));
        continue;
      }
      int64_t d = 0;
      for (; d + 32 <= dim; d += 32)
        _mm512_storeu_si512(out + d, _mm512_loadu_si512(rows[k] + d));
      if (d < padded) {
        std::memset(out + d, 0, (padded - d) * sizeof(bf16));
        std::memcpy(out + d, rows[k] + d, (dim - d) * sizeof(bf16));
      }
    }
  }
  LLMC_INLINE void store_weights(uint32_t* weights, int64_t key, v16f a, v16f b) {
    // one instruction rounds both keys; a permute brings each query's two side by side
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    _mm512_storeu_si512(weights + key / 2 * kLanes, _mm512_permutexvar_epi16(order, both));
  }
};

struct PairEngine : PairPacking<2> {
  static constexpr int64_t kPanels = kMaxPanels, kKeyStep = 2;
  static void enter() {}
  static void leave() {}

  static void pack_values(const bf16* const* rows, int64_t n, int64_t padded_n, int64_t dim,
                          uint32_t* to, int64_t padded) {
    for (int64_t k = 0; k < padded_n; k += 2) {
      for (int64_t d = 0; d < padded; d += kLanes) {
        const int64_t left = std::min<int64_t>(kLanes, dim - d);
        v16u low = {}, high = {};
        if (k < n) low = load_words(rows[k] + d, left);
        if (k + 1 < n) high = load_words(rows[k + 1] + d, left);
        const v16u pair = low | high << 16;
        std::memcpy(to + k / 2 * padded + d, &pair,
                    std::min<int64_t>(kLanes, padded - d) * sizeof(uint32_t));
      }
    }
  }
  static void scores(int64_t panels, const uint32_t* keys, int64_t n, int64_t dim,
                     const uint32_t* query, float* out) {
    product<PairWords>(panels, keys, dim / 2, 1, n, reinterpret_cast<const float*>(query),
                       dim / 2 * kLanes, dim / 2, out, kPanelScores, false);
  }
  static void add_values(int64_t panels, const uint32_t* values, int64_t, int64_t n, int64_t dim,
                         const uint32_t* weights, float* acc) {
    product<PairWords>(panels, values, 1, dim, dim, reinterpret_cast<const float*>(weights),
                       kPanelScores, n / 2, acc, dim * kLanes, true);
  }
};
#endif

#ifdef LLMC_AMX
// Tiles of 16 rows of 64 bytes. A is read row by row: keys need no packing beyond padding, and
// values are transposed so that their rows are head elements.
struct AmxEngine : PairPacking<32> {
  static constexpr int64_t kPanels = 2, kKeyStep = 32;

  static void enter() { enter_amx(); }
  static void leave() { _tile_release(); }

  // to[d][key]: a row per head element, kTileKeys bf16 long.
  static void pack_values(const bf16* const* rows, int64_t n, int64_t padded_n, int64_t dim,
                          uint32_t* to, int64_t padded) {
    for (int64_t k = 0; k < padded_n; k += 32)
      for (int64_t d = 0; d < padded; d += kLanes) {
        const int64_t left = std::max<int64_t>(0, std::min<int64_t>(kLanes, dim - d));
        __m512i pairs[16];
        for (int64_t j = 0; j < 16; ++j) {
          const int64_t key = k + 2 * j;
          v16u low = {}, high = {};
          if (key < n && left) low = load_words(rows[key] + d, left);
          if (key + 1 < n && left) high = load_words(rows[key + 1] + d, left);
          pairs[j] = (__m512i)(low | high << 16);
        }
        transpose(pairs);
        for (int64_t j = 0; j < 16; ++j)
          _mm512_storeu_si512(to + (d + j) * (kTileKeys / 2) + k / 2, pairs[j]);
      }
  }
  // C[m][lane] (+)= A[m][k] B[k][lane] for 32 rows of A and one or two panels of B. All strides in
  // 32-bit words; rows, and depth in bf16, are multiples of 32.
  template <bool kTwo>
  static void product(const uint32_t* a, int64_t a_row, int64_t rows, const uint32_t* b,
                      int64_t b_panel, int64_t depth, float* c, int64_t c_panel, bool add) {
    constexpr int64_t kTileWords = 16 * kLanes;
    for (int64_t m = 0; m < rows; m += 32) {
      float *c0 = c + m * kLanes, *c1 = c0 + c_panel;
      if (add) {
        _tile_loadd(0, c0, 64);
        _tile_loadd(1, c0 + kTileWords, 64);
        if (kTwo) _tile_loadd(2, c1, 64);
        if (kTwo) _tile_loadd(3, c1 + kTileWords, 64);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        if (kTwo) _tile_zero(2);
        if (kTwo) _tile_zero(3);
      }
      for (int64_t k = 0; k < depth / 32; ++k) {
        _tile_loadd(4, a + m * a_row + k * kLanes, a_row * 4);
        _tile_loadd(6, b + k * kTileWords, 64);
        _tile_loadd(5, a + (m + 16) * a_row + k * kLanes, a_row * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (kTwo) {
          _tile_loadd(7, b + b_panel + k * kTileWords, 64);
          _tile_dpbf16ps(2, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, c0, 64);
      _tile_stored(1, c0 + kTileWords, 64);
      if (kTwo) _tile_stored(2, c1, 64);
      if (kTwo) _tile_stored(3, c1 + kTileWords, 64);
    }
  }
  static void scores(int64_t panels, const uint32_t* keys, int64_t n, int64_t dim,
                     const uint32_t* query, float* out) {
    auto run = panels == 2 ? &product<true> : &product<false>;
    run(keys, dim / 2, n, query, dim / 2 * kLanes, dim, out, kPanelScores, false);
  }
  static void add_values(int64_t panels, const uint32_t* values, int64_t, int64_t n, int64_t dim,
                         const uint32_t* weights, float* acc) {
    auto run = panels == 2 ? &product<true> : &product<false>;
    run(values, kTileKeys / 2, dim, weights, kPanelScores, n, acc, dim * kLanes, true);
  }
};
#endif

}  // namespace llmc
