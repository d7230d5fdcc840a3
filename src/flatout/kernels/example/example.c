/* TFRecord files of tf.train.Example messages: finding, decoding and writing records.

   A wrong buffer is a ValueError, a record that is not as it should be gets a status, and nothing
   crashes. __init__.py checks the other numbers. The work itself is in core.h and writer.h. */

#include <math.h>

#include "../shared/buffers.h"
#include "core.h"
#include "writer.h"

#define PLAN "flatout.kernels._example.plan"

/* ---- buffers ---- */

/* The buffers of one call. */
typedef struct {
    Py_buffer *views;
    Py_ssize_t count, room;
} Held;

static int hold_room(Held *held, Py_ssize_t room)
{
    *held = (Held){.room = room};
    held->views = PyMem_Calloc((size_t)room, sizeof *held->views);
    if (held->views != NULL)
        return 1;
    PyErr_NoMemory();
    return 0;
}

static void let_go(Held *held)
{
    release(held->views, held->count);
    PyMem_Free(held->views);
}

/* The view of an object whose dtype is in `dtypes` (NULL: any). `number` follows its name, unless
   it is -1. NULL with an exception set. */
static Py_buffer *hold(Held *held, PyObject *object, const char *name, Py_ssize_t number,
                       const char *dtypes, int is_written)
{
    char label[64];
    Py_buffer *view = &held->views[held->count];
    PyOS_snprintf(label, sizeof label, number < 0 ? "%s" : "%s[%zd]", name, number);
    if (!get_buffer(object, view, label, is_written))
        return NULL;
    held->count++;
    const char *found = dtype(view);
    if (dtypes == NULL || (*found != 0 && strstr(dtypes, found) != NULL))
        return view;
    PyErr_Format(PyExc_ValueError, "%s: expected native, aligned %s", label, dtypes);
    return NULL;
}

/* As `hold`, of one dimension and `count` numbers; any count for -1. */
static Py_buffer *hold_row(Held *held, PyObject *object, const char *name, Py_ssize_t number,
                           const char *dtypes, int is_written, int64_t count)
{
    Py_buffer *view = hold(held, object, name, number, dtypes, is_written);
    return view != NULL && is_row(view, name, dtypes, count) ? view : NULL;
}

/* Offsets of `rows` rows in an array of `*room` values, which becomes the last offset. */
static const int64_t *hold_offsets(Held *held, PyObject *object, Py_ssize_t number, int64_t rows,
                                   int64_t *room)
{
    Py_buffer *view = hold_row(held, object, "offsets", number, "int64", 0, rows + 1);
    if (view == NULL)
        return NULL;
    int64_t last = 0, is_good = 1;
    for (int64_t row = 0; row <= rows; row++) {
        int64_t offset = read_once(view->buf, row);
        is_good &= offset >= last;
        last = offset;
    }
    if (!is_good || last > *room) {
        PyErr_Format(PyExc_ValueError,
                     "offsets[%zd]: expected numbers from 0 to %lld that do not decrease", number,
                     (long long)*room);
        return NULL;
    }
    *room = last;
    return view->buf;
}

/* ---- checksum and frames ---- */

/* The CRC-32C of bytes whose beginning has the CRC-32C `value`, and whose rest is `data`. */
static PyObject *crc32c(PyObject *module, PyObject *args)
{
    PyObject *data;
    unsigned int value;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTuple(args, "OI:crc32c", &data, &value) || !get_buffer(data, &view, "data", 0))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    value = ~crc_best(~value, view.buf, view.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(value);
}

/* As `crc32c`, by each way that this machine has: a dict of their names. For tests. */
static PyObject *crc32c_ways(PyObject *module, PyObject *args)
{
    PyObject *data, *answer;
    unsigned int value;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTuple(args, "OI:crc32c_ways", &data, &value) ||
        !get_buffer(data, &view, "data", 0))
        return NULL;
    answer = PyDict_New();
    for (int i = 0; answer != NULL && i < CRC_WAYS; i++) {
        if (!crc_ways[i].runs())
            continue;
        PyObject *found = PyLong_FromUnsignedLong(~crc_ways[i].crc(~value, view.buf, view.len));
        if (found == NULL || PyDict_SetItemString(answer, crc_ways[i].name, found))
            Py_CLEAR(answer);
        Py_XDECREF(found);
    }
    PyBuffer_Release(&view);
    return answer;
}

