// Runs ops of kernels/cpu without torch, for emulators of other processors: stands in for the part
// of torch's C ABI that they call (kernels/cpu/torch_abi.h), reads calls from a file, and writes what
// they return and what they leave in their arguments. tests/support/op_harness.py has both formats.
#include "torch_abi.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct Storage {
  char* bytes;
  explicit Storage(size_t size) {  // as torch aligns; what nobody writes is a huge number
    const size_t whole = (size + 127) / 64 * 64;
    bytes = static_cast<char*>(std::aligned_alloc(64, whole));
    std::memset(bytes, 0x7f, whole);
  }
  ~Storage() { std::free(bytes); }
};

struct AtenTensorOpaque {
  int32_t dtype;
  std::vector<int64_t> sizes, strides;
  std::shared_ptr<Storage> storage;
  int64_t offset = 0;

  int64_t width() const {  // bytes; the numbers are those of torch's ScalarType
    return dtype == 4 ? 8 : dtype == 3 || dtype == 6 ? 4 : dtype == 2 || dtype == 5 || dtype == 15 ? 2 : 1;
  }
  char* data() const { return storage->bytes + offset * width(); }
  int64_t numel() const {
    int64_t n = 1;
    for (int64_t size : sizes) n *= size;
    return n;
  }
  int64_t span() const {  // elements from the first to behind the last
    int64_t n = 1;
    for (size_t d = 0; d < sizes.size(); ++d) n += (sizes[d] - 1) * strides[d];
    return numel() ? n : 0;
  }
  int64_t at(int64_t i) const {  // of the i-th element in reading order
    int64_t place = 0;
    for (size_t d = sizes.size(); d-- > 0; i /= sizes[d]) place += i % sizes[d] * strides[d];
    return place;
  }
};

struct StringOpaque {
  std::string text;
};

class TorchLibraryOpaque {};

using Function = void (*)(StableIValue*, uint64_t, uint64_t);

static std::map<std::string, Function>& functions() {
  static std::map<std::string, Function> all;
  return all;
}

static AtenTensorHandle make(int32_t dtype, std::vector<int64_t> sizes,
                             std::vector<int64_t> strides) {
  auto* t = new AtenTensorOpaque{dtype, std::move(sizes), std::move(strides), nullptr};
  t->storage = std::make_shared<Storage>(t->span() * t->width());
  return t;
}

extern "C" {

int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_dtype_uint8() { return 0; }
int32_t aoti_torch_dtype_int8() { return 1; }
int32_t aoti_torch_dtype_int16() { return 2; }
int32_t aoti_torch_dtype_int32() { return 3; }
int32_t aoti_torch_dtype_int64() { return 4; }
int32_t aoti_torch_dtype_float16() { return 5; }
int32_t aoti_torch_dtype_float32() { return 6; }
int32_t aoti_torch_dtype_bfloat16() { return 15; }
int32_t aoti_torch_dtype_float8_e5m2() { return 23; }
int32_t aoti_torch_dtype_float8_e4m3fn() { return 24; }

AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle t, void** data) {
  return *data = t->data(), 0;
}
AOTITorchError aoti_torch_get_dim(AtenTensorHandle t, int64_t* dim) {
  return *dim = int64_t(t->sizes.size()), 0;
}
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle t, int32_t* dtype) {
  return *dtype = t->dtype, 0;
}
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle t, int64_t** sizes) {
  return *sizes = t->sizes.data(), 0;
}
AOTITorchError aoti_torch_get_strides(AtenTensorHandle t, int64_t** strides) {
  return *strides = t->strides.data(), 0;
}
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle t, AtenTensorHandle* owned) {
  return *owned = new AtenTensorOpaque(*t), 0;
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle t) { return delete t, 0; }
AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle from, int32_t) {
  if (self->dtype != from->dtype || self->sizes != from->sizes) return 1;
  for (int64_t i = 0; i < self->numel(); ++i)
    std::memcpy(self->data() + self->at(i) * self->width(),
                from->data() + from->at(i) * from->width(), self->width());
  return 0;
}
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t, int32_t, AtenTensorHandle* owned) {
  return *owned = make(dtype, {sizes, sizes + dim}, {strides, strides + dim}), 0;
}
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle self, int64_t dim,
                                              const int64_t* sizes, const int64_t* strides,
                                              int64_t added, AtenTensorHandle* owned) {
  *owned = new AtenTensorOpaque{self->dtype, {sizes, sizes + dim}, {strides, strides + dim},
                                self->storage, self->offset + added};
  return 0;
}

