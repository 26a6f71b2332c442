// v15 -- head_dim beyond 256: each block of a cluster has a slice of a head's columns
// taken: only for large head_dim; up to 256, the same for v, there is one slice, and v12 is faster
// change: from v11. The blocks of a cluster have the same work tile, and each its slice of the columns
//     of Q and K, up to 320, and of V and O, up to 256. One computes the softmax of a warpgroup's rows: it
//     gets the others' sums of Q K^T over their slices, to which it adds its own, and sends them P. The
//     other warpgroup's rows are another block's
// why: O of 64 rows and 512 columns is 256 floats for each thread of a warpgroup, which has 255 registers.
//     In slices that follow one after the other, S would be computed again for each: at 512 1.5 times the
//     products. Predicted: at 512 0.8 times the TFLOP/s of v11 at 256, for a block does what it does
//     there, and moves S and P
// limits: bf16, fp16; head_dim 8-1024 by 8, v's may differ; sm_90a
#include "mma.cuh"
#include "slices.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute; one more copies
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER = 128 * CONSUMERS;  // the thread that starts all copies
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr int PANEL = 64;  // columns of a panel: 128 bytes a row, the swizzle's width
constexpr int ceil_div(int x, int y) { return (x + y - 1) / y; }
constexpr int larger(int x, int y) { return x > y ? x : y; }
constexpr int MOST_COLUMNS = larger(HEAD_DIM, V_HEAD_DIM);
// Blocks of a cluster: in a slice registers have room for 4 panels of O, and shared memory for 5 of Q.
constexpr int SLICES = larger(ceil_div(HEAD_DIM, 5 * PANEL), ceil_div(V_HEAD_DIM, 4 * PANEL));
// Panels of a slice of Q and K, and of one of V and O. The last slices may have fewer, or none.
constexpr int PANELS = ceil_div(ceil_div(HEAD_DIM, PANEL), SLICES);
constexpr int V_PANELS = ceil_div(ceil_div(V_HEAD_DIM, PANEL), SLICES);
constexpr int SLICE = PANELS * PANEL, V_SLICE = V_PANELS * PANEL;  // their columns
// Columns in products; zeros from HEAD_DIM on, or from V_HEAD_DIM on.
constexpr int DIM = SLICES > 1 ? SLICE : ceil_div(HEAD_DIM, 16) * 16;
constexpr int V_DIM = SLICES > 1 ? V_SLICE : ceil_div(V_HEAD_DIM, 16) * 16;
constexpr int BLOCK_M = 64 * CONSUMERS;  // query rows, 64 a warpgroup
constexpr int NUM_STAGES = 2;            // tiles of K, and of V, in shared memory
constexpr int MOST_SMEM = 227 * 1024;    // bytes a block
// The last panel of Q is kept in registers, and O leaves through its place in shared memory; wgmma reads
// so many columns from there.
constexpr int Q_SMEM_DIM = (PANELS - 1) * PANEL;
constexpr int TURN_BARRIER = 1;  // of warpgroup 0; the other's follows

// Where m is set, the row's largest P becomes 2^-HEADROOM, or up to twice that. It is set again where
// a lane's share of a tile's sum of P exceeds MAX_SUM. fp16 holds P up to 65504 and has no exponents
// to spare below 1. bf16 has, but V may be large, too: with sums of at most 2^16, O += P V stays
// finite for |V| < 2^96 and 2^20 keys. More headroom would cost S - m, a float, its last digits.
constexpr int HEADROOM = std::is_same_v<Element, fp16> ? 0 : 24;
constexpr float MAX_SUM = std::is_same_v<Element, fp16> ? 65504.0f : 0x1p16f;
// Beyond it P cannot be brought back by one normal power of two; it may be infinite.
constexpr float LOST_SUM = 0x1p100f;

// Up to BLOCK_M queries of a head, and how many tiles of keys they see.
struct WorkTile {
    int q_start, head, kv_head, batch;
    int num_tiles;  // at least 2
    bool is_last;   // of its cluster
};

// The place of a tile in a ring of stages, by its number among all tiles of its kind.
template <int STAGES>
struct Place {
    int number = 0;

    __device__ int stage() const { return number % STAGES; }
    __device__ int phase() const { return number / STAGES; }  // of the stage's barriers
};

// Columns of a tensor in panels, as TMA writes them: in each, 8 rows of 128 bytes are swizzled.
template <int NUM_PANELS, int ROWS>
using Panels = Element[NUM_PANELS][ROWS][PANEL];

// Threads of a warpgroup that send: a block that is alone sends nothing.
constexpr int SENDERS = SLICES > 1 ? 128 : 1;

// For a warpgroup's rows, what threads of other blocks send the threads of the same number: as it lies
// in their registers.
template <int KEYS>
struct Exchange {
    float prob[KEYS / 16][SENDERS][4];  // P, from the block that computes the softmax
    // Likewise, of 8 upper and 8 lower rows of a warp: the factors of O, and 1 / l with the last P.
    float factors[32][4];
    // What is sent has arrived; and, at the sender, every warp has read it.
    Mbarrier s_full, s_empty, p_full, p_empty;
};

