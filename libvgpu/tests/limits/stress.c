// A process of the stress test: allocates and frees in every way, at random, until a stop command or a kill signal.
// Each line on standard input is a command, answered with one line:
//
//   go <operations>   runs the operations, answers `done <granted> <denied> <wrong> <operations>`
//   drain             frees everything, answers `done …` likewise
//   free              lets the library reclaim the memory of dead processes, answers `free`
//
// A result other than success and CUDA_ERROR_OUT_OF_MEMORY is wrong, and reported on standard error.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

typedef int Result;
typedef unsigned long long Pointer;

#define MIB (1ull << 20)
#define GRANULE (2 * MIB)

static void *cuda;
static Pointer most, limit;
static _Atomic Pointer granted, denied, wrong, operations_done;
static void *primary;

// The enabled operations: all, only those on pools, or all others.
static enum { ALL, POOLS, OTHERS } kinds;

// Each call is looked up with `dlsym`, which is part of the test.
#define CALL(name, types, ...)                                                     \
    ({                                                                             \
        Result (*call) types = (Result(*) types)dlsym(cuda, #name);                \
        call ? call(__VA_ARGS__) : -1;                                             \
    })

enum Kind { NOTHING, PLAIN, STREAM_ORDERED, ARRAY, MIPMAPPED, POOL, MAPPED };

struct Object {
    enum Kind kind;
    Pointer handle, parts[4];
    Pointer bytes;
};

// Objects of each thread. A single thread has as many as several threads together.
#define THREADS 2
#define OBJECTS 96

static struct Worker {
    pthread_t thread;
    uint64_t state;
    Pointer operations;
    struct Object objects[OBJECTS];
} workers[THREADS];
static int threads = 1;
static __thread struct Worker *worker;

static uint64_t below(uint64_t bound) {
    worker->state = worker->state * 6364136223846793005ull + 1442695040888963407ull;
    return (worker->state >> 33) % bound;
}

// Half of all requests are small, a few exceed any limit.
static Pointer some_bytes(void) {
    switch (below(16)) {
    case 0: return 1 + below(4096);
    case 1 ... 7: return 1 + below(MIB);
    case 8: return most * 64;
    default: return 1 + below(most);
    }
}

static Result note(const char *what, Result result) {
    if (result == 0) granted++;
    else if (result == 2) denied++;
    else {
        wrong++;
        fprintf(stderr, "%s returned %d\n", what, result);
    }
    return result;
}

static void must(const char *what, Result result) {
    if (result) {
        wrong++;
        fprintf(stderr, "%s returned %d\n", what, result);
    }
}

struct ArrayDescriptor { size_t width, height, depth; unsigned format, channels, flags; };
struct Properties { int type, handles, location_type, location; void *win32; unsigned char flags[8]; };

static int has(const char *name) { return dlsym(cuda, name) != NULL; }

static void make_plain(struct Object *object) {
    Pointer bytes = some_bytes();
    Result result;
    switch (below(4)) {
    case 0: {
        size_t pitch;
        result = note("cuMemAllocPitch", CALL(cuMemAllocPitch_v2, (Pointer *, size_t *, size_t, size_t, unsigned), &object->handle, &pitch, 1 + bytes % 100000, 1 + bytes / 100000, 4));
        break;
    }
    case 1: result = note("cuMemAllocManaged", CALL(cuMemAllocManaged, (Pointer *, size_t, unsigned), &object->handle, bytes, 1)); break;
    default: result = note("cuMemAlloc", CALL(cuMemAlloc_v2, (Pointer *, size_t), &object->handle, bytes));
    }
    if (!result) object->kind = PLAIN;
}

static void make_array(struct Object *object) {
    struct ArrayDescriptor descriptor = {1 + below(2048), 1 + below(2048), below(4), 0x20, 1, 0};
    if (has("cuArray3DCreate_v2") && below(2)) {
        if (!note("cuArray3DCreate", CALL(cuArray3DCreate_v2, (Pointer *, struct ArrayDescriptor *), &object->handle, &descriptor))) object->kind = ARRAY;
    } else if (has("cuMipmappedArrayCreate")) {
        descriptor.depth = 0;
        if (!note("cuMipmappedArrayCreate", CALL(cuMipmappedArrayCreate, (Pointer *, struct ArrayDescriptor *, unsigned), &object->handle, &descriptor, 1 + below(8)))) object->kind = MIPMAPPED;
    }
}

// A new pool with a few allocations.
static void make_pool(struct Object *object) {
    char properties[88] = {0};
    struct Properties device = {1, 0, 1, 0, NULL, {0}};
    memcpy(properties, &device, 16);
    if (note("cuMemPoolCreate", CALL(cuMemPoolCreate, (Pointer *, void *), &object->handle, properties))) return;
    object->kind = POOL;
    for (int i = 0; i < 4; i++) {
        object->parts[i] = 0;
        if (note("cuMemAllocFromPoolAsync", CALL(cuMemAllocFromPoolAsync, (Pointer *, size_t, Pointer, void *), &object->parts[i], some_bytes() / 2 + 1, object->handle, NULL))) object->parts[i] = 0;
    }
}

// Physical memory with up to two mappings. Often the handle is released before the mappings, sometimes it was exported.
static void make_mapped(struct Object *object) {
    struct Properties properties = {1, 1, 1, 0, NULL, {0}};
    // Exported memory stays charged until the process ends, so it is rare and small.
    int is_exported = below(64) == 0;
    object->bytes = is_exported ? GRANULE : (1 + below(most / GRANULE)) * GRANULE;
    if (note("cuMemCreate", CALL(cuMemCreate, (Pointer *, size_t, struct Properties *, uint64_t), &object->handle, object->bytes, &properties, 0))) return;
    object->kind = MAPPED;
    memset(object->parts, 0, sizeof object->parts);
    for (uint64_t i = 0, count = below(3); i < count; i++) {
        Pointer *at = &object->parts[i];
        must("cuMemAddressReserve", CALL(cuMemAddressReserve, (Pointer *, size_t, size_t, Pointer, uint64_t), at, object->bytes, 0, 0, 0));
        must("cuMemMap", CALL(cuMemMap, (Pointer, size_t, size_t, Pointer, uint64_t), *at, object->bytes, 0, object->handle, 0));
    }
    if (is_exported) {
        int exported = -1;
        must("cuMemExportToShareableHandle", CALL(cuMemExportToShareableHandle, (void *, Pointer, int, uint64_t), &exported, object->handle, 1, 0));
        if (exported >= 0) close(exported);
    }
    if (object->parts[0] && below(2)) {
        must("cuMemRelease", CALL(cuMemRelease, (Pointer), object->handle));
        object->handle = 0;
    }
}

// A graph that allocates while it runs. The device caches the memory for other graphs.
static void run_graph(void) {
    void *graph = NULL, *exec = NULL, *node = NULL, *before = NULL;
    must("cuGraphCreate", CALL(cuGraphCreate, (void **, unsigned), &graph, 0));
    for (uint64_t i = 0, count = 1 + below(3); i < count; i++) {
        struct { struct Properties properties; char rest[56]; void *access; size_t count, bytes; Pointer pointer; } allocation;
        memset(&allocation, 0, sizeof allocation);
        allocation.properties = (struct Properties){1, 0, 1, 0, NULL, {0}};
        allocation.bytes = some_bytes();
        must("cuGraphAddMemAllocNode", CALL(cuGraphAddMemAllocNode, (void **, void *, void **, size_t, void *), &node, graph, before ? &before : NULL, before ? 1 : 0, &allocation));
        before = node;
        must("cuGraphAddMemFreeNode", CALL(cuGraphAddMemFreeNode, (void **, void *, void **, size_t, Pointer), &node, graph, &before, 1, allocation.pointer));
        before = node;
    }
    must("cuGraphInstantiate", CALL(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long), &exec, graph, 0));
    for (uint64_t i = 0, count = 1 + below(2); i < count; i++) {
        note("cuGraphLaunch", CALL(cuGraphLaunch, (void *, void *), exec, NULL));
        must("cuCtxSynchronize", CALL(cuCtxSynchronize, (void)));
    }
    must("cuGraphExecDestroy", CALL(cuGraphExecDestroy, (void *), exec));
    must("cuGraphDestroy", CALL(cuGraphDestroy, (void *), graph));
}

