// The parts of the CUDA language that a host compiler lacks: keywords, the indices of the running
// thread, vector types, mathematics.
#pragma once
#include <stdint.h>
#include <stdio.h>  // nvcc declares printf without it
#include <string.h>

#include <type_traits>

// Leaves the special functions (Bessel, zeta, ...) out of libstdc++'s <math.h>: they take as long
// to compile as everything else that a simple step includes. <type_traits> defines it.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <math.h>

#include "launch_bounds.h"

#define __global__
#define __device__
#define __constant__
#define __grid_constant__
#define __shared__ _Pragma("GCC error \"no __shared__ in steps: use shared_memory<Layout>()\"")

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct uint3 {
    uint32_t x, y, z;
};

inline constinit thread_local uint3 threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

struct alignas(8) float2 {
    float x, y;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }

// As in CUDA, the minimum (or maximum) of a number and NaN is the number.
template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return a < b || b != b ? a : b;
    return static_cast<T>(a) < static_cast<T>(b) ? a : b;
}

template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return a > b || b != b ? a : b;
    return static_cast<T>(a) > static_cast<T>(b) ? a : b;
}
