// write_kv and rope_write: they write a step's keys and values to the paged cache.
#include "cached.h"
#include "kernels.h"
#include "parallel.h"

#include <cstring>
#include <vector>

namespace llmc {
namespace {

template <class T>  // the type of the cache's elements
T* slot_pointer(void* cache, const int64_t stride[3], int64_t block_size, int64_t slot, int64_t h) {
  return static_cast<T*>(cache) + slot / block_size * stride[0] + h * stride[1] +
         slot % block_size * stride[2];
}

// Rows of a cache with the inputs' type, or with 16 bits for float32...
template <class T>
struct PlainCache {
  using Element = T;
  LLMC_METHOD void copy(const T* row, int64_t n, float, T* to) const {
    std::memcpy(to, row, n * sizeof(T));
  }
  template <class Input>
  LLMC_METHOD void copy(const Input* row, int64_t n, float, T* to) const {
    round(row, n, 1.0f, to);
  }
  LLMC_METHOD void round(const float* row, int64_t n, float, T* to) const {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(row + i));
    for (; i < n; ++i) assign(to[i], row[i]);
  }
};

// ... and of an FP8 cache.
template <class T>
struct Fp8Cache {
  using Element = uint8_t;
  Fp8Format format;
  LLMC_METHOD void copy(const T* row, int64_t n, float scale, uint8_t* to) const {
    encode_row(row, n, scale, format, to);
  }
  LLMC_METHOD void round(const float* row, int64_t n, float scale, uint8_t* to) const {
    encode_row(row, n, scale, format, to);
  }
};

template <class T, class Cache>
void write_value(const WriteArgs& w, const Cache& cache, int64_t t, int64_t slot) {
  const T* value = static_cast<const T*>(w.value) + t * w.value_stride[0];
  for (int64_t h = 0; h < w.kv_heads; ++h)
    cache.copy(value + h * w.value_stride[1], w.v_dim, w.scales.value_of(h),
               slot_pointer<typename Cache::Element>(w.value_cache, w.value_cache_stride,
                                                     w.block_size, slot, h));
}

template <class T, class Cache>
void write_key(const WriteArgs& w, const Cache& cache, int64_t t, int64_t slot) {
  const T* key = static_cast<const T*>(w.key) + t * w.key_stride[0];
  for (int64_t h = 0; h < w.kv_heads; ++h)
    cache.copy(key + h * w.key_stride[1], w.head_dim, w.scales.key_of(h),
               slot_pointer<typename Cache::Element>(w.key_cache, w.key_cache_stride,
                                                     w.block_size, slot, h));
}

template <class T, class Cache>
void write_rows(const WriteArgs& w, const Cache& cache) {
  const int64_t cost = w.kv_heads * (w.head_dim + w.v_dim);
  parallel_rows(w.tokens, cost, w.threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = w.slots[t];
      if (slot < 0) continue;
      write_key<T>(w, cache, t, slot);
      write_value<T>(w, cache, t, slot);
    }
  });
}

// Normalizes and rotates one head to `y`, with `x` as scratch: float rows of at least `dim` + 16.
template <class T>
[[gnu::noinline]] void turn_head(const RopeArgs& a, const T* in, const void* norm,
                                 const float* cos, const float* sin, float* __restrict__ x,
                                 float* __restrict__ y) {
  const int64_t dim = a.write.head_dim, width = a.rotary_dim, half = width / 2;
  int64_t i = 0;
  v16f squares = {};
  for (; i + kLanes <= dim; i += kLanes) {
    v16f v = load(in + i);
    squares += v * v;
    store(x + i, v);
  }
  if (i < dim) {
    v16f v = load_n(in + i, dim - i);
    squares += v * v;
    store(x + i, v);
  }
  if (norm != nullptr) {
    const T* weight = static_cast<const T*>(norm);
    const float factor = 1.0f / std::sqrt(sum_lanes(squares) / float(dim) + a.eps);
    for (i = 0; i + kLanes <= dim; i += kLanes)
      store(x + i, load(x + i) * factor * (load(weight + i) + a.norm_offset));
    for (; i < dim; ++i) x[i] = x[i] * factor * (to_float(weight[i]) + a.norm_offset);
  }
  if (a.interleaved) {
    for (i = 0; i < half; ++i) {
      y[2 * i] = x[2 * i] * cos[2 * i] - x[2 * i + 1] * sin[2 * i];
      y[2 * i + 1] = x[2 * i + 1] * cos[2 * i + 1] + x[2 * i] * sin[2 * i + 1];
    }
  } else {
    for (i = 0; i < half; ++i) y[i] = x[i] * cos[i] - x[half + i] * sin[i];
    for (i = half; i < width; ++i) y[i] = x[i] * cos[i] + x[i - half] * sin[i];
  }
  for (i = width; i < dim; ++i) y[i] = x[i];
}

