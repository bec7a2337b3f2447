/* Logits to probabilities, in the order of llama.cpp's default sampler chain.
 *
 * Top-k, top-p and min-p each keep a prefix of the tokens sorted by falling logit (a tie by rising id). The
 * prefix is found by radix selection on the logits' bits; nothing is ever sorted.
 *
 * Loops over a row work element by element or on LANES partial results folded in a fixed order, so that a
 * compiler may use vectors of any width and the results are still the same bits everywhere. */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "cspec.h"
#include "portable.h"

enum { LANES = 64 };

/* e^-88 is below FLT_MIN. */
#define NEGLIGIBLE (-88.0f)

static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static inline float greater(float a, float b) { return a > b ? a : b; }

/* e^x for x <= 0 within 2 units in the last place; zero below FLT_MIN.
 *
 * x = n ln 2 + r, |r| <= ln 2 / 2: adding 1.5 * 2^23 rounds to the integer n, and ln 2 is subtracted in two
 * parts, the first of few enough bits that its multiple is exact. e^r is its series to r^7. */
static inline float exp_negative(float x) {
    const float round_to_integer = 0x1.8p23f;
    const float ln2_high = 0x1.62E4p-1f, ln2_low = 0x1.7F7D1Cp-20f;
    const float bounded = x < NEGLIGIBLE ? NEGLIGIBLE : x;
    const float n = (bounded * 0x1.715476p0f + round_to_integer) - round_to_integer;
    const float r = (bounded - n * ln2_high) - n * ln2_low;
    float sum = 1.0f / 5040;
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 1.0f / 2;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const int32_t exponent = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &exponent, sizeof power);
    const float result = sum * power;
    return result < FLT_MIN ? 0.0f : result;
}

/* Maps a float to an integer of the same order; 0.0 and -0.0 to the same one. */
static inline uint32_t order_key(float x) {
    int32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return (uint32_t)(bits ^ (bits >> 31 | INT32_MIN));
}

static float logit_of_key(uint32_t key) {
    const uint32_t bits = key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu);
    float logit;
    memcpy(&logit, &bits, sizeof logit);
    return logit;
}

static inline double fold_sums(double *lane) {
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) {
            lane[l] += lane[l + half];
        }
    }
    return lane[0];
}

/* ---- the row before truncation ------------------------------------------------------------------- */

/* Sets the logits that are not allowed to -inf. Returns whether one of them was above it. */
CSPEC_CLONES
static bool bar(float *row, size_t n_vocab, const uint32_t *allowed) {
    uint32_t any = 0;
    for (size_t i = 0; i < n_vocab; i += 32) {
        const size_t width = smaller(32, n_vocab - i);
        const uint32_t word = allowed[i / 32];
        for (uint32_t l = 0; l < width; l++) {
            const uint32_t in = word >> l & 1;
            any |= (in ^ 1) & (row[i + l] > -INFINITY);
            row[i + l] = in ? row[i + l] : -INFINITY;
        }
    }
    return any;
}

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
    for (size_t j = 0; j < n_seen; j++) {
        if (ids[j] >= 0 && (size_t)ids[j] < n_vocab && counts[j] > 0) {
            float logit = row[ids[j]];
            logit = logit <= 0.0f ? logit * repeat : logit / repeat;
            row[ids[j]] = logit - ((float)counts[j] * frequency + presence);
        }
    }
}

/* The largest logit of the row, or NaN if one is NaN. */
CSPEC_CLONES
static float largest_of(const float *row, size_t n) {
    float lane[LANES];
    for (size_t l = 0; l < LANES; l++) {
        lane[l] = -INFINITY;
    }
    for (size_t i = 0; i < n; i += LANES) {
        const size_t width = smaller(LANES, n - i);
        for (size_t l = 0; l < width; l++) {
            const float logit = row[i + l];
            /* Once NaN, a lane stays NaN: no comparison with it is true. */
            lane[l] = lane[l] >= logit ? lane[l] : lane[l] != lane[l] ? lane[l] : logit;
        }
    }
    float largest = -INFINITY;
    for (size_t l = 0; l < LANES; l++) {
        if (lane[l] != lane[l]) {
            return NAN;
        }
        largest = greater(largest, lane[l]);
    }
    return largest;
}

static void make_one_hot(float *row, size_t n_vocab, float largest) {
    size_t choice = 0;
    while (row[choice] != largest) {
        choice++;
    }
    memset(row, 0, n_vocab * sizeof *row);
    row[choice] = 1.0f;
}

/* ---- truncation: a token is dropped by setting its logit to -inf ---------------------------------- */

static inline bool any_at_least(const float *row, size_t n, float threshold) {
    int32_t any = 0;
    for (size_t i = 0; i < n; i++) {
        any |= row[i] >= threshold;
    }
    return any;
}

