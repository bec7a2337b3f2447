/* Kernels in plain C: the meaning of the others, which give the same bits. */
#include "matmul.h"

#include <math.h>
#include <string.h>

static uint32_t word(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static float float_at(const uint8_t *at)
{
    float value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* F16 to float, exactly. */
static float half_at(const uint8_t *at, int32_t i)
{
    uint16_t half;
    memcpy(&half, at + 2 * i, sizeof half);
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t bits;
    if (magnitude >= 0x7c00) { /* infinity, NaN: quiet, as the instruction makes it */
        bits = sign | 0x7f800000u | (magnitude & 0x3ff) << 13 | (magnitude > 0x7c00 ? 0x400000u : 0);
    } else if (magnitude >= 0x400) {
        bits = sign | ((magnitude << 13) + (112u << 23));
    } else { /* subnormal: a multiple of 2^-24 */
        const float value = (float)magnitude * 0x1p-24f;
        memcpy(&bits, &value, sizeof bits);
        bits |= sign;
    }
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float brain_at(const uint8_t *at, int32_t i)
{
    uint16_t half;
    memcpy(&half, at + 2 * i, sizeof half);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Vector i of the 32 k at `at`, 4 k of one row. */
static uint32_t unpack(enum quants quants, const uint8_t *at, int32_t i, int32_t row)
{
    static const uint8_t codes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                      129, 141, 153, 166, 181, 197, 217, 241}; /* IQ4_NL's values + 128 */
    const uint8_t *lane = at + 4 * row;
    switch (quants) {
    case NIBBLES:
        return word(lane + i / 2 * 64) >> i % 2 * 4 & 0x0f0f0f0fu;
    case NIBBLES_1_BIT:
        return (word(lane + i / 2 * 64) >> i % 2 * 4 & 0x0f0f0f0fu) |
               (word(lane + 256) >> i & 0x01010101u) << 4;
    case NIBBLES_2_BITS:
        lane += i / 4 * 192;
        i %= 4;
        return (word(lane + i / 2 * 64) >> i % 2 * 4 & 0x0f0f0f0fu) |
               (word(lane + 128) >> 2 * i & 0x03030303u) << 4;
    case BYTES:
        return word(lane + 64 * i);
    case TWO_BITS:
        return word(lane + i / 4 * 64) >> i % 4 * 2 & 0x03030303u;
    case TWO_BITS_1_BIT:
        return (word(lane + i / 4 * 64) >> i % 4 * 2 & 0x03030303u) |
               (word(lane + 128) >> i & 0x01010101u) << 2;
    case CODES: {
        const uint32_t index = word(lane + i / 2 * 64) >> i % 2 * 4 & 0x0f0f0f0fu;
        return (uint32_t)codes[index & 15] | (uint32_t)codes[index >> 8 & 15] << 8 |
               (uint32_t)codes[index >> 16 & 15] << 16 | (uint32_t)codes[index >> 24] << 24;
    }
    default:
        return 0;
    }
}

static int32_t group_bytes(enum quants quants)
{
    static const int32_t bytes[] = {256, 320, 384, 512, 128, 192, 256, 0, 0};
    return bytes[quants];
}

/* The scales and mins of the sub-blocks of one row. Returns where the quants begin. */
static const uint8_t *unpack_scales(enum scales scales, const uint8_t *head, const uint8_t *body, int32_t row,
                                    int32_t *scale, int32_t *min)
{
    const uint8_t *lane = body + 4 * row;
    switch (scales) {
    case SCALES_6_MINS:
        for (int32_t h = 0; h < 2; h++) {
            const uint32_t w0 = word(lane + 64) >> 16 * h, w1 = word(lane + 128) >> 16 * h,
                           w2 = word(lane + 192) >> 16 * h;
            min[h] = w0 & 63;
            min[h + 2] = w0 >> 6 & 63;
            min[h + 4] = w1 & 63;
            min[h + 6] = w1 >> 6 & 63;
            scale[h] = w2 & 63;
            scale[h + 2] = w2 >> 6 & 63;
            scale[h + 4] = (int32_t)((w0 >> 12 & 15) | (w2 >> 12 & 3) << 4);
            scale[h + 6] = (int32_t)((w1 >> 12 & 15) | (w2 >> 14 & 3) << 4);
        }
        return body + 256;
    case SCALES_8:
        for (int32_t j = 0; j < 16; j++) {
            scale[j] = (int8_t)body[16 * j + row];
        }
        return body + 256;
    case SCALES_6:
        scale[15] = -32;
        for (int32_t i = 0; i < 3; i++) {
            const uint32_t w = word(lane + 64 * i);
            for (int32_t j = 0; j < 5; j++) {
                scale[5 * i + j] = (int32_t)(w >> 6 * j & 63) - 32;
            }
            scale[15] += (int32_t)(w >> 30) << 2 * i;
        }
        return body + 192;
    case SCALES_4_MINS:
        for (int32_t j = 0; j < 16; j++) {
            const int32_t at = (j % 2 << 1) | (j / 2 % 2);
            const uint32_t byte = word(lane + j / 4 * 64) >> 8 * at & 255;
            scale[j] = byte & 15;
            min[j] = (int32_t)(byte >> 4);
        }
        return body + 256;
    case SCALES_6_LONG:
        for (int32_t j = 0; j < 8; j++) {
            uint16_t high;
            memcpy(&high, head + 32 + 2 * row, sizeof high);
            scale[j] = (int32_t)((word(lane) >> 4 * j & 15) | (uint32_t)(high >> 2 * j & 3) << 4) - 32;
        }
        return body + 64;
    default:
        return body;
    }
}

/* Sum of 4 products of unsigned and signed bytes. */
static int32_t dot(uint32_t unsigned_bytes, uint32_t signed_bytes)
{
    int32_t sum = 0;
    for (int32_t i = 0; i < 4; i++) {
        sum += (int32_t)(unsigned_bytes >> 8 * i & 255) * (int8_t)(signed_bytes >> 8 * i & 255);
    }
    return sum;
}

/* All kernels are this one; record points at the token's word of a block's first entry. */
static float block_32(const struct matmul_type *type, const uint8_t *head, const uint8_t *body,
                      const uint8_t *record, size_t entry, int32_t row, float sum)
{
    const bool has_min = type->scales == SCALE_MIN;
    const uint8_t *quants = has_min ? body + 64 : body, *scale = record + 8 * entry, *total = scale + entry;
    int32_t product = has_min ? 0 : (int32_t)word(total);
    for (int32_t i = 0; i < 8; i++) {
        product += dot(unpack(type->quants, quants, i, row), word(record + (size_t)i * entry));
    }
    float value = (float)product * half_at(has_min ? body : head, row);
    if (has_min) {
        value = fmaf(half_at(body + 32, row), float_at(total), value);
    }
    return fmaf(value, float_at(scale), sum);
}

/* Even and odd k are summed apart: two chains of additions take half the time of one. */
static void block_floats(const struct matmul_type *type, const uint8_t *body, const uint8_t *record, size_t entry,
                         int32_t row, float *even, float *odd)
{
    float (*at)(const uint8_t *, int32_t) = type->quants == HALVES ? half_at : brain_at;
    for (int32_t k = 0; k < 32; k += 2, body += 64, record += 2 * entry) {
        *even = fmaf(at(body, row), float_at(record), *even);
        *odd = fmaf(at(body + 32, row), float_at(record + entry), *odd);
    }
}

static float block_256(const struct matmul_type *type, const uint8_t *head, const uint8_t *body,
                       const uint8_t *record, size_t entry, int32_t row, float sum)
{
    const bool has_min = type->offset == 0;
    const bool long_blocks = type->scales == SCALES_6_MINS || type->scales == SCALES_6_LONG;
    const int32_t n_sub = long_blocks ? 8 : 16, vectors = 64 / n_sub;
    int32_t scale[16] = {0}, min[16] = {0};
    const uint8_t *quants = unpack_scales(type->scales, head, body, row, scale, min);
    const uint8_t *sums = record + 64 * entry;
    int32_t product = 0, mins = 0;
    for (int32_t j = 0; j < n_sub; j++) {
        int32_t sub = has_min ? 0 : (int32_t)word(sums + (size_t)j * entry);
        for (int32_t i = j * vectors; i < (j + 1) * vectors; i++) {
            sub += dot(unpack(type->quants, quants + i / 8 * group_bytes(type->quants), i % 8, row),
                       word(record + (size_t)i * entry));
        }
        product += sub * scale[j];
        if (has_min) {
            mins += min[j] * (int16_t)(word(sums + (size_t)(j / 2) * entry) >> j % 2 * 16 & 0xffff);
        }
    }
    const float x_scale = float_at(sums + (size_t)(has_min ? n_sub / 2 : n_sub) * entry);
    const bool in_body = type->scales == SCALES_6_MINS;
    sum = fmaf((float)product, half_at(in_body ? body : head, row) * x_scale, sum);
    if (has_min) {
        sum = fmaf(-(float)mins, half_at(in_body ? body + 32 : head + 32, row) * x_scale, sum);
    }
    return sum;
}

void matmul_c(const struct matmul_type *type, int32_t n, const uint8_t *panel, const uint8_t *records,
              int64_t n_blocks, float *out, size_t stride)
{
    const uint8_t *body = panel + matmul_head_size(type, n_blocks);
    const size_t entry = 4 * (size_t)n;
    for (size_t t = 0; t < (size_t)n; t++) {
        for (int32_t row = 0; row < MATMUL_ROWS; row++) {
            float sum = 0, odd = 0;
            for (int64_t b = 0; b < n_blocks; b++) {
                const uint8_t *head = panel + b * type->head_bytes, *quants = body + b * type->body_bytes;
                const uint8_t *record = records + (size_t)b * (size_t)type->record * (size_t)n + 4 * t;
                if (type->scales == NO_SCALE) {
                    block_floats(type, quants, record, entry, row, &sum, &odd);
                } else if (type->block == 32) {
                    sum = block_32(type, head, quants, record, entry, row, sum);
                } else {
                    sum = block_256(type, head, quants, record, entry, row, sum);
                }
            }
            out[t * stride + (size_t)row] = type->scales == NO_SCALE ? sum + odd : sum;
        }
    }
}
