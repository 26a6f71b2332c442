// Finds data races in shared memory: two threads access the same bytes, one of them writes, and
// nothing orders the two. The order in which they happen to run does not matter: a missing barrier
// is found even where a vote, or the scheduler, stood in for it.
//
// Each thread has a vector clock: of every other thread, the latest epoch whose accesses come before
// its own next one (Flanagan and Freund, FastTrack, PLDI 2009). Barriers pass on what a thread knows:
// __syncthreads, __syncwarp, named barriers and mbarriers. Shuffles, votes, matrix instructions and
// setmaxnreg do not, since CUDA does not promise that they order memory.
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

// What a barrier passes on.
struct Handover {
    Clock arrived = {};    // known to the threads that have arrived
    Clock completed = {};  // and to those that had when the latest phase completed

    void complete_phase() { completed = arrived; }
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
    Races(const Buffer& smem, int num_threads, const int& running_thread);
    ~Races();
    Races(const Races&) = delete;
    Races& operator=(const Races&) = delete;

    void begin_block();

    // All accesses so far come before all later ones.
    void order_block();

    // Orders the lanes in the mask, of the warp whose first thread is given.
    void order_lanes(int first_thread, uint32_t mask);

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

    // It starts a copy to these bytes, which are poison until the copy lands.
    void start_copy(size_t offset, size_t bytes, Site site);

  private:
    static constexpr size_t LINE_BYTES = 16;
    static constexpr size_t GRANULE_BYTES = 2;  // 16-bit elements may belong to different threads
    static constexpr size_t GRANULES = LINE_BYTES / GRANULE_BYTES;

    // A thread, or the warp that begins with it: each of its lanes for itself, or as a whole.
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
    Epoch* clock_of(int thread) const { return clocks + thread * stride; }

    Party self() const { return {static_cast<uint16_t>(running_thread), false, false, 0}; }
    Party own_warp(uint16_t mapping, bool as_a_whole = false) const {
        const uint16_t first_thread = running_thread / WARP_SIZE * WARP_SIZE;
        return {first_thread, true, as_a_whole, mapping};
    }

    // Whether it comes before all that the party does next.
    bool ordered(const Event& earlier, Party party) const;

    // Report where an earlier access does not come before this one.
    void compare_with_writes(Piece piece, Access access, Event event) const;
    void compare_with_reads(Piece piece, Event event) const;

    // Compare, then remember the access.
    void read(size_t offset, size_t bytes, Event event);
    void write(size_t offset, size_t bytes, Event event);
    void write_granules(Piece piece, Event event);

    [[noreturn]] static void report(Access earlier_access, const Event& earlier, size_t byte,
                                    Access access, Event event);

    const int num_threads;
    const int& running_thread;
    const size_t smem_bytes;
    const size_t num_lines;
    const size_t stride;  // of clocks, in whole vectors
    GuardedPages clock_pages, line_pages, granule_pages;
    Epoch* const clocks;
    Line* const lines;
    Event* const granules;          // writes to those of lines that are split
    Clock joined;                   // for order_lanes()
    std::vector<Epoch> current;     // of each thread
    std::vector<Epoch> warp_known;  // what a warp's lanes did up to then comes before all they do
    Epoch block_known = 0;          // likewise of the block
    Epoch latest = 0;               // the counter
};

}  // namespace simt
