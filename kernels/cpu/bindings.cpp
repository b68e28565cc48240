// Torch bindings: checks of everything that the kernels assume, and outputs. Norms, linears,
// sampling.
#include "bindings.h"

#include "dtypes.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

namespace llmc::ops {

Dtype cache_dtype_of(const Tensor& t, const Tensor& beside) {
  if (t.scalar_type() == at::kFloat8_e4m3fn) return Dtype::e4m3;
  if (t.scalar_type() == at::kFloat8_e5m2) return Dtype::e5m2;
  if (t.scalar_type() == at::kChar) return Dtype::i8;
  const Dtype own = dtype_of(t), of_inputs = dtype_of(beside);
  TORCH_CHECK(own == of_inputs || of_inputs == Dtype::f32, "a cache must be ",
              beside.scalar_type(), " or narrower, got ", t.scalar_type());
  return own;
}

void check(const Tensor& t, const char* name, at::ScalarType dtype, int64_t dims) {
  TORCH_CHECK(t.scalar_type() == dtype, name, " must be ", dtype, ", got ", t.scalar_type());
  TORCH_CHECK(t.dim() == dims, name, " must have ", dims, " dimensions, got ", t.sizes());
  TORCH_CHECK(t.numel() == 0 || t.size(-1) == 1 || t.stride(-1) == 1, name,
              " must have a dense last dimension, got strides ", t.strides());
}

namespace {

// A tensor as rows of its last dimension; copies to `kept` only if the outer dimensions can't be
// expressed with three strides.
Rows rows_of(const Tensor& given, Tensor& kept) {
  TORCH_CHECK(given.dim() >= 1, "a row op needs at least one dimension");
  const Tensor& t = at::dense_rows(given, kept);
  Rows rows{nullptr, {1, 1, 1}, {0, 0, 0}};
  int used = 3;
  for (int64_t d = t.dim() - 2; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (used < 3 && t.stride(d) == rows.stride[used] * rows.size[used]) {
      rows.size[used] *= t.size(d);  // one stride covers both dimensions
      continue;
    }
    if (used == 0) {
      kept = t.contiguous();
      return rows_of(kept, kept);
    }
    --used;
    rows.size[used] = t.size(d);
    rows.stride[used] = t.stride(d);
  }
  rows.data = t.data_ptr();
  return rows;
}

// The rows of two tensors of one shape, in the same order.
std::pair<Rows, Rows> alike(const Tensor& a, const Tensor& b, Tensor& kept_a, Tensor& kept_b) {
  Rows a_rows = rows_of(a, kept_a), b_rows = rows_of(b, kept_b);
  for (int d = 0; d < 3; ++d)
    if (a_rows.size[d] != b_rows.size[d]) {  // folded differently: make both contiguous
      kept_a = a.contiguous(), kept_b = b.contiguous();
      a_rows = rows_of(kept_a, kept_a), b_rows = rows_of(kept_b, kept_b);
    }
  return {a_rows, b_rows};
}

}  // namespace

const void* vector_or_null(const optional<Tensor>& t, const char* name, const Tensor& like,
                           int64_t size) {
  if (!t.has_value() || !t->defined()) return nullptr;
  check(*t, name, like.scalar_type(), 1);
  TORCH_CHECK(t->size(0) == size, name, " must have ", size, " elements, got ", t->size(0));
  return t->data_ptr();
}

Tensor rms_norm(const Tensor& x, const optional<Tensor>& weight, double eps, double offset) {
  Tensor kept, out = at::empty(x.sizes(), x.scalar_type());
  if (x.numel() == 0) return out;
  kernels->norm({dtype_of(x), rows_of(x, kept), {},
                 vector_or_null(weight, "weight", x, x.size(-1)), out.data_ptr(), nullptr,
                 x.size(-1), float(eps), float(offset), at::num_threads()});
  return out;
}

Tensor layer_norm(const Tensor& x, const optional<Tensor>& weight, const optional<Tensor>& bias,
                  double eps) {
  Tensor kept, out = at::empty(x.sizes(), x.scalar_type());
  if (x.numel() == 0) return out;
  const int64_t width = x.size(-1);
  kernels->norm({dtype_of(x), rows_of(x, kept), {}, vector_or_null(weight, "weight", x, width),
                 out.data_ptr(), nullptr, width, float(eps), 0, at::num_threads(), true,
                 vector_or_null(bias, "bias", x, width)});
  return out;
}

namespace {

// Fills in the rows, the sum and the sizes of `a`; returns the sum.
Tensor add_and_norm(const Tensor& x, const Tensor& residual, NormArgs a) {
  TORCH_CHECK(x.sizes() == residual.sizes() && x.scalar_type() == residual.scalar_type(),
              "x and residual must be alike");
  Tensor sum = at::empty(x.sizes(), x.scalar_type());
  if (x.numel() == 0) return sum;
  Tensor kept_x, kept_residual;
  std::tie(a.x, a.residual) = alike(x, residual, kept_x, kept_residual);
  a.dtype = dtype_of(x), a.sum = sum.data_ptr(), a.width = x.size(-1);
  a.threads = at::num_threads();
  kernels->norm(a);
  return sum;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const optional<Tensor>& weight, double eps,
                                        double offset) {
  Tensor out = at::empty(x.sizes(), x.scalar_type());
  NormArgs a{};
  a.weight = vector_or_null(weight, "weight", x, x.size(-1)), a.out = out.data_ptr();
  a.eps = float(eps), a.offset = float(offset);
  Tensor sum = add_and_norm(x, residual, a);
  return {std::move(out), std::move(sum)};
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const optional<Tensor>& weight,
                                          const optional<Tensor>& bias, double eps) {
  Tensor out = at::empty(x.sizes(), x.scalar_type());
  NormArgs a{};
  a.weight = vector_or_null(weight, "weight", x, x.size(-1)), a.out = out.data_ptr();
  a.bias = vector_or_null(bias, "bias", x, x.size(-1)), a.centered = true, a.eps = float(eps);
  Tensor sum = add_and_norm(x, residual, a);
  return {std::move(out), std::move(sum)};
}

NormArgs norm_of_x(const Tensor& x, const optional<Tensor>& weight, double eps, double offset) {
  NormArgs a{};
  a.norms_x = true;
  a.x_weight = vector_or_null(weight, "weight", x, x.size(-1));
  a.x_eps = float(eps), a.x_offset = float(offset);
  return a;
}

Tensor norm_add(const Tensor& x, const Tensor& residual, const optional<Tensor>& weight, double eps,
                double offset) {
  return add_and_norm(x, residual, norm_of_x(x, weight, eps, offset));
}

std::tuple<Tensor, Tensor> norm_add_norm(const Tensor& x, const Tensor& residual,
                                         const optional<Tensor>& weight, double eps, double offset,
                                         const optional<Tensor>& next_weight, double next_eps,
                                         double next_offset) {
  Tensor out = at::empty(x.sizes(), x.scalar_type());
  NormArgs a = norm_of_x(x, weight, eps, offset);
  a.weight = vector_or_null(next_weight, "next_weight", x, x.size(-1)), a.out = out.data_ptr();
  a.eps = float(next_eps), a.offset = float(next_offset);
  Tensor sum = add_and_norm(x, residual, a);
  return {std::move(out), std::move(sum)};
}

}  // namespace

Tensor gated_norm(const Tensor& x, const Tensor& gate, const optional<Tensor>& weight, double eps,
                  double offset, const std::string& act, bool gate_first, int64_t group,
                  at::ScalarType dtype) {
  const int64_t width = x.size(-1);
  TORCH_CHECK(x.sizes() == gate.sizes(), "gate ", gate.sizes(), " does not fit x ", x.sizes());
  TORCH_CHECK(group > 0 && width % group == 0, "groups of ", group, " do not divide ", width);
  TORCH_CHECK(act == "silu" || act == "sigmoid", "act must be silu or sigmoid, got ", act);
  const bool weighted = weight.has_value() && weight->defined();
  TORCH_CHECK(!weighted || (weight->dim() == 1 && weight->size(0) == width &&
                            (width == 1 || weight->stride(0) == 1)),
              "weight must be a dense [", width, "]");
  Tensor out = at::empty(x.sizes(), dtype);
  if (x.numel() == 0) return out;
  Tensor kept_x, kept_gate;
  const auto [x_rows, gate_rows] = alike(x, gate, kept_x, kept_gate);
  kernels->gated_rms_norm({x_rows, gate_rows, dtype_of(x), dtype_of(gate),
                           dtype_of(weighted ? *weight : x), dtype_of(out, "the result"),
                           weighted ? weight->data_ptr() : nullptr, out.data_ptr(), width, group,
                           float(eps), float(offset), act == "silu", gate_first,
                           at::num_threads()});
  return out;
}

namespace {

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const optional<Tensor>& weight,
                      double eps, double offset, const std::string& act, bool gate_first,
                      int64_t group, int32_t dtype) {
  return gated_norm(x, gate, weight, eps, offset, act, gate_first, group,
                    at::scalar_type_of(dtype));
}

Act act_named(const std::string& act) {
  static constexpr std::pair<const char*, Act> kActs[] = {
      {"silu", Act::silu}, {"gelu", Act::gelu}, {"gelu_tanh", Act::gelu_tanh},
      {"quick_gelu", Act::quick_gelu}, {"relu", Act::relu}, {"relu2", Act::relu2}};
  for (const auto& [name, kind] : kActs)
    if (act == name) return kind;
  TORCH_CHECK(false, "act must be silu, gelu, gelu_tanh, quick_gelu, relu or relu2, got ", act);
}

}  // namespace

