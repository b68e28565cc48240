// A linear whose weight is stored turned: [depth, channels], as some checkpoints stack their experts.
#pragma once

#include "kernels.h"

namespace llmc {

constexpr int64_t kMaxColumnRows = 4;  // of x: more are better multiplied by the library

// weight_stride is that from one input to the next.
void linear_columns(const LinearArgs&);

}  // namespace llmc
