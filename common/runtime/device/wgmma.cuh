// The warpgroup's matrix product (sm_90a), for 16-bit elements: 128 threads, four whole warps, start
// D += A B with B, and perhaps A, in shared memory and D in registers, and go on while it runs. The
// layouts are the PTX ISA's, "Asynchronous warpgroup-level matrix instructions".
// common/runtime/simt/wgmma.cuh is the twin for the host compiler.
#pragma once
#include <type_traits>

#include "attention.cuh"

// Which way an operand lies in shared memory: K_MAJOR has a row of A, or a column of B, contiguous,
// MN_MAJOR the transpose of that.
enum Major { K_MAJOR, MN_MAJOR };

// A tile of the widest swizzle, in bytes: 8 rows of 128.
constexpr int SWIZZLE_128B_TILE = 8 * 128;

// Describes an operand that lies in shared memory as tiles of 8 rows, each row as long as the swizzle
// is wide (16 bytes without a swizzle), as TMA writes them; the matrix that is meant begins at `start`.
//     K_MAJOR    stride_bytes is from 8 rows of A (columns of B) to the next 8; leading_bytes is from
//                16 bytes of K to the next, not used with a swizzle: K = 16 lies within a row
//     MN_MAJOR   a row has as many of A's rows (B's columns) as it is long; leading_bytes is from
//                those to the next ones, stride_bytes from 8 of K to the next 8; without a swizzle
//                the other way round
// The tiles begin at multiples of their size; start may be further on, within their first row.
template <Swizzle SWIZZLE>
__device__ uint64_t matrix_descriptor(const Element* start, int leading_bytes, int stride_bytes) {
    const uint64_t address = __cvta_generic_to_shared(start);
    const uint64_t layout = (4 - SWIZZLE) % 4;  // 128 bytes are 1, 64 are 2, 32 are 3
    return address >> 4 & 0x3fff | uint64_t(leading_bytes) >> 4 << 16 |
           uint64_t(stride_bytes) >> 4 << 32 | layout << 62;
}

// The compiler must have computed these registers before, and reads them only after.
template <int TILES>
__device__ void order_registers(float (&d)[TILES][4]) {
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[j][i])::"memory");
}
template <int STEPS>
__device__ void order_registers(uint32_t (&a)[STEPS][4]) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[k][i])::"memory");
}

