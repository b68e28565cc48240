// Torch bindings of the ops with a state. Slots come from the scheduler, so sizes are checked but
// values are not.
#include "bindings.h"

namespace llmc::ops {
namespace {

// A tensor as rows per token, copied to `kept` if its last dimension is not contiguous.
TokenRows packed(const Tensor& given, const char* name, at::Sizes sizes, Tensor& kept) {
  TORCH_CHECK(given.sizes() == sizes, name, " must be ", sizes, ", got ", given.sizes());
  const Tensor& t = at::dense_rows(given, kept);
  return {dtype_of(t, name), t.data_ptr(), t.stride(0), t.dim() > 1 ? t.stride(1) : 0};
}

template <class T>
const T* list(const optional<Tensor>& t, const char* name, int64_t size) {
  TORCH_CHECK(t.has_value() && t->defined(), name,
              " is missing: without slots only the reference runs");
  TORCH_CHECK(t->scalar_type() == at::type_of<T> && t->dim() == 1 &&
                  t->size(0) == size && t->is_contiguous(),
              name, " must be a dense [", size, "] of ", at::type_of<T>,
              ", got ", t->sizes(), " of ", t->scalar_type());
  return t->data_ptr<T>();
}

Step step_of(int64_t tokens, const optional<Tensor>& query_start,
                   const optional<Tensor>& context_len, const optional<Tensor>& request_row) {
  const int64_t requests = request_row.has_value() ? request_row->size(0) : 0;
  return {list<int32_t>(query_start, "query_start", requests + 1),
          list<int32_t>(context_len, "context_len", requests),
          list<int64_t>(request_row, "request_row", requests), requests, tokens};
}

// The data of the state [slots, ...], whose slots have `sizes`.
void* slots(const optional<Tensor>& state, at::ScalarType dtype, at::Sizes sizes) {
  TORCH_CHECK(state.has_value() && state->defined(),
              "state is missing: without slots only the reference runs");
  TORCH_CHECK(state->scalar_type() == dtype && state->is_contiguous() && state->dim() > 0 &&
                  state->sizes().slice(1) == sizes,
              "state must be a dense ", dtype, " [slots, ", sizes, "], got ", state->sizes(),
              " of ", state->scalar_type());
  return state->data_ptr();
}

// A list of numbers of any dtype as the rows of one token; data is null if there is none.
TokenRows numbers(const optional<Tensor>& given, const char* name, int64_t size, Tensor& kept) {
  if (!given.has_value() || !given->defined()) return {};
  TORCH_CHECK(given->dim() == 1, name, " must have 1 dimension, got ", given->sizes());
  return packed(given->view({1, given->size(0)}, {0, given->stride(0)}), name, {1, size}, kept);
}

// [T, H, P] as rows [T, H * P], copied to `kept` if heads are not next to each other.
Tensor by_token(const Tensor& t, Tensor& kept) {
  const bool dense = (t.size(2) == 1 || t.stride(2) == 1) &&
                     (t.size(1) == 1 || t.stride(1) == t.size(2));
  if (!dense) kept = t.contiguous();
  const Tensor& rows = dense ? t : kept;
  const int64_t width = t.size(1) * t.size(2);
  return rows.view({t.size(0), width}, {rows.stride(0), 1});
}

Tensor causal_conv(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                   const optional<std::string>& act, const optional<Tensor>& x_gate,
                   const optional<Tensor>& y_gate, const optional<Tensor>& state,
                   const optional<Tensor>& query_start, const optional<Tensor>& context_len,
                   const optional<Tensor>& request_row) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && weight.size(0) == x.size(1),
              "weight ", weight.sizes(), " does not fit x ", x.sizes());
  TORCH_CHECK(!act || *act == "silu", "act must be silu, got ", *act);
  TORCH_CHECK(weight.size(1) > 0 && weight.size(1) <= kMaxTaps, "weight must have 1 to ",
              kMaxTaps, " taps, got ", weight.size(1));
  TORCH_CHECK(weight.scalar_type() == x.scalar_type() &&
                  (!bias || bias->scalar_type() == x.scalar_type()),
              "x, weight and bias must have one dtype");
  Tensor input, x_by, y_by, taps = weight.contiguous(), offset = bias ? bias->contiguous() : Tensor();
  const int64_t channels = x.size(1), width = weight.size(1);
  TORCH_CHECK(!bias || offset.numel() == channels, "bias must have ", channels, " elements");
  Tensor out = at::empty(x.sizes(), x.scalar_type());
  kernels->causal_conv({step_of(x.size(0), query_start, context_len, request_row),
                     packed(x, "x", x.sizes(), input),
                     x_gate ? packed(*x_gate, "x_gate", x.sizes(), x_by) : TokenRows{},
                     y_gate ? packed(*y_gate, "y_gate", x.sizes(), y_by) : TokenRows{},
                     taps.data_ptr(),
                     bias ? offset.data_ptr() : nullptr, act.has_value(),
                     slots(state, x.scalar_type(), {channels, width - 1}), out.data_ptr(),
                     channels, width, at::num_threads()});
  return out;
}

