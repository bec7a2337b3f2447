/* Where the last tokens of a text occurred before, and what followed them.
 *
 * A trie of contexts read backwards: from the root, each step adds the token one further to the left. Every
 * position of the text inserts its left context, so that a node has the number of positions with that context,
 * and the most recent of them. Steps without a branch are one edge, as in a suffix tree, so a position adds at
 * most two nodes; contexts are cut off at a fixed depth, so it takes a bounded number of steps.
 *
 * A context is never copied: a node's is found in the text, left of its most recent position. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cspec.h"

/* A context of depth tokens. On the edge above it lie those that are its right part, longer than its parent's,
 * which occur at the same positions. */
typedef struct {
    uint32_t parent;   /* its node, and */
    int32_t symbol;    /* the token that the step from there adds: the node's key */
    uint32_t depth;
    uint32_t count;    /* positions after it, of tokens and separators */
    uint32_t ends;     /* of them separators */
    uint32_t last;     /* the most recent of the tokens' positions, or a separator's if there is no token's */
} node;

struct cspec_ngram {
    uint32_t max_depth;
    int32_t *text;     /* [text_room], n_text of them used */
    size_t n_text, text_room;
    node *nodes;       /* [node_room], n_nodes of them used; the first is the root */
    size_t n_nodes, node_room;
    uint32_t *slots;   /* [n_slots] nodes hashed by their key, open addressing; 0: empty */
    size_t n_slots;    /* a power of two, at least twice n_nodes */
};

static inline uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* ---- memory ---------------------------------------------------------------------------------------- */

/* The slot of the child that symbol leads to, or the empty one where it would be. */
static uint32_t *find_slot(const cspec_ngram *index, uint32_t parent, int32_t symbol) {
    uint64_t key = (uint64_t)parent << 32 | (uint32_t)symbol;
    key = (key ^ key >> 29) * 0x9E3779B97F4A7C15u;
    key ^= key >> 32;
    for (size_t at = (size_t)key;; at++) {
        uint32_t *slot = &index->slots[at & (index->n_slots - 1)];
        const node *found = &index->nodes[*slot];
        if (*slot == 0 || (found->parent == parent && found->symbol == symbol)) {
            return slot;
        }
    }
}

static void fill_slots(cspec_ngram *index) {
    memset(index->slots, 0, index->n_slots * sizeof *index->slots);
    for (size_t i = 1; i < index->n_nodes; i++) {
        *find_slot(index, index->nodes[i].parent, index->nodes[i].symbol) = (uint32_t)i;
    }
}

/* Room for one more token and the two nodes that it may add. Where there is not enough memory the index stays
 * as it was. */
static int reserve(cspec_ngram *index) {
    if (index->n_text == INT32_MAX) {
        return CSPEC_NO_MEMORY;
    }
    if (index->n_text == index->text_room) {
        const size_t room = 2 * index->text_room;
        int32_t *text = realloc(index->text, room * sizeof *text);
        if (!text) {
            return CSPEC_NO_MEMORY;
        }
        index->text = text;
        index->text_room = room;
    }
    if (index->n_nodes + 2 > index->node_room) {
        const size_t room = 2 * index->node_room;
        node *nodes = realloc(index->nodes, room * sizeof *nodes);
        if (!nodes) {
            return CSPEC_NO_MEMORY;
        }
        index->nodes = nodes;
        index->node_room = room;
    }
    if (2 * (index->n_nodes + 2) > index->n_slots) {
        const size_t n_slots = 2 * index->n_slots;
        uint32_t *slots = malloc(n_slots * sizeof *slots);
        if (!slots) {
            return CSPEC_NO_MEMORY;
        }
        free(index->slots);
        index->slots = slots;
        index->n_slots = n_slots;
        fill_slots(index);
    }
    return CSPEC_OK;
}

static void clear(cspec_ngram *index) {
    index->n_text = 0;
    index->n_nodes = 1;
    index->nodes[0] = (node){0};
    fill_slots(index);
}

cspec_ngram *cspec_ngram_new(int32_t max_match) {
    enum { ROOM = 64 };
    cspec_ngram *index = calloc(1, sizeof *index);
    if (!index) {
        return NULL;
    }
    /* One more than is matched, so that a match and the token after it are a context too. */
    index->max_depth = (uint32_t)max_match + 1;
    index->text_room = index->node_room = ROOM;
    index->n_slots = 2 * ROOM;
    index->text = malloc(index->text_room * sizeof *index->text);
    index->nodes = malloc(index->node_room * sizeof *index->nodes);
    index->slots = malloc(index->n_slots * sizeof *index->slots);
    if (!index->text || !index->nodes || !index->slots) {
        cspec_ngram_free(index);
        return NULL;
    }
    clear(index);
    return index;
}

void cspec_ngram_free(cspec_ngram *index) {
    if (index) {
        free(index->text);
        free(index->nodes);
        free(index->slots);
        free(index);
    }
}

size_t cspec_ngram_length(const cspec_ngram *index) { return index->n_text; }

size_t cspec_ngram_bytes(const cspec_ngram *index) {
    return sizeof *index + index->text_room * sizeof *index->text + index->node_room * sizeof *index->nodes +
           index->n_slots * sizeof *index->slots;
}

/* ---- building -------------------------------------------------------------------------------------- */

static uint32_t add_node(cspec_ngram *index, uint32_t *slot, node added) {
    *slot = (uint32_t)index->n_nodes;
    index->nodes[index->n_nodes] = added;
    return (uint32_t)index->n_nodes++;
}

