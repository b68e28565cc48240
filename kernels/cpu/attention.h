// Shared by the parts of paged_attention: a work item, and where its rows are written.
//
// Softmax uses powers of two: a row's running maximum `m` is in units of log2, `l` is the sum of
// 2^(score - m). Rows of one item are (token, head of the group) pairs, heads fastest.
#pragma once

#include "arena.h"
#include "cached.h"
#include "kernels.h"
#include "vec.h"

#include <algorithm>
#include <cstring>

namespace llmc {

struct Item {  // some queries of one request, and KV heads, against a range of keys
  int64_t request, kv_head, num_heads;  // more than one KV head only in the stream kernel
  int64_t token, num_tokens;  // index of the first query in the packed tokens
  int64_t position;           // of the first query in its request
  int64_t first_key, last_key;
  int64_t part;  // -1: rows are written to the output; else the index of their partial result
  int64_t cost;
};

struct Plan {
  const AttentionArgs& a;
  int64_t group;           // query heads per KV head
  float* partials;         // [part][row][2 + v_dim]
  int64_t partial_stride;  // floats per part
};

// The keys visible to a query are an interval: [first_visible, position].
LLMC_INLINE int64_t first_visible(const AttentionArgs& a, int64_t position) {
  int64_t first = 0;
  if (a.window > 0) first = std::max(first, position - a.window + 1);
  if (a.chunk > 0) first = std::max(first, position / a.chunk * a.chunk);
  return first;
}

// body(i, count, inside, keys, values) for the keys [first, first + n) of the item's first KV head,
// block by block: keys i to i + count of them are in the block with `keys` and `values`, from slot
// `inside` on.
template <class T, class Body>
LLMC_INLINE void each_block(const AttentionArgs& a, const Item& item, int64_t first, int64_t n,
                            const Body& body) {
  const int32_t* table = a.block_table + item.request * a.table_stride;
  for (int64_t i = 0; i < n;) {
    const int64_t at = first + i, block = table[at / a.block_size], inside = at % a.block_size;
    const int64_t count = std::min(n - i, a.block_size - inside);
    body(i, count, inside,
         static_cast<const T*>(a.key_cache) + block * a.key_stride[0] +
             item.kv_head * a.key_stride[1],
         static_cast<const T*>(a.value_cache) + block * a.value_stride[0] +
             item.kv_head * a.value_stride[1]);
    i += count;
  }
}

// Pointers to the key and value rows of [first, first + n), for the item's first KV head. The
// scales of an int8 cache are asked for.
template <class T>
void find_rows(const AttentionArgs& a, const Item& item, int64_t first, int64_t n, const T** keys,
               const T** values) {
  each_block<T>(a, item, first, n, [&](int64_t i, int64_t count, int64_t inside, const T* key_block,
                                       const T* value_block) {
    if constexpr (std::is_same_v<T, int8_t>) {
      __builtin_prefetch(block_scales(key_block, a.block_size, a.key_stride[2]) + inside, 0, 2);
      __builtin_prefetch(block_scales(value_block, a.block_size, a.value_stride[2]) + inside, 0, 2);
    }
    for (int64_t j = 0; j < count; ++j) {
      keys[i + j] = key_block + (inside + j) * a.key_stride[2];
      values[i + j] = value_block + (inside + j) * a.value_stride[2];
    }
  });
}

// The scales of the same rows of an int8 cache.
inline void copy_scales(const AttentionArgs& a, const Item& item, int64_t first, int64_t n,
                        float* keys, float* values) {
  each_block<int8_t>(a, item, first, n, [&](int64_t i, int64_t count, int64_t inside,
                                            const int8_t* key_block, const int8_t* value_block) {
    const float* from = block_scales(key_block, a.block_size, a.key_stride[2]) + inside;
    std::memcpy(keys + i, from, count * sizeof(float));
    from = block_scales(value_block, a.block_size, a.value_stride[2]) + inside;
    std::memcpy(values + i, from, count * sizeof(float));
  });
}

// Converts n cached rows to T, contiguously, and sets `rows` to point to the results. `scales`: of
// the rows of an int8 cache.
template <class T, class E>
void widen_rows(Dtype cache, int64_t n, int64_t dim, const E* const* stored, T* to, const T** rows,
                const float* scales = nullptr) {
  for (int64_t i = 0; i < n; ++i) {
    rows[i] = to + i * dim;
    widen_cached(stored[i], dim, cache, to + i * dim, scales ? scales[i] : 1.0f);
  }
}

// Adds the distance bias of a query at `position` to its scores of n keys from `first` on. Scores
// are in units of log2, `step` floats apart.
__attribute__((noinline)) inline void add_distance_bias(const AttentionArgs& a, int64_t token,
                                                        int64_t head, int64_t position,
                                                        int64_t first, int64_t n, float* scores,
                                                        int64_t step) {
  const int64_t farthest = position - first;  // to the first key; later keys are nearer
  const int64_t begin = std::max<int64_t>(0, farthest - a.num_distances + 1);
  const int64_t end = std::min(n, farthest + 1);
  const ByHead& bias = a.distance_bias;
  with_type(bias.dtype, [&](auto t) {
    const auto* of_row = static_cast<const decltype(t)*>(bias.data) + token * bias.stride[0] +
                         head * bias.stride[1] + farthest;
    for (int64_t k = begin; k < end; ++k) scores[k * step] += to_float(of_row[-k]) * kLog2e;
  });
}

// The weight of a sink, to be added to a sum of weights with maximum score m. Not inline: few
// models have sinks.
__attribute__((noinline)) inline float sink_weight(const AttentionArgs& a, int64_t token,
                                                   int64_t head, float m) {
  const float sink = a.sinks[token * a.sink_stride + head] * kLog2e, top = std::max(m, sink);
  return std::exp2(sink - top) / std::exp2(m - top);
}

// Writes acc / l to the output, rounded, after adding the sink to the softmax.
inline void write_output(const AttentionArgs& a, int64_t token, int64_t head, float m, float l,
                         const float* acc) {
  if (a.sinks != nullptr) l += sink_weight(a, token, head, m);
  const float scale = a.scales.value_of(head / (a.heads / a.kv_heads));
  const float factor = l > 0 ? scale / l : 0.0f;
  with_type(a.dtype, [&](auto t) {
    auto* out = static_cast<decltype(t)*>(a.out) + (token * a.heads + head) * a.v_dim;
    int64_t i = 0;
    for (; i + kLanes <= a.v_dim; i += kLanes) store(out + i, load(acc + i) * factor);
    if (i < a.v_dim) store_n(out + i, load_n(acc + i, a.v_dim - i) * factor, a.v_dim - i);
  });
}

// `row` counts the item's rows: KV heads slowest, then tokens, then heads of the group.
inline void finish_row(const Plan& plan, const Item& item, int64_t row, float m, float l,
                       const float* acc) {
  const AttentionArgs& a = plan.a;
  if (item.part < 0) {
    const int64_t of_head = item.num_tokens * plan.group, in_head = row % of_head;
    write_output(a, item.token + in_head / plan.group,
                 (item.kv_head + row / of_head) * plan.group + in_head % plan.group, m, l, acc);
    return;
  }
  float* to = plan.partials + item.part * plan.partial_stride + row * (2 + a.v_dim);
  to[0] = m;
  to[1] = l;
  std::memcpy(to + 2, acc, a.v_dim * sizeof(float));
}

bool amx_ready();  // the CPU has bf16 tiles, and Linux lets this process use them

void run_stream(const Plan&, const Item&);      // one token, few heads: memory-bound
void run_stream_amx(const Plan&, const Item&);  // the same with scores computed by AMX
void run_tiles(const Plan&, const Item&);       // many rows: compute-bound
void run_chosen(const AttentionArgs&);          // a whole step with chosen positions
bool amx_streams(const AttentionArgs&);         // whether run_stream_amx supports this call
constexpr int64_t kMaxStreamRows = 8;           // maximum heads per group, for both

}  // namespace llmc
