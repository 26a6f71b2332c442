// v14 -- lengths and windows: sequences packed one after another, a sliding window of keys
// taken: only for lengths and windows; v12 and v13 have none to look up
// change: of v11, the mask and the schedule. A first kernel lists the work tiles of all sequences, the
//     longest first, and blocks take them by ticket. Tensor maps of five axes end where a sequence
//     does. A query sees a window of keys; m is set by the first tile that its row sees
// why: models are trained on packed sequences, and many of their layers look at a window of keys.
//     With a batch of padded sequences both cost what is masked away: predicted: the TFLOP/s of v11 of
//     what is visible, less the parts of tiles at the ends of sequences and windows
// limits: bf16, fp16; head_dim 8-256 by 8; sm_90a
#include "attention_lengths.cuh"
#include "bulk.cuh"
#include "dependent_launch.cuh"
#include "mma.cuh"
#include "ragged.cuh"
#include "ticket.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = HEAD_DIM <= 96 ? 3 : 2;  // warpgroups that compute; one more copies
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER = 128 * CONSUMERS;  // the thread that starts all copies
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;
constexpr int BLOCK_M = 64 * CONSUMERS;  // query rows, 64 a warpgroup
constexpr int BLOCK_N =                  // keys of a tile
    HEAD_DIM <= 64    ? 128
    : HEAD_DIM <= 96  ? 96
    : HEAD_DIM <= 128 ? 128
    : HEAD_DIM <= 192 ? 96
                      : 64;
constexpr int NUM_STAGES = CONSUMERS;             // tiles of K, and of V, in shared memory
constexpr int Q_STAGES = HEAD_DIM <= 64 ? 2 : 1;  // and of Q
constexpr int WORK_STAGES = Q_STAGES + 2;         // and of what is known of a work tile
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

// Until a row sees a key. So far below any S that a finite one has no P there, and not -inf itself:
// 2^(-inf + inf) is NaN.
constexpr float NO_SHIFT = -0x1p126f;

// Up to BLOCK_M queries of a sequence, in a head, and the tiles of keys that they see. Rows count from
// the tensors' first ones.
struct WorkTile {
    int q_start, q_end;  // q_end: the sequence's, as k_begin and k_end
    int k_begin, k_end;
    int own_key;    // the last key that the first query would see with a causal mask
    int k_start;    // of the first tile
    int num_tiles;  // at least 1
    int batch, head, kv_head;
};

// The work tiles of one head; a ticket is a place in the order of all heads' ones.
struct Order {
    int count, ticket;
};
constexpr int CLASSES = 32;  // of work tiles of about the same length
constexpr int ORDER_THREADS = 32 * CLASSES;
struct OrderMemory {
    int count[CLASSES];
};
constexpr int L2_BYTES = 32 << 20;  // that K and V of the heads at work may take

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
    WorkTile work[WORK_STAGES];  // those whose Q is here, the one whose O leaves, and the next one
    int last[NUM_STAGES];        // whether V is that of the block's last tile
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_order",
                 .grid = {{BATCH, INT32_MAX}},
                 .threads = ORDER_THREADS,
                 .smem_bytes = sizeof(OrderMemory)},
                {.name = "attention_forward",
                 .grid = {{SEQ_Q, 1}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory),
                 .blocks_per_sm = 1}},
    // Packed sequences have at most a work tile for each query.
    .workspace = {{.element_bytes = sizeof(WorkTile), .shape = {{SEQ_Q, 1}, {BATCH, 1}}},
                  {.element_bytes = sizeof(Order), .shape = {{BATCH, 1}}}},
    .q_box = {BLOCK_M, PANEL, SWIZZLE_128B},
    .k_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .v_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .o_box = {16, PANEL, SWIZZLE_128B},
};
__constant__ int32_t kernels_start_early = 1;
}

// The window of a query: with a causal mask it has no key after its own.
__device__ int window_right(const LengthsParams& p) { return CAUSAL ? 0 : p.window_right; }

