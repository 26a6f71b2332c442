// Barriers in shared memory that count arrivals and bytes, for the host compiler: the twin of
// common/runtime/device/mbarrier.cuh. A phase must get the arrivals and the bytes that it takes, no more.
#pragma once
#include "attention.cuh"

using Mbarrier = uint64_t;

void mbarrier_init(Mbarrier& barrier, int count, simt::Site site = simt::Site::here());

void fence_mbarrier_init();

void mbarrier_arrive(Mbarrier& barrier, simt::Site site = simt::Site::here());

void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes, simt::Site site = simt::Site::here());

// Waits until the phase completes, so that one that never does is a deadlock; sometimes returns
// false without waiting. When the thread goes on, the next phase may have completed, too.
bool mbarrier_try_wait_parity(Mbarrier& barrier, int parity, simt::Site site = simt::Site::here());
