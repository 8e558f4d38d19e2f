// Calls functions of the libraries at the paths in the first two arguments (CUDA, NVML), each in a child process. Each
// line on standard input is a name. The answer: the name, the file of the function that `dlsym` found, its result, and
// how often the library's function was called.
//
// `graph ALLOCATES` instantiates a graph, after an allocation node was added if ALLOCATES is 1. The answer: the result,
// and how often nodes were queried.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef long Zero;
// More arguments than any function has.
typedef int (*Any)(Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero, Zero);

static void call(void *library, const char *name) {
    unsigned (*calls)(const char *) = (unsigned (*)(const char *))dlsym(library, "stub_calls");
    Any function = (Any)dlsym(library, name);
    Dl_info found = {0};
    if (!function || !dladdr(*(void **)&function, &found)) {
        printf("%s none 0 0\n", name);
        return;
    }
    unsigned before = calls(name);
    int result = function(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    printf("%s %s %d %u\n", name, strrchr(found.dli_fname, '/') + 1, result, calls(name) - before);
}

static void graph(void *library, int allocates) {
    unsigned (*calls)(const char *) = (unsigned (*)(const char *))dlsym(library, "stub_calls");
    int (*add)(void **, void *, void **, size_t, void *) = (int (*)(void **, void *, void **, size_t, void *))dlsym(library, "cuGraphAddMemAllocNode");
    int (*instantiate)(void **, void *, unsigned long long) = (int (*)(void **, void *, unsigned long long))dlsym(library, "cuGraphInstantiateWithFlags");
    void *exec = NULL;
    if (allocates) add(&exec, NULL, NULL, 0, NULL);
    int result = instantiate(&exec, NULL, 0);
    printf("graph %d %u\n", result, calls("nodes"));
}

int main(int count, char **arguments) {
    (void)count;
    setvbuf(stdin, NULL, _IONBF, 0);
    void *cuda = dlopen(arguments[1], RTLD_NOW), *nvml = dlopen(arguments[2], RTLD_NOW);
    if (!cuda || !nvml) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    char line[128], name[128];
    while (fgets(line, sizeof line, stdin)) {
        int allocates = 0, status = 0;
        sscanf(line, "%127s %d", name, &allocates);
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            if (!strcmp(name, "graph")) graph(cuda, allocates);
            else call(strncmp(name, "nvml", 4) ? cuda : nvml, name);
            fflush(stdout);
            _exit(0);
        }
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status)) printf("%s signal %d 0\n", name, WTERMSIG(status));
        fflush(stdout);
    }
    return 0;
}
