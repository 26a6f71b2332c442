// The interface between the host and a kernel: the kernel's one parameter and the step's launch
// descriptor. Included by device/attention.cuh and simt/attention.cuh, which define Element;
// mirrored by launch.py.
#pragma once
#include <stdint.h>

struct Strides {  // in elements; the head_dim axis is contiguous, so it has none
    int64_t batch, head, row;
};

// Describes q, k, v or o to the tensor memory accelerator, as [batch, heads, seq, HEAD_DIM], v and o with
// V_HEAD_DIM, and in boxes, where the launch descriptor asks for it. The bits are the hardware's, or the
// runtime's.
struct alignas(128) TensorMap {
    uint64_t opaque[16];
};

// The parameter of every kernel of every step.
struct AttentionParams {
    TensorMap q_map, k_map, v_map, o_map;
    const Element* q;  // [batch, heads, seq_q, HEAD_DIM]
    const Element* k;  // [batch, kv_heads, seq_k, HEAD_DIM]
    const Element* v;  // [batch, kv_heads, seq_k, V_HEAD_DIM], for most steps the same
    Element* o;        // [batch, heads, seq_q, V_HEAD_DIM]
    float* lse;        // [batch, heads, seq_q], contiguous: natural log of the softmax denominator
    void* workspace[2];  // as the launch descriptor asked, 256-byte aligned, contents undefined
    Strides q_stride, k_stride, v_stride, o_stride;
    int32_t batch, heads, kv_heads, seq_q, seq_k;
    float softmax_scale;
};

// The launch descriptor says how to launch a step; the host reads it from the compiled module.
enum Size : int32_t { BATCH, HEADS, KV_HEADS, SEQ_Q, SEQ_K };

struct Extent {  // of one axis; tile 0 ends a list of axes
    Size size;
    int32_t tile;
};

struct KernelLaunch {  // an empty name ends the list of kernels
    char name[48];
    // gridDim.x = product of ceil(size / tile), filled up to whole clusters; gridDim.y = gridDim.z = 1
    Extent grid[4];
    int32_t threads;
    int32_t smem_bytes;  // dynamic shared memory
    // gridDim.x is at most this times the multiprocessors, in as many clusters as fit at a time; 0: no limit
    int32_t blocks_per_sm;
};

// Without an axis it has one element. A step with blocks_per_sm is given such a one for what its blocks
// leave each other between their tiles: a null pointer where none has a second tile.
struct Workspace {  // element_bytes 0: no such workspace
    int32_t element_bytes;
    Extent shape[4];  // elements = product of size rounded up to a multiple of tile
};

// How a box lies in shared memory: with the 16-byte chunks permuted in every 8 rows of this many
// bytes; in rows of 128, chunk c of row r lies at place c ^ r % 8.
enum Swizzle : int32_t { SWIZZLE_NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B };

struct Box {  // what TMA copies at once, elements of one head; rows 0: no such tensor map
    int32_t rows, columns;
    Swizzle swizzle;
};

// A step may also define, beside it, extern "C" __constant__ int32_t l2_fetch_bytes as 64, 128 or 256:
// what L2 fetches from memory at once for the boxes of its tensor maps. Of 256 the host makes 128 where
// memory is as fast as an H200's. A step that does not define it has 256; or 128, where memory is so fast
// and at most 128 rows share a head of keys.
struct LaunchDescriptor {
    int32_t alignment;        // bytes that divide every row's address in q, k, v and o
    KernelLaunch kernels[3];  // launched in this order
    Workspace workspace[2];
    Box q_box, k_box, v_box, o_box;
};
