/* Kernels for AMX: 64 k of a panel's 16 rows, a tile register full, times 64 k of up to 16 tokens.
 *
 * The unit that multiplies tiles takes as long for 8 tokens as eight dot products take for one, so whatever is done for
 * each sub-block and token would be most of the work. The unpacked quants are therefore multiplied by the sub-blocks' integer
 * scales, in two parts that fit bytes, and one pair of sums goes through the whole block:
 *
 *     sum over j of scale[j] * (q . x of sub-block j)  =  first . x  +  second . x * 2^shift
 *
 * an integer, and the same as kernels_c.c's in whatever order it is added up. Types with one scale, a float, to 32 k have no
 * such way, and AVX-512 is as fast for them. */
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

/* Tile registers: 0 to 3 sums; 4 and 5 activations; 6 and 7 weights. The tokens of a tile are cut into parts of equally
 * many, up to 16, of which the last two overlap where they do not come out even. Two parts at a time meet the weights. */
enum { PART = 16, WEIGHTS = 6 };

static inline int32_t count_parts(int32_t n)
{
    return (n + PART - 1) / PART;
}

static inline int32_t part_size(int32_t n)
{
    return (n + count_parts(n) - 1) / count_parts(n);
}

static inline int32_t part_start(int32_t n, int32_t part)
{
    const int32_t size = part_size(n);
    return (part + 1) * size <= n ? part * size : n - size;
}

struct matmul_tile_config matmul_amx_config(int32_t n_tokens)
{
    struct matmul_tile_config config = {.palette = 1};
    for (int32_t tile = 0; tile < 8; tile++) {
        config.rows[tile] = (uint8_t)(tile < WEIGHTS ? part_size(n_tokens) : 16);
        config.row_bytes[tile] = 64;
    }
    return config;
}

typedef int32_t tile_sums[16][MATMUL_ROWS];

INLINE void store(uint8_t *at, ints value)
{
    _mm512_store_si512(at, value);
}