// Of a block, for tiles of KEYS keys.
template <int KEYS>
struct alignas(1024) SharedMemoryOf {  // the swizzle's pattern: 8 rows of 128 bytes
    // And O, in the last panel.
    Panels<PANELS, BLOCK_M> q;
    Panels<PANELS, KEYS> k[NUM_STAGES];
    Panels<V_PANELS, KEYS> v[NUM_STAGES];
    // S of the other slices, sent to the block that computes the softmax; of a block's warpgroups at
    // most one's.
    float partial[SLICES > 1 ? SLICES - 1 : 1][KEYS / 8][SENDERS][4];
    Exchange<KEYS> exchange[CONSUMERS];
    WorkTile work[CONSUMERS][2];                     // the one whose Q is there, and the one before
    Mbarrier q_full[CONSUMERS], q_empty[CONSUMERS];  // of a warpgroup's rows
    Mbarrier k_full[NUM_STAGES], v_full[NUM_STAGES];    // the tile has arrived
    Mbarrier k_empty[NUM_STAGES], v_empty[NUM_STAGES];  // every warp has read it
};

// Whether shared memory has room for tiles of so many keys, and registers for KEYS / 2 of S, KEYS / 4 of P
// and V_DIM / 2 of O beside the rest.
template <int KEYS>
constexpr bool fits() {
    return sizeof(SharedMemoryOf<KEYS>) <= MOST_SMEM && 3 * KEYS / 4 + V_DIM / 2 <= 176;
}
constexpr int BLOCK_N = fits<128>()  ? 128
                        : fits<96>() ? 96
                        : fits<80>() ? 80
                        : fits<64>() ? 64
                                     : 48;  // keys of a tile
using SharedMemory = SharedMemoryOf<BLOCK_N>;
static_assert(sizeof(SharedMemory) <= MOST_SMEM);

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward",
                 .grid = {{COLUMNS, ceil_div(MOST_COLUMNS, SLICES)},
                          {SEQ_Q, BLOCK_M},
                          {HEADS, 1},
                          {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory),
                 .blocks_per_sm = 1}},
    .q_box = {64, PANEL, SWIZZLE_128B},
    .k_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .v_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .o_box = {16, PANEL, SWIZZLE_128B},
};
}

// The keys that a row of queries sees. Causal: query i sees j <= i + seq_k - seq_q, so the last
// query sees the last key.
__device__ int visible_keys(const AttentionParams& p, int row) {
    return CAUSAL ? min(p.seq_k, row + p.seq_k - p.seq_q + 1) : p.seq_k;
}

// Their tiles. At least 2: a block that gets P works on three tiles at a time, S of one, the softmax of
// another one and P of a third, and they must not be of more than two work tiles.
__device__ int visible_tiles(const AttentionParams& p, int row) {
    return max(2, (visible_keys(p, row) + BLOCK_N - 1) / BLOCK_N);
}

// The order of the work tiles. In a round each cluster takes one. With a causal mask they differ in
// length, and are sorted by it within sections of whole heads, whose K and V stay in L2: downwards in
// every other section, upwards in the rest, the last one downwards, so that a cluster's long work tiles
// are followed by short ones. Where they do not fit, clusters read K and V from DRAM together, if those
// of a head are in step: then all heads are one section, a round's work tiles are about as long as each
// other, and every other round goes backwards.
constexpr float CACHED_BYTES = 16 << 20;  // 16 MB were seen to fit into L2's 50, and 32 not to
struct Schedule {
    const AttentionParams& p;
    int q_blocks, num_heads;  // of a head; of all batches
    int section_heads;
    int clusters, cluster;
    int count;  // of the cluster's work tiles

    __device__ explicit Schedule(const AttentionParams& params)
        : p(params),
          q_blocks((p.seq_q + BLOCK_M - 1) / BLOCK_M),
          num_heads(p.batch * p.heads),
          clusters(gridDim.x / SLICES),
          cluster(blockIdx.x / SLICES) {
        // A section's work tiles fill up to 4 rounds, as few as they fill to nine tenths.
#pragma unroll 1
        for (int rounds = 1; rounds <= 4; ++rounds) {
            section_heads = max(1, rounds * clusters / q_blocks);
            if (10 * section_heads * q_blocks >= 9 * rounds * clusters) break;
        }
        // Heads of a group share K and V. (Of a section with fewer heads than a group this is too little.)
        const float head_bytes =
            float(p.seq_k) * ((HEAD_DIM + V_HEAD_DIM) * sizeof(Element)) * p.kv_heads / p.heads;
        if (section_heads * head_bytes > CACHED_BYTES || section_heads > num_heads)
            section_heads = num_heads;
        const int num_work = q_blocks * num_heads, full_rounds = num_work / clusters;
        count = full_rounds + (place(full_rounds) < num_work % clusters);
    }

