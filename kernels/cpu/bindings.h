// What the bindings share: dtypes of tensors, and the ops that others are made of.
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
  at::fail(name, " must be float32, bfloat16 or float16, got ", t.scalar_type());
}

namespace ops {

Tensor rms_norm(const Tensor& x, const optional<Tensor>& weight, double eps, double offset);
Tensor act_mul(const Tensor& gate_up, const std::string& act);
Tensor linear(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias);

}  // namespace ops
}  // namespace llmc
