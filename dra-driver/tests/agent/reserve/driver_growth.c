// A process whose use of the GPU lets libcuda allocate memory for itself. Prints the result of the creation of its context,
// and of each input line: `limit N VALUE` (cuCtxSetLimit), `kernel NAME` (loads a module and launches its kernel, which
// makes a lazily loaded module resident), `fill BYTES` (allocates in these steps until denied).

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *Handle;

static Handle cuda;

#define CALL(name, types, ...) ((int(*) types)dlsym(cuda, #name))(__VA_ARGS__)

static int run_kernel(const char *name) {
    Handle module = NULL, kernel = NULL;
    unsigned long long ns = 0;
    void *parameters[] = {&ns, NULL};
    int result = CALL(cuModuleLoadData, (Handle *, const void *), &module, "image");
    if (!result) result = CALL(cuModuleGetFunction, (Handle *, Handle, const char *), &kernel, module, name);
    if (!result)
        result = CALL(cuLaunchKernel, (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **),
                      kernel, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL);
    return result ? result : CALL(cuCtxSynchronize, (void));
}

static int take(size_t bytes) {
    unsigned long long memory;
    return CALL(cuMemAlloc_v2, (unsigned long long *, size_t), &memory, bytes);
}

int main(void) {
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) return 3;
    Handle context = NULL;
    int result = CALL(cuInit, (unsigned), 0);
    if (!result) result = CALL(cuDevicePrimaryCtxRetain, (Handle *, int), &context, 0);
    if (!result) result = CALL(cuCtxSetCurrent, (Handle), context);
    char line[64], name[32];
    do {
        printf("%d\n", result);
        fflush(stdout);
        if (!fgets(line, sizeof line, stdin)) return 0;
        int limit = 0;
        size_t value = 0;
        if (sscanf(line, "limit %d %zu", &limit, &value) == 2) result = CALL(cuCtxSetLimit, (int, size_t), limit, value);
        else if (sscanf(line, "kernel %31s", name) == 1) result = run_kernel(name);
        else if (sscanf(line, "fill %zu", &value) == 1) {
            while (!(result = take(value))) {}
        } else result = -1;
    } while (1);
}
