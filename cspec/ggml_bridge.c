/* The bridge: makes a position's logits the same bits however many tokens ggml evaluates together.
 *
 * ggml's CPU backend asks every entry of a list of "extra buffer types" about every operation of a graph. The
 * list is an exported symbol, so this file puts an entry of its own at its front. Three operations
 * choose their order of summation by the number of tokens (docs/exactness.md); for those the entry
 *   - computes MUL_MAT itself: with the kernels of matmul/ where the weights were loaded in their layout
 *     (ggml_weights.c), else every element as one vec_dot of one row with one column;
 *   - computes FLASH_ATTN_EXT itself (attention.c);
 *   - sets use_ref on MUL_MAT_ID, and on attention that attention.c does not cover, which makes ggml take one
 *     row at a time.
 * Other operations wider than exact_width tokens are left as they are: prompts are evaluated at full speed.
 *
 * Nothing of llama.cpp is linked. Its functions are found in the libraries that are already loaded, and
 * every structure is compared with objects from public functions before it is relied upon (ggml_checks.c).
 */
#define _GNU_SOURCE
#include "cspec.h"
#include "ggml_checks.h"
#include "ggml_weights.h"
#include "matmul/matmul.h"

#include <stdio.h>

#if defined(__linux__) && defined(__LP64__) && (defined(__x86_64__) || defined(__aarch64__))

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* ---- state --------------------------------------------------------------------------------------- */

enum { ABSENT, PROBING, ACTIVE };
static atomic_int mode = ABSENT;
static atomic_bool enabled = true;
static atomic_int kernels; /* CSPEC_KERNELS_* of attention */
static atomic_int_fast64_t exact_width = INT64_MAX;
static atomic_uint_fast64_t counts[CSPEC_BRIDGE_COUNTS];

static void count(int32_t what, const compute_params *params)
{
    if (params->ith == 0) {
        atomic_fetch_add_explicit(&counts[what], 1, memory_order_relaxed);
    }
}

/* ---- MUL_MAT ------------------------------------------------------------------------------------- */

/* Weights that another buffer type has repacked are its business. */
static bool in_plain_memory(const tensor *t)
{
    struct cspec_ggml_buffer *buffer = t->view_src != NULL ? t->view_src->buffer : t->buffer;
    return buffer == NULL || ggml.ggml_backend_buffer_is_host(buffer);
}

static int64_t rows_of(const tensor *t)
{
    return t->ne[1] * t->ne[2] * t->ne[3];
}

/* dst[i3, i2, i1, i0] = weights[i3 / r3, i2 / r2, i0, :] . x[i3, i2, i1, :]
 *
 * As ggml does for a single column: x is converted to the type that the weights' vec_dot wants, then every
 * element is one vec_dot of one row with one column. Neither depends on how many columns there are, nor on
 * which thread takes what. Returns false for a shape or type that it does not know, the same in every thread. */
