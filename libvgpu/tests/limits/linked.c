// A program that is linked with libcuda or, built with -DRUNTIME, with a static library that opens libcuda as the
// static CUDA runtime does. It supports a few commands of test_process.c.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

typedef unsigned long long Pointer;

#ifdef RUNTIME
extern void *runtime_function(const char *name, int version);
#define CALL(name, version, types, ...) \
    (((int(*) types)runtime_function(#name, version))(__VA_ARGS__))
#else
extern int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(Pointer *, size_t), cuMemGetInfo_v2(size_t *, size_t *);
#define cuMemAlloc cuMemAlloc_v2
#define cuMemGetInfo cuMemGetInfo_v2
#define CALL(name, version, types, ...) name(__VA_ARGS__)
#endif

int main(void) {
    // Ends with the test, however that ends.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    char line[256], word[64];
    unsigned long long a;
    while (fgets(line, sizeof line, stdin)) {
        a = 0;
        sscanf(line, "%63s %llu", word, &a);
        Pointer pointer = 0;
        if (!strcmp(word, "init")) {
            void *context = NULL;
            int result = CALL(cuInit, 2000, (unsigned), 0);
            if (!result) result = CALL(cuDevicePrimaryCtxRetain, 7000, (void **, int), &context, (int)a);
            if (!result) result = CALL(cuCtxSetCurrent, 4000, (void *), context);
            printf("%d 0\n", result);
        } else if (!strcmp(word, "alloc")) {
            int result = CALL(cuMemAlloc, 3020, (Pointer *, size_t), &pointer, a);
            printf("%d 0 %llu\n", result, pointer);
        } else if (!strcmp(word, "meminfo")) {
            size_t available = 0, total = 0;
            int result = CALL(cuMemGetInfo, 3020, (size_t *, size_t *), &available, &total);
            printf("%d %zu %zu\n", result, available, total);
        } else {
            printf("-1 unknown command\n");
        }
    }
    return 0;
}