// The keys that row r of a work tile sees: from first_visible() to before end_visible(). Its own key may
// be before the sequence's first one, and where r is not a query, behind the last one. No sum here
// overflows.
__device__ int first_visible(const LengthsParams& p, const WorkTile& work, int r) {
    const int own = work.own_key + r;
    return own - min(p.window_left, max(own - work.k_begin, 0));
}
__device__ int end_visible(const LengthsParams& p, const WorkTile& work, int r) {
    const int own = work.own_key + r;
    return own + 1 + min(window_right(p), work.k_end - 1 - own);
}

// A sequence's rows.
struct Sequence {
    int q_begin, q_end, k_begin, k_end, batch;

    __device__ Sequence(const LengthsParams& p, int i) {
        const bool packed = p.cu_seqlens_q != nullptr;
        batch = packed ? 0 : i;
        q_begin = packed ? p.cu_seqlens_q[i] : 0;
        q_end = packed ? p.cu_seqlens_q[i + 1] : p.seq_q;
        k_begin = packed ? p.cu_seqlens_k[i] : 0;
        k_end = p.seqused_k ? k_begin + p.seqused_k[i] : packed ? p.cu_seqlens_k[i + 1] : p.seq_k;
    }

    __device__ int q_blocks() const { return (q_end - q_begin + BLOCK_M - 1) / BLOCK_M; }

    __device__ WorkTile work_tile(const LengthsParams& p, int q_block) const {
        WorkTile work = {.q_start = q_begin + q_block * BLOCK_M,
                         .q_end = q_end,
                         .k_begin = k_begin,
                         .k_end = k_end,
                         .batch = batch};
        work.own_key = k_end - (q_end - work.q_start);
        work.k_start = max(k_begin, first_visible(p, work, 0));
        const int last_row = min(BLOCK_M, q_end - work.q_start) - 1;
        const int keys = end_visible(p, work, last_row) - work.k_start;
        work.num_tiles = max(1, (keys + BLOCK_N - 1) / BLOCK_N);
        return work;
    }

    // The first work tile with at least this many tiles of keys, if a left end of its window, which the
    // first ones do not have, counts for all of them: then the later ones have no less.
    __device__ int first_block(const LengthsParams& p, int tiles) const {
        const int64_t keys = int64_t(tiles - 1) * BLOCK_N + 1, right = window_right(p);
        const int seq_k = k_end - k_begin, offset = seq_k - (q_end - q_begin);
        if (tiles == 1) return 0;
        if (keys > min(int64_t(seq_k), p.window_left + right + BLOCK_M)) return q_blocks();
        const int64_t rows = keys - right - offset;  // before the end of its queries
        return max((rows + BLOCK_M - 1) / BLOCK_M - 1, int64_t(0));
    }
};

// ======== the first kernel: a list of the work tiles of a head, the longest first, so that blocks that
// are done fill up the time of the others with ever shorter ones. A warp lists a class; there are two
// for each power of two ========
extern "C" __global__ void __launch_bounds__(ORDER_THREADS)
    attention_order(const __grid_constant__ LengthsParams p) {
    griddepcontrol_launch_dependents();
    OrderMemory& smem = shared_memory<OrderMemory>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int number = CLASSES - 1 - warp;  // of the class, by length
    const auto least_tiles = [](int number) { return (2 + number % 2) << number / 2 >> 1; };
    struct Blocks {
        int begin, end;
    };
    const auto blocks_of = [&](const Sequence& sequence) {
        const int begin = sequence.first_block(p, least_tiles(number));
        const int end = number == CLASSES - 1 ? sequence.q_blocks()
                                              : sequence.first_block(p, least_tiles(number + 1));
        return Blocks{begin, end};
    };
    int count = 0;
    for (int i = lane; i < p.sequences; i += 32) {
        const Blocks blocks = blocks_of(Sequence(p, i));
        count += blocks.end - blocks.begin;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        count += __shfl_xor_sync(0xffffffff, count, distance);
    if (lane == 0) smem.count[warp] = count;
    __syncthreads();
    int next = 0;  // the place of the class's next work tile
    for (int longer = 0; longer < warp; ++longer) next += smem.count[longer];
    if (threadIdx.x == ORDER_THREADS - 1)
        *static_cast<Order*>(p.workspace[1]) = {.count = next + count, .ticket = 0};

    for (int start = 0; start < p.sequences; start += 32) {
        const Sequence sequence(p, min(start + lane, p.sequences - 1));
        Blocks blocks = blocks_of(sequence);
        if (start + lane >= p.sequences) blocks.end = blocks.begin;
        int behind = blocks.end - blocks.begin;  // the place behind this lane's
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int before = __shfl_up_sync(0xffffffff, behind, distance);
            if (lane >= distance) behind += before;
        }
        WorkTile* place = static_cast<WorkTile*>(p.workspace[0]) + next + behind;
        for (int block = blocks.begin; block < blocks.end; ++block)
            *--place = sequence.work_tile(p, block);
        next += __shfl_sync(0xffffffff, behind, 31);
    }
}

