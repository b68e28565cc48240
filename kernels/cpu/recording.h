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
#include <tuple>

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

namespace recorded {

template <auto kMember, class Function>
struct Entry;

template <auto kMember, class Result, class... Arguments>
struct Entry<kMember, Result (*)(Arguments...)> {
  static Result call(Arguments... arguments) {
    const auto function = chosen_kernels->*kMember;
    if constexpr (std::is_void_v<Result>) {
      function(arguments...);
      recorder->current.calls.push_back(
          [function, kept = std::tuple<std::decay_t<Arguments>...>(arguments...)] {
            std::apply(function, kept);
          });
    } else {
      return function(arguments...);  // a query about the machine
    }
  }
};

inline const Kernels kTable = {
    "",
#define LLMC_ENTRY(name) &Entry<&Kernels::name, decltype(Kernels::name)>::call,
    LLMC_KERNELS(LLMC_ENTRY)
#undef LLMC_ENTRY
};

}  // namespace recorded

// The table that the bindings call through.
struct KernelTable {
  const Kernels* operator->() const { return recorder ? &recorded::kTable : chosen_kernels; }
};
inline constexpr KernelTable kernels;

}  // namespace llmc
