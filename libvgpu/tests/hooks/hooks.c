// Calls the driver's functions one by one, for libvgpu's tests of each hook. Each line on standard input is a command,
// answered with one line that begins with the driver's result.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

typedef int Result;
typedef unsigned long long Pointer;
typedef void *Handle;

static void *cuda;

static void *function(const char *name) { return dlsym(cuda, name); }

#define CALL(name, types, ...)                                  \
    ({                                                          \
        Result(*call) types = (Result(*) types)function(#name); \
        call ? call(__VA_ARGS__) : -1;                          \
    })

static struct Row {
    const char *name;
    Result (*call)(void);
} rows[256];
static int row_count;

// A function that launches work, with its arguments.
#define ROW(name, types, ...)                                                              \
    static Result name##_row(void) { return CALL(name, types, __VA_ARGS__); }              \
    __attribute__((constructor)) static void name##_register(void) {                       \
        rows[row_count++] = (struct Row){#name, name##_row};                               \
    }
// Also its variant for per-thread default streams.
#define ROWS(name, suffix, types, ...) ROW(name, types, __VA_ARGS__) ROW(name##suffix, types, __VA_ARGS__)

enum { BYTES = 1 << 16, PITCH = 512 };
static Handle context, kernel, stream, graph, exec, array, array2;
static Pointer from, to;

struct Config { unsigned grid[3], block[3], shared; Handle stream; void *attributes; unsigned count; };
static struct Config config = {{4, 1, 1}, {64, 1, 1}, 0, NULL, NULL, 0};
struct Launch { Handle function; unsigned grid[3], block[3], shared; Handle stream; void **parameters; };
static struct Launch launches[1] = {{NULL, {4, 1, 1}, {64, 1, 1}, 0, NULL, NULL}};

struct Side2 { size_t x, y; unsigned type; const void *host; Pointer device; Handle array; size_t pitch; };
struct Copy2 { struct Side2 from, to; size_t width, height; };
struct Side3 { size_t x, y, z, lod; unsigned type; const void *host; Pointer device; Handle array, context; size_t pitch, height; };
struct Copy3 { struct Side3 from, to; size_t width, height, depth; };
static struct Copy2 rows2;
static struct Copy3 volume;
struct Attributes { unsigned order; int from[2], to[2]; unsigned flags; };
static struct Attributes attributes = {1, {0}, {0}, 0};
struct Operand { unsigned type; Pointer pointer; size_t row, layer; int hint[2]; };
struct Operation { struct Operand from, to; size_t extent[3]; unsigned order, flags; };
static struct Operation operation;
static size_t sizes[1] = {BYTES}, starts[1] = {0}, failed;

#define LAUNCH_TYPES (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **)
ROWS(cuLaunchKernel, _ptsz, LAUNCH_TYPES, kernel, 4, 1, 1, 64, 1, 1, 0, NULL, NULL, NULL)
ROWS(cuLaunchKernelEx, _ptsz, (struct Config *, Handle, void **, void **), &config, kernel, NULL, NULL)
ROWS(cuLaunchCooperativeKernel, _ptsz, (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **),
     kernel, 4, 1, 1, 64, 1, 1, 0, NULL, NULL)
ROW(cuLaunchCooperativeKernelMultiDevice, (struct Launch *, unsigned, unsigned), launches, 1, 0)
ROW(cuLaunch, (Handle), kernel)
ROW(cuLaunchGrid, (Handle, int, int), kernel, 4, 1)
ROW(cuLaunchGridAsync, (Handle, int, int, Handle), kernel, 4, 1, stream)
ROWS(cuGraphLaunch, _ptsz, (Handle, Handle), exec, stream)

ROWS(cuMemsetD8_v2, _ptds, (Pointer, unsigned char, size_t), to, 1, BYTES)
ROWS(cuMemsetD16_v2, _ptds, (Pointer, unsigned short, size_t), to, 1, BYTES / 2)
ROWS(cuMemsetD32_v2, _ptds, (Pointer, unsigned, size_t), to, 1, BYTES / 4)
ROWS(cuMemsetD8Async, _ptsz, (Pointer, unsigned char, size_t, Handle), to, 1, BYTES, stream)
ROWS(cuMemsetD16Async, _ptsz, (Pointer, unsigned short, size_t, Handle), to, 1, BYTES / 2, stream)
ROWS(cuMemsetD32Async, _ptsz, (Pointer, unsigned, size_t, Handle), to, 1, BYTES / 4, stream)
ROWS(cuMemsetD2D8_v2, _ptds, (Pointer, size_t, unsigned char, size_t, size_t), to, PITCH, 1, 256, 16)
ROWS(cuMemsetD2D16_v2, _ptds, (Pointer, size_t, unsigned short, size_t, size_t), to, PITCH, 1, 128, 16)
ROWS(cuMemsetD2D32_v2, _ptds, (Pointer, size_t, unsigned, size_t, size_t), to, PITCH, 1, 64, 16)
ROWS(cuMemsetD2D8Async, _ptsz, (Pointer, size_t, unsigned char, size_t, size_t, Handle), to, PITCH, 1, 256, 16, stream)
ROWS(cuMemsetD2D16Async, _ptsz, (Pointer, size_t, unsigned short, size_t, size_t, Handle), to, PITCH, 1, 128, 16, stream)
ROWS(cuMemsetD2D32Async, _ptsz, (Pointer, size_t, unsigned, size_t, size_t, Handle), to, PITCH, 1, 64, 16, stream)

ROWS(cuMemcpy, _ptds, (Pointer, Pointer, size_t), to, from, BYTES)
ROWS(cuMemcpyAsync, _ptsz, (Pointer, Pointer, size_t, Handle), to, from, BYTES, stream)
ROWS(cuMemcpyDtoD_v2, _ptds, (Pointer, Pointer, size_t), to, from, BYTES)
ROWS(cuMemcpyDtoDAsync_v2, _ptsz, (Pointer, Pointer, size_t, Handle), to, from, BYTES, stream)
ROWS(cuMemcpyPeer, _ptds, (Pointer, Handle, Pointer, Handle, size_t), to, context, from, context, BYTES)
ROWS(cuMemcpyPeerAsync, _ptsz, (Pointer, Handle, Pointer, Handle, size_t, Handle), to, context, from, context, BYTES, stream)
ROWS(cuMemcpyDtoA_v2, _ptds, (Handle, size_t, Pointer, size_t), array, 0, from, 256)
ROWS(cuMemcpyAtoD_v2, _ptds, (Pointer, Handle, size_t, size_t), to, array, 0, 256)
ROWS(cuMemcpyAtoA_v2, _ptds, (Handle, size_t, Handle, size_t, size_t), array2, 0, array, 0, 256)
ROWS(cuMemcpy2D_v2, _ptds, (struct Copy2 *), &rows2)
ROWS(cuMemcpy2DUnaligned_v2, _ptds, (struct Copy2 *), &rows2)
ROWS(cuMemcpy2DAsync_v2, _ptsz, (struct Copy2 *, Handle), &rows2, stream)
ROWS(cuMemcpy3D_v2, _ptds, (struct Copy3 *), &volume)
ROWS(cuMemcpy3DAsync_v2, _ptsz, (struct Copy3 *, Handle), &volume, stream)
ROWS(cuMemcpy3DPeer, _ptds, (struct Copy3 *), &volume)
ROWS(cuMemcpy3DPeerAsync, _ptsz, (struct Copy3 *, Handle), &volume, stream)
ROWS(cuMemcpyWithAttributesAsync, _ptsz, (Pointer, Pointer, size_t, struct Attributes *, Handle), to, from, BYTES, &attributes, stream)
ROWS(cuMemcpy3DWithAttributesAsync, _ptsz, (struct Operation *, unsigned long long, Handle), &operation, 0, stream)
ROWS(cuMemcpyBatchAsync, _ptsz, (Pointer *, Pointer *, size_t *, size_t, struct Attributes *, size_t *, size_t, size_t *, Handle),
     &to, &from, sizes, 1, &attributes, starts, 1, &failed, stream)
ROWS(cuMemcpyBatchAsync_v2, _ptsz, (Pointer *, Pointer *, size_t *, size_t, struct Attributes *, size_t *, size_t, Handle),
     &to, &from, sizes, 1, &attributes, starts, 1, stream)
ROWS(cuMemcpy3DBatchAsync, _ptsz, (size_t, struct Operation *, size_t *, unsigned long long, Handle), 1, &operation, &failed, 0, stream)
ROWS(cuMemcpy3DBatchAsync_v2, _ptsz, (size_t, struct Operation *, unsigned long long, Handle), 1, &operation, 0, stream)

#define TRY(call)                                \
    do {                                         \
        Result tried = (call);                   \
        if (tried) return tried;                 \
    } while (0)

// Launches kernels of kinds that were never seen. Each of them requests time and so reports the number of previous
// launches.
static Result flush(void) {
    static unsigned blocks = 100;
    TRY(CALL(cuLaunchKernel, LAUNCH_TYPES, kernel, ++blocks, 1, 1, 32, 1, 1, 0, stream, NULL, NULL));
    return CALL(cuCtxSynchronize, (void));
}

static Result make_graph(void) {
    Handle node = NULL;
    struct { Handle function; unsigned grid[3], block[3], shared; void **parameters, **extra; } one =
        {kernel, {4, 1, 1}, {64, 1, 1}, 0, NULL, NULL};
    TRY(CALL(cuGraphCreate, (Handle *, unsigned), &graph, 0));
    TRY(CALL(cuGraphAddKernelNode, (Handle *, Handle, Handle *, size_t, void *), &node, graph, NULL, 0, &one));
    return CALL(cuGraphInstantiateWithFlags, (Handle *, Handle, unsigned long long), &exec, graph, 0);
}

static Result prepare(void) {
    Handle module = NULL;
    TRY(CALL(cuInit, (unsigned), 0));
    TRY(CALL(cuDevicePrimaryCtxRetain, (Handle *, int), &context, 0));
    TRY(CALL(cuCtxSetCurrent, (Handle), context));
    TRY(CALL(cuModuleLoadData, (Handle *, const void *), &module, "any image"));
    TRY(CALL(cuModuleGetFunction, (Handle *, Handle, const char *), &kernel, module, "plain"));
    TRY(CALL(cuStreamCreate, (Handle *, unsigned), &stream, 1));
    TRY(CALL(cuMemAlloc_v2, (Pointer *, size_t), &from, BYTES));
    TRY(CALL(cuMemAlloc_v2, (Pointer *, size_t), &to, BYTES));
    struct { size_t width, height; unsigned format, channels; } flat = {256, 0, 1, 1};
    TRY(CALL(cuArrayCreate_v2, (Handle *, void *), &array, &flat));
    TRY(CALL(cuArrayCreate_v2, (Handle *, void *), &array2, &flat));
    TRY(CALL(cuFuncSetBlockShape, (Handle, int, int, int), kernel, 64, 1, 1));
    launches[0].function = kernel;
    launches[0].stream = stream;
    rows2 = (struct Copy2){.from = {.type = 2, .device = from, .pitch = PITCH}, .to = {.type = 2, .device = to, .pitch = PITCH}, .width = 256, .height = 16};
    volume = (struct Copy3){.from = {.type = 2, .device = from, .pitch = PITCH, .height = 4}, .to = {.type = 2, .device = to, .pitch = PITCH, .height = 4}, .width = 256, .height = 4, .depth = 4};
    operation = (struct Operation){.from = {.type = 1, .pointer = from}, .to = {.type = 1, .pointer = to}, .extent = {BYTES, 1, 1}, .order = 1};
    return make_graph();
}

// Launches a kernel that fails with a sticky error.
static Result fault(uint64_t code) {
    Handle module = NULL, failing = NULL;
    void *parameters[] = {&code};
    TRY(CALL(cuModuleLoadData, (Handle *, const void *), &module, "any image"));
    TRY(CALL(cuModuleGetFunction, (Handle *, Handle, const char *), &failing, module, "fault"));
    return CALL(cuLaunchKernel, LAUNCH_TYPES, failing, 4, 1, 1, 64, 1, 1, 0, NULL, parameters, NULL);
}

struct Kernel { Handle function; unsigned grid[3], block[3], shared; void **parameters, **extra; Handle kernel, context; };
static Handle timed_exec, timed_node;

// A graph of one kernel of `ns` nanoseconds.
static Result make_timed(uint64_t ns, Handle *made, Handle *node) {
    Handle module = NULL, spin = NULL;
    void *parameters[] = {&ns};
    struct Kernel one = {.grid = {4, 1, 1}, .block = {64, 1, 1}, .parameters = parameters};
    TRY(CALL(cuModuleLoadData, (Handle *, const void *), &module, "any image"));
    TRY(CALL(cuModuleGetFunction, (Handle *, Handle, const char *), &spin, module, "spin"));
    one.function = spin;
    TRY(CALL(cuGraphCreate, (Handle *, unsigned), made, 0));
    return CALL(cuGraphAddKernelNode, (Handle *, Handle, Handle *, size_t, void *), node, *made, NULL, 0, &one);
}

static Result launch_timed(int times) {
    for (int i = 0; i < times; i++) {
        TRY(CALL(cuGraphLaunch, (Handle, Handle), timed_exec, stream));
        TRY(CALL(cuCtxSynchronize, (void)));
    }
    return 0;
}

// Time per byte on a GPU with slow memory; a copy reads and writes each byte.
enum { FILL_NS_PER_BYTE = 2441, COPY_NS_PER_BYTE = 2 * FILL_NS_PER_BYTE };
struct Fill { Pointer to; size_t pitch; unsigned value, element; size_t width, height; };

static struct Fill fill_of(uint64_t ns) { return (struct Fill){to, 0, 1, 1, ns / FILL_NS_PER_BYTE, 1}; }

static struct Copy3 copy_of(uint64_t ns) {
    return (struct Copy3){.from = {.type = 2, .device = from}, .to = {.type = 2, .device = to}, .width = ns / COPY_NS_PER_BYTE, .height = 1, .depth = 1};
}

// A graph with a node of `ns` nanoseconds that the function `how` can change.
static Result make_changeable(const char *how, uint64_t ns, Handle *made, Handle *node) {
    struct Fill fill = fill_of(ns);
    struct Copy3 copy = copy_of(ns);
    Handle child = NULL, unused = NULL;
    if (!strcmp(how, "cuGraphExecChildGraphNodeSetParams")) TRY(make_timed(ns, &child, &unused));
    else if (strcmp(how, "cuGraphExecMemsetNodeSetParams") && strcmp(how, "cuGraphExecMemcpyNodeSetParams")) return make_timed(ns, made, node);
    TRY(CALL(cuGraphCreate, (Handle *, unsigned), made, 0));
    if (child) return CALL(cuGraphAddChildGraphNode, (Handle *, Handle, Handle *, size_t, Handle), node, *made, NULL, 0, child);
    if (strstr(how, "Memset")) return CALL(cuGraphAddMemsetNode, (Handle *, Handle, Handle *, size_t, void *, Handle), node, *made, NULL, 0, &fill, context);
    return CALL(cuGraphAddMemcpyNode, (Handle *, Handle, Handle *, size_t, void *, Handle), node, *made, NULL, 0, &copy, context);
}

// Makes a short executable graph and launches it until its cost is learned. `how` names the function that will change
// its duration to `ns`.
static Result learn_timed(const char *how, uint64_t ns) {
    Handle made = NULL;
    int is_enabled_later = !strcmp(how, "cuGraphNodeSetEnabled");
    TRY(make_changeable(how, is_enabled_later ? ns : 20000, &made, &timed_node));
    TRY(CALL(cuGraphInstantiateWithFlags, (Handle *, Handle, unsigned long long), &timed_exec, made, 0));
    if (is_enabled_later) TRY(CALL(cuGraphNodeSetEnabled, (Handle, Handle, unsigned), timed_exec, timed_node, 0));
    return launch_timed(50);
}

// Changes the graph's duration to `ns` with the named function.
static Result change_timed(const char *how, uint64_t ns) {
    Handle made = NULL, node = NULL;
    int result_info[8];
    struct Fill fill = fill_of(ns);
    struct Copy3 copy = copy_of(ns);
    void *change = function(how);
    if (!change) return -1;
    if (!strcmp(how, "cuGraphNodeSetEnabled")) return ((Result(*)(Handle, Handle, unsigned))change)(timed_exec, timed_node, 1);
    if (strstr(how, "Memset")) return ((Result(*)(Handle, Handle, void *, Handle))change)(timed_exec, timed_node, &fill, context);
    if (strstr(how, "Memcpy")) return ((Result(*)(Handle, Handle, void *, Handle))change)(timed_exec, timed_node, &copy, context);
    TRY(make_timed(ns, &made, &node));
    if (!strcmp(how, "cuGraphExecChildGraphNodeSetParams")) return ((Result(*)(Handle, Handle, Handle))change)(timed_exec, timed_node, made);
    if (!strcmp(how, "cuGraphExecUpdate")) return ((Result(*)(Handle, Handle, Handle *, int *))change)(timed_exec, made, &node, result_info);
    if (!strcmp(how, "cuGraphExecUpdate_v2")) return ((Result(*)(Handle, Handle, void *))change)(timed_exec, made, result_info);
    struct { int type, reserved[3]; union { struct Kernel kernel; long long room[29]; }; long long end; } any = {0};
    _Static_assert(sizeof any == 256, "as in cuda.h");
    TRY(CALL(cuGraphKernelNodeGetParams_v2, (Handle, struct Kernel *), node, &any.kernel));
    void *parameters = !strcmp(how, "cuGraphExecNodeSetParams") ? (void *)&any : (void *)&any.kernel;
    return ((Result(*)(Handle, Handle, void *))change)(timed_exec, timed_node, parameters);
}

// Begins a capture with the named function, launches in it, and ends it.
static Result capture(const char *begin, const char *end) {
    Handle captured = NULL;
    Result (*start)(Handle, ...) = (Result(*)(Handle, ...))function(begin);
    Result (*stop)(Handle, Handle *) = (Result(*)(Handle, Handle *))function(end);
    Handle into = NULL;
    if (!start || !stop) return -1;
    if (strstr(begin, "ToGraph")) {
        TRY(CALL(cuGraphCreate, (Handle *, unsigned), &into, 0));
        TRY(((Result(*)(Handle, Handle, Handle *, void *, size_t, int))start)(stream, into, NULL, NULL, 0, 0));
    } else if (strstr(begin, "_v2")) {
        TRY(((Result(*)(Handle, int))start)(stream, 0));
    } else {
        TRY(((Result(*)(Handle))start)(stream));
    }
    for (int i = 0; i < 5; i++)
        TRY(CALL(cuLaunchKernel, LAUNCH_TYPES, kernel, 4, 1, 1, 64, 1, 1, 0, stream, NULL, NULL));
    return stop(stream, &captured);
}

// Makes an executable graph that allocates `bytes` with the named function, and launches or uploads it.
static Result graph_memory(const char *how, const char *use, size_t bytes) {
    Handle made = NULL, node = NULL, ready = NULL;
    struct { int type, handles, location_type, location; char rest[72]; void *access; size_t count, bytes; Pointer pointer; } allocation;
    _Static_assert(sizeof allocation == 120, "as in cuda.h");
    memset(&allocation, 0, sizeof allocation);
    allocation.type = allocation.location_type = 1;
    allocation.bytes = bytes;
    TRY(CALL(cuGraphCreate, (Handle *, unsigned), &made, 0));
    TRY(CALL(cuGraphAddMemAllocNode, (Handle *, Handle, Handle *, size_t, void *), &node, made, NULL, 0, &allocation));
    struct { uint64_t flags; Handle stream, error; unsigned result; } parameters = {0};
    void *instantiate = function(how);
    if (!instantiate) return -1;
    if (strstr(how, "WithParams")) TRY(((Result(*)(Handle *, Handle, void *))instantiate)(&ready, made, &parameters));
    else if (strstr(how, "WithFlags")) TRY(((Result(*)(Handle *, Handle, unsigned long long))instantiate)(&ready, made, 0));
    else TRY(((Result(*)(Handle *, Handle, Handle *, char *, size_t))instantiate)(&ready, made, NULL, NULL, 0));
    Result (*run)(Handle, Handle) = (Result(*)(Handle, Handle))function(use);
    Result result = run ? run(ready, stream) : -1;
    CALL(cuGraphExecDestroy, (Handle), ready);
    return result;
}

static Handle green, green_context, array_made, made_context, external;
static Pointer object, memory, mapped, pool;

static Result make_green(void) {
    unsigned resource[36] = {0};
    Handle description = NULL;
    TRY(CALL(cuInit, (unsigned), 0));
    TRY(CALL(cuDeviceGetDevResource, (int, void *, int), 0, resource, 1));
    TRY(CALL(cuDevResourceGenerateDesc, (Handle *, void *, unsigned), &description, resource, 1));
    TRY(CALL(cuGreenCtxCreate, (Handle *, Handle, int, unsigned), &green, description, 0, 1));
    TRY(CALL(cuCtxFromGreenCtx, (Handle *, Handle), &green_context, green));
    return CALL(cuCtxSetCurrent, (Handle), green_context);
}

struct Properties { int type, handles, location_type, location; void *win32; unsigned char flags[8]; };

static Result make_memory(size_t bytes) {
    struct Properties properties = {1, 1, 1, 0, NULL, {0}};
    return CALL(cuMemCreate, (Pointer *, size_t, void *, unsigned long long), &memory, bytes, &properties, 0);
}

static Result map_memory(size_t bytes) {
    TRY(CALL(cuMemAddressReserve, (Pointer *, size_t, size_t, Pointer, unsigned long long), &mapped, bytes, 0, 0, 0));
    return CALL(cuMemMap, (Pointer, size_t, size_t, Pointer, unsigned long long), mapped, bytes, 0, memory, 0);
}

static Result make_object(size_t bytes) {
    struct { unsigned devices; size_t bytes; unsigned long long handles, flags; } properties = {2, bytes, 0, 0};
    TRY(CALL(cuMulticastCreate, (Pointer *, void *), &object, &properties));
    TRY(CALL(cuMulticastAddDevice, (Pointer, int), object, 0));
    return CALL(cuMulticastAddDevice, (Pointer, int), object, 1);
}

static Result import_external(int descriptor, size_t bytes) {
    struct { int type; union { int fd; uint64_t rest[2]; } handle; uint64_t size; unsigned flags, reserved[16]; } description;
    memset(&description, 0, sizeof description);
    description.type = 1;
    description.handle.fd = descriptor;
    description.size = bytes;
    return CALL(cuImportExternalMemory, (Handle *, void *), &external, &description);
}

static Result make_pool(int type, int location) {
    int properties[22] = {type, 0, location, 0};
    return CALL(cuMemPoolCreate, (Pointer *, void *), &pool, properties);
}

struct IpcHandle { unsigned char bytes[64]; };

// Opens linear memory of another process by its handle with the named function.
static Result open_ipc(const char *how, const char *hex, Pointer *pointer) {
    struct IpcHandle handle;
    Result (*open)(Pointer *, struct IpcHandle, unsigned) = (Result(*)(Pointer *, struct IpcHandle, unsigned))function(how);
    for (size_t i = 0; i < sizeof handle.bytes; i++) sscanf(hex + 2 * i, "%2hhx", &handle.bytes[i]);
    return open ? open(pointer, handle, 1) : -1;
}

static void run(char *line) {
    char word[64] = "", first[64] = "", second[64] = "";
    unsigned long long a = 0, b = 0;
    sscanf(line, "%63s %63s %63s", word, first, second);
    sscanf(line, "%*s %llu %llu", &a, &b);
    Result result = -1;
    Pointer pointer = 0;
    if (!strcmp(word, "rows")) {
        printf("0");
        for (int i = 0; i < row_count; i++) printf(" %s", rows[i].name);
        printf("\n");
        return;
    }
    if (!strcmp(word, "prepare")) result = prepare();
    else if (!strcmp(word, "flush")) result = flush();
    else if (!strcmp(word, "row")) {
        for (int i = 0; i < row_count; i++)
            if (!strcmp(rows[i].name, first)) result = rows[i].call();
        if (!result) result = CALL(cuCtxSynchronize, (void));
    } else if (!strcmp(word, "capture")) result = capture(first, second);
    else if (!strcmp(word, "learntimed")) {
        sscanf(line, "%*s %*s %llu", &a);
        result = learn_timed(first, a);
    }
    else if (!strcmp(word, "launchtimed")) result = launch_timed(1);
    else if (!strcmp(word, "changetimed")) {
        sscanf(line, "%*s %*s %llu", &a);
        result = change_timed(first, a);
    }
    else if (!strcmp(word, "destroystream")) {
        Result (*destroy)(Handle) = (Result(*)(Handle))function(first);
        Handle doomed = NULL;
        result = CALL(cuStreamCreate, (Handle *, unsigned), &doomed, 1);
        if (!result) result = CALL(cuStreamBeginCapture_v2, (Handle, int), doomed, 0);
        if (!result) result = destroy(doomed);
    } else if (!strcmp(word, "graph")) {
        sscanf(line, "%*s %*s %*s %llu", &a);
        result = graph_memory(first, second, a);
    } else if (!strcmp(word, "init")) {
        result = CALL(cuInit, (unsigned), 0);
        if (!result) result = CALL(cuDevicePrimaryCtxRetain, (Handle *, int), &context, 0);
        if (!result) result = CALL(cuCtxSetCurrent, (Handle), context);
    } else if (!strcmp(word, "primary")) {
        // Ends the primary context with the named function.
        result = ((Result(*)(int))function(first))(0);
        if (!result) result = CALL(cuDevicePrimaryCtxRetain, (Handle *, int), &context, 0);
        if (!result) result = CALL(cuCtxSetCurrent, (Handle), context);
    } else if (!strcmp(word, "alloc")) result = CALL(cuMemAlloc_v2, (Pointer *, size_t), &pointer, a);
    else if (!strcmp(word, "async")) result = CALL(cuMemAllocAsync, (Pointer *, size_t, Handle), &pointer, a, NULL);
    else if (!strcmp(word, "free")) result = CALL(cuMemFree_v2, (Pointer), a);
    else if (!strcmp(word, "fault")) result = fault(a);
    else if (!strcmp(word, "sync")) result = CALL(cuCtxSynchronize, (void));
    else if (!strcmp(word, "meminfo")) {
        size_t available = 0, total = 0;
        result = CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total);
        printf("%d %zu %zu\n", result, available, total);
        return;
    } else if (!strcmp(word, "total1")) {
        unsigned total = 0;
        result = CALL(cuDeviceTotalMem, (unsigned *, int), &total, 0);
        printf("%d %u\n", result, total);
        return;
    } else if (!strcmp(word, "array")) {
        unsigned narrow[6] = {(unsigned)a, (unsigned)b, 1, 0x20, 1, 0}, flat[4] = {(unsigned)a, (unsigned)b, 0x20, 1};
        struct { size_t width, height; unsigned format, channels; } wide = {a, b, 0x20, 1};
        sscanf(line, "%*s %*s %*s %63s", first);
        void *create = function(first);
        void *descriptor = !strcmp(first, "cuArray3DCreate") ? (void *)narrow : !strcmp(first, "cuArrayCreate") ? (void *)flat : (void *)&wide;
        result = create ? ((Result(*)(Handle *, void *))create)(&array_made, descriptor) : -1;
    } else if (!strcmp(word, "destroyarray")) result = CALL(cuArrayDestroy, (Handle), array_made);
    else if (!strcmp(word, "context3")) result = CALL(cuCtxCreate_v3, (Handle *, void *, int, unsigned, int), &made_context, NULL, 0, 0, 0);
    else if (!strcmp(word, "context4")) result = CALL(cuCtxCreate_v4, (Handle *, void *, unsigned, int), &made_context, NULL, 0, 0);
    else if (!strcmp(word, "destroycontext")) {
        result = CALL(cuCtxDestroy_v2, (Handle), made_context);
        if (!result) result = CALL(cuCtxSetCurrent, (Handle), context);
    } else if (!strcmp(word, "detachcontext")) result = CALL(cuCtxDetach, (Handle), made_context);
    else if (!strcmp(word, "green")) result = make_green();
    else if (!strcmp(word, "destroygreen")) result = CALL(cuGreenCtxDestroy, (Handle), green);
    else if (!strcmp(word, "create")) result = make_memory(a);
    else if (!strcmp(word, "map")) result = map_memory(a);
    else if (!strcmp(word, "unmap")) result = CALL(cuMemUnmap, (Pointer, size_t), mapped, a);
    else if (!strcmp(word, "retain")) result = CALL(cuMemRetainAllocationHandle, (Pointer *, Pointer), &memory, mapped);
    else if (!strcmp(word, "release")) result = CALL(cuMemRelease, (Pointer), memory);
    else if (!strcmp(word, "object")) result = make_object(a);
    else if (!strcmp(word, "sparsearray")) {
        struct { size_t width, height, depth; unsigned format, channels, flags; } descriptor = {1024, 1024, 0, 0x20, 1, 0x40};
        result = CALL(cuArray3DCreate_v2, (Handle *, void *), &array2, &descriptor);
    } else if (!strcmp(word, "tiles")) {
        unsigned long long c = 0;
        sscanf(line, "%*s %llu %llu %llu %63s", &a, &b, &c, first);
        // Maps the memory to `b` rows of tiles of the sparse array from row `a`, each 128 elements high; unmaps them if
        // `c`.
        struct { unsigned resource_type; Handle resource; unsigned part, padding, level, layer, x, y, z, width, height, depth, operation, memory_type; Pointer memory, offset; unsigned devices, flags, reserved[2]; }
            operation = {0, array2, 0, 0, 0, 0, 0, 128 * (unsigned)a, 0, 1024, 128 * (unsigned)b, 1, c ? 2 : 1, 0, c ? 0 : memory, 0, 1, 0, {0}};
        _Static_assert(sizeof operation == 96, "as in cuda.h");
        Result (*map)(void *, unsigned, Handle) = (Result(*)(void *, unsigned, Handle))function(first);
        result = map ? map(&operation, 1, NULL) : -1;
    } else if (!strcmp(word, "destroysparse")) result = CALL(cuArrayDestroy, (Handle), array2);
    else if (!strcmp(word, "bind")) {
        if (!strcmp(first, "cuMulticastBindMem"))
            result = CALL(cuMulticastBindMem, (Pointer, size_t, Pointer, size_t, size_t, uint64_t), object, 0, memory, 0, 4 << 20, 0);
        else if (!strcmp(first, "cuMulticastBindMem_v2"))
            result = CALL(cuMulticastBindMem_v2, (Pointer, int, size_t, Pointer, size_t, size_t, uint64_t), object, 0, 0, memory, 0, 4 << 20, 0);
        else if (!strcmp(first, "cuMulticastBindAddr"))
            result = CALL(cuMulticastBindAddr, (Pointer, size_t, Pointer, size_t, uint64_t), object, 0, mapped, 4 << 20, 0);
        else
            result = CALL(cuMulticastBindAddr_v2, (Pointer, int, size_t, Pointer, size_t, uint64_t), object, 0, 0, mapped, 4 << 20, 0);
    } else if (!strcmp(word, "unbind")) result = CALL(cuMulticastUnbind, (Pointer, int, size_t, size_t), object, 0, 0, a);
    else if (!strcmp(word, "releaseobject")) result = CALL(cuMemRelease, (Pointer), object);
    else if (!strcmp(word, "export")) {
        int exported = -1;
        result = CALL(cuMemExportToShareableHandle, (void *, Pointer, int, uint64_t), &exported, memory, 1, 0);
        printf("%d %d\n", result, exported);
        return;
    } else if (!strcmp(word, "external")) {
        // Descriptor `b` of process `a`, of 64 MiB, as if received over a socket.
        char path[64];
        snprintf(path, sizeof path, "/proc/%llu/fd/%llu", a, b);
        FILE *opened = fopen(path, "w");
        result = opened ? import_external(dup(fileno(opened)), 64 << 20) : -1;
        if (opened) fclose(opened);
    } else if (!strcmp(word, "ipcopen")) {
        char hex[160] = "";
        sscanf(line, "%*s %*s %159s", hex);
        result = open_ipc(first, hex, &pointer);
        mapped = pointer;
    } else if (!strcmp(word, "ipcclose")) result = CALL(cuIpcCloseMemHandle, (Pointer), mapped);
    else if (!strcmp(word, "destroyexternal")) result = CALL(cuDestroyExternalMemory, (Handle), external);
    else if (!strcmp(word, "checkpoint")) {
        // Calls the named function for process `a`.
        sscanf(line, "%*s %*s %llu", &a);
        result = ((Result(*)(int, void *))function(first))((int)a, NULL);
    } else if (!strcmp(word, "pool")) result = make_pool((int)a, (int)b);
    else if (!strcmp(word, "hostpool")) {
        int location[2] = {2, 0};
        result = CALL(cuMemGetDefaultMemPool, (Pointer *, void *, int), &pool, location, 1);
    } else if (!strcmp(word, "frompool")) result = CALL(cuMemAllocFromPoolAsync, (Pointer *, size_t, Pointer, Handle), &pointer, a, pool, NULL);
    printf("%d %llu\n", result, pointer);
}

int main(void) {
    // Ends with the test, however that ends.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!cuda) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    char line[512];
    while (fgets(line, sizeof line, stdin)) run(line);
    return 0;
}