    // The cluster's, among the work tiles of a round.
    __device__ int place(int round) const {
        const bool backwards = CAUSAL && section_heads == num_heads && round % 2 == 1;
        return backwards ? clusters - 1 - cluster : cluster;
    }

    __device__ WorkTile at(int i) const {
        const int index = i * clusters + place(i);
        int head = index / q_blocks, q_block = index % q_blocks;
        if (CAUSAL) {
            const int section = head / section_heads, first_head = section * section_heads;
            const int heads = min(section_heads, num_heads - first_head);
            const int in_section = index - first_head * q_blocks;
            head = first_head + in_section % heads;
            q_block = in_section / heads;
            const bool downwards = ((num_heads - 1) / section_heads - section) % 2 == 0;
            if (downwards) q_block = q_blocks - 1 - q_block;
        }
        const int q_start = BLOCK_M * q_block, head_in_batch = head % p.heads;
        return {q_start,
                head_in_batch,
                head_in_batch / (p.heads / p.kv_heads),
                head / p.heads,
                visible_tiles(p, q_start + BLOCK_M - 1),
                i + 1 == count};
    }
};

// Waits for the end of a phase. Phase -1 counts as ended: a new stage is empty.
__device__ void wait_for(Mbarrier& barrier, int phase) {
    while (!mbarrier_try_wait_parity(barrier, phase & 1)) {
    }
}

// Starts tile[panel][first + r][col] = tensor[row + r][first_column + PANEL panel + col] of a box's rows
// r, zeros past the tensor's ends, and announces its bytes to the barrier. Called by one thread.
template <int BOX_ROWS, int NUM_PANELS, int ROWS>
__device__ void load_tile(Panels<NUM_PANELS, ROWS>& tile, int first, const TensorMap& map,
                          int first_column, int row, int head, int batch, Mbarrier& full) {
    mbarrier_arrive_expect_tx(full, NUM_PANELS * BOX_ROWS * PANEL * sizeof(Element));
#pragma unroll
    for (int panel = 0; panel < NUM_PANELS; ++panel)
        cp_async_bulk_tensor_load(tile[panel][first], map, first_column + PANEL * panel, row, head,
                                  batch, full);
}

// Describes the columns d ... d + 15 of a tile, its rows from `row` on: Q or K.
template <int NUM_PANELS, int ROWS>
__device__ uint64_t k_major(const Panels<NUM_PANELS, ROWS>& tile, int row, int d) {
    return matrix_descriptor<SWIZZLE_128B>(&tile[d / PANEL][row][d % PANEL], 0, SWIZZLE_128B_TILE);
}

// Describes the rows key ... key + 15 of a tile, all columns: V.
template <int NUM_PANELS, int ROWS>
__device__ uint64_t mn_major(const Panels<NUM_PANELS, ROWS>& tile, int key) {
    return matrix_descriptor<SWIZZLE_128B>(&tile[0][key][0], sizeof(tile[0]), SWIZZLE_128B_TILE);
}

// Where TMA puts 8 elements of a tile's row from column d on: 8 chunks of a row change places.
template <int NUM_PANELS, int ROWS>
__device__ Element* swizzled(Panels<NUM_PANELS, ROWS>& tile, int row, int d) {
    return &tile[d / PANEL][row][d % PANEL ^ row % 8 * VEC];
}

