#include "ggml_checks.h"
#include "cspec.h"

#if defined(__linux__) && defined(__LP64__) && (defined(__x86_64__) || defined(__aarch64__))

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct bridge_probe probe;

static uint64_t count_of(int32_t what)
{
    uint64_t counts[CSPEC_BRIDGE_COUNTS];
    cspec_bridge_read_counts(counts);
    return counts[what];
}

static void *new_context(void)
{
    return ggml.ggml_init((struct init_params){.mem_size = (size_t)8 << 20});
}

/* All reads are inside the context's memory. */
const char *check_tensors(void)
{
    static const char *const wrong = "ggml's tensors are not laid out as expected";
    if (ggml.ggml_tensor_overhead() != sizeof(tensor) + 32 /* struct ggml_object */ ||
        strcmp(ggml.ggml_type_name(CSPEC_GGML_F16), "f16") != 0 ||
        strcmp(ggml.ggml_type_name(CSPEC_GGML_Q4_K), "q4_K") != 0 ||
        strcmp(ggml.ggml_type_name(CSPEC_GGML_BF16), "bf16") != 0) {
        return wrong;
    }
    void *context = new_context();
    if (context == NULL) {
        return "no memory for ggml's checks";
    }
    const tensor *a = ggml.ggml_new_tensor_4d(context, CSPEC_GGML_F16, 32, 5, 3, 2);
    const tensor *b = ggml.ggml_new_tensor_4d(context, CSPEC_GGML_F32, 32, 7, 3, 2);
    const tensor *ids = ggml.ggml_new_tensor_4d(context, CSPEC_GGML_I32, 3, 7, 1, 1);
    const tensor *experts = ggml.ggml_new_tensor_4d(context, CSPEC_GGML_F16, 32, 5, 4, 1);
    const tensor *inputs = ggml.ggml_new_tensor_4d(context, CSPEC_GGML_F32, 32, 1, 7, 1);
    const tensor *view = ggml.ggml_view_2d(context, (tensor *)a, 16, 4, 64, 64);
    const tensor *product = ggml.ggml_mul_mat(context, (tensor *)a, (tensor *)b);
    const tensor *chosen =
        ggml.ggml_mul_mat_id(context, (tensor *)experts, (tensor *)inputs, (tensor *)ids);
    const tensor *mask = ggml.ggml_new_tensor_4d(context, CSPEC_GGML_F16, 5, 7, 1, 1);
    const tensor *attention = ggml.ggml_flash_attn_ext(context, (tensor *)b, (tensor *)a, (tensor *)a,
                                                       (tensor *)mask, 0.5f, 0.25f, 0.125f);
    const float params[3] = {0.5f, 0.25f, 0.125f};
    const struct cspec_ggml_type_traits *traits = ggml.ggml_get_type_traits(CSPEC_GGML_Q8_0);
    const bool good =
        readable(traits, sizeof *traits) && traits->type_name == ggml.ggml_type_name(CSPEC_GGML_Q8_0) &&
        traits->blck_size == ggml.ggml_blck_size(CSPEC_GGML_Q8_0) &&
        traits->type_size == ggml.ggml_type_size(CSPEC_GGML_Q8_0) && traits->is_quantized &&
        same_library(CODE(traits->to_float), CODE(ggml.ggml_get_type_traits)) &&
        a->type == CSPEC_GGML_F16 && a->buffer == NULL && a->ne[0] == 32 && a->ne[1] == 5 && a->ne[2] == 3 &&
        a->ne[3] == 2 && a->nb[0] == 2 && a->nb[1] == 64 && a->nb[2] == 320 && a->nb[3] == 960 &&
        a->data == ggml.ggml_get_data(a) && a->name == ggml.ggml_get_name(a) && a->view_src == NULL &&
        view->view_src == a && view->view_offs == 64 && view->data == (char *)a->data + 64 &&
        product->op == CSPEC_GGML_OP_MUL_MAT && strcmp(ggml.ggml_op_desc(product), "MUL_MAT") == 0 &&
        product->src[0] == a && product->src[1] == b && product->src[2] == NULL && product->ne[0] == 5 &&
        product->ne[1] == 7 && product->op_params[1] == 0 && chosen->op == CSPEC_GGML_OP_MUL_MAT_ID &&
        strcmp(ggml.ggml_op_desc(chosen), "MUL_MAT_ID") == 0 && chosen->src[2] == ids &&
        attention->op == CSPEC_GGML_OP_FLASH_ATTN_EXT &&
        strcmp(ggml.ggml_op_desc(attention), "FLASH_ATTN_EXT") == 0 && attention->src[0] == b &&
        attention->src[2] == a && attention->src[3] == mask && memcmp(attention->op_params, params, sizeof params) == 0;
    ggml.ggml_free(context);
    return good ? NULL : wrong;
}

