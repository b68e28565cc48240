// The product of a row with a Hadamard matrix: `rotate` in cache_dtype.py.
#pragma once

#include "vec.h"

#include <algorithm>
#include <cmath>

namespace llmc {

// x [dim] in place; dim is a multiple of 4.
inline void rotate_row(float* x, int64_t dim) {
  const int64_t size = dim & -dim;
  for (int64_t step = 1; step < size; step *= 2)
    for (int64_t first = 0; first < dim; first += 2 * step)
      for (int64_t i = first; i < first + step; ++i) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
  const float scale = 1 / std::sqrt(float(size));
  for (int64_t i = 0; i < dim; ++i) x[i] *= scale;
}

// to [dim] = the rotated row.
template <class T>
void rotate_row(const T* row, int64_t dim, float* to) {
  for (int64_t i = 0; i < dim; ++i) to[i] = to_float(row[i]);
  rotate_row(to, dim);
}

}  // namespace llmc
