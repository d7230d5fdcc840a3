/* Dropout whose draws are a function of the sample, in one pass and without a mask in memory.

   The gradient is the same pass over the gradient of the result. The work runs on the threads of
   the OpenMP that torch itself uses: a pool of our own would fight with it for the CPUs. */

#include "../shared/module.h"
#include "../shared/parallel.h"
#include "../shared/bf16.h"
#include "core.h"

/* Elements that a thread takes at a time, and whose bytes lie on its stack at a time. */
enum { PORTION = 32 * 1024, CHUNK = 1024 };
/* Channels-last images go by tiles of channels, over some positions at a time. */
enum { TILE = 32, POSITIONS = 256 };

typedef struct Job Job;
struct Job {
    const char *x;
    char *out;
    int64_t samples, inner;    /* x is (outer, samples, inner) */
    int64_t channels, spatial; /* or (images, spatial, channels), where `channels` is not 0 */
    uint32_t start;
    double scale;
    Draws draws;
    void (*apply)(const Job *job, int64_t at, const uint8_t *keep, int64_t stride, int64_t count);
    void (*unit)(const Job *job, int64_t number);
    int64_t elements, units, next;
};

/* `count` elements from place `at` on; their bytes lie `stride` apart. As in torch, what is dropped
   is multiplied by zero: a NaN stays one. */
#define DEFINE(NAME, ITEM, NUMBER, WIDENED, ROUNDED)                                               \
    static inline __attribute__((always_inline)) void NAME##_by(                                   \
        const Job *job, int64_t at, const uint8_t *keep, int64_t stride, int64_t count)            \
    {                                                                                              \
        const ITEM *x = (const ITEM *)job->x + at;                                                 \
        ITEM *out = (ITEM *)job->out + at;                                                         \
        const NUMBER scale = (NUMBER)job->scale;                                                   \
        for (int64_t i = 0; i < count; i++)                                                        \
            out[i] = ROUNDED(WIDENED(x[i]) * ((NUMBER)keep[i * stride] * scale));                  \
    }                                                                                              \
                                                                                                   \
    static void NAME(const Job *job, int64_t at, const uint8_t *keep, int64_t stride,              \
                     int64_t count)                                                                \
    {                                                                                              \
        if (stride == 1)                                                                           \
            NAME##_by(job, at, keep, 1, count);                                                    \
        else                                                                                       \
            NAME##_by(job, at, keep, stride, count);                                               \
    }

DEFINE(apply_float, float, float, , )
DEFINE(apply_double, double, double, , )
DEFINE(apply_bfloat16, uint16_t, float, widened, rounded)

/* Elements as they lie in memory, up to the end of the sample's row or of the portion. */
static void flat(const Job *job, int64_t number)
{
    uint8_t keep[CHUNK];
    int64_t at = number * PORTION;
    const int64_t end = at + PORTION < job->elements ? at + PORTION : job->elements;
    while (at < end) {
        int64_t row = at / job->inner, into = at % job->inner, count = job->inner - into;
        int64_t most = job->apply ? CHUNK : PORTION;
        count = count < end - at ? count : end - at;
        count = count < most ? count : most;
        uint32_t sample = job->start + (uint32_t)(row % job->samples);
        int64_t first = row / job->samples * job->inner + into;
        if (job->apply) {
            keep_span(&job->draws, keep, sample, first, count);
            job->apply(job, at, keep, 1, count);
        } else
            keep_span(&job->draws, (uint8_t *)job->out + at, sample, first, count);
        at += count;
    }
}

/* A tile of channels of one image. An element's number is that in (channels, spatial), whatever
   the layout. */
static void tile(const Job *job, int64_t number)
{
    uint8_t keep[TILE * POSITIONS];
    const int64_t spatial = job->spatial, tiles = (job->channels + TILE - 1) / TILE;
    const int64_t image = number / tiles, channel = number % tiles * TILE;
    const int64_t left = job->channels - channel, wide = left < TILE ? left : TILE;
    const int64_t each = job->inner / (job->channels * spatial); /* images of a sample */
    const uint32_t sample = job->start + (uint32_t)(image / each);
    const int64_t base = (image % each * job->channels + channel) * spatial;
    const int64_t step = spatial < POSITIONS ? spatial : POSITIONS;
    for (int64_t from = 0; from < spatial; from += step) {
        const int64_t count = spatial - from < step ? spatial - from : step;
        if (step == spatial)
            keep_span(&job->draws, keep, sample, base, wide * spatial);
        else
            for (int64_t c = 0; c < wide; c++)
                keep_span(&job->draws, keep + c * step, sample, base + c * spatial + from, count);
        for (int64_t s = 0; s < count; s++)
            job->apply(job, (image * spatial + from + s) * job->channels + channel, keep + s, step,
                       wide);
    }
}

/* What each thread runs, until nothing is left. */
static void work(void *shared)
{
    Job *job = shared;
    for (;;) {
        int64_t number = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (number >= job->units)
            return;
        job->unit(job, number);
    }
}

/* Elements of a sample: the numbers of its blocks have 32 bits. */
#define MOST ((int64_t)1 << 34)

/* The pointers are addresses, checked by the caller; `item` is the bytes of a number: 2
   (bfloat16), 4 (float32), 8 (float64), or 1 to write whether each is kept, without an x. x is
   of shape (outer, samples, inner), or, where `channels` is not 0, of images that lie as
   (spatial, channels). `parallel` is the address of GOMP_parallel, or 0 for this thread only;
   `is_plain` does without what not every CPU has. */
static PyObject *run(PyObject *module, PyObject *args)
{
    unsigned long long x, out, seed, parallel;
    unsigned long start, draw, step, threshold;
    long long outer, samples, inner, channels, spatial;
    unsigned threads;
    int item, is_plain;
    Job job = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "KKiLLLLLkkkKkdKIp:run", &x, &out, &item, &outer, &samples, &inner,
                          &channels, &spatial, &start, &draw, &step, &seed, &threshold, &job.scale,
                          &parallel, &threads, &is_plain))
        return NULL;
    job.samples = samples, job.inner = inner, job.channels = channels, job.spatial = spatial;
    if (outer > MOST / inner) {
        PyErr_SetString(PyExc_ValueError, "expected less than 2**34 elements of a sample");
        return NULL;
    }
    job.x = AT(x);
    job.out = AT(out);
    job.start = (uint32_t)start;
    job.draws = (Draws){.seed = {(uint32_t)seed, (uint32_t)(seed >> 32)}, .step = (uint32_t)step,
                        .draw = (uint32_t)draw, .threshold = (uint32_t)threshold};
    job.draws.keep = is_plain ? keep_portable : fastest();
    job.apply = item == 2 ? apply_bfloat16 : item == 4 ? apply_float : item == 8 ? apply_double : NULL;
    job.elements = outer * samples * inner;
    if (channels && job.apply) {
        job.unit = tile;
        job.units = job.elements / (channels * spatial) * ((channels + TILE - 1) / TILE);
    } else {
        job.unit = flat;
        job.units = (job.elements + PORTION - 1) / PORTION;
    }
    Py_BEGIN_ALLOW_THREADS
    in_parallel(work, &job, parallel, job.units > 1 ? threads : 1);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_dropout, "Dropout whose draws are a function of the sample.", methods)
