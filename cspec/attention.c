/* Attention: who computes what. The arithmetic is in attention_kernels.h.
 *
 * K and V of one head, for the queries of all heads of its group and as many tokens as give ROWS rows, are a
 * unit. Many units are shared among the threads, each of which goes through its unit's segments of cells in
 * order. With few units, threads share (unit, segment) pairs, and the results wait in memory to be added in the
 * same order. Either way every row goes through the same operations. */
#include "attention.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROWS = 64,      /* enough that converting K and V is cheap beside using them */
    ALIGNMENT = 128, /* two cache lines, which some prefetchers fetch together */
};
/* Memory that waiting results may take; past it units are shared, even if few. */
#define MOST_WAITING ((int64_t)64 << 20) /* bytes */

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* ---- choice of kernels --------------------------------------------------------------------------- */

static int32_t cpu_kernels(int32_t most)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (most >= CSPEC_KERNELS_AVX512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        return CSPEC_KERNELS_AVX512;
    }
    /* Every CPU with AVX2 and FMA has F16C. */
    if (most >= CSPEC_KERNELS_AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return CSPEC_KERNELS_AVX2;
    }
    return CSPEC_KERNELS_OFF; /* fmaf is a slow call */
#else
    return smaller(most, CSPEC_KERNELS_C);
#endif
}

int32_t cspec_kernels(void)
{
    static const struct {
        const char *name;
        int32_t kernels;
    } choices[] = {
        {"off", CSPEC_KERNELS_OFF},      {"c", CSPEC_KERNELS_C},           {"avx2", CSPEC_KERNELS_AVX2},
        {"avxvnni", CSPEC_KERNELS_AVX2}, {"avx512", CSPEC_KERNELS_AVX512}, {"amx", CSPEC_KERNELS_AVX512},
    };
    const char *wanted = getenv("PYSPEC_KERNELS");
    for (size_t i = 0; wanted != NULL && i < sizeof choices / sizeof *choices; i++) {
        if (strcmp(wanted, choices[i].name) == 0) {
            const int32_t kernels = choices[i].kernels;
            return kernels <= CSPEC_KERNELS_C || cpu_kernels(kernels) == kernels ? kernels : CSPEC_KERNELS_OFF;
        }
    }
    return cpu_kernels(CSPEC_KERNELS_AVX512);
}

static const attention_kernels *kernels_of(const cspec_attention *a)
{
    switch (a->kernels) {
    case CSPEC_KERNELS_AVX512:
        return cspec_attention_avx512;
    case CSPEC_KERNELS_AVX2:
        return cspec_attention_avx2;
    case CSPEC_KERNELS_C:
        return cspec_attention_c;
    default:
        return NULL;
    }
}

int32_t cspec_attention_covers(const cspec_attention *a)
{
    return kernels_of(a) != NULL && a->k_size % ATTENTION_LANES == 0 && a->v_size % ATTENTION_LANES == 0 &&
           a->k_size > 0 && a->v_size > 0 && a->k_size <= ATTENTION_MOST_HEAD &&
           a->v_size <= ATTENTION_MOST_HEAD && a->n_kv_heads > 0 && a->n_heads % a->n_kv_heads == 0 &&
           a->n_cells > 0 && a->n_tokens > 0 && a->n_sequences > 0;
}

/* A total of no segment yet. */
static void clear(float *total, int64_t row_size)
{
    memset(total, 0, (size_t)row_size * sizeof *total);
    total[0] = -INFINITY;
}

/* ---- the division into units --------------------------------------------------------------------- */

typedef struct {
    int64_t group;           /* heads that share K and V */
    int64_t tokens, n_tiles; /* tokens of a unit; runs of so many */
    int64_t n_units, n_segments;
    int64_t row_size; /* floats of sums and totals */
    bool waiting;     /* whether pairs are shared, and segments' sums wait */
} division;

