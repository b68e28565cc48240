// token_logprobs: the log-probability and rank of each row's token, and the k most likely tokens.
//
// Maxima of blocks of 64 logits show which blocks can contain one of the k, so few are read twice.
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"
#include "vec.h"

#include <algorithm>
#include <functional>
#include <vector>

namespace llmc {
namespace {

constexpr int64_t kBlock = 64;

struct Scratch {  // per thread, kept between calls
  std::vector<float> x, block_max, order;
  std::vector<int32_t> tokens;
};

// x = logits padded with -inf to whole blocks; false if the row has NaN, +inf or only -inf.
template <class T>
bool scan(const T* logits, int64_t vocab, Scratch& s, float& highest) {
  const int64_t blocks = (vocab + kBlock - 1) / kBlock;
  s.x.assign(size_t(blocks * kBlock), -kInf);
  s.block_max.resize(size_t(blocks));
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) store(&s.x[i], load(logits + i));
  for (; i < vocab; ++i) s.x[i] = to_float(logits[i]);
  v16i nan = {};
  highest = -kInf;
  for (int64_t b = 0; b < blocks; ++b) {
    v16f top = splat(-kInf);
    for (i = b * kBlock; i < (b + 1) * kBlock; i += kLanes) {
      const v16f x = load(&s.x[i]);
      nan |= x != x;
      top = vmax(top, x);
    }
    s.block_max[b] = max_lanes(top);
    highest = std::max(highest, s.block_max[b]);
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (nan[lane]) return false;
  return highest < kInf && highest > -kInf;
}

double log_total(const Scratch& s, float highest) {
  double total = 0;
  for (size_t b = 0; b < s.block_max.size(); ++b) {
    if (s.block_max[b] < highest - 100) continue;
    v16f sum = {};
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const v16f x = load(&s.x[b * kBlock + i]);
      sum += (v16f)((v16i)exp_lanes(x - highest) & (x > splat(-kInf)));
    }
    total += sum_lanes(sum);
  }
  return std::log(total) + highest;
}

// Stores the k most likely tokens in s.tokens; ties are in order of token id.
void find_top(Scratch& s, int64_t vocab, int64_t k) {
  float bound = -kInf;  // k blocks reach it, so k logits do
  if (int64_t(s.block_max.size()) >= k) {
    s.order = s.block_max;
    std::nth_element(s.order.begin(), s.order.begin() + (k - 1), s.order.end(), std::greater<>());
    bound = s.order[k - 1];
  }
  s.tokens.clear();
  for (size_t b = 0; b < s.block_max.size(); ++b) {
    if (s.block_max[b] < bound) continue;
    const int64_t end = std::min(int64_t(b + 1) * kBlock, vocab);
    for (int64_t i = int64_t(b) * kBlock; i < end; ++i)
      if (s.x[i] >= bound) s.tokens.push_back(int32_t(i));
  }
  const auto middle = s.tokens.begin() + std::min<int64_t>(k, int64_t(s.tokens.size()));
  std::partial_sort(s.tokens.begin(), middle, s.tokens.end(), [&](int32_t a, int32_t b) {
    return s.x[a] != s.x[b] ? s.x[a] > s.x[b] : a < b;
  });
  s.tokens.erase(middle, s.tokens.end());
}

template <class T>
void report(const TokenLogprobsArgs& a, int64_t row, Scratch& s) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  int64_t* ids = a.top_ids + row * a.k;
  float* values = a.top_values + row * a.k;
  float highest;
  const bool good = scan(static_cast<const T*>(a.logits) + row * a.logits_stride, a.vocab, s,
                         highest);
  a.chosen[row] = nan;
  a.rank[row] = 0;
  std::fill(ids, ids + a.k, int64_t(-1));
  std::fill(values, values + a.k, good ? -kInf : nan);
  if (!good) return;
  const double total = log_total(s, highest);
  const int64_t token = a.token[row];
  if (token >= 0 && token < a.vocab) {
    const float mine = s.x[token];
    int64_t above = 0;
    for (size_t b = 0; b < s.block_max.size(); ++b)
      if (s.block_max[b] > mine)
        for (int64_t i = 0; i < kBlock; ++i) above += s.x[b * kBlock + i] > mine;
    a.chosen[row] = float(mine - total);
    a.rank[row] = above + 1;
  }
  if (a.k == 0) return;
  find_top(s, a.vocab, a.k);
  for (size_t i = 0; i < s.tokens.size(); ++i) {
    ids[i] = s.tokens[i];
    values[i] = float(s.x[s.tokens[i]] - total);
  }
}

}  // namespace

void token_logprobs(const TokenLogprobsArgs& a) {
  parallel_rows(a.rows, a.vocab, a.threads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t row = begin; row < end; ++row)
      with_type(a.dtype, [&](auto t) { report<decltype(t)>(a, row, scratch); });
  });
}

}  // namespace llmc
