/* Philox 4x32-10 on values, so that a loop over counters can be vectorised. */
#ifndef CSPEC_PHILOX_H
#define CSPEC_PHILOX_H

#include <stdint.h>

typedef struct {
    uint32_t word0, word1, word2, word3;
} philox_block;

/* The multipliers and the key's increments are those of the paper's table 2. */
static inline philox_block philox_round(philox_block counter, uint32_t key0, uint32_t key1, uint32_t round) {
    const uint64_t product0 = (uint64_t)0xD2511F53u * counter.word0;
    const uint64_t product1 = (uint64_t)0xCD9E8D57u * counter.word2;
    return (philox_block){
        (uint32_t)(product1 >> 32) ^ counter.word1 ^ (key0 + round * 0x9E3779B9u),
        (uint32_t)product1,
        (uint32_t)(product0 >> 32) ^ counter.word3 ^ (key1 + round * 0xBB67AE85u),
        (uint32_t)product0,
    };
}

static inline philox_block philox(philox_block counter, uint32_t key0, uint32_t key1) {
    for (uint32_t round = 0; round < 10; round++) {
        counter = philox_round(counter, key0, key1, round);
    }
    return counter;
}

#endif
