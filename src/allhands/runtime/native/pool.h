// Threads that share the parts of one job.

#ifndef ALLHANDS_POOL_H
#define ALLHANDS_POOL_H

// `work(argument, part, thread)` for all parts below `parts`, each once, in any order; returns when all are done.
// `thread` is below pool_threads(), and no two run with the same one at once. A second caller meanwhile, or one
// inside of a part, does its parts by itself, as thread 0.
void pool_run(void (*work)(void *, int, int), void *argument, int parts);

// How many threads take part, the caller included.
int pool_threads(void);
void pool_set_threads(int count);

#endif
