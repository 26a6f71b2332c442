// The one mechanism behind barriers, shuffles and votes: the threads of a group each bring a
// payload, the last to arrive does the work for all, and all go on. Every instruction that a warp,
// a warpgroup or a block executes together is a call of collective() with a payload of its own.
#pragma once
#include "access.h"
#include "global_races.h"
#include "scheduler.h"
#include "warp.h"

namespace simt {

// The payloads of a group's threads, indexed within the group.
template <typename Payload>
class Payloads {
  public:
    explicit Payloads(Thread* first_thread) : first_thread(first_thread) {}
    Payload& operator[](int i) const { return *static_cast<Payload*>(first_thread[i].payload); }

  private:
    Thread* first_thread;
};

// The running thread's warp; reports where it cannot execute the operation.
Group& warp_for(const Operation& operation);

// The running thread's warpgroup; reports where it cannot execute the operation.
Group& warpgroup_for(const Operation& operation);

// True for the last thread to arrive. Threads that wait for each other at different collectives
// never complete either; the scheduler reports them when no thread can go on.
bool arrive_last(Group& group, const Operation& operation);

// complete(Payloads<Payload>) runs once, when all of the group's threads (or the lanes in
// operation.mask) have arrived.
template <typename Payload, typename Complete>
void collective(Group& group, const Operation& operation, Payload& payload, Complete complete) {
    Worker& worker = *Worker::current();
    worker.start_waiting(operation, &payload);
    if (arrive_last(group, operation)) {
        complete(Payloads<Payload>(&worker.thread(group.first_thread)));
        for (int i = 0; i < group.num_threads; ++i) {
            if (!operation.mask || operation.mask >> i & 1)
                worker.make_runnable(group.first_thread + i);
        }
    }
    worker.yield();
}

// Without a payload.
template <typename Complete>
void collective(Group& group, const Operation& operation, Complete complete) {
    struct {
    } nothing;
    collective(group, operation, nothing, [&](auto) { complete(); });
}

// Reports threads of a group that bring different payloads.
template <typename Payload>
void require_same(const Group& group, const Operation& operation, Payloads<Payload> threads) {
    for (int i = 1; i < group.num_threads; ++i) {
        if (threads[i] == threads[0]) continue;
        Report report = operation_fault("threads disagree", operation);
        for (int j : {0, i}) {
            report.add("\n  thread %d: ", group.first_thread + j);
            threads[j].describe(report);
        }
        report.fail();
    }
}

// Of a warp, whose lanes all bring the same, on an object in global memory by which blocks wait for
// each other: complete(warp, operation) runs once, when all lanes have arrived.
template <typename Object, typename Payload, typename Complete>
void collective_between_blocks(const char* name, Object& object, Payload payload, Site site,
                               Complete complete) {
    require_global(&object, sizeof(object), name, site);
    *static_cast<const volatile char*>(static_cast<const void*>(&object));  // traps here, or never
    const Operation operation = {name, site, ALL_LANES};
    Group& warp = warp_for(operation);
    collective(warp, operation, payload, [&](Payloads<Payload> lanes) {
        require_same(warp, operation, lanes);
        Worker::current()->races().order_lanes(warp.first_thread, ALL_LANES);
        global_races.require_kernel_wait(WRITE, &object, site);
        complete(warp, Operation{name, site});
    });
}

}  // namespace simt
