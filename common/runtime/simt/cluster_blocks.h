// The blocks of a cluster; an ordinary block is a cluster of one. All run on one OS thread, each
// with a worker of its own, so that which thread of which block goes on is drawn from the seed, and
// what they share needs no lock.
#pragma once
#include <stdint.h>

#include <deque>
#include <vector>

#include "races.h"
#include "scheduler.h"

namespace simt {

class Cluster {
  public:
    Cluster(const Launch& launch, Grid& grid);

    // Runs the cluster with this number, from its first block's start to its last one's end.
    void run(uint32_t number);

    int size() const { return static_cast<int>(all_blocks.size()); }
    std::deque<Worker>& blocks() { return all_blocks; }
    const std::deque<Worker>& blocks() const { return all_blocks; }

    // The block of this rank, into whose shared memory the running thread reaches. Reports where
    // there is none, or where it has ended.
    Worker& block(int rank, const Operation& operation);

    // Draws the thread that goes on next, and makes its block the current one. Once all blocks have
    // ended: run().
    Fiber& next_thread();

    // The running thread arrives at the cluster's barrier, and waits for the others.
    void arrive(const Operation& operation);
    void wait(const Operation& operation);

    // The running thread has exited: the barrier waits for it no longer.
    void lose_thread();

    // Adds where the threads of each block wait.
    void describe_stall(Report& report) const;

  private:
    struct Waiter {
        Worker* block;
        int thread;
    };

    // The first block that can, from one on that is drawn; nullptr if none can.
    template <typename Can>
    Worker* draw(Can can);

    // Ends the barrier's phase if all threads have arrived; they go on.
    void complete_barrier();

    [[noreturn]] void report_stall();

    Grid& grid;
    ClusterClocks clocks;
    std::deque<Worker> all_blocks;  // by rank; they never move
    const uint64_t launch_seed;
    Random random;
    // Drawn for each cluster: a block runs for as long as it can, as warps do in scheduler.h.
    bool one_block_first = false;
    int num_threads = 0;  // of all blocks, that have not exited
    int arrived = 0;      // of them, at the barrier
    uint32_t phase = 0;   // of the barrier
    Handover handover;
    std::vector<Waiter> waiters;
    Fiber scheduler;  // run(), suspended while threads run
};

}  // namespace simt
