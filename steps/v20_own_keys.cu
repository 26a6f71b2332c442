// v20 -- warps with keys of their own: products of 16 rows, which a warp computes alone
// taken: only for the fewest rows; on many keys, another row tile would read these again
// change: from v18. wgmma multiplies 64 rows at least, by four warps; mma.sync of v06 multiplies 16, by
//     one. Each warp has a quarter of a tile's keys to itself, with m, l and O of its own, and waits for
//     nobody else until the work tile ends. Then all merge what they have found, as blocks merge parts.
//     So a work tile has 16 rows, and one ring of more stages, 64 KB of which are under way, is enough.
//     The first copies wait for no other warp. What is cut is merged by warps that do not compute where
//     whole work tiles follow, and by all where none do
// why: v18 computes with a tile for 1020 of the 1700 cycles that its bytes take to arrive, with up to 32
//     rows of 64 columns, and its second ring hides that in part. A kernel that only reads is 1.4 % faster
//     with many keys. Predicted: as much
// repeats: all bits on as many multiprocessors; their number decides where the keys are cut
// limits: bf16, fp16; head_dim 8-256 by 8; sm_90a
#include "attention_divisors.cuh"
#include "copy.cuh"
#include "group_rows.cuh"
#include "mma.cuh"
#include "signals.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

constexpr int COMPUTING = 4;                        // warps
constexpr int PRODUCER_WARP = COMPUTING;            // starts the copies of K and V
constexpr int MERGING_WARP = PRODUCER_WARP + 1;     // the first of those that only merge
constexpr int NUM_THREADS = 256;                    // all of them merge where nothing else is left
constexpr int TILE_ROWS = 16;                       // rows of a work tile, and of a product
constexpr int BLOCK_N = HEAD_DIM <= 64 ? 128 : 64;  // keys of a tile
constexpr int WARP_N = BLOCK_N / COMPUTING;         // of those, a warp's
constexpr int NUM_STAGES = HEAD_DIM <= 64    ? 3    // tiles of K, and of V, in shared memory
                           : HEAD_DIM <= 128 ? 4
                                             : 2;
constexpr int MBARRIERS_BARRIER = 1;  // of the warps that compute and the one that copies
constexpr int PART_BARRIER = 2;       // of those that compute
constexpr int OWN_PART_BARRIER = 3;   // of those, and of the ones that only merge
constexpr int Q_STAGES = 2;           // work tiles whose Q is there
constexpr int PANEL = 64;             // columns of a panel: 128 bytes a row, the swizzle's width
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole products; zeros from HEAD_DIM on
// With 256 columns a warp has no registers for all of Q beside O, and loads it again for each tile.
constexpr bool Q_IN_REGISTERS = DIM <= 128;

// Columns of a tensor in panels, as TMA writes them: in each, 8 rows of 128 bytes are swizzled.
template <int ROWS>
using Tile = Element[PANELS][ROWS][PANEL];
// Copies that are under way at a time: with more than 64 KB of each SM (72 with 136 to 192 columns), DRAM
// gets slower. Who copies waits for the phase of an earlier one, so that stage must not have been filled
// again.
constexpr int UNDER_WAY = (65536 - 1) / sizeof(Tile<BLOCK_N>) + 1;
static_assert(UNDER_WAY < 2 * NUM_STAGES);

// What has been found in some keys of a work tile: O = sum P V, m and l, P = 2^(S - m).
template <int COLUMNS>
struct Found {
    float o[TILE_ROWS][COLUMNS];
    float row_max[TILE_ROWS], row_sum[TILE_ROWS];
};
// By a warp. A row of O begins 8 banks of shared memory, or 24, after the one before.
using WarpPart = Found<DIM + 8>;
// By a block.
struct alignas(128) Part : Found<HEAD_DIM> {
    Signal ready;  // for the block that merges it
};
// A share leaves at most one part of a work tile whose last keys it has, and one of a work tile that goes on
// in the next share.
enum PartKind { ENDS, GOES_ON };
struct Parts {
    Part part[2];
};
// From so many tiles of keys in a share on, equal shares are worth merging even where others would keep nine
// tenths of the blocks busy: REST_SHARE where whole work tiles follow, LONG_SHARE, 3.75 MB of K, where none do.
constexpr int REST_SHARE = HEAD_DIM <= 128 ? 6 : 20;
constexpr int LONG_SHARE = (15 << 18) / sizeof(Tile<BLOCK_N>);
constexpr int MAX_BLOCKS = 144;             // no device of this architecture has more SMs
constexpr int MERGE_CHUNKS = HEAD_DIM / 4;  // of a row of O: four columns

