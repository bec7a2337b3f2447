#define _GNU_SOURCE
#include "ggml_weights.h"

#if defined(__linux__) && defined(__LP64__) && (defined(__x86_64__) || defined(__aarch64__))

#include "cspec.h"
#include "matmul/matmul.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct cspec_ggml_tensor tensor;
typedef struct cspec_ggml_buffer buffer;
typedef struct cspec_ggml_buffer_type buffer_type;

#define GGML_FUNCTIONS(X)                                                                             \
    X(size_t, ggml_nbytes, (const tensor *))                                                          \
    X(buffer_type *, ggml_backend_cpu_buffer_type, (void))                                            \
    X(buffer *, ggml_backend_buft_alloc_buffer, (buffer_type *, size_t))                              \
    X(void, ggml_backend_buffer_free, (buffer *))                                                     \
    X(buffer_type *, ggml_backend_buffer_get_type, (buffer *))                                        \
    X(void *, ggml_backend_buffer_get_base, (buffer *))                                               \
    X(size_t, ggml_backend_buffer_get_size, (buffer *))                                               \
    X(bool, ggml_backend_buffer_is_host, (buffer *))                                                  \
    X(void *, ggml_backend_cpu_reg, (void))                                                           \
    X(void *, ggml_backend_reg_dev_get, (void *, size_t))                                             \
    X(void *, ggml_backend_reg_get_proc_address, (void *, const char *))                              \
    X(void, ggml_threadpool_chunk_set, (void *, int32_t))                                             \
    X(int32_t, ggml_threadpool_chunk_add, (void *, int32_t))                                          \
    X(void, ggml_barrier, (void *))

#define MEMBER(result, name, arguments) result(*name) arguments;
static struct {
    GGML_FUNCTIONS(MEMBER)
} ggml;
#undef MEMBER

_Static_assert((int)CSPEC_PANEL_ROWS == (int)MATMUL_ROWS, "Python counts rows of panels");

static buffer_type *ours; /* null until structures have been compared */
static atomic_int level = MATMUL_OFF;

/* Changed between passes only. */
static struct {
    const int32_t *panels; /* [n_panels]; null: there is none */
    int64_t n_panels, n_rows;
} shortlist;

static size_t align(size_t size)
{
    return (size + 63) / 64 * 64;
}

/* ---- loading ------------------------------------------------------------------------------------- */

/* The type whose kernels take these weights, or null. */
static const struct matmul_type *type_of(const tensor *weights)
{
    const struct matmul_type *type = matmul_find_type(weights->type);
    return type != NULL && weights->ne[0] % type->block == 0 && weights->ne[0] > 0 && weights->ne[1] > 0 &&
                   weights->ne[2] == 1 && weights->ne[3] == 1 && weights->view_src == NULL &&
                   weights->nb[1] == (size_t)(weights->ne[0] / type->block) * (size_t)type->ggml_bytes
               ? type
               : NULL;
}

size_t weights_get_alloc_size(buffer_type *buft, const tensor *t)
{
    (void)buft;
    const struct matmul_type *type = type_of(t);
    const size_t size = ggml.ggml_nbytes(t);
    if (type == NULL) {
        return size;
    }
    const size_t packed = (size_t)matmul_panels(t->ne[1]) * matmul_panel_size(type, t->ne[0] / type->block);
    return packed > size ? packed : size;
}

/* Whether the bytes are of a file that is mapped for reading only. */
static bool in_mapped_file(const void *data, size_t size)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    const uintptr_t first = (uintptr_t)data;
    bool found = false;
    char line[512];
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        unsigned long begin, end, inode;
        char access[8];
        if (sscanf(line, "%lx-%lx %7s %*x %*s %lu", &begin, &end, access, &inode) == 4 && begin <= first &&
            first < end) {
            found = inode != 0 && access[1] == '-' && first + size <= end;
            break;
        }
    }
    if (maps != NULL) {
        fclose(maps);
    }
    return found;
}

