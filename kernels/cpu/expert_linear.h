// Routed experts: rows of x with the same expert are gathered, multiplied by its weight in one
// product, and scattered back. The product is that of the linear or the quantized_linear op.
#pragma once

#include "bindings.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace llmc::ops {

// x has a row for each result, or one for several consecutive results.
// multiply(rows, k) returns a contiguous [rows, channels]: rows of `x` for expert k, by its weight.
template <class Multiply>
Tensor by_expert(const Tensor& x, const Tensor& expert, int64_t experts, int64_t channels,
                 const Multiply& multiply) {
  TORCH_CHECK(x.dim() == 2 && expert.dim() == 1 &&
                  (x.size(0) ? expert.size(0) % x.size(0) == 0 : expert.size(0) == 0) &&
                  expert.scalar_type() == at::kLong,
              "x ", x.sizes(), " and its experts ", expert.sizes(), " do not fit together");
  const int64_t rows = expert.size(0), choices = rows / std::max<int64_t>(1, x.size(0));
  const Tensor input = x.contiguous(), picked = expert.contiguous();
  Tensor out = at::empty({rows, channels}, x.scalar_type());
  at::leave_out();  // the routing is read here, so the op can't be replayed
  const int64_t* e = picked.data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> of(experts);
  for (int64_t r = 0; r < rows; ++r)
    if (e[r] >= 0 && e[r] < experts) of[e[r]].push_back(r);
  const size_t in_bytes = input.size(1) * input.element_size();
  const size_t out_bytes = channels * out.element_size();
  const char* from = static_cast<const char*>(input.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  std::memset(to, 0, rows * out_bytes);
  for (int64_t k = 0; k < experts; ++k) {
    const auto& mine = of[k];
    if (mine.empty()) continue;
    Tensor gathered = at::empty({int64_t(mine.size()), input.size(1)}, x.scalar_type());
    char* row = static_cast<char*>(gathered.data_ptr());
    for (int64_t r : mine) {
      std::memcpy(row, from + r / choices * in_bytes, in_bytes);
      row += in_bytes;
    }
    const Tensor y = multiply(gathered, k);
    const char* result = static_cast<const char*>(y.data_ptr());
    for (int64_t r : mine) {
      std::memcpy(to + r * out_bytes, result, out_bytes);
      result += out_bytes;
    }
  }
  return out;
}

// Contiguous x times a weight [depth, channels].
inline Tensor by_columns(const Tensor& x, const Tensor& weight, const Tensor* bias) {
  Tensor kept;
  const Tensor& rows = at::dense_rows(weight, kept);
  Tensor out = at::empty({x.size(0), weight.size(1)}, x.scalar_type());
  kernels->linear_columns({dtype_of(x), x.data_ptr(), rows.data_ptr(),
                           bias ? bias->data_ptr() : nullptr, out.data_ptr(), x.size(0), x.size(1),
                           rows.size(1), x.stride(0), rows.stride(0), rows.size(1),
                           at::num_threads()});
  return out;
}

inline Tensor multiply_experts(const Tensor& x, const Tensor& weight,
                               const optional<Tensor>& bias, const Tensor& expert,
                               bool transposed) {
  TORCH_CHECK(weight.dim() == 3 && x.dim() == 2 && weight.size(transposed ? 1 : 2) == x.size(1),
              "expert_linear: x ", x.sizes(), " and weight ", weight.sizes(),
              " do not fit together");
  return by_expert(x, expert, weight.size(0), weight.size(transposed ? 2 : 1),
                   [&](const Tensor& rows, int64_t k) {
                     const optional<Tensor> b = bias ? optional(bias->select(k)) : std::nullopt;
                     const Tensor w = weight.select(k);
                     return transposed ? by_columns(rows, w, b ? &*b : nullptr)
                                       : linear(rows, w, b);
                   });
}

}  // namespace llmc::ops