/* The CRC-32C of each `block` bytes of `data`, the last of which may be fewer, into `out`. */
static PyObject *crc32c_blocks(PyObject *module, PyObject *args)
{
    PyObject *data, *out, *answer = NULL;
    long long block;
    Held held;
    (void)module;
    if (!PyArg_ParseTuple(args, "OLO:crc32c_blocks", &data, &block, &out) || !hold_room(&held, 2))
        return NULL;
    Py_buffer *view = hold(&held, data, "data", -1, NULL, 0);
    if (view == NULL)
        goto done;
    long long count = view->len / block + (view->len % block != 0);
    Py_buffer *sums = hold_row(&held, out, "out", -1, "int64", 1, count);
    if (sums == NULL)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    const uint8_t *at = view->buf;
    for (long long i = 0; i < count; i++, at += block) {
        long long size = i < count - 1 ? block : view->len - i * block;
        ((int64_t *)sums->buf)[i] = (int64_t)(uint32_t)~crc_best(~(uint32_t)0, at, size);
    }
    Py_END_ALLOW_THREADS
    answer = Py_NewRef(Py_None);
done:
    let_go(&held);
    return answer;
}

/* Find records from byte `start` on. Returns how many, where the next frame begins, and an
   `End`. */
static PyObject *scan(PyObject *module, PyObject *args)
{
    PyObject *text, *starts, *ends, *answer = NULL;
    Py_buffer *views[3];
    long long start;
    Held held;
    (void)module;
    if (!PyArg_ParseTuple(args, "OLOO:scan", &text, &start, &starts, &ends) ||
        !hold_room(&held, 3))
        return NULL;
    if ((views[0] = hold(&held, text, "buffer", -1, NULL, 0)) == NULL ||
        (views[1] = hold_row(&held, starts, "starts", -1, "int64", 1, -1)) == NULL ||
        (views[2] = hold_row(&held, ends, "ends", -1, "int64", 1, views[1]->shape[0])) == NULL)
        goto done;
    Frames frames = {.text = views[0]->buf, .at = start, .stop = views[0]->len};
    frames.starts = views[1]->buf;
    frames.ends = views[2]->buf;
    frames.room = views[1]->shape[0];
    int end;
    Py_BEGIN_ALLOW_THREADS
    end = frames_scan(&frames);
    Py_END_ALLOW_THREADS
    answer = Py_BuildValue("LLi", (long long)frames.count, (long long)frames.at, end);
done:
    let_go(&held);
    return answer;
}

/* ---- plans ---- */

static void free_capsule(PyObject *capsule)
{
    plan_free(PyCapsule_GetPointer(capsule, PLAN));
}

/* Reads (name, kind, width, required) into feature `i`. */
static int read_feature(Plan *plan, int32_t i, PyObject *tuple)
{
    Feature *feature = &plan->features[i];
    const char *name;
    Py_ssize_t bytes;
    long long width;
    int kind;
    if (!PyArg_ParseTuple(tuple, "y#iLp:feature", &name, &bytes, &kind, &width,
                          &feature->required))
        return 0;
    if (kind < BYTES || kind > INTS || (width != RAGGED && (width < 1 || width > INT32_MAX))) {
        PyErr_Format(PyExc_ValueError, "feature %d: its kind or its width is out of range", i);
        return 0;
    }
    feature->kind = (Kind)kind;
    feature->width = width;
    int done = plan_name(plan, i, (const uint8_t *)name, bytes);
    if (done == 0)
        PyErr_NoMemory();
    if (done < 0)
        PyErr_Format(PyExc_ValueError, "feature %d: another one has the same name", i);
    return done > 0;
}

/* What to look for in records: (name, kind, width or -1, required) each. */
static PyObject *make_plan(PyObject *module, PyObject *features)
{
    (void)module;
    Py_ssize_t count = PySequence_Size(features);
    if (count < 0)
        return NULL;
    if (count < 1 || count > 1 << 24)
        return PyErr_Format(PyExc_ValueError, "features: expected at least one, found %zd", count);
    Plan *plan = plan_new(count);
    if (plan == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *feature = PySequence_GetItem(features, i);
        int is_good = feature != NULL && read_feature(plan, (int32_t)i, feature);
        Py_XDECREF(feature);
        if (!is_good) {
            plan_free(plan);
            return NULL;
        }
    }
    PyObject *capsule = PyCapsule_New(plan, PLAN, free_capsule);
    if (capsule == NULL)
        plan_free(plan);
    return capsule;
}

