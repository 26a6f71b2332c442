// main(): the step as a program. `step describe` writes the launch descriptor; `step run` reads one
// request from stdin, executes the kernels and writes to stdout the outputs, the workspaces and,
// where bank conflicts are counted, a line for each place that accesses shared memory. cpu.py is the
// other side. What the step computes only those two know: here, tensors are buffers.
#include <dlfcn.h>

#include <utility>

#include "elements.cuh"
#include "global_races.h"
#include "grid.h"
#include "step.h"
#include "tensor_map.h"
#include "trap.h"

namespace simt {
namespace {

constexpr int MAX_BUFFERS = 16;

// Of a buffer: an input is read from the request, the others go into the answer. What is kept is read,
// too: an output or a workspace of which a launch before may have written a part.
enum Kind : int32_t { INPUT, OUTPUT, WORKSPACE, KEPT };

struct BufferRequest {  // an empty name ends the list
    char name[16];
    int32_t segments;
    int32_t alignment, misalignment;  // address % alignment == misalignment
    int32_t address_at;               // where in the kernels' parameter its address belongs
    int32_t map_at;                   // where the tensor map is that holds its address, or -1
    int32_t kind;                     // enum Kind
};

struct KernelRequest {  // an empty name ends the list
    char name[48];
    int64_t blocks;
    int32_t threads;
    int32_t smem_bytes;
};

// Followed by the kernels' parameter without its addresses, then for each buffer by its segments
// and, of what is read, by their bytes.
struct Request {
    uint64_t seed;
    int32_t workers;  // OS threads
    int32_t time_limit_s;
    int32_t count_banks;  // 0 or 1
    int32_t calls;        // launches of all kernels, each call into poisoned outputs
    BufferRequest buffers[MAX_BUFFERS];
    KernelRequest kernels[3];
};

constexpr int MAX_BLOCKS = INT32_MAX, MAX_THREADS = 1024;  // the limits of every device
constexpr int MAX_CLUSTER = 8;  // blocks; that of every device with clusters

void (*kernel)();
alignas(TensorMap) std::byte kernel_params[4096];  // the most that CUDA lets a kernel take

BankCounter bank_counter;  // of all launches

void read_exactly(void* to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) Report().add("the request ends too early").fail();
}

void write_exactly(FILE* file, const void* from, size_t bytes) {
    if (fwrite(from, 1, bytes, file) != bytes) Report().add("the answer cannot be written").fail();
}

// Whether the step defines it as 1.
bool kernels_start_early() {
    const auto* defined = static_cast<const int32_t*>(dlsym(RTLD_DEFAULT, "kernels_start_early"));
    if (!defined) return false;
    if (*defined != 0 && *defined != 1)
        Report().add("kernels_start_early is %d: make it 0 or 1", *defined).fail();
    return *defined;
}

// Of the kernel: as its signature says, or 1.
int cluster_size_of(const KernelRequest& asked) {
    const auto* dims = SignatureOf<ClusterDims>::find(reinterpret_cast<const void*>(kernel));
    if (!dims) return 1;
    if (dims->x < 1 || dims->x > MAX_CLUSTER || dims->y != 1 || dims->z != 1) {
        Report()
            .add(
                "kernel %s has clusters of %d x %d x %d blocks; its __cluster_dims__ must be 1 to "
                "%d",
                asked.name, dims->x, dims->y, dims->z, MAX_CLUSTER)
            .fail();
    }
    return dims->x;
}

void launch_kernel(const Request& request, int index) {
    const KernelRequest& asked = request.kernels[index];
    kernel = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, asked.name));
    if (!kernel)
        Report().add("the step has no kernel \"%s\"; is it extern \"C\"?", asked.name).fail();
    if (asked.blocks < 1 || asked.blocks > MAX_BLOCKS || asked.threads < 1 ||
        asked.threads > MAX_THREADS) {
        Report()
            .add("kernel %s has %lld blocks of %d threads; at most %d of %d can be launched",
                 asked.name, static_cast<long long>(asked.blocks), asked.threads, MAX_BLOCKS,
                 MAX_THREADS)
            .fail();
    }
    const auto* bounds = SignatureOf<LaunchBounds>::find(reinterpret_cast<const void*>(kernel));
    if (bounds && asked.threads > bounds->max_threads) {
        Report()
            .add("kernel %s is launched with %d threads; its __launch_bounds__ allow %d",
                 asked.name, asked.threads, bounds->max_threads)
            .fail();
    }
    const int cluster_size = cluster_size_of(asked);
    const Launch launch = {
        .kernel_name = asked.name,
        .run_thread = [] { simt_step.call(kernel, kernel_params); },
        .num_blocks =
            static_cast<uint32_t>((asked.blocks + cluster_size - 1) / cluster_size * cluster_size),
        .cluster_size = cluster_size,
        .num_threads = asked.threads,
        .num_workers = request.workers,
        .smem_bytes = static_cast<size_t>(asked.smem_bytes),
        .smem_flush = request.seed % 2 ? Flush::START : Flush::END,
        .seed = mix(request.seed) + index,
        .odd = request.seed % 2 != 0,
        .count_banks = request.count_banks != 0,
        .starts_early = kernels_start_early() && index > 0,
    };
    global_races.begin_launch();
    Grid(launch, bank_counter).run();
    for (const Buffer& buffer : global_buffers) {
        if (const char* where = buffer.damaged_slack()) {
            Report()
                .add("out-of-bounds write in kernel %s: %s of %s; an %s seed %s the line",
                     asked.name, where, buffer.name, request.seed % 2 ? "even" : "odd",
                     buffer.segments.size() > 1 ? "may find" : "finds")
                .fail();
        }
    }
}

