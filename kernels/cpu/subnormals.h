// x86 CPUs take over a hundred cycles for a float operation with a subnormal result, and attention
// has many: products of tiny probabilities. With random weights they took a third of a prompt's time.
#pragma once

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

namespace llmc {

// While it lives, results of this thread below 2^-126 are zeros. Inputs are read as they are: codes
// and scales may be subnormal. ARM CPUs need no such thing.
class FlushSubnormals {
#ifdef __x86_64__
 public:
  FlushSubnormals() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
#else
 public:
  FlushSubnormals() {}  // not trivial, so that unused variables do not warn
#endif
};

}  // namespace llmc
