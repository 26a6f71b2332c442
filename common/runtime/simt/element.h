// bf16 and fp16 in software: the same bits on every host, whatever types its compiler knows. Local
// variables that nobody initializes are NaN.
#pragma once
#include <stdint.h>

#include <bit>
#include <type_traits>

struct bf16 {
    uint16_t bits = 0xFFFF;
};

struct fp16 {
    uint16_t bits = 0xFFFF;
};

using fp32 = float;

namespace simt {

template <typename T>  // of the matrices that tensor cores multiply
concept MatrixElement = std::is_same_v<T, bf16> || std::is_same_v<T, fp16>;

}  // namespace simt

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

inline float to_float(fp16 x) {
    // Exponent and mantissa, moved to their places in a float, give a number that is 2^112 too
    // small, also where fp16 is subnormal.
    const float magnitude = std::bit_cast<float>((x.bits & 0x7fffu) << 13) * 0x1p112f;
    uint32_t bits = std::bit_cast<uint32_t>(magnitude);
    if (magnitude >= 0x1p16f) bits |= 0x7f800000;  // infinity and NaN
    return std::bit_cast<float>(bits | (x.bits & 0x8000u) << 16);
}

// Rounds to nearest even.
template <typename T>
T from_float(float x);

template <>
inline fp32 from_float<fp32>(float x) {
    return x;
}

template <>
inline bf16 from_float<bf16>(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (x != x) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <>
inline fp16 from_float<fp16>(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (x != x) return {0x7fff};
    uint32_t rounded;
    if (magnitude >= 0x477ff000) {  // 65520 lies halfway between the largest number and the next
        rounded = 0x7c00;
    } else if (magnitude <
               0x38800000) {  // subnormal: adding 0.5 leaves multiples of 2^-24 in the mantissa
        rounded = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    } else {  // rebias the exponent from 127 to 15, drop 13 bits of mantissa
        rounded = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    }
    return {static_cast<uint16_t>(sign | rounded)};
}
