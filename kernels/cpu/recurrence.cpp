// linear_recurrence, decayed_softmax and pool_windows: the state is a few vectors, which are
// updated in place from token to token, some channels at a time.
#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "state.h"

namespace llmc {
namespace {

constexpr int64_t kTile = 1024;  // channels
constexpr float kLowest = -1e38f;  // the largest logit before any token

// Calls body(span, first, last) for channel ranges of every request; `cost` is that of one channel.
template <class Body>
void by_channels(const Step& step, int64_t channels, int64_t cost, int threads, const Body& body) {
  const int64_t tiles = (channels + kTile - 1) / kTile, items = step.requests * tiles;
  cost *= step.tokens_each() * std::min(kTile, channels);
  parallel_items(items, worth_threads(items * cost, items, threads), [&](int64_t item) {
    const int64_t first = item % tiles * kTile;
    body(step.span(item / tiles), first, std::min(first + kTile, channels));
  });
}

void recur(const RecurrenceArgs& a, const Span& s, int64_t first, int64_t last) {
  alignas(64) float x[kTile], decay[kTile];
  const int64_t n = last - first;
  float* h = a.state + s.slot * a.channels + first;
  if (s.fresh) std::fill(h, h + n, 0.0f);
  for (int64_t t = s.first; t < s.last; ++t) {
    widen(a.x, t, 0, first, n, x);
    widen(a.decay, t, 0, first, n, decay);
    for (int64_t i = 0; i < n; i += kLanes) {
      const v16f next = load_to(h + i, n - i) * load(decay + i) + load(x + i);
      store_to(h + i, next, n - i);
      store(x + i, next);
    }
    narrow(a.x.dtype, a.out, t * a.channels + first, n, x);
  }
}

// One token of sixteen channels; value becomes the output.
LLMC_INLINE void fade(v16f key, v16f decay, v16f bonus, v16f& value, v16f& above, v16f& below,
                      v16f& highest) {
  v16f top = vmax(highest, key + bonus);
  v16f kept = exp_lanes(highest - top), own = exp_lanes(key + bonus - top);
  const v16f out = (kept * above + own * value) / (kept * below + own);
  top = vmax(highest + decay, key);
  kept = exp_lanes(highest + decay - top), own = exp_lanes(key - top);
  above = kept * above + own * value;
  below = kept * below + own;
  highest = top;
  value = out;
}

void mix(const MixArgs& a, const Span& s, int64_t first, int64_t last) {
  alignas(64) float key[kTile], value[kTile], decay[kTile], bonus[kTile];
  const int64_t n = last - first, all = a.channels;
  float* state = a.state + s.slot * 3 * all + first;
  if (s.fresh) {
    std::fill(state, state + n, 0.0f);
    std::fill(state + all, state + all + n, 0.0f);
    std::fill(state + 2 * all, state + 2 * all + n, kLowest);
  }
  widen(a.decay, 0, 0, first, n, decay);
  widen(a.bonus, 0, 0, first, n, bonus);
  for (int64_t t = s.first; t < s.last; ++t) {
    widen(a.key, t, 0, first, n, key);
    widen(a.value, t, 0, first, n, value);
    for (int64_t i = 0; i < n; i += kLanes) {
      v16f memory[3], x = load(value + i);
      for (int j = 0; j < 3; ++j) memory[j] = load_to(state + j * all + i, n - i);
      fade(load(key + i), load(decay + i), load(bonus + i), x, memory[0], memory[1], memory[2]);
      for (int j = 0; j < 3; ++j) store_to(state + j * all + i, memory[j], n - i);
      store(value + i, x);
    }
    narrow(a.value.dtype, a.out, t * all + first, n, value);
  }
}

// Resets the sums of a softmax over tokens: highest logit, sum of weights, weighted sum of values.
void clear(float* sums, int64_t all, int64_t n) {
  std::fill(sums, sums + n, kLowest);
  std::fill(sums + all, sums + all + n, 0.0f);
  std::fill(sums + 2 * all, sums + 2 * all + n, 0.0f);
}

void add(float* sums, int64_t all, int64_t n, const float* logit, const float* value) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const v16f highest = load_to(sums + i, n - i), x = load(logit + i);
    const v16f top = vmax(highest, x), kept = exp_lanes(highest - top), own = exp_lanes(x - top);
    store_to(sums + all + i, kept * load_to(sums + all + i, n - i) + own, n - i);
    const v16f above = kept * load_to(sums + 2 * all + i, n - i) + own * load(value + i);
    store_to(sums + 2 * all + i, above, n - i);
    store_to(sums + i, top, n - i);
  }
}

// The result of a softmax over two parts; the same part twice counts like once.
void finish(const float* one, const float* other, int64_t all, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const v16f a = load_to(one + i, n - i), b = load_to(other + i, n - i), top = vmax(a, b);
    const v16f of_a = exp_lanes(a - top), of_b = exp_lanes(b - top);
    const v16f below = of_a * load_to(one + all + i, n - i) + of_b * load_to(other + all + i, n - i);
    const v16f above =
        of_a * load_to(one + 2 * all + i, n - i) + of_b * load_to(other + 2 * all + i, n - i);
    store(out + i, above / below);
  }
}

void pool(const PoolArgs& a, const Span& s, int64_t first, int64_t last) {
  alignas(64) float value[kTile], gate[kTile], bias[kTile];
  const int64_t n = last - first, all = a.channels, parts = 2 * a.series - 1;
  float* state = a.state + s.slot * parts * 3 * all + first;
  auto part = [&](int64_t i) { return state + i * 3 * all; };
  if (s.fresh)
    for (int64_t i = 0; i < parts; ++i) clear(part(i), all, n);
  for (int64_t t = s.first; t < s.last; ++t) {
    const int64_t j = (s.place + t - s.first) % a.width;
    if (j == 0) {
      if (a.series == 2)
        for (int64_t k = 0; k < 3; ++k)
          std::memcpy(part(0) + k * all, part(1) + k * all, n * sizeof(float));
      for (int64_t i = parts - a.series; i < parts; ++i) clear(part(i), all, n);
    }
    for (int64_t i = 0; i < a.series; ++i) {
      widen(a.value, t, 0, i * all + first, n, value);
      widen(a.gate, t, 0, i * all + first, n, gate);
      widen(a.bias, j, 0, i * all + first, n, bias);
      for (int64_t c = 0; c < n; c += kLanes) store(gate + c, load(gate + c) + load(bias + c));
      add(part(parts - a.series + i), all, n, gate, value);
    }
    if (j == a.width - 1) {
      finish(part(0), part(parts - 1), all, n, value);
    } else {
      std::fill(value, value + kTile, 0.0f);
    }
    narrow(a.value.dtype, a.out, t * all + first, n, value);
  }
}

}  // namespace

void linear_recurrence(const RecurrenceArgs& a) {
  by_channels(a.step, a.channels, 1, a.threads,
              [&](const Span& s, int64_t first, int64_t last) { recur(a, s, first, last); });
}

void decayed_softmax(const MixArgs& a) {
  by_channels(a.step, a.channels, 16, a.threads,
              [&](const Span& s, int64_t first, int64_t last) { mix(a, s, first, last); });
}

void pool_windows(const PoolArgs& a) {
  by_channels(a.step, a.channels, 16 * a.series, a.threads,
              [&](const Span& s, int64_t first, int64_t last) { pool(a, s, first, last); });
}

}  // namespace llmc