/* Gives back the pages of a mapped file: they would be in memory twice. Reading them again finds them again. */
static void give_back(const void *data, size_t size)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t first = ((uintptr_t)data + page - 1) / page * page, last = ((uintptr_t)data + size) / page * page;
    if (last > first) {
        madvise((void *)first, last - first, MADV_DONTNEED);
    }
}

struct packing {
    const struct matmul_type *type;
    const tensor *weights;
    const uint8_t *rows;
    bool mapped;
    atomic_int_fast64_t next; /* panel */
};

enum { PACKING_STEP = 1 << 20 /* bytes */ };

static void *pack_panels(void *argument)
{
    struct packing *packing = argument;
    const tensor *weights = packing->weights;
    const int64_t n_rows = weights->ne[1], n_panels = matmul_panels(n_rows);
    const size_t panel_bytes = weights->nb[1] * MATMUL_ROWS;
    const int64_t step = 1 + (int64_t)(PACKING_STEP / panel_bytes);
    for (int64_t first; (first = atomic_fetch_add(&packing->next, step)) < n_panels;) {
        const int64_t last = first + step < n_panels ? first + step : n_panels;
        matmul_pack(packing->type, n_rows, weights->ne[0], packing->rows, weights->data, first, last);
        if (packing->mapped) {
            give_back(packing->rows + (size_t)first * panel_bytes, (size_t)(last - first) * panel_bytes);
        }
    }
    return NULL;
}

