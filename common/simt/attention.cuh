// What every step includes, for the host compiler: the twin of common/device/attention.cuh, and the
// runtime that executes kernels on a CPU to check them. It is a checker, not a timer, and hostile
// on purpose: the order of blocks and threads is drawn from a seed, memory starts as NaN and ends
// at guard pages, and threads that wait for each other in vain are an error with a report.
//
//     cuda.h        keywords, vector types, maths    element.h    bf16 and fp16
//     warp.h        shuffles and votes               block.h      __syncthreads, shared memory
//     vector.h      16-byte accesses                 copy.cuh     16-byte copies, cp.async
//     mma.cuh       ldmatrix, stmatrix, mma.sync     wmma.cuh     CUDA's warp matrices
//     wgmma.cuh     the warpgroup's products         wgmma_state.h   of them, those in flight
//     warpgroup.cuh setmaxnreg, named barriers       warpgroup_state.h   what those have counted
//     mbarrier.cuh  barriers that count bytes        tma.cuh      copies of boxes of tensors
//     async.h       reads by the async proxy         async_view.h what that proxy sees
//     tensor_map.h  what is in a tensor map          mbarrier_state.h  what an mbarrier counts
//     access.h      addresses checked and counted    banks.h      bank conflicts
//     collective.h  what threads do together         scheduler.h  blocks, threads, who runs next
//     thread.h      the state of a thread            stall.h      why no thread can run
//     fiber.h       switching stacks                 memory.h     buffers between guard pages
//     trap.h        signals become reports           report.h     how a report is written
//     sanitizer.h   fibers and AddressSanitizer      random.h     numbers drawn from the seed
//     run.cpp       main(), the launches             clock.cuh    a clock that counts its readings
//
// The .cpp files, run.cpp and those that are named like a header, are compiled once; each step is
// linked with them.
//
// A new instruction is a function with the name of its wrapper in common/device. If threads execute
// it together, it is a call of collective(). If a thread waits in it for something else, it calls
// Worker::start_waiting() and yield(), and whatever it waits for calls make_runnable(). If it
// accesses memory, the address goes through vector_access() or shared_access(); if it writes,
// through note_write() too.
#pragma once
#include "block.h"
#include "cuda.h"
#include "element.h"
#include "warp.h"

using Element = ELEMENT;  // -DELEMENT=bf16, fp16 or fp32

#include "../launch.h"
#include "vector.h"
