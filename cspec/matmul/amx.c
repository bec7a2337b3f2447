/* AMX: whether a process may use it, and what a thread's tiles are. */
#define _GNU_SOURCE
#include "matmul.h"

#ifdef MATMUL_AMX_BUILT

#include <cpuid.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

_Static_assert(sizeof(struct matmul_tile_config) == 64, "as the instructions read and write it");

static bool permitted;

/* The CPU must have the instructions, the system must save their registers (XCR0 has bits for the configuration and the
 * tiles), and since 8 KiB of a thread's state are not given to every process, Linux wants to be asked. */
static void ask(void)
{
    enum { TILES = 1 << 24, BYTES_DOT = 1 << 25, XCR0_TILES = 3 << 17, ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    uint32_t a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & bit_OSXSAVE) == 0 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) ||
        (d & (TILES | BYTES_DOT)) != (TILES | BYTES_DOT)) {
        return;
    }
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    permitted = (saved & XCR0_TILES) == XCR0_TILES && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}

bool matmul_amx_permitted(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ask);
    return permitted;
}

/* Not the compiler's functions: GCC 12's do not say that all 64 bytes are read or written. */
void matmul_amx_save(struct matmul_tile_config *config)
{
    __asm__ volatile("sttilecfg %0" : "=m"(*config));
}

void matmul_amx_load(const struct matmul_tile_config *config)
{
    __asm__ volatile("ldtilecfg %0" ::"m"(*config));
}

#else

bool matmul_amx_permitted(void)
{
    return false;
}

void matmul_amx_save(struct matmul_tile_config *config)
{
    (void)config;
}

void matmul_amx_load(const struct matmul_tile_config *config)
{
    (void)config;
}

#endif
