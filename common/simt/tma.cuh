// The tensor memory accelerator, for the host compiler: the twin of common/device/tma.cuh. A load
// lands at any time after its issue, in half of the blocks as late as it may, and its place is
// poison until then; a store reads shared memory in the wait that covers its group, and writes the
// tensor at once or, in half of the blocks, as late as it may, after the stores that follow it.
#pragma once
#include "async.h"
#include "mbarrier.cuh"
#include "tensor_map.h"

namespace simt {

inline int box_bytes(const TensorBox& box) {
    return box.map.box_rows * box.map.box_columns * int(sizeof(Element));
}

// Bits 4-6 of an address change by its bits 7-9, or the lower ones of these; where a box begins all
// of them are 0.
inline size_t swizzled(const TensorMapFields& map, size_t place) {
    const size_t bits = (1 << map.swizzle) - 1;
    return place ^ (place >> 7 & bits) << 4;
}

// nullptr outside of the tensor.
inline std::byte* element_address(const TensorMapFields& map, const int64_t (&index)[4]) {
    int64_t offset = index[0] * int64_t{sizeof(Element)};
    for (int axis = 0; axis < 4; ++axis) {
        if (index[axis] < 0 || index[axis] >= map.sizes[axis]) return nullptr;
        if (axis > 0) offset += index[axis] * map.strides[axis - 1];
    }
    return reinterpret_cast<std::byte*>(map.address) + offset;
}

// copy(in_shared, in_tensor) for each element of the box, with nullptr outside of the tensor.
template <typename Copy>
void for_each_element(const TensorBox& box, Copy copy) {
    const auto [d, first_row, head, batch] = box.first;
    for (int row = 0; row < box.map.box_rows; ++row) {
        for (int col = 0; col < box.map.box_columns; ++col) {
            const size_t place = (row * box.map.box_columns + col) * sizeof(Element);
            copy(box.in_shared + swizzled(box.map, place),
                 element_address(box.map,
                                 {d + int64_t{col}, first_row + int64_t{row}, head, batch}));
        }
    }
}

// The box that an instruction names, once it is certain that it can be copied.
inline TensorBox tensor_box(const TensorMap& tensor_map, int d, int row, int head, int batch,
                            const Element* shared, bool stored, const char* operation, Site site) {
    const auto* address = reinterpret_cast<const std::byte*>(shared);
    TensorBox box = {{}, {d, row, head, batch}, const_cast<std::byte*>(address)};
    memcpy(&box.map, &tensor_map, sizeof(box.map));
    if (box.map.valid != VALID_TENSOR_MAP) {
        Worker::current()
            ->fault("no tensor map")
            .add(
                ": %s (%s:%d) needs the map of a tensor whose box in the launch descriptor has "
                "rows",
                operation, site.file_name(), site.line)
            .fail();
    }
    // Both are seen on an H200, which calls the instruction illegal.
    if (d * int(sizeof(Element)) % 16) {
        Worker::current()
            ->fault("misaligned box")
            .add(": %s (%s:%d) needs a d of a multiple of 16 bytes, not %d elements", operation,
                 site.file_name(), site.line, d)
            .fail();
    }
    if (stored && (d < 0 || row < 0 || head < 0 || batch < 0)) {
        Worker::current()
            ->fault("store before the tensor")
            .add(": %s (%s:%d) can start no box at d %d, row %d, head %d, batch %d", operation,
                 site.file_name(), site.line, d, row, head, batch)
            .fail();
    }
    // How rows that are shorter than the swizzle lie is not documented.
    const size_t span = box.map.swizzle ? 16 << box.map.swizzle : 16;
    const size_t row_bytes = box.map.box_columns * sizeof(Element);
    if (box.map.swizzle && row_bytes != span) {
        Worker::current()
            ->fault("box and swizzle do not fit")
            .add(": %s (%s:%d) swizzles %zu bytes, and a row of the box has %zu", operation,
                 site.file_name(), site.line, span, row_bytes)
            .fail();
    }
    const size_t alignment = max(128, 8 * span);
    if (reinterpret_cast<uintptr_t>(address) % alignment) {
        Report report = address_fault("misaligned access", operation, site);
        report.add("a multiple of %zu bytes, not the address ", alignment);
        describe_address(report, address);
        report.fail();
    }
    require_shared(address, box_bytes(box), operation, site);
    return box;
}

// What a store reads of shared memory.
inline std::vector<std::byte> read_box(const TensorBox& box, const char* operation, Site site) {
    std::vector<std::byte> elements(box_bytes(box));
    read_async(box.in_shared, elements.size(), elements.data(), operation, site);
    return elements;
}

inline void land_load(const BulkCopy& load) {
    Worker& worker = *Worker::current();
    for_each_element(load.box, [](std::byte* to, const std::byte* from) {
        const Element zero = {};
        memcpy(to, from ? from : reinterpret_cast<const std::byte*>(&zero), sizeof(Element));
    });
    const std::byte* smem = worker.shared_memory().data;
    worker.async_view().update(load.box.in_shared - smem, box_bytes(load.box));
    const auto& barrier = reinterpret_cast<const Mbarrier&>(smem[load.mbarrier]);
    complete_bytes(barrier, box_bytes(load.box), load.name, load.site);
}

inline void land_store(const BulkCopy& store) {
    for_each_element(store.box, [&](const std::byte* from, std::byte* to) {
        if (to) memcpy(to, &store.elements[from - store.box.in_shared], sizeof(Element));
    });
}

// How many of the running thread's stores are not in its `pending` latest groups. What is in no
// group yet is newer than all of them.
inline size_t num_stores_before(uint64_t pending) {
    const Thread& self = Worker::current()->self();
    size_t count = 0;
    while (count < self.stores.size() &&
           self.stores[count].group + pending < self.num_store_groups) {
        ++count;
    }
    return count;
}

}  // namespace simt