/* Drops the logits below the threshold, and of those equal to it all but the first `ties`. */
CSPEC_CLONES
static void drop_below(float *row, size_t n_vocab, float threshold, size_t ties) {
    for (size_t i = 0; i < n_vocab; i += LANES) {
        const size_t width = smaller(LANES, n_vocab - i);
        int32_t tied = 0;
        for (size_t l = 0; l < width; l++) {
            tied |= row[i + l] == threshold;
            row[i + l] = row[i + l] >= threshold ? row[i + l] : -INFINITY;
        }
        for (size_t l = 0; tied && l < width; l++) {
            if (row[i + l] == threshold) {
                row[i + l] = ties > 0 ? threshold : -INFINITY;
                ties -= ties > 0;
            }
        }
    }
}

/* Sum of e^(logit - largest). */
CSPEC_CLONES
static double mass_of(const float *row, size_t n_vocab, float largest) {
    double lane[LANES] = {0.0};
    for (size_t i = 0; i < n_vocab; i += LANES) {
        const size_t width = smaller(LANES, n_vocab - i);
        if (any_at_least(row + i, width, largest + NEGLIGIBLE)) {
            for (size_t l = 0; l < width; l++) {
                lane[l] += (double)exp_negative(row[i + l] - largest);
            }
        }
    }
    return fold_sums(lane);
}

/* What a selection goes by: a token weighs one, or e^(logit - largest). Logits below the floor are known
 * not to be selected. */
typedef struct {
    bool by_mass;
    float largest;
    float floor;
} measure;

/* Adds the weights of the tokens whose key agrees with `prefix` on the bits `known` to the bins of the bits
 * that follow. */
CSPEC_CLONES
static void fill_bins(const float *row, size_t n_vocab, const measure *by, uint32_t prefix, uint32_t known,
                      int shift, double *bins) {
    for (size_t i = 0; i < n_vocab; i += LANES) {
        const size_t width = smaller(LANES, n_vocab - i);
        uint32_t key[LANES];
        float weight[LANES];
        int32_t any = 0;
        for (size_t l = 0; l < width; l++) {
            key[l] = order_key(row[i + l]);
            const bool counts = ((key[l] & known) == prefix) & (row[i + l] >= by->floor);
            any |= counts;
            weight[l] = counts ? 1.0f : 0.0f;
        }
        if (!any) {
            continue;
        }
        if (by->by_mass) {
            for (size_t l = 0; l < width; l++) {
                weight[l] *= exp_negative(row[i + l] - by->largest);
            }
        }
        size_t n = 0;
        for (size_t l = 0; l < width; l++) {
            key[n] = (key[l] & ~known) >> shift;
            weight[n] = weight[l];
            n += weight[l] > 0.0f;
        }
        for (size_t j = 0; j < n; j++) {
            bins[key[j]] += (double)weight[j];
        }
    }
}

/* Keeps the shortest prefix, by falling logit, whose weight reaches the goal; all if none does. */
static void keep_until(float *row, size_t n_vocab, const measure *by, double goal) {
    enum { BINS = 1 << 13 };
    static const int shifts[] = {19, 9, 0};
    uint32_t key = 0, known = 0; /* of the last token kept, as far as known */
    double above = 0.0;          /* weight of the tokens above it */
    for (int level = 0; level < 3; level++) {
        double bins[BINS] = {0.0};
        fill_bins(row, n_vocab, by, key, known, shifts[level], bins);
        uint32_t bin = ~known >> shifts[level];
        while (bin > 0 && above + bins[bin] < goal) {
            above += bins[bin--];
        }
        /* Later, the bins are parts of one that reaches the goal, and fall short of it by rounding only. */
        if (level == 0 && above + bins[bin] < goal) {
            return;
        }
        key |= bin << shifts[level];
        known = ~0u << shifts[level];
    }
    const float logit = logit_of_key(key);
    const double weight = by->by_mass ? (double)exp_negative(logit - by->largest) : 1.0;
    drop_below(row, n_vocab, logit, (size_t)fmin(ceil((goal - above) / weight), (double)n_vocab));
}

/* A logit that at least k tokens reach: the k-th largest of groups' largest. Far fewer tokens than the vocabulary
 * reach it, unless it is sorted. A group is every LANES-th token of a stretch, so that vectors find its largest; many
 * groups leave k of them where most of the row is -inf. */
