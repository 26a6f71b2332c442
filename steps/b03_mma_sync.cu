// b03 -- mma.sync: seven products on the tensor cores, fragments chain, no atomics
// change: all products by mma.sync from tiles that cp.async copies while others are in use; a warp
//     computes S and dP for rows of its own and keeps P and dS in registers, where the accumulators
//     of one product are the operand of the next
// why: b02 is limited by the FMA pipe, which is 16 times slower than the tensor cores; two kernels
//     still compute S and dP twice, 7 products instead of 5, and in exchange every gradient has one
//     owner: 15 times b02
// limits: bf16, fp16; head_dim 8-256 by 8; sm_80; more than 99 KiB of shared memory from head_dim
//     200 on, which sm_86 and sm_89 lack
//     tuned for two blocks per SM, which need Hopper's shared memory from head_dim 72 on: 194 KiB
#include "backward.cuh"
#include "copy.cuh"
#include "mma.cuh"

constexpr int NUM_WARPS = 4;
constexpr int NUM_THREADS = 32 * NUM_WARPS;
constexpr int BLOCKS_PER_SM = HEAD_DIM <= 128 ? 2 : 1;
constexpr int NUM_STAGES = 2;  // tiles in shared memory: stage is in use, stage ^ 1 in flight
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole fragments; zeros from HEAD_DIM on
constexpr int PITCH = (DIM + 63) / 64 * 64;     // of a row, in whole 128 bytes: every bank once

// attention_dq: a block has rows of queries and takes the keys tile by tile.
constexpr int DQ_FRAGS = HEAD_DIM <= 128 ? 2 : 1;  // a warp's fragments of 16 queries
constexpr int DQ_QUERIES = 16 * DQ_FRAGS * NUM_WARPS;
constexpr int DQ_KEYS = 32;

// attention_dk_dv: a block has rows of keys, 16 a warp, and takes the queries tile by tile. dK and
// dV of more than 128 columns do not fit into registers: the block then computes them one after
// another, COLUMNS at a time, and S and dP again.
constexpr int DKV_KEYS = 16 * NUM_WARPS;
constexpr int DKV_QUERIES = HEAD_DIM <= 128 ? 64 : 32;
constexpr int COLUMNS = DIM <= 128 ? DIM : 128;

struct Reduction {
    float of_warps[NUM_WARPS];
};

struct DqMemory {
    Element q[DQ_QUERIES][PITCH];
    Element dout[DQ_QUERIES][PITCH];
    Element k[NUM_STAGES][DQ_KEYS][PITCH];
    Element v[NUM_STAGES][DQ_KEYS][PITCH];
    Reduction reduction;
};

struct DkDvMemory {
    Element k[DKV_KEYS][PITCH];
    Element v[DKV_KEYS][PITCH];
    Element q[NUM_STAGES][DKV_QUERIES][PITCH];
    Element dout[NUM_STAGES][DKV_QUERIES][PITCH];
    float2 rows[NUM_STAGES][DKV_QUERIES];
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
                 .grid = {{SEQ_Q, DKV_QUERIES}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(Reduction)},
                {.name = "attention_dq",
                 .grid = {{SEQ_Q, DQ_QUERIES}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(DqMemory)},
                {.name = "attention_dk_dv",
                 .grid = {{SEQ_K, DKV_KEYS}, {KV_HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(DkDvMemory)}},
    .workspace = {{.element_bytes = sizeof(float2),  // of each query: lse in units of log2, delta
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, DKV_QUERIES}}},
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

// acc += X B of X [16 M_FRAGS, K] and the columns of B [K, DIM] from `column` on: what is there of
// the N that acc has. X is an accumulator of multiply(): a lane's elements of two accumulators
// [16, 8] side by side are its elements of an operand [16, 16].
template <int M_FRAGS, int K, int N>
__device__ void add_product(float (&acc)[M_FRAGS][N / 8][4], const float (&x)[M_FRAGS][K / 8][4],
                            const Element (*b)[PITCH], int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        uint32_t a_frag[M_FRAGS][4];
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &x[m][k / 8 + i / 2][i % 2 * 2];
                a_frag[m][i] = cvt_rn_x2<Element>(pair[0], pair[1]);
            }
#pragma unroll
        for (int d = 0; d < N; d += 16) {
            if (column + d >= DIM) break;
            uint32_t b_frag[4];  // B [16, 8], of the columns d ... d + 7 and of the next 8
            const int row = k + lane % 16;
            ldmatrix_x4_trans(b_frag, &b[row][swizzle(row, lane / 16 * 8, column + d)]);
#pragma unroll
            for (int m = 0; m < M_FRAGS; ++m) {
                mma_m16n8k16<Element>(acc[m][d / 8], a_frag[m], b_frag[0], b_frag[1]);
                mma_m16n8k16<Element>(acc[m][d / 8 + 1], a_frag[m], b_frag[2], b_frag[3]);
            }
        }
    }
}

