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

static int refuse(int which, const char *expected)
{
    PyErr_Format(PyExc_ValueError, "%s: expected %s", NAMES[which], expected);
    return 0;
}

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

static int is_given(const Py_buffer *view)
{
    return view->obj != NULL;
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

static int check_bytes(const Py_buffer *views, int which)
{
    if (views[which].ndim == 1 && holds(&views[which], "uint8"))
        return 1;
    return refuse(which, "one dimension of uint8");
}

/* One dimension of `count` numbers of a kind; or of any number of them where it is -1. */
static int check_numbers(const Py_buffer *views, int which, Kind kind, const char *words,
                         int64_t count)
{
    const Py_buffer *view = &views[which];
    if (view->ndim != 1 || kind_of(view) != kind) {
        PyErr_Format(PyExc_ValueError, "%s: expected one dimension of native, aligned %s",
                     NAMES[which], words);
        return 0;
    }
    if (count >= 0 && view->shape[0] != count) {
        PyErr_Format(PyExc_ValueError, "%s: expected %lld numbers, found %zd", NAMES[which],
                     (long long)count, view->shape[0]);
        return 0;
    }
    return 1;
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
    if (!check_bytes(views, TEXT) || !check_numbers(views, STARTS, INT64, "int64", -1) ||
        !check_numbers(views, ENDS, INT64, "int64", job->rows) ||
        !check_numbers(views, AT, INT64, "int64", job->rows) || !check_bytes(views, STATUS) ||
        (is_given(&views[QID]) && !check_numbers(views, QID, INT64, "int64", job->rows)))
        return 0;
    if (views[STATUS].shape[0] != job->rows)
        return refuse(STATUS, "a byte for each row");
    if (job->label_kind == NOTHING || job->label_kind == INT32)
        return refuse(LABELS, "native, aligned float32, float64 or int64");
    if (!check_numbers(views, LABELS, job->label_kind, "numbers", job->rows))
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

/* `is_plain`: as on a processor without AVX2. */
static int64_t run(Libsvm *job, int is_plain)
{
    int64_t bad;
    Py_BEGIN_ALLOW_THREADS
    bad = libsvm_read(job, is_plain ? chunk_portable : fastest());
    Py_END_ALLOW_THREADS
    return bad;
}

/* Read rows, and write all but their pairs. Returns how many are bad, and the smallest and the
   largest index of the others. */
static PyObject *survey(PyObject *module, PyObject *args)
{
    PyObject *given[VIEWS] = {NULL}, *answer = NULL;
    Py_buffer views[VIEWS] = {{0}};
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
    if (!get_buffers(given, views) || !check_rows(&job, views) ||
        !check_numbers(views, LENGTHS, INT32, "int32", job.rows))
        goto done;
    if (job.label_as == NOTHING || job.label_as == INT32 || room < 0) {
        PyErr_SetString(PyExc_ValueError, "expected labels as float32, float64 or int64, and a "
                                          "width of 0 or more");
        goto done;
    }
    if (job.label_kind != FLOAT64) {
        refuse(LABELS, "float64");
        goto done;
    }
    job.lengths = views[LENGTHS].buf;
    long long bad = run(&job, is_plain);
    answer = Py_BuildValue("LLL", bad, (long long)job.low, (long long)job.high);
done:
    release(views, VIEWS);
    return answer;
}

/* Read rows; the pairs of row i go to ids and values from offsets[i] on. Returns how many are
   bad. */
static PyObject *parse(PyObject *module, PyObject *args)
{
    PyObject *given[VIEWS] = {NULL}, *answer = NULL;
    Py_buffer views[VIEWS] = {{0}};
    long long base, limit;
    int is_plain;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOLLp:parse", &given[TEXT], &given[STARTS], &given[ENDS],
                          &given[OFFSETS], &given[LABELS], &given[QID], &given[IDS], &given[VALUES],
                          &given[STATUS], &given[AT], &base, &limit, &is_plain))
        return NULL;
    Libsvm job = {.sink = PAIRS, .base = base, .limit = limit};
    if (!get_buffers(given, views) || !check_rows(&job, views) ||
        !check_numbers(views, OFFSETS, INT64, "int64", job.rows + 1))
        goto done;
    job.label_as = job.label_kind;
    job.value_as = kind_of(&views[VALUES]);
    job.id_kind = kind_of(&views[IDS]);
    if (job.id_kind != INT32 && job.id_kind != INT64) {
        refuse(IDS, "native, aligned int32 or int64");
        goto done;
    }
    if (job.value_as != FLOAT32 && job.value_as != FLOAT64) {
        refuse(VALUES, "native, aligned float32 or float64");
        goto done;
    }
    if (!check_numbers(views, IDS, job.id_kind, "numbers", -1) ||
        !check_numbers(views, VALUES, job.value_as, "numbers", views[IDS].shape[0]))
        goto done;
    job.offsets = views[OFFSETS].buf;
    job.items = views[IDS].shape[0];
    job.ids = views[IDS].buf;
    job.values = views[VALUES].buf;
    if (job.id_kind == INT32 && job.limit > (int64_t)INT32_MAX + 1)
        job.limit = (int64_t)INT32_MAX + 1;
    if (check_offsets(&job))
        answer = PyLong_FromLongLong(run(&job, is_plain));
done:
    release(views, VIEWS);
    return answer;
}

/* Read rows to vectors of `limit` float32 each. Returns how many are bad. */
static PyObject *dense(PyObject *module, PyObject *args)
{
    PyObject *given[VIEWS] = {NULL}, *answer = NULL;
    Py_buffer views[VIEWS] = {{0}};
    long long base, limit;
    int is_plain;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOOLLp:dense", &given[TEXT], &given[STARTS], &given[ENDS],
                          &given[LABELS], &given[QID], &given[OUT], &given[STATUS], &given[AT],
                          &base, &limit, &is_plain))
        return NULL;
    Libsvm job = {.sink = DENSE, .base = base, .limit = limit, .value_as = FLOAT32};
    if (!get_buffers(given, views) || !check_rows(&job, views))
        goto done;
    job.label_as = job.label_kind;
    if (views[OUT].ndim != 2 || kind_of(&views[OUT]) != FLOAT32 ||
        views[OUT].shape[0] != job.rows || views[OUT].shape[1] != job.limit) {
        PyErr_Format(PyExc_ValueError,
                     "out: expected native, aligned float32 of shape (%lld, %lld)",
                     (long long)job.rows, (long long)job.limit);
        goto done;
    }
    job.out = views[OUT].buf;
    answer = PyLong_FromLongLong(run(&job, is_plain));
done:
    release(views, VIEWS);
    return answer;
}

static PyMethodDef methods[] = {
    {"survey", survey, METH_VARARGS, NULL},
    {"parse", parse, METH_VARARGS, NULL},
    {"dense", dense, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_libsvm, "Rows of LibSVM text.", methods)
