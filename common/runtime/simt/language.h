// The headers that every step includes and that depend on none of its macros: cpu.py has g++ compile
// them once.
#include "access.h"
#include "block.h"
#include "cuda.h"
#include "element.h"
#include "warp.h"
