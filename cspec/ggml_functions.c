#define _GNU_SOURCE
#include "ggml_functions.h"

#if defined(__linux__) && defined(__LP64__) && (defined(__x86_64__) || defined(__aarch64__))

#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

struct ggml_functions ggml;

const char *ggml_resolve(void *library)
{
    void *symbol;
#define RESOLVE(result, name, arguments)                                                              \
    if ((symbol = dlsym(RTLD_DEFAULT, #name)) == NULL && (symbol = dlsym(library, #name)) == NULL) {  \
        return #name;                                                                                 \
    }                                                                                                 \
    memcpy(&ggml.name, &symbol, sizeof symbol);
    GGML_FUNCTIONS(RESOLVE)
#undef RESOLVE
    return NULL;
}

bool readable(const void *address, size_t size)
{
    static const size_t step = 512; /* PIPE_BUF on any system: never a partial write */
    int ends[2];
    if (address == NULL || pipe2(ends, O_CLOEXEC) != 0) {
        return false;
    }
    char sink[512];
    bool good = true;
    for (size_t done = 0; good && done < size; done += step) {
        size_t length = size - done < step ? size - done : step;
        good = write(ends[1], (const char *)address + done, length) == (ssize_t)length &&
               read(ends[0], sink, length) == (ssize_t)length;
    }
    close(ends[0]);
    close(ends[1]);
    return good;
}

bool same_library(const void *one, const void *other)
{
    Dl_info first, second;
    return dladdr(one, &first) != 0 && dladdr(other, &second) != 0 && first.dli_fbase == second.dli_fbase;
}

const void *code(void (*function)(void))
{
    const void *address;
    memcpy(&address, &function, sizeof address);
    return address;
}

#endif
