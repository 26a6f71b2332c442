// CUDA's 16x16x16 warp matrices, for the host compiler: the twin of common/runtime/device/wmma.cuh.
// The mapping of elements to lanes is scrambled, as on no GPU, so that a kernel that relies on one
// fails. Alignment, and that all lanes pass the same arguments, are checked. Since it is not
// documented which lane reads what, bank conflicts are not counted.
#pragma once
#include "access.h"
#include "attention.cuh"
#include "random.h"

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

class Report;

constexpr int MATRIX_SIDE = 16;
constexpr int MATRIX_ELEMENTS = MATRIX_SIDE * MATRIX_SIDE;

// The element, 16 row + col, of each lane's x[i]: a random permutation of a warp's slots. With more
// slots than elements each element has copies, and which of them counts is arbitrary, too.
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
    SIMT_UNTRACKED const uint8_t* of_lane(int lane) const { return elements + lane * SIZE; }

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
inline constexpr int OPERAND_SIZE = MATRIX_ELEMENTS / WARP_SIZE;
template <>
inline constexpr int OPERAND_SIZE<fp16> = 2 * MATRIX_ELEMENTS / WARP_SIZE;

// A matrix in memory, an argument that all lanes of a warp share.
struct MatrixInMemory {
    const void* address;
    int element_bytes;
    unsigned ldm;  // elements from a row to the next, or from a column to the next
    wmma::layout_t layout;

    bool operator==(const MatrixInMemory&) const = default;
    void describe(Report& report) const;

    // Distance of the element 16 row + col from the address, in elements.
    SIMT_UNTRACKED size_t offset(int element) const {
        const size_t row = element / MATRIX_SIDE;
        const size_t col = element % MATRIX_SIDE;
        return layout == wmma::mem_row_major ? row * ldm + col : col * ldm + row;
    }
};

// Checks the arguments of one lane. Traps from here on are reported as part of this access.
void begin_access(const MatrixInMemory& matrix, const char* name, Site site);

// A collective of the warp; reports lanes that pass different matrices.
void meet_at(MatrixInMemory matrix, Access access, const char* name, Site site);

// Calls move(i, offset in the matrix) for each x[i] of the running lane. A warp matrix
// instruction does not order memory accesses: a lane makes half of its accesses before all lanes
// have arrived, half after, when it runs next. So a missing __syncwarp() shows both before and
// after the instruction.
template <int SIZE, typename Move>
SIMT_UNTRACKED void for_each_element(const FragmentMap<SIZE>& map, const MatrixInMemory& matrix,
                                     Access access, const char* name, Site site, Move move) {
    begin_access(matrix, name, site);
    const uint8_t* elements = map.of_lane(lane_id());
    for (int i = 0; i < SIZE; i += 2) move(i, matrix.offset(elements[i]));
    meet_at(matrix, access, name, site);
    for (int i = 1; i < SIZE; i += 2) move(i, matrix.offset(elements[i]));
}

template <typename T, int SIZE, int SEED>
void load_fragment(Fragment<T, SIZE, SEED>& fragment, const T* p, unsigned ldm,
                   wmma::layout_t layout, Site site) {
    for_each_element(fragment.map, {p, sizeof(T), ldm, layout}, READ, "load_matrix_sync", site,
                     [&](int i, size_t offset) SIMT_UNTRACKED { fragment.x[i] = p[offset]; });
}

// A lane's share of a matrix: x[i] is the matrix's elements[i].
struct MatrixShare {
    float x[OPERAND_SIZE<fp16>];
    const uint8_t* elements;
    int size;
};

template <typename T, int SIZE, int SEED>
MatrixShare share_of(const Fragment<T, SIZE, SEED>& fragment) {
    MatrixShare share = {{}, fragment.map.of_lane(lane_id()), SIZE};
    for (int i = 0; i < SIZE; ++i) share.x[i] = to_float(fragment.x[i]);
    return share;
}

struct ProductShare {
    MatrixShare a, b, sum;
};

// A collective of the warp: sum += a b.
void multiply_add(ProductShare& share, Site site);

}  // namespace simt

namespace wmma {

template <typename T>
concept Layout = std::is_same_v<T, row_major> || std::is_same_v<T, col_major>;

template <typename Use, int M, int N, int K, typename T, typename L = void>
struct fragment;
template <simt::MatrixElement T, Layout L>
struct fragment<matrix_a, 16, 16, 16, T, L>
    : simt::Fragment<T, simt::OPERAND_SIZE<T>, 1 + L::in_memory> {};
template <simt::MatrixElement T, Layout L>
struct fragment<matrix_b, 16, 16, 16, T, L>
    : simt::Fragment<T, simt::OPERAND_SIZE<T>, 3 + L::in_memory> {};
template <>
struct fragment<accumulator, 16, 16, 16, float> : simt::Fragment<float, 8, 5> {};

using Accumulator = fragment<accumulator, 16, 16, 16, float>;

template <typename T, int SIZE, int SEED>
void fill_fragment(simt::Fragment<T, SIZE, SEED>& fragment, std::type_identity_t<T> x) {
    for (T& element : fragment.x) element = x;
}

template <typename Use, simt::MatrixElement T, Layout L>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, L>& fragment, const T* p, unsigned ldm,
                      simt::Site site = simt::Site::here()) {
    simt::load_fragment(fragment, p, ldm, L::in_memory, site);
}

inline void load_matrix_sync(Accumulator& fragment, const float* p, unsigned ldm, layout_t layout,
                             simt::Site site = simt::Site::here()) {
    simt::load_fragment(fragment, p, ldm, layout, site);
}

inline void store_matrix_sync(float* p, const Accumulator& fragment, unsigned ldm, layout_t layout,
                              simt::Site site = simt::Site::here()) {
    simt::for_each_element(fragment.map, {p, sizeof(*p), ldm, layout}, simt::WRITE,
                           "store_matrix_sync", site,
                           [&](int i, size_t offset) SIMT_UNTRACKED { p[offset] = fragment.x[i]; });
}

// D = A B + C
template <simt::MatrixElement T, Layout LA, Layout LB>
SIMT_UNTRACKED void mma_sync(Accumulator& d, const fragment<matrix_a, 16, 16, 16, T, LA>& a,
                             const fragment<matrix_b, 16, 16, 16, T, LB>& b, const Accumulator& c,
                             simt::Site site = simt::Site::here()) {
    simt::ProductShare product = {simt::share_of(a), simt::share_of(b), simt::share_of(c)};
    simt::multiply_add(product, site);
    for (int i = 0; i < d.num_elements; ++i) d.x[i] = product.sum.x[i];
}

}  // namespace wmma
