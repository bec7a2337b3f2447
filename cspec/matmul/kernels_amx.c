/* Kernels for AMX: a tile of a panel's bytes, 64 k of 16 rows, times a tile of up to 16 tokens' activations.
 *
 * The unit that multiplies tiles takes as long for 8 tokens as eight dot products take for one, so whatever is done for
 * each sub-block and token would be most of the work. Where a block has integer scales the unpacked quants are therefore
 * multiplied by them, in two parts that fit bytes, and one pair of sums goes through the whole block:
 *
 *     sum over j of scale[j] * (q . x of sub-block j)  =  low . x  +  high . x * 2^shift
 *
 * an integer, and the same as kernels_c.c's in whatever order it is added up. */
#include "matmul.h"

#ifdef MATMUL_AMX_BUILT

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#include "unpack_512.inc"

/* GCC 12's own functions for tiles do not say which memory they read and write. */
#define LOAD_TILE(tile, at, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(at), "r"((int64_t)(stride)) : "memory")
#define STORE_TILE(tile, at) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(at), "r"((int64_t)64) : "memory")
#define CLEAR_TILE(tile) __asm__ volatile("tilezero %%tmm" #tile::)
/* sums += x * weights: signed x, and unsigned or signed weights */
#define DOT_UNSIGNED(sums, x, weights) \
    __asm__ volatile("tdpbsud %%tmm" #weights ", %%tmm" #x ", %%tmm" #sums::)
#define DOT_SIGNED(sums, x, weights) \
    __asm__ volatile("tdpbssd %%tmm" #weights ", %%tmm" #x ", %%tmm" #sums::)

/* Tiles: 0 to 3 sums; 4 and 5 activations; 6 and 7 weights. Where there are more than 16 tokens, sums and activations are
 * of two halves with equally many, which overlap by a token where their number is odd. */
enum { HALF = MATMUL_ROW_TOKENS / 2, WEIGHTS = 6 };

struct matmul_tile_config matmul_amx_config(const struct matmul_type *type, int32_t n_tokens)
{
    const int32_t rows = n_tokens > HALF ? (n_tokens + 1) / 2 : n_tokens, bytes = type->block == 32 ? 32 : 64;
    struct matmul_tile_config config = {.palette = 1};
    for (int32_t tile = 0; tile < 8; tile++) {
        config.rows[tile] = (uint8_t)(tile < WEIGHTS ? rows : bytes / 4);
        config.row_bytes[tile] = (uint16_t)(tile == 4 || tile == 5 ? bytes : 64);
    }
    return config;
}

/* sums[half][i]: [16 tokens][16 rows] */
typedef int32_t tile_sums[16][MATMUL_ROWS];

INLINE void store(uint8_t *at, ints value)
{
    _mm512_store_si512(at, value);
}

INLINE floats *result_of(float *results, int32_t t)
{
    return (floats *)(void *)(results + t * MATMUL_ROWS);
}

/* ---- blocks of 32 k ------------------------------------------------------------------------------ */

enum { CHUNK = 4 /* blocks that are multiplied together */ };

/* Bytes of a block's body. */
INLINE int body_size(enum quants quants, enum scales scales)
{
    return group_bytes(quants) + (scales == SCALE_MIN ? 64 : 0);
}

/* Unpacks n_blocks blocks, unless their quants are whole bytes. */
INLINE void unpack_chunk(enum quants quants, enum scales scales, const int n_blocks, const uint8_t *body, uint8_t *to)
{
    const int size = body_size(quants, scales);
    for (int j = 0; quants != BYTES && j < n_blocks; j++, body += size, to += 512) {
        const uint8_t *at = scales == SCALE_MIN ? body + 64 : body;
        ints packed = _mm512_setzero_si512();
        const ints high = high_bits(quants, at, 0);
        UNROLL for (int i = 0; i < 8; i++)
        {
            if (i % per_packed(quants) == 0) {
                packed = load(at + packed_at(quants, i));
            }
            store(to + i * 64, unpack(quants, packed, high, i));
        }
    }
}

#define DOT_BLOCK(j)                                                      \
    if (n_blocks > j) {                                                   \
        LOAD_TILE(6, weights + j * step, 64);                             \
        LOAD_TILE(4, x + (j * n + start) * 32, 32);                       \
        CLEAR_TILE(j);                                                    \
        DOT_UNSIGNED(j, 4, 6);                                            \
    }

INLINE void dot_chunk(const int n_blocks, const uint8_t *weights, const int step, const uint8_t *x, int32_t n,
                      int32_t start)
{
    DOT_BLOCK(0)
    DOT_BLOCK(1)
    DOT_BLOCK(2)
    DOT_BLOCK(3)
}

INLINE void store_chunk(const int n_blocks, tile_sums *sums)
{
    STORE_TILE(0, sums[0]);
    if (n_blocks > 1) {
        STORE_TILE(1, sums[1]);
        STORE_TILE(2, sums[2]);
        STORE_TILE(3, sums[3]);
    }
}

/* The results of the tokens from `start` on. */
INLINE void finish_32(enum quants quants, enum scales scales, const int n_blocks, const uint8_t *head,
                      const uint8_t *body, const uint8_t *words, int32_t n, int32_t start, int32_t end,
                      const tile_sums *sums, float *results)
{
    const int has_min = scales == SCALE_MIN, size = body_size(quants, scales);
    floats scale[CHUNK], min[CHUNK];
    UNROLL for (int j = 0; j < n_blocks; j++)
    {
        scale[j] = load_halves(has_min ? body + j * size : head + j * 32);
        min[j] = has_min ? load_halves(body + j * size + 32) : _mm512_setzero_ps();
    }
    for (int32_t t = start; t < end; t++) {
        floats result = *result_of(results, t);
        UNROLL for (int j = 0; j < n_blocks; j++)
        {
            const uint8_t *word = words + (j * n + t) * 8;
            ints sum = _mm512_load_si512(sums[j][t - start]);
            if (!has_min) {
                sum = _mm512_add_epi32(sum, token_word(word, 1));
            }
            floats value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale[j]);
            if (has_min) {
                value = _mm512_fmadd_ps(min[j], token_float(word, 1), value);
            }
            result = _mm512_fmadd_ps(value, token_float(word, 0), result);
        }
        *result_of(results, t) = result;
    }
}

/* n_runs times n_blocks blocks. What a step waits for is begun a step before it: weights are unpacked a chunk before they are
 * multiplied (a tile is loaded only when the stores to it have left the core, which they do in the order of the program),
 * and sums are used when the next are on their way. */
INLINE void multiply_runs(enum quants quants, enum scales scales, const int n_blocks, const uint8_t *head,
                          const uint8_t *body, const uint8_t *ahead, const uint8_t *x, const uint8_t *words, int32_t n,
                          int64_t n_runs, float *results)
{
    const int has_min = scales == SCALE_MIN, size = body_size(quants, scales);
    const int head_bytes = has_min ? 0 : n_blocks * 32, body_bytes = n_blocks * size;
    const int step = quants == BYTES ? size : 512;
    const int32_t half = n > HALF ? n / 2 : 0;
    _Alignas(64) uint8_t unpacked[2][CHUNK * 512];
    _Alignas(64) tile_sums sums[CHUNK];
    unpack_chunk(quants, scales, n_blocks, body, unpacked[0]);
    for (int64_t run = 0; run < n_runs; run++) {
        const uint8_t *weights = quants == BYTES ? body + (has_min ? 64 : 0) : unpacked[run % 2];
        fetch_ahead(ahead, head_bytes + body_bytes);
        ahead += head_bytes + body_bytes;
        if (run + 1 < n_runs) {
            unpack_chunk(quants, scales, n_blocks, body + body_bytes, unpacked[(run + 1) % 2]);
        }
        dot_chunk(n_blocks, weights, step, x, n, 0);
        if (run > 0) {
            finish_32(quants, scales, n_blocks, head - head_bytes, body - body_bytes, words - n_blocks * 8 * n, n, half,
                      n, sums, results);
        }
        store_chunk(n_blocks, sums);
        if (n > HALF) {
            /* Of an odd number of tokens the one in the middle is computed again, not finished again. */
            dot_chunk(n_blocks, weights, step, x, n, half);
            finish_32(quants, scales, n_blocks, head, body, words, n, 0, half, sums, results);
            store_chunk(n_blocks, sums);
        }
        head += head_bytes;
        body += body_bytes;
        x += n_blocks * 32 * n;
        words += n_blocks * 8 * n;
    }
    finish_32(quants, scales, n_blocks, head - head_bytes, body - body_bytes, words - n_blocks * 8 * n, n, half, n, sums,
              results);
}

INLINE void multiply_32(enum quants quants, enum scales scales, const uint8_t *head, const uint8_t *body,
                        const uint8_t *x, const uint8_t *words, int32_t n, int64_t n_blocks, float *results)
{
    const int head_bytes = scales == SCALE_MIN ? 0 : 32, body_bytes = body_size(quants, scales);
    const int64_t chunks = n_blocks / CHUNK, done = chunks * CHUNK;
    if (chunks > 0) {
        multiply_runs(quants, scales, CHUNK, head, body, head, x, words, n, chunks, results);
    }
    if (done < n_blocks) {
        multiply_runs(quants, scales, 1, head + done * head_bytes, body + done * body_bytes,
                      head + done * (head_bytes + body_bytes), x + done * 32 * n, words + done * 8 * n, n,
                      n_blocks - done, results);
    }
}

/* ---- blocks of 256 k ----------------------------------------------------------------------------- */

INLINE int with_mins(enum scales scales)
{
    return scales == SCALES_6_MINS || scales == SCALES_4_MINS;
}

INLINE int sub_blocks(enum scales scales)
{
    return scales == SCALES_6_MINS || scales == SCALES_6_LONG ? 8 : 16;
}

/* What the quants of signed scales are too high by. */
INLINE int offset_of(enum scales scales)
{
    return scales == SCALES_8 ? 32 : scales == SCALES_6 ? 4 : 128;
}

/* What the second part of the scaled quants is multiplied by, as a shift; 0: there is none, they are bytes. */
INLINE int part_shift(enum scales scales)
{
    return scales == SCALES_6_MINS ? 3 : scales == SCALES_4_MINS ? 0 : 8;
}

INLINE int head_size(enum scales scales)
{
    return scales == SCALES_6_MINS ? 0 : scales == SCALES_4_MINS || scales == SCALES_6_LONG ? 64 : 32;
}

/* Bytes 0 and 1 of each lane in both of its halves, or byte 0 in all four. */
INLINE ints repeat_half(ints value)
{
    return _mm512_shuffle_epi8(value, _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100));
}

