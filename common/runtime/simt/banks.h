// Counts bank conflicts in shared memory, for accesses that go through a wrapper.
//
// The model is that of NVIDIA's CUDA programming guide: 32 banks hold successive 4-byte words; a
// bank serves one word per wavefront, to all lanes that access it. A warp's access is split into
// phases of 128 bytes: 32, 16 or 8 consecutive lanes at 4, 8 or 16 bytes a lane; for ldmatrix each
// matrix is a phase. A phase takes as many wavefronts as the most words it accesses in one bank;
// those beyond the first are conflicts. The hardware may merge phases that access the same words;
// the model does not.
//
// Lanes do not synchronize at an access: the n-th execution of a source line by each lane of a warp
// counts as one access of the warp. That is wrong only where a lane skips the line once and returns
// to it later.
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

    // One warp's accesses from a place since the block began.
    struct WarpLog {
        uint32_t executed[WARP_SIZE] = {};  // times, by each lane
        std::vector<WarpAccess> accesses = {};
    };

    // All accesses from a place in the source.
    struct Place {
        const char* operation;
        Site site;
        long long accesses = 0;    // of warps
        long long ideal = 0;       // wavefronts without conflicts: one a phase
        long long wavefronts = 0;  // with them
        std::vector<WarpLog> warps = {};
    };

    // A thread accesses `bytes` bytes of shared memory at `offset`.
    void count(const char* operation, Site site, int thread, uint32_t offset, int bytes);

    // All threads of the block have exited.
    void end_block();

    // Adds another counter's counts.
    void add(const BankCounter& other);

    const std::vector<Place>& places() const { return all_places; }

  private:
    static constexpr int NUM_BANKS = 32, WORD_BYTES = 4;

    Place& place(const char* operation, Site site);

    static void evaluate(Place& place, const WarpAccess& access);

    // Wavefronts of one phase; 0 if none of its lanes takes part.
    static int count_wavefronts(const WarpAccess& access, int first_lane, int num_lanes);

    std::vector<Place> all_places;
};

}  // namespace simt
