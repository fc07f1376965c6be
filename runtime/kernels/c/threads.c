#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
enum { USUAL_ROUNDING = 0x1f80 };  // nearest, ties to even; subnormal numbers are numbers
#else
enum { USUAL_ROUNDING = 0 };
#endif

enum { MOST_THREADS = 256, SPINS = 4000 };  // some 100 microseconds, then a thread sleeps

// Threads wait for a number to change: for a while with open eyes.
typedef struct {
  atomic_uint number, num_asleep;
  pthread_mutex_t lock;
  pthread_cond_t rung;
} bell;

static bell started = {0, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER};
static bell met = {0, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER};
static pthread_mutex_t one_job = PTHREAD_MUTEX_INITIALIZER;
static atomic_int num_arrived, next_unit;
static int num_workers, num_threads;  // those that wait for jobs; those of the job under way
static void (*job)(void *);
static void *job_argument;
static _Thread_local int number_here;  // of a caller: 0

int thread_number(void) { return number_here; }

static void ring(bell *b, unsigned number) {
  atomic_store(&b->number, number);
  if (!atomic_load(&b->num_asleep)) return;
  pthread_mutex_lock(&b->lock);
  pthread_cond_broadcast(&b->rung);
  pthread_mutex_unlock(&b->lock);
}

static void wait_for(bell *b, unsigned old) {
  for (int i = 0; i < SPINS; ++i) {
    if (atomic_load_explicit(&b->number, memory_order_acquire) != old) return;
    if (i % 64 == 63) sched_yield();  // whoever is waited for may want this very core
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }
  pthread_mutex_lock(&b->lock);
  atomic_fetch_add(&b->num_asleep, 1);
  while (atomic_load(&b->number) == old) pthread_cond_wait(&b->rung, &b->lock);
  atomic_fetch_sub(&b->num_asleep, 1);
  pthread_mutex_unlock(&b->lock);
}

void meet(void) {
  const int count = num_threads;  // read before all are here: then the next job may have another number
  if (count == 1) {
    atomic_store_explicit(&next_unit, 0, memory_order_relaxed);
    return;
  }
  unsigned old = atomic_load(&met.number);
  if (atomic_fetch_add(&num_arrived, 1) + 1 < count) {
    wait_for(&met, old);
  } else {
    atomic_store(&num_arrived, 0);
    atomic_store(&next_unit, 0);
    ring(&met, old + 1);
  }
}

int take(int total, int share, int *begin) {
  *begin = atomic_fetch_add_explicit(&next_unit, share, memory_order_relaxed);
  int left = total - *begin;
  return left < share ? left : share;
}

int fair_share(int total, int times) {
  const int shares = num_threads * times;
  return (total + shares - 1) / shares;
}

// Returns what was set before.
static uint64_t set_rounding(uint64_t to) {
  uint64_t old = 0;
#if defined(__x86_64__)
  old = _mm_getcsr();
  _mm_setcsr((unsigned)to);
#elif defined(__aarch64__)
  __asm__ volatile("mrs %0, fpcr" : "=r"(old));
  __asm__ volatile("msr fpcr, %0" ::"r"(to));
#endif
  return old;
}

static void *worker(void *argument) {
  const unsigned number = (unsigned)(uintptr_t)argument;
  number_here = (int)number;
  set_rounding(USUAL_ROUNDING);
  for (unsigned seen = 0;;) {
    wait_for(&started, seen);
    seen = atomic_load(&started.number);
    if (number >= seen % MOST_THREADS) continue;
    job(job_argument);
    meet();
  }
  return NULL;
}

static void forget(void) {  // a forked process has none of the threads, and none of their sleep
  num_workers = 0;
  atomic_store(&started.number, 0);
  atomic_store(&num_arrived, 0);
  atomic_store(&next_unit, 0);
  pthread_mutex_init(&one_job, NULL);
  bell *bells[] = {&started, &met};
  for (int i = 0; i < 2; ++i) {
    atomic_store(&bells[i]->num_asleep, 0);
    pthread_mutex_init(&bells[i]->lock, NULL);
    pthread_cond_init(&bells[i]->rung, NULL);
  }
}

static void forget_when_forked(void) { pthread_atfork(NULL, NULL, forget); }

static void make_workers(int count) {
  for (; num_workers < count; ++num_workers) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, worker, (void *)(uintptr_t)(num_workers + 1))) return;
    pthread_detach(thread);
  }
}

void run_in_threads(int count, void (*run)(void *argument), void *argument) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, forget_when_forked);
  pthread_mutex_lock(&one_job);
  make_workers((count < MOST_THREADS ? count : MOST_THREADS - 1) - 1);
  num_threads = count < num_workers + 1 ? count : num_workers + 1;
  job = run, job_argument = argument;
  const uint64_t before = set_rounding(USUAL_ROUNDING);
  if (num_threads > 1) {  // a number that was not there before, which says how many are to come
    unsigned number = atomic_load(&started.number);
    ring(&started, (number / MOST_THREADS + 1) * MOST_THREADS + (unsigned)num_threads);
  }
  run(argument);
  meet();
  set_rounding(before);
  pthread_mutex_unlock(&one_job);
}
