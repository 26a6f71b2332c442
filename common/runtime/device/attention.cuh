// What every step includes, for nvcc. common/runtime/simt/attention.cuh is its twin for the host compiler.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;
using Element = ELEMENT;  // -DELEMENT=bf16, fp16 or fp32

#include "../launch.h"

// The block's dynamic shared memory, laid out as the struct T.
template <typename T>
__device__ T& shared_memory() {
    extern __shared__ __align__(1024) unsigned char shared_memory_bytes[];
    return *reinterpret_cast<T*>(shared_memory_bytes);
}

// 2^(LOG2_E x) = exp x, and LN_2 log2 x = log x: the hardware's exponential and logarithm have base 2.
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(fp16 x) { return __half2float(x); }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }

// Rounds to nearest even.
template <typename T>
__device__ T from_float(float x);
template <>
__device__ inline fp32 from_float<fp32>(float x) {
    return x;
}
template <>
__device__ inline fp16 from_float<fp16>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ inline bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}

// Four floats in one 16-byte access; p must be 16-byte aligned.
__device__ inline float4 load_float4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ inline void store_float4(float* p, float4 x) { *reinterpret_cast<float4*>(p) = x; }

// Four floats, rounded, in one 8-byte access; p must be 8-byte aligned.
template <typename T>
__device__ void store_float4(T* p, float4 x) {
    const T elements[4] = {from_float<T>(x.x), from_float<T>(x.y), from_float<T>(x.z),
                           from_float<T>(x.w)};
    uint2 bits;
    memcpy(&bits, elements, sizeof(bits));
    *reinterpret_cast<uint2*>(p) = bits;
}

// VEC elements in one 16-byte access, converted to or from float; p must be 16-byte aligned.
constexpr int VEC = 16 / sizeof(Element);

__device__ inline void load_vector(float (&x)[VEC], const Element* p) {
    const uint4 bits = *reinterpret_cast<const uint4*>(p);
    Element elements[VEC];
    memcpy(elements, &bits, sizeof(bits));
#pragma unroll
    for (int i = 0; i < VEC; ++i) x[i] = to_float(elements[i]);
}

__device__ inline void store_vector(Element* p, const float (&x)[VEC]) {
    Element elements[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) elements[i] = from_float<Element>(x[i]);
    uint4 bits;
    memcpy(&bits, elements, sizeof(bits));
    *reinterpret_cast<uint4*>(p) = bits;
}
