// libcuda.so.1 and libnvidia-ml.so.1 of a driver that rejects every call and counts the calls. The compiler gets the
// list of functions as `FUNCTIONS`, each as `F(name)`, except those that answer.

#include <stddef.h>
#include <string.h>

#define NOT_SUPPORTED 801

// On x86-64 and aarch64 a function may ignore its arguments.
#define F(name) static unsigned name##_calls; int name(void) { name##_calls++; return NOT_SUPPORTED; }
FUNCTIONS
#undef F

// A graph of kernels.
enum { NODES = 100000 };
static unsigned node_calls, instantiations;

int cuGraphGetNodes(void *graph, void **nodes, size_t *count) {
    (void)graph;
    if (!nodes) return *count = NODES, 0;
    if (*count > NODES) *count = NODES;
    for (size_t i = 0; i < *count; i++) nodes[i] = &node_calls;
    return 0;
}

int cuGraphNodeGetType(void *node, int *type) {
    (void)node;
    node_calls++;
    return *type = 0, 0;
}

int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
    (void)graph, (void)flags;
    instantiations++;
    if (!exec) return NOT_SUPPORTED;
    return *exec = &node_calls, 0;
}

// Returns how often a function was called; for `nodes`, how often a node was queried.
unsigned stub_calls(const char *name) {
    if (!strcmp(name, "nodes")) return node_calls;
    if (!strcmp(name, "cuGraphInstantiateWithFlags")) return instantiations;
#define F(function) if (!strcmp(name, #function)) return function##_calls;
    FUNCTIONS
    return 0;
}
