/* cspec: the mathematics of speculative decoding over full vocabularies.
 *
 * Every function that Python may call is declared here; cspec/build.py hands this file to cffi as it is.
 * Rows are arrays of n_vocab floats. No function of distributions and rules allocates, keeps state or draws a
 * random number of its own: random numbers are arguments, made by cspec_uniform. Sums are accumulated in double.
 */
#ifndef CSPEC_H
#define CSPEC_H

#include <stddef.h>
#include <stdint.h>

/* ---- status ------------------------------------------------------------------------------------- */

enum {
    CSPEC_OK = 0,
    CSPEC_NAN = 1,   /* a logit is NaN */
    CSPEC_INF = 2,   /* a logit is +inf: no distribution follows from it */
    CSPEC_EMPTY = 3, /* every logit is -inf: nothing can be drawn */
    CSPEC_NO_MEMORY = 4,
    CSPEC_BARRED = 5, /* every allowed logit is -inf, and one that is not allowed is greater */
};

/* ---- random numbers (random.c) ------------------------------------------------------------------ */

/* One stream per purpose, so that no two decisions ever share a random number. */
enum {
    CSPEC_STREAM_DRAFT = 0,  /* drawing a token from q_i */
    CSPEC_STREAM_ACCEPT = 1, /* accepting a drafted token */
    CSPEC_STREAM_TARGET = 2, /* the round's last token: from the residual, or from p */
    CSPEC_STREAM_GUMBEL = 3, /* the noise of a token at a position, shared by draft and target */
};

/* Philox 4x32-10 (Salmon et al., SC 2011). counter: [4], key: [2], out: [4]. */
void cspec_philox(const uint32_t *counter, const uint32_t *key, uint32_t *out);

/* A double in [0, 1) with 53 random bits, a function of its arguments alone. */
double cspec_uniform(uint64_t seed, uint32_t stream, uint64_t round, uint32_t index);

/* ---- logits to probabilities (distribution.c) ---------------------------------------------------- */

typedef struct {
    double temperature;       /* >= 0; 0 is greedy: one-hot at the largest logit, lowest id of a tie */
    int32_t top_k;            /* <= 0: off */
    double top_p;             /* in (0, 1]; 1: off */
    double min_p;             /* in [0, 1]; 0: off */
    double repeat_penalty;    /* > 0; 1: off */
    double frequency_penalty; /* 0: off */
    double presence_penalty;  /* 0: off */
} cspec_sampling;

/* Turns a row of logits into the distribution that the settings mean, in the order of llama.cpp's default
 * sampler chain: logit bias, penalties, top-k, top-p, min-p, temperature. Tokens that are not allowed are out
 * before all of them.
 *
 *   logits       [n_vocab]
 *   probs        [n_vocab] out; may be logits itself
 *   seen_ids     [n_seen] the distinct ids in the penalty window; ids outside [0, n_vocab) are passed over
 *   seen_counts  [n_seen] how often each occurs there
 *   bias_ids     [n_bias], bias [n_bias]: added to the logits; ids outside [0, n_vocab) are passed over
 *   allowed      [(n_vocab + 31) / 32] bit id % 32 of word id / 32 says whether id is allowed; null: all are.
 *                What the logits of others are makes no difference, NaN included, but for CSPEC_BARRED
 *
 * Probabilities below FLT_MIN are zero. Returns a status; on any but CSPEC_OK probs is unspecified. */
int cspec_probabilities(const float *logits, float *probs, size_t n_vocab, const cspec_sampling *sampling,
                        const int32_t *seen_ids, const int32_t *seen_counts, size_t n_seen,
                        const int32_t *bias_ids, const float *bias, size_t n_bias, const uint32_t *allowed);

/* The probability of one id at temperature 1, with nothing else applied; 0 where no distribution follows.
 *
 *   logits  [n_vocab] */
double cspec_softmax_of(const float *logits, size_t n_vocab, int32_t id);

/* ---- verification (verify.c) ----------------------------------------------------------------------
 *
 * Shapes that every rule shares:
 *
 *   p         [gamma + 1] rows [n_vocab]: the target's distributions
 *   q         [gamma] rows [n_vocab]: what each drafted token was drawn from; a null row is one-hot at it
 *   drafted   [gamma] ids
 *   u_accept  [gamma] in [0, 1), u_draw in [0, 1)
 *   token     out: the token after the accepted ones
 *
 * Each returns how many drafted tokens are accepted, 0 to gamma. */

