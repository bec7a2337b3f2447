/* Runs every function of the library over random and awkward inputs, for the sanitizers to watch. Arrays have
 * exactly the documented lengths, on the heap, so that one element too far is seen. */
#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cspec.h"

enum { GAMMA = 3 };

static const size_t SIZES[] = {1, 2, 63, 64, 65, 127, 200, 1000};
static const double LAST = 1.0 - 0x1p-53; /* the greatest u that exists */

static uint64_t calls;

static double uniform(void) { return cspec_uniform(1, 0, calls++, 0); }

static int pick(int n) { return (int)(uniform() * n); }

static float pick_logit(int kind) {
    static const float odd[] = {0.0f,     -0.0f,    1.0f,      -1.0f, FLT_MIN, 1e-45f,
                                -FLT_MAX, FLT_MAX, -INFINITY, -1e6f, 1e6f,    INFINITY, NAN};
    switch (kind) {
    case 0: return (float)(20 * uniform() - 10);
    case 1: return (float)pick(3);
    case 2: return odd[pick(11)]; /* those from which a distribution follows */
    default: return odd[pick(13)];
    }
}

static float *make_logits(size_t n_vocab, int kind) {
    float *row = malloc(n_vocab * sizeof *row);
    for (size_t i = 0; i < n_vocab; i++) {
        row[i] = pick_logit(kind);
    }
    return row;
}

static cspec_sampling pick_sampling(void) {
    static const double temperatures[] = {0.0, 1.0, 0.3, 5.0, 1e-300, 1e300};
    static const int32_t top_ks[] = {0, -1, 1, 2, 64, 999, INT32_MAX};
    static const double top_ps[] = {1.0, 0.95, 0.5, 1e-300};
    static const double min_ps[] = {0.0, 0.05, 1.0, 1e-300};
    static const double penalties[] = {1.0, 1.3, 0.5, 1e30};
    return (cspec_sampling){
        .temperature = temperatures[pick(6)],
        .top_k = top_ks[pick(7)],
        .top_p = top_ps[pick(4)],
        .min_p = min_ps[pick(4)],
        .repeat_penalty = penalties[pick(4)],
        .frequency_penalty = pick(2) * 0.5,
        .presence_penalty = pick(2) * -0.5,
    };
}

static void check_probabilities(size_t n_vocab) {
    const int32_t ids[] = {-1, 0, (int32_t)n_vocab - 1, (int32_t)n_vocab, INT32_MAX, INT32_MIN};
    const int32_t counts[] = {1, 2, 1000, 1, 1, 1};
    const float bias[] = {1.0f, -INFINITY, 2.0f, 3.0f, 4.0f, 5.0f};
    const cspec_sampling sampling = pick_sampling();
    float *logits = make_logits(n_vocab, pick(4));
    float *probs = malloc(n_vocab * sizeof *probs);
    const size_t n_seen = (size_t)pick(7), n_bias = (size_t)pick(7);
    uint32_t *allowed = malloc((n_vocab + 31) / 32 * sizeof *allowed);
    for (size_t i = 0; i < (n_vocab + 31) / 32; i++) {
        allowed[i] = pick(2) ? (uint32_t)(uniform() * 0x1p32) : 0;
    }
    const uint32_t *mask = pick(2) ? allowed : NULL;
    int status =
        cspec_probabilities(logits, probs, n_vocab, &sampling, ids, counts, n_seen, ids, bias, n_bias, mask);
    double sum = 0.0;
    for (size_t i = 0; status == CSPEC_OK && i < n_vocab; i++) {
        assert(probs[i] == 0.0f || probs[i] >= FLT_MIN);
        assert(probs[i] == 0.0f || !mask || (mask[i / 32] >> i % 32 & 1));
        sum += probs[i];
    }
    assert(status != CSPEC_OK || fabs(sum - 1.0) < 1e-6);
    const double share = cspec_softmax_of(logits, n_vocab, pick((int)n_vocab));
    assert(share >= 0.0 && share <= 1.0);
    free(logits);
    free(probs);
    free(allowed);
}

static float *make_distribution(size_t n_vocab) {
    const cspec_sampling sampling = {pick(4) ? 1.0 : 0.0, pick(2) * 2, 1.0, 0.0, 1.0, 0.0, 0.0};
    float *row = make_logits(n_vocab, pick(3));
    if (cspec_probabilities(row, row, n_vocab, &sampling, NULL, NULL, 0, NULL, NULL, 0, NULL) != CSPEC_OK) {
        for (size_t i = 0; i < n_vocab; i++) {
            row[i] = i == 0;
        }
    }
    return row;
}

static double pick_u(void) { return pick(2) ? uniform() : pick(2) ? 0.0 : LAST; }

static void check_token(const float *row, size_t n_vocab, int32_t token) {
    assert(token >= 0 && (size_t)token < n_vocab && row[token] > 0.0f);
}

static void check_verification(size_t n_vocab) {
    float *p[GAMMA + 1], *q[GAMMA];
    int32_t drafted[GAMMA];
    double u_accept[GAMMA], a[GAMMA + 1], b[GAMMA + 1];
    int32_t token;
    const int32_t gamma = pick(GAMMA + 1);
    for (int i = 0; i <= GAMMA; i++) {
        p[i] = make_distribution(n_vocab);
    }
    for (int i = 0; i < GAMMA; i++) {
        q[i] = pick(4) ? make_distribution(n_vocab) : NULL;
        drafted[i] = q[i] && pick(4) ? cspec_draw(q[i], NULL, 1.0, n_vocab, pick_u()) : pick((int)n_vocab);
        u_accept[i] = pick_u();
    }
    const float *const *rows_p = (const float *const *)p, *const *rows_q = (const float *const *)q;

    int32_t t = cspec_verify_token(rows_p, rows_q, drafted, gamma, n_vocab, u_accept, pick_u(), &token);
    check_token(p[t], n_vocab, token);
    t = cspec_verify_block(rows_p, rows_q, drafted, gamma, n_vocab, u_accept, pick_u(), &token);
    check_token(p[t], n_vocab, token);
    cspec_block_thresholds(rows_p, rows_q, drafted, gamma, n_vocab, a, b);
    for (int i = 0; i <= gamma; i++) {
        assert(a[i] >= 0.0 && a[i] <= 1.0 && b[i] >= 0.0 && b[i] <= 1.0);
    }
    t = cspec_verify_coupled(rows_p, drafted, gamma, n_vocab, calls, UINT64_MAX - 1, &token);
    check_token(p[t], n_vocab, token);
    if (q[0]) {
        check_token(p[0], n_vocab, cspec_draw(p[0], q[0], uniform(), n_vocab, pick_u()));
    }
    for (int i = 0; i <= GAMMA; i++) {
        free(p[i]);
    }
    for (int i = 0; i < GAMMA; i++) {
        free(q[i]);
    }
}

int main(void) {
    for (size_t s = 0; s < sizeof SIZES / sizeof *SIZES; s++) {
        for (int repeat = 0; repeat < 400; repeat++) {
            check_probabilities(SIZES[s]);
            check_verification(SIZES[s]);
        }
    }
    puts("done");
    return 0;
}
