/* A product in panels and tiles, with the kernels of an instruction set. */
#include "matmul.h"

#include <string.h>

#include "../cspec.h"

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
#endif
    return level == MATMUL_C;
}

static matmul_kernel *find_kernel(int32_t level, const struct matmul_type *type, int32_t n_tokens)
{
    return level == MATMUL_AVX512 ? matmul_avx512_kernel(type, n_tokens) : NULL;
}

void matmul_multiply(const struct matmul_product *product, int64_t first, int64_t last)
{
    const struct matmul_type *type = product->type;
    const int64_t n_blocks = product->n_k / type->block, n_tiles = matmul_tiles(product->n_tokens);
    const size_t panel_size = matmul_panel_size(type, n_blocks), token_size = matmul_token_size(type, n_blocks);
    const int64_t fitting = (int64_t)(GROUP_BYTES / panel_size), group = fitting > 1 ? fitting : 1;
    for (int64_t start = first; start < last; start += group) {
        const int64_t end = start + group < last ? start + group : last;
        for (int64_t tile = 0; tile < n_tiles; tile++) {
            const int64_t token = matmul_tile_start(product->n_tokens, tile);
            const int32_t n = (int32_t)(matmul_tile_start(product->n_tokens, tile + 1) - token);
            const uint8_t *records = (const uint8_t *)product->activations + (size_t)token * token_size;
            matmul_kernel *kernel = find_kernel(product->level, type, n);
            for (int64_t panel = start; panel < end; panel++) {
                const int64_t row = panel * MATMUL_ROWS, rows = product->n_rows - row;
                const uint8_t *weights = (const uint8_t *)product->panels + (size_t)panel * panel_size;
                float edge[MATMUL_TOKENS][MATMUL_ROWS];
                float *out = product->out + (size_t)token * product->stride + row;
                const bool whole = rows >= MATMUL_ROWS;
                float *to = whole ? out : edge[0];
                const size_t stride = whole ? product->stride : MATMUL_ROWS;
                if (kernel != NULL) {
                    kernel(weights, records, n_blocks, to, stride);
                } else {
                    matmul_c(type, n, weights, records, n_blocks, to, stride);
                }
                for (int32_t t = 0; !whole && t < n; t++) {
                    memcpy(out + (size_t)t * product->stride, edge[t], (size_t)rows * sizeof(float));
                }
            }
        }
    }
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
                  const void *packed, const float *x, void *activations, float *out, int32_t n_parts)
{
    const struct matmul_type *found = matmul_find_type(type);
    const int64_t n_blocks = n_k / found->block, n_panels = matmul_panels(n_rows);
    const struct matmul_tokens tokens = {(const char *)x, {n_tokens, 1, 1}, {sizeof(float) * (size_t)n_k, 0, 0}};
    const struct matmul_product product = {found,  instructions, n_rows, n_k,           n_tokens,
                                           packed, activations,  out,    (size_t)n_rows};
    for (int32_t part = 0; part < n_parts; part++) {
        matmul_quantise(found, n_blocks, &tokens, n_tokens, activations, n_blocks * part / n_parts,
                        n_blocks * (part + 1) / n_parts);
    }
    for (int32_t part = 0; part < n_parts; part++) {
        matmul_multiply(&product, n_panels * part / n_parts, n_panels * (part + 1) / n_parts);
    }
}
