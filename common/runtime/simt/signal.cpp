#include "signal.cuh"

#include "access.h"
#include "collective.h"
#include "grid.h"
#include "trap.h"

namespace simt {
namespace {

struct SignalAddress {  // what a lane brings
    const Signal* signal;

    bool operator==(const SignalAddress&) const = default;
    void describe(Report& report) const {
        report.add("the signal ");
        describe_address(report, reinterpret_cast<const std::byte*>(signal));
    }
};

// A collective of the warp; complete(operation) runs once, when all lanes have arrived.
template <typename Complete>
void signal_collective(const char* name, const Signal& signal, Site site, Complete complete) {
    require_global(&signal, sizeof(signal), name, site);
    *static_cast<const volatile char*>(static_cast<const void*>(&signal));  // traps here, or never
    const Operation operation = {name, site, ALL_LANES};
    Group& warp = warp_for(operation);
    SignalAddress address = {&signal};
    collective(warp, operation, address, [&](Payloads<SignalAddress> lanes) {
        require_same(warp, operation, lanes);
        Worker::current()->races().order_lanes(warp.first_thread, ALL_LANES);
        global_races.require_kernel_wait(WRITE, &signal, site);
        complete(Operation{name, site});
    });
}

}  // namespace
}  // namespace simt

void post_signal(Signal& signal, simt::Site site) {
    simt::signal_collective("post_signal", signal, site, [&](const simt::Operation& operation) {
        simt::Worker& worker = *simt::Worker::current();
        worker.grid().post(signal, operation);
        if (worker.in_this_run(simt::mix(site.line))) worker.grid().fall_behind();
    });
}

void take_signal(Signal& signal, simt::Site site) {
    simt::signal_collective("take_signal", signal, site, [&](const simt::Operation& operation) {
        simt::Worker& worker = *simt::Worker::current();
        while (!worker.grid().take(signal, operation)) worker.wait_for_signal(signal);
    });
}
