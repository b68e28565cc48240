// write_segments, prepare_step, record_tokens and ban_words: a few hundred words per step, so they
// use one thread.
#include "sampling.h"

#include <cstring>
#include <limits>

namespace llmc {

void write_segments(int32_t* memory, const int32_t* delta) {
  const int64_t count = delta[0], first = delta[1];
  for (int64_t i = 0; i < count; ++i) {
    const int32_t *run = delta + first + 3 * i, target = run[0], length = run[1], source = run[2];
    std::memcpy(memory + target, delta + source, length * sizeof(int32_t));
  }
}

namespace {

struct Line {
  int32_t row, start, count, first, context, sample, samples, scored;
};

void write_tokens(const PrepareArgs& a, const Line& line) {
  const int32_t* history = a.history + line.row * a.history_stride;
  const int32_t* table = a.row_block_table + line.row * a.row_block_table_stride;
  const int64_t offset = a.position_offset[line.row];
  for (int64_t i = 0; i < line.count; ++i) {
    const int64_t position = line.start + i, out = line.first + i;
    a.token_ids[out] = history[position];
    a.positions[out] = position + offset;
    const int32_t* blocks = table + position / a.block_size * a.groups;
    for (int64_t g = 0; g < a.groups; ++g)
      a.slot_mapping[g * a.slot_group + out] =
          line.context > 0 ? blocks[g] * a.block_size + position % a.block_size : -1;
  }
}

void write_table(const PrepareArgs& a, const Line& line, int64_t request) {
  const int32_t* table = a.row_block_table + line.row * a.row_block_table_stride;
  const int64_t blocks = (line.context + a.block_size - 1) / a.block_size;
  int32_t* out = a.block_table + request * a.block_table_stride;
  if (a.groups == 1) {
    std::memcpy(out, table, blocks * sizeof(int32_t));
    return;
  }
  for (int64_t g = 0; g < a.groups; ++g, out += a.block_table_group)
    for (int64_t i = 0; i < blocks; ++i) out[i] = table[i * a.groups + g];
}

void write_samples(const PrepareArgs& a, const Line& line) {
  for (int64_t i = 0; i < line.samples; ++i) {
    const int64_t token = line.count - line.samples + i, out = line.sample + i;
    a.logits_index[out] = line.first + token;
    a.row[out] = line.row;
    a.length[out] = line.context > 0 && i >= line.scored ? line.start + token + 1 : 0;
  }
}

}  // namespace

void prepare_step(const PrepareArgs& a) {
  a.query_start[0] = 0;
  for (int64_t r = 0; r < a.requests; ++r) {
    Line line;
    std::memcpy(&line, a.work + r * 8, sizeof(line));
    write_tokens(a, line);
    write_samples(a, line);
    write_table(a, line, r);
    a.context_len[r] = line.context;
    a.request_row[r] = line.row;
    a.query_start[r + 1] = line.first + line.count;
  }
}

void record_tokens(int32_t* history, int64_t stride, const int64_t* row, const int32_t* length,
                   const int64_t* token, int64_t samples) {
  for (int64_t s = 0; s < samples; ++s)
    if (length[s] > 0) history[row[s] * stride + length[s]] = token[s] < 0 ? 0 : token[s];
}

namespace {

// Whether `output` of `count` tokens ends with the word's tokens before its last.
bool ends_with(const int32_t* output, int64_t count, const int32_t* word, int64_t places) {
  for (int64_t i = places - 2, o = count - 1; i >= 0 && word[i] >= 0; --i, --o)
    if (o < 0 || output[o] != word[i]) return false;
  return true;
}

}  // namespace

bool bans_words(const BanArgs& a, int64_t sample) {
  return a.num_words > 0 && a.words[a.row[sample] * a.words_stride + a.places - 1] >= 0;
}

void ban_words_of(const BanArgs& a, int64_t sample, float* logits) {
  const int64_t r = a.row[sample], prompt = a.prompt_len[r];
  const int32_t* output = a.history + r * a.history_stride + prompt;
  for (int64_t w = 0; w < a.num_words; ++w) {
    const int32_t* word = a.words + r * a.words_stride + w * a.places;
    const int32_t last = word[a.places - 1];
    if (last < 0) break;
    if (last < a.vocab && ends_with(output, a.length[sample] - prompt, word, a.places))
      logits[last] = -std::numeric_limits<float>::infinity();
  }
}

void ban_words(const BanArgs& a) {
  for (int64_t s = 0; s < a.samples; ++s) ban_words_of(a, s, a.logits + s * a.logits_stride);
}

}  // namespace llmc
