/* A dense optimizer's step on the rows of a table that a batch has used.

   A row that no batch has used has gradients of zero, under which a dense optimizer still moves it.
   So each row knows the last step that it has been brought to, and is brought through those that it
   missed before it is read: in one go where a closed form is near enough, else step by step.

   Every row is independent of all others, so that the number of threads changes no bit. */

#include <math.h>
#include <stdlib.h>

#include "../shared/module.h"
#include "../shared/parallel.h"

enum { ADAM, SGD, RMSPROP, ADAGRAD };

/* What one step of a rule needs, as __init__.py fills it in. */
typedef struct {
    double rate;   /* of Adam: divided by the bias correction of the mean */
    double root;   /* Adam: what multiplies the root of the squares: the bias correction of these */
    double first;  /* Adam: beta1; others: momentum */
    double second; /* Adam: beta2; RMSprop: alpha */
    double keep;   /* what decoupled weight decay leaves of a weight */
    double decay;  /* weight decay that is added to the gradient */
    double first_logs, second_logs, keep_logs; /* sums of log2 of first, second, keep to this step */
    double nesterov;
    double first_rest, second_rest; /* what a gradient counts in the mean, and in the squares */
    double scale;  /* SGD, RMSprop: what a gradient is multiplied by on its way to the momentum */
    double within; /* RMSprop, Adagrad: what is added to the squares before their root is taken */
} Step;

/* Terms of the series in `Missed`. */
#define TERMS 16

/* What the steps behind one step, up to `upto`, do to a row without gradients. */
typedef struct {
    double upto;
    double of_weight, of_buffer; /* weight = of_weight * weight - of_buffer * buffer, */
    double to_weight, to_buffer; /* buffer = to_weight * weight + to_buffer * buffer */
    double root;                 /* of Adam, the series is about this multiple of the root */
    double moments[TERMS];
    double size, rest; /* at least what a row moves by, and at most what the series leaves out */
} Missed;

/* A closed form may leave out this share of what a row moves by: what float32 rounds by anyway. */
#define NEAR 3e-7

typedef struct Job Job;
typedef void (*Pass)(const Job *, int64_t row, const float *gradient, float *spare);

/* Upper and lower 16 bits of floats, of all rows. */
typedef struct {
    uint16_t *upper, *lower;
} Halves;

struct Job {
    Pass pass;
    float *weights, *first, *second; /* of all rows; NULL where the rule has none */
    Halves halves[3];                /* the same in their place, where floats lie in two halves */
    int32_t *last;                   /* the step that each row is at */
    const int64_t *rows;             /* which rows; NULL for all */
    const float *gradients;          /* of these rows; NULL where there is none */
    int64_t count, width;
    const Step *steps;   /* from `base` on */
    const Missed *missed; /* the same */
    int64_t base, now;   /* `now`: the step that rows are brought to */
    double epsilon;
    int rule, nothing_decays;
};

#define ALWAYS static inline __attribute__((always_inline))

ALWAYS void adam_step(float *w, float *m, float *v, const float *g, int64_t width, const Step *step,
                      double epsilon)
{
    /* In the order of torch's kernels, so that little is rounded otherwise. */
    const float rate = (float)step->rate, correction = (float)(1 / step->root);
    const float eps = (float)epsilon, b2 = (float)step->second;
    const float c1 = (float)step->first_rest, c2 = (float)step->second_rest;
    const float keep = (float)step->keep, decay = (float)step->decay;
    NOTHING_ALIASES
    for (int64_t i = 0; i < width; i++) {
        const float gradient = (g ? g[i] : 0) + decay * w[i];
        m[i] = m[i] + c1 * (gradient - m[i]);
        v[i] = b2 * v[i] + c2 * gradient * gradient;
        w[i] = keep * w[i] - rate * m[i] / (sqrtf(v[i]) / correction + eps);
    }
}

