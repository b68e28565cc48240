// Routed experts. The rows of one expert are often few, and their product would be too small to
// share out, so threads take parts of the products of all experts.
#include "experts.h"
#include "dtypes.h"
#include "parallel.h"
#include "vec.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

namespace llmc {
namespace {

// The order in which logits are chosen: NaN first, as in torch.
bool is_higher(float a, float b) {
  return b == b && (a > b || a != a);
}

// The `count` highest of n logits, highest first; the earlier one of equal logits.
void choose_highest(const float* logits, int64_t n, int64_t count, int64_t* chosen) {
  for (int64_t i = 0, used = 0; i < n; ++i) {
    if (used == count && !is_higher(logits[i], logits[chosen[count - 1]])) continue;
    int64_t at = used < count ? used++ : count - 1;
    for (; at > 0 && is_higher(logits[i], logits[chosen[at - 1]]); --at)
      chosen[at] = chosen[at - 1];
    chosen[at] = i;
  }
}

// Scores of n logits in their place; returns by what they are yet to be divided.
float to_scores(float* logits, int64_t n, Score score) {
  if (score != Score::softmax) {
    each_vector(n, [&](int64_t i, int64_t count) LLMC_LAMBDA {
      const v16f x = load_up_to(logits + i, count);
      store_up_to(logits + i, score == Score::sigmoid ? sigmoid_lanes(x) : softplus_lanes(x), count);
    });
    if (score == Score::sqrt_softplus)
      for (int64_t i = 0; i < n; ++i) logits[i] = std::sqrt(logits[i]);
    return 1;
  }
  float highest = logits[0];
  for (int64_t i = 1; i < n; ++i) highest = is_higher(logits[i], highest) ? logits[i] : highest;
  v16f sum = {};
  each_vector(n, [&](int64_t i, int64_t count) LLMC_LAMBDA {
    v16f power = exp_lanes(load_up_to(logits + i, count) - highest);
    if (count < kLanes) power = select(lane_numbers() < static_cast<float>(count), power, v16f{});
    store_up_to(logits + i, power, count);
    sum += power;
  });
  return sum_lanes(sum);
}

// Make values outside of the groups with the highest sums of two values -inf.
void keep_groups(const ChooseExpertsArgs& a, float* ranked) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const int64_t size = a.experts / a.groups;
  thread_local std::vector<float> sums, kept;
  thread_local std::vector<int64_t> best;
  sums.resize(a.groups), kept.assign(a.experts, kLowest), best.resize(a.kept_groups);
  for (int64_t g = 0; g < a.groups; ++g) {
    int64_t two[2];
    choose_highest(ranked + g * size, size, 2, two);
    sums[g] = ranked[g * size + two[0]] + ranked[g * size + two[1]];
  }
  choose_highest(sums.data(), a.groups, a.kept_groups, best.data());
  for (const int64_t g : best) std::copy_n(ranked + g * size, size, kept.data() + g * size);
  std::copy_n(kept.data(), a.experts, ranked);
}

// ranked: room for a.experts values; correction: null, or as many in float32.
void choose_for(const ChooseExpertsArgs& a, int64_t token, const float* correction, float* scores,
                float* ranked) {
  widen_row(a.dtype, a.logits, token * a.stride, a.experts + a.gated * a.shared, scores);
  const float* const gates = scores + a.experts;
  const int64_t all = a.count + a.shared;
  int64_t* const chosen = a.expert + token * all;
  // without a correction, logits have the order of their scores, and differ where these are rounded
  std::copy_n(scores, a.experts, ranked);
  const float divisor = to_scores(scores, a.experts, a.score);
  if (correction)
    for (int64_t i = 0; i < a.experts; ++i) ranked[i] = scores[i] / divisor + correction[i];
  else if (a.kept_groups < a.groups)
    for (int64_t i = 0; i < a.experts; ++i) ranked[i] = scores[i] / divisor;
  if (a.kept_groups < a.groups) keep_groups(a, ranked);
  choose_highest(ranked, a.experts, a.count, chosen);
  float total = a.normalized ? a.sum_eps * divisor : divisor;
  if (a.normalized)
    for (int64_t c = 0; c < a.count; ++c) total += scores[chosen[c]];
  with_type(a.weight_dtype, [&](auto t) {
    auto* const weight = static_cast<decltype(t)*>(a.weight) + token * all;
    for (int64_t c = 0; c < a.count; ++c) assign(weight[c], scores[chosen[c]] / total * a.factor);
    for (int64_t i = 0; i < a.shared; ++i)
      assign(weight[a.count + i], a.gated ? 1 / (1 + std::exp(-gates[i])) : 1.f);
  });
  for (int64_t i = 0; i < a.shared; ++i) chosen[a.count + i] = a.experts + i;
  if (a.slots && a.slots[token] < 0) std::fill_n(chosen, all, a.experts + a.shared);
}

struct Group {  // results of one expert, as positions in the order of experts
  int64_t expert, first, count;
};

// The results with an expert in the order of experts, and where each expert's are.
std::vector<Group> groups_of(const Routing& routing, std::vector<int64_t>& order) {
  for (int64_t r = 0; r < routing.results; ++r)
    if (routing.expert[r] >= 0 && routing.expert[r] < routing.experts) order.push_back(r);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return routing.expert[a] < routing.expert[b]; });
  std::vector<Group> groups;
  for (int64_t i = 0; i < int64_t(order.size()); ++i) {
    const int64_t expert = routing.expert[order[i]];
    if (groups.empty() || groups.back().expert != expert) groups.push_back({expert, i, 0});
    ++groups.back().count;
  }
  return groups;
}

