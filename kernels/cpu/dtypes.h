// Dispatches a run-time dtype to a type.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace llmc {

// run(T()) for T = float, bf16 or f16.
template <class Run>
LLMC_INLINE decltype(auto) with_type(Dtype dtype, const Run& run) {
  switch (dtype) {
    case Dtype::bf16: return run(bf16{});
    case Dtype::f16: return run(f16{});
    default: return run(float{});
  }
}

}  // namespace llmc