ALWAYS void sgd_step(float *w, float *buffer, const float *g, int64_t width, const Step *step)
{
    const float rate = (float)step->rate, momentum = (float)step->first;
    const float decay = (float)step->decay, nesterov = step->nesterov != 0 ? momentum : 0;
    const float own = step->nesterov != 0 ? 1 : 0, of_buffer = step->nesterov != 0 ? nesterov : 1;
    const float keep = (float)step->keep, scale = (float)step->scale;
    if (buffer == NULL) {
        NOTHING_ALIASES
        for (int64_t i = 0; i < width; i++)
            w[i] = keep * w[i] - rate * ((g ? g[i] : 0) + decay * w[i]);
        return;
    }
    NOTHING_ALIASES
    for (int64_t i = 0; i < width; i++) {
        const float gradient = scale * ((g ? g[i] : 0) + decay * w[i]);
        buffer[i] = momentum * buffer[i] + gradient;
        w[i] = keep * w[i] - rate * (own * gradient + of_buffer * buffer[i]);
    }
}

ALWAYS void rmsprop_step(float *w, float *v, float *buffer, const float *g, int64_t width,
                         const Step *step, double epsilon)
{
    const float rate = (float)step->rate, alpha = (float)step->second, eps = (float)epsilon;
    const float rest = (float)step->second_rest, momentum = (float)step->first;
    const float decay = (float)step->decay, keep = (float)step->keep;
    const float within = (float)step->within, scale = (float)step->scale;
    if (buffer == NULL) {
        NOTHING_ALIASES
        for (int64_t i = 0; i < width; i++) {
            const float gradient = (g ? g[i] : 0) + decay * w[i];
            v[i] = alpha * v[i] + rest * gradient * gradient;
            w[i] = keep * w[i] - rate * gradient / (sqrtf(v[i] + within) + eps);
        }
        return;
    }
    NOTHING_ALIASES
    for (int64_t i = 0; i < width; i++) {
        const float gradient = (g ? g[i] : 0) + decay * w[i];
        v[i] = alpha * v[i] + rest * gradient * gradient;
        buffer[i] = momentum * buffer[i] + scale * gradient / (sqrtf(v[i] + within) + eps);
        w[i] = keep * w[i] - rate * buffer[i];
    }
}

ALWAYS void adagrad_step(float *w, float *sum, const float *g, int64_t width, const Step *step,
                         double epsilon)
{
    const float rate = (float)step->rate, decay = (float)step->decay, eps = (float)epsilon;
    const float keep = (float)step->keep, within = (float)step->within;
    NOTHING_ALIASES
    for (int64_t i = 0; i < width; i++) {
        const float gradient = (g ? g[i] : 0) + decay * w[i];
        sum[i] += gradient * gradient;
        w[i] = keep * w[i] - rate * gradient / (sqrtf(sum[i] + within) + eps);
    }
}

ALWAYS void one_step(const Job *job, int64_t row, const float *gradient, const Step *step)
{
    const int64_t at = row * job->width;
    float *w = job->weights + at, *first = job->first ? job->first + at : NULL;
    float *second = job->second ? job->second + at : NULL;
    if (job->rule == ADAM)
        adam_step(w, first, second, gradient, job->width, step, job->epsilon);
    else if (job->rule == SGD)
        sgd_step(w, first, gradient, job->width, step);
    else if (job->rule == RMSPROP)
        rmsprop_step(w, second, first, gradient, job->width, step, job->epsilon);
    else
        adagrad_step(w, first, gradient, job->width, step, job->epsilon);
}

/* All of Adam's missed steps. With x the root of v, the steps move w by m times the sum of
   a_j / (b_j x + eps). With a B among the b_j, s_j = (B - b_j) / (B + b_j) and
   z = (B x - eps) / (B x + eps), which lies in -1..1, a term is
   a_j * 2 B / (B + b_j) / (B x + eps) / (1 - s_j z): a series in z, whose moments no row changes.
   It converges from the first step on, where the bias correction lets b_j fall quickly. */
