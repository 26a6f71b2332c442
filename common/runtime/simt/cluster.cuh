// Clusters, for the host compiler: the twin of common/runtime/device/cluster.cuh. The blocks of a
// cluster run on one OS thread, in an order drawn from the seed; cluster_blocks.h has them. A copy
// to another block's shared memory lands as a load does there, and reads its source then.
// mbarrier.cpp has the arrivals and the wait, tma.cpp the copies.
#pragma once
#include "tma.cuh"

int cluster_rank();

void cluster_arrive(simt::Site site = simt::Site::here());
void cluster_wait(simt::Site site = simt::Site::here());

void mbarrier_arrive_cluster(Mbarrier& barrier, int rank, simt::Site site = simt::Site::here());
void mbarrier_arrive_cluster_relaxed(Mbarrier& barrier, int rank,
                                     simt::Site site = simt::Site::here());

bool mbarrier_try_wait_parity_cluster(Mbarrier& barrier, int parity,
                                      simt::Site site = simt::Site::here());

namespace simt {

void start_multicast(void* to_shared, const TensorMap& map, const BoxStart& first,
                     Mbarrier& barrier, uint16_t ranks, Site site);

}  // namespace simt

inline void cp_async_bulk_tensor_load_multicast(Element* to_shared, const TensorMap& map, int d,
                                                int row, int head, int batch, Mbarrier& barrier,
                                                uint16_t ranks,
                                                simt::Site site = simt::Site::here()) {
    simt::start_multicast(to_shared, map, {4, {d, row, head, batch}}, barrier, ranks, site);
}

void cp_async_bulk_cluster(void* to_shared, const void* from_shared, int bytes, Mbarrier& barrier,
                           int rank, simt::Site site = simt::Site::here());
