// The C functions with which Python records ops and replays them (recording.py).
#include "recording.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

namespace llmc {
namespace {

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

}  // namespace

const Kernels recording_kernels = {
    "",
#define LLMC_ENTRY(name) &Entry<&Kernels::name, decltype(Kernels::name)>::call,
    LLMC_KERNELS(LLMC_ENTRY)
#undef LLMC_ENTRY
};

}  // namespace llmc

namespace llmc::aten {

void leave_out() {
  if (recorder) recorder->is_left_out = true;
}

void keep(AtenTensorHandle handle) {
  if (!recorder) return;
  AtenTensorHandle shared;
  must(aoti_torch_new_tensor_handle(handle, &shared));
  recorder->current.memory.push_back(Tensor(shared));
}

}  // namespace llmc::aten

using llmc::recorder;

extern "C" {

// Starts recording on this thread.
void llmc_record() {
  delete recorder;
  recorder = new llmc::Recorder;
}

// Called after each op. Returns whether its kernels are recorded; if not, torch has to call it
// again.
bool llmc_record_op() {
  llmc::Recording& current = recorder->current;
  const bool is_whole = !std::exchange(recorder->is_left_out, false);
  if (is_whole) {
    llmc::Recording& done = *recorder->done;
    std::move(current.calls.begin(), current.calls.end(), std::back_inserter(done.calls));
    std::move(current.memory.begin(), current.memory.end(), std::back_inserter(done.memory));
  }
  current = {};
  return is_whole;
}

// Returns the calls since the last recording, to be freed by llmc_free_recording; null if there are
// none.
llmc::Recording* llmc_take_recording() {
  auto done = std::exchange(recorder->done, std::make_unique<llmc::Recording>());
  if (done->calls.empty()) {
    std::move(done->memory.begin(), done->memory.end(), std::back_inserter(recorder->done->memory));
    return nullptr;
  }
  return done.release();
}

void llmc_stop_recording() {
  delete std::exchange(recorder, nullptr);
}

// Records a lookup of rows that torch has just done: row index[i] of `table` [rows] is row i of
// `out` [count], `bytes` bytes each. The index is int64 or int32. The caller keeps the memory alive.
void llmc_record_rows(const char* table, int64_t rows, const void* index, bool is_long,
                      int64_t count, char* out, int64_t bytes) {
  recorder->done->calls.push_back([=] {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = is_long ? static_cast<const int64_t*>(index)[i]
                                  : static_cast<const int32_t*>(index)[i];
      if (row < 0 || row >= rows)
        throw std::out_of_range("row " + std::to_string(row) + " of a table of " +
                                std::to_string(rows));
      std::memcpy(out + i * bytes, table + row * bytes, bytes);
    }
  });
}

// Returns null, or an error's message, which is valid until this thread replays again.
const char* llmc_replay(const llmc::Recording* recording) {
  static thread_local std::string message;
  const llmc::FlushSubnormals flush;
  try {
    for (const auto& call : recording->calls) call();
  } catch (const std::bad_alloc&) {
    message = "out of memory";
    return message.c_str();
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}

void llmc_free_recording(llmc::Recording* recording) {
  delete recording;
}
}
