#include "collective.h"
#include "grid.h"
#include "signals.cuh"
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

void take(const char* name, Signal& signal, Site site) {
    const auto complete = [&](Group&, const Operation& operation) {
        Worker& worker = *Worker::current();
        while (!worker.grid().take(signal, operation)) worker.wait_for_signal(signal);
    };
    collective_between_blocks(name, signal, SignalAddress{&signal}, site, complete);
}

}  // namespace
}  // namespace simt

void post_signal(Signal& signal, simt::Site site) {
    const auto post = [&](simt::Group&, const simt::Operation& operation) {
        simt::Worker& worker = *simt::Worker::current();
        worker.grid().post(signal, operation);
        if (worker.in_this_run(simt::mix(site.line))) worker.grid().fall_behind();
    };
    simt::collective_between_blocks("post_signal", signal, simt::SignalAddress{&signal}, site,
                                    post);
}

void take_signal(Signal& signal, simt::Site site) { simt::take("take_signal", signal, site); }

// The lanes' signals one after another: nobody can tell.
void take_signals(Signal* signal, simt::Site site) {
    const uint64_t own = reinterpret_cast<uint64_t>(signal);
    for (int lane = 0; lane < simt::WARP_SIZE; ++lane) {
        const uint64_t of = simt::exchange("take_signals", simt::ALL_LANES, own, lane, site);
        if (of != 0) simt::take("take_signals", *reinterpret_cast<Signal*>(of), site);
    }
}
