// The program under test in libvgpu's tests. Each line on standard input is a command, answered with one line that
// begins with the driver's result.
//
// The first argument is the way to resolve functions: `dlsym`, `procaddress` (all functions except cuGetProcAddress
// through cuGetProcAddress), or `next` (dlsym with RTLD_NEXT after the library was loaded globally). `open=NAME` is
// `dlsym` in the library of that name.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../../tests/gpu-tenants/symbol.h"

typedef int Result;
typedef unsigned long long Pointer;

static void *cuda, *nvml;
static const char *route;
static Result (*get_proc_address)(const char *, void **, int, uint64_t, int *);

static void *function(const char *name) {
    if (!strcmp(route, "next")) return dlsym(RTLD_NEXT, name);
    if (strcmp(route, "procaddress")) return dlsym(cuda, name);
    // The base name and the newest version, as the CUDA runtime does.
    char base[128];
    snprintf(base, sizeof base, "%s", name);
    uint64_t flags = 0;
    size_t length = strlen(base);
    if (length > 5 && !strcmp(base + length - 5, "_ptsz")) {
        base[length - 5] = 0;
        flags = 2;
        length -= 5;
    }
    if (length > 3 && base[length - 3] == '_' && base[length - 2] == 'v') base[length - 3] = 0;
    void *found = NULL;
    int status = 0;
    if (get_proc_address(base, &found, 12080, flags, &status)) return NULL;
    return found;
}

