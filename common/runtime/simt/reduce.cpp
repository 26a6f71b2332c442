#include "reduce.cuh"

#include "access.h"
#include "global_races.h"
#include "grid.h"

void red_add(float* to, float x, simt::Site site) {
    simt::require_global(to, sizeof(*to), "red_add", site);
    // Traps here, and not when the launch ends, where it must not be written.
    volatile float& now = *to;
    now = now;
    simt::global_races.reduce(to, site);
    simt::Worker::current()->grid().add(to, x);
}
