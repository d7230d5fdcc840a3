/* Loops over torch's memory, on the threads of the OpenMP that torch itself uses. */

#ifndef FLATOUT_PARALLEL_H
#define FLATOUT_PARALLEL_H

#include <stdint.h>

/* A pointer from the address that a tensor has in Python. */
#define AT(address) ((void *)(uintptr_t)(address))

/* Before a loop whose pointers do not alias: `restrict` does not outlive inlining. */
#if defined(__clang__)
#define NOTHING_ALIASES _Pragma("clang loop vectorize(assume_safety)")
#else
#define NOTHING_ALIASES _Pragma("GCC ivdep")
#endif

/* GOMP_parallel of libgomp's ABI, which LLVM's and Intel's OpenMP have too. */
typedef void (*Parallel)(void (*function)(void *), void *data, unsigned threads, unsigned flags);

/* `parallel` is the address of GOMP_parallel, or 0 for this thread only. */
static inline void in_parallel(void (*function)(void *), void *data, unsigned long long parallel,
                               unsigned threads)
{
    if (parallel && threads > 1)
        ((Parallel)(uintptr_t)parallel)(function, data, threads, 0);
    else
        function(data);
}

#endif