INLINE ints repeat_byte(ints value)
{
    return _mm512_shuffle_epi8(value, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
}

/* 4 k of each row times the rows' scales, at `to` and, a second part, 1024 bytes further.
 *
 * Unsigned scales are cut into two of 3 bits, or have 4 bits with quants of 2: the product of two neighbouring bytes and such
 * a number is one multiplication of 16 bits, without a carry. Signed scales: q * s + offset * (-s - 1), both of whose
 * factors are bytes, is (q - offset) * s - offset, 16 bits, the low and the high 8 of which are the parts. */
INLINE void scale_quants(enum scales scales, ints quants, const ints *by, uint8_t *to)
{
    if (with_mins(scales)) {
        store(to, _mm512_mullo_epi16(quants, by[0]));
        if (part_shift(scales) != 0) {
            store(to + 1024, _mm512_mullo_epi16(quants, by[1]));
        }
        return;
    }
    const ints low = _mm512_set1_epi16(0xff), high = bytes(-1) ^ low;
    const int offset = offset_of(scales);
    const ints even = _mm512_maddubs_epi16(and_or(quants, low, _mm512_set1_epi16((short)(offset << 8))), by[0]);
    const ints odd = _mm512_maddubs_epi16(and_or(quants, high, _mm512_set1_epi16((short)offset)), by[1]);
    store(to, and_or(even, low, _mm512_slli_epi16(odd, 8)));
    store(to + 1024, and_or(odd, high, _mm512_srli_epi16(even, 8)));
}

/* The factors of scale_quants. */
INLINE void factors(enum scales scales, ints scale, ints *by)
{
    if (scales == SCALES_6_MINS) {
        const ints half = repeat_half(scale);
        by[0] = _mm512_and_si512(half, _mm512_set1_epi16(7));
        by[1] = _mm512_srli_epi16(half, 3);
    } else if (scales == SCALES_4_MINS) {
        by[0] = by[1] = repeat_half(scale);
    } else {
        const ints byte = repeat_byte(scale);
        by[0] = _mm512_xor_si512(byte, _mm512_set1_epi32((int)0xff00ff00));
        by[1] = _mm512_xor_si512(byte, _mm512_set1_epi32(0x00ff00ff));
    }
}

/* 32 k, of one sub-block or two with these scales. */
INLINE void unpack_scaled(enum quants quants, enum scales scales, const uint8_t *at, const ints *scale, uint8_t *to)
{
    ints packed = _mm512_setzero_si512(), high = packed, by[2], by_high[2];
    const int vectors = 64 / sub_blocks(scales);
    UNROLL for (int i = 0; i < 8; i++)
    {
        if (i % vectors == 0) {
            factors(scales, scale[i / vectors], by);
            by_high[0] = _mm512_slli_epi16(by[0], 12);
            by_high[1] = _mm512_slli_epi16(by[1], 12);
            high = high_bits(quants, at, i);
        }
        if (i % per_packed(quants) == 0) {
            packed = load(at + packed_at(quants, i));
        }
        if (quants == NIBBLES && i % 2 == 1) {
            /* 16 q times 2^12 by, of which the upper half is q * by: a shift less. */
            const ints nibbles = _mm512_and_si512(packed, bytes(0xf0));
            store(to + i * 64, _mm512_mulhi_epu16(nibbles, by_high[0]));
            store(to + i * 64 + 1024, _mm512_mulhi_epu16(nibbles, by_high[1]));
        } else {
            scale_quants(scales, unpack(quants, packed, high, i), by, to + i * 64);
        }
    }
}

/* The results of tokens `first` to `end` - 1, whose sums begin with token `first`. */
INLINE void finish_half(enum scales scales, floats weight_scale, floats min_scale, const ints *mins,
                        const uint8_t *words, int32_t first, int32_t end, const tile_sums *sums, float *results)
{
    const int n_sums = with_mins(scales) ? sub_blocks(scales) / 2 : 1;
    const uint8_t *word = words + first * 4 * (n_sums + 1);
    for (int32_t t = first, row = 0; t < end; t++, row++, word += 4 * (n_sums + 1)) {
        ints product = _mm512_load_si512(sums[0][row]);
        if (part_shift(scales) != 0) {
            product = _mm512_add_epi32(product, shift(_mm512_load_si512(sums[1][row]), part_shift(scales)));
        }
        if (!with_mins(scales)) {
            product = _mm512_add_epi32(product, token_word(word, 0));
        }
        const floats x_scale = token_float(word, n_sums);
        floats result = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), _mm512_mul_ps(weight_scale, x_scale),
                                        *result_of(results, t));
        if (with_mins(scales)) {
            ints sum = _mm512_setzero_si512();
            UNROLL for (int i = 0; i < n_sums; i++)
            {
                sum = _mm512_dpwssd_epi32(sum, mins[i], token_word(word, i));
            }
            result = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(min_scale, x_scale), result);
        }
        *result_of(results, t) = result;
    }
}

