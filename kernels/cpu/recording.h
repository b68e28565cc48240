// What the kernels of a step were called with, so that the step can be run again without torch:
// what a CUDA graph is on a GPU.
//
// While a thread records, the bindings call the kernels through a table that also notes the call and
// keeps the memory it names. A binding that does work of its own with the values of a tensor calls
// leave_out(): torch has to call that op again.
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
  std::vector<Tensor> memory;  // of results and in between
};

struct Recorder {
  std::unique_ptr<Recording> done = std::make_unique<Recording>();  // ops that are recorded whole
  Recording current;                                               // what the op at hand added
  bool is_left_out = false;                                        // torch has to call it
};

inline thread_local Recorder* recorder = nullptr;  // of this thread, while it records

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
      return function(arguments...);  // a question about the machine
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
