// The torch side of low-bit linears, and the linear with what surrounds it, made of other ops.
#include "low_bit.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using std::optional;

constexpr int64_t kFewRows = 16;        // more are multiplied by tiles, where there are any,
constexpr int64_t kFewPairRows = 4;     // and by pairs of bf16 where there are none
constexpr int64_t kWidened = 1 << 20;   // bytes of bf16 weight at a time: the caches hold them

llmc::Format format_of(const Tensor& weight) {
  switch (weight.scalar_type()) {
    case at::kChar: return llmc::Format::int8;
    case at::kByte: return llmc::Format::int4;
    case at::kFloat8_e4m3fn: return llmc::Format::fp8;
    default:
      TORCH_CHECK(false, "weight must be int8, uint8 or float8_e4m3fn, got ",
                  weight.scalar_type());
  }
}

const void* bias_data(const optional<Tensor>& bias, const Tensor& x, int64_t channels) {
  if (!bias.has_value() || !bias->defined()) return nullptr;
  TORCH_CHECK(bias->scalar_type() == x.scalar_type() && bias->is_contiguous() &&
                  bias->dim() == 1 && bias->size(0) == channels,
              "bias must be a dense [", channels, "] of ", x.scalar_type(), ", got ",
              bias->sizes(), " of ", bias->scalar_type());
  return bias->data_ptr();
}

void check_scales(const Tensor& weight, const Tensor& scale, const optional<Tensor>& zero,
                  const llmc::LowBitArgs& a) {
  const bool is_int4 = a.format == llmc::Format::int4;
  TORCH_CHECK(scale.dim() == 3 && scale.is_contiguous() && scale.size(0) == weight.size(0) &&
                  scale.size(2) == llmc::kChannels && scale.size(1) > 0 &&
                  a.depth % (scale.size(1) * 32) == 0,
              "scale ", scale.sizes(), " does not fit weight ", weight.sizes());
  TORCH_CHECK(scale.scalar_type() == at::kFloat || (is_int4 && scale.scalar_type() == at::kBFloat16),
              "scale must be float32 (or bfloat16 for uint8 weights), got ", scale.scalar_type());
  TORCH_CHECK(!zero || (is_int4 && zero->scalar_type() == at::kByte && zero->is_contiguous() &&
                        zero->sizes() == scale.sizes()),
              "zero must be uint8, like scale, and comes with uint8 weights only");
}

llmc::LowBitArgs make_args(const Tensor& x, const Tensor& weight, const Tensor& scale,
                           const optional<Tensor>& zero, const optional<Tensor>& bias,
                           const optional<Tensor>& minimum) {
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
              "llmc_cpu takes float32 or bfloat16, got ", x.scalar_type());
  TORCH_CHECK(weight.dim() == 3 && weight.size(2) == llmc::kLineBytes && weight.is_contiguous(),
              "weight must be a dense [N / 16, lines, 64], got ", weight.sizes());
  llmc::LowBitArgs a{};
  a.dtype = x.scalar_type() == at::kFloat ? llmc::Dtype::f32 : llmc::Dtype::bf16;
  a.format = format_of(weight);
  a.depth = weight.size(1) * (a.format == llmc::Format::int4 ? 8 : 4);
  a.channels = weight.size(0) * llmc::kChannels;
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == a.depth && a.depth > 0, "weight ", weight.sizes(),
              " has ", a.depth, " inputs and does not fit x ", x.sizes());
  check_scales(weight, scale, zero, a);
  a.group = a.depth / scale.size(1);
  a.x = x.data_ptr();
  a.x_stride = a.depth;
  a.rows = x.numel() / a.depth;
  a.weight = static_cast<const uint8_t*>(weight.data_ptr());
  a.scale = scale.data_ptr();
  a.scale_dtype = scale.scalar_type() == at::kFloat ? llmc::Dtype::f32 : llmc::Dtype::bf16;
  a.zero = zero ? zero->data_ptr<uint8_t>() : nullptr;
  a.bias = bias_data(bias, x, a.channels);
  TORCH_CHECK(!minimum || (!zero && a.format != llmc::Format::fp8 && minimum->is_contiguous() &&
                           minimum->scalar_type() == at::kFloat && minimum->sizes() == scale.sizes()),
              "minimum must be float32, like scale, and comes with integers without zero only");
  a.minimum = minimum ? minimum->data_ptr<float>() : nullptr;
  a.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return a;
}

