// linear by dot products: rows of the weight, each read once and in order, with up to four rows of
// x at a time, for CPUs without tiles and for channels that do not fill a tile. x is converted once
// to the type and order in which weights are unpacked from a register.
#include "arena.h"
#include "dtypes.h"
#include "linear.h"
#include "parallel.h"
#include "sums.h"

#include <type_traits>

namespace llmc {
namespace {

constexpr int kToL2 = 2;          // the locality argument of __builtin_prefetch
constexpr int64_t kAhead = kNative == 8 ? 1024 : 3072;  // bytes; chosen by measurement: docs/cpu.md
constexpr int64_t kLineBytes = 64;
constexpr int64_t kPart = 512;  // inputs at a time of more than four rows of x: they fit in L1
constexpr int64_t kMostGroups = 8;  // of rows, whose sums of a part are kept on the stack
// Two rows of x that fill more than this of L1 are multiplied by several weight rows side by side.
template <class Words>
constexpr int64_t kStreamedTwice = 4096 / sizeof(typename Words::X);  // elements

// kStep elements of the weight as V, which add() multiplies by kStep elements of x, packed as X.
template <class Element>
struct Words {  // float
  using T = Element;
  using X = float;
  using V = vf;
  using Sum = vf;
  static constexpr int64_t kStep = kNative;
  LLMC_INLINE V get(const float* p) { return load_as<vf>(p); }
  LLMC_INLINE Sum add(Sum acc, V w, const float* x) { return acc + w * get(x); }
  static void pack(const T* x, int64_t n, X* to) { std::memcpy(to, x, n * sizeof(T)); }
};

template <>
struct Words<f16> {
  using T = f16;
  using X = float;
  struct V { vf low, high; };
  using Sum = vf;
  static constexpr int64_t kStep = 2 * kNative;
  LLMC_INLINE V get(const f16* p) { return {load_lanes<vf>(p), load_lanes<vf>(p + kNative)}; }
  LLMC_INLINE Sum add(Sum acc, V w, const float* x) {
    acc += w.low * load_as<vf>(x);
    return acc + w.high * load_as<vf>(x + kNative);
  }
  static void pack(const T* x, int64_t n, X* to) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(x[i]);
  }
};

#ifdef LLMC_AVX512_BF16
template <>
struct Words<bf16> {  // 32 products per instruction
  using T = bf16;
  using X = bf16;
  using V = __m512i;
  using Sum = v16f;
  static constexpr int64_t kStep = 32;
  LLMC_INLINE V get(const bf16* p) { return _mm512_loadu_si512(p); }
  LLMC_INLINE Sum add(Sum acc, V w, const bf16* x) {
    return (v16f)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)get(x));
  }
  static void pack(const T* x, int64_t n, X* to) { std::memcpy(to, x, n * sizeof(T)); }
};
#else
template <>
struct Words<bf16> {  // a register of bf16 becomes two of floats: even elements and odd elements
  using T = bf16;
  using X = float;
  using V = vu;
  using Sum = vf;
  static constexpr int64_t kStep = 2 * kNative;
  LLMC_INLINE V get(const bf16* p) { return load_as<vu>(p); }
  LLMC_INLINE Sum add(Sum acc, V w, const float* x) {
    acc += (vf)(w << 16) * load_as<vf>(x);
    return acc + (vf)(w & 0xffff0000u) * load_as<vf>(x + kNative);
  }
  static void pack(const T* x, int64_t n, X* to) {
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      const V w = get(x + i);
      store_as(to + i, (vf)(w << 16));
      store_as(to + i + kNative, (vf)(w & 0xffff0000u));
    }
    for (int64_t in = 0; i + in < n; ++in) to[i + in % 2 * kNative + in / 2] = to_float(x[i + in]);
  }
};
#endif

