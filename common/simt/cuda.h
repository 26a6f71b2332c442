// The parts of the CUDA language that a host compiler lacks: keywords, vector types, mathematics.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#define __global__
#define __device__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ _Pragma("GCC error \"no __shared__ in steps: use shared_memory<Layout>()\"")

struct alignas(16) float4 {
    float x, y, z, w;
};

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// As in CUDA, of a number and NaN the number.
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
