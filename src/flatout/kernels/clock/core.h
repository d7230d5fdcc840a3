/* What a clock keeps, and how time passes to its lanes. */

#ifndef FLATOUT_CLOCK_CORE_H
#define FLATOUT_CLOCK_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>
#include <time.h>

enum { INPUT, COPY, FORWARD, BACKWARD, SYNC, OPTIMIZER, HOST, EVALUATION, SAVING, GC, IDLE, AFTER };
#define LANES (AFTER + 1)
#define KEPT 20000

typedef struct {
    PyObject_HEAD
    long long spent[LANES];
    unsigned long thread;
    long long last, began;
    long long steps, backwards;
    long long between, after; /* of those lanes, when the last step ended */
    long long *durations;     /* of the latest KEPT steps, each in the place of its number */
    long long due, until;
    int current;
    char is_inside, is_open;
    char is_marked;
    char is_counted;         /* whether the optimizer's step that runs has ended a step */
    char is_trained_on;      /* whether a backward pass has followed a batch of that loader */
    char wants_told;         /* whether Python is to say what the open calls were */
    PyObject *loader;        /* what gave the latest batch, or NULL */
    PyObject *evaluations;   /* calls of which it is not known yet what they were: a list */
    long long asked;         /* when a batch was */
    long long kept_graphs;   /* backward passes that were handed to Python as they keep their graph */
    long long seen_backwards;
    long long before[LANES]; /* where the lanes stood at the mark */
    long long first[LANES];  /* where they stood after the first step */
} Clock;

/* As time.perf_counter_ns() on Linux. */
static inline long long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline void mark(Clock *self)
{
    memcpy(self->before, self->spent, sizeof self->before);
    self->seen_backwards = self->backwards;
    self->is_marked = 1;
}

/* The time since the last look goes to the lane that ran. */
static inline void pass_to(Clock *self, int lane)
{
    long long now = now_ns();
    self->spent[self->current] += now - self->last;
    self->last = now;
    self->current = lane;
}

/* A step has ended when last looked; returns whether someone wants to be called. */
static inline int end_step(Clock *self, int merge)
{
    long long between = self->spent[EVALUATION] + self->spent[SAVING], took;
    took = self->last - self->began - (between - self->between);
    self->began = self->last;
    self->between = between;
    if (self->backwards > 1) { /* what lay between them was the host's */
        self->spent[HOST] += self->spent[AFTER] - self->after;
        self->spent[AFTER] = self->after;
    }
    self->after = self->spent[AFTER];
    self->backwards = self->seen_backwards = 0;
    self->is_marked = 0;
    if (merge && self->steps) {
        self->durations[(self->steps - 1) % KEPT] += took;
    } else {
        self->durations[self->steps % KEPT] = took;
        self->steps += 1;
    }
    if (self->steps == 1)
        memcpy(self->first, self->spent, sizeof self->first);
    return self->steps >= self->due || self->last >= self->until;
}

/* Whether the calling thread is the one whose steps are counted. */
static inline int is_own_thread(const Clock *self)
{
    return PyThread_get_thread_ident() == self->thread;
}

static inline void release(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc free_it = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_it(object);
    Py_DECREF(type);
}

#endif
