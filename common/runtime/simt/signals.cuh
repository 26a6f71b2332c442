// The twin of common/runtime/device/signals.cuh for the host compiler.
#pragma once
#include "signal.cuh"

void take_signals(Signal* signal, simt::Site site = simt::Site::here());