extern "C" __global__ void __cluster_dims__(SLICES) __launch_bounds__(NUM_THREADS, 1)
    attention_forward(const __grid_constant__ AttentionParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    // Uniform across the warp; the shuffle tells the compiler so.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int rank = SLICES > 1 ? cluster_rank() : 0;
    const int first_column = rank * SLICE;      // of Q and K
    const int v_first_column = rank * V_SLICE;  // of V and O

    if (threadIdx.x == PRODUCER) {
        prefetch_tensormap(p.k_map);
        prefetch_tensormap(p.q_map);
        prefetch_tensormap(p.v_map);
        prefetch_tensormap(p.o_map);
#pragma unroll
        for (int group = 0; group < CONSUMERS; ++group) {
            mbarrier_init(smem.q_full[group], 1);
            mbarrier_init(smem.q_empty[group], 4);
        }
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(smem.k_full[stage], 1);
            mbarrier_init(smem.v_full[stage], 1);
            mbarrier_init(smem.k_empty[stage], 4 * CONSUMERS);
            mbarrier_init(smem.v_empty[stage], 4 * CONSUMERS);
        }
#pragma unroll
        for (auto& exchange : smem.exchange) {
            if (SLICES == 1) break;
            mbarrier_init(exchange.s_full, 1);
            mbarrier_init(exchange.s_empty, 4);
            mbarrier_init(exchange.p_full, 1);
            mbarrier_init(exchange.p_empty, 4 * (SLICES - 1));
        }
        fence_mbarrier_init();
    }
    cluster_arrive();
    __syncthreads();  // the mbarriers are initialized

    // ======== the producers. One thread copies, for all work tiles, K of a tile, then V of the tile
    // before, as the consumers need them; and one for each consumer its rows of Q ========
    if (warp >= PRODUCER / 32) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const Schedule schedule(p);
        const int group = warp - PRODUCER / 32 - 1;
        if (threadIdx.x == PRODUCER) {
            int number = 0;                          // of the tile of K
            int v_row = 0, v_head = 0, v_batch = 0;  // of the tile before
            const auto load_v = [&] {
                const Place<NUM_STAGES> v = {number - 1};
                wait_for(smem.v_empty[v.stage()], v.phase() - 1);
                load_tile<BLOCK_N>(smem.v[v.stage()], 0, p.v_map, v_first_column, v_row, v_head,
                                   v_batch, smem.v_full[v.stage()]);
            };
            for (int i = 0; i < schedule.count; ++i) {
                const WorkTile work = schedule.at(i);
                for (int tile = 0; tile < work.num_tiles; ++tile, ++number) {
                    const Place<NUM_STAGES> k = {number};
                    wait_for(smem.k_empty[k.stage()], k.phase() - 1);
                    load_tile<BLOCK_N>(smem.k[k.stage()], 0, p.k_map, first_column, tile * BLOCK_N,
                                       work.kv_head, work.batch, smem.k_full[k.stage()]);
                    if (number > 0) load_v();
                    v_row = tile * BLOCK_N, v_head = work.kv_head, v_batch = work.batch;
                }
            }
            load_v();
        } else if (lane == 0 && 0 <= group && group < CONSUMERS) {
            for (int i = 0; i < schedule.count; ++i) {
                const WorkTile work = schedule.at(i);
                wait_for(smem.q_empty[group], i - 1);
                smem.work[group][i % 2] = work;
                load_tile<64>(smem.q, 64 * group, p.q_map, first_column, work.q_start + 64 * group,
                              work.head, work.batch, smem.q_full[group]);
            }
        }
        cluster_wait();
        cluster_arrive();
        cluster_wait();  // as the consumers
        return;
    }

    // ======== the consumers: a warpgroup computes 64 rows of each work tile ========
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int warpgroup = warp / 4;
    const int group_row = 64 * warpgroup;  // the warpgroup's first row in the block
    const int warp_row = 16 * warp;        // and the warp's
    const int thread = threadIdx.x % 128;  // in the warpgroup
    auto& exchange = smem.exchange[warpgroup];
    // Read where they are needed: registers are short.
    const auto& works = smem.work[warpgroup];
    const int owner = warpgroup % SLICES;  // the block that computes the softmax of these rows
    const auto release = [&](Mbarrier& empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };
    // Ping-pong scheduling: consumers start their products in turn, so that one computes softmax
    // while the other multiplies. Nobody takes the last turn.
    const auto wait_for_turn = [&] { bar_sync(TURN_BARRIER + warpgroup, 256); };
    const auto pass_turn = [&] { bar_arrive(TURN_BARRIER + 1 - warpgroup, 256); };
    if (warpgroup == 1) pass_turn();  // the first turn is warpgroup 0's

    const float scale_log2 = p.softmax_scale * LOG2_E;  // exp(scale s) = 2^(scale_log2 s)
    // A lane's s_acc[n][2 r + i] and o_acc[n][2 r + i], with r and i 0 or 1, are the elements of S
    // and O in row 8 r + lane / 4 of its warp's 16 and column 8 n + 2 (lane % 4) + i.
    float o_acc[V_DIM / 8][4] = {};
    float shift[2];     // m, in units of log2
    float tile_sum[2];  // this lane's share of a tile's sum of P
    float row_sum[2];   // this lane's share of l, at last all of it
    float inverse[2];   // 1 / l

    uint32_t q_frag[(DIM - Q_SMEM_DIM) / 16][4];  // [16, 16] each, of the warp's rows
    float s_acc[BLOCK_N / 8][4];
    uint32_t p_frag[BLOCK_N / 16][4];
    float rescale[2];

    // ---- load Q of a work tile: what goes to registers
    const uint64_t q_desc = k_major(smem.q, group_row, 0);
    const auto load_q = [&](int i) {
        wait_for(smem.q_full[warpgroup], i);
#pragma unroll
        for (int d = Q_SMEM_DIM; d < DIM; d += 16)
            ldmatrix_x4(q_frag[(d - Q_SMEM_DIM) / 16],
                        swizzled(smem.q, warp_row + lane % 16, d + lane / 16 * 8));
        __syncwarp();  // every lane has its elements, whose place is then O's
    };
    // Every product that reads Q has ended, and O has left the last panel's place.
    const auto release_q = [&] {
        if (lane == 0) cp_async_bulk_wait_group_read<0>();
        release(smem.q_empty[warpgroup]);
    };

    // ---- S += Q K^T  [BLOCK_M, BLOCK_N] of the slice, [64, BLOCK_N] of it in each warpgroup
    const auto start_s = [&](int number, bool add) {
        const Place<NUM_STAGES> place = {number};
        wait_for(smem.k_full[place.stage()], place.phase());
        wgmma_fence(s_acc, q_frag);
#pragma unroll
        for (int d = 0; d < DIM; d += 16) {
            const uint64_t k_desc = k_major<PANELS, BLOCK_N>(smem.k[place.stage()], 0, d);
            if (d < Q_SMEM_DIM)
                wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(
                    s_acc, q_desc + (d / PANEL * sizeof(smem.q[0]) + 2 * (d % PANEL)) / 16, k_desc,
                    add || d > 0);
            else
                wgmma_m64nNk16<Element, K_MAJOR>(s_acc, q_frag[(d - Q_SMEM_DIM) / 16], k_desc,
                                                 add || d > 0);
        }
        wgmma_commit_group();
    };
    const auto release_k = [&](int number) {
        release(smem.k_empty[Place<NUM_STAGES>{number}.stage()]);
    };
    // ---- O += P V  [BLOCK_M, V_DIM] of the slice, [64, V_DIM] of it in each warpgroup
    const auto wait_for_v = [&](int number) {
        const Place<NUM_STAGES> place = {number};
        wait_for(smem.v_full[place.stage()], place.phase());
    };
    const auto start_pv = [&](int number, bool add) {
        wgmma_fence(o_acc, p_frag);
#pragma unroll
        for (int j = 0; j < BLOCK_N; j += 16)
            wgmma_m64nNk16<Element, MN_MAJOR>(
                o_acc, p_frag[j / 16],
                mn_major<V_PANELS, BLOCK_N>(smem.v[Place<NUM_STAGES>{number}.stage()], j),
                add || j > 0);
        wgmma_commit_group();
    };
    const auto release_v = [&](int number) {
        release(smem.v_empty[Place<NUM_STAGES>{number}.stage()]);
    };
    const auto rescale_o = [&] {
#pragma unroll
        for (int n = 0; n < V_DIM / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) o_acc[n][i] *= rescale[i / 2];
    };

    // ---- what blocks send each other, of a tile. A thread of the owner and that of the same number in
    // another block have the same elements.
    // s_acc, to the owner
    const auto send_s = [&](int number) {
        wait_for(exchange.s_empty, number - 1);
        auto& partial = smem.partial[rank - (rank > owner)];
#pragma unroll
        for (int n = 0; n < BLOCK_N / 8; ++n) {
            const float* x = s_acc[n];
            st_async(partial[n][thread], make_float4(x[0], x[1], x[2], x[3]), exchange.s_full,
                     owner);
        }
    };
    // s_acc = the sum of the others'
    const auto receive_s = [&](int number) {
        if constexpr (SLICES > 1) {
            if (thread == 0) mbarrier_arrive_expect_tx(exchange.s_full, sizeof(smem.partial));
            wait_for(exchange.s_full, number);
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                for (int from = 0; from < SLICES - 1; ++from) {
                    const float4 x = load_float4(smem.partial[from][n][thread]);
                    const float part[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        s_acc[n][i] = from == 0 ? part[i] : s_acc[n][i] + part[i];
                }
        }
    };
    // Others may send again when what has arrived is in registers, for which a product waits before it
    // starts: loads that are on their way could come too late, and a relaxed arrival waits for none.
    const auto release_s = [&] {
        if (lane > 0 && lane < SLICES)
            mbarrier_arrive_cluster_relaxed(exchange.s_empty, (rank + lane) % SLICES);
    };
    const auto release_p = [&] {
        if (lane == 0) mbarrier_arrive_cluster_relaxed(exchange.p_empty, owner);
    };
    // P, the factors of O before it is added, and 1 / l, which with the last P of a work tile is known.
    const auto send_p = [&](int number) {
        if constexpr (SLICES > 1) {
            wait_for(exchange.p_empty, number - 1);
#pragma unroll
            for (int step = 1; step < SLICES; ++step) {
                const int to = (rank + step) % SLICES;
#pragma unroll
                for (int j = 0; j < BLOCK_N / 16; ++j) {
                    float4 x;
                    memcpy(&x, p_frag[j], sizeof(x));
                    st_async(exchange.prob[j][thread], x, exchange.p_full, to);
                }
                if (lane % 4 == 0)
                    st_async(exchange.factors[thread / 4],
                             make_float4(rescale[0], rescale[1], inverse[0], inverse[1]),
                             exchange.p_full, to);
            }
        }
    };
    const auto receive_p = [&](int number) {
        if (thread == 0)
            mbarrier_arrive_expect_tx(exchange.p_full,
                                      sizeof(exchange.factors) + sizeof(exchange.prob));
        wait_for(exchange.p_full, number);
        const float4 x = load_float4(exchange.factors[thread / 4]);
        rescale[0] = x.x, rescale[1] = x.y, inverse[0] = x.z, inverse[1] = x.w;
#pragma unroll
        for (int j = 0; j < BLOCK_N / 16; ++j) {
            const float4 x = load_float4(exchange.prob[j][thread]);
            memcpy(p_frag[j], &x, sizeof(x));
        }
    };

    // ---- softmax: P = 2^(S - m)
    // Hides keys, and scales S where the exponential's multiply-add cannot. Returns the scale that is
    // left for it.
    const auto scale_and_mask = [&](const WorkTile& work, int tile) {
        // The scale is part of the exponential's multiply-add. All of a row's P share the rounding
        // error of scale * max, which cancels (for logits up to 2^27). But with a negative scale the
        // largest S is not the largest logit, and 0 * -inf is NaN.
        float tile_scale = scale_log2;
        if (scale_log2 <= 0.0f) {
            tile_scale = 1.0f;
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s_acc[n][i] *= scale_log2;
        }
        // Hidden keys, where the warp's first row has some.
        const int k_start = tile * BLOCK_N, warp_start = work.q_start + warp_row;
        if (k_start + BLOCK_N > visible_keys(p, warp_start)) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                // From the lane's first column on.
                const int row = warp_start + 8 * r + lane / 4;
                const int keys = visible_keys(p, row) - k_start - 2 * (lane % 4);
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (8 * n + i >= keys) s_acc[n][2 * r + i] = -INFINITY;
            }
        }
        return tile_scale;
    };
    // The largest element of a row.
    const auto largest = [&](int r) {
        float x = -INFINITY;
#pragma unroll
        for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) x = fmaxf(x, s_acc[n][2 * r + i]);
        return quad_max(x);
    };
    const auto exponentiate = [&](float tile_scale) {
        tile_sum[0] = tile_sum[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s_acc[n][i] = ex2_approx_ftz(s_acc[n][i] * tile_scale - shift[i / 2]);
                tile_sum[i / 2] += s_acc[n][i];
            }
    };

    // P in the layout of wgmma's operand A: of the warp's upper 8 rows (r = 0) or of its lower ones.
    const auto convert_half = [&](int r) {
#pragma unroll
        for (int j = 0; j < BLOCK_N / 16; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* s = &s_acc[2 * j + i][2 * r];
                p_frag[j][2 * i + r] = cvt_rn_x2<Element>(s[0], s[1]);
            }
    };
    const auto convert_p = [&] {
        convert_half(0);
        convert_half(1);
    };

    // S of a tile again: P has taken its place, and K may have left shared memory. So from global
    // memory, and by mma.sync, since the warpgroup's other warps may have nothing to repair; and of all
    // columns, so that nothing need be sent: the other blocks' warps with these rows do the same.
    const auto compute_s_again = [&](const WorkTile& work, int tile) {
        const int row = work.q_start + warp_row + lane / 4, key = tile * BLOCK_N + lane / 4;
        // Four elements of a row, zeros where it has none. A quad's lanes read 16 of them; in the
        // sum over d the order does not matter, if it is the same for Q and K.
        const auto four = [](const Element* x, int64_t stride, int row, int rows, bool inside) {
            return inside && uint32_t(row) < uint32_t(rows)
                       ? *reinterpret_cast<const uint64_t*>(x + row * stride)
                       : 0;
        };
        const Element* q =
            p.q + work.batch * p.q_stride.batch + work.head * p.q_stride.head + 4 * (lane % 4);
        const Element* k =
            p.k + work.batch * p.k_stride.batch + work.kv_head * p.k_stride.head + 4 * (lane % 4);
#pragma unroll
        for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s_acc[n][i] = 0.0f;
#pragma unroll 1
        for (int d = 0; d < HEAD_DIM; d += 16, q += 16, k += 16) {
            const bool inside = d + 4 * (lane % 4) < HEAD_DIM;
            const uint64_t upper = four(q, p.q_stride.row, row, p.seq_q, inside);
            const uint64_t lower = four(q, p.q_stride.row, row + 8, p.seq_q, inside);
            const uint32_t a[4] = {uint32_t(upper), uint32_t(lower), uint32_t(upper >> 32),
                                   uint32_t(lower >> 32)};
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n) {
                const uint64_t b = four(k, p.k_stride.row, key + 8 * n, p.seq_k, inside);
                mma_m16n8k16<Element>(s_acc[n], a, uint32_t(b), uint32_t(b >> 32));
            }
        }
    };

    // ---- raise m where P has left its range: m' = m + e, and P, l and O become 2^-e times what they
    // were. Where P was not lost, e is a whole number: that changes no digit of them; and only the upper
    // or the lower 8 of the warp's rows may need it. Returns whether a row of the warp has a new m; O is
    // still to be scaled then, when no product adds to it.
    const auto raise_shift = [&](const WorkTile& work, int tile) {
        if (!__any_sync(0xffffffff, tile_sum[0] > MAX_SUM || tile_sum[1] > MAX_SUM)) return false;
        // Votes and shuffles are issued together: the result of each takes long to arrive.
        const bool lost = __any_sync(0xffffffff, tile_sum[0] > LOST_SUM || tile_sum[1] > LOST_SUM);
        bool over[2];
        float largest_sum[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            over[r] = __any_sync(0xffffffff, tile_sum[r] > MAX_SUM);
            largest_sum[r] = quad_max(tile_sum[r]);
        }
        if (lost) {
            compute_s_again(work, tile);
            const float tile_scale = scale_and_mask(work, tile);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float raised = fmaxf(shift[r], largest(r) * tile_scale + HEADROOM);
                rescale[r] = ex2_approx_ftz(shift[r] - raised);
                shift[r] = raised;
            }
            exponentiate(tile_scale);
            convert_p();
        } else {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                rescale[r] = 1.0f;
                if (!over[r]) continue;  // usually only one half of the warp's rows needs it
                // floor(log2) of a sum that is not much larger than the row's largest P, and 2^-e, by
                // the exponent's bits: lg2 and ex2 would queue behind other warps' exponentials.
                const int exponent = (__float_as_int(largest_sum[r]) >> 23) - 127;
                const int e = max(exponent + HEADROOM, 0);
                rescale[r] = __int_as_float((127 - e) << 23);
                shift[r] += e;
                tile_sum[r] *= rescale[r];
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) s_acc[n][2 * r + i] *= rescale[r];
                convert_half(r);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) row_sum[r] *= rescale[r];
        return true;
    };
    // What is sent with a P that is neither the last nor raises m; nobody reads 1 / l then.
    const auto reset_factors = [&] {
        rescale[0] = rescale[1] = 1.0f;
        inverse[0] = inverse[1] = 0.0f;
    };
    const auto sum_up = [&] {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row_sum[r] = quad_sum(row_sum[r]);
            inverse[r] = row_sum[r] == 0.0f ? 0.0f : 1.0f / row_sum[r];
        }
    };

    // ---- write O, panel by panel
    const auto write = [&](const WorkTile& work) {
#pragma unroll
        for (int panel = 0; panel < V_PANELS; ++panel) {
            if (panel > 0) {
                if (lane == 0) cp_async_bulk_wait_group_read<0>();
                __syncwarp();  // what was there has left
            }
#pragma unroll
            for (int n = panel * PANEL / 8; n < min((panel + 1) * PANEL, V_DIM) / 8; n += 2) {
                uint32_t o_frag[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* x = &o_acc[n + i / 2][2 * (i % 2)];
                    o_frag[i] = cvt_rn_x2<Element>(x[0] * inverse[i % 2], x[1] * inverse[i % 2]);
                }
                const int d = Q_SMEM_DIM + 8 * n % PANEL + lane / 16 * 8;
                stmatrix_x4(swizzled(smem.q, warp_row + lane % 16, d), o_frag);
            }
            fence_proxy_async();  // by each writer, before the barrier
            __syncwarp();
            if (lane == 0) {
                // A warp's 16 rows are a box. TMA leaves out the rows past seq_q and the columns past
                // V_HEAD_DIM, some of which nobody has written.
                cp_async_bulk_tensor_store(p.o_map, v_first_column + PANEL * panel,
                                           work.q_start + warp_row, work.head, work.batch,
                                           smem.q[PANELS - 1][warp_row]);
                cp_async_bulk_commit_group();
            }
        }
    };
    const auto write_lse = [&](const WorkTile& work) {
        // log sum exp = (m + log2 l) ln 2, of both without the headroom: the logarithm is most exact
        // near 1. -inf where no key is visible. Of the 4 lanes that know m and l of two rows, two
        // write one each.
        const int r = lane % 4, row = work.q_start + warp_row + 8 * r + lane / 4;
        if (r < 2 && row < p.seq_q) {
            const float l = r == 0 ? row_sum[0] : row_sum[1], m = r == 0 ? shift[0] : shift[1];
            p.lse[(int64_t(work.batch) * p.heads + work.head) * p.seq_q + row] =
                l == 0.0f ? -INFINITY
                          : (m - HEADROOM + lg2_approx_ftz(l * ex2_approx_ftz(HEADROOM))) * LN_2;
        }
    };

    // ======== the rows whose softmax this block computes ========
    const auto attend = [&] {
        cluster_wait();  // the mbarriers of all blocks are initialized
        int number = 0;  // of the tile, among those of all work tiles
        load_q(0);
        receive_s(0);
        wait_for_turn();
        start_s(0, SLICES > 1);
        release_s();
        pass_turn();
        for (int i = 0;; ++i) {
            const WorkTile& work = works[i % 2];
            // ---- the first tile, whose S has been started
            wgmma_wait_group<0>(s_acc);
            release_k(number);
            const float first_scale = scale_and_mask(work, 0);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float tile_max = largest(r) * first_scale;
                // Where S is -inf throughout, m is so far below any other S that P is lost there, and
                // not -inf itself: 2^(-inf + inf) is NaN.
                shift[r] = fmaxf(tile_max + HEADROOM, -0x1p126f);
            }
            exponentiate(first_scale);
#pragma unroll
            for (int r = 0; r < 2; ++r) row_sum[r] = tile_sum[r];
            convert_p();
            reset_factors();
            send_p(number);
            wait_for_v(number);
            ++number;

            // ---- for each K/V tile
            bool raised = false;
            for (int tile = 1; tile < work.num_tiles; ++tile, ++number) {
                const bool is_last = tile + 1 == work.num_tiles;
                receive_s(number);
                wait_for_turn();
                start_s(number, SLICES > 1);
                release_s();
                if (raised) rescale_o();  // while S is multiplied
                start_pv(number - 1, tile > 1);
                pass_turn();
                wgmma_wait_group<1>(s_acc);
                release_k(number);
                if (is_last) release_q();
                exponentiate(scale_and_mask(work, tile));  // while O += P V runs
                // The wait for V stands here because ptxas moves no code across a loop that waits:
                // without it, ptxas lets all of the softmax wait for O.
                wait_for_v(number);
                wgmma_wait_group<0>(o_acc, p_frag);
                release_v(number - 1);
                convert_p();
                reset_factors();
                raised = raise_shift(work, tile);
#pragma unroll
                for (int r = 0; r < 2; ++r) row_sum[r] += tile_sum[r];
                if (is_last) sum_up();
                send_p(number);
            }
            if (raised) rescale_o();
            // The last product is started in either branch: ptxas serializes a wgmma that is under way
            // where branches part.
            if (work.is_last) {
                wait_for_turn();
                start_pv(number - 1, true);
                pass_turn();
                wgmma_wait_group<0>(o_acc, p_frag);
                write(work);
                write_lse(work);
                break;
            }
            load_q(i + 1);
            receive_s(number);
            wait_for_turn();
            start_pv(number - 1, true);
            start_s(number, SLICES > 1);
            release_s();
            pass_turn();
            wgmma_wait_group<1>(o_acc, p_frag);
            release_v(number - 1);
            write(work);  // while S of the next work tile runs
            write_lse(work);
        }
    };

    // ======== those whose softmax another one computes: S goes there a tile before it is needed, while
    // P of the tile before is on its way ========
    const auto assist = [&] {
        // P of a tile, and O ready to be added to.
        const auto prepare_pv = [&](int number) {
            wait_for_v(number);
            receive_p(number);
            if (__any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f)) rescale_o();
        };
        load_q(0);
        start_s(0, false);
        cluster_wait();  // the mbarriers of all blocks are initialized
        wgmma_wait_group<0>(s_acc);
        release_k(0);
        send_s(0);
        wait_for_turn();
        start_s(1, false);
        pass_turn();
        wgmma_wait_group<0>(s_acc);
        release_k(1);
        if (works[0].num_tiles == 2) release_q();
        send_s(1);
        int number = 1;  // of a tile: S is that of the next one, and P that of the one before
        for (int i = 0;; ++i) {
            const WorkTile& work = works[i % 2];
            for (int tile = 1; tile < work.num_tiles; ++tile, ++number) {
                prepare_pv(number - 1);
                // After the work tile's last S comes the next one's first.
                if (tile + 1 == work.num_tiles) {
                    if (work.is_last) break;
                    load_q(i + 1);
                }
                wait_for_turn();
                start_s(number + 1, false);
                start_pv(number - 1, tile > 1);
                release_p();
                pass_turn();
                wgmma_wait_group<1>(s_acc);
                release_k(number + 1);
                if (tile + 2 == work.num_tiles) release_q();
                send_s(number + 1);
                wgmma_wait_group<0>(o_acc, p_frag);
                release_v(number - 1);
            }
            if (work.is_last) {
                wait_for_turn();
                start_pv(number - 1, work.num_tiles > 2);
                release_p();
                pass_turn();
                wgmma_wait_group<0>(o_acc, p_frag);
                release_v(number - 1);
                prepare_pv(number);
                wait_for_turn();
                start_pv(number, true);
                pass_turn();
                wgmma_wait_group<0>(o_acc, p_frag);
                write(work);
                break;
            }
            prepare_pv(number - 1);
            wait_for_turn();
            start_pv(number - 1, true);
            start_s(number + 1, false);
            release_p();
            pass_turn();
            wgmma_wait_group<1>(o_acc, p_frag);
            release_v(number - 1);
            write(work);  // while S of the next work tile's second tile runs
            wgmma_wait_group<0>(s_acc);
            release_k(number + 1);
            if (works[(i + 1) % 2].num_tiles == 2) release_q();
            send_s(number + 1);
            ++number;
        }
    };

    if (rank == owner)
        attend();
    else
        assist();
    if (lane == 0) cp_async_bulk_wait_group_read<0>();
    cluster_arrive();
    cluster_wait();  // no block reaches into another one any more
}