/* ---- measuring and decoding ---- */

/* Buffers that both calls have. */
static int hold_job(Held *held, Job *job, PyObject *const *objects)
{
    static const char *const names[] = {"buffer", "starts", "ends", "status", "at"};
    static const char *const dtypes[] = {NULL, "int64", "int64", "uint8", "int64"};
    Py_buffer *views[5];
    for (int i = 0; i < 5; i++) {
        int64_t rows = i == 1 ? -1 : job->rows;
        views[i] = i == 0 ? hold(held, objects[i], names[i], -1, NULL, 0)
                          : hold_row(held, objects[i], names[i], -1, dtypes[i], i >= 3, rows);
        if (views[i] == NULL)
            return 0;
        if (i == 1)
            job->rows = views[i]->shape[0];
    }
    job->text = views[0]->buf;
    job->bytes = views[0]->len;
    job->starts = views[1]->buf;
    job->ends = views[2]->buf;
    job->status = views[3]->buf;
    job->at = views[4]->buf;
    return 1;
}

static PyObject *run(Job *job)
{
    int64_t bad;
    job->memory = PyMem_Calloc((size_t)job->plan->count + 1, sizeof *job->memory);
    if (job->memory == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    bad = example_decode(job);
    Py_END_ALLOW_THREADS
    PyMem_Free(job->memory);
    return PyLong_FromLongLong(bad);
}

/* Lengths of the ragged features of each record. Returns how many records are bad. */
static PyObject *measure(PyObject *module, PyObject *args)
{
    PyObject *objects[5], *capsule, *lengths, *answer = NULL;
    Job job = {0};
    Held held;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOp:measure", &objects[0], &objects[1], &objects[2],
                          &capsule, &lengths, &objects[3], &objects[4], &job.check))
        return NULL;
    job.plan = PyCapsule_GetPointer(capsule, PLAN);
    if (job.plan == NULL || !hold_room(&held, 6))
        return NULL;
    Py_buffer *view;
    if (hold_job(&held, &job, objects) &&
        (view = hold(&held, lengths, "lengths", -1, "int64", 1)) != NULL) {
        job.lengths = view->buf;
        if (view->ndim != 2 || view->shape[0] != job.plan->ragged || view->shape[1] != job.rows)
            PyErr_Format(PyExc_ValueError, "lengths: expected shape (%lld, %lld)",
                         (long long)job.plan->ragged, (long long)job.rows);
        else
            answer = run(&job);
    }
    let_go(&held);
    return answer;
}

static int read_float(PyObject *number, uint64_t *fill)
{
    double real = PyFloat_AsDouble(number);
    float half = (float)real;
    uint32_t bits;
    if (PyErr_Occurred() || (isinf(half) && !isinf(real)))
        return 0;
    memcpy(&bits, &half, 4);
    *fill = bits;
    return 1;
}

static int read_whole(PyObject *number, int64_t lowest, int64_t highest, uint64_t *fill)
{
    int64_t whole;
    if (PyFloat_Check(number)) {
        double real = PyFloat_AsDouble(number);
        if (!(fabs(real) < 9223372036854775808.0) || real != floor(real))
            return 0;
        whole = (int64_t)real;
    } else {
        whole = PyLong_AsLongLong(number);
    }
    *fill = (uint64_t)whole;
    return !PyErr_Occurred() && whole >= lowest && whole <= highest;
}

/* What a missing value becomes, as bits. */
static int read_default(PyObject *number, const char *found, Py_ssize_t i, uint64_t *fill)
{
    int is_good;
    if (strcmp(found, "float32") == 0)
        is_good = read_float(number, fill);
    else if (strcmp(found, "uint8") == 0)
        is_good = read_whole(number, 0, UINT8_MAX, fill);
    else if (strcmp(found, "int32") == 0)
        is_good = read_whole(number, INT32_MIN, INT32_MAX, fill);
    else
        is_good = read_whole(number, INT64_MIN, INT64_MAX, fill);
    if (!is_good) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "defaults[%zd]: expected a number that fits into %s", i,
                     found);
    }
    return is_good;
}

