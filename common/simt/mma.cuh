// The warp's matrix instructions, for the host compiler: the twin of common/device/mma.cuh, which
// says what each does. A whole warp must come to the same instruction.
#pragma once
#include "attention.cuh"

namespace simt {

template <typename Payload, typename Complete>
void warp_instruction(const char* name, Site site, Payload& payload, Complete complete) {
    const Operation operation = {name, site, ALL_LANES};
    collective(warp_for(operation), operation, payload, complete);
}

// After all lanes have named their rows each reads its elements in its own time, so that what
// another lane writes next is seen too early where a __syncwarp() is missing.
inline void ldmatrix(uint32_t (&r)[4], const Element* row, bool transposed, const char* name,
                     Site site) {
    struct Payload {
        const uint16_t* row;
        const uint16_t *lower[4], *upper[4];  // where the lane's elements are
    } payload;
    payload.row = reinterpret_cast<const uint16_t*>(shared_access<16>(row, name, site));
    warp_instruction(name, site, payload, [&](Payloads<Payload> lanes) {
        for (int lane = 0; lane < WARP_SIZE; ++lane) {
            for (int m = 0; m < 4; ++m) {
                const auto element = [&](int i, int j) {
                    return transposed ? lanes[8 * m + j].row + i : lanes[8 * m + i].row + j;
                };
                lanes[lane].lower[m] = element(lane / 4, 2 * (lane % 4));
                lanes[lane].upper[m] = element(lane / 4, 2 * (lane % 4) + 1);
            }
        }
    });
    for (int m = 0; m < 4; ++m) r[m] = *payload.lower[m] | uint32_t{*payload.upper[m]} << 16;
}

// The inverse of ldmatrix: lanes that have named their rows each write theirs in their own time.
inline void stmatrix(Element* row, const uint32_t (&r)[4], const char* name, Site site) {
    struct Payload {
        const uint32_t* r;
        uint32_t row[4];  // of the lane's row, two elements each
    } payload{r, {}};
    shared_access<16>(row, name, site);
    warp_instruction(name, site, payload, [](Payloads<Payload> lanes) {
        for (int lane = 0; lane < WARP_SIZE; ++lane) {
            for (int i = 0; i < 4; ++i) lanes[lane].row[i] = lanes[lane % 8 * 4 + i].r[lane / 8];
        }
    });
    memcpy(note_write(row, 16), payload.row, 16);
}

template <typename T>
float lower(uint32_t packed) {
    return to_float(T{static_cast<uint16_t>(packed)});
}
template <typename T>
float upper(uint32_t packed) {
    return to_float(T{static_cast<uint16_t>(packed >> 16)});
}

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

// A product of two 16-bit numbers is exact in float. They are added one after another, each sum
// rounded to nearest; the hardware may add in any order and round in other ways, as long as it
// keeps at least float's precision.
template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  simt::Site site = simt::Site::here()) {
    struct Payload {
        const uint32_t* a;
        uint32_t b[2];
        float* d;
    } payload{a, {b0, b1}, d};
    simt::warp_instruction("mma_m16n8k16", site, payload, [](simt::Payloads<Payload> lanes) {
        float a[16][16], b[16][8], d[16][8];
        for (int lane = 0; lane < simt::WARP_SIZE; ++lane) {
            const Payload& brought = lanes[lane];
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; ++i) {
                const int row = g + i % 2 * 8, col = 2 * t + i / 2 * 8;
                a[row][col] = simt::lower<T>(brought.a[i]);
                a[row][col + 1] = simt::upper<T>(brought.a[i]);
            }
            for (int i = 0; i < 2; ++i) {
                b[2 * t + 8 * i][g] = simt::lower<T>(brought.b[i]);
                b[2 * t + 8 * i + 1][g] = simt::upper<T>(brought.b[i]);
            }
            for (int i = 0; i < 4; ++i) d[g + i / 2 * 8][2 * t + i % 2] = brought.d[i];
        }
        for (int row = 0; row < 16; ++row) {
            for (int k = 0; k < 16; ++k) {
                for (int col = 0; col < 8; ++col) d[row][col] += a[row][k] * b[k][col];
            }
        }
        for (int lane = 0; lane < simt::WARP_SIZE; ++lane) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; ++i) lanes[lane].d[i] = d[g + i / 2 * 8][2 * t + i % 2];
        }
    });
}

template <typename T>
uint32_t cvt_rn_x2(float lo, float hi) {
    return from_float<T>(lo).bits | uint32_t{from_float<T>(hi).bits} << 16;
}

inline float ex2_approx_ftz(float x) {
    const float y = exp2f(x);  // of a subnormal 1, as of the 0 that the hardware takes it for
    return y < 0x1p-126f ? 0.0f : y;
}

inline float lg2_approx_ftz(float x) {
    return log2f(fabsf(x) < 0x1p-126f ? 0.0f : x);  // as the hardware takes a subnormal
}
