// The torch side: schemas, checks of what the kernels take on trust, and outputs.
#include "bindings.h"

#include "dtypes.h"
#include "expert_linear.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace llmc::ops {

Dtype cache_dtype_of(const Tensor& t, const Tensor& beside) {
  if (t.scalar_type() == at::kFloat8_e4m3fn) return Dtype::e4m3;
  if (t.scalar_type() == at::kFloat8_e5m2) return Dtype::e5m2;
  TORCH_CHECK(t.scalar_type() == beside.scalar_type(), "a cache must be ", beside.scalar_type(),
              " or float8, got ", t.scalar_type());
  return dtype_of(t);
}

void check(const Tensor& t, const char* name, at::ScalarType dtype, int64_t dims) {
  TORCH_CHECK(t.scalar_type() == dtype, name, " must be ", dtype, ", got ", t.scalar_type());
  TORCH_CHECK(t.dim() == dims, name, " must have ", dims, " dimensions, got ", t.sizes());
  TORCH_CHECK(t.numel() == 0 || t.size(-1) == 1 || t.stride(-1) == 1, name,
              " must have a dense last dimension, got strides ", t.strides());
}

namespace {

// Rows of the last dimension; copies only where outer strides do not fit three sizes. `kept` holds
// the copy.
Rows rows_of(const Tensor& given, Tensor& kept) {
  TORCH_CHECK(given.dim() >= 1, "a row op needs at least one dimension");
  const Tensor& t = at::dense_rows(given, kept);
  Rows rows{nullptr, {1, 1, 1}, {0, 0, 0}};
  int used = 3;
  for (int64_t d = t.dim() - 2; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (used < 3 && t.stride(d) == rows.stride[used] * rows.size[used]) {
      rows.size[used] *= t.size(d);  // one stride serves both
      continue;
    }
    if (used == 0) {
      kept = t.contiguous();
      return rows_of(kept, kept);
    }
    --used;
    rows.size[used] = t.size(d);
    rows.stride[used] = t.stride(d);
  }
  rows.data = t.data_ptr();
  return rows;
}

const void* vector_or_null(const optional<Tensor>& t, const char* name, const Tensor& like,
                           int64_t size) {
  if (!t.has_value() || !t->defined()) return nullptr;
  check(*t, name, like.scalar_type(), 1);
  TORCH_CHECK(t->size(0) == size, name, " must have ", size, " elements, got ", t->size(0));
  return t->data_ptr();
}

}  // namespace

Tensor rms_norm(const Tensor& x, const optional<Tensor>& weight, double eps, double offset) {
  Tensor kept, out = at::empty(x.sizes(), x.scalar_type());
  if (x.numel() == 0) return out;
  kernels->rms_norm({dtype_of(x), rows_of(x, kept), {},
                     vector_or_null(weight, "weight", x, x.size(-1)), out.data_ptr(), nullptr,
                     x.size(-1), float(eps), float(offset), at::num_threads()});
  return out;
}

namespace {

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const optional<Tensor>& weight, double eps,
                                        double offset) {
  TORCH_CHECK(x.sizes() == residual.sizes() && x.scalar_type() == residual.scalar_type(),
              "x and residual must be alike");
  Tensor out = at::empty(x.sizes(), x.scalar_type()), sum = at::empty(x.sizes(), x.scalar_type());
  if (x.numel() == 0) return {std::move(out), std::move(sum)};
  Tensor kept_x, kept_residual;
  Rows x_rows = rows_of(x, kept_x), res_rows = rows_of(residual, kept_residual);
  for (int d = 0; d < 3; ++d)
    if (x_rows.size[d] != res_rows.size[d]) {  // folded differently: make both dense
      kept_x = x.contiguous(), kept_residual = residual.contiguous();
      x_rows = rows_of(kept_x, kept_x), res_rows = rows_of(kept_residual, kept_residual);
    }
  kernels->rms_norm({dtype_of(x), x_rows, res_rows,
                     vector_or_null(weight, "weight", x, x.size(-1)), out.data_ptr(),
                     sum.data_ptr(), x.size(-1), float(eps), float(offset), at::num_threads()});
  return {std::move(out), std::move(sum)};
}

}  // namespace