INLINE void finish_256(enum scales scales, const uint8_t *head, const uint8_t *body, const uint8_t *words, int32_t n,
                       const tile_sums *sums, float *results)
{
    const int in_body = scales == SCALES_6_MINS;
    const floats weight_scale = load_halves(in_body ? body : head);
    const floats min_scale = with_mins(scales) ? load_halves(in_body ? body + 32 : head + 32) : weight_scale;
    ints scale[16], mins[8];
    unpack_scales(scales, head, body, scale, mins);
    if (n > HALF) {
        finish_half(scales, weight_scale, min_scale, mins, words, 0, n / 2, sums, results);
    }
    finish_half(scales, weight_scale, min_scale, mins, words, n > HALF ? n / 2 : 0, n, n > HALF ? sums + 2 : sums,
                results);
}

/* Quarter `part` of a block, 64 k, scaled. */
INLINE void unpack_quarter(enum quants quants, enum scales scales, const uint8_t *body, const ints *scale, int part,
                           uint8_t *to)
{
    const int each = sub_blocks(scales) / 8;
    _Pragma("GCC unroll 1") for (int turn = 2 * part; turn < 2 * part + 2; turn++, to += 512)
    {
        ints by[2];
        UNROLL for (int i = 0; i < each; i++)
        {
            const int j = each * turn + i;
            by[i] = scales == SCALES_8
                        ? _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(body + 16 * j)))
                        : scale[j];
        }
        unpack_scaled(quants, scales, body + scales_bytes(scales) + turn * group_bytes(quants), by, to);
    }
}

