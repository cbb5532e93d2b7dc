// CPU kernels of Foredraft: forward passes of a decoder for bfloat16 and float32 (passes.inc, attention.inc), with coded
// weights (coding.inc, codes.inc), vocabulary operations (vocab.inc), and both in one call (fused.inc).
//
// The order of every sum depends only on the position that it belongs to, never on the rows, queries or keys that
// share the call, nor on the number of threads. So a position gets the same bits in a call of any shape.

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

// Vectors of 16 lanes on every machine; the compiler splits them where registers are narrower.
typedef float V __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
typedef double D __attribute__((vector_size(64)));

enum {
    LANES = 16,
    BLOCK = 32,          // outputs of a block of packed weights; positions of a block of cached keys
    CHUNK = 128,         // words of the inner dimension that a product reads for all rows before it goes on
    MAX_ROWS = 64,       // rows of a product that share one pass over a weight block
    MAX_HEAD_DIM = 512,  // also MAX_HEAD_DIM in model/runner/native/passes.py
    CACHE_LINE = 64,     // bytes
};
enum {
    KEYS = 128,    // keys that one step of the online softmax covers
    QUERIES = 12,  // query rows that one thread attends with at a time
    GROUP = 6,     // query rows whose accumulators fit into registers
    WORTHWHILE = 4096,       // elements of rows that one thread takes at a time
    WEIGHT_BYTES = 1 << 17,  // of a product that one thread takes at a time
    NEAR_SUMS = 1 << 12,     // floats of sums that lie in the nearest cache until their piece is committed
    MAX_BLOCKS = 8,          // as many blocks at most
    MAX_LANES = 64,          // vectors of a gate that one thread takes at a time, at most
};
#ifdef __AVX512F__
enum { TILE = 12 };  // rows of a product tile: two accumulators per row, of 32 registers
#else
enum { TILE = 2 };
#endif
// Coded weights (coding.inc, codes.inc). GROUP_COLUMNS are coded together; AHEAD: bytes that are prefetched. SUPER groups
// share the steps of nested scales; SUMS: sums of inputs that a thread keeps, at least those of a row.
enum { GROUP_COLUMNS = 32, AHEAD = 4096, SUPER = 8, SUMS = 1 << 14 };

// How a weight is coded. bits: 0 where it is not, or 2, 3, 4, 5, 6 or 8. scale: the dtype of scales and offsets. columns:
// those of a scale, 16 or 32. lowest: the code of the first number. zeros: every group has a zero point; with 4 bits only.
// offsets: a scaled code less the offset of its group is the weight. float8: codes of 8 bits are float8_e4m3fn. book: codes
// are those of CODEBOOKS[book - 1]; 0: they are integers in their order.
enum { BFLOAT16, FLOAT16, FLOAT32, NESTED };
typedef struct { int64_t bits, scale, columns, lowest, zeros, offsets, float8, book; } Coding;

// A packed weight [n, k]: blocks of 32 outputs, [ceil(n / 32)][k / WORD][32] words. A word of 32 bits holds one float
// or two bfloat16. inputs: the numbers that the inputs are rounded to first, with a scale for a row, or for INPUT_GROUP
// columns; 0: they stay as they are. order [k]: the packed columns are these of the weight's; null: they are in order.
// scale: the factor on logits, or on what is added to the states; 0: none.
enum { INT8 = 1, FLOAT8, FLOAT8_GROUPS, INPUT_GROUP = 128 };
typedef struct { const void *weight; const float *bias; int64_t n, k; Coding coding; int64_t inputs; const int32_t *order; float scale; } Linear;

// A norm; no weight: none. wide: the weight is float32 and the product is rounded last. centred: a layer norm, which subtracts
// the mean first, and is wide; bias: its bias in float32, or null. apart: float32 numbers from one head's weight to the next's;
// 0: all heads have one.
typedef struct { const void *weight; const float *bias; float eps; int32_t wide, centred, apart; } Norm;

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
} Layer;

