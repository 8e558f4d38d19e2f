// Threads of one process that run the same task concurrently. Each line on standard input is a command, answered with
// one line that begins with the driver's result. The threads synchronize before each round.
//
//   init <device>, initonly                   makes the primary context current, or no context
//   grow <threads> <rounds> <bytes>           each allocates from the current pool in its own stream and frees;
//                                             prints the number of denials
//   small <threads> <rounds> <bytes>          likewise, plain memory
//   importpool <pid> <descriptor>             imports a pool of another process, as if received over a socket
//   import <handle> <threads> <rounds>        each imports the exported allocation and frees it; prints the number
//                                             of successful imports
//   open <handle> <threads> <rounds>          likewise, by IPC handle
//   primary <threads> <rounds> <bytes>        each retains the primary context, allocates and frees there and
//                                             releases the context; prints the number of denials
//   pools <threads> <rounds> <bytes>          each creates a pool, allocates from it and frees, queries the free memory
//                                             and destroys the pool; prints the number of denials and of
//                                             rounds after which memory was in use
//   recur <rounds> <bytes>                    one thread destroys a context with many allocations; as soon as another
//                                             thread gets a context with the same handle, it allocates there. Prints the
//                                             number of such contexts, and of those whose memory was not in use
//   unmap <rounds>, unmaptiles <rounds>, destroyarray <rounds>, releaseobject <rounds>
//                                             one thread ends all references of many allocations, at addresses, in a
//                                             sparse array or in a multicast object, with one call; another thread creates
//                                             and releases allocations with the same handles meanwhile and afterwards. Prints
//                                             the number of such allocations, and of rounds after which memory was in use
//   failunmap <rounds>                        one thread releases the handle of memory that is mapped twice, while two others
//                                             try to unmap it in vain. Prints how often the memory was not in use before its
//                                             end, or in use afterwards
//   churn <bytes>, calm                       begins, or ends, to allocate and free in another thread
//   load <count>                              loads modules without global variables; prints the number of denials
//   kernels <threads> <rounds> <bytes>        each requests a kernel of one library with global variables; prints the number
//                                             of denials
//   captures <call> <rounds>                  one thread captures in global mode; meanwhile another one queries the free memory
//                                             (0), the same by NVML (1), launches a graph with memory nodes (2), or creates
//                                             memory (3). Prints the numbers of denied calls and of invalid captures
//   meminfo                                   prints free and total memory

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

typedef int Result;
typedef unsigned long long Pointer;

#define OUT_OF_MEMORY 2
#define MOST_THREADS 16

static void *cuda, *nvml, *context;

