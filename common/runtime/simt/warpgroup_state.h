// A block's named barriers and the register pool that setmaxnreg redistributes. The scheduler keeps
// them; warpgroup.cpp changes them.
#pragma once
#include <stdint.h>

#include <vector>

#include "races.h"
#include "report.h"

namespace simt {

constexpr int WARPGROUP_SIZE = 128;
constexpr int NUM_BARRIERS = 16;  // of a block; 0 is that of __syncthreads

// A barrier begins a new round when all threads of the current one have arrived.
struct NamedBarrier {
    int expected = 0, arrived = 0;  // threads, in this round
    uint32_t round = 0;
    std::vector<int> waiting = {};  // for the end of this round
    Handover handover = {};

    void describe(Report& report, int id) const {
        report.add("\n  barrier %d: %d of %d threads have arrived", id, arrived, expected);
    }
};

// A setmaxnreg_inc that waits for registers.
struct RegisterRequest {
    int warpgroup, registers;       // per thread
    std::vector<int> waiting = {};  // threads
};

// A block has the registers it is launched with: per thread, as many as __launch_bounds__ allows.
class RegisterPool {
  public:
    explicit RegisterPool(int num_threads)
        : launched(SM_REGISTERS / num_threads / 8 * 8),
          num_warpgroups(num_threads / WARPGROUP_SIZE) {
        if (launched > MAX_REGISTERS) launched = MAX_REGISTERS;
    }

    void begin_block() {
        held.assign(num_warpgroups, launched);
        free = 0;
        requests.clear();
    }

    // Registers that a warpgroup needs in addition to have `registers` per thread; negative: frees.
    int missing(int warpgroup, int registers) const {
        return (registers - held[warpgroup]) * WARPGROUP_SIZE;
    }

    void take(int warpgroup, int registers) {
        free -= missing(warpgroup, registers);
        held[warpgroup] = registers;
    }

    void describe(Report& report, const RegisterRequest& request) const {
        report.add("\n  warpgroup %d waits for %d registers, %d are free", request.warpgroup,
                   missing(request.warpgroup, request.registers), free);
    }

    std::vector<int> held = {};  // per thread, by each warpgroup
    int free = 0;
    std::vector<RegisterRequest> requests = {};  // in order of arrival

  private:
    static constexpr int SM_REGISTERS = 65536, MAX_REGISTERS = 256;

    int launched, num_warpgroups;
};

}  // namespace simt
