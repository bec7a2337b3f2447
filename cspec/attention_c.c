/* Attention in plain C. Where the compiler's target has fused multiply-add (any 64-bit Arm) its loops become
 * vector instructions; elsewhere fmaf is a call, slow, and only good to compare with. */
#include "attention.h"

#include <math.h>
#include <string.h>

#define TARGET
#define FOR_LANES for (int l = 0; l < ATTENTION_LANES; l++)
#define LANE_BY_LANE(expression)                                                                      \
    {                                                                                                 \
        vec result;                                                                                   \
        FOR_LANES                                                                                     \
        {                                                                                             \
            result.lane[l] = expression;                                                              \
        }                                                                                             \
        return result;                                                                                \
    }

typedef struct {
    float lane[ATTENTION_LANES];
} vec;

static inline float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of_half(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00) { /* infinity or not a number */
        return float_of_bits(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    }
    /* The exponent is 112 too small; as a factor this is right for subnormal numbers too. */
    return float_of_bits(sign | bits_of_float(float_of_bits(rest << 13) * 0x1p112f));
}

#define fetch(from) __builtin_prefetch(from)

static inline vec load(const float *from)
{
    vec a;
    memcpy(a.lane, from, sizeof a.lane);
    return a;
}

static inline void store(float *to, vec a)
{
    memcpy(to, a.lane, sizeof a.lane);
}

static inline vec load_half(const uint16_t *from) LANE_BY_LANE(float_of_half(from[l]))
static inline vec broadcast(float x) LANE_BY_LANE(x)
static inline vec add(vec a, vec b) LANE_BY_LANE(a.lane[l] + b.lane[l])
static inline vec sub(vec a, vec b) LANE_BY_LANE(a.lane[l] - b.lane[l])
static inline vec mul(vec a, vec b) LANE_BY_LANE(a.lane[l] * b.lane[l])
static inline vec quotient(vec a, vec b) LANE_BY_LANE(a.lane[l] / b.lane[l])
static inline vec fused(vec a, vec b, vec c) LANE_BY_LANE(fmaf(a.lane[l], b.lane[l], c.lane[l]))
static inline vec larger(vec a, vec b) LANE_BY_LANE(a.lane[l] > b.lane[l] ? a.lane[l] : b.lane[l])
static inline vec choose(uint32_t bits, vec a, vec b) LANE_BY_LANE(bits >> l & 1 ? a.lane[l] : b.lane[l])
static inline vec power_of_two(vec shifted) LANE_BY_LANE(float_of_bits((bits_of_float(shifted.lane[l]) + 127) << 23))

static inline uint32_t less(vec a, vec b)
{
    uint32_t bits = 0;
    FOR_LANES
    {
        bits |= (uint32_t)(a.lane[l] < b.lane[l]) << l;
    }
    return bits;
}

static inline void store_transposed(const vec *rows, float *out, int64_t stride)
{
    for (int i = 0; i < ATTENTION_LANES; i++) {
        FOR_LANES
        {
            out[i * stride + l] = rows[l].lane[i];
        }
    }
}

enum { DOT_ROWS = 4, DOT_VECS = 1, SUM_ROWS = 4, SUM_VECS = 1 };

#include "attention_kernels.h"

const attention_kernels *const cspec_attention_c = &kernels;
