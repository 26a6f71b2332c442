// b13 -- two widths: v has a head_dim of its own, up to 256 like q's
// taken: only for large head_dim; where v shares it, b10 and b07 are as fast
// change: from b07. Tiles of V, dO and dV are V_HEAD_DIM wide. What registers and shared memory have room
//     for is reckoned from both widths: which operands stay in registers, how many stages there are, and
//     from where on one warpgroup has dV and the other dK. There P is passed on in float
// why: b12, in one slice, has tiles of 32 rows, and P and dS in shared memory, for what blocks of a
//     cluster send each other. b07 has neither, but v would have to be padded: at 192 and 128 a seventh of
//     the products would be of zeros. Predicted: there as many TFLOP/s as b07 at 192, 1.7 times b12's and
//     1.17 times FlashAttention-3's
// limits: bf16, fp16; head_dim 8-256 by 8, v's may differ; sm_90a
#include "backward.cuh"
#include "bulk.cuh"
#include "copy.cuh"
#include "dependent_launch.cuh"
#include "mma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute; one more loads
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER_WARP = 4 * CONSUMERS;  // its first lane starts all loads
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr int GROUP_BARRIER = 1;  // of warpgroup 0; the other's follows. 0 is that of __syncthreads
constexpr int TURN_BARRIER = GROUP_BARRIER + CONSUMERS;  // likewise
// Longer products lose by waiting for turns.
constexpr bool TAKE_TURNS = HEAD_DIM + V_HEAD_DIM <= 384;
constexpr int PANEL = 64;     // columns of a panel: 128 bytes, the swizzle's width
constexpr int BOX_ROWS = 64;  // that one copy loads
constexpr int ceil_div(int x, int y) { return (x + y - 1) / y; }
// Of Q and K, and of V and dO.
constexpr int PANELS = ceil_div(HEAD_DIM, PANEL), V_PANELS = ceil_div(V_HEAD_DIM, PANEL);
// Columns in whole products; zeros from HEAD_DIM on, or from V_HEAD_DIM on.
constexpr int DIM = ceil_div(HEAD_DIM, 16) * 16, V_DIM = ceil_div(V_HEAD_DIM, 16) * 16;
// Rows of two tensors, one of either width, that are 16 MB: all SMs read them from either half of the L2
// cache.
constexpr int SECTION_ROWS = (16 << 20) / ((HEAD_DIM + V_HEAD_DIM) * sizeof(Element));

// A thread's part of 64 rows: so many registers in float, and rounded. Operands are kept in registers
// where all such parts that are in use at a time then take MOST_REGISTERS at most; the rest is for
// addresses.
constexpr int accumulators(int columns) { return columns / 2; }
constexpr int fragments(int columns) { return columns / 4; }
constexpr int MOST_REGISTERS = 208;

// Tiles that shared memory has room for, four at most, beside what is kept: rows of either width, and
// other bytes. A KB is left for the mbarriers.
constexpr int stages(int kept_rows, int tile_rows, int other_bytes) {
    const int row_bytes = (PANELS + V_PANELS) * PANEL * sizeof(Element);
    const int n = ((226 << 10) - other_bytes - kept_rows * row_bytes) / (tile_rows * row_bytes);
    return n < 4 ? n : 4;
}

// attention_dq: a block has rows of queries, 64 a warpgroup, and takes the keys tile by tile. Q and
// dO are in registers where they fit beside dQ, S and dP: the products then read K and V alone from
// shared memory.
constexpr int DQ_QUERIES = 64 * CONSUMERS;
constexpr int DQ_KEYS = HEAD_DIM <= 64 ? 128 : 64;  // never as wide as dQ: see K_IN_REGISTERS
constexpr int DQ_REGISTERS = accumulators(DIM + 2 * DQ_KEYS);
constexpr bool Q_IN_REGISTERS = DQ_REGISTERS + fragments(DIM) <= MOST_REGISTERS;
constexpr bool DOUT_IN_REGISTERS =
    DQ_REGISTERS + (Q_IN_REGISTERS ? fragments(DIM) : 0) + fragments(V_DIM) <= MOST_REGISTERS;
// Where there is room for one tile of V alone, there are two of K, which dS K reads long after dO V^T
// has read V. With twice as many tiles of half as many keys, S and dP would take longer to read Q and dO
// from shared memory than to multiply.
constexpr int V_STAGES = stages(DQ_QUERIES, DQ_KEYS, 0);
constexpr int K_STAGES = V_STAGES > 1 ? V_STAGES : 2;

