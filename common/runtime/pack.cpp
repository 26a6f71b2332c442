// Packs the parameter of a step's kernels, the struct that launch.h or backward.h defines, and on a GPU
// launches them. In Python this would take half of a small call's time on the host. pack.py compiles it
// and mirrors Plan, launcher.py Launcher.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simt/tensor_map.h"

namespace packing {

constexpr int AXES = 4;         // batch, head, row, d
constexpr int MAX_AXES = 5;     // of a map
constexpr int MAX_KERNELS = 3;  // of a step
constexpr int MAP_BYTES = 128, MAP_ALIGNMENT = 64;

constexpr int UNFIT = -1;

enum Size { BATCH, HEADS, KV_HEADS, SEQ_Q, SEQ_K, NUM_SIZES };  // as in launch.h
constexpr int PADDED_Q = NUM_SIZES, MOST_TILE_ROWS = 128;       // as in lengths.h
constexpr int COLUMNS = PADDED_Q + 1;                           // as in slices.cuh
constexpr int GROUP_ROWS = COLUMNS + 1;                         // as in group_rows.cuh
constexpr int SPLIT_KEYS = GROUP_ROWS + 1;                      // as in divisors.h
// With so many rows of queries that share a head of keys, or fewer, its keys are read once. (Packed
// sequences count together.)
constexpr int MOST_ROWS_ONCE = 128;

// As cuTensorMapEncodeTiled: a map of `rank` axes, the innermost one first. Strides are in bytes, and
// the innermost axis has none.
using EncodeMap = int(void* map, int data_type, uint32_t rank, void* address, const uint64_t* sizes,
                      const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                      int interleave, int swizzle, int l2_promotion, int out_of_bounds_fill);

struct Operand {
    int32_t strided;
    int32_t axes[AXES - 1];                  // enum Size
    int32_t columns;                         // of a strided one, along a last axis
    int32_t box_rows, box_columns, swizzle;  // of its tensor map; 0 rows: it has none
};

struct Extent {  // of an axis of a grid, in tiles; tile 0: there is no such axis
    int32_t size, tile;
};

struct Kernel {
    Extent grid[4];
    int32_t most_blocks;  // 0: as many as there are tiles
    int32_t cluster;      // blocks
};

struct Plan {
    EncodeMap* encode;
    int32_t data_type, l2_promotion;  // the driver's enums
    int32_t l2_promotion_once;        // where keys are read once
    int32_t columns, element_bytes;   // columns: the size COLUMNS
    int32_t alignment;                // bytes that divide every row's address
    int32_t operands, workspaces, scalars;
    int32_t lengths_at, divisors_at;  // bytes: where in the parameter these are; 0: nowhere
    int32_t kernels;
    Operand operand[9];  // the first two are q and k
    Kernel kernel[MAX_KERNELS];
};

struct Lengths {                                    // as in lengths.h
    int64_t cu_seqlens_q, cu_seqlens_k, seqused_k;  // addresses, or 0
    int32_t sequences, window_left, window_right;
};

struct Divisor {  // as in divisors.h
    uint32_t value, inverse;
};

struct Divisors {  // as in divisors.h
    Divisor tiles[4], works, blocks, group;
    int32_t split_keys;
};

// How a strided operand lies: sizes and strides in elements.
struct Tensor {
    int64_t sizes[AXES], strides[AXES];
};

template <typename T>
void write(unsigned char*& at, T x) {
    std::memcpy(at, &x, sizeof x);
    at += sizeof x;
}

bool are_valid(const int32_t* sizes) {
    for (int i = 0; i < NUM_SIZES; ++i)
        if (sizes[i] < 1) return false;
    return sizes[HEADS] % sizes[KV_HEADS] == 0;
}

bool fits(const Plan& plan, const Operand& operand, int64_t address, const Tensor& t,
          const int32_t* sizes) {
    uint64_t offsets = address;
    for (int axis = 0; axis < AXES - 1; ++axis) {
        if (t.sizes[axis] != sizes[operand.axes[axis]]) return false;
        offsets |= t.strides[axis] * plan.element_bytes;
    }
    return t.sizes[AXES - 1] == operand.columns && t.strides[AXES - 1] == 1 &&
           offsets % plan.alignment == 0;
}

int encode(const Plan& plan, const Operand& operand, int64_t address, const Tensor& t,
           const int32_t* sizes_of_call, unsigned char* map) {
    alignas(MAP_ALIGNMENT) unsigned char bits[MAP_BYTES] = {};
    uint64_t sizes[MAX_AXES], strides[MAX_AXES - 1];
    for (int axis = 0; axis < AXES; ++axis) sizes[axis] = t.sizes[AXES - 1 - axis];
    for (int axis = 0; axis < AXES - 1; ++axis)
        strides[axis] = t.strides[AXES - 2 - axis] * plan.element_bytes;
    const bool is_ragged = plan.lengths_at != 0;
    if (is_ragged) {  // as ragged.cuh has it: the fifth axis is the end of a sequence's rows
        const uint64_t rows = sizes[1], row_bytes = strides[0];
        sizes[AXES] = rows + 1;
        strides[AXES - 1] = row_bytes;
        address -= rows * row_bytes;
    }
    const uint32_t box[MAX_AXES] = {uint32_t(operand.box_columns), uint32_t(operand.box_rows), 1, 1,
                                    1};
    const uint32_t every_element[MAX_AXES] = {1, 1, 1, 1, 1};
    const bool reads_once = sizes_of_call[GROUP_ROWS] <= MOST_ROWS_ONCE;
    const int status =
        plan.encode(bits, plan.data_type, AXES + is_ragged, reinterpret_cast<void*>(address), sizes,
                    strides, box, every_element, 0, operand.swizzle,
                    reads_once ? plan.l2_promotion_once : plan.l2_promotion, 0);
    std::memcpy(map, bits, sizeof bits);
    return status;
}

int64_t count_tiles(const Extent& extent, const int32_t* sizes) {
    return extent.tile ? (int64_t{sizes[extent.size]} + extent.tile - 1) / extent.tile : 1;
}

// As many as there are tiles, or as can be; filled up to whole clusters.
int64_t count_blocks(const Kernel& kernel, const int32_t* sizes) {
    int64_t blocks = 1;
    for (const Extent& extent : kernel.grid) blocks *= count_tiles(extent, sizes);
    if (kernel.most_blocks) blocks = std::min(blocks, int64_t{kernel.most_blocks});
    return (blocks + kernel.cluster - 1) / kernel.cluster * kernel.cluster;
}

Divisors divisors_of(const Kernel& kernel, const int32_t* sizes) {
    const auto divisor = [](int64_t value) {
        const uint32_t counted = uint32_t(std::min<int64_t>(value, UINT32_MAX));
        return Divisor{counted, UINT32_MAX / counted};
    };
    const int64_t blocks = count_blocks(kernel, sizes);
    Divisors divisors = {};
    int64_t works = 1, key_tiles = 1;
    for (int axis = 0; axis < 4; ++axis) {
        const Extent& extent = kernel.grid[axis];
        const int64_t tiles = count_tiles(extent, sizes);
        divisors.tiles[axis] = divisor(tiles);
        (extent.size == SEQ_K ? key_tiles : works) *= tiles;
    }
    divisors.works = divisor(works);
    divisors.blocks = divisor(blocks);
    divisors.group = divisor(sizes[HEADS] / sizes[KV_HEADS]);
    const int64_t idle = (blocks - works % blocks) % blocks;  // in the last round
    divisors.split_keys = works < 9 * idle && key_tiles > 1 && works <= UINT32_MAX / key_tiles;
    return divisors;
}

extern "C" {
// Writes the parameter, and how many blocks each kernel has. Returns 0; or UNFIT where the tensors
// do not fit together, or the step cannot read their rows; or 1 + i + 256 * the encoder's status
// where that rejects the map of operand i. addresses are those of the operands and workspaces,
// tensors are the strided operands; lengths are read where the plan has a place for them.
int pack(const Plan* plan, const int64_t* addresses, const Tensor* tensors, const double* scalars,
         const Lengths* lengths, unsigned char* params, int64_t* blocks) {
    const Tensor &q = tensors[0], &k = tensors[1];
    const int64_t given[NUM_SIZES] = {q.sizes[0], q.sizes[1], k.sizes[1], q.sizes[2], k.sizes[2]};
    int32_t sizes[SPLIT_KEYS + 1] = {};
    for (int i = 0; i < NUM_SIZES; ++i) sizes[i] = given[i] <= INT32_MAX ? int32_t(given[i]) : 0;
    if (!are_valid(sizes)) return UNFIT;
    if (plan->lengths_at) {
        const int64_t rows = int64_t{sizes[BATCH]} * sizes[SEQ_Q];
        const int64_t padded = rows + int64_t{MOST_TILE_ROWS} * lengths->sequences;
        if (padded > INT32_MAX) return UNFIT;
        sizes[PADDED_Q] = int32_t(padded);
    }
    sizes[COLUMNS] = plan->columns;
    const int64_t group_rows = int64_t{sizes[HEADS] / sizes[KV_HEADS]} * sizes[SEQ_Q];
    if (group_rows > INT32_MAX) return UNFIT;
    sizes[GROUP_ROWS] = int32_t(group_rows);

    int num_strided = 0;
    for (int i = 0; i < plan->operands; ++i) num_strided += plan->operand[i].strided;
    unsigned char* map = params;
    unsigned char* address = params + MAP_BYTES * num_strided;
    unsigned char* stride = address + sizeof *addresses * (plan->operands + plan->workspaces);
    for (int i = 0; i < plan->operands + plan->workspaces; ++i) write(address, addresses[i]);
    for (int i = 0; i < plan->operands; ++i) {
        const Operand& operand = plan->operand[i];
        if (!operand.strided) continue;
        Tensor t = *tensors++;
        for (int axis = 0; axis < AXES - 1; ++axis) {
            if (t.sizes[axis] == 1) t.strides[axis] = 0;  // it has no meaning
            write(stride, t.strides[axis]);
        }
        if (!fits(*plan, operand, addresses[i], t, sizes)) return UNFIT;
        if (operand.box_rows)
            if (const int status = encode(*plan, operand, addresses[i], t, sizes, map))
                return 1 + i + 256 * status;
        map += MAP_BYTES;
    }
    for (int i = 0; i < NUM_SIZES; ++i) write(stride, sizes[i]);
    for (int i = 0; i < plan->scalars; ++i) write(stride, float(scalars[i]));
    if (plan->lengths_at) std::memcpy(params + plan->lengths_at, lengths, sizeof *lengths);
    if (plan->divisors_at) {
        const Divisors divisors = divisors_of(plan->kernel[0], sizes);
        sizes[SPLIT_KEYS] = divisors.split_keys;
        std::memcpy(params + plan->divisors_at, &divisors, sizeof divisors);
    }
    for (int i = 0; i < plan->kernels; ++i) blocks[i] = count_blocks(plan->kernel[i], sizes);
    return 0;
}

// The SIMT runtime's map. Its program has the tensor at another address: a map of five axes begins
// as many rows before that as the tensor has.
int encode_for_simt(void* map, int element_bytes, uint32_t axes, void* address,
                    const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                    const uint32_t*, int, int swizzle, int, int) {
    simt::TensorMapFields fields = {};
    fields.address = reinterpret_cast<uint64_t>(address);
    fields.axes = int32_t(axes);
    for (uint32_t axis = 0; axis < axes; ++axis) fields.sizes[axis] = int32_t(sizes[axis]);
    for (uint32_t axis = 0; axis < axes - 1; ++axis) {
        if (strides[axis] >> 40) return 1;  // the driver's CUDA_ERROR_INVALID_VALUE
        fields.strides[axis] = int64_t(strides[axis]);
    }
    if (axes > AXES) fields.begin = -fields.sizes[1] * fields.strides[0];
    fields.box_columns = int32_t(box[0]);
    fields.box_rows = int32_t(box[1]);
    fields.swizzle = swizzle;
    fields.valid = simt::VALID_TENSOR_MAP;
    fields.element_bytes = element_bytes;
    std::memcpy(map, &fields, sizeof fields);
    return 0;
}
}  // extern "C"

// ---- Launching. Types and constants of the driver are as in cuda.h, which not every machine has.

constexpr int MAX_PARAMS_BYTES = 4096;                // what kernels can take on every GPU
constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;  // a CUlaunchAttributeID

using Context = void*;

struct alignas(8) LaunchAttribute {  // CUlaunchAttribute
    int32_t id, padding, value[16];
};

struct LaunchConfig {  // CUlaunchConfig
    uint32_t grid[3], block[3], smem_bytes;
    void* stream;
    LaunchAttribute* attributes;
    uint32_t num_attributes;
};

struct LoadedKernel {
    void* function;
    int32_t threads, smem_bytes;
    int32_t starts_early;  // before the kernel in front has ended
};

struct Launcher {
    int (*get_context)(Context*);  // cuCtxGetCurrent
    int (*push_context)(Context);
    int (*pop_context)(Context*);
    int (*launch)(const LaunchConfig*, void* function, void** params, void** extra);
    Context context;  // of the kernels
    LoadedKernel kernel[MAX_KERNELS];
};

int launch_kernel(const Launcher& launcher, const LoadedKernel& kernel, int64_t blocks,
                  void* params, void* stream) {
    LaunchAttribute early = {PROGRAMMATIC_STREAM_SERIALIZATION, 0, {1}};
    LaunchConfig config = {};
    config.grid[0] = uint32_t(std::min<int64_t>(blocks, UINT32_MAX));  // the driver rejects that
    config.block[0] = kernel.threads;
    config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
    config.smem_bytes = kernel.smem_bytes;
    config.stream = stream;
    config.attributes = &early;
    config.num_attributes = kernel.starts_early;
    return launcher.launch(&config, kernel.function, &params, nullptr);
}

int launch_here(const Plan& plan, const int64_t* addresses, const Tensor* tensors,
                const double* scalars, const Lengths* lengths, const Launcher& launcher,
                void* stream) {
    unsigned char params[MAX_PARAMS_BYTES] = {};
    int64_t blocks[MAX_KERNELS];
    if (const int failure = pack(&plan, addresses, tensors, scalars, lengths, params, blocks))
        return failure;
    for (int i = 0; i < plan.kernels; ++i) {
        if (blocks[i] == 0) continue;
        if (const int status =
                launch_kernel(launcher, launcher.kernel[i], blocks[i], params, stream))
            return UNFIT - status;
    }
    return 0;
}

extern "C" {
// Packs, and launches the kernels in order. Returns what pack() does; or UNFIT - the driver's status
// where that fails, and then launches no more. The thread may be in another context, or in none.
int launch(const Plan* plan, const int64_t* addresses, const Tensor* tensors, const double* scalars,
           const Lengths* lengths, const Launcher* launcher, void* stream) {
    Context current = nullptr;
    if (const int status = launcher->get_context(&current)) return UNFIT - status;
    const bool is_elsewhere = current != launcher->context;
    if (is_elsewhere)
        if (const int status = launcher->push_context(launcher->context)) return UNFIT - status;
    const int failure = launch_here(*plan, addresses, tensors, scalars, lengths, *launcher, stream);
    if (is_elsewhere) launcher->pop_context(&current);
    return failure;
}
}  // extern "C"
}  // namespace packing
