// b12 -- head_dim beyond 256: each block of a cluster has a slice of a head's columns
// taken: only for large head_dim; up to 256, the same for v, there is one slice: b10 and b07 are faster
// change: from b07. The blocks of a cluster have the same work, and each its slice of the columns of Q, K
//     and their gradients, and of V, dO and dV, up to 256. Of each 16 columns of S and dP one block is the
//     owner: the others send it their sums over their slices, it computes P and dS there, and sends them
//     back, rounded, to be multiplied with each block's slices. In both kernels a block has 64 rows, and
//     one warpgroup for S and P, one for dP and dS, as b07 had above head_dim 128 for dK and dV. The next
//     tile's S and dP are multiplied while this tile's are on their way, and what a block keeps is in
//     registers as far as it fits
// why: dK and dV of 64 keys and 512 columns are 512 floats for each thread of a warpgroup. In slices that
//     follow one after the other, S and dP would be computed again for each: at 512 11 products instead
//     of 7. Predicted: at 512 0.8 times the TFLOP/s of b07 at 256, like v15 and for the same reason: a
//     block does what it does there, and moves S, P, dP and dS
// limits: bf16, fp16; head_dim 8-1024 by 8, v's may differ; sm_90a
#include "backward.cuh"
#include "bulk.cuh"
#include "copy.cuh"
#include "dependent_launch.cuh"
#include "mma.cuh"
#include "slices.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute; one more loads
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER_WARP = 4 * CONSUMERS;  // its first lane starts all loads
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int CONSUMER_BARRIER = 1;  // 0 is that of __syncthreads
constexpr int PANEL = 64;            // columns of a panel: 128 bytes, the swizzle's width
constexpr int ceil_div(int x, int y) { return (x + y - 1) / y; }
constexpr int larger(int x, int y) { return x > y ? x : y; }
constexpr int MOST_COLUMNS = larger(HEAD_DIM, V_HEAD_DIM);
// The most columns of Q and K in a slice: five panels fit into two slices, beside four of V and dO.
constexpr int MOST_SLICE = ceil_div(HEAD_DIM, 2 * PANEL) == 5 ? 5 * PANEL : 4 * PANEL;
// Blocks of a cluster.
constexpr int SLICES = larger(ceil_div(HEAD_DIM, MOST_SLICE), ceil_div(V_HEAD_DIM, 4 * PANEL));
// Panels of a slice of Q and K, and of one of V and dO. The last slices may have fewer, or none.
constexpr int PANELS = ceil_div(ceil_div(HEAD_DIM, PANEL), SLICES);
constexpr int V_PANELS = ceil_div(ceil_div(V_HEAD_DIM, PANEL), SLICES);
// Their columns; zeros from HEAD_DIM on, or from V_HEAD_DIM on.
constexpr int SLICE = PANELS * PANEL, V_SLICE = V_PANELS * PANEL;
// Rows of two tensors that are 16 MB: all SMs read them from either half of the L2 cache.
constexpr int SECTION_ROWS = (16 << 20) / ((HEAD_DIM + V_HEAD_DIM) * sizeof(Element));

// A block keeps ROWS rows of two tensors, and takes others TILE by TILE: attention_dq keeps Q and dO and
// takes K and V, attention_dk_dv the other way round.
constexpr int ROWS = 64;
constexpr int TILE = 32;
// Panels of dQ that a warpgroup sums: every second one. Where their number is odd, both have the last
// one, and warpgroup 0 writes it.
constexpr int DQ_PANELS = (PANELS + 1) / 2;
// Panels of Q, or dO, that registers have room for beside dQ; and of K, or V, beside so many of dV, or dK.
constexpr int DQ_KEPT_PANELS = 4;
constexpr int DKV_KEPT_PANELS[] = {0, 4, 4, 3, 2, 1};

// A tile as TMA writes it: panels, in each of which 8 rows of 128 bytes are swizzled.
template <int NUM_PANELS, int NUM_ROWS>
using Tile = Element[NUM_PANELS][NUM_ROWS][PANEL];

// S and dP of a tile, or their transposes, in float. A lane's element [n][2 r + i], with r and i 0 or 1,
// is the one in row 8 r + lane / 4 of its warp's 16 and column 8 n + 2 (lane % 4) + i.
using Scores = float[TILE / 8][4];
// P or dS, rounded, in the layout of wgmma's operand A: [16, 16] of the warp's rows each.
using Fragments = uint32_t[TILE / 16][4];

// Of a tile's queries: lse in units of log2, and delta.
struct Rows {
    float lse[TILE], delta[TILE];
};

// 16 columns of S are a unit, whose owner is one of the blocks: it adds up S and dP of all slices there,
// computes P and dS, and sends them to the others. Of more than two blocks some own none.
constexpr int UNITS = TILE / 16;
constexpr int OWN_UNITS = (UNITS + SLICES - 1) / SLICES;  // of a block, at most
__device__ int owner_of(int unit) { return unit % SLICES; }

