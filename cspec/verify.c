/* Which drafted tokens are kept, and what follows them.
 *
 * An accepting probability is compared as u < probability: u is in [0, 1), so that zero never accepts and
 * one always does. */
#include <math.h>
#include <string.h>

#include "cspec.h"
#include "philox.h"
#include "portable.h"

/* Rows are summed in blocks folded in a fixed order, so that sums do not depend on the width of a vector. */
enum { BLOCK = 64 };

static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* ---- drawing --------------------------------------------------------------------------------------- */

/* What is left of p once q is taken from it: max(scale * p - q, 0). */
typedef struct {
    const float *p;  /* [n_vocab] */
    const float *q;  /* [n_vocab], or null for */
    int32_t one_hot; /* the one-hot row of this id, or for -1 the zero row */
    double scale;    /* in [0, 1] */
    size_t n_vocab;
} residual;

/* The weights of the block of ids that starts at first; beyond the vocabulary they are zero. */
static inline void fill_weights(const residual *rest, size_t first, double *weight) {
    const size_t width = smaller(BLOCK, rest->n_vocab - first);
    const float *p = rest->p + first;
    if (rest->q) {
        const float *q = rest->q + first;
        for (size_t l = 0; l < width; l++) {
            const double left = rest->scale * p[l] - q[l];
            weight[l] = left > 0.0 ? left : 0.0;
        }
    } else {
        for (size_t l = 0; l < width; l++) {
            weight[l] = rest->scale * p[l];
        }
        if (rest->one_hot >= 0 && (size_t)rest->one_hot - first < width) {
            weight[(size_t)rest->one_hot - first] = 0.0;
        }
    }
    for (size_t l = width; l < BLOCK; l++) {
        weight[l] = 0.0;
    }
}

static inline double mass_of_block(const residual *rest, size_t first) {
    double weight[BLOCK];
    fill_weights(rest, first, weight);
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) {
            weight[l] += weight[l + half];
        }
    }
    return weight[0];
}

CSPEC_CLONES
static double mass_of(const residual *rest) {
    double mass = 0.0;
    for (size_t first = 0; first < rest->n_vocab; first += BLOCK) {
        mass += mass_of_block(rest, first);
    }
    return mass;
}

/* The first block at whose end the mass exceeds the goal; the last one of any mass if rounding leaves none.
 * before: out, the mass of the blocks before it. */
CSPEC_CLONES
static size_t find_block(const residual *rest, double goal, double *before) {
    double mass = 0.0;
    size_t found = 0;
    *before = 0.0;
    for (size_t first = 0; first < rest->n_vocab && mass <= goal; first += BLOCK) {
        const double added = mass_of_block(rest, first);
        if (added > 0.0) {
            found = first;
            *before = mass;
            mass += added;
        }
    }
    return found;
}

static int32_t draw(const residual *rest, double u) {
    const double mass = mass_of(rest);
    if (mass <= 0.0) {
        const residual whole = {rest->p, NULL, -1, 1.0, rest->n_vocab};
        return rest->q || rest->one_hot >= 0 ? draw(&whole, u) : -1;
    }
    double sum;
    double weight[BLOCK];
    const size_t first = find_block(rest, u * mass, &sum);
    fill_weights(rest, first, weight);
    int32_t id = -1;
    for (size_t l = 0; l < BLOCK && (id < 0 || sum <= u * mass); l++) {
        if (weight[l] > 0.0) {
            id = (int32_t)(first + l);
            sum += weight[l];
        }
    }
    return id;
}

int32_t cspec_draw(const float *p, const float *q, double scale, size_t n_vocab, double u) {
    const residual rest = {p, q, -1, scale, n_vocab};
    return draw(&rest, u);
}

/* ---- token and block ------------------------------------------------------------------------------- */

/* q_i(x_i); a row that is missing is one-hot at the drafted token. */
static double drafted_q(const float *const *q, const int32_t *drafted, int32_t i) {
    return q[i] ? q[i][drafted[i]] : 1.0;
}

/* What the next token is drawn from after t accepted ones, 0 <= t <= gamma. */
static residual residual_after(const float *const *p, const float *const *q, const int32_t *drafted,
                               int32_t gamma, size_t n_vocab, int32_t t, double scale) {
    if (t == gamma) {
        return (residual){p[t], NULL, -1, 1.0, n_vocab};
    }
    return (residual){p[t], q[t], q[t] ? -1 : drafted[t], scale, n_vocab};
}

