// Runs a kernel's blocks: one OS thread per cluster in flight, which mostly is a single block, one
// fiber per thread. Fibers switch only where threads synchronize or start something asynchronous;
// which one goes on is drawn from the seed and the block's index, so that every order can be
// reproduced.
#pragma once
#include <stdint.h>

#include <map>
#include <vector>

#include "async_view.h"
#include "banks.h"
#include "cuda.h"
#include "global_races.h"
#include "mbarrier_state.h"
#include "memory.h"
#include "races.h"
#include "random.h"
#include "report.h"
#include "thread.h"
#include "warpgroup_state.h"
#include "wgmma_state.h"

namespace simt {

class Cluster;
class Grid;

// One kernel of the request.
struct Launch {
    const char* kernel_name;
    void (*run_thread)();  // calls the kernel with its parameter
    uint32_t num_blocks;
    int cluster_size;  // consecutive blocks
    int num_threads;
    int num_workers;  // clusters that run at a time
    size_t smem_bytes;
    Flush smem_flush;
    uint64_t seed;
    bool odd;  // the second of a check's two runs, which draws the opposite in in_this_run()
    bool count_banks;
    bool starts_early;  // before the kernel in front of it has ended
};

// Runs blocks one after another on the OS thread that made it.
class Worker {
  public:
    Worker(const Launch& launch, Grid& grid, Cluster& cluster, ClusterClocks& clocks, int rank);
    ~Worker() { current_worker = nullptr; }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    // The worker of the block that the calling OS thread runs; nullptr if it runs no kernel.
    static Worker* current() { return current_worker; }

    void begin_block(uint32_t block);
    bool has_ended() const { return num_exited == launch.num_threads; }

    // The calling OS thread runs this worker's block from here on.
    void become_current();

    // Where loads may be early, now and then lands one. Like hurry() it may become the current
    // worker.
    void land_early();

    bool can_run() const { return num_runnable > 0; }

    // When no thread can go on: lands a load, or lets a thread go on that is late. False if none
    // is.
    bool hurry();

    // Draws a thread that can run, and declares it running.
    Fiber& next_thread();

    // Lets the threads go on that wait for other blocks.
    void end_block_waits();

    // The running thread waits from here on, until make_runnable() is called for it.
    void start_waiting(const Operation& operation, void* payload);

    // Switches to a runnable thread; returns when it is this one's turn again.
    void yield();

    void make_runnable(int thread);

    // The load lands later, at the latest when no thread can go on without it.
    void start_load(const BulkCopy& load) { loads.push_back(load); }

    // Lands the thread's first `count` stores; all have already read shared memory.
    void land_stores(Thread& thread, size_t count);

    // True if the block's copies may land before they have to.
    bool may_copy_early() const { return copies_may_be_early; }

    // True once in n calls on average.
    bool once_in(int n) { return random.below(n) == 0; }

    // True for one in n keys on average, whichever thread of a warp asks and whenever: for events
    // that happen to all lanes of a warp together.
    bool once_in_for_warp(int n, uint64_t key) const {
        return mix(block_seed + running / WARP_SIZE, key) % n == 0;
    }

    // True in exactly one of a check's two runs, for all threads of the running warp, or of as many
    // as are named, alike.
    bool in_this_run(uint64_t key, int threads = WARP_SIZE) const {
        return mix(mix(blockIdx.x, running / threads), key) % 2 != launch.odd;
    }

    // Lets the running thread go on only when no other one can, not even those that
    // may_fall_behind().
    void straggle();

    // In one of a check's two runs lets the running thread, and those of its warp, or of as many as
    // are named, that call this with the same key, go on only when no other thread can.
    void may_fall_behind(uint64_t key, int threads = WARP_SIZE);

    // The running thread goes on when the signal is posted, or the counter is at the place; before it
    // does, all others go on that can. By then another warp may have taken the signal.
    void wait_for_signal(const uint64_t& signal) { wait_for_block({&signal}); }
    void wait_for_place(const int& counter, int place) {
        wait_for_block({nullptr, &counter, place});
    }
    const std::vector<BlockWait>& block_waits() const { return all_block_waits; }

    // Whether what the running thread does now comes after the end of the kernels in front.
    bool has_waited_for_kernels() {
        // A load that lands was looked at when it started.
        return !launch.starts_early || running == NO_THREAD || smem_races.after_kernel_wait();
    }

