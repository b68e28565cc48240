// Repacks blocks of GGUF files for quantized_linear. The same in numpy, which is the reference, and
// where the types are documented: llmc/weights/gguf/blocks.py.
//
// Each type is a struct with the format and size of its blocks, and two functions:
// `values` writes a block's values as bytes, in the order of its inputs; `scales` writes its scales
// and any minimums, or the words of a superblock.
#include "low_bit_packed.h"
#include "transpose.h"

namespace llmc {
namespace {

constexpr int64_t kPiece = kSuperblock;  // inputs that are unpacked at a time

template <class T>
LLMC_INLINE T read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// A channel's scales. Those of the other channels of its block are between them.
template <class T>
struct Scales {
  T* first;
  LLMC_METHOD void put(int64_t i, T value) const { first[i * kChannels] = value; }
};

// The lower halves of some bytes, then their upper halves.
template <int kBytes>
LLMC_INLINE void read_nibbles(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < kBytes; i += 8) {
    const auto both = read<uint64_t>(from + i);
    const uint64_t low = both & 0x0f0f0f0f0f0f0f0fu, high = both >> 4 & 0x0f0f0f0f0f0f0f0fu;
    std::memcpy(to + i, &low, sizeof low);
    std::memcpy(to + kBytes + i, &high, sizeof high);
  }
}

// 64 bytes with two bits of 256 inputs: each run of 32 is in the same bits of 32 bytes.
LLMC_INLINE void read_two_bits(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 32; ++j) to[32 * i + j] = from[32 * (i / 4) + j] >> 2 * (i % 4) & 3;
}

// Adds some bits of 32 bytes to a run of 32 inputs, above `kBelow` bits.
template <int kBelow>
LLMC_INLINE void add_bits(const uint8_t* from, int shift, int mask, uint8_t* to) {
  for (int i = 0; i < 32; ++i) to[i] |= (from[i] >> shift & mask) << kBelow;
}

// Adds bit i of a 32-bit word to input i, above four bits.
LLMC_INLINE void add_fifth_bits(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < 4; ++i) {
    const uint64_t own = from[i] * 0x0101010101010101u & 0x8040201008040201u;
    const uint64_t top = own + 0x7f7f7f7f7f7f7f7fu;  // bit 7 of a byte: whether it was not 0
    const uint64_t sum = read<uint64_t>(to + 8 * i) | (top >> 3 & 0x1010101010101010u);
    std::memcpy(to + 8 * i, &sum, sizeof sum);
  }
}

template <Format kOwn, int kHead, int kRest, bool kHasMinimum = false>
struct Short {  // blocks of 32 inputs: a float16 scale and any minimum, then `kRest` bytes
  static constexpr Format kFormat = kOwn;
  static constexpr int kValues = 32, kBytes = kHead + kRest, kScales = 1;
  static constexpr bool kMinimum = kHasMinimum;
  using Scale = uint16_t;
  static void scales(const uint8_t* block, Scales<Scale> scale, Scales<Scale> minimum) {
    scale.put(0, read<uint16_t>(block));
    if (kMinimum) minimum.put(0, read<uint16_t>(block + 2));
  }
};

template <Format kOwn, int kHead, bool kHasMinimum = false>
struct Nibbles : Short<kOwn, kHead, 16, kHasMinimum> {
  static void values(const uint8_t* block, uint8_t* to) { read_nibbles<16>(block + kHead, to); }
};

template <int kHead, bool kHasMinimum>
struct FiveBits : Short<Format::int5, kHead, 20, kHasMinimum> {
  static void values(const uint8_t* block, uint8_t* to) {
    read_nibbles<16>(block + kHead + 4, to);
    add_fifth_bits(block + kHead, to);
  }
};

using Q4_0 = Nibbles<Format::int4, 2>;
using Q4_1 = Nibbles<Format::int4, 4, true>;
using Q5_0 = FiveBits<2, false>;
using Q5_1 = FiveBits<4, true>;
using IQ4_NL = Nibbles<Format::iq4, 2>;

struct Q8_0 : Short<Format::int8, 2, 32> {
  static void values(const uint8_t* block, uint8_t* to) { std::memcpy(to, block + 2, kValues); }
};

struct MXFP4 : Nibbles<Format::mxfp4, 1> {
  using Scale = uint8_t;
  static void scales(const uint8_t* block, Scales<Scale> scale, Scales<Scale>) {
    scale.put(0, block[0]);
  }
};

