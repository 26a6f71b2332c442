#include "wgmma.cuh"

#include <utility>

#include "access.h"
#include "async_view.h"
#include "collective.h"

namespace simt {
namespace {

constexpr const char* WGMMA = "wgmma_m64nNk16";
constexpr const char* WAIT = "wgmma_wait_group";
constexpr int WGMMA_K = 16;
constexpr int WARP_ROWS = 16;           // of A and D
constexpr int CHUNK = CHUNK_BYTES / 2;  // elements

// D while it is in flight: a NaN that no arithmetic produces, unlike POISON.
constexpr uint32_t IN_FLIGHT = 0xffbfffff;

Report operand_fault(const char* what, const WgmmaOperand& operand, Site site) {
    Report report = operation_fault(what, {WGMMA, site});
    report.add(", operand %s at byte %d of shared memory, ", operand.name, operand.start());
    return report;
}

// Checks a descriptor without reading the matrix; size is the matrix's along M or N.
void require_operand(const WgmmaOperand& operand, int size, Site site) {
    if (operand.bits & 0x3fffc000c000c000) {
        operand_fault("unsupported descriptor", operand, site)
            .add("is 0x%016llx: only start, leading and stride bytes and swizzle may be set",
                 static_cast<unsigned long long>(operand.bits))
            .fail();
    }
    if (!operand.swizzle()) return;
    const int row = operand.row(), column = operand.start() % row;
    if (operand.start() % (8 * row) >= row) {
        operand_fault("misaligned descriptor", operand, site)
            .add("must start in the first %d bytes of a multiple of %d", row, 8 * row)
            .fail();
    }
    const int bytes = min(row, 2 * (operand.major == K_MAJOR ? WGMMA_K : size));
    if (column + bytes > row) {
        operand_fault("operand past the end of its row", operand, site)
            .add("takes %d bytes of each row from its byte %d on; a row has %d", bytes, column, row)
            .fail();
    }
}

// Reads `size` rows of A (or columns of B) from `first` on, as [WGMMA_K, size]. The layouts are
// those that CUTLASS calls canonical, in cute/arch/mma_sm90_desc.hpp: lines of chunks along the
// contiguous axis, in groups of eight lines.
std::vector<uint16_t> read_operand(const WgmmaOperand& operand, int size, int first, Site site) {
    std::vector<uint16_t> matrix(WGMMA_K * size);
    Worker& worker = *Worker::current();
    const Buffer& smem = worker.shared_memory();
    const AsyncView& view = worker.async_view();
    Races& races = worker.races();
    const bool k_major = operand.major == K_MAJOR;
    const int row = operand.row(), row_chunks = row / CHUNK_BYTES;
    // Without a swizzle, stride and leading bytes swap roles in MN_MAJOR.
    const bool exchanged = !k_major && !operand.swizzle();
    const int eight_lines = exchanged ? operand.leading() : operand.stride();
    const int next_row = exchanged ? operand.stride() : operand.leading();
    const int first_line = k_major ? first : 0, first_chunk = k_major ? 0 : first / CHUNK;
    const int lines = k_major ? size : WGMMA_K, chunks = (k_major ? WGMMA_K : size) / CHUNK;
    for (int i = 0; i < lines; ++i) {
        const int line = first_line + i;
        for (int j = 0; j < chunks; ++j) {
            const int chunk = first_chunk + j;
            int offset = operand.start() + line % 8 * row + line / 8 * eight_lines +
                         chunk % row_chunks * CHUNK_BYTES + chunk / row_chunks * next_row;
            offset ^= (offset >> 7 & (row_chunks - 1)) << 4;
            if (offset + CHUNK_BYTES > int(smem.bytes)) {
                operand_fault("operand outside shared memory", operand, site)
                    .add("reaches to byte %d of %zu", offset + CHUNK_BYTES, smem.bytes)
                    .fail();
            }
            uint16_t elements[CHUNK];
            races.read_by_warp(offset, CHUNK_BYTES, site);
            view.read(offset, CHUNK_BYTES, elements, WGMMA, site);
            for (int e = 0; e < CHUNK; ++e) {
                const int k = k_major ? CHUNK * j + e : i, column = k_major ? i : CHUNK * j + e;
                matrix[k * size + column] = elements[e];
            }
        }
    }
    return matrix;
}

// Calls function(lane, i, element) for all registers d[i / 4][i % 4] of a warp, which hold the
// elements of 16 rows and 8 tiles columns, row-major.
template <typename Function>
void for_each_register(int tiles, Function function) {
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        for (int i = 0; i < 4 * tiles; ++i) {
            const int row = lane / 4 + i % 4 / 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
            function(lane, i, row * 8 * tiles + col);
        }
    }
}

// One more product will write the warp's registers of D; the first one sets them to IN_FLIGHT.
void join_accumulator(WgmmaState& wgmma, Payloads<WgmmaShare> lanes) {
    const int tiles = lanes[0].tiles;
    if (Accumulator* known = wgmma.accumulator(lanes[0].d, tiles)) {
        ++known->products;
        return;
    }
    Accumulator d = {.tiles = tiles, .products = 1};
    d.sum.resize(WARP_ROWS * 8 * tiles);
    for (int lane = 0; lane < WARP_SIZE; ++lane) d.registers[lane] = lanes[lane].d;
    for_each_register(tiles, [&](int lane, int i, int element) {
        d.sum[element] = d.registers[lane][i];
        memcpy(&d.registers[lane][i], &IN_FLIGHT, sizeof(IN_FLIGHT));
    });
    wgmma.accumulators.push_back(std::move(d));
}

// Lane 4 g + t holds in a[i] the elements k and k + 1 of row r: r = g + 8 (i % 2),
// k = 2 t + 8 (i / 2).
std::vector<uint16_t> read_registers(const uint32_t (&a)[WARP_SIZE][4]) {
    std::vector<uint16_t> matrix(WGMMA_K * WARP_ROWS);
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i % 2 * 8, k = lane % 4 * 2 + i / 2 * 8;
            uint16_t* element = &matrix[k * WARP_ROWS + row];
            element[0] = static_cast<uint16_t>(a[lane][i]);
            element[WARP_ROWS] = static_cast<uint16_t>(a[lane][i] >> 16);
        }
    }
    return matrix;
}

