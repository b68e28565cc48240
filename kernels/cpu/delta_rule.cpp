// delta_rule: some columns of one head's state at a time, over a request's tokens. A token reads
// the columns twice: once for their products with key and query, once to add the correction. The
// second time they are in the cache, so a decode step costs one read and one write of the state.
#include <cmath>
#include <vector>

#include "parallel.h"
#include "state.h"

namespace llmc {
namespace {

// A decode step streams the state, so it uses long segments of its rows. Otherwise the columns stay
// in the L1 cache from token to token.
constexpr int64_t kWide = 4, kNarrow = 2;  // in vectors

struct Token {  // [D] each: key and query, without and with the decay
  float *key, *query, *decay, *kept_key, *kept_query;
  float match;  // query . key
};

// 1 / sqrt(sum(x^2) + norm_eps) of n values, or 1.
float norm_factor(const DeltaArgs& a, const float* x, int64_t n) {
  if (!a.normed) return 1.0f;
  v16f squares = {};
  for (int64_t i = 0; i < n; i += kLanes) squares += load(x + i) * load(x + i);
  return 1.0f / std::sqrt(sum_lanes(squares) + a.norm_eps);
}

void prepare(const DeltaArgs& a, int64_t t, int64_t head, Token& token) {
  const int64_t n = whole_vectors(a.dim), key_head = head / (a.heads / a.key_heads);
  widen(a.key, t, key_head, 0, a.dim, token.key);
  widen(a.query, t, key_head, 0, a.dim, token.query);
  const float key_factor = norm_factor(a, token.key, n);
  const float query_factor = norm_factor(a, token.query, n) * a.scale;
  const int64_t decays = a.decays_by_channel ? a.dim : 1, whole = whole_vectors(decays);
  widen(a.decay, t, head, 0, decays, token.decay);
  if (a.decay_rate.data) {
    widen(a.decay_bias, 0, head, 0, decays, token.kept_key);
    const float rate = number(a.decay_rate, 0, head);
    for (int64_t i = 0; i < whole; i += kLanes)
      store(token.decay + i,
            rate * softplus_lanes(load(token.decay + i) + load(token.kept_key + i)));
  }
  const v16f one = splat(std::exp(token.decay[0]));
  v16f match = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const v16f key = load(token.key + i) * key_factor;
    const v16f query = load(token.query + i) * query_factor;
    const v16f kept = a.decays_by_channel ? exp_lanes(load(token.decay + i)) : one;
    store(token.key + i, key);
    store(token.decay + i, kept);
    store(token.kept_key + i, key * kept);
    store(token.kept_query + i, query * kept);
    match += key * query;
  }
  token.match = sum_lanes(match);
}

// kVectors vectors of columns: from -> to (which can be the same), value -> out.
template <int kVectors>
void apply(const Token& token, int64_t dim, const float* from, int64_t from_stride, float* to,
           int64_t to_stride, const float* value, float beta, float* out) {
  v16f known[2][kVectors] = {}, found[2][kVectors] = {};
  auto read = [&](int64_t d, int part) {
    const v16f key = splat(token.kept_key[d]), query = splat(token.kept_query[d]);
    for (int v = 0; v < kVectors; ++v) {
      const v16f memory = load(from + d * from_stride + v * kLanes);
      known[part][v] += key * memory;
      found[part][v] += query * memory;
    }
  };
  int64_t d = 0;
  for (; d + 2 <= dim; d += 2) read(d, 0), read(d + 1, 1);
  if (d < dim) read(d, 0);
  v16f correction[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    correction[v] = (load(value + v * kLanes) - (known[0][v] + known[1][v])) * beta;
    store(out + v * kLanes, found[0][v] + found[1][v] + correction[v] * token.match);
  }
  for (d = 0; d < dim; ++d) {
    const v16f key = splat(token.key[d]), decay = splat(token.decay[d]);
    for (int v = 0; v < kVectors; ++v)
      store(to + d * to_stride + v * kLanes,
            load(from + d * from_stride + v * kLanes) * decay + key * correction[v]);
  }
}

template <int kVectors>
void columns(const DeltaArgs& a, const Span& s, int64_t head, int64_t first) {
  constexpr int64_t kColumns = kVectors * kLanes;
  const int64_t n = whole_vectors(a.dim), left = a.v_dim - first;
  const int64_t count = left < kColumns ? left : kColumns;
  thread_local std::vector<float> room;
  room.resize(5 * n + a.dim * kColumns);
  float* p = room.data();
  Token token{p, p + n, p + 2 * n, p + 3 * n, p + 4 * n};
  float* tile = p + 5 * n;
  float* state = a.state + ((s.slot * a.heads + head) * a.dim) * a.v_dim + first;
  const bool whole = count == kColumns;
  const bool in_place = whole && !s.fresh && s.last - s.first == 1;
  if (!in_place)
    for (int64_t d = 0; d < a.dim; ++d)
      for (int64_t i = 0; i < kColumns; i += kLanes)
        store(tile + d * kColumns + i, s.fresh || i >= count
                                           ? v16f{}
                                           : load_to(state + d * a.v_dim + i, count - i));
  alignas(64) float value[kColumns] = {}, out[kColumns];
  for (int64_t t = s.first; t < s.last; ++t) {
    prepare(a, t, head, token);
    widen(a.value, t, head, first, count, value);
    float beta = number(a.beta, t, head);
    if (a.beta_scale != 0) beta = a.beta_scale / (1.0f + std::exp(-beta));
    if (in_place)
      apply<kVectors>(token, a.dim, state, a.v_dim, state, a.v_dim, value, beta, out);
    else
      apply<kVectors>(token, a.dim, tile, kColumns, tile, kColumns, value, beta, out);
    narrow(a.dtype, a.out, (t * a.heads + head) * a.v_dim + first, count, out);
  }
  if (!in_place)
    for (int64_t d = 0; d < a.dim; ++d)
      for (int64_t i = 0; i < count; i += kLanes)
        store_to(state + d * a.v_dim + i, load(tile + d * kColumns + i), count - i);
}

template <int kVectors>
void all(const DeltaArgs& a) {
  constexpr int64_t kColumns = kVectors * kLanes;
  const int64_t tiles = (a.v_dim + kColumns - 1) / kColumns;
  const int64_t items = a.step.requests * a.heads * tiles;
  const int64_t cost = a.step.tokens_each() * a.dim * kColumns / 2;
  parallel_items(items, worth_threads(items * cost, items, a.threads), [&](int64_t item) {
    const int64_t head = item / tiles % a.heads;
    columns<kVectors>(a, a.step.span(item / tiles / a.heads), head, item % tiles * kColumns);
  });
}

}  // namespace

void delta_rule(const DeltaArgs& a) {
  a.step.tokens_each() > 1 || a.v_dim <= kNarrow * kLanes ? all<kNarrow>(a) : all<kWide>(a);
}

}  // namespace llmc
