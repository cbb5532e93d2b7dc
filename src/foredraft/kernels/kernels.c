// The passes of a decoder on a CPU, for bfloat16 and float32 (passes.inc), and what is decided over a vocabulary
// (vocab.inc); fused.inc puts both together.
//
// Every sum is added in an order that depends on nothing but the position's own place: not on how many rows,
// queries or keys share the pass, nor on the number of threads. So every shape gives a position the same bits.

#include <float.h>
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float V __attribute__((vector_size(64)));     // 16 lanes, whatever the machine has
typedef uint32_t U __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));

enum { LANES = 16, BLOCK = 32, CHUNK = 128, MOST_ROWS = 64, WIDEST_HEAD = 512, LINE = 64 };
enum { KEYS = 128, QUERIES = 12, GROUP = 6 };  // of attention: keys and query rows at once, and those in registers
#ifdef __AVX512F__
enum { TILE = 12 };  // rows of a tile: two accumulators each, of 32 registers
#else
enum { TILE = 2 };
#endif

// A weight [n, k] as blocks of 32 outputs: [n / 32][words of k][32], a word being one float or two bfloat16.
typedef struct { const uint32_t *weight; const float *bias; int64_t n, k; } Linear;

typedef struct { const void *weight; float eps; int32_t offset; } Norm;  // no weight: no norm

typedef struct {
    Norm before, after, q, k;  // of attention; q and k of each head
    Norm mlp_before, mlp_after;
    Linear qkv, output, gate_up, down;
    int64_t window;      // 0: none
    int64_t rope;        // which of the pass's tables turns its queries and keys
} Layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, dim, inner, gelu;
    float scale, softcap, logit_softcap;  // 0: no cap
    const void *embedding;  // [vocabulary, hidden]
    float embedding_scale;  // 0: none
    Norm norm;
    Linear head;
    Layer *layer;
} Model;

typedef struct {
    int64_t groups;  // runs of columns of one row, at successive positions
    const int64_t *first, *count, *start, *row;  // of each: first column, columns, first position, cache row
    const void *const *rotary;  // tables, [positions, cos|sin, dim] each
    void *cache;  // [layers, k|v, rows, kv_heads, positions, dim], but keys in blocks (attention.inc)
    int64_t rows, positions;
} Pass;

static const I ORDER = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static inline V splat(float x) { return x - (V){0}; }
static inline V load(const float *p) { V v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, V v) { memcpy(p, &v, sizeof v); }
static inline V pick(I mask, V yes, V no) { return (V)(((I)yes & mask) | ((I)no & ~mask)); }
static inline V larger(V a, V b) { return pick(a > b, a, b); }

// Halves folded onto each other: in the same order in every pass.
#define FOLD(v, with) \
    v = with(v, __builtin_shuffle(v, ((I){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}))); \
    v = with(v, __builtin_shuffle(v, ((I){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}))); \
    v = with(v, __builtin_shuffle(v, ((I){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}))); \
    v = with(v, __builtin_shuffle(v, ((I){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14})));

static inline V plus(V a, V b) { return a + b; }
static inline float total(V v) { FOLD(v, plus) return v[0]; }
static inline float largest(V v) { FOLD(v, larger) return v[0]; }

// e^x within 2 ulp; 0 below the smallest normal number; NaN stays.
static inline V exponential(V x) {
    const I low = x < splat(-87.3f);
    x = pick(x > splat(88.0f), splat(88.0f), x);
    const V shifted = x * splat(1.44269504f) + splat(12582912.0f);
    const V n = shifted - splat(12582912.0f);
    const V r = (x - n * splat(0.693145752f)) - n * splat(1.42860677e-6f);
    V p = splat(1.0f / 5040);
    p = p * r + splat(1.0f / 720);
    p = p * r + splat(1.0f / 120);
    p = p * r + splat(1.0f / 24);
    p = p * r + splat(1.0f / 6);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    const U power = ((U)shifted << 23) + (127u << 23);
    return pick(low, splat(0.0f), p * (V)power);
}

static inline V hyperbolic_tangent(V x) {
    x = pick(x > splat(40.0f), splat(40.0f), x);
    return splat(1.0f) - splat(2.0f) / (exponential(x + x) + splat(1.0f));
}

static inline V activated(V x, int64_t gelu) {
    if (!gelu) return x / (exponential(-x) + splat(1.0f));
    const V inner = (x + x * x * x * splat(0.044715f)) * splat(0.797884561f);
    return x * splat(0.5f) * (hyperbolic_tangent(inner) + splat(1.0f));
}

// 16 x 16 words, in place: squares of 1, 2, 4 and 8 change places across the diagonal.
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

typedef struct { int64_t from, to; } Share;

static inline Share share(int64_t count) {
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    return (Share){count * me / threads, count * (me + 1) / threads};
}

// The query rows of a group that share a key head.
static inline int64_t queries(const Model *m, const Pass *p, int64_t g) {
    return p->count[g] * (m->heads / m->kv_heads);
}

// The runs of LANES positions, from a multiple of it on, that a group's columns reach into.
static inline int64_t runs(const Pass *p, int64_t g) {
    return (p->start[g] + p->count[g] - 1) / LANES - p->start[g] / LANES + 1;
}

static inline void bring(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch((const char *)from + i);
}

// A weight [n, words] in blocks; what is missing of the last one is zero.
void foredraft_pack(const uint32_t *weight, int64_t n, int64_t words, uint32_t *packed, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const Share blocks = share((n + BLOCK - 1) / BLOCK);
        for (int64_t block = blocks.from; block < blocks.to; block++)
            for (int64_t w = 0; w < words; w += LANES)
                for (int half = 0; half < BLOCK; half += LANES) {
                    const int64_t some = words - w < LANES ? words - w : LANES;
                    U m[LANES] = {0};
                    for (int i = 0; i < LANES; i++) {
                        const int64_t row = block * BLOCK + half + i;
                        if (row < n) memcpy(m + i, weight + row * words + w, some * sizeof(uint32_t));
                    }
                    transpose(m);
                    for (int64_t i = 0; i < some; i++)
                        memcpy(packed + (block * words + w + i) * BLOCK + half, m + i, sizeof(U));
                }
    }
}

enum { DONE, NO_MEMORY };  // what whoever needs memory of its own gives; without it, nothing was decided

// How a token is drawn, of each row; no temperature: the likeliest. The others may be missing, or say nothing by 1
// (top_p) or 0 (top_k, min_p). cut: whether top_p or min_p says anything.
typedef struct {
    const float *temperature;
    const int64_t *top_k;
    const float *top_p, *min_p;
    const uint8_t *cut;
} Drawing;

// Where drafts end, by how sure the model is of its likeliest token: `bins` - 1 rising edges, and a row each of the
// chances [rows, bins] that a place survives the one before it, and of the least survival [rows, steps] at which a
// token is drawn (keep) and another step taken (more). Out: sure [rows, steps], of every step that was taken.
typedef struct {
    int64_t bins;
    const float *edges, *chances, *keep, *more;
    float *sure;
} Stops;

int foredraft_max_prob(const float *x, int64_t rows, int64_t n, float *out, int threads);
static float survival(const Stops *stops, int64_t row, float sure, float before);

static int draw(
    const Drawing *how, int64_t row, const float *logits, int64_t n, const int64_t *key, int64_t *token,
    uint8_t *finite, float *law, int threads);

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
