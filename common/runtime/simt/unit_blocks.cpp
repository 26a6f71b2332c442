// What runs blocks and watches them; unit_instructions.cpp has the rest of the runtime. A unit
// compiles many .cpp files at once, since most of what each of them takes by itself are the same
// headers. So names in their anonymous namespaces must differ.

#include "access.cpp"
#include "async_view.cpp"
#include "banks.cpp"
#include "block.cpp"
#include "cluster_blocks.cpp"
#include "collective.cpp"
#include "fiber.cpp"
#include "global_races.cpp"
#include "grid.cpp"
#include "races.cpp"
#include "run.cpp"
#include "scheduler.cpp"
#include "trap.cpp"
#include "uninitialized.cpp"
#include "warp.cpp"
