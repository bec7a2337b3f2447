/* Attention with AVX2, fused multiply-add and F16C: a vector is two registers. */
#include "attention.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define OPERATION TARGET static inline __attribute__((always_inline))

typedef struct {
    __m256 low, high;
} vec;

#define fetch(from) __asm__ volatile("prefetcht1 (%0)" : : "r"(from))

OPERATION vec load(const float *from)
{
    return (vec){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}

OPERATION void store(float *to, vec a)
{
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps(to + 8, a.high);
}

OPERATION vec load_half(const uint16_t *from)
{
    return (vec){_mm256_cvtph_ps(_mm_loadu_si128((const void *)from)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + 8)))};
}

OPERATION vec broadcast(float x)
{
    return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}

OPERATION vec add(vec a, vec b)
{
    return (vec){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

OPERATION vec sub(vec a, vec b)
{
    return (vec){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}

OPERATION vec mul(vec a, vec b)
{
    return (vec){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

OPERATION vec quotient(vec a, vec b)
{
    return (vec){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}

OPERATION vec fused(vec a, vec b, vec c)
{
    return (vec){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

OPERATION vec larger(vec a, vec b)
{
    return (vec){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}

OPERATION uint32_t less(vec a, vec b)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)) |
           (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)) << 8;
}

OPERATION __m256 sign_of_bits(uint32_t bits)
{
    const __m256i shift = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    return _mm256_castsi256_ps(_mm256_sllv_epi32(_mm256_set1_epi32((int32_t)bits), shift));
}

OPERATION vec choose(uint32_t bits, vec a, vec b)
{
    return (vec){_mm256_blendv_ps(b.low, a.low, sign_of_bits(bits)),
                 _mm256_blendv_ps(b.high, a.high, sign_of_bits(bits >> 8))};
}

OPERATION __m256 power_of_two_of_half(__m256 shifted)
{
    const __m256i n = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}

OPERATION vec power_of_two(vec shifted)
{
    return (vec){power_of_two_of_half(shifted.low), power_of_two_of_half(shifted.high)};
}

/* 4 x 4 blocks within the 128-bit halves, then the halves themselves. */
OPERATION void store_transposed_8(const __m256 *rows, float *out, int64_t stride)
{
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
        b[i] = (__m256)_mm256_unpacklo_pd((__m256d)a[i], (__m256d)a[i + 2]);
        b[i + 1] = (__m256)_mm256_unpackhi_pd((__m256d)a[i], (__m256d)a[i + 2]);
        b[i + 2] = (__m256)_mm256_unpacklo_pd((__m256d)a[i + 1], (__m256d)a[i + 3]);
        b[i + 3] = (__m256)_mm256_unpackhi_pd((__m256d)a[i + 1], (__m256d)a[i + 3]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}

OPERATION void store_transposed(const vec *rows, float *out, int64_t stride)
{
    for (int first = 0; first < 16; first += 8) {
        __m256 low[8], high[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            low[i] = rows[first + i].low;
            high[i] = rows[first + i].high;
        }
        store_transposed_8(low, out + first, stride);
        store_transposed_8(high, out + 8 * stride + first, stride);
    }
}

/* 12 of 16 registers. */
enum { DOT_ROWS = 6, DOT_VECS = 1, SUM_ROWS = 6, SUM_VECS = 1 };

#include "attention_kernels.h"

const attention_kernels *const cspec_attention_avx2 = &kernels;

#else

const attention_kernels *const cspec_attention_avx2 = NULL;

#endif