// What a block computes of a work tile: of up to TILE_ROWS rows, which share a key head, the tiles of
// keys first ... end - 1.
struct Segment {
    int first_row, kv_head, batch;
    int first, end;
    PartKind kind;
    bool is_whole;  // all tiles of the work tile
};

// What is to be merged: the parts of the work tile whose last keys a share has, but not the first ones.
struct Merge {
    Segment segment;
    uint32_t first_share, last_share;  // whose parts these are
};

// Where a row of Q and of O begins, and its lse.
struct RowPlace {
    const Element* q;
    Element* o;
    float* lse;
};

struct alignas(1024) SharedMemory {  // the swizzle's pattern: 8 rows of 128 bytes
    Tile<TILE_ROWS> q[Q_STAGES];
    Tile<BLOCK_N> k[NUM_STAGES], v[NUM_STAGES];
    WarpPart parts[COMPUTING];
    RowPlace places[Q_STAGES][TILE_ROWS];
    Merge merge;
    Mbarrier k_full[NUM_STAGES], v_full[NUM_STAGES];    // the tile has arrived
    Mbarrier k_empty[NUM_STAGES], v_empty[NUM_STAGES];  // every warp has read it
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward",
                 .grid = {{SEQ_K, BLOCK_N}, {GROUP_ROWS, TILE_ROWS}, {KV_HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory),
                 .blocks_per_sm = 1}},
    // One for each share; by an axis, as those without a second tile leave parts, too.
    .workspace = {{.element_bytes = sizeof(Parts), .shape = {{BATCH, MAX_BLOCKS}}}},
    .k_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .v_box = {BLOCK_N, PANEL, SWIZZLE_128B},
};
// Half a row is a panel's: the other half is fetched with it, where the two are 256 bytes.
__constant__ int32_t l2_fetch_bytes = HEAD_DIM % (2 * PANEL) == 0 ? 256 : 128;
}

// The shares. Row n of a key head is query n / group of head n % group of its group. What is counted
// here is less than 2^32: a division of 64 bits takes ten times as long, and a short call waits for
// these.
struct Schedule {
    const DivisorsParams& p;
    const Divisor tiles;      // of keys, of each work tile
    const Divisor row_tiles;  // work tiles of a key head
    const Divisor kv_heads;
    const int rows;          // of a key head: the queries of its heads
    const uint32_t works;    // work tiles
    uint32_t shares;         // of all blocks
    uint32_t cut_works;      // so many work tiles are cut, the first ones:
    uint32_t parts;          // into so many equal parts each, if that is not 0
    uint32_t share, longer;  // or else into shares of so many tiles; of the first ones one more

    __device__ explicit Schedule(const DivisorsParams& params)
        : p(params),
          tiles(p.tiles[0]),
          row_tiles(p.tiles[1]),
          kv_heads(p.tiles[2]),
          rows(p.group.value * p.seq_q),
          works(p.works.value),
          shares(p.blocks.value),
          cut_works(0),
          parts(0) {
        // Parts take time to write and to merge. So whole work tiles are dealt out, but for a rest of which
        // there are not enough for all blocks.
        const uint32_t rounds = p.blocks.divide(works), rest = works - rounds * shares;
        const uint64_t rest_tiles = uint64_t(rest) * tiles.value;
        if (rest == 0 || rest_tiles > UINT32_MAX) return;
        if (rounds > 0) {
            // A rest that keeps nine tenths of all rounds busy is not cut if its shares would be short.
            if (!p.split_keys && rest_tiles < REST_SHARE * shares) return;
        } else {
            // As many parts of each, if these keep all blocks busy, or nine tenths where shares are short.
            parts = p.works.divide(shares);
            const uint32_t busy = rest * parts;
            const bool is_long = rest_tiles >= LONG_SHARE * shares;
            if (is_long ? busy < shares : 10 * busy < 9 * shares) parts = 0;
            if (uint64_t(busy) * tiles.value > UINT32_MAX) parts = 0;  // more than cut() counts
        }
        cut_works = rest;
        if (parts > 0) {
            shares = rest * parts;
        } else {
            share = p.blocks.divide(rest_tiles);
            longer = rest_tiles - share * shares;
        }
    }

