// v13 -- split keys: all blocks share the keys of few queries, and a second kernel merges their parts
// taken: only for few queries; for more, v12's tensor cores are busier
// change: the tiles of keys of each work tile are cut into equal parts, one for each block or, where that
//     leaves many without any, or some for long, all in a row into as many equal shares as there are
//     blocks. What a block computes of a work tile that it has only a part of is O, m and l of its keys.
//     A second kernel merges the parts. Where there are work tiles enough, whole ones are dealt out in
//     turn. The rows of a work tile are the queries of all heads that look at the same keys. What blocks
//     divide by, to find their work tiles, the host has inverted
// why: with one query a head is one block's work, and most SMs have none; and each head of a group
//     reads the same keys again. Predicted: with one query and 8 sequences of 8192 keys or more, 0.93
//     of the speed of a copy, as K and V come from global memory once, through all SMs
// repeats: all bits on as many multiprocessors; their number decides where the keys are cut
// limits: bf16, fp16; head_dim 8-256 by 8; sm_90a
#include "attention_divisors.cuh"
#include "copy.cuh"
#include "dependent_launch.cuh"
#include "group_rows.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute; one more copies
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER_WARP =
    4 * CONSUMERS;  // starts the copies of K and V; the next ones copy Q of later segments
constexpr int Q_WARPS = 3;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int BLOCK_M = 64;                          // rows of a warpgroup
constexpr int BLOCK_N = HEAD_DIM <= 128 ? 128 : 64;  // keys of a tile
constexpr int NUM_STAGES = 2;                        // tiles of K, and of V, in shared memory
// The more is under way to all SMs at a time, the slower DRAM gets; with only 16 KB each of K and V it would
// be idle at times. So where a tile is larger, its copy begins when the one before has arrived.
constexpr bool IS_PACED = HEAD_DIM > 64;
constexpr int Q_TILES = HEAD_DIM <= 192 ? 4 : 3;  // of Q, BLOCK_M rows each, in turn
// Two warpgroups multiply in turn, but not where each has fewer keys at a time.
constexpr bool TAKE_TURNS = BLOCK_N == 128;
constexpr int TURN_BARRIER = 1, Q_BARRIER = 3;  // each of warpgroup 0; the other's is the next
constexpr int PANEL = 64;  // columns of a panel: 128 bytes a row, the swizzle's width
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole products; zeros from HEAD_DIM on

// Columns of a tensor in panels, as TMA writes them: in each, 8 rows of 128 bytes are swizzled.
template <int ROWS>
using Tile = Element[PANELS][ROWS][PANEL];

// What a warpgroup has found in a block's keys of a work tile: O = sum P V, m and l, P = 2^(S - m).
struct alignas(128) Part {
    // o[n][r][thread] is what a thread's accumulators have of columns 16 n ... 16 n + 15 of its row r: two of
    // the first 8 and two of the others. A warp writes 512 bytes at once.
    float o[DIM / 16][2][128][4];
    float row_max[BLOCK_M], row_sum[BLOCK_M];
};
// A block leaves at most one part of a work tile whose last keys it has, and one of its last work tile,
// which goes on in the next block.
enum PartKind { ENDS, GOES_ON };
struct Parts {
    Part part[2][CONSUMERS];
};
// From so many tiles of keys in a share on, equal shares are worth merging even where as many parts of each
// work tile would keep nine tenths of the blocks busy; not where the parts are of two warpgroups.
constexpr int LONG_SHARE = 400;
constexpr int MAX_BLOCKS = 144;                       // no device of this architecture has more SMs
constexpr int MERGE_THREADS = 256, MERGE_BLOCKS = 4;  // the latter on an SM
// Of O a thread merges so many float4 of parts at a time: two of each of two parts or, where there are
// more, one of each of four.
constexpr int MERGED_AT_ONCE = 4;

