// The functions of torch's stable C ABI that tensor.h calls, as in torch 2.11 and later
// (torch/csrc/inductor/aoti_torch/c/shim.h, torch/csrc/stable/c/shim.h). They are declared here so
// that a build does not need torch at all; a test compiles them together with torch's own headers.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct StringOpaque;
using StringHandle = StringOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StableIValue = uint64_t;
using AOTITorchError = int32_t;  // 0: success

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_float8_e5m2();
int32_t aoti_torch_dtype_int16();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_uint8();

AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** borrowed);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** borrowed);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** borrowed);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* owned);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle owned);
AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle from, int32_t non_blocking);
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* owned);
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle self, int64_t dim,
                                              const int64_t* sizes, const int64_t* strides,
                                              int64_t added_offset, AtenTensorHandle* owned);

AOTITorchError torch_string_c_str(StringHandle string, const char** borrowed);
AOTITorchError torch_string_length(StringHandle string, size_t* length);
AOTITorchError torch_delete_string(StringHandle owned);
AOTITorchError torch_get_num_threads(uint32_t* threads);
AOTITorchError torch_call_dispatcher(const char* op, const char* overload, StableIValue* stack,
                                     uint64_t version);

AOTITorchError aoti_torch_library_init_fragment(const char* name, const char* file, uint32_t line,
                                                TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_init_impl(const char* name, const char* key, const char* file,
                                            uint32_t line, TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* op,
                                  void (*function)(StableIValue*, uint64_t, uint64_t),
                                  uint64_t version);
}