static int hold_output(Held *held, const Job *job, Output *output, Py_ssize_t i, PyObject *array,
                       PyObject *offsets, PyObject *fill)
{
    static const char *const dtypes[] = {[BYTES] = "uint8", [FLOATS] = "float32",
                                         [INTS] = "int32 or int64"};
    const Feature *feature = &job->plan->features[i];
    Py_buffer *view = hold(held, array, "outputs", i, dtypes[feature->kind], 1);
    if (view == NULL || !read_default(fill, dtype(view), i, &output->fill))
        return 0;
    output->values = view->buf;
    output->item = (size_t)view->itemsize;
    output->room = view->len / view->itemsize;
    if (feature->width == RAGGED) {
        if (view->ndim != 1) {
            PyErr_Format(PyExc_ValueError, "outputs[%zd]: expected one dimension, for it is ragged",
                         i);
            return 0;
        }
        output->offsets = hold_offsets(held, offsets, i, job->rows, &output->room);
        return output->offsets != NULL;
    }
    if (offsets != Py_None) {
        PyErr_Format(PyExc_ValueError, "offsets[%zd]: expected None, for it is not ragged", i);
        return 0;
    }
    int64_t wanted;
    if (view->ndim >= 1 && view->shape[0] == job->rows &&
        !__builtin_mul_overflow(job->rows, feature->width, &wanted) && output->room == wanted)
        return 1;
    PyErr_Format(PyExc_ValueError, "outputs[%zd]: expected shape (%lld, %lld)", i,
                 (long long)job->rows, (long long)feature->width);
    return 0;
}

static int hold_outputs(Held *held, const Job *job, Output *outputs, PyObject *const *lists)
{
    Py_ssize_t count = (Py_ssize_t)job->plan->count;
    for (int i = 0; i < 3; i++) {
        Py_ssize_t found = PySequence_Size(lists[i]);
        if (found < 0)
            return 0;
        if (found != count) {
            PyErr_Format(PyExc_ValueError, "expected outputs, offsets and defaults of %zd features",
                         count);
            return 0;
        }
    }
    int is_good = 1;
    for (Py_ssize_t i = 0; is_good && i < count; i++) {
        PyObject *items[3];
        for (int j = 0; j < 3; j++) {
            items[j] = PySequence_GetItem(lists[j], i);
            is_good = is_good && items[j] != NULL;
        }
        is_good = is_good && hold_output(held, job, &outputs[i], i, items[0], items[1], items[2]);
        for (int j = 0; j < 3; j++)
            Py_XDECREF(items[j]);
    }
    return is_good;
}

/* Values of each record into arrays. Returns how many records are bad. */
static PyObject *decode(PyObject *module, PyObject *args)
{
    PyObject *objects[5], *capsule, *lists[3], *answer = NULL;
    Job job = {0};
    Held held;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOp:decode", &objects[0], &objects[1], &objects[2],
                          &capsule, &lists[0], &lists[1], &lists[2], &objects[3], &objects[4],
                          &job.check))
        return NULL;
    job.plan = PyCapsule_GetPointer(capsule, PLAN);
    if (job.plan == NULL || !hold_room(&held, (Py_ssize_t)(6 + 2 * job.plan->count)))
        return NULL;
    Output *outputs = PyMem_Calloc((size_t)job.plan->count, sizeof *outputs);
    job.outputs = outputs;
    if (outputs == NULL)
        PyErr_NoMemory();
    else if (hold_job(&held, &job, objects) && hold_outputs(&held, &job, outputs, lists))
        answer = run(&job);
    PyMem_Free(outputs);
    let_go(&held);
    return answer;
}

/* ---- writing ---- */

