// A library that the subject loads with RTLD_DEEPBIND and that is linked with libcuda: its calls are bound to the
// libraries that it names itself before those that were preloaded.

extern int cuMemAlloc_v2(unsigned long long *pointer, __SIZE_TYPE__ bytes);

int plugin_allocate(unsigned long long bytes) {
    unsigned long long pointer;
    return cuMemAlloc_v2(&pointer, bytes);
}
