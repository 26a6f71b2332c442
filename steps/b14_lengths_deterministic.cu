// b14 -- lengths, every bit repeats: gradients with lengths and windows, without reductions
// taken: only for lengths and windows that no other step takes; b11 has five products where this has seven
// change: of b13, the mask and the schedule, as b11 has them of b08. Tiles of a sequence's queries have places
//     of their own, and so have tiles of its keys. Blocks of attention_dk_dv are persistent, and take these by
//     ticket
// why: b11 adds to dQ in any order, and keeps too much in shared memory for head_dim above 128. But models
//     that look through windows have heads of 256, too (Gemma), and who looks for a mistake wants the same
//     bits twice. Predicted: above 128 the TFLOP/s of b07 of what is visible, less the parts of tiles at
//     the ends of sequences and windows; up to 128, 0.85 times b11's
// limits: bf16, fp16; head_dim 8-256 by 8; sm_90a
#include "backward_lengths.cuh"
#include "bulk.cuh"
#include "copy.cuh"
#include "dependent_launch.cuh"
#include "mma.cuh"
#include "ragged.cuh"
#include "ticket.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute; one more loads
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER_WARP = 4 * CONSUMERS;  // its first lane starts all loads
// A work is found by a warp that copies: that takes more registers than b13's producers have.
constexpr int DQ_PRODUCER_REGISTERS = 24, DQ_CONSUMER_REGISTERS = 240;
constexpr int DKV_PRODUCER_REGISTERS = 40, DKV_CONSUMER_REGISTERS = 232;
constexpr int GROUP_BARRIER = 1;  // of warpgroup 0; the other's follows. 0 is that of __syncthreads
constexpr int TURN_BARRIER = GROUP_BARRIER + CONSUMERS;  // likewise
// Of the warps of attention_dk_dv that have work: the one before has ended, and the next is known.
constexpr int WORK_BARRIER = TURN_BARRIER + CONSUMERS, WORK_THREADS = 128 * CONSUMERS + 32;
constexpr bool TAKE_TURNS = HEAD_DIM <= 192;  // longer products lose by waiting for them
constexpr int PANEL = 64;                     // columns of a panel: 128 bytes, the swizzle's width
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole products; zeros from HEAD_DIM on
constexpr int BOX_ROWS = 64;                    // that one copy loads

// Tiles that shared memory has room for, four at most, beside what is kept: rows of two tensors, and other
// bytes. Two KB are left for the mbarriers and the works.
constexpr int stages(int kept_rows, int tile_rows, int other_bytes) {
    const int row_bytes = 2 * PANELS * PANEL * sizeof(Element);
    const int n = ((225 << 10) - other_bytes - kept_rows * row_bytes) / (tile_rows * row_bytes);
    return n < 4 ? n : 4;
}

// attention_dq: a block has rows of queries, 64 a warpgroup, and takes the keys tile by tile. Up to head_dim
// 192 Q is in registers beside dQ, S and dP.
constexpr int DQ_QUERIES = 64 * CONSUMERS;
// Never as wide as dQ: ptxas 13.0 may then give dS some of Q's registers.
constexpr int DQ_KEYS = HEAD_DIM <= 64 ? 128 : 64;
constexpr bool Q_IN_REGISTERS = HEAD_DIM <= 192;
constexpr bool DOUT_IN_REGISTERS = HEAD_DIM <= 128;
// Where there is room for one tile of V alone, there are two of K, which dS K reads long after dO V^T has
// read V.
constexpr int V_STAGES = stages(DQ_QUERIES, DQ_KEYS, 0);
constexpr int K_STAGES = V_STAGES > 1 ? V_STAGES : 2;

// attention_dk_dv: a block has keys, and takes the queries tile by tile. Where a warpgroup's dK and dV of 64
// keys do not fit into its registers beside S and dP, both have the same keys: 0 computes S^T, P and dV, and 1
// computes dP^T, dS and dK from the P that 0 passes on.
constexpr bool SPLIT = DIM > 128;
constexpr int DKV_KEYS = SPLIT ? 64 : 64 * CONSUMERS, DKV_QUERIES = DIM <= 64 ? 128 : 64;
// And V. Up to head_dim 128 the gradients need the registers.
constexpr bool K_IN_REGISTERS = SPLIT && HEAD_DIM <= 192;

// A tile as TMA writes it: panels, in each of which 8 rows of 128 bytes are swizzled.
template <int ROWS>
using Tile = Element[PANELS][ROWS][PANEL];

// P^T of a tile: of each 8 columns the four elements of all threads, one thread's after another's. They
// are not rounded: that would make dS as wrong in the same direction wherever P is the same.
using PTile = float[SPLIT ? DKV_QUERIES / 8 : 1][128][4];

// Of a tile's queries: lse in units of log2, and delta.
struct Rows {
    float lse[DKV_QUERIES], delta[DKV_QUERIES];
};

// Tiles of Q, and of dO.
constexpr int DKV_STAGES =
    stages(DKV_KEYS, DKV_QUERIES, (SPLIT ? sizeof(PTile) : 0) + 4 * sizeof(Rows));

