#include "warpgroup.cuh"

#include "collective.h"

namespace simt {
namespace {

struct RegisterCount {  // of a thread
    int registers;

    bool operator==(const RegisterCount&) const = default;
    void describe(Report& report) const { report.add("%d registers", registers); }
};

// A collective of the warpgroup in which change(pool, index of the warpgroup) runs once.
template <typename Change>
void change_registers(const Operation& operation, int registers, Change change) {
    Group& warpgroup = warpgroup_for(operation);
    RegisterCount count = {registers};
    collective(warpgroup, operation, count, [&](Payloads<RegisterCount> threads) {
        require_same(warpgroup, operation, threads);
        change(Worker::current()->registers(), warpgroup.first_thread / WARPGROUP_SIZE);
    });
}

// Begins a report about a setmaxnreg in the wrong direction.
Report register_fault(const Operation& operation, int registers, int held) {
    Report report = operation_fault("wrong number of registers", operation);
    report.add(" from %d to %d a thread", held, registers);
    return report;
}

// Grants the requests for which there are enough registers.
void grant_registers(RegisterPool& pool) {
    std::erase_if(pool.requests, [&](const RegisterRequest& request) {
        if (pool.missing(request.warpgroup, request.registers) > pool.free) return false;
        pool.take(request.warpgroup, request.registers);
        for (int thread : request.waiting) Worker::current()->make_runnable(thread);
        return true;
    });
}

// A warp's arrival at a named barrier.
struct Arrival {
    int id, num_threads;
    uint32_t round = 0;  // that it arrives in

    bool operator==(const Arrival& other) const {
        return id == other.id && num_threads == other.num_threads;
    }
    void describe(Report& report) const { report.add("barrier %d, %d threads", id, num_threads); }
};

// The warp arrives at a barrier; the last warp of a round begins the next.
Arrival arrive(const char* name, int id, int num_threads, Site site) {
    const Operation operation = {name, site, ALL_LANES};
    Worker& worker = *Worker::current();
    if (id < 1 || id >= NUM_BARRIERS) {
        operation_fault("wrong barrier", operation)
            .add(", which has 1 to %d, not %d; 0 is that of __syncthreads", NUM_BARRIERS - 1, id)
            .fail();
    }
    const int block_threads = worker.block().num_threads;
    if (num_threads <= 0 || num_threads % WARP_SIZE || num_threads > block_threads) {
        operation_fault("wrong number of threads", operation)
            .add(", which needs a multiple of %d up to the block's %d, not %d", WARP_SIZE,
                 block_threads, num_threads)
            .fail();
    }
    Group& warp = warp_for(operation);
    Arrival arrival = {id, num_threads};
    collective(warp, operation, arrival, [&](Payloads<Arrival> lanes) {
        require_same(warp, operation, lanes);
        NamedBarrier& barrier = worker.named_barrier(id);
        if (barrier.arrived && barrier.expected != num_threads) {
            operation_fault("threads disagree", operation)
                .add(": barrier %d of %d threads, while %d have arrived at it as one of %d", id,
                     num_threads, barrier.arrived, barrier.expected)
                .fail();
        }
        for (int lane = 0; lane < WARP_SIZE; ++lane) lanes[lane].round = barrier.round;
        barrier.expected = num_threads;
        barrier.arrived += WARP_SIZE;
        for (int lane = 0; lane < WARP_SIZE; ++lane)
            worker.races().release(warp.first_thread + lane, barrier.handover);
        if (barrier.arrived < num_threads) return;
        for (int thread : barrier.waiting) worker.make_runnable(thread);
        barrier.waiting.clear();
        barrier.arrived = 0;
        ++barrier.round;
        barrier.handover.complete_phase();
    });
    return arrival;
}

}  // namespace

void give_registers(int registers, Site site) {
    const Operation operation = {"setmaxnreg_dec", site};
    change_registers(operation, registers, [&](RegisterPool& pool, int warpgroup) {
        if (registers > pool.held[warpgroup])
            register_fault(operation, registers, pool.held[warpgroup]).fail();
        pool.take(warpgroup, registers);
        grant_registers(pool);
    });
}

// If there are too few, the threads wait until another warpgroup gives some back.
void take_registers(int registers, Site site) {
    const Operation operation = {"setmaxnreg_inc", site};
    change_registers(operation, registers, [&](RegisterPool& pool, int warpgroup) {
        if (registers < pool.held[warpgroup])
            register_fault(operation, registers, pool.held[warpgroup]).fail();
        pool.requests.push_back({warpgroup, registers});
        grant_registers(pool);
    });
    Worker& worker = *Worker::current();
    for (RegisterRequest& request : worker.registers().requests) {
        if (request.warpgroup != worker.running_thread() / WARPGROUP_SIZE) continue;
        request.waiting.push_back(worker.running_thread());
        worker.start_waiting(operation, nullptr);
        worker.yield();
        break;
    }
}

}  // namespace simt

void bar_sync(int id, int num_threads, simt::Site site) {
    const simt::Arrival arrival = simt::arrive("bar_sync", id, num_threads, site);
    simt::Worker& worker = *simt::Worker::current();
    simt::NamedBarrier& barrier = worker.named_barrier(id);
    if (barrier.round == arrival.round) {
        barrier.waiting.push_back(worker.running_thread());
        worker.start_waiting({"bar_sync", site}, nullptr);
        worker.yield();
    }
    worker.races().acquire(worker.running_thread(), barrier.handover);
}

void bar_arrive(int id, int num_threads, simt::Site site) {
    const simt::Arrival arrival = simt::arrive("bar_arrive", id, num_threads, site);
    simt::Worker::current()->may_fall_behind(simt::mix(simt::mix(site.line, id), arrival.round));
}