/* Computes op with n_threads, telling the probe what its hook should see. */
static bool compute(void *context, tensor *op, int32_t n_threads, bool use_ref)
{
    struct threadpool_params pool_params = ggml.ggml_threadpool_params_default(n_threads);
    void *pool = ggml.ggml_threadpool_new(&pool_params);
    void *graph = ggml.ggml_new_graph(context);
    if (pool == NULL || graph == NULL) {
        return false;
    }
    ggml.ggml_build_forward_expand(graph, op);
    probe.op = op;
    probe.plan = (struct graph_plan){.n_threads = n_threads};
    struct graph_plan plan = ggml.ggml_graph_plan(graph, n_threads, pool);
    bool good = plan.n_threads == n_threads && plan.threadpool == pool && plan.work_data == NULL &&
                plan.work_size < (size_t)64 << 20;
    if (good) {
        plan.use_ref = use_ref;
        plan.work_data = malloc(plan.work_size + 1);
        probe.plan = plan;
        good = plan.work_data != NULL && ggml.ggml_graph_compute(graph, &plan) == 0;
        free(plan.work_data);
    }
    ggml.ggml_threadpool_free(pool);
    return good;
}

/* Uniform in [-1, 1), the same sequence in every run. */
static void fill(float *values, size_t n, uint32_t seed)
{
    uint32_t state = seed;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)((int32_t)state >> 8) / 8388608.0f;
    }
}

enum {
    N_ROWS = 9,   /* query rows, or columns of a product, that are computed at every width */
    HEAD = 64,    /* attention: head size, */
    Q_HEADS = 4,  /* query heads, */
    KV_HEADS = 2, /* heads of K and V, */
    CELLS = 640,  /* cells (past the 512 from which ggml splits them among threads), */
    SEEN = 600,   /* how many of them the first row sees; each later row sees one more */
    INNER = 512,  /* products: length of a dot product, */
    OUTER = 48,   /* rows of the weights, */
    EXPERTS = 2,  /* and of each expert, both of which every token uses */
};
enum { KV_SIZE = KV_HEADS * CELLS * HEAD, Q_SIZE = Q_HEADS * HEAD };
/* A single row by two threads, where ggml would split the cells; a few; enough for ggml's tiled products.
 * Each is compared with single rows by one thread. */
static const int32_t widths[] = {1, 2, 9};
enum { N_WIDTHS = sizeof widths / sizeof *widths };

/* What the tests compute with. */
struct check_material {
    float k[KV_SIZE], v[KV_SIZE];           /* [KV_HEADS][CELLS][HEAD], rounded to F16 */
    uint16_t k_half[KV_SIZE], v_half[KV_SIZE];
    float weights[EXPERTS * OUTER * INNER]; /* [EXPERTS][OUTER][INNER] */
    float quantised[EXPERTS * OUTER * INNER];
    float x[N_ROWS * INNER];
    float one[N_ROWS * EXPERTS * OUTER + N_ROWS * Q_SIZE], many[N_ROWS * EXPERTS * OUTER + N_ROWS * Q_SIZE];
};

struct check_material *new_check_material(void)
{
    struct check_material *m = malloc(sizeof *m);
    if (m == NULL) {
        return NULL;
    }
    fill(m->k, KV_SIZE, 1);
    fill(m->v, KV_SIZE, 2);
    ggml.ggml_fp32_to_fp16_row(m->k, m->k_half, KV_SIZE);
    ggml.ggml_fp32_to_fp16_row(m->v, m->v_half, KV_SIZE);
    ggml.ggml_fp16_to_fp32_row(m->k_half, m->k, KV_SIZE);
    ggml.ggml_fp16_to_fp32_row(m->v_half, m->v, KV_SIZE);
    fill(m->weights, EXPERTS * OUTER * INNER, 3);
    fill(m->x, N_ROWS * INNER, 4);
    return m;
}

