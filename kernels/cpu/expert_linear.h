// Routed experts as one product for each, which is that of the linear or the quantized_linear op:
// for tiles, whose products can be torch's, and weights that have to be copied. All others are for
// the kernels of experts.h.
#pragma once

#include "bindings.h"
#include "experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace llmc::ops {

// x [T, depth] and expert [T * choices]; the caller adds the bytes between experts.
inline Routing routing_of(const Tensor& x, const Tensor& expert, int64_t experts) {
  return {expert.data_ptr<int64_t>(), expert.size(0), expert.size(0) / x.size(0), experts};
}

inline int64_t expert_bytes(const Tensor& t) {  // between two experts
  return t.stride(0) * t.element_size();
}
inline int64_t expert_bytes(const optional<Tensor>& t) {
  return t ? expert_bytes(*t) : 0;
}

inline void check_experts(const Tensor& x, const Tensor& expert) {
  TORCH_CHECK(x.dim() == 2 && expert.dim() == 1 &&
                  (x.size(0) ? expert.size(0) % x.size(0) == 0 : expert.size(0) == 0) &&
                  expert.scalar_type() == at::kLong,
              "x ", x.sizes(), " and its experts ", expert.sizes(), " do not fit together");
}

// x has a row for each result, or one for several consecutive results (check_experts).
// multiply(rows, k) returns a contiguous [rows, channels]: rows of `x` for expert k, by its weight.
template <class Multiply>
Tensor by_expert(const Tensor& x, const Tensor& expert, int64_t experts, int64_t channels,
                 const Multiply& multiply) {
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

}  // namespace llmc::ops
