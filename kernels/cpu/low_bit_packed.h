// Weights of 5 and 6 bits: several lines of a block hold 32 or 16 inputs. Kernels that do not read
// these themselves get the same values as lines of int8. See kernels/quantized_linear.py for the
// layout.
#pragma once

#include "low_bit.h"

namespace llmc {

// The lines of a unit, or the same words of some of its channels.
template <Format kFormat, class V>
struct Unit {
  static_assert(is_packed(kFormat));
  static constexpr bool kIs6 = kFormat == Format::int6;
  static constexpr int kLines = layout_of(kFormat).lines, kInputs = layout_of(kFormat).inputs;
  V line[kLines];

  // Inputs 4 i to 4 i + 3, as unsigned bytes.
  LLMC_METHOD V get(int i) const {
    if (kIs6) {
      if (i < kLines) return line[i] & 0x3f3f3f3fu;
      return (line[0] >> 6 & 0x03030303u) | (line[1] >> 4 & 0x0c0c0c0cu) |
             (line[2] >> 2 & 0x30303030u);
    }
    if (i < kLines) return line[i] & 0x1f1f1f1fu;
    if (i < 7) {
      const int first = 2 * (i - 5);
      return (line[first] >> 5 & 0x07070707u) | (line[first + 1] >> 2 & 0x18181818u);
    }
    return (line[kLines - 1] >> 5 & 0x07070707u) | (line[1] >> 4 & 0x08080808u) |
           (line[3] >> 3 & 0x10101010u);
  }
};

// The int8 lines of `inputs` inputs, whole units, minus `middle`.
template <Format kFormat>
void unpack(const uint8_t* from, int64_t inputs, uint32_t middle, uint8_t* to) {
  using U = Unit<kFormat, v16u>;
  constexpr uint32_t kTop = 0x80808080u;
  const uint32_t offset = middle * 0x01010101u;
  for (int64_t k = 0; k < inputs; k += U::kInputs, from += U::kLines * kLineBytes) {
    U unit;
#pragma GCC unroll 5
    for (int i = 0; i < U::kLines; ++i) {
      __builtin_prefetch(from + i * kLineBytes + 2048, 0, 3);
      unit.line[i] = load_as<v16u>(from + i * kLineBytes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < U::kInputs / 4; ++i, to += kLineBytes)
      store_as(to, ((unit.get(i) | kTop) - offset) ^ kTop);  // no byte borrows from the next one
  }
}

// The inverse of `unpack` and `Unit::get`, for all formats but fp8: lines with a byte for each of
// `inputs` inputs, whole units -> lines of `kFormat`. Returns the end of what it wrote.
template <Format kFormat>
uint8_t* pack_lines(const uint8_t* from, int64_t inputs, uint8_t* to) {
  constexpr Layout kUnit = layout_of(kFormat);
  constexpr int kLines = kUnit.lines, kCodes = kUnit.inputs / 4;
  for (int64_t k = 0; k < inputs; k += kUnit.inputs, from += kCodes * kLineBytes) {
    v16u x[kCodes];
    for (int i = 0; i < kCodes; ++i) x[i] = load_as<v16u>(from + i * kLineBytes);
    if constexpr (is_4_bit(kFormat)) {
      for (int i = 0; i < kLines; ++i) {
        const v16u a = x[2 * i] | x[2 * i] >> 4, b = x[2 * i + 1] | x[2 * i + 1] >> 4;
        x[i] = (a & 0xffu) | (a >> 8 & 0xff00u) | (b & 0xffu) << 16 | (b << 8 & 0xff000000u);
      }
    } else if constexpr (kFormat == Format::int6) {
      for (int i = 0; i < kLines; ++i) x[i] |= x[3] << (6 - 2 * i) & 0xc0c0c0c0u;
    } else if constexpr (kFormat == Format::int5) {
      for (int i = 0; i < 3; ++i) x[2 * i] |= x[5 + i] << 5 & 0xe0e0e0e0u;
      for (int i = 0; i < 2; ++i)
        x[2 * i + 1] |= (x[5 + i] << 2 & 0x60606060u) | (x[7] << (4 - i) & 0x80808080u);
    }
    for (int i = 0; i < kLines; ++i, to += kLineBytes) store_as(to, x[i]);
  }
  return to;
}

// Int8 lines of a block for inputs [k, k + inputs): those of the weight, or unpacked to `room`.
inline const uint8_t* int8_lines(const LowBitArgs& a, int64_t block, int64_t k, int64_t inputs,
                                 uint8_t* room) {
  const uint8_t* from = a.weight + (block * a.lines() + lines_of(a.stored, k)) * kLineBytes;
  if (!is_packed(a.stored)) return from;
  const uint32_t middle = a.has_minimum() ? 0 : middle_of(a.stored);
  (a.stored == Format::int6 ? &unpack<Format::int6> : &unpack<Format::int5>)(from, inputs, middle,
                                                                            room);
  return room;
}

}  // namespace llmc