// Threads send those of the same number what lies in their registers: to the owner S or dP of the other
// slices,
struct Sums {
    alignas(16) float x[SLICES > 1 ? SLICES - 1 : 1][OWN_UNITS][2][128][4];
    Mbarrier full;  // all have arrived
};
// and from the owners P or dS, rounded.
struct Shares {
    alignas(16) float x[UNITS][128][4];
    Mbarrier full;  // those of all units have arrived
};

// What S, or dP, is a product of.
template <int NUM_PANELS, int STAGES>
struct alignas(SWIZZLE_128B_TILE) OperandsOf {
    Tile<NUM_PANELS, ROWS> kept;           // Q or dO, or K or V; in the end dQ, dK or dV
    Tile<NUM_PANELS, TILE> tiles[STAGES];  // of K or V, or Q or dO
};

// With so many tiles at a time. Of what there are two, the first is for warpgroup 0's S, the second for
// warpgroup 1's dP.
template <int STAGES>
struct SharedMemoryOf {
    OperandsOf<PANELS, STAGES> of_s;
    OperandsOf<V_PANELS, STAGES> of_dp;
    // [i % 2] is tile i's. In consumed all warps of the other blocks say that they have read what they were
    // sent of it, so that this block may send again.
    Sums sums[2][2];  // of a warpgroup; with one slice only for P, see pass_p()
    Shares prob[2], ds[2];
    Mbarrier consumed[2];
    Rows rows[STAGES];  // of the queries of a tile: come with it
    // What is kept, or a tile, has arrived; and every warp has read both tiles.
    Mbarrier kept_full, full[2][STAGES], empty[STAGES];
    Mbarrier p_full, p_read;  // P of the block's own units is there, and warpgroup 1 has read it
};

constexpr int MOST_SMEM = 227 * 1024;  // bytes a block
// The next tile's S and dP are started while the one before this may be in use.
constexpr int NUM_STAGES = sizeof(SharedMemoryOf<4>) <= MOST_SMEM ? 4 : 3;
using SharedMemory = SharedMemoryOf<NUM_STAGES>;
template <int NUM_PANELS>
using Operands = OperandsOf<NUM_PANELS, NUM_STAGES>;
static_assert(sizeof(SharedMemory) <= MOST_SMEM);
constexpr int KEPT_BYTES = sizeof(SharedMemory::of_s.kept) + sizeof(SharedMemory::of_dp.kept);

constexpr int ROW_THREADS = 128 * CONSUMERS;  // of attention_delta
constexpr int LANES = 16;                     // threads that share a row of it
using WarpFloats = float[ROW_THREADS / 32];

template <typename T>
constexpr bool IS_FP16 = false;
template <>
constexpr bool IS_FP16<fp16> = true;

constexpr int BLOCK_COLUMNS = ceil_div(MOST_COLUMNS, SLICES);  // of them a grid has SLICES
static_assert(ceil_div(MOST_COLUMNS, BLOCK_COLUMNS) == SLICES);

extern "C" {
__constant__ int32_t kernels_start_early = 1;
__constant__ BackwardDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_delta",
                 .grid = {{SEQ_Q, TILE}, {HEADS, 1}, {BATCH, 1}},
                 .threads = ROW_THREADS,
                 .smem_bytes = sizeof(WarpFloats)},
                {.name = "attention_dq",
                 .grid = {{COLUMNS, BLOCK_COLUMNS}, {SEQ_Q, ROWS}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory)},
                {.name = "attention_dk_dv",
                 .grid = {{COLUMNS, BLOCK_COLUMNS}, {SEQ_K, ROWS}, {KV_HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory)}},
    .workspace = {{.element_bytes = sizeof(Rows) / TILE,
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, TILE}}},
                  {.element_bytes = IS_FP16<Element> ? sizeof(float) : 0,  // of a tile: max |dO|
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, 1}}}},
    .q_box = {TILE, PANEL, SWIZZLE_128B},
    .k_box = {TILE, PANEL, SWIZZLE_128B},
    .v_box = {TILE, PANEL, SWIZZLE_128B},
    .dout_box = {TILE, PANEL, SWIZZLE_128B},
    .dq_box = {16, PANEL, SWIZZLE_128B},
    .dk_box = {16, PANEL, SWIZZLE_128B},
    .dv_box = {16, PANEL, SWIZZLE_128B},
};
}

