// Work over threads on the OpenMP runtime that torch already runs (one runtime in the process).
#pragma once

#include <atomic>
#include <cstdint>

namespace llmc {

// A parallel region costs several microseconds: below this much work it is not worth one.
constexpr int64_t kSerialCost = 60000;  // in units of about a clock cycle per 4 elements

inline int worth_threads(int64_t cost, int64_t items, int threads) {
  int64_t useful = cost / kSerialCost + 1;
  if (useful > items) useful = items;
  return static_cast<int>(useful < threads ? useful : threads);
}

// body(begin, end) over even shares of `items` rows; `cost` is that of one row.
template <class Body>
void parallel_rows(int64_t items, int64_t cost, int threads, const Body& body) {
  const int n = worth_threads(items * cost, items, threads);
  if (n <= 1) {
    if (items > 0) body(0, items);
    return;
  }
#pragma omp parallel for num_threads(n) schedule(static, 1)
  for (int t = 0; t < n; ++t) {
    const int64_t begin = items * t / n, end = items * (t + 1) / n;
    if (begin < end) body(begin, end);
  }
}

// body(item) one at a time from a shared counter: for items of unequal cost.
template <class Body>
void parallel_items(int64_t items, int threads, const Body& body) {
  if (threads <= 1 || items <= 1) {
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  for (int64_t i = next++; i < items; i = next++) body(i);
}

}  // namespace llmc
