// Finds data races in shared memory: two threads access the same bytes, one of them writes, and
// nothing orders the two. The order in which they happen to run does not matter: a missing barrier
// is found even where a vote, or the scheduler, stood in for it.
//
// Each thread has a vector clock: of every other thread, the latest epoch whose accesses come before
// its own next one (Flanagan and Freund, FastTrack, PLDI 2009). Barriers pass on what a thread knows:
// __syncthreads, __syncwarp, named barriers and mbarriers. Shuffles, votes, matrix instructions and
// setmaxnreg do not, since CUDA does not promise that they order memory.
//
// In a cluster the clocks are of the threads of all blocks, which cluster barriers and arrivals at
// another block's mbarrier pass on. Other blocks only copy to a block's shared memory and arrive at
// its mbarriers: these are compared with what the block's own threads have accessed.
//
// A step is compiled with -fsanitize=thread, which makes the compiler call a function before each
// access; races.cpp defines those functions. Accesses that the runtime makes on a step's behalf go
// through track() of access.h.
//
// It does not find races
// - with any but the latest of several readers: it remembers the last writer of each two bytes and
//   the last reader of each 16;
// - with a write of a single byte, which is compared with those but not remembered;
// - of TMA loads with later accesses: the destination of a load is poison until it has landed;
// - of memcpy and memset where g++ calls them: clang++ calls functions of races.cpp instead;
// - of a step's own accesses in a build with AddressSanitizer, which excludes ThreadSanitizer.
#pragma once
#include <stdint.h>

#include <map>
#include <vector>

#include "access.h"
#include "memory.h"
#include "site.h"
#include "warp.h"

namespace simt {

class Report;

// A thread begins a new epoch each time it passes on what it knows. All threads of a worker draw
// epochs from one counter, which continues from block to block: a barrier of the whole block then
// needs no clocks, since whatever has an older epoch came before.
using Epoch = int32_t;

// For each thread of the block, the latest epoch that came before. May be empty: none did.
using Clock = std::vector<Epoch>;

// The clocks of the threads of a cluster, numbered from block to block in whole warps.
class ClusterClocks {
  public:
    ClusterClocks(int blocks, int threads);

    int first_thread(int block) const { return block * stride / blocks; }
    Epoch* of(int thread) const { return clocks + thread * stride; }

    const int blocks;
    const int stride;  // epochs in a clock, in whole vectors

  private:
    GuardedPages pages;
    Epoch* const clocks;
};

// What a barrier passes on.
struct Handover {
    Clock arrived = {};    // known to the threads that have arrived
    Clock completed = {};  // and to those that had when the latest phase completed

    void complete_phase() { completed = arrived; }
};

// The latest copy from a block to another one's mbarrier; earlier ones have landed when it has.
struct CopyOut {
    const char* name;
    Site site;
    int rank;         // of the other block
    size_t mbarrier;  // offset in its shared memory
    uint32_t phase;
    // Of each thread, by its number in the cluster, that has waited for the phase: when it first
    // had.
    std::map<int, Epoch> waits = {};
};

// Where in the program an access is: a site, or two return addresses, the second one the caller's,
// since wrappers are not always inlined. In 8 bytes: addresses become distances within the program.
class Place {
  public:
    Place(Site site) : bits(pack(distance(site.file), site.line) | 1) {}
    Place(const void* code, const void* caller) : bits(pack(distance(code), distance(caller))) {}

    void describe(Report& report) const;

  private:
    static constexpr char ORIGIN = 0;  // some point of the program
    static int32_t distance(const void* address) {
        return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(&ORIGIN);
    }
    static uint64_t pack(uint32_t upper, uint32_t lower) {
        return uint64_t{upper} << 32 | lower << 1;
    }

    uint64_t bits;  // 32, 31 and 1: whether it is a site
};

class Races {
  public:
    // running_thread always is the block's running thread.
    Races(const Buffer& smem, int num_threads, const int& running_thread, ClusterClocks& clocks,
          int rank);
    ~Races();
    Races(const Races&) = delete;
    Races& operator=(const Races&) = delete;

    void begin_block();

    // The compiler's calls are for this block from here on.
    void become_current() const;

    // All accesses so far come before all later ones.
    void order_block();

    // Orders the lanes in the mask, of the warp whose first thread is given.
    void order_lanes(int first_lane, uint32_t mask);

    // A thread's arrival at a barrier, and the end of its wait for one.
    void release(int thread, Handover& barrier);
    void acquire(int thread, const Handover& barrier);

    // The running thread accesses bytes of shared memory.
    void access(Access access, size_t offset, size_t bytes, Place place);

    // Its warp accesses them, in an instruction that begins with begin_warp_access(). Which lane
    // accesses what is unknown, but with the same mapping the same lane always accesses a byte.
    void begin_warp_access();
    void access_by_warp(Access access, size_t offset, size_t bytes, uint16_t mapping, Site site);

    // Its warp as a whole reads bytes, likewise: whoever comes after one of its lanes comes after that.
    void read_by_warp(size_t offset, size_t bytes, Site site);

