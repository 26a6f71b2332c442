// What every forward step includes, for the host compiler: the twin of
// common/runtime/device/attention.cuh, and the runtime that executes kernels on a CPU to check
// them. It is a checker, not a timer, and hostile on purpose: the order of blocks and threads is
// drawn from a seed; threads fall far behind after an arrive or the start of a copy, blocks after a
// signal; waits that may fail do; memory and variables start as NaN; buffers end at guard pages;
// threads that wait for each other in vain are reported, and so are accesses to shared memory that
// no barrier orders, and those of two blocks to global memory that no signal does.
//
// Included by steps; what a header only declares has its body in the .cpp file of the same name:
//
//     backward.cuh  instead of this one, in steps of the backward ladder
//     attention_lengths.cuh, backward_lengths.cuh    likewise, where steps take lengths and windows
//     attention_divisors.cuh    likewise, where the host divides for them
//     elements.cuh  what all of them begin with      language.h   its part without macros
//     cuda.h        keywords, vector types, maths    element.h    bf16 and fp16
//     warp.h        shuffles and votes               block.h      __syncthreads, shared memory
//     vector.h      16-byte accesses                 copy.cuh     16-byte copies, cp.async
//     mma.cuh       ldmatrix, stmatrix, mma.sync     wmma.cuh     CUDA's warp matrices
//     wgmma.cuh     the warpgroup's products         warpgroup.cuh   setmaxnreg, named barriers
//     mbarrier.cuh  barriers that count bytes        tma.cuh      copies of boxes of tensors
//     signal.cuh    signals between blocks           reduce.cuh   additions in global memory
//     clock.cuh     a clock that counts its readings bulk.cuh     copies of consecutive bytes
//     cluster.cuh   what reaches into other blocks   ticket.cuh   works for whoever comes first
//     ordered.cuh   code that blocks pass in order   ragged.cuh   boxes whose rows end in between
//     dependent_launch.cuh   waits for kernels in front
//     access.h      addresses checked and counted    random.h     numbers drawn from the seed
//     site.h        a place in the source
//
// The runtime's own:
//
//     run.cpp       main(), the launches             grid.h       which blocks run, their signals
//     step.h        what run.cpp knows of the step   scheduler.h  which of a block's threads runs
//     cluster_blocks.h                               which of a cluster's blocks runs
//     collective.h  what threads do together         thread.h     the state of a thread
//     wgmma_state.h, warpgroup_state.h, mbarrier_state.h         what the scheduler keeps of those
//     tensor_map.h  what is in a tensor map          async_view.h what the async proxy sees
//     banks.h       bank conflicts                   stall.h      why no thread can run
//     races.h, global_races.h                        accesses that nothing orders
//     memory.h      buffers between guard pages      fiber.h      switching stacks
//     trap.h        signals become reports           report.h     how a report is written
//     sanitizer.h   fibers and AddressSanitizer      launch_bounds.h   what a signature says
//     nan_pattern.sh, uninitialized.cpp              what nobody initializes is NaN
//
// The .cpp files are compiled once, as parts of unit_blocks.cpp and unit_instructions.cpp, and each
// step is linked with them. Headers that steps include are small and include no large part of the
// standard library, so that steps compile fast.
//
// A new instruction is a function with the name of its wrapper in common/runtime/device. Its body
// is in the .cpp file, where Element is not known: the header turns Element and template parameters
// into ordinary arguments. If threads execute it together, it calls collective(). If a thread waits
// in it for something else, it calls Worker::start_waiting() and yield(), and whatever it waits for
// calls make_runnable(). If it tells other threads to go on, or starts a copy, it ends with
// may_fall_behind(); a fence, for which others must wait, begins with it. If it accesses memory, the
// address goes through track(), in shared memory also through shared_access(), and if it writes
// there, through note_write(). If it starts a copy from or to global memory, that address goes
// through require_kernel_wait() of global_races.h. If it is a barrier, it also tells races.h what it
// orders.
#pragma once
#include "elements.cuh"

// In a step: not in the runtime's own files, nor after one of the others.
#if defined(ELEMENT) && !defined(SIMT_STEP)
#define SIMT_STEP
#include "step.h"

extern "C" LaunchDescriptor launch_descriptor;  // the step defines it

const simt::StepInterface simt_step = simt::interface_of<AttentionParams>(launch_descriptor);
#endif