#define CALL(name, types, ...)                                             \
    ({                                                                     \
        Result (*call) types = (Result(*) types)function(#name);           \
        call ? call(__VA_ARGS__) : -1;                                     \
    })

#define SLOTS 65536
static Pointer slots[SLOTS];
static int used;

static void answer_slot(Result result, Pointer pointer) {
    if (result == 0) slots[used] = pointer;
    printf("%d %d %llu\n", result, result == 0 ? used++ : -1, pointer);
}

// In two steps, because the evaluation order of arguments is undefined.
#define ANSWER(call)                  \
    do {                              \
        Result result = (call);       \
        answer_slot(result, pointer); \
    } while (0)

static void *allocate_forever(void *argument) {
    Pointer size = (Pointer)(uintptr_t)argument, count = 0;
    Result (*set)(void *) = (Result(*)(void *))function("cuCtxSetCurrent");
    set((void *)(uintptr_t)slots[0]);
    for (;;) {
        Pointer pointer;
        if (CALL(cuMemAlloc_v2, (Pointer *, size_t), &pointer, size)) break;
        count++;
    }
    return (void *)(uintptr_t)count;
}

struct ArrayDescriptor { size_t width, height, depth; unsigned format, channels, flags; };
struct Properties { int type, handles, location_type, location; void *win32; unsigned char flags[8]; };
struct Handle { unsigned char bytes[64]; };
struct Memory { unsigned long long total, free, used; };
struct Memory2 { unsigned version; unsigned long long total, reserved, free, used; };

static void *nvml_function(const char *name) { return dlsym(nvml, name); }

static void nvml_memory(int device, int version) {
    if (!nvml) {
        nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        if (!nvml) { printf("-1 %s\n", dlerror()); return; }
        ((int (*)(void))nvml_function("nvmlInit_v2"))();
    }
    void *handle = NULL;
    int (*by_index)(unsigned, void **) = (int (*)(unsigned, void **))nvml_function("nvmlDeviceGetHandleByIndex_v2");
    int result = by_index(device, &handle);
    if (result) { printf("%d\n", result); return; }
    if (version == 1) {
        struct Memory memory = {0};
        result = ((int (*)(void *, struct Memory *))nvml_function("nvmlDeviceGetMemoryInfo"))(handle, &memory);
        printf("%d %llu %llu %llu\n", result, memory.total, memory.free, memory.used);
    } else {
        struct Memory2 memory = {.version = sizeof memory | 2u << 24};
        result = ((int (*)(void *, struct Memory2 *))nvml_function("nvmlDeviceGetMemoryInfo_v2"))(handle, &memory);
        printf("%d %llu %llu %llu %llu\n", result, memory.total, memory.free, memory.used, memory.reserved);
    }
}

static void object_of(void *address) {
    Dl_info info;
    if (!address) printf("0 none\n");
    else if (dladdr(address, &info)) printf("0 %s\n", strrchr(info.dli_fname, '/') ? strrchr(info.dli_fname, '/') + 1 : info.dli_fname);
    else printf("0 unknown\n");
}

// A library that is loaded with RTLD_DEEPBIND and calls the driver itself; built from plugin.c.
static Result (*plugin_allocate)(unsigned long long);

static int by_size(const void *left, const void *right) {
    unsigned a = *(const unsigned *)left, b = *(const unsigned *)right;
    return (a > b) - (a < b);
}

#include "image.h"

// Writes an image to a new file, whose name replaces the pattern at `path`.
static void write_image(char *path, struct Image image) {
    int file = mkstemp(path);
    if (file < 0 || write(file, image.start, image.length) < 0) perror(path);
    close(file);
}

static void forbid(const char *name);

static void run(char *line) {
    char word[64] = "", name[128] = "";
    unsigned long long a = 0, b = 0, c = 0, d = 0, e = 0;
    sscanf(line, "%63s %llu %llu %llu %llu %llu", word, &a, &b, &c, &d, &e);
    Pointer pointer = 0;
    if (!strcmp(word, "init")) {
        void *context = NULL;
        int device = (int)a;
        Result result = CALL(cuInit, (unsigned), 0);
        if (!result) result = CALL(cuDeviceGet, (int *, int), &device, (int)a);
        if (!result) result = CALL(cuDevicePrimaryCtxRetain, (void **, int), &context, device);
        if (!result) result = CALL(cuCtxSetCurrent, (void *), context);
        answer_slot(result, (Pointer)(uintptr_t)context);
    } else if (!strcmp(word, "initonly")) {
        printf("%d\n", CALL(cuInit, (unsigned), 0));
    } else if (!strcmp(word, "alloc")) {
        ANSWER(CALL(cuMemAlloc_v2, (Pointer *, size_t), &pointer, a));
    } else if (!strcmp(word, "alloc1")) {
        unsigned small = 0;
        Result result = CALL(cuMemAlloc, (unsigned *, unsigned), &small, (unsigned)a);
        answer_slot(result, small);
    } else if (!strcmp(word, "free1")) {
        printf("%d\n", CALL(cuMemFree, (unsigned), (unsigned)slots[a]));
    } else if (!strcmp(word, "managed")) {
        ANSWER(CALL(cuMemAllocManaged, (Pointer *, size_t, unsigned), &pointer, a, 1));
    } else if (!strcmp(word, "pitch")) {
        size_t pitch;
        ANSWER(CALL(cuMemAllocPitch_v2, (Pointer *, size_t *, size_t, size_t, unsigned), &pointer, &pitch, a, b, 4));
    } else if (!strcmp(word, "async")) {
        ANSWER(CALL(cuMemAllocAsync, (Pointer *, size_t, void *), &pointer, a, NULL));
    } else if (!strcmp(word, "async_ptsz")) {
        ANSWER(CALL(cuMemAllocAsync_ptsz, (Pointer *, size_t, void *), &pointer, a, NULL));
    } else if (!strcmp(word, "asyncin")) {
        ANSWER(CALL(cuMemAllocAsync, (Pointer *, size_t, Pointer), &pointer, a, slots[b]));
    } else if (!strcmp(word, "freein")) {
        printf("%d\n", CALL(cuMemFreeAsync, (Pointer, Pointer), slots[a], slots[b]));
    } else if (!strcmp(word, "stream")) {
        ANSWER(CALL(cuStreamCreate, (Pointer *, unsigned), &pointer, 1));
    } else if (!strcmp(word, "destroystream")) {
        printf("%d\n", CALL(cuStreamDestroy_v2, (Pointer), slots[a]));
    } else if (!strcmp(word, "stall")) {
        // Makes stream `a` wait until the word at `b` is 1.
        printf("%d\n", CALL(cuStreamWaitValue32_v2, (Pointer, Pointer, unsigned, unsigned), slots[a], slots[b], 1, 1));
    } else if (!strcmp(word, "set")) {
        // The memory of the simulated GPU is memory of the process.
        *(volatile unsigned *)(uintptr_t)slots[a] = 1;
        printf("0\n");
    } else if (!strcmp(word, "freeasync")) {
        printf("%d\n", CALL(cuMemFreeAsync, (Pointer, void *), slots[a], NULL));
    } else if (!strcmp(word, "pool")) {
        struct Properties properties = {1, (int)b, 1, (int)a, NULL, {0}};
        char padded[88] = {0};
        memcpy(padded, &properties, 16);
        ANSWER(CALL(cuMemPoolCreate, (Pointer *, void *), &pointer, padded));
    } else if (!strcmp(word, "defaultpool")) {
        ANSWER(CALL(cuDeviceGetDefaultMemPool, (Pointer *, int), &pointer, (int)a));
    } else if (!strcmp(word, "frompool")) {
        ANSWER(CALL(cuMemAllocFromPoolAsync, (Pointer *, size_t, Pointer, void *), &pointer, a, slots[b], NULL));
    } else if (!strcmp(word, "destroypool")) {
        printf("%d\n", CALL(cuMemPoolDestroy, (Pointer), slots[a]));
    } else if (!strcmp(word, "keep")) {
        // Sets the release threshold of the current pool.
        void *pool = NULL;
        uint64_t threshold = a;
        Result result = CALL(cuDeviceGetMemPool, (void **, int), &pool, 0);
        if (!result) result = CALL(cuMemPoolSetAttribute, (void *, int, void *), pool, 4, &threshold);
        printf("%d\n", result);
    } else if (!strcmp(word, "policy")) {
        // Sets a reuse policy of the current pool.
        void *pool = NULL;
        int allows = (int)b;
        Result result = CALL(cuDeviceGetMemPool, (void **, int), &pool, 0);
        if (!result) result = CALL(cuMemPoolSetAttribute, (void *, int, void *), pool, (int)a, &allows);
        printf("%d\n", result);
    } else if (!strcmp(word, "highest")) {
        // The peak reservation of the current pool since the last query.
        void *pool = NULL;
        uint64_t highest = 0, none = 0;
        Result result = CALL(cuDeviceGetMemPool, (void **, int), &pool, 0);
        if (!result) result = CALL(cuMemPoolGetAttribute, (void *, int, void *), pool, 6, &highest);
        if (!result) result = CALL(cuMemPoolSetAttribute, (void *, int, void *), pool, 6, &none);
        printf("%d %llu\n", result, (unsigned long long)highest);
    } else if (!strcmp(word, "sync")) {
        printf("%d\n", CALL(cuCtxSynchronize, (void)));
    } else if (!strcmp(word, "free")) {
        printf("%d\n", CALL(cuMemFree_v2, (Pointer), slots[a]));
    } else if (!strcmp(word, "freeraw")) {
        printf("%d\n", CALL(cuMemFree_v2, (Pointer), a));
    } else if (!strcmp(word, "array")) {
        // Elements along each side, channels, and the format; 0 means FLOAT.
        struct ArrayDescriptor descriptor = {a, b, c, e ? (unsigned)e : 0x20, d ? d : 1, 0};
        ANSWER(CALL(cuArray3DCreate_v2, (Pointer *, struct ArrayDescriptor *), &pointer, &descriptor));
    } else if (!strcmp(word, "sparse")) {
        // 1024 × 1024 elements of 4 bytes, without memory.
        struct ArrayDescriptor descriptor = {1024, 1024, 0, 0x20, 1, 0x40};
        ANSWER(CALL(cuArray3DCreate_v2, (Pointer *, struct ArrayDescriptor *), &pointer, &descriptor));
    } else if (!strcmp(word, "tiles") || !strcmp(word, "untile")) {
        // Maps memory `b` to `d` rows of tiles of the sparse array `a` from row `c`, each 128 elements high; or unmaps
        // them.
        int unmaps = *word == 'u';
        struct { unsigned resource_type; Pointer resource; unsigned part, padding, level, layer, x, y, z, width, height, depth, operation, memory_type; Pointer memory, offset; unsigned devices, flags, reserved[2]; }
            operation = {0, slots[a], 0, 0, 0, 0, 0, 128 * (unsigned)c, 0, 1024, 128 * (unsigned)d, 1, unmaps ? 2 : 1, 0, unmaps ? 0 : slots[b], 0, 1, 0, {0}};
        _Static_assert(sizeof operation == 96, "as in cuda.h");
        printf("%d\n", CALL(cuMemMapArrayAsync, (void *, unsigned, void *), &operation, 1, NULL));
    } else if (!strcmp(word, "mipmapped")) {
        // Elements along two sides, levels, and layers or the faces of a cube, with its flags.
        struct ArrayDescriptor descriptor = {a, b, d, 0x20, 1, (unsigned)e};
        ANSWER(CALL(cuMipmappedArrayCreate, (Pointer *, struct ArrayDescriptor *, unsigned), &pointer, &descriptor, c));
    } else if (!strcmp(word, "object")) {
        // A multicast object of devices 0 and 1, to which the first `b` bytes of memory `a` are bound.
        struct { unsigned devices; size_t bytes; uint64_t handles, flags; } properties = {2, b, 0, 0};
        Result result = CALL(cuMulticastCreate, (Pointer *, void *), &pointer, &properties);
        for (int device = 0; device < 2 && !result; device++) result = CALL(cuMulticastAddDevice, (Pointer, int), pointer, device);
        if (!result) result = CALL(cuMulticastBindMem, (Pointer, size_t, Pointer, size_t, size_t, uint64_t), pointer, 0, slots[a], 0, b, 0);
        ANSWER(result);
    } else if (!strcmp(word, "destroyarray")) {
        printf("%d\n", CALL(cuArrayDestroy, (Pointer), slots[a]));
    } else if (!strcmp(word, "destroymipmapped")) {
        printf("%d\n", CALL(cuMipmappedArrayDestroy, (Pointer), slots[a]));
    } else if (!strcmp(word, "create")) {
        struct Properties properties = {1, (int)c, 1, (int)b, NULL, {0}};
        ANSWER(CALL(cuMemCreate, (Pointer *, size_t, struct Properties *, uint64_t), &pointer, a, &properties, 0));
    } else if (!strcmp(word, "module")) {
        // A module with global variables of `a` bytes, loaded by function `b` from an image of form `c`.
        char path[] = "/tmp/drava-module-XXXXXX";
        struct Image made = make_image(a, (enum Form)c);
        const void *image = made.start;
        if (b == 3) write_image(path, made);
        ANSWER(b == 1   ? CALL(cuModuleLoadDataEx, (Pointer *, const void *, unsigned, int *, void **), &pointer, image, 0, NULL, NULL)
               : b == 2 ? CALL(cuModuleLoadFatBinary, (Pointer *, const void *), &pointer, image)
               : b == 3 ? CALL(cuModuleLoad, (Pointer *, const char *), &pointer, path)
                        : CALL(cuModuleLoadData, (Pointer *, const void *), &pointer, image));
        if (b == 3) unlink(path);
    } else if (!strcmp(word, "linked")) {
        // A module with the global variables of two linked images, each of `a` bytes.
        struct Image image = make_image(a, PTX);
        void *link = NULL, *linked = NULL;
        size_t size = 0;
        Result result = CALL(cuLinkCreate_v2, (unsigned, int *, void **, void **), 0, NULL, NULL, &link);
        for (int i = 0; !result && i < 2; i++) {
            result = CALL(cuLinkAddData_v2, (void *, int, void *, size_t, const char *, unsigned, int *, void **), link, 1, (void *)image.start, image.length, NULL, 0, NULL, NULL);
        }
        if (!result) result = CALL(cuLinkComplete, (void *, void **, size_t *), link, &linked, &size);
        if (!result) result = CALL(cuModuleLoadData, (Pointer *, const void *), &pointer, linked);
        answer_slot(result, pointer);
        if (link) CALL(cuLinkDestroy, (void *), link);
    } else if (!strcmp(word, "unload")) {
        printf("%d\n", CALL(cuModuleUnload, (Pointer), slots[a]));
    } else if (!strcmp(word, "library")) {
        // A library with global variables of `a` bytes, from an image of form `b`, in a file if `c` is not 0.
        char path[] = "/tmp/drava-library-XXXXXX";
        struct Image image = make_image(a, (enum Form)b);
        if (c) write_image(path, image);
        ANSWER(c ? CALL(cuLibraryLoadFromFile, (Pointer *, const char *, int *, void **, unsigned, int *, void **, unsigned), &pointer, path, NULL, NULL, 0, NULL, NULL, 0)
                 : CALL(cuLibraryLoadData, (Pointer *, const void *, int *, void **, unsigned, int *, void **, unsigned), &pointer, image.start, NULL, NULL, 0, NULL, NULL, 0));
        if (c) unlink(path);
    } else if (!strcmp(word, "kernel")) {
        ANSWER(CALL(cuLibraryGetKernel, (Pointer *, Pointer, const char *), &pointer, slots[a], "any"));
    } else if (!strcmp(word, "librarymodule")) {
        ANSWER(CALL(cuLibraryGetModule, (Pointer *, Pointer), &pointer, slots[a]));
    } else if (!strcmp(word, "libraryglobal")) {
        size_t size = 0;
        ANSWER(CALL(cuLibraryGetGlobal, (Pointer *, size_t *, Pointer, const char *), &pointer, &size, slots[a], "any"));
    } else if (!strcmp(word, "libraryfunction")) {
        ANSWER(CALL(cuLibraryGetUnifiedFunction, (Pointer *, Pointer, const char *), &pointer, slots[a], "any"));
    } else if (!strcmp(word, "kernels")) {
        ANSWER(CALL(cuLibraryEnumerateKernels, (Pointer *, unsigned, Pointer), &pointer, 1, slots[a]));
    } else if (!strcmp(word, "launchkernel")) {
        Result result = CALL(cuLaunchKernel, (Pointer, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), slots[a], 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
        printf("%d\n", result);
    } else if (!strcmp(word, "unloadlibrary")) {
        printf("%d\n", CALL(cuLibraryUnload, (Pointer), slots[a]));
    } else if (!strcmp(word, "setlimit")) {
        printf("%d\n", CALL(cuCtxSetLimit, (int, size_t), (int)a, b));
    } else if (!strcmp(word, "release")) {
        printf("%d\n", CALL(cuMemRelease, (Pointer), slots[a]));
    } else if (!strcmp(word, "retain")) {
        ANSWER(CALL(cuMemRetainAllocationHandle, (Pointer *, Pointer), &pointer, slots[a]));
    } else if (!strcmp(word, "reserve")) {
        ANSWER(CALL(cuMemAddressReserve, (Pointer *, size_t, size_t, Pointer, uint64_t), &pointer, a, 0, 0, 0));
    } else if (!strcmp(word, "map")) {
        printf("%d\n", CALL(cuMemMap, (Pointer, size_t, size_t, Pointer, uint64_t), slots[a] + d, b, 0, slots[c], 0));
    } else if (!strcmp(word, "unmap")) {
        printf("%d\n", CALL(cuMemUnmap, (Pointer, size_t), slots[a], b));
    } else if (!strcmp(word, "meminfo")) {
        size_t available = 0, total = 0;
        Result result = CALL(cuMemGetInfo_v2, (size_t *, size_t *), &available, &total);
        printf("%d %zu %zu\n", result, available, total);
    } else if (!strcmp(word, "total")) {
        size_t total = 0;
        Result result = CALL(cuDeviceTotalMem_v2, (size_t *, int), &total, (int)a);
        printf("%d %zu\n", result, total);
    } else if (!strcmp(word, "nvml")) {
        nvml_memory((int)a, (int)b);
    } else if (!strcmp(word, "context")) {
        void *context = NULL;
        Result result = b == 4 ? CALL(cuCtxCreate_v4, (void **, void *, unsigned, int), &context, NULL, 0, (int)a)
                               : CALL(cuCtxCreate_v2, (void **, unsigned, int), &context, 0, (int)a);
        answer_slot(result, (Pointer)(uintptr_t)context);
    } else if (!strcmp(word, "errno")) {
        // The value of errno after an allocation of `a` bytes, granted or denied, and a query of the free memory.
        size_t available = 0, total = 0;
        Result (*allocate)(Pointer *, size_t) = (Result(*)(Pointer *, size_t))function("cuMemAlloc_v2");
        Result (*info)(size_t *, size_t *) = (Result(*)(size_t *, size_t *))function("cuMemGetInfo_v2");
        errno = 77;
        Result result = allocate(&pointer, a);
        if (!info(&available, &total)) printf("%d %d\n", result, errno);
    } else if (!strcmp(word, "setcurrent")) {
        printf("%d\n", CALL(cuCtxSetCurrent, (Pointer), slots[a]));
    } else if (!strcmp(word, "attach")) {
        ANSWER(CALL(cuCtxAttach, (Pointer *, unsigned), &pointer, 0));
    } else if (!strcmp(word, "detach")) {
        printf("%d\n", CALL(cuCtxDetach, (void *), (void *)(uintptr_t)slots[a]));
    } else if (!strcmp(word, "destroy")) {
        printf("%d\n", CALL(cuCtxDestroy_v2, (void *), (void *)(uintptr_t)slots[a]));
    } else if (!strcmp(word, "releaseprimary")) {
        printf("%d\n", CALL(cuDevicePrimaryCtxRelease_v2, (int), (int)a));
    } else if (!strcmp(word, "threads")) {
        // `a` threads allocate `b` bytes repeatedly until denied; prints the number of allocations of all threads.
        pthread_t threads[64];
        Pointer sum = 0;
        for (unsigned i = 0; i < a; i++) pthread_create(&threads[i], NULL, allocate_forever, (void *)(uintptr_t)b);
        for (unsigned i = 0; i < a; i++) {
            void *count;
            pthread_join(threads[i], &count);
            sum += (Pointer)(uintptr_t)count;
        }
        printf("0 %llu\n", sum);
    } else if (!strcmp(word, "denials")) {
        // Makes `b` requests for `a` bytes, which must be denied; prints the median, mean and 99.9th percentile of
        // their time in nanoseconds, and the time of an empty measurement.
        Result (*allocate)(Pointer *, size_t) = (Result(*)(Pointer *, size_t))function("cuMemAlloc_v2");
        unsigned *took = calloc(b, sizeof *took);
        Result result = 0;
        double sum = 0;
        for (Pointer i = 0; i < b; i++) {
            struct timespec before, after;
            clock_gettime(CLOCK_MONOTONIC, &before);
            Result one = allocate(&pointer, a);
            clock_gettime(CLOCK_MONOTONIC, &after);
            if (one != 2) result = one ? one : -1;
            took[i] = (unsigned)((after.tv_sec - before.tv_sec) * 1000000000 + after.tv_nsec - before.tv_nsec);
            sum += took[i];
        }
        qsort(took, b, sizeof *took, by_size);
        unsigned empty = ~0u;
        for (int i = 0; i < 1000; i++) {
            struct timespec before, after;
            clock_gettime(CLOCK_MONOTONIC, &before);
            clock_gettime(CLOCK_MONOTONIC, &after);
            unsigned one = (unsigned)(after.tv_nsec - before.tv_nsec);
            if (one < empty) empty = one;
        }
        printf("%d %u %.0f %u %u\n", result, took[b / 2], sum / (double)b, took[b - 1 - b / 1000], empty);
        free(took);
    } else if (!strcmp(word, "fork")) {
        // The child continues in place of the parent; the parent waits and keeps its memory.
        pid_t child = fork();
        if (child > 0) {
            int status;
            waitpid(child, &status, 0);
            _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 111);
        }
        printf("0 %d\n", (int)getpid());
    } else if (!strcmp(word, "forkidle")) {
        // The child idles and outlives its parent.
        pid_t child = fork();
        if (child == 0) {
            alarm(120);
            pause();
            _exit(0);
        }
        printf("0 %d\n", (int)child);
    } else if (!strcmp(word, "namespace")) {
        // From now on uses a copy of the library in a separate namespace, in addition to the first copy.
        void *other = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
        if (other) cuda = other;
        printf("%d\n", other ? 0 : -1);
    } else if (!strcmp(word, "reopen")) {
        // Closes the library as many times as it was opened, and opens it again.
        for (Pointer i = 0; i < a; i++) dlclose(cuda);
        cuda = dlopen("libcuda.so.1", RTLD_NOW);
        printf("%d\n", cuda ? 0 : -1);
    } else if (!strcmp(word, "plugin")) {
        printf("%d\n", plugin_allocate(a));
    } else if (!strcmp(word, "export")) {
        int exported = -1;
        Result result = CALL(cuMemExportToShareableHandle, (void *, Pointer, int, uint64_t), &exported, slots[a], 1, 0);
        printf("%d %d\n", result, exported);
    } else if (!strcmp(word, "import")) {
        // Descriptor `b` of process `a`, as if received over a socket.
        char path[64];
        snprintf(path, sizeof path, "/proc/%llu/fd/%llu", a, b);
        int imported = open(path, O_WRONLY | O_CLOEXEC);
        ANSWER(CALL(cuMemImportFromShareableHandle, (Pointer *, void *, int), &pointer, (void *)(uintptr_t)imported, 1));
        close(imported);
    } else if (!strcmp(word, "close")) {
        printf("%d\n", close((int)a));
    } else if (!strcmp(word, "exportpool")) {
        int exported = -1;
        Result result = CALL(cuMemPoolExportToShareableHandle, (void *, Pointer, int, uint64_t), &exported, slots[a], 1, 0);
        printf("%d %d\n", result, exported);
    } else if (!strcmp(word, "importpool")) {
        // Descriptor `b` of process `a`, as if received over a socket.
        char path[64];
        snprintf(path, sizeof path, "/proc/%llu/fd/%llu", a, b);
        int imported = open(path, O_RDWR | O_CLOEXEC);
        ANSWER(CALL(cuMemPoolImportFromShareableHandle, (Pointer *, void *, int, uint64_t), &pointer, (void *)(uintptr_t)imported, 1, 0));
        close(imported);
    } else if (!strcmp(word, "exportpointer")) {
        struct Handle data;
        Result result = CALL(cuMemPoolExportPointer, (struct Handle *, Pointer), &data, slots[a]);
        printf("%d ", result);
        for (size_t i = 0; i < sizeof data.bytes; i++) printf("%02x", data.bytes[i]);
        printf("\n");
    } else if (!strcmp(word, "importpointer")) {
        struct Handle data;
        char hex[160] = "";
        sscanf(line, "%63s %llu %159s", word, &a, hex);
        for (size_t i = 0; i < sizeof data.bytes; i++) sscanf(hex + 2 * i, "%2hhx", &data.bytes[i]);
        ANSWER(CALL(cuMemPoolImportPointer, (Pointer *, Pointer, struct Handle *), &pointer, slots[a], &data));
    } else if (!strcmp(word, "ipcget")) {
        struct Handle handle;
        Result result = CALL(cuIpcGetMemHandle, (struct Handle *, Pointer), &handle, slots[a]);
        printf("%d ", result);
        for (size_t i = 0; i < sizeof handle.bytes; i++) printf("%02x", handle.bytes[i]);
        printf("\n");
    } else if (!strcmp(word, "ipcopen")) {
        struct Handle handle;
        char hex[160] = "";
        sscanf(line, "%63s %159s", word, hex);
        for (size_t i = 0; i < sizeof handle.bytes; i++) sscanf(hex + 2 * i, "%2hhx", &handle.bytes[i]);
        ANSWER(CALL(cuIpcOpenMemHandle_v2, (Pointer *, struct Handle, unsigned), &pointer, handle, 1));
    } else if (!strcmp(word, "ipcclose")) {
        printf("%d\n", CALL(cuIpcCloseMemHandle, (Pointer), slots[a]));
    } else if (!strcmp(word, "graph")) {
        // `a` allocation nodes of `b` bytes, each with a free node if `c` is not 0, uploaded at instantiation if `d` is
        // not 0; answers with the executable graph.
        void *graph = NULL, *exec = NULL, *node = NULL, *before = NULL;
        Result result = CALL(cuGraphCreate, (void **, unsigned), &graph, 0);
        for (Pointer i = 0; !result && i < a; i++) {
            struct { struct Properties properties; char rest[56]; void *access; size_t count, bytes; Pointer pointer; } allocation;
            _Static_assert(sizeof allocation == 120, "as in cuda.h");
            memset(&allocation, 0, sizeof allocation);
            allocation.properties = (struct Properties){1, 0, 1, 0, NULL, {0}};
            allocation.bytes = b;
            result = CALL(cuGraphAddMemAllocNode, (void **, void *, void **, size_t, void *), &node, graph, before ? &before : NULL, before ? 1 : 0, &allocation);
            before = node;
            if (!result && c) {
                result = CALL(cuGraphAddMemFreeNode, (void **, void *, void **, size_t, Pointer), &node, graph, &before, 1, allocation.pointer);
                before = node;
            }
        }
        struct { unsigned long long flags; void *stream, *error_node; int result; } parameters = {d ? 2 : 0, NULL, NULL, -1};
        if (!result) {
            result = CALL(cuGraphInstantiateWithParams, (void **, void *, void *), &exec, graph, &parameters);
            if (!result != !parameters.result) result = -1;
        }
        answer_slot(result, (Pointer)(uintptr_t)exec);
    } else if (!strcmp(word, "capture")) {
        // Begins to capture a new stream in global mode; answers with the stream.
        Result result = CALL(cuStreamCreate, (Pointer *, unsigned), &pointer, 1);
        if (!result) result = CALL(cuStreamBeginCapture_v2, (Pointer, int), pointer, 0);
        answer_slot(result, pointer);
    } else if (!strcmp(word, "endcapture")) {
        void *graph = NULL;
        printf("%d\n", CALL(cuStreamEndCapture, (Pointer, void **), slots[a], &graph));
    } else if (!strcmp(word, "launch")) {
        printf("%d\n", CALL(cuGraphLaunch, (void *, void *), (void *)(uintptr_t)slots[a], NULL));
    } else if (!strcmp(word, "launchat")) {
        // By the address `b` of the driver's function.
        Result (*launch)(void *, void *) = (Result(*)(void *, void *))(uintptr_t)b;
        printf("%d\n", launch((void *)(uintptr_t)slots[a], NULL));
    } else if (!strcmp(word, "launchin")) {
        printf("%d\n", CALL(cuGraphLaunch, (void *, Pointer), (void *)(uintptr_t)slots[a], slots[b]));
    } else if (!strcmp(word, "destroyexec")) {
        printf("%d\n", CALL(cuGraphExecDestroy, (void *), (void *)(uintptr_t)slots[a]));
    } else if (!strcmp(word, "vfork")) {
        pid_t child = vfork();
        if (child == 0) {
            execl("/bin/true", "true", NULL);
            _exit(111);
        }
        int status = 1;
        waitpid(child, &status, 0);
        printf("%d\n", status);
    } else if (!strcmp(word, "vforklookup")) {
        // The child, which shares its parent's memory, looks up a driver function.
        pid_t child = vfork();
        if (child == 0) _exit(function("cuMemAlloc_v2") ? 0 : 111);
        int status = 1;
        waitpid(child, &status, 0);
        printf("%d\n", status);
    } else if (!strcmp(word, "allocat")) {
        // By an address from the library's own symbol table.
        Result (*allocate)(Pointer *, size_t) = (Result(*)(Pointer *, size_t))(uintptr_t)a;
        ANSWER(allocate(&pointer, b));
    } else if (!strcmp(word, "addressof")) {
        // The address of a libcuda.so.1 function, from the loader's list and the library's symbols.
        sscanf(line, "%63s %127s", word, name);
        printf("0 %llu\n", (Pointer)(uintptr_t)symbol_of(cuda, name));
    } else if (!strcmp(word, "closeregion")) {
        // Closes the region's descriptors, and reuses their numbers for another file.
        int closed = 0;
        FILE *other = tmpfile();
        for (int fd = 3; fd < 1024; fd++) {
            char link[64], path[512];
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
            ssize_t length = readlink(link, path, sizeof path - 1);
            if (length < 0) continue;
            path[length] = 0;
            if (!strstr(path, "/usage/region")) continue;
            dup2(fileno(other), fd);
            closed++;
        }
        printf("%d %d\n", closed ? 0 : -1, closed);
    } else if (!strcmp(word, "exec")) {
        char *arguments[] = {"/proc/self/exe", (char *)route, NULL};
        execv(arguments[0], arguments);
        printf("-1\n");
    } else if (!strcmp(word, "lookup")) {
        sscanf(line, "%63s %127s", word, name);
        object_of(function(name));
    } else if (!strcmp(word, "default")) {
        sscanf(line, "%63s %127s", word, name);
        object_of(dlsym(RTLD_DEFAULT, name));
    } else if (!strcmp(word, "procaddress")) {
        // Name, CUDA version, flags.
        sscanf(line, "%63s %127s %llu %llu", word, name, &a, &b);
        void *found = NULL;
        int status = 0;
        Result result = get_proc_address(name, &found, (int)a, b, &status);
        if (result) printf("%d\n", result);
        else if (!found) printf("%d none\n", status);
        else {
            Dl_info info;
            dladdr(found, &info);
            const char *file = strrchr(info.dli_fname, '/');
            printf("0 %s %s\n", file ? file + 1 : info.dli_fname, info.dli_sname ? info.dli_sname : "?");
        }
    } else if (!strcmp(word, "forbidmemory")) {
        // As if the process could map no more.
        forbid("memory");
        printf("0\n");
    } else {
        printf("-1 unknown command\n");
    }
}

// System calls that a sandbox forbids: they fail with EPERM. The arguments distinguish libvgpu's calls from the
// driver's.
static const struct Forbidden { const char *name; int call, argument; unsigned value; } forbidden[] = {
    {"inessential", SYS_fallocate, -1, 0},
    {"inessential", SYS_fchmod, -1, 0},
    {"inessential", SYS_sched_yield, -1, 0},
    {"inessential", SYS_unlinkat, -1, 0},
    {"directory", SYS_getdents64, -1, 0},
    {"status", SYS_fstat, -1, 0},
    {"open", SYS_openat, 2, O_RDWR | O_NOFOLLOW | O_CLOEXEC},
    {"open", SYS_openat, 2, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_CREAT},
    {"map", SYS_mmap, 1, 266240},
    {"memory", SYS_mmap, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE},
    {"lock", SYS_fcntl, 1, F_OFD_SETLK},
    {"rundir", SYS_openat, 2, O_RDONLY | O_DIRECTORY | O_CLOEXEC},
};

static void forbid(const char *name) {
    struct sock_filter filter[64];
    int at = 0;
    for (size_t i = 0; i < sizeof forbidden / sizeof *forbidden; i++) {
        const struct Forbidden *one = &forbidden[i];
        if (strcmp(one->name, name)) continue;
        filter[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
        filter[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)one->call, 0, one->argument < 0 ? 1 : 3);
        if (one->argument >= 0) {
            size_t place = offsetof(struct seccomp_data, args) + 8 * (size_t)one->argument;
            filter[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)place);
            filter[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, one->value, 0, 1);
        }
        filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    }
    if (!at) {
        fprintf(stderr, "unknown set of system calls %s\n", name);
        exit(1);
    }
    filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {(unsigned short)at, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        perror("seccomp");
        exit(1);
    }
}