static void fill_query(float *q, int32_t row)
{
    fill(q, Q_SIZE, 100u + (uint32_t)row);
}

/* Rows first to first + n of the test attention, into out [n][Q_HEADS][HEAD]. */
static bool attention(const struct check_material *m, float *out, int32_t first, int32_t n, int32_t n_threads,
                      bool use_ref)
{
    void *context = new_context();
    if (context == NULL) {
        return false;
    }
    tensor *q = ggml.ggml_new_tensor_4d(context, CSPEC_GGML_F32, HEAD, n, Q_HEADS, 1);
    tensor *k = ggml.ggml_new_tensor_4d(context, CSPEC_GGML_F16, HEAD, CELLS, KV_HEADS, 1);
    tensor *v = ggml.ggml_new_tensor_4d(context, CSPEC_GGML_F16, HEAD, CELLS, KV_HEADS, 1);
    tensor *mask = ggml.ggml_new_tensor_4d(context, CSPEC_GGML_F16, CELLS, n, 1, 1);
    memcpy(k->data, m->k_half, sizeof m->k_half);
    memcpy(v->data, m->v_half, sizeof m->v_half);
    for (int32_t row = 0; row < n; row++) {
        float values[Q_SIZE];
        fill_query(values, first + row);
        for (int32_t head = 0; head < Q_HEADS; head++) {
            memcpy((float *)q->data + (head * n + row) * HEAD, values + head * HEAD, HEAD * sizeof(float));
        }
        for (int32_t cell = 0; cell < CELLS; cell++) {
            ((uint16_t *)mask->data)[row * CELLS + cell] = cell < SEEN + first + row ? 0 : 0xfc00; /* -inf */
        }
    }
    tensor *result = ggml.ggml_flash_attn_ext(context, q, k, v, mask, 0.125f, 0.0f, 0.0f);
    const bool good = compute(context, result, n_threads, use_ref);
    memcpy(out, result->data, sizeof(float) * (size_t)n * Q_SIZE);
    ggml.ggml_free(context);
    return good;
}

/* Whether out [Q_HEADS][HEAD] is softmax(q K' / 8) V. */
static bool attention_is_right(const struct check_material *m, const float *out, int32_t row)
{
    float q[Q_SIZE];
    fill_query(q, row);
    for (int32_t head = 0; head < Q_HEADS; head++) {
        const float *k = m->k + head / (Q_HEADS / KV_HEADS) * CELLS * HEAD;
        const float *v = m->v + head / (Q_HEADS / KV_HEADS) * CELLS * HEAD;
        double sum = 0, value[HEAD] = {0};
        for (int32_t cell = 0; cell < SEEN + row; cell++) {
            double score = 0;
            for (int32_t i = 0; i < HEAD; i++) {
                score += (double)q[head * HEAD + i] * k[cell * HEAD + i];
            }
            const double weight = exp(score / 8);
            sum += weight;
            for (int32_t i = 0; i < HEAD; i++) {
                value[i] += weight * v[cell * HEAD + i];
            }
        }
        for (int32_t i = 0; i < HEAD; i++) {
            /* ggml sums V in half precision. */
            if (!(fabs(out[head * HEAD + i] - value[i] / sum) < 5e-3)) {
                return false;
            }
        }
    }
    return true;
}

/* Whether the entry is called as declared: each of its functions with the arguments that it should have. */
const char *check_calls(struct check_material *m)
{
    enum { THREADS = 2 };
    for (int32_t use_ref = 0; use_ref < 2; use_ref++) {
        atomic_store(&probe.asked, 0);
        atomic_store(&probe.sized, 0);
        atomic_store(&probe.nth, 0);
        atomic_store(&probe.threads, 0);
        atomic_store(&probe.wrong, 0);
        if (!attention(m, m->one, 0, 1, THREADS, use_ref != 0)) {
            return "ggml could not compute the probe";
        }
        const int32_t nth = atomic_load(&probe.nth);
        if (nth == 0 || atomic_load(&probe.threads) != (1 << nth) - 1 || atomic_load(&probe.wrong) != 0 ||
            atomic_load(&probe.sized) != 1 || atomic_load(&probe.asked) != nth + 1 /* once for the size */) {
            return "ggml does not call the bridge as expected";
        }
    }
    return NULL;
}

