// choose_keys and choose_blocks: a sparse indexer's scores over the context of each token, and the
// choice of the best.
//
// Keys are lanes: sixteen of them are transposed once for all heads. A score is then a chain of
// multiply-adds with one number of the query, and does not depend on what else is in the step.
#include "arena.h"
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"
#include "transpose.h"

#include <algorithm>
#include <vector>

namespace llmc {
namespace {

constexpr int64_t kStretch = 512;          // keys per work item
constexpr int64_t kRoundScores = 1 << 22;  // maximum floats for the scores of a round

struct Query {
  int64_t token, request, keys;
  int64_t scores;  // offset of its scores in the round's: [keys], or [heads, keys] for blocks
};

struct Stretch {
  int64_t query, first;
};

template <class T>
void write_keys(const ChooseArgs& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    const int64_t slot = a.slots[t];
    if (slot < 0) continue;
    T* to = static_cast<T*>(a.key_cache) + slot / a.block_size * a.cache_stride[0] +
            slot % a.block_size * a.cache_stride[1];
    std::memcpy(to, static_cast<const T*>(a.key) + t * a.key_stride, a.head_dim * sizeof(T));
  }
}

// Calls use(h, the products of its query with sixteen keys) for each head.
template <class Use>
LLMC_INLINE void each_head(const float* query, const float* keys, int64_t heads, int64_t dim,
                           int64_t padded, const Use& use) {
  constexpr int kHeads = 4;
  int64_t h = 0;
  for (; h + kHeads <= heads; h += kHeads) {
    v16f acc[kHeads] = {};
    for (int64_t d = 0; d < dim; ++d) {
      const v16f key = load(keys + d * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < kHeads; ++i) acc[i] += key * splat(query[(h + i) * padded + d]);
    }
    for (int i = 0; i < kHeads; ++i) use(h + i, acc[i]);
  }
  for (; h < heads; ++h) {
    v16f acc{};
    for (int64_t d = 0; d < dim; ++d) acc += load(keys + d * kLanes) * splat(query[h * padded + d]);
    use(h, acc);
  }
}

template <class T>
void widen(const T* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  for (; i < n; ++i) to[i] = to_float(from[i]);
}

template <class T>
void score(const ChooseArgs& a, const Query& q, int64_t first, float* scores) {
  static thread_local Arena arena;
  const int64_t padded = (a.head_dim + kLanes - 1) / kLanes * kLanes;
  arena.reset((a.heads + 2 * kLanes) * padded * sizeof(float) + 256);
  float* query = arena.take<float>(a.heads * padded);
  float* rows = arena.take<float>(kLanes * padded);
  float* keys = arena.take<float>(kLanes * padded);
  std::fill(rows, rows + kLanes * padded, 0.0f);
  const T* from = static_cast<const T*>(a.query) + q.token * a.query_stride[0];
  for (int64_t h = 0; h < a.heads; ++h)
    widen(from + h * a.query_stride[1], a.head_dim, query + h * padded);
  const float* weights = a.weights ? a.weights + q.token * a.weight_stride : nullptr;
  const int32_t* table = a.block_table + q.request * a.table_stride;
  const int64_t last = std::min(first + kStretch, q.keys);
  for (int64_t k = first; k < last; k += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, last - k);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = k + i, block = table[at / a.block_size];
      widen(static_cast<const T*>(a.key_cache) + block * a.cache_stride[0] +
                at % a.block_size * a.cache_stride[1],
            a.head_dim, rows + i * padded);
    }
    for (int64_t d = 0; d < padded; d += kLanes) transpose(rows + d, padded, keys + d * kLanes, kLanes);
    if (a.weights == nullptr) {
      each_head(query, keys, a.heads, a.head_dim, padded,
                [&](int64_t h, v16f products) { store_n(scores + h * q.keys + k, products, n); });
      continue;
    }
    v16f sum{};
    each_head(query, keys, a.heads, a.head_dim, padded, [&](int64_t h, v16f products) {
      sum += vmax(products, v16f{}) * splat(weights[h]);
    });
    store_n(scores + k, sum, n);
  }
}

// Sorts by score, then by earlier token; there are no ties.
uint64_t rank_of(float score, int64_t position) {
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  if (score == 0) bits = 0;  // also -0
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(bits) << 32 | (0xffffffffu - uint32_t(position));
}