#define CALL(name, types, ...)                                     \
    ({                                                             \
        Result (*call) types = (Result(*) types)dlsym(cuda, #name); \
        call ? call(__VA_ARGS__) : -1;                             \
    })

struct Handle { unsigned char bytes[64]; };

static struct Task {
    Pointer rounds, bytes, pool;
    struct Handle handle;
    pthread_barrier_t start;
    _Atomic Pointer granted, denied, left;
    _Atomic Result wrong;
    _Atomic int has_ended;
} task;

static void note(Result result) {
    if (result == 0) task.granted++;
    else if (result == OUT_OF_MEMORY) task.denied++;
    else task.wrong = result;
}

static void must(Result result) {
    if (result) task.wrong = result;
}

static void *grow(void *unused) {
    Pointer stream = 0;
    must(CALL(cuCtxSetCurrent, (void *), context));
    must(CALL(cuStreamCreate, (Pointer *, unsigned), &stream, 1));
    for (Pointer round = 0; round < task.rounds; round++) {
        Pointer pointer = 0;
        pthread_barrier_wait(&task.start);
        Result result = CALL(cuMemAllocAsync, (Pointer *, size_t, Pointer), &pointer, task.bytes, stream);
        note(result);
        pthread_barrier_wait(&task.start);
        if (!result) must(CALL(cuMemFreeAsync, (Pointer, Pointer), pointer, stream));
        must(CALL(cuStreamSynchronize, (Pointer), stream));
    }
    must(CALL(cuStreamDestroy_v2, (Pointer), stream));
    return unused;
}

static void *small(void *unused) {
    must(CALL(cuCtxSetCurrent, (void *), context));
    for (Pointer round = 0; round < task.rounds; round++) {
        Pointer pointer = 0;
        pthread_barrier_wait(&task.start);
        Result result = CALL(cuMemAlloc_v2, (Pointer *, size_t), &pointer, task.bytes);
        note(result);
        pthread_barrier_wait(&task.start);
        if (!result) must(CALL(cuMemFree_v2, (Pointer), pointer));
    }
    return unused;
}

static void *import(void *unused) {
    must(CALL(cuCtxSetCurrent, (void *), context));
    for (Pointer round = 0; round < task.rounds; round++) {
        Pointer pointer = 0;
        Result result = CALL(cuMemPoolImportPointer, (Pointer *, Pointer, struct Handle *), &pointer, task.pool, &task.handle);
        note(result);
        if (!result) must(CALL(cuMemFree_v2, (Pointer), pointer));
    }
    return unused;
}

static void *open_handle(void *unused) {
    must(CALL(cuCtxSetCurrent, (void *), context));
    for (Pointer round = 0; round < task.rounds; round++) {
        Pointer pointer = 0;
        pthread_barrier_wait(&task.start);
        Result result = CALL(cuIpcOpenMemHandle_v2, (Pointer *, struct Handle, unsigned), &pointer, task.handle, 1);
        note(result);
        pthread_barrier_wait(&task.start);
        if (!result) must(CALL(cuIpcCloseMemHandle, (Pointer), pointer));
    }
    return unused;
}

static void *use_primary(void *unused) {
    for (Pointer round = 0; round < task.rounds; round++) {
        void *mine = NULL;
        Pointer pointer = 0;
        Result result = CALL(cuDevicePrimaryCtxRetain, (void **, int), &mine, 0);
        note(result);
        if (result) continue;
        must(CALL(cuCtxSetCurrent, (void *), mine));
        result = CALL(cuMemAlloc_v2, (Pointer *, size_t), &pointer, task.bytes);
        note(result);
        if (!result) must(CALL(cuMemFree_v2, (Pointer), pointer));
        must(CALL(cuDevicePrimaryCtxRelease_v2, (int), 0));
    }
    return unused;
}

static void *use_own_pool(void *unused) {
    // Pinned memory of device 0, without handle types.
    int properties[22] = {1, 0, 1, 0};
    must(CALL(cuCtxSetCurrent, (void *), context));
    for (Pointer round = 0; round < task.rounds; round++) {
        Pointer pool = 0, pointer = 0;
        size_t available = 0, total = 0;
        must(CALL(cuMemPoolCreate, (Pointer *, void *), &pool, properties));
        Result result = CALL(cuMemAllocFromPoolAsync, (Pointer *, size_t, Pointer, Pointer), &pointer, task.bytes, pool, 0);
        note(result);
        if (!result) must(CALL(cuMemFreeAsync, (Pointer, Pointer), pointer, 0));
        must(CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total));
        must(CALL(cuMemPoolDestroy, (Pointer), pool));
        if (pthread_barrier_wait(&task.start) == PTHREAD_BARRIER_SERIAL_THREAD) {
            must(CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total));
            task.left += available != total;
        }
        pthread_barrier_wait(&task.start);
    }
    return unused;
}

static void *ended;

static void *destroy_context(void *unused) {
    for (Pointer round = 0; round < task.rounds; round++) {
        Pointer pointer = 0;
        must(CALL(cuCtxCreate_v2, (void **, unsigned, int), &ended, 0, 0));
        for (int i = 0; i < 1000; i++) must(CALL(cuMemAlloc_v2, (Pointer *, size_t), &pointer, 4096));
        pthread_barrier_wait(&task.start);
        must(CALL(cuCtxDestroy_v2, (void *), ended));
        pthread_barrier_wait(&task.start);
        pthread_barrier_wait(&task.start);
    }
    return unused;
}