struct alignas(1024) SharedMemory {  // the swizzle's pattern: 8 rows of 128 bytes
    Tile<BLOCK_M> q[Q_TILES];
    Tile<BLOCK_N> k[NUM_STAGES], v[NUM_STAGES];
    Mbarrier q_full[Q_TILES],
        q_empty[Q_TILES];  // the tile has arrived; every warp has read it
    Mbarrier k_full[NUM_STAGES], k_empty[NUM_STAGES];
    Mbarrier v_full[NUM_STAGES], v_empty[NUM_STAGES];
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels =
        {{.name = "attention_forward",
          .grid = {{SEQ_K, BLOCK_N}, {GROUP_ROWS, BLOCK_M * CONSUMERS}, {KV_HEADS, 1}, {BATCH, 1}},
          .threads = NUM_THREADS,
          .smem_bytes = sizeof(SharedMemory),
          .blocks_per_sm = 1},
         {.name = "attention_merge",
          .grid = {{SEQ_Q, 1}, {HEADS, 1}, {BATCH, 1}, {SPLIT_KEYS, 1}},
          .threads = MERGE_THREADS,
          .blocks_per_sm = MERGE_BLOCKS}},
    // One for each block; by an axis, as blocks without a second tile leave parts, too.
    .workspace = {{.element_bytes = sizeof(Parts), .shape = {{BATCH, MAX_BLOCKS}}}},
    .k_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .v_box = {BLOCK_N, PANEL, SWIZZLE_128B},
};
__constant__ int32_t kernels_start_early = 1;
// Half a row is a panel's: the other half is fetched with it, where the two are 256 bytes.
__constant__ int32_t l2_fetch_bytes = HEAD_DIM % (2 * PANEL) == 0 ? 256 : 128;
}

// What a block computes of a work tile: of up to `tile_rows` rows, which share a key head, the tiles
// of keys first ... end - 1.
struct Segment {
    int first_row, kv_head, batch;
    int first, end;
    PartKind kind;
    bool is_whole;  // all tiles of the work tile
};

// Row n of a key head is query n / group of head n % group of its group. What is counted here is less
// than 2^32: a division of 64 bits takes ten times as long, and a short call waits for these.
struct Schedule {
    const DivisorsParams& p;
    const Divisor tiles;      // of keys, of each work tile
    const Divisor row_tiles;  // work tiles of a key head
    const Divisor kv_heads;
    const uint32_t works;            // work tiles
    const int rows;                  // of a key head: the queries of its heads
    const int consumers, tile_rows;  // warpgroups that have rows; the rows of a work tile
    uint32_t blocks;                 // that have a share
    const bool is_whole;             // it is of whole work tiles
    uint32_t parts;          // or one of so many equal ones of a work tile, if that is not 0
    uint32_t share, longer;  // or else of so many tiles of keys; of the first blocks one more

    __device__ explicit Schedule(const DivisorsParams& params)
        : p(params),
          tiles(p.tiles[0]),
          row_tiles(p.tiles[1]),
          kv_heads(p.tiles[2]),
          works(p.works.value),
          rows(p.group.value * p.seq_q),
          consumers(rows <= BLOCK_M ? 1 : CONSUMERS),
          tile_rows(BLOCK_M * consumers),
          blocks(p.blocks.value),
          is_whole(!p.split_keys) {
        // Parts take time to write and to merge. So whole work tiles are dealt out, or as many parts
        // of each, where that keeps all blocks busy, or nine tenths and shares are short.
        if (is_whole) return;
        parts = p.works.divide(blocks);
        const uint32_t busy = works * parts;
        const bool is_long = consumers == 1 && works * tiles.value >= LONG_SHARE * blocks;
        if (busy < blocks && (is_long || 10 * busy < 9 * blocks)) parts = 0;
        if (parts > 0) {
            blocks = busy;
            return;
        }
        share = p.blocks.divide(works * tiles.value);
        longer = works * tiles.value - share * blocks;
    }

