/* Kernels for AVX-512 with VNNI: a register holds 4 k of 16 rows. kernels_c.c says what they compute.
 *
 * Everything that depends on the type or the number of tokens is a constant argument of a function that is
 * always inlined: kernels.inc makes one kernel of each pair. */
#include "matmul.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 8")

/* Bytes of weights to ask for ahead of their use. With several tokens a core does not run far enough ahead of itself
 * to keep the memory busy. Every line is asked for, into the first-level cache: with some left to the CPU's own
 * prefetcher, or into the second level, products take up to a tenth longer (Zen 4; 2048 and 4096 are as good). What is
 * ahead is counted from the panel's start and moves by a block's head and body, so that the panels' lines are asked for
 * without a gap: counted from the body, as many lines of each panel as its heads take are not, and products of
 * small panels with heads (Q4_0, Q5_0) take 1.6 times as long. */
enum { AHEAD = 3072 };

typedef __m512i ints;
typedef __m512 floats;

INLINE ints load(const uint8_t *at)
{
    return _mm512_loadu_si512(at);
}

/* The word of token t in an entry, in every lane. */
INLINE ints token_word(const uint8_t *entry, int t)
{
    int32_t value;
    __builtin_memcpy(&value, entry + 4 * t, sizeof value);
    return _mm512_set1_epi32(value);
}

INLINE floats token_float(const uint8_t *entry, int t)
{
    float value;
    __builtin_memcpy(&value, entry + 4 * t, sizeof value);
    return _mm512_set1_ps(value);
}

INLINE floats load_halves(const uint8_t *at)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
}

/* sum += 4 products of unsigned weights with the word of token t, which becomes an embedded broadcast: GCC 12 loads it
 * into a register of its own if it is left the choice. */
INLINE ints add_products(ints sum, ints weights, const uint8_t *entry, int t)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(sum)
            : "v"(weights), "m"(*(const uint8_t(*)[4])(entry + 4 * t)));
    return sum;
}

/* a & mask | b */
INLINE ints and_or(ints a, ints mask, ints b)
{
    return _mm512_ternarylogic_epi32(a, mask, b, 0xea);
}

INLINE ints bytes(int value)
{
    return _mm512_set1_epi8((char)value);
}

/* To the left, or to the right if negative: what crosses into another byte is masked away afterwards. */
INLINE ints shift(ints value, int left)
{
    return left > 0 ? _mm512_slli_epi32(value, (unsigned)left)
                    : left < 0 ? _mm512_srli_epi32(value, (unsigned)-left) : value;
}

/* Where vector i's 32 k of high bits are. */
INLINE ints high_bits(enum quants quants, const uint8_t *at, int i)
{
    switch (quants) {
    case NIBBLES_1_BIT:
        return load(at + 256);
    case NIBBLES_2_BITS:
        return load(at + i / 4 * 192 + 128);
    case TWO_BITS_1_BIT:
        return load(at + 128);
    default:
        return _mm512_setzero_si512();
    }
}

/* Vector i of 32 k: 64 unsigned bytes. packed is the vector that holds its low bits, high is high_bits(i). */
INLINE ints unpack(enum quants quants, ints packed, ints high, int i)
{
    const ints low_nibble = bytes(15);
    switch (quants) {
    case NIBBLES:
        return _mm512_and_si512(shift(packed, i % 2 * -4), low_nibble);
    case NIBBLES_1_BIT:
        return and_or(shift(packed, i % 2 * -4), low_nibble, _mm512_and_si512(shift(high, 4 - i), bytes(16)));
    case NIBBLES_2_BITS:
        return and_or(shift(packed, i % 2 * -4), low_nibble,
                      _mm512_and_si512(shift(high, 4 - 2 * (i % 4)), bytes(48)));
    case BYTES:
        return packed;
    case TWO_BITS:
        return _mm512_and_si512(shift(packed, i % 4 * -2), bytes(3));
    case TWO_BITS_1_BIT:
        return and_or(shift(packed, i % 4 * -2), bytes(3), _mm512_and_si512(shift(high, 2 - i), bytes(4)));
    case CODES: {
        const ints codes = _mm512_broadcast_i32x4(
            _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, (char)129, (char)141, (char)153, (char)166,
                          (char)181, (char)197, (char)217, (char)241));
        return _mm512_shuffle_epi8(codes, _mm512_and_si512(shift(packed, i % 2 * -4), low_nibble));
    }
    default:
        return packed;
    }
}