/* Draws an id from normalise(max(scale * p - q, 0)) by inversion of u in [0, 1); q may be null for zero.
 * Only an id of positive weight is returned. Where no weight is positive (p == q up to rounding) it draws
 * from p; where p is zero too it returns -1.
 *
 *   p, q  [n_vocab] */
int32_t cspec_draw(const float *p, const float *q, double scale, size_t n_vocab, double u);

/* The token rule (Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding",
 * ICML 2023, algorithm 1). */
int32_t cspec_verify_token(const float *const *p, const float *const *q, const int32_t *drafted,
                           int32_t gamma, size_t n_vocab, const double *u_accept, double u_draw,
                           int32_t *token);

/* The block rule (Sun et al., "Block Verification Accelerates Speculative Decoding", 2024).
 * It accepts at least as many tokens as the token rule on average. u_accept[i] belongs to drafted[i];
 * every one of them is needed, whatever the others decide. */
int32_t cspec_verify_block(const float *const *p, const float *const *q, const int32_t *drafted,
                           int32_t gamma, size_t n_vocab, const double *u_accept, double u_draw,
                           int32_t *token);

/* What the block rule decides by. The number of accepted tokens is the largest t with t == 0 or
 * u_accept[t - 1] < b[t]. Given the first t drafted ids, and averaged over those drawn after them, it is at
 * least t with probability a[t].
 *
 *   a, b  [gamma + 1] out; a[0] and b[0] are 1 */
void cspec_block_thresholds(const float *const *p, const float *const *q, const int32_t *drafted,
                            int32_t gamma, size_t n_vocab, double *a, double *b);

/* The id that maximises log p + Gumbel noise, never one with p == 0; -1 where all are. The noise depends
 * on (seed, position, id) alone, so a draft and a target of similar distributions mostly choose alike.
 *
 *   p         [n_vocab]
 *   position  absolute, of the token that is chosen */
int32_t cspec_coupled_choice(const float *p, size_t n_vocab, uint64_t seed, uint64_t position);

/* The coupled rule: the target makes its own choice at each position, starting at position, and a drafted
 * token is accepted where it is that choice. What is emitted depends on the target and the seed alone. */
int32_t cspec_verify_coupled(const float *const *p, const int32_t *drafted, int32_t gamma, size_t n_vocab,
                             uint64_t seed, uint64_t position, int32_t *token);

/* ---- suffix index (ngram.c) -----------------------------------------------------------------------
 *
 * Where the last tokens of a text occurred before, and what followed them. The text holds ids >= 0 and separators
 * < 0, which match nothing and are never proposed. */

typedef struct cspec_ngram cspec_ngram;

/* An index over an empty text, or null if there is not enough memory. max_match: in tokens, from 1 to 2^20; longer
 * matches count as this long. */
cspec_ngram *cspec_ngram_new(int32_t max_match);

/* index may be null. */
void cspec_ngram_free(cspec_ngram *index);

/* Adds tokens [n] to the text, each in at most max_match steps and at most two nodes of memory. On
 * CSPEC_NO_MEMORY it has the first of them, as many as cspec_ngram_length says. */
int cspec_ngram_push(cspec_ngram *index, const int32_t *tokens, size_t n);

/* Tokens and separators of the text. */
size_t cspec_ngram_length(const cspec_ngram *index);

/* Bytes that it holds. */
size_t cspec_ngram_bytes(const cspec_ngram *index);

/* Cuts the text to its first length tokens. The index is built again in the memory that it has, which takes as
 * long as pushing them did. */
void cspec_ngram_truncate(cspec_ngram *index, size_t length);

/* Proposes what may follow tail, which need not be the end of the text. Each token is the one that followed the
 * most recent occurrence of the longest end, of at most max_match tokens, of tail and the tokens proposed before
 * it that any token followed; none is proposed where that is shorter than min_match.
 *
 *   tail      [n_tail]
 *   tokens    [n] out
 *   matches   [n] out, the length of that end
 *   followed  [n] out, how often it was followed by this token, and
 *   totals    [n] out, by any
 *
 * Returns how many are proposed. */
int32_t cspec_ngram_continue(const cspec_ngram *index, const int32_t *tail, size_t n_tail, int32_t n,
                             int32_t min_match, int32_t *tokens, int32_t *matches, int32_t *followed,
                             int32_t *totals);

/* ---- abort (abort.c) ------------------------------------------------------------------------------ */

/* llama.cpp's abort callback: whether a pass is to end early. flag: [1] int32_t, non-zero to end it. */
_Bool cspec_abort_requested(void *flag);

