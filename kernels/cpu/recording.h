// Records the kernel calls of a step, so that the step can be replayed without torch: the
// counterpart of a CUDA graph.
//
// While a thread records, the bindings call the kernels through a table that also records the call
// and keeps its memory alive. A binding that reads tensor values itself calls leave_out(): then
// torch has to call that op again.
#pragma once

#include "table.h"
#include "tensor.h"

#include <functional>
#include <memory>

namespace llmc {

using aten::Tensor;

struct Recording {
  std::vector<std::function<void()>> calls;
  std::vector<Tensor> memory;  // results and intermediate tensors
};

struct Recorder {
  std::unique_ptr<Recording> done = std::make_unique<Recording>();  // fully recorded ops
  Recording current;                                               // calls of the current op
  bool is_left_out = false;                                        // torch has to call it again
};

inline thread_local Recorder* recorder = nullptr;  // not null while this thread records

extern const Kernels recording_kernels;  // each function also records its call

// The table that the bindings call through.
struct KernelTable {
  const Kernels* operator->() const { return recorder ? &recording_kernels : chosen_kernels; }
};
inline constexpr KernelTable kernels;

}  // namespace llmc
