/* The algorithm of attention, for the vectors that the including file has defined.
 *
 * For a row (token, head), with s_c = scale q . k_c + slope mask_c over the cells c that its mask lets it see:
 *   dot product  one chain of fused multiply-adds over the head's elements, a lane for each cell
 *   segment      m = max s_c; w_c = e^(s_c - m); their sum in LANES partial sums, folded in halves;
 *                sum of w_c v_c as one chain of fused multiply-adds over the visible cells, in their order
 *   total        segments added in the order of the cells, rescaled to the larger maximum
 * Nothing in this depends on another row, on cells that are not visible, or on who computes what. Cells that are
 * not visible are never multiplied, not even by zero: what they hold may be an infinity or not a number.
 *
 * The including file defines: TARGET (attributes of a function), vec, and
 *   load, store, load_half, broadcast, add, sub, mul, quotient, fused (a b + c), larger (a > b ? a : b),
 *   less (a bit for each lane), choose (bits, a, b: a where the bit is set), power_of_two (see exp_negative),
 *   store_transposed (LANES vectors as columns), fetch (an address, into the cache, without telling the compiler of
 *   a read: GCC would then keep sums in memory around it);
 *   DOT_ROWS x DOT_VECS, SUM_ROWS x SUM_VECS: the largest tiles of results that fit into its registers. */
#include <math.h>
#include <string.h>

#include "attention.h"

enum { LANES = ATTENTION_LANES, BLOCK = ATTENTION_BLOCK, SEGMENT = ATTENTION_SEGMENT, STRIPES = ATTENTION_STRIPES };
enum { Q_STRIDE = ATTENTION_Q_STRIDE, ALL = 0xffff, LINE = 64 };
enum { MAXIMUM, SUM, VALUES }; /* of sums and totals */

#define INLINE static inline __attribute__((always_inline)) TARGET

static inline int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t group_size(const cspec_attention *a)
{
    return a->n_heads / a->n_kv_heads;
}

/* ---- elementary functions ------------------------------------------------------------------------ */

/* e^x for x <= 0 within 2 units in the last place; zero below e^-87, where results would be subnormal.
 *
 * x = n ln 2 + r, |r| <= ln 2 / 2: adding 1.5 * 2^23 rounds to the integer n, which is then in the low bits;
 * ln 2 is subtracted in two parts. e^r is its series to r^7. */
INLINE vec exp_negative(vec x)
{
    const vec magic = broadcast(0x1.8p23f);
    const vec shifted = fused(x, broadcast(0x1.715476p0f), magic);
    const vec n = sub(shifted, magic);
    const vec r = fused(n, broadcast(-0x1.7F7D1Cp-20f), fused(n, broadcast(-0x1.62E4p-1f), x));
    vec sum = broadcast(1.0f / 5040);
    sum = fused(sum, r, broadcast(1.0f / 720));
    sum = fused(sum, r, broadcast(1.0f / 120));
    sum = fused(sum, r, broadcast(1.0f / 24));
    sum = fused(sum, r, broadcast(1.0f / 6));
    sum = fused(sum, r, broadcast(1.0f / 2));
    sum = fused(sum, r, broadcast(1.0f));
    sum = fused(sum, r, broadcast(1.0f));
    return choose(less(x, broadcast(-87.0f)), broadcast(0.0f), mul(sum, power_of_two(shifted)));
}

/* tanh x = (1 - e^-2|x|) / (1 + e^-2|x|), with the sign of x. */
INLINE vec tanh_of(vec x)
{
    const vec zero = broadcast(0.0f), one = broadcast(1.0f);
    const vec e = exp_negative(mul(broadcast(-2.0f), larger(x, sub(zero, x))));
    const vec magnitude = quotient(sub(one, e), add(one, e));
    return choose(less(x, zero), sub(zero, magnitude), magnitude);
}