/* sums of quarter `part`: x of a block. */
INLINE void dot_quarter(enum scales scales, const uint8_t *x, const uint8_t *scaled, int part, int32_t n)
{
    const int unsigned_second = scales == SCALES_6_MINS, two_parts = part_shift(scales) != 0;
    LOAD_TILE(6, scaled, 64);
    LOAD_TILE(4, x + part * 64 * n, 64);
    DOT_UNSIGNED(0, 4, 6);
    if (two_parts) {
        LOAD_TILE(7, scaled + 1024, 64);
        if (unsigned_second) {
            DOT_UNSIGNED(1, 4, 7);
        } else {
            DOT_SIGNED(1, 4, 7);
        }
    }
    if (n > HALF) {
        LOAD_TILE(5, x + (part * n + n / 2) * 64, 64);
        DOT_UNSIGNED(2, 5, 6);
        if (two_parts && unsigned_second) {
            DOT_UNSIGNED(3, 5, 7);
        } else if (two_parts) {
            DOT_SIGNED(3, 5, 7);
        }
    }
}

/* What a step waits for is begun a step before it: weights are unpacked a quarter of a block before they are multiplied
 * (a tile is loaded only when the stores to it have left the core, which they do in the order of the program), and a
 * block's sums are used when the next block's are on their way. */