    // Where a block's share begins, and that of the block before ends.
    __device__ uint32_t cut(uint32_t block) const {
        return parts > 0 ? block * tiles.value / parts : share * block + min(block, longer);
    }
    // Who has the first tile of a work tile, and the last one.
    __device__ uint32_t first_block(uint32_t work) const {
        return parts > 0 ? work * parts : block_of(work * tiles.value);
    }
    __device__ uint32_t last_block(uint32_t work) const {
        return parts > 0 ? (work + 1) * parts - 1 : block_of((work + 1) * tiles.value - 1);
    }
    // Whose share has the tile, if there are no equal ones.
    __device__ uint32_t block_of(uint32_t tile) const {
        const uint32_t first = cut(longer);
        return tile < first ? tile / (share + 1) : longer + (tile - first) / share;
    }

    // The keys that a row sees. Causal: query i sees j <= i + seq_k - seq_q.
    __device__ int visible_keys(int row) const {
        const int query = p.group.divide(row);
        return CAUSAL ? max(0, min(p.seq_k, query + p.seq_k - p.seq_q + 1)) : p.seq_k;
    }
};

// A block's share, segment by segment.
struct Share {
    const Schedule& schedule;
    uint32_t begin = 0, end = 0;          // of the tiles
    uint32_t first_work = 0, stride = 1;  // of its work tiles
    int count = 0;

    __device__ Share(const Schedule& s, uint32_t block) : schedule(s) {
        if (s.is_whole) {
            first_work = block, stride = s.blocks;
            if (block < s.works) count = s.p.blocks.divide(s.works - 1 - block) + 1;
        } else if (block < s.blocks) {
            begin = s.cut(block), end = s.cut(block + 1);
            first_work = s.tiles.divide(begin);
            count = s.tiles.divide(end - 1) - first_work + 1;
        }
    }