static void *create_context_again(void *unused) {
    for (Pointer round = 0; round < task.rounds; round++) {
        void *mine = NULL;
        Pointer pointer = 0;
        size_t available = 0, total = 0;
        pthread_barrier_wait(&task.start);
        for (int i = 0; i < 64 && mine != ended; i++) {
            if (mine) must(CALL(cuCtxDestroy_v2, (void *), mine));
            must(CALL(cuCtxCreate_v2, (void **, unsigned, int), &mine, 0, 0));
        }
        must(CALL(cuMemAlloc_v2, (Pointer *, size_t), &pointer, task.bytes));
        pthread_barrier_wait(&task.start);
        must(CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total));
        task.granted += mine == ended;
        task.left += available + task.bytes > total;
        must(CALL(cuCtxDestroy_v2, (void *), mine));
        pthread_barrier_wait(&task.start);
    }
    return unused;
}

enum { MEMORIES = 200, MAPPINGS = 20 * MEMORIES, CREATED = 100, SPARE = 10, TILES = 64 };
static Pointer range, sparse, object, handles[MEMORIES];
static enum { ADDRESSES, TILES_OF_ARRAY, WHOLE_ARRAY, OBJECT } referrer;

static Pointer create_memory(void) {
    // Pinned memory of device 0, without handle types.
    struct { int type, handles, location_type, location; void *win32; unsigned char flags[8]; } properties = {1, 0, 1, 0, NULL, {0}};
    Pointer handle = 0;
    must(CALL(cuMemCreate, (Pointer *, size_t, void *, uint64_t), &handle, task.bytes, &properties, 0));
    return handle;
}

// Maps all allocations in turn to the tiles of the sparse array, each 128 elements long and high, or unmaps all.
static void change_tiles(int unmaps) {
    static struct { unsigned resource_type; Pointer resource; unsigned part, padding, level, layer, x, y, z, width, height, depth, operation, memory_type; Pointer memory, offset; unsigned devices, flags, reserved[2]; }
        operations[MAPPINGS];
    _Static_assert(sizeof operations[0] == 96, "as in cuda.h");
    for (int i = 0; i < MAPPINGS; i++) {
        operations[i].resource = sparse;
        operations[i].x = i % TILES * 128;
        operations[i].y = i / TILES * 128;
        operations[i].width = operations[i].height = 128;
        operations[i].depth = operations[i].devices = 1;
        operations[i].operation = unmaps ? 2 : 1;
        operations[i].memory = unmaps ? 0 : handles[i % MEMORIES];
    }
    must(CALL(cuMemMapArrayAsync, (void *, unsigned, void *), operations, MAPPINGS, NULL));
}

static int by_handle(const void *left, const void *right) {
    Pointer a = *(const Pointer *)left, b = *(const Pointer *)right;
    return (a > b) - (a < b);
}

static Result make_array(void) {
    struct { size_t width, height, depth; unsigned format, channels, flags; } descriptor = {128 * TILES, 128 * TILES, 0, 0x20, 1, 0x40};
    return CALL(cuArray3DCreate_v2, (Pointer *, void *), &sparse, &descriptor);
}

static void make_object(void) {
    struct { unsigned devices; size_t bytes; uint64_t handles, flags; } properties = {2, MAPPINGS * task.bytes, 0, 0};
    must(CALL(cuMulticastCreate, (Pointer *, void *), &object, &properties));
    for (int device = 0; device < 2; device++) must(CALL(cuMulticastAddDevice, (Pointer, int), object, device));
}

