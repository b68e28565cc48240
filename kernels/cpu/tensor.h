// Torch through its stable C ABI, so that one library works with every torch from 2.11 on and the
// bindings compile in a second: the part of ATen's interface that they need, under the same names.
// torch/csrc/stable has a C++ version, which costs 1.5 us more per call (two allocations per
// tensor).
#pragma once

#include "subnormals.h"
#include "team.h"
#include "torch_abi.h"

#include <cstring>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmc::aten {

constexpr uint64_t kTorchVersion = 2ULL << 56 | 11ULL << 48;  // the oldest supported version

enum class ScalarType {
  Byte, Char, Short, Int, Long, Half, Float, BFloat16, Float8_e5m2, Float8_e4m3fn
};
constexpr auto kByte = ScalarType::Byte, kChar = ScalarType::Char, kShort = ScalarType::Short,
               kInt = ScalarType::Int, kLong = ScalarType::Long, kHalf = ScalarType::Half,
               kFloat = ScalarType::Float, kBFloat16 = ScalarType::BFloat16,
               kFloat8_e5m2 = ScalarType::Float8_e5m2, kFloat8_e4m3fn = ScalarType::Float8_e4m3fn,
               kOther = ScalarType(10);

struct TypeInfo {
  int32_t code;  // torch's number for it
  const char* name;
  int64_t size;  // bytes
};

// In the order of ScalarType; the running torch defines the numbers.
inline const TypeInfo kTypes[] = {
    {aoti_torch_dtype_uint8(), "Byte", 1},
    {aoti_torch_dtype_int8(), "Char", 1},
    {aoti_torch_dtype_int16(), "Short", 2},
    {aoti_torch_dtype_int32(), "Int", 4},
    {aoti_torch_dtype_int64(), "Long", 8},
    {aoti_torch_dtype_float16(), "Half", 2},
    {aoti_torch_dtype_float32(), "Float", 4},
    {aoti_torch_dtype_bfloat16(), "BFloat16", 2},
    {aoti_torch_dtype_float8_e5m2(), "Float8_e5m2", 1},
    {aoti_torch_dtype_float8_e4m3fn(), "Float8_e4m3fn", 1},
    {-1, "another dtype", 0},
};

template <class T>
constexpr ScalarType type_of = std::is_same_v<T, int64_t>   ? kLong
                               : std::is_same_v<T, int32_t> ? kInt
                               : std::is_same_v<T, uint8_t> ? kByte
                               : std::is_same_v<T, float>   ? kFloat
                                                            : kOther;

ScalarType scalar_type_of(int32_t code);  // kOther for a dtype that is not listed

struct Sizes {  // borrowed
  const int64_t* data;
  int64_t count;

  Sizes(const int64_t* data, int64_t count) : data(data), count(count) {}
  Sizes(std::initializer_list<int64_t> list) : data(list.begin()), count(list.size()) {}
  Sizes(const std::vector<int64_t>& list) : data(list.data()), count(list.size()) {}
  int64_t operator[](int64_t i) const { return data[i]; }
  const int64_t* begin() const { return data; }
  const int64_t* end() const { return data + count; }
  std::vector<int64_t> vec() const { return {begin(), end()}; }
  Sizes slice(int64_t from) const { return {data + from, count - from}; }
  bool operator==(const Sizes& other) const {
    return count == other.count &&
           (count == 0 || std::memcmp(data, other.data, count * sizeof *data) == 0);
  }
};

// A part of a message: words, a number, or a list of numbers. All are borrowed.
struct Part {
  const char* words = nullptr;
  bool is_list = false;
  Sizes numbers{nullptr, 0};
  int64_t number = 0;

  Part(const char* words) : words(words) {}
  Part(const std::string& words) : words(words.c_str()) {}
  Part(int64_t number) : number(number) {}
  Part(ScalarType type) : words(kTypes[int(type)].name) {}
  Part(const Sizes& numbers) : is_list(true), numbers(numbers) {}
};

// Throws the parts in one string.
[[noreturn]] void fail(std::initializer_list<Part> parts);

#define TORCH_CHECK(condition, ...)                                 \
  do {                                                              \
    if (!(condition)) [[unlikely]] llmc::aten::fail({__VA_ARGS__}); \
  } while (false)

// See recording.h: leave_out() makes torch call the current op again; keep() keeps a tensor's
// memory.
void leave_out();
void keep(AtenTensorHandle handle);