    // Where a share begins, and the one before it ends.
    __device__ uint32_t cut(uint32_t index) const {
        return parts > 0 ? index * tiles.value / parts : share * index + min(index, longer);
    }
    // The share that has the first tile of a work tile.
    __device__ uint32_t first_share(uint32_t work) const {
        if (parts > 0) return work * parts;
        const uint32_t tile = work * tiles.value, first = cut(longer);
        return tile < first ? tile / (share + 1) : longer + (tile - first) / share;
    }

    // The keys that a row sees. Causal: query i sees j <= i + seq_k - seq_q.
    __device__ int visible_keys(int row) const {
        const int query = p.group.divide(row);
        return CAUSAL ? max(0, query - p.seq_q + p.seq_k + 1) : p.seq_k;
    }

    __device__ RowPlace place(const Segment& segment, int row) const {
        const int query = p.group.divide(row);
        const int head = segment.kv_head * p.group.value + row - query * p.group.value;
        return {p.q + segment.batch * p.q_stride.batch + head * p.q_stride.head +
                    query * p.q_stride.row,
                p.o + segment.batch * p.o_stride.batch + head * p.o_stride.head +
                    query * p.o_stride.row,
                p.lse + (int64_t(segment.batch) * p.heads + head) * p.seq_q + query};
    }
};

// A block's share, segment by segment: of work tiles that are cut, and then whole ones. While whole ones
// are computed, the warps that do not compute merge the parts of one that is cut. What is cut comes in
// reverse: the next share waits for the part that goes on.
struct Share {
    const Schedule& schedule;
    uint32_t index;
    uint32_t begin = 0, end = 0;  // of the tiles of what is cut
    uint32_t first_work = 0;      // of the work tiles that are cut
    uint32_t num_cut = 0;         // segments of these
    uint32_t count = 0;           // all segments

    __device__ explicit Share(const Schedule& s) : schedule(s), index(blockIdx.x) {
        if (index >= s.shares) return;
        if (s.cut_works > 0) begin = s.cut(index), end = s.cut(index + 1);
        if (begin < end) {
            first_work = s.tiles.divide(begin);
            num_cut = s.tiles.divide(end - 1) - first_work + 1;
        }
        const uint32_t whole = s.works - s.cut_works;
        count = num_cut + (index < whole ? s.p.blocks.divide(whole - 1 - index) + 1 : 0);
    }

    // Whether it has the last keys of a work tile whose first ones it has not.
    __device__ bool has_parts_to_merge() const {
        const uint32_t tiles = schedule.tiles.value, left = (first_work + 1) * tiles - begin;
        return num_cut > 0 && left < tiles && left <= end - begin;
    }
    __device__ bool merges_early() const { return has_parts_to_merge() && count > num_cut; }

