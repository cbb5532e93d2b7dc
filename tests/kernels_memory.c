// The kernels over buffers that end where their contents do, for a compiler that watches memory (AddressSanitizer):
// odd sizes, rows that end at the cache's end, groups of different lengths, sub-layers left out. Then the same where
// memory is short: whatever allocation fails, a kernel says so, and gives back what it had.

#include <stdint.h>
#include <stdlib.h>

static int64_t allowed = INT64_MAX, held;  // allocations of the kernels that succeed, and those not given back

static void *scarce(size_t size) {
    if (__atomic_fetch_sub(&allowed, 1, __ATOMIC_SEQ_CST) <= 0) return NULL;
    __atomic_fetch_add(&held, 1, __ATOMIC_SEQ_CST);
    return malloc(size);
}

static void give_back(void *memory) {
    if (memory) __atomic_fetch_sub(&held, 1, __ATOMIC_SEQ_CST);
    free(memory);
}

#define malloc scarce
#define free give_back
#include "kernels.c"
#undef malloc
#undef free

#include <stdio.h>

// How many allocations the call needs; it must fail with any fewer.
#define NEEDED(call) \
    ({ \
        int64_t needed = 0; \
        for (;; needed++) { \
            allowed = needed; \
            const int failed = call; \
            if (held) printf("kept %ld of %ld: " #call "\n", (long)held, (long)needed), exit(1); \
            if (!failed) break; \
        } \
        allowed = INT64_MAX; \
        needed; \
    })

static uint64_t state = 1;

static float noise(void) {
    state = mixed(state + 0x9E3779B97F4A7C15u);
    return (float)(state >> 40) * 0x1p-23f - 1;
}

static void *room_for(int64_t values, int64_t size) { return malloc(values * size); }

static float *floats(int64_t count) {
    float *x = room_for(count, sizeof(float));
    for (int64_t i = 0; i < count; i++) x[i] = noise();
    return x;
}

static void *elements(int64_t count, int word) {
    if (word == 1) return floats(count);
    uint16_t *x = room_for(count, sizeof(uint16_t));
    for (int64_t i = 0; i < count; i++) {
        const float value = noise();
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        x[i] = bits >> 16;
    }
    return x;
}

static Linear linear(int64_t n, int64_t k, int word) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK, words = k / word;
    uint32_t *weight = elements(n * k, word), *packed = room_for(blocks * words * BLOCK, sizeof(uint32_t));
    foredraft_pack(weight, n, words, packed, 3);
    free(weight);
    return (Linear){packed, floats(blocks * BLOCK), n, k};
}

static Norm norm(int64_t n, int word, int offset) {
    return (Norm){offset ? floats(n) : elements(n, word), 1e-6f, offset};
}

static void drop(Linear l) { free((void *)l.weight), free((void *)l.bias); }