static division divide(const cspec_attention *a, int32_t n_threads)
{
    division d = {.group = a->n_heads / a->n_kv_heads, .row_size = 2 + a->v_size};
    const int64_t most = d.group < ROWS ? ROWS / d.group : 1;
    d.tokens = divide_up(a->n_tokens, divide_up(a->n_tokens, most));
    d.n_tiles = divide_up(a->n_tokens, d.tokens);
    d.n_units = a->n_sequences * d.n_tiles * a->n_kv_heads;
    d.n_segments = divide_up(a->n_cells, ATTENTION_SEGMENT);
    const int64_t waiting =
        a->n_sequences * a->n_tokens * a->n_heads * d.n_segments * d.row_size * (int64_t)sizeof(float);
    d.waiting = d.n_units < 4 * (int64_t)n_threads && waiting <= MOST_WAITING;
    return d;
}

static attention_unit unit_of(const cspec_attention *a, const division *d, int64_t index)
{
    const int64_t first = index / a->n_kv_heads % d->n_tiles * d->tokens;
    return (attention_unit){
        .sequence = index / a->n_kv_heads / d->n_tiles,
        .kv_head = index % a->n_kv_heads,
        .first_token = first,
        .n_tokens = smaller(d->tokens, a->n_tokens - first),
    };
}

/* ---- memory -------------------------------------------------------------------------------------- */

/* Takes bytes from work, or only counts them where it is null. */
static void *take(char *work, size_t *used, int64_t bytes)
{
    void *taken = work == NULL ? NULL : work + *used;
    *used += (size_t)divide_up(bytes, ALIGNMENT) * ALIGNMENT;
    return taken;
}

/* The costs of a thread's share, and its scratch. */
static attention_scratch lay_out(const cspec_attention *a, const division *d, char *work, size_t *used,
                                 uint8_t **costs)
{
    const int64_t rows = d->tokens * d->group, size = (int64_t)sizeof(float);
    attention_scratch s;
    s.q = take(work, used, rows * ATTENTION_Q_STRIDE * size);
    s.keys = take(work, used, a->k_size * ATTENTION_BLOCK * size);
    s.rows_of_k = take(work, used, a->k_to_float == NULL ? 0 : ATTENTION_LANES * a->k_size * size);
    s.rows_of_v = take(work, used, a->v_to_float == NULL ? 0 : ATTENTION_SEGMENT * a->v_size * size);
    s.weights = take(work, used, rows * ATTENTION_SEGMENT * size);
    s.visible = take(work, used, rows * ATTENTION_STRIPES * (int64_t)sizeof *s.visible);
    s.sums = take(work, used, d->waiting ? 0 : rows * d->row_size * size);
    s.totals = take(work, used, (d->waiting ? 1 : rows) * d->row_size * size);
    *costs = take(work, used, d->n_units * d->n_segments * (int64_t)sizeof **costs);
    return s;
}

/* Of waiting sums: [unit][segment][row of the unit][row_size], with room for all rows in each unit. */
static int64_t place_of(const division *d, int64_t unit, int64_t segment)
{
    return (unit * d->n_segments + segment) * d->tokens * d->group * d->row_size;
}

static size_t work_size(const cspec_attention *a, int32_t n_threads)
{
    const division d = divide(a, n_threads);
    size_t used = 0;
    uint8_t *costs;
    lay_out(a, &d, NULL, &used, &costs);
    used *= (size_t)n_threads;
    if (d.waiting) {
        take(NULL, &used, place_of(&d, d.n_units, 0) * (int64_t)sizeof(float));
    }
    return used + ALIGNMENT;
}

size_t cspec_attention_work_size(const cspec_attention *a, int32_t n_threads)
{
    size_t most = 0;
    for (int32_t n = 1; n <= n_threads; n++) {
        const size_t size = work_size(a, n);
        most = size > most ? size : most;
    }
    return most;
}

