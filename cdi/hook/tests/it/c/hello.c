/* Says its name when it is loaded. */
#include <unistd.h>

__attribute__((constructor)) static void hello(void)
{
    if (write(1, NAME "\n", sizeof NAME) < 0)
        _exit(1);
}
