// CUDA's warp matrices (sm_80): which lane holds which element is not documented.
// common/runtime/simt/wmma.cuh is the twin for the host compiler.
#pragma once
#include <mma.h>

#include "attention.cuh"

namespace wmma = nvcuda::wmma;
