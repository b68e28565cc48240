// From logits to tokens: the arguments of the kernels, and what sample_rows is made of.
#pragma once

#include "step_rows.h"

namespace llmc {

// The parameters in SampleArgs are tables, indexed by the rows of the other arguments.
void sample_rows(const SampleArgs&, const ProcessArgs&, const BanArgs&, int64_t ahead);

// process_logits and ban_words for one sample.
bool changes_logits(const ProcessArgs&, int64_t sample);  // whether process_row does more than copy
void process_row(const ProcessArgs&, int64_t sample, float* to);
bool bans_words(const BanArgs&, int64_t sample);  // whether the row has banned words
void ban_words_of(const BanArgs&, int64_t sample, float* logits);

}  // namespace llmc
