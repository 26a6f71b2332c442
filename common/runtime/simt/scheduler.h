// Runs a kernel's blocks: one OS thread a block in flight, one fiber a thread. Fibers switch only
// where threads wait for each other; which one goes on is drawn from the seed and the block's
// index, so that any order can be had again.
#pragma once
#include <stdint.h>

#include <map>
#include <vector>

#include "async_view.h"
#include "banks.h"
#include "cuda.h"
#include "mbarrier_state.h"
#include "memory.h"
#include "random.h"
#include "report.h"
#include "thread.h"
#include "warpgroup_state.h"
#include "wgmma_state.h"

namespace simt {

// One kernel of the request.
struct Launch {
    const char* kernel_name;
    void (*run_thread)();  // calls the kernel with its parameter
    uint32_t num_blocks;
    int num_threads;
    size_t smem_bytes;
    Flush smem_flush;
    uint64_t seed;
    bool odd;  // the second of a check's two runs: it does where drawn what the first leaves out
    bool count_banks;
};

// Runs blocks one after another on the OS thread that made it.
class Worker {
  public:
    explicit Worker(const Launch& launch);
    ~Worker() { current_worker = nullptr; }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    // The calling OS thread's; nullptr where it runs no kernel.
    static Worker* current() { return current_worker; }

    void run_block(uint32_t block);

    // From here the running thread waits in a collective, until make_runnable() is called for it.
    void start_waiting(const Operation& operation, void* payload);

    // Lets a runnable thread go on; returns when it is this one's turn again.
    void yield();

    void make_runnable(int thread);

    // The copy lands later, as late as when no thread can go on without it.
    void start_load(const BulkCopy& load) { loads.push_back(load); }

    // The first so many of the thread's stores, which have all read their elements, write them.
    void land_stores(Thread& thread, size_t count);

    // Whether the block's copies need not be as late as they may.
    bool may_copy_early() const { return copies_may_be_early; }

    // True once in n calls on average.
    bool once_in(int n) { return random.below(n) == 0; }

    // True for one in n keys on average, whichever thread of a warp asks and whenever it does: for
    // what befalls the lanes of a warp together.
    bool once_in_for_warp(int n, uint64_t key) const {
        return mix(block_seed + running / WARP_SIZE, key) % n == 0;
    }

    // True in exactly one of a check's two runs, for all lanes of the running warp alike.
    bool in_this_run(uint64_t key) const {
        return mix(mix(blockIdx.x, running / WARP_SIZE), key) % 2 != launch.odd;
    }

    // Once in a while lets the running thread, and the lanes of its warp that call this with the
    // same key, go on only when no other thread can.
    void may_fall_behind(uint64_t key);

    Thread& thread(int i) { return threads[i]; }
    int running_thread() const { return running; }
    Thread& self() { return threads[running]; }
    Group& block() { return block_group; }
    Group& warp() { return warp_groups[running / WARP_SIZE]; }
    Group& warpgroup() { return warpgroup_groups[running / WARPGROUP_SIZE]; }
    const Buffer& shared_memory() const { return smem; }
    AsyncView& async_view() { return smem_async_view; }
    const AsyncView& async_view() const { return smem_async_view; }
    // The block's that have been initialized, by their place in shared memory.
    std::map<size_t, MbarrierState>& mbarriers() { return all_mbarriers; }
    // The running thread's warp's.
    WgmmaState& wgmma() { return wgmma_states[running / WARP_SIZE]; }
    NamedBarrier& named_barrier(int id) { return named_barriers[id]; }
    RegisterPool& registers() { return register_pool; }
    // nullptr where the launch asks for no count.
    BankCounter* banks() { return launch.count_banks ? &bank_counter : nullptr; }

    // The thread whose stack has overflowed into this address, or NO_THREAD.
    static constexpr int NO_THREAD = -1;
    int overflowed_stack(const std::byte* address) const;

    // Whether a frame pointer and the return address above it lie on the running thread's stack.
    bool on_stack(uintptr_t frame) const;

    // Begins a report: "<what> in kernel K, block B, thread T".
    Report fault(const char* what) const;

    // Where the running thread is, as closely as is known.
    void describe_progress(Report& report) const;

  private:
    static constexpr size_t STACK_BYTES = size_t{1} << 18;
    static constexpr size_t STACK_GUARD_BYTES = size_t{1} << 16;

    // A thread's fiber outlives the block: resumed after its thread has exited, it runs a thread of
    // the next block.
    static void run_threads();

    void exit_thread();

    bool is_awaited(const BulkCopy& load) const;

    // The loads that some thread waits for come first; returns how many they are.
    size_t sort_loads();

    // Any of the first so many.
    void land_load(size_t candidates);

    // A block must not end before all that was started, or announced, has arrived.
    void require_loads_landed() const;

    // A warp with a runnable thread: the running one where it goes first, or else any.
    Group& next_warp();

    // Draws a runnable thread and declares it running.
    Fiber& next_thread();

    const Launch& launch;
    Buffer smem;
    AsyncView smem_async_view;
    std::map<size_t, MbarrierState> all_mbarriers;
    std::vector<BulkCopy> loads;  // in flight
    BankCounter bank_counter;
    std::vector<Thread> threads;
    std::vector<GuardedPages> stacks;
    Group block_group;
    std::vector<Group> warp_groups, warpgroup_groups;
    std::vector<WgmmaState> wgmma_states;  // of each warp
    NamedBarrier named_barriers[NUM_BARRIERS];
    RegisterPool register_pool;
    Fiber scheduler;  // run_block(), suspended while threads run
    int num_runnable = 0;
    // Drawn for each block: a warp goes on for as long as it can before another has its turn. Where a
    // barrier is missing it then overwrites what the others have yet to read; when every thread is
    // drawn at random, a warp that has to meet in shuffles never gets so far ahead.
    bool one_warp_first = false;
    // Drawn for each block: loads land at any time, stores in order as soon as they have read their
    // elements; else all as late as they may, the latest stores first.
    bool copies_may_be_early = false;
    int running = NO_THREAD;
    int num_exited = 0;
    std::vector<int> behind;  // threads that could go on but have fallen behind
    uint64_t block_seed = 0;
    Random random;
    static inline constinit thread_local Worker* current_worker = nullptr;
};

// Begins a report about the running thread's operation.
Report operation_fault(const char* what, const Operation& operation);

}  // namespace simt
