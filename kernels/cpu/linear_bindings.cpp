// Torch bindings of quantized linears, and of fused_linear, which is composed of other ops.
#include "expert_linear.h"

namespace llmc::ops {
namespace {

constexpr int64_t kFewRows = 16;        // more rows use tiles, if the CPU has them
constexpr int64_t kWidened = 1 << 20;   // bytes of bf16 weight at a time: they fit in the caches

Format format_of(const Tensor& weight, const Tensor& scale) {
  const auto has_lines = [&](int64_t lines) { return weight.size(2) == lines * kLineBytes; };
  if (weight.scalar_type() == at::kChar)
    return has_lines(2) ? Format::iq2 : has_lines(4) ? Format::iq3_xxs : Format::int8;
  for (Format format : {Format::iq4, Format::iq3_s, Format::int6, Format::int5})
    if (weight.scalar_type() == at::kByte && has_lines(layout_of(format).lines)) return format;
  if (weight.scalar_type() == at::kByte)
    return scale.scalar_type() == at::kByte ? Format::mxfp4 : Format::int4;
  if (weight.scalar_type() == at::kFloat8_e4m3fn) return Format::fp8;
  if (weight.scalar_type() == at::kFloat8_e5m2) return Format::nvfp4;
  at::fail({"weight must be int8, uint8, float8_e4m3fn or float8_e5m2, got ", weight.scalar_type()});
}

const void* bias_data(const optional<Tensor>& bias, const Tensor& x, int64_t channels) {
  if (!bias.has_value() || !bias->defined()) return nullptr;
  TORCH_CHECK(bias->scalar_type() == x.scalar_type() && bias->is_contiguous() &&
                  bias->dim() == 1 && bias->size(0) == channels,
              "bias must be a dense [", channels, "] of ", x.scalar_type(), ", got ",
              bias->sizes(), " of ", bias->scalar_type());
  return bias->data_ptr();
}

// Groups are multiples of this, so that kernels read whole lines for each.
int64_t least_group(const LowBitArgs& a) {
  return std::max<int64_t>(kMinGroup, layout_of(a.stored).inputs);
}

// Superblocks of scales and any minimums: the group and the number of parts, from the words of each.
void set_superblocks(const Tensor& weight, const Tensor& scale, const optional<Tensor>& zero,
                     const optional<Tensor>& minimum, LowBitArgs& a) {
  const int64_t count = a.depth / kSuperblock;
  const bool is_whole = scale.dim() == 3 && scale.is_contiguous() && count > 0 &&
                        scale.size(0) == weight.size(0) && scale.size(2) == kChannels &&
                        a.depth % kSuperblock == 0 && scale.size(1) % count == 0;
  const bool is_table = a.format == Format::table;  // which has no minimums
  const bool is_integers = a.format == Format::int8 || a.format == Format::int4 || is_table;
  for (int64_t group : {16, 32})
    for (int parts : {1, 2})
      if (is_whole && group % least_group(a) == 0 && !(is_table && parts == 2) &&
          scale.size(1) / count == (1 + kSuperblock / group / 2) * parts)
        a.group = group, a.groups = a.depth / group, a.superblock_parts = parts;
  TORCH_CHECK(a.superblock_parts && is_integers && !zero && !minimum, "scale ", scale.sizes(),
              " of int16 is not dense, does not fit weight ", weight.sizes(), " of ",
              weight.scalar_type(), ", or comes with zero or minimum");
  a.scale = scale.data_ptr();
}

void check_groups(const Tensor& weight, const Tensor& scale, const optional<Tensor>& zero,
                  const optional<Tensor>& minimum, const LowBitArgs& a) {
  const bool is_int4 = a.format == Format::int4;
  TORCH_CHECK(scale.dim() == 3 && scale.is_contiguous() && scale.size(0) == weight.size(0) &&
                  scale.size(2) == kChannels && scale.size(1) > 0 &&
                  a.depth % (scale.size(1) * least_group(a)) == 0 && a.depth % kDepthStep == 0,
              "scale ", scale.sizes(), " does not fit weight ", weight.sizes());
  TORCH_CHECK(scale.scalar_type() == at::kFloat || scale.scalar_type() == at::kHalf ||
                  scale.scalar_type() == at::kBFloat16 || a.stored == Format::mxfp4,
              "scale must be float32, float16 or bfloat16 (or uint8 for uint8 weights), got ",
              scale.scalar_type());
  TORCH_CHECK(!zero || (is_int4 && zero->scalar_type() == at::kByte && zero->is_contiguous() &&
                        zero->sizes() == scale.sizes()),
              "zero must be uint8, like scale, and comes with uint8 weights only");
  TORCH_CHECK(!minimum || (!zero && (is_int4 || a.format == Format::int8) && minimum->is_contiguous() &&
                           (minimum->scalar_type() == at::kFloat ||
                            minimum->scalar_type() == at::kHalf) &&
                           minimum->sizes() == scale.sizes()),
              "minimum must be float32 or float16, in the shape of scale, and comes with integers without zero only");
}

// The arguments for the weight only.
LowBitArgs weight_args(const Tensor& weight, const Tensor& scale, const optional<Tensor>& zero,
                       const optional<Tensor>& minimum) {
  const bool is_dense = weight.dim() == 3 && weight.is_contiguous();
  const Format stored = is_dense ? format_of(weight, scale) : Format::int8;
  TORCH_CHECK(is_dense && weight.size(2) == layout_of(stored).lines * kLineBytes,
              "weight must be a dense [N / 16, lines, 64], or uint8 [.., 128] for iq4, [.., 256] for iq3_s, "
              "[.., 320] for int5 or [.., 192] for int6, or int8 [.., 128] for iq2 or [.., 256] for iq3_xxs, "
              "or float8_e5m2 [.., 128] for nvfp4, "
              "got ", weight.sizes(), " of ", weight.scalar_type());
  LowBitArgs a{};
  a.stored = stored;
  a.format = read_as(stored);
  a.book = codebook_of(stored);
  a.depth = weight.size(1) * layout_of(stored).inputs;
  a.channels = weight.size(0) * kChannels;
  a.weight = static_cast<const uint8_t*>(weight.data_ptr());
  a.threads = at::num_threads();
  if (scale.scalar_type() == at::kShort) {
    set_superblocks(weight, scale, zero, minimum, a);
    return a;
  }
  check_groups(weight, scale, zero, minimum, a);
  a.groups = scale.size(1);
  a.group = a.depth / a.groups;
  a.scale = scale.data_ptr();
  if (stored != Format::mxfp4) a.scale_dtype = dtype_of(scale, "scale");
  a.zero = zero ? zero->data_ptr<uint8_t>() : nullptr;
  a.minimum = minimum ? minimum->data_ptr() : nullptr;
  a.minimum_dtype = minimum ? dtype_of(*minimum, "minimum") : Dtype::f32;
  return a;
}

LowBitArgs make_args(const Tensor& x, const Tensor& weight, const Tensor& scale,
                     const optional<Tensor>& zero, const optional<Tensor>& bias,
                     const optional<Tensor>& minimum, int64_t x_bits) {
  LowBitArgs a = weight_args(weight, scale, zero, minimum);
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == a.depth && a.depth > 0, "weight ", weight.sizes(),
              " has ", a.depth, " inputs and does not fit x ", x.sizes());
  a.dtype = dtype_of(x);
  a.x = x.data_ptr();
  a.x_stride = a.depth;
  a.rows = x.numel() / a.depth;
  a.bias = bias_data(bias, x, a.channels);
  if (a.format == Format::fp8 && x_bits == 8) {
    TORCH_CHECK(a.group % kDepthStep == 0, "x_bits is 8, but scales are of ", a.group,
                " inputs; fp8 inputs need multiples of ", kDepthStep);
    a.x_bits = kExactBits;  // once x is rounded
    return a;
  }
  const bool is_rounded = x_bits == 16 ? a.format != Format::fp8
                                       : x_bits == 8 && middle_of(a.stored);
  TORCH_CHECK(x_bits == kExactBits || (is_rounded && kernels->rounds_x()), "x_bits must be ",
              kExactBits, ", 8 for fp8, or on x86 16 for other weights or 8 for integers of 4 to 6 bits, got ",
              x_bits);
  a.x_bits = int(x_bits);
  return a;
}

// Many rows: parts of the weight are dequantized and multiplied by a linear, or by torch's linear
// if that is faster.
void by_stretches(const LowBitArgs& a, const Tensor& x, const optional<Tensor>& bias,
                  const Tensor& out) {
  const Tensor reordered = at::empty({a.rows, a.depth}, x.scalar_type());
  kernels->reorder_x(a, static_cast<bf16*>(reordered.data_ptr()));
  const int64_t step = std::max<int64_t>(64, kWidened / (2 * a.depth) / 64 * 64);
  const Tensor widened = at::empty({std::min(step, a.channels), a.depth}, x.scalar_type());
  const Tensor rows = out.view({a.rows, a.channels}, {a.channels, 1});
  for (int64_t n = 0; n < a.channels; n += step) {
    const int64_t count = std::min(step, a.channels - n);
    kernels->widen_channels(a, n, n + count, static_cast<bf16*>(widened.data_ptr()));
    const optional<Tensor> part = a.bias ? optional(bias->narrow(0, n, count)) : std::nullopt;
    const Tensor to = rows.narrow(1, n, count);
    const LinearArgs product{a.dtype, reordered.data_ptr(), widened.data_ptr(),
                             part ? part->data_ptr() : nullptr, to.data_ptr(), a.rows,
                             a.depth, count, a.depth, a.depth, a.channels, a.threads};
    if (kernels->takes_linear(product))
      kernels->linear(product);
    else
      to.copy_(at::torch_linear(reordered, widened.narrow(0, 0, count), part ? &*part : nullptr));
  }
}

// A copy of x, rounded, which becomes that of `a`.
Tensor round_to_fp8(const Tensor& x, LowBitArgs& a) {
  Tensor rounded = at::empty(x.sizes().vec(), x.scalar_type());
  kernels->round_to_fp8({a.dtype, a.x, rounded.data_ptr(), a.rows * a.depth, a.group, a.threads});
  a.x = rounded.data_ptr();
  return rounded;
}

Tensor quantized_linear(const Tensor& x, const Tensor& weight, const Tensor& scale,
                        const optional<Tensor>& zero, const optional<Tensor>& bias,
                        const optional<Tensor>& minimum, int64_t x_bits) {
  Tensor input = x.contiguous();
  LowBitArgs a = make_args(input, weight, scale, zero, bias, minimum, x_bits);
  auto sizes = x.sizes().vec();
  sizes.back() = a.channels;
  Tensor out = at::empty(sizes, x.scalar_type());
  if (out.numel() == 0) return out;
  a.out = out.data_ptr();
  if (a.x_bits != x_bits) input = round_to_fp8(input, a);
  const bool is_bf16 = a.dtype == Dtype::bf16 && a.x_bits == kExactBits;
  if (is_bf16 && a.rows > kFewRows && kernels->widens_weights())
    by_stretches(a, input, bias, out);
  else
    kernels->quantized_linear(a);
  return out;
}

Tensor expert_rows(const Tensor& x, const Tensor& weight, const Tensor& scale,
                   const optional<Tensor>& zero, const optional<Tensor>& bias,
                   const Tensor& expert, const optional<Tensor>& minimum, int64_t x_bits) {
  Tensor input = x.contiguous();
  const Tensor picked = expert.contiguous();
  const auto first = [](const optional<Tensor>& all) {
    return all ? optional(all->select(0)) : std::nullopt;
  };
  LowBitArgs a = make_args(input, weight.select(0), scale.select(0), first(zero), first(bias),
                           first(minimum), x_bits);
  if (a.x_bits != x_bits) input = round_to_fp8(input, a);
  Tensor out = at::empty({expert.size(0), a.channels}, x.scalar_type());
  a.out = out.data_ptr();
  Routing routing = routing_of(x, picked, weight.size(0));
  routing.weight_bytes = expert_bytes(weight);
  routing.scale_bytes = expert_bytes(scale);
  routing.zero_bytes = expert_bytes(zero);
  routing.bias_bytes = expert_bytes(bias);
  routing.minimum_bytes = expert_bytes(minimum);
  kernels->quantized_expert_rows(a, routing);
  return out;
}

Tensor one_by_one(const Tensor& x, const Tensor& weight, const Tensor& scale,
                    const optional<Tensor>& zero, const optional<Tensor>& bias,
                    const Tensor& expert, const optional<Tensor>& minimum, int64_t x_bits) {
  const auto of = [](const optional<Tensor>& all, int64_t k) {
    return all ? optional(all->select(k)) : std::nullopt;
  };
  return by_expert(x, expert, weight.size(0), weight.size(1) * kChannels,
                   [&](const Tensor& rows, int64_t k) {
                     return quantized_linear(rows, weight.select(k), scale.select(k), of(zero, k),
                                             of(bias, k), of(minimum, k), x_bits);
                   });
}

Tensor quantized_expert_linear(const Tensor& x, const Tensor& weight, const Tensor& scale,
                               const optional<Tensor>& zero, const optional<Tensor>& bias,
                               const Tensor& expert, const optional<Tensor>& minimum,
                               int64_t x_bits, const optional<Tensor>&, const optional<Tensor>&,
                               const optional<std::string>& act, optional<double> limit,
                               double shift, bool interleaved) {
  const auto fits = [&](const optional<Tensor>& t) {
    return !t || (t->dim() >= 2 && t->size(0) == weight.size(0));
  };
  TORCH_CHECK(weight.dim() == 4 && scale.dim() == 4 && scale.size(0) == weight.size(0) &&
                  fits(zero) && fits(bias) && fits(minimum),
              "quantized_expert_linear: weight ", weight.sizes(), " and scale ", scale.sizes(),
              " must both be [experts, N / 16, ..., ...], and others have as many experts");
  check_experts(x, expert);
  const auto is_dense = [](const optional<Tensor>& t) { return !t || t->is_contiguous(); };
  const bool may_widen = x.scalar_type() == at::kBFloat16 && x_bits == kExactBits &&
                         x.size(0) > kFewRows && kernels->widens_weights();
  const bool takes_rows = !may_widen && x.size(0) > 0 && weight.numel() > 0 &&
                          weight.is_contiguous() && scale.is_contiguous() && is_dense(zero) &&
                          is_dense(bias) && is_dense(minimum);
  Tensor y = takes_rows ? expert_rows(x, weight, scale, zero, bias, expert, minimum, x_bits)
                        : one_by_one(x, weight, scale, zero, bias, expert, minimum, x_bits);
  if (act) return act_mul(y, *act, limit, shift, interleaved);
  return y;
}

Tensor quantized_embedding(const Tensor& ids, const Tensor& weight, const Tensor& scale,
                           const optional<Tensor>& zero, const optional<Tensor>& minimum,
                           int32_t dtype) {
  LowBitArgs a = weight_args(weight, scale, zero, minimum);
  auto sizes = ids.sizes().vec();
  sizes.push_back(a.depth);
  Tensor out = at::empty(sizes, at::scalar_type_of(dtype));
  a.dtype = dtype_of(out, "the result");
  a.out = out.data_ptr();
  a.rows = ids.numel();
  const Tensor dense = ids.contiguous();
  kernels->quantized_embedding(a, dense.data_ptr<int64_t>());
  return out;
}

Tensor fused_linear(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                    const optional<Tensor>& norm_weight, optional<double> eps, double offset,
                    const optional<std::string>& act, const optional<Tensor>& residual,
                    const optional<Tensor>& gate, const std::string& gate_act, bool gate_first,
                    int64_t group, bool gated, bool centered, const optional<Tensor>& norm_bias) {
  TORCH_CHECK(eps || !(gate || centered), "a gate and centering belong to a norm");
  TORCH_CHECK(!centered || !(gate || offset), "a centered norm has no gate and no offset");
  const auto multiplied = [&](const Tensor& normed) { return linear(normed, weight, bias); };
  Tensor y = gate ? multiplied(gated_norm(x, *gate, norm_weight, *eps, offset, gate_act, gate_first,
                                          group, weight.scalar_type()))
             : centered ? multiplied(layer_norm(x, norm_weight, norm_bias, *eps))
             : eps      ? multiplied(rms_norm(x, norm_weight, *eps, offset))
                        : multiplied(x);
  if (act) y = gated ? act_mul(y, *act) : activate(y, *act);
  if (!residual || y.numel() == 0) return y;
  TORCH_CHECK(residual->sizes() == y.sizes() && residual->scalar_type() == y.scalar_type(),
              "residual must be ", y.sizes(), " of ", y.scalar_type(), ", got ",
              residual->sizes(), " of ", residual->scalar_type());
  const Tensor addend = residual->contiguous();
  kernels->add_to({dtype_of(y), addend.data_ptr(), y.data_ptr(), y.numel(), at::num_threads()});
  return y;
}

}  // namespace

