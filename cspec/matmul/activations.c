/* Activations to 8 bits. */
#include "../portable.h"
#include "matmul.h"

#include <string.h>

/* AMX's kernels do much the same work for one token as for 16: for as many as are one tile of AVX-512's these are faster, or
 * hardly slower. */
bool matmul_in_rows(const struct matmul_type *type, int32_t level, int64_t n_tokens)
{
    return level == MATMUL_AMX && type->block == 256 && n_tokens > MATMUL_TOKENS;
}

int64_t matmul_tiles(bool in_rows, int64_t n_tokens)
{
    const int64_t most = in_rows ? MATMUL_ROW_TOKENS : MATMUL_TOKENS;
    return (n_tokens + most - 1) / most;
}

/* Tiles are as even as they can be: 9 tokens are 4 and 5, since a nearly empty tile costs more than its share. */
int64_t matmul_tile_start(bool in_rows, int64_t n_tokens, int64_t tile)
{
    return n_tokens * tile / matmul_tiles(in_rows, n_tokens);
}

size_t matmul_token_size(const struct matmul_type *type, int64_t n_blocks)
{
    return (size_t)n_blocks * (size_t)type->record;
}

int32_t matmul_row_words(const struct matmul_type *type)
{
    return type->offset == 0 ? (type->record - 256) / 4 : 2;
}

/* The sum of 8 int8, 128 higher to be unsigned, in quarters of a word: the compiler's own way is to extract each. */
static inline int32_t sum_of_8(const int8_t *q)
{
    uint64_t word;
    memcpy(&word, q, sizeof word);
    word ^= 0x8080808080808080u;
    const uint64_t pairs = (word & 0x00ff00ff00ff00ffu) + (word >> 8 & 0x00ff00ff00ff00ffu);
    return (int32_t)(pairs * 0x0001000100010001u >> 48) - 8 * 128;
}

/* x [n] to int8 with one scale, which is returned. n: a multiple of 16, constant; sums: [n / 16] of the quants.
 *
 * The largest magnitude is found among the bit patterns, which are ordered as the magnitudes are, with NaN
 * above all: it is the same in any order, and a NaN makes the scale and so the product NaN. */
static inline __attribute__((always_inline)) float quantise(const float *x, const int32_t n, int8_t *q,
                                                            int32_t *sums)
{
    uint32_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    float magnitude;
    memcpy(&magnitude, &largest, sizeof magnitude);
    /* The reciprocal of a tiny magnitude overflows: such activations are zero. */
    const float factor = magnitude >= 1e-36f && magnitude <= 3e38f ? 127.0f / magnitude : 0.0f;
    /* Adding 1.5 * 2^23 leaves the nearest integer (ties to even) in the low bits. */
    for (int32_t i = 0; i < n; i++) {
        const float scaled = x[i] * factor + 12582912.0f;
        uint32_t bits;
        memcpy(&bits, &scaled, sizeof bits);
        q[i] = (int8_t)(bits & 0xff);
    }
    for (int32_t i = 0; i < n / 16; i++) {
        sums[i] = sum_of_8(q + 16 * i) + sum_of_8(q + 16 * i + 8);
    }
    return magnitude / 127.0f;
}

/* Where one token's blocks are put: 4 quants to a word, and other words. Steps are in bytes. */
struct place {
    uint8_t *quants, *words;          /* of the first block */
    size_t quants_step, words_step;   /* from one word to the next; of quants in rows: none */
    size_t row;                       /* from one row of 64 quants to the next */
    size_t quants_block, words_block; /* from one block to the next */
};

static inline void put(uint8_t **to, size_t step, const void *word)
{
    memcpy(*to, word, 4);
    *to += step;
}

/* In each of these: n_blocks blocks of one token. */

static void put_floats(const float *x, int64_t n_blocks, const struct place *to)
{
    uint8_t *at = to->quants;
    for (int64_t k = 0; k < 32 * n_blocks; k++) {
        put(&at, to->quants_step, x + k);
    }
}

CSPEC_CLONES static void put_32(const float *x, int64_t n_blocks, const struct place *to, int32_t offset)
{
    for (int64_t b = 0; b < n_blocks; b++, x += 32) {
        int8_t q[32];
        int32_t sums[2];
        uint8_t *at = to->words + (size_t)b * to->words_block;
        const float scale = quantise(x, 32, q, sums);
        uint8_t *quants = to->quants + (size_t)b * to->quants_block;
        for (int32_t i = 0; i < 8; i++) {
            put(&quants, to->quants_step, q + 4 * i);
        }
        put(&at, to->words_step, &scale);
        const int32_t sum = sums[0] + sums[1], initial = -offset * sum;
        const float as_float = (float)sum;
        put(&at, to->words_step, offset != 0 ? (const void *)&initial : (const void *)&as_float);
    }
}