/* The scratch of a thread, and where sums wait, which all threads share. */
static attention_scratch scratch_of(const cspec_attention *a, const division *d, int32_t thread,
                                    int32_t n_threads, void *work, float **waiting, uint8_t **costs)
{
    char *aligned = (char *)work + (-(uintptr_t)work & (ALIGNMENT - 1));
    size_t size = 0;
    lay_out(a, d, NULL, &size, costs);
    *waiting = (float *)(aligned + size * (size_t)n_threads);
    size_t used = size * (size_t)thread;
    return lay_out(a, d, aligned, &used, costs);
}

/* ---- fair shares --------------------------------------------------------------------------------- */

static bool sees_any(const uint16_t *mask, int64_t n)
{
    bool any = false;
    for (int64_t c = 0; c < n; c++) {
        any |= mask[c] != ATTENTION_UNSEEN;
    }
    return any;
}

/* Which stripes of a segment any row of a unit sees, as bits. */
static uint8_t find_seen(const cspec_attention *a, const division *d, const attention_unit *unit, int64_t segment)
{
    uint8_t seen = 0;
    const int64_t n_heads = smaller(d->group, a->mask_heads);
    for (int64_t stripe = 0; stripe < ATTENTION_STRIPES; stripe++) {
        const int64_t first = segment * ATTENTION_SEGMENT + stripe * ATTENTION_LANES;
        const int64_t n = smaller(ATTENTION_LANES, a->n_cells - first);
        bool any = false;
        for (int64_t row = 0; row < unit->n_tokens * n_heads && n > 0 && !any; row++) {
            const int64_t head = unit->kv_head * d->group + row % n_heads;
            const int64_t token = unit->first_token + row / n_heads;
            any = sees_any(attention_mask_of(a, token, head, unit->sequence) + first, n);
        }
        seen |= (uint8_t)(any << stripe);
    }
    return seen;
}

/* costs: [units][segments] out, in stripes of cells; 0 where nothing is seen. Returns their sum. */
static int64_t find_costs(const cspec_attention *a, const division *d, uint8_t *costs)
{
    int64_t sum = 0;
    for (int64_t u = 0; u < d->n_units; u++, costs += d->n_segments) {
        const attention_unit unit = unit_of(a, d, u);
        const bool repeats = a->mask != NULL && a->mask_heads == 1 && unit.kv_head > 0;
        for (int64_t i = 0; i < d->n_segments; i++) {
            costs[i] = repeats           ? costs[i - d->n_segments]
                       : a->mask == NULL ? ATTENTION_STRIPES
                                         : (uint8_t)__builtin_popcount(find_seen(a, d, &unit, i));
            sum += costs[i];
        }
    }
    return sum;
}

/* Whether the part of the whole that begins at `before` is a thread's. Parts that begin in the same n-th of
 * the whole are neighbours and go to the same thread. */
static bool is_mine(int64_t before, int64_t sum, int32_t thread, int32_t n_threads)
{
    return before * n_threads / sum == thread;
}

/* ---- the two steps ------------------------------------------------------------------------------- */

static void write_row(const cspec_attention *a, const attention_unit *unit, int64_t row, float *total)
{
    const int64_t group = a->n_heads / a->n_kv_heads, head = unit->kv_head * group + row % group;
    char *out = a->out + (unit->first_token + row / group) * a->out_stride[0] + head * a->out_stride[1] +
                unit->sequence * a->out_stride[2];
    kernels_of(a)->finish(total, a->v_size, a->sinks == NULL ? NULL : a->sinks + head, (float *)out);
}

/* Segments of one unit in order, from nothing to its rows of out. */
static void compute_unit(const cspec_attention *a, const division *d, const attention_unit *unit,
                         const uint8_t *costs, attention_scratch *scratch)
{
    const attention_kernels *kernels = kernels_of(a);
    const int64_t n_rows = unit->n_tokens * d->group;
    for (int64_t row = 0; row < n_rows; row++) {
        clear(scratch->totals + row * d->row_size, d->row_size);
    }
    kernels->pack(a, unit, scratch);
    for (int64_t i = 0; i < d->n_segments; i++) {
        if (costs[i] == 0) {
            continue;
        }
        kernels->segment(a, unit, i, scratch, scratch->sums);
        for (int64_t row = 0; row < n_rows; row++) {
            kernels->add(scratch->totals + row * d->row_size, scratch->sums + row * d->row_size, a->v_size);
        }
    }
    for (int64_t row = 0; row < n_rows; row++) {
        write_row(a, unit, row, scratch->totals + row * d->row_size);
    }
}

