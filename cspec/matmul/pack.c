/* From ggml's blocks to panels of 16 interleaved rows. */
#include "matmul.h"

#include <string.h>

/* ---- ggml's blocks ------------------------------------------------------------------------------- */

/* One block of one row, taken apart: nothing here is scaled, and offsets are still in. */
struct block {
    uint32_t quants[64]; /* 4 consecutive k to a word, k % 4 == 0 in its low byte */
    uint16_t d, min;     /* F16 */
    uint8_t scale[16], sub_min[16];
};

static uint32_t word(const uint8_t *bytes)
{
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static uint16_t half(const uint8_t *bytes)
{
    uint16_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

/* Bits 4 i to 4 i + 3 of a word, one to each byte. */
static uint32_t spread(uint32_t bits, int32_t i)
{
    return ((bits >> 4 * i & 15) * 0x00204081u) & 0x01010101u;
}

/* 32 k: n_bits bits of each of 32 bytes, from bit `from` on, become those from bit `to` on. */
static void take_bits(const uint8_t *bytes, int32_t from, int32_t n_bits, int32_t to, uint32_t *quants)
{
    const uint32_t mask = ((1u << n_bits) - 1) * 0x01010101u;
    for (int32_t i = 0; i < 8; i++) {
        const uint32_t bits = (word(bytes + 4 * i) >> from & mask) << to;
        quants[i] = to == 0 ? bits : quants[i] | bits;
    }
}

/* 32 k: the first 16 in the low nibbles of 16 bytes. */
static void nibbles(const uint8_t *bytes, uint32_t *quants)
{
    for (int32_t i = 0; i < 4; i++) {
        quants[i] = word(bytes + 4 * i) & 0x0f0f0f0fu;
        quants[i + 4] = word(bytes + 4 * i) >> 4 & 0x0f0f0f0fu;
    }
}

/* The 6-bit scales and mins of 8 sub-blocks of Q4_K and Q5_K. */
static void scales_and_mins(const uint8_t *bytes, struct block *block)
{
    for (int32_t j = 0; j < 4; j++) {
        block->scale[j] = bytes[j] & 63;
        block->sub_min[j] = bytes[j + 4] & 63;
        block->scale[j + 4] = (uint8_t)((bytes[j + 8] & 15) | bytes[j] >> 6 << 4);
        block->sub_min[j + 4] = (uint8_t)(bytes[j + 8] >> 4 | bytes[j + 4] >> 6 << 4);
    }
}

static void take_apart(int32_t ggml_type, const uint8_t *bytes, struct block *block)
{
    switch (ggml_type) {
    case 2:  /* Q4_0: F16 d, nibbles */
    case 20: /* IQ4_NL: the same */
        block->d = half(bytes);
        nibbles(bytes + 2, block->quants);
        break;
    case 3: /* Q4_1: F16 d, F16 min, nibbles */
        block->d = half(bytes);
        block->min = half(bytes + 2);
        nibbles(bytes + 4, block->quants);
        break;
    case 6: /* Q5_0: F16 d, 32 high bits, nibbles */
        block->d = half(bytes);
        nibbles(bytes + 6, block->quants);
        for (int32_t i = 0; i < 8; i++) {
            block->quants[i] |= spread(word(bytes + 2), i) << 4;
        }
        break;
    case 7: /* Q5_1: F16 d, F16 min, 32 high bits, nibbles */
        block->d = half(bytes);
        block->min = half(bytes + 2);
        nibbles(bytes + 8, block->quants);
        for (int32_t i = 0; i < 8; i++) {
            block->quants[i] |= spread(word(bytes + 4), i) << 4;
        }
        break;
    case 8: /* Q8_0: F16 d, int8; here 128 too high, so that they are unsigned */
        block->d = half(bytes);
        for (int32_t i = 0; i < 8; i++) {
            block->quants[i] = word(bytes + 2 + 4 * i) ^ 0x80808080u;
        }
        break;
    case 10: /* Q2_K: 16 bytes (scale, min), twice 32 bytes with 128 k of 2 bits, F16 d, F16 dmin */
        block->d = half(bytes + 80);
        block->min = half(bytes + 82);
        for (int32_t j = 0; j < 16; j++) {
            block->scale[j] = bytes[j] & 15;
            block->sub_min[j] = bytes[j] >> 4;
        }
        for (int32_t j = 0; j < 8; j++) {
            take_bits(bytes + 16 + j / 4 * 32, j % 4 * 2, 2, 0, block->quants + 8 * j);
        }
        break;
    case 11: /* Q3_K: 32 bytes with 8 high bits, twice 32 bytes with 128 k of 2 bits, 12 bytes scales, F16 d */
        block->d = half(bytes + 108);
        for (int32_t j = 0; j < 16; j++) {
            const int32_t low = bytes[96 + j % 8] >> j / 8 * 4 & 15, high = bytes[104 + j % 4] >> j / 4 * 2 & 3;
            block->scale[j] = (uint8_t)(low | high << 4);
        }
        for (int32_t j = 0; j < 8; j++) {
            take_bits(bytes + 32 + j / 4 * 32, j % 4 * 2, 2, 0, block->quants + 8 * j);
            take_bits(bytes, j, 1, 2, block->quants + 8 * j);
        }
        break;
    case 12: /* Q4_K: F16 d, F16 dmin, 12 bytes scales and mins, 4 times 32 bytes with 2 sub-blocks of nibbles */
    case 13: /* Q5_K: 32 bytes with 8 high bits before the nibbles */
        block->d = half(bytes);
        block->min = half(bytes + 2);
        scales_and_mins(bytes + 4, block);
        for (int32_t j = 0; j < 8; j++) {
            const uint8_t *low = bytes + (ggml_type == 12 ? 16 : 48) + j / 2 * 32;
            take_bits(low, 4 * (j % 2), 4, 0, block->quants + 8 * j);
            if (ggml_type == 13) {
                take_bits(bytes + 16, j, 1, 4, block->quants + 8 * j);
            }
        }
        break;
    case 14: /* Q6_K: twice 64 bytes nibbles, twice 32 bytes of 4 high pairs of bits, 16 int8 scales, F16 d */
        block->d = half(bytes + 208);
        memcpy(block->scale, bytes + 192, 16);
        for (int32_t j = 0; j < 8; j++) {
            take_bits(bytes + j / 4 * 64 + j % 2 * 32, j / 2 % 2 * 4, 4, 0, block->quants + 8 * j);
            take_bits(bytes + 128 + j / 4 * 32, j % 4 * 2, 2, 4, block->quants + 8 * j);
        }
        break;
    case 23: /* IQ4_XS: F16 d, 16 bits and then 4 bytes of scales, 8 times 16 bytes nibbles */
        block->d = half(bytes);
        for (int32_t j = 0; j < 8; j++) {
            const int32_t low = bytes[4 + j / 2] >> j % 2 * 4 & 15, high = half(bytes + 2) >> 2 * j & 3;
            block->scale[j] = (uint8_t)(low | high << 4);
            nibbles(bytes + 8 + 16 * j, block->quants + 8 * j);
        }
        break;
    default:
        break;
    }
}

/* ---- panels -------------------------------------------------------------------------------------- */

static void put_word(uint8_t *vector, int32_t row, uint32_t value)
{
    memcpy(vector + 4 * row, &value, sizeof value);
}

static void put_half(uint8_t *halves, int32_t row, uint16_t value)
{
    memcpy(halves + 2 * row, &value, sizeof value);
}

/* 32 k of one row. Returns where the next 32 go. */
static uint8_t *put_quants(enum quants quants, const uint32_t *q, uint8_t *to, int32_t row)
{
    uint32_t bits = 0;
    switch (quants) {
    case NIBBLES:
    case NIBBLES_1_BIT:
    case CODES:
        for (int32_t i = 0; i < 4; i++) {
            put_word(to + 64 * i, row, (q[2 * i] & 0x0f0f0f0fu) | (q[2 * i + 1] & 0x0f0f0f0fu) << 4);
        }
        if (quants != NIBBLES_1_BIT) {
            return to + 256;
        }
        for (int32_t i = 0; i < 8; i++) {
            bits |= (q[i] >> 4 & 0x01010101u) << i;
        }
        put_word(to + 256, row, bits);
        return to + 320;
    case NIBBLES_2_BITS:
        for (int32_t sub = 0; sub < 2; sub++, q += 4, to += 192) {
            put_word(to, row, (q[0] & 0x0f0f0f0fu) | (q[1] & 0x0f0f0f0fu) << 4);
            put_word(to + 64, row, (q[2] & 0x0f0f0f0fu) | (q[3] & 0x0f0f0f0fu) << 4);
            put_word(to + 128, row,
                     (q[0] >> 4 & 0x03030303u) | (q[1] >> 4 & 0x03030303u) << 2 |
                         (q[2] >> 4 & 0x03030303u) << 4 | (q[3] >> 4 & 0x03030303u) << 6);
        }
        return to;
    case BYTES:
        for (int32_t i = 0; i < 8; i++) {
            put_word(to + 64 * i, row, q[i]);
        }
        return to + 512;
    case TWO_BITS:
    case TWO_BITS_1_BIT:
        for (int32_t v = 0; v < 2; v++) {
            uint32_t value = 0;
            for (int32_t i = 0; i < 4; i++) {
                value |= (q[4 * v + i] & 0x03030303u) << 2 * i;
            }
            put_word(to + 64 * v, row, value);
        }
        if (quants == TWO_BITS) {
            return to + 128;
        }
        for (int32_t i = 0; i < 8; i++) {
            bits |= (q[i] >> 2 & 0x01010101u) << i;
        }
        put_word(to + 128, row, bits);
        return to + 192;
    default:
        return to;
    }
}

/* What a block's quants are multiplied by. Returns where the quants go. */
static uint8_t *put_scales(enum scales scales, const struct block *block, uint8_t *head, uint8_t *body,
                           int32_t row)
{
    uint32_t words[4] = {0};
    switch (scales) {
    case SCALE:
        put_half(head, row, block->d);
        return body;
    case SCALE_MIN:
        put_half(body, row, block->d);
        put_half(body + 32, row, block->min);
        return body + 64;
    case SCALES_6_MINS:
        /* Sub-blocks 2 p and 2 p + 1 are in the low and the high half of a word, so that mins come out as pairs
         * of int16. Each half is: min 0, min 1, low 4 bits of scale 2; min 2, min 3, low 4 bits of scale 3;
         * scale 0, scale 1, high 2 bits of scales 2 and 3; the numbers being p. */
        put_half(body, row, block->d);
        put_half(body + 32, row, block->min);
        for (int32_t h = 0; h < 2; h++) {
            const uint8_t *s = block->scale + h, *m = block->sub_min + h;
            words[0] |= (uint32_t)(m[0] | m[2] << 6 | (s[4] & 15) << 12) << 16 * h;
            words[1] |= (uint32_t)(m[4] | m[6] << 6 | (s[6] & 15) << 12) << 16 * h;
            words[2] |= (uint32_t)(s[0] | s[2] << 6 | s[4] >> 4 << 12 | s[6] >> 4 << 14) << 16 * h;
        }
        for (int32_t i = 0; i < 3; i++) {
            put_word(body + 64 + 64 * i, row, words[i]);
        }
        return body + 256;
    case SCALES_8:
        put_half(head, row, block->d);
        for (int32_t j = 0; j < 16; j++) {
            body[16 * j + row] = block->scale[j];
        }
        return body + 256;
    case SCALES_6:
        /* Five scales to a word; the last one's bits are left over in pairs. */
        put_half(head, row, block->d);
        for (int32_t j = 0; j < 15; j++) {
            words[j / 5] |= (uint32_t)block->scale[j] << 6 * (j % 5);
        }
        for (int32_t i = 0; i < 3; i++) {
            put_word(body + 64 * i, row, words[i] | (uint32_t)(block->scale[15] >> 2 * i & 3) << 30);
        }
        return body + 192;
    case SCALES_4_MINS:
        /* Word p has sub-blocks 4 p, 4 p + 2, 4 p + 1, 4 p + 3: pairs of neighbours are 16 bits apart. */
        put_half(head, row, block->d);
        put_half(head + 32, row, block->min);
        for (int32_t j = 0; j < 16; j++) {
            const int32_t at = (j % 2 << 1) | (j / 2 % 2);
            words[j / 4] |= (uint32_t)(block->scale[j] | block->sub_min[j] << 4) << 8 * at;
        }
        for (int32_t i = 0; i < 4; i++) {
            put_word(body + 64 * i, row, words[i]);
        }
        return body + 256;
    case SCALES_6_LONG:
        put_half(head, row, block->d);
        for (int32_t j = 0; j < 8; j++) {
            words[0] |= (uint32_t)(block->scale[j] & 15) << 4 * j;
            words[1] |= (uint32_t)(block->scale[j] >> 4) << 2 * j;
        }
        put_half(head + 32, row, (uint16_t)words[1]);
        put_word(body, row, words[0]);
        return body + 64;
    default:
        return body;
    }
}

int64_t matmul_panels(int64_t n_rows)
{
    return (n_rows + MATMUL_ROWS - 1) / MATMUL_ROWS;
}

size_t matmul_head_size(const struct matmul_type *type, int64_t n_blocks)
{
    return ((size_t)n_blocks * (size_t)type->head_bytes + 63) / 64 * 64;
}

size_t matmul_panel_size(const struct matmul_type *type, int64_t n_blocks)
{
    return matmul_head_size(type, n_blocks) + (size_t)n_blocks * (size_t)type->body_bytes;
}

void matmul_pack(const struct matmul_type *type, int64_t n_rows, int64_t n_k, const void *rows, void *panels,
                 int64_t first, int64_t last)
{
    const int64_t n_blocks = n_k / type->block;
    const size_t row_size = (size_t)n_blocks * (size_t)type->ggml_bytes;
    for (int64_t panel = first; panel < last; panel++) {
        uint8_t *head = (uint8_t *)panels + (size_t)panel * matmul_panel_size(type, n_blocks);
        uint8_t *body = head + matmul_head_size(type, n_blocks);
        if (n_rows - panel * MATMUL_ROWS < MATMUL_ROWS) {
            memset(head, 0, matmul_panel_size(type, n_blocks));
        }
        for (int64_t b = 0; b < n_blocks; b++, head += type->head_bytes, body += type->body_bytes) {
            for (int32_t row = 0; row < MATMUL_ROWS && panel * MATMUL_ROWS + row < n_rows; row++) {
                const uint8_t *from = (const uint8_t *)rows +
                                      (size_t)(panel * MATMUL_ROWS + row) * row_size +
                                      (size_t)b * (size_t)type->ggml_bytes;
                if (type->scales == NO_SCALE) {
                    for (int32_t k = 0; k < 32; k++) {
                        put_half(body + 32 * k, row, half(from + 2 * k));
                    }
                    continue;
                }
                struct block block;
                take_apart(type->ggml_type, from, &block);
                uint8_t *to = put_scales(type->scales, &block, head, body, row);
                for (int32_t i = 0; i < type->block / 4; i += 8) {
                    to = put_quants(type->quants, block.quants + i, to, row);
                }
            }
        }
    }
}