// rows[r][column + n] = factor acc[r][n], rounded, for the rows and columns that there are
template <int M_FRAGS, int N>
__device__ void store(Element* rows, int64_t stride, int num_rows,
                      const float (&acc)[M_FRAGS][N / 8][4], int column, float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = 16 * m + 8 * r + lane / 4;
            if (row >= num_rows) continue;
            Element* to = rows + row * stride + column + 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < N; n += 8) {
                if (column + n >= HEAD_DIM) break;
                const float* x = &acc[m][n / 8][2 * r];
                *reinterpret_cast<uint32_t*>(to + n) =
                    cvt_rn_x2<Element>(factor * x[0], factor * x[1]);
            }
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
// P = 2^(S - lse) is 0 there; delta = rowsum(dO * O)  [batch, heads, seq_q in whole tiles]
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    attention_delta(const __grid_constant__ BackwardParams p) {
    const int q_tiles = (p.seq_q + DKV_QUERIES - 1) / DKV_QUERIES;
    const int head = blockIdx.x / q_tiles % p.heads;
    const int batch = blockIdx.x / q_tiles / p.heads;
    const Element* o = p.o + batch * p.o_stride.batch + head * p.o_stride.head;
    const Element* dout = p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head;

    float largest = 0.0f;
    for (int r = threadIdx.x / LANES; r < DKV_QUERIES; r += NUM_THREADS / LANES) {
        const int i = blockIdx.x % q_tiles * DKV_QUERIES + r;
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
            static_cast<float2*>(p.workspace[0])[int64_t(blockIdx.x) * DKV_QUERIES + r] = of_row;
        }
    }
    if (IS_FP16<Element>) {
        largest = block_max(shared_memory<Reduction>(), largest);
        if (threadIdx.x == 0) static_cast<float*>(p.workspace[1])[blockIdx.x] = largest;
    }
}

