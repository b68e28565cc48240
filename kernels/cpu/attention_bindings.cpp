// Torch bindings of attention: cache writes, ops that read caches, and ops that choose keys.
#include "bindings.h"

#include "dtypes.h"

#include <algorithm>
#include <vector>

namespace llmc::ops {
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
    TORCH_CHECK(cache.element_size() == 1 && cache.scalar_type() != at::kChar, name,
                " is for caches of float8, got ", cache.scalar_type());
    stride = t->size(0) == 1 ? 0 : 1;
    return t->data_ptr<float>();
  };
  scales.key = read(key, "k_scale", scales.key_stride);
  scales.value = read(value, "v_scale", scales.value_stride);
  return scales;
}

// The tokens of a block [rows, D]: an int8 cache has their scales, 4 bytes each, in its last rows.
int64_t block_tokens(const Tensor& cache, const char* name) {
  const int64_t rows = cache.size(2), dim = cache.size(3);
  if (cache.scalar_type() != at::kChar) return rows;
  TORCH_CHECK(dim > 0 && dim % 4 == 0 && cache.stride(2) == dim, name,
              " must have dense blocks with a multiple of 4 channels if it is int8, got ",
              cache.sizes(), " with strides ", cache.strides());
  return rows * dim / (dim + 4);
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
                  block_tokens(key_cache, "key_cache") == block_tokens(value_cache, "value_cache"),
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
  w.block_size = block_tokens(key_cache, "key_cache");
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

Rotation rotation_of(const Tensor& cos_table, const Tensor& sin_table, const Tensor& positions,
                     int64_t tokens, bool interleaved) {
  check(cos_table, "cos_table", at::kFloat, 2);
  check(sin_table, "sin_table", at::kFloat, 2);
  check(positions, "positions", at::kLong, 1);
  TORCH_CHECK(cos_table.sizes() == sin_table.sizes() && cos_table.size(1) % 2 == 0 &&
                  positions.size(0) == tokens,
              "cos_table ", cos_table.sizes(), ", sin_table ", sin_table.sizes(), " and positions ",
              positions.sizes(), " do not fit together and ", tokens, " tokens");
  return {cos_table.data_ptr<float>(), sin_table.data_ptr<float>(), cos_table.stride(0),
          sin_table.stride(0), cos_table.size(1), positions.data_ptr<int64_t>(), interleaved};
}

Tensor rope_write(const Tensor& query, const Tensor& key, const Tensor& value,
                  const optional<Tensor>& query_norm, const optional<Tensor>& key_norm, double eps,
                  double norm_offset, const Tensor& cos_table, const Tensor& sin_table,
                  const Tensor& positions, bool interleaved, const Tensor& key_cache,
                  const Tensor& value_cache, const Tensor& slot_mapping,
                  const optional<Tensor>& k_scale, const optional<Tensor>& v_scale,
                  bool norm_last) {
  check(query, "query", key.scalar_type(), 3);
  RopeArgs a{};
  a.write = write_args(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale);
  a.rotation = rotation_of(cos_table, sin_table, positions, key.size(0), interleaved);
  TORCH_CHECK(query.size(0) == key.size(0) && query.size(2) == key.size(2) &&
                  a.rotation.width <= key.size(2),
              "query ", query.sizes(), " and cos_table ", cos_table.sizes(), " do not fit key ",
              key.sizes());
  const int64_t dim = query.size(2);
  Tensor out = at::empty(query.sizes(), query.scalar_type());
  a.query = query.data_ptr();
  auto norm_of = [&](const optional<Tensor>& weight, const char* name, int64_t heads,
                     bool* together) {
    *together = weight && weight->defined() && weight->size(0) != dim;
    return vector_or_null(weight, name, query, *together ? heads * dim : dim);
  };
  a.query_norm = norm_of(query_norm, "query_norm", query.size(1), &a.query_together);
  a.key_norm = norm_of(key_norm, "key_norm", key.size(1), &a.key_together);
  TORCH_CHECK(!norm_last || !(a.query_together || a.key_together),
              "heads can't be normalized together after their rotation");
  a.out = out.data_ptr();
  a.heads = query.size(1);
  copy_strides(query, a.query_stride, 2);
  a.eps = float(eps);
  a.norm_offset = float(norm_offset);
  a.norm_last = norm_last;
  kernels->rope_write(a);
  return out;
}

Tensor rope_write_latent(const Tensor& query, const Tensor& latent, const Tensor& shared,
                         const optional<Tensor>& latent_norm, double eps, double norm_offset,
                         const Tensor& cos_table, const Tensor& sin_table, const Tensor& positions,
                         bool interleaved, const Tensor& key_cache, const Tensor& slot_mapping,
                         const optional<Tensor>& k_scale) {
  const auto dtype = latent.scalar_type();
  check(query, "query", dtype, 3);
  check(latent, "latent", dtype, 2);
  check(shared, "shared", dtype, 2);
  check(key_cache, "key_cache", key_cache.scalar_type(), 4);
  check(slot_mapping, "slot_mapping", at::kLong, 1);
  const int64_t tokens = query.size(0), width = shared.size(1), rank = latent.size(1);
  LatentWriteArgs a{};
  a.rotation = rotation_of(cos_table, sin_table, positions, tokens, interleaved);
  TORCH_CHECK(latent.size(0) == tokens && shared.size(0) == tokens &&
                  slot_mapping.size(0) == tokens && a.rotation.width == width &&
                  width <= query.size(2) && key_cache.size(1) == 1 &&
                  key_cache.size(3) == rank + width,
              "query ", query.sizes(), ", latent ", latent.sizes(), ", shared ", shared.sizes(),
              ", cos_table ", cos_table.sizes(), " and key_cache ", key_cache.sizes(),
              " do not fit together");
  a.write.dtype = dtype_of(latent);
  a.write.cache = cache_dtype_of(key_cache, latent);
  a.write.scales = scales_of(k_scale, k_scale, key_cache);
  a.write.key_cache = key_cache.data_ptr();
  a.write.slots = slot_mapping.data_ptr<int64_t>();
  a.write.tokens = tokens;
  a.write.kv_heads = 1;
  a.write.head_dim = rank + width;
  a.write.block_size = block_tokens(key_cache, "key_cache");
  copy_strides(key_cache, a.write.key_cache_stride, 3);
  a.write.threads = at::num_threads();
  Tensor out = at::empty(query.sizes(), dtype);
  a.query = query.data_ptr();
  a.latent = latent.data_ptr();
  a.shared = shared.data_ptr();
  a.norm = vector_or_null(latent_norm, "latent_norm", latent, rank);
  a.out = out.data_ptr();
  a.heads = query.size(1);
  a.dim = query.size(2);
  copy_strides(query, a.query_stride, 2);
  a.latent_stride = latent.stride(0);
  a.shared_stride = shared.stride(0);
  a.eps = float(eps);
  a.norm_offset = float(norm_offset);
  kernels->rope_write_latent(a);
  return out;
}

// One float per head (or per token and head, if `tokens` is given), stored in `kept` unless the
// tensor already has this form; null if there is no `t`.
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
                  key_cache.size(3) == query.size(2) &&
                  block_tokens(key_cache, "key_cache") == block_tokens(value_cache, "value_cache"),
              "query ", query.sizes(), " does not fit the caches ", key_cache.sizes(), ", ",
              value_cache.sizes());
  TORCH_CHECK(query_start.size(0) == context_len.size(0) + 1 &&
                  block_table.size(0) >= context_len.size(0),
              "query_start ", query_start.sizes(), " and block_table ", block_table.sizes(),
              " do not fit context_len ", context_len.sizes());
  TORCH_CHECK(key_cache.scalar_type() != at::kChar || !(chosen.has_value() && chosen->defined()),
              "chosen keys are not read from an int8 cache");
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
  a.block_size = block_tokens(key_cache, "key_cache");
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

// Arguments that indexers of keys and of blocks have in common.
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

const at::Ops kOps = {
    {"write_kv", &at::boxed<&write_kv>},
    {"rope_write", &at::boxed<&rope_write>},
    {"rope_write_latent", &at::boxed<&rope_write_latent>},
    {"paged_attention", &at::boxed<&paged_attention>},
    {"choose_keys", &at::boxed<&choose_keys>},
    {"choose_blocks", &at::boxed<&choose_blocks>},
};

}  // namespace
}  // namespace llmc::ops
