// The blocks of a launch: which of them run, each on an OS thread, or on one with the rest of its
// cluster, and what they signal each other, or do in order. As many run at a time as there are workers. Where a
// block waits for another one, its OS thread sleeps, and one more is started for blocks that have
// not begun: a block may wait for any other.
#pragma once
#include <stdint.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <vector>

#include "global_races.h"
#include "scheduler.h"

namespace simt {

class Grid {
  public:
    // Adds the bank conflicts of its blocks to `banks`.
    Grid(const Launch& launch, BankCounter& banks);

    // Returns when all blocks have run. Reports signals that nobody has taken.
    void run();

    // The running warp posts a signal.
    void post(uint64_t& signal, const Operation& operation);

    // It takes a signal. False if that is not posted.
    bool take(uint64_t& signal, const Operation& operation);

    // The running warp begins its section. False if an earlier place's has not ended.
    bool begin_section(const int& counter, int place, const Operation& operation);
    void end_section(int& counter, int place, const Operation& operation);

    // A reduction of the running block: to[i] += x[i], in an ordered section at once, otherwise when
    // all blocks have run.
    void add(float* to, const float* x, size_t floats);

    // The running cluster sleeps until what one of its warps waits for has come.
    void wait_for_blocks() { sleep(false); }

    // The running cluster sleeps until no other one can go on.
    void fall_behind() { sleep(true); }

  private:
    // A posted signal.
    struct Post {
        Operation operation;
        uint32_t block;
        int first_thread;  // of the warp
        BlockClock clock;
    };

    struct Reduction {
        float* to;
        float x;
    };

    // A cluster whose OS thread sleeps.
    struct Sleeper {
        const Cluster& cluster;
        bool is_behind;  // else it waits for other blocks
        bool awake = false;
    };

    // What an OS thread does: runs a cluster, then others while there are any.
    void run_clusters(uint32_t number);

    // Carries out the reductions, in an order drawn from the seed.
    void reduce();

    void sleep(bool is_behind);

    void wake(Sleeper& sleeper);

    bool has_come(const BlockWait& wait) const;

    // The first sleeper that waits for what has come; nullptr if none does.
    Sleeper* ready_sleeper() const;

    // Wakes whoever may run now. Reports where nobody ever will.
    void wake_sleepers();

    void describe(Report& report, const uint64_t& signal, const Post& post) const;

    [[noreturn]] void report_deadlock() const;

    const Launch& launch;
    BankCounter& banks;
    std::vector<uint32_t> order;  // of the clusters, shuffled

    std::mutex mutex;                 // of what follows
    std::condition_variable changed;  // num_running, next or a sleeper
    size_t next = 0;                  // in the order: the first cluster that has not begun
    int num_running = 0;              // OS threads that are not asleep
    std::vector<Sleeper*> sleepers;   // in the order in which they fell asleep
    std::map<const uint64_t*, Post> posted;
    std::map<const int*, BlockClock> sections;  // by counter: what the last one passes on
    std::map<uint32_t, std::vector<Reduction>> reductions;  // by block
};

}  // namespace simt
