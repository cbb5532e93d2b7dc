// Runs the kernels under AddressSanitizer, over buffers that end where their contents end: odd sizes, cache rows that
// are full, groups of different lengths, skipped sub-layers. Then fails each of their allocations in turn: the kernel
// must report it and free what it has.

#include <stdint.h>
#include <stdlib.h>

static int64_t allowed = INT64_MAX;  // allocations that still succeed
static int64_t live;                 // allocations that are not freed

static void *limited_malloc(size_t size) {
    if (__atomic_fetch_sub(&allowed, 1, __ATOMIC_SEQ_CST) <= 0) return NULL;
    __atomic_fetch_add(&live, 1, __ATOMIC_SEQ_CST);
    return malloc(size);
}

static void counted_free(void *memory) {
    if (memory) __atomic_fetch_sub(&live, 1, __ATOMIC_SEQ_CST);
    free(memory);
}

#include "pool.inc"  // keeps its memory for the next call

#define malloc limited_malloc
#define free counted_free
#include "kernels.c"
#undef malloc
#undef free

#include <stdio.h>

// As kernels/pool.py does: late threads may still read what a call was given.
static void settled_free(void *memory) {
    while (!foredraft_settled()) nap();
    free(memory);
}

#define free settled_free

// The number of allocations that the call needs; with any fewer, it must fail and free what it has.
#define NEEDED(call) \
    ({ \
        int64_t needed = 0; \
        for (;; needed++) { \
            allowed = needed; \
            const int failed = (call) & NO_MEMORY; \
            if (live) printf("%ld of %ld allocations leak: " #call "\n", (long)live, (long)needed), exit(1); \
            if (!failed) break; \
        } \
        allowed = INT64_MAX; \
        needed; \
    })

static uint64_t state = 1;

static float noise(void) {
    state = mix64(state + 0x9E3779B97F4A7C15u);
    return (float)(state >> 40) * 0x1p-23f - 1;
}

static void *array(int64_t values, int64_t size) { return malloc(values * size); }

static float *floats(int64_t count) {
    float *x = array(count, sizeof(float));
    for (int64_t i = 0; i < count; i++) x[i] = noise();
    return x;
}

// Kinds of elements: float32, bfloat16, float16.
#define CALL(kind, name, ...) \
    (kind == 1 ? name##_float32(__VA_ARGS__) : kind == 2 ? name##_bfloat16(__VA_ARGS__) : name##_float16(__VA_ARGS__))

// The elements of work memory that a row of inputs takes.
static int64_t room_of(int word, int64_t k) { return word == 1 ? 0 : 2 * ((k + CHUNK - 1) / CHUNK * CHUNK); }

static void *elements(int64_t count, int word) {
    if (word == 1) return floats(count);
    uint16_t *x = array(count, sizeof(uint16_t));
    for (int64_t i = 0; i < count; i++) {
        const float value = noise();
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        x[i] = bits >> 16;
    }
    return x;
}

static Linear linear(int64_t n, int64_t k, int word) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK, words = word == 1 ? k : k / 2;
    uint32_t *weight = elements(n * k, word), *packed = array(blocks * words * BLOCK, sizeof(uint32_t));
    foredraft_pack(weight, n, words, word == 3, packed, 3);
    free(weight);
    return (Linear){packed, floats(blocks * BLOCK), n, k, .inputs = n % 3};
}

enum { ROUNDED, WIDE, CENTRED };  // an RMS norm with weights of the model's dtype, one in float32, a layer norm

static Norm norm(int64_t n, int word, int kind) {
    return (Norm){
        .weight = kind ? floats(n) : elements(n, word), .bias = kind == CENTRED ? floats(n) : NULL, .eps = 1e-6f,
        .wide = kind != ROUNDED, .centred = kind == CENTRED};
}

static void free_linear(Linear l) { free((void *)l.weight), free((void *)l.bias); }

enum { VOCABULARY = 45, TOKENS = 60, COLUMNS = 39, GROUPS = 3, ROWS = 4, STEPS = 4, LEARNED = 5 };  // of the model, its pass and its draft

// A model of two layers with every kind of norm and cap; or a head that reads pairs.
static Model new_model(
    int word, int64_t dim, int64_t kv_heads, int64_t heads, int64_t hidden, int64_t inner, int64_t window,
    int pairs, Layer *layer) {
    const int64_t width = (heads + 2 * kv_heads) * dim, first = pairs ? 2 * hidden : hidden;
    for (int i = 0; i < 2; i++)
        layer[i] = (Layer){
            .before = norm(hidden, word, i), .after = i ? norm(hidden, word, i) : (Norm){0},
            .q = norm(dim, word, i), .k = norm(dim, word, i), .v = i ? norm(dim, word, i) : (Norm){0},
            .mlp_before = norm(hidden, word, i ? CENTRED : ROUNDED), .mlp_after = i ? norm(hidden, word, CENTRED) : (Norm){0},
            .qkv = linear(width, i ? hidden : first, word), .output = linear(hidden, heads * dim, word),
            .gate_up = linear(2 * inner, hidden, word), .down = linear(hidden, inner, word),
            .window = i ? window : 0, .rotated = dim, .kv_heads = kv_heads, .dim = dim, .inner = inner,
            .scalar = i ? 0.5f : 1};
    const Linear head = linear(VOCABULARY, hidden, word);  // in float32, the embedding too
    Model m = {
        2, hidden, heads, .activation = GELU_TANH, .gated = 1, .wide = width > 2 * inner ? width : 2 * inner,
        .scale = 0.3f, .softcap = 5,
        .logit_softcap = 7, .embedding = word == 1 && !pairs ? NULL : elements((pairs ? TOKENS : VOCABULARY) * hidden, word), .tied = head,
        .embedding_scale = 1.5f, .learned = elements((LEARNED + 1) * hidden, word), .last_learned = LEARNED,
        .norm = norm(hidden, word, ROUNDED), .head = head, .layer = layer};
    if (pairs) {
        m.pairs = m.residual = m.recurs = 1;
        m.token_norm = norm(hidden, word, ROUNDED), m.state_norm = norm(hidden, word, ROUNDED);
    }
    return m;
}

static void free_model(Model m) {
    for (int i = 0; i < 2; i++) {
        const Layer *l = m.layer + i;
        const Norm *norms[] = {&l->before, &l->after, &l->q, &l->k, &l->v, &l->mlp_before, &l->mlp_after};
        for (int n = 0; n < 7; n++) free((void *)norms[n]->weight), free((void *)norms[n]->bias);
        free_linear(l->qkv), free_linear(l->output), free_linear(l->gate_up), free_linear(l->down);
    }
    free((void *)m.embedding), free((void *)m.learned), free((void *)m.norm.weight), free_linear(m.head);
    free((void *)m.token_norm.weight), free((void *)m.state_norm.weight);
}

static int run_draft(
    int word, const Model *m, const Pass *p, const Draft *d, const uint8_t *attention, const uint8_t *mlp,
    void *scratch, float *logits, int threads) {
    return CALL(word, foredraft_draft, m, p, d, attention, mlp, 2, scratch, logits, threads);
}

// Fused drafts of the pass's groups: greedy and sampled.
static void drafts(
    int word, const Model *m, const Pass *p, const int64_t *tokens, const uint8_t (*plans)[2], void *scratch) {
    const int64_t slot[GROUPS] = {2, 0, 3}, length[GROUPS] = {1, 4, 2};
    const int64_t count = m->pairs ? TOKENS : VOCABULARY;  // a head of pairs has outputs for some tokens
    int64_t keys[ROWS * STEPS], drawn[ROWS * STEPS];
    for (int i = 0; i < ROWS * STEPS; i++) keys[i] = (int64_t)mix64(i);
    const float temperature[ROWS] = {1, 0.5f, 2, 1};
    const float top_p[ROWS] = {0.5f, 1, 1, 0.9f}, min_p[ROWS] = {0, 0, 0.1f, 0.2f};
    const uint8_t cut[ROWS] = {1, 0, 1, 1};
    const int64_t top_k[ROWS] = {0, 1, 44, 100};
    const Sampling sampling[2] = {{0}, {temperature, top_k, top_p, min_p, cut}};
    uint8_t *finite = array(ROWS * STEPS, 1);
    float *probs = array(ROWS * STEPS * count, sizeof(float));
    float *logits = array(GROUPS * VOCABULARY + (m->pairs ? TOKENS : 0), sizeof(float));
    uint8_t *mask = array(count, 1);
    for (int i = 0; i < count; i++) mask[i] = i % 3 == 0;
    uint8_t *none = array(count, 1);  // a draft that cannot begin
    const uint8_t *const masks[ROWS] = {none, NULL, mask, NULL};
    memset(none, 0, count);
    Draft d = {tokens, COLUMNS, STEPS, slot, length, NULL, keys, NULL, drawn, finite, probs, 1, NULL};
    void *states = array(ROWS * STEPS * m->hidden, word == 1 ? sizeof(float) : sizeof(uint16_t));
    int64_t draft_vocab[VOCABULARY];
    for (int i = 0; i < VOCABULARY; i++) draft_vocab[i] = TOKENS - 1 - i;
    void *pairs = elements(COLUMNS * m->hidden, word), *left = elements(ROWS * m->hidden, word);
    if (m->pairs) d.pairs = pairs, d.left = left, d.draft_vocab = draft_vocab, d.vocabulary = TOKENS;
    for (int plan = 0; plan < 3; plan++)
        for (int threads = 1; threads < 4; threads += 2) {
            d.sampling = sampling + plan % 2;
            d.allowed = threads > 1 ? masks : NULL;
            d.states = plan ? states : NULL;
            run_draft(word, m, p, &d, plans[plan], plans[2 - plan], scratch, logits, threads);
        }
    if (m->hidden == 2) {  // the allocations do not depend on the size: the smallest model is enough
        d.sampling = sampling + 1;
        const int64_t needed = NEEDED(run_draft(word, m, p, &d, plans[0], plans[0], scratch, logits, 2));
        if (needed < 1 + 7 * 3) printf("a draft of 7 tokens allocates %ld times\n", (long)needed), exit(1);
    }
    free(pairs), free(left);
    free(states), free(none), free(mask), free(finite), free(probs), free(logits);
}

// Forward passes and drafts of a model, whose cache has no position to spare.
static void passes(
    int word, int64_t dim, int64_t kv_heads, int64_t heads_per_kv, int64_t hidden, int64_t inner, int64_t window,
    int pairs) {
    enum { CACHE_ROWS = 3, POSITIONS = 128 };
    const int64_t heads = kv_heads * heads_per_kv, width = (heads + 2 * kv_heads) * dim;
    const int64_t first[GROUPS] = {0, 33, 34}, count[GROUPS] = {33, 1, 5}, start[GROUPS] = {POSITIONS - 33, pairs, 62};
    const int64_t row[GROUPS] = {2, 0, 1};
    Layer layer[2];
    Model m = new_model(word, dim, kv_heads, heads, hidden, inner, window, pairs, layer);
    void *table = elements(POSITIONS * 2 * dim, word);
    void *cache[2];  // of each layer
    for (int i = 0; i < 2; i++) cache[i] = elements(2 * CACHE_ROWS * kv_heads * POSITIONS * dim, word);
    const void *rotary[1] = {table};
    void *inputs = elements(COLUMNS * hidden, word);
    const Pass p = {GROUPS, first, count, start, row, NULL, rotary, cache, CACHE_ROWS, POSITIONS, inputs};
    const int64_t wide = width > 2 * inner ? width : 2 * inner, narrow = heads * dim > inner ? heads * dim : inner;
    m.room = room_of(word, narrow > (1 + pairs) * hidden ? narrow : (1 + pairs) * hidden);
    void *x = elements(COLUMNS * hidden, word), *scratch = elements(COLUMNS * (m.room + (1 + pairs) * hidden + wide + narrow), word);
    void *draft_scratch = elements(COLUMNS * (m.room + (2 + 2 * pairs) * hidden + wide + narrow), word);
    void *states = elements(COLUMNS * hidden, word);
    const int64_t aux_layer = 1;
    float *logits = array(COLUMNS * VOCABULARY, sizeof(float));
    int64_t tokens[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) tokens[i] = i * 7 % VOCABULARY;
    const uint8_t plans[3][2] = {{1, 1}, {0, 1}, {0, 0}};
    for (int plan = 0; plan < 3; plan++)
        for (int threads = 1; threads < 4; threads += 2) {
            const int64_t *embedded = plan ? NULL : tokens;
            const uint8_t *attention = plans[plan], *mlp = plans[2 - plan];
            CALL(word, foredraft_forward, &m, &p, embedded, x, COLUMNS, attention, mlp, 0, 2, &aux_layer, 1, states, scratch, logits,
                 threads);
        }
    drafts(word, &m, &p, tokens, plans, draft_scratch);
    for (int64_t i = 0; i < COLUMNS * VOCABULARY; i++)
        if (!isfinite(logits[i])) printf("logit %ld is not finite\n", (long)i), exit(1);
    free_model(m);
    free(inputs);
    free(table), free(cache[0]), free(cache[1]), free(x), free(scratch), free(draft_scratch), free(logits);
    free(states);
}

// Products with coded weights, of no row, part or block too many.
static void coded_products(int word, int64_t n, int64_t k) {
    const int64_t rows[] = {1, 5, 16, 17, 33, 64, 70};
    const CodeFormat code_formats[] = {
        {4, BFLOAT16, 32, -8}, {8, BFLOAT16, 32, -128}, {4, FLOAT16, 32, -8, .zeros = 1}, {4, FLOAT32, 32, -8},
        {8, FLOAT32, 32, -128}, {4, FLOAT16, 32, 0, .offsets = 1}, {5, FLOAT16, 32, 0, .offsets = 1}, {5, FLOAT16, 32, -16},
        {8, FLOAT32, 16, -128, .offsets = 1}, {4, FLOAT16, 32, -8, .book = 1}, {4, NESTED, 32, -8, .book = 1},
        {2, NESTED, 16, 0, .offsets = 1}, {3, NESTED, 16, -4}, {4, NESTED, 32, 0, .offsets = 1},
        {5, NESTED, 32, 0, .offsets = 1}, {6, NESTED, 16, -32}, {6, NESTED, 16, -32, .offsets = 1},
        {8, NESTED, 16, -128, .offsets = 1}, {8, BFLOAT16, 32, -128, .float8 = 1},
    };
    int8_t *codes = array(n * k, 1);
    for (int64_t i = 0; i < n * k; i++) codes[i] = i * 7 % 16 - 8;
    // as float32, which is the longest, for 16 columns each
    uint8_t *scales = elements(n * (k / 16), 1), *offsets = elements(n * (k / 16), 1);
    uint16_t *steps = array(n * (k / 256) + 1, 2);
    int32_t *order = array(k, sizeof(int32_t));
    for (int64_t j = 0; j < k; j++) order[j] = k - 1 - j;
    const Codes all = {codes, scales, offsets, steps, steps};
    for (size_t c = 0; c < sizeof code_formats / sizeof *code_formats; c++) {
        if (code_formats[c].scale == NESTED && k % (GROUP_COLUMNS * SUPER)) continue;
        const int64_t blocks = (n + BLOCK - 1) / BLOCK;
        uint8_t *packed = array(blocks * block_bytes(code_formats[c], k), 1);
        foredraft_pack_codes(&all, n, k, code_formats + c, packed, 3);
        const Linear l = {packed, NULL, n, k, code_formats[c], .order = c % 2 ? order : NULL};
        const int64_t ends[] = {0, n - 1};
        void *taken = elements(2 * k, word);
        CALL(word, foredraft_rows, &l, ends, 2, taken);
        free(taken);
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            void *x = elements(rows[i] * k, word), *y = elements(rows[i] * n, word);
            void *room = elements(rows[i] * room_of(word, k), word);
            CALL(word, foredraft_product, &l, x, rows[i], y, room, 3);
            free(x), free(y), free(room);
        }
        free(packed);
    }
    free(codes), free(scales), free(offsets), free(steps), free(order);
}

