/* Kernels for AVX2. */
#include "matmul.h"

#if defined(__x86_64__) && defined(__GNUC__)

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define FIND matmul_avx2_kernel
#include "kernels_256.inc"

#else

matmul_kernel *matmul_avx2_kernel(const struct matmul_type *type, int32_t n_tokens)
{
    (void)type, (void)n_tokens;
    return NULL;
}

#endif