int main(int count, char **arguments) {
    // Ends with the test, however that ends.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    route = count > 1 ? arguments[1] : "dlsym";
    setvbuf(stdout, NULL, _IOLBF, 0);
    // Unbuffered, so that commands after `exec` remain for the next program.
    setvbuf(stdin, NULL, _IONBF, 0);
    if (!strcmp(route, "restricted")) forbid("inessential");
    if (getenv("TEST_PROCESS_FORBIDS")) forbid(getenv("TEST_PROCESS_FORBIDS"));
    const char *library = strncmp(route, "open=", 5) ? "libcuda.so.1" : route + 5;
    if (!strcmp(route, "dlmopen")) cuda = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
    else cuda = dlopen(library, RTLD_NOW | (strcmp(route, "next") ? RTLD_LOCAL : RTLD_GLOBAL));
    if (!cuda) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    if (count > 2) {
        void *plugin = dlopen(arguments[2], RTLD_NOW | RTLD_DEEPBIND);
        if (plugin) *(void **)&plugin_allocate = dlsym(plugin, "plugin_allocate");
        if (!plugin_allocate) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
    }
    struct rlimit files, none;
    getrlimit(RLIMIT_NOFILE, &files);
    none = files;
    none.rlim_cur = 3;
    // Looks up the first function while the process cannot open files.
    if (getenv("TEST_PROCESS_WITHOUT_DESCRIPTORS")) setrlimit(RLIMIT_NOFILE, &none);
    *(void **)&get_proc_address = dlsym(cuda, "cuGetProcAddress_v2");
    setrlimit(RLIMIT_NOFILE, &files);
    char line[256];
    while (fgets(line, sizeof line, stdin)) run(line);
    return 0;
}