CSPEC_CLONES
static float reached_by(const float *row, size_t n_vocab, size_t k) {
    enum { STRETCHES = 16, GROUPS = STRETCHES * LANES };
    const size_t stretch = (n_vocab / GROUPS + 1) * LANES;
    float largest[GROUPS];
    uint32_t key[GROUPS], reached = 0;
    for (size_t g = 0; g < GROUPS; g++) {
        largest[g] = -INFINITY;
    }
    for (size_t i = 0; i < n_vocab; i += LANES) {
        float *lane = largest + i / stretch * LANES;
        const size_t width = smaller(LANES, n_vocab - i);
        for (size_t l = 0; l < width; l++) {
            lane[l] = greater(lane[l], row[i + l]);
        }
    }
    for (size_t g = 0; g < GROUPS; g++) {
        key[g] = order_key(largest[g]);
    }
    for (uint32_t bit = 1u << 31; bit > 0; bit >>= 1) {
        uint32_t n = 0;
        for (size_t g = 0; g < GROUPS; g++) {
            n += key[g] >= (reached | bit);
        }
        reached |= n >= k ? bit : 0;
    }
    return k <= GROUPS ? logit_of_key(reached) : -INFINITY;
}

static void keep_top_k(float *row, size_t n_vocab, size_t k) {
    /* What has been dropped already is no candidate. */
    const measure by = {.by_mass = false, .floor = greater(reached_by(row, n_vocab, k), -FLT_MAX)};
    keep_until(row, n_vocab, &by, (double)k);
}

/* Tokens of less than (1 - top_p) / n_vocab of the mass have less than 1 - top_p of it together, so none of
 * them is needed. The floor is lowered by more than its own rounding. */
static void keep_top_p(float *row, size_t n_vocab, float largest, double mass, double top_p) {
    const double needless = 0.99 * (1.0 - top_p) * mass / (double)n_vocab;
    const float floor = nextafterf(largest + (float)log(needless), -INFINITY);
    const measure by = {.by_mass = true, .largest = largest, .floor = floor};
    keep_until(row, n_vocab, &by, top_p * mass);
}

static void truncate_row(float *row, size_t n_vocab, float largest, const cspec_sampling *sampling) {
    if (sampling->top_k > 0 && (size_t)sampling->top_k < n_vocab) {
        keep_top_k(row, n_vocab, (size_t)sampling->top_k);
    }
    const double mass = sampling->top_p < 1.0 ? mass_of(row, n_vocab, largest) : 0.0;
    /* Each of the two keeps a prefix, so their order is free once top-p's mass is known. Min-p is the faster
     * and leaves top-p little to select from. */
    if (sampling->min_p > 0.0) {
        drop_below(row, n_vocab, largest + logf((float)sampling->min_p), n_vocab);
    }
    if (sampling->top_p < 1.0) {
        keep_top_p(row, n_vocab, largest, mass, sampling->top_p);
    }
}

/* ---- temperature and normalisation ---------------------------------------------------------------- */

CSPEC_CLONES
static void normalise(float *row, size_t n_vocab, float largest, float temperature) {
    double lane[LANES] = {0.0};
    for (size_t i = 0; i < n_vocab; i += LANES) {
        const size_t width = smaller(LANES, n_vocab - i);
        if (!any_at_least(row + i, width, largest + NEGLIGIBLE * temperature)) {
            memset(row + i, 0, width * sizeof *row);
            continue;
        }
        for (size_t l = 0; l < width; l++) {
            row[i + l] = exp_negative((row[i + l] - largest) / temperature);
            lane[l] += (double)row[i + l];
        }
    }
    const double inverse = 1.0 / fold_sums(lane);
    for (size_t i = 0; i < n_vocab; i++) {
        const float probability = (float)(row[i] * inverse);
        row[i] = probability < FLT_MIN ? 0.0f : probability;
    }
}

int cspec_probabilities(const float *logits, float *probs, size_t n_vocab, const cspec_sampling *sampling,
                        const int32_t *seen_ids, const int32_t *seen_counts, size_t n_seen,
                        const int32_t *bias_ids, const float *bias, size_t n_bias, const uint32_t *allowed) {
    memmove(probs, logits, n_vocab * sizeof *probs);
    const bool barred = allowed && bar(probs, n_vocab, allowed);
    add_bias(probs, n_vocab, bias_ids, bias, n_bias);
    penalise(probs, n_vocab, sampling, seen_ids, seen_counts, n_seen);
    const float largest = largest_of(probs, n_vocab);
    if (!isfinite(largest)) {
        return isnan(largest) ? CSPEC_NAN : largest > 0.0f ? CSPEC_INF : barred ? CSPEC_BARRED : CSPEC_EMPTY;
    }
    if (sampling->temperature == 0.0) {
        make_one_hot(probs, n_vocab, largest);
        return CSPEC_OK;
    }
    truncate_row(probs, n_vocab, largest, sampling);
    const float temperature = fminf(fmaxf((float)sampling->temperature, FLT_MIN), FLT_MAX);
    normalise(probs, n_vocab, largest, temperature);
    return CSPEC_OK;
}

double cspec_softmax_of(const float *logits, size_t n_vocab, int32_t id) {
    const float largest = largest_of(logits, n_vocab);
    return isfinite(largest) ? exp((double)logits[id] - largest) / mass_of(logits, n_vocab, largest) : 0.0;
}
