/* What the machine can do at most, as bench/limits.py measures it: reading memory, and multiply-adds of 8-bit
 * integers in registers. Each in as many threads as asked for, begun together.
 *
 * The loops are plain: wide loads and several independent accumulators, so that what bounds them is the memory, or
 * the unit that multiplies, and not a chain of dependent operations. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 64 };
enum { AVX2, AVX512_VNNI, AMX };

struct part {
    const unsigned char *bytes; /* [size], a multiple of 1024 and aligned to 64 */
    size_t size;
    int64_t rounds;
    int level, number;
    uint64_t sum; /* so that nothing is left out */
    pthread_barrier_t *barrier;
};

__attribute__((target("avx2"))) static uint64_t read_all(const unsigned char *bytes, size_t size)
{
    __m256i a[8] = {0};
    for (size_t i = 0; i < size; i += sizeof a) {
        for (size_t j = 0; j < 8; j++) {
            a[j] = _mm256_add_epi64(a[j], _mm256_load_si256((const __m256i *)(const void *)(bytes + i) + j));
        }
    }
    for (size_t j = 1; j < 8; j++) {
        a[0] = _mm256_add_epi64(a[0], a[j]);
    }
    return (uint64_t)_mm256_extract_epi64(a[0], 0) + (uint64_t)_mm256_extract_epi64(a[0], 1) +
           (uint64_t)_mm256_extract_epi64(a[0], 2) + (uint64_t)_mm256_extract_epi64(a[0], 3);
}

/* 16 * 64 multiply-adds a round. The empty assembly keeps the compiler from merging what is equal. */
__attribute__((target("avx512f,avx512vnni"))) static uint64_t multiply_avx512(int64_t rounds)
{
    __m512i a[16], x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(5);
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) {
        a[j] = _mm512_set1_epi32(j);
    }
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) {
            __asm__("" : "+v"(a[j]));
            a[j] = _mm512_dpbusd_epi32(a[j], x, y);
        }
    }
    uint64_t sum = 0;
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) {
        sum += (uint32_t)_mm512_reduce_add_epi32(a[j]);
    }
    return sum;
}

/* The same with what AVX2 has: products of bytes added in pairs, kept in 16 bits. A kernel has to widen them too. */
__attribute__((target("avx2"))) static uint64_t multiply_avx2(int64_t rounds)
{
    __m256i a[8], x = _mm256_set1_epi8(3), y = _mm256_set1_epi8(5);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        a[j] = _mm256_set1_epi16((short)j);
    }
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            __asm__("" : "+x"(y));
            a[j] = _mm256_add_epi16(a[j], _mm256_maddubs_epi16(x, y));
        }
    }
    uint64_t sum = 0;
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        sum += (uint64_t)_mm256_extract_epi64(a[j], 0);
    }
    return sum;
}

/* 4 * 16 * 16 * 64 multiply-adds a round, in whole tiles of zeros. */
static uint64_t multiply_amx(int64_t rounds)
{
    struct {
        uint8_t palette, unused[15];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
    for (int64_t i = 0; i < rounds; i++) {
        __asm__ volatile("tdpbusd %tmm4, %tmm6, %tmm0\n\ttdpbusd %tmm5, %tmm6, %tmm1\n\t"
                         "tdpbusd %tmm4, %tmm7, %tmm2\n\ttdpbusd %tmm5, %tmm7, %tmm3");
    }
    __asm__ volatile("tilerelease");
    return 0;
}

/* A CPU of its own for each thread: two that wake together may stay on one for as long as this takes. */
static void stay_on_one_cpu(int number)
{
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        return;
    }
    int left = number % CPU_COUNT(&allowed);
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed) && left-- == 0) {
            CPU_SET(cpu, &one);
        }
    }
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
}

static void *work(void *argument)
{
    struct part *part = argument;
    stay_on_one_cpu(part->number);
    pthread_barrier_wait(part->barrier);
    if (part->bytes != NULL) {
        part->sum = read_all(part->bytes, part->size);
    } else {
        part->sum = part->level == AMX           ? multiply_amx(part->rounds)
                    : part->level == AVX512_VNNI ? multiply_avx512(part->rounds)
                                                 : multiply_avx2(part->rounds);
    }
    return NULL;
}

/* The seconds that the parts take together, or a negative number if there are no threads to be had. */
static double run(struct part *parts, int threads)
{
    pthread_barrier_t barrier;
    pthread_t ids[MOST_THREADS];
    struct timespec start, end;
    pthread_barrier_init(&barrier, NULL, (unsigned)threads + 1);
    for (int i = 0; i < threads; i++) {
        parts[i].barrier = &barrier;
        parts[i].number = i;
        if (pthread_create(&ids[i], NULL, work, &parts[i]) != 0) {
            return -1; /* those that wait at the barrier end with the process */
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &start);
    pthread_barrier_wait(&barrier);
    for (int i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    pthread_barrier_destroy(&barrier);
    return (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
}

/* Memory of `size` bytes, all of it present, in large pages where there are any; null if there is not enough. */
unsigned char *limits_memory(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
    madvise(memory, size, MADV_HUGEPAGE);
    memset(memory, 1, size);
    return memory;
}

/* Bytes a second at which threads read a share each of `size` bytes. */
double limits_read(const unsigned char *bytes, size_t size, int threads)
{
    struct part parts[MOST_THREADS] = {0};
    const size_t share = size / (size_t)threads / 1024 * 1024;
    for (int i = 0; i < threads; i++) {
        parts[i] = (struct part){.bytes = bytes + (size_t)i * share, .size = share};
    }
    return (double)(share * (size_t)threads) / run(parts, threads);
}

/* Multiply-adds a second that threads do with an instruction set. */
double limits_multiply(int level, int threads)
{
    struct part parts[MOST_THREADS] = {0};
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    const int64_t rounds = 1 << 20;
    if (level == AMX && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) != 0) {
        return 0;
    }
    for (int i = 0; i < threads; i++) {
        parts[i] = (struct part){.rounds = rounds, .level = level};
    }
    const double each = level == AMX ? 4 * 16 * 16 * 64 : level == AVX512_VNNI ? 16 * 64 : 8 * 32;
    return (double)rounds * each * threads / run(parts, threads);
}
