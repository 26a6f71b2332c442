// A thread of a block, and the operations that threads execute together.
#pragma once
#include <stdint.h>

#include <vector>

#include "fiber.h"
#include "report.h"
#include "site.h"
#include "tensor_map.h"
#include "warp.h"

namespace simt {

// An operation of several threads, e.g. a shuffle: the one a thread waits in, or else its latest.
struct Operation {
    const char* name = nullptr;  // nullptr before a thread's first operation
    Site site = {};
    uint32_t mask = 0;  // participating lanes of a warp; 0 in larger groups
    int mbarrier = -1;  // offset of the mbarrier that the thread waits for; -1 if none
    int parity = 0;     // of the phase it waits for

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

// A cp.async in flight: 16 bytes, zeros if `from` is null.
struct AsyncCopy {
    Site site;
    void* to;
    const void* from;
    uint64_t group;  // committed by its thread before its issue
};

// A TMA copy in flight, or a bulk reduction, which is a store here.
struct BulkCopy {
    const char* name;
    Site site;
    uint64_t group;  // of a store: groups committed by its thread before its issue
    int mbarrier;    // of a load: offset in shared memory
    TensorBox box;
    void (*land)(const BulkCopy&);         // a store: writes or adds the elements; a load: copies
    std::vector<std::byte> elements = {};  // that a store has read; empty before
};

// A warp's wait for another block: for a signal, or for its place in an ordered section.
struct BlockWait {
    const uint64_t* signal;  // nullptr: for the counter
    const int* counter;
    int place;
    int thread;  // goes on when it has come; the other lanes wait for that one
};

struct Thread {
    enum State : uint8_t { RUNNABLE, WAITING, EXITED };

    Fiber fiber;
    State state;
    Operation operation;
    void* payload;  // brought to a collective; lies on the thread's stack, valid while it waits
    uint64_t wait_key = 0;           // latest mbarrier_try_wait_parity: line, mbarrier and phase
    uint64_t wait_attempts = 0;      // earlier attempts with this key
    std::vector<AsyncCopy> copies;   // the block's, in the order of their issue
    uint64_t num_copy_groups = 0;    // committed so far
    std::vector<BulkCopy> stores;    // the block's, in the order of their issue
    uint64_t num_store_groups = 0;   // committed so far
    uint64_t num_proxy_fences = 0;   // so far
    Operation cluster_arrival = {};  // at the cluster's barrier, not yet waited for
    uint32_t cluster_phase = 0;      // of the barrier, at that arrival
};

// A collective that some but not all of its threads have reached.
struct Rendezvous {
    Operation operation;
    int expected, arrived;
};

// Consecutive threads of a block that act together: a warp, a warpgroup or the whole block.
struct Group {
    int first_thread, num_threads;
    std::vector<Rendezvous> open = {};  // several where lanes diverge
    std::vector<int> runnable = {};     // a warp's runnable threads, in no particular order
    const int* section = nullptr;       // the counter of the ordered section that a warp is in
};

}  // namespace simt
