// Barriers in shared memory that count arrivals and bytes, for the host compiler: the twin of
// common/runtime/device/mbarrier.cuh. A phase must get exactly the arrivals and bytes it expects.
#pragma once
#include "attention.cuh"

using Mbarrier = uint64_t;

void mbarrier_init(Mbarrier& barrier, int count, simt::Site site = simt::Site::here());

void fence_mbarrier_init();

void mbarrier_arrive(Mbarrier& barrier, simt::Site site = simt::Site::here());

void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes, simt::Site site = simt::Site::here());

// Sometimes returns false at once, to all lanes of a warp alike; else waits until the phase
// completes, so that one that never does is a deadlock. By the time the thread goes on, the next
// phase may have completed, too, and then this returns false as well.
bool mbarrier_try_wait_parity(Mbarrier& barrier, int parity, simt::Site site = simt::Site::here());