INLINE float exp_negative_of_one(float x)
{
    float lanes[LANES];
    store(lanes, exp_negative(broadcast(x)));
    return lanes[0];
}

INLINE float larger_of(float a, float b)
{
    return a > b ? a : b;
}

/* ALiBi's slope of a head: 2^(-max_bias i / n) for i = 1..n, n the largest power of two of heads; the heads
 * past it take the odd steps of twice as many. */
static float slope_of(const cspec_attention *a, int64_t head)
{
    if (a->max_bias <= 0.0f) {
        return 1.0f;
    }
    int64_t n = 1;
    while (2 * n <= a->n_heads) {
        n *= 2;
    }
    const float bias = head < n ? a->max_bias : a->max_bias / 2;
    const int64_t step = head < n ? head + 1 : 2 * (head - n) + 1;
    return powf(powf(2.0f, -bias / (float)n), (float)step);
}

/* ---- which cells a row sees ---------------------------------------------------------------------- */

TARGET static void find_visible(const cspec_attention *a, const attention_unit *unit, int64_t first, int64_t n,
                                uint16_t *visible)
{
    const int64_t group = group_size(a);
    for (int64_t row = 0; row < unit->n_tokens * group; row++, visible += STRIPES) {
        if (a->mask != NULL && a->mask_heads == 1 && row % group != 0) {
            memcpy(visible, visible - STRIPES, STRIPES * sizeof *visible);
            continue;
        }
        const uint16_t *mask = a->mask == NULL ? NULL
                                               : attention_mask_of(a, unit->first_token + row / group,
                                                         unit->kv_head * group + row % group, unit->sequence);
        for (int64_t stripe = 0; stripe < STRIPES; stripe++) {
            uint32_t bits = 0;
            for (int64_t lane = 0; lane < smaller(LANES, n - stripe * LANES); lane++) {
                bits |= (uint32_t)(mask == NULL || mask[first + stripe * LANES + lane] != ATTENTION_UNSEEN)
                        << lane;
            }
            visible[stripe] = (uint16_t)bits;
        }
    }
}

/* ---- Q . K --------------------------------------------------------------------------------------- */

TARGET static void pack(const cspec_attention *a, const attention_unit *unit, attention_scratch *scratch)
{
    const int64_t group = group_size(a);
    for (int64_t row = 0; row < unit->n_tokens * group; row++) {
        const char *q = a->q + (unit->first_token + row / group) * a->q_stride[0] +
                        (unit->kv_head * group + row % group) * a->q_stride[1] +
                        unit->sequence * a->q_stride[2];
        memcpy(scratch->q + row * Q_STRIDE, q, (size_t)a->k_size * sizeof(float));
    }
}

/* Converts and transposes LANES keys into lanes of the block. What lies past the last of n cells is never read:
 * those lanes repeat it. */
TARGET static void transpose_keys(const cspec_attention *a, const char *k, int64_t n, attention_scratch *scratch,
                                  float *keys)
{
    const char *cell[LANES];
    for (int64_t lane = 0; lane < LANES; lane++) {
        cell[lane] = k + smaller(lane, n - 1) * a->k_stride[0];
    }
    if (a->k_to_float != NULL) {
        for (int64_t lane = 0; lane < LANES; lane++) {
            float *row = scratch->rows_of_k + lane * a->k_size;
            a->k_to_float(cell[lane], row, a->k_size);
            cell[lane] = (const char *)row;
        }
    }
    for (int64_t d = 0; d < a->k_size; d += LANES) {
        vec rows[LANES];
        if (a->k_to_float != NULL) {
            for (int64_t lane = 0; lane < LANES; lane++) {
                rows[lane] = load((const float *)cell[lane] + d);
            }
        } else {
#pragma GCC unroll 16
            for (int64_t lane = 0; lane < LANES; lane++) {
                rows[lane] = load_half((const uint16_t *)cell[lane] + d);
            }
        }
        store_transposed(rows, keys + d * BLOCK, BLOCK);
    }
}

