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

/* x [n] to int8 with one scale, which is returned. n: a multiple of 16; sums: [n / 16] of the quants.
 *
 * The largest magnitude is found among the bit patterns, which are ordered as the magnitudes are, with NaN
 * above all: it is the same in any order, and a NaN makes the scale and so the product NaN. */
CSPEC_CLONES static float quantise(const float *x, int32_t n, int8_t *q, int32_t *sums)
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
    const float scale = magnitude / 127.0f;
    /* The reciprocal of a tiny scale overflows: such activations are zero. */
    const float factor = magnitude >= 1e-36f && magnitude <= 3e38f ? 127.0f / magnitude : 0.0f;
    /* Adding 1.5 * 2^23 leaves the nearest integer (ties to even) in the low bits. */
    for (int32_t i = 0; i < n; i++) {
        const float scaled = x[i] * factor + 12582912.0f;
        uint32_t bits;
        memcpy(&bits, &scaled, sizeof bits);
        q[i] = (int8_t)(bits & 0xff);
    }
    for (int32_t i = 0; i < n / 16; i++) {
        int32_t sum = 0;
        for (int32_t j = 0; j < 16; j++) {
            sum += q[16 * i + j];
        }
        sums[i] = sum;
    }
    return scale;
}

/* A block of one token into its place in a tile of n; to is that token's word of the record's first entry. */
static void put_record(const struct matmul_type *type, const float *x, uint8_t *to, size_t n)
{
    int8_t q[256];
    int32_t sums[16];
    const size_t entry = 4 * n;
    const int32_t block = type->block;
    if (type->scales == NO_SCALE) {
        for (int32_t k = 0; k < 32; k++) {
            memcpy(to + (size_t)k * entry, x + k, 4);
        }
        return;
    }
    const float scale = quantise(x, block, q, sums);
    for (int32_t i = 0; i < block / 4; i++) {
        memcpy(to + (size_t)i * entry, q + 4 * i, 4);
    }
    to += (size_t)(block / 4) * entry;
    if (block == 32) {
        memcpy(to, &scale, 4);
        const int32_t sum = sums[0] + sums[1];
        const float as_float = (float)sum;
        const int32_t initial = -type->offset * sum;
        memcpy(to + entry, type->offset != 0 ? (const void *)&initial : (const void *)&as_float, 4);
        return;
    }
    const bool long_blocks = type->scales == SCALES_6_MINS || type->scales == SCALES_6_LONG;
    int32_t n_sums = 16;
    if (long_blocks) {
        n_sums = 8;
        for (int32_t i = 0; i < n_sums; i++) {
            sums[i] = sums[2 * i] + sums[2 * i + 1];
        }
    }
    if (type->offset != 0) {
        for (int32_t i = 0; i < n_sums; i++, to += entry) {
            const int32_t initial = -type->offset * sums[i];
            memcpy(to, &initial, 4);
        }
    } else {
        for (int32_t i = 0; i < n_sums; i += 2, to += entry) {
            const int16_t pair[2] = {(int16_t)sums[i], (int16_t)sums[i + 1]};
            memcpy(to, pair, 4);
        }
    }
    memcpy(to, &scale, 4);
}

void matmul_quantise(const struct matmul_type *type, int64_t n_blocks, const struct matmul_tokens *x,
                     int64_t n_tokens, void *activations, int64_t first, int64_t last)
{
    const size_t token_size = matmul_token_size(type, n_blocks);
    for (int64_t tile = 0; tile < matmul_tiles(n_tokens); tile++) {
        const int64_t start = matmul_tile_start(n_tokens, tile);
        const size_t n = (size_t)(matmul_tile_start(n_tokens, tile + 1) - start);
        for (size_t t = 0; t < n; t++) {
            const int64_t token = start + (int64_t)t;
            const int64_t i0 = token % x->ne[0], i1 = token / x->ne[0] % x->ne[1], i2 = token / x->ne[0] / x->ne[1];
            const char *from = x->data + (size_t)i0 * x->stride[0] + (size_t)i1 * x->stride[1] +
                               (size_t)i2 * x->stride[2];
            uint8_t *to = (uint8_t *)activations + (size_t)start * token_size + 4 * t;
            for (int64_t b = first; b < last; b++) {
                put_record(type, (const float *)from + b * type->block, to + (size_t)b * (size_t)type->record * n,
                           n);
            }
        }
    }
}
