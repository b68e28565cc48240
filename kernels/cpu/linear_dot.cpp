// linear by dot products: rows of the weight, each read once and in order, with up to four rows of
// x at a time. For one or two rows of x, for CPUs without tiles, and for the channels that do not
// fill a tile.
#include "linear.h"

namespace llmc {
namespace {

constexpr int kToL2 = 2;          // the locality that __builtin_prefetch takes
constexpr int64_t kAhead = 3072;  // bytes; measured: docs/cpu.md
constexpr int64_t kLine = 32;     // elements of a cache line

#ifdef LLMC_AVX512_BF16
struct Words {  // 32 products an instruction
  static constexpr int64_t kStep = 32;
  using V = __m512i;
  LLMC_INLINE V get(const bf16* p) { return _mm512_loadu_si512(p); }
  LLMC_INLINE V get_n(const bf16* p, int64_t n) {
    return _mm512_maskz_loadu_epi16((1u << n) - 1, p);
  }
  LLMC_INLINE v16f add(v16f acc, V w, V x) {
    return (v16f)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
  }
};
#else
struct Words {
  static constexpr int64_t kStep = kLanes;
  using V = v16f;
  LLMC_INLINE V get(const bf16* p) { return load(p); }
  LLMC_INLINE V get_n(const bf16* p, int64_t n) { return load_n(p, n); }
  LLMC_INLINE v16f add(v16f acc, V w, V x) { return acc + w * x; }
};
#endif

#ifdef LLMC_AVX512
constexpr int kSums = 16;  // of 32 registers

// The sums of the lanes of sixteen vectors, in order: in a tree, so that the loads of the next block
// need not wait behind hundreds of instructions.
LLMC_INLINE v16f sum_each(const v16f* acc) {
  __m512 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // lanes 0, 1 of each 128 bits: vectors 2i, 2i + 1
    const __m512 a = (__m512)acc[2 * i], b = (__m512)acc[2 * i + 1];
    t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)  // lanes 0 to 3: vectors 4i to 4i + 3
    t[i] = _mm512_add_ps(_mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44),
                         _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    t[i] = _mm512_add_ps(_mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0xdd));
  return (v16f)_mm512_add_ps(_mm512_shuffle_f32x4(t[0], t[1], 0x88),
                             _mm512_shuffle_f32x4(t[0], t[1], 0xdd));
}
#else
constexpr int kSums = 4;  // a vector is two or more of 16 registers

LLMC_INLINE v16f sum_each(const v16f* acc) {
  v16f sums = {};
  for (int i = 0; i < kSums; ++i) sums[i] = sum_lanes(acc[i]);
  return sums;
}
#endif

// Rows [m, m + rows) of the sums of kSums / M channels from `n` on.
template <int M>
LLMC_INLINE void write_sums(const LinearArgs& a, int64_t n, int64_t m, int64_t rows,
                            const v16f* acc) {
  constexpr int R = kSums / M;
  float sums[kLanes];
  store(sums, sum_each(acc));
  for (int64_t j = 0; j < rows; ++j)
    for (int64_t i = 0; i < R; ++i)
      out_row(a, m + j)[n + i] = to_bf16(sums[j * R + i] + bias_of(a, n + i));
}

