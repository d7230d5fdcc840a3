/* Memory is asked for before it is read where the processor does not foresee that: backwards, or with
   something left out between two rows. */

#ifndef FLATOUT_AUGMENT_FETCH_H
#define FLATOUT_AUGMENT_FETCH_H

#include <stdint.h>

enum { ROWS_AHEAD = 4 };

static inline void fetch(const uint8_t *from, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 64)
        __builtin_prefetch(from + at);
}

#endif
