/* max(0, largest of 2x2) over channels-last images, and its gradient, in one pass each.

   For each window forward also leaves a code of one byte: which of the four pixels won, or that
   none did. Backward needs nothing else, where torch keeps the image and indices of eight bytes.

   bfloat16 and float32 are compared as integers: numbers above zero are ordered as their bits are,
   and all others are clamped. The work runs on the threads of the OpenMP that torch itself uses: a
   pool of our own would fight with it for the CPUs. */

#include "../shared/module.h"
#include "../shared/parallel.h"

enum { CLAMPED = 4 };

/* Bytes of image that a thread takes at a time: enough to hide the taking, few enough to share. */
#define PORTION (128 * 1024)

typedef struct {
    char *image; /* (images, height, width, channels) */
    char *small; /* (images, height / 2, width / 2, channels): the result, or its gradient */
    uint8_t *codes; /* as small */
    int64_t images, height, width, channels;
    void (*row)(char *image, char *small, uint8_t *codes, int64_t width, int64_t channels);
    int backward;
    int item;
    int64_t at_a_time;
    int64_t next;
} Job;

/* Four pixels of one window, over all channels. As in torch, the first largest wins, and the last
   NaN before all. */
#define DEFINE(BITS, MAGNITUDE, INFINITE)                                                          \
    static void forward_window_##BITS(                                                             \
        const int##BITS##_t *restrict a, const int##BITS##_t *restrict b,                          \
        const int##BITS##_t *restrict c, const int##BITS##_t *restrict d,                          \
        int##BITS##_t *restrict out, uint8_t *restrict codes, int64_t channels)                    \
    {                                                                                              \
        for (int64_t i = 0; i < channels; i++) {                                                   \
            const int##BITS##_t pixels[4] = {a[i], b[i], c[i], d[i]};                              \
            int##BITS##_t most = 0, code = CLAMPED;                                                \
            for (int##BITS##_t k = 0; k < 4; k++) {                                                \
                int##BITS##_t size = pixels[k] & MAGNITUDE;                                        \
                int wins = (size > INFINITE) | (pixels[k] > most);                                 \
                most = wins ? size : most;                                                         \
                code = wins ? k : code;                                                            \
            }                                                                                      \
            out[i] = most;                                                                         \
            codes[i] = (uint8_t)code;                                                              \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static void backward_window_##BITS(                                                            \
        int##BITS##_t *restrict a, int##BITS##_t *restrict b, int##BITS##_t *restrict c,           \
        int##BITS##_t *restrict d, const int##BITS##_t *restrict gradient,                         \
        const uint8_t *restrict codes, int64_t channels)                                           \
    {                                                                                              \
        for (int64_t i = 0; i < channels; i++) {                                                   \
            int##BITS##_t code = codes[i], value = gradient[i];                                    \
            value &= -((value & MAGNITUDE) != 0); /* -0 becomes 0, as when torch adds it to 0 */   \
            a[i] = value & -(code == 0);                                                           \
            b[i] = value & -(code == 1);                                                           \
            c[i] = value & -(code == 2);                                                           \
            d[i] = value & -(code == 3);                                                           \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static void forward_##BITS(char *image, char *small, uint8_t *codes, int64_t width,            \
                               int64_t channels)                                                   \
    {                                                                                              \
        const int##BITS##_t *top = (const int##BITS##_t *)image, *bottom = top + width * channels; \
        int##BITS##_t *out = (int##BITS##_t *)small;                                               \
        for (int64_t w = 0; w < width / 2; w++) {                                                  \
            forward_window_##BITS(top, top + channels, bottom, bottom + channels, out, codes,      \
                                  channels);                                                       \
            top += 2 * channels, bottom += 2 * channels, out += channels, codes += channels;       \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static void backward_##BITS(char *image, char *small, uint8_t *codes, int64_t width,           \
                                int64_t channels)                                                  \
    {                                                                                              \
        int##BITS##_t *top = (int##BITS##_t *)image, *bottom = top + width * channels;             \
        const int##BITS##_t *gradient = (const int##BITS##_t *)small;                              \
        for (int64_t w = 0; w < width / 2; w++) {                                                  \
            backward_window_##BITS(top, top + channels, bottom, bottom + channels, gradient,       \
                                   codes, channels);                                               \
            top += 2 * channels, bottom += 2 * channels;                                           \
            gradient += channels, codes += channels;                                               \
        }                                                                                          \
        if (width % 2) { /* no window sees the last column */                                      \
            memset(top, 0, (size_t)channels * sizeof *top);                                        \
            memset(bottom, 0, (size_t)channels * sizeof *bottom);                                  \
        }                                                                                          \
    }

DEFINE(16, 0x7FFF, 0x7F80)
DEFINE(32, 0x7FFFFFFF, 0x7F800000)

static void run_row(const Job *job, int64_t number)
{
    const int64_t rows = job->height / 2, line = job->width * job->channels * job->item;
    const int64_t image = number / rows, row = number % rows;
    const int64_t small = number * (job->width / 2) * job->channels;
    char *top = job->image + (image * job->height + 2 * row) * line;
    job->row(top, job->small + small * job->item, job->codes + small, job->width, job->channels);
    if (job->backward && job->height % 2 && row == rows - 1) /* nor the last row */
        memset(top + 2 * line, 0, (size_t)line);
}

/* What each thread runs: portions of rows, until none is left. */
static void work(void *shared)
{
    Job *job = shared;
    const int64_t rows = job->images * (job->height / 2);
    for (;;) {
        int64_t from = __atomic_fetch_add(&job->next, job->at_a_time, __ATOMIC_RELAXED);
        if (from >= rows)
            return;
        int64_t until = from + job->at_a_time < rows ? from + job->at_a_time : rows;
        for (int64_t number = from; number < until; number++)
            run_row(job, number);
    }
}

/* The pointers are addresses, checked by the caller; `item` is 2 (bfloat16) or 4 (float32)
   bytes. `parallel` is the address of GOMP_parallel, or 0 for this thread only. */
static PyObject *run(PyObject *module, PyObject *args)
{
    unsigned long long image, small, codes, parallel;
    unsigned threads;
    long long images, height, width, channels;
    Job job = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "pKKKLLLLiKI:run", &job.backward, &image, &small, &codes, &images,
                          &height, &width, &channels, &job.item, &parallel, &threads))
        return NULL;
    job.image = AT(image);
    job.small = AT(small);
    job.codes = AT(codes);
    job.images = images, job.height = height, job.width = width, job.channels = channels;
    if (job.item == 2)
        job.row = job.backward ? backward_16 : forward_16;
    else
        job.row = job.backward ? backward_32 : forward_32;
    job.at_a_time = PORTION / (2 * width * channels * job.item) + 1;
    Py_BEGIN_ALLOW_THREADS
    in_parallel(work, &job, parallel, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_relu_pool, "ReLU and 2x2 max-pooling in one pass.", methods)
