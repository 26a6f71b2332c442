#include "tma.cuh"

#include <vector>

#include "access.h"
#include "async_view.h"
#include "bulk.cuh"
#include "cluster.cuh"
#include "cluster_blocks.h"
#include "global_races.h"
#include "grid.h"
#include "scheduler.h"
#include "tensor_map.h"

namespace simt {
namespace {

int box_bytes(const TensorBox& box) {
    return box.map.box_rows * box.map.box_columns * box.map.element_bytes;
}

// XORs bits 4-6 of an offset with its bits 7-9, or the lower of these; a box begins where all of
// them are 0.
size_t swizzled(const TensorMapFields& map, size_t place) {
    const size_t bits = (1 << map.swizzle) - 1;
    return place ^ (place >> 7 & bits) << 4;
}

// nullptr outside the tensor.
std::byte* element_address(const TensorMapFields& map, const int64_t (&index)[MAX_AXES]) {
    int64_t offset = map.begin + index[0] * map.element_bytes;
    for (int axis = 0; axis < map.axes; ++axis) {
        if (index[axis] < 0 || index[axis] >= map.sizes[axis]) return nullptr;
        if (axis > 0) offset += index[axis] * map.strides[axis - 1];
    }
    return reinterpret_cast<std::byte*>(map.address) + offset;
}

// Calls copy(in_shared, in_tensor, bytes) for each chunk of the box; only its first `bytes` bytes
// lie in the tensor.
template <typename Copy>
void for_each_chunk(const TensorBox& box, Copy copy) {
    const int chunk = CHUNK_BYTES / box.map.element_bytes;  // elements
    for (int row = 0; row < box.map.box_rows; ++row) {
        for (int col = 0; col < box.map.box_columns; col += chunk) {
            const size_t place = (row * box.map.box_columns + col) * box.map.element_bytes;
            const int64_t index[] = {box.first[0] + int64_t{col}, box.first[1] + int64_t{row},
                                     box.first[2], box.first[3], box.first[4]};
            std::byte* in_tensor = element_address(box.map, index);
            const int64_t elements = in_tensor ? min(chunk, box.map.sizes[0] - index[0]) : 0;
            copy(box.in_shared + swizzled(box.map, place), in_tensor,
                 elements * box.map.element_bytes);
        }
    }
}

// The box that an instruction copies; reports where it cannot be copied.
TensorBox tensor_box(const TensorMap& tensor_map, const BoxStart& first, const void* shared,
                     bool stored, const Operation& operation) {
    const auto [d, row, head, batch, fifth] = first.index;
    auto* address = static_cast<std::byte*>(const_cast<void*>(shared));
    TensorBox box = {{}, {d, row, head, batch, fifth}, address};
    memcpy(&box.map, &tensor_map, sizeof(box.map));
    if (box.map.valid != VALID_TENSOR_MAP) {
        operation_fault("no tensor map", operation)
            .add(" needs the map of a tensor whose box in the launch descriptor has rows")
            .fail();
    }
    if (box.map.axes != first.axes) {
        operation_fault("another tensor map", operation)
            .add(" has %d coordinates, and the map has %d axes: ", first.axes, box.map.axes)
            .add("5 in steps that take lengths, else 4")
            .fail();
    }
    // An H200 reports both as an illegal instruction.
    if (d * box.map.element_bytes % 16) {
        operation_fault("misaligned box", operation)
            .add(" needs a d of a multiple of 16 bytes, not %d elements", d)
            .fail();
    }
    if (stored && (d < 0 || row < 0 || head < 0 || batch < 0 || fifth < 0)) {
        Report report = operation_fault("store before the tensor", operation);
        report.add(" can start no box at d %d, row %d, head %d, batch %d", d, row, head, batch);
        if (first.axes == MAX_AXES) report.add(", end %d", fifth);
        report.fail();
    }
    // A GPU fills the box with zeros, but it also reads where the map begins.
    const int64_t corner[] = {d, row, head, batch, fifth};
    if (!stored && box.map.begin < 0 && !element_address(box.map, corner)) {
        operation_fault("load from outside of the map", operation)
            .add(" begins at d %d, row %d, head %d, batch %d, end %d, ", d, row, head, batch, fifth)
            .add("outside of the map: then a GPU reads the map's first address, before the tensor")
            .fail();
    }
    // The layout of rows shorter than the swizzle is not documented.
    const size_t span = box.map.swizzle ? 16 << box.map.swizzle : 16;
    const size_t row_bytes = box.map.box_columns * box.map.element_bytes;
    if (box.map.swizzle && row_bytes != span) {
        operation_fault("box and swizzle do not fit", operation)
            .add(" swizzles %zu bytes, and a row of the box has %zu", span, row_bytes)
            .fail();
    }
    require_aligned(address, 8 * span, operation.name, operation.site);
    require_shared(address, box_bytes(box), operation.name, operation.site);
    return box;
}

// Consecutive bytes of shared memory as a box: all of a tensor that is one row of floats, anywhere
// in memory. Reports where they cannot be copied.
TensorBox row_box(const void* tensor, const void* shared, int bytes, const Operation& operation) {
    if (bytes <= 0 || bytes % CHUNK_BYTES) {
        operation_fault("wrong number of bytes", operation)
            .add(" takes a positive multiple of %d bytes, not %d", CHUNK_BYTES, bytes)
            .fail();
    }
    require_aligned(shared, CHUNK_BYTES, operation.name, operation.site);
    require_shared(shared, bytes, operation.name, operation.site);
    const int floats = bytes / int{sizeof(float)};
    return {.map = {.address = reinterpret_cast<uintptr_t>(tensor),
                    .begin = 0,
                    .axes = 1,
                    .sizes = {floats},
                    .strides = {},
                    .box_columns = floats,
                    .box_rows = 1,
                    .swizzle = SWIZZLE_NONE,
                    .valid = VALID_TENSOR_MAP,
                    .element_bytes = sizeof(float)},
            .first = {},
            .in_shared = static_cast<std::byte*>(const_cast<void*>(shared))};
}

std::vector<std::byte> read_shared(const void* from, size_t bytes, const Operation& operation) {
    std::vector<std::byte> elements(bytes);
    track(READ, from, bytes, operation.site);
    read_async(static_cast<const std::byte*>(from), bytes, elements.data(), operation.name,
               operation.site);
    return elements;
}

// Reads the box from shared memory.
std::vector<std::byte> read_box(const BulkCopy& store) {
    return read_shared(store.box.in_shared, box_bytes(store.box), {store.name, store.site});
}

void land_load(const BulkCopy& load) {
    Worker& worker = *Worker::current();
    for_each_chunk(load.box, [&](std::byte* to, const std::byte* from, size_t bytes) {
        memset(to, 0, CHUNK_BYTES);
        if (!bytes) return;
        if (global_races.watches(from)) global_races.access(READ, from, bytes, load.site);
        memcpy(to, from, bytes);
    });
    const std::byte* smem = worker.shared_memory().data;
    worker.async_view().update(load.box.in_shared - smem, box_bytes(load.box));
    const auto& barrier = reinterpret_cast<const Mbarrier&>(smem[load.mbarrier]);
    complete_bytes(barrier, box_bytes(load.box), load.name, load.site);
}

void land_remote_store(const BulkCopy& store) {
    const std::byte* smem = Worker::current()->shared_memory().data;
    memcpy(store.box.in_shared, store.elements.data(), store.elements.size());
    const auto& barrier = reinterpret_cast<const Mbarrier&>(smem[store.mbarrier]);
    complete_bytes(barrier, store.elements.size(), store.name, store.site);
}

void land_store(const BulkCopy& store) {
    for_each_chunk(store.box, [&](const std::byte* from, std::byte* to, size_t bytes) {
        if (!bytes) return;
        track(WRITE, to, bytes, store.site);
        memcpy(to, &store.elements[from - store.box.in_shared], bytes);
    });
}

void land_reduction(const BulkCopy& reduction) {
    auto* to = reinterpret_cast<float*>(reduction.box.map.address);
    const auto* x = reinterpret_cast<const float*>(reduction.elements.data());
    Worker::current()->grid().add(to, x, reduction.elements.size() / sizeof(float));
}

// The first element of a tensor stands for all: a tensor is an input or not.
void require_kernel_wait(Access access, const TensorBox& box, Site site) {
    const auto* tensor = reinterpret_cast<const void*>(box.map.address);
    global_races.require_kernel_wait(access, tensor, site);
}

// The number of the running thread's stores outside its `pending` latest groups.
size_t num_stores_before(uint64_t pending) {
    const Thread& self = Worker::current()->self();
    size_t count = 0;
    while (count < self.stores.size() &&
           self.stores[count].group + pending < self.num_store_groups) {
        ++count;
    }
    return count;
}

// The destination and the mbarrier lie in the block `to`, where `box` and `barrier` lie in the
// running one. Until the mbarrier's phase completes the destination holds either the old or the new
// elements, so it is poisoned. `land` copies from the box's tensor, or else stores the elements.
void issue_load(Worker& to, TensorBox box, const Mbarrier& barrier, const Operation& operation,
                void (*land)(const BulkCopy&) = land_load, std::vector<std::byte> elements = {}) {
    Worker& worker = *Worker::current();
    const Site site = operation.site;
    if (elements.empty()) require_kernel_wait(READ, box, site);
    const MbarrierState& state = use_mbarrier(to, barrier, operation.name, site);
    if (!state.fenced) {
        Report report = operation_fault("missing fence_mbarrier_init", operation);
        report.add(" needs one of thread %d after it has initialized ", state.initializer);
        state.name(report);
        report.fail();
    }
    const size_t offset = box.in_shared - worker.shared_memory().data;
    box.in_shared = to.shared_memory().data + offset;
    to.races().start_copy(worker.races(), offset, box_bytes(box), site);
    memset(box.in_shared, POISON, box_bytes(box));
    to.async_view().update(offset, box_bytes(box));
    to.start_load({operation.name, site, 0, int(state.offset), box, land, std::move(elements)});
    worker.may_fall_behind(mix(mix(site.line, offset), state.phase));
}

void issue_store(const TensorBox& box, void (*land)(const BulkCopy&), const Operation& operation) {
    Worker& worker = *Worker::current();
    Thread& self = worker.self();
    require_kernel_wait(WRITE, box, operation.site);
    const BulkCopy store = {operation.name, operation.site, self.num_store_groups, -1, box, land};
    read_box(store);  // the hardware may read it now
    self.stores.push_back(store);
    worker.may_fall_behind(mix(operation.site.line, self.num_store_groups));
}

}  // namespace

void start_load(void* to_shared, const TensorMap& map, const BoxStart& first, Mbarrier& barrier,
                const char* name, Site site) {
    const Operation operation = {name, site};
    const TensorBox box = tensor_box(map, first, to_shared, false, operation);
    issue_load(*Worker::current(), box, barrier, operation);
}

void start_multicast(void* to_shared, const TensorMap& map, const BoxStart& first,
                     Mbarrier& barrier, uint16_t ranks, Site site) {
    const Operation operation = {"cp_async_bulk_tensor_load_multicast", site};
    const TensorBox box = tensor_box(map, first, to_shared, false, operation);
    Cluster& cluster = Worker::current()->cluster();
    if (ranks == 0 || ranks >> cluster.size()) {
        operation_fault("wrong ranks", operation)
            .add(" takes a bit for each rank of the cluster, 0x1 to 0x%x, not 0x%x",
                 (1 << cluster.size()) - 1, ranks)
            .fail();
    }
    for (int rank = 0; rank < cluster.size(); ++rank)
        if (ranks >> rank & 1) issue_load(cluster.block(rank, operation), box, barrier, operation);
}

void start_store(const TensorMap& map, const BoxStart& first, const void* from_shared,
                 const char* name, Site site) {
    const Operation operation = {name, site};
    issue_store(tensor_box(map, first, from_shared, true, operation), land_store, operation);
}

void read_stores(int pending) {
    Worker& worker = *Worker::current();
    const size_t count = num_stores_before(pending);
    for (size_t i = 0; i < count; ++i) {
        BulkCopy& store = worker.self().stores[i];
        if (store.elements.empty()) store.elements = read_box(store);
    }
    if (worker.may_copy_early()) worker.land_stores(worker.self(), count);
}

void land_stores(int pending) {
    read_stores(pending);
    Worker& worker = *Worker::current();
    worker.land_stores(worker.self(), num_stores_before(pending));
}

}  // namespace simt

