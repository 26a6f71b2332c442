// b04 -- mma.sync, 5 products: dQ is added up in global memory
// change: the kernel that computes dK and dV also multiplies its dS by its keys and adds the product
//     to dQ in global memory, in float and in the order of the accumulators; a last kernel brings dQ
//     into its order, scales and rounds it. dS must pass through shared memory for that: P does, too,
//     so that two warps can share 32 keys, and a fragment serves two products
// why: b03 computes S and dP twice: 5 products for 7 are 1.4 times b03 if the reductions, 4 bytes an
//     element of dQ for every 128 keys, cost nothing
// limits: bf16, fp16; head_dim 8-256 by 8; sm_80; more than 99 KiB of shared memory from head_dim
//     72 on, which sm_86 and sm_89 lack
//     needs 4 bytes of workspace for each element of dQ
// repeats: all bits but dq's; blocks add to it in any order
#include "backward.cuh"
#include "copy.cuh"
#include "mma.cuh"
#include "reduce.cuh"

constexpr int NUM_WARPS = HEAD_DIM <= 128 ? 8 : 4;
constexpr int NUM_THREADS = 32 * NUM_WARPS;
constexpr int NUM_STAGES = 2;  // tiles in shared memory: stage is in use, stage ^ 1 in flight
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole fragments; zeros from HEAD_DIM on
constexpr int FRAGS = 2;                        // of 16 rows each, in all of a warp's products

// A block has rows of keys and takes the queries tile by tile. Of S and dP two warps share 32 keys,
// and each has half of the queries; of dK and dV each has half of the columns instead: in every 32
// of them, 16. Of dQ four warps share 32 queries, and each has 16 of every 64 columns.
constexpr int BLOCK_N = 16 * NUM_WARPS;             // keys
constexpr int BLOCK_M = HEAD_DIM <= 128 ? 64 : 32;  // queries of a tile
constexpr int WARP_QUERIES = BLOCK_M / 2;

// dK and dV of more than 128 columns do not fit into registers: the block then computes them one
// after another, COLUMNS at a time, and S and dP again; and the same columns of dQ.
constexpr int COLUMNS = DIM <= 128 ? DIM : 128;
constexpr int PASSES = (DIM + COLUMNS - 1) / COLUMNS;
constexpr int DKV_SPACING = 32, DQ_SPACING = 64;
using DkvFragments = float[FRAGS][(COLUMNS + DKV_SPACING - 1) / DKV_SPACING][2][4];
using DqFragments = float[FRAGS][(COLUMNS + DQ_SPACING - 1) / DQ_SPACING][2][4];

constexpr int DQ_FLOATS = PASSES * NUM_THREADS * sizeof(DqFragments) / sizeof(float);  // of a tile
constexpr int PITCH = DQ_FLOATS / BLOCK_M;  // of a row, in whole 128 bytes: every bank once

struct Reduction {
    float of_warps[NUM_WARPS];
};

struct SharedMemory {
    Element k[BLOCK_N][PITCH];
    Element v[BLOCK_N][PITCH];
    Element q[NUM_STAGES][BLOCK_M][PITCH];
    Element dout[NUM_STAGES][BLOCK_M][PITCH];
    Element p[BLOCK_N][64];   // the transpose of P, in BLOCK_M columns
    Element ds[BLOCK_N][64];  // the transpose of dS
    float2 rows[NUM_STAGES][BLOCK_M];
    Reduction reduction;
};

constexpr int LANES = 16;  // threads that share a row of attention_delta

template <typename T>
constexpr bool IS_FP16 = false;
template <>
constexpr bool IS_FP16<fp16> = true;

extern "C" {
__constant__ BackwardDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_delta",
                 .grid = {{SEQ_Q, BLOCK_M}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(Reduction)},
                {.name = "attention_backward",
                 .grid = {{SEQ_K, BLOCK_N}, {KV_HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory)},
                {.name = "attention_round",
                 .grid = {{SEQ_Q, BLOCK_M}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS}},
    .workspace = {{.element_bytes = sizeof(float2),  // of each query: lse in units of log2, delta
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, BLOCK_M}}},
                  {.element_bytes = PITCH * sizeof(float),  // dQ in tiles of DQ_FLOATS
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, BLOCK_M}}},
                  {.element_bytes = IS_FP16<Element> ? sizeof(float) : 0,  // of a tile: max |dO|
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, 1}}}},
};
}