INLINE void multiply_256(enum quants quants, enum scales scales, const uint8_t *head, const uint8_t *body,
                         const uint8_t *x, const uint8_t *words, int32_t n, int64_t n_blocks, float *results)
{
    const int two_parts = part_shift(scales) != 0;
    const int head_bytes = head_size(scales), body_bytes = scales_bytes(scales) + 8 * group_bytes(quants);
    const size_t words_bytes = 4 * (size_t)n * (size_t)((with_mins(scales) ? sub_blocks(scales) / 2 : 1) + 1);
    const uint8_t *ahead = head;
    _Alignas(64) uint8_t scaled[2][2048];
    _Alignas(64) tile_sums sums[4];
    ints scale[16], mins[8];
    unpack_scales(scales, head, body, scale, mins);
    unpack_quarter(quants, scales, body, scale, 0, scaled[0]);
    for (int64_t b = 0; b < n_blocks; b++) {
        CLEAR_TILE(0);
        CLEAR_TILE(1);
        if (n > HALF) {
            CLEAR_TILE(2);
            CLEAR_TILE(3);
        }
        _Pragma("GCC unroll 1") for (int part = 0; part < 3; part++)
        {
            fetch_ahead(ahead, 2 * group_bytes(quants));
            ahead += 2 * group_bytes(quants);
            unpack_quarter(quants, scales, body, scale, part + 1, scaled[(part + 1) % 2]);
            dot_quarter(scales, x, scaled[part % 2], part, n);
        }
        fetch_ahead(ahead, head_bytes + scales_bytes(scales) + 2 * group_bytes(quants));
        ahead += head_bytes + scales_bytes(scales) + 2 * group_bytes(quants);
        if (b + 1 < n_blocks) {
            unpack_scales(scales, head + head_bytes, body + body_bytes, scale, mins);
            unpack_quarter(quants, scales, body + body_bytes, scale, 0, scaled[0]);
        }
        dot_quarter(scales, x, scaled[1], 3, n);
        if (b > 0) {
            finish_256(scales, head - head_bytes, body - body_bytes, words - words_bytes, n, sums, results);
        }
        STORE_TILE(0, sums[0]);
        if (two_parts) {
            STORE_TILE(1, sums[1]);
        }
        if (n > HALF) {
            STORE_TILE(2, sums[2]);
            if (two_parts) {
                STORE_TILE(3, sums[3]);
            }
        }
        head += head_bytes;
        body += body_bytes;
        x += 256 * n;
        words += words_bytes;
    }
    finish_256(scales, head - head_bytes, body - body_bytes, words - words_bytes, n, sums, results);
}