static bool mul_mat(const compute_params *params, tensor *dst)
{
    const tensor *weights = dst->src[0], *x = dst->src[1];
    const struct cspec_ggml_type_traits_cpu *traits = ggml.ggml_get_type_traits_cpu(weights->type);
    const int32_t column_type = traits->vec_dot_type;
    const bool convert = x->type != column_type;
    const size_t column_size = ggml.ggml_row_size(column_type, x->ne[0]);

    if (traits->vec_dot == NULL || dst->op_params[1] != 0 /* a hint: not an ordinary product */ ||
        dst->type != CSPEC_GGML_F32 || dst->nb[0] != sizeof(float) ||
        weights->nb[0] != ggml.ggml_type_size(weights->type) || x->nb[0] != ggml.ggml_type_size(x->type)) {
        return false;
    }
    if (convert && (x->type != CSPEC_GGML_F32 || params->wsize < column_size * (size_t)rows_of(x))) {
        return false;
    }

    if (convert) {
        /* Threads share every row by blocks, which are converted one by one whoever does it. */
        void (*from_float)(const float *, void *, int64_t) =
            ggml.ggml_get_type_traits_cpu(column_type)->from_float;
        const int64_t block = ggml.ggml_blck_size(column_type), n_blocks = x->ne[0] / block;
        const int64_t first = n_blocks * params->ith / params->nth;
        const int64_t last = n_blocks * (params->ith + 1) / params->nth;
        for (int64_t row = 0; row < rows_of(x); row++) {
            const int64_t i1 = row % x->ne[1], i2 = row / x->ne[1] % x->ne[2], i3 = row / x->ne[1] / x->ne[2];
            const char *from = (const char *)x->data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3];
            char *to = (char *)params->wdata + row * column_size;
            if (last > first) {
                from_float((const float *)from + first * block,
                           to + first * ggml.ggml_type_size(column_type), (last - first) * block);
            }
        }
    }
    if (params->ith == 0) {
        /* Every thread starts with the chunk of its own number. */
        ggml.ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml.ggml_barrier(params->threadpool);

    const int64_t n_rows = weights->ne[1], n_columns = x->ne[1];
    /* 16 rows' results fill a cache line; a single column has too little to do there for one chunk. */
    const int64_t chunk_rows = n_columns == 1 ? 64 : 16;
    const int64_t row_chunks = (n_rows + chunk_rows - 1) / chunk_rows;
    const int64_t n_chunks = row_chunks * dst->ne[2] * dst->ne[3];
    const int64_t r2 = x->ne[2] / weights->ne[2], r3 = x->ne[3] / weights->ne[3];

    for (int64_t chunk = params->ith; chunk < n_chunks;
         chunk = ggml.ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t i2 = chunk / row_chunks % dst->ne[2], i3 = chunk / row_chunks / dst->ne[2];
        const int64_t first = chunk % row_chunks * chunk_rows;
        const int64_t last = first + chunk_rows < n_rows ? first + chunk_rows : n_rows;
        const char *matrix =
            (const char *)weights->data + i2 / r2 * weights->nb[2] + i3 / r3 * weights->nb[3];
        for (int64_t i1 = 0; i1 < n_columns; i1++) {
            const char *column = convert ? (const char *)params->wdata +
                                               ((i3 * x->ne[2] + i2) * n_columns + i1) * column_size
                                         : (const char *)x->data + i1 * x->nb[1] + i2 * x->nb[2] +
                                               i3 * x->nb[3];
            float *out = (float *)((char *)dst->data + i1 * dst->nb[1] + i2 * dst->nb[2] + i3 * dst->nb[3]);
            for (int64_t row = first; row < last; row++) {
                traits->vec_dot((int)x->ne[0], &out[row], 0, matrix + row * weights->nb[1], 0, column, 0, 1);
            }
        }
    }
    return true;
}

/* ---- FLASH_ATTN_EXT ------------------------------------------------------------------------------ */

static void copy_floats(const void *from, float *to, int64_t n)
{
    memcpy(to, from, (size_t)n * sizeof *to);
}

/* What converts rows of a type; false if nothing does. */
static bool find_to_float(int32_t type, void (**to_float)(const void *, float *, int64_t))
{
    if (type == CSPEC_GGML_F16) {
        *to_float = NULL; /* the kernels do it */
        return true;
    }
    *to_float = type == CSPEC_GGML_F32 ? copy_floats : ggml.ggml_get_type_traits(type)->to_float;
    return *to_float != NULL;
}

static void take_strides(int64_t *strides, const tensor *t, int32_t rows, int32_t heads)
{
    strides[0] = (int64_t)t->nb[rows];
    strides[1] = (int64_t)t->nb[heads];
    strides[2] = (int64_t)t->nb[3];
}

/* Whether the kernels know the operation, in terms that do not depend on the number of tokens. Q, K and V are
 * [sequences][heads][tokens or cells][head size], the result [sequences][tokens][heads][head size]. */