bool is_amd() {
#ifdef __x86_64__
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// Whether one or two rows of x are multiplied by the weight row by row. With registers of eight
// floats, several weight rows side by side are faster on Intel's processors.
bool streams_rows() { return kNative != 8 || is_amd(); }

// Whether a row of the weight is read with prefetches. Loads that convert are a tenth slower with
// them on AMD's processors with AVX-512.
template <class T>
bool prefetches() {
  return !(std::is_same_v<T, f16> && kNative == 16 && is_amd());
}

template <class Words>
struct Product {  // a linear, and rows of x packed for Words, padded with zeros to whole steps
  using T = typename Words::T;
  using X = typename Words::X;
  const LinearArgs& a;
  const X* x;
  int64_t stride, first;  // of the packed rows; the first row

  const T* weight(int64_t n) const {
    return static_cast<const T*>(a.weight) + n * a.weight_stride;
  }
  const X* row(int64_t m) const { return x + m * stride; }
  void put(int64_t m, int64_t n, float sum) const {
    if (a.bias) sum += to_float(static_cast<const T*>(a.bias)[n]);
    assign(static_cast<T*>(a.out)[(first + m) * a.out_stride + n], sum);
  }
};

// The last elements of a row of the weight, which do not fill a step.
template <class Words>
LLMC_INLINE typename Words::V get_rest(const typename Words::T* p, int64_t n) {
  typename Words::T rest[Words::kStep] = {};
  std::memcpy(rest, p, n * sizeof *p);
  return Words::get(rest);
}

// kSums / M rows of the weight, one after the other as in memory, by M rows of x; kFetch: with one
// prefetch per line.
template <int M, bool kFetch, class Words>
LLMC_INLINE void stream(const Product<Words>& p, int64_t n, int64_t m) {
  constexpr int R = kSums / M, kSteps = 4 / M;  // alternating sums, to hide the latency
  constexpr int64_t kStep = Words::kStep, kRound = kSteps * kStep;
  constexpr int64_t kSize = sizeof(typename Words::T);
  const int64_t depth = p.a.depth;
  for (int i = 0; i < R; ++i) {
    const typename Words::T* w = p.weight(n + i);
    typename Words::Sum acc[M][kSteps] = {};
    int64_t k = 0;
    for (; k + kRound <= depth; k += kRound) {
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
        const auto* at = w + k + s * kStep;
        if (kFetch && s * kStep * kSize % kLineBytes == 0)
          __builtin_prefetch(at + kAhead / kSize, 0, kToL2);
        const auto v = Words::get(at);
#pragma GCC unroll 2
        for (int j = 0; j < M; ++j)
          acc[j][s] = Words::add(acc[j][s], v, p.row(m + j) + k + s * kStep);
        if (kFetch) asm volatile("" ::: "memory");  // alternate with loads: else a tenth slower
      }
    }
    for (; k < depth; k += kStep) {
      const auto v = depth - k < kStep ? get_rest<Words>(w + k, depth - k) : Words::get(w + k);
#pragma GCC unroll 2
      for (int j = 0; j < M; ++j) acc[j][0] = Words::add(acc[j][0], v, p.row(m + j) + k);
    }
#pragma GCC unroll 2
    for (int j = 0; j < M; ++j) {
      auto sum = acc[j][0];
      for (int s = 1; s < kSteps; ++s) sum += acc[j][s];
      p.put(m + j, n + i, sum_lanes(sum));
    }
  }
}

// Prefetches the next rows of the weight in the order of memory, some bytes per step. Each group of
// rows of x does so for its share: if the first one did it for all, memory would be idle later.
struct Fetch {
  const char* at;
  int64_t bytes = 0, owed = 0;

  LLMC_METHOD void step() {
    for (owed += bytes; owed >= kLineBytes; owed -= kLineBytes, at += kLineBytes)
      __builtin_prefetch(at, 0, kToL2);
  }
};

// Inputs [begin, end). Sums of all parts but the last are left in `sums`, kSums for each block.
template <class Words>
struct Part {
  int64_t begin, end;
  typename Words::Sum* sums;
};