// Every vocabulary operation, over `count` rows of n values.
static void vocabulary_operations(int64_t count, int64_t n) {
    float *x = floats(count * n), *probs = array(count * n, sizeof(float)), *least = floats(count);
    float *temperature = array(count, sizeof(float)), *mass = array(count, sizeof(float));
    int64_t *ids = array(count, sizeof(int64_t)), *keys = array(count, sizeof(int64_t));
    uint8_t *cut = array(count, 1);
    for (int64_t r = 0; r < count; r++)
        temperature[r] = 0.5f + r, mass[r] = 0.3f * r, cut[r] = r % 2, keys[r] = (int64_t)mix64(r);
    uint8_t *finite = array(count, 1);
    double *units = array(count, sizeof(double));
    float *residual = array(count * n, sizeof(float));
    foredraft_argmax(x, count, n, ids, finite, 2);
    foredraft_max_prob(x, count, n, least, 2);
    foredraft_residual(x, NULL, ids, cut, count, n, residual);
    foredraft_residual(residual, x, NULL, cut, count, n, residual);
    foredraft_probs(x, temperature, keys, mass, mass, cut, 1, count, n, probs, finite, 2);
    foredraft_hash_keys(keys, NULL, keys, NULL, 4, count, 1, ids);
    foredraft_uniform(ids, count, units);
    softmax_rows(x, temperature, NULL, 1, count, n, probs, finite, 2);
    foredraft_nucleus(probs, mass, count, n, least, 2);
    trim_rows(probs, least, cut, count, n, 2);
    foredraft_gumbel_argmax(probs, keys, count, n, ids, 2);
    for (int64_t r = 0; r < count; r++)
        if (ids[r] < 0 || ids[r] >= n) printf("%ld is not a token\n", (long)ids[r]), exit(1);
    x[n / 2] = NAN;
    softmax_rows(x, temperature, NULL, 1, count, n, probs, finite, 2);
    foredraft_nucleus(probs, mass, count, n, least, 2);
    foredraft_gumbel_argmax(probs, keys, count, n, ids, 2);
    free(finite), free(units), free(residual);
    free(x), free(probs), free(least), free(temperature), free(mass), free(ids), free(keys), free(cut);
}

