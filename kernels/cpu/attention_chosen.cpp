// Attention of each query to the positions chosen for it: every cache row has its own address.
#include "attention.h"
#include "dtypes.h"
#include "parallel.h"

#include <vector>

namespace llmc {
namespace {

constexpr int64_t kAhead = 8;  // rows to prefetch, since hardware can't predict their addresses

struct Row {  // a query of a request, and the KV head of some of its heads
  int64_t token, position, request, kv_head;
};

// One row of a cache in T: in the cache itself, or converted to `to` for narrower caches.
template <class T>
const T* row_at(const void* cache, Dtype dtype, int64_t offset, int64_t dim, T* to) {
  return with_element<T>(dtype, [&](auto e) -> const T* {
    const auto* row = static_cast<const decltype(e)*>(cache) + offset;
    if constexpr (std::is_same_v<decltype(e), T>) return row;
    widen_cached(row, dim, dtype, to);
    return to;
  });
}

template <class T>
void prefetch_at(const void* cache, Dtype dtype, int64_t offset, int64_t dim) {
  const int64_t width = with_element<T>(dtype, [](auto e) { return int64_t(sizeof e); });
  const char* row = static_cast<const char*>(cache) + offset * width;
  for (int64_t i = 0; i < dim * width; i += 64) __builtin_prefetch(row + i, 0, 2);
}

template <class T>
float dot(const float* query, const T* key, int64_t dim) {
  v16f sum{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) sum += load(query + i) * load(key + i);
  if (i < dim) sum += load_n(query + i, dim - i) * load_n(key + i, dim - i);
  return sum_lanes(sum);
}

template <class T>
void add_scaled(float* acc, float weight, const T* value, int64_t dim) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store(acc + i, load(acc + i) + load(value + i) * weight);
  for (; i < dim; ++i) acc[i] += to_float(value[i]) * weight;
}

// Turns scores in units of log2 into weights in place; returns the maximum and the sum of weights.
void softmax(float* scores, int64_t n, float* top, float* sum) {
  v16f most = splat(-kInf), total{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = vmax(most, load(scores + i));
  float m = max_lanes(most), l = 0;
  for (; i < n; ++i) m = std::max(m, scores[i]);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    const v16f weight = exp2_lanes(load(scores + i) - m);
    total += weight;
    store(scores + i, weight);
  }
  l = sum_lanes(total);
  for (; i < n; ++i) l += scores[i] = std::exp2(scores[i] - m);
  *top = m, *sum = l;
}

template <class T>
void attend(const AttentionArgs& a, const Row& row) {
  static thread_local Arena arena;
  const int64_t group = a.heads / a.kv_heads, dim = a.head_dim, v_dim = a.v_dim;
  const int64_t most = a.num_chosen * a.sparse_block_size;
  arena.reset((group * (dim + v_dim + most + 48) + 2 * (dim + v_dim)) * sizeof(float) +
              2 * (most + 16) * sizeof(int64_t));
  int64_t* key_at = arena.take<int64_t>(most);
  int64_t* value_at = arena.take<int64_t>(most);
  float* query = arena.take<float>(group * dim);
  float* acc = arena.take<float>(group * v_dim);
  float* scores = arena.take<float>(group * most);
  T* wide = arena.take<T>(std::max(dim, v_dim));

  const int32_t* table = a.block_table + row.request * a.table_stride;
  const int32_t* chosen =
      a.chosen + row.token * a.chosen_stride[0] + row.kv_head * a.chosen_stride[1];
  int64_t n = 0;
  for (int64_t i = 0; i < a.num_chosen; ++i) {
    if (chosen[i] < 0) continue;
    const int64_t first = chosen[i] * a.sparse_block_size;
    const int64_t past = std::min(first + a.sparse_block_size, row.position + 1);
    for (int64_t at = first; at < past; ++at) {
      const int64_t block = table[at / a.block_size], inside = at % a.block_size;
      key_at[n] =
          block * a.key_stride[0] + row.kv_head * a.key_stride[1] + inside * a.key_stride[2];
      value_at[n++] =
          block * a.value_stride[0] + row.kv_head * a.value_stride[1] + inside * a.value_stride[2];
    }
  }
  const T* from = static_cast<const T*>(a.query) + row.token * a.query_stride[0] +
                  row.kv_head * group * a.query_stride[1];
  for (int64_t g = 0; g < group; ++g)
    for (int64_t d = 0; d < dim; ++d) query[g * dim + d] = to_float(from[g * a.query_stride[1] + d]);

  const float scale = a.scale * a.scales.key_of(row.kv_head);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch_at<T>(a.key_cache, a.cache, key_at[i + kAhead], dim);
    const T* key = row_at(a.key_cache, a.cache, key_at[i], dim, wide);
    for (int64_t g = 0; g < group; ++g) {
      float score = dot(query + g * dim, key, dim) * scale;
      if (a.softcap > 0) score = a.softcap * std::tanh(score / a.softcap);
      scores[g * most + i] = score * kLog2e;
    }
  }
  std::fill(acc, acc + group * v_dim, 0.0f);
  std::vector<float> top(group), sum(group);
  for (int64_t g = 0; g < group; ++g) softmax(scores + g * most, n, &top[g], &sum[g]);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch_at<T>(a.value_cache, a.cache, value_at[i + kAhead], v_dim);
    const T* value = row_at(a.value_cache, a.cache, value_at[i], v_dim, wide);
    for (int64_t g = 0; g < group; ++g)
      add_scaled(acc + g * v_dim, scores[g * most + i], value, v_dim);
  }
  for (int64_t g = 0; g < group; ++g)
    write_output(a, row.token, row.kv_head * group + g, top[g], sum[g], acc + g * v_dim);
}

}  // namespace

void run_chosen(const AttentionArgs& a) {
  std::vector<Row> rows;
  for (int64_t r = 0; r < a.requests; ++r) {
    if (a.context_len[r] <= 0) continue;
    const int64_t last = a.query_start[r + 1];
    for (int64_t t = a.query_start[r]; t < last; ++t)
      for (int64_t h = 0; h < a.kv_heads; ++h)
        rows.push_back({t, a.context_len[r] - (last - t), r, h});
  }
  const int64_t group = a.heads / a.kv_heads;
  const int64_t cost = a.num_chosen * a.sparse_block_size * (8 + group) * (a.head_dim + a.v_dim) / 16;
  const Row* work = rows.data();
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    parallel_rows(int64_t(rows.size()), cost, a.threads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) attend<T>(a, work[i]);
    });
  });
}

}  // namespace llmc