// The indices of the top_k highest of `count` scores, where `count` > top_k.
void pick(const float* scores, int64_t count, int64_t top_k, int32_t* out) {
  static thread_local std::vector<uint64_t> ranks;
  ranks.resize(count);
  for (int64_t i = 0; i < count; ++i) ranks[i] = rank_of(scores[i], i);
  const auto worst = ranks.begin() + top_k - 1;
  std::nth_element(ranks.begin(), worst, ranks.end(), std::greater<uint64_t>());
  const uint64_t least = *worst;
  for (int64_t i = 0; i < count; ++i)
    if (rank_of(scores[i], i) >= least) *out++ = int32_t(i);
}

// Replaces the scores of keys [keys] by those of their blocks; returns the number of blocks.
int64_t score_blocks(const ChooseArgs& a, float* scores, int64_t keys) {
  const int64_t size = a.sparse_block_size, count = (keys + size - 1) / size;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t past = std::min((i + 1) * size, keys);
    const float most = *std::max_element(scores + i * size, scores + past);
    scores[i] = i + a.recent >= count ? kInf : most;
  }
  return count;
}

void pick_all(const ChooseArgs& a, const Query& q, float* scores) {
  if (a.weights != nullptr) return pick(scores, q.keys, a.top_k, a.out + q.token * a.top_k);
  for (int64_t h = 0; h < a.heads; ++h) {
    float* own = scores + h * q.keys;
    const int64_t count = score_blocks(a, own, q.keys);
    pick(own, count, a.top_k, a.out + (q.token * a.heads + h) * a.top_k);
  }
}

// Scores and choices for queries that see more keys than they choose.
template <class T>
void choose(const ChooseArgs& a, const std::vector<Query>& queries, std::vector<float>& scores) {
  std::vector<Stretch> stretches;
  int64_t keys = 0, all_scores = 0;
  for (int64_t i = 0; i < int64_t(queries.size()); ++i) {
    keys += queries[i].keys;
    all_scores = queries[i].scores + queries[i].keys * (a.weights ? 1 : a.heads);
    for (int64_t first = 0; first < queries[i].keys; first += kStretch)
      stretches.push_back({i, first});
  }
  if (int64_t(scores.size()) < all_scores) scores.resize(all_scores);
  float* all = scores.data();
  const int64_t cost = a.heads * a.head_dim / 8;  // per key
  const int64_t count = int64_t(stretches.size());
  parallel_rows(count, keys * cost / count, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Query& q = queries[stretches[i].query];
      score<T>(a, q, stretches[i].first, all + q.scores);
    }
  });
  const int64_t num = int64_t(queries.size());
  parallel_rows(num, keys * 8 / num, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      pick_all(a, queries[i], all + queries[i].scores);
  });
}

}  // namespace

void choose_keys(const ChooseArgs& a) {
  with_type(a.dtype, [&](auto t) { write_keys<decltype(t)>(a); });
  // a token's choices are `rows` rows of `out`; each chooses among blocks of `size` keys
  const int64_t rows = a.weights ? 1 : a.heads, size = a.weights ? 1 : a.sparse_block_size;
  std::fill(a.out, a.out + a.tokens * rows * a.top_k, -1);
  std::vector<Query> queries;
  std::vector<float> scores;
  int64_t keys = 0;
  auto flush = [&] {
    if (!queries.empty())
      with_type(a.dtype, [&](auto t) { choose<decltype(t)>(a, queries, scores); });
    queries.clear();
    keys = 0;
  };
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t first = a.query_start[r], last = a.query_start[r + 1], length = a.context_len[r];
    for (int64_t t = first; t < last && length > 0; ++t) {
      const int64_t sees = (length - (last - t) + 1) / a.rate;
      const int64_t among = (sees + size - 1) / size;
      if (among <= a.top_k) {
        for (int64_t row = t * rows; row < (t + 1) * rows; ++row)
          for (int64_t i = 0; i < among; ++i) a.out[row * a.top_k + i] = int32_t(i);
        continue;
      }
      if (keys + sees * rows > kRoundScores) flush();
      queries.push_back({t, r, sees, keys});
      keys += sees * rows;
    }
  }
  flush();
}

}  // namespace llmc