// The product's elements as they are now.
WgmmaElements read_operands(const AsyncProduct& product) {
    Worker& worker = *Worker::current();
    worker.races().begin_warp_access();
    const int warp = worker.running_thread() % WARPGROUP_SIZE / WARP_SIZE;
    const Site site = product.site;
    return {product.a_registers[0] ? read_registers(product.a_held)
                                   : read_operand(product.a, WARP_ROWS, warp * WARP_ROWS, site),
            read_operand(product.b, 8 * product.tiles, 0, site)};
}

// sum += A B in the order of k. Products of two 16-bit numbers are exact in float; the hardware may
// add in another order and round differently.
template <typename T>
void multiply_add(std::vector<float>& sum, const WgmmaElements& elements, int columns) {
    constexpr int TILE = 8;  // columns, whose sums of a row stay in vector registers
    float a[WGMMA_K][WARP_ROWS], b[WGMMA_K][TILE];
    for (int k = 0; k < WGMMA_K; ++k)
        for (int row = 0; row < WARP_ROWS; ++row)
            a[k][row] = to_float(T{elements.a[k * WARP_ROWS + row]});
    for (int first = 0; first < columns; first += TILE) {
        for (int k = 0; k < WGMMA_K; ++k)
            for (int col = 0; col < TILE; ++col)
                b[k][col] = to_float(T{elements.b[k * columns + first + col]});
        for (int row = 0; row < WARP_ROWS; ++row) {
            float* const of_row = &sum[row * columns + first];
            float tile[TILE];
            for (int col = 0; col < TILE; ++col) tile[col] = of_row[col];
            for (int k = 0; k < WGMMA_K; ++k)
                for (int col = 0; col < TILE; ++col) tile[col] += a[k][row] * b[k][col];
            for (int col = 0; col < TILE; ++col) of_row[col] = tile[col];
        }
    }
}