ALWAYS void adam_missed(float *w, float *m, float *v, int64_t width, const Missed *missed,
                        double epsilon, double of_first, double of_second, double of_weight,
                        double keep_behind)
{
    const float eps = (float)epsilon, root = (float)missed->root;
    const float kept = (float)of_weight, behind = (float)keep_behind;
    const float mean = (float)of_first, square = (float)of_second;
    float c[TERMS];
    for (int k = 0; k < TERMS; k++)
        c[k] = (float)missed->moments[k];
    NOTHING_ALIASES
    for (int64_t i = 0; i < width; i++) {
        const float x = sqrtf(v[i]) * root, over = 1 / (x + eps), z = (x - eps) * over;
        float series = c[TERMS - 1];
        for (int k = TERMS - 2; k >= 0; k--)
            series = series * z + c[k];
        w[i] = kept * w[i] - behind * (series * over * m[i]);
        m[i] *= mean;
        v[i] *= square;
    }
}

ALWAYS int is_zero(const float *values, int64_t width)
{
    int zero = 1;
    for (int64_t i = 0; i < width; i++)
        zero &= values[i] == 0;
    return zero;
}

ALWAYS void bring_adam(const Job *job, int64_t row, int64_t from)
{
    const int64_t at = row * job->width;
    float *w = job->weights + at, *m = job->first + at, *v = job->second + at;
    const Step *then = job->steps + (from - job->base), *now = job->steps + (job->now - job->base);
    const Missed *missed = job->missed + (from - job->base);
    const double keep = exp2(now->keep_logs - then->keep_logs);
    if (is_zero(m, job->width)) {
        const float square = (float)exp2(now->second_logs - then->second_logs), kept = (float)keep;
        NOTHING_ALIASES
        for (int64_t i = 0; i < job->width; i++) {
            w[i] *= kept;
            v[i] *= square;
        }
        return;
    }
    if (!(missed->rest <= NEAR * missed->size)) {
        for (int64_t step = from + 1; step <= job->now; step++)
            one_step(job, row, NULL, job->steps + (step - job->base));
        return;
    }
    const Step *upto = job->steps + ((int64_t)missed->upto - job->base);
    adam_missed(w, m, v, job->width, missed, job->epsilon,
                exp2(now->first_logs - then->first_logs), exp2(now->second_logs - then->second_logs),
                keep, exp2(now->keep_logs - upto->keep_logs));
}

/* So many factors of squares are taken one by one. */
#define MULTIPLIED 64

ALWAYS void bring_linear(const Job *job, int64_t row, int64_t from)
{
    const int64_t at = row * job->width;
    const Missed *missed = job->missed + (from - job->base);
    const Step *then = job->steps + (from - job->base), *now = job->steps + (job->now - job->base);
    const Step *upto = job->steps + ((int64_t)missed->upto - job->base);
    const double behind = exp2(now->keep_logs - upto->keep_logs);
    const float a = (float)(behind * missed->of_weight), b = (float)(behind * missed->of_buffer);
    const float c = (float)missed->to_weight, d = (float)missed->to_buffer;
    float *w = job->weights + at, *buffer = job->first ? job->first + at : NULL;
    if (buffer == NULL) {
        NOTHING_ALIASES
        for (int64_t i = 0; i < job->width; i++)
            w[i] *= a;
    } else {
        NOTHING_ALIASES
        for (int64_t i = 0; i < job->width; i++) {
            const float weight = w[i];
            w[i] = a * weight - b * buffer[i];
            buffer[i] = c * weight + d * buffer[i];
        }
    }
    if (job->rule == RMSPROP) {
        float *v = job->second + at;
        /* One after another where they are few, which rounds as torch does. */
        const int is_short = now - then <= MULTIPLIED;
        const Step *step = is_short ? then + 1 : now;
        const double all = exp2(now->second_logs - then->second_logs);
        for (; step <= now; step++) {
            const float square = (float)(is_short ? step->second : all);
            NOTHING_ALIASES
            for (int64_t i = 0; i < job->width; i++)
                v[i] *= square;
        }
    }
}

