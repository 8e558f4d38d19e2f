// The compute limiter that HAMi-core's documentation and issues describe, for comparison: a token bucket per process.
//
// - A launch costs as many tokens as its grid has blocks. It goes ahead while the bucket is not negative, else it
//   sleeps for 10 ms and looks again.
// - A thread looks every 120 ms at what NVML says of the last second's utilisation, and moves the process's share of
//   tokens up or down by a step that grows with the square of the number of multiprocessors.

#define RIVAL_FACTOR 32
#define RIVAL_TICK_US 120000
#define RIVAL_SLEEP_US 10000

struct RivalSample {
    unsigned pid;
    unsigned long long at;
    unsigned sm, memory, encoder, decoder;
};

static volatile long long rival_bucket, rival_pool, rival_share;
static volatile int rival_limit;
static int rival_multiprocessors = 132, rival_threads = 2048;
static pthread_t rival_thread;

static long long rival_step(int used) {
    long long off = rival_limit > used ? rival_limit - used : used - rival_limit;
    long long step = (long long)rival_multiprocessors * rival_multiprocessors * rival_threads * (off > 5 ? off : 5) / 2560;
    if (off > rival_limit / 2) step = step * off * 2 / (rival_limit + 1);
    return step;
}

static void *rival_watch(void *nvml) {
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*get)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*utilisation)(void *, struct RivalSample *, unsigned *, unsigned long long) =
        (int (*)(void *, struct RivalSample *, unsigned *, unsigned long long))dlsym(nvml, "nvmlDeviceGetProcessUtilization");
    void *device = NULL;
    if (init() || get(0, &device)) return NULL;
    for (;;) {
        usleep(RIVAL_TICK_US);
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        unsigned long long since = now.tv_sec * 1000000ull + now.tv_nsec / 1000 - 1000000;
        struct RivalSample samples[256];
        unsigned count = 256, mine = 0;
        int used = 0;
        if (utilisation(device, samples, &count, since)) count = 0;
        for (unsigned i = 0; i < count; i++)
            if (samples[i].pid == (unsigned)getpid()) used += samples[i].sm, mine++;
        if (mine) used /= mine;
        rival_share += used < rival_limit ? rival_step(used) : -rival_step(used);
        if (rival_share > rival_pool) rival_share = rival_pool;
        if (rival_share < 0) rival_share = 0;
        long long bucket = rival_bucket + rival_share;
        rival_bucket = bucket > rival_pool ? rival_pool : bucket;
    }
}

static int rival_start(int limit) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml) return -1;
    rival_pool = (long long)rival_multiprocessors * rival_threads * RIVAL_FACTOR;
    rival_limit = limit;
    return pthread_create(&rival_thread, NULL, rival_watch, nvml);
}

static void rival_before_launch(unsigned blocks) {
    if (!rival_limit) return;
    while (rival_bucket < 0) usleep(RIVAL_SLEEP_US);
    __sync_fetch_and_sub(&rival_bucket, blocks);
}
