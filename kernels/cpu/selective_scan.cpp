// selective_scan: a part of a request's state that fits in the L1 cache is updated in place from
// token to token.
#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "state.h"

namespace llmc {
namespace {

constexpr int64_t kTile = 4096;  // elements of the state
constexpr int64_t kMaxRows = 256;
// What a token gives to rows of the state, and takes from them.
struct Token {
  alignas(64) float x[kMaxRows], dt[kMaxRows], fed[kMaxRows], out[kMaxRows];
  std::vector<float> lines;
  float *b, *c, *kept;  // a decay for each value of a row, or for all of them

  // Its inputs for rows [first, last).
  void read(const ScanArgs& a, int64_t t, int64_t first, int64_t last,
            const float* dt_bias) {
    const int64_t n = whole_vectors(a.size);
    lines.resize(3 * n);
    b = lines.data(), c = b + n, kept = c + n;
    const int64_t first_head = first / a.width, heads = (last - 1) / a.width + 1 - first_head;
    widen(a.x, t, 0, first, last - first, x);
    widen(a.dt, t, 0, first_head, heads, dt);
    for (int64_t i = 0; i < heads; i += kLanes) {
      const v16f size = load(dt + i) + load(dt_bias + i);
      store(dt + i, vmin(vmax(a.softplus ? softplus_lanes(size) : size, splat(a.dt_min)),
                         splat(a.dt_max)));
    }
  }
  // The decays of a head, with this step size.
  void decay(const ScanArgs& a, int64_t head, float step) {
    if (!a.decays_by_state) return store(kept, splat(std::exp(step * a.a[head])));
    for (int64_t i = 0; i < a.size; i += kLanes)
      store(kept + i, exp_lanes(load_to(a.a + head * a.size + i, a.size - i) * step));
  }
  void write(const ScanArgs& a, int64_t t, int64_t first, int64_t last, const float* skip) {
    if (a.skip.data)
      for (int64_t i = 0; i < last - first; i += kLanes)
        store(out + i, load(out + i) + load(skip + i) * load(x + i));
    if (a.gate.data) {
      float* const gate = fed;  // which is not needed any more
      widen(a.gate, t, 0, first, last - first, gate);
      for (int64_t i = 0; i < last - first; i += kLanes)
        store(out + i, load(out + i) * load(gate + i) * sigmoid_lanes(load(gate + i)));
    }
    narrow(a.dtype, a.out, t * a.heads * a.width + first, last - first, out);
  }
};

// kTokens tokens for R rows of the state, the first of which is row `row` of the tokens:
// memory = kept memory + fed b, out = memory c.
template <int kTokens, int R, bool kOneDecay>
LLMC_INLINE void step_rows(float* memory, int64_t size, Token* tokens, int64_t row) {
  v16f sum[kTokens][R] = {};
  v16f decay[kTokens];
  for (int k = 0; k < kTokens; ++k) decay[k] = load(tokens[k].kept);
  each_vector(size, [&](int64_t i, int64_t count) LLMC_LAMBDA {
    v16f own[kTokens], from[kTokens], to[kTokens];
#pragma GCC unroll 2
    for (int k = 0; k < kTokens; ++k) {
      own[k] = kOneDecay ? decay[k] : load(tokens[k].kept + i);
      from[k] = load(tokens[k].b + i);
      to[k] = load(tokens[k].c + i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      v16f m = load_up_to(memory + r * size + i, count);
#pragma GCC unroll 2
      for (int k = 0; k < kTokens; ++k) {
        m = m * own[k] + tokens[k].fed[row + r] * from[k];
        sum[k][r] += m * to[k];
      }
      store_up_to(memory + r * size + i, m, count);
    }
  });
#pragma GCC unroll 2
  for (int k = 0; k < kTokens; ++k)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) tokens[k].out[row + r] = sum_lanes(sum[k][r]);
}

// The same for any number of rows.
template <int kTokens, bool kOneDecay>
void step_head(float* memory, int64_t rows, int64_t size, Token* tokens, int64_t row) {
  constexpr int kTogether = kNative == 8 && kTokens > 1 ? 2 : 4;  // whose sums fit in registers
  int64_t r = 0;
  for (; r + kTogether <= rows; r += kTogether)
    step_rows<kTokens, kTogether, kOneDecay>(memory + r * size, size, tokens, row + r);
  for (; r < rows; ++r)
    step_rows<kTokens, 1, kOneDecay>(memory + r * size, size, tokens, row + r);
}

// Tokens from t on, for rows [first, last) of the H * P rows with N values each. Two tokens read
// and write the state once.
template <int kTokens>
void step(const ScanArgs& a, const Span& s, int64_t t, int64_t first, int64_t last,
          const float* dt_bias, const float* skip, Token* tokens) {
  float* const state = a.state + s.slot * a.heads * a.width * a.size;
  const int64_t heads_a_group = a.heads / a.groups, first_head = first / a.width;
  for (int k = 0; k < kTokens; ++k) tokens[k].read(a, t + k, first, last, dt_bias);
  int64_t group = -1;
  for (int64_t head = first_head, row = first, end; row < last; ++head, row = end) {
    end = std::min(last, (head + 1) * a.width);
    const bool is_next = group < 0 || head % heads_a_group == 0;
    group = head / heads_a_group;
    for (int k = 0; k < kTokens; ++k) {
      Token& token = tokens[k];
      const float size = token.dt[head - first_head];
      token.decay(a, head, size);
      for (int64_t r = row - first; r < end - first; ++r) token.fed[r] = size * token.x[r];
      if (!is_next) continue;
      widen(a.b, t + k, group, 0, a.size, token.b);
      widen(a.c, t + k, group, 0, a.size, token.c);
    }
    const auto step_of = a.decays_by_state ? &step_head<kTokens, false> : &step_head<kTokens, true>;
    step_of(state + row * a.size, end - row, a.size, tokens, row - first);
  }
  for (int k = 0; k < kTokens; ++k) tokens[k].write(a, t + k, first, last, skip);
}

void scan_rows(const ScanArgs& a, const Span& s, int64_t first, int64_t last) {
  const int64_t first_head = first / a.width, heads = (last - 1) / a.width + 1 - first_head;
  alignas(64) float skip[kMaxRows], dt_bias[kMaxRows] = {};
  if (a.skip.data) {
    float of_heads[kMaxRows];
    widen(a.skip, 0, 0, first_head, heads, of_heads);
    for (int64_t row = first; row < last; ++row)
      skip[row - first] = of_heads[row / a.width - first_head];
  }
  if (a.dt_bias.data) widen(a.dt_bias, 0, 0, first_head, heads, dt_bias);
  float* const state = a.state + s.slot * a.heads * a.width * a.size;
  if (s.fresh) std::fill(state + first * a.size, state + last * a.size, 0.0f);
  thread_local Token tokens[2];
  int64_t t = s.first;
  for (; t + 2 <= s.last; t += 2) step<2>(a, s, t, first, last, dt_bias, skip, tokens);
  if (t < s.last) step<1>(a, s, t, first, last, dt_bias, skip, tokens);
}

}  // namespace

void selective_scan(const ScanArgs& a) {
  const int64_t all = a.heads * a.width;
  const int64_t rows = std::clamp<int64_t>(kTile / a.size / kLanes * kLanes, kLanes, kMaxRows);
  const int64_t tiles = (all + rows - 1) / rows, items = a.step.requests * tiles;
  const int64_t cost = a.step.tokens_each() * rows * (whole_vectors(a.size) / 2 + 32);
  parallel_items(items, worth_threads(items * cost, items, a.threads), [&](int64_t item) {
    const int64_t first = item % tiles * rows;
    scan_rows(a, a.step.span(item / tiles), first, std::min(first + rows, all));
  });
}

}  // namespace llmc
