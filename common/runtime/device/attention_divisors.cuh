// What a forward step includes whose blocks find their work tiles by divisions, for nvcc.
// common/runtime/simt/attention_divisors.cuh is its twin for the host compiler.
#pragma once
// clang-format off: divisors.h needs the Element of attention.cuh
#include "attention.cuh"
#include "../divisors.h"
// clang-format on