INLINE floats *result_of(float *results, int32_t t)
{
    return (floats *)(void *)(results + t * MATMUL_ROWS);
}

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
INLINE void finish_part(enum scales scales, floats weight_scale, floats min_scale, const ints *mins,
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

/* A block of a panel, and all tokens' words of it. */
struct block {
    const uint8_t *head, *body, *words;
};

/* The results of parts `first` and the next, if there is one, of a block, whose sums are those. */
INLINE void finish(enum scales scales, const struct block *block, int32_t n, int32_t first, const tile_sums *sums,
                   float *results)
{
    const int in_body = scales == SCALES_6_MINS;
    const uint8_t *halves = in_body ? block->body : block->head;
    const floats weight_scale = load_halves(halves);
    const floats min_scale = with_mins(scales) ? load_halves(halves + 32) : weight_scale;
    const int32_t n_parts = count_parts(n), size = part_size(n), last = first + 1 < n_parts ? first + 1 : first;
    ints scale[16], mins[8];
    unpack_scales(scales, block->head, block->body, scale, mins);
    for (int32_t part = first; part <= last; part++) {
        /* Tokens that the next part has too are left to it. */
        const int32_t start = part_start(n, part), end = part + 1 < n_parts ? part_start(n, part + 1) : start + size;
        finish_part(scales, weight_scale, min_scale, mins, block->words, start, end, sums + 2 * (part - first), results);
    }
}

/* A quarter of a block, 64 k, scaled. */
INLINE void unpack_quarter(enum quants quants, enum scales scales, const uint8_t *body, const ints *scale, int quarter,
                           uint8_t *to)
{
    const int each = sub_blocks(scales) / 8;
    _Pragma("GCC unroll 1") for (int turn = 2 * quarter; turn < 2 * quarter + 2; turn++, to += 512)
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

/* sums of quarter `quarter`, of parts `first` and, if there is one, the next; x: of a block. */
INLINE void dot_quarter(enum scales scales, const uint8_t *x, const uint8_t *scaled, int quarter, int32_t n, int32_t first)
{
    const int unsigned_second = scales == SCALES_6_MINS, two = part_shift(scales) != 0;
    x += quarter * 64 * n;
    LOAD_TILE(6, scaled, 64);
    LOAD_TILE(4, x + part_start(n, first) * 64, 64);
    DOT_UNSIGNED(0, 4, 6);
    if (two) {
        LOAD_TILE(7, scaled + 1024, 64);
        if (unsigned_second) {
            DOT_UNSIGNED(1, 4, 7);
        } else {
            DOT_SIGNED(1, 4, 7);
        }
    }
    if (first + 1 < count_parts(n)) {
        LOAD_TILE(5, x + part_start(n, first + 1) * 64, 64);
        DOT_UNSIGNED(2, 5, 6);
        if (two && unsigned_second) {
            DOT_UNSIGNED(3, 5, 7);
        } else if (two) {
            DOT_SIGNED(3, 5, 7);
        }
    }
}

/* Results [n][16]. What a step waits for is begun a step before it: weights are unpacked a quarter of a block before they are
 * multiplied (a tile is loaded only when the stores to it have left the core, which they do in the order of the program),
 * and sums are used when the next ones are on their way. */
INLINE void multiply(enum quants quants, enum scales scales, const uint8_t *head, const uint8_t *body,
                     const uint8_t *x, const uint8_t *words, int32_t n, int64_t n_blocks, float *results)
{
    const int two = part_shift(scales) != 0, head_bytes = head_size(scales);
    const int group = group_bytes(quants), body_bytes = scales_bytes(scales) + 8 * group;
    const size_t words_bytes = 4 * (size_t)n * (size_t)((with_mins(scales) ? sub_blocks(scales) / 2 : 1) + 1);
    const uint8_t *ahead = head;
    _Alignas(64) uint8_t scaled[4][2048];
    _Alignas(64) tile_sums sums[4];
    ints scale[16], mins[8];
    struct block block = {head, body, words}, waiting = block; /* whose sums are not used yet */
    int32_t waiting_part = -1;
    unpack_scales(scales, head, body, scale, mins);
    unpack_quarter(quants, scales, body, scale, 0, scaled[0]);
    for (int64_t b = 0; b < n_blocks; b++) {
        for (int32_t part = 0; part < count_parts(n); part += 2) {
            CLEAR_TILE(0);
            CLEAR_TILE(1);
            CLEAR_TILE(2);
            CLEAR_TILE(3);
            _Pragma("GCC unroll 1") for (int quarter = 0; quarter < 3; quarter++)
            {
                if (part == 0) {
                    fetch_ahead(ahead, 2 * group);
                    ahead += 2 * group;
                    unpack_quarter(quants, scales, block.body, scale, quarter + 1, scaled[quarter + 1]);
                }
                dot_quarter(scales, x, scaled[quarter], quarter, n, part);
            }
            if (part + 2 >= count_parts(n)) {
                fetch_ahead(ahead, head_bytes + scales_bytes(scales) + 2 * group);
                ahead += head_bytes + scales_bytes(scales) + 2 * group;
                if (b + 1 < n_blocks) {
                    unpack_scales(scales, block.head + head_bytes, block.body + body_bytes, scale, mins);
                    unpack_quarter(quants, scales, block.body + body_bytes, scale, 0, scaled[0]);
                }
            }
            dot_quarter(scales, x, scaled[3], 3, n, part);
            if (waiting_part >= 0) {
                finish(scales, &waiting, n, waiting_part, sums, results);
            }
            STORE_TILE(0, sums[0]);
            if (two) {
                STORE_TILE(1, sums[1]);
            }
            if (part + 1 < count_parts(n)) {
                STORE_TILE(2, sums[2]);
                if (two) {
                    STORE_TILE(3, sums[3]);
                }
            }
            waiting = block;
            waiting_part = part;
        }
        block = (struct block){block.head + head_bytes, block.body + body_bytes, block.words + words_bytes};
        x += 256 * n;
    }
    finish(scales, &waiting, n, waiting_part, sums, results);
}

/* ---- a kernel for each type ---------------------------------------------------------------------- */

#define KERNEL(quants, scales, head_bytes)                                                                        \
    TARGET static void quants##_##scales(const uint8_t *panel, const uint8_t *x, const uint8_t *words, int32_t n, \
                                         int64_t n_blocks, float *out, size_t stride)                             \
    {                                                                                                             \
        const uint8_t *body = panel + (n_blocks * head_bytes + 63) / 64 * 64;                                     \
        _Alignas(64) float results[MATMUL_ROW_TOKENS * MATMUL_ROWS];                                              \
        __builtin_memset(results, 0, (size_t)n * MATMUL_ROWS * sizeof(float));                                    \
        multiply(quants, scales, panel, body, x, words, n, n_blocks, results);                                    \
        for (int32_t t = 0; t < n; t++) {                                                                         \
            _mm512_storeu_ps(out + (size_t)t * stride, *result_of(results, t));                                   \
        }                                                                                                         \
    }

#include "each_type.inc"

FOR_EACH_OF_256(KERNEL)

#define ENTRY(quants, scales, head) {quants, scales, quants##_##scales},
static const struct {
    enum quants quants;
    enum scales scales;
    matmul_rows_kernel *kernel;
} kernels[] = {FOR_EACH_OF_256(ENTRY)};

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

struct matmul_tile_config matmul_amx_config(int32_t n_tokens)
{
    (void)n_tokens;
    return (struct matmul_tile_config){0};
}

matmul_rows_kernel *matmul_amx_kernel(const struct matmul_type *type)
{
    (void)type;
    return NULL;
}

#endif