// Superblocks, whose words are described in kernels/quantized_linear.py.
template <Format kOwn, int kSize, int kWords>
struct Super {
  static constexpr Format kFormat = kOwn;
  static constexpr int kValues = kSuperblock, kBytes = kSize, kScales = kWords;
  static constexpr bool kMinimum = false;
  using Scale = uint16_t;
};

// A factor, then pairs of steps.
template <int kSteps>
LLMC_INLINE void put_steps(const uint8_t* factor, const uint8_t* steps, Scales<uint16_t> to) {
  to.put(0, read<uint16_t>(factor));
  for (int i = 0; i < kSteps / 2; ++i) to.put(1 + i, read<uint16_t>(steps + 2 * i));
}

// The factor of scales, and that of minimums, which files store as what is subtracted.
LLMC_INLINE void put_factors(const uint8_t* both, Scales<uint16_t> to) {
  to.put(0, read<uint16_t>(both));
  to.put(1, read<uint16_t>(both + 2) ^ 0x8000);
}

template <Format kOwn, int kSize>
struct SixBitSteps : Super<kOwn, kSize, 10> {  // scales and minimums of eight groups
  static void scales(const uint8_t* block, Scales<uint16_t> scale, Scales<uint16_t>) {
    put_factors(block, scale);
    const auto low = read<uint32_t>(block + 4), high = read<uint32_t>(block + 8);
    const auto mixed = read<uint32_t>(block + 12);
    const uint32_t step[] = {low & 0x3f3f3f3f,
                             (mixed & 0x0f0f0f0f) | (low >> 6 & 0x03030303) << 4};
    const uint32_t least[] = {high & 0x3f3f3f3f,
                              (mixed >> 4 & 0x0f0f0f0f) | (high >> 6 & 0x03030303) << 4};
    for (int i = 0; i < 8; ++i) {
      const uint32_t own = step[i / 4] >> 8 * (i % 4), minimum = least[i / 4] >> 8 * (i % 4);
      scale.put(2 + i, uint16_t((own & 0xff) | minimum << 8));
    }
  }
};

struct Q4_K : SixBitSteps<Format::int4, 144> {
  static void values(const uint8_t* block, uint8_t* to) {
    for (int i = 0; i < 4; ++i) read_nibbles<32>(block + 16 + 32 * i, to + 64 * i);
  }
};

struct Q5_K : SixBitSteps<Format::int5, 176> {
  static void values(const uint8_t* block, uint8_t* to) {
    for (int i = 0; i < 4; ++i) read_nibbles<32>(block + 48 + 32 * i, to + 64 * i);
    for (int i = 0; i < 8; ++i) add_bits<4>(block + 16, i, 1, to + 32 * i);
  }
};

struct Q6_K : Super<Format::int6, 210, 9> {
  static void scales(const uint8_t* block, Scales<Scale> scale, Scales<Scale>) {
    put_steps<16>(block + 208, block + 192, scale);
  }
  static void values(const uint8_t* block, uint8_t* to) {
    for (int half = 0; half < 2; ++half, to += 128) {
      read_nibbles<64>(block + 64 * half, to);
      for (int i = 0; i < 4; ++i) add_bits<4>(block + 128 + 32 * half, 2 * i, 3, to + 32 * i);
    }
  }
};

struct Q2_K : Super<Format::int4, 84, 18> {
  static void scales(const uint8_t* block, Scales<Scale> scale, Scales<Scale>) {
    put_factors(block + 80, scale);
    for (int i = 0; i < 16; ++i) scale.put(2 + i, (block[i] & 15) | block[i] >> 4 << 8);
  }
  static void values(const uint8_t* block, uint8_t* to) { read_two_bits(block + 16, to); }
};

