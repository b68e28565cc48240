// Prefill, and decode with many heads per KV head: blocks of query rows against tiles of keys.
//
// An item's rows are panels of 16 lanes. For each tile of 128 keys, K and V are packed once and
// used by every panel that can see the tile: scores, softmax, weights times values.
#include "hadamard.h"
#include "tile_engine.h"

#ifdef LLMC_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llmc {
namespace {

struct Panel {  // sixteen query rows; lanes past the last row see nothing
  v16f m, l;
  v16i first, last;  // keys visible to each lane, inclusive
  v16f position, slope;
  int64_t least_first, most_first, least_last, most_last;
};

void init_panel(const Plan& plan, const Item& item, int64_t row, int64_t rows, Panel& p) {
  const AttentionArgs& a = plan.a;
  p.m = splat(-kInf);
  p.l = v16f{};
  p.first = splat_int(0);
  p.last = splat_int(-1);
  p.position = p.slope = v16f{};
  p.least_first = p.least_last = INT64_MAX;
  p.most_first = p.most_last = -1;
  for (int lane = 0; lane < kLanes && row + lane < rows; ++lane) {
    const int64_t position = item.position + (row + lane) / plan.group;
    const int64_t first = std::max(first_visible(a, position), item.first_key);
    const int64_t last = std::min(position, item.last_key - 1);
    p.first[lane] = int32_t(first);
    p.last[lane] = int32_t(last);
    p.position[lane] = float(position);
    if (a.slopes) p.slope[lane] = a.slopes[item.kv_head * plan.group + (row + lane) % plan.group];
    p.least_first = std::min(p.least_first, first);
    p.most_first = std::max(p.most_first, first);
    p.least_last = std::min(p.least_last, last);
    p.most_last = std::max(p.most_last, last);
  }
}

// Applies softcap, slopes and masks, if the tile needs them. The result is in units of log2.
void transform(const AttentionArgs& a, const Panel& p, float raw_scale, float* scores,
               int64_t first, int64_t n, bool plain, bool masked) {
  for (int64_t k = 0; k < n; ++k) {
    v16f x = load(scores + k * kLanes);
    if (!plain) {
      x *= raw_scale;
      if (a.softcap > 0) x = a.softcap * tanh_lanes(x / a.softcap);
      if (a.slopes) x += p.slope * (float(first + k) - p.position);
      x *= kLog2e;
    }
    if (masked) {
      const v16i key = splat_int(int32_t(first + k));
      x = select((key >= p.first) & (key <= p.last), x, splat(-kInf));
    }
    store(scores + k * kLanes, x);
  }
}

// Adds each row's distance biases to the transformed scores of a panel.
void add_distances(const Plan& plan, const Item& item, int64_t row, int64_t rows, float* scores,
                   int64_t first, int64_t n) {
  for (int64_t lane = 0; lane < kLanes && row + lane < rows; ++lane) {
    const int64_t token = (row + lane) / plan.group, head = (row + lane) % plan.group;
    add_distance_bias(plan.a, item.token + token, item.kv_head * plan.group + head,
                      item.position + token, first, n, scores + lane, kLanes);
  }
}

// Turns scores of n keys, times `scale`, into weights for the next product. Rows of acc are
// rescaled only if a maximum changed.
template <class E>
void softmax(Panel& p, float* scores, int64_t n, int64_t padded_n, float scale, uint32_t* weights,
             float* acc, int64_t v_dim) {
  v16f top0 = splat(-kInf), top1 = top0;
  int64_t k = 0;
  for (; k + 2 <= n; k += 2) {
    top0 = vmax(top0, load(scores + k * kLanes));
    top1 = vmax(top1, load(scores + (k + 1) * kLanes));
  }
  if (k < n) top0 = vmax(top0, load(scores + k * kLanes));
  const v16f m = vmax(p.m, vmax(top0, top1) * scale);
  const v16f base = select(m == splat(-kInf), v16f{}, m);  // for lanes without visible keys so far
  const v16i moved = m != p.m;
  bool any = false;
  for (int i = 0; i < kLanes; ++i) any |= moved[i] != 0;
  if (any) {
    const v16f factor = exp2_lanes(p.m - base);
    p.l *= factor;
    for (int64_t d = 0; d < v_dim; ++d) store(acc + d * kLanes, load(acc + d * kLanes) * factor);
    p.m = m;
  }
  for (k = n; k < round_up(padded_n, 2); ++k) store(scores + k * kLanes, splat(-kInf));
  v16f sum0 = {}, sum1 = {};
  for (k = 0; k < padded_n; k += 2) {
    const v16f w0 = exp2_for<E::kExact>(load(scores + k * kLanes) * scale - base);
    const v16f w1 = exp2_for<E::kExact>(load(scores + (k + 1) * kLanes) * scale - base);
    sum0 += w0;
    sum1 += w1;
    E::store_weights(weights, k, w0, w1);
  }
  p.l += sum0 + sum1;
}

template <class E>
void finish(const Plan& plan, const Item& item, const Panel& p, int64_t row, int64_t rows,
            const float* acc, float* lines, int64_t v_dim) {
  columns_to_rows(acc, plan.a.v_dim, lines, v_dim);
  for (int lane = 0; lane < kLanes && row + lane < rows; ++lane)
    finish_row(plan, item, row + lane, p.m[lane], p.l[lane], lines + lane * v_dim);
}

// Copies the rows of a panel, rotated as the keys of an int8 cache are.
template <class T>
void rotate_rows(const T** rows, int64_t dim, float* wide, T* to) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (rows[lane] == nullptr) continue;
    rotate_row(rows[lane], dim, wide);
    T* row = to + lane * dim;
    for (int64_t i = 0; i < dim; ++i) assign(row[i], wide[i]);
    rows[lane] = row;
  }
}

