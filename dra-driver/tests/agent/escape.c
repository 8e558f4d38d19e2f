// A program that takes GPU memory by a function that it is given, and keeps it until its input ends.
// Usage: escape FUNCTION BYTES. The function is called as cuMemAlloc_v2 is. Prints the driver's result.

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

typedef int (*AllocFunction)(unsigned long long *, size_t);

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) return 3;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain");
    int (*set_current)(void *) = (int (*)(void *))dlsym(cuda, "cuCtxSetCurrent");
    AllocFunction alloc = (AllocFunction)dlsym(cuda, argv[1]);
    if (!init || !retain || !set_current || !alloc) return 4;
    void *context = NULL;
    unsigned long long address = 0;
    int result = init(0);
    if (!result) result = retain(&context, 0);
    if (!result) result = set_current(context);
    if (!result) result = alloc(&address, strtoull(argv[2], NULL, 10));
    printf("%d\n", result);
    fflush(stdout);
    while (getchar() != EOF) {}
    return 0;
}
