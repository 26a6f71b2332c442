// The warp's matrix instructions, for the host compiler: the twin of common/runtime/device/mma.cuh,
// which says what each does. All lanes of a warp must execute the same instruction.
#pragma once
#include "attention.cuh"

namespace simt {

void ldmatrix(uint32_t (&r)[4], const void* row, bool transposed, const char* name, Site site);
void stmatrix(void* row, const uint32_t (&r)[4], const char* name, Site site);

}  // namespace simt

inline void ldmatrix_x4(uint32_t (&r)[4], const Element* row,
                        simt::Site site = simt::Site::here()) {
    simt::ldmatrix(r, row, false, "ldmatrix_x4", site);
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const Element* row,
                              simt::Site site = simt::Site::here()) {
    simt::ldmatrix(r, row, true, "ldmatrix_x4_trans", site);
}

inline void stmatrix_x4(Element* row, const uint32_t (&r)[4],
                        simt::Site site = simt::Site::here()) {
    simt::stmatrix(row, r, "stmatrix_x4", site);
}

template <simt::MatrixElement T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  simt::Site site = simt::Site::here());

template <typename T>
uint32_t cvt_rn_x2(float lo, float hi) {
    return from_float<T>(lo).bits | uint32_t{from_float<T>(hi).bits} << 16;
}

inline float quad_max(float x, simt::Site site = simt::Site::here()) {
    x = fmaxf(x, __shfl_xor_sync(simt::ALL_LANES, x, 1, site));
    return fmaxf(x, __shfl_xor_sync(simt::ALL_LANES, x, 2, site));
}

inline float quad_sum(float x, simt::Site site = simt::Site::here()) {
    x += __shfl_xor_sync(simt::ALL_LANES, x, 1, site);
    return x + __shfl_xor_sync(simt::ALL_LANES, x, 2, site);
}

inline float ex2_approx_ftz(float x) {
    const float y = exp2f(x);  // a subnormal x gives 1, like the 0 that the hardware flushes it to
    return y < 0x1p-126f ? 0.0f : y;
}

inline float lg2_approx_ftz(float x) {
    return log2f(fabsf(x) < 0x1p-126f ? 0.0f : x);  // the hardware flushes subnormals
}
