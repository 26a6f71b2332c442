// Runs a kernel's blocks: one OS thread a block in flight, one fiber a thread. Fibers switch only
// where threads wait for each other; which one goes on is drawn from the seed and the block's
// index, so that any order can be had again.
#pragma once
#include <stdint.h>

#include <vector>

#include "banks.h"
#include "memory.h"
#include "random.h"
#include "report.h"
#include "stall.h"
#include "thread.h"

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
    bool count_banks;
};

// Runs blocks one after another on the OS thread that made it.
class Worker {
  public:
    explicit Worker(const Launch& launch)
        : launch(launch),
          smem("shared memory", launch.smem_bytes, 16, 0, launch.smem_flush),
          threads(launch.num_threads),
          block_group{0, launch.num_threads},
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
        one_warp_first = random.below(2);
        smem.poison();
        num_exited = 0;
        for (int i = 0; i < launch.num_threads; ++i) {
            threads[i].operation = {};
            threads[i].copies.clear();
            make_runnable(i);
        }
        Fiber::switch_to(scheduler, next_thread());
        running = NO_THREAD;
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

    Thread& thread(int i) { return threads[i]; }
    int running_thread() const { return running; }
    Thread& self() { return threads[running]; }
    Group& block() { return block_group; }
    Group& warp() { return warp_groups[running / WARP_SIZE]; }
    const Buffer& shared_memory() const { return smem; }
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
        Fiber& self = threads[running].fiber;
        threads[running].state = Thread::EXITED;
        ++num_exited;
        Fiber::switch_to(self, num_exited == launch.num_threads ? scheduler : next_thread());
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
        if (num_runnable == 0) {
            running = NO_THREAD;
            Report report = fault(stall_reason(threads));
            describe_stall(report, threads);
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
    BankCounter bank_counter;
    std::vector<Thread> threads;
    std::vector<GuardedPages> stacks;
    Group block_group;
    std::vector<Group> warp_groups;
    Fiber scheduler;  // run_block(), suspended while threads run
    int num_runnable = 0;
    // Drawn for each block: a warp goes on for as long as it can before another has its turn. Where a
    // barrier is missing it then overwrites what the others have yet to read; when every thread is
    // drawn at random, a warp that has to meet in shuffles never gets so far ahead.
    bool one_warp_first = false;
    int running = NO_THREAD;
    int num_exited = 0;
    Random random;
    static inline constinit thread_local Worker* current_worker = nullptr;
};

}  // namespace simt
