/* Kernels for AVX2: a register holds 4 k of half a panel's rows. kernels_c.c says what they compute, and
 * kernels_avx512.c has the same frame.
 *
 * There is no instruction for four products into a 32-bit sum. vpmaddubsw adds pairs of products into 16 bits, of
 * which as many are added up as cannot overflow; vpmaddwd then widens them, and multiplies them by the scale. */
#include "matmul.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 8")
#define ROLL _Pragma("GCC unroll 1")

enum { AHEAD = 3072 }; /* bytes; kernels_avx512.c says why */

typedef __m256i ints;
typedef __m256 floats;

INLINE ints load(const uint8_t *at)
{
    return _mm256_loadu_si256((const ints *)at);
}

/* The word of token t in an entry, in every lane. */
INLINE ints token_word(const uint8_t *entry, int t)
{
    int32_t value;
    __builtin_memcpy(&value, entry + 4 * t, sizeof value);
    return _mm256_set1_epi32(value);
}

INLINE floats token_float(const uint8_t *entry, int t)
{
    float value;
    __builtin_memcpy(&value, entry + 4 * t, sizeof value);
    return _mm256_set1_ps(value);
}

INLINE floats load_halves(const uint8_t *at)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}

INLINE ints bytes(int value)
{
    return _mm256_set1_epi8((char)value);
}

/* To the left, or to the right if negative: what crosses into another byte is masked away afterwards. */
INLINE ints shift(ints value, int left)
{
    return left > 0 ? _mm256_slli_epi32(value, left) : left < 0 ? _mm256_srli_epi32(value, -left) : value;
}

INLINE ints and_or(ints a, ints mask, ints b)
{
    return _mm256_or_si256(_mm256_and_si256(a, mask), b);
}

/* Vector i of the 32 k at `at`: 32 unsigned bytes, or of BYTES and CODES signed ones. */
INLINE ints unpack(enum quants quants, const uint8_t *at, const int i)
{
    const ints low_nibble = bytes(15);
    switch (quants) {
    case NIBBLES:
        return _mm256_and_si256(shift(load(at + i / 2 * 64), i % 2 * -4), low_nibble);
    case NIBBLES_1_BIT:
        return and_or(shift(load(at + i / 2 * 64), i % 2 * -4), low_nibble,
                      _mm256_and_si256(shift(load(at + 256), 4 - i), bytes(16)));
    case NIBBLES_2_BITS:
        return and_or(shift(load(at + i / 4 * 192 + i % 4 / 2 * 64), i % 2 * -4), low_nibble,
                      _mm256_and_si256(shift(load(at + i / 4 * 192 + 128), 4 - 2 * (i % 4)), bytes(48)));
    case BYTES:
        return _mm256_xor_si256(load(at + 64 * i), bytes(128));
    case TWO_BITS:
        return _mm256_and_si256(shift(load(at + i / 4 * 64), i % 4 * -2), bytes(3));
    case TWO_BITS_1_BIT:
        return and_or(shift(load(at + i / 4 * 64), i % 4 * -2), bytes(3),
                      _mm256_and_si256(shift(load(at + 128), 2 - i), bytes(4)));
    case CODES: {
        const ints codes = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113));
        return _mm256_shuffle_epi8(codes,
                                   _mm256_and_si256(shift(load(at + i / 2 * 64), i % 2 * -4), low_nibble));
    }
    default:
        return _mm256_setzero_si256();
    }
}

INLINE int is_signed(enum quants quants)
{
    return quants == BYTES || quants == CODES;
}

