/* BatchNorm in training, with what often follows it, in two passes over memory: y = act(x * scale +
   shift + skip), and its gradient. `act` is nothing, ReLU or ReLU6, and there may be no skip.

   An element's channel is known from its place alone, in either layout, so all passes run over
   `count` elements in a row, beside arrays that hold each lane's numbers:

     channels last  a portion of whole rows of channels, side by side in `lanes`
     otherwise      one channel of one image, whose numbers are repeated over all `lanes`

   Sums are made per portion, in float, and added up in order, in double: they are the same on any
   number of threads. Those run on the OpenMP that torch itself uses: a pool of our own would fight
   with it for the CPUs. */

#include "../shared/module.h"
#include "../shared/parallel.h"
#include "../shared/bf16.h"

#include <math.h>
#include <stdlib.h>

enum { NOTHING, RELU, RELU6 };

/* Elements that a thread takes at a time, lanes that repay a loop over them, and elements of a
   channel that are looked at first. */
enum { PORTION = 16 * 1024, LANES = 64, LOOKS = 8 };

typedef struct Job Job;

/* What is known of each lane; `first` and `second` are the sums. */
typedef struct {
    float *base, *scale, *shift, *slope, *first, *second;
} Lanes;

typedef void (*Pass)(const Job *job, const Lanes *lanes, int64_t width, int64_t at, int64_t count);

struct Job {
    const char *x, *skip, *gradient, *seen; /* seen: y, where the activation is read from it */
    char *out, *out_skip;
    const float *base, *scale, *shift, *slope; /* of each channel */
    float *partial;                            /* (portions, 2, channels), or NULL */
    int64_t rows, channels, spatial;           /* spatial: of a channel, 0 for channels last */
    int64_t width, at_a_time, units, next;
    int activation, failed;
    Pass pass;
};

/* As torch does: a NaN stays one, and passes its gradient on. */
static inline __attribute__((always_inline)) float activated(float value, int activation)
{
    value = activation != NOTHING && value < 0 ? 0 : value;
    return activation == RELU6 && value > 6 ? 6 : value;
}

static inline __attribute__((always_inline)) float let_through(float gradient, float value,
                                                               int activation)
{
    gradient = activation != NOTHING && value <= 0 ? 0 : gradient;
    return activation == RELU6 && value >= 6 ? 0 : gradient;
}

#define SAME(value) (value)
#define ALWAYS static inline __attribute__((always_inline)) void

/* The four passes; `sums` of forward are of x - base and its square, those of backward of the
   gradient and of its product with x - base. */
