// The parts of the CUDA language that a host compiler lacks: keywords, vector types, mathematics.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ _Pragma("GCC error \"no __shared__ in steps: use shared_memory<Layout>()\"")

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) int4 {
    int32_t x, y, z, w;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int4 make_int4(int32_t x, int32_t y, int32_t z, int32_t w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

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

// glibc declares these two, but does not export them.
extern "C" inline float __expf(float x) noexcept { return expf(x); }
extern "C" inline float __logf(float x) noexcept { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
