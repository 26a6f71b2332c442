// Rows of a group of heads, for the host compiler: the twin of common/runtime/device/group_rows.cuh.
#pragma once
#include "attention.cuh"

constexpr Size GROUP_ROWS = Size(SEQ_K + 3);