// gated: the MLP multiplies the activation of its first half by its second. parallel: the MLP reads what enters the layer.
// together: the norms of queries and keys are over all heads together, not over each. sums: a norm after a sub-layer is of what
// entered plus the output, not of the output.
enum { SILU, GELU_TANH, GELU, RELU };  // activations
typedef struct {
    int64_t layers, hidden, heads, activation, gated, parallel, together, sums;
    int64_t wide;  // elements of the widest of qkv, gate_up and input_gate of all layers
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

// Columns of a ragged batch. A group is a run of columns of one cache row at successive positions. A leaf is a group of one
// column whose key and value lie elsewhere in the row, because another column has them at its position: its attention takes them
// as if they lay there, and no other column sees them.
typedef struct {
    int64_t groups;
    const int64_t *first, *count, *start, *row;  // [groups]: first column, columns, first position, cache row
    const int64_t *slot;  // [groups]: where the first column's key and value lie; null: all at their positions
    const void *const *rotary;  // rotary tables [positions, cos|sin, rotated]
    void *const *cache;  // of each layer [k|v, rows, kv_heads, positions, dim], with keys in blocks (attention.inc)
    int64_t rows, positions;
    const void *inputs;  // [columns, input_layers, input_size], or the embeddings of pairs [columns, hidden]; null without both
} Pass;

// How far behind their positions the keys and values of a group lie; 0 but for a leaf.
static inline int64_t behind(const Pass *p, int64_t group) { return p->slot ? p->slot[group] - p->start[group] : 0; }

static inline int64_t last_column(const Pass *p, int64_t group) { return p->first[group] + p->count[group] - 1; }

static const I LANE_INDEX = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Returns a b + c, rounded once where the machine can. Left alone, a compiler that tunes for some CPUs fuses in one tile and
// not in another. With AVX-512 it is told; elsewhere the check at loading finds out (model/runner/native/check.py).
static inline __attribute__((always_inline)) V multiply_add(V a, V b, V c) {
#ifdef __AVX512F__
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

static inline V splat(float x) { return x - (V){0}; }
static inline V load(const float *p) { V v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, V v) { memcpy(p, &v, sizeof v); }
static inline V widened(const void *p) { H raw; memcpy(&raw, p, sizeof raw); return (V)(__builtin_convertvector(raw, U) << 16); }
static inline V from_half(const void *p) {
#ifdef __AVX512F__
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256(p));
#else
    // The exponent moves by 112; a multiplication gives it, for numbers below the smallest normal one too.
    H raw;
    memcpy(&raw, p, sizeof raw);
    const U v = __builtin_convertvector(raw, U);
    return (V)((U)((V)((v & 0x7fff) << 13) * (float)0x1p112) | (v & 0x8000) << 16);
#endif
}
static inline V choose(I mask, V yes, V no) { return (V)(((I)yes & mask) | ((I)no & ~mask)); }
static inline V maximum(V a, V b) { return choose(a > b, a, b); }

// Reduces a vector by folding halves onto each other, always in the same order.
#define REDUCE(v, with) \
    v = with(v, __builtin_shuffle(v, ((I){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}))); \
    v = with(v, __builtin_shuffle(v, ((I){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}))); \
    v = with(v, __builtin_shuffle(v, ((I){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}))); \
    v = with(v, __builtin_shuffle(v, ((I){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14})));

static inline V add(V a, V b) { return a + b; }
static inline float lanes_sum(V v) { REDUCE(v, add) return v[0]; }
static inline float lanes_max(V v) { REDUCE(v, maximum) return v[0]; }

// e^x within 2 ulp; 0 below the smallest normal number; NaN stays NaN.
static inline V exponential(V x) {
    const I low = x < splat(-87.3f);
    x = choose(x > splat(88.0f), splat(88.0f), x);
    const V shifted = x * splat(1.44269504f) + splat(12582912.0f);
    const V n = shifted - splat(12582912.0f);
    const V r = (x - n * splat(0.693145752f)) - n * splat(1.42860677e-6f);
    V p = splat(1.0f / 5040);
    p = multiply_add(p, r, splat(1.0f / 720));
    p = multiply_add(p, r, splat(1.0f / 120));
    p = multiply_add(p, r, splat(1.0f / 24));
    p = multiply_add(p, r, splat(1.0f / 6));
    p = multiply_add(p, r, splat(0.5f));
    p = multiply_add(p, r, splat(1.0f));
    p = multiply_add(p, r, splat(1.0f));
    const U power = ((U)shifted << 23) + (127u << 23);
    return choose(low, splat(0.0f), p * (V)power);
}

static inline V hyperbolic_tangent(V x) {
    x = choose(x > splat(40.0f), splat(40.0f), x);
    return splat(1.0f) - splat(2.0f) / (exponential(x + x) + splat(1.0f));
}

// The error function within 4 ulp: x P(x^2) / Q(x^2), which is 1 in float32 from the bound on.
static inline V error_function(V x) {
    x = choose(x > splat(3.8325069f), splat(3.8325069f), choose(x < splat(-3.8325069f), splat(-3.8325069f), x));
    const V square = x * x;
    V p = splat(0.00022905065861350646f), q = splat(-1.1791602954361697e-7f);
    p = multiply_add(p, square, splat(0.0034082910107109506f));
    p = multiply_add(p, square, splat(0.050955695062380861f));
    p = multiply_add(p, square, splat(0.18520832239976145f));
    p = multiply_add(p, square, splat(1.128379143519084f));
    q = multiply_add(q, square, splat(0.000023547966471313185f));
    q = multiply_add(q, square, splat(0.0010179625278914885f));
    q = multiply_add(q, square, splat(0.014070470171167667f));
    q = multiply_add(q, square, splat(0.11098505178285362f));
    q = multiply_add(q, square, splat(0.49746925110067538f));
    q = multiply_add(q, square, splat(1.0f));
    return x * p / q;
}

// SiLU, GELU in its tanh approximation or exact, or ReLU; NaN stays NaN.
static inline V activation(V x, int64_t kind) {
    if (kind == SILU) return x / (exponential(-x) + splat(1.0f));
    if (kind == RELU) return choose(x < splat(0.0f), splat(0.0f), x);
    if (kind == GELU) return x * splat(0.5f) * (error_function(x * splat(0.707106781f)) + splat(1.0f));
    const V inner = (x + x * x * x * splat(0.044715f)) * splat(0.797884561f);
    return x * splat(0.5f) * (hyperbolic_tangent(inner) + splat(1.0f));
}

// Rounds floats to integers, ties to even; they lie within +-2 ** 22.
static inline V nearest(V v) { return (v + splat(0x1.8p23f)) - splat(0x1.8p23f); }

// Reads float8_e4m3fn from the lowest bytes of lanes. The exponent moves by 120; a multiplication gives it, for numbers
// below the smallest normal one too.
static inline V from_float8(U v) {
    const V value = (V)((U)((V)((v & 0x7f) << 20) * (float)0x1p120) | (v & 0x80) << 24);
    return choose((I)(v & 0x7f) == 0x7f, splat(NAN), value);
}

// Rounds floats to float8_e4m3fn, ties to even; they lie within +-448.
static inline V to_float8(V v) {
    const U bits = (U)v, rounded = (bits + 0x7ffff + ((bits >> 20) & 1)) & 0xfff00000u;
    const V small = (v + splat(0x1.8p14f)) - splat(0x1.8p14f);  // multiples of 2 ** -9, below the smallest normal number
    return choose((v >= splat(0x1p-6f)) | (v <= splat(-0x1p-6f)), (V)rounded, small);
}

static inline V clamped(V v, float low, float high) {
    return choose(v < splat(low), splat(low), choose(v > splat(high), splat(high), v));
}

// Transposes 16 x 16 words in place: swaps squares of 1, 2, 4 and 8 words across the diagonal.
#define SWAP(step, even, odd) \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) \
        if (!(i & step)) { \
            const U a = m[i], b = m[i + step]; \
            m[i] = __builtin_shuffle(a, b, even); \
            m[i + step] = __builtin_shuffle(a, b, odd); \
        }

static inline __attribute__((always_inline)) void transpose(U *m) {
    SWAP(1, ((U){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}),
         ((U){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}))
    SWAP(2, ((U){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}),
         ((U){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}))
    SWAP(4, ((U){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}),
         ((U){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}))
    SWAP(8, ((U){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}),
         ((U){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}))
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
    return m->heads + (l->reads ? 0 : l->joined ? l->kv_heads : 2 * l->kv_heads);
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

// Operations of the parts of a pass: a product may round and order its inputs first.
enum {
    PRODUCT_OPERATIONS = 3,
    LAYER_OPERATIONS = 4 * PRODUCT_OPERATIONS + 9,
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
    return sizeof(int64_t) * (5 * p->groups + rotary_tables(m) + m->layers) + 2 * m->layers + 8 * LANES;
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

typedef struct { const uint32_t *weight; int64_t n, words; uint32_t *packed; } Packing;

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
                    for (int64_t i = 0; i < left; i++)
                        memcpy(p.packed + (block * p.words + w + i) * BLOCK + half, m + i, sizeof(U));
                }
}

// Packs a weight [n, words] into blocks (see Linear); outputs past n in the last block are zero.
void foredraft_pack(const uint32_t *weight, int64_t n, int64_t words, uint32_t *packed, int threads) {
    run_direct(pack, &(Packing){weight, n, words, packed}, sizeof(Packing), 1, threads);
}

#include "coding.inc"

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
    int64_t tap;
    void *states;                  // [rows, steps, hidden] output: the states that enter layer `tap`; null: unwanted
    const void *pairs;             // [columns, hidden] the states of the first step's pairs, of heads that read pairs
    void *left;                    // [rows, hidden] output: the state of the pair that would follow; null: unwanted
    const int64_t *words;          // [the head's outputs] the tokens that they stand for; null: they are all tokens
    int64_t vocabulary;            // tokens
    const int64_t *choices;        // [steps] how many tokens are wanted that come next in the draw of a step, `most` at most
    int64_t most;
    int64_t *further;              // [rows, steps, most] output: these, the likeliest first, or -1; null: unwanted
} Draft;

// Returns full [vocabulary]: the logits of the words [count] at the tokens that they stand for, and -inf elsewhere.
static float *spread(const int64_t *words, const float *logits, int64_t count, float *full, int64_t vocabulary) {
    for (int64_t i = 0; i < vocabulary; i++) full[i] = -INFINITY;
    for (int64_t i = 0; i < count; i++) full[words[i]] = logits[i];
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

#include "tiles.inc"

// The templates of passes.inc and fused.inc: E is the element type, WORD the elements of a 32-bit word.
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(x) JOIN(x, SUFFIX)

typedef float Float32;
#define E Float32
#define WORD 1
#define SUFFIX _float32
#include "passes.inc"
#include "fused.inc"
#undef E
#undef WORD
#undef SUFFIX

typedef uint16_t BFloat16;
#define E BFloat16
#define WORD 2
#define SUFFIX _bfloat16
#include "passes.inc"
#include "fused.inc"
#undef E
#undef WORD
#undef SUFFIX

#include "vocab.inc"