/* Adagrad moves no weight without a gradient; decoupled weight decay does. */
ALWAYS void bring_adagrad(const Job *job, int64_t row, int64_t from)
{
    const Step *then = job->steps + (from - job->base), *now = job->steps + (job->now - job->base);
    const float kept = (float)exp2(now->keep_logs - then->keep_logs);
    float *w = job->weights + row * job->width;
    if (kept == 1)
        return;
    NOTHING_ALIASES
    for (int64_t i = 0; i < job->width; i++)
        w[i] *= kept;
}

/* So few missed steps are made one by one, as torch does. */
#define STEPWISE 4

/* Through the steps that a row has missed, to `now`. */
ALWAYS void bring(const Job *job, int64_t row)
{
    const int64_t from = job->last[row];
    if (from >= job->now)
        return;
    job->last[row] = (int32_t)job->now;
    const int is_stepwise = !job->nothing_decays && job->rule != SGD;
    if (is_stepwise || job->now - from <= STEPWISE) {
        for (int64_t step = from + 1; step <= job->now; step++)
            one_step(job, row, NULL, job->steps + (step - job->base));
    } else if (job->rule == ADAM) {
        bring_adam(job, row, from);
    } else if (job->rule == ADAGRAD) {
        bring_adagrad(job, row, from);
    } else {
        bring_linear(job, row, from);
    }
}

/* One row; with a gradient it makes the step after `now`. */
ALWAYS void take(const Job *job, int64_t row, const float *gradient)
{
    bring(job, row);
    if (gradient != NULL) {
        one_step(job, row, gradient, job->steps + (job->now + 1 - job->base));
        job->last[row] = (int32_t)(job->now + 1);
    }
}

ALWAYS void join(float *to, Halves from, int64_t at, int64_t width)
{
    NOTHING_ALIASES
    for (int64_t i = 0; i < width; i++) {
        const uint32_t bits = (uint32_t)from.upper[at + i] << 16 | from.lower[at + i];
        memcpy(to + i, &bits, sizeof bits);
    }
}

ALWAYS void split(Halves to, int64_t at, const float *from, int64_t width)
{
    NOTHING_ALIASES
    for (int64_t i = 0; i < width; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        to.upper[at + i] = (uint16_t)(bits >> 16);
        to.lower[at + i] = (uint16_t)bits;
    }
}

/* One row whose floats lie in halves: taken in `spare`, which has room for three of them. */
ALWAYS void take_halves(const Job *job, int64_t row, const float *gradient, float *spare)
{
    Job one = *job;
    float **const wholes[] = {&one.weights, &one.first, &one.second};
    const int64_t at = row * job->width;
    for (int i = 0; i < 3; i++) {
        if (job->halves[i].upper == NULL)
            continue;
        *wholes[i] = spare + i * job->width;
        join(*wholes[i], job->halves[i], at, job->width);
    }
    one.last = job->last + row;
    take(&one, 0, gradient);
    for (int i = 0; i < 3; i++)
        if (job->halves[i].upper != NULL)
            split(job->halves[i], at, *wholes[i], job->width);
}

#define COMPILE(SUFFIX, TARGET)                                                                    \
    TARGET static void take_##SUFFIX(const Job *job, int64_t row, const float *gradient,           \
                                     float *spare)                                                 \
    {                                                                                              \
        if (job->halves[0].upper != NULL)                                                          \
            take_halves(job, row, gradient, spare);                                                \
        else                                                                                       \
            take(job, row, gradient);                                                              \
    }

