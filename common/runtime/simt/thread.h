// A thread of a block, and what it does together with others.
#pragma once
#include <stdint.h>

#include <vector>

#include "fiber.h"
#include "report.h"
#include "site.h"
#include "tensor_map.h"
#include "warp.h"

namespace simt {

// What threads do together, e.g. a shuffle: which thread waits where, or else was last.
struct Operation {
    const char* name = nullptr;  // nullptr before a thread's first
    Site site = {};
    uint32_t mask = 0;  // the lanes of the warp that take part; 0 in groups larger than a warp
    int mbarrier = -1;  // that the thread waits for: its byte in shared memory; -1 if for none
    int parity = 0;     // of the phase that it waits for

    bool operator==(const Operation& other) const {
        return name == other.name && mask == other.mask && site == other.site &&
               mbarrier == other.mbarrier && parity == other.parity;
    }
    void describe(Report& report) const {
        report.add("%s (%s:%d)", name, site.file_name(), site.line);
        if (mask) report.add(" with mask 0x%08x", mask);
        if (mbarrier >= 0)
            report.add(" for parity %d of the mbarrier at byte %d", parity, mbarrier);
    }
};

// A cp.async that has not landed: 16 bytes, zeros where there is nothing to copy from.
struct AsyncCopy {
    Site site;
    void* to;
    const void* from;
    uint64_t group;  // how many groups its thread had committed at its issue
};

// A TMA copy that has not landed.
struct BulkCopy {
    const char* name;
    Site site;
    uint64_t group;  // of a store: how many groups its thread had committed
    int mbarrier;    // of a load: its byte in shared memory
    TensorBox box;
    void (*land)(const BulkCopy&);  // of a store: writes the elements; of a load: does all of it
    std::vector<std::byte> elements = {};  // of a store: what it has read; empty before
};

struct Thread {
    enum State : uint8_t { RUNNABLE, WAITING, EXITED };

    Fiber fiber;
    State state;
    Operation operation;
    void* payload;  // what it brought to the collective; on its stack, so valid while it waits
    uint64_t wait_key = 0;          // of its last mbarrier_try_wait_parity: place, mbarrier, phase
    uint64_t wait_attempts = 0;     // that it has made with this key before
    std::vector<AsyncCopy> copies;  // the block's, in the order of their issue
    uint64_t num_copy_groups = 0;   // committed so far
    std::vector<BulkCopy> stores;   // the block's, in the order of their issue
    uint64_t num_store_groups = 0;  // committed so far
};

// A collective that some, not all of its threads have reached.
struct Rendezvous {
    Operation operation;
    int expected, arrived;
};

// Consecutive threads of a block that act together: a warp, a warpgroup or the whole block.
struct Group {
    int first_thread, num_threads;
    std::vector<Rendezvous> open = {};  // several where lanes diverge
    std::vector<int> runnable = {};     // of a warp: its runnable threads, in no particular order
};

}  // namespace simt
