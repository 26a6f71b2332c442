// What the kernels of the backward ladder take, and their launch descriptor; the rest of the interface
// is launch.h's. Included by device/backward.cuh and simt/backward.cuh; mirrored by launch.py.
#pragma once
#include "launch.h"

// The parameter of every kernel of every b-step.
struct BackwardParams {
    TensorMap q_map, k_map, v_map, o_map, dout_map, dq_map, dk_map, dv_map;
    const Element* q;  // [batch, heads, seq_q, HEAD_DIM]
    const Element* k;  // [batch, kv_heads, seq_k, HEAD_DIM]
    const Element* v;  // [batch, kv_heads, seq_k, V_HEAD_DIM]
    const Element* o;  // [batch, heads, seq_q, V_HEAD_DIM]: what forward returned
    const float* lse;  // [batch, heads, seq_q], contiguous: likewise; -inf where no key is visible
    const Element* dout;  // [batch, heads, seq_q, HEAD_DIM]: the gradient of o
    Element* dq;          // [batch, heads, seq_q, HEAD_DIM]
    Element* dk;          // [batch, kv_heads, seq_k, HEAD_DIM]: summed over the group's query heads
    Element* dv;          // [batch, kv_heads, seq_k, V_HEAD_DIM]: likewise
    void* workspace[3];   // as the launch descriptor asked, 256-byte aligned, contents undefined
    Strides q_stride, k_stride, v_stride, o_stride, dout_stride, dq_stride, dk_stride, dv_stride;
    int32_t batch, heads, kv_heads, seq_q, seq_k;
    float softmax_scale;
};

struct BackwardDescriptor {
    int32_t alignment;        // bytes that divide every row's address in all tensors but lse
    KernelLaunch kernels[3];  // launched in this order
    Workspace workspace[3];
    Box q_box, k_box, v_box, o_box, dout_box, dq_box, dk_box, dv_box;
};