void cp_async_bulk_commit_group() { ++simt::Worker::current()->self().num_store_groups; }

// The source is read when the copy lands; reading a byte of each chunk now makes a bad address trap
// here.
void cp_async_bulk_load(void* to_shared, const void* from_global, int bytes, Mbarrier& barrier,
                        simt::Site site) {
    const simt::Operation operation = {"cp_async_bulk_load", site};
    const simt::TensorBox box = simt::row_box(from_global, to_shared, bytes, operation);
    simt::require_global(from_global, simt::CHUNK_BYTES, operation.name, site);
    for (int i = 0; i < bytes; i += simt::CHUNK_BYTES)
        static_cast<const volatile char*>(from_global)[i];
    simt::issue_load(*simt::Worker::current(), box, barrier, operation);
}

// The source is read when the copy lands, whatever it then holds; the hardware may read it now.
void cp_async_bulk_cluster(void* to_shared, const void* from_shared, int bytes, Mbarrier& barrier,
                           int rank, simt::Site site) {
    const simt::Operation operation = {"cp_async_bulk_cluster", site};
    const simt::TensorBox box = simt::row_box(from_shared, to_shared, bytes, operation);
    simt::require_aligned(from_shared, simt::CHUNK_BYTES, operation.name, site);
    simt::read_shared(from_shared, bytes, operation);
    simt::Worker& worker = *simt::Worker::current();
    simt::Worker& to = worker.cluster().block(rank, operation);
    if (&to != &worker) {
        const simt::MbarrierState& state = simt::find_mbarrier(to, barrier, operation.name, site);
        worker.races().start_copy_out({operation.name, site, to.rank(), state.offset, state.phase});
    }
    simt::issue_load(to, box, barrier, operation);
}

