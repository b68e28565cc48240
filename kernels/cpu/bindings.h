// Shared by the bindings: dtypes of tensors, and ops that other ops are composed of.
#pragma once

#include "recording.h"

namespace llmc {

namespace at = aten;
using at::Tensor;
using std::optional;

inline Dtype dtype_of(const Tensor& t, const char* name = "llmc_cpu's input") {
  if (t.scalar_type() == at::kFloat) return Dtype::f32;
  if (t.scalar_type() == at::kBFloat16) return Dtype::bf16;
  if (t.scalar_type() == at::kHalf) return Dtype::f16;
  at::fail({name, " must be float32, bfloat16 or float16, got ", t.scalar_type()});
}

namespace ops {

Tensor rms_norm(const Tensor& x, const optional<Tensor>& weight, double eps, double offset);
Tensor layer_norm(const Tensor& x, const optional<Tensor>& weight, const optional<Tensor>& bias,
                  double eps);
Tensor gated_norm(const Tensor& x, const Tensor& gate, const optional<Tensor>& weight, double eps,
                  double offset, const std::string& act, bool gate_first, int64_t group,
                  at::ScalarType dtype);
Tensor activate(const Tensor& x, const std::string& act);
Tensor act_mul(const Tensor& gate_up, const std::string& act, optional<double> limit = {},
               double shift = 0, bool interleaved = false);
Tensor linear(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias);
// x [B, M, K] times mat2 [B, K, N] to `out` [B, M, N] with contiguous rows. Matrices of `mat2` are
// stored like weights, [channels, depth], or transposed.
void multiply(const Tensor& x, const Tensor& mat2, const Tensor& out);
Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& query_start, const Tensor& context_len,
                       const Tensor& block_table, double scale, int64_t window, int64_t chunk,
                       double softcap, const optional<Tensor>& sinks,
                       const optional<Tensor>& slopes, const optional<Tensor>& k_scale,
                       const optional<Tensor>& v_scale, const optional<Tensor>& prompts,
                       const optional<Tensor>& chosen, int64_t sparse_block_size, int64_t v_dim,
                       const optional<Tensor>& distance_bias);

void check(const Tensor& t, const char* name, at::ScalarType dtype, int64_t dims);
// The elements of a tensor whose first dimension has `at_least` or more.
template <class T>
T* dense(const Tensor& t, const char* name, int64_t dims, int64_t at_least) {
  check(t, name, at::type_of<T>, dims);
  TORCH_CHECK(t.size(0) >= at_least, name, " must have at least ", at_least, " rows, got ",
              t.size(0));
  return t.data_ptr<T>();
}
Dtype cache_dtype_of(const Tensor& t, const Tensor& beside);
const void* vector_or_null(const optional<Tensor>& t, const char* name, const Tensor& like,
                           int64_t size);

}  // namespace ops
}  // namespace llmc