// Starts the warp's share of a product.
template <typename T>
void start_product(Payloads<WgmmaShare> lanes, WgmmaOperand a, WgmmaOperand b, Site site) {
    WgmmaState& wgmma = Worker::current()->wgmma();
    if (!wgmma.fenced) {
        operation_fault("missing wgmma_fence", {WGMMA, site})
            .add(": call it before the first wgmma of each group")
            .fail();
    }
    const WgmmaShare& share = lanes[0];
    if (!share.a) require_operand(a, 4 * WARP_ROWS, site);
    require_operand(b, 8 * share.tiles, site);
    AsyncProduct product = {.site = site,
                            .group = wgmma.num_groups,
                            .a = a,
                            .b = b,
                            .accumulate = share.accumulate,
                            .d = share.d,
                            .tiles = share.tiles,
                            .multiply_add = multiply_add<T>};
    for (int lane = 0; share.a && lane < WARP_SIZE; ++lane) {
        product.a_registers[lane] = lanes[lane].a;
        memcpy(product.a_held[lane], lanes[lane].a, sizeof(product.a_held[lane]));
    }
    product.issued = read_operands(product);
    join_accumulator(wgmma, lanes);
    wgmma.products.push_back(std::move(product));
}

void require_unchanged(const std::vector<uint16_t>& issued, const std::vector<uint16_t>& landing,
                       const WgmmaOperand& operand, Site site) {
    if (issued == landing) return;
    operand_fault("write to an operand of a wgmma in flight", operand, site)
        .add("has changed before the wgmma has landed")
        .fail();
}

[[noreturn]] void fail_changed(const AsyncProduct& product, int lane, const char* operand) {
    const Worker& worker = *Worker::current();
    worker.fault("write to registers of a wgmma in flight")
        .add(": thread %d has changed %s of %s (%s:%d), which had not landed",
             worker.running_thread() / WARP_SIZE * WARP_SIZE + lane, operand, WGMMA,
             product.site.file_name(), product.site.line)
        .fail();
}

// The last product that writes an accumulator moves it to the registers.
void land(const AsyncProduct& product, WgmmaState& wgmma) {
    const WgmmaElements landing = read_operands(product);
    require_unchanged(product.issued.a, landing.a, product.a, product.site);
    require_unchanged(product.issued.b, landing.b, product.b, product.site);
    for (int lane = 0; product.a_registers[0] && lane < WARP_SIZE; ++lane) {
        if (memcmp(product.a_registers[lane], product.a_held[lane], sizeof(product.a_held[lane])))
            fail_changed(product, lane, "A");
    }
    Accumulator& d = *wgmma.accumulator(product.d, product.tiles);
    if (!product.accumulate) d.sum.assign(d.sum.size(), 0);
    product.multiply_add(d.sum, landing, 8 * product.tiles);
    if (--d.products) return;
    for_each_register(d.tiles, [&](int lane, int i, int element) {
        float& held = d.registers[lane][i];
        if (memcmp(&held, &IN_FLIGHT, sizeof(held))) fail_changed(product, lane, "D");
        held = d.sum[element];
    });
    std::swap(d, wgmma.accumulators.back());
    wgmma.accumulators.pop_back();
}

}  // namespace

uint64_t matrix_descriptor(const void* start, int leading_bytes, int stride_bytes, Swizzle swizzle,
                           Site site) {
    constexpr const char* NAME = "matrix_descriptor";
    require_aligned(start, CHUNK_BYTES, NAME, site);
    const uint64_t address = require_shared(start, CHUNK_BYTES, NAME, site);
    for (int bytes : {leading_bytes, stride_bytes}) {
        if (bytes >= 0 && bytes < 1 << 18 && bytes % CHUNK_BYTES == 0) continue;
        operation_fault("wrong distance", {NAME, site})
            .add(" needs multiples of %d bytes below %d, not %d", CHUNK_BYTES, 1 << 18, bytes)
            .fail();
    }
    const uint64_t layout = (4 - swizzle) % 4;
    return address >> 4 | uint64_t(leading_bytes) >> 4 << 16 | uint64_t(stride_bytes) >> 4 << 32 |
           layout << 62;
}

