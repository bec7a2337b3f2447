/* Kernels for AVX-512 with VNNI: a register holds 4 k of 16 rows. kernels_c.c says what they compute.
 *
 * Everything that depends on the type or the number of tokens is a constant argument of a function that is
 * always inlined: kernels.inc makes one kernel of each pair. */
#include "matmul.h"

#if defined(__x86_64__) && defined(__GNUC__)

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#include "unpack_512.inc"

/* sum += 4 products of unsigned weights with the word of token t, which becomes an embedded broadcast: GCC 12 loads it
 * into a register of its own if it is left the choice. */
INLINE ints add_products(ints sum, ints weights, const uint8_t *entry, int t)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(sum)
            : "v"(weights), "m"(*(const uint8_t(*)[4])(entry + 4 * t)));
    return sum;
}

/* sums[t] += products of vectors first to last - 1 of 32 k with the tokens' words; record is the entry of vector 0. */
INLINE void dots(enum quants quants, const int n, const uint8_t *at, const uint8_t *record, const int first,
                 const int last, ints *sums)
{
    ints packed = _mm512_setzero_si512();
    const ints high = high_bits(quants, at, first);
    UNROLL for (int i = first; i < last; i++)
    {
        if (i % per_packed(quants) == 0) {
            packed = load(at + packed_at(quants, i));
        }
        const ints weights = unpack(quants, packed, high, i);
        UNROLL for (int t = 0; t < n; t++)
        {
            sums[t] = add_products(sums[t], weights, record + i * 4 * n, t);
        }
    }
}

/* ---- blocks of 32 k ------------------------------------------------------------------------------ */

INLINE void multiply_32(enum quants quants, enum scales scales, const int n, const uint8_t *head,
                        const uint8_t *body, const uint8_t *record, int64_t n_blocks, float *out, size_t stride)
{
    const int has_min = scales == SCALE_MIN, step = group_bytes(quants) + (has_min ? 64 : 32);
    const uint8_t *ahead = head;
    floats results[MATMUL_TOKENS];
    UNROLL for (int t = 0; t < n; t++)
    {
        results[t] = _mm512_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const uint8_t *x_scales = record + 8 * 4 * n, *totals = x_scales + 4 * n;
        ints sums[MATMUL_TOKENS];
        UNROLL for (int t = 0; t < n; t++)
        {
            sums[t] = has_min ? _mm512_setzero_si512() : token_word(totals, t);
        }
        fetch_ahead(ahead, step);
        ahead += step;
        dots(quants, n, has_min ? body + 64 : body, record, 0, 8, sums);
        const floats scale = load_halves(has_min ? body : head);
        UNROLL for (int t = 0; t < n; t++)
        {
            floats value = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[t]), scale);
            if (has_min) {
                value = _mm512_fmadd_ps(load_halves(body + 32), token_float(totals, t), value);
            }
            results[t] = _mm512_fmadd_ps(value, token_float(x_scales, t), results[t]);
        }
        head += has_min ? 0 : 32;
        body += group_bytes(quants) + (has_min ? 64 : 0);
        record += 10 * 4 * n;
    }
    UNROLL for (int t = 0; t < n; t++)
    {
        _mm512_storeu_ps(out + (size_t)t * stride, results[t]);
    }
}

/* ---- blocks of 256 k ----------------------------------------------------------------------------- */

