// Internals of the linear op. A share is a range of output channels that one thread computes for
// all rows of x, so that each thread reads its own part of the weight, once.
#pragma once

#include "kernels.h"
#include "vec.h"

#include <algorithm>

namespace llmc {

inline const bf16* weight_row(const LinearArgs& a, int64_t n) {
  return static_cast<const bf16*>(a.weight) + n * a.weight_stride;
}

inline const bf16* x_row(const LinearArgs& a, int64_t m) {
  return static_cast<const bf16*>(a.x) + m * a.x_stride;
}

inline bf16* out_row(const LinearArgs& a, int64_t m) {
  return static_cast<bf16*>(a.out) + m * a.out_stride;
}

inline float bias_of(const LinearArgs& a, int64_t n) {
  return a.bias ? to_float(static_cast<const bf16*>(a.bias)[n]) : 0.0f;
}

void linear_dot(const LinearArgs&);  // for few rows, of any dtype
// Channels [begin, end) for `rows` rows of bf16 from `row` on, by dot products.
void dot_share(const LinearArgs&, int64_t row, int64_t rows, int64_t begin, int64_t end);

void few_columns(const LinearArgs&);  // linear_columns for few rows, of any dtype
void linear_amx(const LinearArgs&);  // requires amx_ready()
bool has_pairs();                    // the CPU has dot products of bf16 pairs
void linear_pairs(const LinearArgs&);

}  // namespace llmc