// Asks for the lines of a token's keys and values, whose addresses no hardware predicts.
template <class E>
void prefetch_slot(const WriteArgs& w, int64_t slot) {
  constexpr int64_t kLine = 64 / sizeof(E);
  if (slot < 0) return;
  for (int64_t h = 0; h < w.kv_heads; ++h) {
    const E* key = slot_pointer<E>(w.key_cache, w.key_cache_stride, w.block_size, slot, h);
    const E* value = slot_pointer<E>(w.value_cache, w.value_cache_stride, w.block_size, slot, h);
    for (int64_t i = 0; i < w.head_dim; i += kLine) __builtin_prefetch(key + i, 1, 3);
    for (int64_t i = 0; i < w.v_dim; i += kLine) __builtin_prefetch(value + i, 1, 3);
  }
}

template <class T, class Cache>
void rope_rows(const RopeArgs& a, const Cache& cache) {
  const WriteArgs& w = a.write;
  const int64_t cost = (a.heads + w.kv_heads) * w.head_dim * 3 + w.kv_heads * w.v_dim;
  parallel_rows(w.tokens, cost, w.threads, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(2 * (w.head_dim + kLanes));
    float *x = scratch.data(), *y = x + w.head_dim + kLanes;
    prefetch_slot<typename Cache::Element>(w, w.slots[begin]);
    for (int64_t t = begin; t < end; ++t) {
      if (t + 1 < end) prefetch_slot<typename Cache::Element>(w, w.slots[t + 1]);
      const float* cos = a.cos + a.positions[t] * a.cos_stride;
      const float* sin = a.sin + a.positions[t] * a.sin_stride;
      const T* query = static_cast<const T*>(a.query) + t * a.query_stride[0];
      T* out = static_cast<T*>(a.out) + t * a.heads * w.head_dim;
      for (int64_t h = 0; h < a.heads; ++h) {
        turn_head<T>(a, query + h * a.query_stride[1], a.query_norm, cos, sin, x, y);
        PlainCache<T>().round(y, w.head_dim, 1.0f, out + h * w.head_dim);
      }
      const int64_t slot = w.slots[t];
      if (slot < 0) continue;
      const T* key = static_cast<const T*>(w.key) + t * w.key_stride[0];
      for (int64_t h = 0; h < w.kv_heads; ++h) {
        turn_head<T>(a, key + h * w.key_stride[1], a.key_norm, cos, sin, x, y);
        cache.round(y, w.head_dim, w.scales.key_of(h),
                    slot_pointer<typename Cache::Element>(w.key_cache, w.key_cache_stride,
                                                          w.block_size, slot, h));
      }
      write_value<T>(w, cache, t, slot);
    }
  });
}

// Calls run(cache) with the class for the cache's type.
template <class T, class Run>
void with_cache(const WriteArgs& w, const Run& run) {
  with_element<T>(w.cache, [&](auto e) {
    if constexpr (std::is_same_v<decltype(e), uint8_t>)
      run(Fp8Cache<T>{fp8_format(w.cache)});
    else
      run(PlainCache<decltype(e)>());
  });
}

}  // namespace

void write_kv(const WriteArgs& w) {
  with_type(w.dtype, [&](auto t) {
    using T = decltype(t);
    with_cache<T>(w, [&](const auto& cache) { write_rows<T>(w, cache); });
  });
}

void rope_write(const RopeArgs& a) {
  with_type(a.write.dtype, [&](auto t) {
    using T = decltype(t);
    with_cache<T>(a.write, [&](const auto& cache) { rope_rows<T>(a, cache); });
  });
}

}  // namespace llmc
