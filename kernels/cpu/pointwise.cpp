// Norms, activations, a sum and a copy: one pass over each row, computed in float.
#include "dtypes.h"
#include "cached.h"
#include "kernels.h"
#include "parallel.h"
#include "vec.h"

#include <limits>
#include <type_traits>
#include <vector>

namespace llmc {
namespace {

template <class T>
const T* row_pointer(const Rows& rows, int64_t i) {
  int64_t c = i % rows.size[2], ab = i / rows.size[2];
  int64_t b = ab % rows.size[1], a = ab / rows.size[1];
  return static_cast<const T*>(rows.data) + a * rows.stride[0] + b * rows.stride[1] +
         c * rows.stride[2];
}

const void* row_of(const Rows& rows, Dtype dtype, int64_t i) {
  return with_type(dtype, [&](auto t) -> const void* { return row_pointer<decltype(t)>(rows, i); });
}

int64_t count(const Rows& rows) {
  return rows.size[0] * rows.size[1] * rows.size[2];
}

template <class T>
v16f squares_of(const T* x, int64_t n) {
  v16f squares0 = {}, squares1 = {};
  int64_t pairs = 0;
  for (; pairs + 2 * kLanes <= n; pairs += 2 * kLanes) {
    const v16f y0 = load(x + pairs), y1 = load(x + pairs + kLanes);
    squares0 += y0 * y0;
    squares1 += y1 * y1;
  }
  each_vector(n - pairs, [&](int64_t i, int64_t count) LLMC_LAMBDA {
    const v16f y = load_up_to(x + pairs + i, count);
    squares0 += y * y;
  });
  return squares0 + squares1;
}

// out = x / sqrt(mean of the squares + eps) * (weight + offset), where `squares` are those of x.
template <class T>
void scale_row(const T* x, v16f squares, const T* weight, float eps, float offset, int64_t n,
               T* out) {
  const float mean = sum_lanes(squares) / static_cast<float>(n);
  const float factor = 1.0f / std::sqrt(mean + eps);
  if (weight == nullptr)
    each_vector(n, [&](int64_t i, int64_t count) LLMC_LAMBDA {
      store_up_to(out + i, load_up_to(x + i, count) * factor, count);
    });
  else
    each_vector(n, [&](int64_t i, int64_t count) LLMC_LAMBDA {
      const v16f scale = load_up_to(weight + i, count) + offset;
      store_up_to(out + i, load_up_to(x + i, count) * factor * scale, count);
    });
}

// out = (x - mean) / sqrt(variance + eps) * weight + bias
template <class T>
void center_row(const NormArgs& a, const T* x, T* out) {
  const T *weight = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
  const float n = static_cast<float>(a.width);
  v16f sum = {}, squares = {};
  each_vector(a.width, [&](int64_t i, int64_t count) LLMC_LAMBDA { sum += load_up_to(x + i, count); });
  const float mean = sum_lanes(sum) / n;
  each_vector(a.width, [&](int64_t i, int64_t count) LLMC_LAMBDA {
    v16f y = load_up_to(x + i, count) - mean;
    if (count < kLanes) y = select(lane_numbers() < static_cast<float>(count), y, v16f{});
    squares += y * y;
  });
  const float factor = 1.0f / std::sqrt(sum_lanes(squares) / n + a.eps);
  each_vector(a.width, [&](int64_t i, int64_t count) LLMC_LAMBDA {
    v16f y = (load_up_to(x + i, count) - mean) * factor;
    if (weight) y = y * load_up_to(weight + i, count);
    if (bias) y = y + load_up_to(bias + i, count);
    store_up_to(out + i, y, count);
  });
}

template <class T>
void norm_row(const NormArgs& a, const T* x, const T* residual, T* out, T* sum) {
  const int64_t n = a.width;
  v16f squares = {};
  if (a.norms_x) {
    scale_row(x, squares_of(x, n), static_cast<const T*>(a.x_weight), a.x_eps, a.x_offset, n, sum);
    x = sum;
  }
  if (residual != nullptr) {
    each_vector(n, [&](int64_t i, int64_t count) LLMC_LAMBDA {
      store_up_to(sum + i, load_up_to(x + i, count) + load_up_to(residual + i, count), count);
      const v16f y = load_up_to(sum + i, count);  // rounded, as in the unfused graph
      squares += y * y;
    });
    x = sum;
  } else if (!a.centered) {
    squares = squares_of(x, n);
  }
  if (out == nullptr) return;
  if (a.centered)
    center_row(a, x, out);
  else
    scale_row(x, squares, static_cast<const T*>(a.weight), a.eps, a.offset, n, out);
}

template <class T>
void norm_rows(const NormArgs& a) {
  const int64_t work = a.width * (a.centered ? 6 : 4);
  parallel_rows(count(a.x), work, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* residual = a.residual.data ? row_pointer<T>(a.residual, i) : nullptr;
      T* sum = a.sum ? static_cast<T*>(a.sum) + i * a.width : nullptr;
      T* out = a.out ? static_cast<T*>(a.out) + i * a.width : nullptr;
      norm_row<T>(a, row_pointer<T>(a.x, i), residual, out, sum);
    }
  });
}