// From here to the mbarrier's phase the destination may hold the old or the new elements: it is
// poisoned.
inline void cp_async_bulk_tensor_load(Element* to_shared, const TensorMap& map, int d, int row,
                                      int head, int batch, Mbarrier& barrier,
                                      simt::Site site = simt::Site::here()) {
    constexpr const char* NAME = "cp_async_bulk_tensor_load";
    simt::Worker& worker = *simt::Worker::current();
    const simt::TensorBox box =
        simt::tensor_box(map, d, row, head, batch, to_shared, false, NAME, site);
    const simt::MbarrierState& state = simt::find_mbarrier(barrier, NAME, site);
    if (!state.fenced) {
        simt::Report report = simt::mbarrier_fault("missing fence_mbarrier_init", NAME, site);
        report.add(" needs one of thread %d after it has initialized ", state.initializer);
        state.name(report);
        report.fail();
    }
    const size_t offset = box.in_shared - worker.shared_memory().data;
    memset(box.in_shared, simt::POISON, simt::box_bytes(box));
    worker.async_view().update(offset, simt::box_bytes(box));
    worker.start_load({NAME, site, 0, int(state.offset), box, simt::land_load});
}

inline void cp_async_bulk_tensor_store(const TensorMap& map, int d, int row, int head, int batch,
                                       const Element* from_shared,
                                       simt::Site site = simt::Site::here()) {
    constexpr const char* NAME = "cp_async_bulk_tensor_store";
    simt::Thread& self = simt::Worker::current()->self();
    const simt::TensorBox box =
        simt::tensor_box(map, d, row, head, batch, from_shared, true, NAME, site);
    simt::read_box(box, NAME, site);  // might be now
    self.stores.push_back({NAME, site, self.num_store_groups, -1, box, simt::land_store});
}

inline void cp_async_bulk_commit_group() { ++simt::Worker::current()->self().num_store_groups; }

template <int PENDING>
void cp_async_bulk_wait_group_read() {
    simt::Worker& worker = *simt::Worker::current();
    const size_t count = simt::num_stores_before(PENDING);
    for (size_t i = 0; i < count; ++i) {
        simt::BulkCopy& store = worker.self().stores[i];
        if (store.elements.empty())
            store.elements = simt::read_box(store.box, store.name, store.site);
    }
    if (worker.may_copy_early()) worker.land_stores(worker.self(), count);
}

template <int PENDING>
void cp_async_bulk_wait_group() {
    cp_async_bulk_wait_group_read<PENDING>();
    simt::Worker& worker = *simt::Worker::current();
    worker.land_stores(worker.self(), simt::num_stores_before(PENDING));
}

inline void fence_proxy_async() {
    simt::Worker& worker = *simt::Worker::current();
    worker.async_view().publish(worker.running_thread());
}
