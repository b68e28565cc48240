// sample and sample_rows: the next token of each row without sorting the vocabulary.
//
// One pass divides by the temperature and keeps the maximum of every block of 64 logits. The block
// maxima bound which tokens can still win under top_k, top_p and the noise, so later passes read
// few blocks.
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"
#include "philox.h"
#include "sampling.h"

#include <algorithm>
#include <functional>
#include <vector>

namespace llmc {
namespace {

constexpr int64_t kBlock = 64;
constexpr float kGreedyBelow = 1e-5f;

struct Candidate {
  float value, mass;
  int32_t token;
};

struct Scratch {  // per thread, kept between calls
  std::vector<float> processed, scaled, block_max, order;
  std::vector<Candidate> candidates, selection;
};

struct Best {
  float value = -kInf;
  int64_t token = -1;
  void offer(float v, int64_t t) {
    if (v > value || (v == value && t < token)) value = v, token = t;
  }
};

// scaled = logits / temperature padded with -inf to whole blocks, and the maximum of each block.
// Returns false for a row that can't be sampled: NaN, +inf, or only -inf.
template <class T>
bool scan(const T* logits, int64_t vocab, float temperature, Scratch& s, float& highest) {
  const int64_t blocks = (vocab + kBlock - 1) / kBlock;
  s.scaled.resize(blocks * kBlock);
  s.block_max.resize(blocks);
  const v16f divisor = splat(temperature);
  v16i nan = {};
  v16f top = splat(-kInf), top_raw = top;
  for (int64_t b = 0; b < blocks; ++b) {
    v16f block_top = splat(-kInf);
    for (int64_t i = b * kBlock; i < (b + 1) * kBlock; i += kLanes) {
      v16f x;
      if (i + kLanes <= vocab) {
        x = load(logits + i);
      } else {
        float tail[kLanes];
        for (int64_t j = 0; j < kLanes; ++j)
          tail[j] = i + j < vocab ? to_float(logits[i + j]) : -kInf;
        x = load(tail);
      }
      nan |= x != x;
      top_raw = vmax(top_raw, x);
      x = x / divisor;
      store(&s.scaled[i], x);
      block_top = vmax(block_top, x);
    }
    s.block_max[b] = max_lanes(block_top);
    top = vmax(top, block_top);
  }
  for (int i = 0; i < kLanes; ++i)
    if (nan[i]) return false;
  highest = max_lanes(top);
  const float raw = max_lanes(top_raw);
  return raw < kInf && raw > -kInf;
}

int64_t first_equal(const Scratch& s, float value) {
  for (size_t b = 0; b < s.block_max.size(); ++b)
    if (s.block_max[b] == value)
      for (int64_t i = b * kBlock;; ++i)
        if (s.scaled[i] == value) return i;
  return -1;
}

// Gathers every finite logit of at least `floor`, in token order.
void gather(Scratch& s, float floor) {
  s.candidates.clear();
  for (size_t b = 0; b < s.block_max.size(); ++b) {
    if (!(s.block_max[b] >= floor)) continue;
    for (int64_t i = b * kBlock; i < int64_t(b + 1) * kBlock; ++i)
      if (s.scaled[i] >= floor && s.scaled[i] > -kInf)
        s.candidates.push_back({s.scaled[i], 0.0f, int32_t(i)});
  }
}

// At least k logits reach the k-th highest block maximum.
float bound_for_top_k(Scratch& s, int64_t k) {
  if (int64_t(s.block_max.size()) < k) return -kInf;
  s.order = s.block_max;
  std::nth_element(s.order.begin(), s.order.begin() + (k - 1), s.order.end(), std::greater<>());
  return s.order[k - 1];
}

void keep_top_k(Scratch& s, int64_t k) {
  auto& c = s.candidates;
  if (int64_t(c.size()) <= k) return;
  s.order.resize(c.size());
  for (size_t i = 0; i < c.size(); ++i) s.order[i] = c[i].value;
  std::nth_element(s.order.begin(), s.order.begin() + (k - 1), s.order.end(), std::greater<>());
  const float kth = s.order[k - 1];
  c.erase(std::remove_if(c.begin(), c.end(), [&](const Candidate& x) { return x.value < kth; }),
          c.end());
}

// Sum of exp(scaled - highest) over the logits of at least `floor`.
double total_mass(const Scratch& s, float floor, float highest) {
  double total = 0;
  const v16f least = splat(floor);
  for (size_t b = 0; b < s.block_max.size(); ++b) {
    if (!(s.block_max[b] >= floor) || s.block_max[b] < highest - 80) continue;
    v16f sum = {};
    for (int64_t i = b * kBlock; i < int64_t(b + 1) * kBlock; i += kLanes) {
      const v16f x = load(&s.scaled[i]);
      sum += select(x >= least, exp_lanes(x - highest), v16f{});
    }
    total += sum_lanes(sum);
  }
  return total;
}

// Keeps the smallest set of the highest candidates whose mass reaches `target`, ties included: a
// value is kept if the mass strictly above it is less than that. This is a quickselect by mass.
void keep_top_p(Scratch& s, double target, float highest) {
  auto& items = s.selection;
  items = s.candidates;
  size_t low = 0, high = items.size();
  double above = 0;
  float least = highest;
  while (low < high) {
    const float a = items[low].value, b = items[(low + high) / 2].value, c = items[high - 1].value;
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    double greater = 0, equal = 0;
    size_t i = low, j = low, k = high;  // [low, i) above the pivot, [i, j) equal, [k, high) below
    while (j < k) {
      if (items[j].value > pivot) {
        greater += items[j].mass;
        std::swap(items[i++], items[j++]);
      } else if (items[j].value == pivot) {
        equal += items[j++].mass;
      } else {
        std::swap(items[j], items[--k]);
      }
    }
    if (above + greater < target) {
      least = pivot;
      above += greater + equal;
      low = k;
    } else {
      high = i;
    }
  }
  auto& c = s.candidates;
  c.erase(std::remove_if(c.begin(), c.end(), [&](const Candidate& x) { return x.value < least; }),
          c.end());
}

int64_t draw_candidates(const Scratch& s, const Philox& philox) {
  Best best;
  const auto& c = s.candidates;
  for (size_t i = 0; i < c.size(); i += kLanes) {
    const size_t n = std::min<size_t>(kLanes, c.size() - i);
    v16u group = {}, words[4];
    for (size_t j = 0; j < n; ++j) group[j] = uint32_t(c[i + j].token) / 4;
    Philox::words(philox, group, words);
    v16u word = {};
    for (size_t j = 0; j < n; ++j) word[j] = words[c[i + j].token % 4][j];
    const v16f noise = gumbel(word);
    for (size_t j = 0; j < n; ++j) best.offer(c[i + j].value + noise[j], c[i + j].token);
  }
  return best.token;
}

// Noise is bounded, so blocks far enough below the current best can be skipped.
int64_t draw_all(const Scratch& s, float floor, int64_t start, const Philox& philox) {
  Best best;
  const v16u lane = (v16u)convert<v16i>(lane_numbers());
  auto visit = [&](int64_t b) {
    v16u words[4];
    Philox::words(philox, lane + uint32_t(b * kBlock / 4), words);
    float noise[4][kLanes];
    for (int j = 0; j < 4; ++j) store(noise[j], gumbel(words[j]));
    for (int64_t i = 0; i < kBlock; ++i) {
      const float x = s.scaled[b * kBlock + i];
      if (x >= floor && x > -kInf) best.offer(x + noise[i % 4][i / 4], b * kBlock + i);
    }
  };
  const int64_t first = start / kBlock;  // the block of the highest logit: a good first bound
  visit(first);
  for (int64_t b = 0; b < int64_t(s.block_max.size()); ++b)
    if (b != first && s.block_max[b] >= floor && s.block_max[b] + kMaxGumbel >= best.value)
      visit(b);
  return best.token;
}

// `r` is the row of the parameters.
template <class T>
int64_t draw(const SampleArgs& a, const T* logits, int64_t r, int64_t position, Scratch& s) {
  const float temperature = a.temperature[r];
  const bool greedy = temperature < kGreedyBelow;
  float highest;
  if (!scan(logits, a.vocab, greedy ? 1.0f : temperature, s, highest)) return -1;
  const int64_t argmax = first_equal(s, highest);
  if (greedy) return argmax;
  const Philox philox(a.seed[r], position);
  const int64_t k = a.top_k[r];
  const float top_p = a.top_p[r];
  const bool has_k = k > 0 && k < a.vocab, has_p = top_p < 1;
  float floor = -kInf;
  if (a.min_p[r] > 0) floor = highest + std::log(std::max(a.min_p[r], 1e-38f));
  if (!has_k && !has_p) return draw_all(s, floor, argmax, philox);
  double total = 0;
  if (has_k) {
    gather(s, std::max(floor, bound_for_top_k(s, k)));
    keep_top_k(s, k);
  } else {
    // all logits below the bound together have less mass than top_p excludes
    total = total_mass(s, floor, highest);
    const double rest = std::max(1e-30, (1.0 - top_p) * total / double(a.vocab));
    gather(s, std::max(floor, highest + float(std::log(rest)) - 0.01f));
  }
  if (has_p) {
    for (Candidate& c : s.candidates) c.mass = std::exp(c.value - highest);
    if (has_k)
      for (const Candidate& c : s.candidates) total += c.mass;
    keep_top_p(s, top_p * total, highest);
  }
  return draw_candidates(s, philox);
}

int64_t draw_stored(const SampleArgs& a, int64_t sample, int64_t r, int64_t position, Scratch& s) {
  return with_type(a.dtype, [&](auto t) {
    const auto* logits = static_cast<const decltype(t)*>(a.logits);
    return draw(a, logits + sample * a.logits_stride, r, position, s);
  });
}

// run(sample, scratch) for each sample.
template <class Run>
void each_sample(const SampleArgs& a, const Run& run) {
  const int threads = worth_threads(a.rows * a.vocab * 2, a.rows, a.threads);
  parallel_items(a.rows, threads, [&](int64_t i) {
    static thread_local Scratch scratch;
    a.out[i] = run(i, scratch);
  });
}

}  // namespace

void sample(const SampleArgs& a) {
  each_sample(a, [&](int64_t i, Scratch& s) { return draw_stored(a, i, i, a.position[i], s); });
}

void sample_rows(const SampleArgs& a, const ProcessArgs& process, const BanArgs& ban,
                 int64_t ahead) {
  each_sample(a, [&](int64_t i, Scratch& s) {
    const int64_t r = process.row[i], position = int64_t(process.length[i]) + ahead;
    const bool is_banned = bans_words(ban, i);
    if (!is_banned && !changes_logits(process, i)) return draw_stored(a, i, r, position, s);
    s.processed.resize(a.vocab);
    process_row(process, i, s.processed.data());
    if (is_banned) ban_words_of(ban, i, s.processed.data());
    return draw(a, s.processed.data(), r, position, s);
  });
}

}  // namespace llmc
