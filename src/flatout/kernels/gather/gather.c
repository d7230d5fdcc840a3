/* Gathering rows by index, and turning uint8 rows into float32 on the way.

   Everything that comes in is checked here, whatever the caller checked before: a wrong buffer is a
   ValueError and a wrong index an IndexError, never a crash. Built on the stable ABI and the buffer
   protocol, so that one binary serves every Python from 3.11 and every numpy. */

#include <math.h>

#include "../shared/buffers.h"

/* The rows that one call moves. `rows` of `row_bytes` bytes each, `count` of them wanted. */
typedef struct {
    Py_buffer source, index, out;
    Py_ssize_t rows, row_bytes, count;
} Gather;

static void let_go(Gather *g)
{
    PyBuffer_Release(&g->source);
    PyBuffer_Release(&g->index);
    PyBuffer_Release(&g->out);
}

static int check_source(Gather *g)
{
    if (g->source.ndim < 1) {
        PyErr_SetString(PyExc_ValueError, "source has no rows: it has 0 dimensions");
        return 0;
    }
    if (has_objects(&g->source)) {
        PyErr_SetString(PyExc_ValueError, "source holds Python objects, which are not plain bytes");
        return 0;
    }
    g->rows = g->source.shape[0];
    /* Without rows every index is out of range, so the size of a row does not matter. */
    g->row_bytes = g->rows > 0 ? g->source.len / g->rows : 0;
    return 1;
}

static int check_index(Gather *g)
{
    if (!is_row(&g->index, "index", "int64", -1))
        return 0;
    g->count = g->index.len / 8;

    const int64_t *index = g->index.buf;
    for (Py_ssize_t i = 0; i < g->count; i++) {
        if ((uint64_t)index[i] >= (uint64_t)g->rows) {
            PyErr_Format(PyExc_IndexError, "index[%zd] is %lld, but the source has %zd rows", i,
                         (long long)index[i], g->rows);
            return 0;
        }
    }
    return 1;
}

static int check_out(Gather *g, Py_ssize_t bytes_out_per_byte)
{
    Py_ssize_t wanted;
    if (has_objects(&g->out)) {
        PyErr_SetString(PyExc_ValueError, "out holds Python objects, which are not plain bytes");
        return 0;
    }
    if (__builtin_mul_overflow(g->row_bytes * bytes_out_per_byte, g->count, &wanted) ||
        g->out.len != wanted) {
        PyErr_Format(PyExc_ValueError, "out: expected %zd rows of %zd bytes, found %zd bytes in all",
                     g->count, g->row_bytes * bytes_out_per_byte, g->out.len);
        return 0;
    }
    return 1;
}

/* Take hold of the three buffers and check them. 0 with an exception set: nothing is held. */
static int acquire(Gather *g, PyObject *source, PyObject *index, PyObject *out,
                   Py_ssize_t bytes_out_per_byte)
{
    memset(g, 0, sizeof *g);
    if (get_buffer(source, &g->source, "source", 0) && get_buffer(index, &g->index, "index", 0) &&
        get_buffer(out, &g->out, "out", 1) && check_source(g) && check_index(g) &&
        check_out(g, bytes_out_per_byte))
        return 1;
    let_go(g);
    return 0;
}

static void copy_rows(const Gather *g)
{
    const char *source = g->source.buf;
    const int64_t *index = g->index.buf;
    const size_t bytes = (size_t)g->row_bytes;
    char *out = g->out.buf;
    if (bytes == 0)
        return;
    for (Py_ssize_t i = 0; i < g->count; i++, out += bytes)
        memcpy(out, source + (size_t)index[i] * bytes, bytes);
}

/* Multiplied, rounded, then added, as numpy does in two passes; setup.py forbids contraction. */
static void scale_rows(const Gather *g, float scale, float shift)
{
    const uint8_t *source = g->source.buf;
    const int64_t *index = g->index.buf;
    const size_t width = (size_t)g->row_bytes;
    float *restrict out = g->out.buf;
    for (Py_ssize_t i = 0; i < g->count; i++, out += width) {
        const uint8_t *restrict from = source + (size_t)index[i] * width;
        for (size_t j = 0; j < width; j++)
            out[j] = (float)from[j] * scale + shift;
    }
}

/* Copy the rows `index` (int64) of `source` into `out`, byte for byte. */
static PyObject *gather(PyObject *module, PyObject *args)
{
    PyObject *source, *index, *out;
    Gather g;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO:gather", &source, &index, &out))
        return NULL;
    if (!acquire(&g, source, index, out, 1))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    copy_rows(&g);
    Py_END_ALLOW_THREADS
    let_go(&g);
    Py_RETURN_NONE;
}

/* Write `row * scale + shift` of the rows `index` of a uint8 `source` into a float32 `out`. */
static PyObject *gather_scaled(PyObject *module, PyObject *args)
{
    PyObject *source, *index, *out;
    double scale, shift;
    Gather g;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOdd:gather_scaled", &source, &index, &out, &scale, &shift))
        return NULL;
    if (!isfinite((float)scale) || !isfinite((float)shift)) {
        PyErr_SetString(PyExc_ValueError, "scale and shift must be finite float32 numbers");
        return NULL;
    }
    if (!acquire(&g, source, index, out, sizeof(float)))
        return NULL;
    if (!holds(&g.source, "uint8") || !holds(&g.out, "float32")) {
        let_go(&g);
        PyErr_SetString(PyExc_ValueError, "scaling wants a uint8 source and an aligned float32 out");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    scale_rows(&g, (float)scale, (float)shift);
    Py_END_ALLOW_THREADS
    let_go(&g);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS, NULL},
    {"gather_scaled", gather_scaled, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_gather, "Gathering rows by index.", methods)
