// Work over the threads of team.h, handed out in pieces from a shared counter: a thread that the
// system runs late, since another process keeps its core busy, finds less left to do or nothing.
#pragma once

#include "team.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace llmc {

// A parallel region costs several microseconds: below this much work it is not worth one.
constexpr int64_t kSerialCost = 60000;  // in units of about a clock cycle per 4 elements
constexpr int64_t kPieceCost = kSerialCost / 4;
constexpr int64_t kPiecesPerThread = 8;

inline int worth_threads(int64_t cost, int64_t items, int threads) {
  int64_t useful = cost / kSerialCost + 1;
  if (useful > items) useful = items;
  return static_cast<int>(useful < threads ? useful : threads);
}

// body(item) one at a time from a shared counter.
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
  llmc_run_team(threads, [](void* context) {
    Work& w = *static_cast<Work*>(context);
    for (int64_t i = w.next++; i < w.items; i = w.next++) w.body(i);
  }, &work);
}

// The same in a few pieces a thread, of about as many items each.
template <class Body>
void parallel_pieces(int64_t items, int threads, const Body& body) {
  const int64_t pieces = threads <= 1 ? 1 : std::min(items, threads * kPiecesPerThread);
  parallel_items(pieces, threads, [&](int64_t p) {
    for (int64_t i = items * p / pieces; i < items * (p + 1) / pieces; ++i) body(i);
  });
}

// body(begin, end) over stretches of `items` rows; `cost` is that of one row.
template <class Body>
void parallel_rows(int64_t items, int64_t cost, int threads, const Body& body) {
  const int n = worth_threads(items * cost, items, threads);
  if (n <= 1) {
    if (items > 0) body(int64_t(0), items);
    return;
  }
  const int64_t worth = std::clamp(items * cost / kPieceCost, int64_t(n), n * kPiecesPerThread);
  const int64_t pieces = std::min(items, worth);
  parallel_items(pieces, n, [&](int64_t i) { body(items * i / pieces, items * (i + 1) / pieces); });
}

}  // namespace llmc
