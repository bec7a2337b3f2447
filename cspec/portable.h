/* What differs between compilers. */
#ifndef CSPEC_PORTABLE_H
#define CSPEC_PORTABLE_H

#include <stdint.h> /* defines __GLIBC__, where it is glibc */

/* Compiles a function once per vector width; the widest that the CPU has is chosen at load time. The
 * arithmetic is the same on each, element by element, so the results are the same bits. Sanitizers instrument
 * the choosing function, which then runs before they are ready. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(CSPEC_ONE_CLONE)
#define CSPEC_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CSPEC_CLONES
#endif

#endif
