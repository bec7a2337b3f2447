/* ggml's public functions, as found in the libraries that are already loaded, and ways to look at memory before
 * it is touched. */
#ifndef CSPEC_GGML_FUNCTIONS_H
#define CSPEC_GGML_FUNCTIONS_H

#include "ggml_bridge.h"

typedef struct cspec_ggml_tensor tensor;
typedef struct cspec_ggml_compute_params compute_params;
typedef struct cspec_ggml_buffer_type buffer_type;
typedef struct cspec_ggml_buft_vector buft_vector;

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
struct ggml_functions {
    GGML_FUNCTIONS(MEMBER)
};
#undef MEMBER

/* Filled by ggml_resolve. */
extern struct ggml_functions ggml;

/* Finds them all, as the dynamic linker does for the library itself: what the program has put in front (a preloaded
 * allocator's operator new) comes first. Returns the first name that is missing, or null. */
const char *ggml_resolve(void *library);

/* Whether size bytes at address can be read: the kernel says so instead of a signal. */
bool readable(const void *address, size_t size);

/* Whether both addresses belong to the same loaded library. */
bool same_library(const void *one, const void *other);

/* A function's address, as data. */
const void *code(void (*function)(void));
#define CODE(function) code((void (*)(void))(function))

#endif
