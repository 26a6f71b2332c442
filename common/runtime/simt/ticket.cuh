// Tickets, for the host compiler: the twin of common/runtime/device/ticket.cuh. Which of the blocks
// that run at a time gets a ticket is up to the operating system, not to the seed.
#pragma once
#include "attention.cuh"

int take_ticket(int* counter, simt::Site site = simt::Site::here());