Tensor delta_rule(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                  const Tensor& beta, double scale, optional<double> norm_eps,
                  const optional<Tensor>& decay_rate, const optional<Tensor>& decay_bias,
                  optional<double> beta_scale, const optional<Tensor>& state,
                  const optional<Tensor>& query_start, const optional<Tensor>& context_len,
                  const optional<Tensor>& request_row) {
  TORCH_CHECK(key.dim() == 3 && value.dim() == 3 && decay.dim() == 3,
              "key, value and decay must have 3 dimensions");
  const int64_t tokens = key.size(0), key_heads = key.size(1), dim = key.size(2);
  const int64_t heads = value.size(1), v_dim = value.size(2), decays = decay.size(2);
  TORCH_CHECK(decays == 1 || decays == dim, "decay must have 1 or ", dim, " a head, got ", decays);
  TORCH_CHECK(key_heads > 0 && heads % key_heads == 0, key_heads, " key heads do not divide ",
              heads, " heads");
  TORCH_CHECK(decay_rate.has_value() == decay_bias.has_value(),
              "decay_rate and decay_bias belong together");
  Tensor q, k, v, g, b, rate, bias, out = at::empty(value.sizes(), value.scalar_type());
  DeltaArgs a{};
  a.step = step_of(tokens, query_start, context_len, request_row);
  a.query = packed(query, "query", {tokens, key_heads, dim}, q);
  a.key = packed(key, "key", {tokens, key_heads, dim}, k);
  a.value = packed(value, "value", {tokens, heads, v_dim}, v);
  a.decay = packed(decay, "decay", {tokens, heads, decays}, g);
  a.beta = packed(beta, "beta", {tokens, heads}, b);
  a.decays_by_channel = decays > 1;
  a.normed = norm_eps.has_value();
  a.scale = float(scale), a.norm_eps = float(norm_eps.value_or(0));
  a.beta_scale = float(beta_scale.value_or(0));
  a.decay_rate = numbers(decay_rate, "decay_rate", heads, rate);
  if (decay_bias) {
    TORCH_CHECK(decay_bias->dim() == 2, "decay_bias must have 2 dimensions");
    const Tensor each = decay_bias->view({1, decay_bias->size(0), decay_bias->size(1)},
                                         {0, decay_bias->stride(0), decay_bias->stride(1)});
    a.decay_bias = packed(each, "decay_bias", {1, heads, decays}, bias);
  }
  a.state = static_cast<float*>(slots(state, at::kFloat, {heads, dim, v_dim}));
  a.dtype = a.value.dtype;
  a.out = out.data_ptr();
  a.heads = heads, a.key_heads = key_heads, a.dim = dim, a.v_dim = v_dim;
  a.threads = at::num_threads();
  kernels->delta_rule(a);
  return out;
}

Tensor selective_scan(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b,
                      const Tensor& c, const optional<Tensor>& skip, const optional<Tensor>& gate,
                      const optional<Tensor>& dt_bias, bool dt_softplus, double dt_min,
                      double dt_max, int32_t dtype, const optional<Tensor>& state,
                      const optional<Tensor>& query_start, const optional<Tensor>& context_len,
                      const optional<Tensor>& request_row) {
  TORCH_CHECK(x.dim() == 3 && a.dim() == 2 && b.dim() == 3, "x, a, b must have 3, 2, 3 dimensions");
  const int64_t tokens = x.size(0), heads = x.size(1), width = x.size(2);
  const int64_t groups = b.size(1), size = b.size(2);
  TORCH_CHECK(groups > 0 && heads % groups == 0, groups, " groups do not divide ", heads, " heads");
  TORCH_CHECK(a.size(0) == heads && (a.size(1) == 1 || a.size(1) == size) &&
                  a.scalar_type() == at::kFloat,
              "a must be [", heads, ", 1 or ", size, "] of float32, got ", a.sizes());
  Tensor kept_x, kept_gate;
  const Tensor rows = by_token(x, kept_x), rate = a.contiguous();
  const Tensor gates = gate ? by_token(*gate, kept_gate) : Tensor();
  Tensor flat, steps, in, read, passed, gated, added;
  Tensor out = at::empty(x.sizes(), at::scalar_type_of(dtype));
  ScanArgs s{};
  s.step = step_of(tokens, query_start, context_len, request_row);
  s.x = packed(rows, "x", {tokens, heads * width}, flat);
  s.dt = packed(dt, "dt", {tokens, heads}, steps);
  s.b = packed(b, "b", {tokens, groups, size}, in);
  s.c = packed(c, "c", {tokens, groups, size}, read);
  s.a = rate.data_ptr<float>();
  s.decays_by_state = a.size(1) > 1;
  s.skip = numbers(skip, "skip", heads, passed);
  if (gate) s.gate = packed(gates, "gate", {tokens, heads * width}, gated);
  s.dt_bias = numbers(dt_bias, "dt_bias", heads, added);
  s.softplus = dt_softplus, s.dt_min = float(dt_min), s.dt_max = float(dt_max);
  s.dtype = dtype_of(out, "the result");
  s.state = static_cast<float*>(slots(state, at::kFloat, {heads, width, size}));
  s.out = out.data_ptr();
  s.heads = heads, s.width = width, s.groups = groups, s.size = size;
  s.threads = at::num_threads();
  kernels->selective_scan(s);
  return out;
}