#define DEFINE(ITEM, NAME, WIDENED, ROUNDED)                                                       \
    ALWAYS NAME##_forward_sums(const Job *job, const Lanes *of, int64_t width, int64_t at,         \
                               int64_t count)                                                      \
    {                                                                                              \
        const ITEM *restrict x = (const ITEM *)job->x;                                             \
        float *restrict first = of->first, *restrict second = of->second;                          \
        const float *restrict base = of->base;                                                     \
        for (const int64_t end = at + count; at < end; at += width) {                              \
            const int64_t here = end - at < width ? end - at : width;                              \
            NOTHING_ALIASES                                                                        \
            for (int64_t i = 0; i < here; i++) {                                                   \
                const float off = WIDENED(x[at + i]) - base[i];                                    \
                first[i] += off;                                                                   \
                second[i] += off * off;                                                            \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    ALWAYS NAME##_forward_by(const Job *job, const Lanes *of, int64_t width, int64_t at,           \
                             int64_t count, int activation, int has_skip)                          \
    {                                                                                              \
        const ITEM *restrict x = (const ITEM *)job->x, *restrict skip = (const ITEM *)job->skip;   \
        ITEM *restrict out = (ITEM *)job->out;                                                     \
        const float *restrict scale = of->scale, *restrict shift = of->shift;                      \
        for (const int64_t end = at + count; at < end; at += width) {                              \
            const int64_t here = end - at < width ? end - at : width;                              \
            NOTHING_ALIASES                                                                        \
            for (int64_t i = 0; i < here; i++) {                                                   \
                float value = WIDENED(x[at + i]) * scale[i] + shift[i];                            \
                if (has_skip)                                                                      \
                    value += WIDENED(skip[at + i]);                                                \
                out[at + i] = ROUNDED(activated(value, activation));                               \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    ALWAYS NAME##_forward(const Job *job, const Lanes *of, int64_t width, int64_t at,              \
                          int64_t count)                                                           \
    {                                                                                              \
        if (job->skip && job->activation)                                                          \
            NAME##_forward_by(job, of, width, at, count, RELU, 1);                                 \
        else if (job->skip)                                                                        \
            NAME##_forward_by(job, of, width, at, count, NOTHING, 1);                              \
        else if (job->activation == RELU6)                                                         \
            NAME##_forward_by(job, of, width, at, count, RELU6, 0);                                \
        else if (job->activation == RELU)                                                          \
            NAME##_forward_by(job, of, width, at, count, RELU, 0);                                 \
        else                                                                                       \
            NAME##_forward_by(job, of, width, at, count, NOTHING, 0);                              \
    }                                                                                              \
                                                                                                   \
    ALWAYS NAME##_backward_by(const Job *job, const Lanes *of, int64_t width, int64_t at,          \
                              int64_t count, int activation, int is_seen, int sums, int has_skip)  \
    {                                                                                              \
        const ITEM *restrict x = (const ITEM *)job->x, *restrict seen = (const ITEM *)job->seen;   \
        const ITEM *restrict gradient = (const ITEM *)job->gradient;                               \
        ITEM *restrict out = (ITEM *)job->out, *restrict out_skip = (ITEM *)job->out_skip;         \
        const float *restrict base = of->base, *restrict scale = of->scale;                        \
        const float *restrict shift = of->shift, *restrict slope = of->slope;                      \
        float *restrict first = of->first, *restrict second = of->second;                          \
        for (const int64_t end = at + count; at < end; at += width) {                              \
            const int64_t here = end - at < width ? end - at : width;                              \
            NOTHING_ALIASES                                                                        \
            for (int64_t i = 0; i < here; i++) {                                                   \
                const float wide = WIDENED(x[at + i]);                                             \
                float value = 0;                                                                   \
                if (is_seen)                                                                       \
                    value = WIDENED(seen[at + i]);                                                 \
                else if (activation)                                                               \
                    value = wide * scale[i] + shift[i];                                            \
                if (!is_seen && activation == RELU6) /* a value just below 6 may be rounded to it */\
                    value = WIDENED(ROUNDED(value));                                               \
                const float g = let_through(WIDENED(gradient[at + i]), value, activation);         \
                if (sums) {                                                                        \
                    first[i] += g;                                                                 \
                    second[i] += g * (wide - base[i]);                                             \
                } else {                                                                           \
                    out[at + i] = ROUNDED(g * scale[i] - first[i] - (wide - base[i]) * slope[i]);  \
                    if (has_skip)                                                                  \
                        out_skip[at + i] = ROUNDED(g);                                             \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    ALWAYS NAME##_backward_of(const Job *job, const Lanes *of, int64_t width, int64_t at,          \
                              int64_t count, int sums)                                             \
    {                                                                                              \
        if (job->seen && job->out_skip)                                                            \
            NAME##_backward_by(job, of, width, at, count, RELU, 1, sums, 1);                       \
        else if (job->seen)                                                                        \
            NAME##_backward_by(job, of, width, at, count, RELU, 1, sums, 0);                       \
        else if (job->activation == RELU6)                                                         \
            NAME##_backward_by(job, of, width, at, count, RELU6, 0, sums, 0);                      \
        else if (job->activation == RELU)                                                          \
            NAME##_backward_by(job, of, width, at, count, RELU, 0, sums, 0);                       \
        else                                                                                       \
            NAME##_backward_by(job, of, width, at, count, NOTHING, 0, sums, 0);                    \
    }                                                                                              \
                                                                                                   \
    ALWAYS NAME##_backward_sums(const Job *job, const Lanes *of, int64_t width, int64_t at,        \
                                int64_t count)                                                     \
    {                                                                                              \
        NAME##_backward_of(job, of, width, at, count, 1);                                          \
    }                                                                                              \
                                                                                                   \
    ALWAYS NAME##_backward(const Job *job, const Lanes *of, int64_t width, int64_t at,             \
                           int64_t count)                                                          \
    {                                                                                              \
        NAME##_backward_of(job, of, width, at, count, 0);                                          \
    }

DEFINE(float, float32, SAME, SAME)
DEFINE(uint16_t, bfloat16, widened, rounded)

#define COMPILE(NAME, SUFFIX, TARGET)                                                              \
    TARGET static void NAME##_##SUFFIX(const Job *job, const Lanes *of, int64_t width, int64_t at, \
                                       int64_t count)                                              \
    {                                                                                              \
        NAME(job, of, width, at, count);                                                           \
    }
#define COMPILE_ALL(SUFFIX, TARGET)                                                                \
    COMPILE(float32_forward_sums, SUFFIX, TARGET)                                                  \
    COMPILE(float32_forward, SUFFIX, TARGET)                                                       \
    COMPILE(float32_backward_sums, SUFFIX, TARGET)                                                 \
    COMPILE(float32_backward, SUFFIX, TARGET)                                                      \
    COMPILE(bfloat16_forward_sums, SUFFIX, TARGET)                                                 \
    COMPILE(bfloat16_forward, SUFFIX, TARGET)                                                      \
    COMPILE(bfloat16_backward_sums, SUFFIX, TARGET)                                                \
    COMPILE(bfloat16_backward, SUFFIX, TARGET)                                                     \
    static const Pass SUFFIX[8] = {                                                                \
        float32_forward_sums_##SUFFIX,  float32_forward_##SUFFIX,                                  \
        float32_backward_sums_##SUFFIX, float32_backward_##SUFFIX,                                 \
        bfloat16_forward_sums_##SUFFIX, bfloat16_forward_##SUFFIX,                                 \
        bfloat16_backward_sums_##SUFFIX, bfloat16_backward_##SUFFIX,                               \
    };

enum { FORWARD_SUMS, FORWARD, BACKWARD_SUMS, BACKWARD, OF_BFLOAT16 };

COMPILE_ALL(plain, )
#if defined(__x86_64__)
COMPILE_ALL(avx2, __attribute__((target("avx2"))))
COMPILE_ALL(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

static Pass pass_of(int number, int item)
{
    number += item == 2 ? OF_BFLOAT16 : 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return avx512[number];
    if (__builtin_cpu_supports("avx2"))
        return avx2[number];
#endif
    return plain[number];
}

/* `width` lanes: those of the channels, or all of one channel. */
static void fill(float *lanes, const float *of, const Job *job, int64_t channel)
{
    if (of == NULL)
        return;
    for (int64_t i = 0; i < job->width; i++)
        lanes[i] = of[job->spatial ? channel : i % job->channels];
}

static void fold(const Job *job, const Lanes *of, int64_t portion, int64_t channel)
{
    float *first = job->partial + portion * 2 * job->channels, *second = first + job->channels;
    if (job->spatial) {
        double a = 0, b = 0;
        for (int64_t i = 0; i < job->width; i++)
            a += of->first[i], b += of->second[i];
        first[channel] = (float)a, second[channel] = (float)b;
        return;
    }
    memcpy(first, of->first, (size_t)job->channels * sizeof *first);
    memcpy(second, of->second, (size_t)job->channels * sizeof *second);
    for (int64_t i = job->channels; i < job->width; i++) {
        first[i % job->channels] += of->first[i];
        second[i % job->channels] += of->second[i];
    }
}

/* What each thread runs: portions, until none is left. */
static void work(void *shared)
{
    Job *job = shared;
    const size_t width = (size_t)job->width;
    float *memory = malloc(6 * width * sizeof *memory);
    if (memory == NULL) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    const Lanes of = {memory,             memory + width,     memory + 2 * width,
                      memory + 3 * width, memory + 4 * width, memory + 5 * width};
    int is_filled = 0;
    for (;;) {
        const int64_t unit = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (unit >= job->units)
            break;
        const int64_t channel = job->spatial ? unit % job->channels : 0;
        if (!is_filled || job->spatial) {
            fill(of.base, job->base, job, channel);
            fill(of.scale, job->scale, job, channel);
            fill(of.shift, job->shift, job, channel);
            fill(of.slope, job->slope, job, channel);
            /* Where nothing is summed, the place of the first sum holds what is taken off. */
            if (job->partial == NULL && job->slope != NULL)
                fill(of.first, job->slope + job->channels, job, channel);
            is_filled = 1;
        }
        if (job->partial)
            memset(of.first, 0, 2 * width * sizeof *memory);
        const int64_t at = unit * job->at_a_time, all = job->rows * job->channels;
        const int64_t end = job->spatial ? all * job->spatial : all;
        job->pass(job, &of, job->width, at, end - at < job->at_a_time ? end - at : job->at_a_time);
        if (job->partial)
            fold(job, &of, job->spatial ? unit / job->channels : unit, channel);
    }
    free(memory);
}

typedef struct {
    unsigned long long parallel;
    unsigned threads;
} Team;

/* 0 where memory ran out. */
static int run_all(Job *job, const Team *team)
{
    job->next = 0;
    in_parallel(work, job, team->parallel, team->threads);
    return !job->failed;
}

static void add_up(const Job *job, int64_t portions, double *first, double *second)
{
    for (int64_t c = 0; c < job->channels; c++)
        first[c] = second[c] = 0;
    for (int64_t portion = 0; portion < portions; portion++) {
        const float *from = job->partial + portion * 2 * job->channels;
        for (int64_t c = 0; c < job->channels; c++) {
            first[c] += from[c];
            second[c] += from[job->channels + c];
        }
    }
}

/* How the work is cut, and memory for the sums: doubles for two of each channel, then floats for
   `arrays` of each channel, then for those of each portion. NULL where there is none. */
static double *laid_out(Job *job, int arrays, float **of_channels, int64_t *portions)
{
    if (job->spatial) {
        job->width = LANES;
        job->at_a_time = job->spatial;
        job->units = job->rows * job->channels;
        *portions = job->rows;
    } else {
        const int64_t together = job->channels < LANES ? LANES / job->channels : 1;
        const int64_t times = PORTION / (job->channels * together);
        job->width = together * job->channels;
        job->at_a_time = job->width * (times > 1 ? times : 1);
        job->units = (job->rows * job->channels + job->at_a_time - 1) / job->at_a_time;
        *portions = job->units;
    }
    const size_t channels = (size_t)job->channels;
    double *memory = malloc(channels * (2 * sizeof(double) + (size_t)arrays * sizeof(float) +
                                        (size_t)*portions * 2 * sizeof(float)));
    if (memory != NULL) {
        *of_channels = (float *)(memory + 2 * channels);
        job->partial = *of_channels + (size_t)arrays * channels;
    }
    return memory;
}

/* The mean of some elements of each channel: near to that of all, so that little is lost when
   squares are subtracted. */
static void near_the_mean(const Job *job, float *base, int item)
{
    const int64_t looks = job->rows < LOOKS ? job->rows : LOOKS;
    const int64_t apart = job->rows / looks, each = job->spatial ? job->spatial : 1;
    for (int64_t c = 0; c < job->channels; c++) {
        float sum = 0;
        for (int64_t look = 0; look < looks; look++) {
            const int64_t at = (look * apart * job->channels + c) * each;
            sum += item == 2 ? widened(((const uint16_t *)job->x)[at]) : ((const float *)job->x)[at];
        }
        base[c] = isfinite(sum) ? sum / (float)looks : 0;
    }
}

static int forward(Job *job, int item, const float *weight, const float *bias, double epsilon,
                   float *saved, const Team *team)
{
    float *base;
    int64_t portions;
    const int64_t channels = job->channels;
    double *sums = laid_out(job, 1, &base, &portions);
    if (sums == NULL)
        return 0;
    near_the_mean(job, base, item);
    job->base = base;
    job->pass = pass_of(FORWARD_SUMS, item);
    int is_done = run_all(job, team);
    if (is_done) {
        const double count = (double)job->rows * (double)(job->spatial ? job->spatial : 1);
        add_up(job, portions, sums, sums + channels);
        for (int64_t c = 0; c < channels; c++) {
            const double off = sums[c] / count;
            double variance = sums[channels + c] / count - off * off;
            variance = variance < 0 ? 0 : variance;
            const double scale = (weight ? weight[c] : 1) / sqrt(variance + epsilon);
            const double mean = base[c] + off;
            saved[c] = (float)mean;
            saved[channels + c] = (float)variance;
            saved[2 * channels + c] = (float)scale;
            saved[3 * channels + c] = (float)((bias ? bias[c] : 0) - mean * scale);
        }
        job->partial = NULL;
        job->base = NULL;
        job->scale = saved + 2 * channels;
        job->shift = saved + 3 * channels;
        job->pass = pass_of(FORWARD, item);
        is_done = run_all(job, team);
    }
    free(sums);
    return is_done;
}

static int backward(Job *job, int item, double epsilon, const float *saved, float *given,
                    const Team *team)
{
    float *slope;
    int64_t portions;
    const int64_t channels = job->channels;
    double *sums = laid_out(job, 2, &slope, &portions);
    if (sums == NULL)
        return 0;
    job->base = saved;
    job->scale = saved + 2 * channels;
    job->shift = saved + 3 * channels;
    job->pass = pass_of(BACKWARD_SUMS, item);
    int is_done = run_all(job, team);
    if (is_done) {
        const double count = (double)job->rows * (double)(job->spatial ? job->spatial : 1);
        add_up(job, portions, sums, sums + channels);
        for (int64_t c = 0; c < channels; c++) {
            const double width = 1 / sqrt(saved[channels + c] + epsilon);
            const double scale = job->scale[c];
            given[c] = (float)(sums[channels + c] * width);
            given[channels + c] = (float)sums[c];
            slope[c] = (float)(scale * width * width * sums[channels + c] / count);
            slope[channels + c] = (float)(scale * sums[c] / count);
        }
        job->partial = NULL;
        job->slope = slope;
        job->pass = pass_of(BACKWARD, item);
        is_done = run_all(job, team);
    }
    free(sums);
    return is_done;
}

/* The pointers are addresses, checked by the caller, 0 for what there is not. `saved` takes the
   mean, variance, scale and shift of each channel, float32. `spatial` is 0 for channels last.
   `item` is 2 (bfloat16) or 4 (float32) bytes; `activation` 0, 1 (ReLU) or 2 (ReLU6).
   `parallel` is the address of GOMP_parallel, or 0 for this thread only. */
static PyObject *py_forward(PyObject *module, PyObject *args)
{
    unsigned long long x, skip, y, weight, bias, saved;
    long long rows, channels, spatial;
    int item, is_done;
    double epsilon;
    Team team;
    Job job = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKKKLLLiidKI:forward", &x, &skip, &y, &weight, &bias, &saved,
                          &rows, &channels, &spatial, &item, &job.activation, &epsilon,
                          &team.parallel, &team.threads))
        return NULL;
    job.x = AT(x), job.skip = AT(skip), job.out = AT(y);
    job.rows = rows, job.channels = channels, job.spatial = spatial;
    Py_BEGIN_ALLOW_THREADS
    is_done = forward(&job, item, AT(weight), AT(bias), epsilon, AT(saved), &team);
    Py_END_ALLOW_THREADS
    if (!is_done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* As `forward`. `y` is its result where a skip was added before the activation, else 0. `given`
   takes the gradients of weight and bias, float32. */
static PyObject *py_backward(PyObject *module, PyObject *args)
{
    unsigned long long x, y, gradient, out, out_skip, saved, given;
    long long rows, channels, spatial;
    int item, is_done;
    double epsilon;
    Team team;
    Job job = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKKKKLLLiidKI:backward", &x, &y, &gradient, &out, &out_skip,
                          &saved, &given, &rows, &channels, &spatial, &item, &job.activation,
                          &epsilon, &team.parallel, &team.threads))
        return NULL;
    job.x = AT(x), job.seen = AT(y), job.gradient = AT(gradient);
    job.out = AT(out), job.out_skip = AT(out_skip);
    job.rows = rows, job.channels = channels, job.spatial = spatial;
    Py_BEGIN_ALLOW_THREADS
    is_done = backward(&job, item, epsilon, AT(saved), AT(given), &team);
    Py_END_ALLOW_THREADS
    if (!is_done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"forward", py_forward, METH_VARARGS, NULL},
    {"backward", py_backward, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_batch_norm, "BatchNorm in training, with its activation.", methods)