    __device__ Segment at(uint32_t i) const {
        const Schedule& s = schedule;
        const uint32_t tiles = s.tiles.value;
        uint32_t work;
        Segment segment;
        if (i < num_cut) {
            work = first_work + num_cut - 1 - i;
            const uint32_t before = work * tiles;
            segment.first = max(begin, before) - before;
            segment.end = min(end - before, tiles);
        } else {
            work = s.cut_works + index + (i - num_cut) * s.shares;
            segment.first = 0, segment.end = tiles;
        }
        segment.kind = segment.end == tiles ? ENDS : GOES_ON;
        segment.is_whole = segment.first == 0 && segment.end == tiles;
        const uint32_t head_of_keys = s.row_tiles.divide(work);
        segment.first_row = (work - head_of_keys * s.row_tiles.value) * TILE_ROWS;
        segment.batch = s.kv_heads.divide(head_of_keys);
        segment.kv_head = head_of_keys - segment.batch * s.kv_heads.value;
        if (CAUSAL) {  // nothing is loaded that no row sees
            const int last_row = min(segment.first_row + TILE_ROWS, s.rows) - 1;
            const uint32_t keys = s.visible_keys(last_row);
            segment.end = min(segment.end, (keys + BLOCK_N - 1) / BLOCK_N);
        }
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

// Where TMA puts 8 elements of a tile's row from column d on: 8 chunks of a row change places.
template <int ROWS>
__device__ Element* swizzled(Tile<ROWS>& tile, int row, int d) {
    return &tile[d / PANEL][row][d % PANEL ^ row % 8 * VEC];
}

// ---- start to copy Q, whose rows are of several heads: no box of a tensor map. By the warps that
// compute. What stays in rows that are not used is multiplied, and nobody reads the products
__device__ void load_q(const AttentionParams& p, const Schedule& schedule, const Segment& segment,
                       int stage, SharedMemory& smem) {
    constexpr int CHUNKS = DIM / VEC;  // of a row
    const int rows = min(TILE_ROWS, schedule.rows - segment.first_row);
#pragma unroll 1  // code is fetched from DRAM when it is first needed
    for (int n = threadIdx.x; n < rows * CHUNKS; n += 32 * COMPUTING) {
        const int local = n / CHUNKS, d = n % CHUNKS * VEC;
        const RowPlace place = schedule.place(segment, segment.first_row + local);
        const bool valid = d < HEAD_DIM;
        cp_async_cg(swizzled(smem.q[stage], local, d), valid ? place.q + d : p.q, valid);
        if (d == 0) smem.places[stage][local] = place;
    }
    cp_async_commit_group();
}

// ---- copy K and V. By a warp, one lane of which starts the copies, but all lanes know what: then ptxas
// has it in uniform registers, where TMA needs it. Otherwise it would move it there lane by lane
__device__ void load_kv(const AttentionParams& p, const Share& share, Segment segment,
                        SharedMemory& smem) {
    const bool starts = threadIdx.x % 32 == 0;
    // Copies are counted, too: K of a tile is copy 2 number, V the next one.
    const auto pace = [&](int copy) {
        const int before = copy - UNDER_WAY, number = before / 2;
        if (before < 0) return;
        Mbarrier(&full)[NUM_STAGES] = before % 2 == 0 ? smem.k_full : smem.v_full;
        wait_for(full[number % NUM_STAGES], number / NUM_STAGES);
    };
    int number = 0;  // of the tile
    for (uint32_t i = 0; i < share.count;) {
        for (int tile = segment.first; tile < segment.end; ++tile, ++number) {
            const int stage = number % NUM_STAGES, phase = number / NUM_STAGES;
            pace(2 * number);
            wait_for(smem.k_empty[stage], phase - 1);
            __syncwarp();  // a lane still waiting would miss the phases that the copy allows
            if (starts)
                load_tile(smem.k[stage], p.k_map, tile * BLOCK_N, segment.kv_head, segment.batch,
                          smem.k_full[stage]);
            pace(2 * number + 1);
            wait_for(smem.v_empty[stage], phase - 1);
            __syncwarp();
            if (starts)
                load_tile(smem.v[stage], p.v_map, tile * BLOCK_N, segment.kv_head, segment.batch,
                          smem.v_full[stage]);
        }
        if (++i < share.count) segment = share.at(i);
    }
}

// Where no key is visible yet all S are -inf, and -inf + inf is NaN.
__device__ float shift_of(float max) { return max == -INFINITY ? 0.0f : max; }

// Of a row, merged from several parts: m, l and, for each c, the four columns of O from d + 4 c STRIDE on.
template <int CHUNKS>
struct Merged {
    static constexpr int STRIDE = (MERGE_CHUNKS + CHUNKS - 1) / CHUNKS;
    float row_max = -INFINITY, row_sum = 0.0f, o[CHUNKS][4] = {};

    // Before parts are added: new_max is at least the m of each, and of what has been merged.
    __device__ void raise(float new_max) {
        const float rescale = ex2_approx_ftz(row_max - shift_of(new_max));
        row_max = new_max;
        row_sum *= rescale;
#pragma unroll
        for (auto& chunk : o)
#pragma unroll
            for (float& x : chunk) x *= rescale;
    }
    __device__ void add(float part_max, float part_sum, const float4 (&part_o)[CHUNKS]) {
        const float factor = ex2_approx_ftz(part_max - shift_of(row_max));
        row_sum += factor * part_sum;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            o[c][0] += factor * part_o[c].x, o[c][1] += factor * part_o[c].y;
            o[c][2] += factor * part_o[c].z, o[c][3] += factor * part_o[c].w;
        }
    }
    // O and lse.
    __device__ void write(const RowPlace& place, int d) const {
        const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            if (d + 4 * c * STRIDE < HEAD_DIM)
                store_float4(place.o + d + 4 * c * STRIDE,
                             make_float4(o[c][0] * inverse, o[c][1] * inverse, o[c][2] * inverse,
                                         o[c][3] * inverse));
        if (d == 0) *place.lse = (row_max + lg2_approx_ftz(row_sum)) * LN_2;
    }
    // Or a part of them.
    __device__ void leave(Part& part, int row, int d) const {
        static_assert(CHUNKS == 1);
        store_float4(&part.o[row][d], make_float4(o[0][0], o[0][1], o[0][2], o[0][3]));
        if (d == 0) part.row_max[row] = row_max, part.row_sum[row] = row_sum;
    }
};

// ---- what a warp computes: all rows of its keys, of all segments
__device__ void compute(const AttentionParams& p, const Share& share, Segment segment,
                        SharedMemory& smem) {
    const Schedule& schedule = share.schedule;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0);
    Parts* const parts = static_cast<Parts*>(p.workspace[0]);
    const auto release = [&](Mbarrier& empty) {
        __syncwarp();  // every lane has read
        if (lane == 0) mbarrier_arrive(empty);
    };
    const float scale_log2 = p.softmax_scale * LOG2_E;  // exp(scale s) = 2^(scale_log2 s)

