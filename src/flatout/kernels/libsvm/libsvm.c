/* Rows of LibSVM text to arrays.

   Everything that comes in is checked here, whatever the caller checked before: a wrong buffer is a
   ValueError, a row that is not as it should be gets a status, and nothing crashes. The parser
   itself is in core.h. */

#include "../shared/buffers.h"
#include "core.h"

/* All buffers that a call may have; those from LABELS on are written. */
enum { TEXT, STARTS, ENDS, OFFSETS, LABELS, QID, STATUS, AT, LENGTHS, IDS, VALUES, OUT, VIEWS };

static const char *const NAMES[VIEWS] = {"buffer", "starts", "ends",    "offsets", "labels", "qid",
                                         "status", "at",     "lengths", "ids",     "values", "out"};

/* Take hold of what is given; NULL and None are not. */
static int get_buffers(PyObject *const *given, Py_buffer *views)
{
    for (int which = 0; which < VIEWS; which++) {
        if (given[which] == NULL || (which == QID && given[which] == Py_None))
            continue;
        if (!get_buffer(given[which], &views[which], NAMES[which], which >= LABELS))
            return 0;
    }
    return 1;
}

static Kind kind_named(const char *name)
{
    return strcmp(name, "float32") == 0   ? FLOAT32
           : strcmp(name, "float64") == 0 ? FLOAT64
           : strcmp(name, "int32") == 0   ? INT32
           : strcmp(name, "int64") == 0   ? INT64
                                          : NOTHING;
}

static Kind kind_of(const Py_buffer *view)
{
    return kind_named(dtype(view));
}

static int is_good(const Py_buffer *views, int which, const char *dtypes, int64_t count)
{
    return is_row(&views[which], NAMES[which], dtypes, count);
}

/* What all calls have. */
static int check_rows(Libsvm *job, const Py_buffer *views)
{
    job->text = views[TEXT].buf;
    job->bytes = views[TEXT].len;
    job->starts = views[STARTS].buf;
    job->ends = views[ENDS].buf;
    job->labels = views[LABELS].buf;
    job->label_kind = kind_of(&views[LABELS]);
    job->qid = views[QID].buf;
    job->status = views[STATUS].buf;
    job->at = views[AT].buf;
    job->rows = views[STARTS].ndim == 1 ? views[STARTS].shape[0] : 0;
    if (job->sink != SURVEY)
        job->label_as = job->label_kind;
    if (!is_good(views, TEXT, "uint8", -1) || !is_good(views, STARTS, "int64", -1) ||
        !is_good(views, ENDS, "int64", job->rows) || !is_good(views, AT, "int64", job->rows) ||
        !is_good(views, STATUS, "uint8", job->rows) ||
        !is_good(views, LABELS, "float32, float64 or int64", job->rows) ||
        (views[QID].obj != NULL && !is_good(views, QID, "int64", job->rows)))
        return 0;
    if (job->base < 0 || job->base > 1) {
        PyErr_Format(PyExc_ValueError, "base: expected 0 or 1, found %lld", (long long)job->base);
        return 0;
    }
    if (job->limit < 0) {
        PyErr_Format(PyExc_ValueError, "limit: expected 0 or more, found %lld",
                     (long long)job->limit);
        return 0;
    }
    return 1;
}

static int check_offsets(const Libsvm *job)
{
    int64_t before = 0;
    for (int64_t i = 0; i <= job->rows; i++) {
        if (job->offsets[i] < before || job->offsets[i] > job->items) {
            PyErr_Format(PyExc_ValueError,
                         "offsets: expected numbers that ascend from 0 to at most %lld, found %lld "
                         "at %lld",
                         (long long)job->items, (long long)job->offsets[i], (long long)i);
            return 0;
        }
        before = job->offsets[i];
    }
    return 1;
}

/* What the pairs of the rows are written to. */
static int check_pairs(Libsvm *job, const Py_buffer *views)
{
    if (!is_good(views, OFFSETS, "int64", job->rows + 1) ||
        !is_good(views, IDS, "int32 or int64", -1) ||
        !is_good(views, VALUES, "float32 or float64", views[IDS].shape[0]))
        return 0;
    job->value_as = kind_of(&views[VALUES]);
    job->id_kind = kind_of(&views[IDS]);
    job->offsets = views[OFFSETS].buf;
    job->items = views[IDS].shape[0];
    job->ids = views[IDS].buf;
    job->values = views[VALUES].buf;
    if (job->id_kind == INT32 && job->limit > (int64_t)INT32_MAX + 1)
        job->limit = (int64_t)INT32_MAX + 1;
    return check_offsets(job);
}