// Many rows: stretches of the weight, widened, by a linear; the library's where it is the faster.
void by_stretches(const llmc::LowBitArgs& a, const Tensor& x, const optional<Tensor>& bias,
                  Tensor out) {
  Tensor reordered = at::empty({a.rows, a.depth}, x.options());
  llmc::reorder_x(a, reinterpret_cast<llmc::bf16*>(reordered.data_ptr()));
  const int64_t step = std::max<int64_t>(64, kWidened / (2 * a.depth) / 64 * 64);
  Tensor widened = at::empty({std::min(step, a.channels), a.depth}, x.options());
  out = out.view({a.rows, a.channels});
  for (int64_t n = 0; n < a.channels; n += step) {
    const int64_t count = std::min(step, a.channels - n);
    llmc::widen(a, n, n + count, reinterpret_cast<llmc::bf16*>(widened.data_ptr()));
    const optional<Tensor> part = a.bias ? optional(bias->narrow(0, n, count)) : std::nullopt;
    Tensor to = out.narrow(1, n, count);
    const llmc::LinearArgs product{reordered.data_ptr(), widened.data_ptr(),
                                   part ? part->data_ptr() : nullptr, to.data_ptr(), a.rows,
                                   a.depth, count, a.depth, a.depth, a.channels, a.threads};
    if (llmc::takes_linear(product))
      llmc::linear(product);
    else
      to.copy_(at::linear(reordered, widened.narrow(0, 0, count), part));
  }
}

Tensor quantized_linear(const Tensor& x, const Tensor& weight, const Tensor& scale,
                        const optional<Tensor>& zero, const optional<Tensor>& bias,
                        const optional<Tensor>& minimum) {
  const Tensor input = x.contiguous();
  llmc::LowBitArgs a = make_args(input, weight, scale, zero, bias, minimum);
  auto sizes = x.sizes().vec();
  sizes.back() = a.channels;
  Tensor out = at::empty(sizes, x.options());
  if (out.numel() == 0) return out;
  a.out = out.data_ptr();
  const bool is_bf16 = a.dtype == llmc::Dtype::bf16;
  if (is_bf16 && a.rows > kFewRows && llmc::widens_weights())
    by_stretches(a, input, bias, out);
  else if (is_bf16 && !a.minimum && a.rows > kFewPairRows && llmc::has_pair_rows())
    llmc::quantized_pair_rows(a);
  else
    llmc::quantized_linear(a);
  return out;
}

template <class Signature>
auto op_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensor fused_linear(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                    const optional<Tensor>& norm_weight, optional<double> eps, double offset,
                    optional<c10::string_view> act, const optional<Tensor>& residual) {
  static const auto norm =
      op_of<Tensor(const Tensor&, const optional<Tensor>&, double, double)>("llmc_cpu::rms_norm");
  static const auto linear =
      op_of<Tensor(const Tensor&, const Tensor&, const optional<Tensor>&)>("llmc_cpu::linear");
  static const auto act_mul = op_of<Tensor(const Tensor&, c10::string_view)>("llmc_cpu::act_mul");
  Tensor y = linear.call(eps ? norm.call(x, norm_weight, *eps, offset) : x, weight, bias);
  if (act) y = act_mul.call(y, *act);
  return residual ? y.add_(*residual) : y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(llmc_cpu, m) {
  m.def(
      "quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? bias, "
      "Tensor? minimum=None) -> Tensor");
  m.def(
      "fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, float? eps, "
      "float offset, str? act, Tensor? residual) -> Tensor");
}

TORCH_LIBRARY_IMPL(llmc_cpu, CPU, m) {
  m.impl("quantized_linear", &quantized_linear);
  m.impl("fused_linear", &fused_linear);
}