    if (share.count > 0) load_q(p, schedule, segment, 0, smem);
    bar_sync(MBARRIERS_BARRIER, 32 * (COMPUTING + 1));  // the mbarriers are initialized
    int number = 0;                                     // of the next tile
    for (uint32_t i = 0; i < share.count; ++i) {
        cp_async_wait_group<0>();
        bar_sync(PART_BARRIER, 32 * COMPUTING);  // Q is there, and nobody reads the one before
        Segment next = segment;
        if (i + 1 < share.count) {
            next = share.at(i + 1);
            load_q(p, schedule, next, (i + 1) % Q_STAGES, smem);
        }
        uint32_t q_frag[DIM / 16][4];
        const auto load_q_frag = [&](int d) {
            ldmatrix_x4(q_frag[d / 16],
                        swizzled(smem.q[i % Q_STAGES], lane % 16, d + lane / 16 * 8));
        };
        if (Q_IN_REGISTERS)
#pragma unroll
            for (int d = 0; d < DIM; d += 16) load_q_frag(d);

        // A lane's s_acc[n][2 r + i] and o_acc[n][2 r + i], with r and i 0 or 1, are the elements of S
        // and O in row 8 r + lane / 4 and column 8 n + 2 (lane % 4) + i.
        float o_acc[DIM / 8][4] = {};
        float row_max[2] = {-INFINITY, -INFINITY};  // m, in units of log2
        float row_sum[2] = {};                      // this lane's share of l

        // ---- for each K/V tile
        for (int tile = segment.first; tile < segment.end; ++tile, ++number) {
            const int stage = number % NUM_STAGES, phase = number / NUM_STAGES;
            // ---- S = Q K^T  [TILE_ROWS, WARP_N]
            float s_acc[WARP_N / 8][4] = {};
            wait_for(smem.k_full[stage], phase);
#pragma unroll
            for (int d = 0; d < DIM; d += 16) {
                if (!Q_IN_REGISTERS) load_q_frag(d);
#pragma unroll
                for (int n = 0; n < WARP_N; n += 16) {
                    uint32_t k_frag[4];  // K^T [16, 8], of the keys n ... n + 7 and of the next 8
                    const int key = WARP_N * warp + n + lane / 16 * 8 + lane % 8;
                    ldmatrix_x4(k_frag, swizzled(smem.k[stage], key, d + lane / 8 % 2 * 8));
                    mma_m16n8k16<Element>(s_acc[n / 8], q_frag[d / 16], k_frag[0], k_frag[1]);
                    mma_m16n8k16<Element>(s_acc[n / 8 + 1], q_frag[d / 16], k_frag[2], k_frag[3]);
                }
            }
            release(smem.k_empty[stage]);

            // ---- online softmax: P = 2^(S - m)
            float tile_scale = scale_log2;
            const int k_start = tile * BLOCK_N + WARP_N * warp;
            // Not every row sees all of these keys. Or the largest S is not the largest logit.
            if (k_start + WARP_N > schedule.visible_keys(segment.first_row) || scale_log2 < 0.0f) {
                tile_scale = 1.0f;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = segment.first_row + 8 * (i / 2) + lane / 4;
                    const int keys = schedule.visible_keys(row) - k_start - 2 * (lane % 4);
#pragma unroll
                    for (int n = 0; n < WARP_N / 8; ++n) {
                        float& s = s_acc[n][i];
                        s = 8 * n + i % 2 < keys ? s * scale_log2 : -INFINITY;
                    }
                }
            }
            uint32_t p_frag[WARP_N / 16][4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float x = -INFINITY;
#pragma unroll
                for (int n = 0; n < WARP_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) x = fmaxf(x, s_acc[n][2 * r + i]);
                const float row_max_new = fmaxf(row_max[r], quad_max(x) * tile_scale);
                const float shift = shift_of(row_max_new);
                const float rescale = ex2_approx_ftz(row_max[r] - shift);
                row_max[r] = row_max_new;
                row_sum[r] *= rescale;
#pragma unroll
                for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) o_acc[n][2 * r + i] *= rescale;
#pragma unroll
                for (int n = 0; n < WARP_N / 8; ++n) {
                    float* s = &s_acc[n][2 * r];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        s[i] = ex2_approx_ftz(s[i] * tile_scale - shift);
                        row_sum[r] += s[i];
                    }
                    // Two accumulators [16, 8] side by side are an operand [16, 16].
                    p_frag[n / 2][n % 2 * 2 + r] = cvt_rn_x2<Element>(s[0], s[1]);
                }
            }

            // ---- O += P V  [TILE_ROWS, HEAD_DIM]
            wait_for(smem.v_full[stage], phase);
