// paged_attention: divides a step into items of similar cost, runs them on the threads, and
// combines the results of requests whose keys were split.
#include "attention.h"
#include "dtypes.h"
#include "parallel.h"

#include <vector>

namespace llmc {
namespace {

constexpr int64_t kTileRows = 256;    // rows per item in the tile kernel
// Keys are split at multiples of this: combining shorter parts would cost more than it saves.
constexpr int64_t kMinTiles = 256, kMinStream = 64;
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kItemCost = 100000;  // a cheaper item would often end before its rows arrive

struct Joined {  // rows whose keys were split into `parts` parts, from `part` on
  Item item;
  int64_t part, parts;
};

void zero_rows(const AttentionArgs& a, int64_t first, int64_t last) {
  const int64_t row = a.heads * a.v_dim * size_of(a.dtype);
  if (last > first) std::memset(static_cast<char*>(a.out) + first * row, 0, (last - first) * row);
}

bool is_stream(const AttentionArgs& a, const Item& item) {
  return item.num_tokens == 1 && a.heads / a.kv_heads <= kMaxStreamRows;
}

void add_items(const AttentionArgs& a, int64_t group, std::vector<Item>& items) {
  const int64_t step = std::max<int64_t>(1, kTileRows / group);
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t start = a.query_start[r], queries = a.query_start[r + 1] - start;
    const int64_t length = a.context_len[r];
    if (queries <= 0 || length <= 0) continue;
    for (int64_t t = (queries - 1) / step * step; t >= 0; t -= step) {
      const int64_t n = std::min(step, queries - t), position = length - queries + t;
      const int64_t first = first_visible(a, position), last = position + n;
      // reading a key from memory costs as much as some rows of the tile kernel
      const int64_t cost = (last - first) * (24 + n * group) * (a.head_dim + a.v_dim) / 16;
      Item item{r, 0, 1, start + t, n, position, first, last, -1, cost};
      if (is_stream(a, item)) {  // a block has all heads side by side: read them in that order
        item.num_heads = a.kv_heads;
        item.cost = cost * a.kv_heads;
        items.push_back(item);
        continue;
      }
      for (; item.kv_head < a.kv_heads; ++item.kv_head) items.push_back(item);
    }
  }
}

// Cuts an item, which goes through the keys of one head after the other, into about `n` stretches of
// equal length. Only heads with a cut within their keys have results to be combined.
void cut(const Item& whole, int64_t n, int64_t min_keys, std::vector<Item>& out, int64_t& parts,
         std::vector<Joined>& joined) {
  const int64_t keys = whole.last_key - whole.first_key;
  const int64_t units = std::max<int64_t>(1, keys / min_keys), total = whole.num_heads * units;
  n = std::clamp<int64_t>(n, 1, total);
  auto key_of = [&](int64_t unit) {
    return unit == units ? whole.last_key : whole.first_key + unit * min_keys;
  };
  for (int64_t i = 0, at = 0; i < n; ++i)
    for (const int64_t end = total * (i + 1) / n; at < end;) {
      const int64_t unit = at % units, heads = unit == 0 ? (end - at) / units : 0;
      Item piece = whole;
      piece.kv_head = whole.kv_head + at / units;
      piece.num_heads = std::max<int64_t>(1, heads);
      const int64_t length = heads > 0 ? heads * units : std::min(end - at, units - unit);
      if (heads == 0) {  // some keys of one head
        if (unit == 0) joined.push_back({piece, parts, 0});
        ++joined.back().parts;
        piece.first_key = key_of(unit);
        piece.last_key = key_of(unit + length);
        piece.part = parts++;
      }
      piece.cost = whole.cost * length / total;
      out.push_back(piece);
      at += length;
    }
}

void join(const Plan& plan, const Joined& j) {
  const int64_t width = 2 + plan.a.v_dim;
  std::vector<float> acc(plan.a.v_dim);
  for (int64_t row = 0; row < j.item.num_tokens * j.item.num_heads * plan.group; ++row) {
    const float* first = plan.partials + j.part * plan.partial_stride + row * width;
    float m = -kInf, l = 0;
    for (int64_t p = 0; p < j.parts; ++p) m = std::max(m, first[p * plan.partial_stride]);
    std::fill(acc.begin(), acc.end(), 0.0f);
    for (int64_t p = 0; p < j.parts; ++p) {
      const float* part = first + p * plan.partial_stride;
      if (part[0] == -kInf) continue;
      const float factor = std::exp2(part[0] - m);
      l += part[1] * factor;
      for (int64_t i = 0; i < plan.a.v_dim; ++i) acc[i] += part[2 + i] * factor;
    }
    finish_row(plan, j.item, row, m, l, acc.data());
  }
}

}  // namespace

void paged_attention(const AttentionArgs& a) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t r = 0; r < a.requests; ++r)
    if (a.context_len[r] <= 0) zero_rows(a, a.query_start[r], a.query_start[r + 1]);
  zero_rows(a, a.query_start[a.requests], a.tokens);
  if (a.chosen != nullptr) return run_chosen(a);

  static thread_local std::vector<Item> items;
  items.clear();
  add_items(a, group, items);
  int64_t total = 0;
  for (const Item& item : items) total += item.cost;
  const int threads = worth_threads(total, total / 2000 + 1, a.threads);
  std::vector<Joined> joined;
  static thread_local std::vector<float> partials;
  int64_t parts = 0;
  if (threads > 1) {
    const int64_t target =
        total / std::clamp<int64_t>(total / kItemCost, threads, threads * kItemsPerThread) + 1;
    std::vector<Item> pieces;
    pieces.reserve(2 * items.size());
    for (const Item& item : items)
      cut(item, (item.cost + target - 1) / target, is_stream(a, item) ? kMinStream : kMinTiles,
          pieces, parts, joined);
    items.swap(pieces);
    std::stable_sort(items.begin(), items.end(),
                     [](const Item& x, const Item& y) { return x.cost > y.cost; });
  }
  const int64_t stride = std::max(kTileRows, a.heads) * (2 + a.v_dim);
  if (int64_t(partials.size()) < parts * stride) partials.resize(parts * stride);
  const Plan plan{a, group, partials.data(), stride};
  const bool amx = amx_streams(a);
  const Item* work = items.data();  // `items` is thread_local, so other threads need the pointer
  parallel_items(int64_t(items.size()), threads, [&](int64_t i) {
    const Item& item = work[i];
    if (!is_stream(a, item)) return run_tiles(plan, item);
    amx ? run_stream_amx(plan, item) : run_stream(plan, item);
  });
  for (const Joined& j : joined) join(plan, j);
}

}  // namespace llmc
