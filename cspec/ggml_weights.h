/* Weights in the layout of matmul/, as a buffer type of ggml's: what the bridge's entry in the list of extra
 * buffer types does about memory and about products with such weights. */
#ifndef CSPEC_GGML_WEIGHTS_H
#define CSPEC_GGML_WEIGHTS_H

#include "ggml_bridge.h"

/* Whether ggml may put an operation's weights here, and compute it from there. */
bool weights_supports(const struct cspec_ggml_tensor *op);

/* Whether op is a product with weights that are here. Nobody else can compute it. */
bool weights_has(const struct cspec_ggml_tensor *op);

/* Of every operation of a graph, in order, while it is planned; and, harmlessly, while it is computed. */
void weights_see(const struct cspec_ggml_tensor *op);

/* While a graph is planned, after weights_see. */
size_t weights_work_size(int32_t n_threads, struct cspec_ggml_tensor *op);

/* Returns whether the activations were those that an earlier product had quantised. */
bool weights_compute(const struct cspec_ggml_compute_params *params, struct cspec_ggml_tensor *op);

/* The memory of the bridge's entry. */
struct cspec_ggml_buffer *weights_alloc_buffer(struct cspec_ggml_buffer_type *buft, size_t size);
size_t weights_get_alloc_size(struct cspec_ggml_buffer_type *buft, const struct cspec_ggml_tensor *tensor);

/* Finds ggml's functions in a loaded library, and compares what is relied upon. Returns why it is not to be relied
 * upon, or null. */
const char *weights_attach(void *library, struct cspec_ggml_buffer_type *entry);

/* The instruction set of the products that follow; MATMUL_OFF: nothing new comes here. */
void weights_set_level(int32_t level);

/* Which panels of an output matrix of n_rows rows are computed by the passes that follow; panels null: all. */
void weights_shortlist(const int32_t *panels, int64_t n_panels, int64_t n_rows);

/* Whether models are loaded into this buffer type, and no other extra one. */
void weights_offer(bool on);

#endif