INLINE void multiply_256(enum quants quants, enum scales scales, const int n, const uint8_t *head,
                         const uint8_t *body, const uint8_t *record, int64_t n_blocks, float *out,
                         size_t stride)
{
    const int in_body = scales == SCALES_6_MINS, has_min = in_body || scales == SCALES_4_MINS;
    const int n_sub = in_body || scales == SCALES_6_LONG ? 8 : 16, vectors = 64 / n_sub;
    const int head_bytes = in_body ? 0 : scales == SCALES_4_MINS || scales == SCALES_6_LONG ? 64 : 32;
    const int n_sums = has_min ? n_sub / 2 : n_sub;
    const uint8_t *ahead = head;
    floats results[MATMUL_TOKENS];
    UNROLL for (int t = 0; t < n; t++)
    {
        results[t] = _mm512_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const uint8_t *x_sums = record + 64 * 4 * n, *x_scales = x_sums + n_sums * 4 * n;
        ints scale[16], mins[8], products[MATMUL_TOKENS];
        fetch_ahead(ahead, head_bytes + scales_bytes(scales));
        ahead += head_bytes + scales_bytes(scales);
        unpack_scales(scales, head, body, scale, mins);
        UNROLL for (int t = 0; t < n; t++)
        {
            products[t] = _mm512_setzero_si512();
        }
        const uint8_t *at = body + scales_bytes(scales), *words = record;
        /* A turn is 32 k: one sub-block, or two. */
        _Pragma("GCC unroll 1") for (int turn = 0; turn < 8; turn++)
        {
            fetch_ahead(ahead, group_bytes(quants));
            ahead += group_bytes(quants);
            UNROLL for (int half = 0; half < 8 / vectors; half++)
            {
                const int j = turn * (8 / vectors) + half;
                ints sums[MATMUL_TOKENS];
                UNROLL for (int t = 0; t < n; t++)
                {
                    sums[t] = has_min ? _mm512_setzero_si512() : token_word(x_sums + j * 4 * n, t);
                }
                dots(quants, n, at, words, half * vectors, (half + 1) * vectors, sums);
                const ints by = scales == SCALES_8
                                    ? _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(body + 16 * j)))
                                    : scale[j];
                UNROLL for (int t = 0; t < n; t++)
                {
                    products[t] = _mm512_add_epi32(products[t], _mm512_mullo_epi32(sums[t], by));
                }
            }
            at += group_bytes(quants);
            words += 8 * 4 * n;
        }
        const floats weight_scale = load_halves(in_body ? body : head);
        UNROLL for (int t = 0; t < n; t++)
        {
            results[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[t]),
                                         _mm512_mul_ps(weight_scale, token_float(x_scales, t)), results[t]);
        }
        if (has_min) {
            const floats min_scale = load_halves(in_body ? body + 32 : head + 32);
            UNROLL for (int t = 0; t < n; t++)
            {
                ints sum = _mm512_setzero_si512();
                UNROLL for (int i = 0; i < n_sums; i++)
                {
                    sum = _mm512_dpwssd_epi32(sum, mins[i], token_word(x_sums + i * 4 * n, t));
                }
                results[t] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sum),
                                              _mm512_mul_ps(min_scale, token_float(x_scales, t)), results[t]);
            }
        }
        head += head_bytes;
        body = at;
        record += (64 + n_sums + 1) * 4 * n;
    }
    UNROLL for (int t = 0; t < n; t++)
    {
        _mm512_storeu_ps(out + (size_t)t * stride, results[t]);
    }
}

/* ---- floats -------------------------------------------------------------------------------------- */

INLINE floats load_brains(const uint8_t *at)
{
    const ints words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

INLINE void multiply_floats(enum quants quants, const int n, const uint8_t *body, const uint8_t *record,
                            int64_t n_blocks, float *out, size_t stride)
{
    floats even[MATMUL_TOKENS], odd[MATMUL_TOKENS];
    UNROLL for (int t = 0; t < n; t++)
    {
        even[t] = odd[t] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < 32 * n_blocks; k += 2) {
        fetch_ahead(body, 64);
        const floats first = quants == HALVES ? load_halves(body) : load_brains(body);
        const floats second = quants == HALVES ? load_halves(body + 32) : load_brains(body + 32);
        UNROLL for (int t = 0; t < n; t++)
        {
            even[t] = _mm512_fmadd_ps(first, token_float(record, t), even[t]);
            odd[t] = _mm512_fmadd_ps(second, token_float(record + 4 * n, t), odd[t]);
        }
        body += 64;
        record += 2 * 4 * n;
    }
    UNROLL for (int t = 0; t < n; t++)
    {
        _mm512_storeu_ps(out + (size_t)t * stride, _mm512_add_ps(even[t], odd[t]));
    }
}

#define FIND matmul_avx512_kernel
#include "kernels.inc"

#else

matmul_kernel *matmul_avx512_kernel(const struct matmul_type *type, int32_t n_tokens)
{
    (void)type, (void)n_tokens;
    return NULL;
}

#endif
