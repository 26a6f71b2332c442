// v19 -- cluster merges: the blocks of a cluster share a work tile's keys, and send each other their parts
// taken: only for few queries of few heads; where there are more, v13, v18 and v20 leave no SM idle
// change: from v13. Eight blocks of a cluster, or four or two of them, are a work tile's team, and each
//     has an equal share of its keys. It sends what it has found, O, m and l, to the others through
//     shared memory, and each merges some of the columns. A work tile has 64 rows instead of 128. There
//     is no workspace, no second kernel, and no loop over work tiles
// why: v13's parts go through the L2, its second kernel reads them back, and both wait for a kernel to
//     start or to end. Predicted for 16 queries of 64 heads on 8 heads of keys, 1024 keys and head_dim
//     256: 13 to 15 us instead of 24
// limits: bf16, fp16; head_dim 8-256 by 8; sm_90a
#include "attention_divisors.cuh"
#include "cluster.cuh"
#include "copy.cuh"
#include "group_rows.cuh"
#include "mma.cuh"
#include "slices.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int LOG_CLUSTER = 3, CLUSTER = 1 << LOG_CLUSTER;  // blocks
// So many clusters run at once, at least: a cluster is in one GPC, of which an H100 has eight, of up to
// 18 SMs. On the one that was measured 15 run: of its GPCs one has fewer than 16.
constexpr int CLUSTERS = 14;
constexpr int NUM_THREADS = 256;  // a warpgroup computes; another one copies
constexpr int PRODUCER_WARP = 4;  // starts the copies of K and V; the next ones copy Q
constexpr int Q_WARPS = 3;
constexpr int BLOCK_M = 64;                          // rows of a work tile
constexpr int BLOCK_N = HEAD_DIM <= 128 ? 128 : 64;  // keys of a tile
constexpr int NUM_STAGES = HEAD_DIM <= 64 ? 4 : 2;   // tiles of K, and of V, in shared memory
// Whether softmax runs while the product before it does. V is released later then, and a tile of larger rows
// takes longer to arrive than softmax.
constexpr bool HIDE_SOFTMAX = HEAD_DIM <= 128;
constexpr int PART_BARRIER = 1;  // of the warpgroup that computes
constexpr int PANEL = 64;        // columns of a panel: 128 bytes a row, the swizzle's width
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole products; zeros from HEAD_DIM on
// Eight columns of O are sent, and merged, together.
constexpr int COLUMNS_OF_O = HEAD_DIM / 8;
constexpr int MERGED = (COLUMNS_OF_O + CLUSTER - 1) / CLUSTER;  // by a block of a whole cluster

// Columns of a tensor in panels, as TMA writes them: in each, 8 rows of 128 bytes are swizzled.
template <int ROWS>
using Tile = Element[PANELS][ROWS][PANEL];

struct alignas(16) RowState {
    float max[BLOCK_M], sum[BLOCK_M];  // m and l
};
// What a block has found in its keys: O = sum P V, m and l, P = 2^(S - m).
struct Part {
    float o[COLUMNS_OF_O][BLOCK_M][8];
    RowState rows;
};

struct alignas(1024) SharedMemory {  // the swizzle's pattern: 8 rows of 128 bytes
    Tile<BLOCK_M> q;
    union {
        struct {
            Tile<BLOCK_N> k[NUM_STAGES], v[NUM_STAGES];
        };
        Part part;  // this block's, when it has read all K and V
    };
    // Of the team's other parts the columns that this block merges. In a smaller team each block
    // merges more columns, of fewer parts, and needs no more room.
    float others_o[(CLUSTER - 1) * MERGED][BLOCK_M][8];
    RowState others_rows[CLUSTER - 1];
    Mbarrier q_full, k_full[NUM_STAGES], v_full[NUM_STAGES];  // the tile has arrived
    Mbarrier k_empty[NUM_STAGES], v_empty[NUM_STAGES];        // every warp has read it
    Mbarrier others_full;                                     // their columns are there
    Mbarrier sent;                                            // this block's are with the others
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels =
        {{.name = "attention_forward",
          // The first extent is CLUSTER: a whole cluster for each work tile.
          .grid = {{COLUMNS, HEAD_DIM / CLUSTER}, {GROUP_ROWS, BLOCK_M}, {KV_HEADS, 1}, {BATCH, 1}},
          .threads = NUM_THREADS,
          .smem_bytes = sizeof(SharedMemory)}},
    .k_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .v_box = {BLOCK_N, PANEL, SWIZZLE_128B},
};
// Half a row is a panel's: the other half is fetched with it, where the two are 256 bytes.
__constant__ int32_t l2_fetch_bytes = HEAD_DIM % (2 * PANEL) == 0 ? 256 : 128;
}

