/* Philox 4x32-10 on values, so that a loop over counters can be vectorised. */
#ifndef CSPEC_PHILOX_H
#define CSPEC_PHILOX_H

#include <stdint.h>

typedef struct {
    uint32_t word0, word1, word2, word3;
} philox_block;

/* The multipliers and the key's increments (golden ratio, sqrt(3) - 1) are those of the paper's table. */
static inline philox_block philox(philox_block counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * counter.word0;
        uint64_t product1 = (uint64_t)0xCD9E8D57u * counter.word2;
        counter = (philox_block){
            (uint32_t)(product1 >> 32) ^ counter.word1 ^ key0,
            (uint32_t)product1,
            (uint32_t)(product0 >> 32) ^ counter.word3 ^ key1,
            (uint32_t)product0,
        };
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

#endif
