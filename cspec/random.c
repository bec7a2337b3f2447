/* Random numbers as a pure function of what they are for: seed, stream, round and index.
 *
 * Philox 4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. */
#include "cspec.h"
#include "philox.h"

void cspec_philox(const uint32_t *counter, const uint32_t *key, uint32_t *out) {
    philox_block block = {counter[0], counter[1], counter[2], counter[3]};
    block = philox(block, key[0], key[1]);
    out[0] = block.word0;
    out[1] = block.word1;
    out[2] = block.word2;
    out[3] = block.word3;
}

double cspec_uniform(uint64_t seed, uint32_t stream, uint64_t round, uint32_t index) {
    philox_block block = {(uint32_t)round, (uint32_t)(round >> 32), index, stream};
    block = philox(block, (uint32_t)seed, (uint32_t)(seed >> 32));
    uint64_t bits = (uint64_t)block.word0 << 32 | block.word1;
    return (double)(bits >> 11) * 0x1p-53;
}
