/* Runs products and attention over random and awkward inputs, with every instruction set of this CPU, for the
 * sanitizers to watch. Arrays have exactly the documented lengths, on the heap, so that one element too far is
 * seen. Results of all instruction sets are compared with those of plain C. */
#undef NDEBUG
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cspec.h"
#include "matmul/matmul.h"

static uint32_t state = 1;

static int pick(int n)
{
    state = state * 1664525u + 1013904223u;
    return (int)((state >> 8) % (uint32_t)n);
}

static float uniform(void) { return (float)pick(20001) / 10000 - 1; }

static void *allocate(size_t size)
{
    void *memory = NULL;
    assert(posix_memalign(&memory, 64, size) == 0);
    return memory;
}

/* Bits that are the same, or not a number in both. */
static void check_same(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        assert(memcmp(&a[i], &b[i], sizeof *a) == 0 || (isnan(a[i]) && isnan(b[i])));
    }
}

/* ---- products ------------------------------------------------------------------------------------ */

static float awkward(void)
{
    static const float values[] = {0.0f, -0.0f, FLT_MIN, 1e-45f, -FLT_MAX, FLT_MAX, INFINITY, -INFINITY, NAN, 1e20f};
    return values[pick(10)];
}

static void check_product(const struct matmul_type *type, int n_rows, int n_blocks, int n_tokens, int kind)
{
    const int32_t number = type->ggml_type;
    const int64_t n_k = (int64_t)n_blocks * type->block;
    const size_t size = (size_t)n_rows * (size_t)n_blocks * (size_t)type->ggml_bytes;
    const size_t n_x = (size_t)(n_tokens * n_k), n_out = (size_t)n_tokens * (size_t)n_rows;
    uint8_t *rows = malloc(size);
    float *x = malloc(n_x * sizeof *x), *expected = malloc(n_out * sizeof *expected), *out = malloc(n_out * sizeof *out);
    void *packed = allocate(cspec_matmul_packed_size(number, n_rows, n_k));
    void *scratch = allocate(cspec_matmul_activations_size(number, n_k, n_tokens));
    for (size_t i = 0; i < size; i++) {
        rows[i] = (uint8_t)pick(256);
    }
    for (size_t i = 0; i < n_x; i++) {
        x[i] = kind == 1 && pick(50) == 0 ? awkward() : kind == 2 ? 0 : uniform();
    }
    cspec_matmul_pack(number, n_rows, n_k, rows, packed);
    cspec_matmul(CSPEC_MATMUL_C, number, n_rows, n_k, n_tokens, packed, x, scratch, expected, NULL, 0, 1);
    for (int32_t level = CSPEC_MATMUL_C; level <= CSPEC_MATMUL_AVX512; level++) {
        if (cspec_matmul_has(level)) {
            cspec_matmul(level, number, n_rows, n_k, n_tokens, packed, x, scratch, out, NULL, 0, 1 + pick(5));
            check_same(out, expected, n_out);
            const int32_t last_panel = (n_rows - 1) / MATMUL_ROWS;
            cspec_matmul(level, number, n_rows, n_k, n_tokens, packed, x, scratch, out, &last_panel, 1, 1 + pick(5));
            for (int t = 0; t < n_tokens; t++) {
                const int row = t * n_rows, wanted = last_panel * MATMUL_ROWS;
                check_same(out + row + wanted, expected + row + wanted, (size_t)(n_rows - wanted));
            }
        }
    }
    free(rows), free(x), free(expected), free(out), free(packed), free(scratch);
}

static void check_products(void)
{
    static const int n_rows[] = {1, 15, 16, 17, 33}, n_tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 17};
    for (int32_t number = 0; number < 64; number++) {
        const struct matmul_type *type = matmul_find_type(number);
        for (int i = 0; type != NULL && i < 10; i++) {
            check_product(type, n_rows[i % 5], 1 + i % 3, n_tokens[i], i % 3);
        }
    }
}

/* ---- attention ----------------------------------------------------------------------------------- */