COMPILE(plain, )
#if defined(__x86_64__)
COMPILE(avx2, __attribute__((target("avx2"))))
COMPILE(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

/* What this processor has, of no more bits than `widest`. */
static Pass chosen(int widest)
{
#if defined(__x86_64__)
    if (widest >= 512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return take_avx512;
    if (widest >= 256 && __builtin_cpu_supports("avx2"))
        return take_avx2;
#endif
    (void)widest;
    return take_plain;
}

/* Rows that a thread takes at a time, and how far ahead it asks for those to come. */
#define PORTION 256
#define AHEAD 8

static int64_t portions_of(int64_t rows)
{
    return (rows + PORTION - 1) / PORTION;
}

/* Threads that have a portion to take: to start one takes as long as some hundred rows do. */
static unsigned needed(unsigned threads, int64_t count)
{
    const int64_t portions = portions_of(count);
    return portions < threads ? (unsigned)(portions > 0 ? portions : 1) : threads;
}

static void ask_for(const Job *job, int64_t place)
{
    const int64_t row = job->rows ? job->rows[place] : place, at = row * job->width;
    __builtin_prefetch(job->last + row, 1);
    for (int one = 0; one < 3 && job->halves[0].upper != NULL; one++) {
        for (int64_t i = 0; i < job->width && job->halves[one].upper != NULL; i += 32) {
            __builtin_prefetch(job->halves[one].upper + at + i, 1);
            __builtin_prefetch(job->halves[one].lower + at + i, 1);
        }
    }
    for (int64_t i = 0; i < job->width && job->weights != NULL; i += 16) {
        __builtin_prefetch(job->weights + at + i, 1);
        if (job->first)
            __builtin_prefetch(job->first + at + i, 1);
        if (job->second)
            __builtin_prefetch(job->second + at + i, 1);
    }
}

static void take_portion(const Job *job, int64_t portion, float *spare)
{
    const int64_t at = portion * PORTION;
    const int64_t end = job->count - at < PORTION ? job->count : at + PORTION;
    for (int64_t place = at; place < end; place++) {
        if (place + AHEAD < end)
            ask_for(job, place + AHEAD);
        const float *gradient = job->gradients ? job->gradients + place * job->width : NULL;
        job->pass(job, job->rows ? job->rows[place] : place, gradient, spare);
    }
}

/* Tables that threads take portions of, one table after the other. */
typedef struct {
    const Job *jobs;
    int64_t count, next;
    float *spare; /* of each thread, so many floats; NULL where no table lies in halves */
    int64_t length, threads;
} Jobs;

static void work(void *shared)
{
    Jobs *all = shared;
    int64_t at = 0, before = 0; /* a job, and the portions of those before it */
    const int64_t thread = __atomic_fetch_add(&all->threads, 1, __ATOMIC_RELAXED);
    float *spare = all->spare ? all->spare + thread * all->length : NULL;
    for (;;) {
        const int64_t next = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED);
        while (at < all->count && next - before >= portions_of(all->jobs[at].count))
            before += portions_of(all->jobs[at++].count);
        if (at == all->count)
            break;
        take_portion(all->jobs + at, next - before, spare);
    }
}

static int read_job(PyObject *table, Job *job)
{
    unsigned long long whole[3], lower[3], last, rows, gradients;
    long long count, width;
    if (!PyArg_ParseTuple(table, "KKKKKKLLdKKK", whole, whole + 1, whole + 2, &last, &rows,
                          &gradients, &count, &width, &job->epsilon, lower, lower + 1, lower + 2))
        return 0;
    if (lower[0]) {
        for (int i = 0; i < 3; i++) {
            job->halves[i].upper = AT(whole[i]);
            job->halves[i].lower = AT(lower[i]);
        }
    } else {
        job->weights = AT(whole[0]);
        job->first = AT(whole[1]);
        job->second = AT(whole[2]);
    }
    job->last = AT(last);
    job->rows = AT(rows);
    job->gradients = AT(gradients);
    job->count = count, job->width = width;
    return 1;
}

static PyObject *step_rows(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *tables;
    unsigned long long steps, missed, parallel;
    long long base, now;
    unsigned threads;
    int widest;
    Job like;
    memset(&like, 0, sizeof like);
    if (!PyArg_ParseTuple(args, "O!KKLLipiKI", &PyList_Type, &tables, &steps, &missed, &base, &now,
                          &like.rule, &like.nothing_decays, &widest, &parallel, &threads))
        return NULL;
    like.steps = AT(steps);
    like.missed = AT(missed);
    like.base = base, like.now = now;
    like.pass = chosen(widest);
    const Py_ssize_t count = PyList_Size(tables);
    Job *jobs = malloc((size_t)(count > 0 ? count : 1) * sizeof *jobs);
    if (jobs == NULL)
        return PyErr_NoMemory();
    int64_t rows = 0, length = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        jobs[i] = like;
        if (!read_job(PyList_GetItem(tables, i), jobs + i)) {
            free(jobs);
            return NULL;
        }
        rows += jobs[i].count;
        if (jobs[i].halves[0].upper != NULL && 3 * jobs[i].width > length)
            length = 3 * jobs[i].width;
    }
    threads = needed(threads, rows);
    float *spare = length ? malloc((size_t)(threads * length) * sizeof *spare) : NULL;
    if (length && spare == NULL) {
        free(jobs);
        return PyErr_NoMemory();
    }
    Jobs all = {jobs, count, 0, spare, length, 0};
    Py_BEGIN_ALLOW_THREADS
    in_parallel(work, &all, parallel, threads);
    Py_END_ALLOW_THREADS
    free(spare);
    free(jobs);
    Py_RETURN_NONE;
}

