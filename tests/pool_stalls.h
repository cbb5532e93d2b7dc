// Stalls threads of the pool at random moments, as a system does that takes them off their cores, and always before they
// sleep.

#pragma once

#include <stdint.h>
#include <time.h>

#ifndef ODDS
#define ODDS 50  // one of so many moments is one of a stall
#endif

static __thread uint64_t moments;
static _Atomic int stalls_begun;

static void stall(int where) {
    if (!moments) moments = (uint64_t)(uintptr_t)&moments ^ (uint64_t)time(NULL);  // another row in each thread and run
    moments = moments * 6364136223846793005u + 1442695040888963407u;
    if (where != 2 && (moments >> 33) % ODDS) return;
    stalls_begun++;
    nanosleep(&(struct timespec){0, where == 2 ? 20000000 : (long)(moments >> 40) % 1000000}, NULL);  // up to a millisecond
}

#define STALL(where) stall(where)