// The order of all heads' work tiles: in sections of as many heads as may have their K and V in L2
// together, each work tile for all heads of a section.
struct Schedule {
    const LengthsParams& p;
    int count;  // work tiles of a head
    int section_heads;

    __device__ explicit Schedule(const LengthsParams& params)
        : p(params), count(static_cast<const Order*>(p.workspace[1])->count) {
        const float head_bytes = float(p.batch) * p.seq_k * (2 * HEAD_DIM * sizeof(Element));
        const float kv_heads = fminf(fmaxf(L2_BYTES / head_bytes, 1.0f), p.kv_heads);
        section_heads = int(kv_heads) * (p.heads / p.kv_heads);
    }

    __device__ bool has(uint32_t i) const { return i < uint32_t(count) * p.heads; }

    __device__ WorkTile at(uint32_t i) const {
        const int first_head = i / (uint32_t(count) * section_heads) * section_heads;
        const int heads = min(section_heads, p.heads - first_head);
        const uint32_t in_section = i - uint32_t(count) * first_head;
        WorkTile work = static_cast<const WorkTile*>(p.workspace[0])[in_section / heads];
        work.head = first_head + in_section % heads;
        work.kv_head = work.head / (p.heads / p.kv_heads);
        return work;
    }
};

// Waits for the end of a phase. Phase -1 counts as ended: a new stage is empty.
__device__ void wait_for(Mbarrier& barrier, int phase) {
    while (!mbarrier_try_wait_parity(barrier, phase & 1)) {
    }
}

alignas(16) __device__ uint16_t zeros[BLOCK_M > BLOCK_N ? BLOCK_M : BLOCK_N][PANEL];

// Starts tile[panel][r][col] = tensor[row + r][PANEL panel + col], zeros from row `end` on, and
// announces its bytes to the barrier. The tensor has `rows` rows. Called by one thread.
template <int ROWS>
__device__ void load_tile(Element (*tile)[ROWS][PANEL], const TensorMap& map, int rows, int row,
                          int end, int head, int batch, Mbarrier& full) {
    mbarrier_arrive_expect_tx(full, PANELS * sizeof(tile[0]));
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
        if (row < end)
            cp_async_bulk_tensor_5d_load(tile[panel][0], map, PANEL * panel, rows - end + row, head,
                                         batch, end, full);
        else  // no box may begin behind the end
            cp_async_bulk_load(tile[panel], zeros, sizeof(tile[panel]), full);
    }
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

// What a warp knows of its work tile in every tile of keys. The rest it reads where it needs it.
struct Work {
    const WorkTile* tile;
    int group_tiles;  // the first ones, that the warpgroup's rows see, at least 1
    // Tiles from clear_begin to before clear_end hide no key from any row of the warp, and are none in
    // which a row sees its first key, unless they are the first one.
    int clear_begin, clear_end;
};

