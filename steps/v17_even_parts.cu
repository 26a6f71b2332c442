// v17 -- even parts: each work tile is cut into as many parts as keep all blocks busy, and in step
// taken: only for few work tiles; for more, v12's shares or its order keep the blocks busy
// change: v11's work tiles, each cut into the same number of parts of its keys: the number with which
//     all rounds together are shortest, unless whole ones keep the blocks busy. In a round, heads that
//     share keys are at the same part of them. A second kernel merges the parts, as in v13
// why: 128 queries of 32 heads are 32 work tiles, for 132 SMs. v13 cuts them, too, but computes S from
//     Q in shared memory, with a running maximum. And v12's shares begin anywhere: heads that share
//     keys, and work tiles of a head, read them at different times, each from DRAM. Predicted: v11's
//     speed per SM, on all SMs, where a call takes much longer than to write and merge the parts
// repeats: all bits on as many multiprocessors; their number decides where the keys are cut
// limits: bf16, fp16; head_dim 8-256 by 8; sm_90a
#include "attention_divisors.cuh"
#include "dependent_launch.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = HEAD_DIM <= 96 ? 3 : 2;  // warpgroups that compute; one more copies
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER = 128 * CONSUMERS;  // the thread that starts all copies
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240;
constexpr int BLOCK_M = 64 * CONSUMERS;  // query rows, 64 a warpgroup
constexpr int BLOCK_N =                  // keys of a tile
    HEAD_DIM <= 64    ? 128
    : HEAD_DIM <= 96  ? 96
    : HEAD_DIM <= 128 ? 128
    : HEAD_DIM <= 192 ? 96
                      : 64;
constexpr int NUM_STAGES = CONSUMERS;             // tiles of K, and of V, in shared memory
constexpr bool IS_PACED = HEAD_DIM > 64;          // their copies begin one after another, as in v13
constexpr int Q_STAGES = HEAD_DIM <= 64 ? 2 : 1;  // tiles of Q
constexpr int PANEL = 64;  // columns of a panel: 128 bytes a row, the swizzle's width
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole products; zeros from HEAD_DIM on
// The last panels of Q are kept in registers, as many as there is room for, and O leaves through
// their place in shared memory; without any it has a panel of its own.
constexpr int Q_PANELS = CONSUMERS == 3 ? 0 : HEAD_DIM <= 128 ? 2 : 1;
constexpr int Q_SMEM_DIM = (PANELS - Q_PANELS) * PANEL;  // columns of Q that wgmma reads from there
constexpr int O_PANELS = Q_PANELS == 0 ? 1 : Q_PANELS;
constexpr int FIRST_O_PANEL = Q_PANELS == 0 ? Q_STAGES * PANELS : PANELS - Q_PANELS;
constexpr int TURN_BARRIER = 1;  // of warpgroup 0; the others' follow. 0 is that of __syncthreads

// Where m is set, the row's largest P becomes 2^-HEADROOM, or up to twice that. It is set again where
// a lane's share of a tile's sum of P exceeds MAX_SUM. fp16 holds P up to 65504 and has no exponents
// to spare below 1. bf16 has, but V may be large, too: with sums of at most 2^16, O += P V stays
// finite for |V| < 2^96 and 2^20 keys. More headroom would cost S - m, a float, its last digits.
constexpr int HEADROOM = std::is_same_v<Element, fp16> ? 0 : 24;
constexpr float MAX_SUM = std::is_same_v<Element, fp16> ? 65504.0f : 0x1p16f;
// Beyond it P cannot be brought back by one normal power of two; it may be infinite.
constexpr float LOST_SUM = 0x1p100f;

// Up to BLOCK_M queries of a head, and a part of the tiles of keys that they see.
struct WorkTile {
    int q_start, head, batch;
    int first, end;  // tiles of keys, at least 1; `end` is the one after the last
    int part;        // its number among all of them
    int last;        // no other one follows
};