static_assert(sizeof(TensorMapFields) <= sizeof(TensorMap));

// Buffers of the request, their addresses in the kernels' parameter, inputs filled and read-only.
void make_buffers(const Request& request) {
    global_buffers.reserve(MAX_BUFFERS);
    for (const BufferRequest& asked : request.buffers) {
        if (!asked.name[0]) break;
        std::vector<Segment> segments(asked.segments);
        read_exactly(segments.data(), segments.size() * sizeof(Segment));
        const Flush flush = request.seed % 2 ? Flush::START : Flush::END;
        Buffer& buffer = global_buffers.emplace_back(asked.name, std::move(segments),
                                                     asked.alignment, asked.misalignment, flush);
        const auto address = reinterpret_cast<uintptr_t>(buffer.data);
        memcpy(kernel_params + asked.address_at, &address, sizeof(address));
        if (asked.map_at >= 0)
            reinterpret_cast<TensorMapFields*>(kernel_params + asked.map_at)->address = address;
        if (asked.kind == INPUT || asked.kind == KEPT)
            for (const Segment& segment : buffer.segments)
                read_exactly(buffer.begin(segment), segment.bytes);
        if (asked.kind == INPUT)
            buffer.make_read_only();
        else
            global_races.watch(buffer);
    }
}

int run_request() {
    // Whatever a kernel prints must not mix with the answer.
    FILE* answer = fdopen(dup(STDOUT_FILENO), "wb");
    dup2(STDERR_FILENO, STDOUT_FILENO);
    setvbuf(stdout, nullptr, _IOLBF, 0);  // a report ends the process and flushes nothing

    Request request;
    read_exactly(&request, sizeof(request));
    if (simt_step.params_bytes > sizeof(kernel_params))
        Report().add("a kernel takes at most %zu bytes", sizeof(kernel_params)).fail();
    read_exactly(kernel_params, simt_step.params_bytes);
    make_buffers(request);

    install_traps(request.time_limit_s);
    for (int call = 0; call < request.calls; ++call) {
        // All others, and the program's variables, stay as the call before has left them.
        for (size_t i = 0; i < global_buffers.size(); ++i)
            if (request.buffers[i].kind == OUTPUT) global_buffers[i].poison();
        for (int i = 0; i < 3 && request.kernels[i].name[0]; ++i) launch_kernel(request, i);
    }
    for (size_t i = 0; i < global_buffers.size(); ++i) {
        const Buffer& buffer = global_buffers[i];
        if (request.buffers[i].kind == INPUT) continue;
        for (const Segment& segment : buffer.segments)
            write_exactly(answer, buffer.begin(segment), segment.bytes);
    }
    for (const BankCounter::Place& place : bank_counter.places()) {
        fprintf(answer, "%s\t%s\t%d\t%lld\t%lld\t%lld\n", place.operation, place.site.file_name(),
                place.site.line, place.accesses, place.ideal, place.wavefronts);
    }
    return fflush(answer);
}

}  // namespace
}  // namespace simt

int main(int argc, char** argv) {
    if (argc == 2 && strcmp(argv[1], "run") == 0) return simt::run_request();
    if (argc == 2 && strcmp(argv[1], "describe") == 0) {
        simt::write_exactly(stdout, simt_step.descriptor, simt_step.descriptor_bytes);
        return 0;
    }
    fprintf(stderr, "usage: %s describe | run\n", argv[0]);
    return 2;
}
