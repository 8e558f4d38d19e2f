// A launch that waits for room in its stream, and calls of another thread meanwhile. Part of `tenant.c`.

// Queue capacity of a stream of the simulated GPU.
#define QUEUE 1024

static Handle full_stream;
static volatile int launches;

static void *launch_into_full_stream(void *unused) {
    (void)unused;
    CHECK(CALL(cuCtxSetCurrent, (Handle), context));
    launches = 1;
    CHECK(launch_kernel(spin, full_stream, 1000, 1));
    return NULL;
}

// Fills a stream with events behind a kernel of `ns` that preloaded libraries do not see.
static Result fill_stream(uint64_t ns) {
    typedef Result (*Launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **);
    Launch hidden = (Launch)symbol_of(cuda, "cuLaunchKernel");
    Handle event = NULL;
    void *parameters[] = {&ns, NULL};
    Result result = CALL(cuStreamCreate, (Handle *, unsigned), &full_stream, 1);
    if (!result) result = CALL(cuEventCreate, (Handle *, unsigned), &event, 2);
    if (!result) result = hidden(spin, 1, 1, 1, 256, 1, 1, 0, full_stream, parameters, NULL);
    for (int i = 1; !result && i < QUEUE; i++) result = CALL(cuEventRecord, (Handle, Handle), event, full_stream);
    return result;
}

// Begins and ends a global capture in an idle stream.
static Result capture_once(Handle stream, uint64_t *took_ns) {
    Handle graph = NULL;
    uint64_t begun = now_ns();
    Result result = CALL(cuStreamBeginCapture_v2, (Handle, int), stream, 0);
    *took_ns = now_ns() - begun;
    if (!result) result = CALL(cuStreamEndCapture, (Handle, Handle *), stream, &graph);
    return result;
}

// Creates and destroys a context.
static Result destroy_once(uint64_t *took_ns) {
    Handle other = NULL;
    Result result = CALL(cuCtxCreate_v2, (Handle *, unsigned, int), &other, 0, 0);
    uint64_t begun = now_ns();
    if (!result) result = CALL(cuCtxDestroy_v2, (Handle), other);
    *took_ns = now_ns() - begun;
    return result;
}

// Begins captures, or destroys contexts, while another thread launches into a stream that is full for `ns`; until one
// call has taken long, or `MOST_CALLS`. Prints the time of the longest one, microseconds. Fails if the launch did not wait
// during all of them.
#define MOST_CALLS 500
#define LAUNCH_DID_NOT_WAIT (-2)
#define LONG_NS 100000000

static void beside_full_stream(uint64_t ns, int destroys) {
    uint64_t longest = 0, took = 0;
    Handle idle = NULL;
    Result result = fill_stream(ns);
    if (!result) result = CALL(cuStreamCreate, (Handle *, unsigned), &idle, 1);
    if (!result) result = pthread_create(&worker, NULL, launch_into_full_stream, NULL);
    while (!result && !launches) usleep(500);
    // Spaced, because the launch reaches its event meanwhile.
    for (int i = 0; !result && i < MOST_CALLS && longest < LONG_NS; i++) {
        result = destroys ? destroy_once(&took) : capture_once(idle, &took);
        if (took > longest) longest = took;
        usleep(500);
    }
    if (!result && longest < LONG_NS && pthread_tryjoin_np(worker, NULL) != EBUSY) result = LAUNCH_DID_NOT_WAIT;
    printf("%d %llu\n", result, (unsigned long long)longest / 1000);
}