/* By what Adam's root is multiplied so many steps after a step, as far as v's decay is known.
   1 - 1 / root^2 is beta2 to the number of the step where the squares are corrected, and else 0. */
static double root_after(const Step *step, double steps)
{
    const double decay = pow(step->second, steps);
    return sqrt(decay / (1 - (1 - 1 / (step->root * step->root)) * decay));
}

/* Behind so many of the steps for which a mean lasts, the series is as far from the first of the
   missed steps as from the last that count. */
#define MIDDLE 0.6

/* What step `now` adds to the steps that rows at `from` have missed. */
static void extend_adam(Missed *missed, const Step *steps, int64_t base, int64_t from, int64_t now)
{
    const Step *then = steps + (from - base), *step = steps + (now - base);
    const double mean = exp2(step->first_logs - then->first_logs);
    const double square = exp2((step->second_logs - then->second_logs) / 2);
    if (now == from + 1)
        missed->root = square * root_after(step, MIDDLE / (1 - step->first));
    const double root = step->root * square, off = (missed->root - root) / (missed->root + root);
    double power = step->rate * mean * 2 * missed->root / (missed->root + root);
    missed->size = missed->size * step->keep + fabs(power) / (1 + fabs(off));
    for (int k = 0; k < TERMS; k++) {
        missed->moments[k] = missed->moments[k] * step->keep + power;
        power *= off;
    }
    missed->rest = missed->rest * step->keep + fabs(power) / (1 - fabs(off));
}

static void extend_linear(Missed *missed, const Step *step)
{
    /* buffer' = momentum * buffer + scale * decay * weight;
       weight' = keep * weight - rate * (what is applied) */
    const double a = missed->of_weight, b = missed->of_buffer;
    const double c = missed->to_weight, d = missed->to_buffer;
    const double own = step->nesterov != 0 ? 1 : 0, by = step->nesterov != 0 ? step->first : 1;
    const double decay = step->scale * step->decay;
    missed->to_weight = step->first * c + decay * a;
    missed->to_buffer = step->first * d - decay * b;
    missed->of_weight = step->keep * a - step->rate * (own * decay * a + by * missed->to_weight);
    missed->of_buffer = step->keep * b + step->rate * (-own * decay * b + by * missed->to_buffer);
}

static PyObject *pass_step(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long steps_at, missed_at;
    long long base, now, horizon;
    int rule;
    if (!PyArg_ParseTuple(args, "KKLLLi", &steps_at, &missed_at, &base, &now, &horizon, &rule))
        return NULL;
    const Step *steps = AT(steps_at);
    Missed *missed = AT(missed_at);
    memset(missed + (now - base), 0, sizeof *missed);
    missed[now - base].of_weight = missed[now - base].to_buffer = 1;
    missed[now - base].upto = (double)now;
    const long long first = now - horizon > base ? now - horizon : base;
    for (long long from = first; from < now; from++) {
        Missed *at = missed + (from - base);
        if (rule == ADAM)
            extend_adam(at, steps, base, from, now);
        else
            extend_linear(at, steps + (now - base));
        at->upto = (double)now;
    }
    Py_RETURN_NONE;
}

