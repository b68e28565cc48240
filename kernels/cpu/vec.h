// Sixteen-lane vectors in the compiler's own vector types: AVX-512, AVX2 and NEON from one text.
// Intrinsics appear only where they buy something, each beside its plain form.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LLMC_AVX512 1
#if defined(__AVX512BF16__)
#define LLMC_AVX512_BF16 1
#endif
#endif

#define LLMC_INLINE static inline __attribute__((always_inline))

namespace llmc {

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef _Float16 v16half __attribute__((vector_size(32)));

constexpr int kLanes = 16;

// As many lanes as one register has: what inner loops of products hold their sums in.
#if defined(LLMC_AVX512)
constexpr int kNative = 16;
#elif defined(__AVX__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
typedef float vf __attribute__((vector_size(4 * kNative)));
typedef uint32_t vu __attribute__((vector_size(4 * kNative)));

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896340736f;

struct bf16 {
  uint16_t bits;
};

struct f16 {  // IEEE binary16
  uint16_t bits;
};

LLMC_INLINE v16f splat(float x) {
  return x - v16f{};
}

LLMC_INLINE v16i splat_int(int32_t x) {
  return x - v16i{};
}

LLMC_INLINE v16f select(v16i mask, v16f a, v16f b) {  // mask lanes are 0 or -1
  return (v16f)(((v16i)a & mask) | ((v16i)b & ~mask));
}

LLMC_INLINE v16f vmax(v16f a, v16f b) {
#ifdef LLMC_AVX512
  return (v16f)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

LLMC_INLINE v16f load(const float* p) {
  v16f x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

LLMC_INLINE v16f load(const bf16* p) {
  v16h x;
  std::memcpy(&x, p, sizeof x);
  return (v16f)(__builtin_convertvector(x, v16u) << 16);
}

LLMC_INLINE v16f load(const f16* p) {
#if defined(LLMC_AVX512)
  return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  const __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
                            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
  v16f x;
  std::memcpy(&x, halves, sizeof x);
  return x;
#else
  v16half x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, v16f);
#endif
}

LLMC_INLINE void store(float* p, v16f x) {
  std::memcpy(p, &x, sizeof x);
}

LLMC_INLINE v16h round_bf16(v16f x) {  // to nearest, ties to even
#ifdef LLMC_AVX512_BF16
  return (v16h)_mm512_cvtneps_pbh((__m512)x);
#else
  v16u bits = (v16u)x;
  v16u rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  v16u nan = (v16u)(x != x);
  return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), v16h);
#endif
}

LLMC_INLINE void store(bf16* p, v16f x) {
  v16h h = round_bf16(x);
  std::memcpy(p, &h, sizeof h);
}

LLMC_INLINE void store(f16* p, v16f x) {  // to nearest, ties to even
#if defined(LLMC_AVX512)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, 0));
#elif defined(__F16C__)
  __m256 halves[2];
  std::memcpy(halves, &x, sizeof x);
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(halves[0], 0));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(halves[1], 0));
#else
  const v16half h = __builtin_convertvector(x, v16half);
  std::memcpy(p, &h, sizeof h);
#endif
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

LLMC_INLINE float to_float(float x) {
  return x;
}

LLMC_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

LLMC_INLINE float to_float(f16 x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  _Float16 y;
  std::memcpy(&y, &x, sizeof y);
  return float(y);
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
  const _Float16 half = _Float16(x);
  std::memcpy(&y, &half, sizeof y);
#endif
}

LLMC_INLINE float sum_lanes(v16f x) {
#ifdef LLMC_AVX512
  return _mm512_reduce_add_ps((__m512)x);
#else
  float part[kLanes];  // in a tree: one after the other, each sum would wait for the one before
  store(part, x);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) part[i] += part[i + n];
  return part[0];
#endif
}

LLMC_INLINE float max_lanes(v16f x) {
#ifdef LLMC_AVX512
  return _mm512_reduce_max_ps((__m512)x);
#else
  float m = x[0];
  for (int i = 1; i < kLanes; ++i) m = m > x[i] ? m : x[i];
  return m;
#endif
}

LLMC_INLINE v16f round_lanes(v16f x) {  // to the nearest integer; |x| below 2^22
#ifdef LLMC_AVX512
  return (v16f)_mm512_roundscale_ps((__m512)x, 0);
#else
  const v16f magic = splat(12582912.0f);  // adding 1.5 * 2^23 leaves no fraction bits
  return (x + magic) - magic;
#endif
}

// 2^(whole + f), |f| <= 0.5, to about 1.5e-7 relative; 0 where it underflows.
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
  v16i exponent = __builtin_convertvector(whole, v16i);
  v16i alive = exponent > -126;
  return (v16f)(((v16i)p + (exponent << 23)) & alive);
#endif
}

LLMC_INLINE v16f exp2_lanes(v16f x) {  // x below 127
  x = vmax(x, splat(-150.0f));
  v16f whole = round_lanes(x);
  return exp2_parts(whole, x - whole);
}

// 2^x, or within 8e-5 of it where the result is rounded to bf16 anyway.
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
  // log2(e) in two parts, else the rounding of x * log2(e) shows for large |x|
  v16f f = (x * kLog2e - whole) + x * 1.925963033500e-8f;
  return exp2_parts(whole, f);
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