#pragma unroll
            for (int j = 0; j < WARP_N; j += 16)
#pragma unroll
                for (int d = 0; d < DIM; d += 16) {
                    uint32_t v_frag[4];  // V [16, 8], of the columns d ... d + 7 and of the next 8
                    const int key = WARP_N * warp + j + lane % 16;
                    ldmatrix_x4_trans(v_frag, swizzled(smem.v[stage], key, d + lane / 16 * 8));
                    mma_m16n8k16<Element>(o_acc[d / 8], p_frag[j / 16], v_frag[0], v_frag[1]);
                    mma_m16n8k16<Element>(o_acc[d / 8 + 1], p_frag[j / 16], v_frag[2], v_frag[3]);
                }
            release(smem.v_empty[stage]);
        }

        // ---- leave what this warp has found
        WarpPart& found = smem.parts[warp];
        const float sums[2] = {quad_sum(row_sum[0]), quad_sum(row_sum[1])};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int local = 8 * r + lane / 4;
            if (segment.first_row + local >= schedule.rows) continue;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n)
                *reinterpret_cast<float2*>(&found.o[local][8 * n + 2 * (lane % 4)]) =
                    float2{o_acc[n][2 * r], o_acc[n][2 * r + 1]};
            if (lane % 4 == 0) found.row_max[local] = row_max[r], found.row_sum[local] = sums[r];
        }
        bar_sync(PART_BARRIER, 32 * COMPUTING);
        // ---- merge what the warps have found: O and lse, or a part of them
        Part& part = parts[share.index].part[segment.kind];
        const int rows = min(TILE_ROWS, schedule.rows - segment.first_row);
        for (int n = threadIdx.x; n < rows * MERGE_CHUNKS; n += 32 * COMPUTING) {
            const int local = n / MERGE_CHUNKS, d = n % MERGE_CHUNKS * 4;
            Merged<1> merged;
#pragma unroll
            for (const WarpPart& of : smem.parts)
                merged.row_max = fmaxf(merged.row_max, of.row_max[local]);
#pragma unroll
            for (const WarpPart& of : smem.parts)
                merged.add(of.row_max[local], of.row_sum[local], {load_float4(&of.o[local][d])});
            if (segment.is_whole)
                merged.write(smem.places[i % Q_STAGES][local], d);
            else
                merged.leave(part, local, d);
        }
        if (i + 1 == share.num_cut && share.merges_early())
            bar_arrive(OWN_PART_BARRIER, NUM_THREADS - 32);
        if (segment.kind == GOES_ON) {
            bar_sync(PART_BARRIER, 32 * COMPUTING);  // all warps have written
            if (warp == 0) post_signal(part.ready);
        }
        segment = next;
    }
}

