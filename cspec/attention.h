/* Flash attention with one order of summation: how the files attention*.c meet.
 *
 * Every file attention_<instruction set>.c defines vectors of LANES floats and compiles the algorithm of
 * attention_kernels.h with them. All of them do the same operations on the same lanes, fused multiply-adds
 * included, so all give the same bits. */
#ifndef CSPEC_ATTENTION_H
#define CSPEC_ATTENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cspec.h"

enum {
    ATTENTION_LANES = 16,
    /* Cells whose keys are converted and transposed at a time. */
    ATTENTION_BLOCK = 32,
    /* Cells that share one maximum and one sum. Results of segments are combined in the order of the cells. */
    ATTENTION_SEGMENT = 128,
    ATTENTION_STRIPES = ATTENTION_SEGMENT / ATTENTION_LANES, /* runs of LANES cells in a segment */
    ATTENTION_MOST_HEAD = 576,
    /* Floats from one packed row of Q to the next. A constant, so that all rows of a tile have constant offsets
     * from one pointer; 37 cache lines, an odd number, so that they fall into different sets. */
    ATTENTION_Q_STRIDE = 592,
    ATTENTION_UNSEEN = 0xfc00, /* -inf in half precision: what the mask says of a cell that a row does not see */
};

/* The rows (token, head) of one group of heads and a run of tokens, all of which see the same K and V. */
typedef struct {
    int64_t sequence, kv_head, first_token, n_tokens;
} attention_unit;

/* What a thread works with. Rows of a unit are [n_tokens][heads of the group]. */
typedef struct {
    float *q;          /* [rows][Q_STRIDE] */
    float *keys;       /* [k_size][BLOCK], transposed */
    float *rows_of_k;  /* [LANES][k_size], of a type that is not F16 */
    float *rows_of_v;  /* [SEGMENT][v_size], likewise */
    float *weights;    /* [rows][SEGMENT], scores and then e^(score - maximum) */
    uint16_t *visible; /* [rows][STRIPES], a bit for each cell */
    float *sums;       /* [rows][2 + v_size], of one segment: maximum, sum of weights, sum of weights x V */
    float *totals;     /* [rows][2 + v_size], of all segments so far */
} attention_scratch;

typedef struct {
    /* Copies a unit's rows of Q to where `segment` wants them. */
    void (*pack)(const cspec_attention *a, const attention_unit *unit, attention_scratch *scratch);
    /* One segment of cells for all rows of a packed unit. sums: [rows][2 + v_size]. */
    void (*segment)(const cspec_attention *a, const attention_unit *unit, int64_t segment,
                    attention_scratch *scratch, float *sums);
    /* Adds the result of the next segment to a row's total; both [2 + v_size]. */
    void (*add)(float *total, const float *sums, int64_t v_size);
    /* Writes a row: total / sum of weights, the sink's included. */
    void (*finish)(float *total, int64_t v_size, const float *sink, float *out);
} attention_kernels;

/* The mask of a row: [n_cells] half precision. */
static inline const uint16_t *attention_mask_of(const cspec_attention *a, int64_t token, int64_t head,
                                                int64_t sequence)
{
    return (const uint16_t *)(a->mask + token * a->mask_stride[0] + head % a->mask_heads * a->mask_stride[1] +
                              sequence % a->mask_sequences * a->mask_stride[2]);
}

/* Null where the compiler's target has no such instructions. */
extern const attention_kernels *const cspec_attention_avx512, *const cspec_attention_avx2,
    *const cspec_attention_c;

#endif
