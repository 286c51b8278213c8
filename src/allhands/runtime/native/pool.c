// See pool.h. The threads wait for the next job for a while without sleeping: jobs follow each other within
// microseconds, and waking a thread takes fifty.

#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define SPIN_NS 60000

static struct {
    void (*work)(void *, int, int);
    void *argument;
    atomic_int left; // parts that are not done
    // In one word: the number of the job (24 bits), the number of its parts (20), and the next part to be taken (20).
    // So a thread that wakes late takes no part of the next job by mistake, and nobody has to wait for that thread.
    _Atomic uint64_t ticket;
    _Atomic uint32_t number; // of the job
    atomic_int sleeping;
} job;

enum { PART_BITS = 20, MOST_PARTS = (1 << PART_BITS) - 1 };
static const uint64_t PART_MASK = MOST_PARTS;
static atomic_int wanted = 1;
static int started = 1; // threads there are, the caller included; changed under `lock`
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void take_parts(uint32_t number, int thread) {
    uint64_t ticket = atomic_load(&job.ticket);
    for (;;) {
        uint64_t next = ticket & PART_MASK, parts = ticket >> PART_BITS & PART_MASK;
        if (ticket >> (2 * PART_BITS) != (number & 0xffffff) || next >= parts)
            return;
        if (!atomic_compare_exchange_weak(&job.ticket, &ticket, ticket + 1))
            continue;
        job.work(job.argument, (int)next, thread);
        atomic_fetch_sub(&job.left, 1);
        ticket = atomic_load(&job.ticket);
    }
}

static void wait_for_job(uint32_t seen) {
    int64_t until = now_ns() + SPIN_NS;
    do
        for (int i = 0; i < 64; i++) {
            if (atomic_load(&job.number) != seen)
                return;
            relax();
        }
    while (now_ns() < until);
    atomic_fetch_add(&job.sleeping, 1);
    while (atomic_load(&job.number) == seen)
        syscall(SYS_futex, &job.number, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&job.sleeping, 1);
}

static uint32_t begins[MAX_THREADS]; // the number that each thread has seen when it starts

static void *serve(void *argument) {
    int thread = (int)(intptr_t)argument;
    uint32_t seen = begins[thread];
    for (;;) {
        wait_for_job(seen);
        seen = atomic_load(&job.number);
        if (thread < pool_threads())
            take_parts(seen, thread);
    }
    return NULL;
}

// After a fork: the new process has none of the threads.
static void forget_threads(void) {
    started = 1;
    pthread_mutex_init(&lock, NULL);
    atomic_store(&job.sleeping, 0);
}

// Start threads up to `count`, or as many as the system allows; the caller holds the lock.
static void start_threads(int count) {
    static int watching;
    if (!watching)
        watching = pthread_atfork(NULL, NULL, forget_threads) == 0;
    for (; watching && started < count; started++) {
        pthread_t thread;
        begins[started] = atomic_load(&job.number);
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)started) != 0)
            break;
        pthread_detach(thread);
    }
}

void pool_run(void (*work)(void *, int, int), void *argument, int parts) {
    int threads = pool_threads() < parts ? pool_threads() : parts;
    if (threads < 2 || parts > MOST_PARTS || pthread_mutex_trylock(&lock) != 0) {
        for (int part = 0; part < parts; part++)
            work(argument, part, 0);
        return;
    }
    start_threads(threads);
    job.work = work;
    job.argument = argument;
    atomic_store(&job.left, parts);
    uint32_t number = atomic_load(&job.number) + 1;
    atomic_store(&job.ticket, (uint64_t)(number & 0xffffff) << (2 * PART_BITS) | (uint64_t)parts << PART_BITS);
    atomic_store(&job.number, number);
    if (atomic_load(&job.sleeping) > 0)
        syscall(SYS_futex, &job.number, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
    take_parts(number, 0);
    for (int spins = 0; atomic_load(&job.left) > 0; spins++)
        spins < 10000 ? relax() : (void)sched_yield();
    pthread_mutex_unlock(&lock);
}

int pool_threads(void) { return atomic_load(&wanted); }

void pool_set_threads(int count) {
    atomic_store(&wanted, count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : count);
}
