// Threads that share the parts of one job.

#ifndef ALLHANDS_POOL_H
#define ALLHANDS_POOL_H

// Call `work(argument, part, thread)` for all parts below `parts`, each once, in any order; return when all are done.
// `thread` is below pool_threads(), and different for calls at the same time. If another job runs, also if this call is
// inside of one of its parts, the caller computes all parts by itself, as thread 0.
void pool_run(void (*work)(void *, int, int), void *argument, int parts);

// How many threads take part, the caller included.
int pool_threads(void);
void pool_set_threads(int count);

#endif