/* The thread's units. A unit costs something even if it sees nothing: its rows are written. */
static void compute_units(const cspec_attention *a, const division *d, int32_t thread, int32_t n_threads,
                          const uint8_t *costs, int64_t sum, attention_scratch *scratch)
{
    int64_t before = 0;
    for (int64_t u = 0; u < d->n_units; u++, costs += d->n_segments) {
        if (is_mine(before, sum + d->n_units, thread, n_threads)) {
            const attention_unit unit = unit_of(a, d, u);
            compute_unit(a, d, &unit, costs, scratch);
        }
        before++;
        for (int64_t i = 0; i < d->n_segments; i++) {
            before += costs[i];
        }
    }
}

/* The thread's pairs of unit and segment. All heads of a segment before the next segment: a cell's heads lie side
 * by side in memory, and what a CPU's prefetcher reads beyond one is the next. */
static void compute_pairs(const cspec_attention *a, const division *d, int32_t thread, int32_t n_threads,
                          const uint8_t *costs, int64_t sum, attention_scratch *scratch, float *waiting)
{
    const attention_kernels *kernels = kernels_of(a);
    int64_t before = 0;
    for (int64_t first = 0; first < d->n_units; first += a->n_kv_heads) {
        for (int64_t i = 0; i < d->n_segments; i++) {
            for (int64_t u = first; u < first + a->n_kv_heads; u++) {
                const uint8_t cost = costs[u * d->n_segments + i];
                if (cost != 0 && is_mine(before, sum, thread, n_threads)) {
                    const attention_unit unit = unit_of(a, d, u);
                    kernels->pack(a, &unit, scratch);
                    kernels->segment(a, &unit, i, scratch, waiting + place_of(d, u, i));
                }
                before += cost;
            }
        }
    }
}

void cspec_attention_segments(const cspec_attention *a, int32_t thread, int32_t n_threads, void *work)
{
    const division d = divide(a, n_threads);
    float *waiting;
    uint8_t *costs;
    attention_scratch scratch = scratch_of(a, &d, thread, n_threads, work, &waiting, &costs);
    const int64_t sum = find_costs(a, &d, costs);
    if (d.waiting) {
        compute_pairs(a, &d, thread, n_threads, costs, sum, &scratch, waiting);
    } else {
        compute_units(a, &d, thread, n_threads, costs, sum, &scratch);
    }
}

void cspec_attention_combine(const cspec_attention *a, int32_t thread, int32_t n_threads, void *work)
{
    const attention_kernels *kernels = kernels_of(a);
    const division d = divide(a, n_threads);
    if (!d.waiting) {
        return;
    }
    float *waiting;
    uint8_t *costs; /* still those of the first step */
    attention_scratch scratch = scratch_of(a, &d, thread, n_threads, work, &waiting, &costs);
    const int64_t rows_of_unit = d.tokens * d.group, n_rows = d.n_units * rows_of_unit;
    for (int64_t r = n_rows * thread / n_threads; r < n_rows * (thread + 1) / n_threads; r++) {
        const int64_t u = r / rows_of_unit, row = r % rows_of_unit;
        const attention_unit unit = unit_of(a, &d, u);
        if (row >= unit.n_tokens * d.group) {
            continue;
        }
        clear(scratch.totals, d.row_size);
        for (int64_t i = 0; i < d.n_segments; i++) {
            if (costs[u * d.n_segments + i] != 0) {
                kernels->add(scratch.totals, waiting + place_of(&d, u, i) + row * d.row_size, a->v_size);
            }
        }
        write_row(a, &unit, row, scratch.totals);
    }
}