/* ggml's own types of this kind take nothing but whole tensors either. */
static void set_tensor(buffer *b, tensor *t, const void *data, size_t offset, size_t size)
{
    (void)b;
    const struct matmul_type *type = type_of(t);
    if (type == NULL || offset != 0 || size != ggml.ggml_nbytes(t)) {
        fprintf(stderr, "pyspec: part of a tensor written into packed weights\n");
        abort();
    }
    struct packing packing = {.type = type, .weights = t, .rows = data, .mapped = in_mapped_file(data, size)};
    enum { MOST_THREADS = 64 };
    pthread_t threads[MOST_THREADS];
    cpu_set_t cpus;
    int32_t n = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1, started = 0;
    n = n < MOST_THREADS ? n : MOST_THREADS;
    n = (size_t)n < size / PACKING_STEP ? n : (int32_t)(size / PACKING_STEP);
    /* A thread that cannot be had is done without. */
    while (started < n - 1 && pthread_create(&threads[started], NULL, pack_panels, &packing) == 0) {
        started++;
    }
    pack_panels(&packing);
    for (int32_t i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    if (packing.mapped) {
        give_back(data, size);
    }
}

static int32_t init_tensor(buffer *b, tensor *t)
{
    (void)b, (void)t;
    return 0; /* GGML_STATUS_SUCCESS */
}

buffer *weights_alloc_buffer(buffer_type *buft, size_t size)
{
    if (ours == NULL) {
        return NULL;
    }
    buffer *b = ggml.ggml_backend_buft_alloc_buffer(ggml.ggml_backend_cpu_buffer_type(), size);
    if (b != NULL) {
        b->buft = buft;
        b->init_tensor = init_tensor;
        b->set_tensor = set_tensor;
        b->get_tensor = NULL;
        b->cpy_tensor = NULL;
        /* Fewer page faults while loading. */
        const uintptr_t huge = (uintptr_t)2 << 20;
        const uintptr_t first = ((uintptr_t)ggml.ggml_backend_buffer_get_base(b) + huge - 1) / huge * huge;
        const uintptr_t last = ((uintptr_t)ggml.ggml_backend_buffer_get_base(b) + size) / huge * huge;
        if (last > first) {
            madvise((void *)first, last - first, MADV_HUGEPAGE);
        }
    }
    return b;
}

/* ---- products ------------------------------------------------------------------------------------ */

bool weights_has(const tensor *op)
{
    return ours != NULL && op->op == CSPEC_GGML_OP_MUL_MAT && op->src[0]->buffer != NULL &&
           op->src[0]->buffer->buft == ours;
}

bool weights_supports(const tensor *op)
{
    const tensor *x = op->src[1];
    return weights_has(op) && atomic_load_explicit(&level, memory_order_relaxed) != MATMUL_OFF &&
           type_of(op->src[0]) != NULL && x->type == CSPEC_GGML_F32 && x->nb[0] == sizeof(float) &&
           (x->buffer == NULL || ggml.ggml_backend_buffer_is_host(x->buffer)) && op->type == CSPEC_GGML_F32 &&
           op->op_params[1] == 0;
}

static int64_t token_count(const tensor *op)
{
    return op->src[1]->ne[1] * op->src[1]->ne[2] * op->src[1]->ne[3];
}

static size_t activations_size(const tensor *op)
{
    const struct matmul_type *type = type_of(op->src[0]);
    return align((size_t)token_count(op) * matmul_token_size(type, op->src[0]->ne[0] / type->block));
}

/* Whether every thread quantises all activations for itself, and takes an even share of the panels: for few of them that
 * is sooner done than waiting for the others, twice where the product is small. */
static bool is_private(const tensor *op)
{
    return token_count(op) * op->src[0]->ne[0] <= 1 << 14 && op->src[0]->ne[1] * op->src[0]->ne[0] <= 1 << 20;
}

/* Panels of a chunk where so many are left: three quarters of a thread's even share. So nearly all of a product is
 * one long run of memory for each thread, and the chunks for which threads wait at its end are small. */
static int64_t chunk_size(int64_t n_left, int32_t n_threads)
{
    return (3 * n_left + 4 * (int64_t)n_threads - 1) / (4 * (int64_t)n_threads);
}

/* Whether they are an output matrix, of its own or the embeddings'. */
static bool makes_logits(const tensor *weights)
{
    return strcmp(weights->name, "output.weight") == 0 || strcmp(weights->name, "token_embd.weight") == 0;
}

/* ---- activations of several products
 *
 * Q, K and V, or gate and up, are products with the same activations. The first quantises them into the work memory,
 * behind what ggml's rotary embedding of Q takes of it; the others find them there if nothing else has used it since.
 * That is decided while a graph is planned, which ggml does before each computation, in one thread and over all
 * operations in their order. A product's last parameter, which ggml leaves alone, keeps the decision. */

enum { ROOM_OF_ROPE = 4096 }; /* bytes for each thread */
enum { QUANTISES, FINDS_PRIVATE, FINDS_COMMON };
enum { DECISION = CSPEC_GGML_OP_PARAMS - 1 };

static _Thread_local struct {
    const tensor *previous, *current; /* operations */
    const tensor *activations;        /* what is quantised in the work memory, or null */
    const struct matmul_type *type;   /* of the weights that they were quantised for */
    int32_t finding;                  /* FINDS_* */
} planned;

/* Whether ggml needs none of the work memory for an operation, or only what lies before the activations. */
static bool keeps_activations(const tensor *op)
{
    switch (op->op) {
    case CSPEC_GGML_OP_ADD:
        return op->type == CSPEC_GGML_F32 && op->src[0]->type == CSPEC_GGML_F32;
    case CSPEC_GGML_OP_MUL:
    case CSPEC_GGML_OP_RMS_NORM:
        return true;
    case CSPEC_GGML_OP_ROPE: /* a row and a cache line for each thread */
        return ((size_t)op->ne[0] + 16) * sizeof(float) <= ROOM_OF_ROPE;
    default:
        return false;
    }
}

void weights_see(const tensor *op)
{
    if (op->op == CSPEC_GGML_OP_NONE || (op->op >= CSPEC_GGML_OP_RESHAPE && op->op <= CSPEC_GGML_OP_TRANSPOSE)) {
        return;
    }
    planned.previous = planned.current;
    planned.current = op;
    if (!weights_has(op) && !keeps_activations(op)) {
        planned.activations = NULL;
    }
}

/* What a product does about its activations. Only those that the operation just before made are kept for others: ones
 * from outside the graph may change between two computations. */
static int32_t decide(const tensor *op)
{
    const tensor *x = op->src[1], *maker = x->view_src != NULL ? x->view_src : x;
    const struct matmul_type *type = type_of(op->src[0]);
    if (planned.activations == x && planned.type == type) {
        return planned.finding;
    }
    const bool made = planned.activations == x || (planned.previous == maker && maker->op != CSPEC_GGML_OP_NONE);
    planned.activations = made && (op->flags & CSPEC_GGML_FLAG_COMPUTE) != 0 ? x : NULL;
    planned.type = type;
    planned.finding = is_private(op) ? FINDS_PRIVATE : FINDS_COMMON;
    return QUANTISES;
}

size_t weights_work_size(int32_t n_threads, tensor *op)
{
    op->op_params[DECISION] = decide(op);
    return activations_size(op) * (size_t)(is_private(op) ? n_threads : 1) +
           (size_t)n_threads * ROOM_OF_ROPE + 64;
}

bool weights_compute(const struct cspec_ggml_compute_params *params, tensor *op)
{
    const tensor *weights = op->src[0], *x = op->src[1];
    const struct matmul_type *type = type_of(weights);
    const int64_t n_tokens = token_count(op);
    const int64_t n_blocks = weights->ne[0] / type->block;
    const int32_t decision = op->op_params[DECISION];
    const bool private = decision == QUANTISES ? is_private(op) : decision == FINDS_PRIVATE;
    uint8_t *scratch = (uint8_t *)align((uintptr_t)params->wdata) + (size_t)params->nth * ROOM_OF_ROPE;
    const struct matmul_tokens tokens = {
        x->data, {x->ne[1], x->ne[2], x->ne[3]}, {x->nb[1], x->nb[2], x->nb[3]}};
    if (private) {
        scratch += (size_t)params->ith * activations_size(op);
    }
    const struct matmul_product product = {
        .type = type,
        .level = atomic_load_explicit(&level, memory_order_relaxed),
        .n_rows = weights->ne[1],
        .n_k = weights->ne[0],
        .n_tokens = n_tokens,
        .panels = weights->data,
        .activations = scratch,
        .out = op->data,
        .stride = op->nb[1] / sizeof(float),
        .listed = makes_logits(weights) && weights->ne[1] == shortlist.n_rows ? shortlist.panels : NULL,
        .n_listed = shortlist.n_panels,
    };
    const int64_t n_panels = matmul_product_panels(&product);
    if (params->ith == 0) {
        planned.activations = NULL; /* what was planned is computed: what follows is another graph */
    }
    if (decision == QUANTISES) {
        const int64_t part = private ? 0 : params->ith, n_parts = private ? 1 : params->nth;
        matmul_quantise(type, product.level, n_blocks, &tokens, n_tokens, scratch, n_blocks * part / n_parts,
                        n_blocks * (part + 1) / n_parts);
    }
    if (is_private(op)) {
        matmul_multiply(&product, n_panels * params->ith / params->nth, n_panels * (params->ith + 1) / params->nth);
        return decision != QUANTISES;
    }
    if (params->ith == 0) {
        /* Every thread starts with the chunk of its own number. */
        ggml.ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml.ggml_barrier(params->threadpool);
    int64_t chunk = 0, first = 0;
    for (int64_t mine = params->ith; first < n_panels;
         mine = ggml.ggml_threadpool_chunk_add(params->threadpool, 1)) {
        for (; chunk < mine; chunk++) {
            first += chunk_size(n_panels - first, params->nth);
        }
        matmul_multiply(&product, first, first + chunk_size(n_panels - first, params->nth));
    }
    return decision != QUANTISES;
}

/* ---- attaching ----------------------------------------------------------------------------------- */

/* What model loading asks: a copy, made at its first use and ended by a null, of the list of extra buffer types. */
static buffer_type **offered;
enum { MOST_OFFERED = 16 };
static buffer_type *others[MOST_OFFERED + 1];

static bool in_library(const void *symbol, const void *library_symbol)
{
    Dl_info one, other;
    return symbol == NULL || (dladdr(symbol, &one) != 0 && dladdr(library_symbol, &other) != 0 &&
                              one.dli_fbase == other.dli_fbase);
}

/* Whether a CPU buffer is laid out as declared. */
static bool buffer_is_known(void)
{
    enum { SIZE = 12345 };
    buffer *b = ggml.ggml_backend_buft_alloc_buffer(ggml.ggml_backend_cpu_buffer_type(), SIZE);
    if (b == NULL) {
        return false;
    }
    const void *const *functions = (const void *const *)(void *)b;
    const void *base_code;
    memcpy(&base_code, &ggml.ggml_backend_buffer_get_base, sizeof base_code);
    bool good = true;
    for (size_t i = 0; good && i < offsetof(buffer, buft) / sizeof(void *); i++) {
        good = in_library(functions[i], base_code);
    }
    good = good && b->buft == ggml.ggml_backend_cpu_buffer_type() &&
           b->buft == ggml.ggml_backend_buffer_get_type(b) && b->size == SIZE &&
           b->size == ggml.ggml_backend_buffer_get_size(b) && b->context != NULL && b->set_tensor != NULL &&
           b->free_buffer != NULL && b->get_base != NULL && b->usage == 0 &&
           (uintptr_t)ggml.ggml_backend_buffer_get_base(b) - (uintptr_t)b->context < 64;
    ggml.ggml_backend_buffer_free(b);
    return good;
}

const char *weights_attach(void *library, buffer_type *entry)
{
    void *symbol;
#define RESOLVE(result, name, arguments)                                                              \
    if ((symbol = dlsym(library, #name)) == NULL) {                                                   \
        return "llama.cpp does not export " #name;                                                    \
    }                                                                                                 \
    memcpy(&ggml.name, &symbol, sizeof symbol);
    GGML_FUNCTIONS(RESOLVE)
#undef RESOLVE
    if (!buffer_is_known()) {
        return "ggml's buffers are not laid out as expected";
    }
    void *reg = ggml.ggml_backend_cpu_reg();
    buffer_type **(*get_offered)(void *device);
    symbol = ggml.ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    memcpy(&get_offered, &symbol, sizeof symbol);
    offered = symbol != NULL ? get_offered(ggml.ggml_backend_reg_dev_get(reg, 0)) : NULL;
    if (offered == NULL) {
        return "ggml does not offer extra buffer types";
    }
    size_t n = 0, kept = 0;
    for (; offered[n] != NULL; n++) {
        if (n == MOST_OFFERED) {
            return "ggml offers more extra buffer types than expected";
        }
        if (offered[n] != entry) {
            others[kept++] = offered[n];
        }
    }
    if (n == 0) {
        return "ggml offers no extra buffer types";
    }
    ours = entry;
    weights_offer(false);
    return NULL;
}

void weights_set_level(int32_t new_level)
{
    atomic_store(&level, new_level);
}

void weights_shortlist(const int32_t *panels, int64_t n_panels, int64_t n_rows)
{
    shortlist.panels = panels;
    shortlist.n_panels = n_panels;
    shortlist.n_rows = n_rows;
}

void weights_offer(bool on)
{
    if (offered == NULL) {
        return;
    }
    if (on) {
        offered[0] = ours;
        offered[1] = NULL;
        return;
    }
    size_t n = 0;
    for (; others[n] != NULL; n++) {
        offered[n] = others[n];
    }
    offered[n] = NULL;
}

#endif
