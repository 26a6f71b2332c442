// What every step of the backward ladder includes, for nvcc. common/runtime/simt/backward.cuh is its
// twin for the host compiler.
#pragma once
// clang-format off: backward.h needs the Element of attention.cuh
#include "attention.cuh"
#include "../backward.h"
// clang-format on
