// quantized_embedding: dequantized rows of a quantized weight. A row is a channel: one four-byte
// word in each line of its block.
#include "low_bit_packed.h"
#include "parallel.h"

namespace llmc {
namespace {

constexpr int64_t kWordBytes = kLineBytes / kChannels;

// Sixteen inputs from the lines that begin at `word`, plus the reader's offset().
template <Format kFormat>
LLMC_INLINE v16f values_at(const FloatReader<kFormat>& reader, const uint8_t* word) {
  using Reader = FloatReader<kFormat>;
  alignas(64) uint32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    uint32_t bits;
    std::memcpy(&bits, word + i / Reader::kInputs * kLineBytes, sizeof bits);
    lanes[i] = bits >> i % Reader::kInputs * (32 / Reader::kInputs);
  }
  return reader.get(load_as<v16u>(lanes), 0);
}

// Inputs from the lines that begin at `word`, with values as stored.
template <Format kFormat>
LLMC_INLINE void unpack_words(const uint8_t* word, uint8_t* to) {
  Unit<kFormat, uint32_t> unit;
  for (int i = 0; i < unit.kLines; ++i) std::memcpy(unit.line + i, word + i * kLineBytes, kWordBytes);
  for (int i = 0; i < unit.kInputs / 4; ++i) {
    const uint32_t four = unit.get(i);
    std::memcpy(to + 4 * i, &four, sizeof four);
  }
}

template <Format kFormat, class T>
void widen_packed_row(const LowBitArgs& a, int64_t channel, T* to) {
  using U = Unit<kFormat, uint32_t>;
  const int64_t block = channel / kChannels, lane = channel % kChannels;
  const uint8_t* word = a.weight + block * a.lines() * kLineBytes + lane * kWordBytes;
  const float middle = a.has_minimum() ? 0.0f : float(middle_of(kFormat));
  for (int64_t k = 0; k < a.depth; k += U::kInputs, word += U::kLines * kLineBytes) {
    uint8_t values[U::kInputs];
    unpack_words<kFormat>(word, values);
    for (int i = 0; i < U::kInputs; i += kLanes, to += kLanes) {
      const int64_t group = (k + i) / a.group;
      const v16f q = convert<v16f>((v16i)widen_from<v16u, uint8_t>(values + i));
      store(to, (q - middle) * scale_of(a, block, group)[lane] + minimum_of(a, block, group)[lane]);
    }
  }
}

template <Format kFormat, class T>
void widen_row(const LowBitArgs& a, int64_t channel, T* to) {
  constexpr int64_t kStep = kLanes / FloatReader<kFormat>::kInputs * kLineBytes;
  const int64_t block = channel / kChannels, lane = channel % kChannels;
  const uint8_t* word = a.weight + block * a.lines() * kLineBytes + lane * kWordBytes;
  const FloatReader<kFormat> reader(a);
  for (int64_t group = 0; group < a.groups; ++group) {
    const float scale = scale_of(a, block, group)[lane];
    const float zero = kFormat == Format::int4 ? zero_of(a, block, group)[lane] : 0.0f;
    const float offset = zero + reader.offset();
    const float minimum = minimum_of(a, block, group)[lane];
    for (int64_t k = 0; k < a.group; k += kLanes, to += kLanes, word += kStep)
      store(to, (values_at<kFormat>(reader, word) - offset) * scale + minimum);
  }
}

template <Format kFormat>
void run(const LowBitArgs& a, const int64_t* ids) {
  parallel_rows(a.rows, a.depth, a.threads, [&](int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) {
      using T = decltype(t);
      for (int64_t m = begin; m < end; ++m) {
        T* const to = static_cast<T*>(a.out) + m * a.depth;
        if (ids[m] < 0 || ids[m] >= a.channels)
          std::memset(to, 0, a.depth * sizeof(T));
        else if constexpr (is_packed(kFormat))
          widen_packed_row<kFormat>(a, ids[m], to);
        else
          widen_row<kFormat>(a, ids[m], to);
      }
    });
  });
}

}  // namespace

void quantized_embedding(const LowBitArgs& a, const int64_t* ids) {
  if (a.stored == Format::int5) return run<Format::int5>(a, ids);
  if (a.stored == Format::int6) return run<Format::int6>(a, ids);
  with_format(a.format, [&](auto format) { run<format()>(a, ids); });
}

}  // namespace llmc
