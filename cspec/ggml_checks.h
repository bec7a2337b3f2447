/* What the bridge tests before it is relied upon: that structures are laid out as declared, that ggml calls it as
 * declared, and that attention and products through it are right and the same bits at every width. Each check returns
 * what is wrong, or null. ggml_resolve must have succeeded. */
#ifndef CSPEC_GGML_CHECKS_H
#define CSPEC_GGML_CHECKS_H

#include "ggml_functions.h"

#include <stdatomic.h>

/* What the hook saw of one expected operation while probing. */
struct bridge_probe {
    const tensor *op;
    struct graph_plan plan;
    atomic_int asked;   /* get_tensor_traits with this op */
    atomic_int sized;   /* work_size with this op and the plan's number of threads */
    atomic_int nth;     /* threads that computed; OpenMP may give fewer than the plan wants */
    atomic_int threads; /* a bit for every thread whose compute_forward had the expected params */
    atomic_int wrong;   /* calls with anything else */
};
extern struct bridge_probe probe;

/* Whether tensors are laid out as declared. */
const char *check_tensors(void);

/* What the other checks compute with, to be freed by the caller; null without memory for it. */
struct check_material;
struct check_material *new_check_material(void);

/* While the hook fills the probe: whether it is called as declared. */
const char *check_calls(struct check_material *m);

/* While the hook is active. */
const char *check_attention(struct check_material *m);
const char *check_products(struct check_material *m);

/* Products with weights that a buffer of this type has packed. */
const char *check_packed(struct check_material *m, buffer_type *packed);

#endif