struct Q3_K : Super<Format::int4, 110, 9> {
  static void scales(const uint8_t* block, Scales<Scale> scale, Scales<Scale>) {
    uint8_t steps[16];
    read_nibbles<8>(block + 96, steps);
    for (int i = 0; i < 4; ++i) {
      const uint32_t high = read<uint32_t>(block + 104) >> 2 * i & 0x03030303;
      const uint32_t step = read<uint32_t>(steps + 4 * i) | high << 4;
      const uint32_t centered = ((step | 0x80808080) - 0x20202020) ^ 0x80808080;  // minus 32
      std::memcpy(steps + 4 * i, &centered, sizeof centered);
    }
    put_steps<16>(block + 108, steps, scale);
  }
  static void values(const uint8_t* block, uint8_t* to) {  // -4 to 3, as int4, whose zero is 8
    read_two_bits(block + 32, to);
    for (int i = 0; i < 8; ++i) add_bits<2>(block, i, 1, to + 32 * i);
    for (int i = 0; i < kValues; ++i) to[i] += 4;
  }
};

struct IQ4_XS : Super<Format::iq4, 136, 5> {
  static void scales(const uint8_t* block, Scales<Scale> scale, Scales<Scale>) {
    const int high = read<uint16_t>(block + 2);
    uint8_t steps[8];
    for (int i = 0; i < 8; ++i) {
      const int low = block[4 + i / 2] >> 4 * (i % 2) & 15;
      steps[i] = uint8_t((low | (high >> 2 * i & 3) << 4) - 32);
    }
    put_steps<8>(block, steps, scale);
  }
  static void values(const uint8_t* block, uint8_t* to) {
    for (int i = 0; i < 8; ++i) read_nibbles<16>(block + 8 + 16 * i, to + 32 * i);
  }
};

template <class Type>
void pack(const GgufArgs& a) {
  using Scale = typename Type::Scale;
  alignas(64) float rows[kChannels][kPiece / 4] = {}, lines[kPiece / 4][kChannels];  // of 4 bytes
  const auto block_at = [&](int64_t channel, int64_t input) {
    const int64_t row = a.order ? a.order[channel] : channel;
    return a.rows + row * a.row_bytes + input / Type::kValues * Type::kBytes;
  };
  uint8_t* weight = a.weight;
  Scale *scales = static_cast<Scale*>(a.scale), *minimums = static_cast<Scale*>(a.minimum);
  for (int64_t n = 0; n < a.channels; n += kChannels)
    for (int64_t k = 0; k < a.depth; k += kPiece) {
      const int64_t inputs = std::min(kPiece, a.depth - k), blocks = inputs / Type::kValues;
      for (int64_t c = 0; c < kChannels; ++c) {
        const uint8_t* from = block_at(n + c, k);
        // sixteen rows are more streams than a processor prefetches by itself
        const uint8_t* next = block_at(std::min(n + c + kChannels, a.channels - 1), k);
        for (int64_t i = 0; i < blocks * Type::kBytes; i += kLineBytes)
          __builtin_prefetch(next + i);
        auto* to = reinterpret_cast<uint8_t*>(rows[c]);
        for (int64_t i = 0; i < blocks; ++i, from += Type::kBytes, to += Type::kValues) {
          Type::values(from, to);
          Type::scales(from, {scales + i * Type::kScales * kChannels + c},
                       {Type::kMinimum ? minimums + i * kChannels + c : nullptr});
        }
      }
      scales += blocks * Type::kScales * kChannels;
      if (Type::kMinimum) minimums += blocks * kChannels;
      for (int64_t i = 0; i < inputs / 4; i += kLanes)
        transpose(&rows[0][i], kPiece / 4, lines[i], kChannels);
      weight = pack_lines<Type::kFormat>(reinterpret_cast<const uint8_t*>(lines), inputs, weight);
    }
}

using Pack = void (*)(const GgufArgs&);

Pack packer_of(int32_t type) {
  switch (type) {
    case 2: return &pack<Q4_0>;
    case 3: return &pack<Q4_1>;
    case 6: return &pack<Q5_0>;
    case 7: return &pack<Q5_1>;
    case 8: return &pack<Q8_0>;
    case 10: return &pack<Q2_K>;
    case 11: return &pack<Q3_K>;
    case 12: return &pack<Q4_K>;
    case 13: return &pack<Q5_K>;
    case 14: return &pack<Q6_K>;
    case 20: return &pack<IQ4_NL>;
    case 23: return &pack<IQ4_XS>;
    case 39: return &pack<MXFP4>;
    default: return nullptr;
  }
}

}  // namespace

bool pack_gguf(const GgufArgs& a) {
  const Pack pack_rows = packer_of(a.type);
  if (pack_rows) pack_rows(a);
  return pack_rows != nullptr;
}

}  // namespace llmc
