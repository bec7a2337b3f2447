/* Kernels for AVX-VNNI, which has vpdpbusd for 256-bit registers: CPUs of laptops without AVX-512. */
#include "matmul.h"

#ifdef MATMUL_AVXVNNI_TARGET

#define TARGET __attribute__((target("avx2,fma,f16c," MATMUL_AVXVNNI_TARGET)))
#define FIND matmul_avxvnni_kernel
#define DOT MATMUL_AVXVNNI_DOT
#include "kernels_256.inc"

#else

matmul_kernel *matmul_avxvnni_kernel(const struct matmul_type *type, int32_t n_tokens)
{
    (void)type, (void)n_tokens;
    return NULL;
}

#endif
