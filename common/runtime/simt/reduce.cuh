// Reductions in global memory, for the host compiler: the twin of common/runtime/device/reduce.cuh.
// They are carried out when the launch has ended, in an order drawn from the seed.
#pragma once
#include "attention.cuh"

void red_add(float* to, float x, simt::Site site = simt::Site::here());