static void map_all(void) {
    if (referrer == WHOLE_ARRAY) must(make_array());
    if (referrer == TILES_OF_ARRAY || referrer == WHOLE_ARRAY) change_tiles(0);
    if (referrer == OBJECT) make_object();
    for (Pointer i = 0; i < MAPPINGS; i++) {
        Pointer memory = handles[i % MEMORIES];
        if (referrer == ADDRESSES) must(CALL(cuMemMap, (Pointer, size_t, size_t, Pointer, uint64_t), range + i * task.bytes, task.bytes, 0, memory, 0));
        if (referrer == OBJECT) must(CALL(cuMulticastBindMem, (Pointer, size_t, Pointer, size_t, size_t, uint64_t), object, i * task.bytes, memory, 0, task.bytes, 0));
    }
    for (int i = 0; i < MEMORIES; i++) must(CALL(cuMemRelease, (Pointer), handles[i]));
}

static void unmap_all(void) {
    if (referrer == ADDRESSES) must(CALL(cuMemUnmap, (Pointer, size_t), range, MAPPINGS * task.bytes));
    if (referrer == TILES_OF_ARRAY) change_tiles(1);
    if (referrer == WHOLE_ARRAY) must(CALL(cuArrayDestroy, (Pointer), sparse));
    if (referrer == OBJECT) must(CALL(cuMemRelease, (Pointer), object));
}

static void *end_references(void *unused) {
    size_t available = 0, total = 0;
    must(CALL(cuCtxSetCurrent, (void *), context));
    for (Pointer round = 0; round < task.rounds; round++) {
        for (int i = 0; i < MEMORIES; i++) handles[i] = create_memory();
        // The driver reuses the highest handle first, which is unmapped last.
        qsort(handles, MEMORIES, sizeof *handles, by_handle);
        map_all();
        task.has_ended = 0;
        pthread_barrier_wait(&task.start);
        unmap_all();
        task.has_ended = 1;
        pthread_barrier_wait(&task.start);
        must(CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total));
        task.left += available != total;
        pthread_barrier_wait(&task.start);
    }
    return unused;
}

// Creates memory. Keeps it and returns 0, or releases it and returns 1 if it has the handle of ended memory.
static int create_one(Pointer *created, int *count) {
    Pointer handle = create_memory();
    if (!bsearch(&handle, handles, MEMORIES, sizeof handle, by_handle)) {
        created[(*count)++] = handle;
        return 0;
    }
    must(CALL(cuMemRelease, (Pointer), handle));
    return 1;
}

static void *create_again(void *unused) {
    Pointer created[CREATED + SPARE];
    must(CALL(cuCtxSetCurrent, (void *), context));
    for (Pointer round = 0; round < task.rounds; round++) {
        int count = 0, recurred = 0;
        pthread_barrier_wait(&task.start);
        while (recurred < 20 && !task.has_ended) {
            if (count == CREATED) {
                // The driver reuses the highest handle first.
                qsort(created, CREATED, sizeof *created, by_handle);
                must(CALL(cuMemRelease, (Pointer), created[0]));
                created[0] = created[--count];
            }
            recurred += create_one(created, &count);
        }
        while (!task.has_ended) sched_yield();
        while (!recurred && count < CREATED + SPARE) recurred += create_one(created, &count);
        task.granted += recurred;
        for (int i = 0; i < count; i++) must(CALL(cuMemRelease, (Pointer), created[i]));
        pthread_barrier_wait(&task.start);
        pthread_barrier_wait(&task.start);
    }
    return unused;
}

static Result prepare_references(void) {
    task.bytes = 2 << 20;
    if (referrer == TILES_OF_ARRAY) return make_array();
    return CALL(cuMemAddressReserve, (Pointer *, size_t, size_t, Pointer, uint64_t), &range, MAPPINGS * task.bytes, 0, 0, 0);
}

static _Atomic int churns;
static pthread_t churner;