// Work tiles: each of up to BLOCK_M rows, which share a key head.
__device__ int num_works() { return gridDim.x / CLUSTER; }

// The logarithm to base 2 of how many blocks have a work tile's keys: a cluster, or a half or a quarter of
// one where that lets more work tiles, or all, run at once.
__device__ int log_team_size() {
    int log_team = LOG_CLUSTER;
    while (log_team > 1 && num_works() << log_team > CLUSTERS * CLUSTER) --log_team;
    return log_team;
}

// A block's share of a work tile: the tiles of keys first ... end - 1. Row n of a key head is query
// n / group of head n % group of its group.
struct Work {
    const DivisorsParams& p;
    int log_team, team, rank;  // blocks that share the work tile: 2^log_team; which of them this is
    int first_row, num_rows, kv_head, batch;
    int first, end;

    __device__ Work(const DivisorsParams& params)
        : p(params),
          log_team(log_team_size()),
          team(1 << log_team),
          rank(cluster_rank() & (team - 1)) {
        const Divisor row_tiles = p.tiles[1], kv_heads = p.tiles[2];
        const int work = blockIdx.x >> log_team, head_of_keys = row_tiles.divide(work);
        first_row = (work - head_of_keys * row_tiles.value) * BLOCK_M;
        num_rows = min(BLOCK_M, p.group.value * p.seq_q - first_row);
        batch = kv_heads.divide(head_of_keys);
        kv_head = head_of_keys - batch * kv_heads.value;
        // Nothing is loaded that no row sees.
        const int64_t tiles = (visible_keys(num_rows - 1) + BLOCK_N - 1) / BLOCK_N;
        first = rank * tiles >> log_team;
        end = (rank + 1) * tiles >> log_team;
    }

    // The keys that a row of the work tile sees. Causal: query i sees j <= i + seq_k - seq_q.
    __device__ int visible_keys(int row) const {
        return CAUSAL ? max(0, min(p.seq_k, query(row) + p.seq_k - p.seq_q + 1)) : p.seq_k;
    }
    // Its query and head.
    __device__ int query(int row) const { return p.group.divide(first_row + row); }
    __device__ int head(int row) const {
        return kv_head * p.group.value + first_row + row - query(row) * p.group.value;
    }

    // The rank in the cluster of the team's block `to`.
    __device__ int in_cluster(int to) const { return cluster_rank() - rank + to; }
    // Each block merges so many of O's columns, in eights; the last ones merge what is left.
    __device__ int merged() const { return (COLUMNS_OF_O + team - 1) >> log_team; }
    __device__ int merged_here() const {
        return max(0, min(merged(), COLUMNS_OF_O - rank * merged()));
    }
};

// Waits for the end of a phase. Phase -1 counts as ended: a new stage is empty.
__device__ void wait_for(Mbarrier& barrier, int phase) {
    while (!mbarrier_try_wait_parity(barrier, phase & 1)) {
    }
}

// Starts tile[panel][r][col] = tensor[row + r][PANEL panel + col], zeros past its ends, and
// announces its bytes to the barrier. Called by one thread.
__device__ void load_tile(Tile<BLOCK_N>& tile, const TensorMap& map, int row, int head, int batch,
                          Mbarrier& full) {
    mbarrier_arrive_expect_tx(full, sizeof(tile));
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
        cp_async_bulk_tensor_load(tile[panel][0], map, PANEL * panel, row, head, batch, full);
}

// Describes the columns d ... d + 15 of a tile: Q or K.
template <int ROWS>
__device__ uint64_t k_major(const Tile<ROWS>& tile, int d) {
    return matrix_descriptor<SWIZZLE_128B>(&tile[d / PANEL][0][d % PANEL], 0, SWIZZLE_128B_TILE);
}