// Starts tile[panel][r][col] = tensor[row + r][first_column + PANEL panel + col], zeros past its ends. Called
// by one thread.
template <int NUM_PANELS, int NUM_ROWS>
__device__ void load_tile(Tile<NUM_PANELS, NUM_ROWS>& tile, const TensorMap& map, int first_column,
                          int row, int head, int batch, Mbarrier& full) {
#pragma unroll
    for (int panel = 0; panel < NUM_PANELS; ++panel)
#pragma unroll
        for (int r = 0; r < NUM_ROWS; r += TILE)
            cp_async_bulk_tensor_load(tile[panel][r], map, first_column + PANEL * panel, row + r,
                                      head, batch, full);
}

// Describes what lies so many elements further on: the lowest bits are the address, in units of 16
// bytes. That is one addition; from the address each takes three instructions, one after the other.
__device__ uint64_t advance(uint64_t descriptor, int elements) {
    return descriptor >> 32 << 32 | uint32_t(descriptor) + elements / VEC;
}

// Describes the columns d ... d + 15 of a tile.
template <int NUM_PANELS, int NUM_ROWS>
__device__ uint64_t k_major(const Tile<NUM_PANELS, NUM_ROWS>& tile, int d) {
    return advance(matrix_descriptor<SWIZZLE_128B>(tile[0][0], 0, SWIZZLE_128B_TILE),
                   d / PANEL * NUM_ROWS * PANEL + d % PANEL);
}

// Describes the rows row ... row + 15 of a tile, from a panel on.
template <int NUM_PANELS>
__device__ uint64_t mn_major(const Tile<NUM_PANELS, TILE>& tile, int row, int panel) {
    return advance(matrix_descriptor<SWIZZLE_128B>(tile[0][0], sizeof(tile[0]), SWIZZLE_128B_TILE),
                   (panel * TILE + row) * PANEL);
}

// The accumulators of so many panels, from the n-th on.
template <int NUM_PANELS, int TILES>
__device__ auto panels_of(float (&acc)[TILES][4], int n) -> float (&)[NUM_PANELS * PANEL / 8][4] {
    return reinterpret_cast<float (&)[NUM_PANELS * PANEL / 8][4]>(acc[PANEL / 8 * n]);
}

// tensor[first_row + r][first_column + c] = factor acc[r][c], rounded, of a warp's 16 rows and the
// columns of a panel, which take the place of rows of `panel`. TMA leaves out what lies past the tensor's
// ends.
__device__ void write(const TensorMap& map, int first_column, int first_row, int head, int batch,
                      Element (&panel)[ROWS][PANEL], const float (*acc)[4], float factor) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16;
#pragma unroll
    for (int n = 0; n < PANEL / 8; n += 2) {
        uint32_t frag[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* x = &acc[n + i / 2][2 * (i % 2)];
            frag[i] = cvt_rn_x2<Element>(x[0] * factor, x[1] * factor);
        }
        // 8 chunks of a row are permuted.
        const int d = 8 * n + lane / 16 * 8, r = row + lane % 16;
        stmatrix_x4(&panel[r][d ^ r % 8 * VEC], frag);
    }
    fence_proxy_async();  // by each writer, before the barrier
    __syncwarp();
    if (lane == 0) {
        cp_async_bulk_tensor_store(map, first_column, first_row, head, batch, panel[row]);
        cp_async_bulk_commit_group();
    }
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

// What a cluster computes: of a head, counted over all batches, the n-th of num_blocks. Without a mask
// the heads come one after another. With one the heads of a section, whose tiles fit into the L2 cache,
// come together: first the clusters 0, which are the longest, of all of them.
struct Work {
    int n, head;
    __device__ Work(int num_blocks, int num_heads, int section_heads) {
        section_heads = CAUSAL ? min(section_heads, num_heads) : 1;
        const int cluster = blockIdx.x / SLICES;
        const int first_head = cluster / (section_heads * num_blocks) * section_heads;
        const int heads = min(section_heads, num_heads - first_head);
        const int place = cluster - first_head * num_blocks;
        n = place / heads;
        head = first_head + place % heads;
    }
};