static bool describe_attention(const tensor *op, cspec_attention *a)
{
    const tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    *a = (cspec_attention){
        .kernels = atomic_load_explicit(&kernels, memory_order_relaxed),
        .n_tokens = q->ne[1],
        .n_heads = q->ne[2],
        .n_kv_heads = k->ne[2],
        .n_cells = k->ne[1],
        .n_sequences = q->ne[3],
        .k_size = k->ne[0],
        .v_size = v->ne[0],
        .q = q->data,
        .k = k->data,
        .v = v->data,
        .mask = mask != NULL ? mask->data : NULL,
        .mask_heads = mask != NULL ? mask->ne[2] : 1,
        .mask_sequences = mask != NULL ? mask->ne[3] : 1,
        .sinks = sinks != NULL ? sinks->data : NULL,
        .out = op->data,
    };
    take_strides(a->q_stride, q, 1, 2);
    take_strides(a->k_stride, k, 1, 2);
    take_strides(a->v_stride, v, 1, 2);
    take_strides(a->out_stride, op, 2, 1);
    if (mask != NULL) {
        take_strides(a->mask_stride, mask, 1, 2);
    }
    memcpy(&a->scale, &op->op_params[0], sizeof a->scale);
    memcpy(&a->max_bias, &op->op_params[1], sizeof a->max_bias);
    memcpy(&a->soft_cap, &op->op_params[2], sizeof a->soft_cap);
    return q->type == CSPEC_GGML_F32 && op->type == CSPEC_GGML_F32 && q->nb[0] == sizeof(float) &&
           op->nb[0] == sizeof(float) && k->nb[0] == ggml.ggml_type_size(k->type) &&
           v->nb[0] == ggml.ggml_type_size(v->type) && q->ne[0] == k->ne[0] && v->ne[1] == k->ne[1] &&
           v->ne[2] == k->ne[2] && k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] &&
           (mask == NULL || (mask->type == CSPEC_GGML_F16 && mask->nb[0] == sizeof(uint16_t) &&
                             mask->ne[0] >= k->ne[1] && mask->ne[1] >= q->ne[1])) &&
           (sinks == NULL || sinks->type == CSPEC_GGML_F32) && find_to_float(k->type, &a->k_to_float) &&
           find_to_float(v->type, &a->v_to_float) && cspec_attention_covers(a);
}

/* Returns false for what the kernels do not know, the same in every thread. */
static bool attend(const compute_params *params, const tensor *op)
{
    cspec_attention a;
    if (!describe_attention(op, &a) || params->wsize < cspec_attention_work_size(&a, params->nth)) {
        return false;
    }
    cspec_attention_segments(&a, params->ith, params->nth, params->wdata);
    ggml.ggml_barrier(params->threadpool);
    cspec_attention_combine(&a, params->ith, params->nth, params->wdata);
    return true;
}

/* ---- the hook ------------------------------------------------------------------------------------ */

static bool is_ours(int32_t op)
{
    return op == CSPEC_GGML_OP_MUL_MAT || op == CSPEC_GGML_OP_MUL_MAT_ID || op == CSPEC_GGML_OP_FLASH_ATTN_EXT;
}

/* A probed call is believed only as far as its arguments turn out to be what they should. */
static void probe_compute(const compute_params *params, const tensor *op)
{
    const struct graph_plan *plan = &probe.plan;
    int undecided = 0;
    if (op == probe.op && readable(params, sizeof *params) && params->nth >= 1 &&
        params->nth <= plan->n_threads &&
        (atomic_compare_exchange_strong(&probe.nth, &undecided, params->nth) || undecided == params->nth) &&
        params->ith >= 0 && params->ith < params->nth && params->wsize == plan->work_size &&
        params->wdata == plan->work_data && params->threadpool == plan->threadpool &&
        *(const unsigned char *)&params->use_ref == plan->use_ref) {
        atomic_fetch_or(&probe.threads, 1 << params->ith);
    } else {
        atomic_fetch_add(&probe.wrong, 1);
    }
}

