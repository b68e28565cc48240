// write_kv, rope_write and rope_write_latent: they write a step's keys and values to the paged cache.
#include "cached.h"
#include "hadamard.h"
#include "kernels.h"
#include "parallel.h"

#include <cstring>
#include <vector>

namespace llmc {
namespace {

template <class E>
struct Slot {  // where a row of a cache is
  E* block;
  int64_t block_size, inside, stride;
  LLMC_METHOD E* row() const { return block + inside * stride; }
  LLMC_METHOD float* scale() const { return block_scales(block, block_size, stride) + inside; }
};

template <class E>
LLMC_INLINE Slot<E> slot_of(void* cache, const int64_t stride[3], int64_t block_size, int64_t slot,
                            int64_t h) {
  E* block = static_cast<E*>(cache) + slot / block_size * stride[0] + h * stride[1];
  return {block, block_size, slot % block_size, stride[2]};
}

// As `to_int8` in cache_dtype.py: the codes of a row, and its scale.
template <class Input>
float quantize_row(const Input* row, int64_t n, int8_t* to) {
  constexpr float kLeast = 1e-30f;
  const float largest = largest_magnitude(row, n);
  if (largest <= kLeast || !(largest < kInf)) {
    std::memset(to, 0, n);
    return largest <= kLeast ? 0.0f : largest / 127;
  }
  const float inverse = 127 / largest;
  auto codes = [&](v16f x) { return (v16u)convert<v16i>(round_lanes(x * inverse)); };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) narrow_to<uint8_t>(to + i, codes(load(row + i)));
  if (i < n) {
    uint8_t rest[kLanes];
    narrow_to<uint8_t>(rest, codes(load_n(row + i, n - i)));
    std::memcpy(to + i, rest, n - i);
  }
  return largest / 127;
}

// to[0, n) = the row, as another 16-bit or 32-bit float.
template <class T, class Input>
void convert_row(const Input* row, int64_t n, T* to) {
  if constexpr (std::is_same_v<Input, T>) {
    std::memcpy(to, row, n * sizeof(T));
  } else {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(row + i));
    for (; i < n; ++i) assign(to[i], to_float(row[i]));
  }
}

// Writes a row of a head's keys or values to a slot of its cache, in the cache's type. `kIsKey`:
// an int8 cache has keys rotated.
template <bool kIsKey, class Input>
[[gnu::noinline]] void write_row(const WriteArgs& w, int64_t slot, int64_t h, const Input* row) {
  void* const cache = kIsKey ? w.key_cache : w.value_cache;
  const int64_t* const stride = kIsKey ? w.key_cache_stride : w.value_cache_stride;
  const int64_t n = kIsKey ? w.head_dim : w.v_dim;
  with_element<Input>(w.cache, [&](auto e) {
    using E = decltype(e);
    const Slot<E> to = slot_of<E>(cache, stride, w.block_size, slot, h);
    if constexpr (std::is_same_v<E, uint8_t>) {
      const float scale = kIsKey ? w.scales.key_of(h) : w.scales.value_of(h);
      encode_row(row, n, scale, fp8_format(w.cache), to.row());
    } else if constexpr (!std::is_same_v<E, int8_t>) {
      convert_row(row, n, to.row());
    } else if constexpr (kIsKey) {
      static thread_local std::vector<float> rotated;
      rotated.resize(n);
      rotate_row(row, n, rotated.data());
      *to.scale() = quantize_row(rotated.data(), n, to.row());
    } else {
      *to.scale() = quantize_row(row, n, to.row());
    }
  });
}

template <class T>
void write_values(const WriteArgs& w, int64_t t, int64_t slot) {
  const T* value = static_cast<const T*>(w.value) + t * w.value_stride[0];
  for (int64_t h = 0; h < w.kv_heads; ++h)
    write_row<false>(w, slot, h, value + h * w.value_stride[1]);
}

template <class T>
void write_rows(const WriteArgs& w) {
  const int64_t cost = w.kv_heads * (w.head_dim + w.v_dim);
  parallel_rows(w.tokens, cost, w.threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = w.slots[t];
      if (slot < 0) continue;
      const T* key = static_cast<const T*>(w.key) + t * w.key_stride[0];
      for (int64_t h = 0; h < w.kv_heads; ++h)
        write_row<true>(w, slot, h, key + h * w.key_stride[1]);
      write_values<T>(w, t, slot);
    }
  });
}