static int check_vectors(Libsvm *job, const Py_buffer *views)
{
    const Py_buffer *out = &views[OUT];
    job->out = out->buf;
    if (out->ndim == 2 && holds(out, "float32") && out->shape[0] == job->rows &&
        out->shape[1] == job->limit)
        return 1;
    PyErr_Format(PyExc_ValueError, "out: expected native, aligned float32 of shape (%lld, %lld)",
                 (long long)job->rows, (long long)job->limit);
    return 0;
}

static int check_outputs(Libsvm *job, const Py_buffer *views)
{
    job->lengths = views[LENGTHS].buf;
    return job->sink == PAIRS   ? check_pairs(job, views)
           : job->sink == DENSE ? check_vectors(job, views)
                                : is_good(views, LENGTHS, "int32", job->rows) &&
                                      is_good(views, LABELS, "float64", job->rows);
}

/* How many rows are bad, or -1 with an exception set. `is_plain`: as on a processor without AVX2. */
static long long read_all(Libsvm *job, PyObject *const *given, int is_plain)
{
    Py_buffer views[VIEWS] = {{0}};
    long long bad = -1;
    if (get_buffers(given, views) && check_rows(job, views) && check_outputs(job, views)) {
        Py_BEGIN_ALLOW_THREADS
        bad = libsvm_read(job, is_plain ? chunk_portable : fastest());
        Py_END_ALLOW_THREADS
    }
    release(views, VIEWS);
    return bad;
}

/* Read rows, and write all but their pairs. Returns how many are bad, and the smallest and the
   largest index of the others. */
static PyObject *survey(PyObject *module, PyObject *args)
{
    PyObject *given[VIEWS] = {NULL};
    long long base, limit, room;
    const char *label_as;
    int is_plain;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOOLLLsp:survey", &given[TEXT], &given[STARTS], &given[ENDS],
                          &given[LABELS], &given[QID], &given[LENGTHS], &given[STATUS], &given[AT],
                          &base, &limit, &room, &label_as, &is_plain))
        return NULL;
    Libsvm job = {.sink = SURVEY, .base = base, .limit = limit, .low = INT64_MAX, .high = -1};
    job.label_as = kind_named(label_as);
    job.value_as = FLOAT32;
    job.room = room < INT32_MAX ? room : INT32_MAX;
    if (job.label_as == NOTHING || job.label_as == INT32 || room < 0) {
        PyErr_SetString(PyExc_ValueError, "expected labels as float32, float64 or int64, and a "
                                          "width of 0 or more");
        return NULL;
    }
    long long bad = read_all(&job, given, is_plain);
    return bad < 0 ? NULL : Py_BuildValue("LLL", bad, (long long)job.low, (long long)job.high);
}

/* Read rows; the pairs of row i go to ids and values from offsets[i] on. Returns how many are
   bad. */
static PyObject *parse(PyObject *module, PyObject *args)
{
    PyObject *given[VIEWS] = {NULL};
    long long base, limit;
    int is_plain;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOLLp:parse", &given[TEXT], &given[STARTS], &given[ENDS],
                          &given[OFFSETS], &given[LABELS], &given[QID], &given[IDS], &given[VALUES],
                          &given[STATUS], &given[AT], &base, &limit, &is_plain))
        return NULL;
    Libsvm job = {.sink = PAIRS, .base = base, .limit = limit};
    long long bad = read_all(&job, given, is_plain);
    return bad < 0 ? NULL : PyLong_FromLongLong(bad);
}

/* Read rows to vectors of `limit` float32 each. Returns how many are bad. */
static PyObject *dense(PyObject *module, PyObject *args)
{
    PyObject *given[VIEWS] = {NULL};
    long long base, limit;
    int is_plain;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOOLLp:dense", &given[TEXT], &given[STARTS], &given[ENDS],
                          &given[LABELS], &given[QID], &given[OUT], &given[STATUS], &given[AT],
                          &base, &limit, &is_plain))
        return NULL;
    Libsvm job = {.sink = DENSE, .base = base, .limit = limit, .value_as = FLOAT32};
    long long bad = read_all(&job, given, is_plain);
    return bad < 0 ? NULL : PyLong_FromLongLong(bad);
}

static PyMethodDef methods[] = {
    {"survey", survey, METH_VARARGS, NULL},
    {"parse", parse, METH_VARARGS, NULL},
    {"dense", dense, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_libsvm, "Rows of LibSVM text.", methods)
