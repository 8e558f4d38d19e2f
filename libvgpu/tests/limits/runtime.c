// A static library that opens libcuda and resolves all functions with cuGetProcAddress, as the static CUDA runtime
// does.

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

void *runtime_function(const char *name, int version) {
    static int (*get_proc_address)(const char *, void **, int, uint64_t, int *);
    if (!get_proc_address) {
        void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
        if (cuda) *(void **)&get_proc_address = dlsym(cuda, "cuGetProcAddress_v2");
    }
    void *function = NULL;
    int status = 0;
    if (get_proc_address) get_proc_address(name, &function, version, 0, &status);
    return function;
}