static void *churn(void *bytes) {
    must(CALL(cuCtxSetCurrent, (void *), context));
    while (churns) {
        Pointer pointer = 0;
        Result result = CALL(cuMemAlloc_v2, (Pointer *, size_t), &pointer, (size_t)bytes);
        if (!result) must(CALL(cuMemFree_v2, (Pointer), pointer));
    }
    return NULL;
}

static Result load(Pointer count) {
    Result result = 0;
    task.denied = 0;
    for (Pointer i = 0; i < count && !result; i++) {
        Pointer module = 0;
        result = CALL(cuModuleLoadData, (Pointer *, const void *), &module, ".version 6.4\n.target sm_50\n.address_size 64\n.visible .entry any() { ret; }\n");
        if (result != OUT_OF_MEMORY) continue;
        task.denied++;
        result = 0;
    }
    return result;
}

static Pointer library;

static Result load_library(Pointer bytes) {
    char text[160];
    snprintf(text, sizeof text, ".version 6.4\n.target sm_50\n.address_size 64\n.global .b8 data[%llu];\n.visible .entry any() { ret; }\n", bytes);
    return CALL(cuLibraryLoadData, (Pointer *, const void *, int *, void **, unsigned, int *, void **, unsigned), &library, text, NULL, NULL, 0, NULL, NULL, 0);
}

static void *request_kernel(void *unused) {
    must(CALL(cuCtxSetCurrent, (void *), context));
    for (Pointer round = 0; round < task.rounds; round++) {
        Pointer kernel = 0;
        pthread_barrier_wait(&task.start);
        note(CALL(cuLibraryGetKernel, (Pointer *, Pointer, const char *), &kernel, library, "any"));
    }
    return unused;
}

static void *captured_exec;

// Leaves free memory in a pool, and makes a graph with memory.
static void prepare_captures(void) {
    uint64_t keeps = ~0ull;
    Pointer pool = 0, pointer = 0;
    void *graph = NULL, *node = NULL, *next = NULL;
    must(CALL(cuDeviceGetMemPool, (Pointer *, int), &pool, 0));
    must(CALL(cuMemPoolSetAttribute, (Pointer, int, void *), pool, 4, &keeps));
    must(CALL(cuMemAllocAsync, (Pointer *, size_t, Pointer), &pointer, 8 << 20, 0));
    must(CALL(cuMemFreeAsync, (Pointer, Pointer), pointer, 0));
    must(CALL(cuGraphCreate, (void **, unsigned), &graph, 0));
    struct { int properties[22]; void *access; size_t count, bytes; Pointer pointer; } allocation = {{1, 0, 1, 0}, NULL, 0, 8 << 20, 0};
    _Static_assert(sizeof allocation == 120, "as in cuda.h");
    must(CALL(cuGraphAddMemAllocNode, (void **, void *, void **, size_t, void *), &node, graph, NULL, 0, &allocation));
    must(CALL(cuGraphAddMemFreeNode, (void **, void *, void **, size_t, Pointer), &next, graph, &node, 1, allocation.pointer));
    must(CALL(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long), &captured_exec, graph, 0));
}

static void *capture(void *unused) {
    Pointer stream = 0;
    must(CALL(cuCtxSetCurrent, (void *), context));
    must(CALL(cuStreamCreate, (Pointer *, unsigned), &stream, 1));
    for (Pointer round = 0; round < task.rounds; round++) {
        void *graph = NULL;
        must(CALL(cuStreamBeginCapture_v2, (Pointer, int), stream, 0));
        pthread_barrier_wait(&task.start);
        pthread_barrier_wait(&task.start);
        task.left += CALL(cuStreamEndCapture, (Pointer, void **), stream, &graph) != 0;
        if (graph) must(CALL(cuGraphDestroy, (void *), graph));
    }
    return unused;
}

