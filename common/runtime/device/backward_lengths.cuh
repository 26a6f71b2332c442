// What a step of the backward ladder includes that takes lengths and windows, for nvcc.
// common/runtime/simt/backward_lengths.cuh is its twin for the host compiler.
#pragma once
// clang-format off: lengths.h needs the Element of attention.cuh
#include "attention.cuh"
#include "../lengths.h"
// clang-format on