// Pointers to n key and value rows from `first` on, as T: rows of narrower caches are converted to
// `to`, dense; then the result is true. Values that are the first channels of keys (of latents) are
// converted with these.
template <class T>
bool find_wide_rows(const AttentionArgs& a, const Item& item, int64_t first, int64_t n, T* to,
                    const T** keys, const T** values) {
  bool converts = false;
  with_element<T>(a.cache, [&](auto e) {
    using E = decltype(e);
    if constexpr (std::is_same_v<E, T>) {
      find_rows(a, item, first, n, keys, values);
    } else {
      converts = true;
      const E *stored_keys[kTileKeys], *stored_values[kTileKeys];
      find_rows(a, item, first, n, stored_keys, stored_values);
      float key_scales[kTileKeys], value_scales[kTileKeys];
      constexpr bool kScaled = std::is_same_v<E, int8_t>;
      if (kScaled) copy_scales(a, item, first, n, key_scales, value_scales);
      widen_rows(a.cache, n, a.head_dim, stored_keys, to, keys, kScaled ? key_scales : nullptr);
      if (static_cast<const void*>(a.value_cache) == a.key_cache && a.v_dim <= a.head_dim)
        std::copy_n(keys, n, values);
      else
        widen_rows(a.cache, n, a.v_dim, stored_values, to + kTileKeys * a.head_dim, values,
                   kScaled ? value_scales : nullptr);
    }
  });
  return converts;
}