Tensor act_mul(const Tensor& gate_up, const std::string& act) {
  TORCH_CHECK(gate_up.size(-1) % 2 == 0, "gate_up must have an even width, got ", gate_up.sizes());
  TORCH_CHECK(act == "silu" || act == "gelu" || act == "gelu_tanh",
              "act must be silu, gelu or gelu_tanh, got ", act);
  auto sizes = gate_up.sizes().vec();
  sizes.back() /= 2;
  Tensor kept, out = at::empty(sizes, gate_up.scalar_type());
  if (out.numel() == 0) return out;
  const Act kind = act == "silu"   ? Act::silu
                         : act == "gelu" ? Act::gelu
                                         : Act::gelu_tanh;
  kernels->act_mul({dtype_of(gate_up), kind, rows_of(gate_up, kept), out.data_ptr(), sizes.back(),
                    at::num_threads()});
  return out;
}

namespace {

void copy_strides(const Tensor& t, int64_t* to, int count) {
  for (int d = 0; d < count; ++d) to[d] = t.stride(d);
}

Scales scales_of(const optional<Tensor>& key, const optional<Tensor>& value,
                       const Tensor& cache) {
  Scales scales{};
  auto read = [&](const optional<Tensor>& t, const char* name, int64_t& stride) -> const float* {
    if (!t.has_value() || !t->defined()) return nullptr;
    check(*t, name, at::kFloat, 1);
    TORCH_CHECK(t->size(0) == 1 || t->size(0) == cache.size(1), name, " must have 1 element or ",
                cache.size(1), ", got ", t->size(0));
    TORCH_CHECK(cache.element_size() == 1, name, " is for caches of float8, got ",
                cache.scalar_type());
    stride = t->size(0) == 1 ? 0 : 1;
    return t->data_ptr<float>();
  };
  scales.key = read(key, "k_scale", scales.key_stride);
  scales.value = read(value, "v_scale", scales.value_stride);
  return scales;
}

WriteArgs write_args(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                           const Tensor& value_cache, const Tensor& slots,
                           const optional<Tensor>& k_scale, const optional<Tensor>& v_scale) {
  const auto dtype = key.scalar_type();
  check(key, "key", dtype, 3);
  check(value, "value", dtype, 3);
  check(key_cache, "key_cache", key_cache.scalar_type(), 4);
  check(value_cache, "value_cache", key_cache.scalar_type(), 4);
  check(slots, "slot_mapping", at::kLong, 1);
  TORCH_CHECK(key.size(0) == value.size(0) && key.size(0) == slots.size(0) &&
                  key.size(1) == value.size(1) && key.size(1) == key_cache.size(1) &&
                  key.size(2) == key_cache.size(3) && value.size(1) == value_cache.size(1) &&
                  value.size(2) == value_cache.size(3) &&
                  key_cache.size(2) == value_cache.size(2),
              "key ", key.sizes(), ", value ", value.sizes(), " and the caches ",
              key_cache.sizes(), ", ", value_cache.sizes(), " do not fit together");
  WriteArgs w{};
  w.dtype = dtype_of(key);
  w.cache = cache_dtype_of(key_cache, key);
  w.scales = scales_of(k_scale, v_scale, key_cache);
  w.key = key.data_ptr();
  w.value = value.data_ptr();
  w.key_cache = key_cache.data_ptr();
  w.value_cache = value_cache.data_ptr();
  w.slots = slots.data_ptr<int64_t>();
  w.tokens = key.size(0);
  w.kv_heads = key.size(1);
  w.head_dim = key.size(2);
  w.v_dim = value.size(2);
  w.block_size = key_cache.size(2);
  copy_strides(key, w.key_stride, 2);
  copy_strides(value, w.value_stride, 2);
  copy_strides(key_cache, w.key_cache_stride, 3);
  copy_strides(value_cache, w.value_cache_stride, 3);
  w.threads = at::num_threads();
  return w;
}

void write_kv(const Tensor& key, const Tensor& value, const Tensor& key_cache,
              const Tensor& value_cache, const Tensor& slot_mapping,
              const optional<Tensor>& k_scale, const optional<Tensor>& v_scale) {
  kernels->write_kv(
      write_args(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale));
}

Tensor rope_write(const Tensor& query, const Tensor& key, const Tensor& value,
                  const optional<Tensor>& query_norm, const optional<Tensor>& key_norm, double eps,
                  double norm_offset, const Tensor& cos_table, const Tensor& sin_table,
                  const Tensor& positions, bool interleaved, const Tensor& key_cache,
                  const Tensor& value_cache, const Tensor& slot_mapping,
                  const optional<Tensor>& k_scale, const optional<Tensor>& v_scale) {
  check(query, "query", key.scalar_type(), 3);
  check(cos_table, "cos_table", at::kFloat, 2);
  check(sin_table, "sin_table", at::kFloat, 2);
  check(positions, "positions", at::kLong, 1);
  RopeArgs a{};
  a.write = write_args(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale);
  TORCH_CHECK(query.size(0) == key.size(0) && query.size(2) == key.size(2) &&
                  positions.size(0) == key.size(0) && cos_table.sizes() == sin_table.sizes() &&
                  cos_table.size(1) <= key.size(2) && cos_table.size(1) % 2 == 0,
              "query ", query.sizes(), ", positions ", positions.sizes(), " and cos_table ",
              cos_table.sizes(), " do not fit key ", key.sizes());
  const int64_t dim = query.size(2);
  Tensor out = at::empty(query.sizes(), query.scalar_type());
  a.query = query.data_ptr();
  a.query_norm = vector_or_null(query_norm, "query_norm", query, dim);
  a.key_norm = vector_or_null(key_norm, "key_norm", query, dim);
  a.out = out.data_ptr();
  a.cos = cos_table.data_ptr<float>();
  a.sin = sin_table.data_ptr<float>();
  a.cos_stride = cos_table.stride(0);
  a.sin_stride = sin_table.stride(0);
  a.max_position = cos_table.size(0);
  a.positions = positions.data_ptr<int64_t>();
  a.heads = query.size(1);
  a.rotary_dim = cos_table.size(1);
  copy_strides(query, a.query_stride, 2);
  a.eps = float(eps);
  a.norm_offset = float(norm_offset);
  a.interleaved = interleaved;
  kernels->rope_write(a);
  return out;
}

// One float a head, or a token and head where it may be of `tokens`, in `kept` unless the tensor holds
// them so; null where there is no `t`.
const float* to_floats(const optional<Tensor>& t, const char* name, int64_t heads,
                       std::vector<float>& kept, int64_t tokens = -1) {
  if (!t.has_value() || !t->defined()) return nullptr;
  const bool of_tokens = t->dim() == 2 && t->size(0) == tokens;
  TORCH_CHECK((t->dim() == 1 || of_tokens) && t->size(-1) == heads, name, " must have ", heads,
              " elements", tokens < 0 ? "" : ", or as many of each token", ", got ", t->sizes());
  if (t->scalar_type() == at::kFloat && t->is_contiguous()) return t->data_ptr<float>();
  at::leave_out();
  const int64_t rows = of_tokens ? tokens : 1, row_step = of_tokens ? t->stride(0) : 0;
  const int64_t step = t->stride(-1);
  kept.reserve(rows * heads);
  with_type(dtype_of(*t, name), [&](auto of) {
    const auto* data = static_cast<const decltype(of)*>(t->data_ptr());
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t h = 0; h < heads; ++h) kept.push_back(to_float(data[r * row_step + h * step]));
  });
  return kept.data();
}

}  // namespace

Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& query_start, const Tensor& context_len,
                       const Tensor& block_table, double scale, int64_t window, int64_t chunk,
                       double softcap, const optional<Tensor>& sinks,
                       const optional<Tensor>& slopes, const optional<Tensor>& k_scale,
                       const optional<Tensor>& v_scale, const optional<Tensor>& /* prompts */,
                       const optional<Tensor>& chosen, int64_t sparse_block_size, int64_t v_dim,
                       const optional<Tensor>& distance_bias) {
  check(query, "query", query.scalar_type(), 3);
  check(key_cache, "key_cache", key_cache.scalar_type(), 4);
  check(value_cache, "value_cache", key_cache.scalar_type(), 4);
  check(query_start, "query_start", at::kInt, 1);
  check(context_len, "context_len", at::kInt, 1);
  check(block_table, "block_table", at::kInt, 2);
  const int64_t heads = query.size(1), kv_heads = key_cache.size(1);
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0 && value_cache.size(1) == kv_heads &&
                  key_cache.size(3) == query.size(2) && key_cache.size(2) == value_cache.size(2),
              "query ", query.sizes(), " does not fit the caches ", key_cache.sizes(), ", ",
              value_cache.sizes());
  TORCH_CHECK(query_start.size(0) == context_len.size(0) + 1 &&
                  block_table.size(0) >= context_len.size(0),
              "query_start ", query_start.sizes(), " and block_table ", block_table.sizes(),
              " do not fit context_len ", context_len.sizes());
  TORCH_CHECK(v_dim >= 0 && v_dim <= key_cache.size(3) && (v_dim == 0 || value_cache.size(3) == 0),
              "v_dim ", v_dim, " does not fit the caches ", key_cache.sizes(), ", ",
              value_cache.sizes());
  const Tensor& values = v_dim ? key_cache : value_cache;
  const int64_t value_width = v_dim ? v_dim : value_cache.size(3);
  std::vector<float> sink_values, slope_values;
  const float* sink = to_floats(sinks, "sinks", heads, sink_values, query.size(0));
  const float* slope = to_floats(slopes, "slopes", heads, slope_values);
  AttentionArgs a{};
  Tensor out = at::empty({query.size(0), heads, value_width}, query.scalar_type());
  a.dtype = dtype_of(query);
  a.cache = cache_dtype_of(key_cache, query);
  a.scales = scales_of(k_scale, v_dim ? k_scale : v_scale, key_cache);
  a.query = query.data_ptr();
  a.key_cache = key_cache.data_ptr();
  a.value_cache = values.data_ptr();
  a.out = out.data_ptr();
  a.query_start = query_start.data_ptr<int32_t>();
  a.context_len = context_len.data_ptr<int32_t>();
  a.block_table = block_table.data_ptr<int32_t>();
  a.tokens = query.size(0);
  a.requests = context_len.size(0);
  a.heads = heads;
  a.kv_heads = kv_heads;
  a.head_dim = query.size(2);
  a.v_dim = value_width;
  a.block_size = key_cache.size(2);
  copy_strides(query, a.query_stride, 2);
  copy_strides(key_cache, a.key_stride, 3);
  copy_strides(values, a.value_stride, 3);
  a.table_stride = block_table.stride(0);
  a.sinks = sink;
  a.sink_stride = sink && sinks->dim() == 2 ? heads : 0;
  a.slopes = slope;
  if (distance_bias.has_value() && distance_bias->defined()) {
    check(*distance_bias, "distance_bias", distance_bias->scalar_type(), 3);
    TORCH_CHECK(distance_bias->size(0) == query.size(0) && distance_bias->size(1) == heads,
                "distance_bias ", distance_bias->sizes(), " does not fit query ", query.sizes());
    a.distance_bias = {distance_bias->data_ptr(), dtype_of(*distance_bias, "distance_bias"),
                       {distance_bias->stride(0), distance_bias->stride(1)}};
    a.num_distances = distance_bias->size(2);
  }
  if (chosen.has_value() && chosen->defined()) {
    check(*chosen, "chosen", at::kInt, 3);
    const int64_t groups = chosen->size(1);
    TORCH_CHECK(chosen->size(0) == query.size(0) && (groups == 1 || groups == kv_heads) &&
                    sparse_block_size > 0 && window == 0 && chunk == 0 && !slope &&
                    a.distance_bias.data == nullptr,
                "chosen ", chosen->sizes(), " does not fit query ", query.sizes(),
                ", or comes with a window, a chunk, slopes or a distance_bias");
    a.chosen = chosen->data_ptr<int32_t>();
    a.num_chosen = chosen->size(2);
    a.chosen_stride[0] = chosen->stride(0);
    a.chosen_stride[1] = groups > 1 ? chosen->stride(1) : 0;
    a.sparse_block_size = sparse_block_size;
  }
  a.window = window;
  a.chunk = chunk;
  a.scale = float(scale);
  a.softcap = float(softcap);
  a.threads = at::num_threads();
  kernels->paged_attention(a);
  return out;
}

