// CUDA's 16x16x16 warp matrices, for the host compiler: the twin of common/runtime/device/wmma.cuh. Which
// lane holds which element is scrambled, as on no GPU, so that a kernel that assumes to know it
// fails. What CUDA requires of addresses, and that all lanes agree on them, is checked. Which lane
// reads what is not documented either, so that bank conflicts cannot be counted.
#pragma once
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
    const uint8_t* of_lane(int lane) const { return elements + lane * SIZE; }

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

// A matrix in memory, which all lanes of a warp name together.
struct MatrixInMemory {
    const void* address;
    int element_bytes;
    unsigned ldm;  // elements from a row to the next, or from a column to the next
    wmma::layout_t layout;

    bool operator==(const MatrixInMemory&) const = default;
    void describe(Report& report) const;

    // How many elements from the address on the element 16 row + col lies.
    size_t offset(int element) const {
        const size_t row = element / MATRIX_SIDE;
        const size_t col = element % MATRIX_SIDE;
        return layout == wmma::mem_row_major ? row * ldm + col : col * ldm + row;
    }
};

// Checks what can be said without the other lanes. A trap from here on is reported as its.
void begin_access(const MatrixInMemory& matrix, const char* name, Site site);

// Has all lanes meet, which must name the same matrix.
void meet_at(MatrixInMemory matrix, const char* name, Site site);

// Calls access(i, offset in the matrix) for each x[i] of the running lane. That lanes meet does not
// order what they access in memory: half of the elements are accessed when the lane comes, half in
// its own time when all have come. So a __syncwarp() is missed both before, where other lanes have
// yet to access the matrix, and after, where they do so next.
template <int SIZE, typename Access>
void for_each_element(const FragmentMap<SIZE>& map, const MatrixInMemory& matrix, const char* name,
                      Site site, Access access) {
    begin_access(matrix, name, site);
    const uint8_t* elements = map.of_lane(lane_id());
    for (int i = 0; i < SIZE; i += 2) access(i, matrix.offset(elements[i]));
    meet_at(matrix, name, site);
    for (int i = 1; i < SIZE; i += 2) access(i, matrix.offset(elements[i]));
}

template <typename T, int SIZE, int SEED>
void load_fragment(Fragment<T, SIZE, SEED>& fragment, const T* p, unsigned ldm,
                   wmma::layout_t layout, Site site) {
    for_each_element(fragment.map, {p, sizeof(T), ldm, layout}, "load_matrix_sync", site,
                     [&](int i, size_t offset) { fragment.x[i] = p[offset]; });
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

// Has all lanes meet: sum += a b.
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
    simt::for_each_element(fragment.map, {p, sizeof(*p), ldm, layout}, "store_matrix_sync", site,
                           [&](int i, size_t offset) { p[offset] = fragment.x[i]; });
}

// D = A B + C
template <simt::MatrixElement T, Layout LA, Layout LB>
void mma_sync(Accumulator& d, const fragment<matrix_a, 16, 16, 16, T, LA>& a,
              const fragment<matrix_b, 16, 16, 16, T, LB>& b, const Accumulator& c,
              simt::Site site = simt::Site::here()) {
    simt::ProductShare product = {simt::share_of(a), simt::share_of(b), simt::share_of(c)};
    simt::multiply_add(product, site);
    for (int i = 0; i < d.num_elements; ++i) d.x[i] = product.sum.x[i];
}

}  // namespace wmma