Tensor linear_recurrence(const Tensor& x, const Tensor& decay, const optional<Tensor>& state,
                         const optional<Tensor>& query_start, const optional<Tensor>& context_len,
                         const optional<Tensor>& request_row) {
  TORCH_CHECK(x.dim() == 2, "x must have 2 dimensions, got ", x.sizes());
  Tensor input, kept, out = at::empty(x.sizes(), x.scalar_type());
  kernels->linear_recurrence({step_of(x.size(0), query_start, context_len, request_row),
                           packed(x, "x", x.sizes(), input), packed(decay, "decay", x.sizes(), kept),
                           static_cast<float*>(slots(state, at::kFloat, {x.size(1)})),
                           out.data_ptr(), x.size(1), at::num_threads()});
  return out;
}

Tensor decayed_softmax(const Tensor& key, const Tensor& value, const Tensor& decay,
                       const Tensor& bonus, const optional<Tensor>& state,
                       const optional<Tensor>& query_start, const optional<Tensor>& context_len,
                       const optional<Tensor>& request_row) {
  TORCH_CHECK(key.dim() == 2 && decay.dim() == 1 && bonus.dim() == 1,
              "key, decay, bonus must have 2, 1, 1 dimensions");
  const int64_t channels = key.size(1);
  const Tensor fades = decay.view({1, decay.size(0)}, {0, decay.stride(0)});
  const Tensor bonuses = bonus.view({1, bonus.size(0)}, {0, bonus.stride(0)});
  Tensor k, v, fade, own, out = at::empty(value.sizes(), value.scalar_type());
  kernels->decayed_softmax({step_of(key.size(0), query_start, context_len, request_row),
                         packed(key, "key", key.sizes(), k), packed(value, "value", key.sizes(), v),
                         packed(fades, "decay", {1, channels}, fade), packed(bonuses, "bonus", {1, channels}, own),
                         static_cast<float*>(slots(state, at::kFloat, {3, channels})),
                         out.data_ptr(), channels, at::num_threads()});
  return out;
}

Tensor pool_windows(const Tensor& value, const Tensor& gate, const Tensor& bias, int64_t series,
                    const optional<Tensor>& state, const optional<Tensor>& query_start,
                    const optional<Tensor>& context_len, const optional<Tensor>& request_row) {
  TORCH_CHECK((series == 1 || series == 2) && value.dim() == 2 && bias.dim() == 2 &&
                  bias.size(0) > 0 && value.size(1) % series == 0,
              "value ", value.sizes(), " and bias ", bias.sizes(), " do not fit ", series,
              " series of 1 or 2");
  const int64_t tokens = value.size(0), width = bias.size(0), all = value.size(1);
  const int64_t channels = all / series;
  Tensor v, g, b, out = at::empty({tokens, channels}, value.scalar_type());
  kernels->pool_windows({step_of(tokens, query_start, context_len, request_row),
                         packed(value, "value", {tokens, all}, v),
                         packed(gate, "gate", {tokens, all}, g),
                         packed(bias, "bias", {width, all}, b),
                         static_cast<float*>(slots(state, at::kFloat, {2 * series - 1, 3, channels})),
                         out.data_ptr(), channels, width, series, at::num_threads()});
  return out;
}

const at::Ops kOps = {
    {"causal_conv", &at::boxed<&causal_conv>},
    {"delta_rule", &at::boxed<&delta_rule>},
    {"selective_scan", &at::boxed<&selective_scan>},
    {"linear_recurrence", &at::boxed<&linear_recurrence>},
    {"decayed_softmax", &at::boxed<&decayed_softmax>},
    {"pool_windows", &at::boxed<&pool_windows>},
};

}  // namespace
}  // namespace llmc::ops
