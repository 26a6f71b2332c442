#include "ticket.cuh"

#include "access.h"
#include "collective.h"
#include "scheduler.h"
#include "trap.h"

int take_ticket(int* counter, simt::Site site) {
    simt::require_global(counter, sizeof(*counter), "take_ticket", site);
    simt::global_races.take_ticket(counter, site);
    const int ticket = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
    if (ticket < 0) {  // poison is -1
        simt::Report report = simt::operation_fault("counter not set", {"take_ticket", site});
        report.add(" finds %d ", ticket);
        simt::describe_address(report, reinterpret_cast<const std::byte*>(counter));
        report.add("; a kernel in front must set the counter to 0").fail();
    }
    return ticket;
}
