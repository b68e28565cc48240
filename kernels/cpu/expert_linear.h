// expert_linear: rows that picked the same expert are gathered, multiplied by its weight in one go,
// and put back. The product is the linear op of this library, or torch's.
#pragma once

#include "table.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <vector>

namespace llmc {

// x, which is dense, by a weight [depth, channels].
inline at::Tensor by_columns(Dtype dtype, const at::Tensor& x, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias) {
  const at::Tensor rows = weight.stride(1) == 1 ? weight : weight.contiguous();
  at::Tensor out = at::empty({x.size(0), weight.size(1)}, x.options());
  kernels->linear_columns({dtype, x.data_ptr(), rows.data_ptr(), bias ? bias->data_ptr() : nullptr,
                  out.data_ptr(), x.size(0), x.size(1), weight.size(1), x.stride(0),
                  weight.stride(0), weight.size(1),
                  at::in_parallel_region() ? 1 : at::get_num_threads()});
  return out;
}

// `multiply(x, weight, bias)` is the linear op for weights [channels, depth].
template <typename Linear>
at::Tensor expert_linear(const Linear& multiply, Dtype dtype, const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, const at::Tensor& expert,
                         bool transposed) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 3 && expert.dim() == 1 &&
                  expert.size(0) == x.size(0) && expert.scalar_type() == at::kLong &&
                  weight.size(transposed ? 1 : 2) == x.size(1),
              "expert_linear: x ", x.sizes(), ", weight ", weight.sizes(), " and expert ",
              expert.sizes(), " do not fit together");
  const int64_t experts = weight.size(0), rows = x.size(0);
  const int64_t channels = weight.size(transposed ? 2 : 1);
  const at::Tensor input = x.contiguous(), picked = expert.contiguous();
  at::Tensor out = at::zeros({rows, channels}, x.options());
  const int64_t* e = picked.data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> of(experts);
  for (int64_t r = 0; r < rows; ++r)
    if (e[r] >= 0 && e[r] < experts) of[e[r]].push_back(r);
  const size_t in_bytes = input.size(1) * input.element_size();
  const size_t out_bytes = channels * out.element_size();
  const char* from = static_cast<const char*>(input.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  for (int64_t k = 0; k < experts; ++k) {
    const auto& mine = of[k];
    if (mine.empty()) continue;
    at::Tensor gathered = at::empty({int64_t(mine.size()), input.size(1)}, x.options());
    char* row = static_cast<char*>(gathered.data_ptr());
    for (int64_t r : mine) {
      std::memcpy(row, from + r * in_bytes, in_bytes);
      row += in_bytes;
    }
    std::optional<at::Tensor> b;
    if (bias.has_value() && bias->defined()) b = bias->select(0, k);
    const at::Tensor w = weight.select(0, k);
    const at::Tensor y =
        transposed ? by_columns(dtype, gathered, w, b) : multiply(gathered, w, b).contiguous();
    const char* result = static_cast<const char*>(y.data_ptr());
    for (int64_t r : mine) {
      std::memcpy(to + r * out_bytes, result, out_bytes);
      result += out_bytes;
    }
  }
  return out;
}

}  // namespace llmc
