// Torch bindings of routed experts; quantized ones are in linear_bindings.cpp.
#include "expert_linear.h"

namespace llmc::ops {
namespace {

// Contiguous x times a weight [depth, channels].
Tensor by_columns(const Tensor& x, const Tensor& weight, const Tensor* bias) {
  Tensor kept;
  const Tensor& rows = at::dense_rows(weight, kept);
  Tensor out = at::empty({x.size(0), weight.size(1)}, x.scalar_type());
  kernels->linear_columns({dtype_of(x), x.data_ptr(), rows.data_ptr(),
                           bias ? bias->data_ptr() : nullptr, out.data_ptr(), x.size(0), x.size(1),
                           rows.size(1), x.stride(0), rows.stride(0), rows.size(1),
                           at::num_threads()});
  return out;
}

Tensor one_by_one(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                  const Tensor& expert, bool transposed) {
  return by_expert(x, expert, weight.size(0), weight.size(transposed ? 2 : 1),
                   [&](const Tensor& rows, int64_t k) {
                     const optional<Tensor> b = bias ? optional(bias->select(k)) : std::nullopt;
                     const Tensor w = weight.select(k);
                     return transposed ? by_columns(rows, w, b ? &*b : nullptr)
                                       : linear(rows, w, b);
                   });
}

// Whether the kernels take the arguments, with rows for any expert.
bool takes_rows(const LinearArgs& a, const Tensor& weight, const optional<Tensor>& bias,
                bool transposed) {
  const bool has_dense_bias = !bias || bias->size(1) == 1 || bias->stride(1) == 1;
  const bool is_dense = weight.stride(2) == 1 && has_dense_bias;
  return is_dense && a.rows > 0 && weight.numel() > 0 && (transposed || kernels->takes_linear(a));
}

Tensor expert_linear(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                     const Tensor& expert, bool transposed, const optional<Tensor>&,
                     const optional<Tensor>&,  // rows are gathered, not sorted
                     const optional<std::string>& act, optional<double> limit, double shift,
                     bool interleaved) {
  TORCH_CHECK(weight.dim() == 3 && x.dim() == 2 && weight.size(transposed ? 1 : 2) == x.size(1),
              "expert_linear: x ", x.sizes(), " and weight ", weight.sizes(),
              " do not fit together");
  TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "weight must be ", x.scalar_type(),
              ", got ", weight.scalar_type());
  check_experts(x, expert);
  const int64_t channels = weight.size(transposed ? 2 : 1);
  TORCH_CHECK(!bias || (bias->dim() == 2 && bias->size(0) == weight.size(0) &&
                        bias->size(1) == channels && bias->scalar_type() == x.scalar_type()),
              "bias must be [experts, ", channels, "] of ", x.scalar_type());
  const Tensor input = x.contiguous(), picked = expert.contiguous();
  LinearArgs a{dtype_of(x), input.data_ptr(), weight.data_ptr(), bias ? bias->data_ptr() : nullptr,
               nullptr, x.size(0), x.size(1), channels, x.size(1), weight.stride(1), channels,
               at::num_threads()};
  Tensor y;
  if (takes_rows(a, weight, bias, transposed)) {
    y = at::empty({expert.size(0), channels}, x.scalar_type());
    a.out = y.data_ptr();
    Routing routing = routing_of(x, picked, weight.size(0));
    routing.weight_bytes = expert_bytes(weight);
    routing.bias_bytes = expert_bytes(bias);
    kernels->expert_rows(a, routing, transposed);
  } else {
    y = one_by_one(x, weight, bias, expert, transposed);
  }
  if (act) return act_mul(y, *act, limit, shift, interleaved);
  return y;
}

Score score_named(const std::string& score) {
  TORCH_CHECK(score == "softmax" || score == "sigmoid" || score == "sqrt_softplus",
              "score must be softmax, sigmoid or sqrt_softplus, got ", score);
  return score == "softmax"   ? Score::softmax
         : score == "sigmoid" ? Score::sigmoid
                              : Score::sqrt_softplus;
}

std::tuple<Tensor, Tensor> choose_experts(const Tensor& given, const optional<Tensor>& slots,
                                          int64_t count, bool normalized, int32_t dtype,
                                          const optional<Tensor>& correction,
                                          const std::string& score, int64_t groups,
                                          int64_t kept_groups, double sum_eps, double factor,
                                          int64_t shared, bool gated) {
  TORCH_CHECK(shared >= gated, shared, " shared experts");
  TORCH_CHECK(given.dim() == 2 && count > 0 && count <= given.size(1) - gated * shared, "logits ",
              given.sizes(), " do not have ", count, " experts to choose");
  Tensor kept;
  const Tensor& logits = at::dense_rows(given, kept);
  const int64_t tokens = logits.size(0);
  TORCH_CHECK(!slots || (slots->dim() == 1 && slots->size(0) == tokens && slots->is_contiguous()),
              "slot_mapping must be dense and have a number for each of ", tokens, " tokens");
  const int64_t experts = logits.size(1) - gated * shared;
  TORCH_CHECK(!correction || (correction->dim() == 1 && correction->size(0) == experts &&
                              correction->is_contiguous()),
              "correction must be dense and have a number for each of ", experts, " experts");
  TORCH_CHECK(0 < kept_groups && kept_groups <= groups && experts % groups == 0 &&
                  (kept_groups == groups || experts >= 2 * groups) &&
                  count <= kept_groups * (experts / groups),
              count, " of ", experts, " experts cannot be chosen from ", kept_groups, " of ",
              groups, " groups");
  Tensor weight = at::empty({tokens, count + shared}, at::scalar_type_of(dtype));
  Tensor expert = at::empty({tokens, count + shared}, at::kLong);
  kernels->choose_experts({dtype_of(logits), dtype_of(weight, "the result"), logits.data_ptr(),
                           slots ? slots->data_ptr<int64_t>() : nullptr, weight.data_ptr(),
                           expert.data_ptr<int64_t>(), tokens, experts, logits.stride(0), count,
                           normalized, score_named(score),
                           correction ? dtype_of(*correction) : Dtype::f32,
                           correction ? correction->data_ptr() : nullptr, groups, kept_groups,
                           float(sum_eps), float(factor), shared, gated, at::num_threads()});
  return {std::move(weight), std::move(expert)};
}

Tensor sum_experts(const Tensor& rows, const Tensor& weight, int32_t dtype,
                   const optional<Tensor>& residual) {
  TORCH_CHECK(rows.dim() == 2 && weight.dim() == 2 && rows.size(0) == weight.numel(),
              "rows ", rows.sizes(), " and weight ", weight.sizes(), " do not fit together");
  const int64_t tokens = weight.size(0), width = rows.size(1);
  Tensor out = at::empty({tokens, width}, at::scalar_type_of(dtype));
  TORCH_CHECK(!residual || (residual->sizes() == out.sizes() &&
                            residual->scalar_type() == out.scalar_type()),
              "residual must be ", out.sizes(), " of ", out.scalar_type());
  const Tensor input = rows.contiguous(), shares = weight.contiguous();
  const optional<Tensor> addend = residual ? optional(residual->contiguous()) : std::nullopt;
  kernels->sum_experts({dtype_of(rows), dtype_of(weight), dtype_of(out, "the result"),
                        input.data_ptr(), shares.data_ptr(), addend ? addend->data_ptr() : nullptr,
                        out.data_ptr(), tokens, weight.size(1), width, at::num_threads()});
  return out;
}

const at::Ops kOps = {
    {"expert_linear", &at::boxed<&expert_linear>},
    {"choose_experts", &at::boxed<&choose_experts>},
    {"sum_experts", &at::boxed<&sum_experts>},
};

}  // namespace
}  // namespace llmc::ops