// R rows of the weight side by side, by M rows of x, of which `rows` are valid: each load is used
// for several products.
template <int M, int R, class Words>
LLMC_INLINE void block(const Product<Words>& p, int64_t n, int64_t m, int64_t rows,
                       const Part<Words>& part, Fetch& fetch) {
  constexpr int kTurns = kSums / (M * R);  // alternating sums
  constexpr int64_t kStep = Words::kStep, kRound = kTurns * kStep;
  const int64_t stride = p.a.weight_stride;
  const typename Words::T* w = p.weight(n);
  const typename Words::X* x[M];
#pragma GCC unroll 6
  for (int j = 0; j < M; ++j) x[j] = p.row(m + std::min<int64_t>(j, rows - 1));
  typename Words::Sum acc[kSums] = {};
  if (part.begin > 0)
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) acc[i] = part.sums[i];
  auto step = [&](auto get, int64_t k, int turn) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const auto v = get(w + i * stride + k);
#pragma GCC unroll 6
      for (int j = 0; j < M; ++j) {
        auto& sum = acc[(turn * M + j) * R + i];
        sum = Words::add(sum, v, x[j] + k);
      }
    }
  };
  int64_t k = part.begin;
  for (; k + kRound <= part.end; k += kRound) {
#pragma GCC unroll 4
    for (int t = 0; t < kTurns; ++t) {
      const int64_t at = k + t * kStep;
      fetch.step();
      step([](const auto* p) __attribute__((always_inline)) { return Words::get(p); }, at, t);
    }
  }
  if (part.end < p.a.depth) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) part.sums[i] = acc[i];
    return;
  }
  for (; k + kStep <= part.end; k += kStep)
    step([](const auto* p) __attribute__((always_inline)) { return Words::get(p); }, k, 0);
  if (const int64_t tail = part.end - k)
    step([=](const auto* p) __attribute__((always_inline)) { return get_rest<Words>(p, tail); },
         k, 0);
  float sums[kSums];
  sum_each(acc, sums);
  for (int64_t j = 0; j < rows; ++j)
    for (int64_t i = 0; i < R; ++i) {
      float sum = sums[j * R + i];
      for (int64_t t = 1; t < kTurns; ++t) sum += sums[(t * M + j) * R + i];
      p.put(m + j, n + i, sum);
    }
}

// kSums rows of the weight by M rows of x, one of so many groups of the `rows` in all.
template <int M, class Words>
LLMC_INLINE void blocks(const Product<Words>& p, int64_t n, int64_t m, int64_t rows, int64_t groups,
                        Part<Words> part, Fetch& fetch) {
  constexpr int R = kSums / M;
  const int64_t end = n + kSums, count = std::min<int64_t>(M, rows - m);
  const auto each = [&](auto at_once) __attribute__((always_inline)) {
    constexpr int kRows = decltype(at_once)::value;
    fetch.bytes = kRows * Words::kStep * sizeof(typename Words::T) / groups;
    for (; n < end; n += kRows, part.sums += kSums) block<M, kRows>(p, n, m, count, part, fetch);
  };
  // Reading from two places at a time is faster if each loaded register is used for M products.
  if (kNative == 16 && Words::kStep == kNative && M == 4 && groups == 1)
    each(std::integral_constant<int, 2>{});
  else
    each(std::integral_constant<int, R>{});
}

// One channel and one row, for the edges.
template <class Words>
void single(const Product<Words>& p, int64_t n, int64_t m) {
  const typename Words::T* w = p.weight(n);
  typename Words::Sum acc = {};
  int64_t k = 0;
  for (; k + Words::kStep <= p.a.depth; k += Words::kStep)
    acc = Words::add(acc, Words::get(w + k), p.row(m) + k);
  if (k < p.a.depth) acc = Words::add(acc, get_rest<Words>(w + k, p.a.depth - k), p.row(m) + k);
  p.put(m, n, sum_lanes(acc));
}

