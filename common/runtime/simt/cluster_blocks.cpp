#include "cluster_blocks.h"

#include <algorithm>

#include "global_races.h"
#include "grid.h"

namespace simt {

Cluster::Cluster(const Launch& launch, Grid& grid)
    : grid(grid),
      clocks(launch.cluster_size, launch.num_threads),
      launch_seed(launch.seed),
      random(0) {
    for (int rank = 0; rank < launch.cluster_size; ++rank)
        all_blocks.emplace_back(launch, grid, *this, clocks, rank);
}

void Cluster::run(uint32_t number) {
    random = Random(mix(mix(launch_seed, number)));
    one_block_first = random.below(2);
    num_threads = 0;
    handover = {};
    for (Worker& block : all_blocks) {
        block.begin_block(number * size() + block.rank());
        num_threads += block.block().num_threads;
    }
    Fiber::switch_to(scheduler, next_thread());
}

Worker& Cluster::block(int rank, const Operation& operation) {
    if (rank < 0 || rank >= size()) {
        operation_fault("wrong rank", operation)
            .add(" takes the rank of a block of the cluster, 0 to %d, not %d", size() - 1, rank)
            .fail();
    }
    Worker& block = all_blocks[rank];
    if (block.has_ended()) {
        operation_fault("access to a block that has ended", operation)
            .add(
                " reaches into the shared memory of rank %d, block %u, all of whose threads have "
                "exited: cluster_arrive, then cluster_wait, in all blocks before the end",
                rank, block.index())
            .fail();
    }
    return block;
}

template <typename Can>
Worker* Cluster::draw(Can can) {
    const uint32_t first = size() == 1 ? 0 : random.below(size());
    for (int i = 0; i < size(); ++i) {
        Worker& block = all_blocks[(first + i) % size()];
        if (can(block)) return &block;
    }
    return nullptr;
}

Fiber& Cluster::next_thread() {
    Worker* const running = Worker::current();
    bool have_ended = true;
    for (Worker& block : all_blocks) {
        block.land_early();
        have_ended &= block.has_ended();
    }
    if (have_ended) return scheduler;
    const auto can_run = [](const Worker& block) { return block.can_run(); };
    Worker* next = one_block_first && running->can_run() ? running : draw(can_run);
    for (; !next; next = draw(can_run)) {
        if (draw([](Worker& block) { return block.hurry(); })) continue;
        bool wait_for_blocks = false;
        for (const Worker& block : all_blocks) wait_for_blocks |= !block.block_waits().empty();
        if (!wait_for_blocks) report_stall();
        grid.wait_for_blocks();
        for (Worker& block : all_blocks) block.end_block_waits();
    }
    next->become_current();
    return next->next_thread();
}

void Cluster::arrive(const Operation& operation) {
    Worker& worker = *Worker::current();
    Thread& self = worker.self();
    if (self.cluster_arrival.name) {
        Report report = operation_fault("cluster_arrive twice", operation);
        report.add(" follows ");
        self.cluster_arrival.describe(report);
        report.add(" with no cluster_wait between the two").fail();
    }
    self.cluster_arrival = operation;
    self.cluster_phase = phase;
    worker.races().release(worker.running_thread(), handover);
    const uint64_t key = mix(operation.site.line, phase);
    ++arrived;
    complete_barrier();
    worker.may_fall_behind(key);
}

void Cluster::lose_thread() {
    --num_threads;
    if (arrived > 0) complete_barrier();
}

void Cluster::complete_barrier() {
    if (arrived < num_threads) return;
    arrived = 0;
    ++phase;
    handover.complete_phase();
    BlockClock known;
    for (Worker& block : all_blocks)
        global_races.take(known, global_races.post(block.index(), block.block_clock()));
    for (Worker& block : all_blocks) global_races.take(block.block_clock(), known);
    for (const Waiter& waiter : waiters) waiter.block->make_runnable(waiter.thread);
    waiters.clear();
}

void Cluster::wait(const Operation& operation) {
    Worker& worker = *Worker::current();
    Thread& self = worker.self();
    if (!self.cluster_arrival.name)
        operation_fault("cluster_wait without cluster_arrive", operation)
            .add(" needs one before")
            .fail();
    if (self.cluster_phase == phase) {
        waiters.push_back({&worker, worker.running_thread()});
        worker.start_waiting(operation, nullptr);
        worker.yield();
    }
    self.cluster_arrival = {};
    worker.races().acquire(worker.running_thread(), handover);
}

void Cluster::describe_stall(Report& report) const {
    for (const Worker& block : all_blocks) {
        report.add("\nblock %u", block.index());
        blockIdx.x = block.index();  // of which the description then speaks
        block.describe_stall(report);
    }
}

void Cluster::report_stall() {
    const auto stalled = std::find_if(all_blocks.begin(), all_blocks.end(),
                                      [](const Worker& block) { return !block.has_ended(); });
    Report report = stalled->stall();
    if (size() == 1) {
        stalled->describe_stall(report);
    } else {
        report.add(", as in all of its cluster");
        describe_stall(report);
    }
    report.fail();
}

}  // namespace simt
