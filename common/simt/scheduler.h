// Runs a kernel's blocks: one OS thread a block in flight, one fiber a thread. Fibers switch only
// where threads wait for each other; which one goes on is drawn from the seed and the block's
// index, so that any order can be had again.
#pragma once
#include <stdint.h>

#include <map>
#include <utility>
#include <vector>

#include "async_view.h"
#include "banks.h"
#include "mbarrier_state.h"
#include "memory.h"
#include "random.h"
#include "report.h"
#include "stall.h"
#include "thread.h"
#include "warpgroup_state.h"
#include "wgmma_state.h"

struct uint3 {
    uint32_t x, y, z;
};

inline constinit thread_local uint3 threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

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
    bool odd;  // of two runs of a check the second: what one draws for a block the other leaves out
    bool count_banks;
};

// Runs blocks one after another on the OS thread that made it.
class Worker {
  public:
    explicit Worker(const Launch& launch)
        : launch(launch),
          smem("shared memory", launch.smem_bytes, 16, 0, launch.smem_flush),
          smem_async_view(smem),
          threads(launch.num_threads),
          block_group{0, launch.num_threads},
          wgmma_states((launch.num_threads + WARP_SIZE - 1) / WARP_SIZE),
          register_pool(launch.num_threads),
          random(0) {
        stacks.reserve(launch.num_threads);
        for (int i = 0; i < launch.num_threads; ++i) {
            const GuardedPages& stack = stacks.emplace_back(STACK_BYTES, STACK_GUARD_BYTES);
            threads[i].fiber = Fiber(stack.begin(), STACK_BYTES, run_threads);
        }
        for (int i = 0; i < launch.num_threads; i += WARP_SIZE) {
            const int lanes = launch.num_threads - i;
            warp_groups.push_back({i, lanes < WARP_SIZE ? lanes : WARP_SIZE});
        }
        for (int i = 0; i < launch.num_threads; i += WARPGROUP_SIZE) {
            const int rest = launch.num_threads - i;
            warpgroup_groups.push_back({i, rest < WARPGROUP_SIZE ? rest : WARPGROUP_SIZE});
        }
        blockDim = {static_cast<uint32_t>(launch.num_threads), 1, 1};
        gridDim = {launch.num_blocks, 1, 1};
        current_worker = this;
    }
    ~Worker() { current_worker = nullptr; }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    // The calling OS thread's; nullptr where it runs no kernel.
    static Worker* current() { return current_worker; }

    void run_block(uint32_t block) {
        blockIdx = {block, 0, 0};
        random = Random(mix(launch.seed) + block);
        loads_may_be_early = Random(~mix(block)).below(2) != launch.odd;
        one_warp_first = random.below(2);
        smem.poison();
        smem_async_view.begin_block();
        all_mbarriers.clear();
        for (WgmmaState& wgmma : wgmma_states) wgmma.begin_block();
        for (NamedBarrier& barrier : named_barriers) barrier = {};
        register_pool.begin_block();
        num_exited = 0;
        for (int i = 0; i < launch.num_threads; ++i) {
            threads[i].operation = {};
            threads[i].copies.clear();
            make_runnable(i);
        }
        Fiber::switch_to(scheduler, next_thread());
        running = NO_THREAD;
        require_loads_landed();
        if (const char* where = smem.damaged_slack()) {
            fault("out-of-bounds write").add(": %s of shared memory", where).fail();
        }
        bank_counter.end_block();
    }

    // From here the running thread waits in a collective, until make_runnable() is called for it.
    void start_waiting(const Operation& operation, void* payload) {
        Thread& self = threads[running];
        self.state = Thread::WAITING;
        self.operation = operation;
        self.payload = payload;
    }

    // Lets a runnable thread go on; returns when it is this one's turn again.
    void yield() {
        Fiber& self = threads[running].fiber;
        Fiber& next = next_thread();
        if (&next != &self) Fiber::switch_to(self, next);
    }

    void make_runnable(int thread) {
        threads[thread].state = Thread::RUNNABLE;
        warp_groups[thread / WARP_SIZE].runnable.push_back(thread);
        ++num_runnable;
    }

    // The copy lands later, as late as when no thread can go on without it.
    void start_load(const BulkCopy& load) { loads.push_back(load); }

    // Whether to do what may happen at any time, once in n.
    bool once_in(int n) { return random.below(n) == 0; }

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
    int overflowed_stack(const std::byte* address) const {
        for (int i = 0; i < launch.num_threads; ++i) {
            if (stacks[i].guards(address)) return i;
        }
        return NO_THREAD;
    }

    // Begins a report: "<what> in kernel K, block B, thread T".
    Report fault(const char* what) const {
        Report report;
        report.add("%s in kernel %s, block %u", what, launch.kernel_name, blockIdx.x);
        if (running != NO_THREAD) report.add(", thread %d", running);
        return report;
    }

