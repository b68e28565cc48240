// Routed experts: the arguments of the kernels that choose them, multiply by them and add them up.
#pragma once

#include "low_bit.h"

namespace llmc {

enum class Score { softmax, sigmoid, sqrt_softplus };

struct ChooseExpertsArgs {
  Dtype dtype, weight_dtype;  // of logits and of weight
  const void* logits;         // [tokens, experts], rows `stride` apart
  const int64_t* slots;       // [tokens]: negative for padding; may be null
  void* weight;               // [tokens, count + shared] dense
  int64_t* expert;            // [tokens, count + shared] dense
  int64_t tokens, experts, stride, count;
  bool normalized;
  Score score;
  Dtype correction_dtype;
  const void* correction;  // [experts]; may be null
  int64_t groups, kept_groups;
  float sum_eps, factor;
  int64_t shared;
  bool gated;  // the logits of a token are followed by as many gates
  int threads;
};

struct SumExpertsArgs {
  Dtype dtype, weight_dtype, out_dtype;
  const void* rows;      // [tokens * choices, width] of `dtype`, dense
  const void* weight;    // [tokens, choices] dense
  const void* residual;  // [tokens, width] of out_dtype, dense; may be null
  void* out;             // [tokens, width] dense
  int64_t tokens, choices, width;
  int threads;
};

// Result r of a routed linear is row r / choices of x by the weight of expert[r]; zeros, if there
// is no such expert.
struct Routing {
  const int64_t* expert;
  int64_t results, choices, experts;
  // bytes between two experts
  int64_t weight_bytes = 0, bias_bytes = 0, scale_bytes = 0, zero_bytes = 0, minimum_bytes = 0;
};

void choose_experts(const ChooseExpertsArgs&);
void sum_experts(const SumExpertsArgs&);
// The arguments are those of expert 0. Results of one expert are computed together.
void expert_rows(const LinearArgs&, const Routing&, bool by_columns);
void quantized_expert_rows(const LowBitArgs&, const Routing&);

}  // namespace llmc
