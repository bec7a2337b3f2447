/* Products of quantised weights with a few tokens' activations; docs/kernels.md shows the layout.
 *
 *     out[token][row] = sum over k of weights[row][k] * x[token][k]
 *
 * 16 rows of the weights lie interleaved in a *panel*, so that a 512-bit register holds 4 consecutive k of each
 * of its rows and one dot-product instruction serves them all. Up to 8 tokens are a *tile*: their
 * activations, quantised to 8 bits, lie interleaved too, 4 consecutive k of each. AMX takes up to 64, in rows.
 *
 * An element of the result is the same operations in the same order whatever the number of tokens, the
 * tile that a token falls into, the panels that a thread takes, or the instruction set: sums of products are
 * integers, exact in any order, and the floating-point operations on them are fixed.
 */
#ifndef CSPEC_MATMUL_H
#define CSPEC_MATMUL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MATMUL_ROWS = 16, MATMUL_TOKENS = 8, MATMUL_ROW_TOKENS = 64 };

/* How the quants of 32 consecutive k lie in a panel. They are unpacked to 8 vectors of 64 bytes, the i-th with
 * k = 4i .. 4i + 3 of each row: byte 4 row + k % 4. */
enum quants {
    NIBBLES,        /* 256 bytes: 4 vectors, 2 i in the low nibbles of one, 2 i + 1 in its high nibbles */
    NIBBLES_1_BIT,  /* and a vector with bit 4 of vector i in its bit i */
    NIBBLES_2_BITS, /* 2 times 192 bytes, of 16 k each: 2 vectors of nibbles, and one with bits 4 and 5 of
                     * vector i in its bits 2 i and 2 i + 1 */
    BYTES,          /* 512 bytes */
    TWO_BITS,       /* 128 bytes: 2 vectors, vector i in bits 2 (i % 4) of vector i / 4 */
    TWO_BITS_1_BIT, /* and a vector with bit 2 of vector i in its bit i */
    CODES,          /* as NIBBLES, each an index into the table of IQ4_NL; unpacked to its value + 128 */
    HALVES,         /* 32 times 16 F16 */
    BRAINS,         /* 32 times 16 BF16 */
};

/* What the quants of a block are multiplied by, and where it lies: for each of 16 rows, in the block's head or at
 * the front of its body. Blocks are of 32 k where there is one scale, of 256 k where there are more. */
enum scales {
    NO_SCALE,
    SCALE,          /* head: F16 d */
    SCALE_MIN,      /* body: F16 d, F16 min */
    SCALES_6_MINS,  /* body: F16 d, F16 dmin, 3 words with 6-bit scales and mins of 8 sub-blocks (pack.c) */
    SCALES_8,       /* head: F16 d; body: [16] int8 scales of 16 sub-blocks */
    SCALES_6,       /* head: F16 d; body: 3 words with 6-bit scales of 16 sub-blocks, 32 too high */
    SCALES_4_MINS,  /* head: F16 d, F16 dmin; body: 4 words with 4-bit scales and mins of 16 sub-blocks */
    SCALES_6_LONG,  /* head: F16 d, 2 high bits of 8 scales; body: a word of their 4 low bits; 32 too high */
};

/* A weight type of ggml's, and its panels: the heads of all blocks, then their bodies. */
struct matmul_type {
    const char *name;
    int32_t ggml_type;
    int32_t block;       /* k of a block, 32 or 256 */
    int32_t ggml_bytes;  /* of a block of one row, as ggml stores it */
    int32_t head_bytes;  /* of a block of 16 rows */
    int32_t body_bytes;
    int32_t record;      /* bytes of a block of one token's activations */
    int32_t offset;      /* what the quants are too high by */
    enum quants quants;
    enum scales scales;
};

/* Types by ggml's number, or null. */
const struct matmul_type *matmul_find_type(int32_t ggml_type);

/* ---- weights (pack.c) ---------------------------------------------------------------------------- */

int64_t matmul_panels(int64_t n_rows);
size_t matmul_head_size(const struct matmul_type *type, int64_t n_blocks); /* of all heads of a panel */
size_t matmul_panel_size(const struct matmul_type *type, int64_t n_blocks);

/* Panels first to last - 1 of n_rows rows of n_k weights, from ggml's layout. Rows past the last are zero. */
void matmul_pack(const struct matmul_type *type, int64_t n_rows, int64_t n_k, const void *rows, void *panels,
                 int64_t first, int64_t last);

/* ---- activations (activations.c) ------------------------------------------------------------------
 *
 * A tile of n tokens is a record for each block, and a record is, with a 32-bit word for each of the n tokens in
 * each entry:
 *   blocks of 32:   [8] 4 int8 quants, [1] float scale, [1] their sum (below)
 *   blocks of 256:  [64] 4 int8 quants, then sums, [1] float scale
 *   no scale:       [32] floats
 * Sums of the quants enter as what the weights' type needs: -offset * sum as int32 of each sub-block, or
 * where there are mins the sums of two neighbouring sub-blocks as two int16, or of the block as a float.
 *
 * AMX's kernels want neighbouring quants of a token together, in rows of 64. Where they are used the
 * quants of all tiles come first, [tile][block][row of a block][token], and then all their words, [tile][block][token]. Words
 * are as above, but where there is an offset to blocks of 256 the sums are a single one: offset * sum of the block's
 * quants. */