/* Vectors that share a packed one. */
INLINE int per_packed(enum quants quants)
{
    return quants == BYTES ? 1 : quants == TWO_BITS || quants == TWO_BITS_1_BIT ? 4 : 2;
}

INLINE int packed_at(enum quants quants, int i)
{
    return quants == NIBBLES_2_BITS ? i / 4 * 192 + i % 4 / 2 * 64 : i / per_packed(quants) * 64;
}

INLINE int group_bytes(enum quants quants)
{
    switch (quants) {
    case NIBBLES_1_BIT:
        return 320;
    case NIBBLES_2_BITS:
        return 384;
    case BYTES:
        return 512;
    case TWO_BITS:
        return 128;
    case TWO_BITS_1_BIT:
        return 192;
    default:
        return 256;
    }
}

INLINE void fetch_ahead(const uint8_t *from, const int size)
{
    UNROLL for (int line = 0; line < size; line += 64)
    {
        _mm_prefetch((const char *)from + AHEAD + line, _MM_HINT_T0);
    }
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

/* The scales of 8 or 16 sub-blocks as int32, and the mins as pairs of int16. */
INLINE void unpack_scales(enum scales scales, const uint8_t *head, const uint8_t *body, ints *scale, ints *mins)
{
    if (scales == SCALES_6_MINS) {
        const ints six = _mm512_set1_epi32(0x003f003f), four = _mm512_set1_epi32(0x000f000f),
                   two = _mm512_set1_epi32(0x00300030), low = _mm512_set1_epi32(0xffff);
        const ints w0 = load(body + 64), w1 = load(body + 128), w2 = load(body + 192);
        mins[0] = _mm512_and_si512(w0, six);
        mins[1] = _mm512_and_si512(shift(w0, -6), six);
        mins[2] = _mm512_and_si512(w1, six);
        mins[3] = _mm512_and_si512(shift(w1, -6), six);
        const ints pairs[4] = {
            _mm512_and_si512(w2, six),
            _mm512_and_si512(shift(w2, -6), six),
            and_or(shift(w0, -12), four, _mm512_and_si512(shift(w2, -8), two)),
            and_or(shift(w1, -12), four, _mm512_and_si512(shift(w2, -10), two)),
        };
        UNROLL for (int p = 0; p < 4; p++)
        {
            scale[2 * p] = _mm512_and_si512(pairs[p], low);
            scale[2 * p + 1] = shift(pairs[p], -16);
        }
    } else if (scales == SCALES_6) {
        const ints six = _mm512_set1_epi32(63), offset = _mm512_set1_epi32(32);
        ints last = _mm512_setzero_si512();
        UNROLL for (int i = 0; i < 3; i++)
        {
            const ints w = load(body + 64 * i);
            UNROLL for (int j = 0; j < 5; j++)
            {
                scale[5 * i + j] = _mm512_sub_epi32(_mm512_and_si512(shift(w, -6 * j), six), offset);
            }
            last = _mm512_or_si512(last, shift(shift(w, -30), 2 * i));
        }
        scale[15] = _mm512_sub_epi32(last, offset);
    } else if (scales == SCALES_4_MINS) {
        const ints four = _mm512_set1_epi32(0x000f000f), low = _mm512_set1_epi32(0xffff);
        UNROLL for (int i = 0; i < 4; i++)
        {
            const ints w = load(body + 64 * i);
            const ints first = _mm512_and_si512(w, four), second = _mm512_and_si512(shift(w, -8), four);
            mins[2 * i] = _mm512_and_si512(shift(w, -4), four);
            mins[2 * i + 1] = _mm512_and_si512(shift(w, -12), four);
            scale[4 * i] = _mm512_and_si512(first, low);
            scale[4 * i + 1] = shift(first, -16);
            scale[4 * i + 2] = _mm512_and_si512(second, low);
            scale[4 * i + 3] = shift(second, -16);
        }
    } else if (scales == SCALES_6_LONG) {
        const ints four = _mm512_set1_epi32(15), two = _mm512_set1_epi32(48), offset = _mm512_set1_epi32(32);
        const ints low = load(body);
        const ints high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(head + 32)));
        UNROLL for (int j = 0; j < 8; j++)
        {
            const ints value = and_or(shift(low, -4 * j), four, _mm512_and_si512(shift(high, 4 - 2 * j), two));
            scale[j] = _mm512_sub_epi32(value, offset);
        }
    }
}

INLINE int scales_bytes(enum scales scales)
{
    return scales == SCALES_6 ? 192 : scales == SCALES_6_LONG ? 64 : 256;
}

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