// What the values of a norm are multiplied by, from the lanes' sums of their squares.
LLMC_INLINE float norm_factor(v16f squares, int64_t count, float eps) {
  return 1.0f / std::sqrt(sum_lanes(squares) / float(count) + eps);
}

// The same, for heads that are normalized together.
template <class Input>
float factor_of_heads(const Input* in, int64_t heads, int64_t stride, int64_t dim, float eps) {
  v16f squares = {};
  for (int64_t h = 0; h < heads; ++h) {
    const Input* head = in + h * stride;
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      const v16f v = load(head + i);
      squares += v * v;
    }
    if (i < dim) {
      const v16f v = load_n(head + i, dim - i);
      squares += v * v;
    }
  }
  return norm_factor(squares, heads * dim, eps);
}

// A row of `dim` values in float, normalized if there is a norm, whose weight has type T; x has room
// for kLanes more. `known`: the norm's factor, if more than this row is normalized together.
template <class T, class Input>
void widen_normed(const Input* in, int64_t dim, const void* norm, float eps, float offset,
                  float* __restrict__ x, const float* known = nullptr) {
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
    const float factor = known != nullptr ? *known : norm_factor(squares, dim, eps);
    for (i = 0; i + kLanes <= dim; i += kLanes)
      store(x + i, load(x + i) * factor * (load(weight + i) + offset));
    for (; i < dim; ++i) x[i] = x[i] * factor * (to_float(weight[i]) + offset);
  }
}

// Rotates the first r.width channels of token t from x to y.
void rotate(const Rotation& r, int64_t t, const float* __restrict__ x, float* __restrict__ y) {
  const float* cos = r.cos + r.positions[t] * r.cos_stride;
  const float* sin = r.sin + r.positions[t] * r.sin_stride;
  const int64_t width = r.width, half = width / 2;
  int64_t i;
  if (r.interleaved) {
    for (i = 0; i < half; ++i) {
      y[2 * i] = x[2 * i] * cos[2 * i] - x[2 * i + 1] * sin[2 * i];
      y[2 * i + 1] = x[2 * i + 1] * cos[2 * i + 1] + x[2 * i] * sin[2 * i + 1];
    }
  } else {
    for (i = 0; i < half; ++i) y[i] = x[i] * cos[i] - x[half + i] * sin[i];
    for (i = half; i < width; ++i) y[i] = x[i] * cos[i] + x[i - half] * sin[i];
  }
}

// The norm of a token's queries or keys.
template <class T>
struct HeadNorm {
  const T* weight;  // null: there is none
  int64_t stride;   // from a head's weights to the next one's; 0: all have the same
  float factor;     // of all heads, if they are normalized together

  HeadNorm(const RopeArgs& a, const void* norm, bool together, const T* in, int64_t heads,
           int64_t head_stride)
      : weight(static_cast<const T*>(norm)),
        stride(together ? a.write.head_dim : 0),
        factor(together ? factor_of_heads(in, heads, head_stride, a.write.head_dim, a.eps) : 0) {}
  LLMC_METHOD const T* of(int64_t h) const { return weight == nullptr ? weight : weight + h * stride; }
  LLMC_METHOD const float* known() const { return stride > 0 ? &factor : nullptr; }
};

// Normalizes and rotates head h, at `in`, to `y`, with `x` as scratch: float rows of at least `dim`
// + 16.
template <class T>
[[gnu::noinline]] void turn_head(const RopeArgs& a, int64_t t, const T* in, const HeadNorm<T>& of,
                                 int64_t h, float* __restrict__ x, float* __restrict__ y) {
  const T* norm = of.of(h);
  const int64_t dim = a.write.head_dim;
  float *plain = a.norm_last ? y : x, *turned = a.norm_last ? x : y;
  widen_normed<T>(in, dim, a.norm_last ? nullptr : norm, a.eps, a.norm_offset, plain, of.known());
  rotate(a.rotation, t, plain, turned);
  for (int64_t i = a.rotation.width; i < dim; ++i) turned[i] = plain[i];
  if (a.norm_last) widen_normed<T>(turned, dim, norm, a.eps, a.norm_offset, y);
}

