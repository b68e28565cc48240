// The parts of tensor.h that are compiled once instead of in each file of bindings.
#include "tensor.h"

namespace llmc::aten {

ScalarType scalar_type_of(int32_t code) {
  int type = 0;
  while (type != int(kOther) && kTypes[type].code != code) ++type;
  return ScalarType(type);
}

void fail(std::initializer_list<Part> parts) {
  std::string message;
  for (const Part& part : parts) {
    if (part.words) {
      message += part.words;
    } else if (part.is_list) {
      message += '[';
      for (int64_t i = 0; i < part.numbers.count; ++i)
        message += (i ? ", " : "") + std::to_string(part.numbers[i]);
      message += ']';
    } else {
      message += std::to_string(part.number);
    }
  }
  throw std::runtime_error(message);
}

void fail_in_torch() {
  fail({"a call into torch failed; its message is above"});
}

Tensor::Tensor(AtenTensorHandle handle) : handle_(handle) {
  int32_t code;
  int64_t *sizes, *strides;
  must(aoti_torch_get_dim(handle, &dim_));
  must(aoti_torch_get_sizes(handle, &sizes));
  must(aoti_torch_get_strides(handle, &strides));
  must(aoti_torch_get_dtype(handle, &code));
  sizes_ = sizes, strides_ = strides;
  type_ = scalar_type_of(code);
}

Tensor Tensor::narrow(int64_t d, int64_t from, int64_t count) const {
  std::vector<int64_t> sizes = this->sizes().vec();
  sizes[d] = count;
  return view(sizes, strides(), from * stride(d));
}

Tensor Tensor::contiguous() const {
  if (is_contiguous()) return Tensor(share());
  Tensor out = empty(sizes(), type_);
  out.copy_(*this);
  return out;
}

Tensor empty(Sizes sizes, ScalarType type) {
  constexpr int64_t kUsual = 8;
  int64_t few[kUsual], step = 1;
  std::vector<int64_t> many(sizes.count > kUsual ? sizes.count : 0);
  int64_t* strides = many.empty() ? few : many.data();
  for (int64_t d = sizes.count - 1; d >= 0; --d) {
    strides[d] = step;
    step *= sizes[d] > 0 ? sizes[d] : 1;
  }
  AtenTensorHandle handle;
  must(aoti_torch_empty_strided(sizes.count, sizes.data, strides, kTypes[int(type)].code,
                                aoti_torch_device_type_cpu(), 0, &handle));
  keep(handle);
  return Tensor(handle);
}

Tensor torch_linear(const Tensor& x, const Tensor& weight, const Tensor* bias) {
  StableIValue stack[3] = {to_stack(x.share()), to_stack(weight.share()), 0};
  if (bias) stack[2] = to_stack(new StableIValue(to_stack(bias->share())));  // torch deletes it
  leave_out();
  must(torch_call_dispatcher("aten::linear", "", stack, kTorchVersion));
  AtenTensorHandle out;
  std::memcpy(&out, stack, sizeof out);
  return Tensor(out).contiguous();
}

std::string Argument<std::string>::take(StableIValue word) {
  StringHandle handle;
  const char* data;
  size_t length;
  std::memcpy(&handle, &word, sizeof handle);
  must(torch_string_c_str(handle, &data));
  must(torch_string_length(handle, &length));
  std::string out(data, length);
  must(torch_delete_string(handle));
  return out;
}

}  // namespace llmc::aten
