/* Attention with AVX-512: a vector is one register. */
#include "attention.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))

typedef __m512 vec;

#define fetch(from) __asm__ volatile("prefetcht1 (%0)" : : "r"(from))
#define load(from) _mm512_loadu_ps(from)
#define store(to, a) _mm512_storeu_ps(to, a)
#define load_half(from) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from)))
#define broadcast(x) _mm512_set1_ps(x)
#define add(a, b) _mm512_add_ps(a, b)
#define sub(a, b) _mm512_sub_ps(a, b)
#define mul(a, b) _mm512_mul_ps(a, b)
#define quotient(a, b) _mm512_div_ps(a, b)
#define fused(a, b, c) _mm512_fmadd_ps(a, b, c)
#define larger(a, b) _mm512_max_ps(a, b)
#define less(a, b) _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)
#define choose(bits, a, b) _mm512_mask_blend_ps((__mmask16)(bits), b, a)

TARGET static inline vec power_of_two(vec shifted)
{
    const __m512i n = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
}

/* 4 x 4 blocks within the 128-bit quarters, then the quarters themselves. */
TARGET static inline void store_transposed(const vec *rows, float *out, int64_t stride)
{
    vec a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        b[i] = (vec)_mm512_unpacklo_pd((__m512d)a[i], (__m512d)a[i + 2]);
        b[i + 1] = (vec)_mm512_unpackhi_pd((__m512d)a[i], (__m512d)a[i + 2]);
        b[i + 2] = (vec)_mm512_unpacklo_pd((__m512d)a[i + 1], (__m512d)a[i + 3]);
        b[i + 3] = (vec)_mm512_unpackhi_pd((__m512d)a[i + 1], (__m512d)a[i + 3]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        const vec low = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
        const vec low_odd = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        const vec high = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
        const vec high_odd = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
        store(out + i * stride, _mm512_shuffle_f32x4(low, high, 0x88));
        store(out + (i + 4) * stride, _mm512_shuffle_f32x4(low_odd, high_odd, 0x88));
        store(out + (i + 8) * stride, _mm512_shuffle_f32x4(low, high, 0xdd));
        store(out + (i + 12) * stride, _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd));
    }
}

/* 24 of 32 registers. */
enum { DOT_ROWS = 12, DOT_VECS = 2, SUM_ROWS = 6, SUM_VECS = 4 };

#include "attention_kernels.h"

const attention_kernels *const cspec_attention_avx512 = &kernels;

#else

const attention_kernels *const cspec_attention_avx512 = NULL;

#endif
