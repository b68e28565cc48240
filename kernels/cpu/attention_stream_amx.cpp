// Decode in bf16 with AMX: scores of 16 keys for all heads of a group at once, directly from the
// cache.
//
// Scores have the heads in the lanes, so the softmax of all of them costs as much as that of one.
// Used if the cache's blocks are whole tiles: 16 keys, 32 elements.
#include "amx.h"
#include "stream_values.h"

namespace llmc {

#ifdef LLMC_AMX
namespace {

constexpr int64_t kTileRows = 16, kTileDim = 32;
constexpr int64_t kTileWords = kTileRows * kLanes;
constexpr int64_t kMinGroup = 4;  // measured: for fewer, the dot products of run_stream are faster

// scores[key][head] for four groups of 16 keys, or fewer at the end of the context.
void score_tile(const Tile<bf16>& tile, int64_t row_bytes, int64_t dim, const uint32_t* query,
                float* scores) {
  const bf16* rows[4];
  for (int64_t i = 0; i < 4; ++i)  // a group past the end repeats one that exists
    rows[i] = tile.keys[i * kTileRows < tile.end ? i * kTileRows : 0];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < dim; d += kTileDim) {
    _tile_loadd(6, query + d / kTileDim * kTileWords, 64);
    _tile_loadd(4, rows[0] + d, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, rows[1] + d, row_bytes);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, rows[2] + d, row_bytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, rows[3] + d, row_bytes);
    _tile_dpbf16ps(3, 5, 6);
    if (tile.next_keys)
      for (int64_t k = d / kTileDim; k < kTile; k += dim / kTileDim)
        prefetch_row(tile.next_keys[k], dim);
  }
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + kTileWords, 64);
  _tile_stored(2, scores + 2 * kTileWords, 64);
  _tile_stored(3, scores + 3 * kTileWords, 64);
}

struct HeadState {
  v16f m, l, slope;
};

// Turns the scores of keys [begin, end) into weights; returns the factor for the sums so far.
v16f softmax(const AttentionArgs& a, float raw_scale, HeadState& h, float* scores, int64_t begin,
             int64_t end, float distance) {
  const bool plain = a.softcap <= 0 && a.slopes == nullptr && raw_scale > 0;
  const float scale = plain ? raw_scale * kLog2e : 1.0f;
  v16f top = splat(-kInf);
  for (int64_t k = begin; k < end; ++k) {
    v16f x = load(scores + k * kLanes);
    if (!plain) {
      x *= raw_scale;
      if (a.softcap > 0) x = a.softcap * tanh_lanes(x / a.softcap);
      x = (x + h.slope * (distance + float(k))) * kLog2e;
      store(scores + k * kLanes, x);
    }
    top = vmax(top, x);
  }
  const v16f m = vmax(h.m, top * scale), factor = exp2_lanes(h.m - m);
  v16f sum = {};
  for (int64_t k = begin; k < end; ++k) {
    const v16f w = exp2_lanes(load(scores + k * kLanes) * scale - m);
    sum += w;
    store(scores + k * kLanes, w);
  }
  h.l = h.l * factor + sum;
  h.m = m;
  return factor;
}

template <int G>
void add_group(const Tile<bf16>& tile, int64_t begin, int64_t v_dim, const float* weights,
               float* acc) {
  add_values<bf16, G>(tile.values, tile.next_values, begin, tile.end, v_dim,
                      {weights, 1, kLanes}, acc, v_dim);
}

void add_heads(const Tile<bf16>& tile, int64_t begin, int64_t heads, int64_t v_dim,
               const float* weights, float* acc) {
  switch (heads) {
    case 4: return add_group<4>(tile, begin, v_dim, weights, acc);
    case 5: return add_group<5>(tile, begin, v_dim, weights, acc);
    case 6: return add_group<6>(tile, begin, v_dim, weights, acc);
    case 7: return add_group<7>(tile, begin, v_dim, weights, acc);
    case 8: return add_group<8>(tile, begin, v_dim, weights, acc);
  }
}

void pack_query(const bf16* query, int64_t stride, int64_t heads, int64_t dim, uint32_t* to) {
  std::memset(to, 0, dim / 2 * kLanes * sizeof(uint32_t));
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t w = 0; w < dim / 2; ++w)
      std::memcpy(to + w * kLanes + h, query + h * stride + 2 * w, sizeof(uint32_t));
}

}  // namespace

bool amx_streams(const AttentionArgs& a) {
  const int64_t group = a.heads / a.kv_heads;
  return a.dtype == Dtype::bf16 && a.cache != Dtype::i8 && group >= kMinGroup && group <= kMaxStreamRows &&
         a.head_dim % kTileDim == 0 && a.v_dim % kTileDim == 0 && a.block_size % kTileRows == 0 &&
         a.distance_bias.data == nullptr && amx_ready();
}

void run_stream_amx(const Plan& plan, const Item& item) {
  const AttentionArgs& a = plan.a;
  const int64_t group = plan.group, dim = a.head_dim, v_dim = a.v_dim, heads = item.num_heads;
  static thread_local Arena arena;
  arena.reset(heads * (dim / 2 * kLanes + group * v_dim) * sizeof(float) +
              heads * sizeof(HeadState) + kTile * kLanes * sizeof(float) + 4096);
  uint32_t* query = arena.take<uint32_t>(heads * dim / 2 * kLanes);
  float* acc = arena.take<float>(heads * group * v_dim);
  float* scores = arena.take<float>(kTile * kLanes);
  HeadState* state = arena.take<HeadState>(heads);
  std::fill(acc, acc + heads * group * v_dim, 0.0f);
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t first = (item.kv_head + h) * group;
    pack_query(static_cast<const bf16*>(a.query) + item.token * a.query_stride[0] +
                   first * a.query_stride[1],
               a.query_stride[1], group, dim, query + h * dim / 2 * kLanes);
    state[h] = {splat(-kInf), v16f{}, v16f{}};
    if (a.slopes)
      for (int64_t g = 0; g < group; ++g) state[h].slope[g] = a.slopes[first + g];
  }
  enter_amx();
  const int64_t row_bytes = (is_fp8(a.cache) ? dim : a.key_stride[2]) * int64_t(sizeof(bf16));
  const int64_t start = item.first_key / kTileRows * kTileRows;
  walk_tiles<bf16>(a, item, start, [&](const Tile<bf16>& tile) __attribute__((noinline)) {
    const int64_t h = tile.head, begin = std::max<int64_t>(0, item.first_key - tile.first);
    score_tile(tile, row_bytes, dim, query + h * dim / 2 * kLanes, scores);
    const v16f factor = softmax(a, a.scale * a.scales.key_of(item.kv_head + h), state[h], scores,
                                begin, tile.end, float(tile.first - item.position));
    float* sums = acc + h * group * v_dim;
    for (int64_t g = 0; g < group; ++g)
      if (factor[g] != 1) scale_row(sums + g * v_dim, v_dim, factor[g]);
    add_heads(tile, begin, group, v_dim, scores, sums);
  });
  _tile_release();
  for (int64_t row = 0; row < heads * group; ++row) {
    const HeadState& h = state[row / group];
    unpermute(acc + row * v_dim, v_dim);
    finish_row(plan, item, row, h.m[row % group], h.l[row % group], acc + row * v_dim);
  }
}

#else

bool amx_streams(const AttentionArgs&) {
  return false;
}

void run_stream_amx(const Plan& plan, const Item& item) {
  run_stream(plan, item);
}

#endif

}  // namespace llmc