// Parts have whole blocks of so many channels, and these whole blocks of any kernel's: so results do
// not depend on the number of parts, and thus of threads.
constexpr int64_t kBlock = 192;
constexpr int64_t kWideBlock = 384;  // for more rows: each part converts its own copy of them
constexpr int64_t kFewRows = 4;

// multiply(x, rows, expert, begin, end, to): dense rows of x by channels [begin, end) of an expert,
// to dense rows of these channels. most_parts: of all experts' products together, in which threads
// share them out.
template <class Args, class Multiply>
void by_groups(const Args& a, int64_t most_parts, const Routing& routing,
               const Multiply& multiply) {
  const int64_t size = size_of(a.dtype), row_bytes = a.depth * size, out_bytes = a.channels * size;
  const char* const x = static_cast<const char*>(a.x);
  char* const out = static_cast<char*>(a.out);
  std::vector<int64_t> order;
  const std::vector<Group> groups = groups_of(routing, order);
  if (int64_t(order.size()) < routing.results) std::memset(out, 0, routing.results * out_bytes);
  if (groups.empty()) return;
  const int64_t count = groups.size();
  const int64_t block = int64_t(order.size()) > kFewRows * count ? kWideBlock : kBlock;
  const int64_t blocks = a.channels / block, most = std::max(blocks, int64_t(1));
  const int64_t parts = std::clamp((most_parts + count - 1) / count, int64_t(1), most);
  const int64_t cost = (routing.results + 3 * count) * a.depth * a.channels / 8;
  const int threads = worth_threads(cost, count * parts, a.threads);
  parallel_stretches(count * parts, threads, [&](int64_t item) {
    const Group& group = groups[item / parts];
    const int64_t part = item % parts, begin = blocks * part / parts * block;
    const int64_t end = part + 1 < parts ? blocks * (part + 1) / parts * block : a.channels;
    const int64_t width = (end - begin) * size, x_bytes = a.x_stride * size;
    const int64_t* const results = order.data() + group.first;
    const auto row_of = [&](int64_t i) { return x + results[i] / routing.choices * x_bytes; };
    const auto to_of = [&](int64_t i) { return out + results[i] * out_bytes + begin * size; };
    if (group.count == 1) return multiply(row_of(0), 1, group.expert, begin, end, to_of(0));
    thread_local std::vector<char> from, to;
    from.resize(group.count * row_bytes);
    to.resize(group.count * width);
    for (int64_t i = 0; i < group.count; ++i)
      std::memcpy(from.data() + i * row_bytes, row_of(i), row_bytes);
    multiply(from.data(), group.count, group.expert, begin, end, to.data());
    for (int64_t i = 0; i < group.count; ++i) std::memcpy(to_of(i), to.data() + i * width, width);
  });
}

