/* A product in panels and tiles, with the kernels of an instruction set. */
#include "../cspec.h"
#include "matmul.h"

#include <math.h>
#include <string.h>

/* Panels are taken in groups that stay in a core's second-level cache while all tiles pass over them. */
enum { GROUP_BYTES = 256 << 10 };

bool matmul_has(int32_t level)
{
#if defined(__x86_64__) && defined(__GNUC__)
    if (level == MATMUL_AVX512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
    }
    if (level == MATMUL_AMX) {
        return matmul_has(MATMUL_AVX512) && matmul_amx_permitted();
    }
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#ifdef CSPEC_EVEX
    if (level == MATMUL_AVXVNNI) {
        return avx2 && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    }
#elif defined(MATMUL_AVXVNNI_TARGET)
    if (level == MATMUL_AVXVNNI) {
        return avx2 && __builtin_cpu_supports("avxvnni");
    }
#endif
    if (level == MATMUL_AVX2) {
        return avx2;
    }
#endif
    return level == MATMUL_C;
}

static matmul_kernel *find_kernel(int32_t level, const struct matmul_type *type, int32_t n_tokens)
{
    switch (level) {
    case MATMUL_AMX:
    case MATMUL_AVX512:
        return matmul_avx512_kernel(type, n_tokens);
    case MATMUL_AVXVNNI:
        return matmul_avxvnni_kernel(type, n_tokens);
    case MATMUL_AVX2:
        return matmul_avx2_kernel(type, n_tokens);
    default:
        return NULL;
    }
}

int64_t matmul_product_panels(const struct matmul_product *product)
{
    return product->listed != NULL ? product->n_listed : matmul_panels(product->n_rows);
}

/* The rows from first to last - 1 of n tokens, which are not computed. */
static void leave_out(float *out, size_t stride, int32_t n, int64_t first, int64_t last)
{
    for (int32_t t = 0; t < n; t++) {
        for (int64_t row = first; row < last; row++) {
            out[(size_t)t * stride + (size_t)row] = -INFINITY;
        }
    }
}

/* Leaves out the rows between the index-th of the listed panels and the next, and those before the first. */
static void leave_out_around(const struct matmul_product *product, int64_t index, float *out, int32_t n)
{
    const int64_t end = (product->listed[index] + (int64_t)1) * MATMUL_ROWS;
    const int64_t next = index + 1 < product->n_listed ? product->listed[index + 1] * (int64_t)MATMUL_ROWS
                                                       : product->n_rows;
    leave_out(out, product->stride, n, end, next);
    if (index == 0) {
        leave_out(out, product->stride, n, 0, product->listed[0] * (int64_t)MATMUL_ROWS);
    }
}

/* A tile of a product's tokens. */
struct tile {
    int64_t first; /* token */
    int32_t n;
    bool in_rows;
    const uint8_t *records;        /* or, in rows: */
    const uint8_t *quants, *words;
};

static struct tile tile_of(const struct matmul_product *product, int64_t n_blocks, bool in_rows, int64_t index)
{
    const uint8_t *activations = product->activations;
    const int64_t first = matmul_tile_start(in_rows, product->n_tokens, index);
    struct tile tile = {
        .first = first,
        .n = (int32_t)(matmul_tile_start(in_rows, product->n_tokens, index + 1) - first),
        .in_rows = in_rows,
    };
    if (in_rows) {
        const size_t words = 4 * (size_t)matmul_row_words(product->type);
        tile.quants = activations + (size_t)(first * product->n_k);
        tile.words = activations + (size_t)(product->n_tokens * product->n_k) + (size_t)(first * n_blocks) * words;
    } else {
        tile.records = activations + (size_t)first * matmul_token_size(product->type, n_blocks);
    }
    return tile;
}

/* A panel times a tile. */
static void multiply_panel(const struct matmul_product *product, const struct tile *tile, int64_t n_blocks,
                           const uint8_t *panel, float *out, size_t stride)
{
    matmul_kernel *kernel;
    if (tile->in_rows) {
        matmul_amx_kernel(product->type)(panel, tile->quants, tile->words, tile->n, n_blocks, out, stride);
    } else if ((kernel = find_kernel(product->level, product->type, tile->n)) != NULL) {
        kernel(panel, tile->records, n_blocks, out, stride);
    } else {
        matmul_c(product->type, tile->n, panel, tile->records, n_blocks, out, stride);
    }
}

