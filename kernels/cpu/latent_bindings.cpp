// latent_attention, composed of other ops and a copy, in one of two forms for each request of a
// step.
#include "bindings.h"

#include <algorithm>

namespace llmc::ops {
namespace {

// As in kernels/latent_attention.py.
constexpr int64_t kLeastNew = 32;
constexpr int64_t kMostBytes = 256 << 20;

constexpr int64_t kPieceBytes = 32 << 20;  // expanded keys and values at a time, at least one head

Rows rows_of(const Tensor& t) {  // [A, B, width]
  return {t.data_ptr(), {1, t.size(0), t.size(1)}, {0, t.stride(0), t.stride(1)}};
}

void copy_rows(const Tensor& from, const Tensor& to, float scale = 1.0f) {
  kernels->copy_rows({dtype_of(to), cache_dtype_of(from, to), scale, rows_of(from), rows_of(to),
                      to.size(2), at::num_threads()});
}

Tensor swapped(const Tensor& t) {  // [A, B, width] -> [B, A, width]
  return t.view({t.size(1), t.size(0), t.size(2)}, {t.stride(1), t.stride(0), t.stride(2)});
}

Tensor integers(std::initializer_list<int64_t> values) {
  Tensor out = at::empty({int64_t(values.size())}, at::kInt);
  std::copy(values.begin(), values.end(), out.data_ptr<int32_t>());
  return out;
}

optional<Tensor> part_of(const optional<Tensor>& t, int64_t from, int64_t count) {
  return t.has_value() && t->defined() ? optional(t->narrow(0, from, count)) : std::nullopt;
}

struct Latent {  // arguments that all requests have in common
  const Tensor &weight, &key_cache;
  double scale, softcap;
  int64_t window, chunk;
  const optional<Tensor>&sinks, &slopes, &k_scale;
  int64_t heads, key_dim, shared_dim, value_dim, rank;

  int64_t width() const { return rank + shared_dim; }

  bool expands(int64_t tokens, int64_t context) const {
    const int64_t pairs = tokens * context - tokens * (tokens - 1) / 2;
    const int64_t made = key_dim + value_dim, of_head = made + key_dim + shared_dim;
    return tokens >= kLeastNew && tokens <= context && window == 0 && chunk == 0 &&
           (context - tokens) * rank * made < pairs * (2 * rank - made) &&
           context * (width() + of_head) * weight.element_size() <= kMostBytes;
  }

  // In the following: query [T, H, D + Dr], out [T, H, Dv]; bounds as in paged_attention.
  void absorbed(const Tensor& query, const Tensor& out, const Tensor& query_start,
                const Tensor& context_len, const Tensor& block_table) const {
    if (out.numel() == 0) return;
    const Tensor by_head = weight.view({heads, key_dim + value_dim, rank},
                                       {(key_dim + value_dim) * weight.stride(0), weight.stride(0), 1});
    const Tensor to_keys = by_head.narrow(1, 0, key_dim);
    const Tensor to_values = by_head.narrow(1, key_dim, value_dim);
    const Tensor turned = to_values.view({heads, rank, value_dim}, {to_values.stride(0), 1, to_values.stride(1)});
    const Tensor own = at::empty({query.size(0), heads, width()}, query.scalar_type());
    multiply(swapped(query.narrow(2, 0, key_dim)), to_keys, swapped(own.narrow(2, 0, rank)));
    copy_rows(query.narrow(2, key_dim, shared_dim), own.narrow(2, rank, shared_dim));
    const Tensor latents = paged_attention(
        own, key_cache, key_cache.narrow(3, 0, 0), query_start, context_len, block_table, scale,
        window, chunk, softcap, sinks, slopes, k_scale, {}, {}, {}, 1, rank, {});
    multiply(swapped(latents), turned, swapped(out));
  }

  // For one request, whose blocks are `table`.
  void expanded(const Tensor& query, const Tensor& out, int64_t context, const int32_t* table) const {
    const auto type = query.scalar_type();
    const Tensor cached = at::empty({context, 1, width()}, type);
    gather(table, cached);
    const Tensor latents = cached.view({context, rank}, {width(), 1});
    const int64_t made_dim = key_dim + value_dim, dim = key_dim + shared_dim;
    const int64_t bytes = context * (made_dim + dim) * query.element_size();
    const int64_t most = std::clamp<int64_t>(kPieceBytes / bytes, 1, heads);
    const Tensor start = integers({0, query.size(0)}), length = integers({context});
    const Tensor block = integers({0}).view({1, 1}, {1, 1});
    for (int64_t first = 0; first < heads; first += most) {
      const int64_t count = std::min(most, heads - first);
      const Tensor made = linear(latents, weight.narrow(0, first * made_dim, count * made_dim), {});
      const Tensor by_head = made.view({context, count, made_dim}, {count * made_dim, made_dim, 1});
      const Tensor keys = at::empty({context, count, dim}, type);
      copy_rows(by_head.narrow(2, 0, key_dim), keys.narrow(2, 0, key_dim));
      copy_rows(cached.view({context, count, shared_dim}, {width(), 0, 1}, rank),
                keys.narrow(2, key_dim, shared_dim));
      // the whole context as one block
      const Tensor key_block = keys.view({1, count, context, dim}, {0, dim, count * dim, 1});
      const Tensor value_block = made.view({1, count, context, value_dim},
                                           {0, made_dim, count * made_dim, 1}, key_dim);
      copy_rows(paged_attention(query.narrow(1, first, count), key_block, value_block, start, length,
                                block, scale, 0, 0, softcap, part_of(sinks, first, count),
                                part_of(slopes, first, count), {}, {}, {}, {}, 1, 0, {}),
                out.narrow(1, first, count));
    }
  }