// A context that is destroyed with allocations in it.
static void use_context(void) {
    void *context = NULL;
    if (note("cuCtxCreate", CALL(cuCtxCreate_v2, (void **, unsigned, int), &context, 0, 0))) return;
    for (int i = 0; i < 4; i++) {
        Pointer pointer;
        note("cuMemAlloc", CALL(cuMemAlloc_v2, (Pointer *, size_t), &pointer, some_bytes()));
    }
    must("cuCtxDestroy", CALL(cuCtxDestroy_v2, (void *), context));
    must("cuCtxSetCurrent", CALL(cuCtxSetCurrent, (void *), primary));
}

// A child that inherits the device files and idles for a while.
static void fork_idle_child(void) {
    pid_t child = fork();
    if (child) return;
    prctl(PR_SET_PDEATHSIG, 0);
    usleep(1000 * (useconds_t)below(20));
    _exit(0);
}

static void query_memory(void) {
    size_t available = 0, total = 0;
    must("cuMemGetInfo", CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total));
    if (total != limit || available > total) {
        wrong++;
        fprintf(stderr, "cuMemGetInfo reports %zu of %zu\n", available, total);
    }
}

static void unmake(struct Object *object) {
    switch (object->kind) {
    case NOTHING: break;
    case PLAIN: must("cuMemFree", CALL(cuMemFree_v2, (Pointer), object->handle)); break;
    case STREAM_ORDERED: must("cuMemFreeAsync", CALL(cuMemFreeAsync, (Pointer, void *), object->handle, NULL)); break;
    case ARRAY: must("cuArrayDestroy", CALL(cuArrayDestroy, (Pointer), object->handle)); break;
    case MIPMAPPED: must("cuMipmappedArrayDestroy", CALL(cuMipmappedArrayDestroy, (Pointer), object->handle)); break;
    case POOL:
        for (int i = 0; i < 4; i++)
            if (object->parts[i]) must("cuMemFreeAsync", CALL(cuMemFreeAsync, (Pointer, void *), object->parts[i], NULL));
        must("cuMemPoolDestroy", CALL(cuMemPoolDestroy, (Pointer), object->handle));
        break;
    case MAPPED:
        for (int i = 0; i < 4; i++) {
            if (!object->parts[i]) continue;
            must("cuMemUnmap", CALL(cuMemUnmap, (Pointer, size_t), object->parts[i], object->bytes));
            must("cuMemAddressFree", CALL(cuMemAddressFree, (Pointer, size_t), object->parts[i], object->bytes));
        }
        if (object->handle) must("cuMemRelease", CALL(cuMemRelease, (Pointer), object->handle));
        break;
    }
    object->kind = NOTHING;
}

