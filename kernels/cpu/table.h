// The kernels of one instruction set as a table of functions. Kernel sources are compiled once per
// level (levels.py); the bindings call through the table of the current level.
#pragma once

#include "experts.h"
#include "kernels.h"
#include "low_bit.h"
#include "sampling.h"
#include "state.h"
#include "step_rows.h"

#define LLMC_KERNELS(K)                                                                      \
  K(norm) K(gated_rms_norm) K(act_mul) K(add_to) K(copy_rows) K(write_kv)                    \
  K(rope_write) K(rope_write_latent) K(paged_attention) K(round_to_fp8) K(choose_keys)       \
  K(sample) K(sample_rows)                                                                   \
  K(token_logprobs) K(process_logits) K(takes_linear) K(linear) K(linear_columns) K(linears) \
  K(quantized_linear) K(rounds_x) K(expert_rows) K(quantized_expert_rows) K(widens_weights)  \
  K(reorder_x) K(widen_channels) K(quantized_embedding) K(delta_rule) K(selective_scan)      \
  K(linear_recurrence) K(decayed_softmax) K(pool_windows) K(causal_conv) K(write_segments)   \
  K(prepare_step) K(record_tokens) K(ban_words) K(add_lora) K(pack_gguf) K(choose_experts)   \
  K(sum_experts)

namespace llmc {

struct Kernels {
  const char* level;
#define LLMC_MEMBER(name) decltype(&llmc::name) name;
  LLMC_KERNELS(LLMC_MEMBER)
#undef LLMC_MEMBER
};

extern const Kernels* chosen_kernels;  // the table of the current level: levels.cpp

}  // namespace llmc
