// A thread's scratch memory: page-aligned, kept between calls, and allocated sequentially.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace llmc {

class Arena {
 public:
  ~Arena() { std::free(base_); }
  void reset(size_t bytes) {
    bytes = (bytes + 8191) / 4096 * 4096;  // includes room for the rounding in take()
    if (bytes > size_) {
      std::free(base_);
      base_ = static_cast<char*>(std::aligned_alloc(4096, bytes));
      size_ = bytes;
      if (base_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    used_ = 0;
  }
  template <class U>
  U* take(size_t count) {
    U* p = reinterpret_cast<U*>(base_ + used_);
    used_ += (count * sizeof(U) + 63) / 64 * 64;
    return p;
  }

 private:
  char* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

}  // namespace llmc
