#include "scheduler.h"

#include <algorithm>
#include <utility>

#include "cluster_blocks.h"
#include "grid.h"
#include "stall.h"
#include "trap.h"

namespace simt {

Worker::Worker(const Launch& launch, Grid& grid, Cluster& cluster, ClusterClocks& clocks, int rank)
    : launch(launch),
      launch_grid(grid),
      own_cluster(cluster),
      rank_in_cluster(rank),
      smem("shared memory", {{0, int64_t(launch.smem_bytes)}}, 16, 0, launch.smem_flush),
      smem_async_view(smem),
      smem_races(smem, launch.num_threads, running, clocks, rank),
      threads(launch.num_threads),
      stacks(launch.num_threads * STACK_STRIDE, STACK_GUARD_BYTES, PROT_NONE),
      block_group{0, launch.num_threads},
      register_pool(launch.num_threads),
      random(0) {
    for (int i = 0; i < launch.num_threads; ++i) {
        stacks.allow(stack(i), stack(i) + STACK_BYTES, PROT_READ | PROT_WRITE);
        threads[i].fiber = Fiber(stack(i), STACK_BYTES, run_threads);
    }
    for (int i = 0; i < launch.num_threads; i += WARP_SIZE) {
        const int lanes = launch.num_threads - i;
        warp_groups.push_back({i, lanes < WARP_SIZE ? lanes : WARP_SIZE});
        wgmma_states.emplace_back();
    }
    for (int i = 0; i < launch.num_threads; i += WARPGROUP_SIZE) {
        const int rest = launch.num_threads - i;
        warpgroup_groups.push_back({i, rest < WARPGROUP_SIZE ? rest : WARPGROUP_SIZE});
    }
    blockDim = {static_cast<uint32_t>(launch.num_threads), 1, 1};
    gridDim = {launch.num_blocks, 1, 1};
}

void Worker::become_current() {
    current_worker = this;
    blockIdx = {block_index, 0, 0};
    smem_races.become_current();
}

void Worker::begin_block(uint32_t block) {
    block_index = block;
    become_current();
    block_seed = mix(launch.seed, block);
    random = Random(block_seed);
    copies_may_be_early = mix(block) % 2 == launch.odd;
    one_warp_first = random.below(2);
    smem.poison();
    if (mix(block, LARGE) % 2 == launch.odd) smem.fill_with_large();
    smem_async_view.begin_block();
    smem_races.begin_block();
    clock = global_races.begin_block(block);
    all_mbarriers.clear();
    for (WgmmaState& wgmma : wgmma_states) wgmma.begin_block();
    for (NamedBarrier& barrier : named_barriers) barrier = {};
    register_pool.begin_block();
    num_exited = 0;
    for (int i = 0; i < launch.num_threads; ++i) {
        threads[i].operation = {};
        make_runnable(i);
    }
}

void Worker::end_block() {
    for (running = 0; running < launch.num_threads; ++running)
        land_stores(threads[running], threads[running].stores.size());
    running = NO_THREAD;
    require_loads_landed();
    if (launch.starts_early && !smem_races.has_kernel_wait()) {
        fault("block ends without griddepcontrol_wait")
            .add(
                ": a kernel that starts early calls it in every block; else it may end, and the "
                "kernel behind it go on, before the one in front has ended")
            .fail();
    }
    smem_races.require_end_is_last();
    if (const char* where = smem.damaged_slack()) {
        fault("out-of-bounds write")
            .add(": %s of shared memory; an %s seed finds the line", where,
                 launch.odd ? "even" : "odd")
            .fail();
    }
    bank_counter.end_block();
}

void Worker::start_waiting(const Operation& operation, void* payload) {
    Thread& self = threads[running];
    self.state = Thread::WAITING;
    self.operation = operation;
    self.payload = payload;
}

void Worker::yield() {
    Fiber& self = threads[running].fiber;
    Fiber& next = own_cluster.next_thread();
    if (&next != &self) Fiber::switch_to(self, next);
}

void Worker::may_fall_behind(uint64_t key, int threads) {
    if (!in_this_run(key, threads)) return;
    behind.push_back(running);
    yield();
}

void Worker::straggle() {
    stragglers.push_back(running);
    yield();
}

void Worker::wait_for_block(BlockWait wait) {
    threads[running].state = Thread::WAITING;
    wait.thread = running;
    all_block_waits.push_back(wait);
    yield();
}

void Worker::make_runnable(int thread) {
    threads[thread].state = Thread::RUNNABLE;
    warp_groups[thread / WARP_SIZE].runnable.push_back(thread);
    ++num_runnable;
}

int Worker::overflowed_stack(const std::byte* address) const {
    const size_t above_lowest_guard = address - (stacks.begin() - STACK_GUARD_BYTES);
    const size_t thread = above_lowest_guard / STACK_STRIDE;
    return thread < threads.size() ? static_cast<int>(thread) : NO_THREAD;
}

bool Worker::on_stack(uintptr_t frame) const {
    if (running == NO_THREAD || frame % sizeof(frame)) return false;
    const auto begin = reinterpret_cast<uintptr_t>(stack(running));
    return begin <= frame && frame + 2 * sizeof(frame) <= begin + STACK_BYTES;
}

Report Worker::fault(const char* what) const {
    Report report;
    report.add("%s in kernel %s, block %u", what, launch.kernel_name, block_index);
    if (running != NO_THREAD) report.add(", thread %d", running);
    return report;
}

Report operation_fault(const char* what, const Operation& operation) {
    Report report = Worker::current()->fault(what);
    report.add(": ");
    operation.describe(report);
    return report;
}

void Worker::describe_progress(Report& report) const {
    if (running == NO_THREAD || !threads[running].operation.name) return;
    report.add("\n  the last collective it passed: ");
    threads[running].operation.describe(report);
}

Report Worker::stall() {
    running = NO_THREAD;
    return fault(stall_reason(threads));
}

void Worker::describe_stall(Report& report) const {
    simt::describe_stall(report, threads, all_mbarriers);
    for (int id = 0; id < NUM_BARRIERS; ++id) {
        if (named_barriers[id].arrived) named_barriers[id].describe(report, id);
    }
    for (const RegisterRequest& request : register_pool.requests)
        register_pool.describe(report, request);
    for (const BlockWait& wait : all_block_waits) {
        if (wait.signal) {
            report.add("\n  nobody has posted the signal ");
            describe_address(report, reinterpret_cast<const std::byte*>(wait.signal));
        } else {
            report.add("\n  nobody has ended the section of place %d of the counter ",
                       *wait.counter);
            describe_address(report, reinterpret_cast<const std::byte*>(wait.counter));
            report.add(", and the wait is for place %d", wait.place);
        }
    }
}

void Worker::run_threads() {
    for (;;) {
        current_worker->launch.run_thread();
        current_worker->exit_thread();
    }
}

void Worker::exit_thread() {
    for (const BulkCopy& store : threads[running].stores) {
        if (!store.elements.empty()) continue;
        fault("exit with a store in flight")
            .add(
                ": %s (%s:%d) may not have read shared memory yet, which ends with the block: "
                "call cp_async_bulk_commit_group, then cp_async_bulk_wait_group_read",
                store.name, store.site.file_name(), store.site.line)
            .fail();
    }
    if (!threads[running].copies.empty()) {
        const AsyncCopy& copy = threads[running].copies[0];
        fault("exit with a copy in flight")
            .add(
                ": cp_async_cg (%s:%d) may land in shared memory after the block has ended: call "
                "cp_async_commit_group, then cp_async_wait_group<0>",
                copy.site.file_name(), copy.site.line)
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
    if (const Operation& arrival = threads[running].cluster_arrival; arrival.name) {
        fault("exit without cluster_wait")
            .add(": %s (%s:%d) has no cluster_wait after it", arrival.name,
                 arrival.site.file_name(), arrival.site.line)
            .fail();
    }
    Fiber& self = threads[running].fiber;
    threads[running].state = Thread::EXITED;
    ++num_exited;
    own_cluster.lose_thread();
    if (has_ended()) end_block();
    Fiber::switch_to(self, own_cluster.next_thread());
}

void Worker::land_stores(Thread& thread, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        const BulkCopy& store = thread.stores[copies_may_be_early ? i : count - 1 - i];
        store.land(store);
    }
    thread.stores.erase(thread.stores.begin(), thread.stores.begin() + count);
}

size_t Worker::sort_loads() {
    if (loads.empty()) return 0;
    std::vector<int> mbarriers;  // that threads wait for
    int latest = -1;             // of a neighbour, which mostly waits for the same; -1: for none
    for (const Thread& thread : threads) {
        if (thread.state != Thread::WAITING || thread.operation.mbarrier == latest) continue;
        latest = thread.operation.mbarrier;
        if (std::ranges::count(mbarriers, latest) == 0) mbarriers.push_back(latest);
    }
    size_t awaited = 0;
    for (size_t i = 0; i < loads.size(); ++i) {
        if (std::ranges::count(mbarriers, loads[i].mbarrier) == 0) continue;
        if (i != awaited) std::swap(loads[i], loads[awaited]);  // mostly it is in front already
        ++awaited;
    }
    return awaited;
}

void Worker::land_load(size_t candidates) {
    const int interrupted = running;
    running = NO_THREAD;
    const uint32_t drawn = random.below(candidates);
    const BulkCopy load = loads[drawn];
    loads[drawn] = loads.back();
    loads.pop_back();
    load.land(load);
    running = interrupted;
}

void Worker::require_loads_landed() const {
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

Group& Worker::next_warp() {
    if (one_warp_first && running != NO_THREAD && !warp().runnable.empty()) return warp();
    uint32_t drawn = random.below(warp_groups.size());
    while (warp_groups[drawn].runnable.empty())
        if (++drawn == warp_groups.size()) drawn = 0;
    return warp_groups[drawn];
}

void Worker::land_early() {
    if (!copies_may_be_early || loads.empty() || !once_in(4)) return;
    become_current();
    land_load(loads.size());
}

bool Worker::hurry() {
    become_current();
    std::vector<int>& late = behind.empty() ? stragglers : behind;
    const size_t awaited = sort_loads();
    if (awaited == 0 && late.empty()) return false;
    // Loads that may be early go before a thread that is late; otherwise it is drawn which of the
    // two is later still.
    const bool early = copies_may_be_early && !loads.empty() && !late.empty();
    if (late.empty() || early || (awaited > 0 && once_in(2))) {
        land_load(early ? loads.size() : awaited);
    } else {
        std::swap(late[random.below(late.size())], late.back());
        make_runnable(late.back());
        late.pop_back();
    }
    return true;
}

void Worker::end_block_waits() {
    for (const BlockWait& wait : all_block_waits) make_runnable(wait.thread);
    all_block_waits.clear();
}

Fiber& Worker::next_thread() {
    std::vector<int>& runnable = next_warp().runnable;
    const uint32_t drawn = random.below(runnable.size());
    running = runnable[drawn];
    runnable[drawn] = runnable.back();
    runnable.pop_back();
    --num_runnable;
    threadIdx.x = running;
    return threads[running].fiber;
}

}  // namespace simt