    // The running thread of a block of the cluster, this one or another, starts a copy to these
    // bytes, which are poison until the copy lands.
    void start_copy(const Races& from, size_t offset, size_t bytes, Site site);

    // Another block's running thread uses the mbarrier in these bytes.
    void read_from(const Races& other, size_t offset, size_t bytes, Site site);

    // It arrives there.
    void note_arrival(const Races& other, Site site);

    // The running thread starts a copy from this block's shared memory to another's, whose mbarrier
    // it counts towards.
    void start_copy_out(const CopyOut& copy);

    // Another block's running thread has waited for a phase of its mbarrier.
    void note_wait(const Races& other, int rank, size_t mbarrier, uint32_t phase);

    // The block ends, and its shared memory with it. Reports another block's arrival that no thread
    // of this one has waited for, and a copy from here of which none knows that it has landed.
    void require_end_is_last() const;

    // It has executed griddepcontrol_wait. Whether some such wait comes before all that it does next,
    // and whether there was any in the block.
    void note_kernel_wait(Site site) { waits.push_back({current[running_thread], self(), site}); }
    bool after_kernel_wait();
    bool has_kernel_wait() const { return !waits.empty(); }

  private:
    static constexpr size_t LINE_BYTES = 16;
    static constexpr size_t GRANULE_BYTES = 2;  // 16-bit elements may belong to different threads
    static constexpr size_t GRANULES = LINE_BYTES / GRANULE_BYTES;

    // A thread, by its number in the cluster, or the warp that begins with it: each of its lanes for
    // itself, or as a whole.
    struct Party {
        uint16_t thread : 14, is_warp : 1, as_a_whole : 1;
        uint16_t mapping;  // of a warp's access

        bool operator==(const Party&) const = default;
    };

    // An access, or those of a party in one epoch.
    struct Event {
        Epoch epoch;  // 0: none
        Party party;
        Place place;
    };

    // The latest accesses to the bytes of a line. Where several have written its granules, `written`
    // has the latest epoch only.
    struct Line {
        Event written, read;
        uint16_t read_bytes;  // bit i: that read was one of byte i
        bool is_split;
    };

    // Part of an access: bytes of one line, of which the first is number `first`.
    struct Piece {
        size_t line;
        int first, end;

        uint16_t bytes() const { return ((1u << (end - first)) - 1) << first; }
        bool is_whole() const { return end - first == LINE_BYTES; }
    };
    template <typename Function>
    void for_each_piece(size_t offset, size_t bytes, Function function);

    // A thread's clock, in which its own epoch is not kept up to date.
    Epoch* clock_of(int thread) const { return clocks.of(first_thread + thread); }

    Party self() const {
        return {static_cast<uint16_t>(first_thread + running_thread), false, false, 0};
    }
    Party own_warp(uint16_t mapping, bool as_a_whole = false) const {
        const int first = running_thread / WARP_SIZE * WARP_SIZE;
        return {static_cast<uint16_t>(first_thread + first), true, as_a_whole, mapping};
    }

    // What the running thread does now.
    Event now(Place place) const { return {current[running_thread], self(), place}; }

    // Whether one of the block's threads knows what a thread of another has done in the epoch.
    bool knows(int thread, Epoch epoch) const;

    bool is_own(Party party) const {
        return party.thread >= first_thread && party.thread < first_thread + num_threads;
    }

    // Up to when all that the block has done comes before what the party does next.
    Epoch known_to(Party party) const { return is_own(party) ? block_known : 0; }

    // Makes each thread know what all know of other blocks, and writes down what order_block()
    // leaves to block_known, for other blocks to learn.
    void share_clocks();

    // Whether it comes before all that the party does next.
    bool ordered(const Event& earlier, Party party) const;

    // Report where an earlier access does not come before this one.
    void compare_with_writes(Piece piece, Access access, Event event) const;
    void compare_with_reads(Piece piece, Event event) const;

    // Compare, then remember the access.
    void read(size_t offset, size_t bytes, Event event);
    void write(size_t offset, size_t bytes, Event event);
    void write_granules(Piece piece, Event event);

    [[noreturn]] void report(Access earlier_access, const Event& earlier, size_t byte,
                             Access access, Event event) const;

    ClusterClocks& clocks;
    const int num_threads;
    const int first_thread;  // its number in the cluster
    const int& running_thread;
    const size_t smem_bytes;
    const size_t num_lines;
    const uintptr_t smem_begin;
    GuardedPages line_pages, granule_pages;
    Line* const lines;
    Event* const granules;        // writes to those of lines that are split
    Clock joined;                 // for order_lanes() and share_clocks()
    std::vector<Event> arrivals;  // of other blocks' threads, the latest of each
    std::vector<CopyOut> copies_out;
    std::vector<Event> waits;       // the block's griddepcontrol_waits
    std::vector<bool> after_wait;   // of each thread: whether one is known to come before
    std::vector<Epoch> current;     // of each thread
    std::vector<Epoch> warp_known;  // what a warp's lanes did up to then comes before all they do
    Epoch block_known = 0;          // likewise of the block
    Epoch latest = 0;               // the counter
};

}  // namespace simt