// Where column col of a row lies: the eight 16-byte chunks of every 128 bytes are permuted, in each
// of 8 rows differently, so that the same chunk of 8 rows touches every bank once.
__device__ int swizzle(int row, int col) { return col ^ row % 8 * VEC; }

// Column d + col, for a multiple d of 16 and a col below 16: the part of d beyond 128 bytes is added,
// so that it is no register of its own.
__device__ int swizzle(int row, int col, int d) {
    return (swizzle(row, col) ^ d % 64) + d / 64 * 64;
}

// Starts tile[r][swizzle(r, d)] = rows[r][d], zeros past the last row and past HEAD_DIM
// [TILE_ROWS, DIM]. Eight threads share a row; the swizzle is the same in all of a thread's rows.
template <int TILE_ROWS>
__device__ void load_tile(Element (&tile)[TILE_ROWS][PITCH], const Element* rows, int64_t stride,
                          int num_rows) {
    static_assert(TILE_ROWS % (NUM_THREADS / 8) == 0 && NUM_THREADS / 8 % 8 == 0);
    const int row = threadIdx.x / 8;
    const int col = threadIdx.x % 8 * VEC;
    Element* to = &tile[row][swizzle(row, col)];
    const Element* from = rows + row * stride + col;
    num_rows -= row;
#pragma unroll
    for (int r = 0; r < TILE_ROWS; r += NUM_THREADS / 8) {
#pragma unroll
        for (int d = 0; d < DIM; d += 8 * VEC)
            if (d + col < DIM)
                cp_async_cg(to + r * PITCH + d, from + d, r < num_rows && d + col < HEAD_DIM);
        from += NUM_THREADS / 8 * stride;
    }
}

// acc = A B^T, of 16 M_FRAGS rows of A and N rows of B, both from a multiple of 8 on. A lane's
// acc[m][n][2 r + i], with r and i 0 or 1, is the element in row 16 m + 8 r + lane / 4 and column
// 8 n + 2 (lane % 4) + i.
template <int M_FRAGS, int N>
__device__ void multiply(float (&acc)[M_FRAGS][N / 8][4], const Element (*a)[PITCH],
                         const Element (*b)[PITCH]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < DIM; d += 16) {
        uint32_t a_frag[M_FRAGS][4];  // [16, 16] each
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m) {
            const int row = 16 * m + lane % 16;
            ldmatrix_x4(a_frag[m], &a[row][swizzle(row, lane / 16 * 8, d)]);
        }
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            uint32_t b_frag[4];  // B^T [16, 8], of the rows n ... n + 7 and of the next 8
            const int row = n + lane / 16 * 8 + lane % 8;
            ldmatrix_x4(b_frag, &b[row][swizzle(row, lane / 8 % 2 * 8, d)]);
#pragma unroll
            for (int m = 0; m < M_FRAGS; ++m) {
                mma_m16n8k16<Element>(acc[m][n / 8], a_frag[m], b_frag[0], b_frag[1]);
                mma_m16n8k16<Element>(acc[m][n / 8 + 1], a_frag[m], b_frag[2], b_frag[3]);
            }
        }
    }
}

// x[row + r][col + c] = acc, rounded, of a warp's part of the transpose of P or dS
__device__ void store_operand(Element (&x)[BLOCK_N][64], int row, int col,
                              const float (&acc)[FRAGS][WARP_QUERIES / 8][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < FRAGS; ++m)
#pragma unroll
        for (int n = 0; n < WARP_QUERIES / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int x_row = row + 16 * m + 8 * r + lane / 4;
                const float* pair = &acc[m][n][2 * r];
                *reinterpret_cast<uint32_t*>(
                    &x[x_row][swizzle(x_row, col + 8 * n) + 2 * (lane % 4)]) =
                    cvt_rn_x2<Element>(pair[0], pair[1]);
            }
}