    // Where the running thread is, as closely as is known.
    void describe_progress(Report& report) const {
        if (running == NO_THREAD || !threads[running].operation.name) return;
        report.add("\n  the last collective it passed: ");
        threads[running].operation.describe(report);
    }

  private:
    static constexpr size_t STACK_BYTES = size_t{1} << 18;
    static constexpr size_t STACK_GUARD_BYTES = size_t{1} << 16;

    // A thread's fiber outlives the block: resumed after its thread has exited, it runs a thread of
    // the next block.
    static void run_threads() {
        for (;;) {
            current_worker->launch.run_thread();
            current_worker->exit_thread();
        }
    }

    void exit_thread() {
        if (!threads[running].stores.empty()) {
            const BulkCopy& store = threads[running].stores[0];
            fault("exit with a store in flight")
                .add(
                    ": %s (%s:%d) may not have read shared memory yet, which ends with the block: "
                    "call cp_async_bulk_commit_group, then cp_async_bulk_wait_group_read",
                    store.name, store.site.file_name(), store.site.line)
                .fail();
        }
        if (!wgmma().products.empty()) {
            const AsyncProduct& product = wgmma().products[0];
            fault("exit with a wgmma in flight")
                .add(
                    ": wgmma_m64nNk16 (%s:%d) has not landed: call wgmma_commit_group, then "
                    "wgmma_wait_group<0>",
                    product.site.file_name(), product.site.line)
                .fail();
        }
        Fiber& self = threads[running].fiber;
        threads[running].state = Thread::EXITED;
        ++num_exited;
        Fiber::switch_to(self, num_exited == launch.num_threads ? scheduler : next_thread());
    }

    bool is_awaited(const BulkCopy& load) const {
        for (const Thread& thread : threads) {
            if (thread.state == Thread::WAITING && thread.operation.mbarrier == load.mbarrier)
                return true;
        }
        return false;
    }

    // The loads that some thread waits for come first; returns how many they are.
    size_t sort_loads() {
        size_t awaited = 0;
        for (BulkCopy& load : loads) {
            if (is_awaited(load)) std::swap(load, loads[awaited++]);
        }
        return awaited;
    }

    // Any of the first so many.
    void land_load(size_t candidates) {
        const int interrupted = running;
        running = NO_THREAD;
        const uint32_t drawn = random.below(candidates);
        const BulkCopy load = loads[drawn];
        loads[drawn] = loads.back();
        loads.pop_back();
        load.land(load);
        running = interrupted;
    }

    // A block must not end before all that was started, or announced, has arrived.
    void require_loads_landed() const {
        if (!loads.empty()) {
            const BulkCopy& load = loads[0];
            fault("block ends with a load in flight")
                .add(": %s (%s:%d) has not landed: wait for its mbarrier", load.name,
                     load.site.file_name(), load.site.line)
                .fail();
        }
        for (const auto& [offset, mbarrier] : all_mbarriers) {
            if (!mbarrier.bytes) continue;
            Report report = fault("block ends in the middle of an mbarrier's phase");
            report.add(": ");
            mbarrier.describe(report);
            report.fail();
        }
    }

    // A warp with a runnable thread: the running one where it goes first, or else any.
    Group& next_warp() {
        if (one_warp_first && running != NO_THREAD && !warp().runnable.empty()) return warp();
        uint32_t drawn = random.below(warp_groups.size());
        while (warp_groups[drawn].runnable.empty()) drawn = (drawn + 1) % warp_groups.size();
        return warp_groups[drawn];
    }

    // Draws a runnable thread and declares it running.
    Fiber& next_thread() {
        if (loads_may_be_early && !loads.empty() && once_in(4)) land_load(loads.size());
        while (num_runnable == 0) {
            const size_t awaited = sort_loads();
            if (awaited == 0) break;
            land_load(awaited);
        }
        if (num_runnable == 0) {
            running = NO_THREAD;
            Report report = fault(stall_reason(threads));
            describe_stall(report, threads, all_mbarriers);
            for (int id = 0; id < NUM_BARRIERS; ++id) {
                if (named_barriers[id].arrived) named_barriers[id].describe(report, id);
            }
            for (const RegisterRequest& request : register_pool.requests)
                register_pool.describe(report, request);
            report.fail();
        }
        std::vector<int>& runnable = next_warp().runnable;
        const uint32_t drawn = random.below(runnable.size());
        running = runnable[drawn];
        runnable[drawn] = runnable.back();
        runnable.pop_back();
        --num_runnable;
        threadIdx.x = running;
        return threads[running].fiber;
    }

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
    // Drawn for each block: loads land at any time; else as late as they may.
    bool loads_may_be_early = false;
    int running = NO_THREAD;
    int num_exited = 0;
    Random random;
    static inline constinit thread_local Worker* current_worker = nullptr;
};

}  // namespace simt