// attention_dk_dv: a block has rows of keys and takes the queries tile by tile. Where a warpgroup's dK
// and dV do not fit into its registers beside S and dP, both warpgroups have the same 64 keys: 0
// computes S^T, P and dV, and 1 computes dP^T, dS and dK from the P that 0 passes on. Without that, S^T
// would be an eighth product, in one block as in blocks of two kinds, and those would load Q and dO
// twice.
constexpr bool SPLIT = DIM + V_DIM > 256;
constexpr int DKV_KEYS = SPLIT ? 64 : 64 * CONSUMERS;
constexpr int DKV_QUERIES = DIM + V_DIM <= 128 ? 128 : 64;  // S and dP fit beside dK and dV
// With K in registers beside dV and P of the tile before, and S; with V beside dK, P and dP.
constexpr int REGISTERS_WITH_K = accumulators(V_DIM + DKV_QUERIES) + fragments(DIM + DKV_QUERIES);
constexpr int REGISTERS_WITH_V = accumulators(DIM + 2 * DKV_QUERIES) + fragments(V_DIM);
// ptxas 13.0 may give P or dS some of these where the gradient is as wide as a tile, as S and dP are.
constexpr bool K_IN_REGISTERS = SPLIT && REGISTERS_WITH_K <= MOST_REGISTERS && V_DIM != DKV_QUERIES;
constexpr bool V_IN_REGISTERS = SPLIT && REGISTERS_WITH_V <= MOST_REGISTERS && DIM != DKV_QUERIES;

// A tile as TMA writes it: panels, in each of which 8 rows of 128 bytes are swizzled.
template <int NUM_PANELS, int ROWS>
using Tile = Element[NUM_PANELS][ROWS][PANEL];

// P^T of a tile: of each 8 columns the four elements of all threads, one thread's after another's. They
// are not rounded: that would make dS as wrong in the same direction wherever P is the same.
using PTile = float[DKV_QUERIES / 8][128][4];

// Of a tile's queries: lse in units of log2, and delta.
struct Rows {
    float lse[DKV_QUERIES], delta[DKV_QUERIES];
};

// Tiles of Q, and of dO.
constexpr int DKV_STAGES = stages(DKV_KEYS, DKV_QUERIES, sizeof(PTile) + 4 * sizeof(Rows));

// Of each tile: full says that it has arrived, empty that every warp that reads it has.
struct alignas(SWIZZLE_128B_TILE) DqMemory {
    Tile<PANELS, DQ_QUERIES> q;  // and in the end dQ
    Tile<V_PANELS, DQ_QUERIES> dout;
    Tile<PANELS, DQ_KEYS> k[K_STAGES];
    Tile<V_PANELS, DQ_KEYS> v[V_STAGES];
    Mbarrier q_full, dout_full, k_full[K_STAGES], v_full[V_STAGES];
    Mbarrier k_empty[K_STAGES], v_empty[V_STAGES];
};

struct alignas(SWIZZLE_128B_TILE) DkDvMemory {
    Tile<PANELS, DKV_KEYS> k;    // and in the end dK
    Tile<V_PANELS, DKV_KEYS> v;  // and dV
    Tile<PANELS, DKV_QUERIES> q[DKV_STAGES];
    Tile<V_PANELS, DKV_QUERIES> dout[DKV_STAGES];
    PTile p;  // from warpgroup 0 to warpgroup 1, if SPLIT
    Rows rows[DKV_STAGES];
    Mbarrier k_full, v_full, p_full, q_full[DKV_STAGES], dout_full[DKV_STAGES];
    Mbarrier p_empty, q_empty[DKV_STAGES], dout_empty[DKV_STAGES];
};

constexpr int ROW_THREADS = 128 * CONSUMERS;  // of attention_delta
constexpr int LANES = 16;                     // threads that share a row of it
using WarpFloats = float[ROW_THREADS / 32];

template <typename T>
constexpr bool IS_FP16 = false;
template <>
constexpr bool IS_FP16<fp16> = true;

extern "C" {
__constant__ int32_t kernels_start_early = 1;
__constant__ BackwardDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_delta",
                 .grid = {{SEQ_Q, DKV_QUERIES}, {HEADS, 1}, {BATCH, 1}},
                 .threads = ROW_THREADS,
                 .smem_bytes = sizeof(WarpFloats)},
                {.name = "attention_dq",
                 .grid = {{SEQ_Q, DQ_QUERIES}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(DqMemory)},
                {.name = "attention_dk_dv",
                 .grid = {{SEQ_K, DKV_KEYS}, {KV_HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(DkDvMemory)}},
    .workspace = {{.element_bytes = sizeof(Rows) / DKV_QUERIES,
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, DKV_QUERIES}}},
                  {.element_bytes = IS_FP16<Element> ? sizeof(float) : 0,  // of a tile: max |dO|
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, 1}}}},
    .q_box = {BOX_ROWS, PANEL, SWIZZLE_128B},
    .k_box = {BOX_ROWS, PANEL, SWIZZLE_128B},
    .v_box = {BOX_ROWS, PANEL, SWIZZLE_128B},
    .dout_box = {BOX_ROWS, PANEL, SWIZZLE_128B},
    .dq_box = {16, PANEL, SWIZZLE_128B},
    .dk_box = {16, PANEL, SWIZZLE_128B},
    .dv_box = {16, PANEL, SWIZZLE_128B},
};
}

// Starts tile[panel][r][col] = tensor[row + r][PANEL panel + col], zeros past its ends. Called by one
// thread.
template <int NUM_PANELS, int ROWS>
__device__ void load_tile(Tile<NUM_PANELS, ROWS>& tile, const TensorMap& map, int row, int head,
                          int batch, Mbarrier& full) {
#pragma unroll
    for (int panel = 0; panel < NUM_PANELS; ++panel)
#pragma unroll
        for (int r = 0; r < ROWS; r += BOX_ROWS)
            cp_async_bulk_tensor_load(tile[panel][r], map, PANEL * panel, row + r, head, batch,
                                      full);
}