// Of each query: lse in units of log2, +inf where no key is visible and past the last query, so that
// P = 2^(S - lse) is 0 there; delta = rowsum(dO * O)  [batch, heads, seq_q in whole tiles]
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    attention_delta(const __grid_constant__ BackwardParams p) {
    griddepcontrol_launch_dependents();  // attention_dq may begin to load
    const int q_tiles = (p.seq_q + TILE - 1) / TILE;
    const int head = blockIdx.x / q_tiles % p.heads;
    const int batch = blockIdx.x / q_tiles / p.heads;
    const Element* o = p.o + batch * p.o_stride.batch + head * p.o_stride.head;
    const Element* dout = p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head;
    Rows& rows = static_cast<Rows*>(p.workspace[0])[blockIdx.x];

    float largest = 0.0f;
    for (int r = threadIdx.x / LANES; r < TILE; r += ROW_THREADS / LANES) {
        const int i = blockIdx.x % q_tiles * TILE + r;
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

// What both kernels do: a walk over tiles, in which out += X B of the P or dS that the warpgroup computes
// of each tile. Of what is kept, the first panels are in registers as well, [16, 16] of the warp's rows each,
// which spares shared memory their reading for each tile.
struct Walk {
    SharedMemory& smem;
    int warpgroup, num_tiles;
    int rank = SLICES > 1 ? cluster_rank() : 0;

    // Of tile i: where it is, and how often that has been filled before.
    __device__ static int stage(int i) { return i % NUM_STAGES; }
    __device__ static int phase(int i) { return i / NUM_STAGES; }

    __device__ int own_units() const { return (UNITS - rank + SLICES - 1) / SLICES; }

    __device__ void wait_for_tile(int n, int i) const {
        wait_for(smem.full[n][stage(i)], phase(i));
    }
    template <int N, int NUM_PANELS>
    __device__ void load_kept(uint32_t (&kept)[N][4], const Operands<NUM_PANELS>& operands) const {
        wait_for(smem.kept_full, 0);
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
        for (int d = 0; d < 16 * N; d += 16) {
            const int column = (d + lane / 16 * 8) % PANEL;
            ldmatrix_x4(kept[d / 16], &operands.kept[d / PANEL][row][column ^ row % 8 * VEC]);
        }
    }
    // Starts S or dP = A B^T  [ROWS, TILE] of the slice, of what is kept and of a tile.
    template <int N, int NUM_PANELS>
    __device__ void start_scores(Scores& acc, uint32_t (&kept)[N][4],
                                 const Operands<NUM_PANELS>& operands, int i) const {
        wait_for_tile(warpgroup, i);
        wgmma_fence(acc, kept);
#pragma unroll
        for (int d = 0; d < NUM_PANELS * PANEL; d += 16) {
            const uint64_t b = k_major(operands.tiles[stage(i)], d);
            if (d < 16 * N)
                wgmma_m64nNk16<Element, K_MAJOR>(acc, kept[d / 16], b, d > 0);
            else
                wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(acc, k_major(operands.kept, d), b, d > 0);
        }
        wgmma_commit_group();
    }
    // Starts acc += X B of the columns of B from a panel on.
    template <int N, int NUM_PANELS>
    __device__ static void start_product(float (&acc)[N][4], Fragments& x,
                                         const Tile<NUM_PANELS, TILE>& b, int panel) {
        wgmma_fence(acc, x);
#pragma unroll
        for (int j = 0; j < TILE; j += 16)
            wgmma_m64nNk16<Element, MN_MAJOR>(acc, x[j / 16], mn_major(b, j, panel), true);
    }

    // Sends the units that the block does not own to their owners.
    __device__ void send(const Scores& acc, int i) const {
        Sums& sums = smem.sums[warpgroup][i % 2];
        if (SLICES > 1) wait_for(smem.consumed[i % 2], i / 2 - 1);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const int owner = owner_of(unit);
            if (SLICES == 1 || owner == rank) continue;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float* x = acc[2 * unit + n];
                st_async(sums.x[rank - (rank > owner)][unit / SLICES][n][threadIdx.x % 128],
                         make_float4(x[0], x[1], x[2], x[3]), sums.full, owner);
            }
        }
    }
    // What it owns += that of the others, in the order of their ranks.
    __device__ void receive(Scores& acc, int i) const {
        Sums& sums = smem.sums[warpgroup][i % 2];
        if (SLICES == 1 || own_units() == 0) return;
        if (threadIdx.x % 128 == 0)
            mbarrier_arrive_expect_tx(sums.full, own_units() * (sizeof(sums.x) / OWN_UNITS));
        wait_for(sums.full, i / 2);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            if (owner_of(unit) != rank) continue;
#pragma unroll
            for (int from = 0; from < SLICES - 1; ++from)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float4 x = load_float4(sums.x[from][unit / SLICES][n][threadIdx.x % 128]);
                    float* sum = acc[2 * unit + n];
                    sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
                }
        }
    }

    // Gives P or dS of a unit, rounded, to all blocks; end_sharing() when it has given those it owns.
    __device__ void share(Shares& shares, int unit, const float (*acc)[4]) const {
        uint32_t frag[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            frag[i] = cvt_rn_x2<Element>(acc[i / 2][2 * (i % 2)], acc[i / 2][2 * (i % 2) + 1]);
        float4 x;
        memcpy(&x, frag, sizeof(x));
        auto& to = shares.x[unit][threadIdx.x % 128];
        store_float4(to, x);
#pragma unroll
        for (int step = 1; step < SLICES; ++step)
            st_async(to, x, shares.full, (rank + step) % SLICES);
    }
    __device__ void end_sharing(Shares& shares) const {
        __syncwarp();
        if (threadIdx.x % 128 == 0)
            mbarrier_arrive_expect_tx(shares.full,
                                      (UNITS - own_units()) * (sizeof(shares.x) / UNITS));
        else if (threadIdx.x % 32 == 0)
            mbarrier_arrive(shares.full);
    }
    // x = P or dS of all units
    __device__ void gather(Fragments& x, Shares& shares, int i) const {
        wait_for(shares.full, i / 2);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const float4 share = load_float4(shares.x[unit][threadIdx.x % 128]);
            memcpy(x[unit], &share, sizeof(share));
        }
    }

    // P of a unit goes to warpgroup 1 of this block as it is, in the place of what another block has sent:
    // rounded, it would make dS as wrong in the same direction wherever P is the same.
    __device__ void pass_p(const float (*p_acc)[4], int i, int unit) const {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float* x = p_acc[n];
            store_float4(smem.sums[0][i % 2].x[0][unit / SLICES][n][threadIdx.x % 128],
                         make_float4(x[0], x[1], x[2], x[3]));
        }
    }
    // dP of a unit becomes dS = P * (dP - delta).
    template <typename Delta>
    __device__ void compute_ds(float (*dp_acc)[4], int i, int unit, const Delta& delta,
                               float factor) const {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float4 x =
                load_float4(smem.sums[0][i % 2].x[0][unit / SLICES][n][threadIdx.x % 128]);
            const float prob[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float& dp = dp_acc[n][k];
                dp = prob[k] * (dp - delta(2 * unit + n, k)) * factor;
            }
        }
    }

    // Lets the other blocks send of the next tile but one. What has been read has been used by now, all of it
    // by what a product reads that has started: a relaxed arrival does not wait for loads.
    __device__ void release_sent(int i) const {
        const int lane = threadIdx.x % 32;
        __syncwarp();
        if (lane > 0 && lane < SLICES)
            mbarrier_arrive_cluster_relaxed(smem.consumed[i % 2], (rank + lane) % SLICES);
    }

    // For tile i, of whose operands S or dP is the product, compute(s, i, unit) makes P or dS of S or dP of a
    // unit that the block owns, and shares it; end(i) says that it has shared them all; gather(i) waits for
    // all units; and multiply(i) starts the product that adds to the accumulators, and reads and writes
    // `registers`.
    template <int MOST_KEPT, int NUM_PANELS, typename Compute, typename End, typename Gather,
              typename Multiply, typename... Registers>
    __device__ void run(const Operands<NUM_PANELS>& operands, const Compute& compute,
                        const End& end, const Gather& gather, const Multiply& multiply,
                        Registers&... registers) const {
        Scores acc, next;
        uint32_t kept[(NUM_PANELS < MOST_KEPT ? NUM_PANELS : MOST_KEPT) * PANEL / 16][4];
        if (num_tiles > 0) {
            load_kept(kept, operands);
            start_scores(acc, kept, operands, 0);
            wgmma_wait_group<0>(acc);
            send(acc, 0);
        }
        for (int i = 0; i < num_tiles; ++i) {
            // Behind the last tile once more that one: products under a condition would be serialized.
            start_scores(next, kept, operands, min(i + 1, num_tiles - 1));
            wgmma_wait_group<1>(registers...);
            if (i > 0) release(smem.empty[stage(i - 1)]);
            receive(acc, i);
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit)
                if (owner_of(unit) == rank) compute(&acc[2 * unit], i, unit);
            end(i);
            wgmma_wait_group<0>(next);
            if (i + 1 < num_tiles) send(next, i + 1);
            gather(i);
            multiply(i);
            wgmma_commit_group();
            release_sent(i);
#pragma unroll
            for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) acc[n][k] = next[n][k];
        }
        wgmma_wait_group<0>(registers...);
    }
};