/* Ids in order with their places: by 11 bits at a time, stable, so that the places of equal ids
   stay in order. */
#define BITS 11
#define BUCKETS (1 << BITS)

static void sort(const int64_t *ids, int64_t count, int64_t largest, int64_t *keys, int64_t *places,
                    int64_t *spare_keys, int64_t *spare_places)
{
    int64_t *from = keys, *from_places = places, *to = spare_keys, *to_places = spare_places;
    int passes = 0;
    for (int64_t left = largest; left > 0; left >>= BITS)
        passes++;
    if (passes == 0)
        passes = 1;
    for (int pass = 0; pass < passes; pass++) {
        const int shift = pass * BITS;
        int64_t starts[BUCKETS];
        memset(starts, 0, sizeof starts);
        const int64_t *read = pass == 0 ? ids : from;
        for (int64_t i = 0; i < count; i++)
            starts[(read[i] >> shift) & (BUCKETS - 1)]++;
        for (int64_t b = 0, sum = 0; b < BUCKETS; b++) {
            const int64_t here = starts[b];
            starts[b] = sum;
            sum += here;
        }
        for (int64_t i = 0; i < count; i++) {
            const int64_t place = starts[(read[i] >> shift) & (BUCKETS - 1)]++;
            to[place] = read[i];
            to_places[place] = pass == 0 ? i : from_places[i];
        }
        int64_t *swap = from;
        from = to, to = swap;
        swap = from_places;
        from_places = to_places, to_places = swap;
    }
    if (from != keys) {
        memcpy(keys, from, (size_t)count * sizeof *keys);
        memcpy(places, from_places, (size_t)count * sizeof *places);
    }
}

static PyObject *group(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long ids_at, rows_at, places_at, starts_at;
    long long count, size;
    if (!PyArg_ParseTuple(args, "KLLKKK", &ids_at, &count, &size, &rows_at, &places_at, &starts_at))
        return NULL;
    const int64_t *ids = AT(ids_at);
    int64_t *rows = AT(rows_at), *places = AT(places_at);
    int64_t *starts = AT(starts_at);
    int64_t *spare = malloc((size_t)(count > 0 ? 2 * count : 1) * sizeof *spare);
    if (spare == NULL)
        return PyErr_NoMemory();
    long long bad = -1, kept = 0;
    int64_t largest = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < count && bad < 0; i++) {
        if ((uint64_t)ids[i] >= (uint64_t)size)
            bad = i;
        largest = ids[i] > largest ? ids[i] : largest;
    }
    if (bad < 0) {
        sort(ids, count, largest, rows, places, spare, spare + count);
        for (int64_t i = 0; i < count; i++) {
            if (i == 0 || rows[i] != rows[kept - 1]) {
                starts[kept] = i;
                rows[kept++] = rows[i];
            }
        }
        starts[kept] = count;
    }
    Py_END_ALLOW_THREADS
    free(spare);
    if (bad >= 0)
        return PyErr_Format(PyExc_IndexError, "ids[%lld] is %lld, but the table has %lld rows", bad,
                            (long long)ids[bad], size);
    return PyLong_FromLongLong(kept);
}

/* Groups of rows in the order of the ranks that own them: blocks of 2^shift rows go round the ranks,
   from `first` on. Of each row also where it lies among its owner's, and of each place, its row. */