    __device__ Segment at(int i) const {
        const Schedule& s = schedule;
        const uint32_t work = first_work + i * stride, tiles = s.tiles.value;
        Segment segment;
        if (s.is_whole) {
            segment.first = 0, segment.end = tiles;
        } else {
            const uint32_t before = work * tiles;
            segment.first = max(begin, before) - before;
            segment.end = min(end - before, tiles);
        }
        segment.kind = segment.end == tiles ? ENDS : GOES_ON;
        segment.is_whole = segment.first == 0 && segment.end == tiles;
        const uint32_t head_of_keys = s.row_tiles.divide(work);
        segment.first_row = (work - head_of_keys * s.row_tiles.value) * s.tile_rows;
        segment.batch = s.kv_heads.divide(head_of_keys);
        segment.kv_head = head_of_keys - segment.batch * s.kv_heads.value;
        // Nothing is loaded that no row sees.
        const int last_row = min(segment.first_row + s.tile_rows, s.rows) - 1;
        segment.end = min(segment.end, (s.visible_keys(last_row) + BLOCK_N - 1) / BLOCK_N);
        return segment;
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

// Where the number-th of a block's tiles of Q is: each warpgroup that computes has one of a work tile.
// With three tiles a place is the other warpgroup's every second time. This one does not see that phase end,
// but it has ended by the time this one's tile before is there: those of the first tiles end before all
// others, and later tiles arrive in order.
struct QPlace {
    int tile, phase;

    __device__ explicit QPlace(int number) : tile(number % Q_TILES), phase(number / Q_TILES) {}
};

// ---- start to copy a warpgroup's tile of Q, whose rows are of several heads: no box of a tensor map. What
// stays in rows past the last is multiplied, and nobody reads the products
__device__ void copy_q(const AttentionParams& p, const Schedule& schedule, const Segment& segment,
                       int warpgroup, Tile<BLOCK_M>& tile, uint32_t thread, uint32_t threads) {
    constexpr uint32_t CHUNKS = DIM / VEC;  // of a row
    const Divisor group = schedule.p.group;
    const Element* group_q =
        p.q + segment.batch * p.q_stride.batch + segment.kv_head * group.value * p.q_stride.head;
    const int first_row = segment.first_row + BLOCK_M * warpgroup;
    const uint32_t rows = max(0, min(BLOCK_M, schedule.rows - first_row));
#pragma unroll 2  // divisions at a time: each has a long latency
    for (uint32_t n = thread; n < rows * CHUNKS; n += threads) {
        const uint32_t local = n / CHUNKS, d = n % CHUNKS * VEC;
        const uint32_t row = first_row + local, query = group.divide(row);
        const Element* q =
            group_q + (row - query * group.value) * p.q_stride.head + query * p.q_stride.row + d;
        const bool valid = d < HEAD_DIM;
        cp_async_cg(swizzled(tile, local, d), valid ? q : p.q, valid);
    }
    cp_async_commit_group();
}

// ---- copy Q of all segments but the first, while others are computed. By Q_WARPS warps
__device__ void load_q(const AttentionParams& p, const Share& share, SharedMemory& smem) {
    const Schedule& schedule = share.schedule;
    const int thread = threadIdx.x - 32 * (PRODUCER_WARP + 1);
    // Two tiles arrive together where both places become free at the same time.
    const bool is_pair = schedule.consumers == CONSUMERS && Q_TILES == 2 * CONSUMERS;
    int number = schedule.consumers;  // of the tile
    for (int i = 1; i < share.count; ++i) {
        const Segment segment = share.at(i);
        for (int warpgroup = 0; warpgroup < schedule.consumers; ++warpgroup, ++number) {
            const QPlace place(number);
            wait_for(smem.q_empty[place.tile], place.phase - 1);
            copy_q(p, schedule, segment, warpgroup, smem.q[place.tile], thread, 32 * Q_WARPS);
            if (is_pair && warpgroup == 0) continue;
            cp_async_wait_group<0>();
            fence_proxy_async();  // by each writer
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                if (is_pair) mbarrier_arrive(smem.q_full[QPlace(number - 1).tile]);
                mbarrier_arrive(smem.q_full[place.tile]);
            }
        }
    }
}

// ---- copy K and V. By one thread
__device__ void load_kv(const AttentionParams& p, const Share& share, SharedMemory& smem) {
    int number = 0;  // of the tile
    for (int i = 0; i < share.count; ++i) {
        const Segment segment = share.at(i);
        for (int tile = segment.first; tile < segment.end; ++tile, ++number) {
            const int stage = number % NUM_STAGES, phase = number / NUM_STAGES;
            const int before = number - 1;
            const bool is_paced = IS_PACED && number > 0;
            if (is_paced) wait_for(smem.k_full[before % NUM_STAGES], before / NUM_STAGES);
            wait_for(smem.k_empty[stage], phase - 1);
            load_tile(smem.k[stage], p.k_map, tile * BLOCK_N, segment.kv_head, segment.batch,
                      smem.k_full[stage]);
            if (is_paced) wait_for(smem.v_full[before % NUM_STAGES], before / NUM_STAGES);
            wait_for(smem.v_empty[stage], phase - 1);
            load_tile(smem.v[stage], p.v_map, tile * BLOCK_N, segment.kv_head, segment.batch,
                      smem.v_full[stage]);
        }
    }
}

// Writes columns d ... d + 15 of a row of O, each times `factor`. All lanes of a warp call it. Of a quad, whose
// lanes are `apart` lanes apart, lane t has columns 2 t and 2 t + 1 of either half, and gives two to its
// neighbour for two others: so each writes 8 bytes, and the quad 32.
__device__ void store_16(Element* o, int d, float4 x, float factor, int quad_lane, int apart,
                         bool is_there) {
    const uint32_t first = cvt_rn_x2<Element>(x.x * factor, x.y * factor);
    const uint32_t next = cvt_rn_x2<Element>(x.z * factor, x.w * factor);
    const int odd = quad_lane % 2;
    const uint32_t theirs = __shfl_xor_sync(0xffffffff, odd ? first : next, apart);
    const uint32_t low = odd ? theirs : first, high = odd ? next : theirs;
    d += 8 * odd + quad_lane / 2 * 4;
    if (is_there && d < HEAD_DIM) *reinterpret_cast<uint64_t*>(o + d) = uint64_t(high) << 32 | low;
}

// ---- what a consumer computes: its rows of all segments
__device__ void compute(const AttentionParams& p, const Share& share, SharedMemory& smem) {
    const Schedule& schedule = share.schedule;
    const auto uniform = [](int x) { return __shfl_sync(0xffffffff, x, 0); };
    const int lane = threadIdx.x % 32;
    const int warp = uniform(threadIdx.x / 32), warpgroup = warp / 4;
    const int warp_row = warp % 4 * 16;
    Parts* const parts = static_cast<Parts*>(p.workspace[0]);
    const auto release = [&](Mbarrier& empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };
    const float scale_log2 = p.softmax_scale * LOG2_E;  // exp(scale s) = 2^(scale_log2 s)
    // A lane's s_acc[n][2 r + i] and o_acc[n][2 r + i], with r and i 0 or 1, are the elements of S
    // and O in row 8 r + lane / 4 of its warp's 16 and column 8 n + 2 (lane % 4) + i.
    float s_acc[BLOCK_N / 8][4];
    uint32_t p_frag[BLOCK_N / 16][4];
    float row_max[2];  // m, in units of log2
    float row_sum[2];  // this lane's share of l
    float rescale[2];
    // Ping-pong scheduling, as in v09.
    const bool take_turns = TAKE_TURNS && schedule.consumers == CONSUMERS;
    const auto wait_for_turn = [&] {
        if (take_turns) bar_sync(TURN_BARRIER + warpgroup, 128 * CONSUMERS);
    };
    const auto pass_turn = [&] {
        if (take_turns) bar_arrive(TURN_BARRIER + 1 - warpgroup, 128 * CONSUMERS);
    };
    if (warpgroup == 1) pass_turn();  // the first turn is warpgroup 0's

    // Each warpgroup copies its first tile of Q itself: it has nothing to compute yet, and more threads than
    // Q_WARPS.
    if (share.count > 0)
        copy_q(p, schedule, share.at(0), warpgroup, smem.q[QPlace(warpgroup).tile],
               threadIdx.x % 128, 128);
    int number = 0;  // of the next tile among the block's
    for (int i = 0; i < share.count; ++i) {
        const Segment segment = share.at(i);
        const QPlace place(schedule.consumers * i + warpgroup);
        const Tile<BLOCK_M>& q = smem.q[place.tile];
        const int first_row = segment.first_row + BLOCK_M * warpgroup + warp_row;

        // ---- S = Q K^T  [BLOCK_M, BLOCK_N]
        const auto start_s = [&](int number) {
            const int stage = number % NUM_STAGES;
            wait_for(smem.k_full[stage], number / NUM_STAGES);
            wgmma_fence(s_acc);
#pragma unroll
            for (int d = 0; d < HEAD_DIM; d += 16)
                wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(
                    s_acc, k_major<BLOCK_M>(q, d), k_major<BLOCK_N>(smem.k[stage], d), d > 0);
            wgmma_commit_group();
        };
        float o_acc[DIM / 8][4] = {};
        // ---- O += P V  [BLOCK_M, HEAD_DIM]
        const auto start_pv = [&](int number) {
            const int stage = number % NUM_STAGES;
            wait_for(smem.v_full[stage], number / NUM_STAGES);
            wgmma_fence(o_acc, p_frag);
#pragma unroll
            for (int j = 0; j < BLOCK_N; j += 16)
                wgmma_m64nNk16<Element, MN_MAJOR>(o_acc, p_frag[j / 16],
                                                  mn_major<BLOCK_N>(smem.v[stage], j), true);
            wgmma_commit_group();
        };
        // ---- online softmax: P = 2^(S - m)
        const auto softmax = [&](int tile) {
            float tile_scale = scale_log2;
            // Without this the largest S would not be the largest logit, and 0 * -inf is NaN.
            if (scale_log2 <= 0.0f) {
                tile_scale = 1.0f;
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) s_acc[n][i] *= scale_log2;
            }
            const int k_start = tile * BLOCK_N;
            if (k_start + BLOCK_N > schedule.visible_keys(first_row)) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = first_row + 8 * r + lane / 4;
                    const int keys = schedule.visible_keys(row) - k_start - 2 * (lane % 4);
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

        row_max[0] = row_max[1] = -INFINITY;
        row_sum[0] = row_sum[1] = 0.0f;
        if (i == 0) {
            cp_async_wait_group<0>();
            fence_proxy_async();  // by each writer
            bar_sync(Q_BARRIER + warpgroup, 128);
        } else {
            wait_for(smem.q_full[place.tile], place.phase);
            __syncwarp();  // a lane still waiting would miss the phases that the release allows
        }
        // ---- for each K/V tile
        if (segment.first < segment.end) {
            wait_for_turn();
            start_s(number);
            pass_turn();
            wgmma_wait_group<0>(s_acc);
            release(smem.k_empty[number % NUM_STAGES]);
            softmax(segment.first);
            convert_p();
            for (int tile = segment.first + 1; tile < segment.end; ++tile, ++number) {
                wait_for_turn();
                start_s(number + 1);
                start_pv(number);
                pass_turn();
                wgmma_wait_group<1>(s_acc);
                release(smem.k_empty[(number + 1) % NUM_STAGES]);
                softmax(tile);  // while O += P V runs
                wgmma_wait_group<0>(o_acc, p_frag);
                release(smem.v_empty[number % NUM_STAGES]);
                // Most maxima do not rise. To ask costs more than it saves where O has few columns.
                const bool rises = rescale[0] < 1.0f || rescale[1] < 1.0f;
                if (HEAD_DIM <= 128 || __any_sync(0xffffffff, rises)) {
#pragma unroll
                    for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) o_acc[n][i] *= rescale[i / 2];
                }
                convert_p();
            }
            wait_for_turn();
            start_pv(number);
            pass_turn();
            wgmma_wait_group<0>(o_acc, p_frag);
            release(smem.v_empty[number % NUM_STAGES]);
            ++number;
        }
        release(smem.q_empty[place.tile]);

        // ---- write O and lse, or a part of them
        Part& part = parts[blockIdx.x].part[segment.kind][warpgroup];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row_sum[r] = quad_sum(row_sum[r]);
            const int local = warp_row + 8 * r + lane / 4, row = first_row + 8 * r + lane / 4;
            if (first_row + 8 * r >= schedule.rows) continue;  // for the whole warp
            const bool is_there = row < schedule.rows;
            const auto of_16 = [&](int n) {  // what this lane has of columns 16 n ... 16 n + 15
                const float *x = &o_acc[2 * n][2 * r], *y = &o_acc[2 * n + 1][2 * r];
                return make_float4(x[0], x[1], y[0], y[1]);
            };
            if (segment.is_whole) {
                const Divisor group = schedule.p.group;
                const int query = group.divide(row);
                const int head = segment.kv_head * group.value + row - query * group.value;
                const float inverse = row_sum[r] == 0.0f ? 0.0f : 1.0f / row_sum[r];
                Element* o = p.o + segment.batch * p.o_stride.batch + head * p.o_stride.head +
                             query * p.o_stride.row;
#pragma unroll
                for (int n = 0; n < DIM / 16; ++n)
                    store_16(o, 16 * n, of_16(n), inverse, lane % 4, 1, is_there);
                if (is_there && lane % 4 == 0)
                    p.lse[(int64_t(segment.batch) * p.heads + head) * p.seq_q + query] =
                        row_sum[r] == 0.0f ? -INFINITY
                                           : (row_max[r] + lg2_approx_ftz(row_sum[r])) * LN_2;
            } else if (is_there) {
#pragma unroll
                for (int n = 0; n < DIM / 16; ++n)
                    *reinterpret_cast<float4*>(part.o[n][r][threadIdx.x % 128]) = of_16(n);
                if (lane % 4 == 0)
                    part.row_max[local] = row_max[r], part.row_sum[local] = row_sum[r];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_forward(const __grid_constant__ DivisorsParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    if (threadIdx.x == 32 * PRODUCER_WARP) {
        prefetch_tensormap(p.k_map);
        prefetch_tensormap(p.v_map);
    }
    const Schedule schedule(p);
    const Share share(schedule, blockIdx.x);
    const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0);
    griddepcontrol_launch_dependents();  // attention_merge may take the SMs that become free

    if (threadIdx.x == 32 * PRODUCER_WARP) {
#pragma unroll
        for (int n = 0; n < Q_TILES; ++n) {
            mbarrier_init(smem.q_full[n], Q_WARPS);
            mbarrier_init(smem.q_empty[n], 4);
        }
        // The first tiles, which the warpgroups copy themselves, count as arrived.
        for (int n = 0; n < schedule.consumers; ++n)
#pragma unroll
            for (int i = 0; i < Q_WARPS; ++i) mbarrier_arrive(smem.q_full[n]);
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(smem.k_full[stage], 1);
            mbarrier_init(smem.v_full[stage], 1);
            mbarrier_init(smem.k_empty[stage], 4 * schedule.consumers);
            mbarrier_init(smem.v_empty[stage], 4 * schedule.consumers);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarriers are initialized

    if (warp >= PRODUCER_WARP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp > PRODUCER_WARP)
            load_q(p, share, smem);
        else if (threadIdx.x % 32 == 0)
            load_kv(p, share, smem);
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    if (warp < 4 * schedule.consumers) compute(p, share, smem);
}

// ---- O = sum of the parts' O, each times 2^(m of the part - m), over l; and lse. A thread merges what one of
// a consumer's threads had of COUNT times 16 columns of a row, which are one of its UNITS. Of the parts it takes
// every `lanes`-th, PARTS at a time: so many lanes of a warp share the work
template <int PARTS>
__device__ void merge(const AttentionParams& p, const Schedule& schedule, uint32_t unit, int lanes,
                      bool is_there) {
    constexpr uint32_t COUNT = MERGED_AT_ONCE / PARTS, UNITS = (DIM / 16 + COUNT - 1) / COUNT;
    const uint32_t row_and_columns = unit / 4, columns = row_and_columns / schedule.rows;
    const uint32_t row = row_and_columns - columns * schedule.rows;
    const uint32_t head_of_keys = columns / UNITS, first_n = columns % UNITS * COUNT;
    // A work tile has the rows of CONSUMERS warpgroups, or it is the only one, and row_block is 0.
    const uint32_t row_block = row / BLOCK_M;
    const uint32_t work = head_of_keys * schedule.row_tiles.value + row_block / CONSUMERS;
    const uint32_t first_block = schedule.first_block(work);
    const uint32_t last_block = schedule.last_block(work);
    const int local = row % BLOCK_M, warpgroup = row_block % CONSUMERS;
    const int r = local / 8 % 2, thread = local / 16 * 32 + local % 8 * 4 + unit % 4;
    const Parts* parts = static_cast<const Parts*>(p.workspace[0]);
    const int lane = threadIdx.x & (lanes - 1);
    is_there &= first_block < last_block;  // one block alone has written O and lse
    float row_max = -INFINITY, row_sum = 0.0f, o[COUNT][4] = {};
    for (uint32_t block = first_block + lane; is_there && block <= last_block;
         block += PARTS * lanes) {
        // All loads first: they take as long as one.
        float part_max[PARTS], part_sum[PARTS];
        float4 part_o[PARTS][COUNT];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const uint32_t of = block + i * lanes;
            part_max[i] = -INFINITY, part_sum[i] = 0.0f;
#pragma unroll
            for (float4& x : part_o[i]) x = make_float4(0, 0, 0, 0);
            if (of > last_block) continue;
            const Part& part = parts[of].part[of < last_block ? GOES_ON : ENDS][warpgroup];
            part_max[i] = part.row_max[local], part_sum[i] = part.row_sum[local];
#pragma unroll
            for (int c = 0; c < COUNT; ++c)
                if (first_n + c < DIM / 16)
                    part_o[i][c] = load_float4(part.o[first_n + c][r][thread]);
        }
        float new_max = row_max;
#pragma unroll
        for (float m : part_max) new_max = fmaxf(new_max, m);
        const float shift = new_max == -INFINITY ? 0.0f : new_max;  // -inf - -inf is NaN
        const float rescale = ex2_approx_ftz(row_max - shift);
        row_sum *= rescale;
#pragma unroll
        for (auto& four : o)
#pragma unroll
            for (float& x : four) x *= rescale;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const float factor = ex2_approx_ftz(part_max[i] - shift);
            row_sum += factor * part_sum[i];
#pragma unroll
            for (int c = 0; c < COUNT; ++c) {
                const float4& x = part_o[i][c];
                o[c][0] += factor * x.x, o[c][1] += factor * x.y;
                o[c][2] += factor * x.z, o[c][3] += factor * x.w;
            }
        }
        row_max = new_max;
    }
    // The same once more, of what the lanes have.
    const float lane_max = row_max;
    for (int other = 1; other < lanes; other *= 2)
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, other));
    const float rescale = ex2_approx_ftz(lane_max - (row_max == -INFINITY ? 0.0f : row_max));
    row_sum *= rescale;
