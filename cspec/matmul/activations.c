/* Activations to 8 bits. */
#include "../portable.h"
#include "matmul.h"

#include <string.h>

int64_t matmul_tiles(int64_t n_tokens)
{
    return (n_tokens + MATMUL_TOKENS - 1) / MATMUL_TOKENS;
}

/* Tiles are as even as they can be: 9 tokens are 4 and 5, since a nearly empty tile costs more than its share. */
int64_t matmul_tile_start(int64_t n_tokens, int64_t tile)
{
    return n_tokens * tile / matmul_tiles(n_tokens);
}

size_t matmul_token_size(const struct matmul_type *type, int64_t n_blocks)
{
    return (size_t)n_blocks * (size_t)type->record;
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

static inline void put(uint8_t **to, size_t entry, const void *word)
{
    memcpy(*to, word, 4);
    *to += entry;
}

/* In each of these: n_blocks blocks of one token into records of a tile; to is the token's word of the first entry, and
 * an entry is as many bytes. */

static void put_floats(const float *x, int64_t n_blocks, uint8_t *to, size_t entry)
{
    for (int64_t k = 0; k < 32 * n_blocks; k++) {
        put(&to, entry, x + k);
    }
}

CSPEC_CLONES static void put_32(const float *x, int64_t n_blocks, uint8_t *to, size_t entry, int32_t offset)
{
    for (int64_t b = 0; b < n_blocks; b++, x += 32) {
        int8_t q[32];
        int32_t sums[2];
        const float scale = quantise(x, 32, q, sums);
        for (int32_t i = 0; i < 8; i++) {
            put(&to, entry, q + 4 * i);
        }
        put(&to, entry, &scale);
        const int32_t sum = sums[0] + sums[1], initial = -offset * sum;
        const float as_float = (float)sum;
        put(&to, entry, offset != 0 ? (const void *)&initial : (const void *)&as_float);
    }
}

/* long_subs: sub-blocks are of 32 k, else of 16. */
CSPEC_CLONES static void put_256(const float *x, int64_t n_blocks, uint8_t *to, size_t entry, int32_t offset,
                                 bool long_subs)
{
    for (int64_t b = 0; b < n_blocks; b++, x += 256) {
        int8_t q[256];
        int32_t sums[16];
        const float scale = quantise(x, 256, q, sums);
        for (int32_t i = 0; i < 64; i++) {
            put(&to, entry, q + 4 * i);
        }
        for (int32_t i = 0; long_subs && i < 8; i++) {
            sums[i] = sums[2 * i] + sums[2 * i + 1];
        }
        for (int32_t i = 0; i < (long_subs ? 8 : 16); i += offset != 0 ? 1 : 2) {
            const int32_t initial = -offset * sums[i];
            const int16_t pair[2] = {(int16_t)sums[i], (int16_t)sums[i | 1]};
            put(&to, entry, offset != 0 ? (const void *)&initial : (const void *)pair);
        }
        put(&to, entry, &scale);
    }
}

void matmul_quantise(const struct matmul_type *type, int64_t n_blocks, const struct matmul_tokens *x,
                     int64_t n_tokens, void *activations, int64_t first, int64_t last)
{
    const size_t token_size = matmul_token_size(type, n_blocks);
    for (int64_t tile = 0; tile < matmul_tiles(n_tokens); tile++) {
        const int64_t start = matmul_tile_start(n_tokens, tile);
        const size_t n = (size_t)(matmul_tile_start(n_tokens, tile + 1) - start), entry = 4 * n;
        for (size_t t = 0; t < n; t++) {
            const int64_t token = start + (int64_t)t;
            const int64_t i0 = token % x->ne[0], i1 = token / x->ne[0] % x->ne[1], i2 = token / x->ne[0] / x->ne[1];
            const char *row = x->data + (size_t)i0 * x->stride[0] + (size_t)i1 * x->stride[1] +
                              (size_t)i2 * x->stride[2];
            const float *from = (const float *)(const void *)row + first * type->block;
            uint8_t *to = (uint8_t *)activations + (size_t)start * token_size +
                          (size_t)first * (size_t)type->record * n + 4 * t;
            if (type->scales == NO_SCALE) {
                put_floats(from, last - first, to, entry);
            } else if (type->block == 32) {
                put_32(from, last - first, to, entry, type->offset);
            } else {
                put_256(from, last - first, to, entry, type->offset,
                        type->scales == SCALES_6_MINS || type->scales == SCALES_6_LONG);
            }
        }
    }
}