// What a block has found in a part of a work tile's keys: O = sum P V, m and l. Each thread leaves what
// it has, so that a warp writes 128 bytes side by side, and reads them like that.
struct alignas(128) Part {
    float o[DIM / 8][4][PRODUCER];
    float shift[2][PRODUCER], row_sum[2][PRODUCER];
};
constexpr int MAX_BLOCKS = 144;  // no device of this architecture has more SMs
constexpr int MAX_ROUNDS = 3;    // of parts
// What it takes to begin and to leave a part, and to merge all of them, in tiles.
constexpr int PART_TILES = 2, MERGE_TILES = 4;
constexpr int MERGE_THREADS = 256, MERGE_BLOCKS = 3;  // the latter on an SM
constexpr int MERGED_PAIRS = 4;                       // of a row's columns that a thread merges, of
constexpr int MERGED_AT_ONCE = 4;                     // so many parts at a time

// The place of a tile in a ring of stages, by its number among all tiles of its kind.
template <int STAGES>
struct Place {
    int number = 0;

    __device__ int stage() const { return number % STAGES; }
    __device__ int phase() const { return number / STAGES; }  // of the stage's barriers
    __device__ Place before() const { return {number - 1}; }
};

// Columns of a tensor in panels, as TMA writes them: in each, 8 rows of 128 bytes are swizzled.
template <int NUM_PANELS, int ROWS>
using Panels = Element[NUM_PANELS][ROWS][PANEL];

struct alignas(1024) SharedMemory {                 // the swizzle's pattern: 8 rows of 128 bytes
    Panels<FIRST_O_PANEL + O_PANELS, BLOCK_M> q_o;  // the stages of Q; its last panels: O
    Panels<PANELS, BLOCK_N> k[NUM_STAGES];
    Panels<PANELS, BLOCK_N> v[NUM_STAGES];
    Mbarrier q_full[Q_STAGES], k_full[NUM_STAGES], v_full[NUM_STAGES];     // the tile has arrived
    Mbarrier q_empty[Q_STAGES], k_empty[NUM_STAGES], v_empty[NUM_STAGES];  // every warp has read it
    WorkTile work[Q_STAGES];                                               // whose Q has arrived
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward",
                 .grid = {{SEQ_Q, BLOCK_M}, {SEQ_K, BLOCK_N}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory),
                 .blocks_per_sm = 1},
                {.name = "attention_merge",
                 .grid = {{SEQ_Q, 1}, {HEADS, 1}, {BATCH, 1}, {SPLIT_KEYS, 1}},
                 .threads = MERGE_THREADS,
                 .blocks_per_sm = MERGE_BLOCKS}},
    // By an axis, as blocks without a second tile leave parts, too.
    .workspace = {{.element_bytes = sizeof(Part), .shape = {{BATCH, MAX_ROUNDS * MAX_BLOCKS}}}},
    .q_box = {BLOCK_M, PANEL, SWIZZLE_128B},
    .k_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .v_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .o_box = {16, PANEL, SWIZZLE_128B},
};
__constant__ int32_t kernels_start_early = 1;
}

// The keys that a row of queries sees. Causal: query i sees j <= i + seq_k - seq_q, so the last
// query sees the last key.
__device__ int visible_keys(const AttentionParams& p, int row) {
    return CAUSAL ? min(p.seq_k, row + p.seq_k - p.seq_q + 1) : p.seq_k;
}

// Their tiles, at least 1.
__device__ int visible_tiles(const AttentionParams& p, int row) {
    return max(1, (visible_keys(p, row) + BLOCK_N - 1) / BLOCK_N);
}

// How many consumers a head's rows keep busy. Of three, 197 rows need two: as 4 groups of 64 they are
// two work tiles of 2 groups, not one of 3 and one of a single group. A consumer that is alone takes
// turns with itself.
__device__ int busy_consumers(const DivisorsParams& p) {
    return p.tiles[0].divide((p.seq_q - 1) / 64) + 1;
}

