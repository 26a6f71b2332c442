#include "cluster.cuh"

#include "cluster_blocks.h"

int cluster_rank() { return simt::Worker::current()->rank(); }

void cluster_arrive(simt::Site site) {
    simt::Worker::current()->cluster().arrive({"cluster_arrive", site});
}

void cluster_wait(simt::Site site) {
    simt::Worker::current()->cluster().wait({"cluster_wait", site});
}