// Orders what the threads have done with their registers, `used` among them, before the wgmma that
// follow: needed before the first one of each group.
template <typename... Registers>
__device__ void wgmma_fence(Registers&... used) {
    (order_registers(used), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Commits the wgmma that have been started since the last group as the next group.
__device__ inline void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the PENDING latest groups have ended: `landed`, the accumulators that they
// write, may then be read, and the registers and the shared memory that they read may be written.
template <int PENDING, typename... Registers>
__device__ void wgmma_wait_group(Registers&... landed) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    (order_registers(landed), ...);
}

// The operands of the instruction for each N: D's registers, first as the assembler's numbers and then
// as C++ variables, and the numbers of the operands that follow them.
// clang-format off
#define NUMBERS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NUMBERS_32 NUMBERS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NUMBERS_48 NUMBERS_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NUMBERS_64 NUMBERS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_80 NUMBERS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NUMBERS_96 NUMBERS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NUMBERS_112 NUMBERS_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NUMBERS_128 NUMBERS_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS_144 NUMBERS_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NUMBERS_160 NUMBERS_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NUMBERS_176 NUMBERS_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NUMBERS_192 NUMBERS_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NUMBERS_208 NUMBERS_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NUMBERS_224 NUMBERS_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NUMBERS_240 NUMBERS_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NUMBERS_256 NUMBERS_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TILE(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define REGISTERS_16 TILE(0), TILE(1)
#define REGISTERS_32 REGISTERS_16, TILE(2), TILE(3)
#define REGISTERS_48 REGISTERS_32, TILE(4), TILE(5)
#define REGISTERS_64 REGISTERS_48, TILE(6), TILE(7)
#define REGISTERS_80 REGISTERS_64, TILE(8), TILE(9)
#define REGISTERS_96 REGISTERS_80, TILE(10), TILE(11)
#define REGISTERS_112 REGISTERS_96, TILE(12), TILE(13)
#define REGISTERS_128 REGISTERS_112, TILE(14), TILE(15)
#define REGISTERS_144 REGISTERS_128, TILE(16), TILE(17)
#define REGISTERS_160 REGISTERS_144, TILE(18), TILE(19)
#define REGISTERS_176 REGISTERS_160, TILE(20), TILE(21)
#define REGISTERS_192 REGISTERS_176, TILE(22), TILE(23)
#define REGISTERS_208 REGISTERS_192, TILE(24), TILE(25)
#define REGISTERS_224 REGISTERS_208, TILE(26), TILE(27)
#define REGISTERS_240 REGISTERS_224, TILE(28), TILE(29)
#define REGISTERS_256 REGISTERS_240, TILE(30), TILE(31)
#define FOR_EACH_N(F) \
    F(16, 8, 9, 10, 11, 12, 13, 14) \
    F(32, 16, 17, 18, 19, 20, 21, 22) \
    F(48, 24, 25, 26, 27, 28, 29, 30) \
    F(64, 32, 33, 34, 35, 36, 37, 38) \
    F(80, 40, 41, 42, 43, 44, 45, 46) \
    F(96, 48, 49, 50, 51, 52, 53, 54) \
    F(112, 56, 57, 58, 59, 60, 61, 62) \
    F(128, 64, 65, 66, 67, 68, 69, 70) \
    F(144, 72, 73, 74, 75, 76, 77, 78) \
    F(160, 80, 81, 82, 83, 84, 85, 86) \
    F(176, 88, 89, 90, 91, 92, 93, 94) \
    F(192, 96, 97, 98, 99, 100, 101, 102) \
    F(208, 104, 105, 106, 107, 108, 109, 110) \
    F(224, 112, 113, 114, 115, 116, 117, 118) \
    F(240, 120, 121, 122, 123, 124, 125, 126) \
    F(256, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

// D (+)= A B with A [64, 16] and B [16, N] of T, D [64, N] of float, N = 8 TILES a multiple of 16; D
// is added to where accumulate is true, else overwritten. Of lane i of warp w of the warpgroup,
// with g = i / 4 and t = i % 4:
//     d[j][0], d[j][1] = D[16 w + g, 8 j + 2 t], D[16 w + g, 8 j + 2 t + 1]
//     d[j][2], d[j][3] = D[16 w + g + 8, 8 j + 2 t], D[16 w + g + 8, 8 j + 2 t + 1]
#define WGMMA(N, TYPE, A, B, ACCUMULATE, A_MAJOR_, B_MAJOR_)                             \
    asm volatile(                                                                        \
        "{\n"                                                                            \
        ".reg .pred accumulate;\n"                                                       \
        "setp.ne.b32 accumulate, %" #ACCUMULATE                                          \
        ", 0;\n"                                                                         \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NUMBERS_##N \
        "}, %" #A ", %" #B ", accumulate, 1, 1, %" #A_MAJOR_ ", %" #B_MAJOR_             \
        ";\n"                                                                            \
        "}"                                                                              \
        : REGISTERS_##N                                                                  \
        : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(A_MAJOR)), "n"(int(B_MAJOR)))
#define WGMMA_CASE(N, A, B, ACCUMULATE, A_MAJOR_, B_MAJOR_, ...)    \
    if constexpr (8 * TILES == N) {                                 \
        if constexpr (std::is_same_v<T, bf16>)                      \
            WGMMA(N, "bf16", A, B, ACCUMULATE, A_MAJOR_, B_MAJOR_); \
        else                                                        \
            WGMMA(N, "f16", A, B, ACCUMULATE, A_MAJOR_, B_MAJOR_);  \
    }
template <typename T, Major A_MAJOR, Major B_MAJOR, int TILES>
__device__ void wgmma_m64nNk16(float (&d)[TILES][4], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(TILES % 2 == 0 && TILES <= 32);
    FOR_EACH_N(WGMMA_CASE)
}

// The same with A in registers, laid out as mma_m16n8k16 has it, each warp with 16 of the 64 rows.
#define WGMMA_A(N, TYPE, A0, A1, A2, A3, B, ACCUMULATE, B_MAJOR_)                             \
    asm volatile(                                                                             \
        "{\n"                                                                                 \
        ".reg .pred accumulate;\n"                                                            \
        "setp.ne.b32 accumulate, %" #ACCUMULATE                                               \
        ", 0;\n"                                                                              \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NUMBERS_##N      \
        "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", accumulate, 1, 1, %" #B_MAJOR_ \
        ";\n"                                                                                 \
        "}"                                                                                   \
        : REGISTERS_##N                                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)),           \
          "n"(int(B_MAJOR)))
#define WGMMA_A_CASE(N, ...)                   \
    if constexpr (8 * TILES == N) {            \
        if constexpr (std::is_same_v<T, bf16>) \
            WGMMA_A(N, "bf16", __VA_ARGS__);   \
        else                                   \
            WGMMA_A(N, "f16", __VA_ARGS__);    \
    }
template <typename T, Major B_MAJOR, int TILES>
__device__ void wgmma_m64nNk16(float (&d)[TILES][4], const uint32_t (&a)[4], uint64_t b,
                               bool accumulate) {
    static_assert(TILES % 2 == 0 && TILES <= 32);
    FOR_EACH_N(WGMMA_A_CASE)
}

#undef TILE
#undef FOR_EACH_N
#undef WGMMA
#undef WGMMA_CASE
#undef WGMMA_A
#undef WGMMA_A_CASE
