// Elements, threads and memory: what every header of simt/ builds on, without the interface of a step,
// which is in attention.cuh and backward.cuh.
#pragma once
#include "block.h"
#include "cuda.h"
#include "element.h"
#include "warp.h"

#if defined(ELEMENT)
using Element = ELEMENT;  // -DELEMENT=bf16, fp16 or fp32
#include "../launch.h"
#include "vector.h"
#else
struct Element;  // in the runtime's own .cpp files, which have only pointers to some
#include "../launch.h"
#endif
