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

Tensor causal_conv(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                   const optional<Tensor>& state, const optional<Tensor>& query_start,
                   const optional<Tensor>& context_len, const optional<Tensor>& request_row) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && weight.size(0) == x.size(1),
              "weight ", weight.sizes(), " does not fit x ", x.sizes());
  TORCH_CHECK(weight.size(1) > 0 && weight.size(1) <= kMaxTaps, "weight must have 1 to ",
              kMaxTaps, " taps, got ", weight.size(1));
  TORCH_CHECK(weight.scalar_type() == x.scalar_type() &&
                  (!bias || bias->scalar_type() == x.scalar_type()),
              "x, weight and bias must have one dtype");
  Tensor input, taps = weight.contiguous(), offset = bias ? bias->contiguous() : Tensor();
  const int64_t channels = x.size(1), width = weight.size(1);
  TORCH_CHECK(!bias || offset.numel() == channels, "bias must have ", channels, " elements");
  Tensor out = at::empty(x.sizes(), x.scalar_type());
  kernels->causal_conv({step_of(x.size(0), query_start, context_len, request_row),
                     packed(x, "x", x.sizes(), input), taps.data_ptr(),
                     bias ? offset.data_ptr() : nullptr,
                     slots(state, x.scalar_type(), {channels, width - 1}), out.data_ptr(),
                     channels, width, at::num_threads()});
  return out;
}

Tensor delta_rule(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                  const Tensor& beta, const optional<Tensor>& state,
                  const optional<Tensor>& query_start, const optional<Tensor>& context_len,
                  const optional<Tensor>& request_row) {
  TORCH_CHECK(key.dim() == 3 && value.dim() == 3 && decay.dim() == 3,
              "key, value and decay must have 3 dimensions");
  const int64_t tokens = key.size(0), heads = key.size(1), dim = key.size(2);
  const int64_t v_dim = value.size(2), decays = decay.size(2);
  TORCH_CHECK(decays == 1 || decays == dim, "decay must have 1 or ", dim, " a head, got ", decays);
  Tensor q, k, v, g, b, out = at::empty(value.sizes(), value.scalar_type());
  DeltaArgs a{};
  a.step = step_of(tokens, query_start, context_len, request_row);
  a.query = packed(query, "query", {tokens, heads, dim}, q);
  a.key = packed(key, "key", {tokens, heads, dim}, k);
  a.value = packed(value, "value", {tokens, heads, v_dim}, v);
  a.decay = packed(decay, "decay", {tokens, heads, decays}, g);
  a.beta = packed(beta, "beta", {tokens, heads}, b);
  a.decays_by_channel = decays > 1;
  a.state = static_cast<float*>(slots(state, at::kFloat, {heads, dim, v_dim}));
  a.dtype = a.value.dtype;
  a.out = out.data_ptr();
  a.heads = heads, a.dim = dim, a.v_dim = v_dim;
  a.threads = at::num_threads();
  kernels->delta_rule(a);
  return out;
}

Tensor selective_scan(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b,
                      const Tensor& c, const optional<Tensor>& state,
                      const optional<Tensor>& query_start, const optional<Tensor>& context_len,
                      const optional<Tensor>& request_row) {
  TORCH_CHECK(x.dim() == 3 && a.dim() == 2 && b.dim() == 3, "x, a, b must have 3, 2, 3 dimensions");
  const int64_t tokens = x.size(0), heads = x.size(1), width = x.size(2);
  const int64_t groups = b.size(1), size = b.size(2);
  TORCH_CHECK(groups > 0 && heads % groups == 0, groups, " groups do not divide ", heads, " heads");
  TORCH_CHECK(a.size(0) == heads && (a.size(1) == 1 || a.size(1) == size) &&
                  a.scalar_type() == at::kFloat,
              "a must be [", heads, ", 1 or ", size, "] of float32, got ", a.sizes());
  const Tensor dense = x.contiguous(), rate = a.contiguous();
  const Tensor rows = dense.view({tokens, heads * width}, {heads * width, 1});
  Tensor flat, steps, in, read, out = at::empty(x.sizes(), x.scalar_type());
  ScanArgs s{};
  s.step = step_of(tokens, query_start, context_len, request_row);
  s.x = packed(rows, "x", {tokens, heads * width}, flat);
  s.dt = packed(dt, "dt", {tokens, heads}, steps);
  s.b = packed(b, "b", {tokens, groups, size}, in);
  s.c = packed(c, "c", {tokens, groups, size}, read);
  s.a = rate.data_ptr<float>();
  s.decays_by_state = a.size(1) > 1;
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