#pragma unroll
    for (auto& four : o)
#pragma unroll
        for (float& x : four) x *= rescale;
    for (int other = 1; other < lanes; other *= 2) {
        row_sum += __shfl_xor_sync(0xffffffff, row_sum, other);
#pragma unroll
        for (auto& four : o)
#pragma unroll
            for (float& x : four) x += __shfl_xor_sync(0xffffffff, x, other);
    }
    is_there &= lane == 0;
    const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
    const Divisor group = schedule.p.group, kv_heads = schedule.kv_heads;
    const uint32_t query = group.divide(row), batch = kv_heads.divide(head_of_keys);
    const uint32_t kv_head = head_of_keys - batch * kv_heads.value;
    const uint32_t head = kv_head * group.value + row - query * group.value;
    Element* out = p.o + batch * p.o_stride.batch + head * p.o_stride.head + query * p.o_stride.row;
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
        store_16(out, 16 * (first_n + c), make_float4(o[c][0], o[c][1], o[c][2], o[c][3]), inverse,
                 unit % 4, lanes, is_there);
    if (is_there && first_n == 0 && unit % 4 == 0)
        p.lse[(int64_t(batch) * p.heads + head) * p.seq_q + query] =
            row_sum == 0.0f ? -INFINITY : (row_max + lg2_approx_ftz(row_sum)) * LN_2;
}

