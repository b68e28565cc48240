// Vectors of sixteen lanes from the compiler's vector types, on any CPU: one register, or a pair of
// halves.
//
// Compilers split vectors that are wider than a register poorly (comparisons lane by lane, copies
// through memory), so a wider vector is a struct of two halves with the operators of a vector.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LLMC_AVX512 1
#if defined(__AVX512BF16__)
#define LLMC_AVX512_BF16 1
#endif
#endif

#ifdef __clang__
#pragma clang fp contract(fast)  // GCC's default: use fused multiply-add
#endif

#define LLMC_INLINE static inline __attribute__((always_inline))
#define LLMC_METHOD inline __attribute__((always_inline))
#define LLMC_LAMBDA __attribute__((always_inline))

namespace llmc {

constexpr int kLanes = 16;
#if defined(LLMC_AVX512)
constexpr int kNative = 16;  // lanes per register
#elif defined(__AVX__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
typedef float vf __attribute__((vector_size(4 * kNative)));
typedef int32_t vi __attribute__((vector_size(4 * kNative)));
typedef uint32_t vu __attribute__((vector_size(4 * kNative)));

template <class T, class Half>
struct Pair {
  Half lo, hi;

  Pair() = default;
  LLMC_METHOD Pair(T x) : lo(x - Half{}), hi(x - Half{}) {}
  LLMC_METHOD Pair(Half low, Half high) : lo(low), hi(high) {}
  template <class U, class Other>  // bit cast
  LLMC_METHOD explicit Pair(const Pair<U, Other>& x) : lo((Half)x.lo), hi((Half)x.hi) {}

  LLMC_METHOD T& operator[](int64_t lane) { return reinterpret_cast<T*>(this)[lane]; }
  LLMC_METHOD T operator[](int64_t lane) const { return reinterpret_cast<const T*>(this)[lane]; }
  LLMC_METHOD Pair operator-() const { return {-lo, -hi}; }
  LLMC_METHOD Pair operator~() const { return {~lo, ~hi}; }
  friend LLMC_METHOD Pair operator<<(const Pair& a, int n) { return {a.lo << n, a.hi << n}; }
  friend LLMC_METHOD Pair operator>>(const Pair& a, int n) { return {a.lo >> n, a.hi >> n}; }
#define LLMC_OPERATOR(op)                                                   \
  friend LLMC_METHOD Pair operator op(const Pair& a, const Pair& b) {       \
    return {a.lo op b.lo, a.hi op b.hi};                                    \
  }                                                                         \
  LLMC_METHOD Pair& operator op##=(const Pair& b) { return *this = *this op b; }
  LLMC_OPERATOR(+)
  LLMC_OPERATOR(-)
  LLMC_OPERATOR(*)
  LLMC_OPERATOR(/)
  LLMC_OPERATOR(&)
  LLMC_OPERATOR(|)
  LLMC_OPERATOR(^)
#undef LLMC_OPERATOR
#define LLMC_COMPARISON(op)                                                 \
  friend LLMC_METHOD auto operator op(const Pair& a, const Pair& b) {       \
    return Pair<int32_t, decltype(a.lo op b.lo)>(a.lo op b.lo, a.hi op b.hi); \
  }
  LLMC_COMPARISON(<)
  LLMC_COMPARISON(<=)
  LLMC_COMPARISON(>)
  LLMC_COMPARISON(>=)
  LLMC_COMPARISON(==)
  LLMC_COMPARISON(!=)
#undef LLMC_COMPARISON
};

template <class V>
constexpr bool kIsPair = false;
template <class T, class Half>
constexpr bool kIsPair<Pair<T, Half>> = true;

template <class T, class Native, int kWidth>
struct LanesOf {
  using Half = typename LanesOf<T, Native, kWidth / 2>::Type;
  using Type = Pair<T, Half>;
};
template <class T, class Native>
struct LanesOf<T, Native, kNative> {
  using Type = Native;
};

using v16f = LanesOf<float, vf, kLanes>::Type;
using v16i = LanesOf<int32_t, vi, kLanes>::Type;
using v16u = LanesOf<uint32_t, vu, kLanes>::Type;

// Loads the lanes of V from memory.
template <class V>
LLMC_INLINE V load_as(const void* p) {
  if constexpr (kIsPair<V>) {
    using Half = decltype(V::lo);
    return {load_as<Half>(p), load_as<Half>(static_cast<const char*>(p) + sizeof(Half))};
  } else {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
}

template <class V>
LLMC_INLINE void store_as(void* p, const V& x) {
  if constexpr (kIsPair<V>) {
    store_as(p, x.lo);
    store_as(static_cast<char*>(p) + sizeof x.lo, x.hi);
  } else {
    std::memcpy(p, &x, sizeof x);
  }
}

// Converts lanes to another type, by value.
template <class To, class V>
LLMC_INLINE To convert(const V& x) {
  if constexpr (kIsPair<To>) {
    using Half = decltype(To::lo);
    return {convert<Half>(x.lo), convert<Half>(x.hi)};
  } else {
    return __builtin_convertvector(x, To);
  }
}

#ifdef __AVX2__
// GCC converts vectors of bytes one by one.
#ifdef LLMC_AVX512
LLMC_INLINE __m512i widen_bytes(const void* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
LLMC_INLINE __m512i widen_signed_bytes(const void* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
template <class V>
LLMC_INLINE void narrow_to_bytes(void* p, V x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x));
}
#else
LLMC_INLINE __m256i widen_bytes(const void* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
LLMC_INLINE __m256i widen_signed_bytes(const void* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
template <class V>
LLMC_INLINE void narrow_to_bytes(void* p, V x) {
  const __m256i lowest = _mm256_set1_epi64x(0x0c080400);
  const __m256i bytes = _mm256_shuffle_epi8((__m256i)x, lowest);
  const __m128i high = _mm256_extracti128_si256(bytes, 1);
  _mm_storel_epi64((__m128i*)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), high));
}
#endif
#endif

// Loads lanes of V from narrower integers or floats in memory...
template <class V, class Element>
LLMC_INLINE V widen_from(const void* p) {
  if constexpr (kIsPair<V>) {
    using Half = decltype(V::lo);
    constexpr auto kBytes = sizeof(Half) / 4 * sizeof(Element);
    return {widen_from<Half, Element>(p),
            widen_from<Half, Element>(static_cast<const char*>(p) + kBytes)};
#ifdef __AVX2__
  } else if constexpr (std::is_same_v<Element, uint8_t>) {
    return (V)widen_bytes(p);
  } else if constexpr (std::is_same_v<Element, int8_t>) {
    return (V)widen_signed_bytes(p);
#endif
  } else {
    typedef Element Narrow __attribute__((vector_size(kNative * sizeof(Element))));
    return __builtin_convertvector(load_as<Narrow>(p), V);
  }
}

// ... and stores them back; integers are truncated.
template <class Element, class V>
LLMC_INLINE void narrow_to(void* p, const V& x) {
  if constexpr (kIsPair<V>) {
    constexpr auto kBytes = sizeof x.lo / 4 * sizeof(Element);
    narrow_to<Element>(p, x.lo);
    narrow_to<Element>(static_cast<char*>(p) + kBytes, x.hi);
#ifdef __AVX2__
  } else if constexpr (sizeof(Element) == 1) {
    narrow_to_bytes(p, x);
#endif
  } else {
    typedef Element Narrow __attribute__((vector_size(kNative * sizeof(Element))));
    store_as(p, __builtin_convertvector(x, Narrow));
  }
}

}  // namespace llmc
