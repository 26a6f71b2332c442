#include "dependent_launch.cuh"

#include "scheduler.h"

void griddepcontrol_wait(simt::Site site) {
    simt::Worker& worker = *simt::Worker::current();
    worker.may_fall_behind(simt::mix(site.line));
    worker.races().note_kernel_wait(site);
}