// All rows that have parts, of each so many parts at a time.
template <int PARTS>
__device__ void merge_rows(const AttentionParams& p, const Schedule& schedule, uint32_t parts) {
    constexpr uint32_t COUNT = MERGED_AT_ONCE / PARTS, UNITS = (DIM / 16 + COUNT - 1) / COUNT;
    const uint32_t units = uint32_t(p.batch) * p.kv_heads * schedule.rows * UNITS * 4;
    const uint32_t threads = gridDim.x * MERGE_THREADS;
    // So many lanes that each loads all of its parts at once, unless there are not so many threads; 16 at most,
    // as a thread's neighbour in its quad, `lanes` lanes away, must be in its warp.
    int log_lanes = 0;
    while (log_lanes < 4 && (PARTS << log_lanes) < parts && units << (log_lanes + 1) <= threads)
        ++log_lanes;
    // Few rows are on all SMs.
    for (uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
         32 * warp < (units << log_lanes); warp += threads / 32) {
        const uint32_t unit = (32 * warp + threadIdx.x % 32) >> log_lanes;
        merge<PARTS>(p, schedule, min(unit, units - 1), 1 << log_lanes, unit < units);
    }
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS, MERGE_BLOCKS)
    attention_merge(const __grid_constant__ DivisorsParams p) {
    const Schedule schedule(p);
    const uint32_t parts = schedule.parts > 0
                               ? schedule.parts
                               : min(schedule.tiles.value, p.works.divide(schedule.blocks) + 2);
    griddepcontrol_wait();  // the parts are there
    if (parts <= 2)
        merge_rows<2>(p, schedule, parts);
    else
        merge_rows<4>(p, schedule, parts);
}
