// v18 -- last block merges: the block with the last keys of a work tile merges its parts
// taken: only for few rows; more, if they are to be merged, take one block longer than v13's kernel
// change: there is no second kernel. The block that has the last keys of a work tile waits for the
//     other parts of it, and merges them. A block begins with what goes on in the next one, so that nobody
//     waits for long; and of several rounds of work tiles only the last one is cut, where it would leave
//     many blocks idle, or some for long. A work tile has 32 rows, 8 of each warp, which leaves half of a
//     product alone. Up to head_dim 64 a block has two rings, where there is work for both
// why: of the 12 to 60 us that v13 takes for a query of each head on 1024 keys, its second kernel is
//     4.5 where keys are split, and was 2.3 where nothing is to be merged, until the host left it out
//     there. Predicted: half of the one, and none of the other
// repeats: all bits on as many multiprocessors; their number decides where the keys are cut
// limits: bf16, fp16; head_dim 8-256 by 8; sm_90a
#include "attention_divisors.cuh"
#include "copy.cuh"
#include "group_rows.cuh"
#include "mma.cuh"
#include "signals.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

// A ring: tiles of K and V in turn, Q, a warpgroup that computes and a warp that starts the copies of K
// and V. With few columns there is room for two: while one is between two work tiles, the other one's
// keys arrive. A lone ring has three more warps, which only merge.
constexpr int MAX_RINGS = HEAD_DIM <= 64 ? 2 : 1;
constexpr int PRODUCER_WARP = 4 * MAX_RINGS;                         // of the first ring
constexpr int NUM_THREADS = MAX_RINGS == 1 ? 256 : 160 * MAX_RINGS;  // all of them merge
constexpr int BLOCK_M = 64;                          // rows of a product, 16 of each warp
constexpr int WARP_ROWS = 8;                         // of those, the ones that are used
constexpr int TILE_ROWS = 4 * WARP_ROWS;             // rows of a work tile
constexpr int BLOCK_N = HEAD_DIM <= 128 ? 128 : 64;  // keys of a tile
constexpr int NUM_STAGES = 2;                        // tiles of K, and of V, in shared memory
// As in v13: the more is under way to all SMs at a time, the slower DRAM gets. Two rings wait, too.
constexpr bool IS_PACED = HEAD_DIM > 64;
constexpr int Q_STAGES = 2;  // work tiles whose Q is there
constexpr int PANEL = 64;    // columns of a panel: 128 bytes a row, the swizzle's width
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole products; zeros from HEAD_DIM on

// Columns of a tensor in panels, as TMA writes them: in each, 8 rows of 128 bytes are swizzled.
template <int ROWS>
using Tile = Element[PANELS][ROWS][PANEL];

// What a ring has found in its keys of a work tile: O = sum P V, m and l, P = 2^(S - m).
struct alignas(128) Part {
    float o[TILE_ROWS][HEAD_DIM];
    float row_max[TILE_ROWS], row_sum[TILE_ROWS];
    Signal ready;  // for the block that merges it
};
// A share leaves at most one part of a work tile whose last keys it has, and one of a work tile that goes on
// in the next share.
enum PartKind { ENDS, GOES_ON };
struct Parts {
    Part part[2];
};
// From so many tiles of keys in a share on, equal shares are worth merging even where others would keep nine
// tenths of the rings busy: 3.75 MB of K or, above 128 columns, where parts are larger, twice that.
constexpr int LONG_SHARE = (HEAD_DIM <= 128 ? 15 << 18 : 15 << 19) / sizeof(Tile<BLOCK_N>);
// And from so many on two rings have shares, even if work tiles must be cut for that.
constexpr int RING_SHARE = 32;
constexpr int MAX_BLOCKS = 144;             // no device of this architecture has more SMs
constexpr int MERGE_CHUNKS = HEAD_DIM / 4;  // of a row of O: four columns

struct alignas(1024) Ring {  // the swizzle's pattern: 8 rows of 128 bytes
    Tile<BLOCK_M> q[Q_STAGES];
    Tile<BLOCK_N> k[NUM_STAGES], v[NUM_STAGES];
    Mbarrier k_full[NUM_STAGES], v_full[NUM_STAGES];    // the tile has arrived
    Mbarrier k_empty[NUM_STAGES], v_empty[NUM_STAGES];  // every warp has read it
};