/* Vectors whose pairs of products, of at most 2 * 127 * the largest quant, add up within 16 bits. */
INLINE int vectors_in_16_bits(enum quants quants)
{
    return is_signed(quants) ? 1 : quants == NIBBLES_2_BITS ? 2 : quants == NIBBLES_1_BIT ? 4 : 8;
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

/* Asks for half of the lines of `size` bytes of weights at a distance, as in kernels_avx512.c. */
INLINE void fetch_ahead(const uint8_t *from, const int size, const int half)
{
    UNROLL for (int line = 0; line < size; line += 128)
    {
        _mm_prefetch((const char *)from + AHEAD + line + 64 * half, _MM_HINT_T0);
    }
}

/* sums[t] += by * products of vectors first to last - 1 with the tokens' words. */
INLINE void dots(enum quants quants, const int n, const uint8_t *at, const uint8_t *record, const int first,
                 const int last, ints by, ints *sums)
{
    const int step = vectors_in_16_bits(quants) < last - first ? vectors_in_16_bits(quants) : last - first;
    UNROLL for (int start = first; start < last; start += step)
    {
        ints pairs[MATMUL_TOKENS];
        UNROLL for (int i = start; i < start + step; i++)
        {
            const ints weights = unpack(quants, at, i);
            const ints magnitudes = is_signed(quants) ? _mm256_abs_epi8(weights) : weights;
            UNROLL for (int t = 0; t < n; t++)
            {
                ints word = token_word(record + i * 4 * n, t);
                if (is_signed(quants)) {
                    word = _mm256_sign_epi8(word, weights);
                }
                const ints products = _mm256_maddubs_epi16(magnitudes, word);
                pairs[t] = i == start ? products : _mm256_add_epi16(pairs[t], products);
                __asm__("" : "+x"(pairs[t])); /* GCC would add them up in another order, and spill them all */
            }
        }
        UNROLL for (int t = 0; t < n; t++)
        {
            sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(pairs[t], by));
        }
    }
}

/* ---- blocks of 32 k ------------------------------------------------------------------------------ */

INLINE void multiply_32(enum quants quants, enum scales scales, const int n, const uint8_t *head,
                        const uint8_t *body, const uint8_t *record, int64_t n_blocks, float *out, size_t stride)
{
    const int has_min = scales == SCALE_MIN, step = group_bytes(quants) + (has_min ? 64 : 32);
    const uint8_t *ahead = head;
    floats results[2][MATMUL_TOKENS];
    ROLL for (int half = 0; half < 2; half++)
    {
        UNROLL for (int t = 0; t < n; t++)
        {
            results[half][t] = _mm256_setzero_ps();
        }
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const uint8_t *x_scales = record + 8 * 4 * n, *totals = x_scales + 4 * n;
        ROLL for (int half = 0; half < 2; half++)
        {
            const floats scale = load_halves((has_min ? body : head) + 16 * half);
            const uint8_t *at = body + (has_min ? 64 : 0) + 32 * half;
            ints sums[MATMUL_TOKENS];
            UNROLL for (int t = 0; t < n; t++)
            {
                sums[t] = has_min || is_signed(quants) ? _mm256_setzero_si256() : token_word(totals, t);
            }
            fetch_ahead(ahead, step, half);
            dots(quants, n, at, record, 0, 8, _mm256_set1_epi16(1), sums);
            UNROLL for (int t = 0; t < n; t++)
            {
                floats value = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[t]), scale);
                if (has_min) {
                    value = _mm256_fmadd_ps(load_halves(body + 32 + 16 * half), token_float(totals, t), value);
                }
                results[half][t] = _mm256_fmadd_ps(value, token_float(x_scales, t), results[half][t]);
            }
        }
        ahead += step;
        head += has_min ? 0 : 32;
        body += group_bytes(quants) + (has_min ? 64 : 0);
        record += 10 * 4 * n;
    }
    ROLL for (int half = 0; half < 2; half++)
    {
        UNROLL for (int t = 0; t < n; t++)
        {
            _mm256_storeu_ps(out + (size_t)t * stride + 8 * half, results[half][t]);
        }
    }
}

/* ---- blocks of 256 k ----------------------------------------------------------------------------- */

