// The warp's matrix instructions whose register layout is known (sm_80; stmatrix sm_90), for 16-bit
// elements. The layouts are the PTX ISA's, "Matrix fragments for mma.m16n8k16" and "ldmatrix".
// common/runtime/simt/mma.cuh is the twin for the host compiler.
#pragma once
#include "attention.cuh"

// Four 8x8 matrices from shared memory. Lane i names row i % 8 of matrix i / 8: 8 elements, 16-byte
// aligned. In r[m] lane i gets the elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4 of matrix m,
// the first one in the lower half.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const Element* row) {
    const uint32_t address = __cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed: in r[m] lane i gets the elements i / 4 of the rows 2 (i % 4)
// and 2 (i % 4) + 1 of matrix m.
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const Element* row) {
    const uint32_t address = __cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Four 8x8 matrices to shared memory, from the registers where ldmatrix_x4 leaves them.
__device__ inline void stmatrix_x4(Element* row, const uint32_t (&r)[4]) {
    const uint32_t address = __cvta_generic_to_shared(row);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// D += A B with A [16, 16] and B [16, 8] of T, D [16, 8] of float. Of lane i, with g = i / 4 and
// t = i % 4, and the first element in the lower half:
//     a[0] = A[g, 2t], A[g, 2t + 1]            a[1] = A[g + 8, 2t], A[g + 8, 2t + 1]
//     a[2] = A[g, 2t + 8], A[g, 2t + 9]        a[3] = A[g + 8, 2t + 8], A[g + 8, 2t + 9]
//     b0 = B[2t, g], B[2t + 1, g]              b1 = B[2t + 8, g], B[2t + 9, g]
//     d[0], d[1] = D[g, 2t], D[g, 2t + 1]      d[2], d[3] = D[g + 8, 2t], D[g + 8, 2t + 1]
template <typename T>
__device__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma_m16n8k16<fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats, rounded to nearest even, in one register: lo in the lower half.
template <typename T>
__device__ uint32_t cvt_rn_x2(float lo, float hi);
template <>
__device__ inline uint32_t cvt_rn_x2<bf16>(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}
template <>
__device__ inline uint32_t cvt_rn_x2<fp16>(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}

// The maximum, and the sum, over the 4 lanes of a quad, which share a row of D; known to all of them.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// 2^x with a relative error of 2^-22; 0 where it would be subnormal.
__device__ inline float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2 of a normal number, with a relative error of 2^-22, between 0.5 and 2 an absolute one.
__device__ inline float lg2_approx_ftz(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
