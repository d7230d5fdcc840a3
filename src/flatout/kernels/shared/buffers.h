/* Checks of the buffers that come in: a wrong one is a ValueError, never a crash. */

#ifndef FLATOUT_BUFFERS_H
#define FLATOUT_BUFFERS_H

#include "module.h"

/* Take hold of C-contiguous memory; 0 with an exception set. */
static inline int get_buffer(PyObject *object, Py_buffer *view, const char *name, int is_written)
{
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags) == 0)
        return 1;
    /* numpy says ValueError and the standard library BufferError for the same thing. */
    if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: expected C-contiguous memory%s", name,
                     is_written ? " that can be written" : "");
    }
    return 0;
}

static inline void release(Py_buffer *views, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        PyBuffer_Release(&views[i]);
}

/* What native, aligned numbers a buffer holds, as numpy calls them; "" for anything else. No format
   at all means bytes. */
static inline const char *dtype(const Py_buffer *view)
{
    const char *format = view->format == NULL ? "B" : view->format;
    if (*format == '@' || *format == '=')
        format++;
    char kind = format[0] != 0 && format[1] == 0 ? format[0] : 0;
    int is_integer = kind == 'i' || kind == 'l' || kind == 'q';
    if ((uintptr_t)view->buf % (size_t)(view->itemsize > 0 ? view->itemsize : 1) != 0)
        return "";
    switch (view->itemsize) {
    case 1:
        return kind == 'B' ? "uint8" : "";
    case 4:
        return kind == 'f' ? "float32" : is_integer ? "int32" : "";
    case 8:
        return kind == 'd' ? "float64" : is_integer ? "int64" : "";
    default:
        return "";
    }
}

static inline int holds(const Py_buffer *view, const char *wanted)
{
    return strcmp(dtype(view), wanted) == 0;
}

/* One dimension of `count` numbers, or of any number where it is -1, of a dtype that `dtypes` names;
   else 0 with an exception set. */
static inline int is_row(const Py_buffer *view, const char *name, const char *dtypes, int64_t count)
{
    const char *found = dtype(view);
    if (view->ndim != 1 || *found == 0 || strstr(dtypes, found) == NULL) {
        PyErr_Format(PyExc_ValueError, "%s: expected one dimension of native, aligned %s", name,
                     dtypes);
        return 0;
    }
    if (count >= 0 && view->shape[0] != count) {
        PyErr_Format(PyExc_ValueError, "%s: expected %lld numbers, found %zd", name,
                     (long long)count, view->shape[0]);
        return 0;
    }
    return 1;
}

static inline int has_objects(const Py_buffer *view)
{
    return view->format != NULL && strchr(view->format, 'O') != NULL;
}

#endif
