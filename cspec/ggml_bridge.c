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
 * Operations wider than exact_width tokens are left as they are: prompts are evaluated at full speed.
 *
 * Nothing of llama.cpp is linked. Its functions are found in the libraries that are already loaded, and
 * every structure is compared with objects from public functions before it is relied upon.
 */
#define _GNU_SOURCE
#include "cspec.h"
#include "ggml_bridge.h"
#include "ggml_weights.h"
#include "matmul/matmul.h"

#include <stdio.h>

#if defined(__linux__) && defined(__LP64__) && (defined(__x86_64__) || defined(__aarch64__))

#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct cspec_ggml_tensor tensor;
typedef struct cspec_ggml_compute_params compute_params;
typedef struct cspec_ggml_buffer_type buffer_type;
typedef struct cspec_ggml_buft_vector buft_vector;

/* ---- ggml's functions ---------------------------------------------------------------------------- */

struct init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
};

/* Returned by value through a pointer, so room after the known fields keeps a longer one harmless. */
struct graph_plan {
    size_t work_size;
    void *work_data;
    int32_t n_threads;
    void *threadpool;
    bool (*abort_callback)(void *data);
    void *abort_callback_data;
    bool use_ref;
    char room[128];
};

struct threadpool_params {
    char unread[2048];
};

#define GGML_FUNCTIONS(X)                                                                             \
    X(void *, ggml_init, (struct init_params))                                                        \
    X(void, ggml_free, (void *))                                                                      \
    X(size_t, ggml_tensor_overhead, (void))                                                           \
    X(tensor *, ggml_new_tensor_4d, (void *, int32_t, int64_t, int64_t, int64_t, int64_t))            \
    X(tensor *, ggml_view_2d, (void *, tensor *, int64_t, int64_t, size_t, size_t))                   \
    X(void *, ggml_get_data, (const tensor *))                                                        \
    X(const char *, ggml_get_name, (const tensor *))                                                  \
    X(const char *, ggml_op_desc, (const tensor *))                                                   \
    X(const char *, ggml_type_name, (int32_t))                                                        \
    X(size_t, ggml_type_size, (int32_t))                                                              \
    X(int64_t, ggml_blck_size, (int32_t))                                                             \
    X(size_t, ggml_row_size, (int32_t, int64_t))                                                      \
    X(tensor *, ggml_mul_mat, (void *, tensor *, tensor *))                                           \
    X(tensor *, ggml_mul_mat_id, (void *, tensor *, tensor *, tensor *))                              \
    X(tensor *, ggml_flash_attn_ext,                                                                  \
      (void *, tensor *, tensor *, tensor *, tensor *, float, float, float))                          \
    X(void *, ggml_new_graph, (void *))                                                               \
    X(void, ggml_build_forward_expand, (void *, tensor *))                                            \
    X(size_t, ggml_quantize_chunk,                                                                    \
      (int32_t, const float *, void *, int64_t, int64_t, int64_t, const float *))                     \
    X(void, ggml_fp32_to_fp16_row, (const float *, uint16_t *, int64_t))                              \
    X(void, ggml_fp16_to_fp32_row, (const uint16_t *, float *, int64_t))                              \
    X(const char *, ggml_backend_buft_name, (buffer_type *))                                          \
    X(void *, ggml_backend_buft_get_device, (buffer_type *))                                          \
    X(size_t, ggml_backend_buft_get_alloc_size, (buffer_type *, const tensor *))                      \
    X(struct cspec_ggml_buffer *, ggml_backend_buft_alloc_buffer, (buffer_type *, size_t))            \
    X(void *, ggml_backend_buffer_get_base, (struct cspec_ggml_buffer *))                             \
    X(void, ggml_backend_buffer_free, (struct cspec_ggml_buffer *))                                   \
    X(int32_t, ggml_backend_tensor_alloc, (struct cspec_ggml_buffer *, tensor *, void *))             \
    X(void, ggml_backend_tensor_set, (tensor *, const void *, size_t, size_t))                        \
    X(bool, ggml_backend_buffer_is_host, (struct cspec_ggml_buffer *))                                \
    X(void *, ggml_backend_cpu_reg, (void))                                                           \
    X(void *, ggml_backend_reg_dev_get, (void *, size_t))                                             \
    X(size_t, ggml_backend_dev_count, (void))                                                         \
    X(struct graph_plan, ggml_graph_plan, (const void *, int32_t, void *))                            \
    X(int32_t, ggml_graph_compute, (void *, struct graph_plan *))                                     \
    X(struct threadpool_params, ggml_threadpool_params_default, (int32_t))                            \
    X(void *, ggml_threadpool_new, (struct threadpool_params *))                                      \
    X(void, ggml_threadpool_free, (void *))                                                           \
    X(void, ggml_threadpool_chunk_set, (void *, int32_t))                                             \
    X(int32_t, ggml_threadpool_chunk_add, (void *, int32_t))                                          \
    X(void, ggml_barrier, (void *))                                                                   \
    X(const struct cspec_ggml_type_traits_cpu *, ggml_get_type_traits_cpu, (int32_t))                 \
    X(const struct cspec_ggml_type_traits *, ggml_get_type_traits, (int32_t))                         \
    X(buft_vector *, _Z39ggml_backend_cpu_get_extra_buffer_typesv, (void))                            \
    X(void *, _Znwm, (size_t)) /* operator new, whose memory the vector holds */