// Describes the rows key ... key + 15 of a tile, all columns: V.
template <int ROWS>
__device__ uint64_t mn_major(const Tile<ROWS>& tile, int key) {
    return matrix_descriptor<SWIZZLE_128B>(&tile[0][key][0], sizeof(tile[0]), SWIZZLE_128B_TILE);
}

// Where TMA would put 8 elements of a tile's row from column d on: 8 chunks of a row change places.
template <int ROWS>
__device__ Element* swizzled(Tile<ROWS>& tile, int row, int d) {
    return &tile[d / PANEL][row][d % PANEL ^ row % 8 * VEC];
}

// ---- copy Q, whose rows are of several heads: no box of a tensor map. By Q_WARPS warps. What stays
// in rows past the last is multiplied, and nobody reads the products
__device__ void load_q(const Work& work, SharedMemory& smem) {
    constexpr int CHUNKS = DIM / VEC;  // of a row
    const AttentionParams& p = work.p;
    const int thread = threadIdx.x - 32 * (PRODUCER_WARP + 1);
    for (int n = thread; n < work.num_rows * CHUNKS; n += 32 * Q_WARPS) {
        const int row = n / CHUNKS, d = n % CHUNKS * VEC;
        const Element* q = p.q + work.batch * p.q_stride.batch + work.head(row) * p.q_stride.head +
                           work.query(row) * p.q_stride.row + d;
        const bool valid = d < HEAD_DIM;
        cp_async_cg(swizzled(smem.q, row, d), valid ? q : p.q, valid);
    }
    cp_async_commit_group();
    cp_async_wait_group<0>();
    fence_proxy_async();  // by each writer
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem.q_full);
}

// ---- copy K and V. By one thread
__device__ void load_kv(const Work& work, SharedMemory& smem) {
    const AttentionParams& p = work.p;
    for (int number = 0; number < work.end - work.first; ++number) {
        const int stage = number % NUM_STAGES, phase = number / NUM_STAGES;
        const int key = (work.first + number) * BLOCK_N;
        wait_for(smem.k_empty[stage], phase - 1);
        load_tile(smem.k[stage], p.k_map, key, work.kv_head, work.batch, smem.k_full[stage]);
        wait_for(smem.v_empty[stage], phase - 1);
        load_tile(smem.v[stage], p.v_map, key, work.kv_head, work.batch, smem.v_full[stage]);
    }
}

