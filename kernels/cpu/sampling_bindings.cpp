// Torch bindings of the sampler: penalties, masks and banned words, the draw, log-probabilities.
// Indices come from the scheduler, so sizes are checked but values are not.
#include "bindings.h"

namespace llmc::ops {
namespace {

SampleArgs sample_args(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                       const Tensor& top_p, const Tensor& min_p, const Tensor& seed,
                       int64_t entries, const Tensor& out) {
  check(logits, "logits", logits.scalar_type(), 2);
  SampleArgs a{};
  a.dtype = dtype_of(logits);
  a.logits = logits.data_ptr();
  a.rows = logits.size(0);
  a.vocab = logits.size(1);
  a.logits_stride = logits.stride(0);
  a.temperature = dense<float>(temperature, "temperature", 1, entries);
  a.top_p = dense<float>(top_p, "top_p", 1, entries);
  a.min_p = dense<float>(min_p, "min_p", 1, entries);
  a.top_k = dense<int32_t>(top_k, "top_k", 1, entries);
  a.seed = dense<int64_t>(seed, "seed", 1, entries);
  a.out = out.data_ptr<int64_t>();
  a.threads = at::num_threads();
  return a;
}

// Without `out`.
ProcessArgs process_args(const Tensor& logits, const Tensor& row, const Tensor& length,
                         const Tensor& history, const Tensor& prompt_len, const Tensor& repetition,
                         const Tensor& presence, const Tensor& frequency,
                         const Tensor& repeat_last_n, const Tensor& bias_token,
                         const Tensor& bias_value, const Tensor& bias_until, const Tensor& has_mask, const Tensor& mask) {
  check(logits, "logits", logits.scalar_type(), 2);
  check(history, "history", at::kInt, 2);
  check(bias_token, "bias_token", at::kInt, 2);
  check(bias_value, "bias_value", at::kFloat, 2);
  check(bias_until, "bias_until", at::kInt, 2);
  check(mask, "mask", at::kInt, 2);
  const int64_t samples = logits.size(0), vocab = logits.size(1), rows = history.size(0);
  TORCH_CHECK(bias_value.sizes() == bias_token.sizes() && bias_until.sizes() == bias_token.sizes() &&
                  bias_token.size(0) == rows && mask.size(0) == rows && mask.size(1) * 32 >= vocab,
              "the tables do not fit: bias ", bias_token.sizes(), ", mask ", mask.sizes(),
              ", history ", history.sizes(), ", logits ", logits.sizes());
  ProcessArgs a{};
  a.dtype = dtype_of(logits);
  a.logits = logits.data_ptr();
  a.rows = samples;
  a.vocab = vocab;
  a.logits_stride = logits.stride(0);
  a.row = dense<int64_t>(row, "row", 1, samples);
  a.length = dense<int32_t>(length, "length", 1, samples);
  a.history = history.data_ptr<int32_t>();
  a.prompt_len = dense<int32_t>(prompt_len, "prompt_len", 1, rows);
  a.history_stride = history.stride(0);
  a.history_width = history.size(1);
  a.repetition = dense<float>(repetition, "repetition", 1, rows);
  a.presence = dense<float>(presence, "presence", 1, rows);
  a.frequency = dense<float>(frequency, "frequency", 1, rows);
  a.repeat_last_n = dense<int32_t>(repeat_last_n, "repeat_last_n", 1, rows);
  a.bias_token = bias_token.data_ptr<int32_t>();
  a.bias_until = bias_until.data_ptr<int32_t>();
  a.bias_value = bias_value.data_ptr<float>();
  a.bias_stride[0] = bias_token.stride(0);
  a.bias_stride[1] = bias_value.stride(0);
  a.bias_stride[2] = bias_until.stride(0);
  a.bias_width = bias_token.size(1);
  a.has_mask = dense<int32_t>(has_mask, "has_mask", 1, rows);
  a.mask = mask.data_ptr<int32_t>();
  a.mask_stride = mask.stride(0);
  a.threads = at::num_threads();
  return a;
}

// Without `logits`.
BanArgs ban_args(const Tensor& logits, const Tensor& row, const Tensor& length,
                 const Tensor& history, const Tensor& prompt_len, const Tensor& words,
                 int64_t places) {
  check(history, "history", at::kInt, 2);
  check(words, "words", at::kInt, 2);
  const int64_t samples = logits.size(0), rows = history.size(0);
  TORCH_CHECK(places > 0 && words.size(0) >= rows && words.size(1) % places == 0,
              "words must be [", rows, ", W * ", places, "], got ", words.sizes());
  BanArgs a{};
  a.samples = samples;
  a.vocab = logits.size(1);
  a.logits_stride = logits.stride(0);
  a.row = dense<int64_t>(row, "row", 1, samples);
  a.length = dense<int32_t>(length, "length", 1, samples);
  a.history = history.data_ptr<int32_t>();
  a.history_stride = history.stride(0);
  a.prompt_len = dense<int32_t>(prompt_len, "prompt_len", 1, rows);
  a.words = words.data_ptr<int32_t>();
  a.words_stride = words.stride(0);
  a.num_words = words.size(1) / places;
  a.places = places;
  return a;
}

Tensor process_logits(const Tensor& logits, const Tensor& row, const Tensor& length,
                      const Tensor& history, const Tensor& prompt_len, const Tensor& repetition,
                      const Tensor& presence, const Tensor& frequency, const Tensor& repeat_last_n,
                      const Tensor& bias_token, const Tensor& bias_value, const Tensor& bias_until,
                      const Tensor& has_mask, const Tensor& mask) {
  ProcessArgs a = process_args(logits, row, length, history, prompt_len, repetition, presence,
                               frequency, repeat_last_n, bias_token, bias_value, bias_until, has_mask,
                               mask);
  Tensor out = at::empty(logits.sizes(), at::kFloat);
  a.out = out.data_ptr<float>();
  kernels->process_logits(a);
  return out;
}

void ban_words(const Tensor& logits, const Tensor& row, const Tensor& length,
               const Tensor& history, const Tensor& prompt_len, const Tensor& words,
               int64_t places) {
  check(logits, "logits", at::kFloat, 2);
  BanArgs a = ban_args(logits, row, length, history, prompt_len, words, places);
  a.logits = logits.data_ptr<float>();
  kernels->ban_words(a);
}

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
              const Tensor& top_p, const Tensor& min_p, const Tensor& seed,
              const Tensor& position) {
  const int64_t rows = logits.size(0);
  Tensor out = at::empty({rows}, at::kLong);
  SampleArgs a = sample_args(logits, temperature, top_k, top_p, min_p, seed, rows, out);
  a.position = dense<int64_t>(position, "position", 1, rows);
  kernels->sample(a);
  return out;
}

Tensor sample_rows(const Tensor& logits, const Tensor& row, const Tensor& length,
                   const Tensor& history, const Tensor& prompt_len, const Tensor& repetition,
                   const Tensor& presence, const Tensor& frequency, const Tensor& repeat_last_n,
                   const Tensor& bias_token, const Tensor& bias_value, const Tensor& bias_until,
                   const Tensor& has_mask, const Tensor& mask, const Tensor& words, int64_t places,
                   const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                   const Tensor& min_p, const Tensor& seed, int64_t ahead) {
  Tensor out = at::empty({logits.size(0)}, at::kLong);
  kernels->sample_rows(
      sample_args(logits, temperature, top_k, top_p, min_p, seed, history.size(0), out),
      process_args(logits, row, length, history, prompt_len, repetition, presence, frequency,
                   repeat_last_n, bias_token, bias_value, bias_until, has_mask, mask),
      ban_args(logits, row, length, history, prompt_len, words, places), ahead);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> token_logprobs(const Tensor& logits,
                                                          const Tensor& token, int64_t k) {
  check(logits, "logits", logits.scalar_type(), 2);
  TORCH_CHECK(k >= 0, "k must not be negative, got ", k);
  const int64_t rows = logits.size(0);
  Tensor chosen = at::empty({rows}, at::kFloat), rank = at::empty({rows}, at::kLong);
  Tensor ids = at::empty({rows, k}, at::kLong), values = at::empty({rows, k}, at::kFloat);
  kernels->token_logprobs({dtype_of(logits), logits.data_ptr(), rows, logits.size(1),
                        logits.stride(0), k, dense<int64_t>(token, "token", 1, rows),
                        chosen.data_ptr<float>(), values.data_ptr<float>(),
                        rank.data_ptr<int64_t>(), ids.data_ptr<int64_t>(), at::num_threads()});
  return {std::move(chosen), std::move(rank), std::move(ids), std::move(values)};
}

const at::Ops kOps = {
    {"process_logits", &at::boxed<&process_logits>},
    {"ban_words", &at::boxed<&ban_words>},
    {"sample", &at::boxed<&sample>},
    {"sample_rows", &at::boxed<&sample_rows>},
    {"token_logprobs", &at::boxed<&token_logprobs>},
};

}  // namespace
}  // namespace llmc::ops