/* llama.cpp's progress callback: whether loading a model is to go on. progress: 0 to 1; flag: as above. */
_Bool cspec_load_wanted(float progress, void *flag);

/* ---- attention (attention.c) ---------------------------------------------------------------------- */

/* Sets of instructions for the kernels. All give the same bits. */
enum {
    CSPEC_KERNELS_OFF = 0,
    CSPEC_KERNELS_C = 1,
    CSPEC_KERNELS_AVX2 = 2,
    CSPEC_KERNELS_AVX512 = 4, /* numbered as CSPEC_MATMUL_* */
};

/* out = softmax(scale Q K' + slope mask) V, for grouped heads: head h takes K and V of its group's. Strides are in
 * bytes, between [0] tokens or cells, [1] heads, [2] sequences; a row is contiguous. */
typedef struct {
    int32_t kernels;          /* CSPEC_KERNELS_* */
    int64_t n_tokens, n_heads, n_kv_heads, n_cells, n_sequences;
    int64_t k_size, v_size;   /* elements of a head: multiples of 16, at most 576 */
    const char *q;            /* float */
    const char *k, *v;        /* IEEE half precision, or what the next two convert */
    void (*k_to_float)(const void *row, float *out, int64_t n); /* null: half precision */
    void (*v_to_float)(const void *row, float *out, int64_t n);
    const char *mask;         /* half precision, [n_tokens][n_cells], -inf: not seen; null: all seen */
    int64_t mask_heads, mask_sequences; /* that the mask distinguishes; the others repeat them */
    const float *sinks;       /* [n_heads] scores of a cell without value; or null */
    char *out;                /* float, [v_size] each */
    int64_t q_stride[3], k_stride[3], v_stride[3], mask_stride[3], out_stride[3];
    float scale;
    float max_bias;           /* of ALiBi's slopes; 0: slope 1 */
    float soft_cap;           /* c: scores are c tanh(score / c); 0: none */
} cspec_attention;

/* What the CPU has, or PYSPEC_KERNELS says (avx512, avx2, c or off; what the CPU lacks counts as off; avxvnni has
 * something for products only, and counts as avx2). */
int32_t cspec_kernels(void);

/* Whether sizes are as above and the kernels exist. */
int32_t cspec_attention_covers(const cspec_attention *attention);

/* Bytes of the memory that so many threads, or fewer, share below. */
size_t cspec_attention_work_size(const cspec_attention *attention, int32_t n_threads);

/* Every thread calls the first, waits for all others, and calls the second. An element of out depends on its own
 * row of Q and the cells that the row sees, in their order, and on nothing else: not on the bits of other
 * cells, how many rows there are, or n_threads. */
void cspec_attention_segments(const cspec_attention *attention, int32_t thread, int32_t n_threads, void *work);
void cspec_attention_combine(const cspec_attention *attention, int32_t thread, int32_t n_threads, void *work);

/* ---- the bridge into ggml's CPU backend (ggml_bridge.c) -------------------------------------------- */

/* The bridge's checks, in order. */
enum {
    CSPEC_CHECK_TENSORS = 1,   /* tensors are laid out as declared */
    CSPEC_CHECK_LIST = 2,      /* the list of extra buffer types is what it is believed to be */
    CSPEC_CHECK_CALLS = 3,     /* ggml calls the bridge's entry with the arguments declared */
    CSPEC_CHECK_ATTENTION = 4, /* attention through it is right, and the same at every width */
    CSPEC_CHECK_PRODUCTS = 5,  /* matrix products likewise */
    CSPEC_CHECK_BUFFERS = 6,   /* of the kernels: buffers are laid out as declared */
    CSPEC_CHECK_KERNELS = 7,   /* each gives the bits of plain C */
    CSPEC_CHECK_PACKED = 8,    /* through ggml they are right, and the same at every width */
};

/* Operations that the bridge was asked about, by what became of them. */
enum {
    CSPEC_BRIDGE_ATTENTION = 0, /* attention made independent of the width */
    CSPEC_BRIDGE_PRODUCT = 1,   /* matrix products likewise */
    CSPEC_BRIDGE_WIDE = 2,      /* left to ggml: wider than the exact width */
    CSPEC_BRIDGE_FOREIGN = 3,   /* left to ggml: weights in another extra buffer type's layout */
    CSPEC_BRIDGE_UNKNOWN = 4,   /* left to ggml: a product of a kind that the bridge does not know */
    CSPEC_BRIDGE_SHARED = 5,    /* of the products: with activations that another had quantised */
    CSPEC_BRIDGE_COUNTS = 6,
};