#define MEMBER(result, name, arguments) result(*name) arguments;
static struct {
    GGML_FUNCTIONS(MEMBER)
} ggml;
#undef MEMBER

/* As the dynamic linker does for the library itself: what the program has put in front (a preloaded allocator's
 * operator new) comes first. Returns the first name that is missing, or null. */
static const char *resolve(void *library)
{
    void *symbol;
#define RESOLVE(result, name, arguments)                                                              \
    if ((symbol = dlsym(RTLD_DEFAULT, #name)) == NULL && (symbol = dlsym(library, #name)) == NULL) {  \
        return #name;                                                                                 \
    }                                                                                                 \
    memcpy(&ggml.name, &symbol, sizeof symbol);
    GGML_FUNCTIONS(RESOLVE)
#undef RESOLVE
    return NULL;
}

/* ---- looking before touching --------------------------------------------------------------------- */

/* Whether size bytes at address can be read: the kernel says so instead of a signal. */
static bool readable(const void *address, size_t size)
{
    static const size_t step = 512; /* PIPE_BUF on any system: never a partial write */
    int ends[2];
    if (address == NULL || pipe2(ends, O_CLOEXEC) != 0) {
        return false;
    }
    char sink[512];
    bool good = true;
    for (size_t done = 0; good && done < size; done += step) {
        size_t length = size - done < step ? size - done : step;
        good = write(ends[1], (const char *)address + done, length) == (ssize_t)length &&
               read(ends[0], sink, length) == (ssize_t)length;
    }
    close(ends[0]);
    close(ends[1]);
    return good;
}

/* Whether both addresses belong to the same loaded library. */
static bool same_library(const void *one, const void *other)
{
    Dl_info first, second;
    return dladdr(one, &first) != 0 && dladdr(other, &second) != 0 && first.dli_fbase == second.dli_fbase;
}

static const void *code(void (*function)(void))
{
    const void *address;
    memcpy(&address, &function, sizeof address);
    return address;
}
#define CODE(function) code((void (*)(void))(function))

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

/* What the hook saw of one expected operation while probing. */
static struct {
    const tensor *op;
    struct graph_plan plan;
    atomic_int asked;   /* get_tensor_traits with this op */
    atomic_int sized;   /* work_size with this op and the plan's number of threads */
    atomic_int nth;     /* threads that computed; OpenMP may give fewer than the plan wants */
    atomic_int threads; /* a bit for every thread whose compute_forward had the expected params */
    atomic_int wrong;   /* calls with anything else */
} probe;

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
        *size = weights_work_size(n_threads, op);
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
    /* Should the exact width change before the operation is computed, ggml computes it in the same memory: it
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
        weights_compute(params, op);
        count(CSPEC_BRIDGE_PRODUCT, params);
        return true;
    }
    /* ggml looks at use_ref in these three operations only, and it outlives the operation: set it in each. */
    const int64_t limit = atomic_load_explicit(&exact_width, memory_order_relaxed);
    if (op->op == CSPEC_GGML_OP_FLASH_ATTN_EXT) {
        params->use_ref = op->src[0]->ne[1] <= limit;
        count(params->use_ref ? CSPEC_BRIDGE_ATTENTION : CSPEC_BRIDGE_WIDE, params);
        return params->use_ref && attend(params, op);
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

/* ---- checks -------------------------------------------------------------------------------------- */

static void *new_context(void)
{
    return ggml.ggml_init((struct init_params){.mem_size = (size_t)8 << 20});
}

/* Whether tensors are laid out as declared. All reads are inside the context's memory. */
static const char *check_tensors(void)
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

/* What the tests compute with; freed when the bridge has been attached. */
struct material {
    float k[KV_SIZE], v[KV_SIZE];           /* [KV_HEADS][CELLS][HEAD], rounded to F16 */
    uint16_t k_half[KV_SIZE], v_half[KV_SIZE];
    float weights[EXPERTS * OUTER * INNER]; /* [EXPERTS][OUTER][INNER] */
    float quantised[EXPERTS * OUTER * INNER];
    float x[N_ROWS * INNER];
    float one[N_ROWS * EXPERTS * OUTER + N_ROWS * Q_SIZE], many[N_ROWS * EXPERTS * OUTER + N_ROWS * Q_SIZE];
};

static void prepare(struct material *m)
{
    fill(m->k, KV_SIZE, 1);
    fill(m->v, KV_SIZE, 2);
    ggml.ggml_fp32_to_fp16_row(m->k, m->k_half, KV_SIZE);
    ggml.ggml_fp32_to_fp16_row(m->v, m->v_half, KV_SIZE);
    ggml.ggml_fp16_to_fp32_row(m->k_half, m->k, KV_SIZE);
    ggml.ggml_fp16_to_fp32_row(m->v_half, m->v, KV_SIZE);
    fill(m->weights, EXPERTS * OUTER * INNER, 3);
    fill(m->x, N_ROWS * INNER, 4);
}

static void fill_query(float *q, int32_t row)
{
    fill(q, Q_SIZE, 100u + (uint32_t)row);
}

/* Rows first to first + n of the test attention, into out [n][Q_HEADS][HEAD]. */
static bool attention(const struct material *m, float *out, int32_t first, int32_t n, int32_t n_threads,
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
static bool attention_is_right(const struct material *m, const float *out, int32_t row)
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
static const char *check_calls(struct material *m)
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
static const char *check_attention(struct material *m)
{
    const uint64_t before = atomic_load(&counts[CSPEC_BRIDGE_ATTENTION]);
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
    if (atomic_load(&counts[CSPEC_BRIDGE_ATTENTION]) - before != N_ROWS + N_WIDTHS) {
        return "ggml did not ask the bridge about every attention";
    }
    return NULL;
}

/* Columns first to first + n of a test product with weights of a type, into out [n][OUTER]; with experts, of
 * MUL_MAT_ID, into out [n][EXPERTS][OUTER]. Packed: from weights in the layout of the kernels. */
static bool product(const struct material *m, float *out, int32_t type, bool experts, bool packed, int32_t first,
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
    if (packed) {
        weights->data = NULL;
        buffer = ggml.ggml_backend_buft_alloc_buffer(&entry, ggml.ggml_backend_buft_get_alloc_size(&entry, weights));
        if (buffer == NULL || buffer->buft != &entry ||
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
static const char *check_products(struct material *m)
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
    const uint64_t before = atomic_load(&counts[CSPEC_BRIDGE_PRODUCT]);
    for (int32_t t = 0; t < N_TYPES; t++) {
        ggml.ggml_quantize_chunk(types[t].type, m->weights, m->quantised, 0, EXPERTS * OUTER, INNER, NULL);
        for (int32_t experts = 0; experts < 2; experts++) {
            const int32_t rows = OUTER * (experts ? EXPERTS : 1);
            for (int32_t column = 0; column < N_ROWS; column++) {
                float *out = m->one + column * rows;
                if (!product(m, out, types[t].type, experts, false, column, 1, 1)) {
                    return "the product test could not be computed";
                }
                if (!product_is_right(out, m->weights, m->x + column * INNER, rows, types[t].tolerance)) {
                    return "products through the bridge are wrong";
                }
            }
            for (int32_t w = 1; w < N_WIDTHS; w++) {
                const int32_t first = N_ROWS - widths[w];
                if (!product(m, m->many, types[t].type, experts, false, first, widths[w], 2)) {
                    return "the product test could not be computed";
                }
                if (memcmp(m->many, m->one + first * rows, sizeof(float) * (size_t)(rows * widths[w])) != 0) {
                    return "products through the bridge depend on the number of tokens";
                }
            }
        }
    }
    if (atomic_load(&counts[CSPEC_BRIDGE_PRODUCT]) - before != N_TYPES * 2 * (N_ROWS + N_WIDTHS - 1)) {
        return "ggml did not ask the bridge about every product";
    }
    return NULL;
}

/* Whether products with weights in the kernels' layout, loaded and computed by ggml, are right, and the same at
 * every width and number of threads. */
static const char *check_packed(struct material *m)
{
    static const struct {
        int32_t type;
        double tolerance;
    } types[] = {{CSPEC_GGML_Q8_0, 0.5}, {CSPEC_GGML_Q4_K, 5}};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        ggml.ggml_quantize_chunk(types[t].type, m->weights, m->quantised, 0, OUTER, INNER, NULL);
        for (int32_t column = 0; column < N_ROWS; column++) {
            float *out = m->one + column * OUTER;
            if (!product(m, out, types[t].type, false, true, column, 1, 1)) {
                return "the test of the kernels could not be computed";
            }
            if (!product_is_right(out, m->weights, m->x + column * INNER, OUTER, types[t].tolerance)) {
                return "products of the kernels are wrong";
            }
        }
        for (int32_t w = 0; w < N_WIDTHS; w++) {
            const int32_t first = N_ROWS - widths[w];
            if (!product(m, m->many, types[t].type, false, true, first, widths[w], 2)) {
                return "the test of the kernels could not be computed";
            }
            if (memcmp(m->many, m->one + first * OUTER, sizeof(float) * (size_t)(OUTER * widths[w])) != 0) {
                return "products of the kernels depend on the number of tokens";
            }
        }
    }
    return NULL;
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
    const char *name = resolve(handle);
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
    struct material *m = malloc(sizeof *m);
    if (m == NULL) {
        return "no memory for the bridge's checks";
    }
    prepare(m);
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
    struct material *m = malloc(sizeof *m);
    if (m == NULL) {
        return "no memory for the bridge's checks";
    }
    prepare(m);
    weights_set_level(level);
    problem = fault(fail_at, CSPEC_CHECK_PACKED, check_packed(m));
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

#endif