[[noreturn]] void fail_in_torch();  // torch has printed its own message
inline void must(AOTITorchError error) {
  if (error != 0) [[unlikely]] fail_in_torch();
}

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle);  // takes ownership
  Tensor(Tensor&& other) noexcept { swap(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  bool defined() const { return handle_ != nullptr; }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  AtenTensorHandle share() const {  // a new handle of the same tensor
    AtenTensorHandle handle;
    must(aoti_torch_new_tensor_handle(handle_, &handle));
    return handle;
  }

  int64_t dim() const { return dim_; }
  int64_t size(int64_t d) const { return sizes_[d < 0 ? d + dim_ : d]; }
  int64_t stride(int64_t d) const { return strides_[d < 0 ? d + dim_ : d]; }
  Sizes sizes() const { return {sizes_, dim_}; }
  Sizes strides() const { return {strides_, dim_}; }
  ScalarType scalar_type() const { return type_; }
  int64_t element_size() const { return kTypes[int(type_)].size; }
  int64_t numel() const {
    int64_t n = 1;
    for (int64_t size : sizes()) n *= size;
    return n;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    if (numel() == 0) return true;
    for (int64_t d = dim_ - 1; d >= 0; --d) {
      if (sizes_[d] != 1 && strides_[d] != expected) return false;
      expected *= sizes_[d];
    }
    return true;
  }
  void* data_ptr() const {
    void* data;
    must(aoti_torch_get_data_ptr(handle_, &data));
    return data;
  }
  template <class T>
  T* data_ptr() const {
    TORCH_CHECK(type_ == type_of<T>, "expected ", type_of<T>, ", got ", type_);
    return static_cast<T*>(data_ptr());
  }

  // A view of the same memory with other sizes and strides, from `offset` elements on.
  Tensor view(Sizes sizes, Sizes strides, int64_t offset = 0) const {
    AtenTensorHandle handle;
    must(aoti_torch__reinterpret_tensor(handle_, sizes.count, sizes.data, strides.data, offset,
                                        &handle));
    return Tensor(handle);
  }
  Tensor narrow(int64_t d, int64_t from, int64_t count) const;
  Tensor select(int64_t index) const {  // in the first dimension
    return view(sizes().slice(1), strides().slice(1), index * stride(0));
  }
  Tensor t() const { return view({size(1), size(0)}, {stride(1), stride(0)}); }
  void copy_(const Tensor& from) const {
    leave_out();
    must(aoti_torch_copy_(handle_, from.get(), 0));
  }
  Tensor contiguous() const;

 private:
  void swap(Tensor& other) {
    std::swap(handle_, other.handle_);
    std::swap(dim_, other.dim_);
    std::swap(sizes_, other.sizes_);
    std::swap(strides_, other.strides_);
    std::swap(type_, other.type_);
  }

  AtenTensorHandle handle_ = nullptr;
  int64_t dim_ = 0;
  const int64_t *sizes_ = nullptr, *strides_ = nullptr;  // owned by the torch tensor
  ScalarType type_ = kByte;
};

Tensor empty(Sizes sizes, ScalarType type);

// `t` if its last dimension is contiguous, else a copy, which is stored in `kept`.
inline const Tensor& dense_rows(const Tensor& t, Tensor& kept) {
  if (t.size(-1) == 1 || t.stride(-1) == 1) return t;
  return kept = t.contiguous();
}

inline int num_threads() {
  uint32_t threads;
  if (llmc_in_team()) return 1;
  must(torch_get_num_threads(&threads));
  return int(threads);
}

template <class T>
StableIValue to_stack(const T& value) {
  StableIValue out = 0;
  std::memcpy(&out, &value, sizeof value);
  return out;
}

// torch's own linear, with a contiguous result. Not named `linear`, since argument-dependent lookup
// would make that ambiguous with ours.
Tensor torch_linear(const Tensor& x, const Tensor& weight, const Tensor* bias);

// Converts the 64-bit words on torch's stack to function arguments, taking ownership of each.
template <class T>
struct Argument {
  static T take(StableIValue word) {
    static_assert(std::is_arithmetic_v<T>);
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
};

template <>
struct Argument<Tensor> {
  static Tensor take(StableIValue word) {
    AtenTensorHandle handle;
    std::memcpy(&handle, &word, sizeof handle);
    return Tensor(handle);
  }
};

template <>
struct Argument<std::string> {
  static std::string take(StableIValue word);
};

template <class T>
struct Argument<std::optional<T>> {
  static std::optional<T> take(StableIValue word) {
    StableIValue* inner;
    std::memcpy(&inner, &word, sizeof inner);
    if (!inner) return std::nullopt;
    std::optional<T> out(Argument<T>::take(*inner));
    delete inner;
    return out;
  }
};

inline void put(StableIValue* stack, Tensor&& result) {
  *stack = to_stack(result.release());
}

template <class... Results>
void put(StableIValue* stack, std::tuple<Results...>&& results) {
  std::apply([&](auto&... result) { ((*stack++ = to_stack(result.release())), ...); }, results);
}

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

template <auto kFunction, class Result, class... Arguments, size_t... I>
void call(StableIValue* stack, Result (*)(Arguments...), std::index_sequence<I...>) {
  if constexpr (std::is_void_v<Result>)
    kFunction(Argument<std::remove_cvref_t<Arguments>>::take(stack[I])...);
  else
    put(stack, kFunction(Argument<std::remove_cvref_t<Arguments>>::take(stack[I])...));
}

template <class Result, class... Arguments>
constexpr auto indices_of(Result (*)(Arguments...)) {
  return std::index_sequence_for<Arguments...>();
}

// kFunction with the signature that torch calls.
template <auto kFunction>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  const FlushSubnormals flush;
  call<kFunction>(stack, kFunction, indices_of(kFunction));
}

struct Op {
  const char* name;  // its schema is inferred from the reference, in Python
  Boxed function;    // takes the schema's arguments, in order
};

// Registers implementations of llmc_cpu ops when the library is loaded; never unregistered.
struct Ops {
  Ops(std::initializer_list<Op> ops) {
    TorchLibraryHandle library;
    must(aoti_torch_library_init_impl("llmc_cpu", "CPU", "kernels/cpu", 0, &library));
    for (const Op& op : ops)
      must(torch_library_impl(library, op.name, op.function, kTorchVersion));
  }
};

}  // namespace llmc::aten