// ---- what the consumer computes: the block's part
__device__ void compute(const Work& work, SharedMemory& smem) {
    const AttentionParams& p = work.p;
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0);
    const auto release = [&](Mbarrier& empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };
    const float scale_log2 = p.softmax_scale * LOG2_E;  // exp(scale s) = 2^(scale_log2 s)
    // A lane's s_acc[n][2 r + i] and o_acc[n][2 r + i], with r and i 0 or 1, are the elements of S
    // and O in row 8 r + lane / 4 of its warp's 16 and column 8 n + 2 (lane % 4) + i.
    float s_acc[BLOCK_N / 8][4];
    uint32_t p_frag[BLOCK_N / 16][4];
    float o_acc[DIM / 8][4] = {};
    float row_max[2] = {-INFINITY, -INFINITY};  // m, in units of log2
    float row_sum[2] = {};                      // this lane's share of l
    float rescale[2];

    // ---- S = Q K^T  [BLOCK_M, BLOCK_N]
    const auto start_s = [&](int number) {
        const int stage = number % NUM_STAGES;
        wait_for(smem.k_full[stage], number / NUM_STAGES);
        wgmma_fence(s_acc);
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16)
            wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(s_acc, k_major<BLOCK_M>(smem.q, d),
                                                      k_major<BLOCK_N>(smem.k[stage], d), d > 0);
        wgmma_commit_group();
    };
    // ---- O += P V  [BLOCK_M, HEAD_DIM]
    const auto start_pv = [&](int number) {
        const int stage = number % NUM_STAGES;
        if (!HIDE_SOFTMAX) wait_for(smem.v_full[stage], number / NUM_STAGES);
        wgmma_fence(o_acc, p_frag);
#pragma unroll
        for (int j = 0; j < BLOCK_N; j += 16)
            wgmma_m64nNk16<Element, MN_MAJOR>(o_acc, p_frag[j / 16],
                                              mn_major<BLOCK_N>(smem.v[stage], j), true);
        wgmma_commit_group();
    };
    // ---- online softmax: P = 2^(S - m)
    const auto softmax = [&](int number) {
        float tile_scale = scale_log2;
        // Without this the largest S would not be the largest logit, and 0 * -inf is NaN.
        if (scale_log2 <= 0.0f) {
            tile_scale = 1.0f;
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s_acc[n][i] *= scale_log2;
        }
        const int k_start = (work.first + number) * BLOCK_N;
        if (k_start + BLOCK_N > work.visible_keys(16 * warp)) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = 16 * warp + 8 * r + lane / 4;
                const int keys = work.visible_keys(row) - k_start - 2 * (lane % 4);
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (8 * n + i >= keys) s_acc[n][2 * r + i] = -INFINITY;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float x = -INFINITY;
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) x = fmaxf(x, s_acc[n][2 * r + i]);
            const float row_max_new = fmaxf(row_max[r], quad_max(x) * tile_scale);
            // Where no key is visible yet all S are -inf, and -inf + inf is NaN.
            const float shift = row_max_new == -INFINITY ? 0.0f : row_max_new;
            rescale[r] = ex2_approx_ftz(row_max[r] - shift);
            row_max[r] = row_max_new;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& s = s_acc[n][2 * r + i];
                    s = ex2_approx_ftz(s * tile_scale - shift);
                    sum += s;
                }
            row_sum[r] = row_sum[r] * rescale[r] + sum;
        }
    };
    const auto convert_p = [&] {
#pragma unroll
        for (int j = 0; j < BLOCK_N / 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* s = &s_acc[2 * j + i / 2][2 * (i % 2)];
                p_frag[j][i] = cvt_rn_x2<Element>(s[0], s[1]);
            }
    };

    // ---- for each K/V tile
    const int num_tiles = work.end - work.first;
    if (num_tiles > 0) {
        wait_for(smem.q_full, 0);
        __syncwarp();
        start_s(0);
        wgmma_wait_group<0>(s_acc);
        release(smem.k_empty[0]);
        softmax(0);
        if (HIDE_SOFTMAX) wait_for(smem.v_full[0], 0);
        convert_p();
        for (int number = 1; number < num_tiles; ++number) {
            start_s(number);
            start_pv(number - 1);
            wgmma_wait_group<1>(s_acc);
            release(smem.k_empty[number % NUM_STAGES]);
            softmax(number);
            // Here, as that keeps ptxas from letting the softmax wait for O.
            if (HIDE_SOFTMAX) wait_for(smem.v_full[number % NUM_STAGES], number / NUM_STAGES);
            wgmma_wait_group<0>(o_acc, p_frag);
            release(smem.v_empty[(number - 1) % NUM_STAGES]);
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) o_acc[n][i] *= rescale[i / 2];
            convert_p();
        }
        start_pv(num_tiles - 1);
        wgmma_wait_group<0>(o_acc, p_frag);
    }

    // ---- write the part, where K and V were
    bar_sync(PART_BARRIER, 128);  // all warps have read them
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        row_sum[r] = quad_sum(row_sum[r]);
        const int row = 16 * warp + 8 * r + lane / 4;
        if (row >= work.num_rows) continue;
#pragma unroll
        for (int n = 0; n < COLUMNS_OF_O; ++n)
            *reinterpret_cast<float2*>(&smem.part.o[n][row][2 * (lane % 4)]) =
                float2{o_acc[n][2 * r], o_acc[n][2 * r + 1]};
        if (lane % 4 == 0)
            smem.part.rows.max[row] = row_max[r], smem.part.rows.sum[row] = row_sum[r];
    }
    fence_proxy_async();  // by each writer
}

// ---- send the others their columns of this block's part, with m and l. By a warp
__device__ void send_part(const Work& work, SharedMemory& smem) {
    const int lane = threadIdx.x % 32, merged = work.merged();
    // Which of its others this block is to another one.
    const auto number = [&](int to) { return (work.rank - to - 1) & (work.team - 1); };
    for (int n = lane; n < COLUMNS_OF_O; n += 32) {
        const int to = n / merged;
        if (to != work.rank)
            cp_async_bulk_cluster(smem.others_o[number(to) * merged + n % merged], smem.part.o[n],
                                  32 * work.num_rows, smem.others_full, work.in_cluster(to));
    }
    if (lane < work.team && lane != work.rank)
        cp_async_bulk_cluster(&smem.others_rows[number(lane)], &smem.part.rows, sizeof(RowState),
                              smem.others_full, work.in_cluster(lane));
}