template <class E>
void tiles(const Plan& plan, const Item& item) {
  using T = typename E::T;
  const AttentionArgs& a = plan.a;
  const int64_t rows = item.num_tokens * plan.group;
  const int64_t panels = (rows + kLanes - 1) / kLanes;
  const int64_t dim = round_up(a.head_dim, E::kDimStep), v_dim = round_up(a.v_dim, E::kDimStep);
  const int64_t words = E::query_words(dim) * kLanes;
  static thread_local Arena arena;
  arena.reset(sizeof(float) * (panels * (words + v_dim * kLanes) + kTileKeys * (dim + v_dim) +
                               2 * E::kPanels * kPanelScores + kLanes * v_dim) +
              kTileKeys * (a.head_dim + a.v_dim) * sizeof(T) + panels * sizeof(Panel) +
              2 * kTileKeys * sizeof(T*) + 16 * 64);
  uint32_t* query = arena.take<uint32_t>(panels * words);
  float* acc = arena.take<float>(panels * v_dim * kLanes);
  uint32_t* keys = arena.take<uint32_t>(kTileKeys * dim);
  uint32_t* values = arena.take<uint32_t>(kTileKeys * v_dim);
  float* scores = arena.take<float>(E::kPanels * kPanelScores);
  uint32_t* weights = arena.take<uint32_t>(E::kPanels * kPanelScores);
  float* lines = arena.take<float>(kLanes * v_dim);
  Panel* panel = arena.take<Panel>(panels);
  T* wide = arena.take<T>(kTileKeys * (a.head_dim + a.v_dim));
  const T** key_rows = arena.take<const T*>(kTileKeys);
  const T** value_rows = arena.take<const T*>(kTileKeys);

  std::fill(acc, acc + panels * v_dim * kLanes, 0.0f);
  for (int64_t p = 0; p < panels; ++p) init_panel(plan, item, p * kLanes, rows, panel[p]);
  for (int64_t p = 0; p < panels; ++p) {
    const T* from[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t row = p * kLanes + lane;
      from[lane] = nullptr;
      if (row < rows)
        from[lane] = static_cast<const T*>(a.query) +
                     (item.token + row / plan.group) * a.query_stride[0] +
                     (item.kv_head * plan.group + row % plan.group) * a.query_stride[1];
    }
    if (a.cache == Dtype::i8) rotate_rows(from, a.head_dim, scores, wide);
    E::pack_panel(from, a.head_dim, query + p * words, dim);
  }
  const float raw_scale = a.scale * a.scales.key_of(item.kv_head);
  const bool by_distance = a.distance_bias.data != nullptr;
  const bool plain = a.softcap <= 0 && a.slopes == nullptr && !by_distance && raw_scale > 0;
  const float scale = plain ? raw_scale * kLog2e : 1.0f;
  E::enter();
  for (int64_t first = item.first_key; first < item.last_key; first += kTileKeys) {
    const int64_t n = std::min(kTileKeys, item.last_key - first);
    const bool dense = find_wide_rows(a, item, first, n, wide, key_rows, value_rows);
    const int64_t padded = round_up(n, E::kKeyStep);
    const uint32_t *tile_keys = keys, *tile_values = values;
    int64_t value_row = v_dim;
    if (E::kPlainRows && dense) {
      tile_keys = reinterpret_cast<const uint32_t*>(key_rows[0]);
      tile_values = reinterpret_cast<const uint32_t*>(value_rows[0]);
      if (value_rows[0] == key_rows[0]) value_row = a.head_dim;
    } else {
      E::pack_keys(key_rows, n, padded, a.head_dim, keys, dim);
      E::pack_values(value_rows, n, padded, a.v_dim, values, v_dim);
    }
    for (int64_t p = 0; p < panels; p += E::kPanels) {
      const int64_t count = std::min(E::kPanels, panels - p);
      int64_t low = INT64_MAX, high = -1;
      for (int64_t i = p; i < p + count; ++i) {
        low = std::min(low, panel[i].least_first);
        high = std::max(high, panel[i].most_last);
      }
      if (high < first || low >= first + n) continue;
      const int64_t seen = std::min(n, high + 1 - first), step = round_up(seen, E::kKeyStep);
      E::scores(count, tile_keys, step, dim, query + p * words, scores);
      for (int64_t i = 0; i < count; ++i) {
        Panel& q = panel[p + i];
        float* s = scores + i * kPanelScores;
        const bool masked = q.most_first > first || q.least_last < first + seen - 1 ||
                            (p + i + 1) * kLanes > rows;
        if (masked || !plain) transform(a, q, raw_scale, s, first, seen, plain, masked);
        if (by_distance) add_distances(plan, item, (p + i) * kLanes, rows, s, first, seen);
        softmax<E>(q, s, seen, step, scale, weights + i * kPanelScores,
                   acc + (p + i) * v_dim * kLanes, v_dim);
      }
      E::add_values(count, tile_values, value_row, step, v_dim, weights, acc + p * v_dim * kLanes);
    }
  }
  E::leave();
  for (int64_t p = 0; p < panels; ++p)
    finish<E>(plan, item, panel[p], p * kLanes, rows, acc + p * v_dim * kLanes, lines, v_dim);
}

}  // namespace

void run_tiles(const Plan& plan, const Item& item) {
  if (plan.a.dtype == Dtype::f32) return tiles<FloatEngine<float>>(plan, item);
  if (plan.a.dtype == Dtype::f16) return tiles<FloatEngine<f16>>(plan, item);
#ifdef LLMC_AMX
  if (amx_ready()) return tiles<AmxEngine>(plan, item);
#endif
#ifdef LLMC_AVX512_BF16
  return tiles<PairEngine>(plan, item);
#else
  return tiles<FloatEngine<bf16>>(plan, item);
#endif
}

bool amx_ready() {
#ifdef LLMC_AMX
  // Linux grants the tile registers on request, once for the whole process
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

}  // namespace llmc
