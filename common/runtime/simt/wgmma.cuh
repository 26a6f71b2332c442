// The warpgroup's matrix product, for the host compiler: the twin of
// common/runtime/device/wgmma.cuh, which says what each function does. It lands as late as
// possible, in each warp's wait that covers its group: only then is D written. A and B are read at
// the issue and must still be the same when it lands.
#pragma once
#include "attention.cuh"

enum Major : int { K_MAJOR, MN_MAJOR };

constexpr int SWIZZLE_128B_TILE = 8 * 128;

namespace simt {

class Report;

uint64_t matrix_descriptor(const void* start, int leading_bytes, int stride_bytes, Swizzle swizzle,
                           Site site);

void fence_wgmma(Site site);

// A thread's arguments of a wgmma.
struct WgmmaShare {
    uint64_t a_bits, b_bits;
    bool accumulate;
    const uint32_t* a;  // nullptr if A is in shared memory, at a_bits
    float* d;           // [tiles][4]
    int tiles;

    bool operator==(const WgmmaShare& other) const;
    void describe(Report& report) const;
};

template <MatrixElement T>
void start_wgmma(WgmmaShare share, Major a_major, Major b_major, Site site);

// Lands all but the `pending` latest groups; products not yet committed to a group are newer than
// all of them.
void land_wgmma(int pending, Site site);

// Reports if wgmma in flight still use the registers.
void require_landed(const void* registers, size_t bytes, Site site);

struct NoRegisters {};
inline NoRegisters no_registers;

}  // namespace simt

// The hardware's descriptor; its address is the offset in the block's shared memory.
template <Swizzle SWIZZLE>
uint64_t matrix_descriptor(const Element* start, int leading_bytes, int stride_bytes,
                           simt::Site site = simt::Site::here()) {
    return simt::matrix_descriptor(start, leading_bytes, stride_bytes, SWIZZLE, site);
}

// Fences and waits name up to five arrays of registers, for the device compiler's sake; here a
// wait checks that nothing in flight uses those that it names.
template <typename A = simt::NoRegisters, typename B = simt::NoRegisters,
          typename C = simt::NoRegisters, typename D = simt::NoRegisters,
          typename E = simt::NoRegisters>
void wgmma_fence(A& = simt::no_registers, B& = simt::no_registers, C& = simt::no_registers,
                 D& = simt::no_registers, E& = simt::no_registers,
                 simt::Site site = simt::Site::here()) {
    simt::fence_wgmma(site);
}

void wgmma_commit_group(simt::Site site = simt::Site::here());

template <int PENDING, typename A = simt::NoRegisters, typename B = simt::NoRegisters,
          typename C = simt::NoRegisters, typename D = simt::NoRegisters,
          typename E = simt::NoRegisters>
void wgmma_wait_group(A& a = simt::no_registers, B& b = simt::no_registers,
                      C& c = simt::no_registers, D& d = simt::no_registers,
                      E& e = simt::no_registers, simt::Site site = simt::Site::here()) {
    simt::land_wgmma(PENDING, site);
    simt::require_landed(&a, sizeof(a), site);
    simt::require_landed(&b, sizeof(b), site);
    simt::require_landed(&c, sizeof(c), site);
    simt::require_landed(&d, sizeof(d), site);
    simt::require_landed(&e, sizeof(e), site);
}

template <simt::MatrixElement T, Major A_MAJOR, Major B_MAJOR, int TILES>
void wgmma_m64nNk16(float (&d)[TILES][4], uint64_t a, uint64_t b, bool accumulate,
                    simt::Site site = simt::Site::here()) {
    static_assert(TILES % 2 == 0 && TILES <= 32);
    simt::start_wgmma<T>({a, b, accumulate, nullptr, d[0], TILES}, A_MAJOR, B_MAJOR, site);
}

template <simt::MatrixElement T, Major B_MAJOR, int TILES>
void wgmma_m64nNk16(float (&d)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                    simt::Site site = simt::Site::here()) {
    static_assert(TILES % 2 == 0 && TILES <= 32);
    simt::start_wgmma<T>({0, b, accumulate, a, d[0], TILES}, K_MAJOR, B_MAJOR, site);
}
