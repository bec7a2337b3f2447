/* Which drafted tokens are kept, and what follows them. */
#include <math.h>

#include "cspec.h"
#include "philox.h"

/* ---- drawing --------------------------------------------------------------------------------------- */

/* What is left of p once q is taken from it: max(scale * p - q, 0), where q is a row [n_vocab], or if that
 * is null the one-hot row of an id, or for the id -1 zero. */
typedef struct {
    const float *p;
    const float *q;
    int32_t one_hot;
    double scale;
} residual;

static inline double weight_of(const residual *rest, size_t i) {
    double taken = rest->q ? rest->q[i] : (size_t)rest->one_hot == i ? 1.0 : 0.0;
    double weight = rest->scale * rest->p[i] - taken;
    return weight > 0.0 ? weight : 0.0;
}

static double mass_of(const residual *rest, size_t n_vocab) {
    double mass = 0.0;
    for (size_t i = 0; i < n_vocab; i++) {
        mass += weight_of(rest, i);
    }
    return mass;
}

static int32_t draw(const residual *rest, size_t n_vocab, double u) {
    double mass = mass_of(rest, n_vocab);
    if (!(mass > 0.0)) {
        residual whole = {rest->p, NULL, -1, 1.0};
        return rest->q || rest->one_hot >= 0 ? draw(&whole, n_vocab, u) : -1;
    }
    double goal = u * mass, sum = 0.0;
    int32_t last = -1;
    for (size_t i = 0; i < n_vocab; i++) {
        double weight = weight_of(rest, i);
        if (weight > 0.0) {
            last = (int32_t)i;
            sum += weight;
            if (sum > goal) {
                break;
            }
        }
    }
    return last;
}

int32_t cspec_draw(const float *p, const float *q, double scale, size_t n_vocab, double u) {
    residual rest = {p, q, -1, scale};
    return draw(&rest, n_vocab, u);
}

/* ---- token and block ------------------------------------------------------------------------------- */

/* q_i(x_i); a row that is missing is one-hot at the drafted token. */
static double drafted_q(const float *const *q, const int32_t *drafted, int32_t i) {
    return q[i] ? q[i][drafted[i]] : 1.0;
}

/* The residual after t accepted tokens, 0 <= t <= gamma. */
static residual residual_after(const float *const *p, const float *const *q, const int32_t *drafted,
                               int32_t gamma, int32_t t, double scale) {
    if (t == gamma) {
        return (residual){p[t], NULL, -1, 1.0};
    }
    return (residual){p[t], q[t], q[t] ? -1 : drafted[t], scale};
}

int32_t cspec_verify_token(const float *const *p, const float *const *q, const int32_t *drafted,
                           int32_t gamma, size_t n_vocab, const double *u_accept, double u_draw,
                           int32_t *token) {
    int32_t t = 0;
    while (t < gamma && u_accept[t] * drafted_q(q, drafted, t) < p[t][drafted[t]]) {
        t++;
    }
    residual rest = residual_after(p, q, drafted, gamma, t, 1.0);
    *token = draw(&rest, n_vocab, u_draw);
    return t;
}

/* a_t: the probability that at least t drafted tokens are accepted, given them. */
static double block_product(const float *const *p, const float *const *q, const int32_t *drafted, int32_t t) {
    double a = 1.0;
    for (int32_t i = 0; i < t; i++) {
        double left = a * p[i][drafted[i]];
        double taken = drafted_q(q, drafted, i);
        a = left <= 0.0 ? 0.0 : left >= taken ? 1.0 : left / taken;
    }
    return a;
}

/* b_t: the probability of stopping no earlier than at t, given that no longer prefix is accepted. */
static double block_threshold(const float *const *p, const float *const *q, const int32_t *drafted,
                              int32_t gamma, size_t n_vocab, int32_t t) {
    double a = block_product(p, q, drafted, t);
    if (t == gamma || a == 0.0 || a == 1.0) {
        return a;
    }
    residual rest = residual_after(p, q, drafted, gamma, t, a);
    double mass = mass_of(&rest, n_vocab);
    return mass / (mass + 1.0 - a);
}

void cspec_block_thresholds(const float *const *p, const float *const *q, const int32_t *drafted,
                            int32_t gamma, size_t n_vocab, double *a, double *b) {
    for (int32_t t = 0; t <= gamma; t++) {
        a[t] = block_product(p, q, drafted, t);
        b[t] = block_threshold(p, q, drafted, gamma, n_vocab, t);
    }
}

int32_t cspec_verify_block(const float *const *p, const float *const *q, const int32_t *drafted,
                           int32_t gamma, size_t n_vocab, const double *u_accept, double u_draw,
                           int32_t *token) {
    int32_t t = gamma;
    while (t > 0 && u_accept[t - 1] >= block_threshold(p, q, drafted, gamma, n_vocab, t)) {
        t--;
    }
    residual rest = residual_after(p, q, drafted, gamma, t, block_product(p, q, drafted, t));
    *token = draw(&rest, n_vocab, u_draw);
    return t;
}

/* ---- coupled --------------------------------------------------------------------------------------- */

/* In (0, 1): one of 2^52 values at the middle of their intervals, so that its logarithm is finite. */
static double open_uniform(uint32_t high, uint32_t low) {
    uint64_t bits = (uint64_t)high << 32 | low;
    return ((double)(bits >> 12) + 0.5) * 0x1p-52;
}

int32_t cspec_coupled_choice(const float *p, size_t n_vocab, uint64_t seed, uint64_t position) {
    double best = INFINITY;
    int32_t choice = -1;
    for (size_t i = 0; i < n_vocab; i++) {
        philox_block block = {(uint32_t)position, (uint32_t)(position >> 32), (uint32_t)(i / 2),
                              CSPEC_STREAM_GUMBEL};
        block = philox(block, (uint32_t)seed, (uint32_t)(seed >> 32));
        double v = i % 2 == 0 ? open_uniform(block.word0, block.word1)
                              : open_uniform(block.word2, block.word3);
        if (p[i] > 0.0f && v < best * p[i]) {
            double arrival = -log1p(-v) / p[i];
            if (arrival < best) {
                best = arrival;
                choice = (int32_t)i;
            }
        }
    }
    return choice;
}

int32_t cspec_verify_coupled(const float *const *p, const int32_t *drafted, int32_t gamma, size_t n_vocab,
                             uint64_t seed, uint64_t position, int32_t *token) {
    int32_t t = 0;
    for (;; t++) {
        *token = cspec_coupled_choice(p[t], n_vocab, seed, position + (uint64_t)t);
        if (t == gamma || *token != drafted[t]) {
            return t;
        }
    }
}