static uint16_t pick_half(void) { return (uint16_t)((pick(2) << 15) | (12 + pick(4)) << 10 | pick(1024)); } /* 1/8 to 2 */

static void check_attention(int n_tokens, int n_cells, int group, int head, int n_sequences)
{
    enum { KV_HEADS = 2, MINUS_INFINITY = 0xfc00 };
    const int n_heads = KV_HEADS * group;
    const size_t n_q = (size_t)(n_sequences * n_tokens * n_heads * head);
    const size_t n_kv = (size_t)(n_sequences * n_cells * KV_HEADS * head), n_mask = (size_t)(n_tokens * n_cells);
    float *q = malloc(n_q * sizeof *q), *expected = malloc(n_q * sizeof *q), *out = malloc(n_q * sizeof *q);
    float *sinks = malloc((size_t)n_heads * sizeof *sinks);
    uint16_t *k = malloc(n_kv * sizeof *k), *v = malloc(n_kv * sizeof *v), *mask = malloc(n_mask * sizeof *mask);
    for (size_t i = 0; i < n_q; i++) {
        q[i] = uniform();
    }
    for (size_t i = 0; i < n_kv; i++) {
        k[i] = pick_half(), v[i] = pick_half();
    }
    for (size_t i = 0; i < n_mask; i++) {
        mask[i] = pick(3) == 0 ? MINUS_INFINITY : 0;
    }
    for (int i = 0; i < n_heads; i++) {
        sinks[i] = uniform();
    }
    const int64_t kv_row = head * 2, kv_cell = kv_row * KV_HEADS, row = head * 4, token = row * n_heads;
    cspec_attention a = {
        .n_tokens = n_tokens, .n_heads = n_heads, .n_kv_heads = KV_HEADS, .n_cells = n_cells,
        .n_sequences = n_sequences, .k_size = head, .v_size = head,
        .q = (const char *)q, .k = (const char *)k, .v = (const char *)v,
        .mask = pick(4) ? (const char *)mask : NULL, .mask_heads = 1, .mask_sequences = 1,
        .sinks = pick(2) ? sinks : NULL,
        .q_stride = {token, row, token * n_tokens},
        .k_stride = {kv_cell, kv_row, kv_cell * n_cells}, .v_stride = {kv_cell, kv_row, kv_cell * n_cells},
        .mask_stride = {n_cells * 2, (int64_t)n_mask * 2, (int64_t)n_mask * 2},
        .out_stride = {token, row, token * n_tokens},
        .scale = 0.25f, .max_bias = pick(2) ? 8.0f : 0.0f, .soft_cap = pick(2) ? 30.0f : 0.0f,
    };
    for (int32_t kernels = CSPEC_KERNELS_C; kernels <= CSPEC_KERNELS_AVX512; kernels++) {
        a.kernels = kernels;
        a.out = (char *)(kernels == CSPEC_KERNELS_C ? expected : out);
        if (!cspec_matmul_has(kernels) || !cspec_attention_covers(&a)) {
            continue;
        }
        const int32_t n_threads = 1 + pick(4);
        char *work = malloc(cspec_attention_work_size(&a, n_threads));
        for (int32_t thread = 0; thread < n_threads; thread++) {
            cspec_attention_segments(&a, thread, n_threads, work);
        }
        for (int32_t thread = 0; thread < n_threads; thread++) {
            cspec_attention_combine(&a, thread, n_threads, work);
        }
        free(work);
        check_same((const float *)(const void *)a.out, expected, n_q);
    }
    free(q), free(expected), free(out), free(sinks), free(k), free(v), free(mask);
}

int main(void)
{
    check_products();
    static const int n_tokens[] = {1, 2, 5, 8, 9, 33}, n_cells[] = {1, 31, 32, 33, 257, 1100}, heads[] = {16, 48, 64, 128};
    for (int i = 0; i < 48; i++) {
        check_attention(n_tokens[i % 6], n_cells[pick(6)], 1 + pick(7), heads[i % 4], 1 + pick(2));
    }
    puts("done");
    return 0;
}