static PyObject *deal(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long rows_at, places_at, starts_at, to_rows_at, to_places_at, to_starts_at;
    unsigned long long local_at, numbers_at, counts_at;
    long long count;
    unsigned first, ranks, shift;
    if (!PyArg_ParseTuple(args, "KKKLIIIKKKKKK", &rows_at, &places_at, &starts_at, &count, &first,
                          &ranks, &shift, &to_rows_at, &to_places_at, &to_starts_at, &local_at,
                          &numbers_at, &counts_at))
        return NULL;
    const int64_t *rows = AT(rows_at);
    const int64_t *places = AT(places_at);
    const int64_t *starts = AT(starts_at);
    int64_t *to_rows = AT(to_rows_at);
    int64_t *to_places = AT(to_places_at);
    int64_t *to_starts = AT(to_starts_at);
    int64_t *local = AT(local_at), *numbers = AT(numbers_at);
    int64_t *counts = AT(counts_at);
    /* Of each rank where its next row goes, and its next place; behind them the rows' owners. */
    int64_t *next = calloc((size_t)(2 * (int64_t)ranks + (count > 0 ? count : 1)), sizeof *next);
    if (next == NULL)
        return PyErr_NoMemory();
    int64_t *next_place = next + ranks, *owners = next_place + ranks;
    const int64_t within = ((int64_t)1 << shift) - 1;
    Py_BEGIN_ALLOW_THREADS
    memset(counts, 0, ranks * sizeof *counts);
    for (int64_t i = 0; i < count; i++) {
        const int64_t owner = owners[i] = (int64_t)((uint64_t)((rows[i] >> shift) + first) % ranks);
        counts[owner]++;
        next_place[owner] += starts[i + 1] - starts[i];
    }
    for (int64_t rank = 0, row = 0, place = 0; rank < (int64_t)ranks; rank++) {
        const int64_t here = next_place[rank];
        next[rank] = row, next_place[rank] = place;
        row += counts[rank], place += here;
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t owner = owners[i], to = next[owner]++;
        int64_t place = next_place[owner];
        to_rows[to] = rows[i];
        to_starts[to] = place;
        local[to] = (int64_t)((uint64_t)(rows[i] >> shift) / ranks) << shift | (rows[i] & within);
        for (int64_t from = starts[i]; from < starts[i + 1]; from++, place++) {
            to_places[place] = places[from];
            numbers[places[from]] = to;
        }
        next_place[owner] = place;
    }
    to_starts[count] = count > 0 ? starts[count] : 0;
    Py_END_ALLOW_THREADS
    free(next);
    Py_RETURN_NONE;
}

typedef struct {
    const float *values;
    const int64_t *places, *starts;
    float *out;
    int64_t count, width, next;
} Sum;

static void add_up(void *shared)
{
    Sum *sum = shared;
    const int64_t width = sum->width;
    for (;;) {
        const int64_t at = __atomic_fetch_add(&sum->next, PORTION, __ATOMIC_RELAXED);
        if (at >= sum->count)
            break;
        const int64_t end = sum->count - at < PORTION ? sum->count : at + PORTION;
        for (int64_t row = at; row < end; row++) {
            float *restrict out = sum->out + row * width;
            int64_t place = sum->starts[row];
            memcpy(out, sum->values + sum->places[place] * width, (size_t)width * sizeof *out);
            for (place++; place < sum->starts[row + 1]; place++) {
                const float *restrict from = sum->values + sum->places[place] * width;
                for (int64_t i = 0; i < width; i++)
                    out[i] += from[i];
            }
        }
    }
}

static PyObject *sum_rows(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long values, places, starts, out, parallel;
    long long count, width;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KKKKLLKI", &values, &places, &starts, &out, &count, &width,
                          &parallel, &threads))
        return NULL;
    Sum sum = {AT(values), AT(places), AT(starts), AT(out), count, width, 0};
    Py_BEGIN_ALLOW_THREADS
    in_parallel(add_up, &sum, parallel, needed(threads, count));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"step_rows", step_rows, METH_VARARGS, "Bring rows of tables to a step, and make the next one."},
    {"pass_step", pass_step, METH_VARARGS, "Take note of a step, for the rows that miss it."},
    {"group", group, METH_VARARGS, "Rows in order, with the places of each."},
    {"deal", deal, METH_VARARGS, "Rows in the order of the ranks that own them."},
    {"sum_rows", sum_rows, METH_VARARGS, "The sum of the values of each row."},
    {NULL, NULL, 0, NULL},
};

MODULE(_table_rows, "A dense optimizer's step on the rows of a table that a batch has used.", methods, )