static void never_called(void *this_)
{
    (void)this_;
}

static bool extra_supports_op(void *this_, void *device, const tensor *op)
{
    (void)this_, (void)device;
    return weights_supports(op);
}

static bool traits_work_size(void *this_, int n_threads, const tensor *op, size_t *size)
{
    (void)this_;
    if (weights_has(op)) {
        /* ggml declares it constant; the operation is the graph's, and not being computed. */
        *size = weights_work_size(n_threads, (tensor *)(uintptr_t)op);
        return true;
    }
    if (atomic_load_explicit(&mode, memory_order_relaxed) == PROBING) {
        atomic_fetch_add(op == probe.op && n_threads == probe.plan.n_threads ? &probe.sized : &probe.wrong, 1);
        return false;
    }
    cspec_attention a;
    if (op->op != CSPEC_GGML_OP_FLASH_ATTN_EXT || !describe_attention(op, &a)) {
        return false; /* ggml's own size is what mul_mat checks for */
    }
    /* Should the kernels be turned off before the operation is computed, ggml computes it in the same memory: it
     * works on tiles of 64 rows and 64 cells. */
    const size_t tile = 64, heads = (size_t)(a.k_size + a.v_size);
    const size_t of_ggml = sizeof(float) * (size_t)n_threads *
                           (2 * tile * (heads + tile) + (size_t)a.n_heads * (2 + (size_t)a.v_size) + 2 * heads);
    const size_t ours = cspec_attention_work_size(&a, n_threads);
    *size = ours > of_ggml ? ours : of_ggml;
    return true;
}

static bool traits_compute_forward(void *this_, compute_params *params, tensor *op)
{
    (void)this_;
    switch (atomic_load_explicit(&mode, memory_order_relaxed)) {
    case ACTIVE:
        break;
    case PROBING:
        probe_compute(params, op);
        return false;
    default:
        return false;
    }

    if (weights_has(op)) {
        if (weights_compute(params, op)) {
            count(CSPEC_BRIDGE_SHARED, params);
        }
        count(CSPEC_BRIDGE_PRODUCT, params);
        return true;
    }
    /* ggml looks at use_ref in these three operations only, and it outlives the operation: set it in each. */
    const int64_t limit = atomic_load_explicit(&exact_width, memory_order_relaxed);
    if (op->op == CSPEC_GGML_OP_FLASH_ATTN_EXT) {
        /* At any width: it is faster than ggml's own. */
        const bool done = attend(params, op);
        params->use_ref = !done && op->src[0]->ne[1] <= limit;
        count(done || params->use_ref ? CSPEC_BRIDGE_ATTENTION : CSPEC_BRIDGE_WIDE, params);
        return done;
    }
    if (!in_plain_memory(op->src[0])) {
        count(CSPEC_BRIDGE_FOREIGN, params);
        return false;
    }
    if (op->op == CSPEC_GGML_OP_MUL_MAT_ID) {
        params->use_ref = op->src[2]->ne[1] <= limit;
        count(params->use_ref ? CSPEC_BRIDGE_PRODUCT : CSPEC_BRIDGE_WIDE, params);
        return false;
    }
    params->use_ref = op->src[1]->ne[1] <= limit && op->op_params[1] == 0;
    if (!params->use_ref) {
        count(op->op_params[1] == 0 ? CSPEC_BRIDGE_WIDE : CSPEC_BRIDGE_PRODUCT, params);
        return false;
    }
    const bool done = mul_mat(params, op);
    count(done ? CSPEC_BRIDGE_PRODUCT : CSPEC_BRIDGE_UNKNOWN, params);
    return done;
}

