// Reductions of four floats at once, for the host compiler: the twin of
// common/runtime/device/reduce_vector.cuh. They are carried out as those of reduce.cuh are.
#pragma once
#include "attention.cuh"

void red_add_v4(float* to, float4 x, simt::Site site = simt::Site::here());