// What is the same in all lanes: told so, ptxas keeps it in uniform registers, where TMA needs it. Otherwise it
// would move it there for each box, lane by lane in a loop.
__device__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// The place of a sequence's first tile of ROWS rows, among those of a head's packed rows, or of `rows` in each
// batch. It is larger by at least 1 than that of the sequence before, so there is one also where there are
// no rows.
template <int ROWS>
__device__ int place_of(const int32_t* cu_seqlens, int rows, int i) {
    return int((cu_seqlens ? cu_seqlens[i] : int64_t(i) * rows) / ROWS) + i;
}

// By all lanes of a warp: the sequence that has this place of a tile, or a later one before the next
// sequence's.
template <int ROWS>
__device__ int sequence_of(const int32_t* cu_seqlens, int rows, int sequences, int place) {
    int first = 0, count = sequences;  // it is one of these
    while (count > 1) {
        const int step = (count + 31) / 32, n = threadIdx.x % 32 * step;
        const bool begun = n < count && place_of<ROWS>(cu_seqlens, rows, first + n) <= place;
        const int last = __popc(__ballot_sync(0xffffffff, begun)) - 1;
        first += last * step;
        count = min(step, count - last * step);
    }
    return first;
}

// The places of the tiles of a head's queries.
template <int ROWS>
__device__ int q_places(const BackwardLengthsParams& p) {
    const int64_t rows = int64_t(p.batch) * p.seq_q + int64_t(MOST_TILE_ROWS) * p.sequences;
    return int((rows + ROWS - 1) / ROWS);
}

// The order of the blocks of a kernel, or of its works: all places of a head, then of the next one. With a
// causal mask all heads of a section have a place before its next one: the blocks that run at a time have
// about as much to do, and go on reading in step.
constexpr int SECTION_HEADS = CAUSAL ? 4 : 1;
struct HeadAndPlace {
    int head, place;
};
__device__ HeadAndPlace head_and_place(int n, int heads, int places) {
    const int first_head = n / (places * SECTION_HEADS) * SECTION_HEADS;
    const int section_heads = min(SECTION_HEADS, heads - first_head);
    const int in_section = n - first_head * places;
    return {first_head + in_section % section_heads, in_section / section_heads};
}

// A sequence's rows, from the tensors' first ones on. Of the keys those before k_used are there; the
// others have gradients of 0.
struct Sequence {
    int q_begin, q_end, k_begin, k_used, k_end, batch;
    int own_key;  // the last one that row 0 of q would see with a causal mask, if it were the sequence's
    int place;    // of the first of its tiles of DKV_QUERIES, Rows
    int q_tiles;  // of these; at least 1

    Sequence() = default;
    // By all lanes of a warp.
    __device__ Sequence(const BackwardLengthsParams& p, int i) {
        const bool packed = p.cu_seqlens_q != nullptr;
        batch = packed ? 0 : i;
        q_begin = packed ? uniform(p.cu_seqlens_q[i]) : 0;
        q_end = packed ? uniform(p.cu_seqlens_q[i + 1]) : p.seq_q;
        k_begin = packed ? uniform(p.cu_seqlens_k[i]) : 0;
        k_end = packed ? uniform(p.cu_seqlens_k[i + 1]) : p.seq_k;
        k_used = p.seqused_k ? k_begin + uniform(p.seqused_k[i]) : k_end;
        own_key = k_used - q_end;
        place = uniform(place_of<DKV_QUERIES>(p.cu_seqlens_q, p.seq_q, i));
        q_tiles = max(1, (q_end - q_begin + DKV_QUERIES - 1) / DKV_QUERIES);
    }
};

// The window of a query: with a causal mask it has no key after its own.
__device__ int window_right(const BackwardLengthsParams& p) { return CAUSAL ? 0 : p.window_right; }

// Tiles first ... end - 1.
struct Tiles {
    int first, end;
};

// Of a sequence's keys those that the queries row ... row + DQ_QUERIES - 1 see. As 64 bits no sum overflows.
__device__ Tiles visible_keys(const BackwardLengthsParams& p, const Sequence& sequence, int row) {
    const int last_row = min(row + DQ_QUERIES, sequence.q_end) - 1;
    const int64_t own_key = sequence.own_key;
    const int64_t first = max(int64_t(sequence.k_begin), row + own_key - p.window_left);
    const int64_t last = min(int64_t(sequence.k_used) - 1, last_row + own_key + window_right(p));
    if (last < first) return {0, 0};
    return {int(first - sequence.k_begin) / DQ_KEYS, int(last - sequence.k_begin) / DQ_KEYS + 1};
}

// Of its queries those that see the keys key ... key + DKV_KEYS - 1; at least one tile, which then sees none.
__device__ Tiles seeing_queries(const BackwardLengthsParams& p, const Sequence& sequence, int key) {
    const int64_t first_own = int64_t(sequence.q_begin) + sequence.own_key;
    const int64_t first = int64_t(key) - window_right(p) - first_own;
    const int last_key = min(key + DKV_KEYS, sequence.k_used) - 1;
    const int64_t last = int64_t(last_key) + p.window_left - first_own;
    const int64_t last_tile = sequence.q_tiles - 1;
    Tiles tiles;
    tiles.first = min(max(first, int64_t(0)) / DKV_QUERIES, last_tile);
    tiles.end = min(max(last, int64_t(0)) / DKV_QUERIES, last_tile) + 1;
    if (last < 0 || tiles.end <= tiles.first) tiles.end = tiles.first + 1;
    return tiles;
}

