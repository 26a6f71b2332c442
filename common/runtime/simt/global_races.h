// Finds data races between blocks in global memory: two of them access the same bytes of an output
// or a workspace, one of the two writes, and no signal orders them. Whichever block runs first, `+=`
// where red_add() belongs is found, and two blocks that store the same element.
//
// Reductions need no order among themselves, and neither do tickets. The sum is there when the launch
// has ended, and a counter is for tickets alone until then: an ordinary access to it in the same
// launch is reported, the block's own too.
//
// As races.h has it, each access is compared with what is remembered of earlier ones: here the last
// write of each two bytes, or the last reduction or ticket, if the same block has not written before,
// and the last read. A block has a clock: of every other block, the latest stamp whose accesses come
// before its own next one. Signals pass on what a block knows.
//
// A kernel that starts early must not access these buffers before griddepcontrol_wait, since the
// kernels in front may still read and write them: reported is an access of a thread that has not
// executed it, and that no barrier orders after one of the block's threads that has.
//
// It does not find races
// - of a read with a later write, where a third block has read in between: the seed draws the order of
//   the blocks, and another order shows it;
// - between threads of a block;
// - of a warp that reads what only another warp of its block has taken a signal for;
// - that races.h does not find for the lack of a call: memcpy, memset and builds with
//   AddressSanitizer.
#pragma once
#include <stdint.h>

#include <atomic>
#include <map>
#include <vector>

#include "access.h"
#include "memory.h"
#include "races.h"

namespace simt {

// A block draws one when it begins and whenever it posts a signal, in ascending order.
using Stamp = uint32_t;

// For each block whose accesses come before, and for itself, the latest stamp.
using BlockClock = std::map<uint32_t, Stamp>;

// What a barrier between blocks passes on.
struct BlockHandover {
    BlockClock arrived = {};    // known to the blocks whose threads have arrived
    BlockClock completed = {};  // and to those whose had when the latest phase completed

    void complete_phase() { completed = arrived; }
};

// What the blocks of a process have written to its buffers, and read there.
class GlobalRaces {
  public:
    // Remembers accesses to the buffer, which stays where it is. Not while kernels run.
    void watch(const Buffer& buffer);

    // All accesses so far come before all later ones.
    void begin_launch() { launch_began = latest; }

    // The clock of a block that begins.
    BlockClock begin_block(uint32_t block) { return {{block, ++latest}}; }

    // A block's post and take: `posted` is what the signal passes on. Barriers join what is posted.
    BlockClock post(uint32_t block, BlockClock& clock);
    void take(BlockClock& clock, const BlockClock& posted) const;

    // Whether access() has to know of it.
    bool watches(const void* address) const {
        return reinterpret_cast<uintptr_t>(address) - begin < bytes;
    }

    // The running block accesses bytes, or adds to them, or takes a ticket from the counter.
    void access(Access access, const void* address, size_t bytes, Place place);
    void reduce(const void* address, size_t bytes, Place place) {
        add(REDUCTION, address, bytes, place);
    }
    void take_ticket(const int* counter, Place place) {
        add(TICKET, counter, sizeof(*counter), place);
    }

    // The running thread accesses memory, now or in a copy that it starts: in a kernel that starts
    // early, not an output or a workspace before griddepcontrol_wait.
    void require_kernel_wait(Access access, const void* address, Place place);

  private:
    static constexpr size_t GRANULE_BYTES = 2;  // 16-bit elements may belong to different blocks

    enum Kind : Stamp { STORE, LOAD, REDUCTION, TICKET };

    struct Event {
        uint32_t block;
        Stamp stamp : 30;  // 0: none
        Kind kind : 2;
    };

    // Several OS threads share them. A report of the one may name the other's place.
    struct Last {
        std::atomic<Event> event;
        std::atomic<Place> place;
    };
    struct Cell {
        Last write, read;
    };

    struct Watched {
        const Buffer& buffer;
        std::vector<size_t> first_cells;  // of its segments
        GuardedPages pages;
    };

    // Calls function(cell, address of its bytes) for each.
    template <typename Function>
    void for_each_cell(const void* address, size_t bytes, Function function);

    void add(Kind kind, const void* address, size_t bytes, Place place);

    // Reports what the running block does where nothing orders it after an earlier event.
    void require_order(Event earlier, const Last& last, const char* does, const std::byte* address,
                       Place place) const;
    bool ordered(Event earlier) const;

    std::vector<Watched> all;
    uintptr_t begin = 0;  // of the lowest buffer
    size_t bytes = 0;     // to the end of the highest
    std::atomic<Stamp> latest = 0;
    Stamp launch_began = 0;
};

inline GlobalRaces global_races;

}  // namespace simt
