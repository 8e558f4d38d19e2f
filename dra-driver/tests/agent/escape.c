// Allocates GPU memory by a given function and keeps it until the end of its input.
// Usage: escape FUNCTION BYTES. The function has the signature of cuMemAlloc_v2 or cuMemAllocManaged. Prints the result of the function, and of
// each input line: `take BYTES`, `free` (the last allocation), `module` (loads a module).

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ALLOCATIONS 4096

typedef unsigned long long Address;
// The flags of cuMemAllocManaged; other functions do not read them.
typedef int (*AllocFunction)(Address *, size_t, unsigned);
enum { ATTACH_GLOBAL = 1 };

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) return 3;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain");
    int (*set_current)(void *) = (int (*)(void *))dlsym(cuda, "cuCtxSetCurrent");
    int (*release)(Address) = (int (*)(Address))dlsym(cuda, "cuMemFree_v2");
    int (*load)(void **, const void *) = (int (*)(void **, const void *))dlsym(cuda, "cuModuleLoadData");
    AllocFunction alloc = (AllocFunction)dlsym(cuda, argv[1]);
    if (!init || !retain || !set_current || !release || !load || !alloc) return 4;
    void *context = NULL, *module = NULL;
    Address allocated[MAX_ALLOCATIONS];
    int count = 0, result = init(0);
    if (!result) result = retain(&context, 0);
    if (!result) result = set_current(context);
    if (!result) result = alloc(&allocated[count], strtoull(argv[2], NULL, 10), ATTACH_GLOBAL);
    if (!result) count++;
    char line[64];
    do {
        printf("%d\n", result);
        fflush(stdout);
        if (!fgets(line, sizeof line, stdin)) return 0;
        if (!strncmp(line, "take ", 5) && count < MAX_ALLOCATIONS) {
            result = alloc(&allocated[count], strtoull(line + 5, NULL, 10), ATTACH_GLOBAL);
            if (!result) count++;
        } else if (!strcmp(line, "free\n") && count > 0) {
            result = release(allocated[--count]);
        } else if (!strcmp(line, "module\n")) {
            result = load(&module, "image");
        } else {
            result = -1;
        }
    } while (1);
}