/* Cuts the edge above the node in slot, and returns the new node at the cut. */
static uint32_t split(cspec_ngram *index, uint32_t *slot, uint32_t depth) {
    const uint32_t lower = *slot;
    node upper = index->nodes[lower];
    upper.depth = depth;
    const uint32_t added = add_node(index, slot, upper);
    index->nodes[lower].parent = added;
    index->nodes[lower].symbol = index->text[upper.last - 1 - depth];
    *find_slot(index, added, index->nodes[lower].symbol) = lower;
    return added;
}

/* Tokens of the context left of a position: up to a separator, the text's beginning or the cut. */
static uint32_t context_depth(const cspec_ngram *index, size_t position) {
    uint32_t depth = 0;
    while (depth < index->max_depth && depth < position && index->text[position - 1 - depth] >= 0) {
        depth++;
    }
    return depth;
}

/* Inserts the context left of the text's last token or separator. */
static void insert_context(cspec_ngram *index) {
    const uint32_t position = (uint32_t)index->n_text - 1;
    const uint32_t is_end = index->text[position] < 0;
    const uint32_t whole = context_depth(index, position);
    const int32_t *left = index->text + position - 1;
    uint32_t at = 0;
    for (uint32_t depth = 0; depth < whole; depth = index->nodes[at].depth) {
        uint32_t *slot = find_slot(index, at, left[-(ptrdiff_t)depth]);
        if (*slot == 0) {
            add_node(index, slot, (node){at, left[-(ptrdiff_t)depth], whole, 1, is_end, position});
            return;
        }
        const node *child = &index->nodes[*slot];
        const int32_t *other = index->text + child->last - 1;
        const uint32_t end = smaller(child->depth, whole);
        do {
            depth++;
        } while (depth < end && left[-(ptrdiff_t)depth] == other[-(ptrdiff_t)depth]);
        at = depth < child->depth ? split(index, slot, depth) : *slot;
        node *passed = &index->nodes[at];
        passed->count++;
        passed->ends += is_end;
        passed->last = is_end ? passed->last : position;
    }
}

int cspec_ngram_push(cspec_ngram *index, const int32_t *tokens, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (reserve(index) != CSPEC_OK) {
            return CSPEC_NO_MEMORY;
        }
        index->text[index->n_text++] = tokens[i];
        insert_context(index);
    }
    return CSPEC_OK;
}

void cspec_ngram_truncate(cspec_ngram *index, size_t length) {
    if (length < index->n_text) {
        clear(index);
        while (index->n_text < length) {
            index->n_text++;
            insert_context(index);
        }
    }
}

/* ---- looking up ------------------------------------------------------------------------------------ */

/* A text to look up the end of: a tail, then tokens. */
typedef struct {
    const int32_t *tail;   /* [n_tail] */
    const int32_t *tokens; /* [n_tokens] */
    size_t n_tail, n_tokens;
} query;

/* The token that has depth others to its right; a separator before the beginning. */
static inline int32_t query_token(const query *text, size_t depth) {
    if (depth < text->n_tokens) {
        return text->tokens[text->n_tokens - 1 - depth];
    }
    depth -= text->n_tokens;
    return depth < text->n_tail ? text->tail[text->n_tail - 1 - depth] : -1;
}

typedef struct {
    uint32_t depth; /* tokens of the match */
    uint32_t count, ends, last;
} match;

/* The longest end of a text, of at most max_depth tokens, that some token follows in the index; with ends too, that
 * anything does. */
static match longest_match(const cspec_ngram *index, const query *text, uint32_t max_depth, bool with_ends) {
    match longest = {0};
    uint32_t at = 0;
    while (longest.depth < max_depth && query_token(text, longest.depth) >= 0) {
        at = *find_slot(index, at, query_token(text, longest.depth));
        const node *child = &index->nodes[at];
        if (at == 0 || (child->count == child->ends && !with_ends)) {
            break;
        }
        const int32_t *other = index->text + child->last - 1;
        const uint32_t end = smaller(child->depth, max_depth);
        uint32_t depth = longest.depth;
        do {
            depth++;
        } while (depth < end && query_token(text, depth) == other[-(ptrdiff_t)depth]);
        longest = (match){depth, child->count, child->ends, child->last};
        if (depth < child->depth) {
            break;
        }
    }
    return longest;
}

/* How often the last depth tokens of a text occur in the index. */
static int32_t occurrences(const cspec_ngram *index, const query *text, uint32_t depth) {
    const match found = longest_match(index, text, depth, true);
    uint32_t count = found.depth == depth ? found.count : 0;
    /* At the very end nothing follows yet. */
    uint32_t same = 0;
    while (same < depth && same < index->n_text &&
           index->text[index->n_text - 1 - same] == query_token(text, same)) {
        same++;
    }
    return (int32_t)(count + (same == depth));
}

int32_t cspec_ngram_continue(const cspec_ngram *index, const int32_t *tail, size_t n_tail, int32_t n,
                             int32_t min_match, int32_t *tokens, int32_t *matches, int32_t *followed,
                             int32_t *totals) {
    query text = {tail, tokens, n_tail, 0};
    int32_t found = 0;
    while (found < n) {
        const match longest = longest_match(index, &text, index->max_depth - 1, false);
        if (longest.depth == 0 || longest.depth < (uint32_t)min_match) {
            break;
        }
        tokens[found] = index->text[longest.last];
        matches[found] = (int32_t)longest.depth;
        totals[found] = (int32_t)(longest.count - longest.ends);
        text.n_tokens++;
        followed[found] = occurrences(index, &text, longest.depth + 1);
        found++;
    }
    return found;
}
