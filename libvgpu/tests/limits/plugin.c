// A library linked with libcuda that the test process loads with RTLD_DEEPBIND: its calls are bound to its own
// dependencies before preloaded libraries.

extern int cuMemAlloc_v2(unsigned long long *pointer, __SIZE_TYPE__ bytes);

int plugin_allocate(unsigned long long bytes) {
    unsigned long long pointer;
    return cuMemAlloc_v2(&pointer, bytes);
}
