/* What the bridge knows of ggml's structures, as they are in llama-cpp-python 0.3.36.
 *
 * llama.cpp's headers are not needed to build pyspec, so the layouts are declared here as facts; ggml_checks.c
 * compares every one that is used with objects made through ggml's public functions before it is relied
 * upon. Names follow ggml's, with a cspec_ prefix. Strides are in bytes, ne[0] is the innermost dimension.
 */
#ifndef CSPEC_GGML_BRIDGE_H
#define CSPEC_GGML_BRIDGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CSPEC_GGML_MAX_SRC = 10, CSPEC_GGML_OP_PARAMS = 16, CSPEC_GGML_NAME = 64 };

enum {
    CSPEC_GGML_F32 = 0,
    CSPEC_GGML_F16 = 1,
    CSPEC_GGML_Q4_0 = 2,
    CSPEC_GGML_Q4_1 = 3,
    CSPEC_GGML_Q5_0 = 6,
    CSPEC_GGML_Q8_0 = 8,
    CSPEC_GGML_Q4_K = 12,
    CSPEC_GGML_Q6_K = 14,
    CSPEC_GGML_I32 = 26,
    CSPEC_GGML_BF16 = 30,
};

enum {
    CSPEC_GGML_OP_NONE = 0,
    CSPEC_GGML_OP_ADD = 2,
    CSPEC_GGML_OP_MUL = 7,
    CSPEC_GGML_OP_RMS_NORM = 25,
    CSPEC_GGML_OP_MUL_MAT = 29,
    CSPEC_GGML_OP_MUL_MAT_ID = 30,
    CSPEC_GGML_OP_RESHAPE = 36, /* with the next three: nothing to compute */
    CSPEC_GGML_OP_TRANSPOSE = 39,
    CSPEC_GGML_OP_ROPE = 48,
    CSPEC_GGML_OP_FLASH_ATTN_EXT = 74,
};

struct cspec_ggml_buffer;

enum { CSPEC_GGML_FLAG_COMPUTE = 16 }; /* without it an operation is left out */

struct cspec_ggml_tensor {
    int32_t type;
    struct cspec_ggml_buffer *buffer; /* null for a view: then view_src's counts */
    int64_t ne[4];
    size_t nb[4];
    int32_t op;
    int32_t op_params[CSPEC_GGML_OP_PARAMS];
    int32_t flags;
    struct cspec_ggml_tensor *src[CSPEC_GGML_MAX_SRC];
    struct cspec_ggml_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[CSPEC_GGML_NAME];
    void *extra;
    char padding[8];
};

/* One per thread and graph: what is written into it stays for the graph's later operations. */
struct cspec_ggml_compute_params {
    int32_t ith; /* this thread, 0 to nth - 1 */
    int32_t nth;
    size_t wsize; /* bytes at wdata, shared by the threads */
    void *wdata;
    void *threadpool;
    bool use_ref;
};

struct cspec_ggml_type_traits_cpu {
    void (*from_float)(const float *x, void *y, int64_t n);
    void (*vec_dot)(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc);
    int32_t vec_dot_type;
    int64_t nrows; /* how many rows and columns vec_dot can take at a time */
};

struct cspec_ggml_type_traits {
    const char *type_name;
    int64_t blck_size;
    int64_t blck_size_interleave;
    size_t type_size;
    bool is_quantized;
    void (*to_float)(const void *x, float *y, int64_t n); /* null: float already */
    void (*from_float_ref)(const float *x, void *y, int64_t n);
};

struct cspec_ggml_buffer_type {
    const char *(*get_name)(struct cspec_ggml_buffer_type *buft);
    struct cspec_ggml_buffer *(*alloc_buffer)(struct cspec_ggml_buffer_type *buft, size_t size);
    size_t (*get_alignment)(struct cspec_ggml_buffer_type *buft);
    size_t (*get_max_size)(struct cspec_ggml_buffer_type *buft); /* may be null */
    size_t (*get_alloc_size)(struct cspec_ggml_buffer_type *buft, const struct cspec_ggml_tensor *tensor);
    bool (*is_host)(struct cspec_ggml_buffer_type *buft); /* may be null: false */
    void *device;
    void *context; /* an extra buffer type: the C++ object whose vtable follows */
};

/* The functions that nothing here calls or replaces have no type. */
struct cspec_ggml_buffer {
    void *free_buffer;
    void *get_base;
    int32_t (*init_tensor)(struct cspec_ggml_buffer *buffer, struct cspec_ggml_tensor *tensor);
    void *memset_tensor;
    void (*set_tensor)(struct cspec_ggml_buffer *buffer, struct cspec_ggml_tensor *tensor, const void *data,
                       size_t offset, size_t size);
    void *get_tensor;
    void *set_tensor_2d;
    void *get_tensor_2d;
    void *cpy_tensor;
    void *clear;
    void *reset;
    struct cspec_ggml_buffer_type *buft;
    void *context; /* of a CPU buffer: its memory */
    size_t size;
    int32_t usage;
};

/* libstdc++'s std::vector<ggml_backend_buffer_type_t>. */
struct cspec_ggml_buft_vector {
    struct cspec_ggml_buffer_type **begin, **end, **capacity;
};

/* Vtables of the Itanium C++ ABI. An object's first word points at `complete`; nothing here is ever deleted
 * through them. A word named `this_` is the object. */
struct cspec_ggml_extra_vtable {
    ptrdiff_t offset_to_top;
    const void *type_info;
    void (*complete)(void *this_);
    void (*deleting)(void *this_);
    bool (*supports_op)(void *this_, void *device, const struct cspec_ggml_tensor *op);
    void *(*get_tensor_traits)(void *this_, const struct cspec_ggml_tensor *op);
};

struct cspec_ggml_traits_vtable {
    ptrdiff_t offset_to_top;
    const void *type_info;
    void (*complete)(void *this_);
    void (*deleting)(void *this_);
    bool (*work_size)(void *this_, int n_threads, const struct cspec_ggml_tensor *op, size_t *size);
    bool (*compute_forward)(void *this_, struct cspec_ggml_compute_params *params,
                            struct cspec_ggml_tensor *op);
};

#endif