struct matmul_tokens {
    const char *data; /* of floats */
    int64_t ne[3];    /* tokens in each of three dimensions */
    size_t stride[3]; /* bytes */
};

/* Whether the activations of so many tokens lie in rows, for AMX's kernels. */
bool matmul_in_rows(const struct matmul_type *type, int32_t level, int64_t n_tokens);

int64_t matmul_tiles(bool in_rows, int64_t n_tokens);
/* A tile's first token; of the one past the last: n_tokens. */
int64_t matmul_tile_start(bool in_rows, int64_t n_tokens, int64_t tile);
/* Bytes of a token's activations, in records or in rows. */
size_t matmul_token_size(const struct matmul_type *type, int64_t n_blocks);
int32_t matmul_row_words(const struct matmul_type *type); /* words of a block of a token in rows */

/* Blocks first to last - 1 of all tokens' activations. */
void matmul_quantise(const struct matmul_type *type, int32_t level, int64_t n_blocks, const struct matmul_tokens *x,
                     int64_t n_tokens, void *activations, int64_t first, int64_t last);

/* AVX-VNNI's instruction, where the compiler knows it. CSPEC_EVEX: the same in AVX-512's encoding, for tests on CPUs that
 * have only that. */
#if defined(__x86_64__) && defined(CSPEC_EVEX)
#define MATMUL_AVXVNNI_TARGET "avx512vl,avx512vnni"
#define MATMUL_AVXVNNI_DOT _mm256_dpbusd_epi32
#elif defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define MATMUL_AVXVNNI_TARGET "avxvnni"
#define MATMUL_AVXVNNI_DOT _mm256_dpbusd_avx_epi32
#endif

/* AMX's instructions, where the compiler's assembler knows them. */
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 11
#define MATMUL_AMX_BUILT
#endif

/* ---- kernels ------------------------------------------------------------------------------------- */

/* A panel times a tile, into out [tokens][stride], 16 floats of each row. */
typedef void matmul_kernel(const uint8_t *panel, const uint8_t *records, int64_t n_blocks, float *out, size_t stride);

enum { MATMUL_OFF, MATMUL_C, MATMUL_AVX2, MATMUL_AVXVNNI, MATMUL_AVX512, MATMUL_AMX, MATMUL_LEVELS };

/* A kernel for n_tokens, or null where the instruction set has none for the type. */
matmul_kernel *matmul_avx2_kernel(const struct matmul_type *type, int32_t n_tokens);
matmul_kernel *matmul_avxvnni_kernel(const struct matmul_type *type, int32_t n_tokens);
matmul_kernel *matmul_avx512_kernel(const struct matmul_type *type, int32_t n_tokens);

/* The same with activations in rows, of n <= MATMUL_ROW_TOKENS tokens; the thread's tiles must be configured for them. */
typedef void matmul_rows_kernel(const uint8_t *panel, const uint8_t *quants, const uint8_t *words, int32_t n,
                                int64_t n_blocks, float *out, size_t stride);

matmul_rows_kernel *matmul_amx_kernel(const struct matmul_type *type);

/* What a thread's tile registers are, as the instructions have it; all zero: not in use. */
struct matmul_tile_config {
    uint8_t palette, start_row, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

struct matmul_tile_config matmul_amx_config(int32_t n_tokens); /* of a tile */
bool matmul_amx_permitted(void);
void matmul_amx_save(struct matmul_tile_config *config);
void matmul_amx_load(const struct matmul_tile_config *config); /* clears the tiles */

/* The meaning of all of them. */
void matmul_c(const struct matmul_type *type, int32_t n_tokens, const uint8_t *panel, const uint8_t *records,
              int64_t n_blocks, float *out, size_t stride);

/* Whether this CPU has what a level needs. */
bool matmul_has(int32_t level);

/* ---- products (product.c) ------------------------------------------------------------------------ */

struct matmul_product {
    const struct matmul_type *type;
    int32_t level;
    int64_t n_rows, n_k, n_tokens;
    const void *panels;
    const void *activations;
    float *out; /* [n_tokens][stride] */
    size_t stride;
    const int32_t *listed; /* [n_listed] the panels to compute, ascending; rows of others are -inf. null: all */
    int64_t n_listed;      /* at least 1 */
};

/* Panels to compute. */
int64_t matmul_product_panels(const struct matmul_product *product);

/* Of the panels to compute those from first to last - 1, times all tokens. */
void matmul_multiply(const struct matmul_product *product, int64_t first, int64_t last);

/* Whether every kernel of a level gives the bits of plain C on panels of random bytes. */
bool matmul_agrees(int32_t level);

#endif
