/* Runs the suffix index over random texts, with allocations that fail, for the sanitizers to watch. Linked with
 * --wrap for malloc, calloc and realloc. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cspec.h"

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *old, size_t size);

static int allocations_left = -1; /* until one fails; below zero: none does */

static int fails(void) { return allocations_left >= 0 && allocations_left-- == 0; }

void *__wrap_malloc(size_t size) { return fails() ? NULL : __real_malloc(size); }

void *__wrap_calloc(size_t n, size_t size) { return fails() ? NULL : __real_calloc(n, size); }

void *__wrap_realloc(void *old, size_t size) { return fails() ? NULL : __real_realloc(old, size); }

static uint64_t calls;

static int pick(int n) { return (int)(cspec_uniform(2, 0, calls++, 0) * n); }

/* On the heap and exactly as long as documented, so that one element too far is seen. */
static int32_t *make_text(size_t n, int n_ids) {
    int32_t *text = __real_malloc((n ? n : 1) * sizeof *text);
    for (size_t i = 0; i < n; i++) {
        text[i] = pick(12) ? pick(n_ids) : -1 - pick(2);
    }
    return text;
}

static void check_proposal(const cspec_ngram *index, int32_t max_match) {
    const size_t n_tail = (size_t)pick(20);
    const int32_t n = pick(10), min_match = 1 + pick(3);
    int32_t *tail = make_text(n_tail, 3), *out[4];
    for (int i = 0; i < 4; i++) {
        out[i] = make_text((size_t)n, 3);
    }
    const int32_t found = cspec_ngram_continue(index, tail, n_tail, n, min_match, out[0], out[1], out[2], out[3]);
    assert(found >= 0 && found <= n);
    for (int32_t i = 0; i < found; i++) {
        assert(out[0][i] >= 0 && out[1][i] >= min_match && out[1][i] <= max_match);
        assert(out[2][i] >= 1 && out[2][i] <= out[3][i]);
    }
    for (int i = 0; i < 4; i++) {
        free(out[i]);
    }
    free(tail);
}

static void check_index(void) {
    const int32_t max_match = 1 + pick(9);
    allocations_left = pick(2) ? pick(20) : -1;
    cspec_ngram *index = cspec_ngram_new(max_match);
    for (int step = 0; index && step < 20; step++) {
        const size_t n = (size_t)pick(60), before = cspec_ngram_length(index);
        int32_t *text = make_text(n, 1 + pick(4));
        const int status = cspec_ngram_push(index, text, n);
        free(text);
        assert(status == CSPEC_OK || allocations_left == -1);
        assert(status == CSPEC_OK ? cspec_ngram_length(index) == before + n : status == CSPEC_NO_MEMORY);
        assert(cspec_ngram_length(index) <= before + n);
        check_proposal(index, max_match);
        if (pick(4) == 0) {
            const size_t length = (size_t)pick((int)before + 70);
            cspec_ngram_truncate(index, length);
            assert(cspec_ngram_length(index) <= length || length >= before);
            check_proposal(index, max_match);
        }
    }
    cspec_ngram_free(index);
    allocations_left = -1;
}

int main(void) {
    for (int repeat = 0; repeat < 600; repeat++) {
        check_index();
    }
    puts("done");
    return 0;
}