// A whole model of two layers, every kind of norm and cap, at the end of a cache that holds no position more.
static void layers(int word, int64_t dim, int64_t kv_heads, int64_t each, int64_t hidden, int64_t inner, int64_t window) {
    enum { ROWS = 3, POSITIONS = 128, GROUPS = 3 };
    const int64_t heads = kv_heads * each, width = (heads + 2 * kv_heads) * dim;
    const int64_t first[GROUPS] = {0, 33, 34}, count[GROUPS] = {33, 1, 5}, start[GROUPS] = {POSITIONS - 33, 0, 62};
    const int64_t row[GROUPS] = {2, 0, 1}, columns = 39;
    Layer layer[2];
    for (int i = 0; i < 2; i++)
        layer[i] = (Layer){
            norm(hidden, word, i), i ? norm(hidden, word, i) : (Norm){0}, norm(dim, word, i), norm(dim, word, i),
            norm(hidden, word, i), i ? norm(hidden, word, i) : (Norm){0}, linear(width, hidden, word),
            linear(hidden, heads * dim, word), linear(2 * inner, hidden, word), linear(hidden, inner, word),
            i ? window : 0, 0};
    void *embedding = elements(45 * hidden, word);
    const Model m = {2, hidden, heads, kv_heads, dim, inner, 1, 0.3f, 5, 7, embedding, 1.5f,
                     norm(hidden, word, 0), linear(45, hidden, word), layer};
    void *table = elements(POSITIONS * 2 * dim, word), *cache = elements(4 * ROWS * kv_heads * POSITIONS * dim, word);
    const void *rotary[1] = {table};
    const Pass p = {GROUPS, first, count, start, row, rotary, cache, ROWS, POSITIONS};
    const int64_t a = width > 2 * inner ? width : 2 * inner, b = heads * dim > inner ? heads * dim : inner;
    void *x = elements(columns * hidden, word), *room = elements(columns * (hidden + a + b), word);
    float *logits = room_for(columns * 45, sizeof(float));
    int64_t tokens[39], slot[GROUPS] = {2, 0, 3}, most[GROUPS] = {1, 4, 2}, keys[4 * 4], drawn[4 * 4];
    for (int i = 0; i < columns; i++) tokens[i] = i * 7 % 45;
    for (int i = 0; i < 16; i++) keys[i] = (int64_t)mixed(i);
    const float temperature[4] = {1, 0.5f, 2, 1}, top_p[4] = {0.5f, 1, 1, 0.9f}, min_p[4] = {0, 0, 0.1f, 0.2f};
    const uint8_t cut[4] = {1, 0, 1, 1};
    const int64_t top_k[4] = {0, 1, 44, 100};
    const Drawing ways[2] = {{0}, {temperature, top_k, top_p, min_p, cut}};
    uint8_t *finite = room_for(4 * 4, 1);
    const float edges[2] = {0.03f, 0.3f}, chances[4 * 3] = {1, 1, 1, 0.5f, 0.6f, 1, 1, 1, 1, 0.2f, 1, 1};
    const float keep[4 * 4] = {0, 0, 0.3f}, more[4 * 4] = {0, 0.4f};
    float *sure = room_for(4 * 4, sizeof(float));
    int64_t counts[4 * 2];
    const Stops stops = {3, edges, chances, keep, more, sure};
    float *probs = room_for(4 * 4 * 45, sizeof(float)), *own = room_for(GROUPS * 45, sizeof(float));
    void *wide_room = elements(columns * (2 * hidden + a + b), word);
    const uint8_t plans[3][2] = {{1, 1}, {0, 1}, {0, 0}};
    for (int plan = 0; plan < 3; plan++)
        for (int threads = 1; threads < 4; threads += 2) {
            if (word == 1) {
                foredraft_forward_float32(&m, &p, plan ? NULL : tokens, x, columns, plans[plan], plans[2 - plan], 0, 2,
                                          room, logits, threads);
                foredraft_draft_float32(&m, &p, tokens, columns, plans[plan], plans[2 - plan], 2, slot, most, 4,
                                        ways + plan % 2, keys, wide_room, own, drawn, finite, probs, plan ? &stops : NULL,
                                        counts, threads);
            } else {
                foredraft_forward_bfloat16(&m, &p, plan ? NULL : tokens, x, columns, plans[plan], plans[2 - plan], 0, 2,
                                           room, logits, threads);
                foredraft_draft_bfloat16(&m, &p, tokens, columns, plans[plan], plans[2 - plan], 2, slot, most, 4,
                                         ways + plan % 2, keys, wide_room, own, drawn, finite, probs, plan ? &stops : NULL,
                                        counts, threads);
            }
        }
    if (hidden == 2) {  // the smallest
        const int64_t tried = word == 1
            ? NEEDED(foredraft_draft_float32(&m, &p, tokens, columns, plans[0], plans[0], 2, slot, most, 4, ways + 1,
                                             keys, wide_room, own, drawn, finite, probs, &stops, counts, 2))
            : NEEDED(foredraft_draft_bfloat16(&m, &p, tokens, columns, plans[0], plans[0], 2, slot, most, 4, ways + 1,
                                              keys, wide_room, own, drawn, finite, probs, &stops, counts, 2));
        if (tried < 1 + 7 * 3) printf("a draft of 7 tokens allocates %ld times\n", (long)tried), exit(1);
    }
    for (int64_t i = 0; i < columns * 45; i++)
        if (!isfinite(logits[i])) printf("not finite: %ld\n", (long)i), exit(1);
    for (int i = 0; i < 2; i++) {
        const Norm *norms[] = {&layer[i].before, &layer[i].after, &layer[i].q, &layer[i].k, &layer[i].mlp_before,
                               &layer[i].mlp_after};
        for (int n = 0; n < 6; n++) free((void *)norms[n]->weight);
        drop(layer[i].qkv), drop(layer[i].output), drop(layer[i].gate_up), drop(layer[i].down);
    }
    free((void *)m.norm.weight), drop(m.head);
    free(table), free(cache), free(x), free(room), free(logits), free(embedding);
    free(finite), free(sure), free(probs), free(own), free(wide_room);
}