/* Attaches the bridge to the llama.cpp in this process, once; later calls find it attached. Call it before a
 * model is loaded, and while no graph is being computed.
 *
 *   library      path of the libllama that is already loaded
 *   fail_at      the check that is to fail although it holds (for tests); 0: none
 *   reason       [reason_size] out: why it is not attached, on one line
 *
 * Returns whether it is attached. If not, ggml is as it was. */
int32_t cspec_bridge_attach(const char *library, int32_t fail_at, char *reason, size_t reason_size);

/* Turns an attached bridge off and on, between passes (for comparisons). On at first. */
void cspec_bridge_enable(int32_t on);

/* Chooses the kernels of attention, between passes; CSPEC_KERNELS_OFF: ggml's own, one row at a time. At first
 * cspec_kernels(). */
void cspec_bridge_kernels(int32_t kernels);

/* The widest operation, in tokens, that is made independent of the width. */
void cspec_bridge_exact_width(int64_t n_tokens);

/* counts: [CSPEC_BRIDGE_COUNTS] out, since the bridge was attached. */
void cspec_bridge_read_counts(uint64_t *counts);

/* How many devices ggml knows; more than one may take operations away from the CPU. 0: not attached. */
int32_t cspec_bridge_devices(void);

/* Attaches the kernels to an attached bridge: weights can then be loaded in their layout. Call it like
 * cspec_bridge_attach, once.
 *
 *   instructions  the widest instruction set (CSPEC_MATMUL_...) to use of those that the CPU has
 *
 * Returns the instruction set that is used; CSPEC_MATMUL_OFF: none, and ggml is as it was. */
int32_t cspec_kernels_attach(const char *library, int32_t instructions, int32_t fail_at, char *reason,
                             size_t reason_size);

/* Whether models that are now loaded with use_extra_bufts have their weights in the kernels' layout, those
 * that no kernel takes in ggml's own, and none in another extra buffer type's. Off at first. */
void cspec_kernels_offer(int32_t on);

/* Rows of packed weights that are computed together. */
enum { CSPEC_PANEL_ROWS = 16 };

/* Has the passes that follow compute only some logits, of models whose output matrix has n_rows rows in the kernels'
 * layout; the others are -inf. Call it between passes, and keep panels until it is called again.
 *
 *   panels  [n_panels] ascending, at least one: panel i is the rows from 16 i on. Null: all logits are computed */
void cspec_kernels_shortlist(const int32_t *panels, int64_t n_panels, int64_t n_rows);

/* ---- matrix products (matmul/) ---------------------------------------------------------------------
 *
 * What the bridge computes products with, for tests and measurements. type is ggml's number of a weight type.
 * docs/kernels.md shows the layouts. */

/* Instruction sets. */
enum {
    CSPEC_MATMUL_OFF = 0,
    CSPEC_MATMUL_C = 1,
    CSPEC_MATMUL_AVX2 = 2,
    CSPEC_MATMUL_AVXVNNI = 3,
    CSPEC_MATMUL_AVX512 = 4, /* with VNNI */
    CSPEC_MATMUL_AMX = 5,    /* for more than 8 tokens and blocks of 256; else AVX512 */
};

/* Whether this CPU has an instruction set. */
int32_t cspec_matmul_has(int32_t instructions);

/* Bytes of n_rows rows of n_k weights when packed; 0: the type or shape is not covered. */
size_t cspec_matmul_packed_size(int32_t type, int64_t n_rows, int64_t n_k);

/* Packs rows, in ggml's layout, into packed [cspec_matmul_packed_size]. */
void cspec_matmul_pack(int32_t type, int64_t n_rows, int64_t n_k, const void *rows, void *packed);

/* Bytes of scratch for the activations of n_tokens tokens. */
size_t cspec_matmul_activations_size(int32_t type, int64_t n_k, int64_t n_tokens);

/* out [n_tokens][n_rows] = x [n_tokens][n_k] times the weights' transpose, in n_parts as so many threads would.
 *
 *   listed  [n_listed] the panels to compute, ascending, as for cspec_kernels_shortlist; null: all */
void cspec_matmul(int32_t instructions, int32_t type, int64_t n_rows, int64_t n_k, int64_t n_tokens,
                  const void *packed, const float *x, void *activations, float *out, const int32_t *listed,
                  int64_t n_listed, int32_t n_parts);

#endif