static void expect(int64_t needed, int64_t wanted, const char *name) {
    if (needed != wanted) printf("%s needs %ld allocations, not %ld\n", name, (long)needed, (long)wanted), exit(1);
}

static void failing_allocations(void) {
    enum { COUNT = 3, N = 20011 };
    float *x = floats(COUNT * N), *probs = floats(COUNT * N);
    const float temperature[COUNT] = {1, 2, 0.5f}, top_p[COUNT] = {0.5f, 0.9f, 0.1f};
    const int64_t top_k[COUNT] = {5, 0, 100}, keys[COUNT] = {1, 2, 3};
    const uint8_t cut[COUNT] = {1, 1, 1};
    int64_t ids[COUNT];
    uint8_t finite[COUNT];
    for (int threads = 1; threads < 3; threads++) {
        expect(NEEDED(foredraft_argmax(x, COUNT, N, ids, finite, threads)), 1, "argmax");
        expect(NEEDED(foredraft_probs(x, temperature, top_k, top_p, NULL, cut, 1, COUNT, N, probs, finite, threads)),
               1 + 2 + 1 + COUNT + 1, "probs");
        expect(NEEDED(foredraft_max_prob(x, COUNT, N, probs, threads)), 1, "max_prob");
        expect(NEEDED(foredraft_gumbel_argmax(probs, keys, COUNT, N, ids, threads)), 1, "gumbel_argmax");
        const Sampling sampling = {temperature, top_k, top_p, NULL, cut};
        expect(NEEDED(draw(&sampling, 0, x, N, keys, ids, finite, probs, threads)), 1 + 1 + 1 + 1 + 1 + 1, "draw");
    }
    free(x), free(probs);
}

int main(void) {
    failing_allocations();
    for (int word = 1; word < 4; word++) {
        passes(word, 2, 1, 1, 2, 2, 0, 0);
        passes(word, 6, 2, 3, 10, 14, 7, 0);
        passes(word, 80, 1, 9, 34, 70, 64, 0);
        passes(word, 500, 1, 1, 16, 32, 1, 0);
        passes(word, 512, 1, 2, 16, 32, 40, 0);
        passes(word, 6, 2, 3, 10, 14, 7, 1);
        coded_products(word, 45, 96), coded_products(word, 1, 32), coded_products(word, 33, 512);
    }
    const int64_t widths[] = {1, 2, 15, 16, 17, 127, 129, 1000, 20011};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        vocabulary_operations(1, widths[i]), vocabulary_operations(3, widths[i]);
    return 0;
}