/* long_subs: sub-blocks are of 32 k, else of 16; in_rows: of an offset there is one sum. */
CSPEC_CLONES static void put_256(const float *x, int64_t n_blocks, const struct place *to, int32_t offset,
                                 bool long_subs, bool in_rows)
{
    for (int64_t b = 0; b < n_blocks; b++, x += 256) {
        int8_t q[256];
        int32_t sums[16];
        uint8_t *at = to->words + (size_t)b * to->words_block;
        const float scale = quantise(x, 256, q, sums);
        uint8_t *quants = to->quants + (size_t)b * to->quants_block;
        for (int32_t i = 0; in_rows && i < 4; i++) {
            memcpy(quants + (size_t)i * to->row, q + 64 * i, 64);
        }
        for (int32_t i = 0; !in_rows && i < 64; i++) {
            put(&quants, to->quants_step, q + 4 * i);
        }
        if (offset != 0 && in_rows) {
            int32_t sum = 0;
            for (int32_t i = 0; i < 16; i++) {
                sum += offset * sums[i];
            }
            put(&at, to->words_step, &sum);
            put(&at, to->words_step, &scale);
            continue;
        }
        for (int32_t i = 0; long_subs && i < 8; i++) {
            sums[i] = sums[2 * i] + sums[2 * i + 1];
        }
        for (int32_t i = 0; i < (long_subs ? 8 : 16); i += offset != 0 ? 1 : 2) {
            const int32_t initial = -offset * sums[i];
            const int16_t pair[2] = {(int16_t)sums[i], (int16_t)sums[i | 1]};
            put(&at, to->words_step, offset != 0 ? (const void *)&initial : (const void *)pair);
        }
        put(&at, to->words_step, &scale);
    }
}

/* Where token t's blocks from `block` on are, in the tile of n tokens from `start` on of n_tokens. */
static struct place place_of(const struct matmul_type *type, bool in_rows, int64_t n_blocks, int64_t n_tokens,
                             uint8_t *activations, int64_t start, size_t n, size_t t, int64_t block)
{
    const size_t token = (size_t)n_blocks, k = (size_t)type->block, before = (size_t)block * n;
    if (in_rows) {
        const size_t words = 4 * (size_t)matmul_row_words(type);
        const size_t blocks = (size_t)start * token + before; /* of other tiles, and of this one */
        return (struct place){
            activations + blocks * k + t * 64,
            activations + (size_t)n_tokens * token * k + (blocks + t) * words,
            0, 4, 64 * n, k * n, words * n};
    }
    const size_t record = (size_t)type->record * n;
    uint8_t *quants = activations + (size_t)start * matmul_token_size(type, n_blocks) + (size_t)block * record + 4 * t;
    return (struct place){quants, quants + k * n, 4 * n, 4 * n, 0, record, record};
}

void matmul_quantise(const struct matmul_type *type, int32_t level, int64_t n_blocks, const struct matmul_tokens *x,
                     int64_t n_tokens, void *activations, int64_t first, int64_t last)
{
    const bool in_rows = matmul_in_rows(type, level, n_tokens);
    for (int64_t tile = 0; tile < matmul_tiles(in_rows, n_tokens); tile++) {
        const int64_t start = matmul_tile_start(in_rows, n_tokens, tile);
        const size_t n = (size_t)(matmul_tile_start(in_rows, n_tokens, tile + 1) - start);
        for (size_t t = 0; t < n; t++) {
            const int64_t token = start + (int64_t)t;
            const int64_t i0 = token % x->ne[0], i1 = token / x->ne[0] % x->ne[1], i2 = token / x->ne[0] / x->ne[1];
            const char *row = x->data + (size_t)i0 * x->stride[0] + (size_t)i1 * x->stride[1] +
                              (size_t)i2 * x->stride[2];
            const float *from = (const float *)(const void *)row + first * type->block;
            const struct place to = place_of(type, in_rows, n_blocks, n_tokens, activations, start, n, t, first);
            if (type->scales == NO_SCALE) {
                put_floats(from, last - first, &to);
            } else if (type->block == 32) {
                put_32(from, last - first, &to, type->offset);
            } else {
                put_256(from, last - first, &to, type->offset,
                        type->scales == SCALES_6_MINS || type->scales == SCALES_6_LONG, in_rows);
            }
        }
    }
}