// What a block of attention_dk_dv computes: for keys from k_start on the tiles `tiles` of queries of each head
// of a group.
struct Work {
    bool is_there;
    int kv_head, k_start;
    Sequence sequence;
    Tiles tiles;
};

// Of each tile: full says that it has arrived, empty that every warp that reads it has.
struct alignas(SWIZZLE_128B_TILE) DqMemory {
    Tile<DQ_QUERIES> q;  // and in the end dQ
    Tile<DQ_QUERIES> dout;
    Tile<DQ_KEYS> k[K_STAGES];
    Tile<DQ_KEYS> v[V_STAGES];
    Mbarrier q_full, dout_full, k_full[K_STAGES], v_full[V_STAGES];
    Mbarrier k_empty[K_STAGES], v_empty[V_STAGES];
};

struct alignas(SWIZZLE_128B_TILE) DkDvMemory {
    Tile<DKV_KEYS> k, v;  // and in the end dK and dV
    Tile<DKV_QUERIES> q[DKV_STAGES];
    Tile<DKV_QUERIES> dout[DKV_STAGES];
    PTile p;  // from warpgroup 0 to warpgroup 1, if SPLIT
    Rows rows[DKV_STAGES];
    Mbarrier k_full, v_full, p_full, q_full[DKV_STAGES], dout_full[DKV_STAGES];
    Mbarrier p_empty, q_empty[DKV_STAGES], dout_empty[DKV_STAGES];
    Work work[2];  // the present one, and the next or the one before
};
static_assert(sizeof(DqMemory) <= 227 * 1024 && sizeof(DkDvMemory) <= 227 * 1024);

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
                 .grid = {{PADDED_Q, DKV_QUERIES}, {HEADS, 1}},
                 .threads = ROW_THREADS,
                 .smem_bytes = sizeof(WarpFloats)},
                {.name = "attention_dq",
                 .grid = {{PADDED_Q, DQ_QUERIES}, {HEADS, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(DqMemory)},
                {.name = "attention_dk_dv",
                 .grid = {{SEQ_K, 1}, {KV_HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(DkDvMemory),
                 .blocks_per_sm = 1}},
    .workspace = {{.element_bytes = sizeof(Rows) / DKV_QUERIES,
                   .shape = {{HEADS, 1}, {PADDED_Q, DKV_QUERIES}}},
                  {.element_bytes = sizeof(int), .shape = {{BATCH, 1}}},   // the tickets
                  {.element_bytes = IS_FP16<Element> ? sizeof(float) : 0,  // of a tile: max |dO|
                   .shape = {{HEADS, 1}, {PADDED_Q, 1}}}},
    .q_box = {BOX_ROWS, PANEL, SWIZZLE_128B},
    .k_box = {BOX_ROWS, PANEL, SWIZZLE_128B},
    .v_box = {BOX_ROWS, PANEL, SWIZZLE_128B},
    .dout_box = {BOX_ROWS, PANEL, SWIZZLE_128B},
    .dq_box = {16, PANEL, SWIZZLE_128B},
    .dk_box = {16, PANEL, SWIZZLE_128B},
    .dv_box = {16, PANEL, SWIZZLE_128B},
};
}

alignas(16) __device__ uint16_t zeros[BOX_ROWS][PANEL];

// Starts tile[panel][r][col] = tensor[row + r][PANEL panel + col], zeros from row `end` on. The tensor
// has `rows` rows. Called by one thread.
template <int ROWS>
__device__ void load_tile(Tile<ROWS>& tile, const TensorMap& map, int rows, int row, int end,
                          int head, int batch, Mbarrier& full) {
#pragma unroll
    for (int r = 0; r < ROWS; r += BOX_ROWS) {
        if (row + r < end) {
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
                cp_async_bulk_tensor_5d_load(tile[panel][r], map, PANEL * panel,
                                             rows - end + row + r, head, batch, end, full);
        } else {  // no box may begin behind the end
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
                cp_async_bulk_load(tile[panel][r], zeros, sizeof(zeros), full);
        }
    }
}

// Describes what lies so many elements further on: the lowest bits are the address, in units of 16
// bytes. That is one addition; from the address each takes three instructions, one after the other.
__device__ uint64_t advance(uint64_t descriptor, int elements) {
    return descriptor >> 32 << 32 | uint32_t(descriptor) + elements / VEC;
}

// Describes the columns d ... d + 15 of a tile, its rows from `row` on.
template <int ROWS>
__device__ uint64_t k_major(const Tile<ROWS>& tile, int row, int d) {
    return advance(matrix_descriptor<SWIZZLE_128B>(tile[0][row], 0, SWIZZLE_128B_TILE),
                   d / PANEL * ROWS * PANEL + d % PANEL);
}

// Describes the rows row ... row + 15 of a tile, all its columns.
template <int ROWS>
__device__ uint64_t mn_major(const Tile<ROWS>& tile, int row) {
    return advance(matrix_descriptor<SWIZZLE_128B>(tile[0][0], sizeof(tile[0]), SWIZZLE_128B_TILE),
                   row * PANEL);
}

// Where TMA puts a row's 8 elements from column d on: the 8 chunks of a row are permuted.
template <int ROWS>
__device__ Element* swizzled(Tile<ROWS>& tile, int row, int d) {
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
// of the tile. TMA leaves out what lies past the columns, and from row `end` on, of the tensor's `rows`.
template <int ROWS, int TILES>
__device__ void write(const TensorMap& map, int rows, int first_row, int end, int head, int batch,
                      Tile<ROWS>& tile, int row, float (&acc)[TILES][4], float factor) {
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
        for (int panel = 0; panel < PANELS; ++panel)
            cp_async_bulk_tensor_5d_store(map, PANEL * panel, rows - end + first_row, head, batch,
                                          end, tile[panel][row]);
        cp_async_bulk_commit_group();
    }
}

// frag = tile[row + r], of a warp's 16 rows, as wgmma's operand A
template <int ROWS, int STEPS>
__device__ void load_rows(uint32_t (&frag)[STEPS][4], Tile<ROWS>& tile, int row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < STEPS; ++j)
        ldmatrix_x4(frag[j], swizzled(tile, row + lane % 16, 16 * j + lane / 16 * 8));
}

