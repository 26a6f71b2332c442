// setmaxnreg and named barriers, for the host compiler: the twin of
// common/runtime/device/warpgroup.cuh, which says what each function does.
#pragma once
#include "attention.cuh"

namespace simt {

void give_registers(int registers, Site site);
void take_registers(int registers, Site site);

}  // namespace simt

template <int REGISTERS>
void setmaxnreg_dec(simt::Site site = simt::Site::here()) {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256);
    simt::give_registers(REGISTERS, site);
}

template <int REGISTERS>
void setmaxnreg_inc(simt::Site site = simt::Site::here()) {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256);
    simt::take_registers(REGISTERS, site);
}

void bar_sync(int id, int num_threads, simt::Site site = simt::Site::here());
void bar_arrive(int id, int num_threads, simt::Site site = simt::Site::here());