AOTITorchError torch_string_c_str(StringHandle s, const char** text) {
  return *text = s->text.c_str(), 0;
}
AOTITorchError torch_string_length(StringHandle s, size_t* length) {
  return *length = s->text.size(), 0;
}
AOTITorchError torch_delete_string(StringHandle s) { return delete s, 0; }
AOTITorchError torch_get_num_threads(uint32_t* threads) {
  return *threads = 4, 0;
}

static float element(const AtenTensorOpaque& t, int64_t i) {
  float value = 0;
  if (t.dtype == 6) std::memcpy(&value, t.data() + 4 * i, 4);
  if (t.dtype == 15) std::memcpy(reinterpret_cast<char*>(&value) + 2, t.data() + 2 * i, 2);
  return value;
}

// aten::linear of float32 and bfloat16 alone, in double.
AOTITorchError torch_call_dispatcher(const char* op, const char*, StableIValue* stack, uint64_t) {
  if (std::strcmp(op, "aten::linear") != 0) return 1;
  std::unique_ptr<AtenTensorOpaque> x(reinterpret_cast<AtenTensorHandle>(stack[0]));
  std::unique_ptr<AtenTensorOpaque> w(reinterpret_cast<AtenTensorHandle>(stack[1])), bias;
  if (stack[2]) {
    auto* inner = reinterpret_cast<StableIValue*>(stack[2]);
    bias.reset(reinterpret_cast<AtenTensorHandle>(*inner));
    delete inner;
  }
  if (x->dtype != 6 && x->dtype != 15) return 1;
  const int64_t channels = w->sizes[0], depth = w->sizes[1];
  std::vector<int64_t> sizes = x->sizes, strides(sizes.size(), 1);
  sizes.back() = channels;
  for (size_t d = sizes.size() - 1; d-- > 0;) strides[d] = strides[d + 1] * sizes[d + 1];
  AtenTensorHandle out = make(x->dtype, sizes, strides);
  for (int64_t i = 0; i < out->numel(); ++i) {
    const int64_t row = i / channels, n = i % channels;
    double sum = bias ? element(*bias, bias->at(n)) : 0;
    for (int64_t k = 0; k < depth; ++k)
      sum += double(element(*x, x->at(row * depth + k))) * element(*w, w->at(n * depth + k));
    const float value = float(sum);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t rounded = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    if (x->dtype == 6) std::memcpy(out->data() + 4 * i, &value, 4);
    if (x->dtype == 15) std::memcpy(out->data() + 2 * i, &rounded, 2);
  }
  stack[0] = reinterpret_cast<StableIValue>(out);
  return 0;
}

AOTITorchError aoti_torch_library_init_fragment(const char*, const char*, uint32_t,
                                                TorchLibraryHandle* library) {
  return *library = new TorchLibraryOpaque, 0;
}
AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                            TorchLibraryHandle* library) {
  return *library = new TorchLibraryOpaque, 0;
}
AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char*) { return 0; }
AOTITorchError torch_library_impl(TorchLibraryHandle, const char* op, Function function, uint64_t) {
  return functions()[op] = function, 0;
}

bool llmc_use_level(const char* name);
bool llmc_pack_gguf(int32_t type, const uint8_t* rows, int64_t row_bytes, const int64_t* order,
                    int64_t channels, int64_t depth, uint8_t* weight, void* scale, void* minimum);
}