bool WgmmaShare::operator==(const WgmmaShare& other) const {
    return a_bits == other.a_bits && b_bits == other.b_bits && accumulate == other.accumulate &&
           tiles == other.tiles;
}

void WgmmaShare::describe(Report& report) const {
    report.add("N = %d, ", 8 * tiles);
    if (!a) report.add("A 0x%016llx, ", static_cast<unsigned long long>(a_bits));
    report.add("B 0x%016llx, accumulate %d", static_cast<unsigned long long>(b_bits), accumulate);
}

void fence_wgmma(Site site) {
    const Operation operation = {"wgmma_fence", site, ALL_LANES};
    collective(warp_for(operation), operation, [] {});
    Worker::current()->wgmma().fenced = true;
}

// Each warp synchronizes on its own first, so that its share does not wait for what other warps
// write.
template <MatrixElement T>
void start_wgmma(WgmmaShare share, Major a_major, Major b_major, Site site) {
    const Operation of_warpgroup = {WGMMA, site}, of_warp = {WGMMA, site, ALL_LANES};
    Group& warpgroup = warpgroup_for(of_warpgroup);
    Group& warp = warp_for(of_warp);
    collective(warp, of_warp, share, [&](Payloads<WgmmaShare> lanes) {
        require_same(warp, of_warp, lanes);
        start_product<T>(lanes, {share.a_bits, a_major, "A"}, {share.b_bits, b_major, "B"}, site);
    });
    collective(warpgroup, of_warpgroup, share, [&](Payloads<WgmmaShare> threads) {
        require_same(warpgroup, of_warpgroup, threads);
    });
}

template void start_wgmma<bf16>(WgmmaShare, Major, Major, Site);
template void start_wgmma<fp16>(WgmmaShare, Major, Major, Site);

void land_wgmma(int pending, Site site) {
    const Operation operation = {WAIT, site, ALL_LANES};
    collective(warp_for(operation), operation, [&] {
        WgmmaState& wgmma = Worker::current()->wgmma();
        size_t landed = 0;
        for (; landed < wgmma.products.size(); ++landed) {
            const AsyncProduct& product = wgmma.products[landed];
            if (product.group + pending >= wgmma.num_groups) break;
            land(product, wgmma);
        }
        wgmma.products.erase(wgmma.products.begin(), wgmma.products.begin() + landed);
    });
}

void require_landed(const void* registers, size_t bytes, Site site) {
    const void *begin = registers, *end = static_cast<const std::byte*>(registers) + bytes;
    WgmmaState& wgmma = Worker::current()->wgmma();
    for (const AsyncProduct& product : wgmma.products) {
        const float* d = wgmma.accumulator(product.d, product.tiles)->registers[lane_id()];
        for (const void* used : {static_cast<const void*>(d),
                                 static_cast<const void*>(product.a_registers[lane_id()])}) {
            if (used < begin || used >= end) continue;
            operation_fault("registers of a wgmma in flight", {WAIT, site, ALL_LANES})
                .add(" names registers of %s (%s:%d), which has not landed", WGMMA,
                     product.site.file_name(), product.site.line)
                .fail();
        }
    }
}

}  // namespace simt

void wgmma_commit_group(simt::Site site) {
    const simt::Operation operation = {"wgmma_commit_group", site, simt::ALL_LANES};
    simt::collective(simt::warp_for(operation), operation, [] {
        simt::WgmmaState& wgmma = simt::Worker::current()->wgmma();
        ++wgmma.num_groups;
        wgmma.fenced = false;
    });
}