// Describes what lies so many elements further on: the lowest bits are the address, in units of 16
// bytes. That is one addition; from the address each takes three instructions, one after the other.
__device__ uint64_t advance(uint64_t descriptor, int elements) {
    return descriptor >> 32 << 32 | uint32_t(descriptor) + elements / VEC;
}

// Describes the columns d ... d + 15 of a tile, its rows from `row` on.
template <int NUM_PANELS, int ROWS>
__device__ uint64_t k_major(const Tile<NUM_PANELS, ROWS>& tile, int row, int d) {
    return advance(matrix_descriptor<SWIZZLE_128B>(tile[0][row], 0, SWIZZLE_128B_TILE),
                   d / PANEL * ROWS * PANEL + d % PANEL);
}

// Describes the rows row ... row + 15 of a tile, all its columns.
template <int NUM_PANELS, int ROWS>
__device__ uint64_t mn_major(const Tile<NUM_PANELS, ROWS>& tile, int row) {
    return advance(matrix_descriptor<SWIZZLE_128B>(tile[0][0], sizeof(tile[0]), SWIZZLE_128B_TILE),
                   row * PANEL);
}

// Where TMA puts a row's 8 elements from column d on: the 8 chunks of a row are permuted.
template <int NUM_PANELS, int ROWS>
__device__ Element* swizzled(Tile<NUM_PANELS, ROWS>& tile, int row, int d) {
    return &tile[d / PANEL][row][d % PANEL ^ row % 8 * VEC];
}

// frag = acc, rounded, in the layout of wgmma's operand A
template <int STEPS>
__device__ void convert(uint32_t (&frag)[STEPS][4], const float (&acc)[2 * STEPS][4]) {
#pragma unroll
    for (int j = 0; j < STEPS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* x = &acc[2 * j + i / 2][2 * (i % 2)];
            frag[j][i] = cvt_rn_x2<Element>(x[0], x[1]);
        }
}

// tensor[first_row + r] = factor acc[r], rounded, of a warp's 16 rows, which take the place of rows
// of the tile. TMA leaves out what lies past the tensor's ends.
template <int NUM_PANELS, int ROWS, int TILES>
__device__ void write(const TensorMap& map, int first_row, int head, int batch,
                      Tile<NUM_PANELS, ROWS>& tile, int row, float (&acc)[TILES][4], float factor) {
    const int lane = threadIdx.x % 32;
    uint32_t frag[TILES / 2][4];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= factor;
    convert(frag, acc);
#pragma unroll
    for (int j = 0; j < TILES / 2; ++j)
        stmatrix_x4(swizzled(tile, row + lane % 16, 16 * j + lane / 16 * 8), frag[j]);
    fence_proxy_async();  // by each writer, before the barrier
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (int panel = 0; panel < NUM_PANELS; ++panel)
            cp_async_bulk_tensor_store(map, PANEL * panel, first_row, head, batch,
                                       tile[panel][row]);
        cp_async_bulk_commit_group();
    }
}

// frag = tile[row + r], of a warp's 16 rows, as wgmma's operand A
template <int NUM_PANELS, int ROWS, int STEPS>
__device__ void load_rows(uint32_t (&frag)[STEPS][4], Tile<NUM_PANELS, ROWS>& tile, int row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < STEPS; ++j)
        ldmatrix_x4(frag[j], swizzled(tile, row + lane % 16, 16 * j + lane / 16 * 8));
}

// Starts acc = A B^T of 64 rows of A and the N rows of B, and as many columns as a_frag has room for. A
// is in these registers or in the tile from `row` on.
template <bool IN_REGISTERS, int STEPS, int NUM_PANELS, int A_ROWS, int N>
__device__ void multiply(float (&acc)[N / 8][4], uint32_t (&a_frag)[STEPS][4],
                         const Tile<NUM_PANELS, A_ROWS>& a, int row, const Tile<NUM_PANELS, N>& b) {
    if (IN_REGISTERS)
        wgmma_fence(acc, a_frag);
    else
        wgmma_fence(acc);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
        const uint64_t b_desc = k_major(b, 0, 16 * j);
        if (IN_REGISTERS)
            wgmma_m64nNk16<Element, K_MAJOR>(acc, a_frag[j], b_desc, j > 0);
        else
            wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(acc, k_major(a, row, 16 * j), b_desc, j > 0);
    }
    wgmma_commit_group();
}

// Starts acc += X B of X [64, K] in registers and the K rows of B, and its columns that acc has.
template <int TILES, int STEPS, int NUM_PANELS, int K>
__device__ void add_product(float (&acc)[TILES][4], uint32_t (&x_frag)[STEPS][4],
                            const Tile<NUM_PANELS, K>& b) {
    wgmma_fence(acc, x_frag);
#pragma unroll
    for (int j = 0; j < STEPS; ++j)
        wgmma_m64nNk16<Element, MN_MAJOR>(acc, x_frag[j], mn_major(b, 16 * j), true);
    wgmma_commit_group();
}