namespace {

// What indexers of keys and of blocks have in common; the rest is up to them.
ChooseArgs choose_args(const Tensor& query, const Tensor& key, const Tensor& key_cache,
                       const Tensor& slot_mapping, const Tensor& query_start,
                       const Tensor& context_len, const Tensor& block_table, int64_t top_k) {
  check(query, "query", query.scalar_type(), 3);
  check(key, "key", query.scalar_type(), 2);
  check(key_cache, "key_cache", query.scalar_type(), 4);
  check(slot_mapping, "slot_mapping", at::kLong, 1);
  check(query_start, "query_start", at::kInt, 1);
  check(context_len, "context_len", at::kInt, 1);
  check(block_table, "block_table", at::kInt, 2);
  const int64_t tokens = query.size(0), heads = query.size(1), dim = query.size(2);
  TORCH_CHECK(key.size(0) == tokens && key.size(1) == dim && slot_mapping.size(0) == tokens &&
                  key_cache.size(1) == 1 && key_cache.size(3) == dim && top_k > 0,
              "query ", query.sizes(), ", key ", key.sizes(), ", key_cache ", key_cache.sizes(),
              " and top_k ", top_k, " do not fit together");
  TORCH_CHECK(query_start.size(0) == context_len.size(0) + 1 &&
                  block_table.size(0) >= context_len.size(0),
              "query_start ", query_start.sizes(), " and block_table ", block_table.sizes(),
              " do not fit context_len ", context_len.sizes());
  ChooseArgs a{};
  a.dtype = dtype_of(query);
  a.query = query.data_ptr();
  a.key = key.data_ptr();
  a.key_cache = key_cache.data_ptr();
  a.slots = slot_mapping.data_ptr<int64_t>();
  a.query_start = query_start.data_ptr<int32_t>();
  a.context_len = context_len.data_ptr<int32_t>();
  a.block_table = block_table.data_ptr<int32_t>();
  a.tokens = tokens;
  a.requests = context_len.size(0);
  a.heads = heads;
  a.head_dim = dim;
  a.block_size = key_cache.size(2);
  a.top_k = top_k;
  a.rate = 1;
  copy_strides(query, a.query_stride, 2);
  a.key_stride = key.stride(0);
  a.table_stride = block_table.stride(0);
  a.cache_stride[0] = key_cache.stride(0);
  a.cache_stride[1] = key_cache.stride(2);
  a.threads = at::num_threads();
  return a;
}

Tensor choose_keys(const Tensor& query, const Tensor& key, const Tensor& weights,
                   const Tensor& key_cache, const Tensor& slot_mapping, const Tensor& query_start,
                   const Tensor& context_len, const Tensor& block_table, int64_t top_k,
                   int64_t rate) {
  ChooseArgs a = choose_args(query, key, key_cache, slot_mapping, query_start, context_len,
                             block_table, top_k);
  TORCH_CHECK(rate > 0, "rate must be positive, got ", rate);
  a.rate = rate;
  check(weights, "weights", at::kFloat, 2);
  TORCH_CHECK(weights.size(0) == a.tokens && weights.size(1) == a.heads,
              "weights ", weights.sizes(), " do not fit query ", query.sizes());
  a.weights = weights.data_ptr<float>();
  a.weight_stride = weights.stride(0);
  Tensor out = at::empty({a.tokens, top_k}, at::kInt);
  a.out = out.data_ptr<int32_t>();
  kernels->choose_keys(a);
  return out;
}

Tensor choose_blocks(const Tensor& query, const Tensor& key, const Tensor& key_cache,
                     const Tensor& slot_mapping, const Tensor& query_start,
                     const Tensor& context_len, const Tensor& block_table, int64_t top_k,
                     int64_t sparse_block_size, int64_t recent) {
  ChooseArgs a = choose_args(query, key, key_cache, slot_mapping, query_start, context_len,
                             block_table, top_k);
  TORCH_CHECK(sparse_block_size > 0 && recent >= 0 && recent <= top_k,
              "sparse_block_size ", sparse_block_size, " and recent ", recent,
              " do not fit top_k ", top_k);
  a.sparse_block_size = sparse_block_size;
  a.recent = recent;
  Tensor out = at::empty({a.tokens, a.heads, top_k}, at::kInt);
  a.out = out.data_ptr<int32_t>();
  kernels->choose_keys(a);
  return out;
}

// x where its rows end at a whole tile, else a view of a copy with zeros beyond their ends: oneDNN's
// tiles multiply what lies there by zero, and a NaN would spread.
const Tensor& zero_padded(const Tensor& x, Tensor& kept) {
  const int64_t depth = x.size(-1), past = (32 - depth % 32) % 32;
  if (past == 0) return x;
  auto sizes = x.sizes().vec();
  sizes.back() += past;
  Tensor padded = at::empty(sizes, x.scalar_type());
  at::leave_out();
  char* end = static_cast<char*>(padded.data_ptr()) + depth * x.element_size();
  const int64_t rows = x.numel() / depth;
  for (int64_t i = 0; i < rows; ++i)
    std::memset(end + i * (depth + past) * x.element_size(), 0, past * x.element_size());
  Tensor view = padded.narrow(x.dim() - 1, 0, depth);
  view.copy_(x);
  return kept = std::move(view);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& stored, const optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() >= 1 && stored.dim() == 2 && x.size(-1) == stored.size(1),
              "weight ", stored.sizes(), " does not fit x ", x.sizes());
  if (x.numel() == 0 || stored.numel() == 0) return at::torch_linear(x, stored, bias ? &*bias : nullptr);
  Tensor dense, kept;
  const bool by_columns = stored.stride(1) != 1 && stored.stride(0) == 1;
  const Tensor& weight = by_columns ? stored : at::dense_rows(stored, dense);
  TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "weight must be ", x.scalar_type(),
              ", got ", weight.scalar_type());
  Rows rows = rows_of(x, kept);
  if (rows.size[0] != 1 || rows.size[1] != 1) {
    kept = x.contiguous();
    rows = rows_of(kept, kept);
  }
  const optional<Tensor> b = bias ? optional(bias->contiguous()) : std::nullopt;
  LinearArgs a{dtype_of(x), rows.data, weight.data_ptr(),
               vector_or_null(b, "bias", x, weight.size(0)), nullptr, rows.size[2], x.size(-1),
               weight.size(0), rows.stride[2], weight.stride(by_columns ? 1 : 0), weight.size(0),
               at::num_threads()};
  if (!by_columns && !kernels->takes_linear(a))
    return at::torch_linear(zero_padded(x, kept), weight, b ? &*b : nullptr);
  auto sizes = x.sizes().vec();
  sizes.back() = a.channels;
  Tensor out = at::empty(sizes, x.scalar_type());
  a.out = out.data_ptr();
  by_columns ? kernels->linear_columns(a) : kernels->linear(a);
  return out;
}