static void rows(int64_t count, int64_t n) {
    float *x = floats(count * n), *probs = room_for(count * n, sizeof(float)), *tops = floats(count);
    float *temperature = room_for(count, sizeof(float)), *mass = room_for(count, sizeof(float));
    int64_t *ids = room_for(count, sizeof(int64_t)), *keys = room_for(count, sizeof(int64_t));
    uint8_t *cut = room_for(count, 1);
    for (int64_t r = 0; r < count; r++)
        temperature[r] = 0.5f + r, mass[r] = 0.3f * r, cut[r] = r % 2, keys[r] = (int64_t)mixed(r);
    uint8_t *finite = room_for(count, 1);
    double *units = room_for(count, sizeof(double));
    float *left = room_for(count * n, sizeof(float));
    foredraft_argmax(x, count, n, ids, finite, 2);
    foredraft_max_prob(x, count, n, tops, 2);
    foredraft_residual(x, NULL, ids, cut, count, n, left);
    foredraft_residual(left, x, NULL, cut, count, n, left);
    foredraft_probs(x, temperature, keys, mass, mass, cut, 1, count, n, probs, finite, 2);
    foredraft_hash_keys(keys, NULL, keys, NULL, 4, count, 1, ids);
    foredraft_uniform(ids, count, units);
    foredraft_softmax(x, temperature, NULL, 1, count, n, probs, finite, 2);
    foredraft_nucleus(probs, mass, count, n, tops, 2);
    foredraft_trim(probs, tops, cut, count, n, 2);
    foredraft_gumbel_argmax(probs, keys, count, n, ids, 2);
    for (int64_t r = 0; r < count; r++)
        if (ids[r] < 0 || ids[r] >= n) printf("no id: %ld\n", (long)ids[r]), exit(1);
    x[n / 2] = NAN;
    foredraft_softmax(x, temperature, NULL, 1, count, n, probs, finite, 2);
    foredraft_nucleus(probs, mass, count, n, tops, 2);
    foredraft_gumbel_argmax(probs, keys, count, n, ids, 2);
    free(finite), free(units), free(left);
    free(x), free(probs), free(tops), free(temperature), free(mass), free(ids), free(keys), free(cut);
}

static void expect(int64_t needed, int64_t wanted, const char *what) {
    if (needed != wanted) printf("%s fails up to %ld, not %ld\n", what, (long)needed, (long)wanted), exit(1);
}

static void short_of_memory(void) {
    enum { ROWS = 3, N = 20011 };
    float *x = floats(ROWS * N), *probs = floats(ROWS * N);
    const float temperature[ROWS] = {1, 2, 0.5f}, top_p[ROWS] = {0.5f, 0.9f, 0.1f};
    const int64_t top_k[ROWS] = {5, 0, 100}, keys[ROWS] = {1, 2, 3};
    const uint8_t cut[ROWS] = {1, 1, 1};
    int64_t ids[ROWS];
    uint8_t finite[ROWS];
    for (int threads = 1; threads < 3; threads++) {
        expect(NEEDED(foredraft_argmax(x, ROWS, N, ids, finite, threads)), 1, "best");
        expect(NEEDED(foredraft_probs(x, temperature, top_k, top_p, NULL, cut, 1, ROWS, N, probs, finite, threads)),
               1 + 2 + 1 + ROWS + 1, "law");
        expect(NEEDED(foredraft_max_prob(x, ROWS, N, probs, threads)), 1, "surest");
        expect(NEEDED(foredraft_gumbel_argmax(probs, keys, ROWS, N, ids, threads)), 1, "race");
        const Drawing how = {temperature, top_k, top_p, NULL, cut};
        expect(NEEDED(draw(&how, 0, x, N, keys, ids, finite, probs, threads)), 1 + 1 + 1 + 1 + 1 + 1, "draw");
    }
    free(x), free(probs);
}

int main(void) {
    short_of_memory();
    for (int word = 1; word < 3; word++) {
        layers(word, 2, 1, 1, 2, 2, 0);
        layers(word, 6, 2, 3, 10, 14, 7);
        layers(word, 80, 1, 9, 34, 70, 64);
        layers(word, 500, 1, 1, 16, 32, 1);
        layers(word, 512, 1, 2, 16, 32, 40);
    }
    const int64_t widths[] = {1, 2, 15, 16, 17, 127, 129, 1000, 20011};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) rows(1, widths[i]), rows(3, widths[i]);
    return 0;
}
