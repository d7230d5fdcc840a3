/* Images of 8 bits resized by linear interpolation, into memory that is there already.

   Everything that comes in is checked here, whatever the caller checked before: a wrong buffer or
   table is a ValueError, never a crash. Tables are `bytes`, which no one can change meanwhile. */

#include "../shared/module.h"
#include "core.h"

static int is_image(const Py_buffer *image, const char *name)
{
    const char *format = image->format;
    const int is_bytes = format == NULL || strcmp(format, "B") == 0;
    if (image->ndim != 3 || !is_bytes || image->len == 0 ||
        image->strides[2] != 1 || image->strides[1] != image->shape[2] ||
        image->strides[0] < image->shape[1] * image->shape[2]) {
        PyErr_Format(PyExc_ValueError,
                     "%s: expected uint8 of three dimensions, rows in line, each of them contiguous",
                     name);
        return 0;
    }
    if (image->shape[0] > INT32_MAX || image->shape[1] * image->shape[2] > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: expected fewer than 2^31 rows, and bytes in a row", name);
        return 0;
    }
    return 1;
}

static uintptr_t end_of(const Py_buffer *image)
{
    return (uintptr_t)image->buf + (uintptr_t)((image->shape[0] - 1) * image->strides[0]) +
           (uintptr_t)(image->shape[1] * image->shape[2]);
}

static int check_images(const Py_buffer *source, const Py_buffer *out)
{
    if (!is_image(source, "source") || !is_image(out, "out"))
        return 0;
    if (source->shape[2] != out->shape[2]) {
        PyErr_Format(PyExc_ValueError, "out: expected the source's %zd channels, found %zd",
                     source->shape[2], out->shape[2]);
        return 0;
    }
    if ((uintptr_t)source->buf < end_of(out) && (uintptr_t)out->buf < end_of(source)) {
        PyErr_SetString(PyExc_ValueError, "out shares memory with the source");
        return 0;
    }
    return 1;
}

/* The tables' sizes and what they point at. */
static int take_tables(Resize *r, PyObject *rows, PyObject *columns, PyObject *values)
{
    const int64_t blocks = line_room(r->width, r->channels) / VALUES;
    const Py_ssize_t value_bytes = PyBytes_Size(values);
    if (PyBytes_Size(rows) != r->height * (Py_ssize_t)sizeof(Pixel) ||
        PyBytes_Size(columns) != r->width * (Py_ssize_t)sizeof(Pixel) ||
        (value_bytes != 0 && value_bytes != blocks * (Py_ssize_t)sizeof(Values))) {
        PyErr_SetString(PyExc_ValueError, "the tables are for another size");
        return 0;
    }
    r->rows = (const Pixel *)PyBytes_AsString(rows);
    r->columns = (const Pixel *)PyBytes_AsString(columns);
    r->values = value_bytes ? (const Values *)PyBytes_AsString(values) : NULL;
    if (!tables_fit(r)) {
        PyErr_SetString(PyExc_ValueError, "the tables point outside the source");
        return 0;
    }
    return 1;
}

static int run(const Py_buffer *source, const Py_buffer *out, PyObject *rows, PyObject *columns,
               PyObject *values)
{
    Resize r = {
        .source = source->buf,
        .out = out->buf,
        .source_line = source->strides[0],
        .out_line = out->strides[0],
        .source_height = source->shape[0],
        .source_width = source->shape[1],
        .height = out->shape[0],
        .width = out->shape[1],
        .channels = out->shape[2],
    };
    if (!take_tables(&r, rows, columns, values))
        return 0;
    r.lines = PyMem_Malloc((size_t)line_room(r.width, r.channels) * 2 * sizeof *r.lines);
    if (r.lines == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    Py_BEGIN_ALLOW_THREADS
    resize(&r);
    Py_END_ALLOW_THREADS
    PyMem_Free(r.lines);
    return 1;
}

/* Resize the uint8 image `source` of shape (height, width, channels) into `out`. `rows`,
   `columns` and `values`, which may be empty, are bytes: arrays of Pixel, Pixel and Values. */
static PyObject *linear(PyObject *module, PyObject *args)
{
    PyObject *source_object, *out_object, *rows, *columns, *values;
    Py_buffer source, out;
    int done = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOSSS:linear", &source_object, &out_object, &rows, &columns,
                          &values))
        return NULL;
    if (PyObject_GetBuffer(source_object, &source, PyBUF_STRIDES | PyBUF_FORMAT) < 0)
        return NULL;
    if (PyObject_GetBuffer(out_object, &out, PyBUF_STRIDES | PyBUF_FORMAT | PyBUF_WRITABLE) == 0) {
        done = check_images(&source, &out) && run(&source, &out, rows, columns, values);
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&source);
    if (done)
        Py_RETURN_NONE;
    if (PyErr_ExceptionMatches(PyExc_BufferError)) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ValueError, "expected a buffer that can be written for out");
    }
    return NULL;
}

static PyMethodDef methods[] = {
    {"linear", linear, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_resize, "Images of 8 bits resized by linear interpolation.", methods)
