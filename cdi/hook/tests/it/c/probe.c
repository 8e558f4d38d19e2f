/* Loads each library named on the command line as a program would, and prints the file that it came from. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        void *library = dlopen(argv[i], RTLD_NOW);
        void *answer = library ? dlsym(library, "answer") : NULL;
        Dl_info info;
        if (answer && dladdr(answer, &info))
            printf("%s: %s\n", argv[i], info.dli_fname);
        else
            printf("%s: not found\n", argv[i]);
    }
    return 0;
}
