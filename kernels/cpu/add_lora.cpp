// add_lora: rows of one adapter are processed in blocks, so that its A and B are read once per
// block. First come the products with A for all blocks, in float; then those with B, added to the
// output.
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"
#include "vec.h"

#include <algorithm>
#include <vector>

namespace llmc {
namespace {

constexpr int64_t kRows = 4;       // per block
constexpr int64_t kLows = 8;       // rows of A per work item
constexpr int64_t kStretch = 256;  // channels per work item

struct Block {
  int64_t slot;  // with experts: slot * experts + expert
  int64_t rows[kRows];  // entries past the last repeat the first
  int64_t count;
};

std::vector<Block> blocks_of(const LoraArgs& a) {
  std::vector<Block> blocks;
  std::vector<int64_t> open(a.slots * a.experts, -1);  // the block of each that has room
  for (int64_t row = 0; row < a.rows; ++row) {
    int64_t slot = int64_t(a.adapter[row / a.choices]) - 1;
    if (slot < 0 || slot >= a.slots) continue;
    const int64_t expert = a.expert ? a.expert[row] : 0;
    if (expert < 0 || expert >= a.experts) continue;
    slot = slot * a.experts + expert;
    if (open[slot] < 0) {
      open[slot] = int64_t(blocks.size());
      blocks.push_back({slot, {row, row, row, row}, 0});
    }
    Block& block = blocks[open[slot]];
    block.rows[block.count++] = row;
    if (block.count == kRows) open[slot] = -1;
  }
  return blocks;
}

// low [kRows] = x of the block's rows times one row of A
template <class T>
void products(const LoraArgs& a, const Block& block, const T* weight, float* low, int64_t stride) {
  const T* x[kRows];
  for (int64_t i = 0; i < kRows; ++i)
    x[i] = static_cast<const T*>(a.x) + block.rows[i] * a.depth;
  const int64_t whole = a.depth / kLanes * kLanes, tail = a.depth - whole;
  v16f sum[kRows] = {};
  for (int64_t k = 0; k < whole; k += kLanes) {
    const v16f w = load(weight + k);
    for (int64_t i = 0; i < kRows; ++i) sum[i] += w * load(x[i] + k);
  }
  if (tail) {
    const v16f w = load_n(weight + whole, tail);
    for (int64_t i = 0; i < kRows; ++i) sum[i] += w * load_n(x[i] + whole, tail);
  }
  for (int64_t i = 0; i < kRows; ++i) low[i * stride] = sum_lanes(sum[i]);
}

// out [.., channels from n to end] += low [kRows, rank] times B
template <class T>
void add(const LoraArgs& a, const Block& block, const T* b, const float* low, int64_t stride,
         int64_t n, int64_t end) {
  for (; n < end; n += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, end - n);
    v16f sum[kRows] = {};
    for (int64_t r = 0; r < a.rank; ++r) {
      const T* row = b + r * a.channels + n;
      const v16f w = lanes == kLanes ? load(row) : load_n(row, lanes);
      for (int64_t i = 0; i < kRows; ++i) sum[i] += low[i * stride + r] * w;
    }
    for (int64_t i = 0; i < block.count; ++i) {
      T* out = static_cast<T*>(a.out) + block.rows[i] * a.channels + n;
      if (lanes == kLanes)
        store(out, load(out) + sum[i]);
      else
        store_n(out, load_n(out, lanes) + sum[i], lanes);
    }
  }
}

template <class T>
void all(const LoraArgs& a) {
  const std::vector<Block> blocks = blocks_of(a);
  if (blocks.empty()) return;
  const int64_t num = int64_t(blocks.size()), lows = a.parts * a.rank;
  std::vector<float> low(num * kRows * lows);
  const int64_t pieces = (lows + kLows - 1) / kLows;
  const int64_t cost = a.depth * kRows * kLows / 4;
  parallel_rows(num * pieces, cost, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Block& block = blocks[item / pieces];
      const int64_t first = item % pieces * kLows, last = std::min(first + kLows, lows);
      for (int64_t j = first; j < last; ++j)
        products<T>(a, block,
                    static_cast<const T*>(a.a) + (block.slot * lows + j) * a.depth,
                    low.data() + item / pieces * kRows * lows + j, lows);
    }
  });
  const int64_t stretches = (a.channels + kStretch - 1) / kStretch;
  parallel_rows(num * stretches, kStretch * kRows * a.rank / 4, a.threads,
                [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t from = item % stretches * kStretch;
      const int64_t to = std::min(from + kStretch, a.channels);
      const Block& block = blocks[item / stretches];
      for (int64_t part = 0; part < a.parts; ++part) {
        const int64_t first = std::max<int64_t>(from, a.bounds[part]);
        const int64_t last = std::min<int64_t>(to, a.bounds[part + 1]);
        add<T>(a, block, static_cast<const T*>(a.b) + block.slot * a.rank * a.channels,
               low.data() + item / stretches * kRows * lows + part * a.rank, lows, first, last);
      }
    }
  });
}

}  // namespace

void add_lora(const LoraArgs& a) {
  const int32_t* end = a.adapter + a.rows / a.choices;
  if (std::all_of(a.adapter, end, [](int32_t one) { return one == 0; })) return;
  with_type(a.dtype, [&](auto type) { all<decltype(type)>(a); });
}

}  // namespace llmc
