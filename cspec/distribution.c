/* Logits to probabilities, in the order of llama.cpp's default sampler chain.
 *
 * Top-k, top-p and min-p each keep a prefix of the tokens sorted by falling logit (a tie by rising id). The
 * prefix is found by radix selection on the logits' bits; nothing is ever sorted. */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "cspec.h"

/* e^x for x <= 0, zero below FLT_MIN. */
static float exp_negative(float x) { return x < -87.3f ? 0.0f : expf(x); }

/* Maps a float to an integer of the same order; 0.0 and -0.0 to the same one. */
static uint32_t order_key(float x) {
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

/* ---- the row before truncation ------------------------------------------------------------------- */

static void add_bias(float *row, size_t n_vocab, const int32_t *ids, const float *bias, size_t n_bias) {
    for (size_t j = 0; j < n_bias; j++) {
        if (ids[j] >= 0 && (size_t)ids[j] < n_vocab) {
            row[ids[j]] += bias[j];
        }
    }
}

static void penalise(float *row, size_t n_vocab, const cspec_sampling *sampling, const int32_t *ids,
                     const int32_t *counts, size_t n_seen) {
    /* In float, as llama.cpp does, so that near-ties at temperature 0 fall the same way. */
    const float repeat = (float)sampling->repeat_penalty;
    const float frequency = (float)sampling->frequency_penalty;
    const float presence = (float)sampling->presence_penalty;
    if (repeat == 1.0f && frequency == 0.0f && presence == 0.0f) {
        return;
    }
    for (size_t j = 0; j < n_seen; j++) {
        if (ids[j] >= 0 && (size_t)ids[j] < n_vocab && counts[j] > 0) {
            float logit = row[ids[j]];
            logit = logit <= 0.0f ? logit * repeat : logit / repeat;
            row[ids[j]] = logit - ((float)counts[j] * frequency + presence);
        }
    }
}

static int find_largest(const float *row, size_t n_vocab, float *largest) {
    *largest = -INFINITY;
    for (size_t i = 0; i < n_vocab; i++) {
        if (isnan(row[i])) {
            return CSPEC_NAN;
        }
        if (row[i] > *largest) {
            *largest = row[i];
        }
    }
    return *largest == INFINITY ? CSPEC_INF : *largest == -INFINITY ? CSPEC_EMPTY : CSPEC_OK;
}

static void make_one_hot(float *row, size_t n_vocab, float largest) {
    size_t choice = 0;
    while (row[choice] != largest) {
        choice++;
    }
    memset(row, 0, n_vocab * sizeof *row);
    row[choice] = 1.0f;
}

/* ---- truncation: ids [n] are the tokens still kept, rising ---------------------------------------- */

static double mass_of(const float *row, float largest, const int32_t *ids, size_t n) {
    double mass = 0.0;
    for (size_t j = 0; j < n; j++) {
        mass += exp_negative(row[ids[j]] - largest);
    }
    return mass;
}

static size_t keep_at_least(const float *row, float threshold, int32_t *ids, size_t n) {
    size_t kept = 0;
    for (size_t j = 0; j < n; j++) {
        if (row[ids[j]] >= threshold) {
            ids[kept++] = ids[j];
        }
    }
    return kept;
}

/* Keeps the shortest prefix, by falling logit, whose weight reaches the goal; all if none does. A token
 * weighs one, or e^(logit - largest). */
static size_t keep_until(const float *row, float largest, bool by_mass, double goal, int32_t *ids, size_t n) {
    static const int shifts[3] = {21, 10, 0};
    uint32_t last = 0; /* key of the last token kept, as far as known */
    double above = 0.0; /* weight of the tokens above it */
    for (int level = 0; level < 3; level++) {
        double weight[2048] = {0.0};
        const int shift = shifts[level];
        const uint32_t known = level == 0 ? 0 : ~0u << shifts[level - 1];
        size_t kept = 0;
        for (size_t j = 0; j < n; j++) {
            uint32_t key = order_key(row[ids[j]]);
            if (key < last) {
                continue;
            }
            ids[kept++] = ids[j];
            if ((key & known) == last) {
                weight[(key & ~known) >> shift] += by_mass ? exp_negative(row[ids[j]] - largest) : 1.0;
            }
        }
        n = kept;
        uint32_t bin = level == 2 ? 1023 : 2047;
        for (; bin > 0 && above + weight[bin] < goal; bin--) {
            above += weight[bin];
        }
        last |= bin << shift;
    }
    size_t kept = 0;
    for (size_t j = 0; j < n; j++) {
        uint32_t key = order_key(row[ids[j]]);
        if (key > last || (key == last && above < goal)) {
            if (key == last) {
                above += by_mass ? exp_negative(row[ids[j]] - largest) : 1.0;
            }
            ids[kept++] = ids[j];
        }
    }
    return kept;
}

static size_t truncate_row(const float *row, size_t n_vocab, float largest, const cspec_sampling *sampling,
                           int32_t *ids) {
    size_t n = n_vocab;
    for (size_t i = 0; i < n; i++) {
        ids[i] = (int32_t)i;
    }
    if (sampling->top_k > 0 && (size_t)sampling->top_k < n) {
        n = keep_until(row, largest, false, sampling->top_k, ids, n);
    }
    if (sampling->top_p < 1.0) {
        n = keep_until(row, largest, true, sampling->top_p * mass_of(row, largest, ids, n), ids, n);
    }
    if (sampling->min_p > 0.0) {
        n = keep_at_least(row, largest + logf((float)sampling->min_p), ids, n);
    }
    return n;
}

/* ---- temperature and normalisation ---------------------------------------------------------------- */

static void normalise(float *row, size_t n_vocab, float largest, double temperature, const int32_t *ids,
                      size_t n) {
    const float divisor = fminf(fmaxf((float)temperature, FLT_MIN), FLT_MAX);
    double mass = 0.0;
    for (size_t j = 0; j < n; j++) {
        row[ids[j]] = exp_negative((row[ids[j]] - largest) / divisor);
        mass += row[ids[j]];
    }
    size_t next = 0;
    for (size_t i = 0; i < n_vocab; i++) {
        if (next < n && (size_t)ids[next] == i) {
            float probability = (float)(row[i] / mass);
            row[i] = probability < FLT_MIN ? 0.0f : probability;
            next++;
        } else {
            row[i] = 0.0f;
        }
    }
}

int cspec_probabilities(const float *logits, float *probs, size_t n_vocab, const cspec_sampling *sampling,
                        const int32_t *seen_ids, const int32_t *seen_counts, size_t n_seen,
                        const int32_t *bias_ids, const float *bias, size_t n_bias, int32_t *scratch) {
    float largest;
    memmove(probs, logits, n_vocab * sizeof *probs);
    add_bias(probs, n_vocab, bias_ids, bias, n_bias);
    penalise(probs, n_vocab, sampling, seen_ids, seen_counts, n_seen);
    int status = find_largest(probs, n_vocab, &largest);
    if (status != CSPEC_OK) {
        return status;
    }
    if (sampling->temperature == 0.0) {
        make_one_hot(probs, n_vocab, largest);
        return CSPEC_OK;
    }
    size_t n = truncate_row(probs, n_vocab, largest, sampling, scratch);
    normalise(probs, n_vocab, largest, sampling->temperature, scratch, n);
    return CSPEC_OK;
}