// A stage's barriers complete one phase per tile. Phase -1 counts as completed from the beginning: a
// new stage is empty.
__device__ void wait_for(Mbarrier& barrier, int phase) {
    while (!mbarrier_try_wait_parity(barrier, phase & 1)) {
    }
}

// Says that all lanes of the warp are done with what the barrier guards.
__device__ void release(Mbarrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Consumers start their products in turn, so that one computes P and dS while the other multiplies.
// A warpgroup's barrier takes its 128 threads, which wait, and the other's, which have started theirs.
// Warpgroup 1 passes the first turn; nobody takes the last.
__device__ void wait_for_turn(int warpgroup) {
    if (TAKE_TURNS) bar_sync(TURN_BARRIER + warpgroup, 128 * CONSUMERS);
}
__device__ void pass_turn(int warpgroup) {
    if (TAKE_TURNS) bar_arrive(TURN_BARRIER + 1 - warpgroup, 128 * CONSUMERS);
}

// The maximum of x over the warp, known to all its lanes.
__device__ float warp_max(float x) {
    for (int offset = 16; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    return x;
}

// What dS is multiplied by before it is rounded to an operand, a power of two. In fp16 dS may be
// beyond the largest number, or below the smallest, where the gradients are not: 1 / factor is 16
// to 32 times the largest |dO| of these tiles.
__device__ float ds_factor(const float* tiles, int num_tiles) {
    if (!IS_FP16<Element>) return 1.0f;
    float largest = 0.0f;
    for (int n = threadIdx.x % 32; n < num_tiles; n += 32) largest = fmaxf(largest, tiles[n]);
    int exponent;
    frexpf(warp_max(largest), &exponent);
    return ldexpf(1.0f, -exponent - 4);
}

// What a block computes: of a head, counted over all batches, the n-th of num_blocks. Without a mask
// the heads come one after another. With one the heads of a section, whose tiles fit into the L2 cache,
// come together: first the blocks 0, which are the longest, of all of them.
struct Work {
    int n, head;
    __device__ Work(int num_blocks, int num_heads, int section_heads) {
        section_heads = CAUSAL ? min(section_heads, num_heads) : 1;
        const int first_head = blockIdx.x / (section_heads * num_blocks) * section_heads;
        const int heads = min(section_heads, num_heads - first_head);
        const int place = blockIdx.x - first_head * num_blocks;
        n = place / heads;
        head = first_head + place % heads;
    }
};

// Of each query: lse in units of log2, +inf where no key is visible and past the last query, so that
// P = 2^(S - lse) is 0 there; delta = rowsum(dO * O)  [batch, heads, seq_q in whole tiles]
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    attention_delta(const __grid_constant__ BackwardParams p) {
    griddepcontrol_launch_dependents();  // attention_dq may begin to load
    const int q_tiles = (p.seq_q + DKV_QUERIES - 1) / DKV_QUERIES;
    const int head = blockIdx.x / q_tiles % p.heads;
    const int batch = blockIdx.x / q_tiles / p.heads;
    const Element* o = p.o + batch * p.o_stride.batch + head * p.o_stride.head;
    const Element* dout = p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head;
    Rows& rows = static_cast<Rows*>(p.workspace[0])[blockIdx.x];

    float largest = 0.0f;
    for (int r = threadIdx.x / LANES; r < DKV_QUERIES; r += ROW_THREADS / LANES) {
        const int i = blockIdx.x % q_tiles * DKV_QUERIES + r;
        const int row = min(i, p.seq_q - 1);  // all lanes take part in the shuffles
        float delta = 0.0f;
        for (int d = threadIdx.x % LANES * VEC; d < V_HEAD_DIM; d += LANES * VEC) {
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
            float lse = INFINITY;
            if (i < p.seq_q) {
                lse = p.lse[(int64_t(batch) * p.heads + head) * p.seq_q + i];
                lse = lse == -INFINITY ? INFINITY : lse * LOG2_E;
            }
            rows.lse[r] = lse;
            rows.delta[r] = i < p.seq_q ? delta : 0.0f;
        }
    }
    if (IS_FP16<Element>) {
        auto& of_warps = shared_memory<WarpFloats>();
        largest = warp_max(largest);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
        __syncthreads();  // every warp's part is there
        for (float of_warp : of_warps) largest = fmaxf(largest, of_warp);
        if (threadIdx.x == 0) static_cast<float*>(p.workspace[1])[blockIdx.x] = largest;
    }
}

// dQ = scale dS K  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_dq(const __grid_constant__ BackwardParams p) {
    DqMemory& smem = shared_memory<DqMemory>();
    const int q_blocks = (p.seq_q + DQ_QUERIES - 1) / DQ_QUERIES;
    const int group = p.heads / p.kv_heads;
    const Work work(q_blocks, p.batch * p.heads, max(1, SECTION_ROWS / p.seq_k) * group);
    // The last queries first: with a mask they see the most keys.
    const int q_start = (q_blocks - 1 - work.n) * DQ_QUERIES;
    const int head = work.head % p.heads;
    const int batch = work.head / p.heads;
    const int kv_head = head / group;
    // Uniform across the warp; the shuffle tells the compiler so.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    // Causal: query i sees the keys j <= i + offset, so the last query sees the last key.
    const int offset = p.seq_k - p.seq_q;
    const int block_keys = CAUSAL ? min(p.seq_k, q_start + DQ_QUERIES + offset) : p.seq_k;
    const int num_tiles = max(0, (block_keys + DQ_KEYS - 1) / DQ_KEYS);

    if (threadIdx.x == 0) {
        mbarrier_init(smem.q_full, 1);
        mbarrier_init(smem.dout_full, 1);
#pragma unroll
        for (int stage = 0; stage < K_STAGES; ++stage) {
            mbarrier_init(smem.k_full[stage], 1);
            mbarrier_init(smem.k_empty[stage], 4 * CONSUMERS);
        }
#pragma unroll
        for (int stage = 0; stage < V_STAGES; ++stage) {
            mbarrier_init(smem.v_full[stage], 1);
            mbarrier_init(smem.v_empty[stage], 4 * CONSUMERS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarriers are initialized

    griddepcontrol_launch_dependents();  // attention_dk_dv may begin to load

    if (warp >= PRODUCER_WARP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp > PRODUCER_WARP || lane > 0) return;
        // ---- load Q and dO, and the tiles
        mbarrier_arrive_expect_tx(smem.q_full, sizeof(smem.q));
        load_tile(smem.q, p.q_map, q_start, head, batch, smem.q_full);
        for (int i = 0; i < num_tiles; ++i) {
            const int k_stage = i % K_STAGES, v_stage = i % V_STAGES;
            Mbarrier &k_full = smem.k_full[k_stage], &v_full = smem.v_full[v_stage];
            wait_for(smem.k_empty[k_stage], i / K_STAGES - 1);
            mbarrier_arrive_expect_tx(k_full, sizeof(smem.k[0]));
            load_tile(smem.k[k_stage], p.k_map, i * DQ_KEYS, kv_head, batch, k_full);
            if (i == 0) {  // after the tile that S needs first
                mbarrier_arrive_expect_tx(smem.dout_full, sizeof(smem.dout));
                load_tile(smem.dout, p.dout_map, q_start, head, batch, smem.dout_full);
            }
            wait_for(smem.v_empty[v_stage], i / V_STAGES - 1);
            mbarrier_arrive_expect_tx(v_full, sizeof(smem.v[0]));
            load_tile(smem.v[v_stage], p.v_map, i * DQ_KEYS, kv_head, batch, v_full);
        }
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    griddepcontrol_wait();  // what attention_delta has written is there
    const int warpgroup = warp / 4;
    const int group_row = 64 * warpgroup;  // the warpgroup's first query in the block
    const int warp_row = 16 * warp;        // and the warp's
    const int warp_keys = CAUSAL ? min(p.seq_k, q_start + warp_row + offset + 1) : p.seq_k;
    const float scale_log2 = p.softmax_scale * LOG2_E;
    const int q_tiles = (p.seq_q + DKV_QUERIES - 1) / DKV_QUERIES;
    const int64_t head_tile = (int64_t(batch) * p.heads + head) * q_tiles;
    const float factor = ds_factor(static_cast<const float*>(p.workspace[1]) + head_tile, q_tiles);
    // Where the last block has no queries for warpgroup 1, it computes what nobody writes.
    const int q_tile = min((q_start + group_row) / DKV_QUERIES, q_tiles - 1);
    const Rows& rows = static_cast<const Rows*>(p.workspace[0])[head_tile + q_tile];
    float lse[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        lse[r] = rows.lse[warp_row % DKV_QUERIES + 8 * r + lane / 4];
        delta[r] = rows.delta[warp_row % DKV_QUERIES + 8 * r + lane / 4];
    }

    // A lane's s_acc[n][2 r + i], with r and i 0 or 1, is the element of S in row 8 r + lane / 4 of
    // its warp's 16 and column 8 n + 2 (lane % 4) + i; so are the others.
    float dq_acc[DIM / 8][4] = {};
    uint32_t q_frag[DIM / 16][4], dout_frag[V_DIM / 16][4];  // [16, 16] each, of the warp's queries
    uint32_t ds_frag[DQ_KEYS / 16][4] = {};  // in use until the next tile's first wait
    wait_for(smem.q_full, 0);
    if (Q_IN_REGISTERS) load_rows(q_frag, smem.q, warp_row);

    if (warpgroup == 1) pass_turn(warpgroup);
    wait_for_turn(warpgroup);

    // ---- for each K/V tile
    for (int i = 0; i < num_tiles; ++i) {
        const int k_stage = i % K_STAGES, v_stage = i % V_STAGES;
        const int k_start = i * DQ_KEYS;

        // ---- S = Q K^T, dP = dO V^T  [DQ_QUERIES, DQ_KEYS], [64, DQ_KEYS] in each warpgroup
        float s_acc[DQ_KEYS / 8][4], dp_acc[DQ_KEYS / 8][4];
        wait_for(smem.k_full[k_stage], i / K_STAGES);
        multiply<Q_IN_REGISTERS>(s_acc, q_frag, smem.q, group_row, smem.k[k_stage]);
        wgmma_wait_group<1>(dq_acc, ds_frag);  // dQ of the tile before
        if (i > 0) release(smem.k_empty[(i - 1) % K_STAGES]);
        if (i == 0) {
            wait_for(smem.dout_full, 0);
            if (DOUT_IN_REGISTERS) load_rows(dout_frag, smem.dout, warp_row);
        }
        wait_for(smem.v_full[v_stage], i / V_STAGES);
        multiply<DOUT_IN_REGISTERS>(dp_acc, dout_frag, smem.dout, group_row, smem.v[v_stage]);
        pass_turn(warpgroup);

        // ---- P = 2^(S - lse), dS = P * (dP - delta)
        wgmma_wait_group<1>(s_acc);
#pragma unroll
        for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& s = s_acc[n][i];
                s = ex2_approx_ftz(s * scale_log2 - lse[i / 2]);
            }
        if (k_start + DQ_KEYS > warp_keys) {  // some are hidden
#pragma unroll
            for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = q_start + warp_row + 8 * (i / 2) + lane / 4;
                    const int row_keys = CAUSAL ? min(p.seq_k, row + offset + 1) : p.seq_k;
                    const int key = k_start + 8 * n + 2 * (lane % 4) + i % 2;
                    if (key >= row_keys) s_acc[n][i] = 0.0f;
                }
        }
        wgmma_wait_group<0>(dp_acc);
        release(smem.v_empty[v_stage]);
#pragma unroll
        for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s_acc[n][i] *= (dp_acc[n][i] - delta[i / 2]) * factor;
        convert(ds_frag, s_acc);

        // ---- dQ += dS K  [DQ_QUERIES, HEAD_DIM], [64, DIM] in each warpgroup
        wait_for_turn(warpgroup);
        add_product(dq_acc, ds_frag, smem.k[k_stage]);
    }
    if (warpgroup == 0) pass_turn(warpgroup);
    wgmma_wait_group<0>(dq_acc, ds_frag);

    // ---- write dQ, in the place of Q
    bar_sync(GROUP_BARRIER + warpgroup, 128);  // all of the warpgroup's products have read Q
    write(p.dq_map, q_start + warp_row, head, batch, smem.q, warp_row, dq_acc,
          p.softmax_scale / factor);
    if (lane == 0) cp_async_bulk_wait_group_read<0>();
}

// dK = scale dS^T Q  [batch, kv_heads, seq_k, HEAD_DIM] and dV = P^T dO  [the same, V_HEAD_DIM], summed
// over the query heads of a group
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_dk_dv(const __grid_constant__ BackwardParams p) {
    DkDvMemory& smem = shared_memory<DkDvMemory>();
    const int k_blocks = (p.seq_k + DKV_KEYS - 1) / DKV_KEYS;
    const int group = p.heads / p.kv_heads;
    // The first keys first: with a mask the most queries see them.
    const Work work(k_blocks, p.batch * p.kv_heads, max(1, SECTION_ROWS / p.seq_q));
    const int k_start = work.n * DKV_KEYS;
    const int kv_head = work.head % p.kv_heads;
    const int batch = work.head / p.kv_heads;
    const int first_head = kv_head * group;
    // Uniform across the warp; the shuffle tells the compiler so.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    // Causal: key j is seen by the queries i >= j - offset.
    const int offset = p.seq_k - p.seq_q;
    const int q_tiles = (p.seq_q + DKV_QUERIES - 1) / DKV_QUERIES;
    const int first_tile = CAUSAL ? max(0, k_start - offset) / DKV_QUERIES : 0;
    const int64_t group_tile = (int64_t(batch) * p.heads + first_head) * q_tiles;

    if (threadIdx.x == 0) {
        mbarrier_init(smem.k_full, 1);
        mbarrier_init(smem.v_full, 1);
        mbarrier_init(smem.p_full, 4);
        mbarrier_init(smem.p_empty, 4);
#pragma unroll
        for (int stage = 0; stage < DKV_STAGES; ++stage) {
            mbarrier_init(smem.q_full[stage], 1);
            mbarrier_init(smem.dout_full[stage], 1);
            mbarrier_init(smem.q_empty[stage], 4 * CONSUMERS);
            mbarrier_init(smem.dout_empty[stage], 4 * CONSUMERS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarriers are initialized

    if (warp >= PRODUCER_WARP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp > PRODUCER_WARP || lane > 0) return;
        // ---- load K and V, and the tiles
        mbarrier_arrive_expect_tx(smem.k_full, sizeof(smem.k));
        load_tile(smem.k, p.k_map, k_start, kv_head, batch, smem.k_full);
        const Rows* group_rows = static_cast<const Rows*>(p.workspace[0]) + group_tile;
        int i = 0;
        // The last tile first, of all heads, then the one before: with a mask, too, the blocks of a
        // key head read the same tiles at the same time, from the L2 cache.
        for (int tile = q_tiles - 1; tile >= first_tile; --tile)
            for (int n = 0; n < group; ++n, ++i) {
                const int stage = i % DKV_STAGES, q_start = tile * DKV_QUERIES;
                const Rows* rows = group_rows + n * q_tiles + tile;
                Mbarrier &q_full = smem.q_full[stage], &dout_full = smem.dout_full[stage];
                wait_for(smem.q_empty[stage], i / DKV_STAGES - 1);
                mbarrier_arrive_expect_tx(q_full, sizeof(smem.q[0]) + sizeof(Rows));
                load_tile(smem.q[stage], p.q_map, q_start, first_head + n, batch, q_full);
                if (i == 0) {  // after the tile that S needs first
                    mbarrier_arrive_expect_tx(smem.v_full, sizeof(smem.v));
                    load_tile(smem.v, p.v_map, k_start, kv_head, batch, smem.v_full);
                    griddepcontrol_wait();  // the rows are there
                }
                cp_async_bulk_load(&smem.rows[stage], rows, sizeof(Rows), q_full);
                wait_for(smem.dout_empty[stage], i / DKV_STAGES - 1);
                mbarrier_arrive_expect_tx(dout_full, sizeof(smem.dout[0]));
                load_tile(smem.dout[stage], p.dout_map, q_start, first_head + n, batch, dout_full);
            }
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    griddepcontrol_wait();  // what attention_delta has written is there
    const int warpgroup = warp / 4;
    const int group_row = SPLIT ? 0 : 64 * warpgroup;  // the warpgroup's first key in the block
    const int warp_row = group_row + warp % 4 * 16;    // and the warp's
    const int num_tiles = group * (q_tiles - first_tile);
    const float scale_log2 = p.softmax_scale * LOG2_E;
    const float factor =
        ds_factor(static_cast<const float*>(p.workspace[1]) + group_tile, group * q_tiles);
    const float dk_scale = p.softmax_scale / factor;

    // A lane's s_acc[n][2 r + i], with r and i 0 or 1, is the element of S^T in row 8 r + lane / 4 of
    // its warp's 16 and column 8 n + 2 (lane % 4) + i; so are the others.
    using Scores = float[DKV_QUERIES / 8][4];

    // ---- P = 2^(S - lse). Keys past the last one need no mask: they are rows that nobody writes.
    const auto compute_p = [&](Scores& s_acc, int stage, int q_start) {
        const bool has_hidden = CAUSAL && k_start + warp_row + 15 > q_start + offset;
#pragma unroll
        for (int n = 0; n < DKV_QUERIES / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int col = 8 * n + 2 * (lane % 4) + i % 2;
                float& s = s_acc[n][i];
                s = ex2_approx_ftz(s * scale_log2 - smem.rows[stage].lse[col]);
            }
        if (has_hidden) {
#pragma unroll
            for (int n = 0; n < DKV_QUERIES / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = k_start + warp_row + 8 * (i / 2) + lane / 4;
                    const int row = q_start + 8 * n + 2 * (lane % 4) + i % 2;
                    if (key > row + offset) s_acc[n][i] = 0.0f;
                }
        }
    };
    // ---- dS = P * (dP - delta)
    const auto compute_ds = [&](Scores& dp_acc, const Scores& p_acc, int stage) {
#pragma unroll
        for (int n = 0; n < DKV_QUERIES / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float delta = smem.rows[stage].delta[8 * n + 2 * (lane % 4) + i % 2];
                dp_acc[n][i] = p_acc[n][i] * (dp_acc[n][i] - delta) * factor;
            }
    };

    uint32_t k_frag[DIM / 16][4], v_frag[V_DIM / 16][4];  // [16, 16] each, of the warp's keys
    // In use until the next tile's first wait.
    uint32_t p_frag[DKV_QUERIES / 16][4] = {}, ds_frag[DKV_QUERIES / 16][4] = {};
    const int first_row = k_start + warp_row;
    if (!SPLIT) {
        float dk_acc[DIM / 8][4] = {}, dv_acc[V_DIM / 8][4] = {};
        wait_for(smem.k_full, 0);

        if (warpgroup == 1) pass_turn(warpgroup);
        wait_for_turn(warpgroup);

        // ---- for each Q/dO tile, of each head of the group
        for (int i = 0, head = 0, tile = q_tiles - 1; i < num_tiles; ++i) {
            const int stage = i % DKV_STAGES;

            // ---- S^T = K Q^T, dP^T = V dO^T  [DKV_KEYS, DKV_QUERIES], 64 rows in each warpgroup
            Scores s_acc, dp_acc;
            wait_for(smem.q_full[stage], i / DKV_STAGES);
            multiply<false>(s_acc, k_frag, smem.k, group_row, smem.q[stage]);
            wgmma_wait_group<1>(dv_acc, dk_acc, p_frag, ds_frag);  // of the tile before
            if (i > 0) {
                release(smem.q_empty[(i - 1) % DKV_STAGES]);
                release(smem.dout_empty[(i - 1) % DKV_STAGES]);
            }
            if (i == 0) wait_for(smem.v_full, 0);
            wait_for(smem.dout_full[stage], i / DKV_STAGES);
            multiply<false>(dp_acc, v_frag, smem.v, group_row, smem.dout[stage]);
            pass_turn(warpgroup);

            // ---- dV += P^T dO, dK += dS^T Q  [DKV_KEYS, V_HEAD_DIM and HEAD_DIM], of it 64 rows in
            // each warpgroup
            wgmma_wait_group<1>(s_acc);
            compute_p(s_acc, stage, tile * DKV_QUERIES);
            convert(p_frag, s_acc);
            wgmma_wait_group<0>(dp_acc);
            compute_ds(dp_acc, s_acc, stage);
            convert(ds_frag, dp_acc);
            wait_for_turn(warpgroup);
            add_product(dv_acc, p_frag, smem.dout[stage]);
            add_product(dk_acc, ds_frag, smem.q[stage]);
            if (++head == group) head = 0, --tile;
        }
        if (warpgroup == 0) pass_turn(warpgroup);
        wgmma_wait_group<0>(dv_acc, dk_acc, p_frag, ds_frag);

        // ---- write dK and dV, in the places of K and V
        bar_sync(GROUP_BARRIER + warpgroup, 128);  // all of the warpgroup's products have read them
        write(p.dk_map, first_row, kv_head, batch, smem.k, warp_row, dk_acc, dk_scale);
        write(p.dv_map, first_row, kv_head, batch, smem.v, warp_row, dv_acc, 1.0f);
    } else if (warpgroup == 0) {
        float dv_acc[V_DIM / 8][4] = {};
        wait_for(smem.k_full, 0);
        if (K_IN_REGISTERS) load_rows(k_frag, smem.k, warp_row);

        // ---- for each Q/dO tile, of each head of the group
        for (int i = 0, head = 0, tile = q_tiles - 1; i < num_tiles; ++i) {
            const int stage = i % DKV_STAGES;

            // ---- S^T = K Q^T  [DKV_KEYS, DKV_QUERIES]
            Scores s_acc;
            wait_for(smem.q_full[stage], i / DKV_STAGES);
            multiply<K_IN_REGISTERS>(s_acc, k_frag, smem.k, group_row, smem.q[stage]);
            wgmma_wait_group<1>(dv_acc, p_frag);  // of the tile before
            if (i > 0) release(smem.dout_empty[(i - 1) % DKV_STAGES]);
            wgmma_wait_group<0>(s_acc);
            compute_p(s_acc, stage, tile * DKV_QUERIES);
            convert(p_frag, s_acc);
            wait_for(smem.p_empty, i - 1);
#pragma unroll
            for (int n = 0; n < DKV_QUERIES / 8; ++n) {
                const float* x = s_acc[n];
                store_float4(smem.p[n][threadIdx.x % 128], make_float4(x[0], x[1], x[2], x[3]));
            }
            release(smem.q_empty[stage]);
            release(smem.p_full);

            // ---- dV += P^T dO  [DKV_KEYS, V_HEAD_DIM]
            wait_for(smem.dout_full[stage], i / DKV_STAGES);
            add_product(dv_acc, p_frag, smem.dout[stage]);
            if (++head == group) head = 0, --tile;
        }
        wgmma_wait_group<0>(dv_acc, p_frag);

        // ---- write dV, in the place of V
        bar_sync(GROUP_BARRIER, 128 * CONSUMERS);  // all products of warpgroup 1 have read V
        write(p.dv_map, first_row, kv_head, batch, smem.v, warp_row, dv_acc, 1.0f);
    } else {
        float dk_acc[DIM / 8][4] = {};
        wait_for(smem.v_full, 0);
        if (V_IN_REGISTERS) load_rows(v_frag, smem.v, warp_row);

        // ---- for each Q/dO tile, of each head of the group
        for (int i = 0; i < num_tiles; ++i) {
            const int stage = i % DKV_STAGES;

            // ---- dP^T = V dO^T  [DKV_KEYS, DKV_QUERIES]
            Scores p_acc, dp_acc;
            wait_for(smem.dout_full[stage], i / DKV_STAGES);
            multiply<V_IN_REGISTERS>(dp_acc, v_frag, smem.v, group_row, smem.dout[stage]);
            wgmma_wait_group<1>(dk_acc, ds_frag);  // of the tile before
            if (i > 0) release(smem.q_empty[(i - 1) % DKV_STAGES]);
            wait_for(smem.p_full, i);
#pragma unroll
            for (int n = 0; n < DKV_QUERIES / 8; ++n) {
                const float4 x = load_float4(smem.p[n][threadIdx.x % 128]);
                p_acc[n][0] = x.x, p_acc[n][1] = x.y, p_acc[n][2] = x.z, p_acc[n][3] = x.w;
            }
            release(smem.p_empty);
            wgmma_wait_group<0>(dp_acc);
            release(smem.dout_empty[stage]);
            wait_for(smem.q_full[stage], i / DKV_STAGES);
            compute_ds(dp_acc, p_acc, stage);
            convert(ds_frag, dp_acc);

            // ---- dK += dS^T Q  [DKV_KEYS, HEAD_DIM]
            add_product(dk_acc, ds_frag, smem.q[stage]);
        }
        wgmma_wait_group<0>(dk_acc, ds_frag);

        // ---- write dK, in the place of K
        bar_sync(GROUP_BARRIER, 128 * CONSUMERS);  // all products of warpgroup 0 have read K
        write(p.dk_map, first_row, kv_head, batch, smem.k, warp_row, dk_acc, dk_scale);
    }
    if (lane == 0) cp_async_bulk_wait_group_read<0>();
}
