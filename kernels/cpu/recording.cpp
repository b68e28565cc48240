// The C functions by which Python records ops and runs them again (recording.py).
#include "recording.h"

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

// From here on this thread records.
void llmc_record() {
  delete recorder;
  recorder = new llmc::Recorder;
}

// After each op: whether its kernels are recorded, else torch has to call it.
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

// What was recorded since the last one, to be freed by llmc_free_recording; null: no call.
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

// False where memory ran out.
bool llmc_replay(const llmc::Recording* recording) {
  try {
    for (const auto& call : recording->calls) call();
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

void llmc_free_recording(llmc::Recording* recording) {
  delete recording;
}
}
