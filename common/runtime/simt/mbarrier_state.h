// What an mbarrier counts. The scheduler keeps this for each; common/runtime/simt/mbarrier.cpp changes it.
#pragma once
#include <stdint.h>

#include "report.h"
#include "site.h"

namespace simt {

struct MbarrierState {
    Site site;          // of its initialization
    int initializer;    // a thread
    bool fenced;        // by a fence_mbarrier_init since
    size_t offset;      // in shared memory
    int count;          // arrivals a phase takes
    int pending;        // of them, yet to come
    int64_t bytes = 0;  // announced, less those landed
    uint32_t phase = 0;

    bool in_phase_of(int parity) const { return phase % 2 == uint32_t(parity); }

    void name(Report& report) const {
        report.add("the mbarrier at byte %zu of shared memory (initialized at %s:%d)", offset,
                   site.file_name(), site.line);
    }
    void describe(Report& report) const {
        name(report);
        report.add(": in phase %u (parity %u), %d of %d arrivals missing", phase, phase % 2,
                   pending, count);
        if (bytes > 0) report.add(", still expects %lld bytes", static_cast<long long>(bytes));
        if (bytes < 0) report.add(", %lld bytes not announced", static_cast<long long>(-bytes));
    }
};

// For the instructions, in common/runtime/simt/mbarrier.cpp: the state of an mbarrier. Reports where there
// is none, or where its place has been overwritten.
MbarrierState& find_mbarrier(const uint64_t& barrier, const char* operation, Site site);

// A copy has brought `bytes`.
void complete_bytes(const uint64_t& barrier, int bytes, const char* operation, Site site);

}  // namespace simt