// The parts of all work tiles, in a row. Block b computes the parts b, b + gridDim.x, b + 2 gridDim.x
// ..., each time one of a round.
struct Schedule {
    const DivisorsParams& p;
    const Divisor q_blocks, heads;  // work tiles of a head; heads of a batch
    int parts;                      // of a work tile
    int tile_rows;                  // of a work tile; the box of Q has BLOCK_M
    int group_work;                 // work tiles of a key head
    int first_row;                  // of a head's first work tile
    int num_parts;                  // of all work tiles

    __device__ Schedule(const DivisorsParams& params, int parts_each)
        : p(params),
          q_blocks(p.tiles[0]),
          heads(p.tiles[2]),
          parts(parts_each),
          tile_rows(64 * busy_consumers(p)),
          group_work(p.group.value * q_blocks.value),
          // A head's block that is not full is the first, which sees the fewest keys. O leaves in
          // boxes of 16 rows: each lies before the tensor's first row, or begins at one of its rows.
          first_row(-((int(q_blocks.value) * tile_rows - p.seq_q) / 16 * 16)),
          num_parts(p.works.value * parts) {}

    // Of a key head, first the first part of all its work tiles: these are at the same keys.
    __device__ WorkTile at(uint32_t i) const {
        const uint32_t row = p.group.divide(q_blocks.divide(i));  // of parts in step
        const uint32_t head_of_keys = row / parts;
        return part_of(head_of_keys, i - row * group_work, row - head_of_keys * parts);
    }

    // Of a work tile, by its number; the next part is group_work later.
    __device__ WorkTile first_part(uint32_t work) const {
        const uint32_t head_of_keys = p.group.divide(q_blocks.divide(work));
        return part_of(head_of_keys, work - head_of_keys * group_work, 0);
    }

    // Of a head of keys, by the number of its work tile and of that one's part.
    __device__ WorkTile part_of(uint32_t head_of_keys, uint32_t work, int part) const {
        const uint32_t head_in_group = q_blocks.divide(work);
        const uint32_t head = head_of_keys * p.group.value + head_in_group;  // of all batches
        const uint32_t batch = heads.divide(head);
        const int q_start = first_row + int(work - head_in_group * q_blocks.value) * tile_rows;
        // A part that is left without tiles has one that no row sees.
        const int tiles = visible_tiles(p, q_start + tile_rows - 1);
        const int part_tiles = (tiles + parts - 1) / parts, first = part * part_tiles;
        const int number = (head_of_keys * parts + part) * group_work + work;
        return {q_start,
                int(head - batch * heads.value),
                int(batch),
                first,
                max(first + 1, min(first + part_tiles, tiles)),
                number,
                number + int(gridDim.x) >= num_parts};
    }
};

// How many parts each work tile has. In one more round there may be room for more of them. Which number
// takes least?
__device__ int parts_of_each(const DivisorsParams& p) {
    if (!p.split_keys) return 1;  // there is no second one
    const uint32_t blocks = p.blocks.value, all_rounds = p.blocks.divide(p.works.value - 1) + 1;
    const uint32_t tiles = visible_tiles(p, p.seq_q - 1);
    uint32_t parts = 1, least = all_rounds * (tiles + PART_TILES);
#pragma unroll 1
    for (uint32_t rounds = all_rounds; rounds <= MAX_ROUNDS; ++rounds) {
        const uint32_t count = p.works.divide(rounds * blocks);
        const uint32_t part_tiles = (tiles - 1) / count + 1;
        const uint32_t time = rounds * (part_tiles + PART_TILES) + MERGE_TILES;
        if (count > 1 && time < least) least = time, parts = count;
    }
    return parts;
}

// (m + log2 l) ln 2, of both without the headroom: the logarithm is most exact near 1. -inf where no key
// is visible.
__device__ float log_sum_exp(float m, float l) {
    return l == 0.0f ? -INFINITY
                     : (m - HEADROOM + lg2_approx_ftz(l * ex2_approx_ftz(HEADROOM))) * LN_2;
}

// Waits for the end of a phase. Phase -1 counts as ended: a new stage is empty.
__device__ void wait_for(Mbarrier& barrier, int phase) {
    while (!mbarrier_try_wait_parity(barrier, phase & 1)) {
    }
}

