#include "wmma.cuh"

#include "access.h"
#include "collective.h"
#include "trap.h"

namespace simt {
namespace {

void gather(float (&matrix)[MATRIX_ELEMENTS], const MatrixShare& share) {
    for (int i = 0; i < share.size; ++i) matrix[share.elements[i]] = share.x[i];
}

// The warp's access. Accumulators, and only they, have 4 bytes an element and may be stored where
// they were loaded from.
void track_matrix(const MatrixInMemory& matrix, Access access, Site site) {
    Worker& worker = *Worker::current();
    const auto* address = static_cast<const std::byte*>(matrix.address);
    const size_t row_bytes = MATRIX_SIDE * matrix.element_bytes;
    const size_t stride = matrix.ldm * matrix.element_bytes;
    if (!worker.shared_memory().contains(address)) {
        for (int row = 0; row < MATRIX_SIDE; ++row)
            track(access, address + row * stride, row_bytes, site);
        return;
    }
    const size_t offset = address - worker.shared_memory().data;
    const uint64_t hash = mix(mix(offset, matrix.ldm), matrix.layout);
    const uint16_t mapping = hash << 1 | (matrix.element_bytes == sizeof(float));
    worker.races().begin_warp_access();
    for (int row = 0; row < MATRIX_SIDE; ++row)
        worker.races().access_by_warp(access, offset + row * stride, row_bytes, mapping, site);
}

}  // namespace

void MatrixInMemory::describe(Report& report) const {
    describe_address(report, static_cast<const std::byte*>(address));
    report.add(", ldm %u, %s-major", ldm, layout == wmma::mem_row_major ? "row" : "column");
}

void begin_access(const MatrixInMemory& matrix, const char* name, Site site) {
    constexpr size_t ADDRESS_BYTES = 32, LDM_BYTES = 16;
    const Operation operation = {name, site, ALL_LANES};
    require_aligned(matrix.address, ADDRESS_BYTES, name, site);
    if (matrix.ldm * matrix.element_bytes % LDM_BYTES || matrix.ldm < unsigned{MATRIX_SIDE}) {
        operation_fault("wrong ldm", operation)
            .add(", which needs a multiple of %zu elements (%zu bytes), at least %d, not %u",
                 LDM_BYTES / matrix.element_bytes, LDM_BYTES, MATRIX_SIDE, matrix.ldm)
            .fail();
    }
    Worker::current()->self().operation = operation;
}

void meet_at(MatrixInMemory matrix, Access access, const char* name, Site site) {
    const Operation operation = {name, site, ALL_LANES};
    collective(warp_for(operation), operation, matrix, [&](Payloads<MatrixInMemory> lanes) {
        for (int lane = 1; lane < WARP_SIZE; ++lane) {
            if (lanes[lane] == lanes[0]) continue;
            Report report = operation_fault("lanes name different matrices", operation);
            for (int named : {0, lane}) {
                report.add("\n  lane %d: ", named);
                lanes[named].describe(report);
            }
            report.fail();
        }
        track_matrix(matrix, access, site);
    });
}

// Products of two 16-bit numbers are exact in float; they are added in the order of k, where the
// hardware may choose another order.
void multiply_add(ProductShare& share, Site site) {
    const Operation operation = {"mma_sync", site, ALL_LANES};
    collective(warp_for(operation), operation, share, [](Payloads<ProductShare> lanes) {
        float a[MATRIX_ELEMENTS], b[MATRIX_ELEMENTS], sum[MATRIX_ELEMENTS];
        for (int lane = 0; lane < WARP_SIZE; ++lane) {
            gather(a, lanes[lane].a);
            gather(b, lanes[lane].b);
            gather(sum, lanes[lane].sum);
        }
        for (int row = 0; row < MATRIX_ELEMENTS; row += MATRIX_SIDE) {
            for (int k = 0; k < MATRIX_SIDE; ++k) {
                for (int col = 0; col < MATRIX_SIDE; ++col)
                    sum[row + col] += a[row + k] * b[MATRIX_SIDE * k + col];
            }
        }
        for (int lane = 0; lane < WARP_SIZE; ++lane) {
            MatrixShare& result = lanes[lane].sum;
            for (int i = 0; i < result.size; ++i) result.x[i] = sum[result.elements[i]];
        }
    });
}

}  // namespace simt