Tensor activate(const Tensor& x, const std::string& act) {
  const Act kind = act_named(act);
  Tensor kept, out = at::empty(x.sizes(), x.scalar_type());
  if (out.numel() == 0) return out;
  ActArgs a{dtype_of(x), kind, rows_of(x, kept), out.data_ptr(), x.size(-1), at::num_threads()};
  a.gated = false;
  kernels->act_mul(a);
  return out;
}

Tensor act_mul(const Tensor& gate_up, const std::string& act, optional<double> limit,
               double shift, bool interleaved) {
  TORCH_CHECK(gate_up.size(-1) % 2 == 0, "gate_up must have an even width, got ", gate_up.sizes());
  const Act kind = act_named(act);
  auto sizes = gate_up.sizes().vec();
  sizes.back() /= 2;
  Tensor kept, out = at::empty(sizes, gate_up.scalar_type());
  if (out.numel() == 0) return out;
  ActArgs a{dtype_of(gate_up), kind, rows_of(gate_up, kept), out.data_ptr(), sizes.back(),
            at::num_threads()};
  if (limit) a.limit = float(*limit);
  a.shift = float(shift);
  a.interleaved = interleaved;
  kernels->act_mul(a);
  return out;
}

namespace {

// x if its rows fill whole tiles, else a view of a copy with zeros past their ends: oneDNN's tiles
// multiply the memory there by zero, so a NaN would propagate.
const Tensor& zero_padded(const Tensor& x, Tensor& kept) {
  const int64_t depth = x.size(-1), past = (32 - depth % 32) % 32;
  if (past == 0) return x;
  auto sizes = x.sizes().vec();
  sizes.back() += past;
  Tensor padded = at::empty(sizes, x.scalar_type());
  at::leave_out();
  char* end = static_cast<char*>(padded.data_ptr()) + depth * x.element_size();
  const int64_t rows = x.numel() / depth;
  for (int64_t i = 0; i < rows; ++i)
    std::memset(end + i * (depth + past) * x.element_size(), 0, past * x.element_size());
  Tensor view = padded.narrow(x.dim() - 1, 0, depth);
  view.copy_(x);
  return kept = std::move(view);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& stored, const optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() >= 1 && stored.dim() == 2 && x.size(-1) == stored.size(1),
              "weight ", stored.sizes(), " does not fit x ", x.sizes());
  if (x.numel() == 0 || stored.numel() == 0) return at::torch_linear(x, stored, bias ? &*bias : nullptr);
  Tensor dense, kept;
  const bool by_columns = stored.stride(1) != 1 && stored.stride(0) == 1;
  const Tensor& weight = by_columns ? stored : at::dense_rows(stored, dense);
  TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "weight must be ", x.scalar_type(),
              ", got ", weight.scalar_type());
  Rows rows = rows_of(x, kept);
  if (rows.size[0] != 1 || rows.size[1] != 1) {
    kept = x.contiguous();
    rows = rows_of(kept, kept);
  }
  const optional<Tensor> b = bias ? optional(bias->contiguous()) : std::nullopt;
  LinearArgs a{dtype_of(x), rows.data, weight.data_ptr(),
               vector_or_null(b, "bias", x, weight.size(0)), nullptr, rows.size[2], x.size(-1),
               weight.size(0), rows.stride[2], weight.stride(by_columns ? 1 : 0), weight.size(0),
               at::num_threads()};
  if (!by_columns && !kernels->takes_linear(a))
    return at::torch_linear(zero_padded(x, kept), weight, b ? &*b : nullptr);
  auto sizes = x.sizes().vec();
  sizes.back() = a.channels;
  Tensor out = at::empty(sizes, x.scalar_type());
  a.out = out.data_ptr();
  by_columns ? kernels->linear_columns(a) : kernels->linear(a);
  return out;
}