// Starts tile[panel][r][col] = tensor[row + r][PANEL panel + col], zeros past its ends, and
// announces its bytes to the barrier. Called by one thread.
template <int ROWS>
__device__ void load_tile(Element (*tile)[ROWS][PANEL], const TensorMap& map, int row, int head,
                          int batch, Mbarrier& full) {
    mbarrier_arrive_expect_tx(full, PANELS * sizeof(tile[0]));
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
        cp_async_bulk_tensor_load(tile[panel][0], map, PANEL * panel, row, head, batch, full);
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

// The last tiles of a work tile may be hidden from a warpgroup's rows. It passes over them while its
// last product still holds a stage of V, so there must be fewer of them than stages.
constexpr int MOST_HIDDEN = NUM_STAGES - 1;
static_assert(!CAUSAL || BLOCK_M - 64 <= MOST_HIDDEN * BLOCK_N);

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_forward(const __grid_constant__ DivisorsParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    // Uniform across the warp; the shuffles tell the compiler so.
    const auto uniform = [](int x) { return __shfl_sync(0xffffffff, x, 0); };
    const int lane = threadIdx.x % 32, consumers = busy_consumers(p);
    griddepcontrol_launch_dependents();  // attention_merge may take the SMs that become free
    const Schedule schedule(p, parts_of_each(p));
    if (int(blockIdx.x) >= schedule.num_parts) return;
    const bool is_part = schedule.parts > 1;

    if (threadIdx.x == PRODUCER) {
        prefetch_tensormap(p.k_map);
        prefetch_tensormap(p.q_map);
        prefetch_tensormap(p.v_map);
        prefetch_tensormap(p.o_map);
#pragma unroll
        for (int stage = 0; stage < Q_STAGES; ++stage) {
            mbarrier_init(smem.q_full[stage], 1);
            mbarrier_init(smem.q_empty[stage], 4 * consumers);
        }
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(smem.k_full[stage], 1);
            mbarrier_init(smem.v_full[stage], 1);
            mbarrier_init(smem.k_empty[stage], 4 * consumers);
            mbarrier_init(smem.v_empty[stage], 4 * consumers);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarriers are initialized

    Place<NUM_STAGES> place;  // of the next tile of K; V of a tile is needed one tile later
    Place<Q_STAGES> q_place;  // of the next work tile's Q

    // ======== the producer: one thread copies, for all work tiles, K of a tile, then V of the tile
    // before, as the consumers need them ========
    if (uniform(threadIdx.x / 128) == CONSUMERS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x != PRODUCER) return;
        int v_row, v_head, v_batch;  // of the tile before
        const auto load_v = [&] {
            const Place<NUM_STAGES> before = place.before();
            if (IS_PACED && before.number > 0)
                wait_for(smem.v_full[before.before().stage()], before.before().phase());
            wait_for(smem.v_empty[before.stage()], before.phase() - 1);
            load_tile<BLOCK_N>(smem.v[before.stage()], p.v_map, v_row, v_head, v_batch,
                               smem.v_full[before.stage()]);
        };
        for (int i = blockIdx.x, last = 0; !last; i += gridDim.x) {
            const WorkTile work = schedule.at(i);
            const int kv_head = p.group.divide(work.head);
            for (int tile = work.first; tile < work.end; ++tile, ++place.number) {
                if (IS_PACED && place.number > 0)
                    wait_for(smem.k_full[place.before().stage()], place.before().phase());
                wait_for(smem.k_empty[place.stage()], place.phase() - 1);
                load_tile<BLOCK_N>(smem.k[place.stage()], p.k_map, tile * BLOCK_N, kv_head,
                                   work.batch, smem.k_full[place.stage()]);
                if (place.number > 0) load_v();
                if (tile == work.first) {
                    const int stage = q_place.stage();
                    wait_for(smem.q_empty[stage], q_place.phase() - 1);
                    smem.work[stage] = work;
                    load_tile<BLOCK_M>(&smem.q_o[stage * PANELS], p.q_map, work.q_start, work.head,
                                       work.batch, smem.q_full[stage]);
                    ++q_place.number;
                }
                v_row = tile * BLOCK_N, v_head = kv_head, v_batch = work.batch;
            }
            last = work.last;
        }
        load_v();
        return;
    }

    // ======== the consumers: a warpgroup computes 64 rows of each work tile ========
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int warp = uniform(threadIdx.x / 32), warpgroup = warp / 4;
    if (warpgroup >= consumers) return;
    const int group_row = 64 * warpgroup;  // the warpgroup's first row in the block
    const int warp_row = 16 * warp;        // and the warp's
    const auto release = [&](Mbarrier& empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };
    // Ping-pong scheduling: consumers start their products in turn, so that one computes softmax
    // while another multiplies. A warpgroup's barrier takes its 128 threads, which wait, and the 128
    // of its predecessor, which have started theirs. Nobody takes the last turn.
    const int next_warpgroup = (warpgroup + 1) % consumers;
    const auto wait_for_turn = [&] { bar_sync(TURN_BARRIER + warpgroup, 256); };
    const auto pass_turn = [&] { bar_arrive(TURN_BARRIER + next_warpgroup, 256); };
    if (next_warpgroup == 0) pass_turn();  // the first turn is warpgroup 0's

    const float scale_log2 = p.softmax_scale * LOG2_E;  // exp(scale s) = 2^(scale_log2 s)
    // A lane's s_acc[n][2 r + i] and o_acc[n][2 r + i], with r and i 0 or 1, are the elements of S
    // and O in row 8 r + lane / 4 of its warp's 16 and column 8 n + 2 (lane % 4) + i.
    float o_acc[DIM / 8][4] = {};
    float shift[2];     // m, in units of log2
    float tile_sum[2];  // this lane's share of a tile's sum of P
    float row_sum[2];   // this lane's share of l, at last all of it
    float inverse[2];   // 1 / l

    constexpr int Q_STEPS = Q_PANELS == 0 ? 1 : (DIM - Q_SMEM_DIM) / 16;
    uint32_t q_frag[Q_STEPS][4];  // [16, 16] each, of the warp's rows
    uint64_t q_desc;              // the warpgroup's rows of what wgmma reads from shared memory
    float s_acc[BLOCK_N / 8][4];
    uint32_t p_frag[BLOCK_N / 16][4];
    float rescale[2];

    // ---- load Q: what goes to registers, and the work tile that it belongs to
    const auto load_q = [&] {
        wait_for(smem.q_full[q_place.stage()], q_place.phase());
        const WorkTile work = smem.work[q_place.stage()];
        q_desc = k_major(smem.q_o, group_row, q_place.stage() * PANELS * PANEL);
#pragma unroll
        for (int d = Q_SMEM_DIM; d < DIM; d += 16)
            ldmatrix_x4(q_frag[(d - Q_SMEM_DIM) / 16],
                        swizzled(smem.q_o, warp_row + lane % 16, d + lane / 16 * 8));
        __syncwarp();  // every lane has its elements, whose place is then O's
        return WorkTile{uniform(work.q_start), uniform(work.head), uniform(work.batch),
                        uniform(work.first),   uniform(work.end),  uniform(work.part),
                        uniform(work.last)};
    };

    // Every product that reads Q from shared memory has ended.
    const auto release_q = [&] {
        release(smem.q_empty[q_place.stage()]);
        ++q_place.number;
    };

    // ---- S = Q K^T  [BLOCK_M, BLOCK_N], [64, BLOCK_N] of it in each warpgroup
    const auto start_s = [&] {
        wait_for(smem.k_full[place.stage()], place.phase());
        wgmma_fence(s_acc, q_frag);
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16) {
            const uint64_t k_desc = k_major<PANELS, BLOCK_N>(smem.k[place.stage()], 0, d);
            if (d < Q_SMEM_DIM)
                wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(
                    s_acc, q_desc + (d / PANEL * sizeof(smem.q_o[0]) + 2 * (d % PANEL)) / 16,
                    k_desc, d > 0);
            else
                wgmma_m64nNk16<Element, K_MAJOR>(s_acc, q_frag[(d - Q_SMEM_DIM) / 16], k_desc,
                                                 d > 0);
        }
        wgmma_commit_group();
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
    // memory, and by mma.sync, since the warpgroup's other warps may have nothing to repair.
    const auto compute_s_again = [&](const WorkTile& work, int tile) {
        const int kv_head = p.group.divide(work.head);
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
            p.k + work.batch * p.k_stride.batch + kv_head * p.k_stride.head + 4 * (lane % 4);
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
    const auto rescale_o = [&] {
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) o_acc[n][i] *= rescale[i / 2];
    };

    // The end of the part's tiles that some row of the warpgroup sees, and for a warpgroup before the
    // first row of as few as it can do with.
    const auto group_end = [&](const WorkTile& work) {
        const int last_row = work.q_start + group_row + 63;
        const int visible = CAUSAL || last_row >= 0 ? visible_tiles(p, last_row) : 0;
        return max(max(work.first + 1, work.end - MOST_HIDDEN), min(work.end, visible));
    };
    // The first tile of a work tile, whose S has been started.
    const auto softmax_first = [&](const WorkTile& work) {
        wgmma_wait_group<0>(s_acc);
        release(smem.k_empty[place.stage()]);
        const float tile_scale = scale_and_mask(work, work.first);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float tile_max = largest(r) * tile_scale;
            // Where S is -inf throughout, m is so far below any other S that P is lost there, and not
            // -inf itself: 2^(-inf + inf) is NaN.
            shift[r] = fmaxf(tile_max + HEADROOM, -0x1p126f);
        }
        exponentiate(tile_scale);
#pragma unroll
        for (int r = 0; r < 2; ++r) row_sum[r] = tile_sum[r];
        convert_p();
        // O has left Q's place. The warp's other lanes learn it at the barrier of their next turn.
        if (Q_PANELS > 0 && lane == 0) cp_async_bulk_wait_group_read<0>();
        if (Q_SMEM_DIM == 0 || group_end(work) == work.first + 1) release_q();
        wait_for(smem.v_full[place.stage()], place.phase());
        ++place.number;
    };

    // ---- O += P V  [BLOCK_M, HEAD_DIM], [64, DIM] of it in each warpgroup
    const auto start_pv = [&](Place<NUM_STAGES> v, bool adds) {
        wgmma_fence(o_acc, p_frag);
#pragma unroll
        for (int j = 0; j < BLOCK_N; j += 16)
            wgmma_m64nNk16<Element, MN_MAJOR>(o_acc, p_frag[j / 16],
                                              mn_major<PANELS, BLOCK_N>(smem.v[v.stage()], j),
                                              adds || j > 0);
        wgmma_commit_group();
    };

    // ---- write O and lse
    const auto sum_up = [&] {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row_sum[r] = quad_sum(row_sum[r]);
            inverse[r] = row_sum[r] == 0.0f ? 0.0f : 1.0f / row_sum[r];
        }
    };
    const auto write_part = [&](const WorkTile& work) {
        Part& part = static_cast<Part*>(p.workspace[0])[work.part];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = work.q_start + warp_row + 8 * r + lane / 4;
            if (row < 0 || row >= p.seq_q) continue;
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) part.o[n][i][threadIdx.x] = o_acc[n][i];
            part.shift[r][threadIdx.x] = shift[r];
            part.row_sum[r][threadIdx.x] = row_sum[r];
        }
    };
    const auto write = [&](const WorkTile& work) {
        const int warp_start = work.q_start + warp_row;
        // O_PANELS at a time. A warp's 16 rows of a panel, swizzled, are a box. TMA leaves out the
        // rows past seq_q and the columns past HEAD_DIM, some of which nobody has written.
#pragma unroll
        for (int first = 0; first < PANELS; first += O_PANELS) {
            if (first > 0 || Q_PANELS == 0) {
                if (lane == 0) cp_async_bulk_wait_group_read<0>();
                __syncwarp();  // what was there has left
            }
            const int end = min(first + O_PANELS, PANELS);
#pragma unroll
            for (int n = first * PANEL / 8; n < min(end * PANEL, DIM) / 8; n += 2) {
                uint32_t o_frag[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* x = &o_acc[n + i / 2][2 * (i % 2)];
                    o_frag[i] = cvt_rn_x2<Element>(x[0] * inverse[i % 2], x[1] * inverse[i % 2]);
                }
                const int d = (FIRST_O_PANEL - first) * PANEL + 8 * n + lane / 16 * 8;
                stmatrix_x4(swizzled(smem.q_o, warp_row + lane % 16, d), o_frag);
            }
            fence_proxy_async();  // by each writer, before the barrier
            __syncwarp();
            if (lane == 0 && warp_start >= 0) {
#pragma unroll
                for (int panel = first; panel < end; ++panel)
                    cp_async_bulk_tensor_store(p.o_map, PANEL * panel, warp_start, work.head,
                                               work.batch,
                                               smem.q_o[FIRST_O_PANEL + panel - first][warp_row]);
                cp_async_bulk_commit_group();
            }
        }
        // Of the 4 lanes that know m and l of two rows, two write one each. After O, whose fence would
        // wait for this store, too.
        const int r = lane % 4, row = warp_start + 8 * r + lane / 4;
        if (r < 2 && 0 <= row && row < p.seq_q) {
            const float l = r == 0 ? row_sum[0] : row_sum[1], m = r == 0 ? shift[0] : shift[1];
            p.lse[(int64_t(work.batch) * p.heads + work.head) * p.seq_q + row] = log_sum_exp(m, l);
        }
    };

    WorkTile work = load_q();
    for (;;) {
        wait_for_turn();
        start_s();
        pass_turn();
        softmax_first(work);
        // ---- for each K/V tile
        const int last_tile = group_end(work) - 1;
        bool raised = false;
        for (int tile = work.first + 1; tile <= last_tile; ++tile, ++place.number) {
            wait_for_turn();
            start_s();
            if (raised) rescale_o();  // while S is multiplied
            start_pv(place.before(), tile > work.first + 1);
            pass_turn();
            wgmma_wait_group<1>(s_acc);
            release(smem.k_empty[place.stage()]);
            if (Q_SMEM_DIM > 0 && tile == last_tile) release_q();
            exponentiate(scale_and_mask(work, tile));  // while O += P V runs
            // The wait for V stands here because ptxas moves no code across a loop that waits:
            // without it, ptxas lets all of the softmax wait for O.
            wait_for(smem.v_full[place.stage()], place.phase());
            wgmma_wait_group<0>(o_acc, p_frag);
            release(smem.v_empty[place.before().stage()]);
            convert_p();
            raised = raise_shift(work, tile);
#pragma unroll
            for (int r = 0; r < 2; ++r) row_sum[r] += tile_sum[r];
        }
        const Place<NUM_STAGES> last_v = place.before();
        for (int tile = last_tile + 1; tile < work.end; ++tile, ++place.number) {
            // The others' tile.
            wait_for_turn();
            pass_turn();
            wait_for(smem.k_full[place.stage()], place.phase());
            __syncwarp();  // a lane still waiting would miss the phases that the release allows
            release(smem.k_empty[place.stage()]);
            wait_for(smem.v_full[place.stage()], place.phase());
            __syncwarp();  // likewise
            release(smem.v_empty[place.stage()]);
        }
        if (raised) rescale_o();
        const WorkTile done = work;
        if (!done.last) work = load_q();  // before O takes the place of Q
        wait_for_turn();
        start_pv(last_v, last_tile > done.first);
        pass_turn();
        sum_up();
        wgmma_wait_group<0>(o_acc, p_frag);
        release(smem.v_empty[last_v.stage()]);
        if (is_part)
            write_part(done);
        else
            write(done);
        if (done.last) break;
    }
    if (lane == 0) cp_async_bulk_wait_group_read<0>();
}

