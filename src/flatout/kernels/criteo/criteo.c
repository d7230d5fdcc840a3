/* Rows of Criteo's click logs to columns.

   A wrong buffer is a ValueError, a row that is not as it should be gets a status, and nothing
   crashes. __init__.py checks the other numbers. The parser itself is in core.h. */

#include "../shared/buffers.h"
#include "core.h"

enum { TEXT, STARTS, ENDS, LABELS, INTEGERS, CATEGORIES, STATUS, AT, VIEWS };

static const char *const NAMES[VIEWS] = {"buffer",   "starts",     "ends",   "labels",
                                         "integers", "categories", "status", "at"};

static Kind kind_of(const Py_buffer *view)
{
    return holds(view, "float32") ? FLOAT32
           : holds(view, "int32") ? INT32
           : holds(view, "int64") ? INT64
                                  : NOTHING;
}

static int refuse(int which, const char *expected)
{
    PyErr_Format(PyExc_ValueError, "%s: expected %s", NAMES[which], expected);
    return 0;
}

static int check_views(Criteo *job, const Py_buffer *views, int has_labels)
{
    job->text = views[TEXT].buf;
    job->bytes = views[TEXT].len;
    job->rows = views[STARTS].len / 8;
    if (!is_row(&views[STARTS], NAMES[STARTS], "int64", -1) ||
        !is_row(&views[ENDS], NAMES[ENDS], "int64", job->rows) ||
        !is_row(&views[STATUS], NAMES[STATUS], "uint8", job->rows) ||
        !is_row(&views[AT], NAMES[AT], "int64", job->rows) ||
        (has_labels &&
         !is_row(&views[LABELS], NAMES[LABELS], "float32, int32 or int64", job->rows)))
        return 0;
    for (int which = INTEGERS; which <= CATEGORIES; which++)
        if (views[which].ndim != 2 || views[which].shape[0] != job->rows)
            return refuse(which, "two dimensions, and as many rows as starts");
    job->starts = views[STARTS].buf;
    job->ends = views[ENDS].buf;
    job->status = views[STATUS].buf;
    job->at = views[AT].buf;
    return 1;
}

static int check_columns(Criteo *job, const Py_buffer *views, int has_labels)
{
    if (has_labels) {
        job->labels = (Column){.values = views[LABELS].buf, .width = 1,
                               .kind = kind_of(&views[LABELS])};
        if (!job->has_label)
            return refuse(LABELS, "None, because the rows have none");
    }
    job->integers.values = views[INTEGERS].buf;
    job->integers.width = views[INTEGERS].shape[1];
    job->integers.kind = kind_of(&views[INTEGERS]);
    if (job->integers.kind == NOTHING)
        return refuse(INTEGERS, "native, aligned float32, int32 or int64");
    job->categories.values = views[CATEGORIES].buf;
    job->categories.width = views[CATEGORIES].shape[1];
    job->categories.kind = kind_of(&views[CATEGORIES]);
    if (job->categories.kind != INT32 && job->categories.kind != INT64)
        return refuse(CATEGORIES, "native, aligned int32 or int64");
    /* A row of one is empty memory for any number of columns; a billion of them is no format. */
    if (job->integers.width > 1 << 30 || job->categories.width > 1 << 30)
        return refuse(job->integers.width > 1 << 30 ? INTEGERS : CATEGORIES, "fewer columns");
    if (job->has_label + job->integers.width + job->categories.width == 0)
        return refuse(CATEGORIES, "at least one field in a row");
    return 1;
}

static int check_numbers(Criteo *job, PyObject *missing_integer, int64_t buckets)
{
    if (job->integers.kind == FLOAT32)
        job->integers.missing = float_bits((float)PyFloat_AsDouble(missing_integer));
    else
        job->integers.missing = PyLong_AsLongLong(missing_integer);
    if (PyErr_Occurred())
        return 0;
    job->hashing = hashing_of(buckets);
    return 1;
}

static PyObject *run(Criteo *job, int is_plain)
{
    int64_t bad;
    size_t fields = (size_t)(job->has_label + job->integers.width + job->categories.width);
    job->tabs = PyMem_Malloc((fields + SLACK) * sizeof(int32_t));
    if (job->tabs == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    bad = criteo_parse(job, is_plain);
    Py_END_ALLOW_THREADS
    PyMem_Free(job->tabs);
    return PyLong_FromLongLong(bad);
}

/* Parse the rows `buffer[starts[i]:ends[i]]`. Returns how many are bad. `is_plain`: as on a
   processor without AVX2. */
static PyObject *parse(PyObject *module, PyObject *args)
{
    PyObject *objects[VIEWS], *missing_integer, *answer = NULL;
    Py_buffer views[VIEWS] = {{0}};
    Criteo job = {0};
    long long missing_category, buckets;
    int is_plain;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOOpOLLp:parse", &objects[TEXT], &objects[STARTS],
                          &objects[ENDS], &objects[LABELS], &objects[INTEGERS],
                          &objects[CATEGORIES], &objects[STATUS], &objects[AT], &job.has_label,
                          &missing_integer, &missing_category, &buckets, &is_plain))
        return NULL;
    job.categories.missing = missing_category;
    int ok = 1, has_labels = objects[LABELS] != Py_None;
    for (int which = 0; ok && which < VIEWS; which++)
        if (which != LABELS || has_labels)
            ok = get_buffer(objects[which], &views[which], NAMES[which], which >= LABELS);
    if (ok && check_views(&job, views, has_labels) && check_columns(&job, views, has_labels) &&
        check_numbers(&job, missing_integer, buckets))
        answer = run(&job, is_plain);
    release(views, VIEWS);
    return answer;
}

static PyMethodDef methods[] = {
    {"parse", parse, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_criteo, "Rows of Criteo's click logs to columns.", methods)