// acc += A B of A [32, K], whose fragments load_a(a_frag, row, k) gives, and the columns of B
// [K, DIM] that a warp has from `column` on: 16 of every SPACING. A lane's acc[m][c][h][2 r + i] is
// the element in row 16 m + 8 r + lane / 4 and column SPACING c + 8 h + 2 (lane % 4) + i.
template <int K, int SPACING, int CHUNKS, typename LoadA>
__device__ void add_product(float (&acc)[FRAGS][CHUNKS][2][4], LoadA load_a,
                            const Element (*b)[PITCH], int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        uint32_t a_frag[FRAGS][4];  // [16, 16] each
#pragma unroll
        for (int m = 0; m < FRAGS; ++m) load_a(a_frag[m], 16 * m, k);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int d = column + SPACING * c;
            if (d >= DIM) break;
            uint32_t b_frag[4];  // B [16, 8], of the columns d ... d + 7 and of the next 8
            const int row = k + lane % 16;
            ldmatrix_x4_trans(b_frag, &b[row][swizzle(row, lane / 16 * 8, d)]);
#pragma unroll
            for (int m = 0; m < FRAGS; ++m) {
                mma_m16n8k16<Element>(acc[m][c][0], a_frag[m], b_frag[0], b_frag[1]);
                mma_m16n8k16<Element>(acc[m][c][1], a_frag[m], b_frag[2], b_frag[3]);
            }
        }
    }
}

// rows[r][d] = factor acc, rounded, for the rows and columns that there are
__device__ void store(Element* rows, int64_t stride, int num_rows, const DkvFragments& acc,
                      int column, float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < FRAGS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = 16 * m + 8 * r + lane / 4;
            if (row >= num_rows) continue;
#pragma unroll
            for (int n = 0; n < (COLUMNS + DKV_SPACING - 1) / DKV_SPACING * 2; ++n) {
                const int d = column + DKV_SPACING * (n / 2) + 8 * (n % 2) + 2 * (lane % 4);
                if (d >= HEAD_DIM) break;
                const float* x = &acc[m][n / 2][n % 2][2 * r];
                *reinterpret_cast<uint32_t*>(rows + row * stride + d) =
                    cvt_rn_x2<Element>(factor * x[0], factor * x[1]);
            }
        }
}

// Where a warp's part of dQ begins: its query in a tile, its column.
__device__ int dq_row() { return threadIdx.x / 32 / (DQ_SPACING / 16) * 16 * FRAGS; }
__device__ int dq_column() { return threadIdx.x / 32 % (DQ_SPACING / 16) * 16; }

// dq += factor acc. A tile of dQ lies in the order of the accumulators, a float of all threads after
// another: a warp adds to 128 bytes at once.
__device__ void add_dq(float* dq, const DqFragments& acc, int column, float factor) {
    dq += threadIdx.x;
#pragma unroll
    for (int n = 0; n < sizeof(DqFragments) / sizeof(float); ++n) {
        const int m = n / (sizeof(acc[0]) / sizeof(float));
        const int c = n % (sizeof(acc[0]) / sizeof(float)) / 8;
        if (column + DQ_SPACING * c < DIM)
            red_add(dq + n * NUM_THREADS, factor * acc[m][c][n / 4 % 2][n % 4]);
    }
}

