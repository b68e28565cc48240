// Torch bindings of step_rows.cpp. Indices come from the scheduler, so sizes are checked but values
// are not.
#include "bindings.h"

namespace llmc::ops {
namespace {

void write_segments(const Tensor& memory, const Tensor& delta) {
  kernels->write_segments(dense<int32_t>(memory, "memory", 1, 0),
                          dense<int32_t>(delta, "delta", 1, 2));
}

void prepare_step(const Tensor& work, const Tensor& history, const Tensor& row_block_table,
                  const Tensor& position_offset, int64_t block_size, const Tensor& token_ids,
                  const Tensor& positions,
                  const Tensor& slot_mapping, const Tensor& query_start,
                  const Tensor& context_len, const Tensor& block_table,
                  const Tensor& request_row, const Tensor& logits_index, const Tensor& row,
                  const Tensor& length) {
  TORCH_CHECK(work.dim() == 2 && work.size(1) == 8 && work.is_contiguous(),
              "work must be a dense [R, 8], got ", work.sizes());
  const int64_t requests = work.size(0), tokens = token_ids.size(0), samples = row.size(0);
  PrepareArgs a;
  a.work = dense<int32_t>(work, "work", 2, 0);
  a.requests = requests;
  a.history = dense<int32_t>(history, "history", 2, 1);
  a.history_stride = history.stride(0);
  a.row_block_table = dense<int32_t>(row_block_table, "row_block_table", 2, 1);
  a.row_block_table_stride = row_block_table.stride(0);
  a.position_offset = dense<int32_t>(position_offset, "position_offset", 1, history.size(0));
  a.block_size = block_size;
  a.groups = slot_mapping.size(0);
  TORCH_CHECK(slot_mapping.dim() == 2 && block_table.dim() == 3 && slot_mapping.size(1) >= tokens &&
                  block_table.size(0) == a.groups && block_table.size(1) >= requests,
              "slot_mapping ", slot_mapping.sizes(), " and block_table ", block_table.sizes(),
              " do not fit ", tokens, " tokens of ", requests, " requests");
  a.token_ids = dense<int64_t>(token_ids, "token_ids", 1, 0);
  a.positions = dense<int64_t>(positions, "positions", 1, tokens);
  a.slot_mapping = dense<int64_t>(slot_mapping, "slot_mapping", 2, 0);
  a.slot_group = slot_mapping.stride(0);
  a.query_start = dense<int32_t>(query_start, "query_start", 1, requests + 1);
  a.context_len = dense<int32_t>(context_len, "context_len", 1, requests);
  a.block_table = dense<int32_t>(block_table, "block_table", 3, 0);
  a.block_table_group = block_table.stride(0);
  a.block_table_stride = block_table.stride(1);
  a.request_row = dense<int64_t>(request_row, "request_row", 1, requests);
  a.logits_index = dense<int64_t>(logits_index, "logits_index", 1, samples);
  a.row = dense<int64_t>(row, "row", 1, samples);
  a.length = dense<int32_t>(length, "length", 1, samples);
  kernels->prepare_step(a);
}

void record_tokens(const Tensor& history, const Tensor& row, const Tensor& length,
                   const Tensor& token) {
  const int64_t samples = row.size(0);
  kernels->record_tokens(dense<int32_t>(history, "history", 2, 1), history.stride(0),
                      dense<int64_t>(row, "row", 1, samples),
                      dense<int32_t>(length, "length", 1, samples),
                      dense<int64_t>(token, "token", 1, samples), samples);
}

const at::Ops kOps = {
    {"write_segments", &at::boxed<&write_segments>},
    {"prepare_step", &at::boxed<&prepare_step>},
    {"record_tokens", &at::boxed<&record_tokens>},
};

}  // namespace
}  // namespace llmc::ops
