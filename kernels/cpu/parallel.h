// Parallel loops over the threads of team.h. Threads take work items as they become free, so a
// thread that the system schedules late, because another process uses its core, finds little or no
// work left.
#pragma once

#include "team.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace llmc {

// A parallel region costs several microseconds; less work than this runs serially.
constexpr int64_t kSerialCost = 60000;  // in units of about a clock cycle per 4 elements
constexpr int64_t kPieceCost = kSerialCost / 4;
constexpr int64_t kPiecesPerThread = 8;

inline int worth_threads(int64_t cost, int64_t items, int threads) {
  int64_t useful = cost / kSerialCost + 1;
  if (useful > items) useful = items;
  return static_cast<int>(useful < threads ? useful : threads);
}

constexpr int kMostThreads = 256;  // maximum number of threads

// Items [begin, end) that a thread takes in order, and of which other threads steal the last ones.
struct alignas(64) Stretch {
  uint64_t left;  // begin in the high half, end in the low half; uninitialized on the stack

  static uint64_t begin(uint64_t range) { return range >> 32; }
  static uint64_t end(uint64_t range) { return range & 0xffffffffu; }
  static uint64_t count(uint64_t range) {
    return begin(range) < end(range) ? end(range) - begin(range) : 0;
  }

  std::atomic_ref<uint64_t> shared() { return std::atomic_ref(left); }
  void put(uint64_t begin, uint64_t end) { shared() = begin << 32 | end; }

  // Takes the first remaining item; negative if there is none.
  int64_t take() {
    uint64_t range = shared();
    while (count(range))
      if (shared().compare_exchange_weak(range, range + (uint64_t(1) << 32))) return begin(range);
    return -1;
  }

  // For an empty stretch: steals the second half of the stretch with the most remaining items.
  bool take_half(Stretch* all, int threads) {
    for (;;) {
      Stretch* most = nullptr;
      uint64_t range = 0;
      for (int t = 0; t < threads; ++t)
        if (const uint64_t r = all[t].shared(); count(r) > count(range)) most = all + t, range = r;
      if (!most) return false;
      const uint64_t middle = begin(range) + count(range) / 2;
      if (most->shared().compare_exchange_strong(range, begin(range) << 32 | middle)) {
        put(middle, end(range));
        return true;
      }
    }
  }
};

// Calls body(item) for adjacent items of similar cost. Each thread starts with its own contiguous
// stretch, so that it reads memory in order, which is fastest.
template <class Body>
void parallel_stretches(int64_t items, int threads, const Body& body) {
  if (threads <= 1 || items <= 1) {
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  struct Work {
    const Body& body;
    const int threads;
    Stretch* stretches;
  };
  Stretch stretches[kMostThreads];
  Work work{body, std::min(threads, kMostThreads), stretches};
  for (int t = 0; t < work.threads; ++t)
    stretches[t].put(items * t / work.threads, items * (t + 1) / work.threads);
  llmc_run_team(work.threads, [](void* context, int thread) {
    Work& w = *static_cast<Work*>(context);
    Stretch& own = w.stretches[thread];
    do {
      for (int64_t i = own.take(); i >= 0; i = own.take()) w.body(i);
    } while (own.take_half(w.stretches, w.threads));
  }, &work);
}

// Calls body(item) for items of any cost; threads take them one at a time, in order.
template <class Body>
void parallel_items(int64_t items, int threads, const Body& body) {
  if (threads <= 1 || items <= 1) {
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  struct Work {
    const Body& body;
    const int64_t items;
    std::atomic<int64_t> next{0};
  } work{body, items};
  llmc_run_team(threads, [](void* context, int) {
    Work& w = *static_cast<Work*>(context);
    for (int64_t i = w.next++; i < w.items; i = w.next++) w.body(i);
  }, &work);
}

// Calls body(item) for adjacent items, grouped in a few pieces of similar size per thread.
template <class Body>
void parallel_pieces(int64_t items, int threads, const Body& body) {
  const int64_t pieces = threads <= 1 ? 1 : std::min(items, threads * kPiecesPerThread);
  parallel_stretches(pieces, threads, [&](int64_t p) {
    for (int64_t i = items * p / pieces; i < items * (p + 1) / pieces; ++i) body(i);
  });
}

// Calls body(begin, end) for ranges of `items` rows; `cost` is that of one row.
template <class Body>
void parallel_rows(int64_t items, int64_t cost, int threads, const Body& body) {
  const int n = worth_threads(items * cost, items, threads);
  if (n <= 1) {
    if (items > 0) body(int64_t(0), items);
    return;
  }
  const int64_t worth = std::clamp(items * cost / kPieceCost, int64_t(n), n * kPiecesPerThread);
  const int64_t pieces = std::min(items, worth);
  parallel_stretches(pieces, n, [&](int64_t i) { body(items * i / pieces, items * (i + 1) / pieces); });
}

}  // namespace llmc
