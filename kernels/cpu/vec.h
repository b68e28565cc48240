// Sixteen floats at a time, on any CPU; memory can hold bf16 or f16.
// Intrinsics are used only where they are faster, each next to its portable version.
#pragma once

#include "lanes.h"

#include <bit>
#include <cmath>
#include <limits>

namespace llmc {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896340736f;

struct bf16 {
  uint16_t bits;
};

struct f16 {  // IEEE binary16
  uint16_t bits;
};

#ifdef __aarch64__
using ieee_half = __fp16;  // C++ has _Float16 only from GCC 13 on this architecture
#else
using ieee_half = _Float16;
#endif

LLMC_INLINE v16f splat(float x) {
  return x - v16f{};
}

LLMC_INLINE v16i splat_int(int32_t x) {
  return x - v16i{};
}

LLMC_INLINE v16f lane_numbers() {
  alignas(64) static constexpr float kNumbers[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                         8, 9, 10, 11, 12, 13, 14, 15};
  return load_as<v16f>(kNumbers);
}

LLMC_INLINE v16f select(v16i mask, v16f a, v16f b) {  // mask lanes are 0 or -1
  return (v16f)(((v16i)a & mask) | ((v16i)b & ~mask));
}

template <class V>
LLMC_INLINE V vmax(V a, V b) {
  if constexpr (kIsPair<V>) {
    return {vmax(a.lo, b.lo), vmax(a.hi, b.hi)};
  } else {
#if defined(LLMC_AVX512)
    return (V)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (V)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
  }
}

template <class V>
LLMC_INLINE V vmin(V a, V b) {
  if constexpr (kIsPair<V>) {
    return {vmin(a.lo, b.lo), vmin(a.hi, b.hi)};
  } else {
#if defined(LLMC_AVX512)
    return (V)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (V)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
  }
}

template <class V>  // vf or v16f
LLMC_INLINE V load_lanes(const float* p) {
  return load_as<V>(p);
}

template <class V>
LLMC_INLINE V load_lanes(const bf16* p) {
  if constexpr (kIsPair<V>) {
    return {load_lanes<decltype(V::lo)>(p), load_lanes<decltype(V::lo)>(p + sizeof(V) / 8)};
  } else {
    return (V)(widen_from<vu, uint16_t>(p) << 16);
  }
}

template <class V>
LLMC_INLINE V load_lanes(const f16* p) {
  if constexpr (kIsPair<V>) {
    return {load_lanes<decltype(V::lo)>(p), load_lanes<decltype(V::lo)>(p + sizeof(V) / 8)};
  } else {
#if defined(LLMC_AVX512)
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    return widen_from<V, ieee_half>(p);
#endif
  }
}

template <class V>
LLMC_INLINE V load_lanes(const int8_t* p) {
  if constexpr (kIsPair<V>) {
    return {load_lanes<decltype(V::lo)>(p), load_lanes<decltype(V::lo)>(p + sizeof(V) / 8)};
  } else {
    return convert<V>(widen_from<vi, int8_t>(p));
  }
}

template <class T>
LLMC_INLINE v16f load(const T* p) {
  return load_lanes<v16f>(p);
}

template <class V>
LLMC_INLINE void store(float* p, V x) {
  store_as(p, x);
}

template <class V>
LLMC_INLINE void store(bf16* p, V x) {  // to nearest, ties to even
  if constexpr (kIsPair<V>) {
    store(p, x.lo);
    store(p + sizeof(V) / 8, x.hi);
  } else {
#ifdef LLMC_AVX512_BF16
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    const vu bits = (vu)x, nan = (vu)(x != x);
    const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    narrow_to<uint16_t>(p, (rounded & ~nan) | (nan & 0x7fc0u));
#endif
  }
}

template <class V>
LLMC_INLINE void store(f16* p, V x) {  // to nearest, ties to even
  if constexpr (kIsPair<V>) {
    store(p, x.lo);
    store(p + sizeof(V) / 8, x.hi);
  } else {
#if defined(LLMC_AVX512)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, 0));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, 0));
#else
    narrow_to<ieee_half>(p, x);
#endif
  }
}

template <class T>
LLMC_INLINE v16f load_n(const T* p, int64_t n) {  // the first n < 16 lanes, zeros after
  T tmp[kLanes] = {};
  std::memcpy(tmp, p, n * sizeof(T));
  return load(tmp);
}

template <class T>
LLMC_INLINE void store_n(T* p, v16f x, int64_t n) {
  T tmp[kLanes];
  store(tmp, x);
  std::memcpy(p, tmp, n * sizeof(T));
}

// The same for n <= 16, faster for whole vectors if the caller's n is constant.
template <class T>
LLMC_INLINE v16f load_up_to(const T* p, int64_t n) {
  return n < kLanes ? load_n(p, n) : load(p);
}

template <class T>
LLMC_INLINE void store_up_to(T* p, v16f x, int64_t n) {
  n < kLanes ? store_n(p, x, n) : store(p, x);
}

// Calls visit(i, count) for each vector of n elements: the last may have fewer than 16. `visit` must
// be inlined, so that its count is constant for all others.
template <class Visit>
LLMC_INLINE void each_vector(int64_t n, const Visit& visit) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) visit(i, int64_t(kLanes));
  if (i < n) visit(i, n - i);
}

