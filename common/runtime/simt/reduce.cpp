#include "reduce.cuh"

#include "access.h"
#include "grid.h"
#include "reduce_vector.cuh"

void red_add(float* to, float x, simt::Site site) {
    simt::require_global(to, sizeof(*to), "red_add", site);
    simt::track_reduction(to, 1, site);
    simt::Worker::current()->grid().add(to, &x, 1);
}

void red_add_v4(float* to, float4 x, simt::Site site) {
    const float floats[4] = {x.x, x.y, x.z, x.w};
    simt::require_global(to, sizeof(floats), "red_add_v4", site);
    simt::track_reduction(to, 4, site);
    simt::Worker::current()->grid().add(to, floats, 4);
}
