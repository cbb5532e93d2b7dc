// CPU kernels of Foredraft: forward passes of a decoder for float32, bfloat16 and float16 (passes.inc, attention.inc), with
// coded weights (code_formats.inc, codes.inc, integers.inc), vocabulary operations (vocab.inc), and both in one call (fused.inc).
//
// The order of every sum depends only on the position that it belongs to, never on the rows, queries or keys that
// share the call, nor on the number of threads. So a position gets the same bits in a call of any shape.

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.inc"

enum {
    BLOCK = 32,          // outputs of a block of packed weights; positions of a block of cached keys
    CHUNK = 128,         // columns, or words of a dot instruction, that a product reads for all rows before it goes on
    MAX_ROWS = 64,       // rows of a product that share one pass over a weight block
    MAX_HEAD_DIM = 512,  // also MAX_HEAD_DIM in model/runner/native/passes.py
    CACHE_LINE = 64,     // bytes
    LOG = 64, MAX_KEY_DIM = 256, MAX_VALUES = 64, MAX_TAPS = 8,  // of recurrent layers, as in model/recurrent.py
};
enum {
    KEYS = 128,    // keys that one step of the online softmax covers
    QUERIES = 12,  // query rows that one thread attends with at a time
    WORTHWHILE = 4096,       // elements of rows that one thread takes at a time
    WEIGHT_BYTES = 1 << 17,  // of a product that one thread takes at a time
    NEAR_SUMS = 1 << 12,     // floats of sums that lie in the nearest cache until their piece is committed
    MAX_BLOCKS = 8,          // as many blocks at most
    FEW_GROUPS = 64,         // groups of inputs that one thread rounds at a time, at most
    MAX_LANES = 64,          // vectors of a gate that one thread takes at a time, at most
};
// Coded weights (code_formats.inc, codes.inc). GROUP_COLUMNS are coded together; AHEAD: bytes that are prefetched. SUPER groups
// share the steps of nested scales; SUMS: sums of inputs that a thread keeps, at least those of a row.
enum { GROUP_COLUMNS = 32, GROUP_WORDS = GROUP_COLUMNS / 2, AHEAD = 4096, SUPER = 8, SUMS = 1 << 14 };

// How a weight is coded. bits: 0 where it is not, or 2, 3, 4, 5, 6 or 8. scale: the dtype of scales and offsets. columns:
// those of a scale, 16 or 32. lowest: the code of the first number. zeros: every group has a zero point; with 4 bits only.
// offsets: a scaled code less the offset of its group is the weight. float8: codes of 8 bits are float8_e4m3fn. book: codes
// are those of CODEBOOKS[book - 1]; 0: they are integers in their order.
enum { BFLOAT16, FLOAT16, FLOAT32, NESTED };
typedef struct { int64_t bits, scale, columns, lowest, zeros, offsets, float8, book; } CodeFormat;

// A packed weight [n, k]: blocks of 32 outputs, [ceil(n / 32)][k / WORD][32] words. A word of 32 bits holds one float
// or two bfloat16, of two columns. float16 lie column after column, [k][32]. inputs: the numbers that the inputs are rounded to first, with a scale for a row, or for INPUT_GROUP
// columns; 0: they stay as they are. order [k]: the packed columns are these of the weight's; null: they are in order.
// scale: the factor on logits, or on what is added to the states; 0: none.
enum { INT8 = 1, FLOAT8, FLOAT8_GROUPS, INPUT_GROUP = 128 };
typedef struct { const void *weight; const float *bias; int64_t n, k; CodeFormat code_format; int64_t inputs; const int32_t *order; float scale; } Linear;

// A norm; no weight: none. wide: the weight is float32 and the product is rounded last. centred: a layer norm, which subtracts
// the mean first, and is wide; bias: its bias in float32, or null. apart: float32 numbers from one head's weight to the next's;
// 0: all heads have one.
typedef struct { const void *weight; const float *bias; float eps; int32_t wide, centred, apart; } Norm;

// What a recurrent layer has in the place of attention (recurrent.inc). rates: projects the numbers of every head of values that
// decide how its state changes, `numbers` in all; without a weight they lie behind the channels. weights: of the convolution,
// [taps, channels]; shift [channels]: what it adds, or null. block: values of a head that lie together. A convolution has no keys,
// hence no state.
enum { NO_MIXER, DELTA, MAMBA, CONVOLUTION };  // kinds
typedef struct {
    Linear rates;
    const float *weights, *shift, *decay, *bias, *skip, *norm;
    int64_t kind, key_heads, value_heads, key_dim, value_dim, taps, block, numbers;
    float eps;  // of the norm
} Mixer;

