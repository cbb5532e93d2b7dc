// Tries the pool alone, with threads that stall at random in the middle of a piece, at its commit and before they sleep.
// Every program computes numbers in operations that depend on each other, in memory that is used again, and counts how often
// each result is written. Compiled with the thread sanitiser too, so numbers are atomic: a late thread may read any of them.

#include "pool_stalls.h"

#include "pool.inc"

#include <stdio.h>
#include <sys/wait.h>

#ifndef PATIENCE
#define PATIENCE 20  // seconds until threads that are awake count as sleepless
#endif

enum { UNITS = 300, OPERATIONS = 12, CALLERS = 3, ROUNDS = 60 };

typedef _Atomic int64_t Number;
typedef struct { Number a[UNITS], b[UNITS], written[OPERATIONS][UNITS]; } Memory;
typedef struct { Memory *memory; int64_t seed; } Context;

static int64_t mixed(int64_t x, int64_t operation) { return (x ^ operation * 0x9E37) * 6364136223846793005 + 1442695040888963407; }

static int64_t get(const Number *x) { return atomic_load_explicit(x, memory_order_relaxed); }
static void set(Number *x, int64_t value) { atomic_store_explicit(x, value, memory_order_relaxed); }

// The units and the piece size of an operation: none, one, fewer than threads, and many.
static int64_t units_of(int64_t operation) { return (int64_t[]){UNITS, 1, 3, UNITS, 0, 97}[operation % 6]; }
static int64_t size_of(int64_t operation) { return (int64_t[]){7, 1, 1, 1, 4, 13}[operation % 6]; }

// b = f(a), or a = g(a, b) in place; every third operation writes at once.
static void chain(Worker *w, const void *context) {
    const Context *c = context;
    for (int64_t o = 0; o < OPERATIONS; o++) {
        const int64_t units = units_of(o), size = size_of(o);
        Number *from = c->memory->a, *to = o % 2 ? c->memory->a : c->memory->b;
        for (Piece p = o % 3 == 2 ? first_direct_piece(w, units, size) : first_piece(w, units, size); p.from < p.to;
             p = next_piece(w)) {
            int64_t own[UNITS];
            for (int64_t i = p.from; i < p.to; i++)
                own[i] = o % 2 ? get(from + i) + get(c->memory->b + (i + 1) % UNITS) : mixed(get(from + i) + c->seed, o);
            if (o % 3 != 2 && !commits(w)) continue;
            for (int64_t i = p.from; i < p.to; i++) {
                set(to + i, own[i]);
                atomic_fetch_add_explicit(&c->memory->written[o][i], 1, memory_order_relaxed);
            }
        }
    }
}

static void fail(const char *what, int64_t at) {
    printf("%s at %ld\n", what, (long)at);
    exit(1);
}

static void try_chain(Memory *memory, Memory *wanted, int threads, int64_t seed, int settles) {
    memset(memory, 0, sizeof *memory);
    memset(wanted, 0, sizeof *wanted);
    const Context context = {memory, seed}, alone = {wanted, seed};
    chain(&(Worker){.threads = 1}, &alone);
    run_copied(chain, &context, sizeof context, OPERATIONS, threads, settles);
    for (int64_t i = 0; i < UNITS; i++)
        if (get(memory->a + i) != get(wanted->a + i) || get(memory->b + i) != get(wanted->b + i)) fail("wrong number", i);
    for (int64_t o = 0; o < OPERATIONS; o++)
        for (int64_t i = 0; i < UNITS; i++)
            if (get(memory->written[o] + i) != (i < units_of(o))) fail("not written once", o * 1000 + i);
    while (!foredraft_settled()) nap();  // as kernels/pool.py does, before the memory is used for something else
}

static void *call(void *number) {
    Memory *memory = malloc(2 * sizeof *memory);
    for (int i = 0; i < ROUNDS; i++) try_chain(memory, memory + 1, 1 + (i + (int)(intptr_t)number) % 8, i, i % 2);
    free(memory);
    return NULL;
}

// Two pieces, each of which waits for the other to begin: they end only if a second thread comes.
static void meet(Worker *w, const void *context) {
    Number *begun = ((const Context *)context)->memory->a;
    const int64_t started = now();
    for (Piece p = first_direct_piece(w, 2, 1); p.from < p.to; p = next_piece(w)) {
        atomic_fetch_add(begun, 1);
        while (get(begun) < 2)
            if (now() - started > PATIENCE * 1000000000ll) fail("no thread woke", 0);
            else nap();
    }
}

static void wait_until_all_sleep(void) {
    const int64_t started = now();
    while (atomic_load(&pool.sleeping) < pool.threads)
        if (now() - started > PATIENCE * 1000000000ll) fail("threads that do not sleep", pool.threads - atomic_load(&pool.sleeping));
        else nap();
}

static void try_wakes(Memory *memory) {
    for (int i = 0; i < 20; i++) {
        set(memory->a, 0);
        if (i % 2) wait_until_all_sleep();
        else nanosleep(&(struct timespec){0, SPIN + i * 20000}, NULL);  // about when the others go to sleep
        const Context context = {memory, 0};
        run_program(meet, &context, sizeof context, 1, 2);
    }
}

int main(void) {
    Memory *memory = malloc(2 * sizeof *memory);
    pthread_t callers[CALLERS];
    for (intptr_t i = 0; i < CALLERS; i++) pthread_create(callers + i, NULL, call, (void *)i);
    for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
    try_wakes(memory);
    wait_until_all_sleep();
#ifdef FORKS
    const pid_t child = fork();
    if (!child) {
        try_chain(memory, memory + 1, 4, 1, 1);
        try_wakes(memory);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status) fail("a forked process", status);
#endif
    try_chain(memory, memory + 1, 4, 2, 1);
    if (!stalls_begun) fail("no stall", 0);
    printf("%d stalls\n", stalls_begun);
    return 0;
}
