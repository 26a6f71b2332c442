// What a step takes in place of launch.h's or backward.h's parameter where sequences have lengths
// of their own and queries see a window of the keys. Included by attention_lengths.cuh and
// backward_lengths.cuh, in device/ and in simt/; mirrored by launch.py and pack.cpp.
#pragma once
#include "backward.h"

// Packed, the sequences lie one after another as rows of one batch: q is
// [1, heads, total_q, HEAD_DIM], and seq_q is total_q. Of a sequence with seq_q queries and seq_k
// keys, query i sees the keys from i + seq_k - seq_q - window_left to
// i + seq_k - seq_q + window_right.
struct Lengths {
    const int32_t* cu_seqlens_q;  // [sequences + 1]: first rows, and the end; null: not packed
    const int32_t* cu_seqlens_k;  // likewise of k and v
    const int32_t* seqused_k;     // [sequences]: how many keys of each are there; null: all
    int32_t sequences;
    int32_t window_left, window_right;  // UNLIMITED: all keys
};
constexpr int32_t UNLIMITED = INT32_MAX;

struct LengthsParams : AttentionParams, Lengths {};
struct BackwardLengthsParams : BackwardParams, Lengths {};
static_assert(sizeof(LengthsParams) == sizeof(AttentionParams) + alignof(AttentionParams));
static_assert(sizeof(BackwardLengthsParams) == sizeof(BackwardParams) + alignof(BackwardParams));

// One more size for grids and workspaces: the rows of q, in all batches, and MOST_TILE_ROWS for
// each sequence, so that the last tile of each may be filled up.
constexpr int MOST_TILE_ROWS = 128;
constexpr Size PADDED_Q = Size(SEQ_K + 1);