// Asks for the lines of a token's keys and values, whose addresses no hardware predicts.
[[gnu::noinline]] void prefetch_slot(const WriteArgs& w, int64_t slot) {
  if (slot < 0) return;
  with_element<float>(w.cache, [&](auto e) {
    using E = decltype(e);
    constexpr int64_t kLine = 64 / sizeof(E);
    for (int64_t h = 0; h < w.kv_heads; ++h) {
      const auto key = slot_of<E>(w.key_cache, w.key_cache_stride, w.block_size, slot, h);
      const auto value = slot_of<E>(w.value_cache, w.value_cache_stride, w.block_size, slot, h);
      for (int64_t i = 0; i < w.head_dim; i += kLine) __builtin_prefetch(key.row() + i, 1, 3);
      for (int64_t i = 0; i < w.v_dim; i += kLine) __builtin_prefetch(value.row() + i, 1, 3);
      if (!std::is_same_v<E, int8_t>) continue;
      __builtin_prefetch(key.scale(), 1, 3);
      __builtin_prefetch(value.scale(), 1, 3);
    }
  });
}

template <class T>
void rope_rows(const RopeArgs& a) {
  const WriteArgs& w = a.write;
  const int64_t cost = (a.heads + w.kv_heads) * w.head_dim * 3 + w.kv_heads * w.v_dim;
  parallel_rows(w.tokens, cost, w.threads, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(2 * (w.head_dim + kLanes));
    float *x = scratch.data(), *y = x + w.head_dim + kLanes;
    prefetch_slot(w, w.slots[begin]);
    for (int64_t t = begin; t < end; ++t) {
      if (t + 1 < end) prefetch_slot(w, w.slots[t + 1]);
      const T* query = static_cast<const T*>(a.query) + t * a.query_stride[0];
      T* out = static_cast<T*>(a.out) + t * a.heads * w.head_dim;
      const HeadNorm<T> query_norm(a, a.query_norm, a.query_together, query, a.heads,
                                   a.query_stride[1]);
      for (int64_t h = 0; h < a.heads; ++h) {
        turn_head<T>(a, t, query + h * a.query_stride[1], query_norm, h, x, y);
        convert_row(y, w.head_dim, out + h * w.head_dim);
      }
      const int64_t slot = w.slots[t];
      if (slot < 0) continue;
      const T* key = static_cast<const T*>(w.key) + t * w.key_stride[0];
      const HeadNorm<T> key_norm(a, a.key_norm, a.key_together, key, w.kv_heads, w.key_stride[1]);
      for (int64_t h = 0; h < w.kv_heads; ++h) {
        turn_head<T>(a, t, key + h * w.key_stride[1], key_norm, h, x, y);
        write_row<true>(w, slot, h, y);
      }
      write_values<T>(w, t, slot);
    }
  });
}

template <class T>
void latent_rows(const LatentWriteArgs& a) {
  const WriteArgs& w = a.write;
  const int64_t width = a.rotation.width, plain = a.dim - width, rank = w.head_dim - width;
  const int64_t cost = a.heads * (a.dim + 4 * width) + 2 * w.head_dim;
  parallel_rows(w.tokens, cost, w.threads, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(w.head_dim + 2 * (width + kLanes) + kLanes);
    float *x = scratch.data(), *y = x + width + kLanes, *row = y + width + kLanes;
    for (int64_t t = begin; t < end; ++t) {
      const T* query = static_cast<const T*>(a.query) + t * a.query_stride[0];
      T* out = static_cast<T*>(a.out) + t * a.heads * a.dim;
      for (int64_t h = 0; h < a.heads; ++h) {
        const T* head = query + h * a.query_stride[1];
        std::memcpy(out + h * a.dim, head, plain * sizeof(T));
        widen_normed<T>(head + plain, width, nullptr, 0, 0, x);
        rotate(a.rotation, t, x, y);
        convert_row(y, width, out + h * a.dim + plain);
      }
      const int64_t slot = w.slots[t];
      if (slot < 0) continue;
      widen_normed<T>(static_cast<const T*>(a.latent) + t * a.latent_stride, rank, a.norm, a.eps,
                      a.norm_offset, row);
      const T* shared = static_cast<const T*>(a.shared) + t * a.shared_stride;
      widen_normed<T>(shared, width, nullptr, 0, 0, x);
      rotate(a.rotation, t, x, row + rank);
      write_row<true>(w, slot, 0, row);
    }
  });
}

}  // namespace

void write_kv(const WriteArgs& w) {
  with_type(w.dtype, [&](auto t) { write_rows<decltype(t)>(w); });
}

void rope_write(const RopeArgs& a) {
  with_type(a.write.dtype, [&](auto t) { rope_rows<decltype(t)>(a); });
}

void rope_write_latent(const LatentWriteArgs& a) {
  with_type(a.write.dtype, [&](auto t) { latent_rows<decltype(t)>(a); });
}

}  // namespace llmc