template <class T>
const T* offset_by(const T* data, int64_t bytes) {
  return data ? reinterpret_cast<const T*>(reinterpret_cast<const char*>(data) + bytes) : nullptr;
}

}  // namespace

void choose_experts(const ChooseExpertsArgs& a) {
  parallel_rows(a.tokens, a.experts * 8, a.threads, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scores, ranked, correction;
    for (auto* room : {&scores, &ranked, &correction})
      room->resize(a.experts + a.shared + kLanes);  // widen_row writes whole vectors
    if (a.correction)
      widen_row(a.correction_dtype, a.correction, 0, a.experts, correction.data());
    for (int64_t token = begin; token < end; ++token)
      choose_for(a, token, a.correction ? correction.data() : nullptr, scores.data(),
                 ranked.data());
  });
}

void sum_experts(const SumExpertsArgs& a) {
  constexpr int64_t kPart = 1024;
  const int64_t parts = (a.width + kPart - 1) / kPart;
  parallel_rows(a.tokens * parts, kPart * a.choices, a.threads, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> weight;
    weight.resize(a.choices + kLanes);  // widen_row writes whole vectors
    alignas(64) float sums[kPart], residual[kPart];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item / parts, first = item % parts * kPart;
      const int64_t n = std::min(kPart, a.width - first), at = token * a.width + first;
      widen_row(a.weight_dtype, a.weight, token * a.choices, a.choices, weight.data());
      with_type(a.dtype, [&](auto t) {
        const auto* rows = static_cast<const decltype(t)*>(a.rows);
        rows += token * a.choices * a.width + first;
        each_vector(n, [&](int64_t i, int64_t count) LLMC_LAMBDA {
          v16f sum = {};
          for (int64_t c = 0; c < a.choices; ++c)
            sum += weight[c] * load_up_to(rows + c * a.width + i, count);
          store(sums + i, sum);
        });
      });
      if (a.residual) {
        widen_row(a.out_dtype, a.residual, at, n, residual);
        for (int64_t i = 0; i < n; i += kLanes)
          store(sums + i, load(sums + i) + load(residual + i));
      }
      narrow_row(a.out_dtype, sums, n, a.out, at);
    }
  });
}

void expert_rows(const LinearArgs& a, const Routing& routing, bool by_columns) {
  const int64_t size = size_of(a.dtype);
  // a weight stored by input is fastest read whole
  const int64_t parts = by_columns ? a.threads : a.threads * kPiecesPerThread;
  by_groups(a, parts, routing, [&](const void* x, int64_t rows, int64_t expert, int64_t begin,
                                   int64_t end, void* to) {
    const int64_t first = by_columns ? begin : begin * a.weight_stride;
    LinearArgs own = a;
    own.x = x, own.x_stride = a.depth, own.rows = rows, own.out = to, own.threads = 1;
    own.channels = own.out_stride = end - begin;
    own.weight = offset_by(a.weight, expert * routing.weight_bytes + first * size);
    own.bias = offset_by(a.bias, expert * routing.bias_bytes + begin * size);
    by_columns ? linear_columns(own) : linear(own);
  });
}

void quantized_expert_rows(const LowBitArgs& a, const Routing& routing) {
  const int64_t blocks = a.channels / kChannels;
  by_groups(a, a.threads * kPiecesPerThread, routing,
            [&](const void* x, int64_t rows, int64_t expert, int64_t begin, int64_t end, void* to) {
    // of an expert's bytes, each block has as many
    const auto from = [&](int64_t bytes) {
      return expert * bytes + bytes / blocks * (begin / kChannels);
    };
    LowBitArgs own = a;
    own.x = x, own.x_stride = a.depth, own.rows = rows, own.out = to, own.threads = 1;
    own.channels = end - begin;
    own.weight = offset_by(a.weight, from(routing.weight_bytes));
    own.scale = offset_by(a.scale, from(routing.scale_bytes));
    own.zero = offset_by(a.zero, from(routing.zero_bytes));
    own.minimum = offset_by(a.minimum, from(routing.minimum_bytes));
    own.bias = offset_by(a.bias, expert * routing.bias_bytes + begin * size_of(a.dtype));
    quantized_linear(own);
  });
}

}  // namespace llmc