/* Whether attention through the bridge is right, and the same at every width and number of threads. */
const char *check_attention(struct check_material *m)
{
    const uint64_t before = count_of(CSPEC_BRIDGE_ATTENTION);
    for (int32_t row = 0; row < N_ROWS; row++) {
        if (!attention(m, m->one + row * Q_SIZE, row, 1, 1, false)) {
            return "the attention test could not be computed";
        }
    }
    if (!attention_is_right(m, m->one, 0) ||
        !attention_is_right(m, m->one + (N_ROWS - 1) * Q_SIZE, N_ROWS - 1)) {
        return "attention through the bridge is wrong";
    }
    for (int32_t w = 0; w < N_WIDTHS; w++) {
        const int32_t first = N_ROWS - widths[w];
        if (!attention(m, m->many, first, widths[w], 2, false)) {
            return "the attention test could not be computed";
        }
        if (memcmp(m->many, m->one + first * Q_SIZE, sizeof(float) * Q_SIZE * (size_t)widths[w]) != 0) {
            return "attention through the bridge depends on the number of tokens";
        }
    }
    if (count_of(CSPEC_BRIDGE_ATTENTION) - before != N_ROWS + N_WIDTHS) {
        return "ggml did not ask the bridge about every attention";
    }
    return NULL;
}

/* Columns first to first + n of a test product with weights of a type, into out [n][OUTER]; with experts, of
 * MUL_MAT_ID, into out [n][EXPERTS][OUTER]. With a buffer type: from weights that it has packed. */
static bool product(const struct check_material *m, float *out, int32_t type, bool experts, buffer_type *packed, int32_t first,
                    int32_t n, int32_t n_threads)
{
    void *context = new_context();
    struct cspec_ggml_buffer *buffer = NULL;
    if (context == NULL) {
        return false;
    }
    const int32_t rows = OUTER * (experts ? EXPERTS : 1);
    tensor *weights = ggml.ggml_new_tensor_4d(context, type, INNER, OUTER, experts ? EXPERTS : 1, 1);
    tensor *x = experts ? ggml.ggml_new_tensor_4d(context, CSPEC_GGML_F32, INNER, 1, n, 1)
                        : ggml.ggml_new_tensor_4d(context, CSPEC_GGML_F32, INNER, n, 1, 1);
    const size_t size = ggml.ggml_row_size(type, INNER) * (size_t)rows;
    if (packed != NULL) {
        weights->data = NULL;
        buffer = ggml.ggml_backend_buft_alloc_buffer(packed, ggml.ggml_backend_buft_get_alloc_size(packed, weights));
        if (buffer == NULL || buffer->buft != packed ||
            ggml.ggml_backend_tensor_alloc(buffer, weights, ggml.ggml_backend_buffer_get_base(buffer)) != 0) {
            return false;
        }
        ggml.ggml_backend_tensor_set(weights, m->quantised, 0, size);
    } else {
        memcpy(weights->data, m->quantised, size);
    }
    memcpy(x->data, m->x + first * INNER, sizeof(float) * (size_t)(n * INNER));
    tensor *result;
    if (experts) {
        tensor *ids = ggml.ggml_new_tensor_4d(context, CSPEC_GGML_I32, EXPERTS, n, 1, 1);
        for (int32_t i = 0; i < n * EXPERTS; i++) {
            ((int32_t *)ids->data)[i] = i % EXPERTS;
        }
        result = ggml.ggml_mul_mat_id(context, weights, x, ids);
    } else {
        result = ggml.ggml_mul_mat(context, weights, x);
    }
    const bool good = compute(context, result, n_threads, false);
    memcpy(out, result->data, sizeof(float) * (size_t)(n * rows));
    if (buffer != NULL) {
        ggml.ggml_backend_buffer_free(buffer);
    }
    ggml.ggml_free(context);
    return good;
}