  void gather(const int32_t* table, const Tensor& to) const {
    const int64_t size = key_cache.size(2);
    const float scale = k_scale ? *k_scale->data_ptr<float>() : 1.0f;
    for (int64_t i = 0; i < to.size(0); i += size) {
      const int64_t count = std::min(size, to.size(0) - i);
      copy_rows(key_cache.select(table[i / size]).narrow(1, 0, count), to.narrow(0, i, count), scale);
    }
  }
};

Tensor latent_attention(const Tensor& query, const Tensor& weight, const Tensor& key_cache,
                        const Tensor& query_start, const Tensor& context_len,
                        const Tensor& block_table, double scale, int64_t window, int64_t chunk,
                        double softcap, const optional<Tensor>& sinks,
                        const optional<Tensor>& slopes, const optional<Tensor>& k_scale,
                        const optional<Tensor>& /* prompts */) {
  check(query, "query", query.scalar_type(), 3);
  check(weight, "weight", query.scalar_type(), 2);
  check(key_cache, "key_cache", key_cache.scalar_type(), 4);
  TORCH_CHECK(key_cache.scalar_type() != at::kChar, "latents are not read from an int8 cache");
  check(query_start, "query_start", at::kInt, 1);
  check(context_len, "context_len", at::kInt, 1);
  check(block_table, "block_table", at::kInt, 2);
  const int64_t tokens = query.size(0), heads = query.size(1), rank = weight.size(1);
  const int64_t shared_dim = key_cache.size(3) - rank, key_dim = query.size(2) - shared_dim;
  TORCH_CHECK(heads > 0 && weight.size(0) % heads == 0 && key_cache.size(1) == 1 && rank > 0 &&
                  shared_dim >= 0 && key_dim > 0 && weight.size(0) / heads > key_dim,
              "weight ", weight.sizes(), " and key_cache ", key_cache.sizes(),
              " do not fit query ", query.sizes());
  TORCH_CHECK(query_start.size(0) == context_len.size(0) + 1 &&
                  block_table.size(0) >= context_len.size(0),
              "query_start ", query_start.sizes(), " and block_table ", block_table.sizes(),
              " do not fit context_len ", context_len.sizes());
  TORCH_CHECK(!sinks.has_value() || !sinks->defined() || sinks->dim() == 1,
              "sinks must have 1 dimension beside a latent, got ", sinks->sizes());
  const Latent latent{weight, key_cache, scale, softcap, window, chunk, sinks, slopes, k_scale,
                      heads, key_dim, shared_dim, weight.size(0) / heads - key_dim, rank};
  Tensor out = at::empty({tokens, heads, latent.value_dim}, query.scalar_type());
  if (tokens < kLeastNew) {  // independent of values, so the step can be recorded
    latent.absorbed(query, out, query_start, context_len, block_table);
    return out;
  }
  at::leave_out();
  const int32_t *start = query_start.data_ptr<int32_t>(), *context = context_len.data_ptr<int32_t>();
  const int64_t requests = context_len.size(0);
  // consecutive requests that are not expanded, and tokens without a request at the end
  const auto absorb = [&](int64_t first, int64_t last) {
    const int64_t from = start[first], count = (last < requests ? start[last] : tokens) - from;
    const Tensor bounds = at::empty({last - first + 1}, at::kInt);
    for (int64_t r = first; r <= last; ++r) bounds.data_ptr<int32_t>()[r - first] = start[r] - start[first];
    latent.absorbed(query.narrow(0, from, count), out.narrow(0, from, count), bounds,
                    context_len.narrow(0, first, last - first),
                    block_table.narrow(0, first, last - first));
  };
  int64_t done = 0;
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t count = start[r + 1] - start[r];
    if (!latent.expands(count, context[r])) continue;
    absorb(done, r);
    latent.expanded(query.narrow(0, start[r], count), out.narrow(0, start[r], count), context[r],
                    block_table.data_ptr<int32_t>() + r * block_table.stride(0));
    done = r + 1;
  }
  absorb(done, requests);
  return out;
}

const at::Ops kOps = {
    {"latent_attention", &at::boxed<&latent_attention>},
};

}  // namespace
}  // namespace llmc::ops