// ---- O = sum of the parts' O, each times 2^(m of the part - m), over l; and lse. A thread merges what
// threads of the same number have left of a row, in some pairs of columns
extern "C" __global__ void __launch_bounds__(MERGE_THREADS, MERGE_BLOCKS)
    attention_merge(const __grid_constant__ DivisorsParams p) {
    const Schedule schedule(p, parts_of_each(p));
    griddepcontrol_wait();  // the parts are there
    if (schedule.parts == 1) return;
    const Part* const all_parts = static_cast<const Part*>(p.workspace[0]);
    constexpr uint32_t CHUNKS = (DIM / 8 + MERGED_PAIRS - 1) / MERGED_PAIRS;
    const uint32_t threads = 2 * schedule.tile_rows;
    const uint32_t num_work = p.works.value;
    for (uint32_t i = blockIdx.x * MERGE_THREADS + threadIdx.x; i < num_work * CHUNKS * 2 * threads;
         i += gridDim.x * MERGE_THREADS) {
        const uint32_t slice = i / threads, thread = i - slice * threads;
        const int r = slice % 2, first_n = slice / 2 % CHUNKS * MERGED_PAIRS;
        const WorkTile work = schedule.first_part(slice / 2 / CHUNKS);
        const int row = work.q_start + int(thread / 32 * 16 + thread % 32 / 4) + 8 * r;
        if (row < 0 || row >= p.seq_q) continue;
        float shift = -INFINITY, row_sum = 0.0f, o[MERGED_PAIRS][2] = {};
        for (int first = 0; first < schedule.parts; first += MERGED_AT_ONCE) {
            // All loads first: they take as long as one.
            float part_shift[MERGED_AT_ONCE], part_sum[MERGED_AT_ONCE];
            float part_o[MERGED_AT_ONCE][MERGED_PAIRS][2];
#pragma unroll
            for (int k = 0; k < MERGED_AT_ONCE; ++k) {
                // In place of one that is not there the first, times 2^-inf.
                const bool is_there = first + k < schedule.parts;
                const int number = is_there ? first + k : 0;
                const Part& part = all_parts[work.part + number * schedule.group_work];
                part_shift[k] = is_there ? part.shift[r][thread] : -INFINITY;
                part_sum[k] = part.row_sum[r][thread];
#pragma unroll
                for (int n = 0; n < MERGED_PAIRS; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        part_o[k][n][i] = part.o[min(first_n + n, DIM / 8 - 1)][2 * r + i][thread];
            }
            float new_shift = shift;
#pragma unroll
            for (float m : part_shift) new_shift = fmaxf(new_shift, m);
            const float rescale = ex2_approx_ftz(shift - new_shift);
            row_sum *= rescale;
#pragma unroll
            for (int n = 0; n < MERGED_PAIRS; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) o[n][i] *= rescale;
#pragma unroll
            for (int k = 0; k < MERGED_AT_ONCE; ++k) {
                const float factor = ex2_approx_ftz(part_shift[k] - new_shift);
                row_sum += factor * part_sum[k];
#pragma unroll
                for (int n = 0; n < MERGED_PAIRS; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) o[n][i] += factor * part_o[k][n][i];
            }
            shift = new_shift;
        }
        const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
        Element* const out = p.o + work.batch * p.o_stride.batch + work.head * p.o_stride.head +
                             row * p.o_stride.row + 2 * (thread % 4);
#pragma unroll
        for (int n = 0; n < MERGED_PAIRS; ++n)
            if (first_n + n < HEAD_DIM / 8)
                *reinterpret_cast<uint32_t*>(out + 8 * (first_n + n)) =
                    cvt_rn_x2<Element>(o[n][0] * inverse, o[n][1] * inverse);
        if (first_n == 0 && thread % 4 == 0)
            p.lse[(int64_t(work.batch) * p.heads + work.head) * p.seq_q + row] =
                log_sum_exp(shift, row_sum);
    }
}