// The channels that are convolved: queries, keys and values.
static inline int64_t channels_of(const Mixer *d) { return 2 * d->key_heads * d->key_dim + d->value_heads * d->value_dim; }

// A layer. reads: its keys and values are those of another layer, so it has queries alone. joined: its values are its keys as
// they were projected, so it has no others.
typedef struct {
    Norm before, after, q, k, v;  // before and after attention; of queries, keys and values
    Norm mlp_before, mlp_after, input_after;
    Linear qkv, output, gate_up, down;
    Linear input_gate, input_output;  // of the layer's input; without a weight there is none
    int64_t window;            // positions of a sliding window; 0: full attention
    int64_t rope, query_rope;  // indices of the rotary tables of keys and of queries in Pass.rotary
    int64_t rotated;           // channels of a head that are rotated, the first ones
    int64_t kv_heads, dim;     // key heads; dimension of a head
    int64_t inner;             // of the MLP
    int64_t reads, joined;
    float scalar;              // the factor on what leaves the layer
    Mixer mixer;
} Layer;

// gated: the MLP multiplies the activation of its first half by its second. parallel: the MLP reads what enters the layer.
// together: the norms of queries and keys are over all heads together, not over each. sums: a norm after a sub-layer is of what
// entered plus the output, not of the output.
enum { SILU, GELU_TANH, GELU, RELU, RELU2 };  // activations
typedef struct {
    int64_t layers, hidden, heads, activation, gated, parallel, together, sums;
    int64_t wide;  // elements of the widest of qkv, gate_up and input_gate of all layers
    int64_t gates;  // attention is gated: qkv has the gates of what the heads give behind the values
    int64_t room;  // elements of work memory that the inputs of a product take, as integers or as floats
    float scale, softcap, logit_softcap;  // of attention scores, twice; of logits. A cap of 0: none
    const void *embedding;  // [vocabulary, hidden]; null: the rows of `tied`
    Linear tied;
    float embedding_scale;  // 0: none
    const void *learned;    // what positions add to embeddings, [last_learned + 1, hidden]; null: nothing
    int64_t last_learned;
    Norm norm;
    Linear head;
    Layer *layer;
    // What layers take of the tokens themselves (model/layer_inputs.py). input_size: of a layer; 0: there is none.
    int64_t input_size, input_layers;
    const void *inputs;  // [tokens, input_layers, input_size]
    float input_scale, projection_scale;
    Linear projection;
    Norm input_norm;
    // A head that reads pairs of a state and a token (model/pair_inputs.py). pairs: whether it does. The first two norms are of
    // the embedding and of the state. join makes the state of a pair; without a weight, the first projections read the pair.
    // residual: the normed state is what the first layer adds to. recurs: the normed output is the next pair's state.
    int64_t pairs, residual, recurs;
    Norm token_norm, state_norm;
    Linear join;
} Model;

// What a recurrent layer keeps: bases [rows, value_heads, blocks, key_dim, block], a log [rows, LOG, channels and rates], and the
// positions of the bases [rows], where one at 0 is zero.
typedef struct { float *bases; void *log; int64_t *at; } Recurrent;

// Columns of a ragged batch. A group is a run of columns of one cache row at successive positions. A leaf of a token tree is a
// group of one column whose key and value lie elsewhere in the row, because another column has them at its position: tree
// attention takes them as if they lay there, and no other column sees them.
typedef struct {
    int64_t groups;
    const int64_t *first, *count, *start, *row;  // [groups]: first column, columns, first position, cache row
    const int64_t *slot;  // [groups]: where the first column's key and value lie; null: all at their positions
    const void *const *rotary;  // rotary tables [positions, cos|sin, rotated]
    void *const *cache;  // of each layer [k|v, rows, kv_heads, positions, dim], with keys in blocks (attention.inc)
    int64_t rows, positions;
    const void *inputs;  // [columns, input_layers, input_size], or the embeddings of pairs [columns, hidden]; null without both
    const int64_t *base;         // [groups]: the position to which the bases of the row move
    const Recurrent *recurrent;  // [layers]; null where no layer is recurrent
} Pass;

// How far behind their positions the keys and values of a group lie; 0 but for a leaf.
static inline int64_t behind(const Pass *p, int64_t group) { return p->slot ? p->slot[group] - p->start[group] : 0; }