// What a ring computes of a work tile: of up to TILE_ROWS rows, which share a key head, the tiles of
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
    uint32_t first_share, last_share;  // whose parts these are; if it is one, there are none
};

// Where a row of Q and of O begins, and its lse.
struct RowPlace {
    const Element* q;
    Element* o;
    float* lse;
};

struct SharedMemory {
    Ring rings[MAX_RINGS];
    Merge merges[MAX_RINGS];  // for each ring
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
    .workspace = {{.element_bytes = sizeof(Parts), .shape = {{BATCH, MAX_RINGS * MAX_BLOCKS}}}},
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
    uint32_t rings;          // of a block that are used
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
          rings(1),
          cut_works(0),
          parts(0) {
        // Parts take time to write and to merge. So whole work tiles are dealt out, but for a rest of which
        // there are not enough for all rings.
        const auto are_busy = [&](uint32_t rings_each) {
            const uint32_t n = rings_each * p.blocks.value;
            const uint32_t rounds = (p.blocks.divide(works - 1) >> (rings_each - 1)) + 1;
            return works >= n && works >= 9 * (rounds * n - works);
        };
        const uint64_t all_tiles = uint64_t(works) * tiles.value;
        if (are_busy(MAX_RINGS) || all_tiles >= RING_SHARE * MAX_RINGS * p.blocks.value)
            rings = MAX_RINGS;
        shares = rings * p.blocks.value;
        const uint32_t rounds = p.blocks.divide(works) >> (rings - 1);
        const uint32_t rest = works - rounds * shares;
        const uint64_t rest_tiles = uint64_t(rest) * tiles.value;
        if (rest == 0 || tiles.value == 1 || rest_tiles > UINT32_MAX) return;
        const bool is_long = rest_tiles >= LONG_SHARE * shares;
        if (rounds > 0) {
            // A rest that keeps nine tenths of all rounds busy is not cut if its shares would be short; nor if
            // its row tiles share keys: neighbors read these from L2 together.
            if (are_busy(rings) && !(is_long && row_tiles.value == 1)) return;
        } else {
            // As many parts of each, if these keep all rings busy, or nine tenths where shares are short.
            parts = p.works.divide(shares);
            const uint32_t busy = rest * parts;
            if (is_long ? busy < shares : 10 * busy < 9 * shares) parts = 0;
            if (uint64_t(busy) * tiles.value > UINT32_MAX) parts = 0;  // more than cut() counts
        }
        cut_works = rest;
        if (parts > 0) {
            shares = rest * parts;
        } else {
            share = p.blocks.divide(rest_tiles) >> (rings - 1);
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

// A ring's share, segment by segment: of work tiles that are cut, and then whole ones. What is cut comes in
// reverse: the next share waits for the part that goes on.
struct Share {
    const Schedule& schedule;
    uint32_t index;
    uint32_t begin = 0, end = 0;  // of the tiles of what is cut
    uint32_t first_work = 0;      // of the work tiles that are cut
    uint32_t num_cut = 0;         // segments of these
    uint32_t count = 0;           // all segments

    __device__ Share(const Schedule& s, uint32_t ring)
        : schedule(s), index(blockIdx.x * s.rings + ring) {
        if (ring >= s.rings || index >= s.shares) return;  // it has none
        if (s.cut_works > 0) begin = s.cut(index), end = s.cut(index + 1);
        if (begin < end) {
            first_work = s.tiles.divide(begin);
            num_cut = s.tiles.divide(end - 1) - first_work + 1;
        }
        const uint32_t whole = s.works - s.cut_works;
        count = num_cut;
        if (index < whole) count += (s.p.blocks.divide(whole - 1 - index) >> (s.rings - 1)) + 1;
    }

    // Whether it has the last keys of a work tile whose first ones it has not.
    __device__ bool has_parts_to_merge() const {
        const uint32_t tiles = schedule.tiles.value, left = (first_work + 1) * tiles - begin;
        return num_cut > 0 && left < tiles && left <= end - begin;
    }

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

// The row of a product that is a work tile's row.
__device__ int row_of_product(int row) { return row / WARP_ROWS * 16 + row % WARP_ROWS; }

// ---- start to copy Q, whose rows are of several heads: no box of a tensor map. By the warpgroup that
// computes. What stays in rows that are not used is multiplied, and nobody reads the products
__device__ void load_q(const AttentionParams& p, const Schedule& schedule, const Segment& segment,
                       int stage, Ring& ring) {
    constexpr int CHUNKS = DIM / VEC;  // of a row
    const int rows = min(TILE_ROWS, schedule.rows - segment.first_row);
#pragma unroll 1  // code is fetched from DRAM when it is first needed
    for (int n = threadIdx.x % 128; n < rows * CHUNKS; n += 128) {
        const int local = n / CHUNKS, d = n % CHUNKS * VEC;
        const Element* q = schedule.place(segment, segment.first_row + local).q;
        const bool valid = d < HEAD_DIM;
        cp_async_cg(swizzled(ring.q[stage], row_of_product(local), d), valid ? q + d : p.q, valid);
    }
    cp_async_commit_group();
}

// ---- copy K and V. By a warp, one lane of which starts the copies, but all lanes know what: then ptxas
// has it in uniform registers, where TMA needs it. Otherwise it would move it there lane by lane
__device__ void load_kv(const AttentionParams& p, const Share& share, Segment segment, Ring& ring) {
    const bool starts = threadIdx.x % 32 == 0;
    int number = 0;  // of the tile
    for (uint32_t i = 0; i < share.count;) {
        for (int tile = segment.first; tile < segment.end; ++tile, ++number) {
            const int stage = number % NUM_STAGES, phase = number / NUM_STAGES;
            const int before = number - 1;
            const bool is_paced = (IS_PACED || share.schedule.rings > 1) && number > 0;
            if (is_paced) wait_for(ring.k_full[before % NUM_STAGES], before / NUM_STAGES);
            wait_for(ring.k_empty[stage], phase - 1);
            __syncwarp();  // a lane still waiting would miss the phases that the copy allows
            if (starts)
                load_tile(ring.k[stage], p.k_map, tile * BLOCK_N, segment.kv_head, segment.batch,
                          ring.k_full[stage]);
            if (is_paced) wait_for(ring.v_full[before % NUM_STAGES], before / NUM_STAGES);
            wait_for(ring.v_empty[stage], phase - 1);
            __syncwarp();
            if (starts)
                load_tile(ring.v[stage], p.v_map, tile * BLOCK_N, segment.kv_head, segment.batch,
                          ring.v_full[stage]);
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
};

// ---- what a consumer computes: its rows of all segments
__device__ void compute(const AttentionParams& p, const Share& share, Segment segment, Ring& ring,
                        int barrier) {
    const Schedule& schedule = share.schedule;
    const auto uniform = [](int x) { return __shfl_sync(0xffffffff, x, 0); };
    const int lane = threadIdx.x % 32;
    const int warp = uniform(threadIdx.x / 32) % 4;
    Parts* const parts = static_cast<Parts*>(p.workspace[0]);
    const auto release = [&](Mbarrier& empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };
    const float scale_log2 = p.softmax_scale * LOG2_E;  // exp(scale s) = 2^(scale_log2 s)
    // A lane's s_acc[n][i] and o_acc[n][i], with i 0 or 1, are the elements of S and O in row lane / 4
    // of its warp's and column 8 n + 2 (lane % 4) + i. Those with i 2 or 3 are of rows not used.
    float s_acc[BLOCK_N / 8][4];
    uint32_t p_frag[BLOCK_N / 16][4];
    float row_max;  // m, in units of log2
    float row_sum;  // this lane's share of l
    float rescale;

    if (share.count > 0) load_q(p, schedule, segment, 0, ring);
    int number = 0;  // of the next tile among the ring's
    for (uint32_t i = 0; i < share.count; ++i) {
        const Tile<BLOCK_M>& q = ring.q[i % Q_STAGES];
        const int local = WARP_ROWS * warp + lane / 4, row = segment.first_row + local;

        // ---- S = Q K^T  [BLOCK_M, BLOCK_N]
        const auto start_s = [&](int number) {
            const int stage = number % NUM_STAGES;
            wait_for(ring.k_full[stage], number / NUM_STAGES);
            wgmma_fence(s_acc);
#pragma unroll
            for (int d = 0; d < HEAD_DIM; d += 16)
                wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(
                    s_acc, k_major<BLOCK_M>(q, d), k_major<BLOCK_N>(ring.k[stage], d), d > 0);
            wgmma_commit_group();
        };
        float o_acc[DIM / 8][4] = {};
        // ---- O += P V  [BLOCK_M, HEAD_DIM]
        const auto start_pv = [&](int number) {
            const int stage = number % NUM_STAGES;
            wait_for(ring.v_full[stage], number / NUM_STAGES);
            wgmma_fence(o_acc, p_frag);
#pragma unroll
            for (int j = 0; j < BLOCK_N; j += 16)
                wgmma_m64nNk16<Element, MN_MAJOR>(o_acc, p_frag[j / 16],
                                                  mn_major<BLOCK_N>(ring.v[stage], j), true);
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
                    for (int i = 0; i < 2; ++i) s_acc[n][i] *= scale_log2;
            }
            const int k_start = tile * BLOCK_N;
            if (k_start + BLOCK_N > schedule.visible_keys(segment.first_row + WARP_ROWS * warp)) {
                const int keys = schedule.visible_keys(row) - k_start - 2 * (lane % 4);
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (8 * n + i >= keys) s_acc[n][i] = -INFINITY;
            }
            float x = -INFINITY;
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) x = fmaxf(x, s_acc[n][i]);
            const float row_max_new = fmaxf(row_max, quad_max(x) * tile_scale);
            const float shift = shift_of(row_max_new);
            rescale = ex2_approx_ftz(row_max - shift);
            row_max = row_max_new;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& s = s_acc[n][i];
                    s = ex2_approx_ftz(s * tile_scale - shift);
                    sum += s;
                }
            row_sum = row_sum * rescale + sum;
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

        row_max = -INFINITY;
        row_sum = 0.0f;
        cp_async_wait_group<0>();
        fence_proxy_async();     // by each writer
        bar_sync(barrier, 128);  // Q is there, and nobody reads the one before
        Segment next = segment;
        if (i + 1 < share.count) {
            next = share.at(i + 1);
            load_q(p, schedule, next, (i + 1) % Q_STAGES, ring);
        }
        // ---- for each K/V tile
        if (segment.first < segment.end) {
            start_s(number);
            wgmma_wait_group<0>(s_acc);
            release(ring.k_empty[number % NUM_STAGES]);
            softmax(segment.first);
            convert_p();
            for (int tile = segment.first + 1; tile < segment.end; ++tile, ++number) {
                start_s(number + 1);
                start_pv(number);
                wgmma_wait_group<1>(s_acc);
                release(ring.k_empty[(number + 1) % NUM_STAGES]);
                softmax(tile);  // while O += P V runs
                wgmma_wait_group<0>(o_acc, p_frag);
                release(ring.v_empty[number % NUM_STAGES]);
#pragma unroll
                for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) o_acc[n][i] *= rescale;
                convert_p();
            }
            start_pv(number);
            wgmma_wait_group<0>(o_acc, p_frag);
            release(ring.v_empty[number % NUM_STAGES]);
            ++number;
        }

        // ---- write O and lse, or a part of them
        Part& part = parts[share.index].part[segment.kind];
        row_sum = quad_sum(row_sum);
        const bool is_there = row < schedule.rows;
        if (is_there && segment.is_whole) {
            const RowPlace place = schedule.place(segment, row);
            const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n)
                *reinterpret_cast<uint32_t*>(place.o + 8 * n + 2 * (lane % 4)) =
                    cvt_rn_x2<Element>(o_acc[n][0] * inverse, o_acc[n][1] * inverse);
            if (lane % 4 == 0) *place.lse = (row_max + lg2_approx_ftz(row_sum)) * LN_2;
        } else if (is_there) {
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n)
                *reinterpret_cast<float2*>(&part.o[local][8 * n + 2 * (lane % 4)]) =
                    float2{o_acc[n][0], o_acc[n][1]};
            if (lane % 4 == 0) part.row_max[local] = row_max, part.row_sum[local] = row_sum;
        }
        if (segment.kind == GOES_ON) {
            bar_sync(barrier, 128);  // all warps have written
            if (warp == 0) post_signal(part.ready);
        }
        segment = next;
    }
}

// ---- wait for other shares' parts of the work tile that is to be merged, and leave in shared memory what
// the merge needs to know. By the warp that copied K and V: those that compute would need registers for it.
// GPUs start blocks in the order of their numbers, and no warpgroup waits for a part
__device__ void await_parts(const AttentionParams& p, const Share& share, Merge& merge) {
    Parts* const parts = static_cast<Parts*>(p.workspace[0]);
    const uint32_t lane = threadIdx.x % 32, last = share.index;
    if (lane == 0) merge.first_share = merge.last_share = last;
    if (!share.has_parts_to_merge()) return;
    const uint32_t first = share.schedule.first_share(share.first_work);
    if (lane == 0) merge = {share.at(share.num_cut - 1), first, last};
    for (uint32_t other = first; other < last; other += 32)
        take_signals(other + lane < last ? &parts[other + lane].part[GOES_ON].ready : nullptr);
}

// ---- o = sum of the parts' O, each times 2^(m of the part - m), over l; and lse. By all threads, one of
// which has CHUNKS times four columns of a row, and AT_ONCE parts of each at a time
template <int CHUNKS, int AT_ONCE>
__device__ void merge(const Schedule& schedule, const Merge& of, int rows) {
    constexpr int STRIDE = Merged<CHUNKS>::STRIDE;
    const Parts* parts = static_cast<const Parts*>(schedule.p.workspace[0]);
    const uint32_t num_parts = of.last_share - of.first_share + 1, work = rows * STRIDE;
    // Where CHUNKS is 1, neighboring lanes may have the same columns, and each every so many-th part: as many
    // lanes of a warp as load all parts at once, if there are threads for it.
    uint32_t shift = 0;
    while (CHUNKS == 1 && shift < 5 && (AT_ONCE << shift) < num_parts &&
           (work << shift) * 2 <= NUM_THREADS)
        ++shift;
    const uint32_t lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
    // Warps stay together, as lanes merge what they have found.
#pragma unroll 1
    for (uint32_t n = threadIdx.x; n - n % 32 < lanes * work; n += NUM_THREADS) {
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

// ---- merge all rings' parts
__device__ void merge(const Schedule& schedule, const SharedMemory& smem) {
    for (uint32_t ring = 0; ring < schedule.rings; ++ring) {
        const Merge& of = smem.merges[ring];
        if (of.first_share == of.last_share) continue;
        const int rows = min(TILE_ROWS, schedule.rows - of.segment.first_row);
        // A round of loads is a journey to L2, or to DRAM. With more than two chunks for each thread the
        // second way takes fewer.
        if (rows * MERGE_CHUNKS <= 2 * NUM_THREADS)
            merge<1, 8>(schedule, of, rows);
        else
            merge<4, 4>(schedule, of, rows);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_forward(const __grid_constant__ DivisorsParams p) {
    const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0);
    const bool computes = warp < PRODUCER_WARP;
    const uint32_t ring_index = computes ? warp / 4 : warp - PRODUCER_WARP;
    const bool copies = !computes && ring_index < MAX_RINGS;
    SharedMemory& smem = shared_memory<SharedMemory>();
    Ring& ring = smem.rings[ring_index % MAX_RINGS];
    const bool starts = copies && threadIdx.x % 32 == 0;
    if (starts) {
        prefetch_tensormap(p.k_map);
        prefetch_tensormap(p.v_map);
    }
    const Schedule schedule(p);
    const Share share(schedule, ring_index);
    const Segment first = share.at(0);

    if (starts) {
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(ring.k_full[stage], 1);
            mbarrier_init(ring.v_full[stage], 1);
            mbarrier_init(ring.k_empty[stage], 4);
            mbarrier_init(ring.v_empty[stage], 4);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarriers are initialized

    if (computes)
        compute(p, share, first, ring, 1 + ring_index);
    else if (copies) {
        load_kv(p, share, first, ring);
        if (schedule.cut_works > 0) await_parts(p, share, smem.merges[ring_index]);
    }
    if (schedule.cut_works == 0) return;
    __syncthreads();  // all parts are there, and this block's, too
    merge(schedule, smem);
}