static void multiply_tile(const struct matmul_product *product, const struct tile *tile, int64_t start, int64_t end)
{
    const int64_t n_blocks = product->n_k / product->type->block;
    const size_t panel_size = matmul_panel_size(product->type, n_blocks);
    for (int64_t index = start; index < end; index++) {
        const int64_t panel = product->listed != NULL ? product->listed[index] : index;
        const int64_t row = panel * MATMUL_ROWS, rows = product->n_rows - row;
        const uint8_t *weights = (const uint8_t *)product->panels + (size_t)panel * panel_size;
        float edge[MATMUL_ROW_TOKENS][MATMUL_ROWS];
        float *first_row = product->out + (size_t)tile->first * product->stride, *out = first_row + row;
        const bool whole = rows >= MATMUL_ROWS;
        multiply_panel(product, tile, n_blocks, weights, whole ? out : edge[0], whole ? product->stride : MATMUL_ROWS);
        for (int32_t t = 0; !whole && t < tile->n; t++) {
            memcpy(out + (size_t)t * product->stride, edge[t], (size_t)rows * sizeof(float));
        }
        if (product->listed != NULL) {
            leave_out_around(product, index, first_row, tile->n);
        }
    }
}

void matmul_multiply(const struct matmul_product *product, int64_t first, int64_t last)
{
    const int64_t n_blocks = product->n_k / product->type->block;
    const bool in_rows = matmul_in_rows(product->type, product->level, product->n_tokens);
    const int64_t n_tiles = matmul_tiles(in_rows, product->n_tokens);
    const int64_t fitting = (int64_t)(GROUP_BYTES / matmul_panel_size(product->type, n_blocks));
    const int64_t group = fitting > 1 ? fitting : 1;
    struct matmul_tile_config before;
    if (in_rows) {
        matmul_amx_save(&before); /* ggml's own products configure a thread's tiles once */
    }
    for (int64_t start = first; start < last; start += group) {
        const int64_t end = start + group < last ? start + group : last;
        for (int64_t i = 0; i < n_tiles; i++) {
            const struct tile tile = tile_of(product, n_blocks, in_rows, i);
            if (in_rows) {
                const struct matmul_tile_config config = matmul_amx_config(tile.n);
                matmul_amx_load(&config);
            }
            multiply_tile(product, &tile, start, end);
        }
    }
    if (in_rows) {
        matmul_amx_load(&before);
    }
}

/* ---- a self-test --------------------------------------------------------------------------------- */

static void fill(uint8_t *bytes, size_t size, uint32_t seed)
{
    uint32_t state = seed;
    for (size_t i = 0; i < size; i++) {
        state = state * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(state >> 24);
    }
}

/* F16 and BF16 without the top bit of their exponent are neither infinite nor NaN. */
static void make_finite(uint8_t *halves, size_t size)
{
    for (size_t i = 1; i < size; i += 2) {
        halves[i] &= 0xbf;
    }
}

enum { TEST_BLOCKS = 2, TEST_K = TEST_BLOCKS * 256 };

/* Where every product is tested. */
struct test {
    _Alignas(64) uint8_t panel[TEST_BLOCKS * 3392];
    _Alignas(64) uint8_t activations[TEST_BLOCKS * 324 * MATMUL_ROW_TOKENS];
    float x[MATMUL_ROW_TOKENS][TEST_K];
    float expected[MATMUL_ROW_TOKENS][MATMUL_ROWS], out[MATMUL_ROW_TOKENS][MATMUL_ROWS];
};

static void fill_test(const struct matmul_type *type, struct test *test)
{
    int8_t quantised[256];
    const size_t head_size = matmul_head_size(type, TEST_BLOCKS), size = matmul_panel_size(type, TEST_BLOCKS);
    fill(test->panel, size, 1);
    make_finite(test->panel, head_size);
    for (size_t at = head_size; at < size; at += (size_t)type->body_bytes) {
        make_finite(test->panel + at, type->scales == NO_SCALE ? (size_t)type->body_bytes : 64);
    }
    for (int32_t t = 0; t < MATMUL_ROW_TOKENS; t++) {
        for (int32_t i = 0; i < TEST_K; i += 256) {
            fill((uint8_t *)quantised, sizeof quantised, (uint32_t)(t + i));
            for (int32_t k = 0; k < 256; k++) {
                test->x[t][i + k] = (float)quantised[k] / 64;
            }
        }
    }
}