// ---- o = sum of the parts' O, each times 2^(m of the part - m), over l; and lse. A thread has four
// columns of a row at a time
__device__ void merge(const Work& work, const SharedMemory& smem) {
    const AttentionParams& p = work.p;
    const int merged = work.merged(), num_chunks = 2 * work.merged_here() * work.num_rows;
    for (int chunk = threadIdx.x; chunk < num_chunks; chunk += NUM_THREADS) {
        const int half = chunk % 2, row = chunk / 2 % work.num_rows;
        const int n = chunk / 2 / work.num_rows, column = work.rank * merged + n;
        float row_max = smem.part.rows.max[row];
#pragma unroll
        for (int i = 0; i < CLUSTER - 1; ++i)
            if (i < work.team - 1) row_max = fmaxf(row_max, smem.others_rows[i].max[row]);
        const float shift = row_max == -INFINITY ? 0.0f : row_max;  // -inf - -inf is NaN
        float row_sum = 0.0f, o[4] = {};
        const auto add = [&](const RowState& rows, const float* part_o) {
            const float factor = ex2_approx_ftz(rows.max[row] - shift);
            const float4 x = load_float4(part_o);
            row_sum += factor * rows.sum[row];
            o[0] += factor * x.x, o[1] += factor * x.y, o[2] += factor * x.z, o[3] += factor * x.w;
        };
        add(smem.part.rows, &smem.part.o[column][row][4 * half]);
#pragma unroll
        for (int i = 0; i < CLUSTER - 1; ++i)
            if (i < work.team - 1)
                add(smem.others_rows[i], &smem.others_o[i * merged + n][row][4 * half]);
        const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
        const int head = work.head(row), query = work.query(row);
        Element* out = p.o + work.batch * p.o_stride.batch + head * p.o_stride.head +
                       query * p.o_stride.row + 8 * column + 4 * half;
        store_float4(out,
                     make_float4(o[0] * inverse, o[1] * inverse, o[2] * inverse, o[3] * inverse));
        if (column == 0 && half == 0)
            p.lse[(int64_t(work.batch) * p.heads + head) * p.seq_q + query] =
                row_sum == 0.0f ? -INFINITY : (row_max + lg2_approx_ftz(row_sum)) * LN_2;
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(NUM_THREADS, 1)
    attention_forward(const __grid_constant__ DivisorsParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    if (int(blockIdx.x) >= num_works() << log_team_size())
        return;  // smaller teams need fewer blocks
    const Work work(p);
    const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0);
    if (threadIdx.x == 32 * PRODUCER_WARP) {
        prefetch_tensormap(p.k_map);
        prefetch_tensormap(p.v_map);
        mbarrier_init(smem.q_full, Q_WARPS);
        mbarrier_init(smem.others_full, 1);
        mbarrier_init(smem.sent, work.team - 1);
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(smem.k_full[stage], 1);
            mbarrier_init(smem.v_full[stage], 1);
            mbarrier_init(smem.k_empty[stage], 4);
            mbarrier_init(smem.v_empty[stage], 4);
        }
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(
            smem.others_full,
            (work.team - 1) * (32 * work.num_rows * work.merged_here() + int(sizeof(RowState))));
    }
    __syncthreads();  // the mbarriers are initialized
    if (warp > PRODUCER_WARP)
        load_q(work, smem);
    else if (threadIdx.x == 32 * PRODUCER_WARP)
        load_kv(work, smem);
    // It takes a while to arrive: the copies have been started.
    cluster_arrive();
    if (warp < PRODUCER_WARP) compute(work, smem);
    __syncthreads();  // the part is there
    cluster_wait();   // the mbarriers of all blocks are initialized
    if (warp == 0) send_part(work, smem);
    wait_for(smem.others_full, 0);
    // A block may end when its part is with the others. (The cluster's barrier at the end would say so,
    // too, but each thread that arrives there waits until its o has reached the L2.)
    if (threadIdx.x < work.team && threadIdx.x != work.rank)
        mbarrier_arrive_cluster_relaxed(smem.sent, work.in_cluster(threadIdx.x));
    merge(work, smem);
    if (warp == 0) wait_for(smem.sent, 0);
}