/* ---- a kernel for each type ---------------------------------------------------------------------- */

#define KERNEL(quants, scales, head_bytes)                                                                        \
    TARGET static void quants##_##scales(const uint8_t *panel, const uint8_t *x, const uint8_t *words, int32_t n, \
                                         int64_t n_blocks, float *out, size_t stride)                             \
    {                                                                                                             \
        const uint8_t *body = panel + (n_blocks * head_bytes + 63) / 64 * 64;                                     \
        _Alignas(64) float results[MATMUL_ROW_TOKENS * MATMUL_ROWS];                                              \
        __builtin_memset(results, 0, (size_t)n * MATMUL_ROWS * sizeof(float));                                    \
        if (scales == SCALE || scales == SCALE_MIN) {                                                             \
            multiply_32(quants, scales, panel, body, x, words, n, n_blocks, results);                             \
        } else {                                                                                                  \
            multiply_256(quants, scales, panel, body, x, words, n, n_blocks, results);                            \
        }                                                                                                         \
        for (int32_t t = 0; t < n; t++) {                                                                         \
            _mm512_storeu_ps(out + (size_t)t * stride, *result_of(results, t));                                   \
        }                                                                                                         \
    }

#include "each_type.inc"

FOR_EACH_QUANTISED(KERNEL)

#define ENTRY(quants, scales, head) {quants, scales, quants##_##scales},
static const struct {
    enum quants quants;
    enum scales scales;
    matmul_rows_kernel *kernel;
} kernels[] = {FOR_EACH_QUANTISED(ENTRY)};

matmul_rows_kernel *matmul_amx_kernel(const struct matmul_type *type)
{
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        if (kernels[i].quants == type->quants && kernels[i].scales == type->scales) {
            return kernels[i].kernel;
        }
    }
    return NULL;
}

#else

struct matmul_tile_config matmul_amx_config(const struct matmul_type *type, int32_t n_tokens)
{
    (void)type, (void)n_tokens;
    return (struct matmul_tile_config){0};
}

matmul_rows_kernel *matmul_amx_kernel(const struct matmul_type *type)
{
    (void)type;
    return NULL;
}

#endif