/* The scales of 8 or 16 sub-blocks of half the rows as int32, and the mins as pairs of int16. */
INLINE void unpack_scales(enum scales scales, const uint8_t *head, const uint8_t *body, const int half, ints *scale,
                          ints *mins)
{
    const uint8_t *at = body + 32 * half;
    if (scales == SCALES_6_MINS) {
        const ints six = _mm256_set1_epi32(0x003f003f), four = _mm256_set1_epi32(0x000f000f),
                   two = _mm256_set1_epi32(0x00300030), low = _mm256_set1_epi32(0xffff);
        const ints w0 = load(at + 64), w1 = load(at + 128), w2 = load(at + 192);
        mins[0] = _mm256_and_si256(w0, six);
        mins[1] = _mm256_and_si256(shift(w0, -6), six);
        mins[2] = _mm256_and_si256(w1, six);
        mins[3] = _mm256_and_si256(shift(w1, -6), six);
        const ints pairs[4] = {
            _mm256_and_si256(w2, six),
            _mm256_and_si256(shift(w2, -6), six),
            and_or(shift(w0, -12), four, _mm256_and_si256(shift(w2, -8), two)),
            and_or(shift(w1, -12), four, _mm256_and_si256(shift(w2, -10), two)),
        };
        UNROLL for (int p = 0; p < 4; p++)
        {
            scale[2 * p] = _mm256_and_si256(pairs[p], low);
            scale[2 * p + 1] = shift(pairs[p], -16);
        }
    } else if (scales == SCALES_8) {
        UNROLL for (int j = 0; j < 16; j++)
        {
            scale[j] = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(body + 16 * j + 8 * half)));
        }
    } else if (scales == SCALES_6) {
        const ints six = _mm256_set1_epi32(63), offset = _mm256_set1_epi32(32);
        ints last = _mm256_setzero_si256();
        UNROLL for (int i = 0; i < 3; i++)
        {
            const ints w = load(at + 64 * i);
            UNROLL for (int j = 0; j < 5; j++)
            {
                scale[5 * i + j] = _mm256_sub_epi32(_mm256_and_si256(shift(w, -6 * j), six), offset);
            }
            last = _mm256_or_si256(last, shift(shift(w, -30), 2 * i));
        }
        scale[15] = _mm256_sub_epi32(last, offset);
    } else if (scales == SCALES_4_MINS) {
        const ints four = _mm256_set1_epi32(0x000f000f), low = _mm256_set1_epi32(0xffff);
        UNROLL for (int i = 0; i < 4; i++)
        {
            const ints w = load(at + 64 * i);
            const ints first = _mm256_and_si256(w, four), second = _mm256_and_si256(shift(w, -8), four);
            mins[2 * i] = _mm256_and_si256(shift(w, -4), four);
            mins[2 * i + 1] = _mm256_and_si256(shift(w, -12), four);
            scale[4 * i] = _mm256_and_si256(first, low);
            scale[4 * i + 1] = shift(first, -16);
            scale[4 * i + 2] = _mm256_and_si256(second, low);
            scale[4 * i + 3] = shift(second, -16);
        }
    } else if (scales == SCALES_6_LONG) {
        const ints four = _mm256_set1_epi32(15), two = _mm256_set1_epi32(48), offset = _mm256_set1_epi32(32);
        const ints low = load(at);
        const ints high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(head + 32 + 16 * half)));
        UNROLL for (int j = 0; j < 8; j++)
        {
            const ints value = and_or(shift(low, -4 * j), four, _mm256_and_si256(shift(high, 4 - 2 * j), two));
            scale[j] = _mm256_sub_epi32(value, offset);
        }
    }
}

INLINE int scales_bytes(enum scales scales)
{
    return scales == SCALES_6 ? 192 : scales == SCALES_6_LONG ? 64 : 256;
}

/* An int32 that fits in 16 bits, twice in each lane. */
INLINE ints twice(ints value)
{
    const __m128i low = _mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
    return _mm256_shuffle_epi8(value, _mm256_broadcastsi128_si256(low));
}