// The last tiles of a work tile may be hidden from a warpgroup's rows. It passes over them while its
// last product still holds a stage of V, so there must be fewer of them than stages.
constexpr int MOST_HIDDEN = NUM_STAGES - 1;
static_assert(BLOCK_M - 64 <= MOST_HIDDEN * BLOCK_N);
// The producer takes a ticket as many tiles before it needs the next work tile.
constexpr int TICKET_TILES = 3;

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_forward(const __grid_constant__ LengthsParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    // Uniform across the warp; the shuffles tell the compiler so.
    const auto uniform = [](int x) { return __shfl_sync(0xffffffff, x, 0); };
    const int lane = threadIdx.x % 32;

    if (threadIdx.x == PRODUCER) {
        prefetch_tensormap(p.k_map);
        prefetch_tensormap(p.q_map);
        prefetch_tensormap(p.v_map);
        prefetch_tensormap(p.o_map);
#pragma unroll
        for (int stage = 0; stage < Q_STAGES; ++stage) {
            mbarrier_init(smem.q_full[stage], 1);
            mbarrier_init(smem.q_empty[stage], 4 * CONSUMERS);
        }
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(smem.k_full[stage], 1);
            mbarrier_init(smem.v_full[stage], 1);
            mbarrier_init(smem.k_empty[stage], 4 * CONSUMERS);
            mbarrier_init(smem.v_empty[stage], 4 * CONSUMERS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarriers are initialized
    griddepcontrol_wait();
    const Schedule schedule(p);
    if (!schedule.has(blockIdx.x)) return;

    Place<NUM_STAGES> place;  // of the next tile of K; V of a tile is needed one tile later
    Place<Q_STAGES> q_place;  // of the next work tile's Q

    // ======== the producer: a warp copies, for all work tiles, K of a tile, then V of the tile before, as the
    // consumers need them. One lane starts the copies, but all lanes know what: then ptxas has it in uniform
    // registers, where TMA needs it. Otherwise it would move it there for each copy, lane by lane ========
    if (uniform(threadIdx.x / 128) == CONSUMERS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (uniform(threadIdx.x / 32) != PRODUCER / 32) return;
        Place<WORK_STAGES> work_place;
        struct Keys {
            int row, end, head, batch;
        };
        Keys v = {};  // of the tile before
        int last = 0;
        const auto load_v = [&] {
            const int stage = place.before().stage();
            wait_for(smem.v_empty[stage], place.before().phase() - 1);
            __syncwarp();  // a lane still waiting would miss the phases that the copy allows
            if (lane > 0) return;
            smem.last[stage] = last;
            load_tile<BLOCK_N>(smem.v[stage], p.v_map, p.seq_k, v.row, v.end, v.head, v.batch,
                               smem.v_full[stage]);
        };
        for (uint32_t i = blockIdx.x; schedule.has(i); ++work_place.number) {
            WorkTile& work = smem.work[work_place.stage()];
            if (lane == 0) work = schedule.at(i);
            __syncwarp();
            const int num_tiles = uniform(work.num_tiles);
            Keys k = {uniform(work.k_start), uniform(work.k_end), uniform(work.kv_head),
                      uniform(work.batch)};
            for (int tile = 0; tile < num_tiles; ++tile, ++place.number, k.row += BLOCK_N) {
                const int stage = place.stage();
                wait_for(smem.k_empty[stage], place.phase() - 1);
                __syncwarp();
                if (lane == 0)
                    load_tile<BLOCK_N>(smem.k[stage], p.k_map, p.seq_k, k.row, k.end, k.head,
                                       k.batch, smem.k_full[stage]);
                if (place.number > 0) load_v();
                if (tile == 0) {
                    const int q_stage = q_place.stage();
                    wait_for(smem.q_empty[q_stage], q_place.phase() - 1);
                    __syncwarp();
                    if (lane == 0)
                        load_tile<BLOCK_M>(&smem.q_o[q_stage * PANELS], p.q_map, p.seq_q,
                                           work.q_start, work.q_end, work.head, work.batch,
                                           smem.q_full[q_stage]);
                    ++q_place.number;
                }
                if (tile == max(num_tiles - TICKET_TILES, 0)) {
                    Order* order = static_cast<Order*>(p.workspace[1]);
                    i = gridDim.x + uniform(lane == 0 ? take_ticket(&order->ticket) : 0);
                }
                v = k;
            }
        }
        last = 1;
        load_v();
        return;
    }

    // ======== the consumers: a warpgroup computes 64 rows of each work tile ========
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int warp = uniform(threadIdx.x / 32), warpgroup = warp / 4;
    const int group_row = 64 * warpgroup;  // the warpgroup's first row in the block
    const int warp_row = 16 * warp;        // and the warp's
    const auto release = [&](Mbarrier& empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };
    // Ping-pong scheduling: consumers start their products in turn, so that one computes softmax
    // while another multiplies. A warpgroup's barrier takes its 128 threads, which wait, and the 128
    // of its predecessor, which have started theirs. Nobody takes the last turn.
    const int next_warpgroup = (warpgroup + 1) % CONSUMERS;
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

    // ---- load Q: what goes to registers. Returns the work tile that it belongs to.
    const auto load_q = [&]() -> const WorkTile& {
        wait_for(smem.q_full[q_place.stage()], q_place.phase());
        q_desc = k_major(smem.q_o, group_row, q_place.stage() * PANELS * PANEL);
#pragma unroll
        for (int d = Q_SMEM_DIM; d < DIM; d += 16)
            ldmatrix_x4(q_frag[(d - Q_SMEM_DIM) / 16],
                        swizzled(smem.q_o, warp_row + lane % 16, d + lane / 16 * 8));
        __syncwarp();  // every lane has its elements, whose place is then O's
        return smem.work[q_place.number % WORK_STAGES];
    };
    // Not before O of the work tile before has left: its numbers take registers.
    const auto look_at = [&](const WorkTile& tile) {
        Work work = {.tile = &tile};
        // Of a warpgroup behind the sequence's end as few as it can do with.
        const int group_keys = end_visible(p, tile, group_row + 63) - tile.k_start;
        const bool has_queries = tile.q_start + group_row < tile.q_end;
        work.group_tiles = uniform(max(
            1, has_queries ? (group_keys + BLOCK_N - 1) / BLOCK_N : tile.num_tiles - MOST_HIDDEN));
        const int hidden = first_visible(p, tile, warp_row + 15) - tile.k_start;
        const int seen = end_visible(p, tile, warp_row) - tile.k_start;
        work.clear_begin = uniform(hidden <= 0 ? 0 : hidden / BLOCK_N + 1);
        work.clear_end = uniform(max(seen, 0) / BLOCK_N);
        return work;
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
    // The largest element of a row.
    const auto largest = [&](int r) {
        float x = -INFINITY;
#pragma unroll
        for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) x = fmaxf(x, s_acc[n][2 * r + i]);
        return quad_max(x);
    };
    // Hides keys, and scales S where the exponential's multiply-add cannot. Returns the scale that is
    // left for it.
    const auto scale_and_mask = [&](const Work& work, int tile) {
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
        if (tile < work.clear_begin || tile >= work.clear_end) {
            // From the lane's first column on.
            const int k_start = work.tile->k_start + tile * BLOCK_N + 2 * (lane % 4);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = warp_row + 8 * r + lane / 4;
                const int first = first_visible(p, *work.tile, row) - k_start;
                const int end = end_visible(p, *work.tile, row) - k_start;
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (8 * n + i < first || 8 * n + i >= end) s_acc[n][2 * r + i] = -INFINITY;
            }
            // A row that has seen no key before has no m yet. softmax_first sets the first tile's.
            if (tile > 0 && __any_sync(0xffffffff, shift[0] == NO_SHIFT || shift[1] == NO_SHIFT)) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float tile_max = largest(r) * tile_scale;
                    if (shift[r] == NO_SHIFT) shift[r] = fmaxf(tile_max + HEADROOM, NO_SHIFT);
                }
            }
        }
        return tile_scale;
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
    const auto compute_s_again = [&](const Work& work, int tile) {
        const WorkTile& of = *work.tile;
        const int row = of.q_start + warp_row + lane / 4;
        const int key = of.k_start + tile * BLOCK_N + lane / 4;
        // Four elements of a row, zeros where it has none. A quad's lanes read 16 of them; in the
        // sum over d the order does not matter, if it is the same for Q and K.
        const auto four = [](const Element* x, int64_t stride, int row, int rows, bool inside) {
            return inside && uint32_t(row) < uint32_t(rows)
                       ? *reinterpret_cast<const uint64_t*>(x + row * stride)
                       : 0;
        };
        const Element* q =
            p.q + of.batch * p.q_stride.batch + of.head * p.q_stride.head + 4 * (lane % 4);
        const Element* k =
            p.k + of.batch * p.k_stride.batch + of.kv_head * p.k_stride.head + 4 * (lane % 4);
#pragma unroll
        for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s_acc[n][i] = 0.0f;
#pragma unroll 1
        for (int d = 0; d < HEAD_DIM; d += 16, q += 16, k += 16) {
            const bool inside = d + 4 * (lane % 4) < HEAD_DIM;
            const uint64_t upper = four(q, p.q_stride.row, row, of.q_end, inside);
            const uint64_t lower = four(q, p.q_stride.row, row + 8, of.q_end, inside);
            const uint32_t a[4] = {uint32_t(upper), uint32_t(lower), uint32_t(upper >> 32),
                                   uint32_t(lower >> 32)};
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n) {
                const uint64_t b = four(k, p.k_stride.row, key + 8 * n, of.k_end, inside);
                mma_m16n8k16<Element>(s_acc[n], a, uint32_t(b), uint32_t(b >> 32));
            }
        }
    };

    // ---- raise m where P has left its range: m' = m + e, and P, l and O become 2^-e times what they
    // were. Where P was not lost, e is a whole number: that changes no digit of them; and only the upper
    // or the lower 8 of the warp's rows may need it. O is scaled later, when no product adds
    // to it.
    const auto raise_shift = [&](const Work& work, int tile) {
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
    };
    const auto rescale_o = [&] {
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) o_acc[n][i] *= rescale[i / 2];
    };

    // The first tile of a work tile, whose S has been started.
    const auto softmax_first = [&](const Work& work) {
        wgmma_wait_group<0>(s_acc);
        release(smem.k_empty[place.stage()]);
        const float tile_scale = scale_and_mask(work, 0);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float tile_max = largest(r) * tile_scale;
            shift[r] = fmaxf(tile_max + HEADROOM, NO_SHIFT);
        }
        exponentiate(tile_scale);
