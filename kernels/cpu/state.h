// The interface for state_bindings.cpp: ops that carry a state from token to token, over packed
// requests. They compute in float; inputs of any dtype are converted a row at a time.
#pragma once

#include "dtypes.h"
#include "kernels.h"
#include "vec.h"

#include <algorithm>

namespace llmc {

struct Span {  // a request's tokens [first, last), its slot, and whether it starts from zero
  int64_t first, last, slot;
  bool fresh;
  int64_t place;  // position of the first token in the request
};

struct Step {
  const int32_t *query_start, *context_len;  // [R + 1], [R]
  const int64_t* slot;                       // [R]
  int64_t requests, tokens;

  Span span(int64_t request) const {
    const int64_t first = query_start[request], last = query_start[request + 1];
    const int64_t before = context_len[request] - (last - first);
    return {first, last, slot[request], before <= 0, std::max<int64_t>(before, 0)};
  }
  int64_t tokens_each() const { return requests ? (tokens + requests - 1) / requests : 0; }
};

struct TokenRows {  // [T, ...] of any dtype, contiguous in its last dimension
  Dtype dtype;
  const void* data;
  int64_t token_stride, head_stride;

  int64_t at(int64_t token, int64_t head) const {
    return token * token_stride + head * head_stride;
  }
};

struct DeltaArgs {
  Step step;
  TokenRows query, key, value, decay, beta;  // decay has D values or 1 per head, beta has one
  bool decays_by_channel, normed;  // normed: query and key are divided by sqrt(sum(x^2) + norm_eps)
  float scale, norm_eps;           // of the query
  TokenRows decay_rate, decay_bias;  // [1, H] and [1, H, D or 1]; data is null if decay is final
  float beta_scale;                  // of sigmoid(beta); 0: beta is final
  float* state;  // [slots, H, D, Dv] dense
  Dtype dtype;   // of out [T, H, Dv], dense
  void* out;
  int64_t heads, key_heads, dim, v_dim;
  int threads;
};

struct ScanArgs {
  Step step;
  TokenRows x, dt, b, c;  // x [T, H * P], dt [T, H], b and c [T, G, N]
  const float* a;      // [H, N or 1] dense
  bool decays_by_state;
  TokenRows skip, gate, dt_bias;  // [1, H], [T, H * P], [1, H]; data is null if there is none
  bool softplus;                  // of dt, which is then at least dt_min and at most dt_max
  float dt_min, dt_max;
  Dtype dtype;  // of out
  float* state;  // [slots, H, P, N] dense
  void* out;     // [T, H * P] dense
  int64_t heads, width, groups, size;
  int threads;
};

struct RecurrenceArgs {
  Step step;
  TokenRows x, decay;  // [T, C]
  float* state;     // [slots, C] dense
  void* out;        // like x, dense
  int64_t channels;
  int threads;
};

struct MixArgs {
  Step step;
  TokenRows key, value, decay, bonus;  // [T, C] twice, and [1, C] twice
  float* state;                     // [slots, 3, C] dense
  void* out;                        // like value, dense
  int64_t channels;
  int threads;
};

struct PoolArgs {
  Step step;
  TokenRows value, gate, bias;  // [T, series * C] twice, and [width, series * C]
  float* state;                 // [slots, 2 * series - 1, 3, C] dense
  void* out;                    // [T, C] like value, dense
  int64_t channels, width, series;
  int threads;
};

constexpr int64_t kMaxTaps = 16;

struct ConvArgs {  // all of one dtype
  Step step;
  TokenRows x, x_gate, y_gate;   // [T, C]; the gates' data may be null
  const void *weight, *bias;  // [C, K] and [C] dense; bias may be null
  bool silu;                  // of the result
  void *state, *out;          // [slots, C, K - 1] and [T, C] dense
  int64_t channels, taps;
  int threads;
};

void delta_rule(const DeltaArgs&);
void selective_scan(const ScanArgs&);
void linear_recurrence(const RecurrenceArgs&);
void decayed_softmax(const MixArgs&);
void pool_windows(const PoolArgs&);
void causal_conv(const ConvArgs&);

LLMC_INLINE int64_t whole_vectors(int64_t n) {  // n rounded up
  return (n + kLanes - 1) / kLanes * kLanes;
}

template <class T>
LLMC_INLINE v16f load_to(const T* p, int64_t left) {
  return left >= kLanes ? load(p) : load_n(p, left);
}

template <class T>
LLMC_INLINE void store_to(T* p, v16f x, int64_t left) {
  left >= kLanes ? store(p, x) : store_n(p, x, left);
}

template <class T>
void widen(const T* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  if (i < n) store(to + i, load_n(from + i, n - i));
}

// to[0, n) = data[at, at + n), and zeros up to a whole vector.
inline void widen(Dtype dtype, const void* data, int64_t at, int64_t n, float* to) {
  with_type(dtype, [&](auto t) { widen(static_cast<const decltype(t)*>(data) + at, n, to); });
}

inline void widen(const TokenRows& x, int64_t token, int64_t head, int64_t first, int64_t n,
                  float* to) {
  widen(x.dtype, x.data, x.at(token, head) + first, n, to);
}

inline float number(const TokenRows& x, int64_t token, int64_t head) {
  const int64_t at = x.at(token, head);
  return with_type(x.dtype, [&](auto t) {
    return to_float(static_cast<const decltype(t)*>(x.data)[at]);
  });
}

template <class T>
void narrow(const float* from, int64_t n, T* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  if (i < n) store_n(to + i, load(from + i), n - i);
}

// data[at, at + n) = from[0, n)
inline void narrow(Dtype dtype, void* data, int64_t at, int64_t n, const float* from) {
  with_type(dtype, [&](auto t) { narrow(from, n, static_cast<decltype(t)*>(data) + at); });
}

}  // namespace llmc
