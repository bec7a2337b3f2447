/* The weight types that have kernels. */
#include "matmul.h"

enum {
    RECORD_32 = 32 + 4 + 4,    /* quants, scale, sum */
    RECORD_MINS_32 = 256 + 16 + 4,
    RECORD_MINS_16 = 256 + 32 + 4,
    RECORD_OFFSET_32 = 256 + 32 + 4,
    RECORD_OFFSET_16 = 256 + 64 + 4,
    RECORD_FLOATS = 128,
};

static const struct matmul_type types[] = {
    /* name, ggml's number, block, ggml's bytes, head, body, record, offset, quants, scales */
    {"F16", 1, 32, 64, 0, 1024, RECORD_FLOATS, 0, HALVES, NO_SCALE},
    {"Q4_0", 2, 32, 18, 32, 256, RECORD_32, 8, NIBBLES, SCALE},
    {"Q4_1", 3, 32, 20, 0, 320, RECORD_32, 0, NIBBLES, SCALE_MIN},
    {"Q5_0", 6, 32, 22, 32, 320, RECORD_32, 16, NIBBLES_1_BIT, SCALE},
    {"Q5_1", 7, 32, 24, 0, 384, RECORD_32, 0, NIBBLES_1_BIT, SCALE_MIN},
    {"Q8_0", 8, 32, 34, 32, 512, RECORD_32, 128, BYTES, SCALE},
    {"Q2_K", 10, 256, 84, 64, 1280, RECORD_MINS_16, 0, TWO_BITS, SCALES_4_MINS},
    {"Q3_K", 11, 256, 110, 32, 1728, RECORD_OFFSET_16, 4, TWO_BITS_1_BIT, SCALES_6},
    {"Q4_K", 12, 256, 144, 0, 2304, RECORD_MINS_32, 0, NIBBLES, SCALES_6_MINS},
    {"Q5_K", 13, 256, 176, 0, 2816, RECORD_MINS_32, 0, NIBBLES_1_BIT, SCALES_6_MINS},
    {"Q6_K", 14, 256, 210, 32, 3328, RECORD_OFFSET_16, 32, NIBBLES_2_BITS, SCALES_8},
    {"IQ4_NL", 20, 32, 18, 32, 256, RECORD_32, 128, CODES, SCALE},
    {"IQ4_XS", 23, 256, 136, 64, 2112, RECORD_OFFSET_32, 128, CODES, SCALES_6_LONG},
    {"BF16", 30, 32, 64, 0, 1024, RECORD_FLOATS, 0, BRAINS, NO_SCALE},
};

const struct matmul_type *matmul_find_type(int32_t ggml_type)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (types[i].ggml_type == ggml_type) {
            return &types[i];
        }
    }
    return NULL;
}
