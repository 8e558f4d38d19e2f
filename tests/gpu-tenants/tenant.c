// A tenant of a GPU, for libvgpu's compute tests and benchmarks: runs GPU work on command. Each line on standard input
// is a command, answered with one line that begins with the driver's result.
//
// The first argument is the way to resolve functions: `dlsym`, or `ptsz` (dlsym, per-thread default streams).

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hami_baseline.h"
#include "symbol.h"

typedef int Result;
typedef unsigned long long Pointer;
typedef void *Handle;

static void *cuda;
static const char *route;

static void *function(const char *name) {
    char variant[128];
    snprintf(variant, sizeof variant, "%s_ptsz", name);
    void *found = !strcmp(route, "ptsz") ? dlsym(cuda, variant) : NULL;
    return found ? found : dlsym(cuda, name);
}

#define CALL(name, types, ...)                                             \
    ({                                                                     \
        static Result(*call) types;                                        \
        if (!call) *(void **)&call = function(#name);                      \
        call ? call(__VA_ARGS__) : -1;                                     \
    })

struct Config {
    unsigned grid[3], block[3], shared;
    Handle stream;
    void *attributes;
    unsigned count;
};

static Handle context, spin, noop;
static Pointer memory, memory2;

static Result launch_kernel(Handle kernel, Handle stream, uint64_t ns, unsigned blocks) {
    void *parameters[] = {&ns, NULL};
    return CALL(cuLaunchKernel, (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **),
                kernel, blocks, 1, 1, 256, 1, 1, 0, stream, parameters, NULL);
}

// The kind of the repeated launch.
enum Kind { KERNEL, EX, COOPERATIVE, FILL, COPY, GRAPH, KINDS };
static const char *const kind_names[KINDS] = {"kernel", "ex", "cooperative", "fill", "copy", "graph"};

#define MOST 64
struct Load {
    enum Kind kind;
    uint64_t ns[MOST];  // durations in turn; bytes for fills and copies
    int lengths;
    int streams;        // used in turn
    int depth;          // launches in flight; 0: synchronize after each
    unsigned blocks;
    unsigned block_us;  // if not 0, kernels run in waves of blocks of this duration, instead of `blocks`
    int burst, idle_ms; // idle time after this number of launches
    int graph_kernels;
    int random;         // random durations instead of in turn
    int plain;          // only launches, at the pace of their durations
};
static struct Load load;
static volatile int running;
static volatile uint64_t launched;
static volatile Result failure;
static pthread_t worker;
static int has_worker;

// Blocks of 256 threads that run at once on 132 multiprocessors of 2,048 threads.
#define WAVE 1056

static unsigned blocks_of(uint64_t ns) {
    if (!load.block_us) return load.blocks;
    uint64_t waves = ns / (load.block_us * 1000ull);
    return WAVE * (waves ? waves : 1);
}

static Result launch(Handle stream, uint64_t ns, Handle graph) {
    struct Config config = {{load.blocks, 1, 1}, {256, 1, 1}, 0, stream, NULL, 0};
    void *parameters[] = {&ns, NULL};
    switch (load.kind) {
    case KERNEL: return launch_kernel(spin, stream, ns, blocks_of(ns));
    case EX:
        return CALL(cuLaunchKernelEx, (struct Config *, Handle, void **, void **), &config, spin, parameters, NULL);
    case COOPERATIVE:
        return CALL(cuLaunchCooperativeKernel, (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **),
                    spin, load.blocks, 1, 1, 256, 1, 1, 0, stream, parameters);
    case FILL: return CALL(cuMemsetD8Async, (Pointer, unsigned char, size_t, Handle), memory, 1, ns, stream);
    case COPY: return CALL(cuMemcpyDtoDAsync_v2, (Pointer, Pointer, size_t, Handle), memory2, memory, ns, stream);
    case GRAPH: return CALL(cuGraphLaunch, (Handle, Handle), graph, stream);
    default: return -1;
    }
}

// A graph of `count` kernels of `ns` nanoseconds each, made by capture.
static Result make_graph(Handle *exec, uint64_t ns, int count) {
    Handle stream = NULL, graph = NULL;
    Result result = CALL(cuStreamCreate, (Handle *, unsigned), &stream, 1);
    if (!result) result = CALL(cuStreamBeginCapture_v2, (Handle, int), stream, 0);
    for (int i = 0; !result && i < count; i++) result = launch_kernel(spin, stream, ns, load.blocks);
    if (!result) result = CALL(cuStreamEndCapture, (Handle, Handle *), stream, &graph);
    if (!result) result = CALL(cuGraphInstantiateWithFlags, (Handle *, Handle, unsigned long long), exec, graph, 0);
    return result;
}

#define CHECK(call)                    \
    do {                               \
        Result checked = (call);       \
        if (checked) {                 \
            failure = checked;         \
            return NULL;               \
        }                              \
    } while (0)

static void *work(void *unused) {
    (void)unused;
    Handle streams[16] = {NULL}, graph = NULL;
    static Handle events[4096];
    unsigned seed = 1;
    CHECK(CALL(cuCtxSetCurrent, (Handle), context));
    for (int i = 0; i < load.streams; i++) CHECK(CALL(cuStreamCreate, (Handle *, unsigned), &streams[i], 1));
    for (int i = 0; i < load.depth; i++)
        if (!events[i]) CHECK(CALL(cuEventCreate, (Handle *, unsigned), &events[i], 2));
    if (load.kind == GRAPH) CHECK(make_graph(&graph, load.ns[0], load.graph_kernels));
    for (uint64_t i = 0; running; i++) {
        Handle stream = load.streams ? streams[i % load.streams] : NULL;
        int which = load.random ? rand_r(&seed) % load.lengths : (int)(i % load.lengths);
        if (load.plain) {
            CHECK(launch(stream, load.ns[which], graph));
            launched++;
            usleep(load.ns[which] / 1000);
            continue;
        }
        if (load.depth && i >= (uint64_t)load.depth) CHECK(CALL(cuEventSynchronize, (Handle), events[i % load.depth]));
        hami_before_launch(blocks_of(load.ns[which]));
        CHECK(launch(stream, load.ns[which], graph));
        if (load.depth) CHECK(CALL(cuEventRecord, (Handle, Handle), events[i % load.depth], stream));
        else CHECK(CALL(cuStreamSynchronize, (Handle), stream));
        launched++;
        if (load.burst && (i + 1) % load.burst == 0) {
            CHECK(CALL(cuCtxSynchronize, (void)));
            usleep(load.idle_ms * 1000);
        }
    }
    CHECK(CALL(cuCtxSynchronize, (void)));
    return NULL;
}

static Result init(int device) {
    Handle module = NULL;
    Result result = CALL(cuInit, (unsigned), 0);
    if (!result) result = CALL(cuDevicePrimaryCtxRetain, (Handle *, int), &context, device);
    if (!result) result = CALL(cuCtxSetCurrent, (Handle), context);
    if (!result) result = CALL(cuModuleLoadData, (Handle *, const void *), &module, "any image");
    if (!result) result = CALL(cuModuleGetFunction, (Handle *, Handle, const char *), &spin, module, "spin");
    if (!result) result = CALL(cuModuleGetFunction, (Handle *, Handle, const char *), &noop, module, "noop");
    return result;
}

// Allocates memory for fills and copies.
// Takes memory twice; 0 bytes free what was taken.
static Result take_memory(size_t bytes) {
    if (!bytes) {
        Result freed = CALL(cuMemFree_v2, (Pointer), memory);
        if (!freed) freed = CALL(cuMemFree_v2, (Pointer), memory2);
        return freed;
    }
    Result result = CALL(cuMemAlloc_v2, (Pointer *, size_t), &memory, bytes);
    if (!result) result = CALL(cuMemAlloc_v2, (Pointer *, size_t), &memory2, bytes);
    return result;
}

// `start KIND key=value…`, durations separated by commas.
static Result start(char *line) {
    memset(&load, 0, sizeof load);
    load.lengths = 1, load.ns[0] = 1000000, load.depth = 2, load.blocks = 4096, load.graph_kernels = 1;
    char *rest = NULL, *word = strtok_r(line, " \n", &rest);
    word = strtok_r(NULL, " \n", &rest);
    for (load.kind = 0; load.kind < KINDS && strcmp(word, kind_names[load.kind]); load.kind++) {}
    while ((word = strtok_r(NULL, " \n", &rest))) {
        char *value = strchr(word, '=');
        if (!value) return -2;
        *value++ = 0;
        if (!strcmp(word, "ns")) {
            load.lengths = 0;
            for (char *end = value; *end && load.lengths < MOST; value = end + (*end == ','))
                load.ns[load.lengths++] = strtoull(value, &end, 10);
        } else if (!strcmp(word, "streams")) load.streams = atoi(value);
        else if (!strcmp(word, "depth")) load.depth = atoi(value);
        else if (!strcmp(word, "blocks")) load.blocks = atoi(value);
        else if (!strcmp(word, "block_us")) load.block_us = atoi(value);
        else if (!strcmp(word, "burst")) load.burst = atoi(value);
        else if (!strcmp(word, "idle")) load.idle_ms = atoi(value);
        else if (!strcmp(word, "kernels")) load.graph_kernels = atoi(value);
        else if (!strcmp(word, "plain")) load.plain = atoi(value);
        else if (!strcmp(word, "random")) load.random = atoi(value);
        else return -2;
    }
    if (load.kind == KINDS || load.depth > 4096 || load.streams > 16) return -2;
    running = 1, failure = 0;
    has_worker = 1;
    return pthread_create(&worker, NULL, work, NULL);
}

static Result stop(void) {
    running = 0;
    if (has_worker) pthread_join(worker, NULL);
    has_worker = 0;
    return failure;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

struct Times {
    uint64_t p50, mean, p999;
};

// Sorts `ns`.
static struct Times times_of(uint64_t *ns, int count, uint64_t clock) {
    uint64_t sum = 0;
    for (int i = 0; i < count; i++) sum += ns[i];
    qsort(ns, count, sizeof *ns, by_size);
    return (struct Times){ns[count / 2] - clock, sum / count - clock, ns[(uint64_t)count * 999 / 1000] - clock};
}

// Times `count` launches of an empty kernel one by one, alternating with as many that bypass preloaded libraries. Each
// batch is queued behind a kernel that keeps the stream busy, because launches into an idle stream of the simulated GPU
// complete immediately.
//
// If `seldom` is not 0, one launch in `seldom` is measured with events, as the meter does, outside of the measured
// time.
static void time_launches(int count, int seldom) {
    enum { BATCH = 500 };
    typedef Result (*Launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **);
    Launch launches[2] = {(Launch)function("cuLaunchKernel"), (Launch)symbol_of(cuda, "cuLaunchKernel")};
    if (!launches[1]) {
        printf("-1 no cuLaunchKernel\n");
        return;
    }
    uint64_t *ns[2] = {malloc(count * sizeof(uint64_t)), malloc(count * sizeof(uint64_t))}, clock = UINT64_MAX, none = 0;
    void *parameters[] = {&none, NULL};
    for (int i = 0; i < 10000; i++) {
        uint64_t begun = now_ns(), took = now_ns() - begun;
        if (took < clock) clock = took;
    }
    Handle events[2] = {NULL, NULL};
    Result result = 0;
    for (int i = 0; i < 2 && !result; i++) result = CALL(cuEventCreate, (Handle *, unsigned), &events[i], 0);
    for (int i = 0; i < 2 * count && !result; i++) {
        int is_measured = seldom && i % (2 * seldom) == 0;
        if (i % BATCH == 0) {
            result = CALL(cuCtxSynchronize, (void));
            if (!result) result = launch_kernel(spin, NULL, 5000000, 4096);
        }
        if (is_measured && !result) result = CALL(cuEventRecord, (Handle, Handle), events[0], NULL);
        Launch launch = launches[i % 2];
        uint64_t begun = now_ns();
        if (!result) result = launch(noop, 1, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
        ns[i % 2][i / 2] = now_ns() - begun;
        if (is_measured && !result) {
            result = CALL(cuEventRecord, (Handle, Handle), events[1], NULL);
            for (int k = 1; k >= 0; k--) CALL(cuEventQuery, (Handle), events[k]);
        }
    }
    if (!result) result = CALL(cuCtxSynchronize, (void));
    printf("%d", result);
    for (int i = 0; i < 2; i++) {
        struct Times times = times_of(ns[i], count, clock);
        printf(" %llu %llu %llu", (unsigned long long)times.p50, (unsigned long long)times.mean, (unsigned long long)times.p999);
        free(ns[i]);
    }
    printf("\n");
}

// Captures a stream in global mode for `milliseconds`, repeated `times` times, while the load continues.
static Result capture(int milliseconds, int times) {
    for (int i = 0; i < times; i++) {
        Handle stream = NULL, graph = NULL, exec = NULL;
        Result result = CALL(cuStreamCreate, (Handle *, unsigned), &stream, 1);
        if (!result) result = CALL(cuStreamBeginCapture_v2, (Handle, int), stream, 0);
        for (int k = 0; !result && k < 10; k++) {
            result = launch_kernel(spin, stream, 1000, 64);
            usleep(milliseconds * 100);
        }
        Result ended = CALL(cuStreamEndCapture, (Handle, Handle *), stream, &graph);
        if (!result) result = ended;
        if (!result) result = CALL(cuGraphInstantiateWithFlags, (Handle *, Handle, unsigned long long), &exec, graph, 0);
        if (!result) result = CALL(cuGraphLaunch, (Handle, Handle), exec, stream);
        if (!result) result = CALL(cuStreamSynchronize, (Handle), stream);
        if (!result) result = CALL(cuGraphExecDestroy, (Handle), exec);
        if (!result) result = CALL(cuGraphDestroy, (Handle), graph);
        if (!result) result = CALL(cuStreamDestroy_v2, (Handle), stream);
        if (result) return result;
    }
    return 0;
}

static void rest(void *milliseconds) { usleep((useconds_t)(uintptr_t)milliseconds * 1000); }

// Launches a graph of a kernel of a millisecond, `others` such kernels of kinds that occur only there, and a host function
// that takes `milliseconds`, repeated `times` times.
static Result graph_with_host_function(int milliseconds, int times, unsigned others) {
    Handle stream = NULL, graph = NULL, exec = NULL;
    Result result = CALL(cuStreamCreate, (Handle *, unsigned), &stream, 1);
    if (!result) result = CALL(cuStreamBeginCapture_v2, (Handle, int), stream, 0);
    for (unsigned i = 0; !result && i <= others; i++) result = launch_kernel(spin, stream, 1000000, 4096u << i);
    if (!result) result = CALL(cuLaunchHostFunc, (Handle, void (*)(void *), void *), stream, rest, (void *)(uintptr_t)milliseconds);
    if (!result) result = CALL(cuStreamEndCapture, (Handle, Handle *), stream, &graph);
    if (!result) result = CALL(cuGraphInstantiateWithFlags, (Handle *, Handle, unsigned long long), &exec, graph, 0);
    for (int i = 0; !result && i < times; i++) {
        result = CALL(cuGraphLaunch, (Handle, Handle), exec, stream);
        if (!result) result = CALL(cuStreamSynchronize, (Handle), stream);
    }
    return result;
}

// Destroys the context of a stream that is being captured, and creates another context.
static Result lost_capture(void) {
    Handle stream = NULL;
    Result result = CALL(cuStreamCreate, (Handle *, unsigned), &stream, 1);
    if (!result) result = CALL(cuStreamBeginCapture_v2, (Handle, int), stream, 2);
    if (!result) result = CALL(cuDevicePrimaryCtxReset_v2, (int), 0);
    return result ? result : init(0);
}

// Captures `count` launches of different kinds, with a capture that preloaded libraries do not see; prints the number
// of nodes in the graph.
static void hidden_capture(int count) {
    Handle stream = NULL, graph = NULL;
    size_t nodes = 0;
    Result (*begin)(Handle, int) = (Result(*)(Handle, int))symbol_of(cuda, "cuStreamBeginCapture_v2");
    Result result = CALL(cuStreamCreate, (Handle *, unsigned), &stream, 1);
    if (!result) result = begin(stream, 0);
    for (int i = 0; !result && i < count; i++) result = launch_kernel(spin, stream, 1000, 1u << i);
    Result ended = CALL(cuStreamEndCapture, (Handle, Handle *), stream, &graph);
    if (!result) result = ended;
    if (!result) result = CALL(cuGraphGetNodes, (Handle, Handle *, size_t *), graph, NULL, &nodes);
    printf("%d %zu\n", result, nodes);
}

#include "full_stream.h"

// The parameter of a launch, in a page that stops the process when it is read.
static uint64_t *parameter;

static void stop_process(int signal) {
    (void)signal;
    mprotect(parameter, 4096, PROT_READ);
    kill(getpid(), SIGSTOP);
}

// Launches a kernel of `ns`. The process stops while libcuda executes the launching call, until it is continued.
static Result stopped_launch(uint64_t ns) {
    struct sigaction action = {.sa_handler = stop_process}, before;
    parameter = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (parameter == MAP_FAILED) return -1;
    *parameter = ns;
    mprotect(parameter, 4096, PROT_NONE);
    sigaction(SIGSEGV, &action, &before);
    void *parameters[] = {parameter, NULL};
    Result result = CALL(cuLaunchKernel, (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **),
                         spin, 4096, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
    sigaction(SIGSEGV, &before, NULL);
    munmap(parameter, 4096);
    return result;
}

// Flags of two processes, in a file that both map.
#define ROUNDS 256
static volatile uint32_t *flags;
static struct {
    volatile uint32_t *flag;
    uint32_t value;
} settings[ROUNDS];

static void set_flag(void *setting) {
    typeof(settings[0]) *set = setting;
    *set->flag = set->value;
}

// Queues `rounds` kernels of `ns`. Each waits on the GPU for a flag that the previous kernel of the other process sets;
// the first kernel of process 0 does not wait.
static Result exchange(const char *path, int own, int rounds, uint64_t ns) {
    int file = open(path, O_RDWR);
    if (file < 0 || rounds > ROUNDS) return -1;
    // The host memory of the simulated GPU is memory of the process, a page of which is replaced by the file.
    enum { PAGE = 4096 };
    char *pages = NULL;
    Result result = CALL(cuMemHostAlloc, (void **, size_t, unsigned), (void **)&pages, 2 * PAGE, 0);
    if (result) return result;
    char *page = pages + (PAGE - (uintptr_t)pages % PAGE) % PAGE;
    flags = mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    close(file);
    if (flags == MAP_FAILED) return -1;
    Handle stream = NULL;
    result = CALL(cuStreamCreate, (Handle *, unsigned), &stream, 1);
    for (int i = 0; !result && i < rounds; i++) {
        uint32_t awaited = own ? i + 1 : i;
        settings[i].flag = &flags[!own], settings[i].value = i + 1;
        // Flag 0: the word is at least the value.
        result = CALL(cuStreamWaitValue32_v2, (Handle, Pointer, uint32_t, unsigned), stream, (Pointer)(uintptr_t)&flags[own], awaited, 0);
        if (!result) result = launch_kernel(spin, stream, ns, 4096);
        if (!result) result = CALL(cuLaunchHostFunc, (Handle, void (*)(void *), void *), stream, set_flag, &settings[i]);
    }
    return result;
}

static void run(char *line) {
    char word[64] = "", name[128] = "";
    long long a = 0, b = 0;
    sscanf(line, "%63s %lld %lld", word, &a, &b);
    if (!strcmp(word, "init")) printf("%d\n", init((int)a));
    else if (!strcmp(word, "hami")) printf("%d\n", hami_start((int)a));
    else if (!strcmp(word, "memory")) printf("%d\n", take_memory(a));
    else if (!strcmp(word, "start")) printf("%d\n", start(line));
    else if (!strcmp(word, "stop")) printf("%d %llu\n", stop(), (unsigned long long)launched);
    else if (!strcmp(word, "count")) printf("%d %llu\n", failure, (unsigned long long)launched);
    else if (!strcmp(word, "once")) {
        // One synchronous kernel of `a` nanoseconds; prints its time in microseconds.
        uint64_t begun = now_ns();
        errno = 77;
        Result result = launch_kernel(spin, NULL, a, b ? b : 4096);
        int error = errno;
        if (!result) result = CALL(cuCtxSynchronize, (void));
        printf("%d %llu %d\n", result, (unsigned long long)(now_ns() - begun) / 1000, error);
    } else if (!strcmp(word, "queue")) {
        // One asynchronous kernel of `a` nanoseconds; prints the time of the call in microseconds.
        uint64_t begun = now_ns();
        Result result = launch_kernel(spin, NULL, a, b ? b : 4096);
        printf("%d %llu\n", result, (unsigned long long)(now_ns() - begun) / 1000);
    } else if (!strcmp(word, "time")) time_launches((int)a, (int)b);
    else if (!strcmp(word, "capture")) printf("%d\n", capture((int)a, (int)b));
    else if (!strcmp(word, "fullstream")) beside_full_stream(a, b);
    else if (!strcmp(word, "lostcapture")) printf("%d\n", lost_capture());
    else if (!strcmp(word, "hostgraph")) {
        unsigned others = 0;
        sscanf(line, "%*s %*s %*s %u", &others);
        printf("%d\n", graph_with_host_function((int)a, (int)b, others));
    }
    else if (!strcmp(word, "stoppedlaunch")) printf("%d\n", stopped_launch(a));
    else if (!strcmp(word, "exchange")) {
        // `exchange PATH OWN ROUNDS NS`
        int own = 0, rounds = 0;
        sscanf(line, "%63s %127s %d %d %lld", word, name, &own, &rounds, &a);
        printf("%d\n", exchange(name, own, rounds, a));
    } else if (!strcmp(word, "synchronize")) printf("%d\n", CALL(cuCtxSynchronize, (void)));
    else if (!strcmp(word, "hiddencapture")) hidden_capture((int)a);
    else if (!strcmp(word, "destroyprimary")) printf("%d\n", CALL(cuDevicePrimaryCtxReset_v2, (int), (int)a));
    else if (!strcmp(word, "fork")) {
        // The child continues in place of the parent; the parent waits.
        pid_t child = fork();
        if (child > 0) {
            int status;
            waitpid(child, &status, 0);
            _exit(0);
        }
        printf("0 %d\n", (int)getpid());
    } else if (!strcmp(word, "vfork")) {
        // This thread is in uninterruptible sleep until its child, which has its memory, is killed.
        pid_t child = vfork();
        if (!child) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            pause();
            _exit(0);
        }
        printf("%d\n", child > 0 && waitpid(child, NULL, 0) == child ? 0 : -1);
    } else if (!strcmp(word, "lookup")) {
        sscanf(line, "%63s %127s", word, name);
        Dl_info info;
        void *found = dlsym(cuda, name);
        if (!found || !dladdr(found, &info)) printf("-1\n");
        else {
            const char *file = strrchr(info.dli_fname, '/');
            printf("0 %s\n", file ? file + 1 : info.dli_fname);
        }
    } else printf("-1 unknown command\n");
}

int main(int count, char **arguments) {
    // Ends with the test, however that ends.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    route = count > 1 ? arguments[1] : "dlsym";
    setvbuf(stdout, NULL, _IOLBF, 0);
    cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!cuda) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    char line[1024];
    while (fgets(line, sizeof line, stdin)) run(line);
    return 0;
}