LLMC_INLINE float to_float(float x) {
  return x;
}

LLMC_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

LLMC_INLINE float to_float(int8_t x) {
  return x;
}

LLMC_INLINE float to_float(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  ieee_half y;
  std::memcpy(&y, &x, sizeof y);
  return float(y);
#else  // the bindings: the compiler would call a function that only libgcc from GCC 12 on has
  const float size = std::bit_cast<float>(uint32_t(x.bits & 0x7fff) << 13) * 0x1p112f;
  const uint32_t rare = (x.bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;  // infinity or NaN
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(size) | rare | sign);
#endif
}

LLMC_INLINE bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return bf16{0x7fc0};
  return bf16{uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

LLMC_INLINE void assign(float& y, float x) {
  y = x;
}

LLMC_INLINE void assign(bf16& y, float x) {
  y = to_bf16(x);
}

LLMC_INLINE void assign(f16& y, float x) {
#ifdef __F16C__
  y.bits = _cvtss_sh(x, 0);
#else
  const ieee_half half = ieee_half(x);
  std::memcpy(&y, &half, sizeof y);
#endif
}

template <class V>
LLMC_INLINE float sum_lanes(V x) {
  if constexpr (kIsPair<V>) {
    return sum_lanes(x.lo + x.hi);
  } else {
#if defined(LLMC_AVX512)
    return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX__)
    const __m256 all = (__m256)x;
    __m128 part = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    part = _mm_add_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
  }
}

template <class V>
LLMC_INLINE float max_lanes(V x) {
  if constexpr (kIsPair<V>) {
    return max_lanes(vmax(x.lo, x.hi));
  } else {
#if defined(LLMC_AVX512)
    return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX__)
    const __m256 all = (__m256)x;
    __m128 part = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    part = _mm_max_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_max_ss(part, _mm_movehdup_ps(part)));
#else
    float m = x[0];
    for (int i = 1; i < kNative; ++i) m = m > x[i] ? m : x[i];
    return m;
#endif
  }
}

LLMC_INLINE vi larger(vi a, vi b) { return a > b ? a : b; }
template <class Half>
LLMC_INLINE Pair<int32_t, Half> larger(const Pair<int32_t, Half>& a, const Pair<int32_t, Half>& b) {
  return {larger(a.lo, b.lo), larger(a.hi, b.hi)};
}

