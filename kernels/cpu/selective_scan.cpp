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

// Rows [first, last) of the H * P rows with N values each.
void scan_rows(const ScanArgs& a, const Span& s, int64_t first, int64_t last) {
  const int64_t n = whole_vectors(a.size), tail = a.size % kLanes, whole = a.size - tail;
  const int64_t heads_a_group = a.heads / a.groups;
  thread_local std::vector<float> room;
  room.resize(3 * n);
  float *b = room.data(), *c = b + n, *kept = c + n;
  alignas(64) float x[kMaxRows], out[kMaxRows], skip[kMaxRows], gate[kMaxRows];
  const int64_t first_head = first / a.width, heads = (last - 1) / a.width + 1 - first_head;
  alignas(64) float dt[kMaxRows], dt_bias[kMaxRows] = {};
  if (a.dt_bias.data) widen(a.dt_bias, 0, 0, first_head, heads, dt_bias);
  if (a.skip.data) {
    widen(a.skip, 0, 0, first_head, heads, gate);
    for (int64_t row = first; row < last; ++row)
      skip[row - first] = gate[row / a.width - first_head];
  }
  float* state = a.state + s.slot * a.heads * a.width * a.size;
  if (s.fresh) std::fill(state + first * a.size, state + last * a.size, 0.0f);
  for (int64_t t = s.first; t < s.last; ++t) {
    widen(a.x, t, 0, first, last - first, x);
    widen(a.dt, t, 0, first_head, heads, dt);
    for (int64_t i = 0; i < heads; i += kLanes) {
      const v16f size = load(dt + i) + load(dt_bias + i);
      store(dt + i, vmin(vmax(a.softplus ? softplus_lanes(size) : size, splat(a.dt_min)),
                         splat(a.dt_max)));
    }
    int64_t head = first_head - 1, group = -1;
    int64_t next = first;  // the first row of the next head
    float step = 0;
    for (int64_t row = first; row < last; ++row) {
      if (row == next) {
        next = (++head + 1) * a.width;
        step = dt[head - first_head];
        if (!a.decays_by_state) {
          const v16f decay = splat(std::exp(step * a.a[head]));
          for (int64_t i = 0; i < n; i += kLanes) store(kept + i, decay);
        } else {
          for (int64_t i = 0; i < a.size; i += kLanes)
            store(kept + i, exp_lanes(load_to(a.a + head * a.size + i, a.size - i) * step));
        }
        if (group < 0 || head % heads_a_group == 0) {
          group = head / heads_a_group;
          widen(a.b, t, group, 0, a.size, b);
          widen(a.c, t, group, 0, a.size, c);
        }
      }
      float* memory = state + row * a.size;
      const v16f fed = splat(step * x[row - first]);
      v16f sum[2] = {};
      int64_t i = 0;
      for (; i + 2 * kLanes <= whole; i += 2 * kLanes)
        for (int u = 0; u < 2; ++u) {
          const int64_t j = i + u * kLanes;
          const v16f m = load(memory + j) * load(kept + j) + fed * load(b + j);
          store(memory + j, m);
          sum[u] += m * load(c + j);
        }
      for (; i < a.size; i += kLanes) {
        const v16f m = load_to(memory + i, a.size - i) * load(kept + i) + fed * load(b + i);
        store_to(memory + i, m, a.size - i);
        sum[0] += m * load(c + i);
      }
      out[row - first] = sum_lanes(sum[0] + sum[1]);
    }
    if (a.skip.data)
      for (int64_t i = 0; i < last - first; i += kLanes)
        store(out + i, load(out + i) + load(skip + i) * load(x + i));
    if (a.gate.data) {
      widen(a.gate, t, 0, first, last - first, gate);
      for (int64_t i = 0; i < last - first; i += kLanes)
        store(out + i, load(out + i) * load(gate + i) * sigmoid_lanes(load(gate + i)));
    }
    narrow(a.dtype, a.out, t * a.heads * a.width + first, last - first, out);
  }
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
