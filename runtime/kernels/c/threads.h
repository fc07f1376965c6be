// One thread pool: a job runs in all its threads at once, and they meet at barriers.

#pragma once

// Run `run(argument)` in `count` threads, the caller among them, and return when all are done. Jobs of
// several callers come one after the other.
void run_in_threads(int count, void (*run)(void *argument), void *argument);

// Within a job: a barrier. Wait until all threads of the job are here.
void meet(void);

// Within a job, between two meetings: the next `share` units of work that no other thread has taken,
// or fewer at the end. Returns how many; `begin` is the first one.
int take(int total, int share, int *begin);

// Units of work to take at once, so that each thread takes a share about `times` times: all end at about the same time.
int fair_share(int total, int times);

// Within a job: the number of the calling thread.
int thread_number(void);
