// quantized_linear for many rows with float32 tiles, on CPUs that have neither tiles nor pairs of
// bf16, and for x of other dtypes: a part of the weight is dequantized and multiplied.
#include "low_bit.h"
#include "low_bit_bytes.h"
#include "low_bit_packed.h"
#include "matmul.h"

namespace llmc {
namespace {

#ifdef LLMC_FOUR_INPUTS
template <class V>
LLMC_INLINE vf part_of(const V& lanes, int part) {
  if constexpr (kIsPair<V>) {
    return part ? lanes.hi : lanes.lo;
  } else {
    return lanes;
  }
}
#endif

template <Format kFormat>
struct LowBit {
  using Reader = FloatReader<kFormat>;
  static constexpr bool kByInput = true;
  const LowBitArgs& a;
  Reader reader{a};
#ifdef LLMC_FOUR_INPUTS
  FourReader<kFormat> fours{a};
#endif

  void widen(int64_t n, int64_t count, int64_t k, int64_t depth, float* to) const {
    for (int64_t c = 0; c < count; c += kChannels) widen_block((n + c) / kChannels, k, depth, to + c);
  }

  LLMC_METHOD void fetch(int64_t n, int64_t k, int64_t m, int several) const {
    constexpr int64_t kBlocks = matmul::kBlock / kChannels;
    constexpr int64_t kLines = kBlocks * matmul::kFetchStep / Reader::kInputs;
    const uint8_t* line =
        a.weight + (n / kChannels * a.lines() + lines_of(a.stored, k)) * kLineBytes;
    for (int64_t i = kLines * m / matmul::kBlock; i < kLines * (m + several) / matmul::kBlock; ++i)
      __builtin_prefetch(line + (i % kBlocks * a.lines() + i / kBlocks) * kLineBytes, 0, 2);
  }

  void widen_block(int64_t block, int64_t k, int64_t depth, float* to) const {
    constexpr int64_t kUnpacked = 64;  // inputs
    alignas(64) uint8_t room[kUnpacked * kChannels];
    const uint8_t* line = nullptr;
    v16f scale = {}, offset = {}, minimum = {};
    int64_t group = k / a.group, next = 0;  // where it begins, from k on
    for (int64_t i = 0; i < depth; i += Reader::kInputs, line += kLineBytes) {
      if (i % kUnpacked == 0)
        line = int8_lines(a, block, k + i, std::min(kUnpacked, depth - i), room);
      if (i == next) {
        scale = scale_of(a, block, group);
        if (kFormat == Format::int4) offset = zero_of(a, block, group) + Reader::offset();
        minimum = minimum_of(a, block, group);
        next = ++group * a.group - k;
      }
#ifdef LLMC_FOUR_INPUTS
      if constexpr (reads_fours(kFormat)) {
        widen_fours(fours, line, scale, to);
        to += Reader::kInputs * matmul::kBlock;
        continue;
      }
#endif
      const v16u bytes = load_as<v16u>(line);
#pragma GCC unroll 8
      for (int step = 0; step < Reader::kSteps; ++step, to += matmul::kBlock) {
        v16f value = reader.get(bytes, step);
        if (kFormat == Format::int4) value -= offset;
        store(to, value * scale + minimum);
      }
    }
  }

#ifdef LLMC_FOUR_INPUTS
  LLMC_METHOD void widen_fours(const FourReader<kFormat>& fours, const uint8_t* line, v16f scale,
                               float* to) const {
    using Fours = FourReader<kFormat>;
    constexpr int kParts = kLineBytes / sizeof(typename Fours::Line);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const vf scaled = part_of(scale, part);
      const auto bytes = load_as<typename Fours::Line>(line + part * sizeof(typename Fours::Line));
#pragma GCC unroll 2
      for (int step = 0; step < Fours::kSteps; ++step) {
        const auto values = fours.get(bytes, step);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          store(to + Fours::input(step, i) * matmul::kBlock + part * kNative,
                values.value[i] * scaled);
      }
    }
  }
#endif
};

template <Format kFormat>
void run(const LowBitArgs& a) {
  const LinearArgs product{a.dtype, a.x, nullptr, a.bias, a.out, a.rows, a.depth, a.channels,
                           a.x_stride, 0, a.channels, a.threads};
  matmul::multiply(product, LowBit<kFormat>{a});
}

}  // namespace

void quantized_many_rows(const LowBitArgs& a) {
  with_format(a.format, [&](auto format) { run<format()>(a); });
}

}  // namespace llmc
