// Counts bank conflicts in shared memory, for accesses that go through a wrapper.
//
// The model is that of NVIDIA's CUDA programming guide: 32 banks, successive 4-byte words in
// successive banks; a bank serves one word at a time, to all lanes that want it. 128 bytes are
// served at a time: of a warp's access of 4, 8 or 16 bytes a lane, 32, 16 or 8 consecutive lanes,
// which is a phase. A phase takes as many wavefronts as its most wanted bank has words to serve;
// those beyond the first are conflicts. For ldmatrix that makes each matrix a phase. Where lanes of
// different phases want the same words, the hardware may serve them at once; the model does not.
//
// Lanes do not meet at an access. What each of them executes from a place in the source for the
// n-th time in the block is taken for one access of their warp: right unless a lane skips it once
// and comes back later.
#pragma once
#include <stdint.h>

#include <vector>

#include "site.h"
#include "warp.h"

namespace simt {

class BankCounter {
  public:
    // One access of a warp.
    struct WarpAccess {
        static constexpr uint32_t NONE = UINT32_MAX;

        explicit WarpAccess(int lane_bytes) : lane_bytes(lane_bytes) {
            for (uint32_t& offset : offsets) offset = NONE;
        }

        int lane_bytes;
        uint32_t offsets[WARP_SIZE];  // in shared memory; NONE of lanes that do not take part
    };

    // What one warp has executed from a place since the block began.
    struct WarpLog {
        uint32_t executed[WARP_SIZE] = {};  // how often each lane has
        std::vector<WarpAccess> accesses = {};
    };

    // All accesses from a place in the source.
    struct Place {
        const char* operation;
        Site site;
        long long accesses = 0;    // of warps
        long long ideal = 0;       // phases, each of which takes a wavefront at least
        long long wavefronts = 0;  // as many as they took
        std::vector<WarpLog> warps = {};
    };

    // A thread accesses the `bytes` bytes of shared memory from `offset` on.
    void count(const char* operation, Site site, int thread, uint32_t offset, int bytes);

    // All threads of the block have exited.
    void end_block();

    // Adds what another counter has counted.
    void add(const BankCounter& other);

    const std::vector<Place>& places() const { return all_places; }

  private:
    static constexpr int NUM_BANKS = 32, WORD_BYTES = 4;

    Place& place(const char* operation, Site site);

    static void evaluate(Place& place, const WarpAccess& access);

    // Of one phase; 0 where none of its lanes takes part.
    static int count_wavefronts(const WarpAccess& access, int first_lane, int num_lanes);

    std::vector<Place> all_places;
};

}  // namespace simt