// dQ = scale dS K  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM)
    attention_dq(const __grid_constant__ BackwardParams p) {
    DqMemory& smem = shared_memory<DqMemory>();
    const int q_blocks = (p.seq_q + DQ_QUERIES - 1) / DQ_QUERIES;
    const int q_start = blockIdx.x % q_blocks * DQ_QUERIES;
    const int head = blockIdx.x / q_blocks % p.heads;
    const int batch = blockIdx.x / q_blocks / p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    const Element* q =
        p.q + batch * p.q_stride.batch + head * p.q_stride.head + q_start * p.q_stride.row;
    const Element* dout = p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head +
                          q_start * p.dout_stride.row;
    const Element* k = p.k + batch * p.k_stride.batch + kv_head * p.k_stride.head;
    const Element* v = p.v + batch * p.v_stride.batch + kv_head * p.v_stride.head;
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * 16 * DQ_FRAGS;  // the warp's first query in the block
    // Causal: query i sees the keys j <= i + offset, so the last query sees the last key.
    const int offset = p.seq_k - p.seq_q;
    const int block_keys = CAUSAL ? min(p.seq_k, q_start + DQ_QUERIES + offset) : p.seq_k;
    const int warp_keys = CAUSAL ? min(p.seq_k, q_start + warp_row + offset + 1) : p.seq_k;

    const auto load_kv = [&](int k_start, int stage) {
        load_tile(smem.k[stage], k + k_start * p.k_stride.row, p.k_stride.row, p.seq_k - k_start);
        load_tile(smem.v[stage], v + k_start * p.v_stride.row, p.v_stride.row, p.seq_k - k_start);
    };

    // ---- load Q and dO, and the first tile
    load_tile(smem.q, q, p.q_stride.row, p.seq_q - q_start);
    load_tile(smem.dout, dout, p.dout_stride.row, p.seq_q - q_start);
    load_kv(0, 0);
    cp_async_commit_group();

    const float scale_log2 = p.softmax_scale * LOG2_E;
    const int q_tiles = (p.seq_q + DKV_QUERIES - 1) / DKV_QUERIES;
    const int64_t head_tile = (int64_t(batch) * p.heads + head) * q_tiles;
    const float factor = ds_factor(smem.reduction, p.workspace[1], head_tile, q_tiles);
    float2 rows[DQ_FRAGS][2];  // lse and delta
#pragma unroll
    for (int m = 0; m < DQ_FRAGS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = min(q_start + warp_row + 16 * m + 8 * r + lane / 4, p.seq_q - 1);
            rows[m][r] = static_cast<const float2*>(p.workspace[0])[head_tile * DKV_QUERIES + row];
        }
    float dq_acc[DQ_FRAGS][DIM / 8][4] = {};

    // ---- for each K/V tile
    for (int k_start = 0, stage = 0; k_start < block_keys; k_start += DQ_KEYS, stage ^= 1) {
        cp_async_wait_group<0>();
        __syncthreads();  // K and V, and at first Q and dO, are complete; everyone has read the
                          // tile before
        if (k_start + DQ_KEYS < block_keys) load_kv(k_start + DQ_KEYS, stage ^ 1);
        cp_async_commit_group();

        // ---- S = Q K^T, dP = dO V^T  [DQ_QUERIES, DQ_KEYS]
        float s_acc[DQ_FRAGS][DQ_KEYS / 8][4], dp_acc[DQ_FRAGS][DQ_KEYS / 8][4];
        multiply<DQ_FRAGS, DQ_KEYS>(s_acc, smem.q + warp_row, smem.k[stage]);
        multiply<DQ_FRAGS, DQ_KEYS>(dp_acc, smem.dout + warp_row, smem.v[stage]);

        // ---- P = 2^(S - lse), dS = P * (dP - delta)
#pragma unroll
        for (int m = 0; m < DQ_FRAGS; ++m)
#pragma unroll
            for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& s = s_acc[m][n][i];
                    s = ex2_approx_ftz(s * scale_log2 - rows[m][i / 2].x);
                }
        if (k_start + DQ_KEYS > warp_keys) {  // some are hidden
#pragma unroll
            for (int m = 0; m < DQ_FRAGS; ++m)
#pragma unroll
                for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int row = q_start + warp_row + 16 * m + 8 * (i / 2) + lane / 4;
                        const int row_keys = CAUSAL ? min(p.seq_k, row + offset + 1) : p.seq_k;
                        const int key = k_start + 8 * n + 2 * (lane % 4) + i % 2;
                        if (key >= row_keys) s_acc[m][n][i] = 0.0f;
                    }
        }
#pragma unroll
        for (int m = 0; m < DQ_FRAGS; ++m)
#pragma unroll
            for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    s_acc[m][n][i] *= (dp_acc[m][n][i] - rows[m][i / 2].y) * factor;

        // ---- dQ += dS K  [DQ_QUERIES, HEAD_DIM]
        add_product<DQ_FRAGS, DQ_KEYS, DIM>(dq_acc, s_acc, smem.k[stage], 0);
    }
    cp_async_wait_group<0>();  // a block that sees no key has not yet waited for its copies

    // ---- write dQ
    store<DQ_FRAGS, DIM>(p.dq + batch * p.dq_stride.batch + head * p.dq_stride.head +
                             (q_start + warp_row) * p.dq_stride.row,
                         p.dq_stride.row, p.seq_q - q_start - warp_row, dq_acc, 0,
                         p.softmax_scale / factor);
}

