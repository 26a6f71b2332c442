// For work tiles whose rows are of all heads that share their keys.
// common/runtime/simt/group_rows.cuh is the twin for the host compiler.
#pragma once
#include "attention.cuh"

// One more size for grids: the queries of all heads that share a key head.
constexpr Size GROUP_ROWS = Size(SEQ_K + 3);