// Initializes the mbarriers.
__device__ void init_barriers(SharedMemory& smem) {
    if (threadIdx.x == 0) {
        mbarrier_init(smem.kept_full, 1);
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(smem.full[0][stage], 1);
            mbarrier_init(smem.full[1][stage], 1);
            mbarrier_init(smem.empty[stage], 4 * CONSUMERS);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(smem.sums[0][n].full, 1);
            mbarrier_init(smem.sums[1][n].full, 1);
            mbarrier_init(smem.prob[n].full, 4);
            mbarrier_init(smem.ds[n].full, 4);
            if (SLICES > 1) mbarrier_init(smem.consumed[n], 4 * CONSUMERS * (SLICES - 1));
        }
        mbarrier_init(smem.p_full, 4);
        mbarrier_init(smem.p_read, 4);
        fence_mbarrier_init();
    }
    cluster_arrive();
    cluster_wait();  // the mbarriers of all blocks are initialized
}

// dQ = scale dS K  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __cluster_dims__(SLICES) __launch_bounds__(NUM_THREADS, 1)
    attention_dq(const __grid_constant__ BackwardParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int q_blocks = (p.seq_q + ROWS - 1) / ROWS;
    const int group = p.heads / p.kv_heads;
    const Work work(q_blocks, p.batch * p.heads, max(1, SECTION_ROWS / p.seq_k) * group);
    // The last queries first: with a mask they see the most keys.
    const int q_start = (q_blocks - 1 - work.n) * ROWS;
    const int head = work.head % p.heads;
    const int batch = work.head / p.heads;
    const int kv_head = head / group;
    // Uniform across the warp; the shuffle tells the compiler so.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    // Causal: query i sees the keys j <= i + offset, so the last query sees the last key.
    const int offset = p.seq_k - p.seq_q;
    const int block_keys = CAUSAL ? min(p.seq_k, q_start + ROWS + offset) : p.seq_k;
    const Walk walk = {smem, warp / 4, max(0, (block_keys + TILE - 1) / TILE)};
    const int first_column = walk.rank * SLICE, v_first_column = walk.rank * V_SLICE;

    init_barriers(smem);
    griddepcontrol_launch_dependents();  // attention_dk_dv may begin to load

    if (warp >= PRODUCER_WARP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 32 * PRODUCER_WARP) {
            // ---- load Q and dO, and the tiles
            for (int i = 0; i < walk.num_tiles; ++i) {
                const int stage = walk.stage(i), k_start = i * TILE;
                Mbarrier &first_full = smem.full[0][stage], &second_full = smem.full[1][stage];
                if (i == 0) {
                    mbarrier_arrive_expect_tx(smem.kept_full, KEPT_BYTES);
                    load_tile(smem.of_s.kept, p.q_map, first_column, q_start, head, batch,
                              smem.kept_full);
                    load_tile(smem.of_dp.kept, p.dout_map, v_first_column, q_start, head, batch,
                              smem.kept_full);
                }
                wait_for(smem.empty[stage], walk.phase(i) - 1);
                mbarrier_arrive_expect_tx(first_full, sizeof(smem.of_s.tiles[stage]));
                load_tile(smem.of_s.tiles[stage], p.k_map, first_column, k_start, kv_head, batch,
                          first_full);
                mbarrier_arrive_expect_tx(second_full, sizeof(smem.of_dp.tiles[stage]));
                load_tile(smem.of_dp.tiles[stage], p.v_map, v_first_column, k_start, kv_head, batch,
                          second_full);
            }
        }
        cluster_arrive();
        cluster_wait();  // as the consumers
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    griddepcontrol_wait();  // what attention_delta has written is there
    const int warpgroup = walk.warpgroup;
    const int first_row = q_start + warp % 4 * 16;  // the warp's first query
    const int warp_keys = CAUSAL ? min(p.seq_k, first_row + offset + 1) : p.seq_k;
    const float scale_log2 = p.softmax_scale * LOG2_E;
    const int q_tiles = (p.seq_q + TILE - 1) / TILE;
    const int64_t head_tile = (int64_t(batch) * p.heads + head) * q_tiles;
    const float factor = ds_factor(static_cast<const float*>(p.workspace[1]) + head_tile, q_tiles);
    const Rows* rows = static_cast<const Rows*>(p.workspace[0]) + head_tile;
    float row_value[2];  // lse for warpgroup 0, delta for the other
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = min(first_row + 8 * r + lane / 4, q_tiles * TILE - 1);
        const Rows& tile = rows[row / TILE];
        row_value[r] = warpgroup == 0 ? tile.lse[row % TILE] : tile.delta[row % TILE];
    }

    float dq_acc[DQ_PANELS * PANEL / 8][4] = {};
    Fragments ds_frag = {};
    // ---- dQ += dS K  [ROWS, SLICE], of it DQ_PANELS panels in each warpgroup
    const auto panel = [&](int n) { return min(CONSUMERS * n + warpgroup, PANELS - 1); };
    const auto multiply = [&](int i) {
        walk.wait_for_tile(0, i);
#pragma unroll
        for (int n = 0; n < DQ_PANELS; ++n)
            walk.start_product(panels_of<1>(dq_acc, n), ds_frag, smem.of_s.tiles[walk.stage(i)],
                               panel(n));
    };

    // ---- P = 2^(S - lse)
    const auto make_p = [&](float (*s_acc)[4], int i, int unit) {
        const int first_key = i * TILE + 16 * unit;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float& s = s_acc[n][k];
                s = ex2_approx_ftz(s * scale_log2 - row_value[k / 2]);
            }
        if (first_key + 16 > warp_keys) {  // some are hidden
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int row = first_row + 8 * (k / 2) + lane / 4;
                    const int row_keys = CAUSAL ? min(p.seq_k, row + offset + 1) : p.seq_k;
                    const int key = first_key + 8 * n + 2 * (lane % 4) + k % 2;
                    if (key >= row_keys) s_acc[n][k] = 0.0f;
                }
        }
        walk.pass_p(s_acc, i, unit);
    };
    const auto end_p = [&](int) { release(smem.p_full); };
    // ---- dS = P * (dP - delta)
    const auto make_ds = [&](float (*dp_acc)[4], int i, int unit) {
        wait_for(smem.p_full, i);
        walk.compute_ds(dp_acc, i, unit, [&](int n, int k) { return row_value[k / 2]; }, factor);
        walk.share(smem.ds[i % 2], unit, dp_acc);
    };
    const auto end_ds = [&](int i) { walk.end_sharing(smem.ds[i % 2]); };
    // Warpgroup 1 has then read P, too.
    const auto gather_ds = [&](int i) { walk.gather(ds_frag, smem.ds[i % 2], i); };

    // ---- for each K/V tile
    if (warpgroup == 0)
        walk.run<DQ_KEPT_PANELS>(smem.of_s, make_p, end_p, gather_ds, multiply, dq_acc, ds_frag);
    else
        walk.run<DQ_KEPT_PANELS>(smem.of_dp, make_ds, end_ds, gather_ds, multiply, dq_acc, ds_frag);

    // ---- write dQ, in the place of Q
    bar_sync(CONSUMER_BARRIER, 128 * CONSUMERS);  // which warpgroup 0 has read