template <class Words>
void channels(const Product<Words>& p, int64_t rows, int64_t begin, int64_t end) {
  // Groups of four, and of three if that divides kSums, so that few rows are computed twice.
  constexpr bool kThrees = kSums % 3 == 0;
  constexpr int kAtOnce = kThrees ? 6 : 4;
  const bool are_few = rows == 1 || (rows == 2 && p.stride < kStreamedTwice<Words>);
  const bool streams = are_few && streams_rows();
  const bool fetches = prefetches<typename Words::T>();
  const bool at_once = rows > 4 && rows <= kAtOnce;
  const int64_t groups = at_once ? 1 : (rows + 3) / 4;
  const int64_t fours = kThrees ? std::max<int64_t>(0, rows - 3 * groups) : groups;
  const int64_t depth = p.a.depth, step = rows > 4 && groups <= kMostGroups ? kPart : depth;
  // Of three rows or more, so at most kSums / 3 blocks. Six at once have more, but are alone.
  constexpr int64_t kGroupSums = kSums * kSums / 3;
  alignas(64) typename Words::Sum sums[kMostGroups * kGroupSums];
  const auto stream_at = [&](int64_t n, auto fetch) __attribute__((always_inline)) {
    constexpr bool kFetch = decltype(fetch)::value;
    if (rows == 1) {
      stream<1, kFetch>(p, n, 0);
    } else {
      stream<2, kFetch>(p, n, 0);
      stream<2, kFetch>(p, n + kSums / 2, 0);
    }
  };
  int64_t n = begin;
  for (; n + kSums <= end; n += kSums) {  // all rows of x while these weight rows are in the cache
    Fetch fetch{reinterpret_cast<const char*>(p.weight(n + kSums))};
    if (streams && fetches) {
      stream_at(n, std::true_type{});
    } else if (streams) {
      stream_at(n, std::false_type{});
    } else {
      for (int64_t k = 0; k < depth; k += step) {
        Part<Words> part{k, std::min(k + step, depth), sums};
        if (rows == 1) {
          blocks<1>(p, n, 0, rows, groups, part, fetch);
        } else if (rows == 2) {
          blocks<2>(p, n, 0, rows, groups, part, fetch);
        } else if (at_once) {
          blocks<kAtOnce>(p, n, 0, rows, groups, part, fetch);
        } else {
          int64_t m = 0;
          for (; m < 4 * fours; m += 4, part.sums += kGroupSums)
            blocks<4>(p, n, m, rows, groups, part, fetch);
          if constexpr (kThrees)
            for (; m < rows; m += 3, part.sums += kGroupSums)
              blocks<3>(p, n, m, rows, groups, part, fetch);
        }
      }
    }
  }
  for (; n < end; ++n)
    for (int64_t m = 0; m < rows; ++m) single(p, n, m);
}

// Rows [row, row + rows) of x, packed for Words.
template <class Words>
Product<Words> pack(const LinearArgs& a, int64_t row, int64_t rows) {
  using T = typename Words::T;
  using X = typename Words::X;
  if constexpr (std::is_same_v<T, X>)
    if (a.depth % Words::kStep == 0)
      return {a, static_cast<const T*>(a.x) + row * a.x_stride, a.x_stride, row};
  static thread_local Arena arena;
  const int64_t stride = (a.depth + 63) / 64 * 64;
  arena.reset(rows * stride * sizeof(X));
  X* const to = arena.take<X>(rows * stride);
  for (int64_t m = 0; m < rows; ++m) {
    std::memset(to + m * stride + a.depth / 64 * 64, 0, (stride - a.depth / 64 * 64) * sizeof(X));
    Words::pack(static_cast<const T*>(a.x) + (row + m) * a.x_stride, a.depth,
                to + m * stride);
  }
  return {a, to, stride, row};
}

}  // namespace

void linear_dot(const LinearArgs& a) {
  with_type(a.dtype, [&](auto t) {
    const auto p = pack<Words<decltype(t)>>(a, 0, a.rows);
    const int64_t groups = (a.channels + kSums - 1) / kSums;
    parallel_rows(groups, kSums * a.depth * (a.rows + 3) / 4, a.threads,
                  [&](int64_t begin, int64_t end) {
      channels(p, a.rows, begin * kSums, std::min(a.channels, end * kSums));
    });
  });
}

void dot_share(const LinearArgs& a, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  channels(pack<Words<bf16>>(a, row, rows), rows, begin, end);
}

}  // namespace llmc