static const struct cspec_ggml_traits_vtable traits_vtable = {
    0, NULL, never_called, never_called, traits_work_size, traits_compute_forward,
};
static struct {
    const void *vtable;
} traits_object = {&traits_vtable.complete};

static void *extra_get_tensor_traits(void *this_, const tensor *op)
{
    (void)this_;
    switch (atomic_load_explicit(&mode, memory_order_relaxed)) {
    case ACTIVE:
        weights_see(op);
        return (atomic_load_explicit(&enabled, memory_order_relaxed) && is_ours(op->op)) || weights_has(op)
                   ? &traits_object
                   : NULL;
    case PROBING:
        if (op == probe.op) {
            atomic_fetch_add(&probe.asked, 1);
            return &traits_object;
        }
        return NULL;
    default:
        return NULL;
    }
}

static const struct cspec_ggml_extra_vtable extra_vtable = {
    0, NULL, never_called, never_called, extra_supports_op, extra_get_tensor_traits,
};
static struct {
    const void *vtable;
} extra_object = {&extra_vtable.complete};

static const char *buft_name(buffer_type *buft)
{
    (void)buft;
    return "CPU_PYSPEC";
}

static size_t buft_alignment(buffer_type *buft)
{
    (void)buft;
    return 64;
}

static buffer_type entry = {
    .get_name = buft_name,
    .alloc_buffer = weights_alloc_buffer,
    .get_alignment = buft_alignment,
    .get_alloc_size = weights_get_alloc_size,
    .context = &extra_object,
};

/* ---- the list ------------------------------------------------------------------------------------ */

enum { MOST_ENTRIES = 16 };