// The maximum of x over the block, known to all its threads.
__device__ float block_max(Reduction& reduction, float x) {
    for (int offset = 16; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    if (threadIdx.x % 32 == 0) reduction.of_warps[threadIdx.x / 32] = x;
    __syncthreads();  // every warp's part is there
    for (int warp = 0; warp < NUM_WARPS; ++warp) x = fmaxf(x, reduction.of_warps[warp]);
    return x;
}

// What dS is multiplied by before it is rounded to an operand, a power of two. In fp16 dS may be
// beyond the largest number, or below the smallest, where the gradients are not: 1 / factor is 16
// to 32 times the largest |dO| of the heads whose tiles are given.
__device__ float ds_factor(Reduction& reduction, const void* tiles, int64_t first, int num_tiles) {
    if (!IS_FP16<Element>) return 1.0f;
    float largest = 0.0f;
    for (int n = threadIdx.x; n < num_tiles; n += NUM_THREADS)
        largest = fmaxf(largest, static_cast<const float*>(tiles)[first + n]);
    int exponent;
    frexpf(block_max(reduction, largest), &exponent);
    return ldexpf(1.0f, -exponent - 4);
}

// Of each query: lse in units of log2, +inf where no key is visible and past the last query, so that
// P = 2^(S - lse) is 0 there; delta = rowsum(dO * O)  [batch, heads, seq_q in whole tiles]. And dQ = 0.
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    attention_delta(const __grid_constant__ BackwardParams p) {
    const int q_tiles = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int head = blockIdx.x / q_tiles % p.heads;
    const int batch = blockIdx.x / q_tiles / p.heads;
    const Element* o = p.o + batch * p.o_stride.batch + head * p.o_stride.head;
    const Element* dout = p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head;

    float largest = 0.0f;
    for (int r = threadIdx.x / LANES; r < BLOCK_M; r += NUM_THREADS / LANES) {
        const int i = blockIdx.x % q_tiles * BLOCK_M + r;
        const int row = min(i, p.seq_q - 1);  // all lanes take part in the shuffles
        float delta = 0.0f;
        for (int d = threadIdx.x % LANES * VEC; d < HEAD_DIM; d += LANES * VEC) {
            float x[VEC], y[VEC];
            load_vector(x, dout + row * p.dout_stride.row + d);
            load_vector(y, o + row * p.o_stride.row + d);
#pragma unroll
            for (int n = 0; n < VEC; ++n) {
                delta += x[n] * y[n];
                largest = fmaxf(largest, fabsf(x[n]));
            }
        }
        for (int offset = LANES / 2; offset > 0; offset /= 2)
            delta += __shfl_xor_sync(0xffffffff, delta, offset);
        if (threadIdx.x % LANES == 0) {
            float2 of_row = {INFINITY, 0.0f};
            if (i < p.seq_q) {
                const float lse = p.lse[(int64_t(batch) * p.heads + head) * p.seq_q + i];
                of_row = {lse == -INFINITY ? INFINITY : lse * LOG2_E, delta};
            }
            static_cast<float2*>(p.workspace[0])[int64_t(blockIdx.x) * BLOCK_M + r] = of_row;
        }
    }
    float* dq = static_cast<float*>(p.workspace[1]) + int64_t(blockIdx.x) * DQ_FLOATS;
    for (int n = 4 * threadIdx.x; n < DQ_FLOATS; n += 4 * NUM_THREADS)
        store_float4(&dq[n], make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    if (IS_FP16<Element>) {
        largest = block_max(shared_memory<Reduction>(), largest);
        if (threadIdx.x == 0) static_cast<float*>(p.workspace[2])[blockIdx.x] = largest;
    }
}

// dK = scale dS^T Q, dV = P^T dO, summed over the query heads of a group
// [batch, kv_heads, seq_k, HEAD_DIM]; dQ += dS K  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_backward(const __grid_constant__ BackwardParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int k_blocks = (p.seq_k + BLOCK_N - 1) / BLOCK_N;
    const int k_start = blockIdx.x % k_blocks * BLOCK_N;
    const int kv_head = blockIdx.x / k_blocks % p.kv_heads;
    const int batch = blockIdx.x / k_blocks / p.kv_heads;
    const int group = p.heads / p.kv_heads;
    const Element* k =
        p.k + batch * p.k_stride.batch + kv_head * p.k_stride.head + k_start * p.k_stride.row;
    const Element* v =
        p.v + batch * p.v_stride.batch + kv_head * p.v_stride.head + k_start * p.v_stride.row;
    const int lane = threadIdx.x % 32;
    // What the warp computes: from which key of the block on, of S and dP from which query of a tile,
    // of dK and dV from which column on.
    const int warp_row = threadIdx.x / 64 * 16 * FRAGS;
    const int warp_col = threadIdx.x / 32 % 2 * WARP_QUERIES;
    const int warp_d = threadIdx.x / 32 % 2 * 16;
    const auto load_p = [&](uint32_t (&a_frag)[4], int row, int k) {
        row += warp_row + lane % 16;
        ldmatrix_x4(a_frag, &smem.p[row][swizzle(row, k + lane / 16 * 8)]);
    };
    const auto load_ds = [&](uint32_t (&a_frag)[4], int row, int k) {
        row += warp_row + lane % 16;
        ldmatrix_x4(a_frag, &smem.ds[row][swizzle(row, k + lane / 16 * 8)]);
    };
    const auto load_ds_trans = [&](uint32_t (&a_frag)[4], int query, int k) {
        const int row = k + lane / 16 * 8 + lane % 8;
        query += dq_row() + lane / 8 % 2 * 8;
        ldmatrix_x4_trans(a_frag, &smem.ds[row][swizzle(row, query)]);
    };
    // Causal: key j is seen by the queries i >= j - offset.
    const int offset = p.seq_k - p.seq_q;
    const int first_tile = CAUSAL ? max(0, k_start - offset) / BLOCK_M : 0;
    const int first_head = kv_head * group;

    const int q_tiles = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const auto load_q = [&](int head, int q_start, int stage) {
        load_tile(
            smem.q[stage],
            p.q + batch * p.q_stride.batch + head * p.q_stride.head + q_start * p.q_stride.row,
            p.q_stride.row, p.seq_q - q_start);
        load_tile(smem.dout[stage],
                  p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head +
                      q_start * p.dout_stride.row,
                  p.dout_stride.row, p.seq_q - q_start);
        const float2* rows = static_cast<const float2*>(p.workspace[0]) +
                             (int64_t(batch) * p.heads + head) * q_tiles * BLOCK_M + q_start;
        const int row = 2 * threadIdx.x;  // 16 bytes hold two
        if (row < BLOCK_M)
            cp_async_cg(reinterpret_cast<Element*>(&smem.rows[stage][row]),
                        reinterpret_cast<const Element*>(rows + row), true);
    };

    // ---- load K and V
    load_tile(smem.k, k, p.k_stride.row, p.seq_k - k_start);
    load_tile(smem.v, v, p.v_stride.row, p.seq_k - k_start);
    const float scale_log2 = p.softmax_scale * LOG2_E;
    const float factor =
        ds_factor(smem.reduction, p.workspace[2], (int64_t(batch) * p.heads + first_head) * q_tiles,
                  group * q_tiles);

    for (int column = 0; column < DIM; column += COLUMNS) {
        if (column > 0) __syncthreads();  // everyone has read the last tile
        load_q(first_head, first_tile * BLOCK_M, 0);
        cp_async_commit_group();
        DkvFragments dk_acc = {}, dv_acc = {};

        // ---- for each Q/dO tile of each head of the group
        int head = first_head, tile = first_tile;
        for (int stage = 0; head < first_head + group; stage ^= 1) {
            cp_async_wait_group<0>();
            __syncthreads();  // Q and dO, and at first K and V, are complete; everyone has read the
                              // tile before
            const int q_start = tile * BLOCK_M;
            float* dq = static_cast<float*>(p.workspace[1]) +
                        ((int64_t(batch) * p.heads + head) * q_tiles + tile) * DQ_FLOATS +
                        column / COLUMNS * (DQ_FLOATS / PASSES);
            if (++tile == q_tiles) ++head, tile = first_tile;
            if (head < first_head + group) load_q(head, tile * BLOCK_M, stage ^ 1);
            cp_async_commit_group();

            // ---- S^T = K Q^T, dP^T = V dO^T  [BLOCK_N, BLOCK_M]
            float s_acc[FRAGS][WARP_QUERIES / 8][4], dp_acc[FRAGS][WARP_QUERIES / 8][4];
            multiply<FRAGS, WARP_QUERIES>(s_acc, smem.k + warp_row, smem.q[stage] + warp_col);
            multiply<FRAGS, WARP_QUERIES>(dp_acc, smem.v + warp_row, smem.dout[stage] + warp_col);

            // ---- P = 2^(S - lse), dS = P * (dP - delta)
            // A key past the last one is no row of dK and dV, but it would add to dQ.
            const int query = q_start + warp_col;
            const int warp_keys = CAUSAL ? min(p.seq_k, query + offset + 1) : p.seq_k;
            const bool has_hidden = k_start + warp_row + 16 * FRAGS > warp_keys;
#pragma unroll
            for (int n = 0; n < WARP_QUERIES / 8; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int col = 8 * n + 2 * (lane % 4) + c;
                    const auto [lse, delta] = smem.rows[stage][warp_col + col];
                    const int row_keys = CAUSAL ? min(p.seq_k, query + col + offset + 1) : p.seq_k;
#pragma unroll
                    for (int i = 0; i < 2 * FRAGS; ++i) {
                        float& s = s_acc[i / 2][n][i % 2 * 2 + c];
                        float& dp = dp_acc[i / 2][n][i % 2 * 2 + c];
                        s = ex2_approx_ftz(s * scale_log2 - lse);
                        if (has_hidden && k_start + warp_row + 8 * i + lane / 4 >= row_keys)
                            s = 0.0f;
                        dp = s * (dp - delta) * factor;
                    }
                }
            store_operand(smem.p, warp_row, warp_col, s_acc);
            store_operand(smem.ds, warp_row, warp_col, dp_acc);
            __syncthreads();  // P and dS are complete; everyone reads them before the next barrier

            // ---- dV += P^T dO, dK += dS^T Q  [BLOCK_N, COLUMNS]
            add_product<BLOCK_M, DKV_SPACING>(dv_acc, load_p, smem.dout[stage], column + warp_d);
            add_product<BLOCK_M, DKV_SPACING>(dk_acc, load_ds, smem.q[stage], column + warp_d);

            // ---- dQ += dS K  [BLOCK_M, COLUMNS]
            DqFragments dq_acc = {};
            add_product<BLOCK_N, DQ_SPACING>(dq_acc, load_ds_trans, smem.k, column + dq_column());
            add_dq(dq, dq_acc, column + dq_column(), 1.0f / factor);
        }

        // ---- write dK and dV
        const int num_rows = p.seq_k - k_start - warp_row;
        store(p.dk + batch * p.dk_stride.batch + kv_head * p.dk_stride.head +
                  (k_start + warp_row) * p.dk_stride.row,
              p.dk_stride.row, num_rows, dk_acc, column + warp_d, p.softmax_scale / factor);
        store(p.dv + batch * p.dv_stride.batch + kv_head * p.dv_stride.head +
                  (k_start + warp_row) * p.dv_stride.row,
              p.dv_stride.row, num_rows, dv_acc, column + warp_d, 1.0f);
    }
}

// dQ in its order and type  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    attention_round(const __grid_constant__ BackwardParams p) {
    const int q_tiles = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int q_start = blockIdx.x % q_tiles * BLOCK_M;
    const int head = blockIdx.x / q_tiles % p.heads;
    const int batch = blockIdx.x / q_tiles / p.heads;
    const int lane = threadIdx.x % 32;
    const float* sum =
        static_cast<const float*>(p.workspace[1]) + int64_t(blockIdx.x) * DQ_FLOATS + threadIdx.x;
    for (int column = dq_column(); column < DIM; column += COLUMNS) {
#pragma unroll
        for (int n = 0; n < sizeof(DqFragments) / sizeof(float); n += 2) {
            constexpr int OF_ROWS = sizeof(DqFragments) / FRAGS / sizeof(float);
            const int row = q_start + dq_row() + n / OF_ROWS * 16 + n / 2 % 2 * 8 + lane / 4;
            const int d = column + n % OF_ROWS / 8 * DQ_SPACING + n / 4 % 2 * 8 + 2 * (lane % 4);
            if (row < p.seq_q && d < HEAD_DIM) {
                Element* to = p.dq + batch * p.dq_stride.batch + head * p.dq_stride.head +
                              row * p.dq_stride.row + d;
                *reinterpret_cast<uint32_t*>(to) =
                    cvt_rn_x2<Element>(p.softmax_scale * sum[n * NUM_THREADS],
                                       p.softmax_scale * sum[(n + 1) * NUM_THREADS]);
            }
        }
        sum += DQ_FLOATS / PASSES;
    }
}
