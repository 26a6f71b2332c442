// CUDA's 16x16x16 warp matrices, for the host compiler: the twin of common/device/wmma.cuh. Which
// lane holds which element is scrambled, as on no GPU, so that a kernel that assumes to know it
// fails. What CUDA requires of addresses, and that all lanes agree on them, is checked. Which lane
// reads what is not documented either, so that bank conflicts cannot be counted.
#pragma once
#include <tuple>

#include "attention.cuh"

namespace wmma {

enum layout_t { mem_row_major, mem_col_major };

struct row_major {
    static constexpr layout_t in_memory = mem_row_major;
};
struct col_major {
    static constexpr layout_t in_memory = mem_col_major;
};
struct matrix_a;
struct matrix_b;
struct accumulator;

}  // namespace wmma

namespace simt {

constexpr int MATRIX_SIDE = 16;
constexpr int MATRIX_ELEMENTS = MATRIX_SIDE * MATRIX_SIDE;

// Which element, 16 row + col, a lane's x[i] is. All slots of a warp, in shuffled order; where there
// are more slots than elements, each element has copies, and which one counts is as arbitrary.
template <int SIZE>
class FragmentMap {
  public:
    explicit FragmentMap(uint64_t seed) {
        Random random(seed);
        for (int slot = 0; slot < WARP_SIZE * SIZE; ++slot) {
            const int other = random.below(slot + 1);
            elements[slot] = elements[other];
            elements[other] = slot % MATRIX_ELEMENTS;
        }
    }
    int element(int lane, int i) const { return elements[lane * SIZE + i]; }

  private:
    uint8_t elements[WARP_SIZE * SIZE];
};

// A lane's share of a matrix. Each type of fragment has a SEED of its own.
template <typename T, int SIZE, int SEED>
struct Fragment {
    static constexpr int num_elements = SIZE;
    static inline const FragmentMap<SIZE> map{SEED};
    T x[SIZE];
};

// CUDA keeps each fp16 of A and B twice.
template <typename T>
constexpr int OPERAND_SIZE = MATRIX_ELEMENTS / WARP_SIZE;
template <>
constexpr int OPERAND_SIZE<fp16> = 2 * MATRIX_ELEMENTS / WARP_SIZE;

// A matrix in memory. T is const where it is read.
template <typename T>
struct MatrixInMemory {
    T* address;
    unsigned ldm;  // elements from a row to the next, or from a column to the next
    wmma::layout_t layout;

    bool operator==(const MatrixInMemory&) const = default;
    T& operator[](int element) const {
        const size_t row = element / MATRIX_SIDE;
        const size_t col = element % MATRIX_SIDE;
        return address[layout == wmma::mem_row_major ? row * ldm + col : col * ldm + row];
    }
    void describe(Report& report) const {
        describe_address(report, reinterpret_cast<const std::byte*>(address));
        report.add(", ldm %u, %s-major", ldm, layout == wmma::mem_row_major ? "row" : "column");
    }
};

// Has all lanes meet, which must name the same matrix, and calls access(i) for each of the running
// lane's elements. To meet does not order what lanes access in memory: half of the elements are
// accessed when the lane comes, half in its own time when all have come. So a __syncwarp() is missed
// both before, where other lanes have yet to access the matrix, and after, where they do so next.
template <int SIZE, typename T, typename Access>
void meet_at(MatrixInMemory<T> matrix, const char* name, Site site, Access access) {
    constexpr size_t ADDRESS_BYTES = 32;
    constexpr size_t LDM_BYTES = 16;
    const Operation operation = {name, site, ALL_LANES};
    require_aligned<ADDRESS_BYTES>(matrix.address, name, site);
    if (matrix.ldm * sizeof(T) % LDM_BYTES || matrix.ldm < unsigned{MATRIX_SIDE}) {
        warp_fault("wrong ldm", operation)
            .add(", which needs a multiple of %zu elements (%zu bytes), at least %d, not %u",
                 LDM_BYTES / sizeof(T), LDM_BYTES, MATRIX_SIDE, matrix.ldm)
            .fail();
    }
    Worker::current()->self().operation = operation;  // for the report, should access() trap
    for (int i = 0; i < SIZE; i += 2) access(i);
    collective(warp_for(operation), operation, matrix, [&](Payloads<MatrixInMemory<T>> lanes) {
        for_each_lane(ALL_LANES, [&](int lane) {
            if (lanes[lane] == lanes[0]) return;
            Report report = warp_fault("lanes name different matrices", operation);
            report.add("\n  lane 0: ");
            lanes[0].describe(report);
            report.add("\n  lane %d: ", lane);
            lanes[lane].describe(report);
            report.fail();
        });
    });
    for (int i = 1; i < SIZE; i += 2) access(i);
}

template <typename T, int SIZE, int SEED>
void load_fragment(Fragment<T, SIZE, SEED>& fragment, MatrixInMemory<const T> matrix, Site site) {
    meet_at<SIZE>(matrix, "load_matrix_sync", site,
                  [&](int i) { fragment.x[i] = matrix[fragment.map.element(lane_id(), i)]; });
}

template <typename T, int SIZE, int SEED>
void gather(float (&matrix)[MATRIX_ELEMENTS], const Fragment<T, SIZE, SEED>& share, int lane) {
    for (int i = 0; i < SIZE; ++i) matrix[share.map.element(lane, i)] = to_float(share.x[i]);
}

// Of all lanes' shares (d, a, b, c): d = a b + c. A product of two 16-bit numbers is exact in float;
// they are added one after another, where the hardware may choose another order.
template <typename Shares>
void multiply_add(Payloads<Shares> lanes) {
    float a[MATRIX_ELEMENTS], b[MATRIX_ELEMENTS], sum[MATRIX_ELEMENTS];
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        gather(a, std::get<1>(lanes[lane]), lane);
        gather(b, std::get<2>(lanes[lane]), lane);
        gather(sum, std::get<3>(lanes[lane]), lane);
    }
    for (int row = 0; row < MATRIX_ELEMENTS; row += MATRIX_SIDE) {
        for (int k = 0; k < MATRIX_SIDE; ++k) {
            for (int col = 0; col < MATRIX_SIDE; ++col)
                sum[row + col] += a[row + k] * b[MATRIX_SIDE * k + col];
        }
    }
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
        auto& share = std::get<0>(lanes[lane]);
        for (int i = 0; i < share.num_elements; ++i) share.x[i] = sum[share.map.element(lane, i)];
    }
}

}  // namespace simt

