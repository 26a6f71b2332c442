// What an mbarrier counts. The scheduler keeps one for each; mbarrier.cpp changes it.
#pragma once
#include <stdint.h>

#include "cuda.h"
#include "global_races.h"
#include "races.h"
#include "report.h"
#include "site.h"

namespace simt {

class Worker;

struct MbarrierState {
    uint32_t block;     // in whose shared memory it is
    Site site;          // of its initialization
    int initializer;    // the thread
    bool fenced;        // by that thread, with fence_mbarrier_init, since
    size_t offset;      // in shared memory
    int count;          // arrivals that a phase expects
    int pending;        // of them still missing
    int64_t bytes = 0;  // announced minus landed
    uint32_t phase = 0;
    Handover handover = {};
    BlockHandover blocks = {};  // of mbarrier_arrive_cluster

    bool in_phase_of(int parity) const { return phase % 2 == uint32_t(parity); }

    void name(Report& report) const {
        report.add("the mbarrier at byte %zu of shared memory", offset);
        if (block != blockIdx.x) report.add(" in block %u", block);
        report.add(" (initialized at %s:%d)", site.file_name(), site.line);
    }
    void describe(Report& report) const {
        name(report);
        report.add(": in phase %u (parity %u), %d of %d arrivals missing", phase, phase % 2,
                   pending, count);
        if (bytes > 0) report.add(", still expects %lld bytes", static_cast<long long>(bytes));
        if (bytes < 0) report.add(", %lld bytes not announced", static_cast<long long>(-bytes));
    }
};

// The state of the block's mbarrier that lies where `barrier` lies in the running block's shared
// memory; reports where there is none or where its 8 bytes have been overwritten.
MbarrierState& find_mbarrier(Worker& block, const uint64_t& barrier, const char* operation,
                             Site site);

// Likewise, for the running thread, which accesses the mbarrier.
MbarrierState& use_mbarrier(Worker& block, const uint64_t& barrier, const char* operation,
                            Site site);

// A copy has delivered `bytes` bytes to the running block.
void complete_bytes(const uint64_t& barrier, int bytes, const char* operation, Site site);

}  // namespace simt