/* Reads (name, kind, values, width, offsets or None). */
static int read_column(Held *held, Column *column, Py_ssize_t i, int64_t rows, PyObject *tuple)
{
    static const char *const dtypes[] = {[BYTES] = "uint8", [FLOATS] = "float32", [INTS] = "int64"};
    PyObject *values, *offsets;
    const char *name;
    Py_ssize_t bytes;
    long long width;
    int kind;
    if (!PyArg_ParseTuple(tuple, "y#iOLO:column", &name, &bytes, &kind, &values, &width, &offsets))
        return 0;
    Py_buffer *view = hold(held, values, "columns", i, dtypes[kind], 0);
    if (view == NULL)
        return 0;
    *column = (Column){.name = (const uint8_t *)name, .name_bytes = bytes, .kind = (Kind)kind};
    column->values = view->buf;
    column->room = view->len / view->itemsize;
    column->width = width;
    if (width == RAGGED)
        return (column->offsets = hold_offsets(held, offsets, i, rows, &column->room)) != NULL;
    int64_t wanted;
    if (!__builtin_mul_overflow(rows, column->width, &wanted) && column->room == wanted)
        return 1;
    PyErr_Format(PyExc_ValueError, "columns[%zd]: expected %lld rows of %lld values", i,
                 (long long)rows, width);
    return 0;
}

/* Both calls: with `out` the records are written, without it only their sizes are found. */
static PyObject *write_or_size(PyObject *list, int64_t rows, PyObject *offsets, PyObject *out)
{
    PyObject *answer = NULL;
    Held held;
    Py_ssize_t count = PySequence_Size(list);
    if (count < 0)
        return NULL;
    if (!hold_room(&held, 2 + 2 * count))
        return NULL;
    Writing job = {.count = count, .rows = rows};
    Column *columns = PyMem_Calloc((size_t)count, sizeof *columns);
    int is_good = columns != NULL;
    if (!is_good)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; is_good && i < count; i++) {
        PyObject *column = PySequence_GetItem(list, i);
        is_good = column != NULL && read_column(&held, &columns[i], i, rows, column);
        Py_XDECREF(column); /* the list keeps it, and so the bytes of its name */
    }
    job.columns = columns;
    Py_buffer *view = NULL;
    if (is_good && (view = hold_row(&held, offsets, "offsets", -1, "int64", out == NULL, rows + 1)))
        job.offsets = view->buf;
    is_good = view != NULL;
    if (is_good && out != NULL) {
        view = hold_row(&held, out, "out", -1, "uint8", 1, -1);
        is_good = view != NULL;
        job.out = is_good ? view->buf : NULL;
        job.out_bytes = is_good ? view->len : 0;
    }
    if (is_good) {
        int64_t done;
        Py_BEGIN_ALLOW_THREADS
        done = out == NULL ? writer_sizes(&job) : writer_write(&job);
        Py_END_ALLOW_THREADS
        if (done == rows)
            answer = PyLong_FromLongLong(done);
        else
            PyErr_Format(PyExc_ValueError,
                         out == NULL ? "row %lld: a record may have at most 2^31 - 1 bytes"
                                     : "row %lld was changed while it was written",
                         (long long)done);
    }
    PyMem_Free(columns);
    let_go(&held);
    return answer;
}

/* Fill `offsets` with where each row's frame will begin, and at last where it ends. */
static PyObject *sizes(PyObject *module, PyObject *args)
{
    PyObject *list, *offsets;
    long long rows;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!LO:sizes", &PyTuple_Type, &list, &rows, &offsets))
        return NULL;
    return write_or_size(list, rows, offsets, NULL);
}

/* Write the frame of each row to where `sizes` has put it. */
static PyObject *write_(PyObject *module, PyObject *args)
{
    PyObject *list, *offsets, *out;
    long long rows;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!LOO:write", &PyTuple_Type, &list, &rows, &offsets, &out))
        return NULL;
    return write_or_size(list, rows, offsets, out);
}

static PyMethodDef methods[] = {
    {"crc32c", crc32c, METH_VARARGS, NULL},
    {"crc32c_ways", crc32c_ways, METH_VARARGS, NULL},
    {"crc32c_blocks", crc32c_blocks, METH_VARARGS, NULL},
    {"scan", scan, METH_VARARGS, NULL},
    {"plan", make_plan, METH_O, NULL},
    {"measure", measure, METH_VARARGS, NULL},
    {"decode", decode, METH_VARARGS, NULL},
    {"sizes", sizes, METH_VARARGS, NULL},
    {"write", write_, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module)
{
    (void)module;
    example_prepare();
    return 0;
}

MODULE(_example, "TFRecord files of tf.train.Example messages.", methods, {Py_mod_exec, prepare},)
