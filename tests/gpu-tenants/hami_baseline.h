// The compute limiter that HAMi-core's documentation and issues describe, for comparison: a token bucket per process.
//
// - A launch costs one token per block of its grid. It is admitted while the bucket is not negative; otherwise it
//   sleeps for 10 ms and retries.
// - A thread reads NVML's utilization of the last second every 120 ms, and adjusts the process's refill up or down by
//   a step that grows with the square of the number of multiprocessors.

#define HAMI_FACTOR 32
#define HAMI_TICK_US 120000
#define HAMI_SLEEP_US 10000

struct HamiSample {
    unsigned pid;
    unsigned long long at;
    unsigned sm, memory, encoder, decoder;
};

static volatile long long hami_bucket, hami_pool, hami_share;
static volatile int hami_limit;
static int hami_multiprocessors = 132, hami_threads = 2048;
static pthread_t hami_thread;

static long long hami_step(int used) {
    long long off = hami_limit > used ? hami_limit - used : used - hami_limit;
    long long step = (long long)hami_multiprocessors * hami_multiprocessors * hami_threads * (off > 5 ? off : 5) / 2560;
    if (off > hami_limit / 2) step = step * off * 2 / (hami_limit + 1);
    return step;
}

static void *hami_watch(void *nvml) {
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*get)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*utilization)(void *, struct HamiSample *, unsigned *, unsigned long long) =
        (int (*)(void *, struct HamiSample *, unsigned *, unsigned long long))dlsym(nvml, "nvmlDeviceGetProcessUtilization");
    void *device = NULL;
    if (init() || get(0, &device)) return NULL;
    for (;;) {
        usleep(HAMI_TICK_US);
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        unsigned long long since = now.tv_sec * 1000000ull + now.tv_nsec / 1000 - 1000000;
        struct HamiSample samples[256];
        unsigned count = 256, mine = 0;
        int used = 0;
        if (utilization(device, samples, &count, since)) count = 0;
        for (unsigned i = 0; i < count; i++)
            if (samples[i].pid == (unsigned)getpid()) used += samples[i].sm, mine++;
        if (mine) used /= mine;
        hami_share += used < hami_limit ? hami_step(used) : -hami_step(used);
        if (hami_share > hami_pool) hami_share = hami_pool;
        if (hami_share < 0) hami_share = 0;
        long long bucket = hami_bucket + hami_share;
        hami_bucket = bucket > hami_pool ? hami_pool : bucket;
    }
}

static int hami_start(int limit) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml) return -1;
    hami_pool = (long long)hami_multiprocessors * hami_threads * HAMI_FACTOR;
    hami_limit = limit;
    return pthread_create(&hami_thread, NULL, hami_watch, nvml);
}

static void hami_before_launch(unsigned blocks) {
    if (!hami_limit) return;
    while (hami_bucket < 0) usleep(HAMI_SLEEP_US);
    __sync_fetch_and_sub(&hami_bucket, blocks);
}