// How many leaves the row of a group has: the groups and the columns right after it.
static inline int64_t leaves_of(const Pass *p, int64_t group) {
    int64_t next = group + 1;
    while (next < p->groups && behind(p, next) && p->row[next] == p->row[group]) next++;
    return next - group - 1;
}

static inline int64_t last_column(const Pass *p, int64_t group) { return p->first[group] + p->count[group] - 1; }

// SiLU, GELU in its tanh approximation or exact, ReLU, or its square; NaN stays NaN.
static inline V activation(V x, int64_t kind) {
    if (kind == SILU) return x / (exponential(-x) + splat(1.0f));
    if (kind == RELU || kind == RELU2) {
        const V positive = choose(x < splat(0.0f), splat(0.0f), x);
        return kind == RELU ? positive : positive * positive;
    }
    if (kind == GELU) return x * splat(0.5f) * (error_function(x * splat(0.707106781f)) + splat(1.0f));
    const V inner = (x + x * x * x * splat(0.044715f)) * splat(0.797884561f);
    return x * splat(0.5f) * (hyperbolic_tangent(inner) + splat(1.0f));
}

#include "pool.inc"

// The size of pieces, `most` or less, of which every thread gets as many of `units`.
static inline int64_t even_size(const Worker *w, int64_t units, int64_t most) {
    const int64_t rounds = (units + w->threads * most - 1) / (w->threads * most), pieces = rounds * w->threads;
    return pieces ? (units + pieces - 1) / pieces : 1;
}

// Rows of n elements that make a piece of work that is worth taking.
static inline int64_t few_rows(int64_t n) { return n < WORTHWHILE ? WORTHWHILE / n : 1; }

// The heads of a column of qkv: queries, then keys and values as far as the layer has any.
static inline int64_t column_heads(const Model *m, const Layer *l) {
    return m->heads + (l->reads ? 0 : l->joined ? l->kv_heads : 2 * l->kv_heads) + (m->gates ? m->heads : 0);
}

// The query rows of group g that share a key head.
static inline int64_t query_rows(const Model *m, const Layer *l, const Pass *p, int64_t g) {
    return p->count[g] * (m->heads / l->kv_heads);
}

// The aligned runs of LANES positions that the columns of group g touch.
static inline int64_t aligned_runs(const Pass *p, int64_t g) {
    return (p->start[g] + p->count[g] - 1) / LANES - p->start[g] / LANES + 1;
}

// Whether layers have inputs or scalars, which take further operations.
static inline int has_inputs(const Model *m) {
    int found = m->input_size != 0;
    for (int64_t i = 0; i < m->layers; i++) found |= m->layer[i].scalar != 1;
    return found;
}

// Operations of the parts of a pass: a product may round, order and widen its inputs first.
enum {
    PRODUCT_OPERATIONS = 4,
    LAYER_OPERATIONS = 5 * PRODUCT_OPERATIONS + 10,
    INPUT_OPERATIONS = 2 * PRODUCT_OPERATIONS + 4,  // of a layer's input and scalar
    PAIR_OPERATIONS = 1 + PRODUCT_OPERATIONS,
    HEAD_OPERATIONS = 1 + PRODUCT_OPERATIONS,
};

// Copies an array to `memory`, which moves on behind it.
static void *copied(const void *from, int64_t bytes, char **memory) {
    void *to = memcpy(*memory, from, bytes);
    *memory += (bytes + LANES - 1) / LANES * LANES;
    return to;
}

static inline int64_t rotary_tables(const Model *m) {
    int64_t tables = 0;
    for (int64_t i = 0; i < m->layers; i++) {
        const Layer *l = m->layer + i;
        const int64_t last = l->rope > l->query_rope ? l->rope : l->query_rope;
        tables = last < tables ? tables : last + 1;
    }
    return tables;
}

// The bytes of the copies of a pass and of two masks [layers].
static int64_t pass_bytes(const Model *m, const Pass *p) {
    return sizeof(int64_t) * (6 * p->groups + rotary_tables(m) + m->layers) + (2 + sizeof(Recurrent)) * m->layers + 10 * LANES;
}