// One group of a row, in place, whose `factors` are already in float.
void gated_norm_group(const GatedNormArgs& a, float* y, const float* factors, const float* weight) {
  const int64_t n = a.group;
  v16f squares = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const v16f x = a.gate_first ? load(y + i) * load(factors + i) : load(y + i);
    store(y + i, x);  // zero past the group's end
    squares += x * x;
  }
  const float factor = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(n) + a.eps);
  for (int64_t i = 0; i < n; i += kLanes) {
    v16f x = load(y + i) * factor;
    if (weight) x = x * (load(weight + i) + a.offset);
    if (!a.gate_first) x = x * load(factors + i);
    store(y + i, x);
  }
}

LLMC_INLINE v16f erf_lanes(v16f x) {  // Abramowitz and Stegun 7.1.26, absolute error 1.5e-7
  v16f a = (v16f)((v16u)x & 0x7fffffffu);
  v16f t = 1.0f / (1.0f + 0.3275911f * a);
  v16f p = t * (0.254829592f +
                t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  v16f y = 1.0f - p * exp_lanes(-a * a);
  return (v16f)((v16u)y | ((v16u)x & 0x80000000u));
}

LLMC_INLINE v16f activate(Act act, v16f x) {
  if (act == Act::silu) return x / (1.0f + exp_lanes(-x));
  if (act == Act::gelu) return 0.5f * x * (1.0f + erf_lanes(x * 0.70710678118654752f));
  if (act == Act::quick_gelu) return x / (1.0f + exp_lanes(-1.702f * x));
  if (act == Act::relu || act == Act::relu2) {
    x = select(x < 0.0f, v16f{}, x);  // NaN stays
    return act == Act::relu ? x : x * x;
  }
  return 0.5f * x * (1.0f + tanh_lanes(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

constexpr int64_t kActBlock = 1024;  // outputs of a row that are computed at a time

// Activates n floats and those that fill their last vector, in place.
[[gnu::noinline]] void activate_row(Act act, float* x, int64_t n) {
  const auto all = [&](auto constant) LLMC_LAMBDA {
    for (int64_t i = 0; i < n; i += kLanes) store(x + i, activate(constant(), load(x + i)));
  };
  switch (act) {
    case Act::silu: return all(std::integral_constant<Act, Act::silu>());
    case Act::gelu: return all(std::integral_constant<Act, Act::gelu>());
    case Act::gelu_tanh: return all(std::integral_constant<Act, Act::gelu_tanh>());
    case Act::quick_gelu: return all(std::integral_constant<Act, Act::quick_gelu>());
    case Act::relu: return all(std::integral_constant<Act, Act::relu>());
    case Act::relu2: return all(std::integral_constant<Act, Act::relu2>());
  }
}

// Splits 2 n floats, gates and what they multiply in turns: the gates move to the front.
void split_turns(float* turns, int64_t n, float* ups) {
  for (int64_t i = 0; i < n; i += kLanes) {
    float gates[kLanes], own[kLanes];  // of fixed sizes, so that the compiler shuffles vectors
    for (int lane = 0; lane < kLanes; ++lane) {
      gates[lane] = turns[2 * (i + lane)];
      own[lane] = turns[2 * (i + lane) + 1];
    }
    store(turns + i, load(gates));
    store(ups + i, load(own));
  }
}

// Outputs [first, first + n) of a row of any kind, in float; n is at most kActBlock.
void act_block(const ActArgs& a, const void* row, int64_t first, int64_t n, void* out, int64_t at) {
  alignas(64) float gates[2 * kActBlock], ups[kActBlock];
  if (a.interleaved) {
    widen_row(a.dtype, row, 2 * first, 2 * n, gates);
    split_turns(gates, n, ups);
  } else {
    widen_row(a.dtype, row, first, n, gates);
    if (a.gated) widen_row(a.dtype, row, a.width + first, n, ups);
  }
  const v16f limit = splat(a.limit);
  for (int64_t i = 0; a.gated && i < n; i += kLanes) {
    const v16f gate = load(gates + i), up = load(ups + i);
    store(gates + i, select(gate > limit, limit, gate));  // NaN stays
    store(ups + i, select(up > limit, limit, select(up < -limit, -limit, up)) + a.shift);
  }
  activate_row(a.act, gates, n);
  for (int64_t i = 0; a.gated && i < n; i += kLanes)
    store(gates + i, load(gates + i) * load(ups + i));
  narrow_row(a.dtype, gates, n, out, at);
}

// The same in one pass, of rows whose first half are gates.
template <Act kAct, class T>
void act_halves(const T* gates, const T* ups, int64_t n, T* out) {
  each_vector(n, [&](int64_t i, int64_t count) LLMC_LAMBDA {
    const v16f y = activate(kAct, load_up_to(gates + i, count)) * load_up_to(ups + i, count);
    store_up_to(out + i, y, count);
  });
}

template <class T>
void add_typed(const AddArgs& a) {
  const int64_t blocks = (a.count + 1023) / 1024;
  parallel_rows(blocks, 1024, a.threads, [&](int64_t begin, int64_t end) {
    const T* x = static_cast<const T*>(a.x);
    T* out = static_cast<T*>(a.out);
    const int64_t last = end * 1024 < a.count ? end * 1024 : a.count;
    int64_t i = begin * 1024;
    for (; i + kLanes <= last; i += kLanes) store(out + i, load(out + i) + load(x + i));
    if (i < last) store_n(out + i, load_n(out + i, last - i) + load_n(x + i, last - i), last - i);
  });
}

// Rounds a group as e4m3 codes times its largest magnitude over 448, in place; to NaN if that is
// not finite.
void round_group(float* x, int64_t n) {
  const float largest = largest_magnitude(x, n);
  const float scale = largest <= std::numeric_limits<float>::max()
                          ? largest / kE4m3.largest
                          : std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < n; i += kLanes) {
    uint8_t codes[kLanes];
    float values[kLanes];
    encode_row(x + i, kLanes, scale, kE4m3, codes);
    decode_row(Dtype::e4m3, codes, kLanes, values);
    store(x + i, largest <= 1e-30f ? v16f{} : load(values) * scale);
  }
}

template <class T>
void copy_typed(const CopyArgs& a) {
  parallel_rows(count(a.to), a.width, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* to = const_cast<T*>(row_pointer<T>(a.to, row));
      with_element<T>(a.cache, [&](auto e) {
        widen_cached(row_pointer<decltype(e)>(a.from, row), a.width, a.cache, to);
      });
      if (a.scale == 1.0f) continue;
      int64_t i = 0;
      for (; i + kLanes <= a.width; i += kLanes) store(to + i, load(to + i) * a.scale);
      if (i < a.width) store_n(to + i, load_n(to + i, a.width - i) * a.scale, a.width - i);
    }
  });
}

}  // namespace

