/* Images of 8 bits resized by linear interpolation, into memory that is there already.

   __init__.py checks the images and makes the tables, which are `bytes`, so that no one can change
   them meanwhile. */

#include "../shared/module.h"
#include "core.h"

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
        .rows = (const Pixel *)PyBytes_AsString(rows),
        .columns = (const Pixel *)PyBytes_AsString(columns),
        .values = PyBytes_Size(values) ? (const Values *)PyBytes_AsString(values) : NULL,
    };
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
        done = run(&source, &out, rows, columns, values);
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&source);
    return done ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"linear", linear, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_resize, "Images of 8 bits resized by linear interpolation.", methods)