#pragma unroll
    for (int n = 0; n < DQ_PANELS; ++n)
        if (CONSUMERS * n + warpgroup < PANELS)
            write(p.dq_map, first_column + PANEL * panel(n), first_row, head, batch,
                  smem.of_s.kept[panel(n)], &dq_acc[PANEL / 8 * n], p.softmax_scale / factor);
    if (lane == 0) cp_async_bulk_wait_group_read<0>();
    cluster_arrive();
    cluster_wait();  // no block reaches into another one any more
}

// dK = scale dS^T Q, dV = P^T dO, summed over the query heads of a group
// [batch, kv_heads, seq_k, HEAD_DIM]
extern "C" __global__ void __cluster_dims__(SLICES) __launch_bounds__(NUM_THREADS, 1)
    attention_dk_dv(const __grid_constant__ BackwardParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int k_blocks = (p.seq_k + ROWS - 1) / ROWS;
    const int group = p.heads / p.kv_heads;
    // The first keys first: with a mask the most queries see them.
    const Work work(k_blocks, p.batch * p.kv_heads, max(1, SECTION_ROWS / p.seq_q));
    const int k_start = work.n * ROWS;
    const int kv_head = work.head % p.kv_heads;
    const int batch = work.head / p.kv_heads;
    const int first_head = kv_head * group;
    // Uniform across the warp; the shuffle tells the compiler so.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    // Causal: key j is seen by the queries i >= j - offset.
    const int offset = p.seq_k - p.seq_q;
    const int q_tiles = (p.seq_q + TILE - 1) / TILE;
    const int first_tile = CAUSAL ? max(0, k_start - offset) / TILE : 0;
    const int64_t group_tile = (int64_t(batch) * p.heads + first_head) * q_tiles;
    // The last tile first, of all heads, then the one before: with a mask, too, the blocks of a key head
    // read the same tiles at the same time, from the L2 cache.
    const Walk walk = {smem, warp / 4, group * (q_tiles - first_tile)};
    const auto q_tile = [&](int i) { return q_tiles - 1 - i / group; };
    const int first_column = walk.rank * SLICE, v_first_column = walk.rank * V_SLICE;

    init_barriers(smem);

    if (warp >= PRODUCER_WARP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 32 * PRODUCER_WARP) {
            // ---- load K and V, and the tiles
            mbarrier_arrive_expect_tx(smem.kept_full, KEPT_BYTES);
            load_tile(smem.of_s.kept, p.k_map, first_column, k_start, kv_head, batch,
                      smem.kept_full);
            load_tile(smem.of_dp.kept, p.v_map, v_first_column, k_start, kv_head, batch,
                      smem.kept_full);
            const Rows* rows = static_cast<const Rows*>(p.workspace[0]) + group_tile;
            for (int i = 0; i < walk.num_tiles; ++i) {
                const int stage = walk.stage(i), tile = q_tile(i), n = i % group;
                Mbarrier &first_full = smem.full[0][stage], &second_full = smem.full[1][stage];
                wait_for(smem.empty[stage], walk.phase(i) - 1);
                mbarrier_arrive_expect_tx(first_full,
                                          sizeof(smem.of_s.tiles[stage]) + sizeof(Rows));
                load_tile(smem.of_s.tiles[stage], p.q_map, first_column, tile * TILE,
                          first_head + n, batch, first_full);
                mbarrier_arrive_expect_tx(second_full, sizeof(smem.of_dp.tiles[stage]));
                load_tile(smem.of_dp.tiles[stage], p.dout_map, v_first_column, tile * TILE,
                          first_head + n, batch, second_full);
                if (i == 0) griddepcontrol_wait();  // the rows are there
                cp_async_bulk_load(&smem.rows[stage], rows + n * q_tiles + tile, sizeof(Rows),
                                   first_full);
            }
        }
        cluster_arrive();
        cluster_wait();  // as the consumers
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    griddepcontrol_wait();  // what attention_delta has written is there
    const int warpgroup = walk.warpgroup;
    const int first_row = k_start + warp % 4 * 16;  // the warp's first key
    const float scale_log2 = p.softmax_scale * LOG2_E;
    const float factor =
        ds_factor(static_cast<const float*>(p.workspace[1]) + group_tile, group * q_tiles);

    // ---- P = 2^(S - lse). Keys past the last one need no mask: they are rows that nobody writes.
    const auto make_p = [&](float (*s_acc)[4], int i, int unit) {
        const int first_query = q_tile(i) * TILE + 16 * unit;
        const float* lse = &smem.rows[walk.stage(i)].lse[16 * unit];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float& s = s_acc[n][k];
                s = ex2_approx_ftz(s * scale_log2 - lse[8 * n + 2 * (lane % 4) + k % 2]);
            }
        if (CAUSAL && first_row + 15 > first_query + offset) {  // some are hidden
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int key = first_row + 8 * (k / 2) + lane / 4;
                    const int row = first_query + 8 * n + 2 * (lane % 4) + k % 2;
                    if (key > row + offset) s_acc[n][k] = 0.0f;
                }
        }
        wait_for(smem.p_read, i - 1);
        walk.pass_p(s_acc, i, unit);
        walk.share(smem.prob[i % 2], unit, s_acc);
    };
    const auto end_p = [&](int i) {
        release(smem.p_full);
        walk.end_sharing(smem.prob[i % 2]);
    };
    // ---- dS = P * (dP - delta)
    const auto make_ds = [&](float (*dp_acc)[4], int i, int unit) {
        const int stage = walk.stage(i);
        walk.wait_for_tile(0, i);  // with Q come the rows
        wait_for(smem.p_full, i);
        walk.compute_ds(
            dp_acc, i, unit,
            [&](int n, int k) { return smem.rows[stage].delta[8 * n + 2 * (lane % 4) + k % 2]; },
            factor);
        walk.share(smem.ds[i % 2], unit, dp_acc);
    };
    const auto end_ds = [&](int i) {
        release(smem.p_read);
        walk.end_sharing(smem.ds[i % 2]);
    };

    // ---- for each Q/dO tile, of each head of the group: dV += P^T dO or dK += dS^T Q, of the tiles that
    // the warpgroup does not make its S or dP of
    const auto gradient = [&](auto& operands, auto& others, Shares(&shares)[2], const auto& compute,
                              const auto& end, const TensorMap& map, int first_column,
                              float factor) {
        constexpr int NUM_PANELS = std::extent_v<decltype(others.kept)>;  // of the gradient
        constexpr int N_PANELS = NUM_PANELS <= 4 ? NUM_PANELS : 1;  // wgmma's N is at most 256
        float acc[NUM_PANELS * PANEL / 8][4] = {};
        Fragments frag = {};  // of P or dS
        const auto gather = [&](int i) { walk.gather(frag, shares[i % 2], i); };
        const auto multiply = [&](int i) {
            walk.wait_for_tile(1 - warpgroup, i);
#pragma unroll
            for (int n = 0; n < NUM_PANELS; n += N_PANELS)
                walk.start_product(panels_of<N_PANELS>(acc, n), frag, others.tiles[walk.stage(i)],
                                   n);
        };
        walk.run<DKV_KEPT_PANELS[NUM_PANELS]>(operands, compute, end, gather, multiply, acc, frag);
        // ---- write dV in the place of V, or dK in that of K
        bar_sync(CONSUMER_BARRIER, 128 * CONSUMERS);  // which the other warpgroup has read
#pragma unroll
        for (int panel = 0; panel < NUM_PANELS; ++panel)
            write(map, first_column + PANEL * panel, first_row, kv_head, batch, others.kept[panel],
                  &acc[PANEL / 8 * panel], factor);
    };
    if (warpgroup == 0)
        gradient(smem.of_s, smem.of_dp, smem.prob, make_p, end_p, p.dv_map, v_first_column, 1.0f);
    else
        gradient(smem.of_dp, smem.of_s, smem.ds, make_ds, end_ds, p.dk_map, first_column,
                 p.softmax_scale / factor);
    if (lane == 0) cp_async_bulk_wait_group_read<0>();
    cluster_arrive();
    cluster_wait();  // no block reaches into another one any more
}