// llmc_pack_gguf as if it were an op: type, depth, rows, order, weight, scale, minimum. Tensors
// without elements stand for null.
static void pack_gguf(StableIValue* stack, uint64_t, uint64_t) {
  std::unique_ptr<AtenTensorOpaque> tensors[5];
  void* data[5];
  for (int i = 0; i < 5; ++i) {
    tensors[i].reset(reinterpret_cast<AtenTensorHandle>(stack[2 + i]));
    data[i] = tensors[i]->numel() ? tensors[i]->data() : nullptr;
  }
  const int64_t channels = 16 * tensors[2]->sizes[0];
  if (!llmc_pack_gguf(int32_t(stack[0]), static_cast<uint8_t*>(data[0]), tensors[0]->strides[0],
                      static_cast<int64_t*>(data[1]), channels, int64_t(stack[1]),
                      static_cast<uint8_t*>(data[2]), data[3], data[4]))
    throw std::runtime_error("the type has no packer");
}

struct Reader {
  std::vector<char> bytes;
  size_t place = 0;

  template <class T>
  T get() {
    T value;
    copy(&value, sizeof value);
    return value;
  }
  void copy(void* to, size_t size) {
    if (place + size > bytes.size()) throw std::runtime_error("the file of calls ends early");
    std::memcpy(to, bytes.data() + place, size);
    place += size;
  }
  std::string text() {
    std::string out(get<int64_t>(), 0);
    copy(out.data(), out.size());
    return out;
  }
  std::vector<int64_t> list() {
    std::vector<int64_t> out(get<int64_t>());
    for (int64_t& n : out) n = get<int64_t>();
    return out;
  }
  AtenTensorHandle tensor() {
    const int32_t dtype = int32_t(get<int64_t>());
    std::vector<int64_t> sizes = list(), strides = list();
    AtenTensorHandle t = make(dtype, sizes, strides);
    copy(t->data(), t->span() * t->width());
    return t;
  }
};

static void write(std::ofstream& to, const AtenTensorOpaque& t) {
  auto number = [&](int64_t n) { to.write(reinterpret_cast<const char*>(&n), sizeof n); };
  number(t.dtype);
  number(int64_t(t.sizes.size()));
  for (int64_t size : t.sizes) number(size);
  for (int64_t i = 0; i < t.numel(); ++i) to.write(t.data() + t.at(i) * t.width(), t.width());
}

template <class T>
static StableIValue word(T value) {
  StableIValue out = 0;
  std::memcpy(&out, &value, sizeof value);
  return out;
}

int main(int, char** argv) {
  functions()["pack_gguf"] = pack_gguf;
  if (!llmc_use_level(argv[1])) return std::fprintf(stderr, "no kernels for %s\n", argv[1]), 1;
  std::ifstream file(argv[2], std::ios::binary);
  Reader in{{std::istreambuf_iterator<char>(file), {}}};
  std::ofstream out(argv[3], std::ios::binary);
  for (int64_t calls = in.get<int64_t>(); calls > 0; --calls) {
    const std::string name = in.text();
    const int64_t results = in.get<int64_t>(), count = in.get<int64_t>();
    std::vector<StableIValue> stack(std::max(results, count));
    std::vector<std::unique_ptr<AtenTensorOpaque>> kept;
    for (int64_t i = 0; i < count; ++i) {
      const char kind = in.get<char>();
      const bool optional = in.get<char>() != 0;
      if (kind == 'n') continue;  // None is a null
      if (kind == 't') {
        kept.emplace_back(in.tensor());
        stack[i] = word(new AtenTensorOpaque(*kept.back()));
      }
      if (kind == 'd') stack[i] = word(in.get<double>());
      if (kind == 'i') stack[i] = word(in.get<int64_t>());
      if (kind == 's') stack[i] = word(new StringOpaque{in.text()});
      if (optional) stack[i] = word(new StableIValue(stack[i]));
    }
    try {
      functions().at(name)(stack.data(), uint64_t(count), uint64_t(results));
    } catch (const std::exception& error) {
      return std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what()), 1;
    }
    for (int64_t i = 0; i < results; ++i) {
      const std::unique_ptr<AtenTensorOpaque> t(reinterpret_cast<AtenTensorHandle>(stack[i]));
      write(out, *t);
    }
    for (const auto& t : kept) write(out, *t);
  }
}