static void compute_test(const struct matmul_type *type, int32_t level, int32_t n, struct test *test, float *out)
{
    const struct matmul_tokens tokens = {(const char *)test->x, {n, 1, 1}, {sizeof *test->x, 0, 0}};
    const struct matmul_product product = {
        .type = type,
        .level = level,
        .n_rows = MATMUL_ROWS,
        .n_k = (int64_t)TEST_BLOCKS * type->block,
        .n_tokens = n,
        .panels = test->panel,
        .activations = test->activations,
        .out = out,
        .stride = MATMUL_ROWS,
    };
    matmul_quantise(type, level, TEST_BLOCKS, &tokens, n, test->activations, 0, TEST_BLOCKS);
    matmul_multiply(&product, 0, 1);
}

bool matmul_agrees(int32_t level)
{
    const int32_t most = level == MATMUL_AMX ? MATMUL_ROW_TOKENS : MATMUL_TOKENS;
    struct test test;
    for (int32_t number = 0; number < 64; number++) {
        const struct matmul_type *type = matmul_find_type(number);
        if (type == NULL) {
            continue;
        }
        fill_test(type, &test);
        compute_test(type, MATMUL_C, most, &test, test.expected[0]);
        for (int32_t n = 1; n <= most; n++) {
            compute_test(type, level, n, &test, test.out[0]);
            if (memcmp(test.out, test.expected, sizeof *test.out * (size_t)n) != 0) {
                return false;
            }
        }
    }
    return true;
}

/* ---- for Python ---------------------------------------------------------------------------------- */

static const struct matmul_type *covered(int32_t type, int64_t n_rows, int64_t n_k)
{
    const struct matmul_type *found = matmul_find_type(type);
    return found != NULL && n_rows > 0 && n_k > 0 && n_k % found->block == 0 ? found : NULL;
}

size_t cspec_matmul_packed_size(int32_t type, int64_t n_rows, int64_t n_k)
{
    const struct matmul_type *found = covered(type, n_rows, n_k);
    return found == NULL ? 0 : (size_t)matmul_panels(n_rows) * matmul_panel_size(found, n_k / found->block);
}

void cspec_matmul_pack(int32_t type, int64_t n_rows, int64_t n_k, const void *rows, void *packed)
{
    matmul_pack(matmul_find_type(type), n_rows, n_k, rows, packed, 0, matmul_panels(n_rows));
}

size_t cspec_matmul_activations_size(int32_t type, int64_t n_k, int64_t n_tokens)
{
    const struct matmul_type *found = covered(type, 1, n_k);
    return found == NULL ? 0 : (size_t)n_tokens * matmul_token_size(found, n_k / found->block);
}

int32_t cspec_matmul_has(int32_t instructions)
{
    return matmul_has(instructions);
}

void cspec_matmul(int32_t instructions, int32_t type, int64_t n_rows, int64_t n_k, int64_t n_tokens,
                  const void *packed, const float *x, void *activations, float *out, const int32_t *listed,
                  int64_t n_listed, int32_t n_parts)
{
    const struct matmul_type *found = matmul_find_type(type);
    const int64_t n_blocks = n_k / found->block;
    const struct matmul_tokens tokens = {(const char *)x, {n_tokens, 1, 1}, {sizeof(float) * (size_t)n_k, 0, 0}};
    const struct matmul_product product = {found,  instructions, n_rows, n_k,           n_tokens,
                                           packed, activations,  out,    (size_t)n_rows, listed, n_listed};
    for (int32_t part = 0; part < n_parts; part++) {
        matmul_quantise(found, instructions, n_blocks, &tokens, n_tokens, activations, n_blocks * part / n_parts,
                        n_blocks * (part + 1) / n_parts);
    }
    const int64_t n_panels = matmul_product_panels(&product);
    for (int32_t part = 0; part < n_parts; part++) {
        matmul_multiply(&product, n_panels * part / n_parts, n_panels * (part + 1) / n_parts);
    }
}
