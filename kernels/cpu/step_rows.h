// The kernels of step_rows.cpp: row tables, deltas, the packed inputs of a step, and ops that use
// the rows after it.
#pragma once

#include "kernels.h"

namespace llmc {

void write_segments(int32_t* memory, const int32_t* delta);

struct PrepareArgs {
  const int32_t* work;  // [requests, 8]
  int64_t requests;
  const int32_t* history;
  int64_t history_stride;
  const int32_t* row_block_table;
  int64_t row_block_table_stride;
  const int32_t* position_offset;
  int64_t block_size, groups;  // a table row has a block of each group, then the next ones
  int64_t *token_ids, *positions, *slot_mapping;
  int64_t slot_group;  // stride of a group
  int32_t *query_start, *context_len;
  int32_t* block_table;
  int64_t block_table_stride, block_table_group;
  int64_t *request_row, *logits_index, *row;
  int32_t* length;
};

void prepare_step(const PrepareArgs& a);

void record_tokens(int32_t* history, int64_t stride, const int64_t* row, const int32_t* length,
                   const int64_t* token, int64_t samples);

struct BanArgs {
  float* logits;  // [samples, vocab]
  int64_t samples, vocab, logits_stride;
  const int64_t* row;
  const int32_t *length, *history, *prompt_len;
  int64_t history_stride;
  const int32_t* words;  // [N, num_words, places]
  int64_t words_stride, num_words, places;
};

void ban_words(const BanArgs& a);

}  // namespace llmc