// kSums / M rows of the weight, one after the other as they lie in memory, by M rows of x. One
// stream of lines, with one request ahead of each, is what memory answers fastest.
template <int M>
LLMC_INLINE void stream(const LinearArgs& a, int64_t n, int64_t m) {
  constexpr int R = kSums / M, kSteps = 2;  // two sums in turn: no step waits for the one before
  constexpr int64_t kStep = Words::kStep, kRound = kSteps * kStep;
  const bf16* x[M];
#pragma GCC unroll 2
  for (int j = 0; j < M; ++j) x[j] = x_row(a, m + j);
  const int64_t depth = a.depth;
  v16f sums[kSums];
  for (int i = 0; i < R; ++i) {
    const bf16* w = weight_row(a, n + i);
    v16f acc[M][kSteps] = {};
    int64_t k = 0;
    for (; k + kRound <= depth; k += kRound) {
#pragma GCC unroll 2
      for (int s = 0; s < kSteps; ++s) {
        const bf16* at = w + k + s * kStep;
        if (s * kStep % kLine == 0) __builtin_prefetch(at + kAhead / 2, 0, kToL2);
        const auto v = Words::get(at);
#pragma GCC unroll 2
        for (int j = 0; j < M; ++j)
          acc[j][s] = Words::add(acc[j][s], v, Words::get(x[j] + k + s * kStep));
        asm volatile("" ::: "memory");  // requests and loads in turn: two of a kind cost a tenth
      }
    }
    for (; k < depth; k += kStep) {
      const int64_t left = depth - k;
      auto get = [=](const bf16* p) { return left < kStep ? Words::get_n(p, left) : Words::get(p); };
      const auto v = get(w + k);
#pragma GCC unroll 2
      for (int j = 0; j < M; ++j) acc[j][0] = Words::add(acc[j][0], v, get(x[j] + k));
    }
#pragma GCC unroll 2
    for (int j = 0; j < M; ++j) sums[j * R + i] = acc[j][0] + acc[j][1];
  }
  write_sums<M>(a, n, m, M, sums);
}

// kSums / M rows of the weight side by side, by M rows of x, of which `rows` count: what is loaded
// of either serves several products. kFetch asks for the same part of the next kSums rows.
template <int M, bool kFetch>
LLMC_INLINE void block(const LinearArgs& a, int64_t n, int64_t m, int64_t rows) {
  constexpr int R = kSums / M;
  const bf16 *w = weight_row(a, n), *x[M];
#pragma GCC unroll 4
  for (int j = 0; j < M; ++j) x[j] = x_row(a, m + std::min<int64_t>(j, rows - 1));
  const int64_t whole = a.depth / Words::kStep * Words::kStep, tail = a.depth - whole;
  v16f acc[kSums] = {};
  auto step = [&](auto get, int64_t k) __attribute__((always_inline)) {
    typename Words::V xs[M];
#pragma GCC unroll 4
    for (int j = 0; j < M; ++j) xs[j] = get(x[j] + k);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const auto v = get(w + i * a.weight_stride + k);
#pragma GCC unroll 4
      for (int j = 0; j < M; ++j) acc[j * R + i] = Words::add(acc[j * R + i], v, xs[j]);
    }
  };
  for (int64_t k = 0; k < whole; k += Words::kStep) {
    if (kFetch) {
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i)
        __builtin_prefetch(w + (kSums + i) * a.weight_stride + k, 0, kToL2);
    }
    step([](const bf16* p) __attribute__((always_inline)) { return Words::get(p); }, k);
  }
  if (tail)
    step([=](const bf16* p) __attribute__((always_inline)) { return Words::get_n(p, tail); }, whole);
  write_sums<M>(a, n, m, rows, acc);
}

// One channel and one row: what is left at the edges.
void single(const LinearArgs& a, int64_t n, int64_t m) {
  const bf16 *w = weight_row(a, n), *x = x_row(a, m);
  v16f acc = {};
  int64_t k = 0;
  for (; k + Words::kStep <= a.depth; k += Words::kStep)
    acc = Words::add(acc, Words::get(w + k), Words::get(x + k));
  if (k < a.depth)
    acc = Words::add(acc, Words::get_n(w + k, a.depth - k), Words::get_n(x + k, a.depth - k));
  out_row(a, m)[n] = to_bf16(sum_lanes(acc) + bias_of(a, n));
}

}  // namespace

void dot_share(const LinearArgs& a, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  const int64_t last = row + rows;
  int64_t n = begin;
  for (; n + kSums <= end; n += kSums) {  // all rows of x while these of the weight are near
    int64_t m = row;
    for (; last - m > 2; m += 4)
      for (int64_t i = 0; i < kSums; i += kSums / 4)
        if (m == row)
          block<4, true>(a, n + i, m, std::min<int64_t>(4, last - m));
        else
          block<4, false>(a, n + i, m, std::min<int64_t>(4, last - m));
    if (last - m == 2) {
      stream<2>(a, n, m);
      stream<2>(a, n + kSums / 2, m);
    }
    if (last - m == 1) stream<1>(a, n, m);
  }
  for (; n < end; ++n)
    for (int64_t m = row; m < last; ++m) single(a, n, m);
}

}  // namespace llmc
