/* What differs between compilers. */
#ifndef CSPEC_PORTABLE_H
#define CSPEC_PORTABLE_H

#include <stdint.h> /* defines __GLIBC__, where it is glibc */

/* Compiles a function once per vector width; the widest that the CPU has is chosen at load time. The
 * arithmetic is the same on each, element by element, so the results are the same bits. CSPEC_ONE_CLONE turns
 * it off: to compare, and for sanitizers, which instrument the choosing function before they are ready. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__has_attribute) && \
    !defined(CSPEC_ONE_CLONE)
#if __has_attribute(target_clones)
#define CSPEC_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif

#ifndef CSPEC_CLONES
#define CSPEC_CLONES
#endif

#endif
