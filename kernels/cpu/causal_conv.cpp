// causal_conv: a block of channels at a time. In memory, the taps of a channel's weight and earlier
// inputs are adjacent; they are transposed so that a lane is a channel.
#include <algorithm>
#include <utility>

#include "dtypes.h"
#include "parallel.h"
#include "state.h"

namespace llmc {
namespace {

constexpr int64_t kBlock = 256;  // channels

// to[j][c] = from[c][j] for n channels; `kTaps` if known at compile time, to unroll the loop.
template <int kTaps, class T>
void turn(const T* from, int64_t taps, int64_t n, float (*to)[kBlock]) {
  const int64_t count = kTaps ? kTaps : taps;
  for (int64_t c = 0; c < n; ++c)
    for (int64_t j = 0; j < count; ++j) to[j][c] = to_float(from[c * count + j]);
}

template <int kTaps, class T>
void turn_back(float* const* from, int64_t taps, int64_t n, T* to) {
  const int64_t count = kTaps ? kTaps : taps;
  for (int64_t c = 0; c < n; ++c)
    for (int64_t j = 0; j < count; ++j) assign(to[c * count + j], from[j][c]);
}

void multiply(const TokenRows& gate, int64_t token, int64_t first, int64_t n, float* by) {
  alignas(64) float factor[kBlock];
  widen(gate, token, 0, first, n, factor);
  for (int64_t c = 0; c < n; ++c) by[c] *= factor[c];
}

template <int kTaps, class T>  // kTaps 0: any number
void block(const ConvArgs& a, const Span& s, int64_t first, int64_t n) {
  constexpr int kPast = kTaps ? kTaps - 1 : 0;
  const int64_t taps = kTaps ? kTaps : a.taps;
  alignas(64) float weight[kMaxTaps][kBlock], lines[kMaxTaps][kBlock], bias[kBlock], out[kBlock];
  float* input[kMaxTaps];  // oldest first; the last is the token's
  for (int64_t j = 0; j < taps; ++j) input[j] = lines[j];
  turn<kTaps>(static_cast<const T*>(a.weight) + first * taps, taps, n, weight);
  T* state = static_cast<T*>(a.state) + (s.slot * a.channels + first) * (taps - 1);
  if (s.fresh)
    for (int64_t j = 0; j + 1 < taps; ++j) std::fill(input[j], input[j] + n, 0.0f);
  else
    turn<kPast>(state, taps - 1, n, lines);
  std::fill(bias, bias + kBlock, 0.0f);
  if (a.bias) widen(a.x.dtype, a.bias, first, n, bias);
  for (int64_t t = s.first; t < s.last; ++t) {
    widen(a.x, t, 0, first, n, input[taps - 1]);
    if (a.x_gate.data) {  // the product is rounded, as it is in the state
      multiply(a.x_gate, t, first, n, input[taps - 1]);
      T rounded[kBlock];
      narrow(input[taps - 1], n, rounded);
      widen(rounded, n, input[taps - 1]);
    }
    for (int64_t c = 0; c < n; c += kLanes) {
      v16f y = load(bias + c);
      for (int64_t j = 0; j < taps; ++j) y += load(weight[j] + c) * load(input[j] + c);
      store(out + c, a.silu ? y * sigmoid_lanes(y) : y);
    }
    if (a.y_gate.data) multiply(a.y_gate, t, first, n, out);
    narrow(a.x.dtype, a.out, t * a.channels + first, n, out);
    std::rotate(input, input + 1, input + taps);
  }
  turn_back<kPast>(input, taps - 1, n, state);
}

template <class T>
void by_taps(const ConvArgs& a, const Span& s, int64_t first, int64_t n) {
  switch (a.taps) {
    case 3: return block<3, T>(a, s, first, n);
    case 4: return block<4, T>(a, s, first, n);
    default: return block<0, T>(a, s, first, n);
  }
}

}  // namespace

void causal_conv(const ConvArgs& a) {
  const int64_t tiles = (a.channels + kBlock - 1) / kBlock, items = a.step.requests * tiles;
  const int64_t cost = (a.step.tokens_each() + 4) * kBlock * a.taps / 2;
  parallel_items(items, worth_threads(items * cost, items, a.threads), [&](int64_t item) {
    const int64_t first = item % tiles * kBlock, n = std::min(kBlock, a.channels - first);
    const Span s = a.step.span(item / tiles);
    with_type(a.x.dtype, [&](auto t) { by_taps<decltype(t)>(a, s, first, n); });
  });
}

}  // namespace llmc