void multiply(const Tensor& x, const Tensor& mat2, const Tensor& out) {
  const bool by_columns = mat2.stride(1) != 1;
  TORCH_CHECK(!by_columns || mat2.stride(2) == 1 || mat2.size(2) == 1,
              "bmm: mat2 needs a dense dimension, its strides are ", mat2.strides());
  if (out.numel() == 0) return;
  const LinearArgs a{dtype_of(x), x.data_ptr(), mat2.data_ptr(), nullptr, out.data_ptr(),
                     x.size(1), x.size(2), mat2.size(2), x.stride(1),
                     mat2.stride(by_columns ? 1 : 2), out.stride(1), at::num_threads()};
  if (by_columns || kernels->takes_linear(a)) {
    const auto bytes = [](const Tensor& t) { return t.stride(0) * int64_t(t.element_size()); };
    kernels->linears(a, {x.size(0), bytes(x), bytes(mat2), bytes(out)}, by_columns);
    return;
  }
  for (int64_t b = 0; b < x.size(0); ++b)
    out.select(b).copy_(at::torch_linear(x.select(b), mat2.select(b).t(), nullptr));
}

namespace {

Tensor bmm(const Tensor& self, const Tensor& mat2) {
  TORCH_CHECK(self.dim() == 3 && mat2.dim() == 3 && self.size(0) == mat2.size(0) &&
                  self.size(2) == mat2.size(1) && self.size(2) > 0 &&
                  self.scalar_type() == mat2.scalar_type(),
              "bmm: ", self.sizes(), " of ", self.scalar_type(), " and ", mat2.sizes(), " of ",
              mat2.scalar_type(), " do not fit together");
  Tensor kept;
  const Tensor& x = at::dense_rows(self, kept);
  Tensor out = at::empty({x.size(0), x.size(1), mat2.size(2)}, x.scalar_type());
  multiply(x, mat2, out);
  return out;
}

const at::Ops kOps = {
    {"bmm", &at::boxed<&bmm>},
    {"quantized_linear", &at::boxed<&quantized_linear>},
    {"quantized_expert_linear", &at::boxed<&quantized_expert_linear>},
    {"quantized_embedding", &at::boxed<&quantized_embedding>},
    {"fused_linear", &at::boxed<&fused_linear>},
};

}  // namespace
}  // namespace llmc::ops