namespace {

void add_lora(const Tensor& out, const Tensor& x, const Tensor& a, const Tensor& b,
              const Tensor& bounds, const Tensor& adapter, const optional<Tensor>& expert) {
  const int64_t rows = expert ? expert->numel() : adapter.numel();
  const int64_t experts = expert ? a.size(1) : 1, parts = expert ? 1 : a.size(1);
  const int64_t tokens = adapter.numel(), choices = std::max<int64_t>(1, tokens ? rows / tokens : 1);
  TORCH_CHECK(a.dim() == 4 && b.dim() == (expert ? 4 : 3) && a.size(0) == b.size(0) &&
                  (!expert || b.size(1) == experts) && a.size(2) == b.size(-2) &&
                  bounds.numel() == parts + 1 && x.dim() >= 1 && out.dim() >= 1 &&
                  x.size(-1) == a.size(3) && out.size(-1) == b.size(-1) &&
                  rows == tokens * choices && x.numel() == rows * x.size(-1) &&
                  out.numel() == rows * out.size(-1),
              "add_lora: out ", out.sizes(), ", x ", x.sizes(), ", a ", a.sizes(), ", b ",
              b.sizes(), ", bounds ", bounds.sizes(), ", adapter ", adapter.sizes(), " and ", rows,
              " rows do not fit together");
  TORCH_CHECK(out.is_contiguous() && a.is_contiguous() && b.is_contiguous() &&
                  bounds.is_contiguous() && adapter.is_contiguous(),
              "add_lora: out, a, b, bounds and adapter must be dense");
  TORCH_CHECK(!expert || (expert->is_contiguous() && expert->scalar_type() == at::kLong),
              "add_lora: expert must be dense and int64");
  TORCH_CHECK(out.scalar_type() == x.scalar_type() && a.scalar_type() == x.scalar_type() &&
                  b.scalar_type() == x.scalar_type(),
              "add_lora: out, a and b must be ", x.scalar_type(), " like x");
  const int32_t* edges = bounds.data_ptr<int32_t>();
  for (int64_t p = 0; p <= parts; ++p)
    TORCH_CHECK(edges[p] >= (p ? edges[p - 1] : 0) && edges[p] <= b.size(-1),
                "add_lora: bounds must rise from 0 to ", b.size(-1));
  const Tensor input = x.contiguous();
  kernels->add_lora({dtype_of(x), input.data_ptr(), a.data_ptr(), b.data_ptr(), out.data_ptr(),
                     edges, adapter.data_ptr<int32_t>(),
                     expert ? expert->data_ptr<int64_t>() : nullptr, rows, x.size(-1), out.size(-1),
                     a.size(0), experts, choices, parts, a.size(2),
                     at::num_threads()});
}

const at::Ops kOps = {
    {"rms_norm", &at::boxed<&rms_norm>},
    {"add_rms_norm", &at::boxed<&add_rms_norm>},
    {"norm_add", &at::boxed<&norm_add>},
    {"norm_add_norm", &at::boxed<&norm_add_norm>},
    {"gated_rms_norm", &at::boxed<&gated_rms_norm>},
    {"layer_norm", &at::boxed<&layer_norm>},
    {"add_layer_norm", &at::boxed<&add_layer_norm>},
    {"act_mul", &at::boxed<&act_mul>},
    {"activate", &at::boxed<&activate>},
    {"linear", &at::boxed<&linear>},
    {"add_lora", &at::boxed<&add_lora>},
};

}  // namespace
}  // namespace llmc::ops