namespace wmma {

template <typename T>
concept Operand = std::is_same_v<T, bf16> || std::is_same_v<T, fp16>;

template <typename T>
concept Layout = std::is_same_v<T, row_major> || std::is_same_v<T, col_major>;

template <typename Use, int M, int N, int K, typename T, typename L = void>
struct fragment;
template <Operand T, Layout L>
struct fragment<matrix_a, 16, 16, 16, T, L>
    : simt::Fragment<T, simt::OPERAND_SIZE<T>, 1 + L::in_memory> {};
template <Operand T, Layout L>
struct fragment<matrix_b, 16, 16, 16, T, L>
    : simt::Fragment<T, simt::OPERAND_SIZE<T>, 3 + L::in_memory> {};
template <>
struct fragment<accumulator, 16, 16, 16, float> : simt::Fragment<float, 8, 5> {};

using Accumulator = fragment<accumulator, 16, 16, 16, float>;

template <typename T, int SIZE, int SEED>
void fill_fragment(simt::Fragment<T, SIZE, SEED>& fragment, std::type_identity_t<T> x) {
    for (T& element : fragment.x) element = x;
}

template <typename Use, Operand T, Layout L>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, L>& fragment, const T* p, unsigned ldm,
                      simt::Site site = simt::Site::here()) {
    simt::load_fragment(fragment, {p, ldm, L::in_memory}, site);
}

inline void load_matrix_sync(Accumulator& fragment, const float* p, unsigned ldm, layout_t layout,
                             simt::Site site = simt::Site::here()) {
    simt::load_fragment(fragment, {p, ldm, layout}, site);
}

inline void store_matrix_sync(float* p, const Accumulator& fragment, unsigned ldm, layout_t layout,
                              simt::Site site = simt::Site::here()) {
    const simt::MatrixInMemory<float> matrix = {p, ldm, layout};
    simt::meet_at<Accumulator::num_elements>(matrix, "store_matrix_sync", site, [&](int i) {
        matrix[fragment.map.element(simt::lane_id(), i)] = fragment.x[i];
    });
}

// D = A B + C
template <Operand T, Layout LA, Layout LB>
void mma_sync(Accumulator& d, const fragment<matrix_a, 16, 16, 16, T, LA>& a,
              const fragment<matrix_b, 16, 16, 16, T, LB>& b, const Accumulator& c,
              simt::Site site = simt::Site::here()) {
    const simt::Operation operation = {"mma_sync", site, simt::ALL_LANES};
    auto shares = std::tie(d, a, b, c);
    simt::collective(simt::warp_for(operation), operation, shares,
                     [](simt::Payloads<decltype(shares)> lanes) { simt::multiply_add(lanes); });
}

}  // namespace wmma