template <class V>  // vi or v16i
LLMC_INLINE int32_t max_ints(V x) {
  if constexpr (kIsPair<V>) {
    return max_ints(larger(x.lo, x.hi));
  } else {
#if defined(LLMC_AVX512)
    return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
    const __m256i all = (__m256i)x;
    __m128i part = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    part = _mm_max_epi32(part, _mm_shuffle_epi32(part, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(part, _mm_shuffle_epi32(part, 0xb1)));
#else
    int32_t m = x[0];
    for (int i = 1; i < kNative; ++i) m = m > x[i] ? m : x[i];
    return m;
#endif
  }
}

// The largest of n magnitudes: NaN if any is NaN, for as integers they have the order of the floats
// with NaN above infinity.
template <class T>
LLMC_INLINE float largest_magnitude(const T* x, int64_t n) {
  v16i most = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = larger(most, (v16i)((v16u)load(x + i) & 0x7fffffffu));
  if (i < n) most = larger(most, (v16i)((v16u)load_n(x + i, n - i) & 0x7fffffffu));
  return std::bit_cast<float>(max_ints(most));
}

LLMC_INLINE v16f round_lanes(v16f x) {  // to the nearest integer; |x| below 2^22
#ifdef LLMC_AVX512
  return (v16f)_mm512_roundscale_ps((__m512)x, 0);
#else
  const v16f magic = splat(12582912.0f);  // adding 1.5 * 2^23 leaves no fraction bits
  return (x + magic) - magic;
#endif
}

// 2^(whole + f), |f| <= 0.5, to about 1.5e-7 relative; 0 on underflow.
LLMC_INLINE v16f exp2_parts(v16f whole, v16f f) {
  v16f p = splat(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
#ifdef LLMC_AVX512
  return (v16f)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  v16i exponent = convert<v16i>(whole);
  v16i alive = exponent > -126;
  return (v16f)(((v16i)p + (exponent << 23)) & alive);
#endif
}

LLMC_INLINE v16f exp2_lanes(v16f x) {  // x below 127
  x = vmax(x, splat(-150.0f));
  v16f whole = round_lanes(x);
  return exp2_parts(whole, x - whole);
}

// 2^x, or within 8e-5 of it if the result is rounded to bf16 anyway.
template <bool kExact>
LLMC_INLINE v16f exp2_for(v16f x) {
#ifdef LLMC_AVX512
  if (!kExact) {
    const v16f f = (v16f)_mm512_reduce_ps((__m512)x, 1);  // above the floor; 0 for -inf
    v16f p = splat(7.8024521e-2f);
    p = p * f + 2.2606718e-1f;
    p = p * f + 6.9583352e-1f;
    p = p * f + 9.9992522e-1f;
    return (v16f)_mm512_scalef_ps((__m512)p, (__m512)x);
  }
#endif
  return exp2_lanes(x);
}

LLMC_INLINE v16f exp_lanes(v16f x) {
  const v16f high = splat(88.0f);
  x = vmax(select(x > high, high, x), splat(-104.0f));
  v16f whole = round_lanes(x * kLog2e);
  // log2(e) in two parts, since the rounding error of x * log2(e) would matter for large |x|
  v16f f = (x * kLog2e - whole) + x * 1.925963033500e-8f;
  return exp2_parts(whole, f);
}

// log(1 + exp(x)) to about 2e-7 relative: max(x, 0) + log(1 + y) with y = exp(-|x|), as the series
// 2 (s + s^3 / 3 + s^5 / 5 + ...) with s = y / (2 + y), at most 1 / 3.
LLMC_INLINE v16f softplus_lanes(v16f x) {
  const v16f y = exp_lanes((v16f)((v16u)x | 0x80000000u));
  const v16f s = y / (2.0f + y), sq = s * s;
  v16f p = splat(2.0f / 15);
  p = p * sq + 2.0f / 13;
  p = p * sq + 2.0f / 11;
  p = p * sq + 2.0f / 9;
  p = p * sq + 2.0f / 7;
  p = p * sq + 2.0f / 5;
  p = p * sq + 2.0f / 3;
  p = p * sq + 2.0f;
  return vmax(x, v16f{}) + s * p;
}

LLMC_INLINE v16f sigmoid_lanes(v16f x) {
  return 1.0f / (1.0f + exp_lanes(-x));
}

LLMC_INLINE v16f tanh_lanes(v16f x) {
  v16f a = (v16f)((v16u)x & 0x7fffffffu);
  const v16f cap = splat(20.0f);
  a = select(a > cap, cap, a);
  v16f e = exp_lanes(-2.0f * a);
  v16f big = (1.0f - e) / (1.0f + e);
  v16f sq = a * a;  // near zero the quotient cancels; four terms of the series are exact there
  v16f small = a * (1.0f + sq * (-0.33333333f + sq * (0.13333333f + sq * -0.05396825f)));
  v16f y = select(a < splat(0.15f), small, big);
  return (v16f)((v16u)y | ((v16u)x & 0x80000000u));
}

}  // namespace llmc
