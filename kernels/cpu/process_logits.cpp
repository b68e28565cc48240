// process_logits: converts logits to float, changes the few that penalties and biases affect, then
// applies masks.
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"
#include "sampling.h"
#include "vec.h"

#include <algorithm>
#include <vector>

namespace llmc {
namespace {

template <class T>
void copy_row(const T* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(in + i));
  for (; i < n; ++i) out[i] = to_float(in[i]);
}

struct Penalties {
  float repetition, presence, frequency;
};

// Of the tokens in [begin, length). `count` is zero for every token on entry and on return.
void penalize(float* out, int64_t vocab, const int32_t* tokens, int64_t begin, int64_t prompt,
              int64_t length, Penalties p, std::vector<int32_t>& count) {
  if (int64_t(count.size()) < vocab) count.resize(vocab);
  auto valid = [&](int32_t t) { return t >= 0 && t < vocab; };
  if (p.repetition != 1) {
    for (int64_t i = begin; i < length; ++i) {
      const int32_t t = tokens[i];
      if (!valid(t) || count[t]++ != 0) continue;
      out[t] = out[t] > 0 ? out[t] / p.repetition : out[t] * p.repetition;
    }
    for (int64_t i = begin; i < length; ++i)
      if (valid(tokens[i])) count[tokens[i]] = 0;
  }
  if (p.presence != 0 || p.frequency != 0) {
    const int64_t first = std::max(begin, prompt);
    for (int64_t i = first; i < length; ++i)
      if (valid(tokens[i])) ++count[tokens[i]];
    for (int64_t i = first; i < length; ++i) {
      const int32_t t = tokens[i];
      if (!valid(t) || count[t] == 0) continue;
      out[t] -= p.presence + p.frequency * float(count[t]);
      count[t] = 0;
    }
  }
}

void mask_row(float* out, const int32_t* mask, int64_t vocab) {
  for (int64_t word = 0; word * 32 < vocab; ++word) {
    const uint32_t bits = uint32_t(mask[word]);
    if (bits == 0xffffffffu) continue;
    float* x = out + word * 32;
    const int64_t n = std::min<int64_t>(32, vocab - word * 32);
    for (int64_t i = 0; i < n; ++i) x[i] = (bits >> i) & 1u ? x[i] : -kInf;
  }
}

}  // namespace

bool changes_logits(const ProcessArgs& a, int64_t s) {
  const int64_t r = a.row[s];
  if (a.repetition[r] != 1 || a.presence[r] != 0 || a.frequency[r] != 0 || a.has_mask[r]) return true;
  const int32_t* biased = a.bias_token + r * a.bias_stride[0];
  return std::any_of(biased, biased + a.bias_width, [](int32_t token) { return token >= 0; });
}

void process_row(const ProcessArgs& a, int64_t s, float* out) {
  static thread_local std::vector<int32_t> count;
  with_type(a.dtype, [&](auto t) {
    copy_row(static_cast<const decltype(t)*>(a.logits) + s * a.logits_stride, out, a.vocab);
  });
  const int64_t r = a.row[s], length = a.length[s], prompt = a.prompt_len[r];
  const int64_t last = a.repeat_last_n[r], begin = last > 0 ? std::max<int64_t>(0, length - last) : 0;
  penalize(out, a.vocab, a.history + r * a.history_stride, begin, prompt,
           std::min(length, a.history_width),
           {a.repetition[r], a.presence[r], a.frequency[r]}, count);
  for (int64_t b = 0; b < a.bias_width; ++b) {
    const int32_t t = a.bias_token[r * a.bias_stride[0] + b];
    const int32_t until = a.bias_until[r * a.bias_stride[2] + b];
    if (t >= 0 && t < a.vocab && length - prompt < until)
      out[t] += a.bias_value[r * a.bias_stride[1] + b];
  }
  if (a.has_mask[r]) mask_row(out, a.mask + r * a.mask_stride, a.vocab);
}

void process_logits(const ProcessArgs& a) {
  const int threads = worth_threads(a.rows * a.vocab, a.rows, a.threads);
  parallel_items(a.rows, threads, [&](int64_t s) { process_row(a, s, a.out + s * a.vocab); });
}

}  // namespace llmc