// Starts acc = A B^T of 64 rows of A and the N rows of B, and as many columns as a_frag has room for. A
// is in these registers or in the tile from `row` on.
template <bool IN_REGISTERS, int STEPS, int A_ROWS, int N>
__device__ void multiply(float (&acc)[N / 8][4], uint32_t (&a_frag)[STEPS][4],
                         const Tile<A_ROWS>& a, int row, const Tile<N>& b) {
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
template <int TILES, int STEPS, int K>
__device__ void add_product(float (&acc)[TILES][4], uint32_t (&x_frag)[STEPS][4],
                            const Tile<K>& b) {
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

// What dS of a sequence and some heads is multiplied by before it is rounded to an operand, a power of two. In
// fp16 dS may be beyond the largest number, or below the smallest, where the gradients are not:
// 1 / factor is 16 to 32 times the largest |dO|.
__device__ float factor_of(const BackwardLengthsParams& p, const Sequence& sequence, int first_head,
                           int heads) {
    if (!IS_FP16<Element>) return 1.0f;
    const float* tiles = static_cast<const float*>(p.workspace[2]);
    float largest = 0.0f;
    for (int n = threadIdx.x % 32; n < heads * sequence.q_tiles; n += 32) {
        const int head = first_head + n / sequence.q_tiles;
        largest = fmaxf(largest, tiles[int64_t(head) * q_places<DKV_QUERIES>(p) + sequence.place +
                                       n % sequence.q_tiles]);
    }
    int exponent;
    frexpf(warp_max(largest), &exponent);
    return ldexpf(1.0f, -exponent - 4);
}

// Of each query: lse in units of log2, +inf where no key is visible and past the sequence's last query, so that
// P = 2^(S - lse) is 0 there; delta = rowsum(dO * O)  [heads, places, DKV_QUERIES]
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    attention_delta(const __grid_constant__ BackwardLengthsParams p) {
    griddepcontrol_launch_dependents();  // attention_dq may begin to load
    const int places = q_places<DKV_QUERIES>(p);
    const int head = blockIdx.x / places, place = blockIdx.x % places;
    if (blockIdx.x == 0 && threadIdx.x == 0) *static_cast<int*>(p.workspace[1]) = 0;
    const Sequence sequence(p,
                            sequence_of<DKV_QUERIES>(p.cu_seqlens_q, p.seq_q, p.sequences, place));
    const int tile = place - sequence.place;
    if (tile >= sequence.q_tiles) return;  // nobody's
    const Element* o = p.o + sequence.batch * p.o_stride.batch + head * p.o_stride.head;
    const Element* dout = p.dout + sequence.batch * p.dout_stride.batch + head * p.dout_stride.head;
    Rows& rows = static_cast<Rows*>(p.workspace[0])[blockIdx.x];

    float largest = 0.0f;
    for (int r = threadIdx.x / LANES; r < DKV_QUERIES; r += ROW_THREADS / LANES) {
        const int row = sequence.q_begin + tile * DKV_QUERIES + r;
        const bool is_query = row < sequence.q_end;  // all lanes take part in the shuffles
        float delta = 0.0f;
        for (int d = threadIdx.x % LANES * VEC; is_query && d < HEAD_DIM; d += LANES * VEC) {
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
            if (is_query) {
                lse = p.lse[(int64_t(sequence.batch) * p.heads + head) * p.seq_q + row];
                lse = lse == -INFINITY ? INFINITY : lse * LOG2_E;
            }
            rows.lse[r] = lse;
            rows.delta[r] = delta;
        }
    }
    if (IS_FP16<Element>) {
        auto& of_warps = shared_memory<WarpFloats>();
        largest = warp_max(largest);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
        __syncthreads();  // every warp's part is there
        for (float of_warp : of_warps) largest = fmaxf(largest, of_warp);
        if (threadIdx.x == 0) static_cast<float*>(p.workspace[2])[blockIdx.x] = largest;
    }
}

// dQ = scale dS K  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_dq(const __grid_constant__ BackwardLengthsParams p) {
    DqMemory& smem = shared_memory<DqMemory>();
    // The last queries first: with a mask they see the most keys.
    const int block = gridDim.x - 1 - blockIdx.x, places = q_places<DQ_QUERIES>(p);
    const auto [head, place] = head_and_place(block, p.heads, places);
    const int kv_head = head / (p.heads / p.kv_heads);
    const int of = sequence_of<DQ_QUERIES>(p.cu_seqlens_q, p.seq_q, p.sequences, place);
    const Sequence sequence(p, of);
    const int first_place = uniform(place_of<DQ_QUERIES>(p.cu_seqlens_q, p.seq_q, of));
    const int q_start = sequence.q_begin + DQ_QUERIES * (place - first_place);
    if (q_start >= sequence.q_end) {  // nobody's
        griddepcontrol_wait();  // attention_dk_dv may go on only when attention_delta has ended
        return;
    }
    const int batch = sequence.batch;
    const int warp = uniform(threadIdx.x / 32);
    const int lane = threadIdx.x % 32;
    const Tiles tiles = visible_keys(p, sequence, q_start);
    const int num_tiles = tiles.end - tiles.first;
    const int first_key = sequence.k_begin + tiles.first * DQ_KEYS;

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

    griddepcontrol_launch_dependents();  // attention_dk_dv may begin

    if (warp >= PRODUCER_WARP) {
        setmaxnreg_dec<DQ_PRODUCER_REGISTERS>();
        if (warp > PRODUCER_WARP || lane > 0) return;
        // ---- load Q and dO, and the tiles
        mbarrier_arrive_expect_tx(smem.q_full, sizeof(smem.q));
        load_tile(smem.q, p.q_map, p.seq_q, q_start, sequence.q_end, head, batch, smem.q_full);
        for (int i = 0; i < num_tiles; ++i) {
            const int k_stage = i % K_STAGES, v_stage = i % V_STAGES;
            const int key = first_key + i * DQ_KEYS;
            Mbarrier &k_full = smem.k_full[k_stage], &v_full = smem.v_full[v_stage];
            wait_for(smem.k_empty[k_stage], i / K_STAGES - 1);
            mbarrier_arrive_expect_tx(k_full, sizeof(smem.k[0]));
            load_tile(smem.k[k_stage], p.k_map, p.seq_k, key, sequence.k_used, kv_head, batch,
                      k_full);
            if (i == 0) {  // after the tile that S needs first
                mbarrier_arrive_expect_tx(smem.dout_full, sizeof(smem.dout));
                load_tile(smem.dout, p.dout_map, p.seq_q, q_start, sequence.q_end, head, batch,
                          smem.dout_full);
            }
            wait_for(smem.v_empty[v_stage], i / V_STAGES - 1);
            mbarrier_arrive_expect_tx(v_full, sizeof(smem.v[0]));
            load_tile(smem.v[v_stage], p.v_map, p.seq_k, key, sequence.k_used, kv_head, batch,
                      v_full);
        }
        return;
    }

    setmaxnreg_inc<DQ_CONSUMER_REGISTERS>();
    griddepcontrol_wait();  // what attention_delta has written is there
    const int warpgroup = warp / 4;
    const int group_row = 64 * warpgroup;  // the warpgroup's first query in the block
    const int warp_row = 16 * warp;        // and the warp's
    const int warp_own_key = sequence.own_key + q_start + warp_row;  // of its first query
    const float scale_log2 = p.softmax_scale * LOG2_E;
    const int left = p.window_left, right = window_right(p);
    const float factor = factor_of(p, sequence, head, 1);
    // Where the last block has no queries for warpgroup 1, it computes what nobody writes.
    const int q_tile =
        min((q_start - sequence.q_begin + group_row) / DKV_QUERIES, sequence.q_tiles - 1);
    const Rows& rows = static_cast<const Rows*>(
        p.workspace[0])[int64_t(head) * q_places<DKV_QUERIES>(p) + sequence.place + q_tile];
    float lse[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        lse[r] = rows.lse[warp_row % DKV_QUERIES + 8 * r + lane / 4];
        delta[r] = rows.delta[warp_row % DKV_QUERIES + 8 * r + lane / 4];
    }

    // A lane's s_acc[n][2 r + i], with r and i 0 or 1, is the element of S in row 8 r + lane / 4 of
    // its warp's 16 and column 8 n + 2 (lane % 4) + i; so are the others.
    float dq_acc[DIM / 8][4] = {};
    uint32_t q_frag[DIM / 16][4], dout_frag[DIM / 16][4];  // [16, 16] each
    uint32_t ds_frag[DQ_KEYS / 16][4] = {};  // in use until the next tile's first wait
    wait_for(smem.q_full, 0);
    if (Q_IN_REGISTERS) load_rows(q_frag, smem.q, warp_row);

    if (warpgroup == 1) pass_turn(warpgroup);
    wait_for_turn(warpgroup);

    // ---- for each K/V tile
    for (int i = 0; i < num_tiles; ++i) {
        const int k_stage = i % K_STAGES, v_stage = i % V_STAGES;
        const int k_start = first_key + i * DQ_KEYS;

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
        const int keys = sequence.k_used - k_start;
        const int distance = k_start - warp_own_key;  // of the first key from the first query's own
        if (keys < DQ_KEYS || distance + DQ_KEYS - 1 > right || distance - 15 < -left) {
#pragma unroll
            for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = 8 * n + 2 * (lane % 4) + i % 2;
                    const int from_own = distance + key - (8 * (i / 2) + lane / 4);
                    if (key >= keys || from_own > right || from_own < -left) s_acc[n][i] = 0.0f;
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
    write(p.dq_map, p.seq_q, q_start + warp_row, sequence.q_end, head, batch, smem.q, warp_row,
          dq_acc, p.softmax_scale / factor);
    if (lane == 0) cp_async_bulk_wait_group_read<0>();
}

// By all lanes of a warp: the work n, or the next that is there; its keys are those of a place, of all heads of
// keys. Then n is the number of the one after it.
__device__ Work take_work(const BackwardLengthsParams& p, int& n) {
    const int places = int(int64_t(p.batch) * p.seq_k / DKV_KEYS) + p.sequences;
    while (n < places * p.kv_heads) {
        const auto [kv_head, place] = head_and_place(n, p.kv_heads, places);
        const int ticket =
            threadIdx.x % 32 == 0 ? take_ticket(static_cast<int*>(p.workspace[1])) : 0;
        n = gridDim.x + uniform(ticket);
        const int of = sequence_of<DKV_KEYS>(p.cu_seqlens_k, p.seq_k, p.sequences, place);
        const Sequence sequence(p, of);
        const int first_place = uniform(place_of<DKV_KEYS>(p.cu_seqlens_k, p.seq_k, of));
        const int k_start = sequence.k_begin + DKV_KEYS * (place - first_place);
        if (k_start < sequence.k_end)  // or it is nobody's
            return {true, kv_head, k_start, sequence, seeing_queries(p, sequence, k_start)};
    }
    return {.is_there = false};
}

// dK = scale dS^T Q and dV = P^T dO  [batch, kv_heads, seq_k, HEAD_DIM], summed over the query heads of a
// group
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_dk_dv(const __grid_constant__ BackwardLengthsParams p) {
    DkDvMemory& smem = shared_memory<DkDvMemory>();
    const int warp = uniform(threadIdx.x / 32);
    const int lane = threadIdx.x % 32;
    const int group = p.heads / p.kv_heads;

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
    __syncthreads();        // the mbarriers are initialized
    griddepcontrol_wait();  // what attention_delta has written is there

    if (warp >= PRODUCER_WARP) {
        setmaxnreg_dec<DKV_PRODUCER_REGISTERS>();
        if (warp > PRODUCER_WARP) return;
        const Rows* all_rows = static_cast<const Rows*>(p.workspace[0]);
        const int places = q_places<DKV_QUERIES>(p);
        // ---- for each work: find it, and load K and V, and the tiles
        int i = 0;  // of the tile, among those of all works
        for (int round = 0, n = blockIdx.x;; ++round) {
            const Work work = take_work(p, n);
            if (lane == 0) smem.work[round % 2] = work;
            __syncwarp();  // lane 0 has written it
            bar_sync(WORK_BARRIER, WORK_THREADS);
            if (!work.is_there) return;
            const Sequence& sequence = work.sequence;
            if (lane == 0) {
                mbarrier_arrive_expect_tx(smem.k_full, sizeof(smem.k));
                load_tile(smem.k, p.k_map, p.seq_k, work.k_start, sequence.k_used, work.kv_head,
                          sequence.batch, smem.k_full);
                mbarrier_arrive_expect_tx(smem.v_full, sizeof(smem.v));
                load_tile(smem.v, p.v_map, p.seq_k, work.k_start, sequence.k_used, work.kv_head,
                          sequence.batch, smem.v_full);
            }
            // The last tile first, of all heads, then the one before: with a mask, too, the blocks of a
            // key head read the same tiles at the same time, from the L2 cache.
            for (int tile = work.tiles.end - 1; tile >= work.tiles.first; --tile)
                for (int head = group * work.kv_head; head < group * (work.kv_head + 1);
                     ++head, ++i) {
                    const int stage = i % DKV_STAGES;
                    const int q_start = sequence.q_begin + tile * DKV_QUERIES;
                    const Rows* rows = all_rows + int64_t(head) * places + sequence.place + tile;
                    Mbarrier &q_full = smem.q_full[stage], &dout_full = smem.dout_full[stage];
                    wait_for(smem.q_empty[stage], i / DKV_STAGES - 1);
                    __syncwarp();  // a lane still waiting would miss the phases that the copies allow
                    if (lane == 0) {
                        mbarrier_arrive_expect_tx(q_full, sizeof(smem.q[0]) + sizeof(Rows));
                        load_tile(smem.q[stage], p.q_map, p.seq_q, q_start, sequence.q_end, head,
                                  sequence.batch, q_full);
                        cp_async_bulk_load(&smem.rows[stage], rows, sizeof(Rows), q_full);
                    }
                    wait_for(smem.dout_empty[stage], i / DKV_STAGES - 1);
                    __syncwarp();
                    if (lane == 0) {
                        mbarrier_arrive_expect_tx(dout_full, sizeof(smem.dout[0]));
                        load_tile(smem.dout[stage], p.dout_map, p.seq_q, q_start, sequence.q_end,
                                  head, sequence.batch, dout_full);
                    }
                }
        }
    }

    setmaxnreg_inc<DKV_CONSUMER_REGISTERS>();
    const int warpgroup = warp / 4;
    const int group_row = SPLIT ? 0 : 64 * warpgroup;  // the warpgroup's first key in the block
    const int warp_row = group_row + warp % 4 * 16;    // and the warp's
    const float scale_log2 = p.softmax_scale * LOG2_E;
    // A lane's s_acc[n][2 r + i], with r and i 0 or 1, is the element of S^T in row 8 r + lane / 4 of
    // its warp's 16 and column 8 n + 2 (lane % 4) + i; so are the others.
    using Scores = float[DKV_QUERIES / 8][4];
    const int left = p.window_left, right = window_right(p);
    // ---- P = 2^(S - lse), of the warp's keys that are there, the first one so far from the own key of the
    // tile's first query
    const auto compute_p = [&](Scores& s_acc, int stage, int keys, int distance) {
#pragma unroll
        for (int n = 0; n < DKV_QUERIES / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int col = 8 * n + 2 * (lane % 4) + i % 2;
                float& s = s_acc[n][i];
                s = ex2_approx_ftz(s * scale_log2 - smem.rows[stage].lse[col]);
            }
        if (keys < 16 || distance + 15 > right || distance - (DKV_QUERIES - 1) < -left) {
#pragma unroll
            for (int n = 0; n < DKV_QUERIES / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = 8 * (i / 2) + lane / 4;
                    const int from_own = distance + key - (8 * n + 2 * (lane % 4) + i % 2);
                    if (key >= keys || from_own > right || from_own < -left) s_acc[n][i] = 0.0f;
                }
        }
    };
    // ---- dS = P * (dP - delta)
    const auto compute_ds = [&](Scores& dp_acc, const Scores& p_acc, int stage, float factor) {
#pragma unroll
        for (int n = 0; n < DKV_QUERIES / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float delta = smem.rows[stage].delta[8 * n + 2 * (lane % 4) + i % 2];
                dp_acc[n][i] = p_acc[n][i] * (dp_acc[n][i] - delta) * factor;
            }
    };
    if (!SPLIT) {
        for (int round = 0, i = 0;; ++round) {
            bar_sync(WORK_BARRIER, WORK_THREADS);
            const Work& work = smem.work[round % 2];
            if (!work.is_there) break;
            const int first_row = work.k_start + warp_row, keys = work.sequence.k_used - first_row;
            // Of the warp's first key from the own key of the sequence's first query.
            const int own_distance = first_row - work.sequence.own_key - work.sequence.q_begin;
            const int begin = i, end = i + group * (work.tiles.end - work.tiles.first);
            const float factor = factor_of(p, work.sequence, group * work.kv_head, group);
            uint32_t no_frag[DIM / 16][4];
            // In use until the next tile's first wait.
            uint32_t p_frag[DKV_QUERIES / 16][4] = {}, ds_frag[DKV_QUERIES / 16][4] = {};
            float dk_acc[DIM / 8][4] = {}, dv_acc[DIM / 8][4] = {};
            wait_for(smem.k_full, round);
            wait_for(smem.v_full, round);

            if (warpgroup == 1) pass_turn(warpgroup);
            wait_for_turn(warpgroup);

            // ---- for each Q/dO tile, of each head of the group
            for (int head = 0, tile = work.tiles.end - 1; i < end; ++i) {
                const int stage = i % DKV_STAGES;

                // ---- S^T = K Q^T, dP^T = V dO^T  [DKV_KEYS, DKV_QUERIES], 64 rows in each warpgroup
                Scores s_acc, dp_acc;
                wait_for(smem.q_full[stage], i / DKV_STAGES);
                multiply<false>(s_acc, no_frag, smem.k, group_row, smem.q[stage]);
                wgmma_wait_group<1>(dv_acc, dk_acc, p_frag, ds_frag);  // of the tile before
                if (i > begin) {
                    release(smem.q_empty[(i - 1) % DKV_STAGES]);
                    release(smem.dout_empty[(i - 1) % DKV_STAGES]);
                }
                wait_for(smem.dout_full[stage], i / DKV_STAGES);
                multiply<false>(dp_acc, no_frag, smem.v, group_row, smem.dout[stage]);
                pass_turn(warpgroup);

                // ---- dV += P^T dO, dK += dS^T Q  [DKV_KEYS, HEAD_DIM], of it 64 rows in each warpgroup
                wgmma_wait_group<1>(s_acc);
                compute_p(s_acc, stage, keys, own_distance - tile * DKV_QUERIES);
                convert(p_frag, s_acc);
                wgmma_wait_group<0>(dp_acc);
                compute_ds(dp_acc, s_acc, stage, factor);
                convert(ds_frag, dp_acc);
                wait_for_turn(warpgroup);
                add_product(dv_acc, p_frag, smem.dout[stage]);
                add_product(dk_acc, ds_frag, smem.q[stage]);
                if (++head == group) head = 0, --tile;
            }
            if (warpgroup == 0) pass_turn(warpgroup);
            wgmma_wait_group<0>(dv_acc, dk_acc, p_frag, ds_frag);
            release(smem.q_empty[(i - 1) % DKV_STAGES]);
            release(smem.dout_empty[(i - 1) % DKV_STAGES]);

            // ---- write dK and dV, in the places of K and V
            // When all of the warpgroup's products have read them.
            bar_sync(GROUP_BARRIER + warpgroup, 128);
            write(p.dk_map, p.seq_k, first_row, work.sequence.k_end, work.kv_head,
                  work.sequence.batch, smem.k, warp_row, dk_acc, p.softmax_scale / factor);
            write(p.dv_map, p.seq_k, first_row, work.sequence.k_end, work.kv_head,
                  work.sequence.batch, smem.v, warp_row, dv_acc, 1.0f);
            if (lane == 0) cp_async_bulk_wait_group_read<0>();
            __syncwarp();  // dK and dV have left, before the next K and V may come
        }
    } else if (warp < 4) {
        for (int round = 0, i = 0;; ++round) {
            bar_sync(WORK_BARRIER, WORK_THREADS);
            const Work& work = smem.work[round % 2];
            if (!work.is_there) break;
            const int first_row = work.k_start + warp_row, keys = work.sequence.k_used - first_row;
            // Of the warp's first key from the own key of the sequence's first query.
            const int own_distance = first_row - work.sequence.own_key - work.sequence.q_begin;
            const int begin = i, end = i + group * (work.tiles.end - work.tiles.first);
            uint32_t k_frag[DIM / 16][4];               // [16, 16] each, of the warp's keys
            uint32_t p_frag[DKV_QUERIES / 16][4] = {};  // in use until the next tile's first wait
            float dv_acc[DIM / 8][4] = {};
            wait_for(smem.k_full, round);
            if (K_IN_REGISTERS) load_rows(k_frag, smem.k, warp_row);

            // ---- for each Q/dO tile, of each head of the group
            for (int head = 0, tile = work.tiles.end - 1; i < end; ++i) {
                const int stage = i % DKV_STAGES;

                // ---- S^T = K Q^T  [DKV_KEYS, DKV_QUERIES]
                Scores s_acc;
                wait_for(smem.q_full[stage], i / DKV_STAGES);
                multiply<K_IN_REGISTERS>(s_acc, k_frag, smem.k, 0, smem.q[stage]);
                wgmma_wait_group<1>(dv_acc, p_frag);  // of the tile before
                if (i > begin) release(smem.dout_empty[(i - 1) % DKV_STAGES]);
                wgmma_wait_group<0>(s_acc);

                compute_p(s_acc, stage, keys, own_distance - tile * DKV_QUERIES);
                convert(p_frag, s_acc);
                wait_for(smem.p_empty, i - 1);
#pragma unroll
                for (int n = 0; n < DKV_QUERIES / 8; ++n) {
                    const float* x = s_acc[n];
                    store_float4(smem.p[n][threadIdx.x % 128], make_float4(x[0], x[1], x[2], x[3]));
                }
                release(smem.q_empty[stage]);
                release(smem.p_full);

                // ---- dV += P^T dO  [DKV_KEYS, HEAD_DIM]
                wait_for(smem.dout_full[stage], i / DKV_STAGES);
                add_product(dv_acc, p_frag, smem.dout[stage]);
                if (++head == group) head = 0, --tile;
            }
            wgmma_wait_group<0>(dv_acc, p_frag);
            release(smem.dout_empty[(i - 1) % DKV_STAGES]);

            // ---- write dV, in the place of V
            bar_sync(GROUP_BARRIER, 128 * CONSUMERS);  // all products of warpgroup 1 have read V
            write(p.dv_map, p.seq_k, first_row, work.sequence.k_end, work.kv_head,
                  work.sequence.batch, smem.v, warp_row, dv_acc, 1.0f);
            if (lane == 0) cp_async_bulk_wait_group_read<0>();
            __syncwarp();  // dV has left, before the next V may come
        }
    } else {
        for (int round = 0, i = 0;; ++round) {
            bar_sync(WORK_BARRIER, WORK_THREADS);
            const Work& work = smem.work[round % 2];
            if (!work.is_there) break;
            const int begin = i, end = i + group * (work.tiles.end - work.tiles.first);
            const float factor = factor_of(p, work.sequence, group * work.kv_head, group);
            uint32_t v_frag[DIM / 16][4], ds_frag[DKV_QUERIES / 16][4] = {};  // as above
            float dk_acc[DIM / 8][4] = {};
            wait_for(smem.v_full, round);
            if (K_IN_REGISTERS) load_rows(v_frag, smem.v, warp_row);

            // ---- for each Q/dO tile, of each head of the group
            for (; i < end; ++i) {
                const int stage = i % DKV_STAGES;

                // ---- dP^T = V dO^T  [DKV_KEYS, DKV_QUERIES]
                Scores p_acc, dp_acc;
                wait_for(smem.dout_full[stage], i / DKV_STAGES);
                multiply<K_IN_REGISTERS>(dp_acc, v_frag, smem.v, 0, smem.dout[stage]);
                wgmma_wait_group<1>(dk_acc, ds_frag);  // of the tile before
                if (i > begin) release(smem.q_empty[(i - 1) % DKV_STAGES]);
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
                compute_ds(dp_acc, p_acc, stage, factor);
                convert(ds_frag, dp_acc);

                // ---- dK += dS^T Q  [DKV_KEYS, HEAD_DIM]
                add_product(dk_acc, ds_frag, smem.q[stage]);
            }
            wgmma_wait_group<0>(dk_acc, ds_frag);
            release(smem.q_empty[(i - 1) % DKV_STAGES]);

            // ---- write dK, in the place of K
            bar_sync(GROUP_BARRIER, 128 * CONSUMERS);  // all products of warpgroup 0 have read K
            write(p.dk_map, p.seq_k, work.k_start + warp_row, work.sequence.k_end, work.kv_head,
                  work.sequence.batch, smem.k, warp_row, dk_acc, p.softmax_scale / factor);
            if (lane == 0) cp_async_bulk_wait_group_read<0>();
            __syncwarp();  // dK has left
        }
    }
}