static Pass copied_pass(const Model *m, const Pass *p, char **memory) {
    Pass pass = *p;
    const int64_t groups = p->groups * sizeof(int64_t);
    pass.first = copied(p->first, groups, memory);
    pass.count = copied(p->count, groups, memory);
    pass.start = copied(p->start, groups, memory);
    pass.row = copied(p->row, groups, memory);
    if (p->slot) pass.slot = copied(p->slot, groups, memory);
    pass.rotary = copied(p->rotary, rotary_tables(m) * sizeof(void *), memory);
    pass.cache = copied(p->cache, m->layers * sizeof(void *), memory);
    if (p->recurrent) {
        pass.base = copied(p->base, groups, memory);
        pass.recurrent = copied(p->recurrent, m->layers * sizeof(Recurrent), memory);
    }
    return pass;
}

// Positions [from, to) of a group, within an aligned run, and a key head. Their words of keys fill whole cache lines, so no two
// threads write into one.
typedef struct { int64_t group, kv, from, to; } KeyRun;

// The run of this number, counted over all groups, runs and heads.
static KeyRun key_run(const Layer *l, const Pass *p, int64_t number) {
    int64_t g = 0;
    for (; number >= l->kv_heads * aligned_runs(p, g); g++) number -= l->kv_heads * aligned_runs(p, g);
    const int64_t first = (p->start[g] / LANES + number / l->kv_heads) * LANES, end = p->start[g] + p->count[g];
    return (KeyRun){
        g, number % l->kv_heads, first > p->start[g] ? first : p->start[g], first + LANES < end ? first + LANES : end};
}

static inline void prefetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch((const char *)from + i);
}

typedef struct { const uint32_t *weight; int64_t n, words, apart; uint32_t *packed; } Packing;

static void pack(Worker *worker, const void *context) {
    const Packing p = *(const Packing *)context;
    const int64_t blocks = (p.n + BLOCK - 1) / BLOCK;
    for (Piece piece = first_direct_piece(worker, blocks, few_rows(BLOCK * p.words)); piece.from < piece.to;
         piece = next_piece(worker))
        for (int64_t block = piece.from; block < piece.to; block++)
            for (int64_t w = 0; w < p.words; w += LANES)
                for (int half = 0; half < BLOCK; half += LANES) {
                    const int64_t left = p.words - w < LANES ? p.words - w : LANES;
                    U m[LANES] = {0};
                    for (int i = 0; i < LANES; i++) {
                        const int64_t row = block * BLOCK + half + i;
                        if (row < p.n) memcpy(m + i, p.weight + row * p.words + w, left * sizeof(uint32_t));
                    }
                    transpose(m);
                    for (int64_t i = 0; i < left; i++) {
                        uint32_t *to = p.packed + (block * p.words + w + i) * BLOCK;
                        const H first = __builtin_convertvector(m[i] & 0xffff, H), second = __builtin_convertvector(m[i] >> 16, H);
                        if (!p.apart) memcpy(to + half, m + i, sizeof(U));
                        else memcpy((H *)to + half / LANES, &first, sizeof first), memcpy((H *)to + 2 + half / LANES, &second, sizeof second);
                    }
                }
}

// Packs a weight [n, words] into blocks (see Linear); outputs past n in the last block are zero. apart: the weight is float16.
void foredraft_pack(const uint32_t *weight, int64_t n, int64_t words, int64_t apart, uint32_t *packed, int threads) {
    run_direct(pack, &(Packing){weight, n, words, apart, packed}, sizeof(Packing), 1, threads);
}

#include "code_formats.inc"
#include "floats.inc"
#include "codes.inc"
#include "integers.inc"

// The result of a kernel. After NO_MEMORY its outputs hold nothing of use. LATE_THREADS: some may still read what the call was
// given, until the pool is settled.
enum { DONE, NO_MEMORY, LATE_THREADS };

// Sampling parameters, [rows] each. A null pointer, 1 (top_p) or 0 (top_k, min_p) turns one off; without temperatures
// every row is greedy. cut: whether the row has a top_p or a min_p.
typedef struct {
    const float *temperature;
    const int64_t *top_k;
    const float *top_p, *min_p;
    const uint8_t *cut;
} Sampling;