    Grid& grid() { return launch_grid; }
    Cluster& cluster() const { return own_cluster; }
    uint32_t index() const { return block_index; }
    int rank() const { return rank_in_cluster; }
    Thread& thread(int i) { return threads[i]; }
    int running_thread() const { return running; }
    Thread& self() { return threads[running]; }
    Group& block() { return block_group; }
    Group& warp() { return warp_groups[running / WARP_SIZE]; }
    Group& warpgroup() { return warpgroup_groups[running / WARPGROUP_SIZE]; }
    const Buffer& shared_memory() const { return smem; }
    AsyncView& async_view() { return smem_async_view; }
    const AsyncView& async_view() const { return smem_async_view; }
    Races& races() { return smem_races; }
    BlockClock& block_clock() { return clock; }
    // The block's initialized mbarriers, by their offset in shared memory.
    std::map<size_t, MbarrierState>& mbarriers() { return all_mbarriers; }
    // Of the running thread's warp.
    WgmmaState& wgmma() { return wgmma_states[running / WARP_SIZE]; }
    NamedBarrier& named_barrier(int id) { return named_barriers[id]; }
    RegisterPool& registers() { return register_pool; }
    // nullptr unless the launch counts bank conflicts.
    BankCounter* banks() { return launch.count_banks ? &bank_counter : nullptr; }

    // The thread whose stack guard contains the address, or NO_THREAD.
    static constexpr int NO_THREAD = -1;
    int overflowed_stack(const std::byte* address) const;

    // Whether a frame pointer and the return address above it lie on the running thread's stack.
    bool on_stack(uintptr_t frame) const;

    // Begins a report: "<what> in kernel K, block B, thread T".
    Report fault(const char* what) const;

    // Adds the last collective that the running thread passed.
    void describe_progress(Report& report) const;

    // Begins a report that no thread can go on: "<reason> in kernel K, block B".
    Report stall();

    // Adds ": no thread can go on", and why.
    void describe_stall(Report& report) const;

  private:
    void wait_for_block(BlockWait wait);

    static constexpr size_t STACK_BYTES = size_t{1} << 18;
    static constexpr size_t STACK_GUARD_BYTES = size_t{1} << 16;
    static constexpr size_t STACK_STRIDE = STACK_BYTES + STACK_GUARD_BYTES;

    // A thread's. All lie in one mapping, as hundreds took long to make: below each is its guard.
    std::byte* stack(int thread) const { return stacks.begin() + thread * STACK_STRIDE; }

    // A fiber outlives its thread: resumed after the thread has exited, it runs a thread of the
    // next block.
    static void run_threads();

    void exit_thread();

    // All threads have exited.
    void end_block();

    // Moves the loads that some thread waits for to the front; returns their number.
    size_t sort_loads();

    // Lands one of the first `candidates` loads, drawn at random.
    void land_load(size_t candidates);

    // Reports loads in flight, and bytes announced to an mbarrier that have not arrived.
    void require_loads_landed() const;

    // Draws a warp with a runnable thread; if one_warp_first, prefers the running one.
    Group& next_warp();

    const Launch& launch;
    Grid& launch_grid;
    Cluster& own_cluster;
    const int rank_in_cluster;
    uint32_t block_index = 0;
    Buffer smem;
    AsyncView smem_async_view;
    Races smem_races;
    BlockClock clock;  // of the running block
    std::map<size_t, MbarrierState> all_mbarriers;
    std::vector<BulkCopy> loads;  // in flight
    BankCounter bank_counter;
    std::vector<Thread> threads;
    GuardedPages stacks;
    Group block_group;
    std::vector<Group> warp_groups, warpgroup_groups;
    std::vector<WgmmaState> wgmma_states;  // of each warp
    NamedBarrier named_barriers[NUM_BARRIERS];
    RegisterPool register_pool;
    int num_runnable = 0;
    // Drawn for each block: a warp runs for as long as it can before another gets its turn. Where a
    // barrier is missing, it then overwrites what the others have yet to read; were every thread
    // drawn at random, a warp that synchronizes in shuffles would never get so far ahead.
    bool one_warp_first = false;
    // Drawn for each block: loads land at any time, and stores in order, as soon as they have read
    // shared memory; otherwise all land as late as possible, the latest stores first.
    bool copies_may_be_early = false;
    int running = NO_THREAD;
    int num_exited = 0;
    std::vector<int> behind;      // threads that could go on but have fallen behind
    std::vector<int> stragglers;  // those that come after them
    std::vector<BlockWait> all_block_waits;
    uint64_t block_seed = 0;
    Random random;
    static inline constinit thread_local Worker* current_worker = nullptr;
};

// Begins a report about the running thread's operation.
Report operation_fault(const char* what, const Operation& operation);

}  // namespace simt