static void operate(void) {
    struct Object *object = &worker->objects[below(OBJECTS / threads)];
    if (object->kind != NOTHING) return unmake(object);
    uint64_t number = below(64);
    int has_pools = number >= 6 && number < 10, is_ordered = number >= 26 && number < 36;
    // Every kind includes contexts, children, synchronization and queries.
    if (kinds == POOLS && number >= 6 && !has_pools && !is_ordered) number = 26;
    if (kinds == OTHERS && (has_pools || is_ordered)) number = 63;
    switch (number) {
    case 0: use_context(); break;
    case 1: fork_idle_child(); break;
    case 2: case 3: must("cuCtxSynchronize", CALL(cuCtxSynchronize, (void))); break;
    case 4: case 5: query_memory(); break;
    case 56 ... 57: if (has("cuGraphAddMemAllocNode")) run_graph(); break;
    case 6 ... 9: if (has("cuMemPoolCreate")) make_pool(object); break;
    case 10 ... 19: if (has("cuMemCreate")) make_mapped(object); break;
    case 20 ... 25: make_array(object); break;
    case 26 ... 35:
        if (!note("cuMemAllocAsync", CALL(cuMemAllocAsync, (Pointer *, size_t, void *), &object->handle, some_bytes(), NULL))) object->kind = STREAM_ORDERED;
        break;
    default: make_plain(object);
    }
}

static void *work(void *argument) {
    worker = argument;
    must("cuCtxSetCurrent", CALL(cuCtxSetCurrent, (void *), primary));
    for (; worker->operations; worker->operations--, operations_done++) operate();
    return NULL;
}

int main(int count, char **arguments) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGCHLD, SIG_IGN);
    if (count != 5) return 2;
    most = strtoull(arguments[2], NULL, 10);
    limit = strtoull(arguments[3], NULL, 10);
    kinds = !strcmp(arguments[4], "pools") ? POOLS : !strcmp(arguments[4], "others") ? OTHERS : ALL;
    // Several threads compete in pools.
    if (kinds == POOLS) threads = THREADS;
    for (int i = 0; i < threads; i++) workers[i].state = strtoull(arguments[1], NULL, 10) + (uint64_t)i * 7919;
    worker = workers;
    setvbuf(stdout, NULL, _IOLBF, 0);
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) return fprintf(stderr, "%s\n", dlerror()), 1;
    must("cuInit", CALL(cuInit, (unsigned), 0));
    // Denied if other processes use the whole limit; the process idles then.
    if (!note("cuDevicePrimaryCtxRetain", CALL(cuDevicePrimaryCtxRetain, (void **, int), &primary, 0)))
        must("cuCtxSetCurrent", CALL(cuCtxSetCurrent, (void *), primary));
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        unsigned long long operations = 0;
        if (sscanf(line, "go %llu", &operations) == 1) {
            if (!primary && !note("cuDevicePrimaryCtxRetain", CALL(cuDevicePrimaryCtxRetain, (void **, int), &primary, 0)))
                must("cuCtxSetCurrent", CALL(cuCtxSetCurrent, (void *), primary));
            for (int i = 0; primary && i < threads; i++) workers[i].operations = operations / (unsigned)threads;
            for (int i = 1; primary && i < threads; i++) pthread_create(&workers[i].thread, NULL, work, &workers[i]);
            if (primary) work(workers);
            for (int i = 1; primary && i < threads; i++) pthread_join(workers[i].thread, NULL);
        } else if (!strncmp(line, "drain", 5)) {
            for (int i = 0; i < threads; i++)
                for (int j = 0; j < OBJECTS; j++) unmake(&workers[i].objects[j]);
            if (primary) must("cuCtxSynchronize", CALL(cuCtxSynchronize, (void)));
            if (primary) must("cuDeviceGraphMemTrim", CALL(cuDeviceGraphMemTrim, (int), 0));
        } else if (!strncmp(line, "free", 4)) {
            size_t available = 0, total = 0;
            if (primary) CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total);
            printf("free\n");
            continue;
        }
        printf("done %llu %llu %llu %llu\n", granted, denied, wrong, operations_done);
        granted = denied = wrong = operations_done = 0;
    }
    return 0;
}