namespace {

Tensor expert_linear(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                     const Tensor& expert, bool transposed) {
  return multiply_experts(x, weight, bias, expert, transposed);
}

template <class T>
const T* column(const Tensor& t, const char* name, at::ScalarType dtype, int64_t size) {
  check(t, name, dtype, 1);
  TORCH_CHECK(t.size(0) >= size, name, " must have ", size, " elements, got ", t.size(0));
  return t.data_ptr<T>();
}

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
              const Tensor& top_p, const Tensor& min_p, const Tensor& seed,
              const Tensor& position) {
  check(logits, "logits", logits.scalar_type(), 2);
  const int64_t rows = logits.size(0);
  Tensor out = at::empty({rows}, at::kLong);
  kernels->sample({dtype_of(logits), logits.data_ptr(), rows, logits.size(1), logits.stride(0),
                column<float>(temperature, "temperature", at::kFloat, rows),
                column<float>(top_p, "top_p", at::kFloat, rows),
                column<float>(min_p, "min_p", at::kFloat, rows),
                column<int32_t>(top_k, "top_k", at::kInt, rows),
                column<int64_t>(seed, "seed", at::kLong, rows),
                column<int64_t>(position, "position", at::kLong, rows), out.data_ptr<int64_t>(),
                at::num_threads()});
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> token_logprobs(const Tensor& logits,
                                                          const Tensor& token, int64_t k) {
  check(logits, "logits", logits.scalar_type(), 2);
  TORCH_CHECK(k >= 0, "k must not be negative, got ", k);
  const int64_t rows = logits.size(0);
  Tensor chosen = at::empty({rows}, at::kFloat), rank = at::empty({rows}, at::kLong);
  Tensor ids = at::empty({rows, k}, at::kLong), values = at::empty({rows, k}, at::kFloat);
  kernels->token_logprobs({dtype_of(logits), logits.data_ptr(), rows, logits.size(1),
                        logits.stride(0), k, column<int64_t>(token, "token", at::kLong, rows),
                        chosen.data_ptr<float>(), values.data_ptr<float>(),
                        rank.data_ptr<int64_t>(), ids.data_ptr<int64_t>(), at::num_threads()});
  return {std::move(chosen), std::move(rank), std::move(ids), std::move(values)};
}

Tensor process_logits(const Tensor& logits, const Tensor& row, const Tensor& length,
                      const Tensor& history, const Tensor& prompt_len, const Tensor& repetition,
                      const Tensor& presence, const Tensor& frequency, const Tensor& bias_token,
                      const Tensor& bias_value, const Tensor& bias_until, const Tensor& has_mask,
                      const Tensor& mask) {
  check(logits, "logits", logits.scalar_type(), 2);
  check(history, "history", at::kInt, 2);
  check(bias_token, "bias_token", at::kInt, 2);
  check(bias_value, "bias_value", at::kFloat, 2);
  check(bias_until, "bias_until", at::kInt, 2);
  check(mask, "mask", at::kInt, 2);
  const int64_t samples = logits.size(0), vocab = logits.size(1), rows = history.size(0);
  TORCH_CHECK(bias_value.sizes() == bias_token.sizes() && bias_until.sizes() == bias_token.sizes() &&
                  bias_token.size(0) == rows && mask.size(0) == rows &&
                  mask.size(1) * 32 >= vocab,
              "the tables do not fit: bias ", bias_token.sizes(), ", mask ", mask.sizes(),
              ", history ", history.sizes(), ", logits ", logits.sizes());
  Tensor out = at::empty(logits.sizes(), at::kFloat);
  ProcessArgs a{};
  a.dtype = dtype_of(logits);
  a.logits = logits.data_ptr();
  a.out = out.data_ptr<float>();
  a.rows = samples;
  a.vocab = vocab;
  a.logits_stride = logits.stride(0);
  a.row = column<int64_t>(row, "row", at::kLong, samples);
  a.length = column<int32_t>(length, "length", at::kInt, samples);
  a.history = history.data_ptr<int32_t>();
  a.prompt_len = column<int32_t>(prompt_len, "prompt_len", at::kInt, rows);
  a.history_stride = history.stride(0);
  a.history_width = history.size(1);
  a.repetition = column<float>(repetition, "repetition", at::kFloat, rows);
  a.presence = column<float>(presence, "presence", at::kFloat, rows);
  a.frequency = column<float>(frequency, "frequency", at::kFloat, rows);
  a.bias_token = bias_token.data_ptr<int32_t>();
  a.bias_until = bias_until.data_ptr<int32_t>();
  a.bias_value = bias_value.data_ptr<float>();
  a.bias_stride[0] = bias_token.stride(0);
  a.bias_stride[1] = bias_value.stride(0);
  a.bias_stride[2] = bias_until.stride(0);
  a.bias_width = bias_token.size(1);
  a.has_mask = column<int32_t>(has_mask, "has_mask", at::kInt, rows);
  a.mask = mask.data_ptr<int32_t>();
  a.mask_stride = mask.stride(0);
  a.threads = at::num_threads();
  kernels->process_logits(a);
  return out;
}

void add_lora(const Tensor& out, const Tensor& x, const Tensor& a, const Tensor& b,
              const Tensor& bounds, const Tensor& adapter, const optional<Tensor>& expert) {
  const int64_t rows = expert ? expert->numel() : adapter.numel();
  const int64_t experts = expert ? a.size(1) : 1, parts = expert ? 1 : a.size(1);
  const int64_t tokens = adapter.numel(), choices = std::max<int64_t>(1, tokens ? rows / tokens : 1);
  TORCH_CHECK(a.dim() == 4 && b.dim() == (expert ? 4 : 3) && a.size(0) == b.size(0) &&
                  (!expert || b.size(1) == experts) && a.size(2) == b.size(-2) &&
                  bounds.numel() == parts + 1 && x.dim() >= 1 && out.dim() >= 1 &&
                  x.size(-1) == a.size(3) && out.size(-1) == b.size(-1) &&
                  rows == tokens * choices && x.numel() == rows * x.size(-1) &&
                  out.numel() == rows * out.size(-1),
              "add_lora: out ", out.sizes(), ", x ", x.sizes(), ", a ", a.sizes(), ", b ",
              b.sizes(), ", bounds ", bounds.sizes(), ", adapter ", adapter.sizes(), " and ", rows,
              " rows do not fit together");
  TORCH_CHECK(out.is_contiguous() && a.is_contiguous() && b.is_contiguous() &&
                  bounds.is_contiguous() && adapter.is_contiguous(),
              "add_lora: out, a, b, bounds and adapter must be dense");
  TORCH_CHECK(!expert || (expert->is_contiguous() && expert->scalar_type() == at::kLong),
              "add_lora: expert must be dense and int64");
  TORCH_CHECK(out.scalar_type() == x.scalar_type() && a.scalar_type() == x.scalar_type() &&
                  b.scalar_type() == x.scalar_type(),
              "add_lora: out, a and b must be ", x.scalar_type(), " like x");
  const int32_t* edges = bounds.data_ptr<int32_t>();
  for (int64_t p = 0; p <= parts; ++p)
    TORCH_CHECK(edges[p] >= (p ? edges[p - 1] : 0) && edges[p] <= b.size(-1),
                "add_lora: bounds must rise from 0 to ", b.size(-1));
  const Tensor input = x.contiguous();
  kernels->add_lora({dtype_of(x), input.data_ptr(), a.data_ptr(), b.data_ptr(), out.data_ptr(),
                     edges, adapter.data_ptr<int32_t>(),
                     expert ? expert->data_ptr<int64_t>() : nullptr, rows, x.size(-1), out.size(-1),
                     a.size(0), experts, choices, parts, a.size(2),
                     at::num_threads()});
}

const at::Ops kOps = {
    {"rms_norm", &at::boxed<&rms_norm>},
    {"add_rms_norm", &at::boxed<&add_rms_norm>},
    {"act_mul", &at::boxed<&act_mul>},
    {"write_kv", &at::boxed<&write_kv>},
    {"rope_write", &at::boxed<&rope_write>},
    {"paged_attention", &at::boxed<&paged_attention>},
    {"choose_keys", &at::boxed<&choose_keys>},
    {"choose_blocks", &at::boxed<&choose_blocks>},
    {"sample", &at::boxed<&sample>},
    {"token_logprobs", &at::boxed<&token_logprobs>},
    {"linear", &at::boxed<&linear>},
    {"expert_linear", &at::boxed<&expert_linear>},
    {"add_lora", &at::boxed<&add_lora>},
    {"process_logits", &at::boxed<&process_logits>},
};

}  // namespace
}  // namespace llmc::ops