/* Scores of n_rows x n_vecs LANES cells. n_rows and n_vecs are constants where this is inlined. */
INLINE void dot_tile(const int n_rows, const int n_vecs, const float *q, const float *keys, int64_t k_size,
                     const char *next, int64_t next_stride, float *scores)
{
    vec sum[n_rows > 0 ? DOT_ROWS : 1][DOT_VECS];
#pragma GCC unroll 16
    for (int row = 0; row < n_rows; row++) {
#pragma GCC unroll 4
        for (int i = 0; i < n_vecs; i++) {
            sum[row][i] = broadcast(0.0f);
        }
    }
    for (int64_t d = 0; d < k_size; d++) {
        /* BLOCK elements of two bytes are a line, so that all d together fetch each line of BLOCK cells. */
        fetch(next + d % BLOCK * next_stride + d / BLOCK * LINE);
        vec key[DOT_VECS];
#pragma GCC unroll 4
        for (int i = 0; i < n_vecs; i++) {
            key[i] = load(keys + d * BLOCK + i * LANES);
        }
#pragma GCC unroll 16
        for (int row = 0; row < n_rows; row++) {
            const vec element = broadcast(q[row * Q_STRIDE + d]);
#pragma GCC unroll 4
            for (int i = 0; i < n_vecs; i++) {
                sum[row][i] = fused(element, key[i], sum[row][i]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < n_rows; row++) {
#pragma GCC unroll 4
        for (int i = 0; i < n_vecs; i++) {
            store(scores + row * SEGMENT + i * LANES, sum[row][i]);
        }
    }
}

#define FOR_ROWS(n_rows, most, CALL)                                                                  \
    switch (n_rows) {                                                                                 \
        CASE(1, most, CALL)                                                                           \
        CASE(2, most, CALL)                                                                           \
        CASE(3, most, CALL)                                                                           \
        CASE(4, most, CALL)                                                                           \
        CASE(5, most, CALL)                                                                           \
        CASE(6, most, CALL)                                                                           \
        CASE(7, most, CALL)                                                                           \
        CASE(8, most, CALL)                                                                           \
        CASE(9, most, CALL)                                                                           \
        CASE(10, most, CALL)                                                                          \
        CASE(11, most, CALL)                                                                          \
        CASE(12, most, CALL)                                                                          \
    }
#define CASE(n, most, CALL)                                                                           \
    case n:                                                                                           \
        CALL((n <= most ? n : 0));                                                                    \
        break;

TARGET static void dot(int64_t n_rows, const float *q, const float *keys, int64_t k_size, const char *next, int64_t next_stride,
                       float *scores)
{
    for (int64_t i = 0; i < BLOCK; i += DOT_VECS * LANES) {
#define DOT(n) dot_tile(n, DOT_VECS, q, keys + i, k_size, next, next_stride, scores + i)
        FOR_ROWS(n_rows, DOT_ROWS, DOT)
#undef DOT
    }
}

/* The size of each of the fewest tiles of at most `most` rows, evened out. */
static int64_t even_tile(int64_t n_rows, int64_t most)
{
    const int64_t n_tiles = (n_rows + most - 1) / most;
    return (n_rows + n_tiles - 1) / n_tiles;
}

/* weights: [rows][SEGMENT] out, q . k of the cells of the blocks in which anything is visible. */
TARGET static void compute_dots(const cspec_attention *a, const char *k, int64_t n_cells,
                                int64_t n_rows, attention_scratch *scratch)
{
    const int64_t tile = even_tile(n_rows, DOT_ROWS);
    for (int64_t first = 0; first < n_cells; first += BLOCK) {
        uint32_t any = 0;
        for (int64_t row = 0; row < n_rows; row++) {
            const uint16_t *visible = scratch->visible + row * STRIPES + first / LANES;
            any |= visible[0] | (uint32_t)visible[1] << LANES;
        }
        if (any == 0) {
            continue;
        }
        for (int64_t lane = 0; lane < BLOCK; lane += LANES) {
            /* Without a cell at all, the lanes keep what they had: no row sees them. */
            if (first + lane < n_cells) {
                transpose_keys(a, k + (first + lane) * a->k_stride[0], n_cells - first - lane, scratch,
                               scratch->keys + lane);
            }
        }
        const char *next = k + (first + BLOCK) * a->k_stride[0];
        int64_t next_stride = a->k_stride[0];
        for (int64_t row = 0; row < n_rows; row += tile) {
            dot(smaller(tile, n_rows - row), scratch->q + row * Q_STRIDE, scratch->keys, a->k_size, next,
                next_stride, scratch->weights + row * SEGMENT + first);
            next_stride = 0; /* once is enough */
        }
    }
}

/* ---- softmax of a segment ------------------------------------------------------------------------ */

INLINE vec load_mask(const uint16_t *mask, int64_t n)
{
    if (n >= LANES) {
        return load_half(mask);
    }
    uint16_t part[LANES] = {0};
    memcpy(part, mask, (size_t)n * sizeof *part);
    return load_half(part);
}

/* weights: [SEGMENT] in: q . k; out: e^(score - maximum), zero where not visible. mask may be null. */
TARGET static void softmax(const cspec_attention *a, const uint16_t *mask, float slope, int64_t n_cells,
                           const uint16_t *visible, float *weights, float *sums)
{
    const vec scale = broadcast(a->soft_cap != 0.0f ? a->scale / a->soft_cap : a->scale);
    vec maxima = broadcast(-INFINITY);
    for (int64_t stripe = 0; stripe < STRIPES; stripe++) {
        const int64_t first = stripe * LANES;
        if (visible[stripe] == 0) {
            continue;
        }
        vec score = mul(load(weights + first), scale);
        if (a->soft_cap != 0.0f) {
            score = mul(broadcast(a->soft_cap), tanh_of(score));
        }
        if (mask != NULL) {
            score = fused(broadcast(slope), load_mask(mask + first, n_cells - first), score);
        }
        score = choose(visible[stripe], score, broadcast(-INFINITY));
        store(weights + first, score);
        maxima = larger(maxima, score);
    }
    float lane[LANES];
    store(lane, maxima);
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) {
            lane[l] = larger_of(lane[l], lane[l + half]);
        }
    }
    const vec maximum = broadcast(lane[0]);
    vec sum = broadcast(0.0f);
    for (int64_t stripe = 0; stripe < STRIPES; stripe++) {
        vec weight = broadcast(0.0f);
        if (visible[stripe] != 0) {
            weight = choose(visible[stripe], exp_negative(sub(load(weights + stripe * LANES), maximum)), weight);
        }
        store(weights + stripe * LANES, weight);
        sum = add(sum, weight);
    }
    sums[MAXIMUM] = lane[0];
    store(lane, sum);
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) {
            lane[l] += lane[l + half];
        }
    }
    sums[SUM] = lane[0];
}

