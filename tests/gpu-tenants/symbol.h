// The address of a symbol of a loaded library without the loader's lookup, as a program gets it that bypasses preloaded
// libraries.

#include <dlfcn.h>
#include <link.h>
#include <string.h>

static void *symbol_of(void *library, const char *name) {
    struct link_map *map = NULL;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map)) return NULL;
    ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    for (ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB) symbols = (ElfW(Sym) *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_STRTAB) names = (const char *)entry->d_un.d_ptr;
    }
    // The string table follows the symbol table.
    for (ElfW(Sym) *symbol = symbols; (const char *)symbol < names; symbol++)
        if (symbol->st_value && !strcmp(names + symbol->st_name, name)) return (void *)(map->l_addr + symbol->st_value);
    return NULL;
}