/* Whether out [rows] is weights [rows][INNER] . x [INNER] within a tolerance. */
static bool product_is_right(const float *out, const float *weights, const float *x, int32_t rows,
                             double tolerance)
{
    for (int32_t row = 0; row < rows; row++) {
        double sum = 0;
        for (int32_t i = 0; i < INNER; i++) {
            sum += (double)weights[row * INNER + i] * x[i];
        }
        if (!(fabs(out[row] - sum) < tolerance)) {
            return false;
        }
    }
    return true;
}

/* Whether products through the bridge are right, and the same at every width and number of threads. */
const char *check_products(struct check_material *m)
{
    /* The tolerance is of a sum of 512 products of values from [-1, 1), whose standard deviation is 7.5. */
    static const struct {
        int32_t type;
        double tolerance;
    } types[] = {
        {CSPEC_GGML_F32, 1e-4},
        {CSPEC_GGML_F16, 0.05},
        {CSPEC_GGML_Q8_0, 0.5},
        {CSPEC_GGML_Q4_K, 5},
    };
    enum { N_TYPES = sizeof types / sizeof *types };
    const uint64_t before = count_of(CSPEC_BRIDGE_PRODUCT);
    for (int32_t t = 0; t < N_TYPES; t++) {
        ggml.ggml_quantize_chunk(types[t].type, m->weights, m->quantised, 0, EXPERTS * OUTER, INNER, NULL);
        for (int32_t experts = 0; experts < 2; experts++) {
            const int32_t rows = OUTER * (experts ? EXPERTS : 1);
            for (int32_t column = 0; column < N_ROWS; column++) {
                float *out = m->one + column * rows;
                if (!product(m, out, types[t].type, experts, NULL, column, 1, 1)) {
                    return "the product test could not be computed";
                }
                if (!product_is_right(out, m->weights, m->x + column * INNER, rows, types[t].tolerance)) {
                    return "products through the bridge are wrong";
                }
            }
            for (int32_t w = 1; w < N_WIDTHS; w++) {
                const int32_t first = N_ROWS - widths[w];
                if (!product(m, m->many, types[t].type, experts, NULL, first, widths[w], 2)) {
                    return "the product test could not be computed";
                }
                if (memcmp(m->many, m->one + first * rows, sizeof(float) * (size_t)(rows * widths[w])) != 0) {
                    return "products through the bridge depend on the number of tokens";
                }
            }
        }
    }
    if (count_of(CSPEC_BRIDGE_PRODUCT) - before != N_TYPES * 2 * (N_ROWS + N_WIDTHS - 1)) {
        return "ggml did not ask the bridge about every product";
    }
    return NULL;
}

/* Whether products with weights in the kernels' layout, loaded and computed by ggml, are right, and the same at
 * every width and number of threads. */
const char *check_packed(struct check_material *m, buffer_type *packed)
{
    static const struct {
        int32_t type;
        double tolerance;
    } types[] = {{CSPEC_GGML_Q8_0, 0.5}, {CSPEC_GGML_Q4_K, 5}};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        ggml.ggml_quantize_chunk(types[t].type, m->weights, m->quantised, 0, OUTER, INNER, NULL);
        for (int32_t column = 0; column < N_ROWS; column++) {
            float *out = m->one + column * OUTER;
            if (!product(m, out, types[t].type, false, packed, column, 1, 1)) {
                return "the test of the kernels could not be computed";
            }
            if (!product_is_right(out, m->weights, m->x + column * INNER, OUTER, types[t].tolerance)) {
                return "products of the kernels are wrong";
            }
        }
        for (int32_t w = 0; w < N_WIDTHS; w++) {
            const int32_t first = N_ROWS - widths[w];
            if (!product(m, m->many, types[t].type, false, packed, first, widths[w], 2)) {
                return "the test of the kernels could not be computed";
            }
            if (memcmp(m->many, m->one + first * OUTER, sizeof(float) * (size_t)(OUTER * widths[w])) != 0) {
                return "products of the kernels depend on the number of tokens";
            }
        }
    }
    return NULL;
}

#endif