/* ---- weights x V --------------------------------------------------------------------------------- */

/* Adds n cells to n_rows x n_vecs LANES values. n_rows, n_vecs and half are constants where this is inlined. */
INLINE void sum_tile(const int n_rows, const int n_vecs, const bool half, const float *weights, const char *v,
                     int64_t v_stride, int64_t n, float *values, int64_t row_stride)
{
    vec sum[SUM_ROWS][SUM_VECS];
#pragma GCC unroll 16
    for (int row = 0; row < n_rows; row++) {
#pragma GCC unroll 4
        for (int i = 0; i < n_vecs; i++) {
            sum[row][i] = load(values + row * row_stride + i * LANES);
        }
    }
    for (int64_t c = 0; c < n; c++, v += v_stride) {
        /* Evenly, so that reading goes on while the CPU computes: it has room for few lines on their way. */
        fetch(v + SEGMENT * v_stride);
        if (n_vecs * LANES * (int)sizeof(uint16_t) > LINE) {
            fetch(v + SEGMENT * v_stride + LINE);
        }
        vec value[SUM_VECS];
#pragma GCC unroll 4
        for (int i = 0; i < n_vecs; i++) {
            value[i] = half ? load_half((const uint16_t *)v + i * LANES) : load((const float *)v + i * LANES);
        }
#pragma GCC unroll 16
        for (int row = 0; row < n_rows; row++) {
            const vec weight = broadcast(weights[row * SEGMENT + c]);
#pragma GCC unroll 4
            for (int i = 0; i < n_vecs; i++) {
                sum[row][i] = fused(weight, value[i], sum[row][i]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < n_rows; row++) {
#pragma GCC unroll 4
        for (int i = 0; i < n_vecs; i++) {
            store(values + row * row_stride + i * LANES, sum[row][i]);
        }
    }
}

/* Adds n cells, all of which all n_rows see, to their values. */
TARGET static void add_cells(int64_t n_rows, bool half, const float *weights, const char *v, int64_t v_stride,
                             int64_t n, float *values, int64_t v_size)
{
    const int64_t vec_size = LANES * (half ? sizeof(uint16_t) : sizeof(float));
    const int64_t n_vecs = v_size / LANES;
    for (int64_t i = 0; i < n_vecs;) {
        const char *v_i = v + i * vec_size;
        float *values_i = values + i * LANES;
#define SUM_WIDE(n_) sum_tile(n_, SUM_VECS, true, weights, v_i, v_stride, n, values_i, v_size + VALUES)
#define SUM_ONE(n_) sum_tile(n_, 1, true, weights, v_i, v_stride, n, values_i, v_size + VALUES)
#define SUM_FLOAT(n_) sum_tile(n_, 1, false, weights, v_i, v_stride, n, values_i, v_size + VALUES)
        if (!half) {
            FOR_ROWS(n_rows, SUM_ROWS, SUM_FLOAT)
            i++;
        } else if (i + SUM_VECS <= n_vecs) {
            FOR_ROWS(n_rows, SUM_ROWS, SUM_WIDE)
            i += SUM_VECS;
        } else {
            FOR_ROWS(n_rows, SUM_ROWS, SUM_ONE)
            i++;
        }
#undef SUM_WIDE
#undef SUM_ONE
#undef SUM_FLOAT
    }
}

/* sums: [rows][2 + v_size] in out: the values of all rows. */
TARGET static void sum_values(const cspec_attention *a, const char *v, int64_t v_stride, bool half,
                              int64_t n_rows, const attention_scratch *scratch, float *sums)
{
    const int64_t row_size = VALUES + a->v_size;
    const int64_t tile = even_tile(n_rows, SUM_ROWS);
    for (int64_t first = 0; first < n_rows; first += tile) {
        const int64_t n = smaller(tile, n_rows - first);
        const uint16_t *visible = scratch->visible + first * STRIPES;
        for (int64_t stripe = 0; stripe < STRIPES;) {
            /* The longest run of stripes that all rows see entirely. */
            int64_t end = stripe;
            for (bool whole = true; whole && end < STRIPES; end += whole) {
                for (int64_t row = 0; row < n; row++) {
                    whole &= visible[row * STRIPES + end] == ALL;
                }
            }
            if (end > stripe) {
                add_cells(n, half, scratch->weights + first * SEGMENT + stripe * LANES,
                          v + stripe * LANES * v_stride, v_stride, (end - stripe) * LANES,
                          sums + first * row_size + VALUES, a->v_size);
                stripe = end;
                continue;
            }
            for (int64_t row = 0; row < n; row++) {
                uint32_t cells = visible[row * STRIPES + stripe];
                const float *weights = scratch->weights + (first + row) * SEGMENT;
                while (cells != 0) {
                    /* A run of visible cells. */
                    const int64_t from = __builtin_ctz(cells), n_cells = __builtin_ctz(~(cells >> from));
                    const int64_t c = stripe * LANES + from;
                    add_cells(1, half, weights + c, v + c * v_stride, v_stride, n_cells,
                              sums + (first + row) * row_size + VALUES, a->v_size);
                    cells &= ~(((1u << n_cells) - 1) << from);
                }
            }
            stripe++;
        }
    }
}

/* ---- the kernels --------------------------------------------------------------------------------- */

TARGET static void segment(const cspec_attention *a, const attention_unit *unit, int64_t segment,
                           attention_scratch *scratch, float *sums)
{
    const int64_t group = group_size(a), n_rows = unit->n_tokens * group, row_size = VALUES + a->v_size;
    const int64_t first = segment * SEGMENT, n_cells = smaller(SEGMENT, a->n_cells - first);
    const char *k = a->k + first * a->k_stride[0] + unit->kv_head * a->k_stride[1] +
                    unit->sequence * a->k_stride[2];
    const char *v = a->v + first * a->v_stride[0] + unit->kv_head * a->v_stride[1] +
                    unit->sequence * a->v_stride[2];

    find_visible(a, unit, first, n_cells, scratch->visible);
    compute_dots(a, k, n_cells, n_rows, scratch);
    for (int64_t row = 0; row < n_rows; row++) {
        const int64_t token = unit->first_token + row / group, head = unit->kv_head * group + row % group;
        const uint16_t *mask = a->mask == NULL ? NULL : attention_mask_of(a, token, head, unit->sequence) + first;
        float *sums_of_row = sums + row * row_size;
        softmax(a, mask, slope_of(a, head), n_cells, scratch->visible + row * STRIPES,
                scratch->weights + row * SEGMENT, sums_of_row);
        memset(sums_of_row + VALUES, 0, (size_t)a->v_size * sizeof(float));
    }
    int64_t v_stride = (int64_t)a->v_stride[0];
    if (a->v_to_float != NULL) {
        for (int64_t c = 0; c < n_cells; c++) {
            a->v_to_float(v + c * v_stride, scratch->rows_of_v + c * a->v_size, a->v_size);
        }
        v = (const char *)scratch->rows_of_v;
        v_stride = a->v_size * (int64_t)sizeof(float);
    }
    sum_values(a, v, v_stride, a->v_to_float == NULL, n_rows, scratch, sums);
}

TARGET static void add_segment(float *total, const float *sums, int64_t v_size)
{
    if (sums[SUM] == 0.0f) { /* the row sees nothing of it: otherwise its largest weight is 1, or not a number */
        return;
    }
    const float maximum = larger_of(total[MAXIMUM], sums[MAXIMUM]);
    const float old = exp_negative_of_one(total[MAXIMUM] - maximum);
    const float new = exp_negative_of_one(sums[MAXIMUM] - maximum);
    total[MAXIMUM] = maximum;
    total[SUM] = total[SUM] * old + sums[SUM] * new;
    for (int64_t d = VALUES; d < VALUES + v_size; d += LANES) {
        store(total + d, fused(load(sums + d), broadcast(new), mul(load(total + d), broadcast(old))));
    }
}

TARGET static void finish(float *total, int64_t v_size, const float *sink, float *out)
{
    float sum = total[SUM], old = 1.0f;
    if (sink != NULL) {
        const float maximum = larger_of(total[MAXIMUM], *sink);
        old = exp_negative_of_one(total[MAXIMUM] - maximum);
        sum = sum * old + exp_negative_of_one(*sink - maximum);
    }
    const vec factor = broadcast(sum == 0.0f ? 0.0f : old / sum);
    for (int64_t d = 0; d < v_size; d += LANES) {
        store(out + d, mul(load(total + VALUES + d), factor));
    }
}

static const attention_kernels kernels = {pack, segment, add_segment, finish};