INLINE void multiply_256(enum quants quants, enum scales scales, const int n, const uint8_t *head,
                         const uint8_t *body, const uint8_t *record, int64_t n_blocks, float *out, size_t stride)
{
    const int in_body = scales == SCALES_6_MINS, has_min = in_body || scales == SCALES_4_MINS;
    const int n_sub = in_body || scales == SCALES_6_LONG ? 8 : 16, vectors = 64 / n_sub;
    const int head_bytes = in_body ? 0 : scales == SCALES_4_MINS || scales == SCALES_6_LONG ? 64 : 32;
    const int n_sums = has_min ? n_sub / 2 : n_sub;
    const int block_bytes = head_bytes + scales_bytes(scales) + 8 * group_bytes(quants);
    const uint8_t *block = head; /* counted from the panel's start, as kernels_avx512.c says */
    floats results[2][MATMUL_TOKENS];
    ROLL for (int half = 0; half < 2; half++)
    {
        UNROLL for (int t = 0; t < n; t++)
        {
            results[half][t] = _mm256_setzero_ps();
        }
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const uint8_t *x_sums = record + 64 * 4 * n, *x_scales = x_sums + n_sums * 4 * n;
        ROLL for (int half = 0; half < 2; half++)
        {
            ints scale[16], mins[8];
            const uint8_t *ahead = block;
            fetch_ahead(ahead, head_bytes + scales_bytes(scales), half);
            ahead += head_bytes + scales_bytes(scales);
            unpack_scales(scales, head, body, half, scale, mins);
            const floats weight_scale = load_halves((in_body ? body : head) + 16 * half);
            ints products[MATMUL_TOKENS];
            UNROLL for (int t = 0; t < n; t++)
            {
                products[t] = _mm256_setzero_si256();
            }
            const uint8_t *at = body + scales_bytes(scales) + 32 * half, *words = record;
            /* A turn is 32 k: one sub-block, or two. */
            ROLL for (int turn = 0; turn < 8; turn++)
            {
                fetch_ahead(ahead, group_bytes(quants), half);
                ahead += group_bytes(quants);
                UNROLL for (int sub = 0; sub < 8 / vectors; sub++)
                {
                    const int j = turn * (8 / vectors) + sub;
                    dots(quants, n, at, words, sub * vectors, (sub + 1) * vectors, twice(scale[j]), products);
                    if (!has_min && !is_signed(quants)) {
                        UNROLL for (int t = 0; t < n; t++)
                        {
                            const ints initial = token_word(x_sums + j * 4 * n, t);
                            products[t] = _mm256_add_epi32(products[t], _mm256_mullo_epi32(scale[j], initial));
                        }
                    }
                }
                at += group_bytes(quants);
                words += 8 * 4 * n;
            }
            UNROLL for (int t = 0; t < n; t++)
            {
                const floats x_scale = token_float(x_scales, t);
                floats result = results[half][t];
                result = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[t]),
                                         _mm256_mul_ps(weight_scale, x_scale), result);
                if (has_min) {
                    const floats min_scale = load_halves((in_body ? body : head) + 32 + 16 * half);
                    ints sum = _mm256_setzero_si256();
                    UNROLL for (int i = 0; i < n_sums; i++)
                    {
                        sum = _mm256_add_epi32(sum,
                                               _mm256_madd_epi16(mins[i], token_word(x_sums + i * 4 * n, t)));
                    }
                    result = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(min_scale, x_scale),
                                              result);
                }
                results[half][t] = result;
            }
        }
        block += block_bytes;
        head += head_bytes;
        body += block_bytes - head_bytes;
        record += (64 + n_sums + 1) * 4 * n;
    }
    ROLL for (int half = 0; half < 2; half++)
    {
        UNROLL for (int t = 0; t < n; t++)
        {
            _mm256_storeu_ps(out + (size_t)t * stride + 8 * half, results[half][t]);
        }
    }
}

/* ---- floats -------------------------------------------------------------------------------------- */

INLINE floats load_floats(enum quants quants, const uint8_t *at)
{
    return quants == HALVES ? load_halves(at)
                            : _mm256_castsi256_ps(_mm256_slli_epi32(
                                  _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16));
}

INLINE void multiply_floats(enum quants quants, const int n, const uint8_t *body, const uint8_t *record,
                            int64_t n_blocks, float *out, size_t stride)
{
    ROLL for (int half = 0; half < 2; half++)
    {
        const uint8_t *weights = body + 16 * half, *x = record;
        floats even[MATMUL_TOKENS], odd[MATMUL_TOKENS];
        UNROLL for (int t = 0; t < n; t++)
        {
            even[t] = odd[t] = _mm256_setzero_ps();
        }
        for (int64_t k = 0; k < 32 * n_blocks; k += 2) {
            const floats low = load_floats(quants, weights), high = load_floats(quants, weights + 32);
            UNROLL for (int t = 0; t < n; t++)
            {
                even[t] = _mm256_fmadd_ps(low, token_float(x, t), even[t]);
                odd[t] = _mm256_fmadd_ps(high, token_float(x + 4 * n, t), odd[t]);
            }
            weights += 64;
            x += 2 * 4 * n;
        }
        UNROLL for (int t = 0; t < n; t++)
        {
            _mm256_storeu_ps(out + (size_t)t * stride + 8 * half, _mm256_add_ps(even[t], odd[t]));
        }
    }
}

#define FIND matmul_avx2_kernel
#include "kernels.inc"

#else

matmul_kernel *matmul_avx2_kernel(const struct matmul_type *type, int32_t n_tokens)
{
    (void)type, (void)n_tokens;
    return NULL;
}

#endif