void norm(const NormArgs& a) {
  with_type(a.dtype, [&](auto t) { norm_rows<decltype(t)>(a); });
}

void gated_rms_norm(const GatedNormArgs& a) {
  const int64_t groups = a.width / a.group, room = (a.group + kLanes - 1) / kLanes * kLanes;
  parallel_rows(count(a.x) * groups, a.group * 16, a.threads, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> lines;
    lines.resize(3 * room);
    float *y = lines.data(), *factors = y + room, *weight = factors + room;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / groups, first = item % groups * a.group;
      widen_row(a.x_dtype, row_of(a.x, a.x_dtype, row), first, a.group, y);
      widen_row(a.gate_dtype, row_of(a.gate, a.gate_dtype, row), first, a.group, factors);
      if (a.weight) widen_row(a.weight_dtype, a.weight, first, a.group, weight);
      for (int64_t i = 0; i < a.group; i += kLanes) {
        const v16f gate = load(factors + i), open = sigmoid_lanes(gate);
        store(factors + i, a.silu ? gate * open : open);
      }
      gated_norm_group(a, y, factors, a.weight ? weight : nullptr);
      narrow_row(a.dtype, y, a.group, a.out, row * a.width + first);
    }
  });
}

void act_mul(const ActArgs& a) {
  const int64_t n = a.width, blocks = (n + kActBlock - 1) / kActBlock;
  const bool is_limited = a.limit != std::numeric_limits<float>::infinity();
  const bool is_plain = a.gated && !a.interleaved && a.shift == 0 && !is_limited;
  const bool in_one_pass = is_plain && (a.act == Act::silu || a.act == Act::gelu_tanh);
  // a decode step has one long row: split rows into blocks, so that it also runs in parallel
  parallel_rows(count(a.x) * blocks, kActBlock * 12, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t r = item / blocks, first = item % blocks * kActBlock;
      const int64_t width = std::min(kActBlock, n - first);
      const void* const row = row_of(a.x, a.dtype, r);
      if (!in_one_pass) {
        act_block(a, row, first, width, a.out, r * n + first);
        continue;
      }
      with_type(a.dtype, [&](auto t) {
        using T = decltype(t);
        const T* const gates = static_cast<const T*>(row) + first;
        T* const out = static_cast<T*>(a.out) + r * n + first;
        const bool is_silu = a.act == Act::silu;
        (is_silu ? act_halves<Act::silu, T> : act_halves<Act::gelu_tanh, T>)(gates, gates + n,
                                                                             width, out);
      });
    }
  });
}

void add_to(const AddArgs& a) {
  with_type(a.dtype, [&](auto t) { add_typed<decltype(t)>(a); });
}

void round_to_fp8(const RoundArgs& a) {
  parallel_rows(a.count / a.group, a.group, a.threads, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> x;
    x.resize(a.group);
    for (int64_t at = begin * a.group; at < end * a.group; at += a.group) {
      widen_row(a.dtype, a.x, at, a.group, x.data());
      round_group(x.data(), a.group);
      narrow_row(a.dtype, x.data(), a.group, a.out, at);
    }
  });
}

void copy_rows(const CopyArgs& a) {
  with_type(a.dtype, [&](auto t) { copy_typed<decltype(t)>(a); });
}

}  // namespace llmc
