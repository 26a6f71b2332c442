#include "reduce.cuh"

#include "access.h"
#include "grid.h"

void red_add(float* to, float x, simt::Site site) {
    simt::require_global(to, sizeof(*to), "red_add", site);
    simt::track_reduction(to, 1, site);
    simt::Worker::current()->grid().add(to, &x, 1);
}