// dK = scale dS^T Q, dV = P^T dO, summed over the query heads of a group
// [batch, kv_heads, seq_k, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM)
    attention_dk_dv(const __grid_constant__ BackwardParams p) {
    DkDvMemory& smem = shared_memory<DkDvMemory>();
    const int k_blocks = (p.seq_k + DKV_KEYS - 1) / DKV_KEYS;
    const int k_start = blockIdx.x % k_blocks * DKV_KEYS;
    const int kv_head = blockIdx.x / k_blocks % p.kv_heads;
    const int batch = blockIdx.x / k_blocks / p.kv_heads;
    const int group = p.heads / p.kv_heads;
    const Element* k =
        p.k + batch * p.k_stride.batch + kv_head * p.k_stride.head + k_start * p.k_stride.row;
    const Element* v =
        p.v + batch * p.v_stride.batch + kv_head * p.v_stride.head + k_start * p.v_stride.row;
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * 16;  // the warp's first key in the block
    // Causal: key j is seen by the queries i >= j - offset.
    const int offset = p.seq_k - p.seq_q;
    const int first_tile = CAUSAL ? max(0, k_start - offset) / DKV_QUERIES : 0;
    const int first_head = kv_head * group;

    const int q_tiles = (p.seq_q + DKV_QUERIES - 1) / DKV_QUERIES;
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
                             (int64_t(batch) * p.heads + head) * q_tiles * DKV_QUERIES + q_start;
        const int row = 2 * threadIdx.x;  // 16 bytes hold two
        if (row < DKV_QUERIES)
            cp_async_cg(reinterpret_cast<Element*>(&smem.rows[stage][row]),
                        reinterpret_cast<const Element*>(rows + row), true);
    };

    // ---- load K and V
    load_tile(smem.k, k, p.k_stride.row, p.seq_k - k_start);
    load_tile(smem.v, v, p.v_stride.row, p.seq_k - k_start);
    const float scale_log2 = p.softmax_scale * LOG2_E;
    const float factor =
        ds_factor(smem.reduction, p.workspace[1], (int64_t(batch) * p.heads + first_head) * q_tiles,
                  group * q_tiles);

    for (int column = 0; column < DIM; column += COLUMNS) {
        if (column > 0) __syncthreads();  // everyone has read the last tile
        load_q(first_head, first_tile * DKV_QUERIES, 0);
        cp_async_commit_group();
        float dk_acc[1][COLUMNS / 8][4] = {}, dv_acc[1][COLUMNS / 8][4] = {};

        // ---- for each Q/dO tile of each head of the group
        int head = first_head, tile = first_tile;
        for (int stage = 0; head < first_head + group; stage ^= 1) {
            cp_async_wait_group<0>();
            __syncthreads();  // Q and dO, and at first K and V, are complete; everyone has read the
                              // tile before
            const int q_start = tile * DKV_QUERIES;
            if (++tile == q_tiles) ++head, tile = first_tile;
            if (head < first_head + group) load_q(head, tile * DKV_QUERIES, stage ^ 1);
            cp_async_commit_group();

            // ---- S^T = K Q^T  [DKV_KEYS, DKV_QUERIES]
            float s_acc[1][DKV_QUERIES / 8][4];
            multiply<1, DKV_QUERIES>(s_acc, smem.k + warp_row, smem.q[stage]);

            // ---- P = 2^(S - lse)
            const bool has_hidden = CAUSAL && k_start + warp_row + 15 > q_start + offset;
#pragma unroll
            for (int j = 0; j < DKV_QUERIES / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int col = 8 * j + 2 * (lane % 4) + i % 2;
                    float& s = s_acc[0][j][i];
                    s = ex2_approx_ftz(s * scale_log2 - smem.rows[stage][col].x);
                    if (has_hidden) {
                        const int key = k_start + warp_row + 8 * (i / 2) + lane / 4;
                        s = key <= q_start + col + offset ? s : 0.0f;
                    }
                }

            // ---- dV += P^T dO  [DKV_KEYS, COLUMNS]
            add_product<1, DKV_QUERIES, COLUMNS>(dv_acc, s_acc, smem.dout[stage], column);

            // ---- dP^T = V dO^T, dS = P * (dP - delta)  [DKV_KEYS, DKV_QUERIES]
            float dp_acc[1][DKV_QUERIES / 8][4];
            multiply<1, DKV_QUERIES>(dp_acc, smem.v + warp_row, smem.dout[stage]);
#pragma unroll
            for (int j = 0; j < DKV_QUERIES / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float delta = smem.rows[stage][8 * j + 2 * (lane % 4) + i % 2].y;
                    s_acc[0][j][i] *= (dp_acc[0][j][i] - delta) * factor;
                }

            // ---- dK += dS^T Q  [DKV_KEYS, COLUMNS]
            add_product<1, DKV_QUERIES, COLUMNS>(dk_acc, s_acc, smem.q[stage], column);
        }

        // ---- write dK and dV
        const int num_rows = p.seq_k - k_start - warp_row;
        store<1, COLUMNS>(p.dk + batch * p.dk_stride.batch + kv_head * p.dk_stride.head +
                              (k_start + warp_row) * p.dk_stride.row,
                          p.dk_stride.row, num_rows, dk_acc, column, p.softmax_scale / factor);
        store<1, COLUMNS>(p.dv + batch * p.dv_stride.batch + kv_head * p.dv_stride.head +
                              (k_start + warp_row) * p.dv_stride.row,
                          p.dv_stride.row, num_rows, dv_acc, column, 1.0f);
    }
}