static bool known_name(const char *name)
{
    static const char *const known[] = {"AMX", "CPU_REPACK", "CPU_KLEIDIAI", "CPU_HBM"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (readable(name, strlen(known[i]) + 1) && strcmp(name, known[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* Whether the list is a vector of buffer types as declared. */
static const char *check_list(void)
{
    const buft_vector *list = ggml._Z39ggml_backend_cpu_get_extra_buffer_typesv();
    const void *cpu_code = CODE(ggml._Z39ggml_backend_cpu_get_extra_buffer_typesv);
    if (!readable(list, sizeof *list)) {
        return "the list of extra buffer types cannot be read";
    }
    const size_t bytes = (uintptr_t)list->end - (uintptr_t)list->begin;
    const size_t room = (uintptr_t)list->capacity - (uintptr_t)list->begin;
    if ((uintptr_t)list->end < (uintptr_t)list->begin || bytes > room || bytes % sizeof(void *) != 0 ||
        room % sizeof(void *) != 0 || room > 64 * MOST_ENTRIES * sizeof(void *) ||
        bytes > MOST_ENTRIES * sizeof(void *) || (bytes != 0 && !readable(list->begin, bytes))) {
        return "the list of extra buffer types is not the vector expected";
    }
    void *device = ggml.ggml_backend_reg_dev_get(ggml.ggml_backend_cpu_reg(), 0);
    for (size_t i = 0; i < bytes / sizeof(void *); i++) {
        buffer_type *other = list->begin[i];
        if (!readable(other, sizeof *other) || !same_library(CODE(other->get_name), cpu_code) ||
            other->device != device || ggml.ggml_backend_buft_get_device(other) != device ||
            !known_name(ggml.ggml_backend_buft_name(other))) {
            return "an entry of the list of extra buffer types is not known";
        }
        const struct cspec_ggml_extra_vtable *vtable;
        if (!readable(other->context, sizeof vtable)) {
            return "an extra buffer type has no object";
        }
        memcpy(&vtable, other->context, sizeof vtable);
        vtable = (const void *)((const char *)vtable - offsetof(struct cspec_ggml_extra_vtable, complete));
        if (!readable(vtable, sizeof *vtable) || !same_library(CODE(vtable->supports_op), cpu_code) ||
            !same_library(CODE(vtable->get_tensor_traits), cpu_code)) {
            return "an extra buffer type's vtable is not the one expected";
        }
    }
    return NULL;
}

/* The list as it was, and the storage that replaces its own: a reader in another thread sees one or the
 * other, both valid. At the end of the process the list frees the one that it then has. */
static buft_vector original;
static buffer_type **storage;

/* At the front, so that no other entry takes an operation first. */
static void insert(void)
{
    buft_vector *list = ggml._Z39ggml_backend_cpu_get_extra_buffer_typesv();
    const size_t n = (size_t)(list->end - list->begin);
    if (storage == NULL) {
        storage = ggml._Znwm((MOST_ENTRIES + 1) * sizeof *storage);
    }
    storage[0] = &entry;
    for (size_t i = 0; i < n; i++) {
        storage[i + 1] = list->begin[i];
    }
    entry.device = ggml.ggml_backend_reg_dev_get(ggml.ggml_backend_cpu_reg(), 0);
    original = *list;
    *list = (buft_vector){storage, storage + n + 1, storage + MOST_ENTRIES + 1};
}

static void withdraw(void)
{
    *ggml._Z39ggml_backend_cpu_get_extra_buffer_typesv() = original;
}

/* ---- attaching ----------------------------------------------------------------------------------- */

static const char *fault(int32_t fail_at, int32_t check, const char *found)
{
    return found == NULL && fail_at == check ? "a check was told to fail" : found;
}

static const char *attach(const char *library, int32_t fail_at)
{
    static char missing[128];
    if (atomic_load(&mode) != ABSENT) {
        return NULL;
    }
    void *handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    if (handle == NULL) {
        return "llama.cpp's library is not loaded";
    }
    const char *name = ggml_resolve(handle);
    dlclose(handle); /* it stays loaded: only the count of this call is given back */
    if (name != NULL) {
        snprintf(missing, sizeof missing, "llama.cpp does not export %s", name);
        return missing;
    }
    const char *problem;
    if ((problem = fault(fail_at, CSPEC_CHECK_TENSORS, check_tensors())) != NULL ||
        (problem = fault(fail_at, CSPEC_CHECK_LIST, check_list())) != NULL) {
        return problem;
    }
    struct check_material *m = new_check_material();
    if (m == NULL) {
        return "no memory for the bridge's checks";
    }
    atomic_store(&kernels, cspec_kernels());
    insert();
    atomic_store(&mode, PROBING);
    problem = fault(fail_at, CSPEC_CHECK_CALLS, check_calls(m));
    if (problem == NULL) {
        atomic_store(&mode, ACTIVE);
        problem = fault(fail_at, CSPEC_CHECK_ATTENTION, check_attention(m));
    }
    if (problem == NULL) {
        problem = fault(fail_at, CSPEC_CHECK_PRODUCTS, check_products(m));
    }
    free(m);
    if (problem != NULL) {
        atomic_store(&mode, ABSENT);
        withdraw();
    }
    for (int32_t i = 0; i < CSPEC_BRIDGE_COUNTS; i++) {
        atomic_store(&counts[i], 0);
    }
    return problem;
}

int32_t cspec_bridge_attach(const char *library, int32_t fail_at, char *reason, size_t reason_size)
{
    const char *problem = attach(library, fail_at);
    snprintf(reason, reason_size, "%s", problem != NULL ? problem : "");
    return problem == NULL;
}

/* The widest instruction set that this CPU has, up to `most`. Plain C is slower than ggml: only if asked for. */
static int32_t best_level(int32_t most)
{
    int32_t level = most;
    while (level > MATMUL_C && !matmul_has(level)) {
        level--;
    }
    return level == MATMUL_C && most != MATMUL_C ? MATMUL_OFF : level;
}

static const char *attach_kernels(const char *library, int32_t level, int32_t fail_at)
{
    if (atomic_load(&mode) != ACTIVE) {
        return "the bridge is not attached";
    }
    if (level == MATMUL_OFF) {
        return "this CPU has neither AVX2 nor AVX-512 VNNI";
    }
    void *handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    if (handle == NULL) {
        return "llama.cpp's library is not loaded";
    }
    const char *problem = weights_attach(handle, &entry);
    dlclose(handle);
    if ((problem = fault(fail_at, CSPEC_CHECK_BUFFERS, problem)) != NULL) {
        return problem;
    }
    problem = matmul_agrees(level) ? NULL : "the kernels' results differ from those of plain C";
    if ((problem = fault(fail_at, CSPEC_CHECK_KERNELS, problem)) != NULL) {
        return problem;
    }
    struct check_material *m = new_check_material();
    if (m == NULL) {
        return "no memory for the bridge's checks";
    }
    weights_set_level(level);
    problem = fault(fail_at, CSPEC_CHECK_PACKED, check_packed(m, &entry));
    free(m);
    return problem;
}

int32_t cspec_kernels_attach(const char *library, int32_t instructions, int32_t fail_at, char *reason,
                             size_t reason_size)
{
    const int32_t level = best_level(instructions);
    const char *problem = instructions == MATMUL_OFF ? "turned off" : attach_kernels(library, level, fail_at);
    weights_set_level(problem == NULL ? level : MATMUL_OFF);
    snprintf(reason, reason_size, "%s", problem != NULL ? problem : "");
    return problem == NULL ? level : MATMUL_OFF;
}

void cspec_kernels_offer(int32_t on)
{
    weights_offer(on != 0);
}

void cspec_kernels_shortlist(const int32_t *panels, int64_t n_panels, int64_t n_rows)
{
    weights_shortlist(panels, n_panels, n_rows);
}

void cspec_bridge_enable(int32_t on)
{
    atomic_store(&enabled, on != 0);
}

void cspec_bridge_kernels(int32_t which)
{
    atomic_store(&kernels, which);
}

void cspec_bridge_exact_width(int64_t n_tokens)
{
    atomic_store(&exact_width, n_tokens);
}

void cspec_bridge_read_counts(uint64_t *out)
{
    for (int32_t i = 0; i < CSPEC_BRIDGE_COUNTS; i++) {
        out[i] = atomic_load_explicit(&counts[i], memory_order_relaxed);
    }
}

int32_t cspec_bridge_devices(void)
{
    return atomic_load(&mode) == ACTIVE ? (int32_t)ggml.ggml_backend_dev_count() : 0;
}

#else

int32_t cspec_bridge_attach(const char *library, int32_t fail_at, char *reason, size_t reason_size)
{
    (void)library, (void)fail_at;
    snprintf(reason, reason_size, "%s", "not supported on this platform");
    return 0;
}

void cspec_bridge_enable(int32_t on)
{
    (void)on;
}

void cspec_bridge_kernels(int32_t which)
{
    (void)which;
}

void cspec_bridge_exact_width(int64_t n_tokens)
{
    (void)n_tokens;
}

void cspec_bridge_read_counts(uint64_t *out)
{
    for (int32_t i = 0; i < CSPEC_BRIDGE_COUNTS; i++) {
        out[i] = 0;
    }
}

int32_t cspec_bridge_devices(void)
{
    return 0;
}

int32_t cspec_kernels_attach(const char *library, int32_t instructions, int32_t fail_at, char *reason,
                             size_t reason_size)
{
    (void)library, (void)instructions, (void)fail_at;
    snprintf(reason, reason_size, "%s", "not supported on this platform");
    return MATMUL_OFF;
}

void cspec_kernels_offer(int32_t on)
{
    (void)on;
}

void cspec_kernels_shortlist(const int32_t *panels, int64_t n_panels, int64_t n_rows)
{
    (void)panels, (void)n_panels, (void)n_rows;
}

#endif
