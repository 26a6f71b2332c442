// A clock, for the host compiler: the twin of common/runtime/device/clock.cuh. It counts its
// readings by all threads: later readings are larger; differences mean nothing.
#pragma once
#include "attention.cuh"

int64_t mov_clock64();