static void *poll_memory(void *unused) {
    Pointer stream = 0;
    void *device = NULL;
    must(CALL(cuCtxSetCurrent, (void *), context));
    must(CALL(cuStreamCreate, (Pointer *, unsigned), &stream, 1));
    if (task.bytes == 1) {
        nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        must(((int (*)(void))dlsym(nvml, "nvmlInit_v2"))());
        must(((int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"))(0, &device));
    }
    for (Pointer round = 0; round < task.rounds; round++) {
        pthread_barrier_wait(&task.start);
        for (int i = 0; i < 3; i++) {
            unsigned long long amounts[3] = {0};
            size_t available = 0, total = 0;
            struct { int type, handles, location_type, location; void *win32; unsigned char flags[8]; } properties = {1, 0, 1, 0, NULL, {0}};
            Pointer handle = 0;
            note(task.bytes == 0   ? CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total)
                 : task.bytes == 1 ? ((int (*)(void *, void *))dlsym(nvml, "nvmlDeviceGetMemoryInfo"))(device, amounts)
                 : task.bytes == 2 ? CALL(cuGraphLaunch, (void *, Pointer), captured_exec, stream)
                                   : CALL(cuMemCreate, (Pointer *, size_t, void *, uint64_t), &handle, 1ull << 40, &properties, 0));
        }
        pthread_barrier_wait(&task.start);
    }
    return unused;
}

// Returns the address of a mapping; no other one follows it.
static Pointer mapped_at(int index) {
    return range + 2 * task.bytes * (Pointer)index;
}

static void *release_handle(void *unused) {
    size_t available = 0, total = 0;
    must(CALL(cuCtxSetCurrent, (void *), context));
    for (Pointer round = 0; round < task.rounds; round++) {
        Pointer handle = create_memory();
        for (int i = 0; i < 2; i++) must(CALL(cuMemMap, (Pointer, size_t, size_t, Pointer, uint64_t), mapped_at(i), task.bytes, 0, handle, 0));
        task.has_ended = 0;
        pthread_barrier_wait(&task.start);
        must(CALL(cuMemRelease, (Pointer), handle));
        task.has_ended = 1;
        pthread_barrier_wait(&task.start);
        for (int i = 0; i < 2; i++) {
            must(CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total));
            task.left += available + task.bytes != total;
            must(CALL(cuMemUnmap, (Pointer, size_t), mapped_at(i), task.bytes));
        }
        must(CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total));
        task.left += available != total;
    }
    return unused;
}

static void *fail_unmap(void *unused) {
    int index = (int)task.granted++;
    must(CALL(cuCtxSetCurrent, (void *), context));
    for (Pointer round = 0; round < task.rounds; round++) {
        pthread_barrier_wait(&task.start);
        do {
            if (CALL(cuMemUnmap, (Pointer, size_t), mapped_at(index), 2 * task.bytes) == 0) task.wrong = -1;
        } while (!task.has_ended);
        pthread_barrier_wait(&task.start);
    }
    return unused;
}

// Runs the task in `count` threads, the first of them with `first`.
static void run_task(void *(*first)(void *), void *(*body)(void *), Pointer count) {
    pthread_t threads[MOST_THREADS];
    if (count > MOST_THREADS) exit(1);
    task.granted = task.denied = task.left = 0;
    task.wrong = 0;
    pthread_barrier_init(&task.start, NULL, (unsigned)count);
    for (Pointer i = 0; i < count; i++) pthread_create(&threads[i], NULL, i ? body : first, NULL);
    for (Pointer i = 0; i < count; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&task.start);
}