#pragma unroll
        for (int r = 0; r < 2; ++r) row_sum[r] = tile_sum[r];
        convert_p();
        // O has left Q's place. The warp's other lanes learn it at the barrier of their next turn.
        if (Q_PANELS > 0 && lane == 0) cp_async_bulk_wait_group_read<0>();
        if (Q_SMEM_DIM == 0 || work.group_tiles == 1) release_q();
        wait_for(smem.v_full[place.stage()], place.phase());
        ++place.number;
    };

    // ---- O += P V  [BLOCK_M, HEAD_DIM], [64, DIM] of it in each warpgroup
    const auto start_pv = [&](Place<NUM_STAGES> v, int tile) {
        wgmma_fence(o_acc, p_frag);
#pragma unroll
        for (int j = 0; j < BLOCK_N; j += 16)
            wgmma_m64nNk16<Element, MN_MAJOR>(o_acc, p_frag[j / 16],
                                              mn_major<PANELS, BLOCK_N>(smem.v[v.stage()], j),
                                              tile > 0 || j > 0);
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
    const auto write = [&](const WorkTile& tile) {
        const WorkTile work =
            tile;  // read before a barrier: then the producer may write the next one
        const int warp_start = work.q_start + warp_row;
        // O_PANELS at a time. A warp's 16 rows of a panel, swizzled, are a box. TMA leaves out the
        // rows from q_end on and the columns past HEAD_DIM, some of which nobody has written.
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
            if (lane == 0 && warp_start < work.q_end) {
#pragma unroll
                for (int panel = first; panel < end; ++panel)
                    cp_async_bulk_tensor_5d_store(
                        p.o_map, PANEL * panel, p.seq_q - work.q_end + warp_start, work.head,
                        work.batch, work.q_end, smem.q_o[FIRST_O_PANEL + panel - first][warp_row]);
                cp_async_bulk_commit_group();
            }
        }
        // log sum exp = (m + log2 l) ln 2, of both without the headroom: the logarithm is most exact
        // near 1. -inf where no key is visible. Of the 4 lanes that know m and l of two rows, two
        // write one each. After O, whose fence would wait for this store, too.
        const int r = lane % 4, row = warp_start + 8 * r + lane / 4;
        if (r < 2 && row < work.q_end) {
            const float l = r == 0 ? row_sum[0] : row_sum[1], m = r == 0 ? shift[0] : shift[1];
            p.lse[(int64_t(work.batch) * p.heads + work.head) * p.seq_q + row] =
                l == 0.0f ? -INFINITY
                          : (m - HEADROOM + lg2_approx_ftz(l * ex2_approx_ftz(HEADROOM))) * LN_2;
        }
    };

    const WorkTile& first_tile = load_q();
    wait_for_turn();
    start_s();
    pass_turn();
    Work work = look_at(first_tile);
    softmax_first(work);
    for (;;) {
        // ---- for each K/V tile
        const int last_tile = work.group_tiles - 1;
        bool raised = false;
        for (int tile = 1; tile <= last_tile; ++tile, ++place.number) {
            wait_for_turn();
            start_s();
            if (raised) rescale_o();  // while S is multiplied
            start_pv(place.before(), tile - 1);
            pass_turn();
            wgmma_wait_group<1>(s_acc);
            release(smem.k_empty[place.stage()]);
            if (Q_SMEM_DIM > 0 && tile == last_tile) release_q();
            exponentiate(scale_and_mask(work, tile));  // while O += P V runs
            // Not in raise_shift: ptxas moves no vote, and without one here it may let most
            // exponentials wait for O.
            raised = __any_sync(0xffffffff, tile_sum[0] > MAX_SUM || tile_sum[1] > MAX_SUM);
            wait_for(smem.v_full[place.stage()], place.phase());
            wgmma_wait_group<0>(o_acc, p_frag);
            release(smem.v_empty[place.before().stage()]);
            convert_p();
            if (raised) raise_shift(work, tile);
#pragma unroll
            for (int r = 0; r < 2; ++r) row_sum[r] += tile_sum[r];
        }
        const Place<NUM_STAGES> last_v = place.before();
        int last = smem.last[last_v.stage()];
        for (int tile = last_tile + 1; tile < work.tile->num_tiles; ++tile, ++place.number) {
            // The others' tile.
            wait_for_turn();
            pass_turn();
            wait_for(smem.k_full[place.stage()], place.phase());
            __syncwarp();  // a lane still waiting would miss the phases that the release allows
            release(smem.k_empty[place.stage()]);
            wait_for(smem.v_full[place.stage()], place.phase());
            last = smem.last[place.stage()];
            __syncwarp();  // likewise
            release(smem.v_empty[place.stage()]);
        }
        if (raised) rescale_o();
        const WorkTile& done = *work.tile;
        wait_for_turn();
        // O += P V is started in either branch: ptxas serializes a wgmma that is under way where
        // branches part.
        if (uniform(last)) {
            start_pv(last_v, last_tile);
            pass_turn();
            sum_up();
            wgmma_wait_group<0>(o_acc, p_frag);
            release(smem.v_empty[last_v.stage()]);
            write(done);
            break;
        }
        start_pv(last_v, last_tile);
        const WorkTile& next = load_q();
        start_s();
        pass_turn();
        sum_up();
        wgmma_wait_group<1>(o_acc, p_frag);
        release(smem.v_empty[last_v.stage()]);
        write(done);  // while S of the next work tile runs
        work = look_at(next);
        softmax_first(work);
    }
    if (lane == 0) cp_async_bulk_wait_group_read<0>();
}
