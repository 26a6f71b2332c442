#include "mma.cuh"

#include "access.h"
#include "collective.h"

namespace simt {
namespace {

template <typename Payload, typename Complete>
void warp_instruction(const char* name, Site site, Payload& payload, Complete complete) {
    const Operation operation = {name, site, ALL_LANES};
    collective(warp_for(operation), operation, payload, complete);
}

// A warp accesses a row of 16 bytes for each lane; which lanes do so is not documented.
template <typename Payload>
void track_rows(Access access, Payloads<Payload> lanes, Site site) {
    Races& races = Worker::current()->races();
    races.begin_warp_access();
    for (int lane = 0; lane < WARP_SIZE; ++lane)
        races.access_by_warp(access, lanes[lane].offset, 16, access, site);
}

template <typename T>
float lower(uint32_t packed) {
    return to_float(T{static_cast<uint16_t>(packed)});
}
template <typename T>
float upper(uint32_t packed) {
    return to_float(T{static_cast<uint16_t>(packed >> 16)});
}

}  // namespace

// Once all lanes have passed their row addresses, each reads its elements when it runs next: where
// a __syncwarp() is missing, it sees what other lanes write after their ldmatrix.
void ldmatrix(uint32_t (&r)[4], const void* row, bool transposed, const char* name, Site site) {
    struct Payload {
        size_t offset;  // of the row in shared memory
        const uint16_t* row;
        const uint16_t *lower[4], *upper[4];  // where the lane's elements are
    } payload;
    payload.offset = shared_access(row, 16, name, site);
    payload.row = static_cast<const uint16_t*>(row);
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
        track_rows(READ, lanes, site);
    });
    for (int m = 0; m < 4; ++m) r[m] = *payload.lower[m] | uint32_t{*payload.upper[m]} << 16;
}

// The inverse of ldmatrix: once all lanes have passed their rows, each writes its own when it runs
// next.
void stmatrix(void* row, const uint32_t (&r)[4], const char* name, Site site) {
    struct Payload {
        size_t offset;  // of the lane's row in shared memory
        const uint32_t* r;
        uint32_t row[4];  // its elements, in twos
    } payload{shared_access(row, 16, name, site), r, {}};
    warp_instruction(name, site, payload, [&](Payloads<Payload> lanes) {
        for (int lane = 0; lane < WARP_SIZE; ++lane) {
            for (int i = 0; i < 4; ++i) lanes[lane].row[i] = lanes[lane % 8 * 4 + i].r[lane / 8];
        }
        track_rows(WRITE, lanes, site);
    });
    note_write(row, 16);
    memcpy(row, payload.row, 16);
}

}  // namespace simt

// Products of two 16-bit numbers are exact in float; they are added in the order of k, rounding to
// nearest. The hardware may add in another order and round differently.
template <simt::MatrixElement T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  simt::Site site) {
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
            float sum[8];  // stays in vector registers
            for (int col = 0; col < 8; ++col) sum[col] = d[row][col];
            for (int k = 0; k < 16; ++k) {
                for (int col = 0; col < 8; ++col) sum[col] += a[row][k] * b[k][col];
            }
            for (int col = 0; col < 8; ++col) d[row][col] = sum[col];
        }
        for (int lane = 0; lane < simt::WARP_SIZE; ++lane) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; ++i) lanes[lane].d[i] = d[g + i / 2 * 8][2 * t + i % 2];
        }
    });
}

template void mma_m16n8k16<bf16>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t,
                                 simt::Site);
template void mma_m16n8k16<fp16>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t,
                                 simt::Site);