int32_t cspec_verify_token(const float *const *p, const float *const *q, const int32_t *drafted,
                           int32_t gamma, size_t n_vocab, const double *u_accept, double u_draw,
                           int32_t *token) {
    int32_t t = 0;
    while (t < gamma && u_accept[t] * drafted_q(q, drafted, t) < p[t][drafted[t]]) {
        t++;
    }
    const residual rest = residual_after(p, q, drafted, gamma, n_vocab, t, 1.0);
    *token = draw(&rest, u_draw);
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
    const residual rest = residual_after(p, q, drafted, gamma, n_vocab, t, a);
    const double mass = mass_of(&rest);
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
    const double a = block_product(p, q, drafted, t);
    const residual rest = residual_after(p, q, drafted, gamma, n_vocab, t, a);
    *token = draw(&rest, u_draw);
    return t;
}

/* ---- coupled --------------------------------------------------------------------------------------- */

/* In (0, 1): the middle of one of 2^52 intervals, so that no logarithm of it is infinite. The random bits
 * are written into the fraction of a number in [1, 2), which vectorises where a conversion does not. */
static inline double open_uniform(uint32_t high, uint32_t low) {
    const uint64_t bits = 0x3FF0000000000000u | ((uint64_t)high << 32 | low) >> 12;
    double in_1_to_2;
    memcpy(&in_1_to_2, &bits, sizeof in_1_to_2);
    return (in_1_to_2 - 1.0) + 0x1p-53;
}

/* The noise of the block of ids that starts at first; two ids share a Philox counter. */
static inline void fill_noise(uint64_t seed, uint64_t position, size_t first, double *noise) {
    enum { HALF = BLOCK / 2 };
    uint32_t word0[HALF], word1[HALF], word2[HALF], word3[HALF];
    for (uint32_t j = 0; j < HALF; j++) {
        word0[j] = (uint32_t)position;
        word1[j] = (uint32_t)(position >> 32);
        word2[j] = (uint32_t)first / 2 + j;
        word3[j] = CSPEC_STREAM_GUMBEL;
    }
    for (uint32_t round = 0; round < 10; round++) {
        for (uint32_t j = 0; j < HALF; j++) {
            philox_block block = {word0[j], word1[j], word2[j], word3[j]};
            block = philox_round(block, (uint32_t)seed, (uint32_t)(seed >> 32), round);
            word0[j] = block.word0;
            word1[j] = block.word1;
            word2[j] = block.word2;
            word3[j] = block.word3;
        }
    }
    for (uint32_t j = 0; j < HALF; j++) {
        noise[2 * j] = open_uniform(word0[j], word1[j]);
        noise[2 * j + 1] = open_uniform(word2[j], word3[j]);
    }
}

/* Argmax of log p + Gumbel noise, as a race: the id of the first arrival, where an id's arrival time is
 * -log(1 - noise) / p, exponential of rate p. Since -log(1 - noise) > noise, few logarithms are needed. */
CSPEC_CLONES
int32_t cspec_coupled_choice(const float *p, size_t n_vocab, uint64_t seed, uint64_t position) {
    double earliest = INFINITY;
    int32_t choice = -1;
    for (size_t first = 0; first < n_vocab; first += BLOCK) {
        const size_t width = smaller(BLOCK, n_vocab - first);
        double noise[BLOCK];
        int32_t any = 0;
        for (size_t l = 0; l < width; l++) {
            any |= p[first + l] > 0.0f;
        }
        if (!any) {
            continue;
        }
        fill_noise(seed, position, first, noise);
        any = 0;
        for (size_t l = 0; l < width; l++) {
            any |= noise[l] < earliest * p[first + l];
        }
        for (size_t l = 0; any && l < width; l++) {
            /* Of p == 0 the product is zero or NaN, and the comparison false. */
            if (noise[l] < earliest * p[first + l]) {
                const double arrival = -log1p(-noise[l]) / p[first + l];
                if (arrival < earliest) {
                    earliest = arrival;
                    choice = (int32_t)(first + l);
                }
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