// ---- wait for other blocks' parts of the work tile that is to be merged, and leave in shared memory what
// the merge needs to know. By a warp that does not compute: GPUs start blocks in the order of their numbers,
// and no warp that computes waits for a part
__device__ void await_parts(const AttentionParams& p, const Share& share, Merge& merge) {
    Parts* const parts = static_cast<Parts*>(p.workspace[0]);
    const uint32_t lane = threadIdx.x % 32, last = share.index;
    const uint32_t first = share.schedule.first_share(share.first_work);
    if (lane == 0) merge = {share.at(share.num_cut - 1), first, last};
    for (uint32_t other = first; other < last; other += 32)
        take_signals(other + lane < last ? &parts[other + lane].part[GOES_ON].ready : nullptr);
}

// ---- o = sum of the parts' O, each times 2^(m of the part - m), over l; and lse. By all warps from
// first_warp on. A thread has CHUNKS times four columns of a row, and AT_ONCE parts of each at a time
template <int CHUNKS, int AT_ONCE>
__device__ void merge(const Schedule& schedule, const Merge& of, int rows, uint32_t first_warp) {
    constexpr int STRIDE = Merged<CHUNKS>::STRIDE;
    const Parts* parts = static_cast<const Parts*>(schedule.p.workspace[0]);
    const uint32_t threads = NUM_THREADS - 32 * first_warp, thread = threadIdx.x - 32 * first_warp;
    const uint32_t num_parts = of.last_share - of.first_share + 1, work = rows * STRIDE;
    // Where CHUNKS is 1, neighboring lanes may have the same columns, and each every so many-th part: as many
    // lanes of a warp as load all parts at once, if there are threads for it.
    uint32_t shift = 0;
    while (CHUNKS == 1 && shift < 5 && (AT_ONCE << shift) < num_parts &&
           (work << shift) * 2 <= threads)
        ++shift;
    const uint32_t lanes = 1 << shift, lane = thread & (lanes - 1);
    // Warps stay together, as lanes merge what they have found.
#pragma unroll 1
    for (uint32_t n = thread; n - n % 32 < lanes * work; n += threads) {
        const int unit = n >> shift, row = min(unit / STRIDE, rows - 1), d = unit % STRIDE * 4;
        Merged<CHUNKS> merged;
#pragma unroll 1
        for (uint32_t share = of.first_share + lane; share <= of.last_share;
             share += AT_ONCE * lanes) {
            // All loads first: they take as long as one.
            float part_max[AT_ONCE], part_sum[AT_ONCE];
            float4 part_o[AT_ONCE][CHUNKS];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const uint32_t from = share + i * lanes;
                part_max[i] = -INFINITY, part_sum[i] = 0.0f;
#pragma unroll
                for (float4& x : part_o[i]) x = make_float4(0, 0, 0, 0);
                if (from > of.last_share) continue;
                const Part& part = parts[from].part[from < of.last_share ? GOES_ON : ENDS];
                part_max[i] = part.row_max[row], part_sum[i] = part.row_sum[row];
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c)
                    part_o[i][c] = load_float4(&part.o[row][min(d + 4 * c * STRIDE, HEAD_DIM - 4)]);
            }
            float new_max = merged.row_max;
#pragma unroll
            for (float m : part_max) new_max = fmaxf(new_max, m);
            merged.raise(new_max);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) merged.add(part_max[i], part_sum[i], part_o[i]);
        }
        if (CHUNKS == 1) {
            // The same once more, of what the lanes have.
            float new_max = merged.row_max;
            for (uint32_t other = 1; other < lanes; other *= 2)
                new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffff, new_max, other));
            merged.raise(new_max);
            for (uint32_t other = 1; other < lanes; other *= 2) {
                merged.row_sum += __shfl_xor_sync(0xffffffff, merged.row_sum, other);
#pragma unroll
                for (float& x : merged.o[0]) x += __shfl_xor_sync(0xffffffff, x, other);
            }
        }
        if (unit < work && lane == 0)
            merged.write(schedule.place(of.segment, of.segment.first_row + row), d);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_forward(const __grid_constant__ DivisorsParams p) {
    const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0);
    const bool computes = warp < PRODUCER_WARP, copies = warp == PRODUCER_WARP;
    SharedMemory& smem = shared_memory<SharedMemory>();
    if (copies) {
        if (threadIdx.x % 32 == 0) {
            prefetch_tensormap(p.k_map);
            prefetch_tensormap(p.v_map);
#pragma unroll
            for (int stage = 0; stage < NUM_STAGES; ++stage) {
                mbarrier_init(smem.k_full[stage], 1);
                mbarrier_init(smem.v_full[stage], 1);
                mbarrier_init(smem.k_empty[stage], COMPUTING);
                mbarrier_init(smem.v_empty[stage], COMPUTING);
            }
            fence_mbarrier_init();
        }
        __syncwarp();  // the mbarriers are initialized: the copies need not wait for those that compute
        bar_arrive(MBARRIERS_BARRIER, 32 * (COMPUTING + 1));
    }
    const Schedule schedule(p);
    const Share share(schedule);
    const Segment first = share.at(0);

    if (computes)
        compute(p, share, first, smem);
    else if (copies)
        load_kv(p, share, first, smem);
    // What only merges is last in the code as well: all of that is fetched as it is first needed.
    if (!share.has_parts_to_merge()) return;
    const int first_warp = share.merges_early() ? MERGING_WARP : 0;
    if (warp < first_warp) return;
    if (warp == MERGING_WARP) await_parts(p, share, smem.merge);
    // All parts are there, and this block's, too.
    if (first_warp > 0)
        bar_sync(OWN_PART_BARRIER, NUM_THREADS - 32);
    else
        __syncthreads();
    const int rows = min(TILE_ROWS, schedule.rows - smem.merge.segment.first_row);
    // A round of loads is a journey to L2, or to DRAM. With more than two chunks for each thread the second
    // way takes fewer.
    if (rows * MERGE_CHUNKS <= 2 * (NUM_THREADS - 32 * first_warp))
        merge<1, 8>(schedule, smem.merge, rows, first_warp);
    else
        merge<4, 4>(schedule, smem.merge, rows, first_warp);
}