// A fused draft: all its steps in one call. A group of the pass is row slot[g] of every [rows, ...] array.
typedef struct {
    const int64_t *tokens;         // [columns] of the first step
    int64_t columns, steps;        // steps: the length of the longest draft
    const int64_t *slot, *length;  // [groups]; length: the tokens that a group draws, 1 to steps
    const Sampling *sampling;
    const int64_t *keys;           // [rows, steps] keys of the noise; null where every row is greedy
    const uint8_t *const *allowed; // [rows] the tokens [vocabulary] that the first step may draw; null: all
    int64_t *drawn;                // [rows, steps] output: the tokens; -1 where no allowed one has a finite logit
    uint8_t *finite;               // [rows, steps] output: whether each token's logits are finite, allowed or not
    float *probs;                  // [rows, steps, vocabulary] output: each token's distribution; null where greedy
    int64_t exit_layer;
    void *states;                  // [rows, steps, hidden] output: the states that enter layer `exit_layer`; null: unwanted
    const void *pairs;             // [columns, hidden] the states of the first step's pairs, of heads that read pairs
    void *left;                    // [rows, hidden] output: the state of the pair that would follow; null: unwanted
    const int64_t *draft_vocab;    // [the head's outputs] the tokens that they stand for; null: they are all tokens
    int64_t vocabulary;            // tokens
    const int64_t *choices;        // [steps] how many tokens are wanted that come next in the draw of a step, `most` at most
    int64_t most;
    int64_t *further;              // [rows, steps, most] output: these, the likeliest first, or -1; null: unwanted
} Draft;

// Returns full [vocabulary]: the logits of a draft vocabulary [count] at the tokens that they stand for, and -inf elsewhere.
static float *spread(const int64_t *draft_vocab, const float *logits, int64_t count, float *full, int64_t vocabulary) {
    for (int64_t i = 0; i < vocabulary; i++) full[i] = -INFINITY;
    for (int64_t i = 0; i < count; i++) full[draft_vocab[i]] = logits[i];
    return full;
}

static int draft_token(
    const Draft *d, int64_t row, int64_t step, const uint8_t *allowed, float *logits, int64_t vocabulary, int threads);

// One step of the online softmax of a query row at position `at`, over `count` keys from position `from` on. Turns the
// products s [count] into scores, soft-capped and masked, and then into unnormalised probabilities; updates the row's
// maximum and sum. Returns the factor by which the row's earlier sums are to be multiplied.
static inline __attribute__((always_inline)) float softmax_step(
    const Model *m, int64_t window, int64_t at, int64_t from, int count, float *s, float *top, float *sum) {
    V top_lanes = splat(-INFINITY);
    for (int k = 0; k < count; k += LANES) {
        const I key = LANE_INDEX + (int32_t)(from + k);
        I seen = key <= (int32_t)at;
        if (window) seen &= key > (int32_t)(at - window);
        if (m->pairs) seen &= key > 0;  // the first token has no state before it
        V score = load(s + k) * splat(m->scale);
        if (m->softcap != 0) score = hyperbolic_tangent(score * splat(1 / m->softcap)) * splat(m->softcap);
        score = choose(seen, score, splat(-INFINITY));
        store(s + k, score);
        top_lanes = maximum(score, top_lanes);
    }
    const float block_top = lanes_max(top_lanes), new_top = block_top > *top ? block_top : *top;
    const float rescale = exponential(splat(*top - new_top))[0];
    V added = {0};
    for (int k = 0; k < count; k += LANES) {
        const V p = exponential(load(s + k) - splat(new_top));
        store(s + k, p);
        added += p;
    }
    *sum = *sum * rescale + lanes_sum(added);
    *top = new_top;
    return rescale;
}

#include "states.inc"
#include "tiles.inc"

// The templates of passes.inc and fused.inc: E is the element type, WORD the elements of a 32-bit word, HALF whether they are
// float16, DOTS whether an instruction sums the products of words, INTEGERS whether inputs become integers where weights are coded.
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(x) JOIN(x, SUFFIX)

typedef float Float32;
#define E Float32
#define WORD 1
#define HALF 0
#define DOTS 0
#define INTEGERS 0
#define SUFFIX _float32
#include "passes.inc"
#include "fused.inc"
#undef E
#undef WORD
#undef HALF
#undef INTEGERS
#undef SUFFIX

typedef uint16_t Float16;
#define E Float16
#define WORD 2
#define HALF 1
#define INTEGERS 1
#define SUFFIX _float16
#include "passes.inc"
#include "fused.inc"
#undef E
#undef HALF
#undef DOTS
#undef INTEGERS
#undef SUFFIX

typedef uint16_t BFloat16;
#define E BFloat16
#define HALF 0
#ifdef __AVX512BF16__
#define DOTS 1
#define INTEGERS 0
#else
#define DOTS 0
#define INTEGERS 1
#endif
#define SUFFIX _bfloat16
#include "passes.inc"
#include "fused.inc"

#include "vocab.inc"