// Among the loads of the other block, as it completes bytes of an mbarrier there.
void st_async(float (&to_shared)[4], float4 x, Mbarrier& barrier, int rank, simt::Site site) {
    const simt::Operation operation = {"st_async", site};
    const simt::TensorBox box = simt::row_box(nullptr, to_shared, sizeof(x), operation);
    const auto* bytes = reinterpret_cast<const std::byte*>(&x);
    simt::Worker& to = simt::Worker::current()->cluster().block(rank, operation);
    simt::issue_load(to, box, barrier, operation, simt::land_remote_store,
                     {bytes, bytes + sizeof(x)});
}

void cp_reduce_async_bulk_add(float* to_global, const float* from_shared, int bytes,
                              simt::Site site) {
    const simt::Operation operation = {"cp_reduce_async_bulk_add", site};
    const simt::TensorBox box = simt::row_box(to_global, from_shared, bytes, operation);
    simt::require_global(to_global, simt::CHUNK_BYTES, operation.name, site);
    simt::track_reduction(to_global, box.map.sizes[0], site);
    simt::issue_store(box, simt::land_reduction, operation);
}

// Late, so that those who do not wait for it go ahead: a whole warpgroup, since its products keep
// its warps together.
void fence_proxy_async(simt::Site site) {
    simt::Worker& worker = *simt::Worker::current();
    const uint64_t key = simt::mix(site.line, worker.self().num_proxy_fences++);
    worker.may_fall_behind(key, simt::WARPGROUP_SIZE);
    worker.async_view().publish(worker.running_thread());
}