static void run(const char *line) {
    char word[64] = "", hex[160] = "";
    Pointer a = 0, b = 0, c = 0;
    sscanf(line, "%63s %llu %llu %llu", word, &a, &b, &c);
    if (!strcmp(word, "init")) {
        Result result = CALL(cuInit, (unsigned), 0);
        if (!result) result = CALL(cuDevicePrimaryCtxRetain, (void **, int), &context, (int)a);
        if (!result) result = CALL(cuCtxSetCurrent, (void *), context);
        printf("%d 0\n", result);
    } else if (!strcmp(word, "initonly")) {
        printf("%d\n", CALL(cuInit, (unsigned), 0));
    } else if (!strcmp(word, "grow") || !strcmp(word, "small") || !strcmp(word, "primary") || !strcmp(word, "pools")) {
        task.rounds = b;
        task.bytes = c;
        void *(*body)(void *) = *word == 'g' ? grow : *word == 's' ? small : !strcmp(word, "pools") ? use_own_pool : use_primary;
        run_task(body, body, a);
        printf("%d %llu %llu\n", task.wrong, task.denied, task.left);
    } else if (!strcmp(word, "importpool")) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%llu/fd/%llu", a, b);
        int imported = open(path, O_RDWR | O_CLOEXEC);
        printf("%d\n", CALL(cuMemPoolImportFromShareableHandle, (Pointer *, void *, int, uint64_t), &task.pool, (void *)(uintptr_t)imported, 1, 0));
        close(imported);
    } else if (!strcmp(word, "import") || !strcmp(word, "open")) {
        sscanf(line, "%63s %159s %llu %llu", word, hex, &a, &b);
        for (size_t i = 0; i < sizeof task.handle.bytes; i++) sscanf(hex + 2 * i, "%2hhx", &task.handle.bytes[i]);
        task.rounds = b;
        void *(*body)(void *) = *word == 'i' ? import : open_handle;
        run_task(body, body, a);
        printf("%d %llu\n", task.wrong, task.granted);
    } else if (!strcmp(word, "recur")) {
        task.rounds = a;
        task.bytes = b;
        run_task(destroy_context, create_context_again, 2);
        printf("%d %llu %llu\n", task.wrong, task.granted, task.left);
    } else if (!strcmp(word, "unmap") || !strcmp(word, "unmaptiles") || !strcmp(word, "destroyarray") || !strcmp(word, "releaseobject")) {
        task.rounds = a;
        referrer = *word == 'd' ? WHOLE_ARRAY : *word == 'r' ? OBJECT : !strcmp(word, "unmap") ? ADDRESSES : TILES_OF_ARRAY;
        Result result = prepare_references();
        run_task(end_references, create_again, 2);
        printf("%d %llu %llu\n", result ? result : task.wrong, task.granted, task.left);
    } else if (!strcmp(word, "failunmap")) {
        task.rounds = a;
        Result result = prepare_references();
        run_task(release_handle, fail_unmap, 3);
        printf("%d %llu\n", result ? result : task.wrong, task.left);
    } else if (!strcmp(word, "churn")) {
        churns = 1;
        printf("%d\n", pthread_create(&churner, NULL, churn, (void *)(uintptr_t)a));
    } else if (!strcmp(word, "calm")) {
        churns = 0;
        printf("%d\n", pthread_join(churner, NULL));
    } else if (!strcmp(word, "load")) {
        Result result = load(a);
        printf("%d %llu\n", result, task.denied);
    } else if (!strcmp(word, "kernels")) {
        task.rounds = b;
        Result result = load_library(c);
        run_task(request_kernel, request_kernel, a);
        if (!result) result = CALL(cuLibraryUnload, (Pointer), library);
        printf("%d %llu\n", result ? result : task.wrong, task.denied);
    } else if (!strcmp(word, "captures")) {
        task.bytes = a;
        task.rounds = b;
        task.wrong = 0;
        prepare_captures();
        Result prepared = task.wrong;
        run_task(capture, poll_memory, 2);
        printf("%d %llu %llu\n", prepared ? prepared : task.wrong, task.denied, task.left);
    } else if (!strcmp(word, "meminfo")) {
        size_t available = 0, total = 0;
        Result result = CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total);
        printf("%d %zu %zu\n", result, available, total);
    } else {
        printf("-1 unknown command\n");
    }
}

int main(void) {
    // Ends with the test, however that ends.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    char line[256];
    while (fgets(line, sizeof line, stdin)) run(line);
    return 0;
}
